"""The functions' calls over one step's completions: inputs, the call itself, scores read from what it returned.

How a call is limited in time is its caller's: threads in this process (`backend.rewards.runner.timeout`), or nothing at all in
the scoring process, which its parent kills (`backend.rewards.sandbox`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

from backend.rewards.catalogue.catalog import nearest
from backend.rewards.mlx_lm_lora_shim import stand_in_library
from backend.rewards.resolve import RewardFunction
from backend.rewards.runner.error_text import class_name, describe_error, text_of, traceback_text
from backend.rewards.runner.extra_logs import ExtraLogs
from backend.rewards.runner.inputs import Sample, TrainerState, inputs_for
from backend.rewards.runner.reward_errors import failure_room
from backend.utils.text import quote

# Convert a reward function's return value to scores: lists, tuples, generators and arrays of any library.

Scores = list[float | None]
LARGEST = 1e30
"""The largest score, either way: advantages are in float32, whose squares and sums of what is larger are infinite."""


class InvalidScores(Exception):
    """The return value cannot be used as scores; `index` is the first completion where this shows."""

    def __init__(self, what: str, index: int = 0) -> None:
        super().__init__(what)
        self.index = index


def read_scores(returned: Any, count: int) -> Scores:
    """`count` finite numbers or None. Raises InvalidScores."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        kind = "None" if returned is None else class_name(returned)
        raise InvalidScores(f"{kind} where a list of {count} scores was expected")
    values = list(values)
    if len(values) != count:
        raise InvalidScores(f"{len(values):,} scores for {count:,} completions")
    return [_score(value, index) for index, value in enumerate(values)]


def _score(value: Any, index: int) -> float | None:
    if value is None:
        return None
    number = _as_float(value)
    if number is None:
        raise InvalidScores(
            f"{quote(text_of(value, repr), 40)} ({class_name(value, 20)}) as a score, which is not a number",
            index,
        )
    if not math.isfinite(number):
        raise InvalidScores(f"{number} as a score, which is not a finite number", index)
    if abs(number) > LARGEST:
        raise InvalidScores(f"{number:g} as a score, which is too large for 32 bits", index)
    return number


def _as_float(value: Any) -> float | None:
    """Bools and any library's scalars have `__float__`. Text has not: `"1"` stays no number."""
    try:
        return float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.inf


# ── step calls ───────────────────────────────────────────────────────────────────────────────────────────────────────

LEAST_S = 0.1
"""Seconds that are left for the text of an exception that was raised at the last moment."""
Outcome = tuple[Scores, float]
"""Scores, and the seconds that they took."""
AsyncCall = tuple[Callable[[], Awaitable[Any]], Callable[[Any], Any]]
"""A call that returns an awaitable, and a function that reads the value it gives."""


Poll = Callable[[], None]
"""Called again and again while a user's code is waited for; what it raises ends the wait."""


def wait_on() -> None:
    """The poll of a caller who never gives up."""


