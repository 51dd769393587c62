"""A finished run as a complete model: adapters folded in, written whole, loaded back and compared, then renamed in.

Nothing is ever half there: a model is built in a hidden folder, and the last act is one rename. This room does not
train, does not upload, and never replaces a model unless told to.
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
from backend.models.verify import TOLERANCE, Reference, last_logits, tokenised, verify
from backend.spec import config as spec_config
from backend.spec import places
from backend.spec.checks import cross_setting_faults
from backend.spec.completions import parse_group_row
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder

PUBLISHER = "grpo-studio"
"""The folder under LM Studio's models that ours go into; its layout is <publisher>/<model>/files."""

KEPT_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "*.tiktoken", "chat_template.*", "generation_config.json"),
    *("tokenization_*.py", "configuration_*.py", "modeling_*.py"),
)
"""What a complete model takes over from its base, byte for byte, beside its own config.json and weights."""

SAMPLES = [
    ("What is 17 plus 25?", "17 plus 25 is 42."),
    ("Write one sentence about the sea.", "The sea was calm, and the light lay on it like a road."),
]
"""(prompt, answer) that models are compared on when the run has no completions of its own."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that stands where it was asked for: its folder, its bytes, and `Check`'s figures."""

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
    progress: Say = lambda sentence: None,
) -> Exported:
    """Write the run's model where LM Studio finds it, or as `folder`/`name` (no `folder`: the run's own fused/).

    Raises Mistake for a run without weights, a name that cannot be a folder, a model that stands there already (unless
    `overwrite`), LM Studio not found, or too little room; RuntimeError when what was written does not answer like the
    run's model. Either way nothing is left behind and what stood there still stands.
    """
    if to == "hub":
        raise Mistake("to", "Export to Hugging Face is not built yet; export to a folder and upload that.")
    if to == "lmstudio":
        root = lm_studio_root()
        target, parent = root / PUBLISHER / safe_name(name), _workshop(root, run)
    else:
        target = folder.expanduser().resolve() / safe_name(name) if folder else run.fused
        parent = atomic_folder.existing(target.parent)
    return _deliver(run, target, parent, quantize=quantize, overwrite=overwrite, progress=progress)


def fuse_run(run: RunFolder, progress: Say = lambda sentence: None) -> Path:
    """Write the run's model into its fused/, replacing an older one, and return that folder. Raises as `export`.

    Loads the base model afresh: a trainer lets go of its policy first, or two models are in memory.
    """
    return _deliver(run, run.fused, run.path, quantize=None, overwrite=True, progress=progress).path


def _deliver(
    run: RunFolder, target: Path, parent: Path, *, quantize: int | None, overwrite: bool, progress: Say
) -> Exported:
    """Build and verify the model under `parent`, then rename it to `target`."""
    config = spec_config.load(run.config)
    source, adapters = _weights_of(run, config)
    atomic_folder.refuse_taken(target, overwrite=overwrite)
    with atomic_folder.stage(parent, target) as stage:
        new = stage / "new"
        reference = fuse(
            source,
            adapters,
            new,
            quantize=quantize,
            quantization=config.quantization if adapters else "none",
            tokenizer_from=config.model,
            samples=_samples(run),
            progress=progress,
        )
        progress("Loading it back and comparing.")
        found = verify(new, reference)
        if found.lost is not None and found.lost > 0.1:
            progress(_lost_sentence(found.lost, quantize))
        size = atomic_folder.folder_bytes(new)
        atomic_folder.publish(new, target, overwrite=overwrite)
    return Exported(target, size, found.max_error, found.agreement, found.lost)


def _weights_of(run: RunFolder, config: spec_config.Config) -> tuple[str, Path | None]:
    """(the model to load, the adapters to put on it). Raises Mistake when the run has none."""
    if config.train_type == "full":
        if (run.model / "config.json").is_file():
            return str(run.model), None
    elif all((run.adapters / one).is_file() for one in ("adapters.safetensors", "adapter_config.json")):
        return config.model, run.adapters
    raise Mistake("run", f"The run {run.name} has no trained weights yet, so there is nothing to export.")


def _samples(run: RunFolder) -> list[tuple[str, str]]:
    """(prompt, first completion) of the run's newest groups, or our own few when it has none."""
    try:
        with run.completions.open("rb") as file:
            file.seek(max(0, run.completions.stat().st_size - (1 << 20)))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return SAMPLES
    found: list[tuple[str, str]] = []
    for line in lines:
        # The first line may have lost its beginning to the seek, and the last may still be being written.
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            group = parse_group_row(line)
            found += [(group["prompt"], group["completions"][0]["text"])] if group is not None else []
    return found[-4:] or SAMPLES


