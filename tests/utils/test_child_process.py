"""The protocol of all child processes: one answer for each request, a new child after one died, and no printed text
among the answers."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator

import pytest

from backend.utils.child_process import ChildEnded, ChildProcess, ChildTimeout

CHILD = """
import os, sys, time
from backend.utils import child_process
out = child_process.claim_stdout()
for request in child_process.requests():
    if request == "print":
        print("printed by Python")
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


def test_a_child_that_died_is_reported_with_its_exit_code_and_stderr_and_replaced(child: ChildProcess) -> None:
    first, _ = child.request(1)
    with pytest.raises(ChildEnded, match="exit code 3:\nlast words") as caught:
        child.request("die")
    assert (caught.value.exit_code, caught.value.stderr) == (3, "last words") and not child.is_started
    second, answer = child.request(2)
    assert second != first and answer == 2


def test_a_request_that_times_out_kills_the_child_so_that_its_answer_cannot_answer_the_next(
    child: ChildProcess,
) -> None:
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


def test_more_than_a_pipe_holds_goes_through_in_both_directions_and_on_stderr() -> None:
    code = "from backend.utils import child_process\nout = child_process.claim_stdout()\nfor x in child_process.requests(): print(x); child_process.answer(out, x)"
    child = ChildProcess([sys.executable, "-c", code], grace_s=0.5)
    text = "x" * 1_000_000
    assert child.request(text) == text
    child.stop()
