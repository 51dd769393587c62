"""Ask a scoring process: one request at a time, with limits that hold whatever a user's code does.

A process that does not answer in time, ends, or answers anything but what it was asked for is killed with all that it started, and
the next request starts another. Several scorers may share one process (the runs of a sweep): each loads its functions under a key.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from backend.rewards.runner.step_calls import timeout_words
from backend.rewards.sandbox.answers import Untrusted, read_answer
from backend.rewards.sandbox.child import ScoringChild
from backend.rewards.sandbox.wire import (
    FIRST_ASYNC,
    FIRST_CALL,
    IDLE,
    LONGEST_ANSWER,
    LOST_CHANNEL,
    SPOILED,
    request_bytes,
)
from backend.spec.faults import Mistake

POLL_S = 0.05
"""How often a waiting parent looks at the shared page and calls `poll`."""
START_S = 60.0
"""How long our own code may take in the process: to start Python, to import, to read a request. On a busy machine, seconds."""
SILENT = f"gave no answer for {START_S:.0f} s and more, as if its process had been stopped"
"""The words for a process that does nothing, outside any call."""
ASYNC_GRACE_S = 0.2
"""How long after their limit async calls may take to be cancelled by their own loop, which knows which of them was late."""
EXIT_S = 1.0
"""How long a process may take to end by itself at the end of a run: a user's `atexit` may write a file."""
_EXIT_CODE_S = 0.5
"""How long after the end of its answers a process may take to exit; one that still runs then has closed the pipe."""

_SIGNALS = {
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGBUS: "a bus error",
    signal.SIGABRT: "an abort",
    signal.SIGKILL: "killed, by itself or by the system when memory runs out",
    signal.SIGXCPU: "out of processor time",
    signal.SIGILL: "an illegal instruction",
    signal.SIGFPE: "a floating-point exception",
}


class ChildFailed(Exception):
    """The process gave no answer, and is gone. `what` are the words after the name of what it was at, which `mark` says."""

    def __init__(self, what: str, mark: int) -> None:
        super().__init__(what)
        self.what, self.mark = what, mark

    def function(self, count: int) -> int:
        """The index of the function that it was at, among `count`; the first where it is not known."""
        index = self.mark - (FIRST_ASYNC if self.mark >= FIRST_ASYNC else FIRST_CALL)
        return index if 0 <= index < count else 0