def _lost_sentence(lost: float, quantize: int | None) -> str:
    how = f"Quantised to {quantize} bits" if quantize else "Folded into one"
    advice = "; more bits keep more." if quantize else "."
    return f"{how}, the model's answers are off by {lost:.0%} of what training changed in them{advice}"


# ── folding adapters in ───────────────────────────────────────────────────────────────────────────────────────────────


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
    progress: Say = lambda sentence: None,
) -> Reference:
    """Write base + adapters as a complete model folder `to` (made here), and return what the model said before that.

    `adapters` is a folder in mlx-lm's format; None writes the model as it is. `quantization` is what the trainer did to
    the base after loading it. A quantised base is written in full precision: folding into few bits can cost more than
    the adapter is worth; `dequantize=False` does so all the same. `quantize` then packs the finished weights into so
    many bits. Tokenizer files come from `tokenizer_from` where that is a model at hand, else from `model_path`.
    Raises Mistake for a model that cannot be used or too little room; ValueError when the adapters are not this model's.
    """
    progress("Loading the model.")
    model, tokenizer, config = policy.load_model(model_path, "model")
    if quantization != "none":
        model, config = _packed(model, config, **policy.QUANTIZATION[quantization])
    dtype = _float_dtype(model)
    kept_packed = not dequantize and policy.is_quantised(model)
    atomic_folder.check_room(to.parent, _written_bytes(model, dtype, quantize))
    rounded = bool(quantize) or kept_packed
    tolerance = None if rounded else TOLERANCE[str(dtype).rpartition(".")[2]]
    reference = _trained(model, tokenizer, adapters, samples or SAMPLES, tolerance)

    progress("Folding the adapters in." if adapters else "Copying the weights.")
    if dequantize:
        _fold_in_floats(model, dtype)
        config = _said_unpacked(config)
    else:
        _fold(model, dequantize=False)
    if quantize:
        model, config = _packed(model, config, group_size=64, bits=quantize, mode="affine")
    _write(model, config, _tokenizer_folder(tokenizer_from, model_path), to)
    del model
    gc.collect()
    mx.clear_cache()
    return reference


def _trained(
    model: nn.Module, tokenizer: Any, adapters: Path | None, samples: list[tuple[str, str]], tolerance: float | None
) -> Reference:
    """Put the adapters on; what the model says then, and what it said before."""
    tokens = tokenised(tokenizer, samples)
    untrained = None
    if adapters:
        untrained = last_logits(model, tokens)
        _attach(model, adapters)
    logits = last_logits(model, tokens)
    if not all(mx.all(mx.isfinite(one)).item() for one in logits):
        raise Mistake("run", "The trained model gives no finite numbers, so there is nothing worth writing.")
    return Reference(samples, tokens, logits, untrained, tolerance)


def _attach(model: nn.Module, adapters: Path) -> None:
    """Put saved adapters on the model, all of them. mlx-lm refuses tensors too many; too few would go unseen."""
    load_adapters(model, str(adapters))
    model.eval()  # the new layers carry dropout
    saved: Any = mx.load(str(adapters / "adapters.safetensors"))
    wanted = [name for name, _ in tree_flatten(model.parameters()) if name.endswith((".lora_a", ".lora_b"))]
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise ValueError(
            f"The adapters in {adapters} lack {len(missing)} tensors of the model, {missing[0]} among them."
        )


def _fold_in_floats(model: nn.Module, dtype: mx.Dtype) -> None:
    """Fold and dequantise in float32 and round once, at the end; weights that are nobody's to change keep their type.

    Everything here is lazy: arrays come to be when their shard is written, and are let go with it.
    """
    before = {name: array.dtype for name, array in tree_flatten(model.parameters())}
    model.set_dtype(mx.float32)  # scales and biases, so that affine weights unpack exactly
    mlx_lm_utils.dequantize_model(model)
    _refuse_packed(model)
    model.set_dtype(mx.float32)  # what unpacked to bfloat16: the mx and nv formats fit in it exactly
    _fold(model, dequantize=True)

    def restored(name: str, array: mx.array) -> mx.array:
        was = before.get(name, dtype)
        return array.astype(was if mx.issubdtype(was, mx.floating) else dtype)

    model.update(tree_map_with_path(restored, model.parameters()))


