"""Agreement of judges and reward models with the user's scores and with themselves, and their bias of place and length.
All questions are known beforehand, so the number of calls can be said before the first."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

from backend.judges.judge import Judge
from backend.judges.model_reward import Block, correlation, model_entries, open_model_rewards, sums
from backend.rewards.bench import Case, group_of, read_cases
from backend.rewards.calls import Poll, wait_on
from backend.rewards.scoring import TrainerState
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError

if TYPE_CHECKING:
    from backend.judges.model_reward import ModelReward

AGREES, FEW_PAIRS = 0.7, 10  # two people agree on 80 % of pairs (MT-Bench, arXiv:2306.05685), chance on 50 %
FAILS = 0.1  # share of completions without a score, as in the health rule `judge_fails`
CERTAIN = 2.94  # standard errors: p = .01 for the largest of three contrasts: accuses one fair judge in 100
SMALL = 0.1  # a bias below this part of the spread within a group moves advantages by less than .1: no warning
MOST_GROUPS, ORDERS = 8, 4  # 8 groups of 8 in 4 orders show a bias of .1 beside a noise of .1 for 9 of 10 judges
MOST_PADDED, MOST_AGAIN = 48, 16  # completions padded and scored twice where each costs a call: enough to show length
FILLER = (  # sentences without content: a padded answer is neither better nor worse
    "The answer given here covers the question as it was asked.",
    "It has been set out in the order in which its parts belong together.",
    "What has been said so far is meant exactly as it stands.",
    "The same could be put in other words without any change in what it means.",
)

Kind = Literal["group", "single", "model"]
Labels = Mapping[str, float | None]  # the different completions of a prompt → the user's score
Scores = Mapping[tuple[int, int], float]  # group and completion → score


@dataclass(frozen=True, slots=True)
class Question:
    """A group to score. `order`: for a judge in group mode; `padded`: texts with filler; `again`: asked before."""

    group: int
    texts: Sequence[str]
    order: Sequence[int]
    padded: frozenset[int] = frozenset()
    again: bool = False


@dataclass(frozen=True, slots=True)
class Effect:
    """A bias in points, and its distance from 0 in standard errors of a permutation test."""

    points: float
    z: float

    def is_clear(self, spread: float | None) -> bool:
        return abs(self.z) > CERTAIN and abs(self.points) > SMALL * (spread or 0.0)


@dataclass(slots=True)
class Agreement:
    """Figures that could not be measured are None or empty. `accuracy`: of the `pairs` that the user ranks differently,
    where a tie counts half. `itself`: between two askings. `spread`: standard deviation of scores within a group.
    `places`: mean score by place in the list. `place`: what the place `which` adds. `length`: what filler adds."""

    name: str
    kind: Kind
    calls: int
    failed: float
    spread: float | None
    pairs: int = 0
    accuracy: float | None = None
    spearman: float | None = None
    itself: float | None = None
    places: list[float] = field(default_factory=list[float])
    which: str = ""
    place: Effect | None = None
    length: Effect | None = None
    concerns: list[str] = field(default_factory=list[str])
    verdict: str = ""


def questions_for(groups: Sequence[Labels], kind: Kind, seed: int = 0) -> list[Question]:
    """Each group as it is, in other orders or again, and padded: in group mode one half of it and then the other.
    Groups beyond the limits are scored once if they have labels."""
    chance, listed, asked = random.Random(seed), list[Question](), 0
    for number, group in enumerate(groups):
        texts, indices = [*group], range(len(group))
        is_measured = asked < (MOST_GROUPS if kind == "group" else MOST_PADDED)
        has_labels = any(label is not None for label in group.values())
        if not (is_measured or has_labels) or (kind == "group" and len(group) < 2):
            continue
        asked += 1 if kind == "group" else len(group)
        order = chance.sample(indices, len(group))
        listed.append(Question(number, texts, order))
        if not is_measured:
            continue
        times = ORDERS - 1 if kind == "group" else int(kind == "single" and asked <= MOST_AGAIN)
        listed += [Question(number, texts, chance.sample(indices, len(group)), again=True) for _ in range(times)]
        half = frozenset(chance.sample(indices, len(group) // 2)) if kind == "group" else frozenset(indices)
        for padded in filter(None, (half, frozenset(indices) - half)):
            longer = [pad(text) if i in padded else text for i, text in enumerate(texts)]
            listed.append(Question(number, longer, order, padded))
    return listed


def pad(text: str) -> str:
    """A completion with filler behind it, about as long again."""
    sentences: list[str] = []
    while not sentences or sum(len(each.split()) for each in sentences) < len(text.split()):
        sentences.append(FILLER[len(sentences) % len(FILLER)])
    return f"{text.rstrip()}\n\n{' '.join(sentences)}"


def measure(
    name: str,
    kind: Kind,
    groups: Sequence[Labels],
    questions: Sequence[Question],
    answers: Sequence[Sequence[float | None]],
    causes: Iterable[str] = (),
) -> Agreement:
    """The figures from the answers to `questions_for`: a score for each text, or None. `causes`: why there was none."""
    given: list[tuple[Question, Scores]] = []
    for question, scores in zip(questions, answers, strict=True):
        given.append((question, {(question.group, i): s for i, s in enumerate(scores) if s is not None}))
    plain: Scores = {}
    for question, scores in given:
        plain |= {} if question.again or question.padded else scores
    labels = {
        (number, i): label
        for number, group in enumerate(groups)
        for i, label in enumerate(group.values())
        if label is not None
    }
    total = sum(len(question.texts) for question in questions)
    in_groups = [y for _, y in _blocks(plain, plain, "group") if len(y) > 1] or [[*plain.values()]]
    found = Agreement(
        name,
        kind,
        calls=len(questions) if kind == "group" else total,
        failed=1 - sum(len(scores) for _, scores in given) / total,
        spread=fmean(map(pstdev, in_groups)) if len(plain) > 1 else None,
    )
    blocks = _blocks(labels, plain, kind)
    found.accuracy, found.pairs = _accuracy(blocks)
    found.spearman = correlation([(_ranks(x), _ranks(y)) for x, y in blocks])
    again = [scores for question, scores in given if question.again]
    found.itself, _ = _accuracy([block for scores in again for block in _blocks(plain, scores, kind)])
    if kind == "group":
        _measure_place(found, [pair for pair in given if not pair[0].padded])
    padded = [pair for pair in given if pair[0].padded]
    # Padded or not, and the score: of one completion, or as the difference between the lists of a group's halves.
    lengths = [([0, 1], [plain[key], s]) for _, scores in padded for key, s in scores.items() if key in plain]
    if kind == "group":
        lengths = list[Block]()
        for (question, one), (_, other) in zip(padded[::2], padded[1::2], strict=True):
            both = one.keys() & other.keys()
            signs = [1 if i in question.padded else -1 for _, i in both]
            lengths.append((signs, [one[key] - other[key] for key in both]))
    found.length = _effect(lengths)
    found.concerns = list(_concerns(found, causes))
    labels = "Not compared with your labels"
    if found.accuracy is not None:
        few = ", too few to tell" if found.pairs < FEW_PAIRS else ""
        labels = f"Agrees with your labels on {found.accuracy:.0%} of {found.pairs} pair{'s' * (found.pairs != 1)}{few}"
    biases = [word for word, effect in (("place", found.place), ("length", found.length)) if effect]
    none = [f"no bias of {' or '.join(biases)} was found"] if biases and not found.concerns else []
    found.verdict = f"{'; '.join((labels, *found.concerns, *none))}."
    return found


def _blocks(x: Scores, y: Scores, kind: Kind) -> list[Block]:
    """What can be compared: the scores of one prompt in group mode, where they are relative; else all."""
    keys = groupby(sorted(x.keys() & y.keys()), lambda key: key[0] if kind == "group" else 0)
    return [([x[key] for key in block], [y[key] for key in block]) for block in (list(each) for _, each in keys)]


def _accuracy(blocks: Sequence[Block]) -> tuple[float | None, int]:
    """The share of the pairs with different x that y ranks in the same way, and their number."""
    signs = [
        (a - b) * (c - d) for x, y in blocks for (a, c), (b, d) in combinations(zip(x, y, strict=True), 2) if a != b
    ]
    agreed = sum(1.0 if sign > 0 else 0.5 if sign == 0 else 0.0 for sign in signs)
    return (agreed / len(signs) if signs else None), len(signs)


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum((other < value) + (other == value) / 2 for other in values) for value in values]


def _effect(blocks: Sequence[Block]) -> Effect | None:
    """The slope of y on x within blocks, against its spread if x were dealt out anew within each block."""
    of_blocks = [(*sums(block), len(block[0]) - 1) for block in blocks if len(block[0]) > 1]
    variance = sum(xx * yy / freedom for _, xx, yy, freedom in of_blocks)
    xy, xx = sum(each[0] for each in of_blocks), sum(each[1] for each in of_blocks)
    return Effect(*((xy / xx, xy / math.sqrt(variance)) if variance else (0.0, 0.0))) if of_blocks else None


def _measure_place(found: Agreement, given: Sequence[tuple[Question, Scores]]) -> None:
    """Scores less the mean of their completion over all orders: only place and chance are left."""
    by_completion, by_place = defaultdict[tuple[int, int], list[float]](list), defaultdict[int, list[float]](list)
    for _, scores in given:
        for key, score in scores.items():
            by_completion[key].append(score)
    calls: list[Block] = []  # place from 0 to 1, and the rest of the score
    for question, scores in given:
        places, rests = list[float](), list[float]()
        for place, i in enumerate(question.order):
            key = (question.group, i)
            if (count := len(by_completion[key])) > 1 and key in scores:
                places.append(place / (len(question.order) - 1))
                # A mean over few orders holds a part of what the place has added.
                rests.append((scores[key] - fmean(by_completion[key])) * count / (count - 1))
                by_place[place].append(rests[-1])
        calls.append((places, rests))
    if by_place:
        mean = fmean(score for scores in by_completion.values() for score in scores)
        found.places = [mean + fmean(by_place[place]) for place in sorted(by_place)]
        contrasts = {
            "the first place": lambda place: float(place == 0),
            "the last place": lambda place: float(place == 1),
            "an early place": lambda place: 1 - place,
        }
        effects = {name: _effect([([x(p) for p in places], y) for places, y in calls]) for name, x in contrasts.items()}
        found.which, found.place = max(effects.items(), key=lambda pair: abs(pair[1].z) if pair[1] else 0.0)


def _concerns(found: Agreement, causes: Iterable[str]) -> Iterator[str]:
    if found.accuracy is not None and found.pairs >= FEW_PAIRS and found.accuracy < AGREES:
        yield "that is little, as two people agree on about 80% and chance on 50%"
    if found.failed > FAILS:
        yield ": ".join((f"{found.failed:.0%} of completions got no score", *causes))
    if found.spread == 0:
        yield "it does not tell the answers to a prompt apart"
    if found.itself is not None and found.itself < AGREES:
        how = "in another order" if found.kind == "group" else "again"
        yield f"asked {how}, it agrees with itself on only {found.itself:.0%} of pairs"
    if (place := found.place) and place.is_clear(found.spread):
        more = "more" if place.points > 0 else "less"
        yield f"{found.which} in the list scores {abs(place.points):.2g} {more}: it looks at the place"
    if (length := found.length) and length.is_clear(found.spread):
        rise, likes = ("rise", "rewards") if length.points > 0 else ("fall", "punishes")
        yield f"scores {rise} by {abs(length.points):.2g} when answers are padded: it {likes} length"


class Examination:
    """A judge or reward model, and what it will be asked about these completions and the user's cases of it."""

    def __init__(self, model: ModelReward, groups: Iterable[Group], cases: Iterable[Case]) -> None:
        self.model, self.name = model, model.name
        self.kind: Kind = model.mode if isinstance(model, Judge) else "model"
        labelled: list[tuple[Group, float | None]] = [(group, None) for group in groups]
        for case in cases:  # of a rubric, a case may have been kept under another judge's name
            expected, group = case["expected"], group_of(case, 0, "A case")
            only = next(iter(expected.values())) if len(expected) == 1 else None
            labelled.append((group, expected.get(self.name, only)))
        found: dict[str, tuple[Problem, dict[str, float | None]]] = {}
        for group, label in labelled:
            prompt = repr((group.problem.prompt, group.problem.messages))
            _, labels = found.setdefault(prompt, (group.problem, {}))
            for completion in group.completions:
                labels[completion.text] = label if label is not None else labels.get(completion.text)
        self.problems = [problem for problem, _ in found.values()]
        self.groups = [labels for _, labels in found.values()]
        self.questions = questions_for(self.groups, self.kind)
        self.calls = len(self.questions) if self.kind == "group" else sum(len(each.texts) for each in self.questions)

    def run(self, poll: Poll = wait_on, report: Callable[[dict[str, Any]], None] = lambda progress: None) -> Agreement:
        """Ask everything. Reports {"phase": its name, "done", "of"}, in questions. Raises UserError or RewardError."""
        if not self.questions:
            least = "two completions of one prompt" if self.kind == "group" else "a completion"
            raise UserError("cases", f"There is nothing to ask {self.name} about: give {least}, or cases of it.")
        model, answers, causes = self.model, list[Sequence[float | None]](), list[str]()

        def told(done: int) -> None:
            report({"phase": self.name, "done": done, "of": len(self.questions)})

        try:
            model.load(None)
            if isinstance(model, Judge):
                asked = [(self.problems[each.group], each.texts, each.order) for each in self.questions]
                answers += model.ask_afresh(asked, poll, told)
                causes += model.causes.values()
            for question in self.questions[len(answers) :]:
                completions = [Completion([], [], text, "eos") for text in question.texts]
                group = Group(self.problems[question.group], completions)
                answers += model.score([group], TrainerState(), poll).scores
                told(len(answers))
        finally:
            model.close()
        return measure(self.name, self.kind, self.groups, self.questions, answers, causes)


def examinations(
    entries: Sequence[str], reward_file: Path | None, groups: Sequence[Group], cases: Sequence[Case] = ()
) -> list[Examination]:
    """Of every judge and reward model among `entries`, by these completions and cases, and the cases beside rubrics and
    the reward file. Raises UserError."""
    chosen = model_entries(entries, reward_file)
    if not chosen:
        raise UserError("reward_functions", "None of the reward functions is a judge or a reward model.")
    kept = read_cases(reward_file) if reward_file else []
    listed: list[Examination] = []
    for model in open_model_rewards([entry for entry in entries if entry in chosen], Path.cwd()).values():
        rubric = model.rubric_file if isinstance(model, Judge) else None
        own = [case for case in kept if model.name in case["expected"]] + (read_cases(rubric) if rubric else [])
        listed.append(Examination(model, groups, [*own, *cases]))
    return listed
