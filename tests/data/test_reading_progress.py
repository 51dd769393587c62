"""Reading a large dataset says how far it has come, parses each row once before a run, and names the line that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.data import reading_progress, streamed_files
from backend.data.problems import PromptFormat, chat_sizes, check_prompts
from backend.data.reading_progress import progress_told_to
from backend.data.rows import check_columns, read_splits
from backend.data.streamed_files import stream_file
from backend.spec.faults import Mistake
from tests.data.test_rows import mistake, settings, write

ROWS = [{"prompt": f"What is {n}?", "answer": n} for n in range(50)]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that are parsed, as they are."""
    lines: list[str] = []
    parse = streamed_files.json_object
    monkeypatch.setattr(streamed_files, "json_object", lambda text, where: lines.append(text) or parse(text, where))
    return lines


def test_every_row_of_a_streamed_file_is_parsed_once_before_a_run(tmp_path: Path, parsed: list[str]) -> None:
    config = settings(write(tmp_path / "rows.jsonl", ROWS), streaming=True)
    train = read_splits(config).train
    assert parsed == [], "where rows begin is found without parsing them"
    assert check_columns(train, config, "rows.jsonl") == [] and len(parsed) == 1
    sizes = chat_sizes(train, PromptFormat.of(config), "rows.jsonl")
    assert list(sizes) == [len(row["prompt"]) for row in ROWS] and len(parsed) == 51
    held = read_splits(settings(tmp_path / "rows.jsonl", streaming=True, validation_split=0.2))
    assert len(parsed) == 51 and check_columns(held.valid, config, "rows.jsonl") == [] and len(parsed) == 52
    assert held.valid[3] in ROWS


def test_a_column_that_only_late_rows_have_is_found_and_one_that_none_has_is_named(tmp_path: Path) -> None:
    config = settings(write(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "x", "topic": "sums"}]), streaming=True)
    rows = stream_file(tmp_path / "rows.jsonl")
    assert check_columns(rows, config.model_copy(update={"type_feature": "topic"}), "rows.jsonl") == []
    (fault,) = check_columns(rows, config.model_copy(update={"prompt_feature": "question"}), "rows.jsonl")
    assert fault.sentence == "There is no column question; rows.jsonl has the columns prompt, answer, topic."


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": ', "The JSON in line 7 of "),
        (b'{"prompt": "\xe9"}', "is not UTF-8 text"),
        (b"[1]", "in line 7 of"),
    ],
)
def test_a_broken_line_ends_the_check_and_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:4], b"", b" \t", line, *lines[4:]]))
    config = settings(path, streaming=True)
    rows = read_splits(config).train
    _, sentence = mistake(check_prompts, rows, None, PromptFormat.of(config), str(path))
    assert says in sentence
    with pytest.raises(Mistake):
        rows[4]


def test_going_through_many_rows_says_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FIRST_S": -1.0, "EVERY_S": 0.0, "LOOKED": 10}.items():
        monkeypatch.setattr(reading_progress, name, value)
    said: list[str] = []
    path = write(tmp_path / "rows.jsonl", ROWS)
    raw: dict[str, Any] = {"streaming": True, "prompt_template": "{prompt} Think."}
    with progress_told_to(said.append):
        rows = read_splits(settings(path, **raw)).train
        chat_sizes(rows, PromptFormat.of(settings(path)), str(path))
    looking, preparing, checking = said[:5], said[5:10], said[10:]
    assert looking[0].startswith("Looking for the rows of rows.jsonl: ")
    assert preparing[1] == "Preparing the rows of rows.jsonl: 20%."
    assert checking == [f"Checking rows.jsonl: {percent}%." for percent in (0, 20, 40, 60, 80)]
    chat_sizes(list(rows), PromptFormat.of(settings(path)), str(path))
    assert len(said) == 15, "nobody listens any more"
    assert json.dumps(rows[0]) == '{"prompt": "What is 0? Think.", "answer": 0}'
