"""The check of several machines: compares their facts, and copies a model on request. Over ssh it starts `main` of this
module, which answers one line of JSON, {"ask": "facts" | "place", …}, with another, and ends with its stdin. Every wait
has a limit, and no process is left."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
from pydantic import TypeAdapter

from backend.config.config import Config
from backend.distributed.hosts_file import (
    AUTO,
    BackendChoice,
    HostsFile,
    choose_backend,
    first_host_problems,
    read_hosts,
)
from backend.distributed.launcher import CONNECT_S, mpirun, rank_program, ssh_command
from backend.distributed.ranks import end_with_stdin
from backend.trainer.memory.estimate import format_bytes
from backend.utils.child_process import CHILD_VERB, ChildEnded, ChildProcess, ChildTimeout, claim_stdout, json_line
from backend.utils.command import is_bundled
from backend.utils.disk import gigabytes, require_room, room_on
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import is_file, is_folder, is_folder_name, names_folder, user_path, write_all
from backend.utils.hub_cache import hub_cache, local_folder, own_file, repo_cache, split_revision
from backend.utils.machine import has_gpu, machine_bytes, processor
from backend.utils.places import project_root
from backend.utils.text import quote

FACTS_S = 45.0  # seconds for a machine to answer
GRACE_S = 2.0
DEVICES_S = 5.0
OF_SSH = 255  # ssh's own exit code
MARKER = "grpo-studio "  # begins an answer, since a shell's startup files may write to the same stream
CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
COPY_LIMIT = 8_000_000_000
RESERVE = 2_000_000_000  # bytes to leave free on a disk
_SSH_HINTS = {  # ssh's words → rest of a sentence
    "Permission denied": "refuses your key. Put it there with: ssh-copy-id {ssh}",
    "Host key verification failed": "is not known to ssh yet. Connect once by hand: ssh {ssh}",
    "Connection refused": "accepts no ssh. Turn on Remote Login there (System Settings, General, Sharing).",
    "timed out": "does not answer. It may be asleep, switched off, or on another network.",
}
_UNPACK = 'mkdir -p "$1" && tar -xf - -C "$1" && mv "$1/$2.part" "$1/$2"'  # unpacks a model; config.json comes last

Level = Literal["refuse", "warn", "info"]
LEVELS: tuple[Level, ...] = ("refuse", "warn", "info")  # refuse: no run would start; warn: slower or different
Reached = Callable[[int, Literal["reading", "read", "copying"], float | None], None]  # (rank, stage, share of a copy)
Check = Callable[[], None]  # called while a machine is waited for; may raise


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A machine's description of itself. Sizes in bytes."""

    machine: str = ""  # its host name
    system: str = ""
    chip: str = ""
    device: str = ""  # gpu or cpu
    memory: int = 0
    memory_free: int = 0
    memory_usable: int = 0
    disk_free: int | None = None
    python: str = ""
    grpo_studio: str = ""
    code: str = ""  # digest of our source files
    mlx: str = ""
    mlx_lm: str = ""
    has_mpi: bool = False
    rdma_devices: tuple[str, ...] = ()
    model: str = ""  # digest of the model's files
    model_bytes: int = 0
    has_reward_file: bool | None = None


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One thing worth knowing. `rank` is None where it is about all machines."""

    level: Level
    rank: int | None
    sentence: str


@dataclass(slots=True)
class CheckedMachine:
    """One entry of the hosts file."""

    rank: int
    ssh: str
    label: str
    is_here: bool = False
    facts: MachineFacts | None = None
    problem: str = ""  # why there are no facts


@dataclass(slots=True)
class MachineReport:
    backend: str
    machines: list[CheckedMachine]
    findings: list[MachineFinding] = field(default_factory=list[MachineFinding])

    @property
    def refusals(self) -> list[MachineFinding]:
        return [finding for finding in self.findings if finding.level == "refuse"]

    @property
    def without_model(self) -> list[int]:
        """Ranks of other machines to which the model can be copied."""
        first = self.machines[0].facts
        if first is None or not first.model or first.model_bytes > COPY_LIMIT:
            return []
        others = [machine for machine in self.machines if not machine.is_here]
        return [machine.rank for machine in others if machine.facts and machine.facts.model != first.model]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> MachineReport:
        return TypeAdapter(cls).validate_python(raw)


def _ignore(*_: object) -> None: ...


def check_machines(
    hosts: HostsFile,
    name: str,
    *,
    backend: str = AUTO,
    model: str = "",
    reward_file: str = "",
    copies: bool = False,
    reached: Reached = _ignore,
    check: Check = _ignore,
) -> MachineReport:
    """Check the machines of the hosts file `name`, with `copies` after sending the model to those that lack it.
    `backend`: the setting `distributed_backend`. `reached` is called from several threads."""
    report = MachineReport("", _checked(hosts, model, reward_file, reached, check))
    if copies and report.without_model:
        lacking = {hosts.hosts[rank].ssh: rank for rank in reversed(report.without_model)}
        for rank in sorted(lacking.values()):  # one after the other: they share this machine's connection
            copy_model(model, hosts, rank, reached, check)
        report.machines = _checked(hosts, model, reward_file, reached, check)
    problems, here = first_host_problems(hosts, name), report.machines[0].facts
    try:
        has_mpi = here is not None and here.has_mpi
        report.backend = choose_backend(hosts, backend, has_mpi=has_mpi, has_cuda=has_cuda()).backend
    except UserError as error:
        problems += error.faults
    refused = [MachineFinding("refuse", None, each.sentence) for each in problems]
    report.findings = [*refused, *findings_of(report, model)]
    return report


def require_machines(hosts: HostsFile, name: str, **wanted: Any) -> list[str]:
    """`check_machines` before a run. → warnings. Raises UserError with everything that would keep it from starting."""
    report = check_machines(hosts, name, **wanted)
    if report.refusals:
        sentences = dict.fromkeys(finding.sentence for finding in report.refusals)
        raise UserError([ConfigProblem("hosts", sentence) for sentence in sentences])
    return [finding.sentence for finding in report.findings if finding.level == "warn"]


def plan_machines(config: Config) -> tuple[HostsFile, BackendChoice]:
    """The machines of a run in rank order, and their backend, without contacting any. Raises UserError."""
    file = Path(config.hosts)
    hosts = read_hosts(file)
    if problems := first_host_problems(hosts, file.name):
        raise UserError(problems)
    choice = choose_backend(hosts, config.distributed_backend, has_mpi=mpirun() is not None, has_cuda=has_cuda())
    if choice.backend == "mpi":  # the entries of each machine together, as mpirun numbers its ranks
        places = ["" if hosts.is_here(rank) else host.ssh for rank, host in enumerate(hosts.hosts)]
        order = sorted(range(len(places)), key=lambda rank: places.index(places[rank]))
        hosts = replace(hosts, hosts=tuple(hosts.hosts[rank] for rank in order))
    return hosts, choice


def require_one_machine(config: Config, what: str) -> None:
    """Raises UserError where a hosts file is set; `what` begins the sentence."""
    if config.hosts:
        raise UserError("hosts", f"{what} trains on this machine alone; take the hosts file out of the settings.")


def _checked(hosts: HostsFile, model: str, reward_file: str, reached: Reached, check: Check) -> list[CheckedMachine]:
    machines, ranks_of = list[CheckedMachine](), dict[str, list[CheckedMachine]]()
    for rank, host in enumerate(hosts.hosts):
        machines.append(CheckedMachine(rank, host.ssh, hosts.label(rank), hosts.is_here(rank)))
        ranks_of.setdefault("" if machines[-1].is_here else host.ssh, []).append(machines[-1])

    def read(ranks: list[CheckedMachine]) -> None:
        found, problem = None, ""
        for machine in ranks:
            reached(machine.rank, "reading", None)
        try:
            if ranks[0].is_here:
                found = facts(model, reward_file)
            else:
                request = {"ask": "facts", "model": model, "reward_file": reward_file}
                found = TypeAdapter(MachineFacts).validate_python(_ask(hosts, ranks[0].rank, request, check))
        except UserError as error:
            problem = error.faults[0].sentence
        for machine in ranks:
            machine.facts, machine.problem = found, problem
            reached(machine.rank, "read", None)

    with ThreadPoolExecutor(len(ranks_of), "machine") as threads:
        list(threads.map(read, ranks_of.values()))
    return machines


def _ask(hosts: HostsFile, rank: int, request: dict[str, Any], check: Check) -> Any:
    """The answer of another machine. Raises UserError."""
    host = hosts.hosts[rank]
    command = ssh_command(host, *rank_program(host, CHILD_VERB, "backend.distributed.machine_check"))
    child = ChildProcess(command, grace_s=GRACE_S, environment=dict(os.environ), marker=MARKER)
    try:
        answer = child.request(request, FACTS_S, check)
        why = f"reports: {quote(answer['error'], 120)}" if "error" in answer else ""
    except ChildTimeout:
        why = f"has not answered for {FACTS_S:.0f} s."
    except ChildEnded as ended:
        last = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.exit_code}"]
        why = f"could not start GRPO Studio: {quote(last[0], 110)}."
        if ended.exit_code == OF_SSH:
            hints = (rest.format(ssh=host.ssh) for words, rest in _SSH_HINTS.items() if words in ended.stderr)
            why = next(hints, f"was not reached within {CONNECT_S} s: {quote(last[0], 100)}.")
        elif ended.exit_code in (126, 127):  # the shell's, for a program that cannot be run, or is not there
            missing = quote(host.program, 80) if host.program else "Python where this machine has its own"
            why = f"has no {missing}. Install GRPO Studio there, or name its program in the hosts file."
        elif "No module named" in ended.stderr or "No such command" in ended.stderr:
            why = "has no GRPO Studio, or an older one. Name its program or folder in the hosts file."
    except (json.JSONDecodeError, OSError) as error:
        why = f"could not be asked: {quote(error)}."
    finally:
        child.stop()
    if why:
        raise UserError("hosts", f"{quote(host.ssh, 40)} {why}")
    return answer


def copy_model(model: str, hosts: HostsFile, rank: int, reached: Reached = _ignore, check: Check = _ignore) -> None:
    """Send a model to another machine, as tar over ssh. Raises UserError; what has arrived stays."""
    host, label = hosts.hosts[rank], hosts.label(rank)
    folder, files = local_folder(model), model_files(model)
    total = sum(files.values())
    if folder is None or not files:
        raise UserError("model", f"The model {quote(model)} is not on this machine, so it cannot be copied to {label}.")
    if total > COPY_LIMIT:
        raise UserError("model", f"The model {quote(model)} is larger than the {COPY_LIMIT:,} bytes that are copied.")
    for name in files:
        own_file(folder / name, folder, "model")
    revision = "" if names_folder(model) else folder.name  # of a snapshot in the cache
    try:
        request = {"ask": "place", "model": model, "revision": revision, "names": [*files], "bytes": total}
        place = _ask(hosts, rank, request, check)["folder"]
    except UserError as error:
        raise UserError("model", f"{label} could not take the model: {error.faults[0].sentence}") from None
    inside = f"snapshots/{revision}/" if revision else ""
    unpack = ["/bin/sh", "-c", _UNPACK, "sh", place, f"{inside}config.json"]
    process = subprocess.Popen(
        ssh_command(host, unpack, {}), bufsize=0, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    stdin: Any = process.stdin
    stderr: Any = process.stderr
    sent = 0

    def write(data: bytes) -> None:
        nonlocal sent
        check()
        write_all(stdin, data)
        sent += len(data)
        reached(rank, "copying", min(sent / total, 1.0))

    try:
        pipe: Any = SimpleNamespace(write=write)
        with (
            suppress(BrokenPipeError),  # the other end's words say why
            stdin,
            tarfile.open(fileobj=pipe, mode="w|", dereference=True, bufsize=1 << 20) as archive,
        ):
            if revision:
                ref = tarfile.TarInfo(f"refs/{split_revision(model)[1] or 'main'}")
                ref.size = len(revision)
                archive.addfile(ref, io.BytesIO(revision.encode()))
            for name in sorted(files, key=lambda name: name == "config.json"):
                archive.add(folder / name, inside + name + (".part" if name == "config.json" else ""))
        last = stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        process.wait()
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        why = quote(last[0] if last else "ssh has ended", 110)
        raise UserError("model", f"{label} could not take the model: {why}")


def main(_arguments: Sequence[str] = ()) -> int:
    out = claim_stdout()
    request = json.loads(sys.stdin.buffer.readline())
    end_with_stdin()  # the main thread may be in a call that never returns
    try:
        if request["ask"] == "facts":
            answer = asdict(facts(request["model"], request["reward_file"]))
        else:
            answer = {"folder": str(place(request["model"], request["revision"], request["names"], request["bytes"]))}
    except UserError as error:
        answer = {"error": error.faults[0].sentence}
    except Exception as error:  # whatever a disk or a program raises is the check's finding
        answer = {"error": f"{type(error).__name__}: {error}"}
    out.write(MARKER + json_line(answer))
    out.flush()
    return 0


def facts(model: str = "", reward_file: str = "") -> MachineFacts:
    """About this machine. Loads no mlx, and takes a fraction of a second."""
    memory, room, macos = psutil.virtual_memory(), room_on(hub_cache()), platform.mac_ver()[0]
    files, digest = model_files(model) if model else {}, ""
    if files and (folder := local_folder(model)) is not None:  # names, sizes and config.json: no weights are read
        others = ("config.json", "tokenizer.json")
        compared = [pair for pair in files.items() if pair[0].endswith(".safetensors") or pair[0] in others]
        digest = sha256(repr(compared).encode() + (folder / "config.json").read_bytes()).hexdigest()[:16]
    package, code = project_root() / "backend", sha256()
    if not is_bundled():
        for file in sorted(package.rglob("*.py")):
            code.update(str(file.relative_to(package)).encode() + file.read_bytes())
    devices = ""
    if shutil.which("ibv_devices") is not None:
        devices = subprocess.run(["ibv_devices"], capture_output=True, text=True, timeout=DEVICES_S).stdout
    return MachineFacts(
        machine=platform.node(),
        system=f"macOS {macos}" if macos else f"{platform.system()} {platform.release()}",
        chip=processor(),
        device="gpu" if has_gpu() or has_cuda() else "cpu",
        memory=memory.total,
        memory_free=memory.available,
        memory_usable=machine_bytes(),
        disk_free=room,
        python=platform.python_version(),
        grpo_studio=_version("grpo-studio"),
        code="" if is_bundled() else code.hexdigest()[:12],
        mlx=_version("mlx"),
        mlx_lm=_version("mlx-lm"),
        has_mpi=mpirun() is not None,
        rdma_devices=tuple(word for word in devices.split() if word.startswith("rdma_")),
        model=digest,
        model_bytes=sum(files.values()),
        has_reward_file=is_file(user_path(reward_file, "reward_functions_file")) if reward_file else None,
    )


def has_cuda() -> bool:
    """True if the installed mlx computes on CUDA, which shows without loading it."""
    return any(_version(package) for package in CUDA_PACKAGES)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def model_files(model: str) -> dict[str, int]:
    """Relative name → bytes of a model's files, hidden ones left out; empty if it is not on this machine."""
    if (folder := local_folder(model)) is None:
        return {}
    found = dict[str, int]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[name.as_posix()] = path.stat().st_size
    is_model = "config.json" in found and any(name.endswith(".safetensors") for name in found)
    return found if is_model else {}


