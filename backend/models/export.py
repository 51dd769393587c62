"""Export a run as a complete model: merge its adapters, write it, load it back, compare the logits, then move it into place.

A model is built in a hidden folder and moved by one rename, so an incomplete one is never visible. Does not train or upload, and
replaces no model unless `overwrite` is set.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tuner.utils import load_adapters

from backend.models import atomic_folder, policy
from backend.models.verify import TOLERANCE, Reference, last_logits, tokenize_samples, verify
from backend.spec import config as spec_config
from backend.spec import places
from backend.spec.checks import cross_setting_faults
from backend.spec.completion_rows import parse_group_row
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder

PUBLISHER = "grpo-studio"
"""The folder under LM Studio's models that ours go into; its layout is <publisher>/<model>/files."""

KEPT_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "*.tiktoken", "chat_template.*", "generation_config.json"),
    *("tokenization_*.py", "configuration_*.py", "modeling_*.py"),
)
"""Files that are copied from the base model unchanged, beside the new config.json and weights."""

SAMPLES = [
    ("What is 17 plus 25?", "17 plus 25 is 42."),
    ("Write one sentence about the sea.", "The sea was calm, and the light lay on it like a road."),
]
"""(prompt, answer) pairs to compare models on when the run has no completions."""

Progress = Callable[[str], None]
"""Receives a sentence for the user at each stage."""


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """Folder and size of an exported model, and the figures of its `Verification`."""

    path: Path
    bytes: int
    max_error: float
    agreement: float
    lost: float | None


# ── a run, exported ───────────────────────────────────────────────────────────────────────────────────────────────────


def export(
    run: RunFolder,
    to: Literal["lmstudio", "folder", "hub"],
    name: str,
    *,
    folder: Path | None = None,
    quantize: Literal[4, 6, 8] | None = None,
    overwrite: bool = False,
    progress: Progress = lambda sentence: None,
) -> ExportedModel:
    """Write the run's model where LM Studio finds it, or as `folder`/`name` (no `folder`: the run's own fused/).

    Raises Mistake for `to="hub"`, a run without weights, a name that no folder can have, an existing model (unless `overwrite`),
    a missing LM Studio, or too little disk space; RuntimeError when the written model's logits differ from the run's. In either
    case nothing new is left behind, and an existing model stays.
    """
    if to == "hub":
        raise Mistake("to", "Export to Hugging Face is not built yet; export to a folder and upload that.")
    if to == "lmstudio":
        root = lm_studio_root()
        target = root / PUBLISHER / safe_name(name)
        # Built outside LM Studio's models folder, which it watches, but on the same disk, so that the last step is a rename:
        # usually beside the models folder, else in the run. If the models have a disk of their own, neither is on it, and
        # `atomic_folder.move_into_place` copies.
        parent = atomic_folder.staging_parent(root, (root.parent, run.path))
    else:
        target = folder.expanduser().resolve() / safe_name(name) if folder else run.fused
        parent = atomic_folder.nearest_existing(target.parent)
    return _build_and_move(run, target, parent, quantize=quantize, overwrite=overwrite, progress=progress)


def fuse_run(run: RunFolder, progress: Progress = lambda sentence: None) -> Path:
    """Write the run's model into its fused/, replacing an older one, and return that folder. Raises as `export`.

    Loads the base model again: a trainer drops its policy first, or two models are in memory.
    """
    return _build_and_move(run, run.fused, run.path, quantize=None, overwrite=True, progress=progress).path


