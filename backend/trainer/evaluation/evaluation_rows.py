"""Evaluations on disk, in `<run>/evaluations/`: NAME.jsonl (an `EvaluatedRow` a line), then NAME.json."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Literal, NotRequired, TypedDict, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from backend.rewards.catalogue import canonical_entry, metric_name, nearest, read_call
from backend.runs.completion_rows import CompletionRow
from backend.runs.events import parse_line
from backend.runs.run_folder import RunFolder
from backend.utils.disk import replace_file, writing
from backend.utils.errors import UserError
from backend.utils.files import json_safe, open_regular, read_bytes
from backend.utils.text import quote

CONFIDENCE = 0.95
SideName = Literal["base", "tuned", "model"]

DecodingName = Literal["greedy", "sampled"]

FULL_SCORES = {  # shipped functions that compare with the dataset's answer → the score of a right one
    "r1_accuracy_reward_func": 2.0,
    "accuracy_reward": 1.0,
    "math_eval": 1.0,
    "multiple_choice": 1.0,
    "jaccard": 1.0,
}

TOTAL = "reward"  # the name of the weighted sum among the figures of a side


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class MeanWithInterval(_Part):
    """A mean over prompts and its interval at CONFIDENCE."""

    value: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class Subject(_Part):
    """The model, and the run and step of the tuned side. `config_sha256`: of the settings as YAML."""

    model: str
    run: str | None = None
    step: int | None = None
    train_type: str | None = None
    config_sha256: str = ""


class Data(_Part):
    """The prompts. `rows` of `rows_in_split` were answered; `trained_on` of them are among the training rows too."""

    dataset: str
    split: str
    source: str
    rows: int
    rows_in_split: int
    too_long: int = 0
    trained_on: int = 0


class RewardFunctionUsed(_Part):
    name: str
    weight: float


class PassRule(_Part):
    """A completion passes where `reward`, a function's name or TOTAL, is at least `at_least`."""

    reward: str
    at_least: float
    chosen_by: Literal["user", "default"]

    def sentence(self) -> str:
        which = "the reward" if self.reward == TOTAL else self.reward
        return f"A completion passes where {which} is at least {self.at_least:g}."

    def is_met_by(self, completion: CompletionRow) -> bool:
        score = completion["reward"] if self.reward == TOTAL else completion["rewards"].get(self.reward)
        return score is not None and score >= self.at_least


def default_pass_rule(entries: Iterable[str]) -> PassRule | None:
    """The first entry that compares with the answer, at the score of a right one."""
    known = ((name, full) for name, full in _full_scores(entries).items() if full is not None)
    return next((PassRule(reward=name, at_least=full, chosen_by="default") for name, full in known), None)


def read_pass_rule(text: str, entries: Iterable[str]) -> PassRule:
    """The rule NAME>=SCORE, or NAME where a right answer's score is known; NAME is of `entries`, or TOTAL."""
    name, _, score = (part.strip() for part in text.partition(">="))
    known = _full_scores(entries) | {TOTAL: None}
    full_name = name if name in known else metric_name(canonical_entry(name))
    if full_name not in known:
        near = nearest(name, known)
        raise UserError("pass", f"No reward here is called {name}.{f' Did you mean {near}?' if near else ''}")
    try:
        at_least = float(score) if score else known[full_name]
    except ValueError:
        raise UserError("pass", f"{score} is not a number; write {name}>=1.") from None
    if at_least is None:
        raise UserError("pass", f"From what score on does {name} count as right? Write {name}>=1, say.")
    return PassRule(reward=full_name, at_least=at_least, chosen_by="user")


def _full_scores(entries: Iterable[str]) -> dict[str, float | None]:
    calls = [read_call(canonical_entry(entry)) for entry in entries]
    return {call.name: None if call.file else FULL_SCORES.get(call.function) for call in calls}


class Figures(_Part):
    """The figures of one side, or the differences tuned − base of all of them. `reward`: the weighted sum of the
    scores. `cut_off`: the share of completions at the length limit. `pass_at`: k → pass@k. `spread`: standard deviation
    (n − 1) of the reward over a prompt's completions; `different`: the share of them that are different texts."""

    reward: MeanWithInterval
    rewards: dict[str, MeanWithInterval]
    tokens: MeanWithInterval
    cut_off: MeanWithInterval
    pass_at: dict[int, MeanWithInterval] = {}
    spread: MeanWithInterval | None = None
    different: MeanWithInterval | None = None


class SideResult(_Part):
    figures: Figures
    seconds: float
    tokens_per_second: float


class Decoding(_Part):
    """The results of one way of sampling, both sides on the same prompts and random numbers. `difference`: tuned −
    base, paired by prompt. `better`: prompts whose mean reward is higher after training."""

    name: DecodingName
    completions: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    sides: dict[SideName, SideResult]
    difference: Figures | None = None
    better: int = 0
    worse: int = 0
    unchanged: int = 0


