"""Load reward functions, and call each once per step, over all groups. A function that raises, hangs or returns invalid
scores stops the run; it never counts as 0.

Functions get keyword arguments. Dialect "ours" (mlx-lm-lora's signature) passes texts; "trl" passes what `GRPOTrainer`
does: messages where the row's prompt has them. A function that indexes messages gets messages in both."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import json
import linecache
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.rewards.calls import Caller, Failure, Poll, class_name, describe_error, read_scores, wait_on
from backend.rewards.catalogue import INPUTS, metric_name, nearest, repeated_names
from backend.rewards.registry import FunctionDescription, Scores
from backend.rewards.resolve import RewardFile, RewardFunction, load_reward_file, resolve
from backend.runs.events import METRICS
from backend.tools.host import NO_TOOLS, ServedEnvironment, ToolSchemas
from backend.types import IMAGES, Completion, Group, Problem, ToolCall, ToolResult, content_text
from backend.utils.errors import UserError
from backend.utils.files import DEPTH, json_safe, levels
from backend.vision.pictures import open_picture

if TYPE_CHECKING:
    from backend.tools.toolbox import RunTools, Toolbox

Sample = tuple[Problem, Completion]

CLOSE_S = 0.8  # seconds for environments to close where nobody has closed them
LONGEST_PRINTED = 2000  # characters of printed output in the bench, from its end
MOST_LOGGED = 4 << 20  # characters of all columns that functions log in a step
MOST_METRICS = 200
_ROW_WORDS = 90  # characters for a row's problem


@dataclass(frozen=True, slots=True)
class TrainerState:
    """`step`: finished steps, of `max_steps`. `epoch`: dataset passes. `max_completion_length`: tokens."""

    step: int = 0
    max_steps: int = 1
    epoch: float = 0.0
    max_completion_length: int | None = None
    reward_timeout: float | None = None

    @property
    def global_step(self) -> int:
        """TRL's name for `step`."""
        return self.step


@dataclass(frozen=True, slots=True)
class RewardSource:
    """Entries by stage, `reward_functions_file`, base folder, and executed files. `optional`: a stage may have none.
    `models`: entries that the trainer's process scores."""

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
    """Start calls, then wait up to `wait_s` for the first that ends. `begin`: (conversation, environment, row) of a new
    rollout. `submit`: calls by conversation. `close`: close every environment. `timeout_s`: of a call."""

    key: int
    timeout_s: float
    wait_s: float = 0.0
    begin: Sequence[tuple[int, str, dict[str, Any]]] | None = None
    submit: Mapping[int, Sequence[ToolCall]] = field(default_factory=dict[int, Sequence[ToolCall]])
    close: bool = False


Request = LoadRequest | ScoreRequest | MapRequest | ToolRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """To a LoadRequest: functions by stage, map functions, missing confinement (`notes`). ScoreRequest: `scores` and
    `seconds` by function, what they logged and printed; so do models that score, whose `notes` are for the user.
    MapRequest: `rows`, None for a dropped one. ToolRequest: `turns` that have ended. `failure`: as a worker's process
    sends it; hosts raise it."""

    failure: Failure | None = None
    stages: list[list[FunctionDescription]] = field(default_factory=list)
    map_functions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    schemas: ToolSchemas = NO_TOOLS
    turns: list[tuple[int, list[ToolResult]]] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    printed: str = ""
    rows: list[dict[str, Any] | None] = field(default_factory=list)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Answer:
        """From JSON. Raises TypeError for what is none."""
        raw: Any = cls(**fields)
        for stage in raw.stages:
            stage[:] = [FunctionDescription(**each | {"file": each["file"] and Path(each["file"])}) for each in stage]
        turns = [(number, [ToolResult(**each) for each in ended]) for number, ended in raw.turns]
        failure = raw.failure and Failure(**raw.failure)
        return replace(raw, failure=failure, schemas=ToolSchemas(**raw.schemas), turns=turns)


