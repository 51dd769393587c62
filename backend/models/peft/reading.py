"""A folder of peft's, read: every adapter by the name of its layer, and the tensors that were trained as a whole.

The folder is somebody else's: headers are checked before an array is read, nothing is unpickled, and of what the files name only arrays in
the folder itself are opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from backend.export.original.original_files import OriginalFiles, open_with
from backend.models.model_folder import PATH
from backend.models.peft.settings import SETTING, PeftSettings, read_settings
from backend.utils.errors import UserError
from backend.utils.files import is_file
from backend.utils.safetensors import BrokenFile, StoredArray, read_header
from backend.utils.text import quote

PREFIX = "base_model.model."
"""What peft puts before the name of a layer."""
ARRAYS, CONFIG, PICKLE = "adapter_model.safetensors", "adapter_config.json", "adapter_model.bin"
NAME = 90
"""Characters of a layer's name in a sentence: it is what has to be found."""
FLOATS = ("F32", "F16", "BF16", "F64")
_LORA = re.compile(r"(?P<layer>.+)\.lora_(?P<part>A\.weight|B\.weight|magnitude_vector(?:\.weight)?)")


@dataclass(frozen=True, slots=True)
class PeftLayer:
    """The adapter of one original layer: `a` [r, in], `b` [out, r], and under DoRA `magnitude` [out]. Its change is scale · b a."""

    a: mx.array
    b: mx.array
    magnitude: mx.array | None
    scale: float


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """`layers` by the original layers' names; `whole`: original tensors that replace the base's. Arrays are not read yet, and float32
    once they are."""

    settings: PeftSettings
    layers: Mapping[str, PeftLayer]
    whole: Mapping[str, mx.array]


def read_peft_adapter(folder: Path) -> PeftAdapter:
    """Raises UserError, naming the file or the layer, for a folder that holds no adapter of peft's, or one that is not whole."""
    if not is_file(folder / ARRAYS):
        if is_file(folder / PICKLE):
            raise UserError(SETTING, f"{quote(folder / PICKLE, PATH)} is a pickle, which can run code when it is opened; save the adapter "
                                   "as safetensors with peft.")  # fmt: skip
        raise UserError(SETTING, f"{quote(folder, PATH)} is no adapter of peft: it has no {ARRAYS}.")
    settings = read_settings(folder / CONFIG)
    try:
        header = read_header(folder / ARRAYS)
    except BrokenFile as error:
        raise UserError(SETTING, f"{quote(folder / ARRAYS, PATH)} {error}.") from None
    parts, whole = _sorted_by_layer(header)
    for layer, found in parts.items():
        _check_layer(layer, found, header, settings)
    try:
        arrays: Any = mx.load(str(folder / ARRAYS))
    except RuntimeError as error:
        raise UserError(SETTING, f"{quote(folder / ARRAYS, PATH)} cannot be read: {quote(error, 60)}.") from None
    read = {name: array.astype(mx.float32) for name, array in arrays.items()}
    layers = {
        layer: PeftLayer(
            read[found["A"]],
            read[found["B"]],
            read[found["magnitude"]] if "magnitude" in found else None,
            settings.scale_of(layer),
        )
        for layer, found in parts.items()
    }
    return PeftAdapter(settings, layers, {name: read[stored] for name, stored in whole.items()})


def merged_model(adapter: PeftAdapter, original: OriginalFiles) -> nn.Module:
    """The original model with the adapters merged by their names, as peft merges them: base + scale · B A, under DoRA at its length."""
    arrays = original.arrays()
    for name, layer in adapter.layers.items():
        merged = arrays[f"{name}.weight"].astype(mx.float32) + layer.scale * (layer.b @ layer.a)
        if layer.magnitude is not None:
            merged = (layer.magnitude / mx.linalg.norm(merged, axis=1))[:, None] * merged
        arrays[f"{name}.weight"] = merged
    arrays |= {name: array for name, array in adapter.whole.items() if name in arrays}
    return open_with(original, arrays)


# ── what the file holds ──────────────────────────────────────────────────────────────────────────────────────────────


def _sorted_by_layer(header: Mapping[str, StoredArray]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """(layer → A, B or magnitude → the array's name; original tensor → the array's name). Raises UserError for any other array."""
    layers: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for stored, about in header.items():
        if not stored.startswith(PREFIX):
            raise UserError(SETTING, f"{ARRAYS} holds {quote(stored, NAME)}, which does not begin with {PREFIX}.")
        if about.dtype not in FLOATS:
            raise UserError(SETTING, f"{ARRAYS} stores {quote(stored, NAME)} as {about.dtype}, which is no float.")
        name = stored.removeprefix(PREFIX)
        if found := _LORA.fullmatch(name):
            part = found["part"].partition("_")[0].removesuffix(".weight")
            layers.setdefault(found["layer"], {})[part] = stored
        elif "lora_" in name:
            layer = name.partition(".lora_")[0]
            raise UserError(
                SETTING,
                f"The adapter of {quote(layer, NAME)} is of a kind that mlx-lm has nothing for ({quote(name.rpartition('.lora_')[2], 30)}).",
            )
        elif ".base_layer." in name:
            raise UserError(
                SETTING,
                f"{quote(name.replace('.base_layer', ''), NAME)} was trained beside the adapters (peft's bias), which mlx-lm has nothing for.",
            )
        else:
            whole[name.replace(".modules_to_save", "")] = stored
    if not layers and not whole:
        raise UserError(SETTING, f"{ARRAYS} holds no adapter.")
    return layers, whole


def _check_layer(
    layer: str, found: Mapping[str, str], header: Mapping[str, StoredArray], settings: PeftSettings
) -> None:
    """Raises UserError where an array of a layer's adapter is missing or has another shape than the settings say."""
    called = quote(layer, NAME)
    wanted = ["A", "B", *(["magnitude"] if settings.uses_dora else [])]
    if missing := [part for part in wanted if part not in found]:
        raise UserError(SETTING, f"The adapter of {called} is not whole: its {missing[0]} is missing.")
    if "magnitude" in found and not settings.uses_dora:
        raise UserError(
            SETTING, f"The adapter of {called} has a magnitude, and adapter_config.json says that it is no DoRA."
        )
    a, b = header[found["A"]].shape, header[found["B"]].shape
    rank = settings.rank_of(layer)
    if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
        raise UserError(SETTING, f"The adapter of {called} is A {list(a)} and B {list(b)}, and its rank is {rank}.")
    if "magnitude" in found and header[found["magnitude"]].shape != (b[0],):
        raise UserError(
            SETTING, f"The magnitude of {called} is {list(header[found['magnitude']].shape)}, and B has {b[0]} rows."
        )
