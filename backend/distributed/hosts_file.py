"""The file that lists the machines of a run, in the format of `mlx.launch`, with two keys of ours that it ignores.

    {"backend": "ring", "envs": ["NAME=value"],
     "hosts": [{"ssh": "127.0.0.1", "ips": ["192.168.0.1"], "rdma": [null, "rdma_en2"]},
               {"ssh": "mac-b",     "ips": ["192.168.0.2"], "rdma": ["rdma_en2", null],
                "program": "~/.local/bin/grpo-studio-backend", "folder": "~/grpo-studio"}]}

or the list of hosts alone. The first entry is the machine that starts the run; a machine listed twice gets two
processes. `program` and `folder` say where GRPO Studio is on a machine that has it in another place. Nothing here
contacts a machine.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.rewards.allowed_code import TrustRecord
from backend.rewards.catalogue import nearest
from backend.utils.documents import parse_json
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import read_bytes, read_text, resolved, user_path
from backend.utils.text import quote
from backend.utils.whole_file import save_as

HOSTS_LIMIT = 2**18
"""Bytes of a hosts file: 64 hosts with an RDMA device for every other one take a third of it."""
MOST_HOSTS = 64
MOST_ADDRESSES = 16
"""Addresses of one host, and RDMA devices between two."""
MOST_VARIABLES = 100
LONGEST_TEXT = 1_000
"""Characters of a variable or a path."""

BACKENDS = ("ring", "mpi", "nccl", "jaccl", "jaccl-ring")
"""The backends of `mlx.launch`."""
AUTO = "auto"
WANTED = (AUTO, "ring", "mpi", "jaccl", "nccl")
"""Values of the setting `distributed_backend`; only a hosts file names jaccl-ring."""
LARGEST_SOUND_RING = 2
"""With three ranks or more, 3 to 4 % of the ring's sums on the CPU never end (mlx#4475)."""
HERE = ("127.0.0.1", "localhost")
"""Names of this machine."""

# A name for ssh never begins with a hyphen: ssh would take it for an option, and some of its options run programs.
_SSH_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]{0,252}")
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}=[^\0\n\r]*")
# A hosts file may be somebody else's, and variables such as PYTHONPATH, LD_PRELOAD or MLX_MPI_LIBNAME load code.
_SETTABLE = re.compile(
    r"(MLX|NCCL|OMP)_(?!.*(LIB|PLUGIN|PATH|FILE|CONF))\w+|OMPI_MCA_(btl|oob)_tcp_\w+|OMPI_MCA_coll_\w+"
    r"|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE"
)


@dataclass(frozen=True, slots=True)
class Host:
    """One process of a run, and the machine that it runs on."""

    ssh: str
    """Name or address for ssh, with or without a user: mac-b, anna@mac-b.local. 127.0.0.1 is this machine."""
    ips: tuple[str, ...] = ()
    """IPv4 addresses at which the other machines reach it; over several cables, one each."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """For each host of the file, in its order, the RDMA device that leads there; None for itself."""
    program: str = ""
    """Program that runs GRPO Studio there: a Python that has it, or grpo-studio-backend. Empty: as here."""
    folder: str = ""
    """Folder of a checkout there. Empty: as here."""

    def to_json(self) -> dict[str, Any]:
        """The entry of the file, empty keys of ours left out."""
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
        """True for a rank on this machine, which needs no ssh. The first always is."""
        return rank == 0 or self.hosts[rank].ssh in (*HERE, self.hosts[0].ssh)

    def label(self, rank: int) -> str:
        """A machine's name in a message."""
        ssh = self.hosts[rank].ssh
        name = "this machine" if self.is_here(rank) else quote(ssh, 40)
        shared = sum(host.ssh == ssh for host in self.hosts) > 1
        return f"{name} (rank {rank})" if shared else name

    def to_json(self) -> dict[str, Any]:
        return {"backend": self.backend, "envs": list(self.envs), "hosts": [host.to_json() for host in self.hosts]}


def read_hosts(path: str | Path, setting: str = "hosts") -> HostsFile:
    """The machines of a file. Raises UserError with every problem, each naming the file and the entry."""
    file = user_path(str(path), setting)
    return parse_hosts(parse_json(read_text(file, setting, HOSTS_LIMIT), quote(file), setting), file.name, setting)


def parse_hosts(raw: object, what: str, setting: str = "hosts") -> HostsFile:
    """The machines of a JSON value; `what` names it in messages. Raises UserError with every problem."""
    return _Reader(quote(what, 40), setting).read(raw)


