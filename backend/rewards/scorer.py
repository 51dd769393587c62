"""A run's reward functions, in the worker or in-process (`reward_isolation: thread`), and its models that score."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.config.setting import RewardSettings
from backend.judges import model_reward
from backend.judges.model_reward import UnreachableJudgeError
from backend.rewards import scoring
from backend.rewards.allowed_code import code_files
from backend.rewards.calls import Failure, Poll, RewardError, ThreadCaller, wait_on
from backend.rewards.catalogue import locate_reward_file, nearest
from backend.rewards.registry import FunctionDescription
from backend.rewards.scoring import Answer, FunctionHost, RewardSource, TrainerState
from backend.rewards.worker import RewardWorker
from backend.types import Group, ToolResult
from backend.utils.errors import UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.judges.model_reward import ModelReward
    from backend.tools.toolbox import RunTools

NOT_ISOLATED = (
    "Reward functions run inside the trainer's own process (reward_isolation: thread): one that crashes, exits or "
    "keeps Python's lock takes the run with it, and nothing keeps it from the run's files."
)
SharedProcesses = Mapping[bool, RewardWorker]  # workers shared by runs, by network access

_NO_NETWORK = re.compile(
    r"gaierror|URLError|Connect\w*Error|ConnectTimeout|Connection\w*Error|name resolution"
    r"|PermissionError: \[Errno 13\] Permission denied(?!:)"  # of a socket: for a file the file's name follows
)
_keys = count(1)


class ProcessLostError(Exception):
    """The process that runs tools has ended; its text completes “A tool …”."""


class Scorer:
    """A run's functions, loaded on first use, and again in a new worker."""

    def __init__(self, source: RewardSource, host: RewardWorker | FunctionHost, timeout_s: float) -> None:
        self.host, self.timeout_s = host, timeout_s
        self._source = source
        self._key = next(_keys)
        self.loaded = Answer()
        self.models: dict[str, ModelReward] = {}  # by entry, open once loaded
        self.has_models = bool(source.models)  # which the leader alone has where several machines train
        self.opens_models = self.has_models  # false on a rank that leaves scoring to the leader
        self.model_notes: list[str] = []  # new messages of models
        self.pause: Callable[[UnreachableJudgeError], None] | None = None  # returns when a judge should try again
        self.tools: RunTools | None = None
        self.restore_tools: Callable[[Poll], None] = lambda poll: None  # called when a new process has loaded them
        self.closing = ExitStack()  # what else ends with it

    def load(self, poll: Poll = wait_on, *, models: bool = True) -> list[list[FunctionDescription]]:
        """Functions of each stage, then environments' `get_reward`. Models are opened, not loaded. Raises UserError."""
        if models and self.opens_models and not self.models:
            self.models = model_reward.open_model_rewards(sorted(self._source.models), self._source.base)
        source = self._source
        while self._key not in self.host.loaded:
            try:
                self.loaded = self.host.ask(scoring.LoadRequest(self._key, source, self.timeout_s, self.tools), poll)
            except Failure as failure:
                if not failure.problems:
                    file = source.file or next(iter(source.files), None)
                    setting = "reward_functions_file" if source.file else "reward_functions"
                    whose = file.name if file else "The process that scores"
                    failure.problems = [(setting, f"{whose} {failure.what} while it was being loaded.")]
                    failure.file = str(file or "")
                raise RewardError(failure, *failure.problems) from None
            self.restore_tools(poll)
        return self.loaded.stages

    def stage_models(self, stage: int) -> dict[int, ModelReward]:
        """The models of a stage by their place among its functions."""
        entries = self._source.stages[stage] if self.models else ()
        return {index: self.models[entry] for index, entry in enumerate(entries) if entry in self.models}

    def load_models(self, folder: Path | None = None) -> None:
        """Load models that are not loaded yet. `folder`: of the run. Raises UserError."""
        for model in self.models.values():
            model.load(folder)

    def unload_models(self) -> None:
        """Close models; they are loaded again when they score."""
        for model in self.models.values():
            model.close()

    def ask_tools(self, timeout_s: float, poll: Poll, **request: Any) -> list[tuple[int, list[ToolResult]]]:
        """The turns that have ended; `request` as `ToolRequest`. Raises ProcessLostError."""
        poll()
        if self._key not in self.host.loaded:  # another run of this worker has ended its process
            raise ProcessLostError("was interrupted")
        try:
            # Quick, and a poll that raises there would end the process before its environments can close.
            return self.host.ask(scoring.ToolRequest(self._key, timeout_s, **request)).turns
        except Failure as failure:
            what = f"kept Python's lock for more than {timeout_s:g} s (tool_timeout)"
            raise ProcessLostError(what if failure.hung else failure.what) from None

    def score(
        self, groups: list[Group], stage: int, weights: Sequence[float], state: TrainerState, poll: Poll = wait_on
    ) -> Answer:
        """Fill in each completion's `scores` (None for no opinion), `reward` (Σ w·score over the others, or None) and
        `logged` with a stage's functions. Raises RewardError and what `poll` raises, changing nothing."""
        samples = scoring.samples_of(groups)
        if not samples:
            return Answer()
        functions = self.load(poll)[stage]
        scored = self.call(groups, stage, range(len(functions)), state, poll=poll)
        names = [function.name for function in functions]
        for i, ((_, completion), row) in enumerate(zip(samples, zip(*scored.scores, strict=True), strict=True)):
            completion.scores = dict(zip(names, row, strict=True))
            completion.reward = scoring.total_reward(row, weights)
            completion.logged |= {column: values[i] for column, values in scored.columns.items()}
        return scored

    def call(
        self,
        groups: Sequence[Group],
        stage: int,
        indices: Sequence[int],
        state: TrainerState,
        *,
        captures: bool = False,
        poll: Poll = wait_on,
    ) -> Answer:
        """Call functions of a stage without changing completions. Raises RewardError."""
        functions = self.load(poll)[stage]
        models, answer = self.stage_models(stage), Answer()
        if models:
            self.load_models()
        others = [index for index in indices if index not in models]
        if others or not models:
            try:
                request = scoring.ScoreRequest(self._key, stage, others, groups, self.timeout_s, state, captures)
                answer = self.host.ask(request, poll)
            except Failure as failure:
                function = functions[others[failure.function]]
                failure.what = self.with_network_hint(failure.what)
                failure.file = failure.file or str(function.file or "")
                failure.line = failure.line or function.line
                raise RewardError.of_call(function, failure, scoring.samples_of(groups)) from None
        scored = dict(zip(others, zip(answer.scores, answer.seconds, strict=True), strict=True))
        printed = [answer.printed]
        for index in filter(models.__contains__, indices):
            began, model = time.perf_counter(), models[index]
            while True:
                try:
                    found = model.score(groups, state, poll)
                    break
                except UnreachableJudgeError as error:
                    if self.pause is None:
                        raise
                    self.pause(error)
            (scores,) = found.scores
            scored[index] = scores, time.perf_counter() - began
            answer.columns.update(found.columns)
            answer.metrics.update(found.metrics | model_reward.score_metrics(model.name, groups, scores))
            self.model_notes += found.notes
            printed += found.notes if captures else []
        scores, seconds = zip(*(scored[index] for index in indices), strict=True)
        return replace(answer, scores=[*scores], seconds=[*seconds], printed="\n".join(filter(None, printed)))

    def with_network_hint(self, what: str) -> str:
        """What code raised, and that it may not use the network if that is the reason."""
        has_none = isinstance(self.host, RewardWorker) and not self.host.network
        return f"{what} (reward_network is off)" if has_none and _NO_NETWORK.search(what) else what

    def map_rows(
        self, function: str, rows: Sequence[dict[str, Any]], where: Callable[[int], str]
    ) -> list[dict[str, Any] | None]:
        """Rows mapped by a map function, None to drop one; `where` names rows. Raises UserError."""
        self.load(models=False)
        known = self.loaded.map_functions
        if function not in known:
            hint = "" if known else ' Put @register_map_function("name") above it.'
            if near := nearest(function, known):
                hint = f" Did you mean {quote(near, 40)}?"
            file = quote(self._source.file.name, 40) if self._source.file else "The reward functions file"
            raise UserError("map_function", f"{file} registers no map function {quote(function, 40)}.{hint}")
        try:
            return self.host.ask(scoring.MapRequest(self._key, function, list(rows), self.timeout_s)).rows
        except Failure as failure:
            row = f"one of the rows from {where(0)} on" if failure.completion is None else where(failure.completion)
            sentence = f"The map function {quote(function, 30)} {quote(failure.what, 100)} on {row}."
            raise RewardError(failure, ("map_function", sentence)) from None

    def notes(self) -> list[str]:
        """Messages about missing confinement of a user's file."""
        return self.loaded.notes if self._source.files else []

    def close(self) -> None:
        """Stop the worker unless it is shared, and unload models."""
        self.closing.close()
        self.unload_models()
        self.host.release(self._key)


def begin_scorer(settings: RewardSettings, processes: SharedProcesses | None = None) -> Scorer:
    """A run's scorer, its worker starting in the background. `processes`: shared workers."""
    source = reward_source(settings)
    if settings.reward_isolation == "thread":
        return Scorer(source, FunctionHost(ThreadCaller(), [NOT_ISOLATED]), settings.reward_timeout)
    network = settings.reward_network
    worker = processes[network] if processes else RewardWorker(network)
    worker.start()  # while the caller does something else
    return Scorer(source, worker, settings.reward_timeout)


def reward_source(settings: RewardSettings) -> RewardSource:
    """Functions of a run's stages, and the files that it executes."""
    stages = [stage.get("reward_functions") or settings.reward_functions for stage in settings.stages]
    stages = stages or [settings.reward_functions]
    keys = ("reward_functions", "stages", "reward_functions_file", "tools_file", "environment")
    files = code_files({key: getattr(settings, key, "") for key in keys})
    file = locate_reward_file(settings.reward_functions_file) if settings.reward_functions_file else None
    models = model_reward.model_entries(chain(*stages), file)
    return RewardSource(stages, file, Path.cwd(), tuple(files), settings.train_mode != "grpo", models)
