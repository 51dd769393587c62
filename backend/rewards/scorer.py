"""The reward functions of one run, wherever they are called: in a process of their own, or in this one.

`reward_isolation` decides. The trainer, evaluations, exports, `check` and the bench know functions by their descriptions only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from backend.config.setting_groups import RewardSettings
from backend.rewards.catalogue.allowed_code import code_files
from backend.rewards.catalogue.catalog import locate_reward_file
from backend.rewards.mlx_lm_lora_shim import stand_in_library
from backend.rewards.resolve import FunctionDescription, RewardFunction, resolve_stages
from backend.rewards.runner import row_mapping
from backend.rewards.runner.inputs import TrainerState
from backend.rewards.runner.score import ScoreReport, score
from backend.rewards.runner.step_calls import CallFailed, CallTimeout, Poll, timeout_words, wait_on
from backend.rewards.runner.timeout import call_with_timeout
from backend.rewards.sandbox.process import ScoringProcess
from backend.rewards.sandbox.process_scorer import ProcessScorer, RewardSource
from backend.rewards.user_files import RewardFile
from backend.types import Group

NOT_ISOLATED = (
    "Reward functions run inside the trainer's own process (reward_isolation: thread): one that crashes, exits or keeps Python's "
    "lock takes the run with it, and nothing keeps it from the run's files."
)
"""Said by a run that executes a file of the user's."""


class Scorer(Protocol):
    """The functions of a run, loaded once and kept until `close`."""

    def load(self) -> list[list[FunctionDescription]]:
        """The functions of each stage. Raises UserError for functions that cannot be used."""
        ...

    def score(
        self,
        groups: list[Group],
        stage: int,
        weights: Sequence[float],
        timeout_s: float,
        state: TrainerState,
        poll: Poll = wait_on,
    ) -> ScoreReport:
        """Fill in every completion's `scores` and `reward` with the functions of a stage, counted from 0. Raises RewardError, and what `poll`
        raises; no completion is changed then."""
        ...

    def map_rows(
        self, function: str, rows: Sequence[dict[str, Any]], where: Callable[[int], str]
    ) -> list[dict[str, Any] | None]:
        """What a map function of the reward functions file makes of each row; `where` names the i-th of them in sentences. Raises UserError."""
        ...

    def notes(self) -> list[str]:
        """Sentences on what keeps these functions from the rest of the system, where that does not hold."""
        ...

    def close(self) -> None:
        """End the process, if there is one. A scorer that is used again loads its functions again."""
        ...


class ThreadScorer:
    """Calls functions in this process, each in a thread with a time limit."""

    def __init__(self, source: RewardSource, timeout_s: float) -> None:
        self._source, self._timeout_s = source, timeout_s
        self._executed: dict[Path, RewardFile] = {}
        self._stages: list[list[RewardFunction]] | None = None

    def load(self) -> list[list[FunctionDescription]]:
        return [[function.description for function in stage] for stage in self._functions()]

    def score(
        self,
        groups: list[Group],
        stage: int,
        weights: Sequence[float],
        timeout_s: float,
        state: TrainerState,
        poll: Poll = wait_on,
    ) -> ScoreReport:
        return score(groups, self._functions()[stage], weights, timeout_s, state, poll)

    def map_rows(
        self, function: str, rows: Sequence[dict[str, Any]], where: Callable[[int], str]
    ) -> list[dict[str, Any] | None]:
        self._functions()
        file = self._executed.get(self._source.file.resolve()) if self._source.file else None
        call = file.map_functions.get(function) if file else None
        if file is None or call is None:
            raise row_mapping.unknown(function, self._source.file, list(file.map_functions) if file else [])
        with stand_in_library(file.functions):
            try:
                return call_with_timeout(
                    self._timeout_s, lambda: row_mapping.map_each(call, rows, file.path), lambda mapped: mapped
                )
            except CallTimeout:
                raise row_mapping.failure(
                    function, timeout_words(self._timeout_s), f"one of the rows from {where(0)} on"
                ) from None
            except CallFailed as failed:
                if not isinstance(failed.__cause__, row_mapping.RowFailed):
                    raise
                raise row_mapping.failure(function, failed.__cause__.what, where(failed.__cause__.index)) from None

    def notes(self) -> list[str]:
        return [NOT_ISOLATED] if self._source.files else []

    def close(self) -> None:
        """Nothing to end: what was executed in this process stays in it."""

    def _functions(self) -> list[list[RewardFunction]]:
        if self._stages is None:
            self._stages = resolve_stages(self._source.stages, self._source.file, self._source.base, self._executed)
        return self._stages


SharedProcesses = Mapping[bool, ScoringProcess]
"""Processes that several runs share: for functions that may use the network (True), and for those that may not."""


def begin_scorer(settings: RewardSettings, processes: SharedProcesses | None = None) -> Scorer:
    """A scorer for a run of these settings. Its process begins to start and to load, while the caller does something else; `load`
    waits for it. `processes`: those that are shared with other runs."""
    source = reward_source(settings)
    if settings.reward_isolation == "thread":
        return ThreadScorer(source, settings.reward_timeout)
    network = settings.reward_network
    process = processes[network] if processes else ScoringProcess(network)
    return ProcessScorer(source, process, settings.reward_timeout)


def reward_source(settings: RewardSettings) -> RewardSource:
    """Which functions a run's stages name, and the files that they are in."""
    base = Path.cwd()
    stages = [stage.get("reward_functions") or settings.reward_functions for stage in settings.stages]
    named = {"reward_functions": settings.reward_functions, "stages": settings.stages}
    file = locate_reward_file(settings.reward_functions_file) if settings.reward_functions_file else None
    files = code_files(named | {"reward_functions_file": settings.reward_functions_file})
    return RewardSource(stages or [settings.reward_functions], file, base, tuple(files))
