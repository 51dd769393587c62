"""Rows are read from every kind of file, from folders and from the Hub; errors are one sentence."""

import csv
import errno
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from backend.config.config import Config, parse, problems
from backend.data.dataset_columns import columns_of, guessed
from backend.data.rows import check_columns, read_splits
from backend.utils.command import backend_environment
from backend.utils.errors import UserError
from tests.support.cases import cases, mistake
from tests.support.hub_server import HubStandIn, Repo

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


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file_is_train_and_a_folder_has_a_split_for_each_file(tmp_path: Path, suffix: str) -> None:
    for name, content in (("train", ROWS), ("validation", ROWS[:2]), ("test", ROWS[2:3]), ("readme", ROWS)):
        write(tmp_path / f"{name}{suffix}", content)
    path = tmp_path / f"train{suffix}"
    alone, splits = read_splits(settings(path)), read_splits(settings(tmp_path))
    assert alone.train == ROWS and not alone.valid and not alone.test and alone.source == {"train": str(path)}
    assert (splits.train, splits.valid, splits.test) == (ROWS, ROWS[:2], ROWS[2:3])
    assert splits.source["valid"] == str(tmp_path / f"validation{suffix}")


def test_a_split_in_two_files_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "train.csv").write_text("prompt,answer\na,b\n")
    with pytest.raises(UserError, match=r"has train\.jsonl and train\.csv; leave one of them there\.$"):
        read_splits(settings(tmp_path))


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
        ("a.json", f'[{{"prompt": {"1" * 5000}}}]', "The JSON in {path} is broken: a whole number has more than 4,300"),
        ("a.parquet", "PAR1 not really", "{path} cannot be read as parquet: "),
        ("a.parquet", "", "{path} cannot be read as parquet: it is empty."),
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


@pytest.mark.parametrize("name", ["locked", "locked/a.jsonl"])
def test_a_folder_that_must_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Not “has none of train.jsonl”, nor “there is no file”. Root may read all, so that the system is a stand-in."""
    write(tmp_path / "locked" / "train.jsonl", ROWS)
    look = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if "locked/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return look(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    _, sentence = mistake(read_splits, settings(tmp_path / name))
    assert sentence.endswith(f"{name} cannot be read: Permission denied.")


def test_the_held_out_share_is_the_same_every_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": str(n), "answer": ""} for n in range(50)])
    first, again, other_seed = (read_splits(settings(path, validation_split=0.1, seed=seed)) for seed in (1, 1, 2))
    assert len(first.valid) == 5 and len(first.train) == 45
    numbers = [int(row["prompt"]) for row in [*first.train, *first.valid]]
    assert sorted(numbers) == list(range(50)) and numbers[:45] == sorted(numbers[:45])
    assert first.valid == again.valid != other_seed.valid
    assert first.source_of("valid") == first.source["train"], "images are relative to it"
    assert len(read_splits(settings(path, validation_split=0.001)).valid) == 1, "a share above 0 holds at least one"
    setting, sentence = mistake(read_splits, settings(path, validation_split=0.999))
    assert setting == "validation_split" and "Holding out 50 of 50 rows" in sentence


SUMS = Repo(
    {
        "README.md": b"# Sums\n",
        "train.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
        "validation.jsonl": json.dumps(ROWS[0]).encode() + b"\n",
    }
)
TWO = b"configs: [{config_name: a, data_files: a.jsonl}, {config_name: b, data_files: b.jsonl}]"
BROKEN = Repo({"train.jsonl": SUMS.files["train.jsonl"] + b'{"prompt": '})
MIXED = Repo(SUMS.files | {"test.jsonl": b'{"question": "?"}'})
PACKED = Repo({"train.jsonl.gz": gzip.compress(SUMS.files["train.jsonl"])})
ASK_THE_HUB = """
import json
import os
from backend.data.rows import read_splits
from backend.config.config import parse
from backend.utils.errors import UserError
streamed = {"streaming": True, "eval_data": {"sums": "owner/sums"}}
missing = {"data": "owner/none"}, {"train_split": "learn"}, {"test_split": "exam"}, {"dataset_config": "large"}
missing += {"data": "owner/two"}, {"data": "owner/broken"}, {"data": "owner/mixed"}, {"data": "owner/packed"}
for more in ({}, streamed, *missing):
    try:
        splits = read_splits(parse({"model": "m", "data": "owner/sums"} | more))
        named = {name: list(each.rows) for name, each in splits.evals.items()}
        print(json.dumps([list(splits.train), list(splits.valid), list(splits.test), splits.source, named]))
    except UserError as mistake:
        print(json.dumps([fault.to_dict() for fault in mistake.faults]))