class FunctionHost:
    """Functions of runs by key, called in this process by `caller`."""

    def __init__(self, caller: Caller, notes: Sequence[str] = (), resolve: Callable[..., Any] = resolve) -> None:
        self.caller, self._notes, self._resolve = caller, list(notes), resolve
        self.loaded: dict[int, tuple[list[list[RewardFunction]], RewardFile | None, Toolbox | None]] = {}

    def release(self, key: int) -> None:
        tools = self.loaded.pop(key, ([], None, None))[2]
        if tools is not None:
            tools.run(ToolRequest(key, CLOSE_S, close=True))

    def close(self) -> None:
        for key in list(self.loaded):
            self.release(key)
        self.caller.close()

    def ask(self, request: Request, poll: Poll = wait_on) -> Answer:
        """Raises Failure."""
        self.caller.poll = poll
        if isinstance(request, LoadRequest):
            return self._load(request)
        stages, file, tools = self.loaded[request.key]
        printed = io.StringIO()  # Python's prints only; what C code writes to descriptor 1 goes to the log
        try:
            if isinstance(request, ToolRequest):
                assert tools is not None
                return Answer(turns=tools.run(request))
            if isinstance(request, MapRequest):
                assert file is not None
                self.caller.functions = [FunctionDescription(request.function, file.path)]
                work = functools.partial(map_each, file.map_functions[request.function], request.rows, file.path)
                return Answer(rows=self.caller.call(0, request.timeout_s, work))
            with contextlib.ExitStack() as stack:
                if request.captures:
                    stack.enter_context(contextlib.redirect_stdout(printed))
                    stack.enter_context(contextlib.redirect_stderr(printed))
                answer = self._score(request, [stages[request.stage][index] for index in request.indices], tools)
        except Failure as failure:
            failure.printed = printed.getvalue()[-LONGEST_PRINTED:]
            raise
        return replace(answer, printed=printed.getvalue()[-LONGEST_PRINTED:])

    def _score(self, request: ScoreRequest, functions: Sequence[RewardFunction], tools: Toolbox | None) -> Answer:
        """Call each function once with all samples; async ones are awaited together, after the others."""
        caller, timeout_s, samples = self.caller, request.timeout_s, samples_of(request.groups)
        state, logs = replace(request.state, reward_timeout=timeout_s), ExtraLogs()
        caller.functions = abouts = [function.about for function in functions]
        outcomes: dict[int, tuple[Scores, float]] = {}
        waiting: dict[int, Awaitable[Scores]] = {}
        environments = list[Any]()
        if tools is not None and tools.kinds:
            environments += [tools.environment(completion.conversation) for _, completion in samples]
            for environment, (_, completion) in zip(environments, samples, strict=True):
                if isinstance(environment, ServedEnvironment):
                    environment.total = sum(each.reward for turn in completion.turns for each in turn.results)

        async def awaited(returned: Awaitable[Any]) -> Scores:
            return read_scores(await returned, len(samples))

        def scores_of(call: Callable[[], Any]) -> Scores | Awaitable[Scores]:
            returned = call()
            return awaited(returned) if inspect.isawaitable(returned) else read_scores(returned, len(samples))

        for index, function in enumerate(functions):
            inputs = inputs_for(samples, state, function.dialect, function.takes_messages)
            inputs["log_extra"] = functools.partial(logs.log_extra, function.about.name)
            inputs["log_metric"] = logs.log_metric
            inputs |= {"environments": [*environments]} if environments else {}
            if missing := [name for name in function.required if name not in inputs]:
                where = "neither an input of reward functions nor a column of the dataset"
                if near := nearest(missing[0], inputs):
                    where += f"; the nearest is {near}"
                raise Failure(f"asks for {missing[0]}, which is {where}", index)
            try:
                call = functools.partial(function.call, **with_pictures(function.call_kwargs(inputs)))
            except UserError as error:
                raise Failure(f"cannot be called: {error.faults[0].sentence.rstrip('.')}", index) from None
            start = time.perf_counter()
            returned = caller.call(index, timeout_s, functools.partial(scores_of, call))
            if inspect.isawaitable(returned):
                waiting[index] = returned
            else:
                outcomes[index] = returned, time.perf_counter() - start
        if waiting:
            outcomes |= caller.gather(timeout_s, waiting)
        for column, values in logs.columns.items():
            if len(values) != len(samples):
                what = f"logged {len(values)} values in the column {column} for {len(samples)} completions"
                raise Failure(what, [about.name for about in abouts].index(logs.owners[column]))
        scores, seconds = zip(*(outcomes[index] for index in range(len(functions))), strict=True)
        metrics = {name: statistics.fmean(values) for name, values in logs.metrics.items()}
        return Answer(scores=[*scores], seconds=[*seconds], columns=logs.columns, metrics=metrics)

    def _load(self, request: LoadRequest) -> Answer:
        linecache.checkcache()
        source, executed = request.source, dict[Path, RewardFile]()
        try:
            tools = request.tools.open(executed) if request.tools else None
            extra = tools.rewards() if tools else []
            if tools and tools.kinds and not extra and not all(source.stages):
                raise UserError("reward_functions", "Choose a reward function, or give the environment a get_reward.")
            # Of models, which the trainer's process calls, only the names are needed here.
            models = {
                entry: RewardFunction(FunctionDescription(metric_name(entry)), lambda: None, {})
                for entry in source.models
            }
            stages: list[list[RewardFunction]] = []
            for entries in source.stages:
                names = [entry for entry in entries if entry not in models]
                needed = names or not (entries or source.optional or extra)
                own = iter(self._resolve(names, source.file, source.base, executed) if needed else ())
                stages.append([*(models.get(entry) or next(own) for entry in entries), *own, *extra])
                if problems := repeated_names(function.about.name for function in stages[-1]):
                    raise UserError(problems)
            file = load_reward_file(source.file, executed) if source.file else None  # for its map functions
        except UserError as error:
            named = source.file or (source.files[0] if len(source.files) == 1 else None)
            problems = [(problem.setting, problem.sentence) for problem in error.faults]
            raise Failure(problems[0][1], problems=problems).located(error.__cause__, named) from error
        self.loaded[request.key] = stages, file, tools
        return Answer(
            stages=[[function.about for function in stage] for stage in stages],
            map_functions=list(file.map_functions if file else ()),
            notes=self._notes,
            schemas=tools.schemas if tools else NO_TOOLS,
        )


