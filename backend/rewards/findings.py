"""Rules that find problems of reward functions in scored completions."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from backend.data.signal import expected_signal
from backend.rewards.catalogue import builtin_rewards, functions, parse_reward_file
from backend.trainer.health.rules import Finding
from backend.utils.errors import UserError

SAME_REWARD = 1e-8  # difference below which rewards are equal
DOMINANT_SHARE = 0.9  # share of the within-group spread that counts as dominant
SLOW_S = 0.25
FEW_SIGNALS = 0.7  # share of groups with a signal below which choosing prompts may pay
LEVELS = ("error", "warning", "good", "note")  # levels of findings, in report order

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
REQUIRED_TEXTS = {
    "r1_accuracy_reward_func": ("<answer>",),
    "r1_int_reward_func": ("<answer>",),
    "r1_strict_format_reward_func": _TAGS,
    "r1_soft_format_reward_func": _TAGS,
    "r1_count_xml": _TAGS,
    "think_format_reward": ("<think>", "</think>"),
}  # texts that a shipped function requires; `keyword` requires its argument
_MARKS = re.compile(r"</?[A-Za-z_]\w*>|\\boxed|####")


@dataclass(slots=True)
class Scores:
    """Scores of one function. `given`: one per completion, None for no opinion, empty after an `error`, the place of
    `RewardError`. `looks_for`: required texts. `logged`: columns by name."""

    name: str
    label: str = ""
    weight: float = 1.0
    given: Sequence[float | None] = ()
    seconds: float = 0.0
    error: Mapping[str, Any] | None = None
    looks_for: Sequence[str] = ()
    logged: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Any])
    printed: str = ""

    @property
    def known(self) -> list[float]:
        return [score for score in self.given if score is not None]

    @property
    def is_constant(self) -> bool:
        return bool(self.known) and max(self.known) - min(self.known) <= SAME_REWARD


@dataclass(frozen=True, slots=True)
class Sample:
    """Scored completions. `sizes`: completions per group; `texts`, `stops`, `rewards`: one per completion; `answers`:
    one per group."""

    sizes: Sequence[int]
    texts: Sequence[str]
    rewards: Sequence[float | None]
    functions: Sequence[Scores]
    stops: Sequence[str] = ()
    answers: Sequence[str] = ()
    group_size: int = 0  # of a run, 0 if unknown
    solved_from: float = 1.0

    @property
    def groups(self) -> list[slice]:
        return [slice(end - size, end) for size, end in zip(self.sizes, accumulate(self.sizes), strict=True)]

    def group_stds(self, values: Sequence[float | None]) -> list[float]:
        """Standard deviation (n − 1) within each group; 0 below two values."""
        known = ([value for value in values[group] if value is not None] for group in self.groups)
        return [statistics.stdev(group) if len(group) > 1 else 0.0 for group in known]

    @property
    def working(self) -> list[Scores]:
        return [scores for scores in self.functions if scores.given and scores.weight]

    @property
    def is_single(self) -> bool:
        return all(size == 1 for size in self.sizes)


def verdicts(sample: Sample) -> list[Finding]:
    """All findings, errors first; a positive one if there are no problems."""
    if not sample.texts:
        return []
    rules = (_no_signal, _never_fires, _others)
    findings = [finding for rule in rules for finding in rule(sample)]
    if not any(finding.level in LEVELS[:2] for finding in findings):
        if sample.is_single:
            findings.append(Finding("scored", "Every function gave scores that a run can use.", "", "good"))
        else:
            apart = sum(spread > SAME_REWARD for spread in sample.group_stds(sample.rewards))
            difference = f"within {apart} of {len(sample.sizes)} prompts the completions score differently"
            difference = "the completions score differently" if len(sample.sizes) == 1 else difference
            findings.append(Finding("signal", f"There is something to learn from: {difference}.", "", "good"))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def _no_signal(sample: Sample) -> Iterator[Finding]:
    flat = [
        group
        for group, spread in zip(sample.groups, sample.group_stds(sample.rewards), strict=True)
        if spread <= SAME_REWARD
        and len(sample.texts[group]) > 1
        and any(reward is not None for reward in sample.rewards[group])
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
    varying = [scores.label for scores in sample.working if max(sample.group_stds(scores.given)) > SAME_REWARD]
    if all(len(set(sample.texts[group])) == 1 for group in flat):
        advice = "They are the same text throughout: raise the temperature."
    elif len(varying) > 1 and len(flat) == len(sample.sizes):
        advice = f"{_listed(varying)} differ, but weighted they cancel out: change a weight."
    elif sample.rewards and all(scores.is_constant and scores.known[0] > 0 for scores in sample.working):
        advice = "Every function gives all it can: take harder prompts."
    else:
        advice = "Take a larger group, a higher temperature, partial credit, or easier prompts."
    yield Finding("no_signal", sentence, advice)


def _never_fires(sample: Sample) -> Iterator[Finding]:
    by_reason: dict[str, list[Scores]] = {}
    for scores in sample.functions:
        if not scores.known or any(scores.known):
            continue
        missing = [mark for mark in scores.looks_for if not any(mark in text for text in sample.texts)]
        reason = f"it gives 0 to all {len(sample.texts)} completions"
        if missing:
            reason = f"the model writes no {_listed(missing, 'or')}"
        elif scores.looks_for:
            count = sum(all(mark in text for mark in scores.looks_for) for text in sample.texts)
            texts = _listed(scores.looks_for)
            reason = f"{count} of {len(sample.texts)} completions have {texts}, and none is what it wants"
        by_reason.setdefault(reason, []).append(scores)
    for reason, alike in by_reason.items():
        if sample.answers and not any(answer.strip() for answer in sample.answers):
            advice = "The dataset's answers are empty: choose the Answer column on Train."
        elif any(not any(mark in text for text in sample.texts) for mark in alike[0].looks_for):
            advice = "Say in the system prompt what to write, or reward a first step towards it."
        else:
            advice = (
                "Read some completions beside their answers: the column may be the wrong one, or the task too hard."
            )
        fires = "fires" if len(alike) == 1 else "fire"
        sentence = f"{_listed([scores.label for scores in alike])} never {fires}: {reason}."
        yield Finding(f"never_fires {' '.join(scores.name for scores in alike)}", sentence, advice)


def _others(sample: Sample) -> Iterator[Finding]:
    total = sum(scores.seconds for scores in sample.functions)
    for scores in sample.functions:
        if scores.error:
            yield Finding(f"fails {scores.name}", scores.error["sentence"], "A run would stop here.", "error")
        if scores.given and not scores.known:
            sentence = f"{scores.label} has no opinion on any completion."
            yield Finding(f"silent {scores.name}", sentence, "Look at the columns that it asks for.")
        if scores.seconds >= SLOW_S and scores.seconds >= DOMINANT_SHARE * total and len(sample.functions) > 1:
            sentence = f"{scores.label} takes {scores.seconds:.2g} s of {total:.2g} s: much slower than the rest."
            yield Finding(f"slow {scores.name}", sentence, "It is called once a step with every completion.", "note")
    if sample.is_single:
        sentence = "There is one completion for each prompt, so nothing to compare: every advantage is 0."
        yield Finding("single", sentence, "Give two or more completions for a prompt.", "note")
    same = [scores for scores in sample.functions if len(scores.known) > 1 and scores.is_constant and scores.known[0]]
    if same:
        gives = "give every completion the same: they add"
        if len(same) == 1:
            gives = f"gives {same[0].known[0]:.3g} to every completion: it adds"
        sentence = f"{_listed([scores.label for scores in same])} {gives} nothing to the advantage."
        code = f"constant {' '.join(scores.name for scores in same)}"
        yield Finding(code, sentence, "What it asks for may be learnt already, or too easy.", "note")
    # Nearly all of the weighted spread within groups.
    spreads = {scores.label: abs(scores.weight) * sum(sample.group_stds(scores.given)) for scores in sample.working}
    moving = [label for label, spread in spreads.items() if spread > SAME_REWARD]
    label, spread = max(spreads.items(), key=lambda pair: pair[1], default=("", 0.0))
    if len(moving) > 1 and spread >= DOMINANT_SHARE * sum(spreads.values()):
        others = "the other hardly counts" if len(moving) == 2 else f"the other {len(moving) - 1} hardly count"
        share = f"{spread / sum(spreads.values()):.0%}"
        sentence = f"{label} makes {share} of the difference between completions; {others}."
        yield Finding("dominates", sentence, "Lower its weight, if the others are meant to be heard.", "note")
    rewards = [[reward for reward in sample.rewards[group] if reward is not None] for group in sample.groups]
    if sample.group_size > 1 and not sample.is_single and (known := [each for each in rewards if each]):
        share = expected_signal(known, sample.group_size, sample.solved_from)
        sentence = f"Over the whole dataset about {share:.0%} of the groups of {sample.group_size} would have a signal."
        advice = "Prompt selection by pass rate chooses prompts that have one." if share < FEW_SIGNALS else ""
        yield Finding("expected_signal", sentence, advice, "note")
    cut = sum(stop == "length" for stop in sample.stops)
    if sample.stops and cut / len(sample.stops) > 0.3:
        sentence = f"{cut} of {len(sample.stops)} completions ran into the length limit."
        yield Finding("cut_off", sentence, "Raise Completion, or strengthen a reward for the right form.")


def required_texts(name: str, function: str, file: Path | None) -> tuple[str, ...]:
    """Texts that a function requires; for user functions the tags in string literals of its `def`."""
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


def _listed(words: Sequence[str], last: str = "and") -> str:
    words = [word for word in words if not word.startswith("</")] or list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
