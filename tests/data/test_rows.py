"""Rows are read from every kind of file, from folders and from the Hub; errors are one sentence."""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from backend.config.config import Config, parse
from backend.data.rows import check_columns, read_splits
from backend.utils.command import backend_environment
from backend.utils.errors import UserError
from tests.support.cases import cases

ROWS = [{"prompt": f"What is {n} plus {n}?", "answer": str(2 * n), "type": "math"} for n in range(6)]


def settings(data: Any = "unused", **raw: Any) -> Config:
    return parse({"model": "m", "data": str(data), "max_seq_length": 600, "max_completion_length": 500} | raw)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write the rows in the format of the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)), encoding="utf-8")
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


def mistake(work: Any, *arguments: Any) -> tuple[str, str]:
    """(setting, sentence) of the one UserError that `work` raises."""
    with pytest.raises(UserError) as caught:
        work(*arguments)
    (fault,) = caught.value.faults
    assert fault.sentence.endswith(".") and "\n" not in fault.sentence
    return fault.setting, fault.sentence


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_all_rows_of_a_single_file_are_train(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", ROWS)
    splits = read_splits(settings(path))
    assert splits.train == ROWS and not splits.valid and not splits.test
    assert splits.source == {"train": str(path)}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_folder_has_a_split_for_each_file(tmp_path: Path, suffix: str) -> None:
    for name, content in (("train", ROWS), ("validation", ROWS[:2]), ("test", ROWS[2:3]), ("readme", ROWS)):
        write(tmp_path / f"{name}{suffix}", content)
    splits = read_splits(settings(tmp_path))
    assert (splits.train, splits.valid, splits.test) == (ROWS, ROWS[:2], ROWS[2:3])
    assert splits.source["valid"] == str(tmp_path / f"validation{suffix}")


def test_a_named_split_that_does_not_exist_is_a_mistake(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    setting, sentence = mistake(read_splits, settings(tmp_path, valid_split="holdout"))
    assert setting == "valid_split" and sentence.startswith("There is no split holdout.")
    setting, sentence = mistake(read_splits, settings(tmp_path, train_split="learn"))
    assert setting == "data" and "has none of learn.jsonl, learn.json, learn.csv, learn.parquet" in sentence


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *((name, "", "The dataset {path} has no rows to train on.") for name in ("a.jsonl", "a.csv")),
        ("a.json", "[]", "The dataset {path} has no rows to train on."),
        ("a.json", '[\n{"prompt": "x"},\n{"prompt" 1}]', "The JSON in {path} is broken at line 3: Expecting ':' delim"),
        ("a.json", '{"prompt": "x"}', "{path} must hold a list of objects."),
        ("a.parquet", "PAR1 not really", "{path} cannot be read as parquet: "),
        ("a.txt", "words", "{path} must end in .jsonl, .json, .csv or .parquet."),
    ],
)
def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, says: str) -> None:
    """Broken lines of JSON and CSV are in test_streaming.py."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    setting, sentence = mistake(read_splits, settings(name))
    assert setting == "data" and sentence.startswith(says.format(path=name))


@cases("name", ["/nowhere/at/all", "./rows", "~/rows", "a/b/c", "rows.jsonl", "owner/rows.parquet"])
def test_a_path_is_never_looked_up_on_the_hub(name: str) -> None:
    """`datasets` retries for over twenty seconds where there is no network."""
    assert mistake(read_splits, settings(name)) == ("data", f"There is no file or folder {name}.")


def test_the_held_out_share_is_the_same_every_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": str(n), "answer": ""} for n in range(50)])
    first, again, other_seed = (read_splits(settings(path, validation_split=0.1, seed=seed)) for seed in (1, 1, 2))
    assert len(first.valid) == 5 and len(first.train) == 45
    numbers = [int(row["prompt"]) for row in [*first.train, *first.valid]]
    assert sorted(numbers) == list(range(50)) and numbers[:45] == sorted(numbers[:45])
    assert first.valid == again.valid != other_seed.valid
    assert first.source_of("valid", "") == first.source["train"], "images are relative to it"
    assert len(read_splits(settings(path, validation_split=0.001)).valid) == 1, "a share above 0 holds at least one"
    setting, sentence = mistake(read_splits, settings(path, validation_split=0.999))
    assert setting == "validation_split" and "Holding out 50 of 50 rows" in sentence


HUB_FILES = {
    "README.md": b"# Sums\n",
    "train.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
    "validation.jsonl": json.dumps(ROWS[0]).encode() + b"\n",
}
COMMIT = "c0ffee" + "0" * 34


class Hub(BaseHTTPRequestHandler):
    """The part of the Hugging Face API that `datasets` uses, with one dataset of plain files, owner/sums."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not path.startswith(("/datasets/owner/sums/", "/api/datasets/owner/sums")):
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            data = HUB_FILES.get(path.rpartition("/")[2])
            named = {"ETag": hashlib.sha1(data).hexdigest(), "X-Repo-Commit": COMMIT} if data else {}
            self.answer(200 if data else 404, data or b"", named or {"X-Error-Code": "EntryNotFound"})
        elif "/tree/" in path:
            in_root = path.endswith(COMMIT)
            files = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in HUB_FILES.items()]
            self.answer(200, json.dumps(files if in_root else []).encode(), {"Content-Type": "application/json"})
        else:
            about = {"id": "owner/sums", "sha": COMMIT, "siblings": [{"rfilename": name} for name in HUB_FILES]}
            self.answer(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


ASK_THE_HUB = """
import json
from backend.data.rows import read_splits
from backend.config.config import parse
from backend.utils.errors import UserError
streamed = {"streaming": True, "eval_data": {"sums": "owner/sums"}}
missing = {"data": "owner/none"}, {"train_split": "learn"}, {"test_split": "exam"}, {"dataset_config": "large"}
for more in ({}, streamed, *missing):
    try:
        splits = read_splits(parse({"model": "m", "data": "owner/sums"} | more))
        named = {name: list(each.rows) for name, each in splits.evals.items()}
        print(json.dumps([list(splits.train), list(splits.valid), list(splits.test), splits.source, named]))
    except UserError as mistake:
        print(json.dumps([fault.to_dict() for fault in mistake.faults]))
"""


def test_a_hub_id_is_read_through_the_datasets_library(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = backend_environment() | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    environment |= {"HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", ASK_THE_HUB], env=environment, capture_output=True, text=True, timeout=120
        )
    finally:
        server.shutdown()
        server.server_close()
    assert process.returncode == 0, process.stderr
    dataset, streamed, none, learn, exam, large = map(json.loads, process.stdout.splitlines())
    assert dataset == [ROWS, ROWS[:1], [], {"train": "owner/sums, train", "valid": "owner/sums, validation"}, {}]
    assert streamed == [*dataset[:4], {"sums": ROWS[:1]}], "the same rows and order, mapped from a file"
    assert none[0]["setting"] == "data" and "has no dataset owner/none" in none[0]["sentence"]
    assert learn == [{"setting": "train_split", "sentence": "owner/sums has no split learn; it has train, validation."}]
    assert exam == [{"setting": "test_split", "sentence": "There is no split exam. owner/sums has train, validation."}]
    assert large[0]["setting"] == "data" and "large" in large[0]["sentence"]


def test_a_missing_column_is_named_with_the_existing_ones() -> None:
    rows = [{"question": "a", "solution": "b"}]
    assert [(fault.setting, fault.sentence) for fault in check_columns(rows, settings(), "rows.jsonl")] == [
        ("prompt_feature", "There is no column prompt; rows.jsonl has the columns question, solution."),
        ("answer_feature", "There is no column answer; rows.jsonl has the columns question, solution."),
    ]
    mapped = settings(prompt_feature="question", answer_feature="solution")
    assert not check_columns(rows, mapped, "rows.jsonl")
    spaced, _ = check_columns([{" prompt": "a", "answer\tb": ""}], settings(), "rows.csv")
    assert spaced.sentence.endswith("has the columns ' prompt', 'answer\\tb'.")


def test_an_answer_column_is_required_only_by_functions_that_compare() -> None:
    rows = [{"prompt": "a"}]
    assert not check_columns(rows, settings(reward_functions=["r1_count_xml"]), "rows")
    for raw in ({"reward_functions": ["r1_accuracy"]}, {"reward_functions": ["mine"], "answer_feature": "solution"}):
        assert [fault.setting for fault in check_columns(rows, settings(**raw), "rows")] == ["answer_feature"]
