"""Load reward functions and call each once per step, over all groups.

A function that raises, hangs or returns invalid scores stops the run; it never counts as 0.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import linecache
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backend.rewards.calls import (
    AsyncCall,
    Caller,
    CallFailedError,
    CallTimeoutError,
    InvalidScoresError,
    Poll,
    Scores,
    read_scores,
    timeout_words,
    wait_on,
)
from backend.rewards.catalogue import locate_reward_file, nearest
from backend.rewards.errors import Failure, LoadError, class_name, describe_error, failure_room
from backend.rewards.inputs import ExtraLogs, Sample, TrainerState, inputs_for
from backend.rewards.registry import FunctionDescription
from backend.rewards.resolve import RewardFunction, resolve
from backend.rewards.user_files import RewardFile, stand_in_library
from backend.types import Group
from backend.utils.errors import UserError

LONGEST_PRINTED = 2000
"""Characters of printed output in the bench, from its end."""
_ROW_WORDS = 90
"""Characters for a row's problem."""


@dataclass(frozen=True, slots=True)
class RewardSource:
    """Source of functions: entries by stage, `reward_functions_file`, base folder, and executed files."""

    stages: Sequence[Sequence[str]]
    file: Path | None
    base: Path
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Functions by stage, and messages about missing confinement."""

    stages: list[list[FunctionDescription]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scored:
    """`scores` and `seconds` by function; empty after a failure."""

    scores: list[Scores] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    printed: str = ""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Mapped rows, None to drop one; or the failure at `failed_row` (−1 if unknown); or the available names."""

    rows: list[dict[str, Any] | None] = field(default_factory=list)
    failure: str = ""
    failed_row: int = -1
    known: list[str] | None = None


class _FunctionError(Exception):
    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class FunctionHost:
    """Functions of runs by key, called in this process by `caller`."""

    generation = 1
    """Process counter of a `RewardWorker`; constant here."""

    def __init__(self, caller: Caller, notes: Sequence[str] = ()) -> None:
        self._caller, self._notes = caller, list(notes)
        self._stages: dict[int, list[list[RewardFunction]]] = {}
        self._files: dict[int, RewardFile | None] = {}

    def start(self) -> None:
        pass

    def release(self, key: int) -> None:
        pass

    def load(self, key: int, source: RewardSource, timeout_s: float, poll: Poll = wait_on) -> Loaded:
        """Execute the files of `source` once each. Raises LoadError."""
        linecache.checkcache()
        executed: dict[Path, RewardFile] = {}
        try:
            stages = self._resolved(source, executed)
        except UserError as error:
            named = source.file or (source.files[0] if len(source.files) == 1 else None)
            raise LoadError(error.faults, Failure.of(error.faults[0].sentence, error.__cause__, named)) from error
        self._stages[key] = stages
        self._files[key] = executed.get(locate_reward_file(source.file).resolve()) if source.file else None
        return Loaded([[function.description for function in stage] for stage in stages], self._notes)

    def _resolved(self, source: RewardSource, executed: dict[Path, RewardFile]) -> list[list[RewardFunction]]:
        return [resolve(names, source.file, source.base, executed) for names in source.stages]

    def score(
        self,
        key: int,
        stage: int,
        indices: Sequence[int],
        groups: Sequence[Group],
        timeout_s: float,
        state: TrainerState,
        captures: bool = False,
        poll: Poll = wait_on,
    ) -> Scored:
        """Score functions of a stage; errors become `failure`. `captures`: return printed output."""
        functions = [self._stages[key][stage][index] for index in indices]
        self._caller.poll = poll
        printed = io.StringIO()  # Python's prints only; what C code writes to descriptor 1 goes to the log
        with contextlib.ExitStack() as stack:
            if captures:
                stack.enter_context(contextlib.redirect_stdout(printed))
                stack.enter_context(contextlib.redirect_stderr(printed))
            step = _Step(
                functions, samples_of(groups), timeout_s, replace(state, reward_timeout=timeout_s), self._caller
            )
            try:
                outcomes = step.outcomes()
            except _FunctionError as error:
                return Scored(failure=error.failure, printed=printed.getvalue()[-LONGEST_PRINTED:])
        return Scored(
            [scores for scores, _ in outcomes],
            [seconds for _, seconds in outcomes],
            step.logs.columns,
            step.logs.metrics,
            printed=printed.getvalue()[-LONGEST_PRINTED:],
        )

    def map_rows(
        self, key: int, function: str, rows: Sequence[dict[str, Any]], timeout_s: float, poll: Poll = wait_on
    ) -> Mapped:
        """Apply a map function to dataset rows."""
        file = self._files.get(key)
        call = file.map_functions.get(function) if file else None
        if file is None or call is None:
            return Mapped(known=list(file.map_functions) if file else [])
        self._caller.poll = poll
        try:
            with stand_in_library(file.functions):
                return Mapped(
                    self._caller.call(0, timeout_s, lambda: map_each(call, rows, file.path), lambda rows: rows)
                )
        except CallTimeoutError:
            return Mapped(failure=timeout_words(timeout_s))
        except CallFailedError as failed:
            if isinstance(failed.__cause__, RowError):
                return Mapped(failure=failed.__cause__.what, failed_row=failed.__cause__.index)
            raise failed.__cause__ or failed from None

    def close(self) -> None:
        """Close the event loop."""
        self._caller.close()