class Evaluation(_Part):
    """The content of NAME.json. `created` is in Unix seconds; the first of `decodings` is the one to quote."""

    version: int = 1
    name: str
    created: float
    seconds: float
    device: str
    versions: dict[str, str] = {}
    subject: Subject
    data: Data
    functions: list[RewardFunctionUsed]
    pass_rule: PassRule | None
    max_completion_length: int
    seed: int
    confidence: float = CONFIDENCE
    decodings: list[Decoding]
    notes: list[str] = []

    @property
    def headline(self) -> Decoding:
        return self.decodings[0]

    def sentence(self, decoding: Decoding | None = None) -> str:
        """The result under a decoding, by default the headline's, in one sentence."""
        first = decoding or self.headline
        split = f"the {self.data.split} split" if self.data.split in ("train", "valid", "test") else self.data.split
        where = f"{self.data.rows} {'row' if self.data.rows == 1 else 'rows'} of {split}"
        if first.difference is None:
            side = next(iter(first.sides.values()))
            return f"The mean reward on {where} is {_number(side.figures.reward)}."
        before, after = (first.sides[name].figures.reward for name in ("base", "tuned"))
        if before.value is None and after.value is None:
            return f"No completion of {where} has a reward: every function returned None."
        change = first.difference.reward
        sentence = f"The mean reward on {where} went from {number_text(before.value)} to {number_text(after.value)}"
        if change.low is None or change.high is None or change.value is None:
            return f"{sentence}."
        if not change.excludes_zero:
            return f"{sentence}: a difference of {_number(change)}, which may be chance."
        if change.value > 0:
            return f"{sentence}: better by {_number(change)}."
        fall = MeanWithInterval(value=-change.value, low=-change.high, high=-change.low)
        return f"{sentence}: worse by {_number(fall)}."


RowSides = dict[SideName, list[CompletionRow]]


class EvaluatedRow(TypedDict):
    """One line of NAME.jsonl: a prompt, and by decoding the completions of each side."""

    index: int
    prompt: str
    answer: str
    type: str | None
    greedy: RowSides | None
    sampled: RowSides | None
    images: NotRequired[list[str]]  # paths of the prompt's pictures, in order


def mean_reward(completions: Iterable[CompletionRow]) -> float | None:
    """Of one prompt's completions; None where none was scored."""
    rewards = [reward for completion in completions if (reward := completion["reward"]) is not None]
    return sum(rewards) / len(rewards) if rewards else None


SAME = 1e-9  # rewards that differ by less are equal


def change_of(row: EvaluatedRow, decoding: DecodingName) -> float | None:
    """tuned − base of a prompt's mean reward, 0 but for rounding; None where a side is missing or unscored."""
    sides = row[decoding] or {}
    before, after = mean_reward(sides.get("base", [])), mean_reward(sides.get("tuned", []))
    if before is None or after is None:
        return None
    return 0.0 if abs(after - before) < SAME else after - before


def write_evaluation(folder: Path, evaluation: Evaluation, rows: Iterable[EvaluatedRow]) -> Path:
    """Write both files into `folder`. → the path of the .json. Raises DiskError."""
    final = folder / f"{evaluation.name}.json"
    with writing(final):
        folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(json_safe(row), ensure_ascii=False).encode(errors="replace") + b"\n" for row in rows)
    replace_file(rows_file(final), lines)
    replace_file(final, [evaluation.model_dump_json(indent=1).encode(errors="replace"), b"\n"])
    return final


def rows_file(path: Path) -> Path:
    return path.with_suffix(".jsonl")


def read_evaluation(path: Path) -> Evaluation:
    """Raises UserError naming a file that is none."""
    try:
        evaluation = Evaluation.model_validate_json(read_bytes(path, "evaluation"))
    except (ValidationError, OverflowError):
        raise UserError("evaluation", f"{quote(path)} is no evaluation of this program.") from None
    if not evaluation.decodings or not all(decoding.sides for decoding in evaluation.decodings):
        raise UserError("evaluation", f"{quote(path)} is an evaluation without results.")
    return evaluation


def read_rows(path: Path) -> list[EvaluatedRow]:
    with suppress(OSError), open_regular(rows_file(path)) as file:
        return [row for line in file if (row := parse_row(line)) is not None]
    return []


def parse_row(line: bytes) -> EvaluatedRow | None:
    row = parse_line(line)
    if row is None or not isinstance(row.get("index"), int):
        return None
    return cast("EvaluatedRow", {"greedy": None, "sampled": None, **row})


def evaluations_of(run: RunFolder) -> list[Path]:
    """The .json files of a run's evaluations, newest first."""
    finished = [path for path in run.evaluations.glob("[!.]*.json") if path.exists()]
    return sorted(finished, key=lambda path: (path.stat().st_mtime, path.name), reverse=True)


def free_name(folder: Path, wish: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", wish).strip("-.") or "evaluation"
    taken = {path.stem for path in folder.glob("[!.]*.json")}
    return next(name for n in count(1) if (name := stem if n == 1 else f"{stem}-{n}") not in taken)


def number_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}".replace("-", "−")


def _number(mean: MeanWithInterval) -> str:
    value = number_text(mean.value)
    if mean.low is None:
        return value
    return f"{value} ({CONFIDENCE * 100:g} % interval {number_text(mean.low)} to {number_text(mean.high)})"
