"""Files of rows with broken bytes, structures and types: a dataset is read, or refused with a message; nothing is left
behind."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.config.config import parse
from backend.data.problems import PromptFormat, check_prompts
from backend.data.rows import check_columns, read_splits
from backend.models.tokenizers import load_tokenizer
from backend.serve import dataset_questions
from backend.serve.questions import QuestionCall
from backend.utils.errors import UserError
from tests.support.random_models import tiny_tokenizer

cells = st.recursive(
    st.text(max_size=20) | st.integers() | st.floats() | st.booleans() | st.none() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
columns = st.sampled_from(["prompt", "answer", "type", "system", "messages", "question"]) | st.text(max_size=8)
rows = st.lists(st.dictionaries(columns, cells, max_size=4), max_size=4)
line_breaks = st.sampled_from(["\n", "\r\n", "\n\n"])
jsonl = st.tuples(rows, line_breaks).map(lambda pair: pair[1].join(json.dumps(row) for row in pair[0]).encode())
csv = st.lists(st.lists(st.text(max_size=8), max_size=4), max_size=4).map(
    lambda lines: "\n".join(["prompt,answer", *(",".join(line) for line in lines)]).encode(errors="replace")
)
broken = st.tuples(jsonl | csv, st.integers(0, 200), st.binary(max_size=4)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
)
contents = jsonl | csv | broken | st.binary(max_size=60)
fuzz = settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))


_FOLDER = TemporaryDirectory(prefix="fuzz-tokenizer-")


@cache
def tokenizer() -> Any:
    folder = tiny_tokenizer(Path(_FOLDER.name))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return load_tokenizer(folder)


def read(raw: dict[str, Any]) -> None:
    """What `check`, a run and the Dataset page do with a dataset. Raises UserError."""
    config = parse(raw)
    splits = read_splits(config)
    if not check_columns(splits.train, config, config.data):
        check_prompts(splits.train, tokenizer(), PromptFormat.of(config), config.data)
    json.dumps(dataset_questions.preview({"settings": raw}, QuestionCall(lambda progress: None)), default=str)


def try_file(name: str, content: bytes, streaming: bool) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        raw = {"model": "m", "data": str(path), "reward_functions": ["r1_int"], "streaming": streaming}
        try:
            read(raw)
        except UserError as error:
            for problem in error.faults:
                assert problem.setting and problem.sentence.isprintable() and problem.sentence.endswith("."), problem
        assert [file.name for file in Path(folder).iterdir()] == [name]


@fuzz
@given(st.sampled_from(["d.jsonl", "d.json", "d.csv", "d.parquet", "d.txt"]), contents, st.booleans())
def test_a_file_is_read_or_refused(name: str, content: bytes, streaming: bool) -> None:
    try_file(name, content, streaming)


@pytest.mark.parametrize(
    "column", [[1, 2], [None, "x"], [math.nan, 1.0], [b"\xff", b"a"], [[1], [2]], [{"a": 1}, {"a": 2}]]
)
def test_a_parquet_file_of_any_type_is_read_or_refused(column: list[Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": column, "answer": ["1", "2"]}), tmp_path / "d.parquet")
    try_file("d.parquet", (tmp_path / "d.parquet").read_bytes(), streaming=False)
