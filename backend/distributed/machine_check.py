"""The check of several machines: compares their facts, copies a model on request, and measures their link.

Every wait has a limit, and no process is left. On each machine, over ssh, the check starts `main` of this module, which
reads one line of JSON and answers with one:

    {"ask": "facts", "model": …, "reward_file": …}               → MachineFacts as a mapping
    {"ask": "place", "model": …, "revision": …, "names": …}      → {"folder": where a copied model goes}
    {"ask": "link", "backend": …, "variables": …, "files": …}    → LinkSpeed as a mapping, as this rank measured it
    any of them                                                  → {"error": a sentence}

The answer begins with MARKER, since a shell's startup files may write to the same stream. The process ends when its
stdin does, also in a sum that waits for a rank that will never come.
"""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
from pydantic import TypeAdapter

from backend.config.config import Config
from backend.distributed.commands import (
    CONNECT_S,
    free_port,
    mlx_environment,
    mlx_files,
    mpirun,
    program_environment,
    rank_program,
    ssh_command,
)
from backend.distributed.hosts_file import (
    AUTO,
    BackendChoice,
    Host,
    HostsFile,
    choose_backend,
    first_host_problem,
    read_hosts,
)
from backend.distributed.machine_report import (
    COPY_LIMIT,
    GRADIENT_BYTES,
    RESERVE,
    CheckedMachine,
    LinkSpeed,
    MachineFacts,
    MachineFinding,
    MachineReport,
    findings_of,
)
from backend.utils.child_process import CHILD_VERB, ChildEnded, ChildProcess, ChildTimeout, claim_stdout, json_line
from backend.utils.command import backend_environment, is_bundled
from backend.utils.disk import require_room, room_on
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import is_file, is_folder, is_folder_name, user_path, write_all
from backend.utils.hub_cache import hub_cache, local_folder, own_file, repo_cache, split_revision
from backend.utils.machine import has_gpu, machine_bytes, processor
from backend.utils.places import project_root
from backend.utils.text import quote

FACTS_S = 45.0  # seconds for a machine to answer
LINK_S = 45.0  # seconds for a measurement; Wi-Fi takes 20
GRACE_S = 2.0
DEVICES_S = 5.0
OF_SSH = 255  # ssh's own exit code
MARKER = "grpo-studio "
CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
LATENCY_SUMS = 21
SMALL_BYTES = 1_000_000  # of the first large sum
SLOW_S = 1.0
_SSH_HINTS = {
    "Permission denied": "refuses your key. Put it there with: ssh-copy-id {ssh}",
    "Host key verification failed": "is not known to ssh yet. Connect once by hand: ssh {ssh}",
    "Connection refused": "accepts no ssh. Turn on Remote Login there (System Settings, General, Sharing).",
    "timed out": "does not answer. It may be asleep, switched off, or on another network.",
}
"""ssh's words → rest of a sentence."""
_UNPACK = 'mkdir -p "$1" && tar -xf - -C "$1" && mv "$1/$2.part" "$1/$2"'  # unpacks a model; config.json comes last

Stage = Literal["reading", "read", "copying", "measuring"]


@dataclass(frozen=True, slots=True)
class Wanted:
    backend: str = AUTO  # the setting `distributed_backend`
    model: str = ""
    reward_file: str = ""
    copies: bool = False


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """Receives the progress of a check, from several threads."""

    reached: Callable[[int, Stage, float | None], None] = lambda rank, stage, share: None
    """(rank, stage, share of a copy)."""
    check: Callable[[], None] = lambda: None  # raises to give up


