"""Score completions outside a run, for the reward bench and the command line: rewards, advantages, and findings as
sentences.

Functions run in the sandbox; sampling is in `backend.trainer.trial_sampling`. It imports no mlx: advantages
are plain Python here, and equal to a run's.
"""

from __future__ import annotations

import ast
import re
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from backend.config.config import Config
from backend.rewards.catalogue.catalog import builtin_rewards, locate_reward_file, reward_call, rewards_in_file
from backend.rewards.catalogue.entry import RewardCall
from backend.rewards.catalogue.parse import functions, parse_reward_file
from backend.rewards.runner.score import total_reward
from backend.rewards.sandbox.client import SandboxClient, SandboxResult, SandboxTask
from backend.trainer.health.rules import Finding
from backend.training.advantages import advantage_values
from backend.utils.errors import UserError

# Rules over a scored sample of completions that find what is wrong with reward functions: one function per rule.

SAME_REWARD = 1e-8
"""Rewards that differ by less count as equal."""
DOMINANT_SHARE = 0.9
"""Share of the within-group spread from which one function dominates the others."""
SLOW_S = 0.25
"""Seconds below which a slow function is not reported."""
LEVELS = ("error", "warning", "good", "note")
"""Levels of findings, in the order in which they are reported."""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
REQUIRED_TEXTS = {
    "r1_accuracy_reward_func": ("<answer>",),
    "r1_int_reward_func": ("<answer>",),
    "r1_strict_format_reward_func": TAGS,
    "r1_soft_format_reward_func": TAGS,
    "r1_count_xml": TAGS,
    "think_format_reward": ("<think>", "</think>"),
}
"""Texts without which a shipped function scores 0; for `keyword` it is its argument."""
_MARKS = re.compile(r"</?[A-Za-z_]\w*>|\\boxed|####")