def write_hosts(path: Path, hosts: HostsFile) -> None:
    """Write the file, for `mlx.launch` too. Raises DiskError and keeps the old content then."""
    save_as(path, json.dumps(hosts.to_json(), indent=2, ensure_ascii=False) + "\n")


def first_host_problem(hosts: HostsFile, what: str, setting: str = "hosts") -> ConfigProblem | None:
    """The problem of a file whose first entry is another machine than this one, as far as its addresses show."""
    first = hosts.hosts[0]
    if not first.ips or first.ssh in HERE or any(_is_own_address(address) for address in first.ips):
        return None
    return ConfigProblem(
        setting,
        f"{quote(what, 40)}: the first host must be this machine, where the run folder is, and {quote(first.ips[0])} "
        "is not an address of it.",
    )


def hosts_problems(path: str) -> list[ConfigProblem]:
    """Everything that this machine alone can find wrong with the hosts file of a run's settings; none for no file."""
    if not path.strip():
        return []
    try:
        problem = first_host_problem(read_hosts(path), Path(path).name)
    except UserError as error:
        return error.faults
    return [problem] if problem is not None else []


def _is_own_address(address: str) -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))  # only an address of an interface of this machine can be bound
        return True
    return False


class _Reader:
    """Reads one file and collects its problems."""

    def __init__(self, what: str, setting: str) -> None:
        self._what, self._setting, self._problems = what, setting, list[ConfigProblem]()

    def read(self, raw: Any) -> HostsFile:
        values: dict[str, Any] = raw if isinstance(raw, dict) else {"hosts": raw}
        entries: Any = values.get("hosts")
        if not isinstance(entries, list) or not entries:
            self._problem('it must list at least one host, as in [{"ssh": "127.0.0.1"}, {"ssh": "mac-b"}]')
        elif len(entries) > MOST_HOSTS:  # pyright: ignore[reportUnknownArgumentType]
            self._problem(f"it lists {len(entries):,} hosts; at most {MOST_HOSTS} can train one run")  # pyright: ignore[reportUnknownArgumentType]
        self._raise_problems()
        self._check_keys(values, ("backend", "envs", "hosts"), "")
        hosts = HostsFile(tuple(self._host(entry, number, len(entries)) for number, entry in enumerate(entries, 1)))
        for rank, host in enumerate(hosts.hosts):  # this machine runs the program that reads the file, and no other
            if (host.program or host.folder) and hosts.is_here(rank):
                self._problem(f"host {rank + 1} is this machine, so it can have no program and no folder of its own")
        backend = values.get("backend") or ""
        if backend and backend not in BACKENDS:
            self._problem(f"the backend must be one of {', '.join(BACKENDS)}, not {quote(backend, 40)}")
        variables = self._variables(values.get("envs"))
        self._raise_problems()
        return HostsFile(hosts.hosts, backend, variables)

    def _host(self, entry: Any, number: int, count: int) -> Host:
        where = f"host {number}"
        if not isinstance(entry, dict):
            self._problem(f'{where} must be a mapping such as {{"ssh": "mac-b"}}, not {quote(entry, 40)}')
            return Host("")
        self._check_keys(entry, ("ssh", "ips", "rdma", "program", "folder"), f"{where}: ")
        ssh: Any = entry.get("ssh")
        if not isinstance(ssh, str) or not _SSH_NAME.fullmatch(ssh):
            found = "has no ssh" if ssh in (None, "") else f"has {quote(ssh, 40)} as ssh"
            self._problem(f"{where} {found}, which must be a machine's name or address as ssh takes it")
            ssh = ""
        elif count > 1 or entry.get("ips"):
            where = f"host {number} ({quote(ssh, 40)})"
        return Host(
            ssh,
            self._addresses(entry.get("ips"), ssh, where),
            self._devices(entry.get("rdma"), number, count, where),
            self._path(entry.get("program"), f"program of {where}"),
            self._path(entry.get("folder"), f"folder of {where}"),
        )

    def _addresses(self, raw: Any, ssh: str, where: str) -> tuple[str, ...]:
        """Where the file has none, the name for ssh if that is an address, as `mlx.launch --hosts` takes it."""
        if raw in (None, []):
            return (ssh,) if _is_ipv4(ssh) else ()
        addresses = self._texts(raw, f"the ips of {where}", MOST_ADDRESSES)
        for address in addresses:
            if not _is_ipv4(address):
                self._problem(
                    f"the ips of {where} must be IPv4 addresses such as 192.168.0.2, not {quote(address, 40)}"
                )
        return addresses

    def _devices(self, raw: Any, number: int, count: int, where: str) -> tuple[str | tuple[str, ...] | None, ...]:
        if raw in (None, []):
            return ()
        if not isinstance(raw, list) or len(raw) != count:  # pyright: ignore[reportUnknownArgumentType]
            self._problem(f"the rdma of {where} must have one entry for each of the {count} hosts")
            return ()
        if raw[number - 1] is not None:
            self._problem(f"the rdma of {where} must be null at its own place, the {number}. of {count}")
        devices: list[str | tuple[str, ...] | None] = []
        for entry in raw:  # pyright: ignore[reportUnknownVariableType]
            if entry is None:
                devices.append(None)
                continue
            names = self._texts(
                [entry] if isinstance(entry, str) else entry, f"an rdma entry of {where}", MOST_ADDRESSES
            )
            for name in names:
                if not _DEVICE.fullmatch(name):
                    self._problem(f"the rdma of {where} must name devices such as rdma_en2, not {quote(name, 40)}")
            devices.append(names[0] if isinstance(entry, str) and names else names)
        return tuple(devices)

    def _variables(self, raw: Any) -> tuple[str, ...]:
        variables = self._texts(raw, "envs", MOST_VARIABLES) if raw else ()
        for variable in variables:
            name = quote(variable.partition("=")[0], 40)  # without its value, which may be a secret
            if not _VARIABLE.fullmatch(variable):
                self._problem(f"envs must have entries such as NAME=value, on one line, not {name}")
            elif not _SETTABLE.fullmatch(variable.partition("=")[0]):
                self._problem(
                    f"envs cannot set {name}, only how MLX, NCCL and Open MPI communicate, and where models are"
                )
        return variables

    def _texts(self, raw: Any, of: str, most: int) -> tuple[str, ...]:
        entries: list[Any] = raw if isinstance(raw, list) else []
        texts = tuple(entry for entry in entries if isinstance(entry, str) and 0 < len(entry) <= LONGEST_TEXT)
        if not texts or len(texts) < len(entries):
            self._problem(f"{of} must be a list of texts, not {quote(raw, 40)}")
            return ()
        if len(texts) > most:
            self._problem(f"{of} has {len(texts):,} entries; at most {most} are read")
            return ()
        return texts

    def _path(self, raw: Any, of: str) -> str:
        if raw in (None, ""):
            return ""
        if not isinstance(raw, str) or len(raw) > LONGEST_TEXT or not raw.isprintable():
            self._problem(f"the {of} must be a path, not {quote(raw, 40)}")
            return ""
        return raw

    def _check_keys(self, values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
        for key in values:
            if key not in known:
                near = nearest(str(key), list(known))
                hint = f"; did you mean {near}?" if near else f"; the keys are {', '.join(known)}"
                self._problem(f"{where}there is no key {quote(key, 40)}{hint}")

    def _problem(self, text: str) -> None:
        end = "" if text.endswith("?") else "."
        self._problems.append(ConfigProblem(self._setting, f"{self._what}: {text}{end}"))

    def _raise_problems(self) -> None:
        if self._problems:
            raise UserError(self._problems)


def _is_ipv4(text: str) -> bool:
    """MLX splits host and port at the first colon, so it reads no IPv6."""
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class BackendChoice:
    backend: str
    """One of BACKENDS."""
    why: str
    """The reason, for the event log."""


def choose_backend(hosts: HostsFile, wanted: str = AUTO, *, has_mpi: bool, has_cuda: bool = False) -> BackendChoice:
    """The backend for these machines. `wanted` is the setting `distributed_backend`; `auto` takes the file's, or what
    suits the machines.

    Raises UserError("distributed_backend", …) where the file or this machine lacks something the backend needs.
    """
    count = len(hosts.hosts)
    if wanted != AUTO:
        backend, why = wanted, f"over {wanted}, as the settings say"
    elif hosts.backend:
        backend, why = hosts.backend, f"over {hosts.backend}, as the hosts file says"
    elif has_cuda:
        backend, why = "nccl", "over nccl, since MLX computes on CUDA here"
    elif not _without_device(hosts):
        backend, why = "jaccl", "over jaccl, since the hosts file has RDMA devices for all"
    elif count <= LARGEST_SOUND_RING:
        backend, why = "ring", "over a ring, which suits two ranks without RDMA devices"
    elif has_mpi:
        backend, why = "mpi", f"over mpi: with {count} ranks some of the ring's sums never end (mlx#4475)"
    else:
        raise UserError(
            "distributed_backend",
            f"{count} ranks need MPI, since with more than two some of the ring's sums never end (mlx#4475), and "
            "mpirun is not installed here. Install Open MPI, or choose ring.",
        )
    if count > 1 and (lack := _lack(hosts, backend, has_mpi, has_cuda)):
        raise UserError("distributed_backend", lack)
    return BackendChoice(backend, f"The machines communicate {why}.")


def _lack(hosts: HostsFile, backend: str, has_mpi: bool, has_cuda: bool) -> str:
    """The reason why this backend cannot be used; "" if it can."""
    without_address = [rank for rank, host in enumerate(hosts.hosts) if not host.ips]
    if backend == "ring" and without_address:
        return (
            f"The ring needs an address of every host, and host {without_address[0] + 1} of the hosts file has no ips."
        )
    if backend in ("jaccl", "jaccl-ring", "nccl") and 0 in without_address:
        return f"{backend} needs an address of the first host, at which the others reach it; it has no ips."
    if backend.startswith("jaccl") and (missing := _without_device(hosts, ring=backend == "jaccl-ring")):
        here, there = missing[0]
        pair = f"from host {here + 1} to host {there + 1}"
        return f"{backend} needs an RDMA device between machines, and the hosts file names none {pair}."
    if backend == "mpi" and not has_mpi:
        return "MPI was chosen, and mpirun is not installed here. Install Open MPI, or choose another backend."
    if backend == "nccl" and not has_cuda:
        return "NCCL was chosen, and MLX computes on no CUDA device here. Choose another backend."
    return ""


def _without_device(hosts: HostsFile, ring: bool = False) -> list[tuple[int, int]]:
    """Pairs of ranks with no RDMA device from the first to the second; of a ring, neighbours only."""
    count = len(hosts.hosts)
    devices = [host.rdma or (None,) * count for host in hosts.hosts]
    pairs = [
        (rank, other)
        for rank in range(count)
        for other in (dict.fromkeys(((rank - 1) % count, (rank + 1) % count)) if ring else range(count))
        if rank != other
    ]
    return [(rank, other) for rank, other in pairs if not devices[rank][other]]


# A run on several machines opens connections with the user's ssh keys and starts programs there, so a person has to
# allow the hosts file: in the window, or on the command line by naming it. A run folder may name a file of somebody
# else.

_ENTRY = "hosts"
"""The key in the trust record that holds all hosts files; a reward file's key is an absolute path."""


@dataclass(frozen=True, slots=True)
class HostsToAllow:
    """A hosts file that may not be used yet. `changed`: earlier contents of it were allowed."""

    path: Path
    fingerprint: str
    hosts: HostsFile
    changed: bool

    @property
    def others(self) -> list[Host]:
        """The machines besides this one, each once."""
        away = (host for rank, host in enumerate(self.hosts.hosts) if not self.hosts.is_here(rank))
        return list({host.ssh: host for host in away}.values())


class AllowedHosts:
    """The hosts files that a person has allowed: path → SHA-256 of the contents, in `TrustRecord`."""

    def __init__(self, file: Path | None = None) -> None:
        self._record = TrustRecord(file)

    def missing(self, name: str) -> HostsToAllow | None:
        """The hosts file of this name if its present contents are not allowed. None for "", and for a file that cannot
        be used at all."""
        if not name.strip():
            return None
        try:
            path = resolved(user_path(name, "hosts"))
            fingerprint = hashlib.sha256(read_bytes(path, "hosts", HOSTS_LIMIT)).hexdigest()
            hosts = read_hosts(path)
        except UserError:  # the run says why
            return None
        known = self._fingerprints().get(str(path))
        return None if known == fingerprint else HostsToAllow(path, fingerprint, hosts, changed=known is not None)

    def allow(self, asked: HostsToAllow) -> None:
        self._record.add({_ENTRY: self._fingerprints() | {str(asked.path): asked.fingerprint}})

    def _fingerprints(self) -> dict[str, str]:
        kept: Any = self._record.read().get(_ENTRY)
        return {path: str(digest) for path, digest in kept.items()} if isinstance(kept, dict) else {}


def allow_hosts(name: str) -> None:
    """Allow a hosts file that a person has named on the command line."""
    record = AllowedHosts()
    if (asked := record.missing(name)) is not None:
        record.allow(asked)


def require_hosts(name: str) -> None:
    """Raise UserError for the hosts file of a run folder that was never allowed here.

    On the command line a file that was allowed once may have been edited since, as with reward files; the window asks
    again.
    """
    asked = AllowedHosts().missing(name)
    if asked is not None and not asked.changed:
        raise UserError(
            "hosts",
            f"The hosts file {quote(asked.path, 66)} was never allowed on this machine. Read it; the verb machines "
            "checks and allows it, and --hosts none trains here alone.",
        )
