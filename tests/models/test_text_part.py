"""Vision models that mlx-lm does not know open as the text model that they hold."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_vlm.utils import load_model as load_whole

from backend.models import inventory
from backend.models.architectures import architecture_refusal
from backend.models.loading import load_model
from tests.support.vision_models import FAMILIES, TRANSFORMERS, rename_as_transformers, tiny_vision_model

IDS = mx.array([[5, 9, 40, 7, 3, 100, 8]])


@pytest.mark.parametrize(
    ("family", "text", "bits"),
    [*((family, {}, None) for family in FAMILIES), ("smolvlm", {}, 4), ("lfm2_vl", {}, 8)],
)
def test_the_text_model_computes_what_mlx_vlm_does(tmp_path: Path, family: str, text: dict, bits: int | None) -> None:
    folder = tiny_vision_model(tmp_path, family, text=text, bits=bits)
    expected = load_whole(folder).language_model(IDS).logits
    own = load_model(str(folder), "model")[0](IDS)
    assert inventory.model_at(folder).remarks == ["It reads images."]
    assert mx.allclose(own, expected, atol=1e-4)
    if family in TRANSFORMERS and bits is None:
        rename_as_transformers(folder, family)
        assert mx.array_equal(load_model(str(folder), "model")[0](IDS), own)


@pytest.mark.parametrize("says", [True, False, None])
def test_the_output_layer_is_the_embedding_without_one(tmp_path: Path, says: bool | None) -> None:
    folder = tiny_vision_model(tmp_path, "smolvlm")
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.update(tie_word_embeddings=says) if says is not None else part.pop("tie_word_embeddings")
    (folder / "config.json").write_text(json.dumps(config))
    with_head = load_model(str(folder), "model")[0](IDS)
    arrays = mx.load(str(folder / "model.safetensors"))
    head = arrays.pop("language_model.lm_head.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    without = load_model(str(folder), "model")[0](IDS)
    assert head.size and bool(mx.array_equal(with_head, without)) == (says is True)


def test_other_vision_models_are_refused() -> None:
    text, eyes = {"model_type": "gemma"}, {"vision_config": {}}
    assert "no model of the kind paligemma" in architecture_refusal(
        {"model_type": "paligemma", "text_config": text} | eyes
    )
    assert "no model of the kind odd" in architecture_refusal(
        {"model_type": "odd", "text_config": {"model_type": "odd"}} | eyes
    )
    assert not architecture_refusal({"model_type": "odd", "text_config": text} | eyes)
