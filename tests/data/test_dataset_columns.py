"""The columns of a dataset file, read from its first line, and the guess which of them are prompt and answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.data.dataset_columns import columns_of, guessed
from tests.support.cases import cases


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("a.csv", "\ufeffquestion,answer\n1,2\n", ["question", "answer"]),
        ("a.csv", '"a, b",c\n', ["a, b", "c"]),
        ("a.csv", "", []),
        ("a.jsonl", '{"prompt": "x", "answer": {"deep": 1}}\n{"other": 1}\n', ["prompt", "answer"]),
        ("a.json", '\n[ {"q": 1, "a": 2}, {"q"', ["q", "a"]),
        ("a.json", '{"rows": broken', []),
        ("a.jsonl", "[1]\n", []),
    ],
)
def test_columns_are_read_from_the_first_line(tmp_path: Path, name: str, text: str, columns: list[str]):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert columns_of(tmp_path / name) == columns


def test_an_unreadable_file_has_no_columns(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    assert columns_of(tmp_path / "a.csv") == columns_of(tmp_path / "absent.csv") == columns_of(tmp_path) == []


@cases(
    ("columns", "features"),
    [
        (["Question", "Answer"], ["prompt", "answer"]),
        (["id", "problem", "final answer"], [None, "prompt", "answer"]),
        (["math_question", "gold-answer", "kind"], ["prompt", "answer", "type"]),
        (["answer", "prompt", "system"], ["answer", "prompt", "system"]),
        (["x", "y"], [None, None]),
    ],
)
def test_usual_column_names_are_recognised(columns: list[str], features: list[str | None]):
    pairs = zip(columns, features, strict=True)
    assert guessed(columns) == {f"{feature}_feature": column for column, feature in pairs if feature}
