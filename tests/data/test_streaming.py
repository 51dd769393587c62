"""Streamed rows are those read into memory, in the same order, with the same error messages."""

import json
import os
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from backend.data.dataset_columns import columns_of
from backend.data.files import Row, read_file, stream_file
from backend.data.labels import check_prompts
from backend.data.problems import PromptFormat, chat_sizes
from backend.data.prompts import PromptStream, TokenizedPrompts
from backend.data.rows import RowSteps, applied, check_columns, read_splits
from backend.models.tokenizers import load_tokenizer
from backend.runs import start_progress
from backend.runs.start_progress import StartProgress, progress_listener
from backend.serve import dataset_questions
from backend.serve.questions import QuestionCall
from backend.utils import documents
from backend.utils.errors import UserError
from tests.data.test_rows import ROWS, settings, write
from tests.support.cases import mistake
from tests.support.random_models import tiny_tokenizer

A, B, AB = {"prompt": "a"}, {"prompt": "b"}, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
QUOTED = [{"prompt": "a\nb, c", "answer": "1"}, {"prompt": 'say "hi"', "answer": "2"}, {"prompt": "end", "answer": "3"}]
MORE_FIELDS = "The CSV in line 2 of {} is broken: it has more fields than the header has columns."
DEEP = "The JSON in line 1 of {} is broken: it is nested more than 100 levels deep."
TEXTS: dict[str, tuple[bytes, list[Row] | str]] = {
    "lines.jsonl": (b'{"prompt": "a"}\n{"prompt": "b"}\n', [A, B]),
    "no end.jsonl": (b'{"prompt": "a"}\n{"prompt": "b"}', [A, B]),
    "blank lines.jsonl": (b'\n\n{"prompt": "a"}\n \t\n\xc2\xa0\n{"prompt": "b"}\n\n', [A, B]),
    "windows.jsonl": (b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n', [A, B]),
    "old mac.jsonl": (b'{"prompt": "a"}\r{"prompt": "b"}\r\r{"prompt": "c"}', [A, B, {"prompt": "c"}]),
    "mark.jsonl": (b'\xef\xbb\xbf{"prompt": "\xc3\xa9"}\n', [{"prompt": "é"}]),
    "inner returns.jsonl": (b'{"prompt":\r"a"}\n', "The JSON in line 1 of {} is broken: Expecting value."),
    "separators.jsonl": ('{"prompt": "a\u2028b\x85c"}\n{"prompt": "a"}\n'.encode(), [{"prompt": "a\u2028b\x85c"}, A]),
    "list.jsonl": (b'{"prompt": "a"}\n[1]\n', "The JSON in line 2 of {} must be an object with columns."),
    "broken.jsonl": (b'{"prompt": "a"}\n{"prompt": \n', "The JSON in line 2 of {} is broken: Expecting value."),
    "cut.jsonl": (b'{"prompt": "a', "The JSON in line 1 of {} is broken: Unterminated string."),
    "tab.jsonl": (b'{"prompt": "a\tb"}', "The JSON in line 1 of {} is broken: Invalid control character."),
    "deep.jsonl": (b"[" * 100_000, DEEP),
    "deep row.jsonl": (b'{"prompt": ' + b"[" * 101 + b"]" * 101 + b"}", DEEP),
    "utf-16.jsonl": ('{"prompt": "hi"}'.encode("utf-16"), "{} is not UTF-8 text."),
    "latin.jsonl": (b'{"prompt": "\xe9"}\n', "{} is not UTF-8 text."),
    "empty.jsonl": (b"", []),
    "plain.csv": (b"prompt,answer\na,1\nb,2\n", AB),
    "quoted.csv": (b'prompt,answer\n"a\nb, c",1\r\n"say ""hi""",2\n\n\nend,3', QUOTED),
    "short.csv": (b"prompt,answer\na\nb,2\n", [{"prompt": "a", "answer": None}, AB[1]]),
    "ragged.csv": (b"prompt,answer\na,1,2\n", MORE_FIELDS),
    "twice.csv": (b"prompt,prompt\na,1\n", "{} has two columns called prompt; rename one of them."),
    "open quote.csv": (b'prompt,answer\n"a,1\nb,2\n', "The CSV in line 2 of {} is broken: unexpected end of data."),
    "mark.csv": (b"\xef\xbb\xbfprompt,answer\na,1\n", AB[:1]),
    "old mac.csv": (b"prompt,answer\ra,1\rb,2\r", AB),
    "header.csv": (b"prompt,answer\n", []),
    "blank header.csv": (b"\nprompt,answer\n", MORE_FIELDS),
    "excel.csv": (b"prompt;answer\na, b;1\n", "The columns of {} are separated by semicolons: save it with commas."),
    "no excel.csv": (b'"to; do"\na\n', [{"to; do": "a"}]),
    "tabs.csv": (b"prompt\tanswer\na\t1\n", "The columns of {} are separated by tabs: save it with commas."),
    "empty.csv": (b"", []),
}


def outcome(read: Any, path: Path) -> list[Row] | str:
    try:
        return list(read(path))
    except UserError as mistake:
        return str(mistake)


@pytest.mark.parametrize("name", TEXTS)
def test_every_text_file_streams_as_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    content, expected = TEXTS[name]
    path = Path(name)
    path.write_bytes(content)
    if isinstance(expected, str):
        assert outcome(read_file, path) == outcome(stream_file, path) == f"data: {expected.format(name)}"
        return
    rows = stream_file(path)
    assert list(rows) == read_file(path) == expected
    assert [rows[i] for i in reversed(range(len(rows)))] == expected[::-1]
    assert rows[:1] == expected[:1] and (not expected or rows[-1] == expected[-1])
    assert rows.columns == list(dict.fromkeys(column for row in expected for column in row)) or not expected
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_parquet_streams_in_any_order_over_groups_and_batches(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n}", "answer": n, "tags": [str(n)] * (n % 3)} for n in range(1000)]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=300)
    streamed = stream_file(path)
    assert list(streamed) == rows
    order = random.Random(0).sample(range(1000), 60)
    assert [streamed[i] for i in order] == [rows[i] for i in order]
    passes = zip(streamed, streamed, (streamed[i] for i in reversed(range(1000))), strict=True)
    assert list(passes) == list(zip(rows, rows, rows[::-1], strict=True)), "a pass disturbs another"
    path.write_bytes(path.read_bytes()[:-100])
    assert outcome(stream_file, path) == outcome(read_file, path)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_splits_and_the_share_held_out_are_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": str(n), "answer": "x"} for n in range(50)]
    path = write(tmp_path / f"rows{suffix}", rows)
    for raw in ({}, {"validation_split": 0.2}, {"validation_split": 0.2, "data_seed": 3}):
        here, there = (read_splits(settings(path, streaming=streaming, **raw)) for streaming in (False, True))
        assert list(there.train) == here.train and list(there.valid) == here.valid
    folder = tmp_path / "folder"
    write(folder / f"train{suffix}", rows)
    write(folder / f"test{suffix}", rows[:3])
    splits = read_splits(settings(folder, streaming=True))
    assert len(splits.train) == 50 and list(splits.test) == rows[:3]


def test_what_cannot_be_streamed_is_refused_by_name(tmp_path: Path) -> None:
    setting, sentence = mistake(read_splits, settings(write(tmp_path / "rows.json", ROWS), streaming=True))
    assert setting == "streaming"
    assert sentence.endswith("json cannot be streamed: only .jsonl, .csv, .parquet files can; make it one of them.")


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    rows = stream_file(path)
    with path.open("a") as file:
        file.write('{"prompt": "new"}\n')
    with pytest.raises(UserError, match="has been changed since its rows were counted"):
        rows[0]


FILLER = "a prompt of the usual length " * 32  # about a kilobyte


def write_large(path: Path, size: int) -> int:
    """Rows of about a kilobyte, up to `size` bytes. → how many."""
    count = 0
    with path.open("w") as file:
        while file.tell() < size:
            file.write(
                "".join(
                    json.dumps({"prompt": f"{n} {FILLER}"[-900:], "answer": str(n)}) + "\n"
                    for n in range(count, count + 1000)
                )
            )
            count += 1000
    return count


def test_rows_stay_on_the_disk_while_a_run_takes_them(tmp_path: Path) -> None:
    rows = write_large(tmp_path / "rows.jsonl", 12_000_000)
    tokenizer = load_tokenizer(tiny_tokenizer(tmp_path / "tokenizer"))
    config = settings(tmp_path / "rows.jsonl", streaming=True, max_seq_length=2000)
    tracemalloc.start()
    try:
        train = read_splits(config).train
        PromptStream(TokenizedPrompts(train, tokenizer, PromptFormat.of(config), "rows.jsonl"), 0).take(3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(train) == rows and peak < 6_000_000, "the text alone is 12 MB, and three times as much as rows in memory"


PROGRESS_ROWS = [{"prompt": f"What is {n}?", "answer": n} for n in range(50)]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that are parsed, as they are."""
    lines: list[str] = []
    parse = documents.parse_loose_json
    monkeypatch.setattr(documents, "parse_loose_json", lambda text: lines.append(text) or parse(text))
    return lines


def test_every_row_of_a_streamed_file_is_parsed_once_before_a_run(tmp_path: Path, parsed: list[str]) -> None:
    config = settings(write(tmp_path / "rows.jsonl", PROGRESS_ROWS), streaming=True)
    train = read_splits(config).train
    assert parsed == [], "where rows begin is found without parsing them"
    assert check_columns(train, config, "rows.jsonl") == [] and len(parsed) == 1
    sizes = chat_sizes(train, PromptFormat.of(config), "rows.jsonl")
    assert list(sizes) == [len(row["prompt"]) for row in PROGRESS_ROWS] and len(parsed) == 51
    held = read_splits(settings(tmp_path / "rows.jsonl", streaming=True, validation_split=0.2))
    assert len(parsed) == 51 and check_columns(held.valid, config, "rows.jsonl") == [] and len(parsed) == 52
    assert held.valid[3] in PROGRESS_ROWS


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": ', "The JSON in line 7 of "),
        (b'{"prompt": "\xe9"}', "is not UTF-8 text"),
        (b"[1]", "in line 7 of"),
    ],
)
def test_a_broken_line_ends_the_check_and_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    path = write(tmp_path / "rows.jsonl", PROGRESS_ROWS)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:4], b"", b" \t", line, *lines[4:]]))
    config = settings(path, streaming=True)
    rows = read_splits(config).train
    _, sentence = mistake(check_prompts, rows, None, PromptFormat.of(config), str(path))
    assert says in sentence
    with pytest.raises(UserError):
        rows[4]


def test_going_through_many_rows_says_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FIRST_S": -1.0, "EVERY_S": 0.0}.items():
        monkeypatch.setattr(start_progress, name, value)
    defaults: Any = start_progress.telling.__kwdefaults__
    monkeypatch.setitem(defaults, "looked", 10)
    said: list[str] = []
    path = write(tmp_path / "rows.jsonl", PROGRESS_ROWS)
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


def test_mapped_rows_count_when_the_map_function_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_progress, "FIRST_S", -1.0)
    order: list[str] = []

    def map_rows(name: str, rows: Sequence[Row], where: Any) -> Sequence[Row]:
        order.append("mapped")
        return rows

    steps = RowSteps(settings("rows.jsonl").model_copy(update={"map_function": "own"}), map_rows)
    with progress_listener(order.append):
        assert len(list(applied(PROGRESS_ROWS, steps, "rows.jsonl"))) == len(PROGRESS_ROWS)
    assert order[0] == "mapped" and "100%" in order[-1]


def test_nan_and_infinity_are_numbers_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "hi", "score": NaN, "most": 1e999}')
    assert read_splits(settings(tmp_path / "a.jsonl")).train[0]["most"] == float("inf")


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_pipe_is_never_opened(tmp_path: Path, is_folder: bool) -> None:
    os.mkfifo(tmp_path / "train.jsonl")
    setting, sentence = mistake(read_splits, settings(tmp_path if is_folder else tmp_path / "train.jsonl"))
    says = "train.csv, train.parquet." if is_folder else "is neither a file nor a folder."
    assert setting == "data" and sentence.endswith(says)
    assert columns_of(tmp_path / "train.jsonl") == []


def test_the_page_survives_what_check_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"\ud800": "\ud800", "answer": "", "prompt": [{"role": "user", "content": 3}]})
    )
    call = QuestionCall(lambda progress: None)
    raw = {"data": str(tmp_path / "a.jsonl")}
    assert dataset_questions.preview(call, settings=raw)["faults"] == []
    row = dataset_questions.preview_row(call, settings=raw, split="train", index=0)
    assert "must hold text or a list of messages" in row["faults"][-1]["sentence"]
    for data in ("~nosuchuser/x.jsonl", "x" * 5000, "a\0b"):
        assert dataset_questions.preview(call, settings={"data": data}).get("faults", [{}])