"""


def test_a_hub_id_is_read_through_the_datasets_library(tmp_path: Path) -> None:
    environment = backend_environment() | {"HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    two = Repo({"README.md": b"---\n" + TWO + b"\n---\n", "a.jsonl": b"{}", "b.jsonl": b"{}"})
    more = {"owner/two": two, "owner/broken": BROKEN, "owner/mixed": MIXED, "owner/packed": PACKED}
    with HubStandIn(datasets={"owner/sums": SUMS} | more) as hub:
        command, environment["HF_ENDPOINT"] = [sys.executable, "-P", "-c", ASK_THE_HUB], hub.url
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    dataset, streamed, none, learn, exam, *others = map(json.loads, process.stdout.splitlines())
    assert dataset == [ROWS, ROWS[:1], [], {"train": "owner/sums, train", "valid": "owner/sums, validation"}, {}]
    assert streamed == [*dataset[:4], {"sums": ROWS[:1]}], "the same rows and order, mapped from a file"
    assert none[0]["setting"] == "data" and "has no dataset owner/none" in none[0]["sentence"]
    assert learn == [{"setting": "train_split", "sentence": "owner/sums has no split learn; it has train, validation."}]
    assert exam == [{"setting": "test_split", "sentence": "There is no split exam. owner/sums has train, validation."}]
    assert [(each[0]["setting"], each[0]["sentence"]) for each in others[:2]] == [
        ("dataset_config", "The dataset owner/sums needs one of its configurations: default."),
        ("dataset_config", "The dataset owner/two needs one of its configurations: a, b."),
    ]
    assert "JSON parse error" in others[2][0]["sentence"]
    assert "its files differ in columns: there are 1 new columns ({'question'})" in others[3][0]["sentence"]
    assert others[4][0] == ROWS


def test_a_missing_column_is_named_with_the_existing_ones() -> None:
    rows = [{"question": "a", "solution": "b"}]
    assert [(fault.setting, fault.sentence) for fault in check_columns(rows, settings(), "rows.jsonl")] == [
        ("prompt_feature", "There is no column prompt; rows.jsonl has the columns question, solution."),
        ("answer_feature", "There is no column answer; rows.jsonl has the columns question, solution."),
    ]
    assert not check_columns(rows, settings(prompt_feature="question", answer_feature="solution"), "rows.jsonl")
    spaced, _ = check_columns([{" prompt": "a", "answer\tb": ""}], settings(), "rows.csv")
    assert spaced.sentence.endswith("has the columns ' prompt', 'answer\\tb'.")
    (alone,) = check_columns([{"prompt": "a"}], settings(), "rows.csv")
    assert alone.sentence == "There is no column answer; rows.csv has the column prompt."


def test_an_answer_column_is_required_only_by_functions_that_compare() -> None:
    rows = [{"prompt": "a"}]
    assert not check_columns(rows, settings(reward_functions=["r1_count_xml"]), "rows")
    for raw in ({"reward_functions": ["r1_accuracy"]}, {"reward_functions": ["mine"], "answer_feature": "solution"}):
        assert [fault.setting for fault in check_columns(rows, settings(**raw), "rows")] == ["answer_feature"]


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
    config = settings(gsm8k, answer_pattern="#### (.*)", prompt_template="Check: {answer}", prompt_feature="question")
    assert read_splits(config).train[1]["question"] == f"Check: {GSM8K[1]['answer']}", "the answer as it was"


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
    splits = read_splits(settings(gsm8k, **raw, prompt_feature="question", streaming=streaming), shortened)
    assert [row["answer"] for row in splits.train] == ["sho"] * 3
    assert [row["question"] for row in splits.train] == [GSM8K[n]["question"] for n in (0, 2, 3)]
    (note,) = splits.notes
    assert note.startswith("1 of 4 rows of train are left out: the map function shorter returned None for them")


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
    assert read_splits(settings(train, valid_data=str(tmp_path / "other"))).valid == [ROWS[files.index(taken)]]


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
        ("a.csv", "\udcff\udcfe\0", []),
    ],
)
def test_columns_are_read_from_the_first_line(tmp_path: Path, name: str, text: str, columns: list[str]):
    (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    assert columns_of(tmp_path / name) == columns and columns_of(tmp_path / "absent.csv") == columns_of(tmp_path) == []


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