class _Step:
    """Functions over one step's samples."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        samples: list[Sample],
        timeout_s: float,
        state: TrainerState,
        caller: Caller,
    ) -> None:
        self._functions, self._samples, self._timeout_s, self._state = functions, samples, timeout_s, state
        self._caller = caller
        self.logs = ExtraLogs()

    def outcomes(self) -> list[tuple[Scores, float]]:
        """Scores and seconds by function, async ones last and concurrently. Raises _FunctionError."""
        found: dict[int, tuple[Scores, float]] = {}
        concurrent: list[AsyncCall] = []
        try:
            for index, function in enumerate(self._functions):
                kwargs = self._kwargs(index)
                work = functools.partial(function.call, **kwargs)
                if function.is_async:
                    concurrent.append((index, work, self._read))
                    continue
                start = time.perf_counter()
                with _stand_in_libraries([function]):
                    scores = self._caller.call(index, self._timeout_s, work, self._read)
                found[index] = scores, time.perf_counter() - start
            if concurrent:
                with _stand_in_libraries(self._functions[index] for index, _, _ in concurrent):
                    results = self._caller.gather(self._timeout_s, concurrent)
                found |= {index: result for (index, _, _), result in zip(concurrent, results, strict=True)}
        except CallTimeoutError as error:
            raise _FunctionError(self._failure(error.index, timeout_words(self._timeout_s), is_timeout=True)) from None
        except CallFailedError as failed:
            assert failed.__cause__ is not None
            raise _FunctionError(self._raised(failed.index, failed.__cause__)) from failed.__cause__
        for index, function in enumerate(self._functions):
            if wrong := self.logs.length_error(function.name, len(self._samples)):
                raise _FunctionError(self._failure(index, wrong))
        return [found[index] for index in range(len(self._functions))]

    def _read(self, returned: Any) -> Scores:
        return read_scores(returned, len(self._samples))

    def _kwargs(self, index: int) -> dict[str, Any]:
        function = self._functions[index]
        inputs = inputs_for(self._samples, self._state, function.dialect) | self.logs.loggers_for(function.name)
        for name in function.arguments.missing(inputs):
            close = nearest(name, inputs)
            hint = f"; the nearest is {close}" if close else ""
            what = f"asks for {name}, which is neither an input of reward functions nor a column of the dataset{hint}"
            raise _FunctionError(self._failure(index, what))
        return function.call_kwargs(inputs)

    def _raised(self, index: int, error: BaseException) -> Failure:
        if isinstance(error, InvalidScoresError):
            return self._failure(index, f"returned {error}", completion=error.index)
        function = self._functions[index]
        room = failure_room(function.description, self._samples[0], has_line=True) - len("raised ")
        what = f"raised {describe_error(error, function.file, room)}"
        return Failure.of(what, error, function.file, function.line, function=index, has_line=True)

    def _failure(self, index: int, what: str, **fields: Any) -> Failure:
        function = self._functions[index]
        return Failure.of(what, None, function.file, function.line, function=index, **fields)


def _stand_in_libraries(functions: Iterable[RewardFunction]) -> ExitStack:
    """Stand-in mlx_lm_lora during calls, with the file's own functions."""
    stack = ExitStack()
    files = {id(function.user_file): function.user_file for function in functions if function.user_file}
    for user_file in files.values():
        stack.enter_context(stand_in_library(user_file.functions))
    return stack


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """Every completion with its problem, in group order."""
    return [(group.problem, completion) for group in groups for completion in group.completions]


def total_reward(scores: Iterable[float | None], weights: Iterable[float]) -> float | None:
    """Σ w·score over the scores that are not None; None if all are."""
    weighted = [w * x for w, x in zip(weights, scores, strict=True) if x is not None]
    return sum(weighted) if weighted else None


class RowError(Exception):
    """A map function failed on the row at this index; `what` completes the message."""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(what)
        self.index, self.what = index, what


def map_each(
    call: Callable[[dict[str, Any]], Any], rows: Sequence[dict[str, Any]], file: Path | None
) -> list[dict[str, Any] | None]:
    """Map each row; None drops one.

    Results must be JSON; dates and the like become text. Raises RowError.
    """
    mapped: list[dict[str, Any] | None] = []
    for index, row in enumerate(rows):
        try:
            returned = call(copy.deepcopy(row))
        except Exception as error:
            raise RowError(index, f"raised {describe_error(error, file, _ROW_WORDS)}") from error
        if returned is not None and not isinstance(returned, dict):
            raise RowError(index, f"returned {class_name(returned)}, not a dict of columns or None")
        if returned is not None and (not returned or not all(isinstance(name, str) for name in returned)):
            raise RowError(index, "returned a dict whose keys are not all names of columns")
        try:
            mapped.append(json.loads(json.dumps(returned, allow_nan=False, default=str)))
        except Exception:  # NaN, a circle, or an object whose text raises
            raise RowError(index, "returned a row with a value that JSON cannot hold") from None
    return mapped
