"""The memory of a run as the window shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.config.config import Config

if TYPE_CHECKING:
    from backend.trainer.memory.model_shape import ModelShape


def memory_parts_of(config: Config, prompt: int | None = None, has_images: bool = False) -> MemoryParts | None:
    """The memory of a run in its largest phase, or None. `prompt`: the longest prompt's tokens."""
    from backend.models.suggested_models import suggested
    from backend.trainer.memory.model_shape import shape_of
    from backend.utils.hub_cache import local_folder

    folder, known = local_folder(config.model), suggested(config.model)
    shape = shape_of(folder) if folder is not None else known.shape if known is not None else None
    if shape is None:
        return None
    images = (prompt or config.max_seq_length - config.max_completion_length) if has_images else 0
    return memory_parts_of_shape(config, shape.reading(images), prompt)


def memory_parts_of_shape(config: Config, shape: ModelShape, prompt: int | None = None) -> MemoryParts:
    from backend.trainer.memory.estimate import PARTS, estimate_run, machines_note
    from backend.utils.machine import machine_bytes

    result = estimate_run(config, shape, machine_bytes(), prompt)
    parts = tuple((*PARTS[name], size) for name, size in result.largest.sizes.items())
    return MemoryParts(parts, result.limit, result.advice, result.speed_note, machines_note(config))


GB = 1e9


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """The memory of a run in bytes, against the `limit` of this machine."""

    parts: tuple[tuple[str, str, float], ...]  # (name, a sentence for its tip, bytes)
    limit: float
    advice: str = ""  # what to change if it does not fit
    speed_note: str = ""  # if it fits
    machines_note: str = ""  # whose memory it is, of a run on several machines

    @property
    def total(self) -> float:
        return sum(size for _, _, size in self.parts)

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    @property
    def sentence(self) -> str:
        of = f" of {amount(self.limit)}" if self.fits else f", and this machine has only {amount(self.limit)} to give"
        return f"Needs about {amount(self.total)}{of}. {self.machines_note}".rstrip()


def amount(size: float) -> str:
    """“9.8 GB”, “640 MB”."""
    if size < GB:
        return f"{size / 1e6:.0f}\u00a0MB"
    return f"{size / GB:.1f}\u00a0GB" if size < 100 * GB else f"{size / GB:.0f}\u00a0GB"