def check_machines(
    hosts: HostsFile, name: str, wanted: Wanted, progress: CheckProgress = CheckProgress(), *, measures: bool = True
) -> MachineReport:
    """The whole check, or all of it but the link. `name`: the hosts file's. Raises what `progress.check` raises."""
    report = _read_facts(hosts, wanted, progress)
    if wanted.copies and report.without_model:
        lacking = {hosts.hosts[rank].ssh: rank for rank in reversed(report.without_model)}
        for rank in sorted(lacking.values()):  # one after the other: they share this machine's connection
            copy_model(wanted.model, hosts, rank, progress)
        report = _read_facts(hosts, wanted, progress)
    problem, here = first_host_problem(hosts, name), report.machines[0].facts
    problems = [problem] if problem else []
    try:
        has_mpi = here is not None and here.has_mpi
        report.backend = choose_backend(hosts, wanted.backend, has_mpi=has_mpi, has_cuda=has_cuda()).backend
        if measures and not problems and len(hosts.hosts) > 1 and all(each.facts for each in report.machines):
            report.link = _link_speed(report, hosts, progress)
    except UserError as error:
        problems += error.faults
    model = wanted.model
    is_hub_id = bool(model) and not is_folder(user_path(model, "model")) and not Path(model).is_absolute()
    report.findings = [
        *(MachineFinding("refuse", None, each.sentence) for each in problems),
        *findings_of(report, model, is_hub_id),
    ]
    return report


def require_machines(hosts: HostsFile, name: str, wanted: Wanted) -> list[str]:
    """Check every machine before a run. → warnings for the event log. Raises UserError with everything that would keep
    the run from starting."""
    report = check_machines(hosts, name, wanted, measures=False)
    if report.refusals:
        sentences = dict.fromkeys(finding.sentence for finding in report.refusals)
        raise UserError([ConfigProblem("hosts", sentence) for sentence in sentences])
    return [finding.sentence for finding in report.findings if finding.level == "warn"]


def plan_machines(config: Config) -> tuple[HostsFile, BackendChoice]:
    """The machines of a run in rank order, and their backend, without contacting any. Raises UserError."""
    file = Path(config.hosts)
    hosts = read_hosts(file)
    if problem := first_host_problem(hosts, file.name):
        raise UserError([problem])
    choice = choose_backend(hosts, config.distributed_backend, has_mpi=mpirun() is not None, has_cuda=has_cuda())
    if choice.backend == "mpi":  # the entries of each machine together, as mpirun numbers its ranks
        places = ["" if hosts.is_here(rank) else host.ssh for rank, host in enumerate(hosts.hosts)]
        order = sorted(range(len(places)), key=lambda rank: places.index(places[rank]))
        hosts = replace(hosts, hosts=tuple(hosts.hosts[rank] for rank in order))
    return hosts, choice


def require_one_machine(config: Config, what: str) -> None:
    """Raise UserError where a hosts file is set; `what` begins the sentence."""
    if config.hosts:
        raise UserError("hosts", f"{what} trains on this machine alone; take the hosts file out of the settings.")


def _read_facts(hosts: HostsFile, wanted: Wanted, progress: CheckProgress) -> MachineReport:
    report, ranks_of = MachineReport(), dict[str, list[CheckedMachine]]()
    for rank, host in enumerate(hosts.hosts):
        address, is_here = host.ips[0] if host.ips else "", hosts.is_here(rank)
        report.machines.append(CheckedMachine(rank, host.ssh, hosts.label(rank), address, is_here))
        ranks_of.setdefault("" if is_here else host.ssh, []).append(report.machines[-1])
    request = {"ask": "facts", "model": wanted.model, "reward_file": wanted.reward_file}

    def read(machines: list[CheckedMachine]) -> None:
        for machine in machines:
            progress.reached(machine.rank, "reading", None)
        found, problem = None, ""
        if machines[0].is_here:
            found = facts(wanted.model, wanted.reward_file)
        else:
            try:
                answer = _ask(hosts, machines[0].rank, request, FACTS_S, progress.check)
                found = TypeAdapter(MachineFacts).validate_python(answer)
            except UserError as error:
                problem = error.faults[0].sentence
        for machine in machines:
            machine.facts, machine.problem = found, problem
            progress.reached(machine.rank, "read", None)

    with ThreadPoolExecutor(len(ranks_of), "machine") as threads:
        list(threads.map(read, ranks_of.values()))
    return report


