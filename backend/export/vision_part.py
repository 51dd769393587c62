"""The part of a vision model that reads images, opened by mlx-vlm; an export writes it beside the text model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm import utils as mlx_lm_utils

from backend.models.loading import loading
from backend.models.model_folder import header_of, object_or_empty
from backend.trainer.memory.model_shape import shape_of
from backend.utils.errors import UserError
from backend.vision.tokenizer import INSTALL

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
