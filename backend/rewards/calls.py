"""Call sync and async user code, validate its scores, and describe its errors. In-process calls (`reward_isolation:
thread`) run in threads that CPython interrupts, which cannot stop C code holding the GIL."""

from __future__ import annotations

import asyncio
import ctypes
import math
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.rewards.registry import FunctionDescription, Scores
from backend.types import Completion, Problem
from backend.utils.command import is_bundled
from backend.utils.errors import LONGEST_TRACEBACK, ConfigProblem, UserError, user_traceback
from backend.utils.text import SENTENCE, cut_in_the_middle, one_line, quote

Poll = Callable[[], None]  # called repeatedly while user code runs; raising cancels the wait

LARGEST = 1e30  # largest absolute score; float32 sums of squares overflow beyond it
_CANCEL_S = 0.1  # seconds for async calls to end after their cancellation
_ASYNC_GRACE_S = 0.3  # seconds past the limit before async calls that hold up the event loop are interrupted
_POLL_S = 0.05
_INTERRUPT_FOR_S = 1.0  # seconds to interrupt a thread before abandoning it
LONGEST_ERROR = 150
_MOST_FRAMES = 100
_NAME, _FILE, _TEXT = 40, 24, 40  # characters of a name, a file's name, and a prompt or completion in a message
_BUNDLED_MODULES = "; not in the app: use grpo-studio from pip"


@dataclass(eq=False)
class Failure(Exception):
    """Failure of user code. `what`: words after the function's name, with a line if it `raised`; `function`,
    `completion`: indices in the call, the latter None if none is to blame; `hung`: it took longer than its limit;
    `line`: innermost line of `file`, or 0; `frames`: {"line", "function", "code"} of its lines on the stack, outermost
    first; `problems`: (setting, message) of what cannot be loaded."""

    what: str
    function: int = 0
    completion: int | None = None
    raised: bool = False
    hung: bool = False
    file: str = ""
    line: int = 0
    frames: Sequence[dict[str, Any]] = ()
    traceback: str = ""
    printed: str = ""
    problems: Sequence[tuple[str, str]] = ()

    @classmethod
    def of_hang(cls, seconds: float, function: int, stack: str = "", file: Path | None = None) -> Failure:
        """The function hung at `stack`, outermost frame first, which begins in its file."""
        own = stack[max(stack.find(f'  File "{file}"'), 0) :]
        what = f"was still running after {seconds:g} s (reward_timeout)"
        return cls(what, function, hung=True, traceback=printable(own[-LONGEST_TRACEBACK:]))

    def located(self, error: BaseException | None, file: Path | None) -> Failure:
        """This failure, with the place in `file` where its cause was raised."""
        self.file = str(file or "")
        for frame in traceback.extract_tb(error.__traceback__) if error and file else ():
            # Skips a comprehension on the same line.
            if frame.filename == self.file and not (frame.name[:1] == "<" and frame.lineno == self.line):
                self.line = frame.lineno or 0
                code = (frame.line or "").strip()[:500]
                self.frames = [*self.frames, {"line": self.line, "function": frame.name, "code": code}][-_MOST_FRAMES:]
        if isinstance(error, SyntaxError) and file and not self.frames:
            self.line = error.lineno or 0
        self.traceback = user_traceback(error, file) if error else ""
        return self


class RewardError(UserError):
    """User code, or a model that scores, failed while it was loaded or called."""

    def __init__(self, failure: Failure, *problems: tuple[str, str]) -> None:
        """`problems`: setting and sentence of each."""
        super().__init__(ConfigProblem(*problem, failure.traceback) for problem in problems)
        self.failure = failure

    @property
    def place(self) -> dict[str, Any]:
        """The message, and where in the user's file it failed, as JSON."""
        where = {key: getattr(self.failure, key) for key in ("file", "line", "frames", "traceback")}
        return {"sentence": self.faults[0].sentence, **where}

    @classmethod
    def of_call(
        cls, function: FunctionDescription, failure: Failure, samples: Sequence[tuple[Problem, Completion]]
    ) -> RewardError:
        """The failure of a call with these completions."""
        file = f" of {cut_in_the_middle(one_line(function.file.name), _NAME)}" if function.file else ""
        line = f", line {function.line}," if function.line and not failure.raised else ""
        before, after = f"The reward function {quote(function.name, _NAME)}{file}{line} ", "."
        if failure.completion is not None:
            problem, completion = samples[failure.completion]
            prompt, text = quote(problem.prompt, _TEXT), quote(completion.text, _TEXT)
            after = f", on the prompt “{prompt}” and the completion “{text}”."
        what = cut_in_the_middle(one_line(failure.what), max(SENTENCE - len(before) - len(after), 2 * _TEXT))
        return cls(failure, ("reward_functions", f"{before}{what}{after}"))