def _build_and_move(
    run: RunFolder, target: Path, parent: Path, *, quantize: int | None, overwrite: bool, progress: Progress
) -> ExportedModel:
    """Build and verify the model under `parent`, then rename it to `target`."""
    config = spec_config.load(run.config)
    source, adapters = _weights_of(run, config)
    # Checked here, before minutes of work, and again by `move_into_place`: the target may have appeared since.
    atomic_folder.check_target(target, overwrite=overwrite)
    with atomic_folder.staging_folder(parent, target) as staging:
        new = staging / "new"
        reference = fuse(
            source,
            adapters,
            new,
            quantize=quantize,
            # A fully fine-tuned model was saved as it was trained; only a base model is quantised after loading.
            quantization=config.quantization if adapters else "none",
            tokenizer_from=config.model,
            samples=_samples(run),
            progress=progress,
        )
        progress("Loading it back and comparing.")
        checked = verify(new, reference)
        if checked.lost is not None and checked.lost > 0.1:
            progress(_lost_sentence(checked.lost, quantize))
        size = atomic_folder.folder_bytes(new)
        atomic_folder.move_into_place(new, target, overwrite=overwrite)
    return ExportedModel(target, size, checked.max_error, checked.agreement, checked.lost)


def _weights_of(run: RunFolder, config: spec_config.Config) -> tuple[str, Path | None]:
    """(the model to load, the adapters to put on it). Raises Mistake when the run has none."""
    if config.train_type == "full":
        if (run.model / "config.json").is_file():
            return str(run.model), None
    elif all((run.adapters / name).is_file() for name in ("adapters.safetensors", "adapter_config.json")):
        return config.model, run.adapters
    raise Mistake("run", f"The run {run.name} has no trained weights yet, so there is nothing to export.")


def _samples(run: RunFolder) -> list[tuple[str, str]]:
    """(prompt, first completion) of the run's last four groups, or SAMPLES when it has none."""
    try:
        with run.completions.open("rb") as file:
            file.seek(max(0, run.completions.stat().st_size - (1 << 20)))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return SAMPLES
    samples: list[tuple[str, str]] = []
    for line in lines:
        # The seek may have cut the first line, and the trainer may still be writing the last.
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            if (group := parse_group_row(line)) is not None:
                samples.append((group["prompt"], group["completions"][0]["text"]))
    return samples[-4:] or SAMPLES


def _lost_sentence(lost: float, quantize: int | None) -> str:
    how = f"Quantised to {quantize} bits" if quantize else "Folded into one"
    advice = "; more bits keep more." if quantize else "."
    return f"{how}, the model's answers are off by {lost:.0%} of what training changed in them{advice}"


# ── merging adapters ──────────────────────────────────────────────────────────────────────────────────────────────────


def fuse(
    model_path: str,
    adapters: Path | None,
    to: Path,
    *,
    dequantize: bool = True,
    quantize: int | None = None,
    quantization: str = "none",
    tokenizer_from: str | None = None,
    samples: list[tuple[str, str]] | None = None,
    progress: Progress = lambda sentence: None,
) -> Reference:
    """Write base + adapters as a complete model folder `to` (created here), and return the model's logits from before that.

    `adapters` is a folder in mlx-lm's format; None writes the model as it is. `quantization` is the trainer's setting: how the base
    was quantised after loading, which is repeated here. A quantised base is written in full precision, because merging into few
    bits can lose more than the adapter gained; `dequantize=False` keeps the bits all the same. `quantize` then quantises the
    finished weights. Tokenizer files come from `tokenizer_from` if that model is on this disk, else from `model_path`.
    Raises Mistake for a model that cannot be used or too little disk space; ValueError when the adapters do not fit the model.
    """
    progress("Loading the model.")
    model, tokenizer, config = policy.load_model(model_path, "model")
    if quantization != "none":
        model, config = _quantized(model, config, **policy.QUANTIZATION[quantization])
    dtype = _float_dtype(model)
    stays_quantised = not dequantize and policy.is_quantised(model)
    atomic_folder.check_free_space(to.parent, _written_bytes(model, dtype, quantize))
    is_rounded = bool(quantize) or stays_quantised
    tolerance = None if is_rounded else TOLERANCE[str(dtype).rpartition(".")[2]]
    reference = _reference_logits(model, tokenizer, adapters, samples or SAMPLES, tolerance)

    progress("Folding the adapters in." if adapters else "Copying the weights.")
    if dequantize:
        _merge_in_float32(model, dtype)
        config = _without_quantization(config)
    else:
        _merge_adapters(model, dequantize=False)
    if quantize:
        model, config = _quantized(model, config, group_size=64, bits=quantize, mode="affine")
    _write(model, config, _tokenizer_folder(tokenizer_from, model_path), to)
    # The caller loads the written model next. mlx modules are in reference cycles, hence the explicit collection.
    del model
    gc.collect()
    mx.clear_cache()
    return reference