class CallTimeout(Exception):
    """The call had not returned in time; of several, `index` is the first that had not."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index


class CallFailed(Exception):
    """The call raised `__cause__`, which may be a SystemExit too; of several calls, `index` did."""

    def __init__(self, cause: BaseException, index: int = 0) -> None:
        super().__init__()
        self.__cause__ = cause
        self.index = index


class Caller(Protocol):
    """Runs a user's code. Both methods raise CallTimeout and CallFailed."""

    def call(self, index: int, seconds: float, work: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        """`read(work())`, with an awaitable that `work` returns awaited first. `index`: of the function in the step."""
        ...

    def gather(self, indices: Sequence[int], seconds: float, calls: Sequence[AsyncCall]) -> list[tuple[Any, float]]:
        """(value read, seconds taken) of each call, all awaited concurrently in one event loop that lasts from step to step. Each
        has `seconds` of its own, and the first that fails ends them all. The index of what is raised is one into `calls`."""
        ...


class FunctionFailed(Exception):
    """A function failed: the words after its name in a sentence, the completion to show, whether the words name a line. `__cause__` is
    the exception of the user's code, if there was one."""

    def __init__(
        self, function: int, what: str, completion: int = 0, *, has_line: bool = False, is_timeout: bool = False
    ) -> None:
        super().__init__(what)
        self.function, self.what, self.completion = function, what, completion
        self.has_line, self.is_timeout = has_line, is_timeout
        self.traceback = ""


def timeout_words(seconds: float) -> str:
    """The words for a function that did not return in time."""
    return f"was still running after {seconds:g} s (reward_timeout)"


class ScoringStep:
    """One step: `functions` over `samples`. `logs` holds what they have logged."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        samples: list[Sample],
        timeout_s: float,
        state: TrainerState,
        caller: Caller,
    ) -> None:
        self.functions, self.samples = functions, samples
        self.timeout_s, self.state, self.caller = timeout_s, replace(state, reward_timeout=timeout_s), caller
        self.logs = ExtraLogs()

    def outcomes(self) -> list[Outcome]:
        """Of each function; those that are async are called last, together. Raises FunctionFailed."""
        of_index = {index: self._call(index) for index, function in enumerate(self.functions) if not function.is_async}
        concurrent = [index for index, function in enumerate(self.functions) if function.is_async]
        if concurrent:
            of_index |= zip(concurrent, self._gather(concurrent), strict=True)
        for index, function in enumerate(self.functions):
            if wrong_length := self.logs.length_error(function.name, len(self.samples)):
                raise FunctionFailed(index, wrong_length)
        return [of_index[index] for index in range(len(self.functions))]

    def _call(self, index: int) -> Outcome:
        function, kwargs = self.functions[index], self._kwargs(index)
        start = time.perf_counter()
        try:
            with _stand_in_libraries([function]):
                scores = self.caller.call(index, self.timeout_s, lambda: function.call(**kwargs), self._read)
        except (CallTimeout, CallFailed) as failure:
            raise self._failure(index, failure, start) from failure.__cause__
        return scores, time.perf_counter() - start

    def _gather(self, indices: list[int]) -> list[Outcome]:
        with_kwargs = [(self.functions[index].call, self._kwargs(index)) for index in indices]
        # Defaults bind the loop's variables now; a plain closure would call the last function each time.
        calls = [((lambda call=call, kwargs=kwargs: call(**kwargs)), self._read) for call, kwargs in with_kwargs]
        start = time.perf_counter()
        try:
            with _stand_in_libraries(self.functions[index] for index in indices):
                return self.caller.gather(indices, self.timeout_s, calls)
        except (CallTimeout, CallFailed) as failure:
            raise self._failure(indices[failure.index], failure, start) from failure.__cause__

    def _read(self, returned: Any) -> Scores:
        return read_scores(returned, len(self.samples))

    def _kwargs(self, index: int) -> dict[str, Any]:
        function = self.functions[index]
        inputs = inputs_for(self.samples, self.state, function.dialect) | self.logs.loggers_for(function.name)
        for name in function.arguments.missing(inputs):
            raise FunctionFailed(index, f"asks for {name}, which is {_unknown_input(name, inputs)}")
        return function.call_kwargs(inputs)

    def _failure(self, index: int, failure: CallTimeout | CallFailed, start: float) -> FunctionFailed:
        cause = failure.__cause__
        if isinstance(failure, CallTimeout) or cause is None:
            return FunctionFailed(index, timeout_words(self.timeout_s), is_timeout=True)
        if isinstance(cause, InvalidScores):
            return FunctionFailed(index, f"returned {cause}", cause.index)
        return self._raised(index, cause, start)

    def _raised(self, index: int, cause: BaseException, start: float) -> FunctionFailed:
        """The words for an exception. They are read within the time limit of the call, which began at `start`: the text of an
        exception is the user's code too, and may hang."""
        function = self.functions[index]
        room = failure_room(function.description, self.samples[0], has_line=True) - len("raised ")
        seconds = max(self.timeout_s - (time.perf_counter() - start), LEAST_S)
        try:
            words, traceback = self.caller.call(
                index,
                seconds,
                lambda: (describe_error(cause, function.file, room), traceback_text(cause, function.file)),
                lambda both: both,
            )
        except CallTimeout:
            return FunctionFailed(index, timeout_words(self.timeout_s), is_timeout=True)
        except CallFailed:
            words, traceback = "an exception that cannot be described", ""
        failed = FunctionFailed(index, f"raised {words}", has_line=True)
        failed.traceback = traceback
        return failed


def _stand_in_libraries(functions: Iterable[RewardFunction]) -> ExitStack:
    """The stand-in for mlx_lm_lora that user code may import while it is called, with its file's own functions."""
    stack = ExitStack()
    files = {id(function.user_file): function.user_file for function in functions if function.user_file}
    for user_file in files.values():
        stack.enter_context(stand_in_library(user_file.functions))
    return stack


def _unknown_input(name: str, inputs: Iterable[str]) -> str:
    close = nearest(name, inputs)
    hint = f"; the nearest is {close}" if close else ""
    return f"neither an input of reward functions nor a column of the dataset{hint}"
