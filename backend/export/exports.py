"""Export formats and targets for command line and window, and the choice of weights. Loads no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from backend.config.config import Config, load
from backend.runs.archive import raw_settings
from backend.runs.events import first_and_last_events
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import Checkpoint, all_checkpoints, best_of, find_checkpoint, has_end
from backend.runs.steering import run_config
from backend.trainer.memory.model_shape import Linear, ModelShape, packed_width, shape_of
from backend.trainer.memory.phases import QUANTIZED
from backend.utils.documents import read_resource
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.places import lm_studio_models

Kind = Literal["adapter", "model", "gguf"]  # adapter files, a complete model folder, or a single file


class Progress(Protocol):
    """Receives a message per stage, and the fraction done if known."""

    def __call__(self, sentence: str, done: float | None = None) -> None: ...


def silent(sentence: str, done: float | None = None) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class ExportFormat:
    key: str
    label: str
    sentence: str
    kind: Kind = "model"
    dtype: str = ""  # "bfloat16" or "float16"; "" keeps the base's type
    quantization: dict[str, Any] = field(default_factory=dict[str, Any])  # arguments of mlx's `quantize`; {} for floats
    keeps_bits: bool = False  # keep quantised layers of the base quantised
    names: Literal["mlx", "original"] = "mlx"  # weight names: mlx-lm's or those of the original Hugging Face files
    gguf_type: str = ""  # matrix type in a GGUF file: q8_0, f16 or bf16
    matrix_bits: float = 0  # bits per weight if neither base nor `quantization` defines them


_TABLES = read_resource("exports.yaml")
FORMATS: dict[str, ExportFormat] = {key: ExportFormat(key, **about) for key, about in _TABLES["formats"].items()}
"""By value of `--format`, in menu order; the first is the default."""
DEFAULT_FORMAT = next(iter(FORMATS))


@dataclass(frozen=True, slots=True)
class ExportTarget:
    key: str
    label: str
    asks_for_folder: bool = False
    kinds: tuple[Kind, ...] = ("model", "adapter", "gguf")  # supported kinds of formats
    refusal: str = ""  # message for an unsupported kind
    store: str = ""  # where a program stores the model; "" for a visible folder
    takes_settings: bool = False  # true if it exports settings for training elsewhere, not weights


PUBLISHER = "grpo-studio"  # our folder under LM Studio's models, laid out as <publisher>/<model>
TARGETS: dict[str, ExportTarget] = {key: ExportTarget(key, **about) for key, about in _TABLES["targets"].items()}
"""By value of `--to`."""


def format_named(key: str) -> ExportFormat:
    """Raises UserError for an unknown format."""
    if key not in FORMATS:
        raise UserError("format", f"There is no format {key}; there are {', '.join(FORMATS)}.")
    return FORMATS[key]


def target_for(key: str, format_: ExportFormat) -> ExportTarget:
    """Raises UserError for an unknown target, or one that does not support the format."""
    if key not in TARGETS:
        raise UserError("to", f"There is no target {key}; there are {', '.join(TARGETS)}.")
    if format_.kind not in TARGETS[key].kinds:
        raise UserError("format", TARGETS[key].refusal)
    return TARGETS[key]


def exported_bytes(base: Path, format_: ExportFormat, quantization: str = "none") -> int | None:
    """Estimate the bytes of a complete model; None if the sizes of `base` are unknown. `quantization` is the run's
    setting."""
    shape = shape_of(base)
    if shape is None or not shape.exact:
        return None
    tower = shape.tower.bytes if shape.tower and format_.kind == "model" else 0
    others = shape.weights + tower - sum(matrix.bytes for matrix in shape.matrices)
    return round(others + sum(_matrix_bytes(matrix, shape, format_, quantization) for matrix in shape.matrices))


def _matrix_bytes(matrix: Linear, shape: ModelShape, format_: ExportFormat, quantization: str) -> float:
    if format_.matrix_bits:
        return matrix.numbers * format_.matrix_bits / 8
    own = format_.quantization
    packing = (own["bits"], own["group_size"], own["mode"]) if own else QUANTIZED.get(quantization)
    if packing and (own or format_.keeps_bits) and matrix.inputs % packing[1] == 0:
        return matrix.numbers * packed_width(*packing, shape.width)
    if format_.keeps_bits:
        return matrix.bytes
    return matrix.numbers * (2 if format_.dtype else shape.width)


def weights_choices(run: RunFolder) -> dict[str, str]:
    """Value of `--checkpoint` → label: end of the run, best checkpoint, then all checkpoints, newest first."""

    def score(saved: Checkpoint) -> str:
        return "" if saved.state.score is None else f", {saved.state.score_metric or 'reward'} {saved.state.score:.3g}"

    checkpoints = all_checkpoints(run)
    best = best_of(checkpoints)
    choices = {"": "End of the run"} if has_end(run) else {}
    choices |= {"best": f"Best checkpoint: step {best.step}{score(best)}"} if best else {}
    return choices | {str(saved.step): f"Checkpoint of step {saved.step}{score(saved)}" for saved in checkpoints[::-1]}


def export_size(run: RunFolder, format_: ExportFormat, checkpoint: str) -> int | None:
    """Estimate the bytes of an export; None if unknown."""
    settings = raw_settings(run)
    is_full = settings.get("train_type") == "full"
    if format_.kind == "adapter":
        file = run.adapters / "adapters.safetensors"
        if checkpoint:
            try:
                file = find_checkpoint(run, checkpoint).weights_file
            except UserError:  # deleted since it was listed
                return None
        return file.stat().st_size if file.is_file() and not is_full else None
    base = run.model if is_full and not checkpoint else local_folder(str(settings.get("model", "")))
    return exported_bytes(base, format_, str(settings.get("quantization", "none"))) if base else None


def has_adapter(run: RunFolder) -> bool:
    return raw_settings(run).get("train_type") != "full"


def has_held_out_prompts(run: RunFolder) -> bool:
    _, last = first_and_last_events(run.events)
    return any(event["kind"] == "eval" for event in last)


def settings_of(run: RunFolder) -> Config:
    """The settings for TRL; of a staged run, those outside its stages. Raises UserError."""
    begun = load(run.config)
    return begun if begun.stages else run_config(run)


def target_folder(target: str, name: str, folder: Path) -> Path:
    return lm_studio_models() / PUBLISHER / name if target == "lmstudio" else folder / name