def text_of(value: object, text: Callable[[object], str] = str) -> str:
    """`str(value)`, or `repr`, even if the object's method raises."""
    try:
        return text(value)
    except BaseException:
        return "(its text cannot be read)"


def class_name(value: object, limit: int = _NAME) -> str:
    return quote(type(value).__name__, limit)


def describe_error(error: BaseException, file: Path | None, limit: int = LONGEST_ERROR) -> str:
    """`ValueError: message (my_rewards.py, line 12)` in about `limit` characters."""
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if frame.filename == str(file)]
    location = ""
    if file and not in_file:
        location = f" ({cut_in_the_middle(one_line(file.name), _FILE)})"
    elif frames:
        frame = (in_file or frames)[-1]
        location = f" ({cut_in_the_middle(one_line(Path(frame.filename).name), _FILE)}, line {frame.lineno})"
    name = class_name(error, max(min(_NAME, limit - len(location)), 8))
    missing = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(missing, str) and missing and not Path(missing).is_absolute():
        message = f"no {quote(missing, 40)} in its working folder; see Path(__file__).parent"
    else:
        message = text_of(error)
    room = limit - len(name) - len(": ") - len(location)
    message = quote(message, room).rstrip(".") if room > 0 else ""
    advice = _BUNDLED_MODULES if isinstance(error, ModuleNotFoundError) and is_bundled() else ""
    return f"{name}{': ' if message else ''}{message}{location}{advice}"


def printable(text: str) -> str:
    """Text for a log, without control characters."""
    return "".join(char if char.isprintable() or char in "\n\t" else " " for char in text)


def wait_on() -> None:
    """A poll that never cancels."""


class _Interrupted(BaseException):
    """Raised in a call after its time limit. No Exception: user code does not catch it."""


