"""Run model-written programs confined, in parallel and with time limits.

A server forks a process per program, which reads its source from the socket and forks for each task. Programs never see
each other or expected values.

Request: {"number", "tasks", "seconds", "memory_mb", "deadline_s"}; answer: [number, [{"ended": "exit" | "time" |
"output" | "limit", "code", "output"}], error] for the tasks that ran. A task is {"source", "input"}, judged by output,
or {"source", "setup", "tests"}, judged by the reports that its tests write to descriptor `REPORTS`. A program could
forge those, so `backend.rewards.functions.code` verifies them. `seconds` of CPU time per task, twice that on the clock
for all; "limit": `deadline_s` are over.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import numbers
import operator
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from backend.rewards.confinement import confine
from backend.utils.child_process import module_command
from backend.utils.command import backend_environment
from backend.utils.files import reason, remove_tree, walk

PRELOADED = ("bisect", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing")  # before forking
REPORTS = 3
CONFINED = b"+"  # comes before a program's output; else why it cannot be confined, and it is not run
MOST_OUTPUT = 256 << 10  # maximum bytes of a task's output or reports
MOST_FOLDER = 16 << 20  # maximum bytes in a program's folder, of which each file takes at least `_BLOCK`
MOST_DEPTH = 500  # maximum characters of a path in it
MOST_HASHED = 4096  # maximum elements of a set or dict, against hash collisions
LARGEST_FILE = 1 << 20
MOST_FILES = 64
FAILED = 1  # exit code of a program that raised
_GRACE_S = 5.0  # seconds past the deadline to wait for an answer
_POLL_S = 0.02
_FOLDER_POLL_S = 0.2
_BLOCK = 4096
_RESERVED = 1 << 30  # bytes of address space that libraries reserve and do not use
_MODULE = "solution"  # module name for imports, as in `from solution import add`
_TAGS: dict[str, Any] = {"l": list, "t": tuple, "s": (set, frozenset), "d": dict}
_KINDS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "d": dict}

OBSERVE, OBSERVE_PAIR = "__observe__", "__observe_pair__"  # get (number, value) and (number, operator, left, right)

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Is": operator.is_,
    "IsNot": operator.is_not,
    "In": lambda a, b: a in b,
    "NotIn": lambda a, b: a not in b,
}

Task = Mapping[str, Any]
TaskResult = Mapping[str, Any]


class ProgramRunner:
    """The server, started on first use. `run` is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: Connection[Any, Any] | None = None

    def run(
        self, programs: Sequence[Sequence[Task]], *, seconds: float, memory_mb: int, deadline_s: float
    ) -> list[list[TaskResult]]:
        """Each program's results of completed tasks; none if the server was lost. Raises RuntimeError if none runs."""
        deadline = time.monotonic() + deadline_s
        with self._lock:
            try:
                server = self._socket or self._start()
                results: list[list[TaskResult]] = [[] for _ in programs]
                waiting = deque(number for number, tasks in enumerate(programs) if tasks)
                processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
                running = 0
                while True:
                    while waiting and running < processors and (left := deadline - time.monotonic()) > 0:
                        number = waiting.popleft()
                        limits = {"seconds": seconds, "memory_mb": memory_mb, "deadline_s": left}
                        server.send_bytes(json.dumps({"number": number, "tasks": programs[number], **limits}).encode())
                        running += 1
                    if not running:
                        return results
                    if not server.poll(max(deadline + _GRACE_S - time.monotonic(), 0)):
                        raise TimeoutError
                    number, results[number], error = json.loads(server.recv_bytes())
                    if error:
                        self.close()
                        raise RuntimeError(error)
                    running -= 1
            except (OSError, EOFError):
                self.close()
                return [[] for _ in programs]

    def _start(self) -> Connection[Any, Any]:
        self._socket, theirs = Pipe()
        with theirs:
            self._server = subprocess.Popen(
                module_command("backend.rewards.programs"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # One thread: each has a stack, and programs run in parallel.
                env=backend_environment(confine.without_secrets(os.environ)) | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return self._socket

    def close(self) -> None:
        server, socket = self._server, self._socket
        self._server = self._socket = None
        if server is not None and socket is not None:
            socket.close()
            try:
                server.wait(1.0)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


runner = ProgramRunner()
atexit.register(runner.close)


def main(arguments: Sequence[str] = ()) -> None:
    confine.readable_by_programs()  # before the forks need it, as the module of the confinement
    for name in (*PRELOADED, *(["backend.rewards.confinement.linux"] if sys.platform == "linux" else [])):
        import_module(name)
    socket = Connection(os.dup(0))
    folder, _ = confine.make_working_folder()
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
        server, is_open, lock = os.getpid(), True, os.open(folder / "lock", os.O_CREAT | os.O_WRONLY)
        while is_open:
            socket.poll(None)
            taken, taking = os.pipe()
            if os.fork() == 0:
                with suppress(BaseException):
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    request = json.loads(socket.recv_bytes())
                    os.write(taking, b"-")
                    os.close(taking)
                    results, error = [], ""
                    try:
                        results = _run_tasks(request, Path(tempfile.mkdtemp(dir=folder)), server)
                    except NotConfinedError as refusal:
                        error = f"programs cannot be kept from your files here: {refusal}"
                    except OSError as failure:
                        error = f"programs cannot be run: {reason(failure)}"
                    fcntl.lockf(lock, fcntl.LOCK_EX)  # one answer at a time
                    socket.send_bytes(json.dumps([request["number"], results, error]).encode())
                os._exit(0)
            os.close(taking)
            is_open = bool(os.read(taken, 1))  # the fork has taken its request off the socket
            os.close(taken)
    finally:
        remove_tree(folder)


class NotConfinedError(Exception):
    """Why a program was not run."""


def _run_tasks(request: Mapping[str, Any], folder: Path, server: int) -> list[TaskResult]:
    begun = time.monotonic()
    deadline = begun + request["deadline_s"]
    until = min(begun + 2 * request["seconds"], deadline)
    results: list[TaskResult] = []
    for task in request["tasks"]:
        folder.mkdir(exist_ok=True)
        result = _run_task(task, folder, request, until, server)
        remove_tree(folder)
        if result["ended"] == "time" and until >= deadline and time.monotonic() >= deadline:
            result["ended"] = "limit"
        results.append(result)
        if result["ended"] != "exit" or time.monotonic() >= deadline:
            break
    return results


def _run_task(task: Task, folder: Path, limits: Mapping[str, Any], until: float, server: int) -> dict[str, Any]:
    output, its_output = os.pipe()
    parent = os.getpid()
    with tempfile.TemporaryFile() as entered:
        entered.write(task.get("input", "").encode(errors="replace"))
        entered.seek(0)
        pid = os.fork()
        if pid == 0:
            _become_program(task, folder, limits, entered.fileno(), its_output, parent)
    os.close(its_output)
    with suppress(OSError):  # the fork does the same: whoever is first
        os.setpgid(pid, pid)
    received, ended, code, looked, is_open = bytearray(), "", None, time.monotonic(), True
    while code is None or is_open:
        done, status = os.waitpid(pid, os.WNOHANG) if code is None else (0, 0)
        if done:
            code = os.waitstatus_to_exitcode(status)
            with suppress(ProcessLookupError, PermissionError):  # of its group, where forks cannot be refused
                os.killpg(pid, signal.SIGKILL)
        if not is_open:
            time.sleep(0.001)
        elif select.select([output], [], [], 0 if done else _POLL_S)[0]:
            piece = os.read(output, 1 << 16)
            received += piece
            is_open = bool(piece) and len(received) <= MOST_OUTPUT
        elif code is not None:
            is_open = False  # a process outside of its group holds the pipe
        now = time.monotonic()
        why = "output" if len(received) > MOST_OUTPUT else "time" if now >= until else ""
        if not why and now - looked > _FOLDER_POLL_S:
            looked = now
            with suppress(OSError):
                size, longest = 0, len(str(folder)) + MOST_DEPTH
                for entry in walk(folder):
                    size += max(entry.stat(follow_symlinks=False).st_blocks * 512, _BLOCK)
                    if size > MOST_FOLDER or len(entry.path) > longest:
                        why = "output"
                        break
        is_lost = os.getppid() != server
        if code is None and (is_lost or (why and not ended)):
            ended = why
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        if is_lost:
            os._exit(1)
    os.close(output)
    if received and not received.startswith(CONFINED):
        raise NotConfinedError(received.decode())
    if code in (-signal.SIGXCPU, -signal.SIGKILL):  # of the limit on its processor time
        ended = ended or "time"
    if len(received) > MOST_OUTPUT:
        ended = "output"
    output_text = received.removeprefix(CONFINED).decode(errors="replace")
    return {"ended": ended or "exit", "code": code, "output": output_text}


def _become_program(
    task: Task, folder: Path, limits: Mapping[str, Any], entered: int, output: int, parent: int
) -> NoReturn:
    """Run a program in this fork of `parent`, with its limits on top of Python's memory, and exit."""
    code = FAILED
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            from backend.rewards.confinement.linux import end_with_parent

            end_with_parent(parent)
        nowhere = os.open(os.devnull, os.O_RDWR)
        places = [entered, nowhere, nowhere, output] if "tests" in task else [entered, output, nowhere]
        # Above all places first: any of them may be one of the places.
        for place, file in enumerate([fcntl.fcntl(file, fcntl.F_DUPFD, 16) for file in places]):
            os.dup2(file, place, inheritable=False)
        os.closerange(len(places), 1 << 12)
        os.chdir(folder)
        memory_bytes = limits["memory_mb"] << 20
        memory = {resource.RLIMIT_DATA: memory_bytes}
        if sys.platform == "linux":  # shared memory is no data
            with open("/proc/self/statm") as sizes:
                taken = int(sizes.read().split()[0]) * resource.getpagesize()
            memory[resource.RLIMIT_AS] = taken + memory_bytes + _RESERVED
        refusal = confine.confine_program(folder)
        os.write(REPORTS if "tests" in task else 1, refusal.encode() or CONFINED)
        if refusal:
            os._exit(FAILED)
        confine.set_limits(
            memory
            | {
                resource.RLIMIT_CPU: max(1, round(limits["seconds"] + 0.5)),
                resource.RLIMIT_FSIZE: LARGEST_FILE,
                resource.RLIMIT_NOFILE: MOST_FILES,
                resource.RLIMIT_CORE: 0,
            }
        )
        # An empty main module in an interpreter that looks fresh.
        module = ModuleType("__main__")
        sys.modules["__main__"] = sys.modules[_MODULE] = module
        sys.argv = [f"{_MODULE}.py"]
        for name in [name for name in sys.modules if name.partition(".")[0] == "backend"]:
            del sys.modules[name]
        sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        if "tests" in task:
            _run_tests(task, module)
        else:
            _execute(task["source"], module)
        code = 0
    except SystemExit as end:
        code = 0 if end.code in (None, 0) else FAILED
    except BaseException:  # of the program, which is judged by its exit code alone
        pass
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def _execute(source: str, module: ModuleType) -> None:
    exec(compile(source, f"{_MODULE}.py", "exec", dont_inherit=True), vars(module))


def _run_tests(task: Task, module: ModuleType) -> None:
    write, dumps = os.write, json.dumps  # before the program can replace them
    current = 0

    def report(*fields: Any) -> None:
        line = memoryview(f"{dumps(fields)}\n".encode())
        while line:
            line = line[write(REPORTS, line) :]

    def claim(value: Any) -> dict[str, Any]:
        try:
            return {"value": encoded(value)}
        except (NotPlainError, RecursionError):
            return {}

    def observe(number: int, value: Any) -> None:
        report(current, number, claim(value))

    def observe_pair(number: int, name: str, left: Any, right: Any) -> None:
        claims = claim(left), claim(right)
        if all(claims):
            report(current, number, {"value": ["t", *(each["value"] for each in claims)]})
        else:
            report(current, number, {} if any(claims) else {"truth": bool(OPERATORS[name](left, right))})

    def entry(name: str) -> Any:
        found = getattr(module, name, None)
        return found if found is not None else getattr(module.Solution(), name)

    with suppress(SystemExit):  # a program may end itself where it is the main one
        _execute(task["source"], module)
    vars(module).update({OBSERVE: observe, OBSERVE_PAIR: observe_pair, "__entry__": entry})
    _execute(task["setup"], module)
    for current, test in enumerate(task["tests"]):
        with suppress(Exception):
            _execute(test, module)
            report(current)


class NotPlainError(ValueError):
    """Not a plain value."""


def encoded(value: Any) -> Any:
    """A plain value as JSON, of built-in types. Raises NotPlainError, RecursionError."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    for tag, kinds in _TAGS.items():
        if isinstance(value, kinds):
            return [tag, *map(encoded, value.items() if tag == "d" else value)]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 0):
        return encoded(value.item())
    if isinstance(value, numbers.Number):  # a Fraction or Decimal
        return float(value)  # pyright: ignore[reportArgumentType]
    raise NotPlainError(type(value).__name__)


def decoded(value: Any) -> Any:
    """Inverse of `encoded`. Raises NotPlainError, RecursionError."""
    if not isinstance(value, list | dict):
        return value
    try:
        tag, *parts = value
        if tag == "b":
            return bytes.fromhex(parts[0])
        if tag == "c":
            return complex(*map(float, parts))
        if tag in ("s", "d") and len(parts) > MOST_HASHED:
            raise NotPlainError("too many elements")
        return _KINDS[tag](map(decoded, parts))
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise NotPlainError(str(error)) from None


if __name__ == "__main__":
    main()
