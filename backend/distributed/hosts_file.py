"""The file that lists the machines of a run, in the format of `mlx.launch`, with two keys of ours that it ignores.

    {"backend": "ring", "envs": ["NAME=value"],
     "hosts": [{"ssh": "127.0.0.1", "ips": ["192.168.0.1"], "rdma": [null, "rdma_en2"]},
               {"ssh": "mac-b",     "ips": ["192.168.0.2"], "rdma": ["rdma_en2", null],
                "program": "~/.local/bin/grpo-studio-backend", "folder": "~/grpo-studio"}]}

or the list of hosts alone. The first entry is the machine that the run is started on; a machine that is listed twice gets two processes.
`program` and `folder` say where GRPO Studio is on a machine where it is not in the same place as here. Nothing here contacts a machine.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.rewards.catalogue.catalog import nearest
from backend.utils.command import BUNDLED_PROGRAM, backend_command, is_bundled
from backend.utils.documents import parse_json
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import read_text, user_path
from backend.utils.places import project_root
from backend.utils.text import quote
from backend.utils.whole_file import save_as

HOSTS_LIMIT = 2**18
"""Bytes of a hosts file: 64 hosts with an RDMA device for every other one take a third of it."""
MOST_HOSTS = 64
MOST_ADDRESSES = 16
"""Addresses of one host, and RDMA devices between two."""
MOST_VARIABLES = 100
LONGEST_WORD = 1_000
"""Characters of a variable or a path."""

BACKENDS = ("ring", "mpi", "nccl", "jaccl", "jaccl-ring")
"""What `mlx.launch` knows."""
HERE = ("127.0.0.1", "localhost")
"""Names of this machine."""

_FILE_KEYS = ("backend", "envs", "hosts")
_HOST_KEYS = ("ssh", "ips", "rdma", "program", "folder")
# A name for ssh never begins with a hyphen: ssh would take it for an option, and some of its options run programs.
_SSH_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]{0,252}")
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}=[^\0\n\r]*")
# They are set here too, and a hosts file may be somebody else's: variables such as PYTHONPATH, LD_PRELOAD or MLX_MPI_LIBNAME load code.
_SETTABLE = re.compile(
    r"(MLX|NCCL|OMP)_(?!.*(LIB|PLUGIN|PATH|FILE|CONF))\w+|OMPI_MCA_(btl|oob)_tcp_\w+|OMPI_MCA_coll_\w+|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE"
)


@dataclass(frozen=True, slots=True)
class Host:
    """One process of a run, and the machine that it runs on."""

    ssh: str
    """The name or address that ssh takes, with or without a user: mac-b, anna@mac-b.local. 127.0.0.1 is this machine."""
    ips: tuple[str, ...] = ()
    """IPv4 addresses at which the other machines reach it; over several cables, one each."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """For each host of the file, in its order, the RDMA device that leads there; None for itself."""
    program: str = ""
    """What runs GRPO Studio there: a Python that has it, or grpo-studio-backend. Empty: as here, at the same path."""
    folder: str = ""
    """The folder of a checkout there. Empty: as here, at the same path."""

    def to_json(self) -> dict[str, Any]:
        """As the file has it, empty keys of ours left out."""
        rdma = [list(device) if isinstance(device, tuple) else device for device in self.rdma]
        ours = {key: value for key in ("program", "folder") if (value := getattr(self, key))}
        return {"ssh": self.ssh, "ips": list(self.ips), "rdma": rdma} | ours


@dataclass(frozen=True, slots=True)
class HostsFile:
    """The machines of a run; the number of a host is its rank."""

    hosts: tuple[Host, ...]
    backend: str = ""
    """One of BACKENDS; "" leaves it to the run."""
    envs: tuple[str, ...] = ()
    """NAME=value for the environment of every process."""

    def is_here(self, rank: int) -> bool:
        """Whether a rank runs on this machine, and so needs no ssh. The first always does."""
        return rank == 0 or self.hosts[rank].ssh in (*HERE, self.hosts[0].ssh)

    def label(self, rank: int) -> str:
        """A machine's name in a sentence."""
        ssh = self.hosts[rank].ssh
        name = "this machine" if self.is_here(rank) else quote(ssh, 40)
        shared = sum(host.ssh == ssh for host in self.hosts) > 1
        return f"{name} (rank {rank})" if shared else name

    def to_json(self) -> dict[str, Any]:
        return {"backend": self.backend, "envs": list(self.envs), "hosts": [host.to_json() for host in self.hosts]}


# ── reading and writing ──────────────────────────────────────────────────────────────────────────────────────────────


def read_hosts(path: str | Path, setting: str = "hosts") -> HostsFile:
    """The machines of a file. Raises UserError with every fault, each naming the file and the entry."""
    file = user_path(str(path), setting)
    return parse_hosts(parse_json(read_text(file, setting, HOSTS_LIMIT), quote(file), setting), file.name, setting)