def place(model: str, revision: str, names: list[str], size: int) -> Path:
    """The folder for a copied model of `size` bytes. Raises UserError without room, or where it would overwrite."""
    folder = repo_cache(model) if revision else user_path(model, "model")
    require_room(folder, size + RESERVE, "The model")
    if revision:
        if not is_folder_name(revision):
            raise UserError("model", "The revision cannot be a folder's name.")
        return folder
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if is_folder(folder) and ("config.json" in present or not present <= {*names}):
        raise UserError("model", f"There is another folder {quote(folder)}; move it away first.")
    return folder


def findings_of(report: MachineReport, model: str = "") -> list[MachineFinding]:
    """Everything that the facts say, the gravest first. `model`: the setting."""
    found = [MachineFinding("refuse", machine.rank, machine.problem) for machine in report.machines if machine.problem]
    here = report.machines[0].facts
    others = {machine.ssh: machine for machine in reversed(report.machines[1:]) if not machine.is_here}
    for machine in others.values():
        if here is not None and machine.facts is not None:
            about = _differences(machine.label, here, machine.facts, report.backend, model)
            found += [MachineFinding(level, machine.rank, sentence) for level, sentence in about]
    names = [report.machines[0].ssh if machine.is_here else machine.ssh for machine in report.machines]
    for name, count in Counter(names).items():
        if count > 1:
            label = "This machine" if report.machines[names.index(name)].is_here else quote(name, 40)
            shared = "its ranks share its processor, and each holds a model in its memory"
            found.append(MachineFinding("info", names.index(name), f"{label} is listed {count} times: {shared}."))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _differences(
    name: str, here: MachineFacts, there: MachineFacts, backend: str, model: str
) -> Iterator[tuple[Level, str]]:
    if here.grpo_studio != there.grpo_studio:
        versions = f"{quote(there.grpo_studio, 20)}, here is {here.grpo_studio}"
        yield "refuse", f"{name} has GRPO Studio {versions}. Install the same version on both."
    elif there.code and here.code and there.code != here.code:
        yield "warn", f"{name} has other source files of the same GRPO Studio. Update both from one place."
    for title, ours, theirs in (("mlx", here.mlx, there.mlx), ("mlx-lm", here.mlx_lm, there.mlx_lm)):
        if ours != theirs:
            versions = f"{title} {quote(theirs, 20)}, here is {ours}"
            yield "warn", f"{name} has {versions}: results of the two may differ in their last digits."
    if here.device != there.device:
        devices = f"computes on the {quote(there.device.upper(), 10)}, this machine on the {here.device.upper()}"
        yield "warn", f"{name} {devices}: it will get a small share of the work."
    elif here.chip != there.chip:
        chips = f"({quote(there.chip, 40)}, here {quote(here.chip, 40)})"
        yield "info", f"{name} has another chip {chips}; each gets work by its measured speed."
    if abs(here.memory - there.memory) > 0.05 * here.memory:
        smaller, larger = sorted((here.memory, there.memory))
        label = name if there.memory < here.memory else "this machine"
        yield (
            "warn" if smaller < 0.5 * larger else "info",
            f"{name} has {format_bytes(there.memory)} of memory, this machine {format_bytes(here.memory)}; every "
            f"machine holds the whole model, so {label} sets the limit.",
        )
    if backend == "mpi" and not there.has_mpi:
        yield "refuse", f"{name} has no mpirun. Install Open MPI there, the same version as here."
    if backend.startswith("jaccl") and not there.rdma_devices:
        needs = "It needs Thunderbolt 5, macOS 26.2 or later, and rdma_ctl enable in Recovery."
        yield "refuse", f"{name} shows no RDMA devices. {needs}"
    if there.has_reward_file is False:
        yield "info", f"{name} has no reward file: its text is sent. Modules beside it are not, so copy those."
    if not model or not here.model or there.model == here.model:
        return
    title, size = quote(model, 60), gigabytes(here.model_bytes)
    needed = here.model_bytes + RESERVE
    copying = f"It can be copied from here ({size})."
    if here.model_bytes > COPY_LIMIT:
        copying = f"With {size} it is above the {gigabytes(COPY_LIMIT)} that are copied; put it there yourself."
    if there.disk_free is not None and there.disk_free < needed:
        room = f"{gigabytes(there.disk_free)} are free, {gigabytes(needed)} needed"
        yield "refuse", f"{name} lacks the model and the room for it: {room}."
    elif there.model:
        yield "refuse", f"{name} has other files of {title} than this machine. {copying}"
    elif not names_folder(model):
        yield "warn", f"{name} has no copy of {title} and will download it ({size}) when the run starts. {copying}"
    else:
        yield "refuse", f"{name} has no folder {title}. {copying}"
