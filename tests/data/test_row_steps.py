"""The map function, the prompt template and the answer pattern make rows; what is wrong with one is one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import problems
from backend.data.rows import read_splits
from tests.data.test_rows import mistake, settings, write
from tests.support.cases import cases

GSM8K = [
    {"question": f"What is {n} plus {n}?", "answer": f"Add {n} to itself.\nThat is {2 * n}.\n#### {2 * n} "}
    for n in range(4)
]


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    return write(tmp_path / "gsm8k.jsonl", GSM8K)


def test_a_pattern_and_a_template_make_the_columns_of_gsm8k(gsm8k: Path) -> None:
    config = settings(gsm8k, answer_pattern="#### (.*)", prompt_template="{question}\n\nAnswer {{like this}}.")
    (first, *_) = rows = read_splits(config).train
    assert [row["answer"] for row in rows] == ["0", "2", "4", "6"], "what the group matches, without the space after it"
    assert first["prompt"] == "What is 0 plus 0?\n\nAnswer {like this}."
    assert first["question"] == GSM8K[0]["question"]


def test_a_template_sees_the_answer_as_it_was(gsm8k: Path) -> None:
    config = settings(gsm8k, answer_pattern="#### (.*)", prompt_template="Check: {answer}", prompt_feature="question")
    assert read_splits(config).train[1]["question"] == f"Check: {GSM8K[1]['answer']}"


def test_rows_without_a_match_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*GSM8K, {"question": "And?", "answer": "nobody knows"}, {"question": "And?", "answer": None}]
    path = write(tmp_path / "rows.jsonl", rows)
    splits = read_splits(settings(path, answer_pattern="#### (.*)", prompt_feature="question"))
    assert len(splits.train) == 4
    assert splits.notes == ["2 of 6 rows of train are left out: the answer pattern matches nothing in their answers."]
    config = settings(path, answer_pattern="solution: (.*)", prompt_feature="question")
    assert mistake(read_splits, config)[0] == "answer_pattern", "a pattern that matches nothing at all is a slip"


@cases(
    ("raw", "setting", "says"),
    [
        ({"answer_pattern": "####"}, "answer_pattern", "has no group"),
        ({"answer_pattern": "(a)(b)"}, "answer_pattern", "has 2 groups"),
        ({"answer_pattern": "(a"}, "answer_pattern", "is not a regular expression: missing ), unterminated subpattern"),
        ({"answer_pattern": "(" * 300}, "answer_pattern", "is not a regular expression"),
        ({"prompt_template": "What?"}, "prompt_template", "names no column"),
        *(({"prompt_template": brace}, "prompt_template", "cannot be read") for brace in "{}"),
        ({"prompt_template": "{}"}, "prompt_template", "a place is empty"),
        *(({"prompt_template": f}, "prompt_template", "holds only the name of a column") for f in ("{a!r}", "{a:>40}")),
        ({"map_function": "shorter"}, "map_function", "no reward functions file"),
        ({"eval_data": {"a b": "x"}}, "eval_data", "cannot name an evaluation set"),
        ({"eval_data": {"rewards": "x"}}, "eval_data", "has a meaning already"),
        ({"eval_data": {"m": {}}}, "eval_data", "names no data"),
        ({"eval_data": {"m": ["x"]}}, "eval_data", "must be text"),
        ({"eval_data": {"m": {"data": "x", "beta": "1"}}}, "eval_data", "has beta"),
        ({"eval_data": {"m": {"data": "x", "answer_pattern": "("}}}, "eval_data", "is not a regular expression"),
        ({"eval_data": {"m": {"data": "a\0b"}}}, "eval_data", ""),
        ({"eval_data": "x"}, "eval_data", "must be a mapping"),
    ],
)
def test_what_suits_no_row_is_refused_at_once(raw: dict[str, Any], setting: str, says: str) -> None:
    (fault,) = problems({"model": "a/b", "data": "a/b"} | raw)
    assert fault.setting == setting and says in fault.sentence
    assert len(fault.sentence) <= 200 and fault.sentence.endswith(".")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"prompt_template": "{qestion}"}, "names qestion, which row 1 of"),
        ({"prompt_template": "{tags}"}, "names tags, which is neither text nor a number in row 1 of"),
        ({"answer_pattern": "(a+)+$"}, "takes more than 0.05 s on the answer of row 1 of"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any], says: str) -> None:
    monkeypatch.setattr("backend.data.rows.MATCH_S", 0.05)
    path = write(tmp_path / "rows.jsonl", [{"prompt": "?", "answer": "a" * 5000 + "b", "tags": ["x"]}])
    setting, sentence = mistake(read_splits, settings(path, **raw))
    assert setting in raw and says in sentence and len(sentence) <= 200


def shortened(name: str, rows: Sequence[dict[str, Any]], where: Callable[[int], str]) -> list[dict[str, Any] | None]:
    assert name == "shorter" and where(0).startswith("row ")
    return [None if row["answer"].endswith("2 ") else row | {"answer": "short"} for row in rows]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_map_function_changes_rows_and_leaves_some_out(gsm8k: Path, streaming: bool) -> None:
    raw = {"map_function": "shorter", "reward_functions_file": "f.py", "answer_pattern": "(sho)"}
    config = settings(gsm8k, **raw, prompt_feature="question", streaming=streaming)
    splits = read_splits(config, shortened)
    assert [row["answer"] for row in splits.train] == ["sho"] * 3
    assert [row["question"] for row in splits.train] == [GSM8K[n]["question"] for n in (0, 2, 3)]
    (note,) = splits.notes
    assert note.startswith("1 of 4 rows of train are left out: the map function shorter returned None for them")