def inputs_for(samples: list[Sample], state: TrainerState, dialect: str, as_messages: bool = False) -> dict[str, Any]:
    """Every input, in fresh lists with one entry per sample; columns have None for missing cells."""
    types = [problem.type for problem, _ in samples]
    inputs: dict[str, Any] = {
        "prompts": [problem.prompt for problem, _ in samples],
        "completions": [completion.text for _, completion in samples],
        "answer": [problem.answer for problem, _ in samples],
        "types": types if any(kind is not None for kind in types) else None,
        "completion_ids": [list(completion.tokens) for _, completion in samples],
        "completions_ids": [list(completion.tokens) for _, completion in samples],
        "trainer_state": state,
    }
    is_trl = dialect == "trl"
    ours = ("prompts", "completions", "completion_ids", "trainer_state") if is_trl else INPUTS
    for index, (problem, completion) in enumerate(samples):
        if as_messages or (is_trl and (_is_chat(problem) or completion.turns)):
            chat = problem.messages or [{"role": "user", "content": problem.prompt}]
            inputs["prompts"][index] = copy.deepcopy(chat)
            written = [message for turn in completion.turns for message in turn.messages()]
            inputs["completions"][index] = written or [{"role": "assistant", "content": completion.text}]
    rows = [{**problem.row, **completion.columns} for problem, completion in samples]
    columns = dict.fromkeys(name for row in rows for name in row if name not in ours)
    return inputs | {name: [row.get(name) for row in rows] for name in columns}