def parse_hosts(raw: object, what: str, setting: str = "hosts") -> HostsFile:
    """The machines of a JSON value; `what` names it in sentences. Raises UserError with every fault."""
    return _Reader(quote(what, 40), setting).read(raw)


def write_hosts(path: Path, hosts: HostsFile) -> None:
    """Write the file anew, for `mlx.launch` too. Raises DiskError; the old content stays then."""
    save_as(path, json.dumps(hosts.to_json(), indent=2, ensure_ascii=False) + "\n")


def fault_of_first(hosts: HostsFile, what: str, setting: str = "hosts") -> ConfigProblem | None:
    """The fault of a file whose first entry is another machine than this one, as far as its addresses tell."""
    first = hosts.hosts[0]
    if not first.ips or first.ssh in HERE or any(_is_own_address(address) for address in first.ips):
        return None
    return ConfigProblem(
        setting,
        f"{quote(what, 40)}: the first host must be this machine, where the run folder is, and {quote(first.ips[0])} "
        "is not an address of it.",
    )


def hosts_faults(path: str) -> list[ConfigProblem]:
    """Everything that keeps a run from using the hosts file of its settings, as far as this machine alone can tell; none for no file."""
    if not path.strip():
        return []
    try:
        hosts = read_hosts(path)
    except UserError as mistake:
        return mistake.faults
    fault = fault_of_first(hosts, Path(path).name)
    return [fault] if fault is not None else []


