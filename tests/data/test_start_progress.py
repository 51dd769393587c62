"""Reading a large dataset reports progress, parses each row once before a run, and names a broken line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.data.problems import PromptFormat, chat_sizes, check_prompts
from backend.data.rows import check_columns, read_splits
from backend.runs import start_progress
from backend.runs.start_progress import StartProgress, progress_listener
from backend.utils import documents
from backend.utils.errors import UserError
from tests.data.test_rows import mistake, settings, write

ROWS = [{"prompt": f"What is {n}?", "answer": n} for n in range(50)]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that are parsed, as they are."""
    lines: list[str] = []
    parse = documents.parse_loose_json
    monkeypatch.setattr(documents, "parse_loose_json", lambda text: lines.append(text) or parse(text))
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
    with pytest.raises(UserError):
        rows[4]


def test_going_through_many_rows_says_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FIRST_S": -1.0, "EVERY_S": 0.0, "LOOKED": 10}.items():
        monkeypatch.setattr(start_progress, name, value)
    said: list[str] = []
    path = write(tmp_path / "rows.jsonl", ROWS)
    raw: dict[str, Any] = {"streaming": True, "prompt_template": "{prompt} Think."}
    with progress_listener(said.append):
        rows = read_splits(settings(path, **raw)).train
        chat_sizes(rows, PromptFormat.of(settings(path)), str(path))
    read = [StartProgress.read(line) for line in said]
    looking, preparing, checking = (read[start : start + 6] for start in (0, 6, 12))
    assert [each and each.doing for each in (looking[0], preparing[0], checking[0])] == [
        "Looking for the rows of rows.jsonl",
        "Preparing the rows of rows.jsonl",
        "Checking rows.jsonl",
    ]
    assert [each and each.share for each in checking] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert said[13].startswith("Checking rows.jsonl: 20%, 10 rows, ") and said[13].endswith(" rows/s.")
    assert "50 rows, " in said[5] and len(said) == 18
    chat_sizes(list(rows), PromptFormat.of(settings(path)), str(path))
    assert len(said) == 18, "nobody listens any more"
    assert json.dumps(rows[0]) == '{"prompt": "What is 0? Think.", "answer": 0}'