def with_pictures(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with images of PIL, not yet decoded, in columns of paths, as in TRL. Raises UserError."""
    opened = functools.cache(open_picture)

    def converted(value: Any) -> Any:
        return [converted(each) for each in value] if isinstance(value, list) else value and opened(value)

    return inputs | {name: converted(inputs[name]) for name in IMAGES if name in inputs}


def _is_chat(problem: Problem) -> bool:
    if "prompt" in problem.row:
        return isinstance(problem.row["prompt"], list)
    ends = [column[-1] for column in problem.row.values() if isinstance(column, list) and column]
    last = [content_text(message["content"]) for message in problem.messages[-1:]]
    return any(
        isinstance(message, Mapping) and [content_text(message.get("content") or "")] == last for message in ends
    )


TRAINER_METRICS = (*METRICS, "epoch", "grad_clipped", "waiting_share")
_TRAINER_PREFIXES = (
    *("rewards/", "judge/", "completions/", "time/", "sampling/", "peak_memory_gb/", "process/", "machine/"),
    *("ranks/", "eval_"),
)


class ExtraLogs:
    """TRL's `log_extra` and `log_metric`. Bad arguments raise in user code, at the right line."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.owners: dict[str, str] = {}  # column → the function that logged it
        self.metrics: dict[str, list[float]] = {}  # values in this step
        self._logged = 0

    def log_extra(self, function: str, column: str, values: Iterable[Any]) -> None:
        """Called by `function`, with values of some of the completions, in order."""
        _check_name("log_extra", column)
        if (owner := self.owners.setdefault(column, function)) != function:
            raise ValueError(f"the column {column} was logged by {owner} already")
        if isinstance(values, str | bytes | Mapping):
            raise TypeError(f"log_extra takes a list of values, one a completion, not {type(values).__name__}")
        text = json.dumps(
            json_safe([*values]), default=lambda each: each.tolist() if hasattr(each, "tolist") else str(each)
        )
        self._logged += len(text)
        if self._logged > MOST_LOGGED:
            raise ValueError(f"log_extra takes {MOST_LOGGED >> 20} MB in a step, and the column {column} is over it")
        self.columns.setdefault(column, []).extend(json_safe(json.loads(text)))

    def log_metric(self, name: str, value: float) -> None:
        _check_name("log_metric", name)
        if name in TRAINER_METRICS or name.startswith(_TRAINER_PREFIXES):
            raise ValueError(f"{name} is a metric of the trainer; log yours under another name")
        if len(self.metrics.keys() | {name}) > MOST_METRICS:
            raise ValueError(f"log_metric takes {MOST_METRICS} names in a step, and {name} is one more")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric takes a finite number, and {name} is {number}")
        self.metrics.setdefault(name, []).append(number)


def _check_name(function: str, name: Any) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError(f"{function} takes a name on one line first, not {name!r}")


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
    """Map each row; None drops one. Results must be JSON; dates and the like become text. Raises Failure."""
    mapped: list[dict[str, Any] | None] = []
    for index, row in enumerate(rows):
        try:
            returned = call(copy.deepcopy(row))
        except Exception as error:
            raise Failure(f"raised {describe_error(error, file, _ROW_WORDS)}", completion=index) from error
        if returned is not None and not isinstance(returned, dict):
            raise Failure(f"returned {class_name(returned)}, not a dict of columns or None", completion=index)
        if returned is not None and (not returned or not all(isinstance(name, str) for name in returned)):
            raise Failure("returned a dict whose keys are not all names of columns", completion=index)
        try:
            row = json.loads(json.dumps(returned, allow_nan=False, default=str))
        except Exception:  # NaN, a circle, or an object whose text raises
            raise Failure("returned a row with a value that JSON cannot hold", completion=index) from None
        if levels(row, DEPTH) > DEPTH:
            raise Failure(f"returned a row that is nested more than {DEPTH} levels deep", completion=index)
        mapped.append(row)
    return mapped
