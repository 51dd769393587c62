"""Load reward functions and call each once per step, over all groups. A function that raises, hangs or returns invalid
scores stops the run; it never counts as 0."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import json
import linecache
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.rewards.calls import BadReturnError, Caller, CallError, Poll, Scores, read_scores, timeout_words, wait_on
from backend.rewards.catalogue import locate_reward_file, metric_name, nearest, repeated_names
from backend.rewards.errors import Failure, class_name, describe_error, printable
from backend.rewards.inputs import ExtraLogs, Sample, TrainerState, inputs_for, with_pictures
from backend.rewards.registry import FunctionDescription
from backend.rewards.resolve import RewardFile, RewardFunction, load_reward_file, resolve, stand_in_library
from backend.tools.host import ServedEnvironment
from backend.types import Group, ToolCall, ToolResult
from backend.utils.errors import UserError
from backend.utils.files import DEPTH, levels
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.tools.runner import ToolRunner
    from backend.tools.toolbox import RunTools

CLOSE_S = 0.8  # seconds for environments to close where nobody has closed them
LONGEST_PRINTED = 2000  # characters of printed output in the bench, from its end
_ROW_WORDS = 90  # characters for a row's problem


@dataclass(frozen=True, slots=True)
class RewardSource:
    """Source of functions: entries by stage, `reward_functions_file`, base folder, and executed files. `optional`: a
    stage may have none. `models`: the entries that the trainer's process scores (`backend.judges`)."""

    stages: Sequence[Sequence[str]]
    file: Path | None
    base: Path
    files: tuple[Path, ...] = ()
    optional: bool = False
    models: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Execute the files of `source` and `tools` once each; their functions are used by `key`."""

    key: int
    source: RewardSource
    timeout_s: float
    tools: RunTools | None = None


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score with functions `indices` of a stage. `captures`: return printed output."""

    key: int
    stage: int
    indices: Sequence[int]
    groups: Sequence[Group]
    timeout_s: float
    state: TrainerState
    captures: bool = False


