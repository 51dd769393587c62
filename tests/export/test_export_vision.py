"""The export of a vision model keeps the part that reads images: mlx-vlm, and so LM Studio, opens it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from backend.config import config as spec_config
from backend.export import export_run, writer
from backend.export.export_run import Export, run_weights
from backend.export.exports import FORMATS, exported_bytes
from backend.export.writer import in_format
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from tests.support.random_runs import write_run
from tests.support.vision_models import PLACEHOLDERS, picture, rename_as_transformers, tiny_vision_model


def exported(tmp_path: Path, model: Path, format_: str = "full", **how: Any) -> tuple[Path, dict[str, mx.array]]:
    """(a random run of `model`, exported; the text model's weights in this format, unpacked)."""
    write_run(tmp_path / "run", model, **how)
    run = RunFolder(tmp_path / "run")
    export_run.export_run(run, Export("folder", "out", folder=tmp_path / "exports", format=format_))
    trained, config = run_weights(run, spec_config.load(run.config)).open_with_config()
    text = mlx_lm_utils.dequantize_model(in_format(trained, config, FORMATS[format_])[0])
    return tmp_path / "exports" / "out", dict(tree_flatten(text.parameters()))


def answer(folder: Path, inputs: dict[str, Any], text: dict[str, mx.array] | None = None) -> mx.array:
    """mlx-vlm's logits of a question with a picture, by the model in `folder` with other weights of its text."""
    from mlx_vlm.utils import load_model  # takes a second, in each worker of the suite

    model = load_model(folder)
    if text is not None:
        mlx_lm_utils.dequantize_model(model)
        own = dict(tree_flatten(model.parameters()))
        if not own.keys() >= text.keys():
            text = {name.replace("language_model.model.", "language_model."): array for name, array in text.items()}
        assert own.keys() >= text.keys()
        model.load_weights(list(text.items()), strict=False)
    return model(**inputs).logits[0]


def test_adapters_for_peft_have_transformers_names(tmp_path: Path) -> None:
    base = rename_as_transformers(tiny_vision_model(tmp_path / "base"), "qwen3_vl")
    write_run(tmp_path / "run", base)
    export = Export("folder", "out", folder=tmp_path, format="peft")
    done = export_run.export_run(RunFolder(tmp_path / "run"), export)
    assert not done.verification.max_error or done.verification.max_error < 1e-4
    names = mx.load(str(tmp_path / "out" / "adapter_model.safetensors"))
    assert "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert "AutoModelForImageTextToText.from_pretrained" in (tmp_path / "out" / "README.md").read_text()


LONG = pytest.mark.proof


def test_without_mlx_vlm_the_vision_part_is_left_out_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "find_spec", lambda name: None)
    for family in ("qwen3_vl", "smolvlm"):
        write_run(tmp_path / family / "run", tiny_vision_model(tmp_path / family / "base", family))
    export = Export("folder", "out", folder=tmp_path)
    done = export_run.export_run(RunFolder(tmp_path / "qwen3_vl" / "run"), export)
    assert writer.INSTALL in done.sentences()[-1]
    assert not any("vision" in name for name in mx.load(str(tmp_path / "out" / "model.safetensors")))
    with pytest.raises(UserError, match="pip install"):  # mlx-lm could not open its text model alone
        export_run.export_run(RunFolder(tmp_path / "smolvlm" / "run"), replace(export, overwrite=True))
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize(
    ("family", "bits", "format_", "how"),
    [
        ("qwen3_vl", None, "full", {}),
        ("smolvlm", None, "full", {"train_type": "full"}),
        ("smolvlm", 8, "fused", {}),
        *(pytest.param(family, None, "full", {}, marks=LONG) for family in ("smolvlm", "gemma3", "lfm2_vl", "qwen3_5")),
        *(pytest.param("smolvlm", 8, format_, {}, marks=LONG) for format_ in ("full", "mxfp4")),
        *(pytest.param("qwen3_vl", None, format_, {}, marks=LONG) for format_ in ("mxfp4", "original")),
        pytest.param("qwen3_vl", 4, "fused", {}, marks=LONG),
    ],
)
def test_mlx_vlm_answers_as_the_trained_model(
    tmp_path: Path, family: str, bits: int | None, format_: str, how: dict[str, Any]
) -> None:
    from mlx_vlm.utils import load_processor, prepare_inputs

    image, base = picture(tmp_path / "image.png"), tmp_path / "base"
    tiny_vision_model(base, family, bits=bits, vision_bits=bits if family == "smolvlm" else None)
    out, text = exported(tmp_path, base, format_, **how)
    processor = load_processor(out, True, eos_token_ids=1)
    inputs = dict(prepare_inputs(processor, images=[image], prompts=f"{PLACEHOLDERS[family]} What? "))
    inputs["mask"] = inputs.pop("attention_mask")
    expected, untrained = answer(base, inputs, text), answer(base, inputs)
    assert mx.allclose(answer(out, inputs), expected, atol=1e-4)
    assert not mx.allclose(untrained, expected, atol=0.1), "training changed the answer"
    if bits is None:
        size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        assert exported_bytes(base, FORMATS[format_]) == pytest.approx(size, rel=0.15)
    arrays = mx.load(str(out / "model.safetensors"))
    packed = {name for name in arrays if name.endswith(".scales") and not name.startswith("language_model.")}
    assert bool(packed) == (family == "smolvlm" and format_ == "fused")