def _reference_logits(
    model: nn.Module, tokenizer: Any, adapters: Path | None, samples: list[tuple[str, str]], tolerance: float | None
) -> Reference:
    """Attach the adapters; the logits with and without them. Raises Mistake where they are not finite."""
    tokens = tokenize_samples(tokenizer, samples)
    untrained = None
    if adapters:
        untrained = last_logits(model, tokens)
        _attach_adapters(model, adapters)
    logits = last_logits(model, tokens)
    if not all(mx.all(mx.isfinite(array)).item() for array in logits):
        raise Mistake("run", "The trained model gives no finite numbers, so there is nothing worth writing.")
    return Reference(samples, tokens, logits, untrained, tolerance)


def _attach_adapters(model: nn.Module, adapters: Path) -> None:
    """Load saved adapters onto the model. mlx-lm refuses unknown tensors; missing tensors, which it would leave random, raise ValueError."""
    load_adapters(model, str(adapters))
    model.eval()  # the new layers carry dropout
    saved: Any = mx.load(str(adapters / "adapters.safetensors"))
    needed = [name for name, _ in tree_flatten(model.parameters()) if name.endswith((".lora_a", ".lora_b"))]
    missing = [name for name in needed if name not in saved]
    if missing:
        raise ValueError(
            f"The adapters in {adapters} lack {len(missing)} tensors of the model, {missing[0]} among them."
        )


def _merge_in_float32(model: nn.Module, dtype: mx.Dtype) -> None:
    """Dequantise and merge in float32 and round once, at the end, to each weight's original type (`dtype` if quantised)."""
    # All of it is lazy: arrays are computed when their shard is written, and freed with it.
    original = {name: array.dtype for name, array in tree_flatten(model.parameters())}
    model.set_dtype(mx.float32)  # scales and biases, so that affine weights dequantise exactly
    mlx_lm_utils.dequantize_model(model)
    _check_dequantized(model)
    model.set_dtype(mx.float32)  # mx and nv formats dequantise to bfloat16, which holds them exactly
    _merge_adapters(model, dequantize=True)

    def restored(name: str, array: mx.array) -> mx.array:
        type_ = original.get(name, dtype)
        return array.astype(type_ if mx.issubdtype(type_, mx.floating) else dtype)

    model.update(tree_map_with_path(restored, model.parameters()))


def _merge_adapters(model: nn.Module, *, dequantize: bool) -> None:
    """Replace every adapter layer by a plain layer with the same output."""
    merged = [(name, module.fuse(dequantize)) for name, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(tree_unflatten(merged))


def _check_dequantized(model: nn.Module) -> None:
    """Raise Mistake where a layer is still quantised: mlx-lm skips layer classes that it does not know."""
    quantized = [name for name, module in model.named_modules() if "scales" in module and hasattr(module, "bits")]
    if quantized:
        raise Mistake(
            "model", f"mlx-lm cannot unpack the quantised layer {quantized[0]} of this model, so it cannot be fused."
        )


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without its quantisation, or mlx-lm would expect quantised weights."""
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if isinstance(inner := plain.get("text_config"), dict):
        plain["text_config"] = _without_quantization(inner)
    return plain


def _quantized(
    model: nn.Module, config: dict[str, Any], *, group_size: int, bits: int, mode: str
) -> tuple[nn.Module, dict[str, Any]]:
    with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints, and stdout belongs to the caller
        return mlx_lm_utils.quantize_model(model, config, group_size, bits, mode=mode)


def _float_dtype(model: nn.Module) -> mx.Dtype:
    """The floating type of most of the model's numbers (in a quantised model: of scales and norms)."""
    sizes: Counter[mx.Dtype] = Counter()
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] += array.size
    return sizes.most_common(1)[0][0]


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _write(model: nn.Module, config: dict[str, Any], source: Path, to: Path) -> None:
    """Write config.json, weights and the base's tokenizer files. Takes the arrays out of the model."""
    to.mkdir(parents=True)
    # By default mlx-lm drops `vision_config`, which a model that keeps its vision tower needs for loading.
    keep_vision = "vision_tower" in getattr(model, "model", {})
    _write_weights(model, to)
    mlx_lm_utils.save_config(config, to / "config.json", keep_vision_config=keep_vision)
    # Copied rather than saved again by transformers 5, whose class name in tokenizer_config.json older versions refuse to load.
    # By copyfile, which drops extended attributes: some disks turn them into ._ files.
    for pattern in KEPT_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, to / file.name)


