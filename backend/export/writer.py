"""Write a model, adapters merged in float32 and rounded once, cast or quantised, one lazy array at a time; or a policy:
its arrays, its adapter config, and the whole model."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten
from mlx_lm import utils as mlx_lm_utils

from backend.config.setting import ModelSettings
from backend.engine.shared_weights import copy_sharing_arrays
from backend.export.exports import ExportFormat
from backend.export.trained_weights import AdapterFiles, TrainedWeights
from backend.export.verify import in_float32
from backend.models import policy as policies
from backend.models.adapters import ADAPTER_ENDS, adapted_layer_count, adapter_about, whole_modules
from backend.models.architectures import is_text_part
from backend.models.loading import loading
from backend.models.model_folder import header_of, object_or_empty
from backend.models.policy import Policy, is_packed
from backend.models.tokenizers import tokenizer_folder
from backend.trainer.memory.model_shape import shape_of
from backend.utils.disk import require_room, whole_folder
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder, own_file
from backend.utils.text import quote
from backend.vision.tokenizer import INSTALL

KEPT_FILES = (  # files of the base to copy unchanged
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "*.tiktoken", "chat_template.*", "generation_config.json"),
    *("tokenization_*.py", "configuration_*.py", "modeling_*.py"),
)
SAFETENSORS_TYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.bool_: "BOOL"}
SAFETENSORS_TYPES |= {getattr(mx, f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)}
SAFETENSORS_TYPES |= {getattr(mx, f"uint{bits}"): f"U{bits}" for bits in (8, 16, 32, 64)}
METADATA = {"format": "mlx"}  # LM Studio refuses a header without metadata
PACKING = ("bits", "group_size", "mode")
BLOCK = 1 << 22  # numbers to quantise at once

Done = Callable[[float], None]  # receives the fraction written


def in_format(model: nn.Module, config: dict[str, Any], format_: ExportFormat) -> tuple[nn.Module, dict[str, Any]]:
    """(model without adapters, config.json). Changes `model`. Raises UserError for a layer that cannot be unpacked."""
    keeps_bits, dtype = format_.keeps_bits, float_type(model)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "fuse")}
    changed = [
        (name, _plain(module, dtype, keeps_bits))
        for name, module in model.named_modules()
        if name in adapted or (is_packed(module) and not keeps_bits and name.rpartition(".")[0] not in adapted)
    ]
    model.update_modules(tree_unflatten(changed))
    if not keeps_bits:
        # mlx-lm skips layer classes that it does not know.
        if packed := [name for name, module in model.named_modules() if is_packed(module)]:
            cannot = f"mlx-lm cannot unpack the quantised layer {packed[0]} of this model"
            raise UserError("model", f"{cannot}, so it cannot be fused.")
        config = without_quantization(config)
    if format_.dtype:
        policies.cast(model, format_.dtype)
        config = {**config, "torch_dtype": format_.dtype} | ({"dtype": format_.dtype} if "dtype" in config else {})
    if format_.quantization:
        weights = {name: module["weight"] for name, module in model.named_modules() if "weight" in module}
        floats = {name: weight for name, weight in weights.items() if weight.size > BLOCK}
        model, config = policies.quantize(model, config, **format_.quantization)
        if not policies.is_quantised(model):
            too_narrow = f"none is a multiple of {format_.quantization['group_size']} wide"
            raise UserError("format", f"No weight of this model can be quantised: {too_narrow}; choose another format.")
        _quantise_in_blocks(model, floats)
    return model, config


def _plain(layer: nn.Module, dtype: mx.Dtype, keeps_bits: bool) -> nn.Module:
    children: list[Any] = list(layer.children().values())
    base: Any = next((child for child in children if isinstance(child, nn.Module) and "weight" in child), layer)
    packing = {key: getattr(base, key) for key in PACKING} if is_packed(base) else {}
    original = {name: array.dtype for name, array in tree_flatten(base.parameters())}
    within: Any = nn.Module()  # mlx-lm replaces the children of a module
    within.layer = layer
    in_float32(within)
    merged: Any = within.layer
    if hasattr(merged, "fuse"):
        merged = merged.fuse(True)

    def as_before(name: str, array: mx.array) -> mx.array:
        type_ = original.get(name, dtype)
        return array.astype(type_ if mx.issubdtype(type_, mx.floating) else dtype)

    merged.update(tree_map_with_path(as_before, merged.parameters()))
    return merged.to_quantized(**packing) if packing and keeps_bits else merged


def _quantise_in_blocks(model: nn.Module, floats: dict[str, mx.array]) -> None:
    # The same codes with less memory: MXFP4 on a CPU takes 40 bytes a number.
    for name, module in model.named_modules():
        if name not in floats or not is_packed(module):
            continue
        how: dict[str, Any] = {key: getattr(module, key) for key in PACKING}
        weight, parts = floats[name], []
        rows = max(1, BLOCK * weight.shape[0] // weight.size)
        for start in range(0, weight.shape[0], rows):
            block = weight[start : start + rows]
            # mlx may compute independent operations in any order, and so hold what all of them need.
            block = mx.depends([block], [parts[-1][0]])[0] if parts else block
            parts.append(mx.quantize(block, **how))
        for key, pieces in zip(("weight", "scales", "biases"), zip(*parts, strict=True), strict=False):
            setattr(module, key, mx.concatenate(list(pieces)))


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if isinstance(inner := plain.get("text_config"), dict):
        plain["text_config"] = without_quantization(inner)
    return plain


def float_type(model: nn.Module) -> mx.Dtype:
    """The most frequent float type of the model, adapters excluded."""
    sizes: Counter[mx.Dtype] = Counter()
    for name, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating) and not name.endswith(ADAPTER_ENDS):
            sizes[array.dtype] += array.size
    return sizes.most_common(1)[0][0]


def write_model(
    model: nn.Module,
    config: dict[str, Any],
    tokenizer_from: Path,
    to: Path,
    done: Done = lambda share: None,
    vision: VisionPart | None = None,
) -> None:
    """Write weights, config.json and tokenizer files. Empties the model. Raises UserError as `kept_files`."""
    to.mkdir(parents=True, exist_ok=True)
    # By default mlx-lm drops `vision_config`, which a model that keeps its vision tower needs for loading.
    keep_vision = "vision_tower" in getattr(model, "model", {}) or vision is not None or is_text_part(config)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    files = kept_files(tokenizer_from)
    if vision is not None:
        weights, config = vision.joined(weights, config)
        files += kept_files(vision.folder, ["*processor*.json"])
    write_weights(weights, to, done)
    mlx_lm_utils.save_config(config, to / "config.json", keep_vision_config=keep_vision)
    # Copied, since transformers 5 would write a class name that older versions refuse to load. By copyfile, which drops
    # extended attributes: some disks turn them into ._ files.
    for file in files:
        shutil.copyfile(file, to / file.name)


def kept_files(base: Path, patterns: Sequence[str] = KEPT_FILES) -> list[Path]:
    """The files of a folder to copy. Raises UserError for a link out of it."""
    return [own_file(file, base, "model") for pattern in patterns for file in base.glob(pattern)]


def write_weights(weights: dict[str, mx.array], to: Path, done: Done) -> None:
    """Write shards of mlx-lm's size, evaluating and freeing arrays one by one. Empties `weights`."""
    total = sum(array.nbytes for array in weights.values())
    shards = mlx_lm_utils.make_shards(weights)
    weights.clear()  # from here only `shards` holds the arrays
    index: dict[str, str] = {}
    count, written = len(shards), counter(total, done)
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        index |= dict.fromkeys(shard, name)
        write_safetensors(to / name, shard, written)
    if count > 1:
        about = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (to / "model.safetensors.index.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def counter(total: int, done: Done) -> Callable[[int], None]:
    """A function that counts bytes and calls `done` with their fraction of `total`."""
    written = 0

    def count(size: int) -> None:
        nonlocal written
        written += size
        done(written / max(total, 1))

    return count


def write_safetensors(
    file: Path,
    arrays: dict[str, Any],
    written: Callable[[int], None] = lambda size: None,
    metadata: dict[str, str] = METADATA,
) -> None:
    """Write mlx or numpy arrays one by one, removing each from `arrays`; `written` receives their bytes. Format:
    https://github.com/huggingface/safetensors. mlx's own writer holds all arrays of a file in memory."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, array in arrays.items():
        dtype = getattr(mx, array.dtype.name) if isinstance(array, np.ndarray) else array.dtype
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": SAFETENSORS_TYPES[dtype], "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in list(arrays):
            size, array = arrays[name].nbytes, arrays.pop(name)
            if isinstance(array, np.ndarray):  # without mlx, which may hang (`snapshot`)
                stream.write(np.ascontiguousarray(array).data)
            else:
                if array.size:
                    stream.write(memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8)))  # pyright: ignore
                del array
                mx.clear_cache()  # a GPU's allocator keeps freed buffers for the next array of the same size
            written(size)


def write_adapter(trained: TrainedWeights, to: Path) -> AdapterFiles:
    """Write the adapters in mlx-lm's layout into a new folder, with a README."""
    assert trained.adapters is not None
    files = trained.adapters.copied_to(to)
    kind = files.about().get("fine_tune_type", "lora")
    packed = {"none": "", "mxfp4": " quantised to MXFP4"}
    quantised = packed.get(trained.quantization, f" quantised to {trained.quantization} bits")
    adapters = f"{'DoRA' if kind == 'dora' else 'LoRA'} adapters for the model {trained.name}{quantised}"
    command = f'mlx_lm.generate --model {trained.name} --adapter-path . --prompt "…"'
    (to / "README.md").write_text(f"{adapters}, trained with GRPO Studio.\n\n```\n{command}\n```\n", encoding="utf-8")
    return files


# A policy: its adapter config, arrays of a checkpoint, and the whole model

Arrays = dict[str, mx.array]
HostArrays = dict[str, np.ndarray]  # host views of evaluated arrays


def adapter_config(policy: Policy, config: ModelSettings) -> dict[str, Any]:
    layers, whole = adapted_layer_count(policy.model, config.num_layers), config.modules_to_save
    return adapter_about(config, config.model, layers, policy.adapted_keys, [*whole_modules(policy.model, whole)])


def on_host(arrays: Arrays) -> HostArrays:
    """Zero-copy numpy views of evaluated arrays."""
    return {name: np.array(x, copy=False) for name, x in arrays.items()}


def save_arrays(path: Path, arrays: Arrays | HostArrays) -> None:
    """Write a safetensors file. Raises OSError."""
    if any(isinstance(x, np.ndarray) for x in arrays.values()):
        write_safetensors(path, dict(arrays))
        return
    # Through a file of Python's, whose errors keep their errno. Without metadata mlx writes `"__metadata__": null`,
    # which not every reader of safetensors accepts.
    with path.open("wb") as file:
        mx.save_safetensors(file, cast("Arrays", arrays), metadata={"format": "mlx"})


def save_model(policy: Policy, config: ModelSettings, folder: Path) -> None:
    """Replace `folder` by the whole model in its loaded precision. Raises UserError and keeps the older one."""
    # A folder, never an id: for an id mlx-lm requests a model card from the Hub, and a run must be able to end offline.
    if (path := local_folder(config.model)) is None:
        gone = f"{quote(config.model, 90)} is gone, so its tokenizer cannot be saved with the trained model"
        raise UserError("model", f"{gone}; put it back, then resume.")
    vision, _ = open_vision_part(path, policy.model_config)
    beside = sum(array.nbytes for array in vision.arrays.values()) if vision else 0
    require_room(folder, model_bytes(policy) + beside, "The model")
    path = tokenizer_folder(config.tokenizer) if config.tokenizer else path
    with whole_folder(folder) as draft:
        write_model(_in_original_precision(policy), dict(policy.model_config), path, draft, vision=vision)


def model_bytes(policy: Policy) -> int:
    model = _in_original_precision(policy)  # lazy: nothing is computed
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return sum(array.nbytes for array in arrays.values())


def _in_original_precision(policy: Policy) -> nn.Module:
    dtypes = policy.original_dtypes
    model = copy_sharing_arrays(policy.model)
    model.update(policy.parameters())  # the masters, where the model computes with copies
    model.update(tree_map_with_path(lambda name, x: x.astype(dtypes.get(name, x.dtype)), model.parameters()))
    return model


# The part of a vision model that reads images, opened by mlx-vlm, which an export writes beside the text model

TEXT = "language_model."
_WRAPPERS = re.compile(r"^(?:language_model\.|model\.)+")


@dataclass(frozen=True, slots=True)
class VisionPart:
    """`folder`: of the base. `arrays` that read images, and `modules` of the text model, by mlx-vlm's names."""

    folder: Path
    arrays: dict[str, mx.array]
    modules: frozenset[str]

    def joined(self, text: dict[str, mx.array], config: dict[str, Any]) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """(all arrays, config.json) of the whole model; `text` are those of mlx-lm's model. Raises UserError."""
        places = {_WRAPPERS.sub("", module): module for module in self.modules}

        def named(module: str) -> str:
            if (place := places.get(_WRAPPERS.sub("", module))) is None:
                raise UserError("model", f"mlx-vlm's model has no {module}, so the part that reads images is lost.")
            return place

        joined = {f"{named(name.rpartition('.')[0])}.{name.rpartition('.')[2]}": text[name] for name in text}
        head, embedding = places.get("lm_head"), places.get("embed_tokens")
        if head and embedding and not any(name.startswith(f"{head}.") for name in joined):  # tied in mlx-lm's model
            tied = {name: array for name, array in joined.items() if name.startswith(f"{embedding}.")}
            joined |= {name.replace(embedding, head): array for name, array in tied.items()}
        if packing := config.get("quantization"):
            packing = {places.get(_WRAPPERS.sub("", key), key): value for key, value in packing.items()}
            config = {**config, "quantization": packing}
        return joined | self.arrays, config


def reads_images(folder: Path) -> bool:
    """True if a model's files hold a part that reads images."""
    shape = shape_of(folder)
    return bool(object_or_empty(folder / "config.json").get("vision_config") and shape and shape.tower)


def open_vision_part(folder: Path, config: dict[str, Any]) -> tuple[VisionPart | None, str]:
    """(the part of the model in `folder` that reads images, lazily, or None; why it cannot be kept, or ""). It is as in
    the base, unpacked unless `config`, of the export, has the base's quantisation."""
    if not reads_images(folder):
        return None, ""
    if find_spec("mlx_vlm") is None:
        return None, f"The part of the model that reads images is left out; to keep it: {INSTALL}."
    from mlx_vlm.utils import load_model

    try:
        with loading(str(folder), "model"):
            whole = load_model(folder, lazy=True)
    except UserError as error:
        return None, f"The part of the model that reads images is left out: {error.faults[0].sentence}"
    if config.get("quantization") != object_or_empty(folder / "config.json").get("quantization"):
        mlx_lm_utils.dequantize_model(whole)
    arrays: dict[str, mx.array] = dict(tree_flatten(whole.parameters()))
    whole.update(tree_map(lambda _: mx.array([]), whole.parameters()))  # only the result holds the arrays
    files = folder.glob("model*.safetensors")
    has_head = any(name.endswith("lm_head.weight") for file in files for name in header_of(file, "model"))
    modules = {name.rpartition(".")[0] for name in arrays if name.startswith(TEXT)}
    modules -= set() if has_head else {f"{TEXT}lm_head"}  # which mlx-vlm makes from the embedding
    return VisionPart(
        folder, {name: x for name, x in arrays.items() if not name.startswith(TEXT)}, frozenset(modules)
    ), ""
