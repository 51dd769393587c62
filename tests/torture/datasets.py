"""Datasets as nobody should make them: files of every kind with broken bytes, encodings, structures and types.

Each goes through what `check`, a run and the Dataset page do with it: rows, columns, prompts as tokens, the page's table and counts. It must
end within LIMIT_S, in rows or in sentences that are one printable line of at most 200 characters, and leave no file behind.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from backend.config.config import parse, problems
from backend.data.dataset_columns import columns_of, guessed
from backend.data.problems import PromptFormat, check_prompts
from backend.data.prompts import TokenizedPrompts, measure_first_rows
from backend.data.rows import SPLITS, check_columns, read_splits
from backend.models.tokenizers import load_tokenizer
from backend.serve import dataset_questions
from backend.serve.question_call import QuestionCall
from backend.utils.errors import ConfigProblem, UserError
from tests.support.random_models import tiny_tokenizer
from tests.torture.hostile_files import NAMES, ODD_TEXTS, put
from tests.torture.report import run_cases

LIMIT_S = 5.0
LONGEST_SENTENCE = 200


class Slow(BaseException):
    """A case took longer than LIMIT_S."""


# ── one case ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def settings(data: str, rng: random.Random) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "model": "m",
        "data": data,
        "max_seq_length": 600,
        "max_completion_length": 500,
        "reward_functions": ["r1_accuracy"],
    }
    if rng.random() < 0.3:
        raw[rng.choice(["prompt_feature", "answer_feature", "type_feature", "system_feature"])] = rng.choice(NAMES)
    if rng.random() < 0.1:
        raw["train_split"] = rng.choice(["exam", "dev", "nowhere", "n" * 300])
    if rng.random() < 0.2:
        raw["validation_split"] = rng.choice([0.1, 0.5, 0.9])
    if rng.random() < 0.1:
        raw["system_prompt"] = rng.choice(ODD_TEXTS)
    if rng.random() < 0.3:
        raw["streaming"] = True
    if rng.random() < 0.2:
        raw["prompt_template"] = rng.choice([*TEMPLATES, *(f"{{{name}}}" for name in NAMES), *ODD_TEXTS])
    if rng.random() < 0.2:
        raw["answer_pattern"] = rng.choice([*PATTERNS, *ODD_TEXTS])
    if rng.random() < 0.2:
        raw[rng.choice(["valid_data", "test_data"])] = rng.choice([data, "./nowhere.csv", "n" * 300])
    if rng.random() < 0.2:
        raw["eval_data"] = rng.choice(
            [{"m": data}, {"m": {"data": data, "prompt_feature": rng.choice(NAMES)}}, {"a b": data}, {"m": 3}]
        )
    if rng.random() < 0.2:
        raw |= {"max_prompt_length": rng.choice([1, 5, 40]), "long_prompts": rng.choice(["leave_out", "cut_left"])}
    if rng.random() < 0.1:
        raw["data_seed"] = rng.choice([0, 7, -1, "x"])
    return raw


TEMPLATES = (
    "{prompt}",
    "Solve: {prompt} {{x}}",
    "{",
    "{}",
    "{prompt!r}",
    "{prompt.__class__}",
    "{0}",
    "{a[0]}",
    "{prompt:>9999999999}",
)
PATTERNS = ("(.*)", "#### (.*)", "(a+)+$", "(", "((.)*)*x", "(?P<a>.)", "(?i)(\\d+)", "(\\", "(.{1000000000})", "()")


def faults_of(raw: dict[str, Any], tokenizer: Any) -> Iterator[ConfigProblem]:
    """The sentences that `check`, a run and the Dataset page have for these settings."""
    if wrong := problems(raw):
        yield from wrong
        return
    config = parse(raw)
    try:
        splits = read_splits(config)
        source = splits.source["train"]
        for split in SPLITS:
            if splits.rows(split):
                yield from (found := check_columns(splits.rows(split), config, splits.source.get(split, config.data)))
                if found:
                    return
        check_prompts(splits.train, tokenizer, PromptFormat.of(config), source)
        prompts = TokenizedPrompts(splits.train, tokenizer, PromptFormat.of(config), source)
        measure_first_rows(prompts, "train")
        prompts.measure(prompts.longest_texts())
    except UserError as mistake:
        yield from mistake.faults


def faults_of_the_page(raw: dict[str, Any]) -> Iterator[ConfigProblem]:
    call = QuestionCall(lambda progress: None)
    answers: list[Any] = []
    questions = (
        (dataset_questions.preview, {}), (dataset_questions.preview_rows, {"split": "train", "start": 0, "count": 50}),
        (dataset_questions.preview_row, {"split": "train", "index": 0}), (dataset_questions.preview_counts, {"split": "train", "most": 100}),
    )  # fmt: skip
    for question, more in questions:
        try:
            answers.append(question({"settings": raw, **more}, call))
        except UserError as mistake:
            yield from mistake.faults
    json.dumps(answers, default=str)
    for answer in answers:
        yield from (ConfigProblem(**fault) for fault in answer.get("faults", ()))


def wrong_sentences(faults: list[ConfigProblem]) -> list[str]:
    return [
        f"{len(fault.sentence)} characters for {fault.setting!r}: {fault.sentence!r}"
        for fault in faults
        if not (
            fault.setting
            and 0 < len(fault.sentence) <= LONGEST_SENTENCE
            and fault.sentence.isprintable()
            and fault.sentence.endswith(".")
        )
    ]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Slow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(
        signal.ITIMER_REAL, 4 * seconds
    )  # the limit is on this process's computing: the machine may be busy
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def tokenizer_folder() -> Path:
    folder = tiny_tokenizer(Path(tempfile.mkdtemp(prefix="torture-tokenizer-")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


@cache
def tokenizer() -> Any:
    return load_tokenizer(tokenizer_folder())


def case(seed: int, home: Path) -> str:
    """What is wrong with one case; "" for nothing."""
    rng = random.Random(f"datasets {seed}")
    folder = home / "d"
    folder.mkdir()
    before = set(os.listdir(home))
    try:
        data = put(folder, rng)
        raw = settings(data, rng)
        made = sorted(str(path) for path in folder.rglob("*"))
        began = time.process_time()
        with limited(LIMIT_S):
            faults = [*faults_of(raw, tokenizer())]
            if rng.random() < 0.25:
                faults += faults_of_the_page(raw | {"model": str(tokenizer_folder())})
                if "\0" not in data:
                    guessed(columns_of(Path(data)))
        if (took := time.process_time() - began) > LIMIT_S:
            return f"took {took:.1f} s: {data}"
        strays = [path for path in sorted(str(path) for path in folder.rglob("*")) if path not in made]
        strays += [name for name in os.listdir(home) if name not in before]
        wrong = wrong_sentences(faults)
        return "; ".join([*wrong, *(f"left {stray}" for stray in strays)])
    except Slow:
        return f"did not end: {data}"
    except Exception:
        return traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(count: int, seed: int) -> int:
    """`count` datasets; returns how many failed."""
    tokenizer()  # so that the first case is not charged for it
    return run_cases("datasets", case, range(seed, seed + count))
