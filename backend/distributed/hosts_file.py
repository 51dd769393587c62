"""The file that lists the machines of a run, in the format of `mlx.launch`, with two keys of ours that it ignores.

    {"backend": "ring", "envs": ["NAME=value"],
     "hosts": [{"ssh": "127.0.0.1", "ips": ["192.168.0.1"], "rdma": [null, "rdma_en2"]},
               {"ssh": "mac-b",     "ips": ["192.168.0.2"], "rdma": ["rdma_en2", null],
                "program": "~/.local/bin/grpo-studio-backend", "folder": "~/grpo-studio"}]}

or the list of hosts alone. The first entry is the machine that starts the run; a machine listed twice gets two
processes. `program` and `folder` say where GRPO Studio is on a machine that has it in another place.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError

from backend.rewards.allowed_code import TrustRecord
from backend.utils.disk import save_as
from backend.utils.documents import parse_json
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import read_bytes, read_text, resolved, user_path
from backend.utils.text import quote

HOSTS_LIMIT = 2**18  # bytes of a hosts file
MOST_HOSTS = 64
AUTO = "auto"
WANTED = (AUTO, "ring", "mpi", "jaccl", "nccl")  # values of `distributed_backend`
LARGEST_SOUND_RING = 2  # longer rings hang now and then (mlx#4475)
HERE = ("127.0.0.1", "localhost")  # names of this machine

# A name that begins with a hyphen would be an option of ssh, and some of its options run programs.
_SSH_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]{0,252}")
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# Variables such as PYTHONPATH, LD_PRELOAD or MLX_MPI_LIBNAME load code, and the file may be somebody else's.
_SETTABLE = re.compile(
    r"(MLX|NCCL|OMP)_(?!.*(LIB|PLUGIN|PATH|FILE|CONF))\w+|OMPI_MCA_(btl|oob)_tcp_\w+|OMPI_MCA_coll_\w+"
    r"|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE"
)


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _device(value: Any) -> str | tuple[str, ...] | None:
    if value is None:
        return None
    names: Any = [value] if isinstance(value, str) else value
    is_list = isinstance(names, list | tuple)
    if not is_list or not all(isinstance(name, str) and _DEVICE.fullmatch(name) for name in names):
        raise ValueError(f"must be a device such as rdma_en2, not {quote(value, 40)}")
    return value if isinstance(value, str) else tuple(names)


def _variable(value: str) -> str:
    name, equals, content = value.partition("=")
    shown = quote(name, 40)  # without its value, which may be a secret
    if not equals or not name.isidentifier() or not content.isprintable():
        raise ValueError(f"must have entries such as NAME=value, on one line, not {shown}")
    if not _SETTABLE.fullmatch(name):
        raise ValueError(f"cannot set {shown}, only how MLX, NCCL and Open MPI communicate, and where models are")
    return value


def _must(holds: Callable[[str], object], be: str) -> AfterValidator:
    def check(value: str) -> str:
        if not holds(value):
            raise ValueError(f"must be {be}, not {quote(value, 40)}")
        return value

    return AfterValidator(check)


_no_null = BeforeValidator(lambda value: value or "")
SshName = Annotated[str, _must(_SSH_NAME.fullmatch, "a machine's name or address as ssh takes it")]
Address = Annotated[str, _must(_is_ipv4, "an IPv4 address such as 192.168.0.2")]
Path_ = Annotated[str, _no_null, Field(max_length=1000), _must(str.isprintable, "a path")]
Variable = Annotated[str, AfterValidator(_variable)]
Device = str | tuple[str, ...] | None
_empty_as_tuple = BeforeValidator(lambda value: value or ())


@dataclass(frozen=True, slots=True)
class Host:
    """One process of a run, and its machine. Only `parse_hosts` checks the values."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    ssh: SshName  # as ssh takes it; 127.0.0.1 is this machine
    ips: Annotated[tuple[Address, ...], Field(max_length=16), _empty_as_tuple] = ()  # IPv4 addresses, one of each cable
    rdma: Annotated[tuple[Annotated[Device, PlainValidator(_device)], ...], _empty_as_tuple] = ()  # to each host
    program: Path_ = ""  # a Python with GRPO Studio, or grpo-studio-backend
    folder: Path_ = ""  # a checkout there