@dataclass(frozen=True, slots=True)
class Scores:
    """One function's scores of a sample. `given`: one per completion, groups in order, None where the function had no opinion,
    empty where it failed with `error`. `seconds`: its run time. `looks_for`: texts without which it scores 0."""

    name: str
    label: str
    weight: float
    given: Sequence[float | None] = ()
    seconds: float = 0.0
    error: str = ""
    looks_for: Sequence[str] = ()

    @property
    def known(self) -> list[float]:
        return [score for score in self.given if score is not None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Scored completions. `sizes`: completions per group; `texts`, `stops` and `rewards`: one per completion, in the order of
    the groups; `answers`: one per group, as in the dataset."""

    sizes: Sequence[int]
    texts: Sequence[str]
    rewards: Sequence[float | None]
    functions: Sequence[Scores]
    stops: Sequence[str] = ()
    answers: Sequence[str] = ()
    groups: Sequence[slice] = field(init=False)

    def __post_init__(self) -> None:
        ends = list(accumulate(self.sizes))
        slices = [slice(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]
        object.__setattr__(self, "groups", slices)

    def group_stds(self, values: Sequence[float | None]) -> list[float]:
        """The standard deviation (n − 1) within each group; 0 for a group with fewer than two values."""
        known = ([value for value in values[group] if value is not None] for group in self.groups)
        return [statistics.stdev(group) if len(group) > 1 else 0.0 for group in known]


Findings = Iterator[Finding]
Rule = Callable[[Sample], Findings]
RULES: list[Rule] = []


def _rule(rule: Rule) -> Rule:
    RULES.append(rule)
    return rule


def verdicts(sample: Sample) -> list[Finding]:
    """What the rules find, errors first; with no error and no warning also a finding that the sample is good."""
    if not sample.texts:
        return []
    findings = [finding for rule in RULES for finding in rule(sample)]
    if not any(finding.level in LEVELS[:2] for finding in findings):
        findings.append(_healthy(sample))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


@_rule
def fails(sample: Sample) -> Findings:
    for scores in sample.functions:
        if scores.error:
            yield Finding(f"fails {scores.name}", scores.error, "A run would stop here.", "error")


@_rule
def no_signal(sample: Sample) -> Findings:
    """Groups whose completions all have the same reward, and the likely reason."""
    flat = [
        group
        for group, spread in zip(sample.groups, sample.group_stds(sample.rewards), strict=True)
        if spread <= SAME_REWARD
    ]
    flat = [
        group for group in flat if len(sample.texts[group]) > 1 and any(x is not None for x in sample.rewards[group])
    ]
    if not flat or 2 * len(flat) < len(sample.sizes):
        return
    several = sum(size > 1 for size in sample.sizes)
    if several == len(flat) == 1:
        sentence = f"All {len(sample.texts[flat[0]])} completions score the same: no signal."
    elif several == len(flat):
        sentence = f"Within each of the {several} prompts all completions score the same: no signal."
    else:
        sentence = f"Within {len(flat)} of {several} prompts all completions score the same, and teach nothing."
    yield Finding("no_signal", sentence, _why_alike(sample, flat))


def _why_alike(sample: Sample, flat: Sequence[slice]) -> str:
    if all(len(set(sample.texts[group])) == 1 for group in flat):
        return "They are the same text throughout: raise the temperature."
    varying = [scores.label for scores in _working(sample) if max(sample.group_stds(scores.given)) > SAME_REWARD]
    if len(varying) > 1 and len(flat) == len(sample.sizes):
        return f"{_listed(varying)} differ, but weighted they cancel out: change a weight."
    if sample.rewards and all(_is_full(scores) for scores in _working(sample)):
        return "Every function gives all it can: take harder prompts."
    return "Take a larger group, a higher temperature, partial credit, or easier prompts."


@_rule
def single(sample: Sample) -> Findings:
    if all(size == 1 for size in sample.sizes):
        sentence = "There is one completion for each prompt, so nothing to compare: every advantage is 0."
        yield Finding("single", sentence, "Give two or more completions for a prompt.", "note")


@_rule
def never_fires(sample: Sample) -> Findings:
    """Functions that gave 0 to every completion, grouped by reason."""
    silent = [scores for scores in sample.functions if scores.known and not any(scores.known)]
    reasons = {scores.name: _why_silent(sample, scores) for scores in silent}
    for reason in dict.fromkeys(reasons.values()):
        alike = [scores for scores in silent if reasons[scores.name] == reason]
        sentence = (
            f"{_listed([scores.label for scores in alike])} never {'fires' if len(alike) == 1 else 'fire'}: {reason}."
        )
        code = f"never_fires {' '.join(scores.name for scores in alike)}"
        yield Finding(code, sentence, _what_then(sample, alike[0]))


def _why_silent(sample: Sample, scores: Scores) -> str:
    texts = list(sample.texts)
    missing = [mark for mark in scores.looks_for if not any(mark in text for text in texts)]
    if missing:
        return f"the model writes no {_listed(missing, 'or')}"
    if scores.looks_for:
        with_all = sum(all(mark in text for mark in scores.looks_for) for text in texts)
        return f"{with_all} of {len(texts)} completions have {_listed(scores.looks_for)}, and none is what it wants"
    return f"it gives 0 to all {len(texts)} completions"


def _what_then(sample: Sample, scores: Scores) -> str:
    if sample.answers and not any(answer.strip() for answer in sample.answers):
        return "The dataset's answers are empty: choose the Answer column on Train."
    if any(not any(mark in text for text in sample.texts) for mark in scores.looks_for):
        return "Say in the system prompt what to write, or reward a first step towards it."
    return "Read some completions beside their answers: the column may be the wrong one, or the task too hard."


@_rule
def silent(sample: Sample) -> Findings:
    for scores in sample.functions:
        if scores.given and not scores.known:
            sentence = f"{scores.label} has no opinion on any completion."
            yield Finding(f"silent {scores.name}", sentence, "Look at the columns that it asks for.")


@_rule
def constant(sample: Sample) -> Findings:
    """Functions that give every completion the same score other than 0."""
    same = [scores for scores in sample.functions if len(scores.known) > 1 and _is_constant(scores) and scores.known[0]]
    if not same:
        return
    gives = (
        f"gives {same[0].known[0]:.3g} to every completion: it adds"
        if len(same) == 1
        else "give every completion the same: they add"
    )
    sentence = f"{_listed([scores.label for scores in same])} {gives} nothing to the advantage."
    code = f"constant {' '.join(scores.name for scores in same)}"
    yield Finding(code, sentence, "What it asks for may be learnt already, or too easy.", "note")


@_rule
def dominates(sample: Sample) -> Findings:
    """A function whose weighted within-group spread is nearly all of the spread."""
    working = _working(sample)
    group_stds = {scores.label: abs(scores.weight) * sum(sample.group_stds(scores.given)) for scores in working}
    total = sum(group_stds.values())
    moving = [label for label, spread in group_stds.items() if spread > SAME_REWARD]
    if len(moving) < 2 or not total:
        return
    label, spread = max(group_stds.items(), key=lambda pair: pair[1])
    if spread / total >= DOMINANT_SHARE:
        others = "the other hardly counts" if len(moving) == 2 else f"the other {len(moving) - 1} hardly count"
        sentence = f"{label} makes {spread / total:.0%} of the difference between completions; {others}."
        yield Finding("dominates", sentence, "Lower its weight, if the others are meant to be heard.", "note")


@_rule
def slow(sample: Sample) -> Findings:
    total = sum(scores.seconds for scores in sample.functions)
    for scores in sample.functions:
        if scores.seconds >= SLOW_S and scores.seconds >= DOMINANT_SHARE * total and len(sample.functions) > 1:
            sentence = f"{scores.label} takes {scores.seconds:.2g} s of {total:.2g} s: much slower than the rest."
            yield Finding(f"slow {scores.name}", sentence, "It is called once a step with every completion.", "note")


@_rule
def cut_off(sample: Sample) -> Findings:
    cut = sum(stop == "length" for stop in sample.stops)
    if sample.stops and cut / len(sample.stops) > 0.3:
        sentence = f"{cut} of {len(sample.stops)} completions ran into the length limit."
        yield Finding("cut_off", sentence, "Raise Completion, or strengthen a reward for the right form.")


def _healthy(sample: Sample) -> Finding:
    if all(size == 1 for size in sample.sizes):
        return Finding("scored", "Every function gave scores that a run can use.", "", "good")
    apart = sum(spread > SAME_REWARD for spread in sample.group_stds(sample.rewards))
    difference = "the completions score differently" if len(sample.sizes) == 1 else (
        f"within {apart} of {len(sample.sizes)} prompts the completions score differently"
    )  # fmt: skip
    return Finding("signal", f"There is something to learn from: {difference}.", "", "good")


# ── help ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def required_texts(name: str, function: str, file: Path | None) -> tuple[str, ...]:
    """Texts without which a function scores 0: from a table for shipped ones; for a user's function the tags in the string
    literals of its `def`. Empty where there are none or the file cannot be read."""
    if file is None or function in {entry.name for entry in builtin_rewards()}:
        return REQUIRED_TEXTS.get(function, REQUIRED_TEXTS.get(name, ()))
    try:
        tree = parse_reward_file(file)
    except UserError:
        return ()
    defined = next((node for node in functions(tree) if function in (node.name, *_strings(node.decorator_list))), None)
    body = defined.body[1:] if defined and ast.get_docstring(defined) else defined.body if defined else []
    return tuple(dict.fromkeys(mark for text in _strings(body) for mark in _MARKS.findall(text)))


def _strings(nodes: Sequence[ast.AST]) -> list[str]:
    every = (part for node in nodes for part in ast.walk(node))
    return [part.value for part in every if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def _working(sample: Sample) -> list[Scores]:
    return [scores for scores in sample.functions if scores.given and scores.weight]


def _is_full(scores: Scores) -> bool:
    """Whether it gives the same positive score to every completion."""
    return _is_constant(scores) and scores.known[0] > 0


def _is_constant(scores: Scores) -> bool:
    return bool(scores.known) and max(scores.known) - min(scores.known) <= SAME_REWARD


def _listed(words: Sequence[str], last: str = "and") -> str:
    words = [word for word in words if not word.startswith("</")] or list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


# ── trial scoring ────────────────────────────────────────────────────────────────────────────────────────────────────

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
    """Score groups in the sandbox; `poll` and `on_function` as in `SandboxClient.score`. Raises UserError.

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
        """The input of `backend.rewards.trial_scoring`."""
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
        except UserError:
            return {}


def _split(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(list(items[start : start + size]))
        start += size
    return pieces