def read_scores(returned: Any, count: int) -> Scores:
    """`count` finite numbers or None, from any iterable or array. Raises Failure."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        kind = "None" if returned is None else class_name(returned)
        raise Failure(f"returned {kind} where a list of {count} scores was expected")
    values = list(values)
    if len(values) != count:
        raise Failure(f"returned {len(values):,} score{'s' * (len(values) != 1)} for {count:,} completions")
    return [None if value is None else _score(value, index) for index, value in enumerate(values)]


def _score(value: Any, index: int) -> float:
    try:
        # Bools and any library's scalars have `__float__`. Text has not: "1" stays no number.
        number = float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError):
        number = None
    except OverflowError:
        number = math.inf
    if number is None:
        text = quote(text_of(value, repr), 40)
        raise Failure(f"returned {text} ({class_name(value, 20)}) as a score, which is not a number", completion=index)
    if not math.isfinite(number):
        raise Failure(f"returned {number} as a score, which is not a finite number", completion=index)
    if abs(number) > LARGEST:
        raise Failure(f"returned {number:g} as a score, which is too large for 32 bits", completion=index)
    return number


class Caller:
    """Calls user code in this thread, without a limit unless it is async. Raises Failure. Calls `mark(index)` before a
    function, and when another of those awaited together has ended, and `mark(-1)` after it. Of those awaited together,
    one that blocks after an await may be taken for another. `functions`: those called, by index."""

    def __init__(self, mark: Callable[[int], None] = lambda index: None) -> None:
        self.poll: Poll = wait_on
        self.functions: Sequence[FunctionDescription] = (FunctionDescription(""),)
        self._report = mark
        self._running = -1
        self._runner: asyncio.Runner | None = None

    def call(self, index: int, seconds: float, work: Callable[[], Any]) -> Any:
        """`work()`, for function `index`."""
        self._mark(index)
        value = self._limited(seconds, work)
        self._mark(-1)
        return value

    def gather(self, seconds: float, calls: Mapping[int, Awaitable[Any]]) -> dict[int, tuple[Any, float]]:
        """(value, seconds) of concurrent calls; the first failure cancels all. The event loop persists between steps,
        since open connections belong to it."""
        results: dict[int, tuple[Any, float]] = {}
        failures: list[Failure] = []

        async def run_one(index: int, awaitable: Awaitable[Any]) -> None:
            self._mark(index)
            start = time.perf_counter()
            try:
                results[index] = await awaitable, time.perf_counter() - start
            except GeneratorExit:
                raise  # the loop was abandoned
            except BaseException as error:
                failures.append(self._failure(index, error))
            self._mark(next((other for other in calls if other not in results), index))

        async def run_all() -> None:
            pending = {asyncio.ensure_future(run_one(*call)) for call in calls.items()}
            end = time.monotonic() + seconds
            while pending and not failures:
                left = end - time.monotonic()
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    stack, waits = "", calls[self._running]  # where it waits, outermost frame first
                    while frame := getattr(waits, "cr_frame", None):
                        stack += "".join(traceback.format_stack(frame))
                        waits = getattr(waits, "cr_await", None)
                    file = self.functions[self._running].file
                    failures.append(Failure.of_hang(seconds, self._running, stack, file))
            for task in pending:
                task.cancel()
            if pending:  # those that ignore their cancellation are left behind
                await asyncio.wait(pending, timeout=_CANCEL_S)

        self._runner, runner = None, self._runner or asyncio.Runner()
        self._mark(min(calls))
        self._limited(seconds, lambda: runner.run(run_all()), _ASYNC_GRACE_S)
        if failures:
            raise failures[0]
        self._runner = runner
        self._mark(-1)
        return results

    def _mark(self, index: int) -> None:
        self._running = index
        self._report(index)

    def close(self) -> None:
        """Cancel what still runs on the event loop, and close it."""
        with suppress(BaseException):  # user code decides what a cancellation raises
            if self._runner:
                self._runner.close()

    def _failure(self, index: int, error: BaseException) -> Failure:
        """The Failure of function `index`, from what it raised or returned."""
        file = self.functions[index].file
        if isinstance(error, Failure):
            return replace(error, function=index).located(error.__cause__, file)
        return Failure(f"raised {describe_error(error, file)}", index, raised=True).located(error, file)

    def _limited(self, seconds: float, work: Callable[[], Any], grace_s: float = 0.0) -> Any:
        try:
            return work()
        except BaseException as error:
            raise self._failure(self._running, error) from error


class ThreadCaller(Caller):
    """Calls user code in threads, interrupted at the limit or when `poll` raises."""

    runs_on = False  # the thread of a call that hung could not be interrupted

    def _limited(self, seconds: float, work: Callable[[], Any], grace_s: float = 0.0) -> Any:
        outcome: dict[str, Any] = {}

        def run() -> None:
            with suppress(_Interrupted):  # a second interrupt, while the handler stores the first
                try:
                    outcome["value"] = work()
                except BaseException as error:
                    outcome["error"] = error

        # A daemon thread: one that cannot be interrupted must not keep the process from ending.
        thread = threading.Thread(target=run, name="reward function", daemon=True)
        deadline, stack = time.monotonic() + seconds + grace_s, ""
        thread.start()
        try:
            while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                thread.join(min(left, _POLL_S))
                if thread.is_alive():
                    self.poll()
        finally:
            # The exception is only pending until the thread's next bytecode, and a bare `except:` may swallow it.
            until = time.monotonic() + _INTERRUPT_FOR_S
            was_interrupted = thread.is_alive()
            hung = self._running
            if frame := sys._current_frames().get(thread.ident or 0):
                stack = "".join(traceback.format_stack(frame))
            while thread.is_alive() and time.monotonic() < until:
                interrupt = ctypes.py_object(_Interrupted)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), interrupt)
                thread.join(_POLL_S)
        if was_interrupted:
            self.runs_on = thread.is_alive()
            raise Failure.of_hang(seconds, hung, stack, self.functions[hung].file)
        if error := outcome.get("error"):
            raise self._failure(self._running, error) from error
        return outcome["value"]
