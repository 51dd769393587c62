"""Settings and files of rows drawn at random, sound and broken: whatever reads them raises UserError, in one line, or
accepts them, writes them back unchanged, and leaves nothing behind."""

import json
import math
import random
import signal
import subprocess
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.config.config import SETTINGS, dump, parse, problems
from backend.config.notes import unusual
from backend.config.other_programs.into_trl import into_trl, trl_yaml
from backend.config.other_programs.translation import FOREIGN_WORDS
from backend.data.labels import check_prompts
from backend.data.problems import PromptFormat
from backend.data.rows import check_columns, read_splits
from backend.models.tokenizers import load_tokenizer
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.runs.sweep import parse_sweep
from backend.serve import dataset_questions
from backend.serve.questions import QuestionCall
from backend.trainer.memory.estimate import estimate_run
from backend.trainer.memory.model_shape import ModelShape, shape_of
from backend.utils.command import backend_command, backend_environment
from backend.utils.documents import parse_yaml
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.random_models import tiny_model, tiny_tokenizer

SOUND = {"model": "owner/model", "data": "owner/data", "reward_functions": ["r1_int"], "max_completion_length": 64}
LIMITS = [limit for setting in SETTINGS.values() for limit in (setting.low, setting.high) if limit is not None]
WORDS = "~ ~nosuchuser/x ../../etc/passwd owner/ a/b/c -rf $HOME {{x}} %s%n nan 1e999 file.py::f /dev/zero"
ODD_TEXTS = ["", " ", "x" * 256, "/" * 5000, "\0", "\ud800", "\u202egnp.exe", "owner/na me", *WORDS.split()]
ODD_TEXTS += ["keyword(word=" + "(" * 300, "kl > nan", "reward >= " + "9" * 5000]

texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=40)
odd_numbers = [*LIMITS, *(limit + 1 for limit in LIMITS), 10**400, -(10**400), math.inf, -math.inf, math.nan]
numbers = st.sampled_from(odd_numbers) | st.integers() | st.floats()
scalars = texts | numbers | st.booleans() | st.none()
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3))
names = texts.filter(str.strip)
keys = st.sampled_from([*SETTINGS, *FOREIGN_WORDS, "stages", "lora_parameters", "optimizer_config"]) | names
raw_settings = st.dictionaries(keys, values, min_size=1, max_size=4).map(lambda changes: SOUND | changes)
YAML_LINES = ["a: 1", "a: 1", "b: [", "}", "&a [*a]", "*b", "!!python/name:os.system", "? x", "- - -", "|\n x", "<<: 3"]
yaml_texts = st.text(max_size=60) | st.lists(st.sampled_from(YAML_LINES), max_size=5).map("\n".join)

fuzz = settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    shape = shape_of(tiny_model(tmp_path_factory.mktemp("model"), layers=1))
    assert shape is not None
    return shape


def require_one_line(error: UserError) -> None:
    for problem in error.faults:
        assert problem.setting and problem.sentence.isprintable() and problem.sentence.endswith((".", "?")), problem


@fuzz
@given(raw_settings)
def test_settings_are_refused_in_one_line_each_or_work_everywhere(shape: ModelShape, raw: dict[str, Any]) -> None:
    assert problems(SOUND) == []
    try:
        if faults := problems(raw):
            raise UserError(faults)
        config = parse(raw)
        assert parse(parse_yaml(dump(config), "what was written", "config")) == config or config.epochs
        trl_yaml(into_trl(config).words, "a file")
        for gpu in (False, True):
            assert estimate_run(config, shape, 16 * 10**9, gpu=gpu).total >= 0
        list(unusual(config))
    except UserError as error:
        require_one_line(error)


@fuzz
@given(raw_settings, st.dictionaries(keys, values, max_size=2), st.dictionaries(names, values, max_size=2))
def test_sweeps_are_refused_in_one_line_each_or_read(base: dict[str, Any], over: Any, more: dict[str, Any]) -> None:
    try:
        parse_sweep({"base": base, "over": over or {"learning_rate": [1e-5, 1e-4]}, **more})
    except UserError as error:
        require_one_line(error)


@fuzz
@given(yaml_texts)
def test_yaml_is_read_as_pyyaml_reads_it_or_refused(text: str) -> None:
    try:
        read = parse_yaml(text, "a file", "config")
    except UserError as error:
        require_one_line(error)
    else:
        assert repr(read) == repr(yaml.safe_load(text))


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
    json.dumps(dataset_questions.preview(QuestionCall(lambda progress: None), settings=raw), default=str)


def try_file(name: str, content: bytes, streaming: bool) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        raw = {"model": "m", "data": str(path), "reward_functions": ["r1_int"], "streaming": streaming}
        try:
            read(raw)
        except UserError as error:
            require_one_line(error)
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


OF_TIME = ("time/", "process/", "machine/", "peak_memory")


def begin(verb: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = backend_command(verb, *arguments)
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=backend_environment(), start_new_session=True, **output)


def run_content(run: RunFolder) -> dict[str, Any]:
    """What a run leaves, without times."""
    steps = [
        {key: value for key, value in event["metrics"].items() if not (key.startswith(OF_TIME) or "per_second" in key)}
        for event in read_events(run.events)
        if event["kind"] == "step"
    ]
    files = {
        str(path.relative_to(run.path)): path.read_bytes()
        for path in sorted(run.path.rglob("*"))
        if path.is_file() and (path.suffix == ".safetensors" or path.name == "completions.jsonl")
    }
    return {"steps": steps, **files}


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(30))
def test_a_killed_run_equals_one_that_was_not(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    runs = [RunFolder(tmp_path / "runs" / name) for name in ("whole", "killed")]
    for run in runs:
        raw = small_run.settings_for(tmp_path / "inputs", iters=6, save_every=2, **small_run.low_half(tmp_path))
        small_run.prepare(run, raw)
    whole, killed = runs
    assert begin("train", "--run", str(whole.path)).wait(120) == 0
    process = begin("train", "--run", str(killed.path))
    for _ in range(3 if seed else 1):
        wanted = dice.randrange(1, 6)
        while process.poll() is None and len(small_run.steps(killed)) < wanted:
            time.sleep(0.01)
        time.sleep(dice.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = begin("resume", str(killed.path))
    assert process.wait(120) == 0, killed.log.read_text()
    assert run_content(killed) == run_content(whole)