def _write_weights(model: nn.Module, to: Path) -> None:
    """Write model.safetensors, or shards of mlx-lm's size with their index. Takes the arrays out of the model.

    Peak memory is hardly more than the model: arrays and their inputs are freed shard by shard.
    """
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    total = sum(array.nbytes for array in weights.values())
    shards = mlx_lm_utils.make_shards(weights)
    # From here only `shards` holds the arrays, so that those of a shard can be freed once it is written.
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    weights.clear()
    index: dict[str, str] = {}
    count = len(shards)
    for number in range(1, count + 1):
        shard = shards.pop(0)
        # One array at a time: evaluated together, their float32 inputs would all be alive (2.5 times the model).
        for array in shard.values():
            mx.eval(array)
        name = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        # Without metadata mlx writes "__metadata__": null, which LM Studio refuses.
        mx.save_safetensors(str(to / name), shard, metadata={"format": "mlx"})
        index |= dict.fromkeys(shard, name)
    if count > 1:
        about = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (to / "model.safetensors.index.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _tokenizer_folder(*names: str | None) -> Path:
    """The folder of the first named model that is on this disk: a folder, or an id in the Hub cache. Raises Mistake."""
    for name in filter(None, names):
        if (folder := Path(name).expanduser()).is_dir():
            return folder
        # OSError: not in the cache. ValueError: not an id. Try the next name.
        with contextlib.suppress(OSError, ValueError):
            return mlx_lm_utils.hf_repo_to_path(name)
    raise Mistake("model", f"The base model {names[0]} is not on this disk any more, and its tokenizer is needed.")


def _written_bytes(model: nn.Module, dtype: mx.Dtype, quantize: int | None) -> int:
    """About the size of the written model; a quantised weight has 32 bits of scale and bias for every 64 numbers."""
    bits = quantize + 0.5 if quantize else 8 * dtype.size
    return int(mlx_lm_utils.get_total_parameters(model) * bits / 8 * 1.02) + (16 << 20)


# ── folders and names ─────────────────────────────────────────────────────────────────────────────────────────────────


def safe_name(name: str) -> str:
    """`name` without surrounding spaces. Raises Mistake when it is empty or cannot name a folder."""
    name = name.strip()
    if not name:
        raise Mistake("lm_studio_name", "Give the exported model a name.")
    faults = cross_setting_faults({"lm_studio_name": name})
    if faults:
        raise Mistake(faults)
    return name


def lm_studio_root() -> Path:
    """LM Studio's models folder. Raises Mistake when LM Studio was never started, or its disk is not attached.

    Only an empty `models` folder in an existing home is ever created for it.
    """
    root, home = places.lm_studio_models(), places.lm_studio_home()
    if root.is_dir() or (root == home / "models" and home.is_dir()):
        return root.resolve()
    raise Mistake(
        "lm_studio",
        f"LM Studio was not found: there is no folder {root}; start LM Studio once, attach the disk that holds its "
        "models, or export to a folder.",
    )