def _ask(hosts: HostsFile, rank: int, request: dict[str, Any], timeout_s: float, poll: Callable[[], None]) -> Any:
    host, is_here = hosts.hosts[rank], hosts.is_here(rank)
    name = "This machine" if is_here else quote(host.ssh, 40)
    program, variables = rank_program(host, CHILD_VERB, "backend.distributed.machine_check"), program_environment(host)
    command = program if is_here else ssh_command(host, program, variables)
    environment = backend_environment() if is_here else dict(os.environ)
    child = ChildProcess(command, grace_s=GRACE_S, environment=environment, marker=MARKER)
    try:
        answer = child.request(request, timeout_s, poll)
        why = f"reports: {quote(answer['error'], 120)}" if "error" in answer else ""
    except ChildTimeout:
        why = f"has not answered for {timeout_s:.0f} s."
    except ChildEnded as ended:
        why = _why(ended, host, is_here)
    except (json.JSONDecodeError, OSError) as error:
        why = f"could not be asked: {quote(error)}."
    finally:
        child.stop()
    if why:
        raise UserError("hosts", f"{name} {why}")
    return answer


def _why(ended: ChildEnded, host: Host, is_here: bool) -> str:
    last = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.exit_code}"]
    if ended.exit_code == OF_SSH and not is_here:
        hints = (rest.format(ssh=host.ssh) for words, rest in _SSH_HINTS.items() if words in ended.stderr)
        return next(hints, f"was not reached within {CONNECT_S} s: {quote(last[0], 100)}.")
    if ended.exit_code in (126, 127):  # the shell's, for a program that cannot be run, or is not there
        missing = quote(host.program, 80) if host.program else "Python where this machine has its own"
        return f"has no {missing}. Install GRPO Studio there, or name its program in the hosts file."
    if "No module named" in ended.stderr or "No such command" in ended.stderr:
        return "has no GRPO Studio, or an older one. Name its program or folder in the hosts file."
    return f"could not start GRPO Studio: {quote(last[0], 110)}."


def _link_speed(report: MachineReport, hosts: HostsFile, progress: CheckProgress) -> LinkSpeed | None:
    backend, ranks = report.backend, list(range(len(hosts.hosts)))
    if backend == "mpi":
        ranks = [0, next((each.rank for each in report.machines if not each.is_here), 1)]
        backend, hosts = "ring", HostsFile(tuple(hosts.hosts[rank] for rank in ranks))
        if not all(host.ips for host in hosts.hosts):
            return None
    port = free_port(hosts)
    speeds, problems = list[LinkSpeed](), list[str]()

    def poll() -> None:
        progress.check()
        if problems:
            raise UserError("hosts", "Another rank has failed, so this one's answer would never come.")

    def measure(rank: int) -> None:
        progress.reached(ranks[rank], "measuring", None)
        variables, files = mlx_environment(hosts, backend, rank, port)
        request = {"ask": "link", "backend": backend, "variables": variables, "files": files}
        try:
            speeds.append(LinkSpeed(**_ask(hosts, rank, request, LINK_S, poll)))
        except UserError as error:
            problems.append(error.faults[0].sentence)

    with ThreadPoolExecutor(len(ranks), "machine") as threads:
        list(threads.map(measure, range(len(ranks))))
    if problems:
        advice = "A firewall may be between them, or an address in the hosts file wrong."
        raise UserError("hosts", f"The machines could not sum over {backend}. {problems[0]} {advice}")
    if (found := min(speed.ranks for speed in speeds)) != len(ranks):
        raise UserError("hosts", f"Only {found} of {len(ranks)} ranks have found each other over {backend}.")
    slowest = min(speed.bytes_per_second for speed in speeds)
    return LinkSpeed(max(speed.latency_s for speed in speeds), slowest, len(ranks))


