"""Score completions outside a run, for the reward bench and the command line: rewards, advantages, and findings as
sentences.

Functions run in the sandbox; sampling is in `backend.run.trial_sampling`. It imports no mlx: advantages
are plain Python here, and equal to a run's.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.rewards.runner.score import total_reward
from backend.rewards.sandbox.client import SandboxClient, SandboxResult, SandboxTask
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.spec.rewards.catalog import builtin_rewards, locate_reward_file, reward_call, rewards_in_file
from backend.spec.rewards.entry import RewardCall
from backend.spec.rewards.verdicts import Sample, Scores, required_texts, verdicts
from backend.training.advantages import advantage_values

Line = Mapping[str, Any]
"""A group of completions as `backend.rewards.completion_lines.line_of` writes it."""


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """Settings that turn completions into advantages: reward functions, their weights, and how groups are normalised."""

    names: Sequence[str]
    weights: Sequence[float]
    file: Path | None = None
    timeout_s: float = 60.0
    max_completion_length: int | None = None
    network: bool = False
    scale_rewards: str = "group"
    aggregation: str = "sum_then_normalize"
    baseline: str = "group"

    @classmethod
    def of(cls, config: Config) -> ScoringSettings:
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

    def task(self, lines: Sequence[Line]) -> SandboxTask:
        return SandboxTask(self.names, lines, self.file, self.timeout_s, self.max_completion_length, self.network)


def score_lines(
    sandbox: SandboxClient,
    lines: Sequence[Line],
    settings: ScoringSettings,
    poll: Callable[[], None] = lambda: None,
    on_function: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Score groups in the sandbox; `poll` and `on_function` as in `SandboxClient.score`. Raises Mistake.

    Returns {"scored": [{"rewards", "reward", "advantage", "logged"?} of each completion, by group], "functions":
    [{"name", "label", "weight", "seconds", "error", "printed"}], "findings": [Finding as a dict], "seconds"}.
    """
    start = time.perf_counter()
    results = sandbox.score(settings.task(lines), poll, on_function)
    seconds = time.perf_counter() - start
    sizes = [len(line["completions"]) for line in lines]
    rewards = _rewards(results, settings.weights, sum(sizes))
    advantages = _advantages(results, sizes, settings)
    described = _DescribedFunctions(settings)
    return {
        "scored": _split(_completion_rows(results, rewards, advantages), sizes),
        "functions": [
            described.to_dict(result, weight) for result, weight in zip(results, settings.weights, strict=True)
        ],
        "findings": [asdict(finding) for finding in verdicts(described.sample(lines, sizes, rewards, results))],
        "seconds": seconds,
    }


def _without_errors(results: Sequence[SandboxResult], weights: Sequence[float]) -> list[tuple[SandboxResult, float]]:
    return [(result, weight) for result, weight in zip(results, weights, strict=True) if result.error is None]


def _rewards(results: Sequence[SandboxResult], weights: Sequence[float], count: int) -> list[float | None]:
    """The weighted sum over the functions that did not fail, for each of `count` completions."""
    counted = _without_errors(results, weights)
    counted_weights = [weight for _, weight in counted]
    return [total_reward([result.scores[i] for result, _ in counted], counted_weights) for i in range(count)]


def _advantages(results: Sequence[SandboxResult], sizes: Sequence[int], settings: ScoringSettings) -> list[float]:
    """Computed over all groups together where they have one size, as in a training step; else group by group."""
    counted = _without_errors(results, settings.weights)
    if not counted:
        return [0.0] * sum(sizes)
    weights = [weight for _, weight in counted]
    scores_by_row = [[result.scores[i] for result, _ in counted] for i in range(sum(sizes))]
    if len(set(sizes)) == 1:
        return _group_advantages(scores_by_row, sizes[0], weights, settings)
    groups = _split(scores_by_row, sizes)
    return [value for group in groups for value in _group_advantages(group, len(group), weights, settings)]


def _group_advantages(
    scores_by_row: list[list[Any]], group_size: int, weights: list[float], settings: ScoringSettings
) -> list[float]:
    if group_size == 1 and settings.scale_rewards != "batch":
        return [0.0] * len(scores_by_row)
    values, _ = advantage_values(
        scores_by_row, group_size, weights=weights, scale_rewards=settings.scale_rewards,
        multi_objective_aggregation=settings.aggregation, baseline=settings.baseline,
    )  # fmt: skip
    return array("f", values).tolist()  # rounded to float32, as a training step has them


def _completion_rows(
    results: Sequence[SandboxResult], rewards: list[float | None], advantages: list[float]
) -> list[dict[str, Any]]:
    """One dict for each completion, with the keys of completions.jsonl."""
    counted = [result for result in results if result.error is None]
    rows: list[dict[str, Any]] = []
    for i, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        row = {
            "rewards": {result.name: result.scores[i] for result in counted},
            "reward": reward,
            "advantage": advantage,
        }
        logged = {column: values[i] for result in counted for column, values in result.logged.items()}
        rows.append(row | ({"logged": logged} if logged else {}))
    return rows


class _DescribedFunctions:
    """Facts about the functions that need no run: label, file, texts that they look for."""

    def __init__(self, settings: ScoringSettings) -> None:
        self._file = settings.file
        self._registered = self._labels_in_file()
        labels = {entry.name: entry.label for entry in builtin_rewards()} | self._registered
        self._calls = [reward_call(name, list(labels)) for name in settings.names]
        self._labels = {call.name: call.alias or labels.get(call.function, call.function) for call in self._calls}
        self._weights = settings.weights

    def to_dict(self, result: SandboxResult, weight: float) -> dict[str, Any]:
        return {
            "name": result.name,
            "label": self._label(result),
            "weight": weight,
            "seconds": result.seconds,
            "error": result.error.to_dict() if result.error else None,
            "printed": result.printed,
        }

    def sample(
        self,
        lines: Sequence[Line],
        sizes: Sequence[int],
        rewards: list[float | None],
        results: Sequence[SandboxResult],
    ) -> Sample:
        """The input of `backend.spec.rewards.verdicts`."""
        completions = [completion for line in lines for completion in line["completions"]]
        functions = [
            Scores(
                result.name, self._label(result), weight, result.scores, result.seconds,
                result.error.sentence if result.error else "", self._required_texts(call),
            )
            for result, weight, call in zip(results, self._weights, self._calls, strict=True)
        ]  # fmt: skip
        return Sample(
            sizes, [completion["text"] for completion in completions], rewards, functions,
            [str(completion.get("stop", "eos")) for completion in completions],
            [str(line.get("answer") or "") for line in lines],
        )  # fmt: skip

    def _label(self, result: SandboxResult) -> str:
        return self._labels.get(result.name, result.name)

    def _required_texts(self, call: RewardCall) -> tuple[str, ...]:
        if call.function == "keyword" and "word" in call.arguments:
            return (str(call.arguments["word"]),)
        file = self._file if call.function in self._registered else None
        if call.file:
            file = locate_reward_file(call.file).resolve()
        return required_texts(call.name, call.function, file)

    def _labels_in_file(self) -> dict[str, str]:
        """Labels of the functions that the user's file registers, by name."""
        try:
            return {entry.name: entry.label for entry in rewards_in_file(self._file)} if self._file else {}
        except Mistake:
            return {}


def _split(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(list(items[start : start + size]))
        start += size
    return pieces