@dataclass(frozen=True, slots=True)
class HostsFile:
    """The machines of a run; the number of a host is its rank."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    hosts: Annotated[tuple[Host, ...], Field(min_length=1, max_length=MOST_HOSTS)]
    backend: Annotated[Literal["", "ring", "mpi", "nccl", "jaccl", "jaccl-ring"], _no_null] = ""
    envs: Annotated[tuple[Variable, ...], Field(max_length=100), _empty_as_tuple] = ()  # NAME=value for every process

    def is_here(self, rank: int) -> bool:
        """True for a rank on this machine, which needs no ssh. The first always is."""
        return rank == 0 or self.hosts[rank].ssh in (*HERE, self.hosts[0].ssh)

    def label(self, rank: int) -> str:
        ssh = self.hosts[rank].ssh
        name = "this machine" if self.is_here(rank) else quote(ssh, 40)
        shared = sum(host.ssh == ssh for host in self.hosts) > 1
        return f"{name} (rank {rank})" if shared else name

    def without(self, rank: int) -> HostsFile:
        """The other machines, without the RDMA devices that lead to this one."""
        kept = [host for other, host in enumerate(self.hosts) if other != rank]
        return replace(self, hosts=tuple(replace(host, rdma=host.rdma[:rank] + host.rdma[rank + 1 :]) for host in kept))

    def to_json(self) -> dict[str, Any]:
        """The content of the file, empty keys of ours left out."""
        ours, file = ("program", "folder"), asdict(self)
        return file | {
            "hosts": [{key: host[key] for key in host if host[key] or key not in ours} for host in file["hosts"]]
        }


_FILE = TypeAdapter(HostsFile)


def read_hosts(path: str | Path) -> HostsFile:
    """The machines of a file. Raises UserError with every problem."""
    file = user_path(str(path), "hosts")
    return parse_hosts(parse_json(read_text(file, "hosts", HOSTS_LIMIT), quote(file), "hosts"), file.name)


def parse_hosts(raw: Any, what: str) -> HostsFile:
    """The machines of a JSON value; `what` names it. Raises UserError with every problem."""
    try:
        found = _FILE.validate_python(raw if isinstance(raw, dict) else {"hosts": raw})
    except ValidationError as error:
        texts = list[str]()
        for each in error.errors(include_context=False):
            if each["type"] == "too_short":  # a wrong entry makes the list too short
                continue
            place, text = each["loc"], each["msg"].removeprefix("Value error, ")
            if len(place) > 1 and place[0] == "hosts":
                place = (f"host {int(place[1]) + 1}", *place[2:])
            where = ", ".join(part for part in place if isinstance(part, str))
            texts.append(f"{where}: {_WORDS.get(text, text)}")
        raise _problems(what, texts or ["it names no hosts"]) from None
    hosts, problems = found.hosts, list[str]()
    for rank, host in enumerate(hosts):
        if (host.program or host.folder) and found.is_here(rank):
            problems.append(f"host {rank + 1} is this machine, so it can have no program and no folder of its own")
        if host.rdma and (len(host.rdma) != len(hosts) or host.rdma[rank] is not None):
            each = f"one entry for each of the {len(hosts)} hosts, and null for itself"
            problems.append(f"the rdma of host {rank + 1} must have {each}")
    if problems:
        raise _problems(what, problems)
    # An address as name is an address too, as for `mlx.launch --hosts`.
    return replace(
        found, hosts=tuple(replace(each, ips=each.ips or ((each.ssh,) if _is_ipv4(each.ssh) else ())) for each in hosts)
    )


def _problems(what: str, texts: Sequence[str]) -> UserError:
    return UserError([ConfigProblem("hosts", f"{quote(what, 40)}: {text}.") for text in texts])


_WORDS = {
    "Unexpected keyword argument": "is no key of a hosts file",
    "Field required": "is missing",
    "Input should be a valid tuple": "must be a list",
}


def write_hosts(path: Path, hosts: HostsFile) -> None:
    """Write the file, for `mlx.launch` too. Raises DiskError and keeps the old content then."""
    save_as(path, json.dumps(hosts.to_json(), indent=2, ensure_ascii=False) + "\n")


def first_host_problems(hosts: HostsFile, what: str) -> list[ConfigProblem]:
    """The problem of a file whose first entry is not this machine, judged by its addresses."""
    first = hosts.hosts[0]
    if not first.ips or first.ssh in HERE:
        return []
    for address in first.ips:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))  # only an address of an interface of this machine can be bound
            return []
    must = "the first host must be this machine, where the run folder is"
    return [ConfigProblem("hosts", f"{quote(what, 40)}: {must}, and {quote(first.ips[0])} is not an address of it.")]


def hosts_problems(path: str) -> list[ConfigProblem]:
    """All problems of a run's hosts file that this machine alone can find."""
    if not path.strip():
        return []
    try:
        return first_host_problems(read_hosts(path), Path(path).name)
    except UserError as error:
        return error.faults