def _is_own_address(address: str) -> bool:
    """Whether an interface of this machine has an IPv4 address: only then a socket can be bound to it."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


class _Reader:
    """Reads one file; collects its faults."""

    def __init__(self, what: str, setting: str) -> None:
        self._what, self._setting, self._faults = what, setting, list[ConfigProblem]()

    def read(self, raw: object) -> HostsFile:
        values = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {"hosts": raw}
        entries = values.get("hosts")
        if not isinstance(entries, list) or not entries:
            self._fault('it must list at least one host, as in [{"ssh": "127.0.0.1"}, {"ssh": "mac-b"}]')
        elif len(cast("list[Any]", entries)) > MOST_HOSTS:
            self._fault(f"it lists {len(cast('list[Any]', entries)):,} hosts; at most {MOST_HOSTS} can train one run")
        if self._faults:
            raise UserError(self._faults)
        self._unknown_keys(values, _FILE_KEYS, "")
        items = cast("list[Any]", entries)
        hosts = tuple(self._host(item, number, len(items)) for number, item in enumerate(items, 1))
        self._no_program_here(hosts)
        file = HostsFile(hosts, self._backend(values.get("backend")), self._variables(values.get("envs")))
        if self._faults:
            raise UserError(self._faults)
        return file

    def _host(self, raw: object, number: int, count: int) -> Host:
        where = f"host {number}"
        if not isinstance(raw, Mapping):
            self._fault(f'{where} must be a mapping such as {{"ssh": "mac-b"}}, not {quote(raw, 40)}')
            return Host("")
        entry = cast("Mapping[str, Any]", raw)
        self._unknown_keys(entry, _HOST_KEYS, f"{where}: ")
        ssh = entry.get("ssh")
        if not isinstance(ssh, str) or not _SSH_NAME.fullmatch(ssh):
            problem = "has no ssh" if ssh in (None, "") else f"has {quote(ssh, 40)} as ssh"
            self._fault(f"{where} {problem}, which must be a machine's name or address as ssh takes it")
            ssh = ""
        elif count > 1 or entry.get("ips"):
            where = f"host {number} ({quote(ssh, 40)})"
        return Host(
            ssh, self._addresses(entry.get("ips"), ssh, where), self._devices(entry.get("rdma"), number, count, where),
            self._text(entry.get("program"), f"program of {where}"), self._text(entry.get("folder"), f"folder of {where}"),
        )  # fmt: skip

    def _no_program_here(self, hosts: tuple[Host, ...]) -> None:
        """What runs on this machine is the program that reads the file, and never one that the file names."""
        for rank, host in enumerate(hosts):
            if (host.program or host.folder) and HostsFile(hosts).is_here(rank):
                self._fault(f"host {rank + 1} is this machine, so it can have no program and no folder of its own")

    def _addresses(self, raw: object, ssh: str, where: str) -> tuple[str, ...]:
        """Where the file has none, the name for ssh if that is an address, as `mlx.launch --hosts` takes it."""
        if raw in (None, []):
            return (ssh,) if _is_ipv4(ssh) else ()
        addresses = self._words(raw, f"the ips of {where}", MOST_ADDRESSES)
        for address in addresses:
            if not _is_ipv4(address):
                self._fault(f"the ips of {where} must be IPv4 addresses such as 192.168.0.2, not {quote(address, 40)}")
        return addresses

    def _devices(self, raw: object, number: int, count: int, where: str) -> tuple[str | tuple[str, ...] | None, ...]:
        if raw in (None, []):
            return ()
        if not isinstance(raw, list) or len(cast("list[Any]", raw)) != count:
            self._fault(f"the rdma of {where} must have one entry for each of the {count} hosts")
            return ()
        devices = cast("list[Any]", raw)
        if devices[number - 1] is not None:
            self._fault(f"the rdma of {where} must be null at its own place, the {number}. of {count}")
        return tuple(None if device is None else self._device(device, where) for device in devices)

    def _device(self, raw: object, where: str) -> str | tuple[str, ...]:
        names = self._words([raw] if isinstance(raw, str) else raw, f"an rdma entry of {where}", MOST_ADDRESSES)
        for name in names:
            if not _DEVICE.fullmatch(name):
                self._fault(f"the rdma of {where} must name devices such as rdma_en2, not {quote(name, 40)}")
        return names[0] if isinstance(raw, str) and names else names

    def _backend(self, raw: object) -> str:
        if raw in (None, ""):
            return ""
        if raw not in BACKENDS:
            self._fault(f"the backend must be one of {', '.join(BACKENDS)}, not {quote(raw, 40)}")
            return ""
        return str(raw)

    def _variables(self, raw: object) -> tuple[str, ...]:
        variables = self._words(raw, "envs", MOST_VARIABLES) if raw else ()
        for variable in variables:
            name = variable.partition("=")[0]  # without its value, which may be a secret
            if not _VARIABLE.fullmatch(variable):
                self._fault(f"envs must have entries such as NAME=value, on one line, not {quote(name, 40)}")
            elif not _SETTABLE.fullmatch(name):
                self._fault(
                    f"envs cannot set {quote(name, 40)}, only how MLX, NCCL and Open MPI communicate, and where models are"
                )
        return variables

    def _words(self, raw: object, of: str, most: int) -> tuple[str, ...]:
        """A list of texts."""
        words = cast("list[Any]", raw) if isinstance(raw, list) else []
        texts = tuple(word for word in words if isinstance(word, str) and 0 < len(word) <= LONGEST_WORD)
        if not texts or len(texts) < len(words):
            self._fault(f"{of} must be a list of texts, not {quote(cast('object', raw), 40)}")
            return ()
        if len(texts) > most:
            self._fault(f"{of} has {len(texts):,} entries; at most {most} are read")
            return ()
        return texts

    def _text(self, raw: object, of: str) -> str:
        if raw in (None, ""):
            return ""
        if not isinstance(raw, str) or len(raw) > LONGEST_WORD or not raw.isprintable():
            self._fault(f"the {of} must be a path, not {quote(raw, 40)}")
            return ""
        return raw

    def _unknown_keys(self, values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
        for key in values:
            if key not in known:
                near = nearest(str(key), list(known))
                hint = f"; did you mean {near}?" if near else f"; the keys are {', '.join(known)}"
                self._fault(f"{where}there is no key {quote(key, 40)}{hint}")

    def _fault(self, sentence: str) -> None:
        self._faults.append(
            ConfigProblem(self._setting, f"{self._what}: {sentence}{'' if sentence.endswith('?') else '.'}")
        )


def _is_ipv4(text: str) -> bool:
    """MLX reads host and port of an address apart at its first colon, so it reads no IPv6."""
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


# ── command ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# The commands of a run on several machines: a rank's program on its machine, and the line to start all by hand.

CONNECT_S = 8
"""Seconds that ssh may take to connect."""
SSH_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
    "-o", "LogLevel=ERROR",
)  # fmt: skip

MPI_OPTIONS = (
    "--enable-recovery", "--mca", "mpi_yield_when_idle", "1", "--mca", "plm_rsh_args", "-o BatchMode=yes",
    "--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4",
)  # fmt: skip
"""Of mpirun: rank 0 outlives another rank, to save; a rank that waits leaves its core to others; and large sums go round a ring, which
over a wire takes half the time of what Open MPI chooses itself (3 ranks, 4 MB, 100 Mb/s: 0.50 s and 1.14 s)."""


def rank_program(host: Host, verb: str, *arguments: str) -> list[str]:
    """Program and arguments of `python -m backend VERB …` on a machine; its `program` in place of ours, where it has one."""
    if Path(host.program).name == BUNDLED_PROGRAM:
        return [host.program, verb, *arguments]
    if not host.program and (is_bundled() or not host.folder):
        return backend_command(verb, *arguments)
    module = "backend" if host.folder or _is_checkout() else "grpo_studio.backend"
    return [host.program or sys.executable, "-P", "-m", module, verb, *arguments]


def rank_environment(host: Host) -> dict[str, str]:
    """What Python needs on that machine to find our packages: a checkout's folder; nothing where they are installed."""
    is_program = is_bundled() if not host.program else Path(host.program).name == BUNDLED_PROGRAM
    if is_program or not (host.folder or _is_checkout()):
        return {}
    return {"PYTHONPATH": host.folder or str(project_root())}