@dataclass(frozen=True, slots=True)
class MapRequest:
    key: int
    function: str
    rows: Sequence[dict[str, Any]]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Start calls, then wait up to `wait_s` for the first that ends. `begin`: (conversation, environment, row) of a
    rollout, which ends the one before. `submit`: calls by conversation. `close`: close every environment. `timeout_s`:
    of a call."""

    key: int
    timeout_s: float
    wait_s: float = 0.0
    begin: Sequence[tuple[int, str, dict[str, Any]]] | None = None
    submit: Mapping[int, Sequence[ToolCall]] = field(default_factory=dict[int, Sequence[ToolCall]])
    close: bool = False


Request = LoadRequest | ScoreRequest | MapRequest | ToolRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """A `failure`, or the answer to a LoadRequest: functions by stage, names of map functions, and messages about
    missing confinement; of a failed one the `problems` (setting, message). ScoreRequest: `scores` and `seconds` by
    function, what they logged and printed. MapRequest: `rows`, None for a dropped one; the failure's `completion` is
    the row. ToolRequest: `turns` that have ended: conversation and results, of `reset` or of its calls."""

    failure: Failure | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)
    stages: list[list[FunctionDescription]] = field(default_factory=list)
    map_functions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shared_schemas: list[dict[str, Any]] = field(default_factory=list)
    environment_schemas: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    turns: list[tuple[int, list[ToolResult]]] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    printed: str = ""
    rows: list[dict[str, Any] | None] = field(default_factory=list)


class FunctionHost:
    """Functions of runs by key, called in this process by `caller`."""

    generation = 0  # of a `RewardWorker`: how many of its processes have ended

    def __init__(self, caller: Caller, notes: Sequence[str] = (), resolve: Callable[..., Any] = resolve) -> None:
        self.caller, self._notes, self._resolve = caller, list(notes), resolve
        self._loaded: dict[int, tuple[list[list[RewardFunction]], RewardFile | None, ToolRunner | None]] = {}

    def release(self, key: int) -> None:
        tools = self._loaded.pop(key, ([], None, None))[2]
        if tools is not None:
            tools.run(ToolRequest(key, CLOSE_S, close=True))

    def close(self) -> None:
        for key in list(self._loaded):
            self.release(key)
        self.caller.close()

    def ask(self, request: Request, poll: Poll = wait_on) -> Answer:
        self.caller.poll = poll
        if isinstance(request, LoadRequest):
            return self._load(request)
        stages, file, tools = self._loaded[request.key]
        if isinstance(request, ToolRequest):
            assert tools is not None
            return Answer(turns=tools.run(request))
        if isinstance(request, MapRequest):
            assert file is not None
            function = file.map_functions[request.function]
            try:
                with stand_in_library(file.functions):
                    work = functools.partial(map_each, function, request.rows, file.path)
                    return Answer(rows=self.caller.call(0, request.timeout_s, work))
            except CallError as call:
                if isinstance(error := call.error, BadReturnError):
                    return Answer(Failure.of(error.what, error.__cause__, file.path, completion=error.index))
                if error is not None:
                    raise error from None
                return Answer(Failure(timeout_words(request.timeout_s), traceback=printable(call.stack)))
        functions = [stages[request.stage][index] for index in request.indices]
        printed = io.StringIO()  # Python's prints only; what C code writes to descriptor 1 goes to the log
        with contextlib.ExitStack() as stack:
            if request.captures:
                stack.enter_context(contextlib.redirect_stdout(printed))
                stack.enter_context(contextlib.redirect_stderr(printed))
            samples = samples_of(request.groups)
            environments = None
            if tools is not None and tools.toolbox.kinds:
                environments = [tools.environment(completion.conversation) for _, completion in samples]
                for environment, (_, completion) in zip(environments, samples, strict=True):
                    if isinstance(environment, ServedEnvironment):
                        environment.total = sum(each.reward for turn in completion.turns for each in turn.results)
            scored = score_step(functions, samples, request.timeout_s, request.state, self.caller, environments)
        return replace(scored, printed=printed.getvalue()[-LONGEST_PRINTED:])

    def _load(self, request: LoadRequest) -> Answer:
        linecache.checkcache()
        source, executed = request.source, dict[Path, RewardFile]()
        files = source.file, source.base
        try:
            tools = request.tools.open(executed) if request.tools else None
            extra = tools.toolbox.rewards() if tools else []
            if tools and tools.toolbox.kinds and not extra and not all(source.stages):
                raise UserError("reward_functions", "Choose a reward function, or give the environment a get_reward.")
            optional = source.optional or bool(extra)
            stages: list[list[RewardFunction]] = []
            for entries in source.stages:
                names = [entry for entry in entries if entry not in source.models]
                own = iter(self._resolve(names, *files, executed) if names or not (entries or optional) else ())
                models = {
                    entry: RewardFunction(FunctionDescription(metric_name(entry)), lambda: None, {})
                    for entry in source.models
                }
                stages.append([*(models.get(entry) or next(own) for entry in entries), *own])
                if problems := repeated_names(function.about.name for function in stages[-1]):
                    raise UserError(problems)
                stages[-1] += extra
                for name, count in Counter(function.about.name for function in stages[-1]).items():
                    if count > 1:
                        raise UserError("environment", f"{quote(name, 40)} names two functions that score; rename one.")
            if source.file and locate_reward_file(source.file).resolve() not in executed:  # for its map functions
                executed[locate_reward_file(source.file).resolve()] = load_reward_file(source.file)
        except UserError as error:
            named = source.file or (source.files[0] if len(source.files) == 1 else None)
            problems = [(problem.setting, problem.sentence) for problem in error.faults]
            return Answer(Failure.of(problems[0][1], error.__cause__, named), problems)
        file = executed.get(locate_reward_file(source.file).resolve()) if source.file else None
        self._loaded[request.key] = stages, file, tools
        return Answer(
            stages=[[function.about for function in stage] for stage in stages],
            map_functions=list(file.map_functions if file else ()),
            notes=self._notes,
            shared_schemas=tools.toolbox.shared_schemas if tools else [],
            environment_schemas=tools.toolbox.environment_schemas if tools else {},
        )


def score_step(
    functions: Sequence[RewardFunction],
    samples: list[Sample],
    timeout_s: float,
    state: TrainerState,
    caller: Caller,
    environments: Sequence[Any] | None = None,
) -> Answer:
    """Call each function once with all samples; async ones are awaited together, after the others. `environments`: one
    of each sample, or None for a run without."""
    state, logs = replace(state, reward_timeout=timeout_s), ExtraLogs()
    outcomes: dict[int, tuple[Scores, float]] = {}
    waiting: dict[int, Awaitable[Any]] = {}

    def failed(index: int, what: str, error: BaseException | None = None, **fields: Any) -> Answer:
        about = functions[index].about
        return Answer(Failure.of(what, error, about.file, about.line, function=index, **fields))

    def scores_or_awaitable(call: Callable[[], Any]) -> Any:
        returned = call()
        return returned if inspect.isawaitable(returned) else read_scores(returned, len(samples))

    async def awaited_scores(awaitable: Awaitable[Any]) -> Scores:
        return read_scores(await awaitable, len(samples))

    try:
        with contextlib.ExitStack() as libraries:
            for index, function in enumerate(functions):
                inputs = inputs_for(samples, state, function.dialect, function.takes_messages)
                inputs |= logs.loggers_for(function.about.name)
                inputs |= {} if environments is None else {"environments": list(environments)}
                for name in function.missing(inputs):
                    near = nearest(name, inputs)
                    hint = f"; the nearest is {near}" if near else ""
                    where = "neither an input of reward functions nor a column of the dataset"
                    return failed(index, f"asks for {name}, which is {where}{hint}")
                try:
                    call = functools.partial(function.call, **with_pictures(function.call_kwargs(inputs)))
                except UserError as error:
                    return failed(index, f"cannot be called: {error.faults[0].sentence.rstrip('.')}")
                library = stand_in_library(function.user_file.functions) if function.user_file else None
                start = time.perf_counter()
                with library or contextlib.nullcontext():
                    returned = caller.call(index, timeout_s, functools.partial(scores_or_awaitable, call))
                if not inspect.isawaitable(returned):
                    outcomes[index] = returned, time.perf_counter() - start
                    continue
                waiting[index] = awaited_scores(returned)
                if function.user_file:
                    libraries.enter_context(stand_in_library(function.user_file.functions))
            if waiting:
                outcomes |= caller.gather(timeout_s, waiting)
    except CallError as call:
        error, about = call.error, functions[call.index].about
        if error is None:
            own = call.stack[max(call.stack.find(f'  File "{about.file}"'), 0) :]  # outermost frame first
            return failed(call.index, timeout_words(timeout_s), traceback=printable(own))
        if isinstance(error, BadReturnError):
            return failed(call.index, error.what, completion=error.index)
        return failed(call.index, f"raised {describe_error(error, about.file)}", error, raised=True)
    for index, function in enumerate(functions):
        if wrong := logs.length_error(function.about.name, len(samples)):
            return failed(index, wrong)
    scores, seconds = zip(*(outcomes[index] for index in range(len(functions))), strict=True)
    return Answer(scores=list(scores), seconds=list(seconds), columns=logs.columns, metrics=logs.metrics)


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """Every completion with its problem, in group order."""
    return [(group.problem, completion) for group in groups for completion in group.completions]


def total_reward(scores: Iterable[float | None], weights: Iterable[float]) -> float | None:
    """Σ w·score over the scores that are not None; None if all are."""
    weighted = [w * x for w, x in zip(weights, scores, strict=True) if x is not None]
    return sum(weighted) if weighted else None


def map_each(
    call: Callable[[dict[str, Any]], Any], rows: Sequence[dict[str, Any]], file: Path | None
) -> list[dict[str, Any] | None]:
    """Map each row; None drops one. Results must be JSON; dates and the like become text. Raises BadReturnError."""
    mapped: list[dict[str, Any] | None] = []
    for index, row in enumerate(rows):
        try:
            returned = call(copy.deepcopy(row))
        except Exception as error:
            raise BadReturnError(f"raised {describe_error(error, file, _ROW_WORDS)}", index) from error
        if returned is not None and not isinstance(returned, dict):
            raise BadReturnError(f"returned {class_name(returned)}, not a dict of columns or None", index)
        if returned is not None and (not returned or not all(isinstance(name, str) for name in returned)):
            raise BadReturnError("returned a dict whose keys are not all names of columns", index)
        try:
            row = json.loads(json.dumps(returned, allow_nan=False, default=str))
        except Exception:  # NaN, a circle, or an object whose text raises
            raise BadReturnError("returned a row with a value that JSON cannot hold", index) from None
        if levels(row, DEPTH) > DEPTH:
            raise BadReturnError(f"returned a row that is nested more than {DEPTH} levels deep", index)
        mapped.append(row)
    return mapped
