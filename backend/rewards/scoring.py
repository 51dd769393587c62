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
from typing import Any, ClassVar

from backend.rewards.calls import (
    AsyncCall,
    Caller,
    CallError,
    InvalidScoresError,
    Poll,
    Scores,
    read_scores,
    timeout_words,
    wait_on,
)
from backend.rewards.catalogue import locate_reward_file, nearest
from backend.rewards.errors import Failure, class_name, describe_error, failure_room
from backend.rewards.inputs import ExtraLogs, Sample, TrainerState, inputs_for
from backend.rewards.registry import FunctionDescription
from backend.rewards.resolve import RewardFunction, resolve
from backend.rewards.user_files import RewardFile, stand_in_library
from backend.types import Completion, Group
from backend.utils.errors import UserError

LONGEST_PRINTED = 2000  # characters of printed output in the bench, from its end
_ROW_WORDS = 90  # characters for a row's problem


@dataclass(frozen=True, slots=True)
class RewardSource:
    """Source of functions: entries by stage, `reward_functions_file`, base folder, and executed files."""

    stages: Sequence[Sequence[str]]
    file: Path | None
    base: Path
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Functions by stage, and messages about missing confinement; or `problems` (setting, message) and a failure."""

    stages: list[list[FunctionDescription]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    failure: Failure | None = None


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


# Requests to a host. `calls`: user calls, each with a limit of `timeout_s`; `lost`: the answer after the worker's end;
# `fits`: checks an answer of the worker against the request.


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Execute the files of `source` once each; its functions are used by `key`."""

    key: int
    source: RewardSource
    timeout_s: float
    answer: ClassVar[type[Loaded]] = Loaded

    @property
    def calls(self) -> int:
        return max(1, len(self.source.files))

    def lost(self, what: str, index: int) -> Loaded:
        file = self.source.file or next(iter(self.source.files), None)
        sentence = f"{file.name if file else 'The process that scores'} {what} while it was being loaded."
        setting = "reward_functions_file" if self.source.file else "reward_functions"
        return Loaded(problems=[(setting, sentence)], failure=Failure(sentence, file=str(file or "")))

    def fits(self, loaded: Loaded) -> bool:
        return bool(loaded.failure) or [len(s) for s in loaded.stages] == [len(s) for s in self.source.stages]


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score functions `indices` of a stage. `captures`: return printed output."""

    key: int
    stage: int
    indices: Sequence[int]
    groups: Sequence[Group]
    timeout_s: float
    state: TrainerState
    captures: bool = False
    answer: ClassVar[type[Scored]] = Scored

    @property
    def calls(self) -> int:
        return len(self.indices)

    def lost(self, what: str, index: int) -> Scored:
        return Scored(failure=Failure(what, min(index, len(self.indices) - 1)))

    def fits(self, scored: Scored) -> bool:
        count = sum(len(group.completions) for group in self.groups)
        if scored.failure is not None:
            return scored.failure.function < len(self.indices) and scored.failure.completion < count
        columns = (*scored.scores, *scored.columns.values())
        return len(scored.scores) == len(self.indices) and all(len(column) == count for column in columns)

    def slim(self) -> ScoreRequest:
        """Without what reward functions do not get, such as log-probabilities."""
        groups = [
            Group(
                replace(group.problem, tokens=[], row=dict(group.problem.row)),
                [Completion(completion.tokens, [], completion.text, "eos") for completion in group.completions],
            )
            for group in self.groups
        ]
        return replace(self, groups=groups)


@dataclass(frozen=True, slots=True)
class MapRequest:
    """Apply a map function to dataset rows."""

    key: int
    function: str
    rows: Sequence[dict[str, Any]]
    timeout_s: float
    calls: ClassVar[int] = 1
    answer: ClassVar[type[Mapped]] = Mapped

    def lost(self, what: str, index: int) -> Mapped:
        return Mapped(failure=what)

    def fits(self, mapped: Mapped) -> bool:
        return bool(mapped.failure) or len(mapped.rows) in (0, len(self.rows))


Request = LoadRequest | ScoreRequest | MapRequest


class FunctionHost:
    """Functions of runs by key, called in this process by `caller`."""

    generation = 1  # process counter of a `RewardWorker`; constant here

    def __init__(self, caller: Caller, notes: Sequence[str] = ()) -> None:
        self.caller, self._notes = caller, list(notes)
        self._stages: dict[int, list[list[RewardFunction]]] = {}
        self._files: dict[int, RewardFile | None] = {}

    def start(self) -> None:
        """A `RewardWorker` starts its process here."""

    def release(self, key: int) -> None:
        """A `RewardWorker` ends its process here."""

    def ask(self, request: Request, poll: Poll = wait_on) -> Any:
        """The answer, of type `request.answer`."""
        self.caller.poll = poll
        if isinstance(request, LoadRequest):
            return self._load(request)
        if isinstance(request, MapRequest):
            return self._map(request)
        functions = [self._stages[request.key][request.stage][index] for index in request.indices]
        printed = io.StringIO()  # Python's prints only; what C code writes to descriptor 1 goes to the log
        with contextlib.ExitStack() as stack:
            if request.captures:
                stack.enter_context(contextlib.redirect_stdout(printed))
                stack.enter_context(contextlib.redirect_stderr(printed))
            scored = score_step(functions, samples_of(request.groups), request.timeout_s, request.state, self.caller)
        return replace(scored, printed=printed.getvalue()[-LONGEST_PRINTED:])

    def _load(self, request: LoadRequest) -> Loaded:
        linecache.checkcache()
        source, executed = request.source, dict[Path, RewardFile]()
        try:
            stages = self._resolved(source, executed)
        except UserError as error:
            named = source.file or (source.files[0] if len(source.files) == 1 else None)
            problems = [(problem.setting, problem.sentence) for problem in error.faults]
            return Loaded(problems=problems, failure=Failure.of(problems[0][1], error.__cause__, named))
        self._stages[request.key] = stages
        file = locate_reward_file(source.file).resolve() if source.file else None
        self._files[request.key] = executed.get(file) if file else None
        return Loaded([[function.description for function in stage] for stage in stages], self._notes)

    def _resolved(self, source: RewardSource, executed: dict[Path, RewardFile]) -> list[list[RewardFunction]]:
        return [resolve(names, source.file, source.base, executed) for names in source.stages]

    def _map(self, request: MapRequest) -> Mapped:
        file = self._files.get(request.key)
        call = file.map_functions.get(request.function) if file else None
        if file is None or call is None:
            return Mapped(known=list(file.map_functions) if file else [])
        try:
            with stand_in_library(file.functions):
                rows = self.caller.call(0, request.timeout_s, lambda: map_each(call, request.rows, file.path), list)
        except CallError as failed:
            if failed.error is None:
                return Mapped(failure=timeout_words(request.timeout_s))
            if isinstance(failed.error, RowError):
                return Mapped(failure=failed.error.what, failed_row=failed.error.index)
            raise failed.error from None
        return Mapped(rows)


def score_step(
    functions: Sequence[RewardFunction], samples: list[Sample], timeout_s: float, state: TrainerState, caller: Caller
) -> Scored:
    """Call each function once with all samples, async ones last and concurrently."""
    state, logs = replace(state, reward_timeout=timeout_s), ExtraLogs()
    outcomes: dict[int, tuple[Scores, float]] = {}
    waiting: list[AsyncCall] = []

    def failed(index: int, what: str, error: BaseException | None = None, **fields: Any) -> Scored:
        function = functions[index]
        failure = Failure.of(what, error, function.file, function.line, function=index, **fields)
        return Scored(failure=failure)

    def read(returned: Any) -> Scores:
        return read_scores(returned, len(samples))

    try:
        for index, function in enumerate(functions):
            inputs = inputs_for(samples, state, function.dialect) | logs.loggers_for(function.name)
            for name in function.arguments.missing(inputs):
                near = nearest(name, inputs)
                hint = f"; the nearest is {near}" if near else ""
                where = "neither an input of reward functions nor a column of the dataset"
                return failed(index, f"asks for {name}, which is {where}{hint}")
            work = functools.partial(function.call, **function.call_kwargs(inputs))
            if function.is_async:
                waiting.append((index, work, read))
                continue
            start = time.perf_counter()
            with _stand_in_libraries([function]):
                scores = caller.call(index, timeout_s, work, read)
            outcomes[index] = scores, time.perf_counter() - start
        if waiting:
            with _stand_in_libraries(functions[index] for index, _, _ in waiting):
                results = caller.gather(timeout_s, waiting)
            outcomes |= {index: result for (index, _, _), result in zip(waiting, results, strict=True)}
    except CallError as call:
        error = call.error
        if error is None:
            return failed(call.index, timeout_words(timeout_s), is_timeout=True)
        if isinstance(error, InvalidScoresError):
            return failed(call.index, f"returned {error}", completion=error.index)
        function = functions[call.index]
        room = failure_room(function.description, samples[0]) - len("raised ")
        what = f"raised {describe_error(error, function.file, room)}"
        return failed(call.index, what, error, has_line=True)
    for index, function in enumerate(functions):
        if wrong := logs.length_error(function.name, len(samples)):
            return failed(index, wrong)
    scores, seconds = zip(*(outcomes[index] for index in range(len(functions))), strict=True)
    return Scored(list(scores), list(seconds), logs.columns, logs.metrics)


def _stand_in_libraries(functions: Iterable[RewardFunction]) -> ExitStack:
    stack = ExitStack()
    for user_file in {id(function.user_file): function.user_file for function in functions}.values():
        if user_file:
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