def ssh_command(host: Host, program: list[str], variables: Mapping[str, str]) -> list[str]:
    """What runs a program on another machine. It asks nothing (a password, an unknown host's key), and ends where the connection is lost."""
    words = [*(f"{name}={value}" for name, value in variables.items()), *program]
    return ["ssh", *SSH_OPTIONS, host.ssh, f"exec env {shell_words(words)}"]


def launch_command(hosts: HostsFile, file: Path, backend: str, run: Path) -> list[str]:
    """What starts all ranks of a prepared run by hand: `mlx.launch`; for MPI mpirun itself, since mlx.launch gives it an option that
    Open MPI 4 refuses. The same program runs on every machine, at the same path: it cannot carry `program` and `folder` of a host."""
    alike = Host("")
    variables = [f"{name}={value}" for name, value in rank_environment(alike).items()]
    program = rank_program(alike, "rank", "--run", str(run))
    if backend == "mpi":
        slots = Counter(host.ssh for host in hosts.hosts)
        of_mpi = [part for variable in [*variables, *hosts.envs] for part in ("-x", variable)]
        machines = ",".join(f"{name}:{count}" for name, count in slots.items())
        return ["mpirun", "-np", str(len(hosts.hosts)), "--host", machines, *MPI_OPTIONS, *of_mpi, *program]
    of_mlx = [part for variable in variables for part in ("--env", variable)]
    return [_mlx_launch(), "--hostfile", str(file), "--backend", backend, *of_mlx, "--", *program]


def shell_words(words: list[str]) -> str:
    """Words for a POSIX shell; a path that begins with ~/ begins with the home folder of that shell's user."""
    return " ".join(
        f'"$HOME"/{shlex.quote(word[2:])}' if word.startswith("~/") else shlex.quote(word) for word in words
    )


def _mlx_launch() -> str:
    """mlx's script, beside our Python where that has it."""
    script = Path(sys.executable).with_name("mlx.launch")
    return str(script) if script.exists() else script.name


def _is_checkout() -> bool:
    return not (project_root() / "__init__.py").exists()


# ── backend environment ──────────────────────────────────────────────────────────────────────────────────────────────

# The environment in which MLX's backends find the other ranks: what `mlx.launch` sets, for the process of one rank.

FIRST_PORT, PORTS = 20_000, 10_000
"""The ports that a run chooses from: below those that systems hand out by themselves (from 32768 on Linux, 49152 on macOS)."""


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    variables: dict[str, str]
    files: dict[str, str]
    """Name of a variable → the content of the file that it names. The file is made on the rank's machine."""


def rank_environment_of(hosts: HostsFile, backend: str, rank: int, port: int) -> RankEnvironment:
    """`port`: the first of the ports that the ranks listen on; the ring takes one for each address, the others one on the first host."""
    variables = {name: value for name, _, value in (entry.partition("=") for entry in hosts.envs)}
    if backend != "mpi":
        variables["MLX_RANK"] = str(rank)
    first = hosts.hosts[0].ips[0] if hosts.hosts[0].ips else "127.0.0.1"
    if backend == "ring":
        return RankEnvironment(variables, {"MLX_HOSTFILE": json.dumps(_ring_addresses(hosts, port))})
    if backend in ("jaccl", "jaccl-ring"):
        devices = json.dumps([host.to_json()["rdma"] for host in hosts.hosts])
        ring = {"MLX_JACCL_RING": "1"} if backend == "jaccl-ring" else {}
        of_jaccl = {"MLX_JACCL_COORDINATOR": f"{first}:{port}"} | ring
        return RankEnvironment(variables | of_jaccl, {"MLX_IBV_DEVICES": devices})
    if backend == "nccl":
        before = sum(host.ssh == hosts.hosts[rank].ssh for host in hosts.hosts[:rank])
        of_nccl = {
            "NCCL_HOST_IP": first,
            "NCCL_PORT": str(port),
            "MLX_WORLD_SIZE": str(len(hosts.hosts)),
            "CUDA_VISIBLE_DEVICES": str(before),
        }
        return RankEnvironment(variables | of_nccl, {})
    return RankEnvironment(variables, {})


def _ring_addresses(hosts: HostsFile, port: int) -> list[list[str]]:
    """Of each rank, the addresses that it listens on; the ports are different also where ranks share a machine."""
    rows: list[list[str]] = []
    for host in hosts.hosts:
        rows.append([f"{address}:{port + index}" for index, address in enumerate(host.ips)])
        port += len(host.ips)
    return rows
