"""What there is to choose when a run is exported, and what a choice amounts to: which weights, how large, where.

For forms; reads the run folder and headers of weight files, and loads nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from backend.config.config import Config, load
from backend.export.exports import PUBLISHER, ExportFormat, exported_bytes
from backend.runs.archive import raw_settings
from backend.runs.events import first_and_last_events
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import SavedWeights, best_of, find_checkpoint, has_end, saved_weights
from backend.runs.steering import run_config
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.places import lm_studio_models


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """One state of a run's weights. `key` is the value of `--checkpoint`, "" for the run's end."""

    key: str
    label: str


def weights_choices(run: RunFolder) -> list[WeightsChoice]:
    """The run's end, the best checkpoint, then every checkpoint, newest first."""
    checkpoints = saved_weights(run)
    choices = [WeightsChoice("", "End of the run")] if has_end(run) else []
    if best := best_of(checkpoints):
        choices.append(WeightsChoice("best", f"Best checkpoint: step {best.step}{_score(best)}"))
    for saved in reversed(checkpoints):
        choices.append(WeightsChoice(str(saved.step), f"Checkpoint of step {saved.step}{_score(saved)}"))
    return choices


def _score(saved: SavedWeights) -> str:
    return "" if saved.score is None else f", {saved.metric or 'reward'} {saved.score:.3g}"


def export_size(run: RunFolder, format_: ExportFormat, checkpoint: str) -> int | None:
    """About the bytes of an export; None where that is not known before."""
    settings = raw_settings(run)
    is_full = settings.get("train_type") == "full"
    if format_.kind == "adapter":
        return None if is_full else _size(_adapter_file(run, checkpoint))
    is_complete = is_full and not checkpoint
    base = run.model if is_complete else local_folder(str(settings.get("model", "")))
    return exported_bytes(base, format_, str(settings.get("quantization", "none"))) if base else None


def _adapter_file(run: RunFolder, checkpoint: str) -> Path:
    try:
        return find_checkpoint(run, checkpoint).arrays if checkpoint else run.adapters / "adapters.safetensors"
    except UserError:  # deleted since it was listed
        return run.adapters / "adapters.safetensors"


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def has_adapter(run: RunFolder) -> bool:
    return raw_settings(run).get("train_type") != "full"


def has_held_out_prompts(run: RunFolder) -> bool:
    """Whether the run has evaluated on prompts that it did not train on."""
    _, last = first_and_last_events(run.events)
    return any(event["kind"] == "eval" for event in last)


def settings_of(run: RunFolder) -> Config:
    """The settings that an export for TRL is made of: those that the run ended with; of one in stages, which no program else has, those that
    hold outside of them. Raises UserError."""
    begun = load(run.config)
    return begun if begun.stages else run_config(run)


def target_folder(target: str, name: str, folder: Path) -> Path:
    """Where a model of that name would be."""
    return lm_studio_models() / PUBLISHER / name if target == "lmstudio" else folder / name


def free_bytes(folder: Path) -> int | None:
    """Free on the disk that `folder` is on, or would be."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return shutil.disk_usage(existing).free if existing else None
