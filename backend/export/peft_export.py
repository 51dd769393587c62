"""Write LoRA or DoRA adapters in peft's format."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.export.originals import LowRank, OriginalFiles, RowRun, Trace, by_original, merged, trace, trained_rows
from backend.export.peft_import import ARRAYS, CONFIG, PREFIX, is_tied, tidy
from backend.export.trained_weights import TrainedWeights
from backend.export.writer import write_safetensors
from backend.utils.errors import UserError
from backend.utils.hub_cache import split_revision

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # transformers' names of the embedding and output layer
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")  # of whose layers peft refuses out_proj
MERGE_INSTEAD = "choose another format, which merges the adapter into the weights"


def write_peft_adapter(trained: TrainedWeights, original: OriginalFiles, to: Path) -> None:
    """Write the adapters and a README into a new folder. Raises UserError for a layer that peft does not support."""
    assert trained.adapters is not None
    learned, traced = trained_rows(trained), trace(original)
    _check_names(original, learned.adapters, traced)
    weights, shapes = original.arrays(), original.shapes
    layers = {
        name.removesuffix(".weight"): _layer(runs, learned.adapters, shapes[name], weights[name])
        for name, runs in by_original(run for array in learned.adapters for run in traced[array]).items()
    }
    to.mkdir(parents=True)
    arrays: dict[str, mx.array] = {}
    for name, layer in layers.items():
        arrays[f"{PREFIX}{name}.lora_A.weight"] = layer.a[0].astype(mx.float32)
        arrays[f"{PREFIX}{name}.lora_B.weight"] = layer.b.astype(mx.float32)
        if layer.magnitude is not None:
            arrays[f"{PREFIX}{name}.lora_magnitude_vector"] = layer.magnitude.astype(mx.float32)
    if lost := sorted(learned.arrays.keys() - traced.keys()):
        unknown = f"Which of the original weights {lost[0]} comes from could not be found out"
        raise UserError("format", f"{unknown}; {MERGE_INSTEAD}.")
    trained_whole = by_original(run for array in learned.arrays for run in traced[array])
    whole = {name: merged(weights[name].astype(mx.float32), runs, learned) for name, runs in trained_whole.items()}
    if is_tied(original.config, traced) and (inputs := [name for name in whole if name.endswith(EMBEDDING)]):
        # peft unties a module that is trained as a whole: the output layer would stay the base's.
        whole[HEAD] = whole[inputs[0]]
    arrays |= {f"{PREFIX}{name}": tensor for name, tensor in whole.items()}
    write_safetensors(to / ARRAYS, arrays, metadata={"format": "pt"})
    config = _config(original.name, layers, trained.adapters.about())
    config["modules_to_save"] = sorted({name.rpartition(".")[0] for name in whole}) or None
    (to / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (base, revision), kind = split_revision(original.name), "DoRA" if config["use_dora"] else "LoRA"
    of_base = f'"{base}"' + (f', revision="{revision}"' if revision else "")
    class_ = "AutoModelForImageTextToText" if "vision_config" in original.config else "AutoModelForCausalLM"
    (to / "README.md").write_text(
        f"---\nbase_model: {base}\nlibrary_name: peft\n---\n\n"
        f"{kind} adapters for {original.name}, trained with GRPO Studio.\n\n"
        f"```python\nfrom peft import PeftModel\nfrom transformers import {class_}\n\n"
        f'model = PeftModel.from_pretrained({class_}.from_pretrained({of_base}), ".")\n```\n',
        encoding="utf-8",
    )


def _check_names(original: OriginalFiles, adapters: Mapping[str, LowRank], traced: Trace) -> None:
    for array, adapter in sorted(adapters.items()):
        layer = array.removesuffix(".weight")
        if array not in traced:
            unknown = f"Which of the original weights {layer} comes from could not be found out"
            raise UserError("format", f"{unknown}; choose mlx-lm's adapter.")
        if not adapter.is_linear:
            odd = f"{layer} is no plain linear layer, and peft's adapters would not do"
            raise UserError("format", f"{odd}; {MERGE_INSTEAD}.")
        for run in traced[array]:
            module = run.original.removesuffix(".weight")
            if module.endswith(".out_proj") and original.config.get("model_type") in MAMBA:
                raise UserError("format", f"peft refuses adapters of Mamba's {module}; {MERGE_INSTEAD}.")
            # transformers 5 holds experts, and the layer that chooses among them, as parameters.
            if any(name.startswith(f"{module.rpartition('.')[0]}.experts.") for name in original.shapes):
                raise UserError("format", f"transformers has no linear layer {module} for an adapter; {MERGE_INSTEAD}.")
            if module.startswith("language_model."):
                raise UserError("format", f"transformers renames {module} when it loads this model; {MERGE_INSTEAD}.")


def _layer(runs: list[RowRun], adapters: Mapping[str, LowRank], shape: tuple[int, ...], weight: mx.array) -> LowRank:
    # One alpha / r for the whole layer, so each adapter is brought to the first one's scale.
    scale = adapters[runs[0].array].scale
    scaled = {array: adapters[array].scaled(scale) for array in dict.fromkeys(run.array for run in runs)}
    taken = [slice(run.start, run.start + run.count) for run in runs]
    parts = [(run.original_start, scaled[run.array], rows) for run, rows in zip(runs, taken, strict=True)]
    a, b = LowRank.joined(parts, shape[0])
    magnitude = None
    if adapters[runs[0].array].magnitude is not None:
        magnitude = mx.linalg.norm(weight.astype(mx.float32), axis=1)  # rows without an adapter keep their length
        for run, rows in zip(runs, taken, strict=True):
            if (learned := scaled[run.array].magnitude) is not None:
                magnitude[run.source] = learned[rows]
    return LowRank(a[None], b, magnitude, scale)


def _config(base: str, layers: Mapping[str, LowRank], about: Mapping[str, Any]) -> dict[str, Any]:
    """`about` is mlx-lm's. alpha is scale · rank, with rsLoRA scale · √rank. Full layer names keep others out."""
    ranks = {name: layer.rank for name, layer in layers.items()}
    usual = min(ranks.values())
    others = {name: rank for name, rank in ranks.items() if rank != usual}
    scale, rslora = next(iter(layers.values())).scale, about.get("use_rslora") is True
    alphas = {rank: tidy(scale * (math.sqrt(rank) if rslora else rank)) for rank in ranks.values()}
    # As an integer where it is one, as peft itself writes alpha.
    alphas = {rank: int(alpha) if alpha == int(alpha) else alpha for rank, alpha in alphas.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": split_revision(base)[0],
        "revision": split_revision(base)[1],
        "inference_mode": True,
        "r": usual,
        "lora_alpha": alphas[usual],
        "bias": "none",
        "lora_dropout": about["lora_parameters"].get("dropout", 0.0),
        "target_modules": sorted(layers),
        "rank_pattern": others,
        "alpha_pattern": {name: alphas[rank] for name, rank in others.items()},
        "use_dora": any(layer.magnitude is not None for layer in layers.values()),
        "use_rslora": rslora,
        "fan_in_fan_out": False,
        **dict.fromkeys(("modules_to_save", "layers_to_transform", "layers_pattern")),
    }
