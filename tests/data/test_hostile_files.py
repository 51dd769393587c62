"""Files that nobody should make end in one sentence, without a hang and without filling the memory."""

from __future__ import annotations

import json
import os
from contextlib import chdir
from pathlib import Path

import pytest

from backend.data.dataset_columns import columns_of
from backend.data.rows import read_splits
from backend.serve import dataset_questions
from backend.serve.questions import QuestionCall
from tests.data.test_rows import mistake, settings

NUMBER = "1" * 5000


def sentence(path: Path) -> str:
    setting, sentence = mistake(read_splits, settings(path))
    assert setting == "data" and len(sentence) <= 200 and sentence.isprintable()
    return sentence


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", "[" * 100_000, "line 1 of a.jsonl is broken: it is nested more than 100 levels deep."),
        ("a.jsonl", '{"prompt": ' + "[" * 101 + "]" * 101 + "}", "is nested more than 100 levels deep."),
        ("a.json", f'[{{"prompt": {NUMBER}}}]', "a.json is broken: a whole number has more than 4,300 digits."),
        ("a.jsonl", '{"prompt": "hi"}'.encode("utf-16"), "a.jsonl is not UTF-8 text."),
        ("a.parquet", "", "a.parquet cannot be read as parquet: it is empty."),
    ],
)
def test_a_broken_file(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    with chdir(tmp_path):
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        assert sentence(Path(name)).endswith(says)


def test_nan_and_infinity_are_numbers_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "hi", "score": NaN, "most": 1e999}')
    assert read_splits(settings(tmp_path / "a.jsonl")).train[0]["most"] == float("inf")


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_pipe_is_never_opened(tmp_path: Path, is_folder: bool) -> None:
    os.mkfifo(tmp_path / "train.jsonl")
    assert sentence(tmp_path if is_folder else tmp_path / "train.jsonl").endswith("a pipe, a socket or a device.")
    assert columns_of(tmp_path / "train.jsonl") == []


def test_the_page_survives_what_check_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"\ud800": "\ud800", "answer": "", "prompt": [{"role": "user", "content": 3}]})
    )
    call = QuestionCall(lambda progress: None)
    raw = {"data": str(tmp_path / "a.jsonl")}
    assert dataset_questions.preview({"settings": raw}, call)["faults"] == []
    row = dataset_questions.preview_row({"settings": raw, "split": "train", "index": 0}, call)
    assert "must hold text or a list of messages" in row["faults"][-1]["sentence"]
    for data in ("~nosuchuser/x.jsonl", "x" * 5000, "a\0b"):
        assert dataset_questions.preview({"settings": {"data": data}}, call).get("faults", [{}])
