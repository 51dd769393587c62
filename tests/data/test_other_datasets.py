"""Validation, test and named evaluation sets come from datasets of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.data.rows import read_splits
from tests.data.test_rows import ROWS, mistake, settings, write


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return write(tmp_path / "train.jsonl", ROWS)


def test_train_valid_and_test_are_three_files(tmp_path: Path, train: Path) -> None:
    valid, test = write(tmp_path / "mine.csv", ROWS[:2]), write(tmp_path / "last.parquet", ROWS[2:3])
    splits = read_splits(settings(train, valid_data=str(valid), test_data=str(test), validation_split=0.5))
    assert (splits.train, splits.valid, splits.test) == (ROWS, ROWS[:2], ROWS[2:3]), "nothing is held out"
    assert splits.source == {"train": str(train), "valid": str(valid), "test": str(test)}


def test_another_dataset_takes_the_place_of_the_datasets_own_split(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for split, rows in (("train", ROWS), ("valid", ROWS[:1]), ("test", ROWS[1:2])):
        write(folder / f"{split}.jsonl", rows)
    other = write(tmp_path / "other.jsonl", ROWS[3:])
    splits = read_splits(settings(folder, valid_data=str(other), valid_split="nowhere-in-the-folder"))
    assert (splits.valid, splits.test) == (ROWS[3:], ROWS[1:2])


@pytest.mark.parametrize(
    ("files", "taken"), [(("train", "valid", "test"), "valid"), (("train", "test"), "test"), (("train",), "train")]
)
def test_a_folder_gives_its_evaluation_split(tmp_path: Path, train: Path, files: tuple[str, ...], taken: str) -> None:
    for number, name in enumerate(files):
        write(tmp_path / "other" / f"{name}.jsonl", ROWS[number : number + 1])
    splits = read_splits(settings(train, valid_data=str(tmp_path / "other")))
    assert splits.valid == [ROWS[files.index(taken)]]


def test_named_sets_have_columns_and_patterns_of_their_own(tmp_path: Path, train: Path) -> None:
    easy = write(tmp_path / "easy.jsonl", ROWS[:2])
    hard = write(tmp_path / "hard" / "exam.jsonl", [{"problem": "?", "solution": "#### 7"}])
    exam = {"data": str(hard.parent), "test_split": "exam", "prompt_feature": "problem"}
    exam |= {"answer_feature": "solution", "answer_pattern": "#### (.*)"}
    splits = read_splits(settings(train, eval_data={"easy": str(easy), "hard": exam}))
    assert list(splits.evals) == ["easy", "hard"]
    assert splits.evals["easy"].rows == ROWS[:2]
    assert splits.evals["hard"].rows == [{"problem": "?", "solution": "7"}]


@pytest.mark.parametrize("key", ["valid_data", "test_data"])
def test_a_dataset_that_is_not_there_is_named_with_its_setting(tmp_path: Path, train: Path, key: str) -> None:
    assert mistake(read_splits, settings(train, **{key: "./no.jsonl"}))[0] == key
    write(tmp_path / "empty.csv", ROWS).write_text("prompt,answer\n")
    setting, sentence = mistake(read_splits, settings(train, **{key: str(tmp_path / "empty.csv")}))
    assert setting == key and sentence.endswith("has no rows.")
    setting, sentence = mistake(read_splits, settings(train, eval_data={"m": "./no.jsonl"}))
    assert setting == "eval_data" and "no.jsonl" in sentence
