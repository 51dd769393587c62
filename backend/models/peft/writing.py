"""LoRA or DoRA adapters in the files of Hugging Face's peft: adapter_config.json and adapter_model.safetensors.

peft names a layer as the transformers model does, which has the names of the original weights, and stores A as [r, in], B as [out, r] and
alpha = scale · r (under rsLoRA scale · √r). Where an original layer holds several of mlx-lm's, its adapters become one of the sum of
their ranks. The format is described in peft's documentation, "PEFT checkpoint format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.models.export.model_files import write_safetensors
from backend.models.export.original.merged_weights import merged
from backend.models.export.original.original_files import OriginalFiles
from backend.models.export.original.row_trace import Rows, Trace, by_original, trace
from backend.models.export.original.trained_rows import LowRank, TrainedRows, trained_rows
from backend.models.export.trained_weights import TrainedWeights
from backend.models.peft.origin import is_tied
from backend.models.peft.reading import ARRAYS, CONFIG, PREFIX, PeftLayer
from backend.models.peft.settings import tidy
from backend.spec.faults import Mistake

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""What transformers calls an embedding and the output layer in models that may tie them."""

MERGE_INSTEAD = "choose another format, which merges the adapter into the weights"


def write_peft_adapter(trained: TrainedWeights, original: OriginalFiles, to: Path) -> None:
    """Write the adapters into a new folder, with a README. Raises Mistake for a layer that peft has no adapter for."""
    learned, traced = trained_rows(trained), trace(original)
    _check_names(original, learned, traced)
    layers = dict(_layers(original, learned, traced))
    to.mkdir(parents=True)
    arrays: dict[str, mx.array] = {}
    for name, layer in layers.items():
        arrays[f"{PREFIX}{name}.lora_A.weight"] = layer.a.astype(mx.float32)
        arrays[f"{PREFIX}{name}.lora_B.weight"] = layer.b.astype(mx.float32)
        if layer.magnitude is not None:
            arrays[f"{PREFIX}{name}.lora_magnitude_vector"] = layer.magnitude.astype(mx.float32)
    whole = _whole_tensors(original, learned, traced)
    arrays |= {f"{PREFIX}{name}": tensor for name, tensor in whole.items()}
    write_safetensors(to / ARRAYS, arrays, metadata={"format": "pt"})
    assert trained.adapters is not None
    config = _config(original.name, layers, trained.adapters.about())
    config["modules_to_save"] = sorted({name.rpartition(".")[0] for name in whole}) or None
    (to / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (to / "README.md").write_text(_readme(original.name, config["use_dora"]), encoding="utf-8")


# ── what peft has no adapter for ─────────────────────────────────────────────────────────────────────────────────────


def _check_names(original: OriginalFiles, learned: TrainedRows, traced: Trace) -> None:
    names = original.shapes
    for array, adapter in sorted(learned.adapters.items()):
        layer = array.removesuffix(".weight")
        if array not in traced:
            raise Mistake(
                "format",
                f"Which of the original weights {layer} comes from could not be found out; choose mlx-lm's adapter.",
            )
        if not adapter.is_linear:
            raise Mistake(
                "format", f"{layer} is no plain linear layer, and peft's adapters would not do; {MERGE_INSTEAD}."
            )
        for run in traced[array]:
            module = run.original.removesuffix(".weight")
            # transformers 5 holds experts, and the layer that chooses among them, as parameters of their own.
            if any(name.startswith(f"{module.rpartition('.')[0]}.experts.") for name in names):
                raise Mistake("format", f"transformers has no linear layer {module} for an adapter; {MERGE_INSTEAD}.")
            if module.startswith("language_model."):
                raise Mistake("format", f"transformers renames {module} when it loads this model; {MERGE_INSTEAD}.")


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _layers(original: OriginalFiles, learned: TrainedRows, traced: Trace) -> Iterator[tuple[str, PeftLayer]]:
    """The adapters by the names of the original layers."""
    weights, shapes = original.arrays(), original.shapes
    rows = (run for array in learned.adapters for run in traced[array])
    for name, runs in by_original(rows).items():
        yield name.removesuffix(".weight"), _layer(runs, learned.adapters, shapes[name], weights[name])


def _whole_tensors(original: OriginalFiles, learned: TrainedRows, traced: Trace) -> dict[str, mx.array]:
    """The original tensors, float32, of the modules that were trained as a whole. Raises Mistake where one cannot be found."""
    if lost := sorted(learned.arrays.keys() - traced.keys()):
        raise Mistake(
            "format", f"Which of the original weights {lost[0]} comes from could not be found out; {MERGE_INSTEAD}."
        )
    tensors = original.arrays()
    runs = by_original(run for array in learned.arrays for run in traced[array])
    whole = {name: merged(tensors[name].astype(mx.float32), rows, learned) for name, rows in runs.items()}
    if is_tied(original.config, traced) and (inputs := [name for name in whole if name.endswith(EMBEDDING)]):
        # peft takes a module that is trained as a whole out of what ties it: the output layer would stay the base's.
        whole[HEAD] = whole[inputs[0]]
    return whole


def _layer(runs: list[Rows], adapters: Mapping[str, LowRank], shape: tuple[int, ...], weight: mx.array) -> PeftLayer:
    """One adapter of an original layer [out, in] from those of the mlx-lm layers in it, side by side along the rank."""
    arrays = list(dict.fromkeys(run.array for run in runs))
    column: dict[str, int] = {}
    for array in arrays:
        column[array] = sum(adapters[before].rank for before in column)
    ranks = sum(adapters[array].rank for array in arrays)
    b = mx.zeros((shape[0], ranks))
    # Rows without an adapter keep the length that they have.
    uses_dora = adapters[arrays[0]].magnitude is not None
    magnitude = mx.linalg.norm(weight.astype(mx.float32), axis=1) if uses_dora else None
    for run in runs:
        adapter = adapters[run.array]
        here, there = slice(run.original_start, run.original_start + run.count), slice(run.start, run.start + run.count)
        # One alpha / r for the whole layer, so each adapter's own scale is brought to the first one's.
        relative = adapter.scale / adapters[arrays[0]].scale
        b[here, column[run.array] : column[run.array] + adapter.rank] = relative * adapter.b[there]
        if magnitude is not None and adapter.magnitude is not None:
            magnitude[here] = adapter.magnitude[there]
    a = mx.concatenate([adapters[array].a[0] for array in arrays])
    return PeftLayer(a, b, magnitude, adapters[arrays[0]].scale)


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _config(base: str, layers: Mapping[str, PeftLayer], about: Mapping[str, Any]) -> dict[str, Any]:
    """peft's adapter_config.json; `about` is mlx-lm's. alpha is scale · rank, under rsLoRA scale · √rank. Layers go by their full names: a
    last part like q_proj would also fit layers that were not trained."""
    ranks = {name: layer.a.shape[0] for name, layer in layers.items()}
    usual = min(ranks.values())
    others = {name: rank for name, rank in ranks.items() if rank != usual}
    scale, rslora = next(iter(layers.values())).scale, about.get("use_rslora") is True
    alphas = {rank: _whole(tidy(scale * (math.sqrt(rank) if rslora else rank))) for rank in ranks.values()}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "revision": None,
        "inference_mode": True, "r": usual, "lora_alpha": alphas[usual], "bias": "none",
        "lora_dropout": about["lora_parameters"].get("dropout", 0.0),
        "target_modules": sorted(layers), "rank_pattern": others,
        "alpha_pattern": {name: alphas[rank] for name, rank in others.items()},
        "use_dora": any(layer.magnitude is not None for layer in layers.values()), "use_rslora": rslora,
        "fan_in_fan_out": False, "modules_to_save": None, "layers_to_transform": None, "layers_pattern": None,
    }  # fmt: skip


def _whole(number: float) -> float:
    """As an integer where it is one, as peft itself writes alpha."""
    return int(number) if number == int(number) else number


def _readme(base: str, is_dora: bool) -> str:
    return (
        f"---\nbase_model: {base}\nlibrary_name: peft\n---\n\n{'DoRA' if is_dora else 'LoRA'} adapters for {base}, trained with GRPO Studio.\n\n"
        "```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), ".")\n```\n'
    )
