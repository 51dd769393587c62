"""Reward bench: score completions outside a run, one function at a time.

Imports no mlx: advantages are plain Python and equal to a run's.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from backend.config.config import Config
from backend.rewards.allowed_code import code_files
from backend.rewards.calls import Poll, wait_on
from backend.rewards.catalogue import builtin_rewards, locate_reward_file, reward_call, rewards_in_file
from backend.rewards.completion_lines import group_of
from backend.rewards.findings import Sample, Scores, required_texts, verdicts
from backend.rewards.inputs import TrainerState
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import RewardSource, samples_of, total_reward
from backend.rewards.worker_process import RewardWorker
from backend.training.advantages import advantage_values
from backend.utils.errors import UserError

Line = Mapping[str, Any]  # A group as written by `backend.rewards.completion_lines.line_of`


@dataclass(slots=True)
class BenchResult:
    """Result of one function. `scores`: one per completion, None for no opinion; empty after an `error`.

    `error`: {"sentence", "file", "line", "frames", "traceback"}.
    """

    name: str
    seconds: float = 0.0
    scores: list[float | None] = field(default_factory=list)
    logged: dict[str, list[Any]] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    printed: str = ""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings for advantages. `names`: entries of `reward_functions`."""

    names: Sequence[str]
    weights: Sequence[float] = ()
    file: Path | None = None
    timeout_s: float = 60.0
    max_completion_length: int | None = None
    network: bool = False
    scale_rewards: str = "group"
    aggregation: str = "sum_then_normalize"
    baseline: str = "group"

    @classmethod
    def of(cls, config: Config) -> BenchSettings:
        """Those of a run."""
        names, file = config.reward_functions, config.reward_functions_file
        return cls(
            names=names,
            weights=config.reward_weights or [1.0] * len(names),
            file=locate_reward_file(file).resolve() if file else None,
            timeout_s=config.reward_timeout,
            max_completion_length=config.max_completion_length,
            network=config.reward_network,
            scale_rewards=config.scale_rewards,
            aggregation=config.multi_objective_aggregation,
            baseline=config.advantage_baseline,
        )


class RewardBench:
    """A reward worker that is reused until the reward files change. One task at a time."""

    def __init__(self) -> None:
        self.worker = RewardWorker()
        self._scorer: Scorer | None = None
        self._loaded: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def score(
        self,
        settings: BenchSettings,
        lines: Sequence[Line],
        poll: Poll = wait_on,
        on_function: Callable[[str], None] = lambda name: None,
    ) -> list[BenchResult]:
        """Score all completions with each function separately.

        `poll` may raise to cancel; `on_function` gets each name first. Raises UserError.
        """
        groups = [group_of(row, index, f"Row {index + 1}") for index, row in enumerate(lines)]
        state = TrainerState(max_completion_length=settings.max_completion_length)
        results: list[BenchResult] = []
        with self._lock:
            try:
                scorer = self._scorer_of(settings)
                for index, function in enumerate(scorer.load(poll)[0]):
                    on_function(function.name)
                    scored = scorer.call(groups, 0, [index], settings.timeout_s, state, captures=True, poll=poll)
                    result = BenchResult(function.name, printed=scored.printed)
                    if failure := scored.failure:
                        result.error = scorer.error([function], failure, samples_of(groups)).place
                    else:
                        result.seconds, result.scores = scored.seconds[0], scored.scores[0]
                        result.logged = scored.columns
                    results.append(result)
            except BaseException:
                self.close()  # the next task begins in a fresh process
                raise
        return results

    def _scorer_of(self, settings: BenchSettings) -> Scorer:
        base = Path.cwd()
        named = {"reward_functions": list(settings.names), "reward_functions_file": str(settings.file or "")}
        files = code_files(named, base)
        # Taken before the worker reads the files: an edit in between differs from these stamps the next time.
        stamps = tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files)
        loaded = (stamps, settings.network, tuple(settings.names), settings.file, base)
        if self._scorer is None or loaded != self._loaded:
            if loaded[:2] != self._loaded[:2]:
                self.close()
                self.worker = RewardWorker(settings.network)
            source = RewardSource([settings.names], settings.file, base, tuple(files))
            self._scorer, self._loaded = Scorer(source, self.worker, settings.timeout_s), loaded
        return self._scorer

    def close(self) -> None:
        """End the worker."""
        self._scorer, self._loaded = None, ()
        self.worker.stop()


