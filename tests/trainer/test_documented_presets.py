"""The presets of public datasets, against stand-ins of their repositories: fetched, checked, read, rewarded; in the
proof, trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from backend.config.config import parse
from backend.data.rows import read_splits
from backend.rewards.functions.answers import accuracy_reward
from backend.serve.dataset_questions import preview
from backend.serve.hub_questions import download
from backend.serve.questions import QuestionCall
from backend.trainer import preflight
from backend.utils import places
from tests.models.test_hub import point_at
from tests.support import public_datasets
from tests.support.hub_server import HubStandIn
from tests.support.public_datasets import DEEPMATH, GSM8K, QWEN2
from tests.support.random_models import tiny_model

ANSWERS = {"gsm8k": ["2,000", "-3"], "deepmath": ["Yes", r"$\dfrac{1}{2}$"]}
"""Preset → answers that its rows must have once they are read."""
RIGHT = {"gsm8k": r"So it is \boxed{2000}.", "deepmath": r"Thus \boxed{\frac{1}{2}}."}
"""Preset → a completion that is right for one of these."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    model = tiny_model(tmp_path / "model", "qwen2")
    repos = {GSM8K: public_datasets.gsm8k(), DEEPMATH: public_datasets.deepmath()}
    with HubStandIn({QWEN2: public_datasets.model_repo(model)}, repos) as stand_in:
        point_at(stand_in.url, tmp_path / "cache", monkeypatch)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", stand_in.url)
        yield stand_in


@pytest.mark.parametrize("preset", ["gsm8k", "deepmath"])
def test_a_documented_preset_finds_its_rows_and_answers(hub: HubStandIn, preset: str) -> None:
    file = places.resources() / "presets" / f"{preset}.yaml"
    settings = yaml.safe_load(file.read_text()) | {"model": QWEN2}
    assert preview({"settings": settings}, QuestionCall()) == {"absent": True}, "nothing is fetched unasked"
    download({"id": settings["data"], "repo_type": "dataset"}, QuestionCall())
    assert preflight.check(settings) == []
    splits = read_splits(parse(settings))
    rows = {row[settings["answer_feature"]] for row in splits.train}
    assert set(ANSWERS[preset]) <= rows and len(splits.train) > 280 and splits.valid and len(splits.test) == 30
    right = [answer for answer in ANSWERS[preset] if accuracy_reward([], [RIGHT[preset]], [answer]) == [1.0]]
    assert len(right) == 1, "the reward tells the right answer from the other"
    shown = preview({"settings": settings}, QuestionCall())
    assert not shown["faults"] and shown["splits"]["train"]["unanswered"] == 0
    hub.down = True
    assert len(read_splits(parse(settings)).train) == len(splits.train), "from the cache"