class BackendChoice(NamedTuple):
    backend: str  # one of the backends of `mlx.launch`: ring, mpi, nccl, jaccl or jaccl-ring
    why: str  # the reason, for the event log


def choose_backend(hosts: HostsFile, wanted: str = AUTO, *, has_mpi: bool, has_cuda: bool = False) -> BackendChoice:
    """The backend for these machines; `wanted`: `distributed_backend`. Raises UserError where something is missing."""
    count = len(hosts.hosts)
    if wanted != AUTO:
        backend, why = wanted, f"over {wanted}, as the settings say"
    elif hosts.backend:
        backend, why = hosts.backend, f"over {hosts.backend}, as the hosts file says"
    elif has_cuda:
        backend, why = "nccl", "over nccl, since MLX computes on CUDA here"
    elif count > 1 and _missing_device(hosts) is None:
        backend, why = "jaccl", "over jaccl, since the hosts file has RDMA devices for all"
    elif count <= LARGEST_SOUND_RING:
        backend, why = "ring", "over a ring, which suits up to two ranks without RDMA devices"
    else:
        backend, why = "mpi", f"over mpi: with {count} ranks some of the ring's sums never end (mlx#4475)"
    lack = ""
    if count > 1:
        without_address = [rank for rank, host in enumerate(hosts.hosts) if not host.ips]
        if backend == "ring" and without_address:
            lack = f"The ring needs an address of every host, and host {without_address[0] + 1} has no ips."
        elif backend in ("jaccl", "jaccl-ring", "nccl") and 0 in without_address:
            lack = f"{backend} needs an address of the first host, at which the others reach it; it has no ips."
        elif backend.startswith("jaccl") and (pair := _missing_device(hosts, ring=backend == "jaccl-ring")):
            between = f"from host {pair[0] + 1} to host {pair[1] + 1}"
            lack = f"{backend} needs RDMA devices; the hosts file has none {between}."
        elif backend == "mpi" and not has_mpi:
            lack = f"{count} ranks need MPI here, and mpirun is not installed. Install Open MPI, or choose ring."
        elif backend == "nccl" and not has_cuda:
            lack = "NCCL was chosen, and MLX computes on no CUDA device here. Choose another backend."
    if lack:
        raise UserError("distributed_backend", lack)
    return BackendChoice(backend, f"The machines communicate {why}.")


def _missing_device(hosts: HostsFile, ring: bool = False) -> tuple[int, int] | None:
    count = len(hosts.hosts)
    for rank, host in enumerate(hosts.hosts):
        for other in range(count):
            is_needed = rank != other and (not ring or (other - rank) % count in (1, count - 1))
            if is_needed and not (host.rdma and host.rdma[other]):
                return rank, other
    return None


# A run on several machines opens connections with the user's ssh keys and starts programs there, so a person has to
# allow the hosts file: in the window, or on the command line by naming it.


@dataclass(frozen=True, slots=True)
class HostsToAllow:
    """A hosts file to allow. `changed`: earlier contents were allowed."""

    path: Path
    fingerprint: str
    hosts: HostsFile
    changed: bool

    @property
    def others(self) -> list[Host]:
        away = (host for rank, host in enumerate(self.hosts.hosts) if not self.hosts.is_here(rank))
        return list({host.ssh: host for host in away}.values())


class AllowedHosts(TrustRecord):
    """Hosts files that a person has allowed: path → SHA-256."""

    def missing(self, name: str) -> HostsToAllow | None:
        """The hosts file if its contents are not allowed; None for "" and for a file with errors."""
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
        self.add({"hosts": self._fingerprints() | {str(asked.path): asked.fingerprint}})

    def _fingerprints(self) -> dict[str, str]:
        kept: Any = self.read().get("hosts")
        return kept if isinstance(kept, dict) else {}


def allow_hosts(name: str) -> None:
    """Allow a hosts file that a person has named on the command line."""
    record = AllowedHosts()
    if (asked := record.missing(name)) is not None:
        record.allow(asked)


def require_hosts(name: str) -> None:
    """Raise UserError for the hosts file of a run folder that was never allowed here; an edited one passes."""
    asked = AllowedHosts().missing(name)
    if asked is not None and not asked.changed:
        advice = "Read it; the verb machines checks and allows it, and --hosts none trains here alone."
        raise UserError("hosts", f"The hosts file {quote(asked.path, 66)} was never allowed on this machine. {advice}")