def copy_model(model: str, hosts: HostsFile, rank: int, progress: CheckProgress = CheckProgress()) -> None:
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
    revision = "" if is_folder(user_path(model, "model")) else folder.name  # of a snapshot in the cache
    try:
        request = {"ask": "place", "model": model, "revision": revision, "names": [*files], "bytes": total}
        place = _ask(hosts, rank, request, FACTS_S, progress.check)["folder"]
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
        progress.check()
        write_all(stdin, data)
        sent += len(data)
        progress.reached(rank, "copying", min(sent / total, 1.0))

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
    """On a machine that is checked: answer one request."""
    out = claim_stdout()
    request = json.loads(sys.stdin.buffer.readline())

    def end_with_stdin() -> None:
        sys.stdin.buffer.read()
        os._exit(0)  # the main thread may be in a call that never returns

    threading.Thread(target=end_with_stdin, daemon=True).start()
    try:
        if request["ask"] == "facts":
            answer = asdict(facts(request["model"], request["reward_file"]))
        elif request["ask"] == "place":
            answer = {"folder": str(place(request["model"], request["revision"], request["names"], request["bytes"]))}
        else:
            answer = asdict(measure(request["backend"], request["variables"], request["files"]))
    except UserError as error:
        answer = {"error": error.faults[0].sentence}
    except Exception as error:  # whatever mlx, the network or a disk raises is the check's finding
        answer = {"error": f"{type(error).__name__}: {error}"}
    out.write(MARKER + json_line(answer))
    out.flush()
    return 0


def facts(model: str = "", reward_file: str = "") -> MachineFacts:
    """About this machine. Loads no mlx, and takes a fraction of a second."""
    memory, room, macos = psutil.virtual_memory(), room_on(hub_cache()), platform.mac_ver()[0]
    folder = local_folder(model) if model else None
    files = model_files(model) if model else {}
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
        model=digest_of(folder, files) if folder and files else "",
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


def measure(backend: str, variables: dict[str, str], files: dict[str, str]) -> LinkSpeed:
    """Measure sums on the CPU's stream, as a run sums gradients; every rank calls it at the same time. Raises
    RuntimeError."""
    os.environ |= variables
    with mlx_files(files):
        import mlx.core as mx

        group = mx.distributed.init(backend=backend.removesuffix("-ring"), strict=True)

    def sum_s(values: int) -> float:
        array = mx.ones(values)
        mx.eval(array)
        began = time.perf_counter()
        mx.eval(mx.distributed.all_sum(array, group=group, stream=mx.cpu))
        return time.perf_counter() - began

    sum_s(1)  # the first one connects
    latency = statistics.median(sum_s(1) for _ in range(LATENCY_SUMS))
    size = SMALL_BYTES
    # All ranks must take the same branch, so the slowest of them decides.
    first: Any = mx.distributed.all_max(mx.array([sum_s(size // 4)]), group=group, stream=mx.cpu).item()
    seconds: float = first
    if seconds < SLOW_S:
        size = GRADIENT_BYTES
        seconds = min(sum_s(size // 4) for _ in range(3))
    return LinkSpeed(latency, size / seconds, group.size())


def model_files(model: str) -> dict[str, int]:
    """Relative name → bytes of a model's files, hidden ones left out; empty if it is not on this machine."""
    if (folder := local_folder(model)) is None:
        return {}
    paths = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    found = {
        name.as_posix(): path.stat().st_size
        for name, path in paths.items()
        if not any(part.startswith(".") for part in name.parts)
    }
    is_model = "config.json" in found and any(name.endswith(".safetensors") for name in found)
    return found if is_model else {}


def digest_of(folder: Path, files: dict[str, int]) -> str:
    """Digest of names, sizes and config.json, to compare machines without reading weights."""
    others = ("config.json", "tokenizer.json")
    compared = [pair for pair in files.items() if pair[0].endswith(".safetensors") or pair[0] in others]
    return sha256(repr(compared).encode() + (folder / "config.json").read_bytes()).hexdigest()[:16]


def place(model: str, revision: str, names: list[str], size: int) -> Path:
    """The folder for a copied model of `size` bytes. Raises UserError without room, or where it would overwrite
    anything."""
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
