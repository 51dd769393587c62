"""Which model TRL loads: the id on Hugging Face, the original of one that MLX converted, or a copy of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.models.export.original.original_files import converted_from
from backend.spec.config import Config
from backend.spec.hub_cache import local_folder
from backend.spec.other_programs.into_trl.writing import LeftOut
from backend.spec.user_input.paths import user_path

COPY = "model"
"""The folder in the export that a local model is copied into."""
_WEIGHTS = {4: "load_in_4bit", 8: "load_in_8bit"}


@dataclass(frozen=True, slots=True)
class TrlModel:
    """`name` for TRL. `copied_from`: the folder whose files go into COPY. `words`: further arguments. `left_out`: what is not the same."""

    name: str
    copied_from: Path | None = None
    words: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def trl_model(config: Config) -> TrlModel:
    """The model of a run as TRL finds it. Raises Mistake for one that MLX packed and whose card does not name its original."""
    folder = local_folder(config.model)
    if folder is None:
        return TrlModel(config.model)
    original, bits = converted_from(folder, config.model)
    if original is None:
        is_path = user_path(config.model, "model").is_dir()
        return TrlModel(COPY, folder) if is_path else TrlModel(config.model)
    packed = (
        f"bitsandbytes packs it into {_nearest(bits)} bits of its own"
        if bits
        else "its weights are those that MLX converted"
    )
    left = LeftOut("model", config.model, f"PyTorch does not read MLX's files: the original, {original}; {packed}")
    words = (_WEIGHTS[_nearest(bits)],) if bits and config.train_type != "full" else ()
    return TrlModel(original, None, words, (left,))


def _nearest(bits: int) -> int:
    return 4 if bits <= 5 else 8
