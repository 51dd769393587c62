"""Settings drawn at random, sound and broken: whatever reads them raises UserError or accepts them, and writes them
back unchanged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.config.config import SETTINGS, dump, parse, problems
from backend.config.notes import unusual
from backend.config.other_programs.files import mlx_lm_lora_yaml
from backend.config.other_programs.into_trl import into_trl, trl_yaml
from backend.config.other_programs.translation import FOREIGN_WORDS
from backend.runs.sweep import parse_sweep
from backend.trainer.memory.estimate import estimate_run
from backend.trainer.memory.model_shape import ModelShape, shape_of
from backend.utils.documents import parse_yaml
from backend.utils.errors import UserError
from tests.support.random_models import tiny_model

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

fuzz = settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))


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
        mlx_lm_lora_yaml(config)
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
