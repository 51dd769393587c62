"""The protocol of all child processes: one answer for each request, a new child after one died, and no printed text
among the answers."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator

import pytest

from backend.utils import places
from backend.utils.child_process import ChildEnded, ChildProcess, ChildTimeout, module_command
from backend.utils.command import backend_command, backend_environment

CHILD = """
import os, sys, time
from backend.utils import child_process
out = child_process.claim_stdout()
for request in child_process.requests():
    if str(request).startswith("print"):
        print(request)
        os.write(1, b"printed by C\\n")
    if request == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if request == "hang":
        time.sleep(60)
    child_process.answer(out, [os.getpid(), request])
"""


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    process = ChildProcess([sys.executable, "-c", CHILD], grace_s=0.5)
    yield process
    process.stop()


def test_prints_of_python_and_c_never_become_answers(child: ChildProcess) -> None:
    assert child.request("print") == [child.pid, "print"]
    assert child.request({"a": "ä\n\ud800", "b": math.nan}) == [child.pid, {"a": "ä\n?", "b": None}]


def test_more_than_a_pipe_holds_goes_through_in_both_directions_and_on_stderr(child: ChildProcess) -> None:
    text = "print" + "x" * 1_000_000
    assert child.request(text) == [child.pid, text]


def test_a_child_that_died_is_reported_with_its_exit_code_and_stderr_and_replaced(child: ChildProcess) -> None:
    first, _ = child.request(1)
    with pytest.raises(ChildEnded, match="exit code 3:\nlast words") as caught:
        child.request("die")
    assert (caught.value.exit_code, caught.value.stderr) == (3, "last words") and not child.is_started
    second, answer = child.request(2)
    assert second != first and answer == 2


def test_a_request_that_times_out_kills_the_child(child: ChildProcess) -> None:
    child.request(1)
    with pytest.raises(ChildTimeout):
        child.request("hang", timeout_s=0.1)
    assert not child.is_started and child.request(2)[1] == 2


def test_poll_may_give_up_on_a_request(child: ChildProcess) -> None:
    """Ctrl-C and cancelled questions raise from `poll`."""
    child.request(1)
    calls: list[float] = []

    def poll() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.request("hang", poll=poll)
    assert not child.is_started and child.request(2)[1] == 2


def test_a_child_ends_by_itself_when_its_stdin_is_closed(child: ChildProcess) -> None:
    child.request(1)
    assert child.stop() == 0 and child.pid is None
    assert child.stop() == 0, "twice does no harm"


def test_a_bundled_app_starts_the_trainers_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_command("train", "--run", "a b") == [sys.executable, "-P", "-m", "backend", "train", "--run", "a b"]
    assert module_command("backend.some.module") == [sys.executable, "-P", "-m", "backend.some.module"]
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    for program in ("grpo-studio", "grpo-studio-backend"):  # from the window, and from the trainer itself
        monkeypatch.setattr(sys, "executable", f"/opt/GRPO Studio/{program}")
        assert backend_command("train", "x") == ["/opt/GRPO Studio/grpo-studio-backend", "train", "x"]
        assert module_command("backend.a")[1:] == ["child", "backend.a"]
    assert backend_environment({"HOME": "/h"}) == {"HOME": "/h"}, "a program of the user's must not import our packages"


def test_the_environment_puts_our_packages_first() -> None:
    root = str(places.project_root())
    assert backend_environment({})["PYTHONPATH"] == root
    environment = backend_environment({"PYTHONPATH": "/theirs", "HOME": "/h"})
    assert environment["PYTHONPATH"] == f"{root}{os.pathsep}/theirs" and environment["HOME"] == "/h"
    assert environment["PYTHONUNBUFFERED"] == "1" and environment["PYTHONIOENCODING"] == "utf-8"
