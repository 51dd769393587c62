"""Samples of `python -m tests.torture agreement` and `verbs`; the kinds of settings that once passed `check` and failed in `train`; and that what is
refused leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backend.__main__ import app
from backend.run.preflight import check
from tests.support.small_run import write_config
from tests.support.trained_run import make_run
from tests.torture import agreement, verbs

VERBS = app()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> agreement.Place:
    return agreement.Place(tmp_path_factory.mktemp("agreement"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[verbs.Place]:
    (tmp_path / "verbs").mkdir()
    with verbs.prepared(tmp_path / "verbs") as place:
        yield place


def test_check_and_train_agree_on_a_sample(inputs: agreement.Place) -> None:
    results = [agreement.case(agreement.draw(seed, inputs), inputs) for seed in range(8)]
    assert not [wrong for wrong, _ in results if wrong]
    assert {is_trained for _, is_trained in results} == {True, False}


@pytest.mark.parametrize(
    ("setting", "words", "changes"),
    [
        ("lora_keys", "self_attn.q_proj", {"lora_keys": ["qq_proj"]}),
        ("lora_keys", "called nothing", {"lora_keys": [""]}),
        ("quantization", "none is a multiple of 64", {"model": "experts", "quantization": "8"}),
        ("quantization", "cannot be quantised", {"model": "experts", "quantization": "mxfp4"}),
        ("reference_model_path", "other tokens", {"beta": 0.1, "reference_model_path": "other-tokens"}),
        ("reference_model_path", "does not fit", {"beta": 0.1, "reference_model_path": "adapters-of-another"}),
        ("reward_weight_schedule", "at least 2 steps", {
            "reward_weight_schedule": "linear", "reward_weights_final": [0.5, 1.0], "epochs": 1, "batch_size": 6,
        }),
        ("stages", "at least one of them not be 0", {"stages": [{"iters": 1, "reward_weights": [0.0, 0.0]}]}),
    ],
)  # fmt: skip
def test_check_sees_what_train_would_refuse(
    setting: str, words: str, changes: dict[str, Any], inputs: agreement.Place
) -> None:
    folders = {key: str(inputs.root / changes[key]) for key in ("model", "reference_model_path") if key in changes}
    faults = check(inputs.sound() | changes | folders)
    assert [fault.setting for fault in faults] == [setting]
    assert words in faults[0].sentence and len(faults[0].sentence) <= 200


def test_a_sample_of_verbs_with_hostile_values(place: verbs.Place) -> None:
    commands = verbs.verbs()
    assert len(commands) > 20
    numbers = {each.opts[0] for command in commands.values() for each in command.params if verbs.takes_number(each)}
    assert {"--limit", "--top-p", "--speed", "place"} <= numbers, "typer tells a number otherwise now"
    assert not [found for seed in range(30) if (found := verbs.case(verbs.draw(seed, place, commands), place))]


@pytest.mark.parametrize(
    "words",
    [
        ("train", "settings.yaml"),
        ("train", "settings.yaml", "--name", "../x"),
        ("demo", "--iters", "0"),
        ("sweep", "sweep.yaml"),
        ("queue", "add", "settings.yaml"),
        ("replay", "parent", "--speed", "nan"),
        ("clone", "parent", "--set", "lora_keys=[nosuch]"),
        *(
            pytest.param(words, marks=pytest.mark.proof)
            for words in (
                ("train", "settings.yaml", "--runs-dir", "runs/new"),
                ("queue", "add", "nosuch.yaml", "--name", "mine"),
                ("replay", "parent", "--name", "../x"),
                ("clone", "parent", "--set", "rank=3"),
                ("clone", "parent", "--name", "../x"),
                ("clone", "parent", "--step", "7"),
            )
        ),
    ],
    ids=" ".join,
)
def test_a_refused_run_leaves_no_folder(words: tuple[str, ...], place: verbs.Place) -> None:
    root = place.root
    make_run(root / "parent", root / "sound")
    write_config(
        root / "sweep.yaml", {"base": {"model": str(root / "absent"), "data": "x.jsonl"}, "over": {"rank": [1, 2]}}
    )
    paths = ("parent", "settings.yaml", "sweep.yaml", "nosuch.yaml", "runs/new")
    before = {path for path in root.rglob("*") if "cache" not in path.parts}
    result = CliRunner().invoke(VERBS, [str(root / word) if word in paths else word for word in words])
    assert result.exit_code == 2, result.output
    assert not verbs.wrong(result)
    assert {path for path in root.rglob("*") if "cache" not in path.parts} == before