def _fold(model: nn.Module, *, dequantize: bool) -> None:
    """Replace every adapter layer by one plain layer with the same output."""
    folded = [(name, module.fuse(dequantize)) for name, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(tree_unflatten(folded))


def _refuse_packed(model: nn.Module) -> None:
    left = [name for name, module in model.named_modules() if "scales" in module and hasattr(module, "bits")]
    if left:
        raise Mistake(
            "model", f"mlx-lm cannot unpack the quantised layer {left[0]} of this model, so it cannot be fused."
        )


def _said_unpacked(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without what it says of quantisation, or loading would look for packed weights."""
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if isinstance(inner := plain.get("text_config"), dict):
        plain["text_config"] = _said_unpacked(inner)
    return plain


def _packed(
    model: nn.Module, config: dict[str, Any], *, group_size: int, bits: int, mode: str
) -> tuple[nn.Module, dict[str, Any]]:
    with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints a line, and stdout is the caller's
        return mlx_lm_utils.quantize_model(model, config, group_size, bits, mode=mode)


def _float_dtype(model: nn.Module) -> mx.Dtype:
    """The floating type that most of the model's parameters have (a packed model's: scales and norms)."""
    sizes: Counter[mx.Dtype] = Counter()
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] += array.size
    return sizes.most_common(1)[0][0]


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _write(model: nn.Module, config: dict[str, Any], source: Path, to: Path) -> None:
    """config.json, weights and the base's own tokenizer files; the model is empty afterwards.

    The tokenizer is copied, not saved anew: transformers 5 saves a class name that older readers refuse to load.
    copyfile leaves extended attributes behind, which some disks would turn into ._ files.
    """
    to.mkdir(parents=True)
    keep_vision = "vision_tower" in getattr(model, "model", {})
    _write_weights(model, to)
    mlx_lm_utils.save_config(config, to / "config.json", keep_vision_config=keep_vision)
    for pattern in KEPT_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, to / file.name)


def _write_weights(model: nn.Module, to: Path) -> None:
    """model.safetensors, or shards of mlx-lm's size with their index. Takes the arrays out of the model.

    Arrays are worked out one by one and let go shard by shard: what they were made of goes as they come, so that the
    whole needs hardly more memory than the model (evaluated together, two and a half times as much).
    """
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    total = sum(array.nbytes for array in weights.values())
    shards = mlx_lm_utils.make_shards(weights)
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    weights.clear()
    index: dict[str, str] = {}
    count = len(shards)
    for number in range(1, count + 1):
        shard = shards.pop(0)
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
    """The first of the models named that is on this disk: a folder, or a Hub id in the local cache."""
    for name in filter(None, names):
        if (folder := Path(name).expanduser()).is_dir():
            return folder
        # Not in the cache (an OSError), or no id at all (a ValueError): the next name may do.
        with contextlib.suppress(OSError, ValueError):
            return mlx_lm_utils.hf_repo_to_path(name)
    raise Mistake("model", f"The base model {names[0]} is not on this disk any more, and its tokenizer is needed.")


def _written_bytes(model: nn.Module, dtype: mx.Dtype, quantize: int | None) -> int:
    """About what the written model will weigh; a packed weight has 32 bits of scale and bias for every 64."""
    bits = quantize + 0.5 if quantize else 8 * dtype.size
    return int(mlx_lm_utils.get_total_parameters(model) * bits / 8 * 1.02) + (16 << 20)


# ── places and names ──────────────────────────────────────────────────────────────────────────────────────────────────


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
    """LM Studio's models folder. Raises Mistake when LM Studio was never started here, or its disk is not there.

    Nothing of LM Studio's is made by us, but for the empty `models` of a home that has none yet.
    """
    root, home = places.lm_studio_models(), places.lm_studio_home()
    if root.is_dir() or (root == home / "models" and home.is_dir()):
        return root.resolve()
    raise Mistake(
        "lm_studio",
        f"LM Studio was not found: there is no folder {root}; start LM Studio once, attach the disk that holds its "
        "models, or export to a folder.",
    )


def _workshop(root: Path, run: RunFolder) -> Path:
    """Where to build a model for LM Studio: outside its models folder, which it watches, yet on the same disk, so that
    the last step is a rename. That is beside the folder as a rule, or else in the run; when the models are on a disk of
    their own, neither fits, and `shelf.publish` copies."""
    return atomic_folder.workshop(root, (root.parent, run.path))