class ScoringProcess:
    """Where user code is scored. `generation` counts the processes that there were: functions that were loaded into an earlier one
    are gone."""

    def __init__(self, network: bool = False) -> None:
        """`network`: whether its functions may use it (`reward_network`)."""
        self.network = network
        self.generation = 0
        self.lock = threading.RLock()
        """Held over a request and what belongs to it."""
        self._child: ScoringChild | None = None
        self._number = 0
        self._keys = 0
        self._in_use: set[int] = set()

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        return self._child.pid if self._child else None

    def new_key(self) -> int:
        """A key that no other scorer of this process has."""
        self._keys += 1
        return self._keys

    def hold(self, key: int) -> None:
        """The scorer of this key uses the process, until `release`."""
        self._in_use.add(key)

    def start(self) -> None:
        """Start a process if there is none, without waiting for it. Raises Mistake."""
        with self.lock:
            if self._child is None:
                try:
                    self._child = ScoringChild(self.network)
                except OSError as error:
                    sentence = f"The process of the reward functions cannot be started: {error.strerror or error}."
                    raise Mistake("reward_isolation", sentence) from error
                self.generation += 1

    def request(
        self, request: dict[str, Any], limit_s: float, calls: int = 1, poll: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Send a request and wait for its answer, which is still unchecked but for its number. `limit_s`: of each of `calls` calls. `poll`
        may raise to give up. Raises ChildFailed, what `poll` raises, and Mistake for a column that cannot be sent; the process is
        gone then."""
        with self.lock:
            self.start()
            self._number += 1
            try:
                self._send({**request, "id": self._number})
                return read_answer(self._receive(limit_s, calls, poll), self._number)
            except Untrusted:
                self.reject()
            except BaseException:
                # The answer to this request must not be taken for that to the next one.
                self.stop()
                raise

    def reject(self) -> NoReturn:
        """The last answer was not what was asked for: end the process. Raises ChildFailed."""
        mark = self._child.page.mark if self._child else IDLE
        self.stop()
        raise ChildFailed("wrote something of its own into the pipe by which scores are returned", mark)

    def stop(self, grace_s: float = 0.0) -> None:
        """End the process and all that it has started, if there is one."""
        with self.lock:
            child, self._child = self._child, None
            if child is not None:
                child.end(grace_s)

    def release(self, key: int, grace_s: float = 0.0) -> None:
        """The scorer of this key is done; with the last one the process ends."""
        with self.lock:
            self._in_use.discard(key)
            if not self._in_use:
                self.stop(grace_s)

    # ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, request: dict[str, Any]) -> None:
        child = self._child
        assert child is not None
        if _ready(child.answers, selectors.EVENT_READ, 0.0) and child.exit_code() is None:
            raise Untrusted  # something that nobody asked for
        child.output.next_request()
        try:
            rest = memoryview(request_bytes(request))
        except Exception as error:  # whatever the type of an object in the row raises
            sentence = f"A column holds what cannot be handed to reward functions: {type(error).__name__}."
            raise Mistake("data", sentence) from error
        deadline = time.monotonic() + START_S
        try:
            while rest:
                if _ready(child.requests, selectors.EVENT_WRITE, POLL_S):
                    rest = rest[os.write(child.requests, rest) :]
                elif time.monotonic() > deadline:
                    raise ChildFailed("kept its process from reading the next completions", IDLE)
        except BrokenPipeError:
            pass  # receiving finds how the process has ended

    def _receive(self, limit_s: float, calls: int, poll: Callable[[], None]) -> bytes:
        child = self._child
        assert child is not None
        received, watch = bytearray(), _Watch(limit_s, calls)
        while not received.endswith(b"\n"):
            poll()
            if _ready(child.answers, selectors.EVENT_READ, watch.patience()):
                piece = os.read(child.answers, 1 << 20)
                if not piece:
                    raise self._ended(child)
                received += piece
                if b"\n" in piece[:-1]:
                    raise Untrusted
                if len(received) > LONGEST_ANSWER:
                    raise ChildFailed(f"returned more than {LONGEST_ANSWER >> 20} MB", child.page.mark)
            elif child.exit_code() is not None:  # a process that it has started may hold the pipe open
                raise self._ended(child)
            else:
                watch.look(child.page.mark)
        return bytes(received)

    def _ended(self, child: ScoringChild) -> ChildFailed:
        code, mark = child.exit_code(_EXIT_CODE_S), child.page.mark
        if code is None or code == LOST_CHANNEL:
            return ChildFailed("closed or replaced the pipe by which scores are returned", mark)
        if code == SPOILED:
            return ChildFailed("left Python in a state in which its process could not go on", mark)
        return ChildFailed(f"ended the process it ran in ({describe_exit(code)})", mark)


class _Watch:
    """Follows the mark of the shared page. A user's code could write it too, so beyond the limit of each call there is one of all
    `calls` together."""

    def __init__(self, limit_s: float, calls: int) -> None:
        self._limit_s = limit_s
        self._mark = IDLE
        self._since = time.monotonic()
        self._end = self._since + START_S + (limit_s + ASYNC_GRACE_S) * calls

    @property
    def _deadline(self) -> float:
        """When the time for what the process is at is up."""
        if self._mark == IDLE:
            limit_s = max(START_S, self._limit_s)
        else:
            limit_s = self._limit_s + (ASYNC_GRACE_S if self._mark >= FIRST_ASYNC else 0.0)
        return min(self._since + limit_s, self._end)

    def patience(self) -> float:
        """Seconds until the next look: no limit is overstepped by more than a moment."""
        return max(min(POLL_S, self._deadline - time.monotonic()), 0.001)

    def look(self, mark: int) -> None:
        """Raises ChildFailed once a limit is over."""
        # The limits of calls that are awaited together begin together; what follows them is the text of one's exception.
        if mark != self._mark and (self._mark < FIRST_ASYNC or mark == IDLE):
            self._since = time.monotonic()
        self._mark = mark
        if time.monotonic() >= self._deadline:
            raise ChildFailed(SILENT if mark == IDLE else timeout_words(self._limit_s), mark)


def describe_exit(code: int) -> str:
    """`exit code 3`, or `signal 11, a segmentation fault` for the negative code of a signal."""
    if code >= 0:
        return f"exit code {code}"
    known = next((words for number, words in _SIGNALS.items() if number == -code), "")
    return f"signal {-code}{f', {known}' if known else ''}"


def _ready(file: int, event: int, wait_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(file, event)
        return bool(selector.select(wait_s))