def score_lines(
    bench: RewardBench,
    lines: Sequence[Line],
    settings: BenchSettings,
    poll: Poll = wait_on,
    on_function: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Score groups; `poll` and `on_function` as in `RewardBench.score`. Raises UserError.

    Returns {"scored": [{"rewards", "reward", "advantage", "logged"?} of each completion, by group], "functions":
    [{"name", "label", "weight", "seconds", "error", "printed"}], "findings": [Finding as a dict], "seconds"}.
    """
    start = time.perf_counter()
    results = bench.score(settings, lines, poll, on_function)
    seconds = time.perf_counter() - start
    completions = [completion for line in lines for completion in line["completions"]]
    sizes = [len(line["completions"]) for line in lines]
    counted = [(result, weight) for result, weight in zip(results, settings.weights, strict=True) if not result.error]
    weights = [weight for _, weight in counted]
    scores_by_row = [[result.scores[i] for result, _ in counted] for i in range(len(completions))]
    rewards = [total_reward(scores, weights) for scores in scores_by_row]
    rows: list[dict[str, Any]] = []
    for i, advantage in enumerate(_advantages(scores_by_row, sizes, weights, settings)):
        given = {result.name: result.scores[i] for result, _ in counted}
        logged = {column: values[i] for result, _ in counted for column, values in result.logged.items()}
        row = {"rewards": given, "reward": rewards[i], "advantage": advantage}
        rows.append(row | ({"logged": logged} if logged else {}))
    # Labels and required texts are read from source.
    own: dict[str, str] = {}
    with suppress(UserError):
        own = {entry.name: entry.label for entry in rewards_in_file(settings.file)} if settings.file else {}
    labels = {entry.name: entry.label for entry in builtin_rewards()} | own
    functions: list[Scores] = []
    for name, weight, result in zip(settings.names, settings.weights, results, strict=True):
        call = reward_call(name, labels)
        looks_for: tuple[str, ...] = (str(call.arguments.get("word", "")),)
        if call.function != "keyword" or not looks_for[0]:
            file = locate_reward_file(call.file).resolve() if call.file else None
            looks_for = required_texts(call.name, call.function, settings.file if call.function in own else file)
        label = call.alias or labels.get(call.function, call.function)
        error = result.error["sentence"] if result.error else ""
        functions.append(Scores(result.name, label, weight, result.scores, result.seconds, error, looks_for))
    sample = Sample(
        sizes,
        [completion["text"] for completion in completions],
        rewards,
        functions,
        [str(completion.get("stop", "eos")) for completion in completions],
        [str(line.get("answer") or "") for line in lines],
    )
    in_order = iter(rows)
    return {
        "scored": [list(islice(in_order, size)) for size in sizes],
        "functions": [
            {
                "name": result.name,
                "label": function.label,
                "weight": function.weight,
                "seconds": result.seconds,
                "error": result.error,
                "printed": result.printed,
            }
            for result, function in zip(results, functions, strict=True)
        ],
        "findings": [asdict(finding) for finding in verdicts(sample)],
        "seconds": seconds,
    }


def _advantages(
    scores_by_row: Sequence[list[Any]], sizes: Sequence[int], weights: list[float], settings: BenchSettings
) -> list[float]:
    if not weights:
        return [0.0] * len(scores_by_row)
    if len(set(sizes)) > 1:
        rows = iter(scores_by_row)
        return [value for size in sizes for value in _advantages(list(islice(rows, size)), [size], weights, settings)]
    if sizes[0] == 1 and settings.scale_rewards != "batch":
        return [0.0] * len(scores_by_row)
    values, _ = advantage_values(
        scores_by_row,
        sizes[0],
        weights=weights,
        scale_rewards=settings.scale_rewards,
        multi_objective_aggregation=settings.aggregation,
        baseline=settings.baseline,
    )
    return array("f", values).tolist()  # rounded to float32, as a training step has them
