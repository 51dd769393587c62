"""The guard leaves nobody behind, however its worker or its parent ends, and ends as its worker did."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backend.utils.command import backend_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has no subreaper")

CHILD = """
import os, signal, sys, time
from pathlib import Path
from backend.rewards.confinement.confine import confine
from backend.rewards.confinement.guard import guard
guard(0)
folder = Path(sys.argv[1])
confine([folder], False, [])
print("ready", flush=True)
def note(name):
    # A process's number as others see it, which need not be its own.
    (folder / name).write_text(os.readlink("/proc/self"))
def daemon(name):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            note(name)
            time.sleep(60)
        os._exit(0)
    while not (folder / name).exists() or not (folder / name).read_text():
        time.sleep(0.005)
note("worker")
"""


def start(folder: Path, code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD + code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env=backend_environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def noted(folder: Path, name: str) -> int:
    """The process that wrote its number there."""
    deadline = time.monotonic() + 10
    while not (folder / name).exists() or not (folder / name).read_text():
        assert time.monotonic() < deadline, f"{name} did not start"
        time.sleep(0.005)
    return int((folder / name).read_text())


def is_alive(pid: int) -> bool:
    """Whether it runs; one that ended and waits for init to collect it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(0)", 0),
        ("os._exit(3)", 3),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
    ],
)
def test_it_ends_as_the_worker_did_and_leaves_no_daemon(tmp_path: Path, code: str, expected: int) -> None:
    process = start(tmp_path, f"daemon('one'); daemon('two'); {code}")
    assert process.wait(10) == expected
    assert not [name for name in ("worker", "one", "two") if is_alive(noted(tmp_path, name))]


@pytest.mark.parametrize("how", ["stdin is closed", "SIGTERM"])
def test_a_worker_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, how: str) -> None:
    process = start(tmp_path, "daemon('one'); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    pids = [noted(tmp_path, name) for name in ("worker", "one")]
    assert process.stdin is not None
    process.terminate() if how == "SIGTERM" else process.stdin.close()
    assert process.wait(5) == -signal.SIGKILL
    assert not [pid for pid in pids if is_alive(pid)]


def test_all_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    """The parent of the child is a process of ours, which gets SIGKILL."""
    child = CHILD + "daemon('one'); time.sleep(60)"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], "
            "stdin=subprocess.PIPE)\nprint(p.pid, flush=True)\ntime.sleep(60)",
            child,
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        env=backend_environment(),
    )
    assert parent.stdout is not None
    guard = int(parent.stdout.readline())
    pids = [guard, noted(tmp_path, "worker"), noted(tmp_path, "one")]
    parent.kill()
    parent.wait()
    wait_until_gone(*pids)


def test_the_worker_ends_with_a_guard_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "time.sleep(60)")
    worker = noted(tmp_path, "worker")
    process.kill()
    process.wait()
    wait_until_gone(worker)
