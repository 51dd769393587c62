"""Each rule of a model folder: what breaks it is found and named, by the module and by the verb `validate`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from backend.__main__ import app
from backend.export import lm_studio_rules, writer
from tests.support.random_models import tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("sound") / "model", layers=1)


def edit(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def shards(folder: Path, *, gap: bool = False, index: bool = True) -> None:
    """The weights in two shards."""
    arrays = dict(mx.load(str(folder / "model.safetensors")))  # pyright: ignore
    (folder / "model.safetensors").unlink()
    names, where = sorted(arrays), {}
    for number, part in ((1, names[:3]), (3 if gap else 2, names[3:])):
        file = f"model-{number:05d}-of-00002.safetensors"
        writer.write_safetensors(folder / file, {name: arrays[name] for name in part})
        where |= dict.fromkeys(part, file)
    if index:
        (folder / lm_studio_rules.INDEX).write_text(json.dumps({"weight_map": where}))


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str = "") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def cut_off(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 8)


def no_metadata(folder: Path) -> None:
    mx.save_safetensors(str(folder / WEIGHTS), {"a": mx.zeros(2)})


BREAKS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no config": (without("config.json"), "config.json", "missing"),
    "config of something else": (written("config.json", "[]"), "config.json", "no JSON object"),
    "no type": (edit(model_type=None), "config.json", "model_type"),
    "no weights": (without(WEIGHTS), WEIGHTS, "no weights"),
    "cut off": (cut_off, WEIGHTS, "cut off"),
    "no weights but text": (written(WEIGHTS, "no header at all"), WEIGHTS, "no safetensors"),
    "no metadata": (no_metadata, WEIGHTS, "metadata"),
    "quantised in words": (edit(quantization={"bits": 4}), "config.json", "says that the weights are quantised"),
    "no tokenizer": (without("tokenizer_config.json"), "tokenizer_config.json", "missing"),
    "no vocabulary": (without("tokenizer.json"), "tokenizer.json", "no vocabulary"),
    "adapter": (written("adapters.safetensors"), "adapters.safetensors", "no part"),
    "mac companion": (written("._model.safetensors"), "._model.safetensors", "hidden"),
    "folder": (lambda f: (f / "more").mkdir(), "more", "folder"),
    "other weights": (written("extra.safetensors"), "extra.safetensors", "is called model.safetensors"),
    "shards without index": (lambda f: shards(f, index=False), lm_studio_rules.INDEX, "index of the shards"),
    "a shard is missing": (lambda f: shards(f, gap=True), "model-00001-of-00002.safetensors", "2 shards"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_a_rule_is_named(sound: Path, tmp_path: Path, name: str) -> None:
    broken, file, word = BREAKS[name]
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    broken(folder)
    faults = lm_studio_rules.faults(folder)
    assert [fault for fault in faults if fault.setting == file and word in fault.sentence], faults


def test_a_sound_model_has_no_fault_also_in_shards(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    assert not lm_studio_rules.faults(folder) and not lm_studio_rules.warnings(folder)
    shards(folder)
    assert not lm_studio_rules.faults(folder)


def test_the_verb_names_faults_and_what_is_missing(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    fine = CliRunner().invoke(app(), ["validate", str(folder)])
    assert fine.exit_code == 0 and "is a model that LM Studio and mlx-lm open" in fine.output
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").unlink()
    bad = CliRunner().invoke(app(), ["validate", str(folder)])
    assert bad.exit_code == 2 and "config.json: The file is missing" in bad.output and "chat template" in bad.output
    said = json.loads(CliRunner().invoke(app(), ["validate", str(folder), "--json"]).output)
    assert [fault["setting"] for fault in said["warnings"]] == ["chat_template"] and said["faults"]
    assert CliRunner().invoke(app(), ["validate", str(tmp_path / "nowhere")]).exit_code == 2
