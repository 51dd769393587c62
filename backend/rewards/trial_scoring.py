"""A sample, scored: from what each function gave to rewards, advantages and the verdict in words.

The bench and the command line tell people the same from here. It calls no function and samples nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.rewards.runner.score import total_reward
from backend.rewards.sandbox.client import SandboxClient, SandboxResult, SandboxTask
from backend.spec.faults import Mistake
from backend.spec.rewards.catalog import builtin_rewards, locate_reward_file, reward_call, rewards_in_file
from backend.spec.rewards.entry import RewardCall
from backend.spec.rewards.verdicts import Sample, Scores, required_texts, verdicts
from backend.training.advantages import advantages

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rules:
    """What a sample is judged by: the reward settings of a config, and how advantages are worked out."""

    names: Sequence[str]
    weights: Sequence[float]
    file: Path | None = None
    timeout_s: float = 60.0
    max_completion_length: int | None = None
    scale_rewards: str = "group"
    aggregation: str = "sum_then_normalize"
    baseline: str = "group"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Rules:
        """From sound settings by key, as `Config.model_dump` gives them."""
        names, file = settings["reward_functions"], settings["reward_functions_file"]
        return cls(
            names=names,
            weights=settings["reward_weights"] or [1.0] * len(names),
            file=locate_reward_file(file).resolve() if file else None,
            timeout_s=settings["reward_timeout"],
            max_completion_length=settings["max_completion_length"],
            scale_rewards=settings["scale_rewards"],
            aggregation=settings["multi_objective_aggregation"],
            baseline=settings["advantage_baseline"],
        )

    def task(self, lines: Sequence[Line]) -> SandboxTask:
        return SandboxTask(self.names, lines, self.file, self.timeout_s, self.max_completion_length)


def score_lines(
    scorer: SandboxClient,
    lines: Sequence[Line],
    rules: Rules,
    poll: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Score groups as `backend.rewards.completion_lines.line_of` writes them, in a process apart.

    → {"scored": [{"rewards", "reward", "advantage", "logged"?} of each completion, by group], "functions": [{"name",
    "label", "weight", "seconds", "error", "printed"}], "findings": [Finding as a dict], "seconds"}. Raises Mistake.
    """
    began = time.perf_counter()
    outcomes = scorer.score(rules.task(lines), poll, tell)
    taken = time.perf_counter() - began
    sizes = [len(line["completions"]) for line in lines]
    rewards = _rewards(outcomes, rules.weights, sum(sizes))
    labels = _labels(rules)
    told = [_told(one, weight, labels) for one, weight in zip(outcomes, rules.weights, strict=True)]
    scored = _scored(outcomes, rewards, _advantages(outcomes, sizes, rules))
    found = verdicts(_sample(lines, sizes, rewards, outcomes, rules, labels))
    return {
        "scored": _cut(scored, sizes),
        "functions": told,
        "findings": [asdict(one) for one in found],
        "seconds": taken,
    }


def _rewards(outcomes: Sequence[SandboxResult], weights: Sequence[float], count: int) -> list[float | None]:
    """The weighted sum over the functions that did not fail."""
    sound = [(one.scores, weight) for one, weight in zip(outcomes, weights, strict=True) if one.error is None]
    return [total_reward([scores[i] for scores, _ in sound], [weight for _, weight in sound]) for i in range(count)]


def _advantages(outcomes: Sequence[SandboxResult], sizes: Sequence[int], rules: Rules) -> list[float]:
    """All groups together where they are of one size, as in a step; else each by itself."""
    sound = [(one.scores, weight) for one, weight in zip(outcomes, rules.weights, strict=True) if one.error is None]
    if not sound:
        return [0.0] * sum(sizes)
    rows = [[scores[i] for scores, _ in sound] for i in range(sum(sizes))]
    if len(set(sizes)) == 1:
        return _of_groups(rows, sizes[0], [weight for _, weight in sound], rules)
    alone = (_of_groups(group, len(group), [weight for _, weight in sound], rules) for group in _cut(rows, sizes))
    return [value for group in alone for value in group]


def _of_groups(rows: list[list[Any]], size: int, weights: list[float], rules: Rules) -> list[float]:
    if size == 1 and rules.scale_rewards != "batch":
        return [0.0] * len(rows)
    found, _ = advantages(
        rows, size, weights=weights, scale_rewards=rules.scale_rewards,
        multi_objective_aggregation=rules.aggregation, baseline=rules.baseline,
    )  # fmt: skip
    values: Any = found.tolist()
    return values


def _scored(
    outcomes: Sequence[SandboxResult], rewards: list[float | None], advantage: list[float]
) -> list[dict[str, Any]]:
    """One entry a completion, in the words of completions.jsonl."""
    sound = [one for one in outcomes if one.error is None]
    return [
        {"rewards": {one.name: one.scores[i] for one in sound}, "reward": reward, "advantage": advantage[i], **_logged(sound, i)}
        for i, reward in enumerate(rewards)
    ]  # fmt: skip


def _logged(outcomes: Sequence[SandboxResult], i: int) -> dict[str, Any]:
    columns = {column: values[i] for one in outcomes for column, values in one.logged.items()}
    return {"logged": columns} if columns else {}


def _told(one: SandboxResult, weight: float, labels: Mapping[str, str]) -> dict[str, Any]:
    error = one.error.to_dict() if one.error else None
    about = {"name": one.name, "label": labels.get(one.name, one.name), "weight": weight}
    return {**about, "seconds": one.seconds, "error": error, "printed": one.printed}


def _sample(
    lines: Sequence[Line],
    sizes: Sequence[int],
    rewards: list[float | None],
    outcomes: Sequence[SandboxResult],
    rules: Rules,
    labels: Mapping[str, str],
) -> Sample:
    made = [one for line in lines for one in line["completions"]]
    calls = _calls(rules)
    functions = [
        Scores(
            one.name, labels.get(one.name, one.name), weight, one.scores, one.seconds,
            one.error.sentence if one.error else "",
            _looked_for(call, rules),
        )
        for one, weight, call in zip(outcomes, rules.weights, calls, strict=True)
    ]  # fmt: skip
    return Sample(
        sizes, [one["text"] for one in made], rewards, functions,
        [str(one.get("stop", "eos")) for one in made], [str(line.get("answer") or "") for line in lines],
    )  # fmt: skip


def _looked_for(call: RewardCall, rules: Rules) -> tuple[str, ...]:
    if call.function == "keyword" and "word" in call.arguments:
        return (str(call.arguments["word"]),)
    return required_texts(call.name, call.function, _file_of(call, rules))


def _calls(rules: Rules) -> list[RewardCall]:
    known = [entry.name for entry in builtin_rewards()]
    return [reward_call(name, [*known, *_own(rules)]) for name in rules.names]


def _own(rules: Rules) -> dict[str, str]:
    """Label by name of what the person's file registers."""
    try:
        return {entry.name: entry.label for entry in rewards_in_file(rules.file)} if rules.file else {}
    except Mistake:
        return {}


def _file_of(call: RewardCall, rules: Rules) -> Path | None:
    if call.file:
        return locate_reward_file(call.file).resolve()
    return rules.file if call.function in _own(rules) else None


def _labels(rules: Rules) -> dict[str, str]:
    known = {entry.name: entry.label for entry in builtin_rewards()} | _own(rules)
    return {call.name: call.alias or known.get(call.function, call.function) for call in _calls(rules)}


def _cut(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    pieces, place = [], 0
    for size in sizes:
        pieces.append(list(items[place : place + size]))
        place += size
    return pieces
