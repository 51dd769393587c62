"""Export weights: check the target, compute a reference, write the model, verify it, move it into place."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.export import atomic_folder, gguf_file, lm_studio_rules, writer
from backend.export.destinations import Destination
from backend.export.exports import ExportFormat, Progress, exported_bytes, silent
from backend.export.original_files import Fetch, original_of, trained_on_original
from backend.export.original_rows import write_merged
from backend.export.peft_export import write_peft_adapter
from backend.export.trained_weights import AdapterFiles, TrainedWeights, open_model
from backend.export.verify import (
    TOLERANCE,
    AnsweredPrompt,
    NotFiniteError,
    Reference,
    Verification,
    compare,
    make_reference,
    reference_bytes,
    verify_folder,
)
from backend.models import policy
from backend.models.peft_files import merged_model, read_peft_adapter
from backend.models.tokenizers import load_tokenizer
from backend.trainer.memory.model_shape import shape_of
from backend.utils.disk import cause, writing
from backend.utils.errors import UserError

GGUF_FILE = "model.gguf"
GGUF_TOLERANCE = {"f16": TOLERANCE["float16"], "bf16": TOLERANCE["bfloat16"], "q8_0": None}
SLACK = 16 << 20
"""Bytes for tokenizer files and headers."""
NOTICEABLE_LOSS = 0.1
"""Share of the training effect lost above which a warning appears."""


@dataclass(frozen=True, slots=True)
class HeldOutDifference:
    """Mean held-out rewards before and after the export, one completion per prompt.

    `error` is the standard error of the mean difference; None for one prompt.
    """

    split: str
    prompts: int
    trained: float
    exported: float
    error: float | None

    @property
    def difference(self) -> float:
        return self.exported - self.trained

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"difference": self.difference}


@dataclass(frozen=True, slots=True)
class ExportedModel:
    place: str
    path: Path
    format: str
    bytes: int
    verification: Verification
    held_out: HeldOutDifference | None
    notes: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """Messages about the comparison."""
        checked, sentences = self.verification, list[str]()
        if not checked.max_error:
            sentences.append("Loaded back, it gives exactly the logits of the trained model.")
        else:
            sentences.append(
                f"Loaded back, its logits differ from the trained model's by {checked.max_error:.2g} at most, and the "
                f"log-probability of a token of the run's completions by {checked.nats:.2g} nats on average."
            )
        if checked.lost is not None and checked.lost > NOTICEABLE_LOSS:
            moved = f"Rounding has moved its logits by {checked.lost:.0%} of what training did"
            sentences.append(f"{moved}; more bits keep more.")
        sentences += self.notes
        if (found := self.held_out) is not None:
            error = f" ± {found.error:.2g}" if found.error else ""
            prompts = f"{found.prompts} prompt{'s' * (found.prompts != 1)} of the {found.split} split"
            rewards = f"its reward is {found.exported:.3g}, and the trained model's {found.trained:.3g}"
            difference = f"{found.difference:+.2g}".replace("-", "−") if found.difference else "0"
            sentences.append(f"On {prompts} {rewards}: a difference of {difference}{error}.")
        return sentences

    def to_dict(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "path": str(self.path),
            "format": self.format,
            "bytes": self.bytes,
            **asdict(self.verification),
            "held_out": self.held_out.to_dict() if self.held_out else None,
            "sentences": self.sentences(),
        }


def build(
    trained: TrainedWeights,
    format_: ExportFormat,
    destination: Destination,
    samples: list[AnsweredPrompt],
    *,
    also: Callable[[TrainedWeights, Path], tuple[HeldOutDifference | None, tuple[str, ...]]] = lambda trained, built: (
        None,
        (),
    ),
    progress: Progress = silent,
    fetch: Fetch | None = None,
) -> ExportedModel:
    """Export trained weights; on any error an existing model stays.

    `also` runs on the verified folder before it is moved, and returns a comparison and notes. `fetch` downloads missing
    original weights; None refuses.

    Raises UserError for an unusable model, an existing target or a full disk; RuntimeError if the logits differ.
    """
    check_kind(trained, format_)
    destination.check()
    requested = trained
    if format_.names == "original":
        trained = trained_on_original(trained, fetch)
    if format_.kind == "gguf":
        gguf_file.check(original_of(trained), trained.tokenizer)
    atomic_folder.check_free_space(destination.workshop, needed_bytes(trained, format_, len(samples)))
    target = destination.target
    with writing(target, also_computes=True), atomic_folder.staging_folder(destination.workshop, target) as staging:
        trained, built = trained.pinned(staging / "adapters"), staging / "new"
        progress("Computing what the trained model answers.")
        tokenizer, tolerance = load_tokenizer(trained.tokenizer), _tolerance(trained, format_)
        reference = make_reference(trained, tokenizer, samples, tolerance, staging / "reference")
        write_in_format(trained, format_, built, progress)
        atomic_folder.drop_hidden_files(built)
        progress("Loading it back and comparing.")
        verification = _verified(trained, format_, built, reference)
        for warning in lm_studio_rules.warnings(built) if format_.kind == "model" else ():
            progress(warning.sentence)
        held_out, more_notes = also(replace(requested, adapters=trained.adapters), built)
        size = atomic_folder.folder_bytes(built)
        place = destination.deliver(built)
    notes: tuple[str, ...] = ()
    if (trained.base, trained.quantization) != (requested.base, requested.quantization):
        merged = f"The adapters were trained on quantised weights and are now on the original ones of {trained.name}"
        differs = "in use, its answers differ from the run's by what quantisation had changed"
        notes = (f"{merged}, with which these logits were compared: {differs}.",)
    return ExportedModel(place, target, format_.key, size, verification, held_out, (*notes, *more_notes))


def check_kind(trained: TrainedWeights, format_: ExportFormat) -> None:
    """Raise UserError for weights that the format or the base model rules out."""
    if format_.kind == "adapter" and trained.adapters is None:
        every = "Full fine-tuning changed every weight, so there is no adapter to export"
        raise UserError("format", f"{every}; choose another format.")
    if format_.kind != "adapter":
        writer.kept_files(trained.tokenizer)


def needed_bytes(trained: TrainedWeights, format_: ExportFormat, samples: int) -> int:
    """Estimate the disk space of an export, temporary files included."""
    shape = shape_of(trained.base)
    reference = reference_bytes(shape.vocabulary if shape else 0, samples)
    adapters = 2 * trained.adapters.arrays.stat().st_size if trained.adapters else 0
    if format_.kind == "adapter":
        return adapters + reference
    size = exported_bytes(trained.base, format_, trained.quantization)
    if size is None:  # unknown from the files: as large as the base, or as 4 bits in 16
        is_packed = shape is not None and shape.quantised
        size = sum(file.stat().st_size for file in trained.base.glob("model*.safetensors")) * (4 if is_packed else 1)
    return int(1.02 * size) + SLACK + reference + adapters


def write_in_format(trained: TrainedWeights, format_: ExportFormat, to: Path, progress: Progress = silent) -> None:
    """Write trained weights into a new folder. Raises UserError if the format cannot represent them."""
    merging = "Merging the adapters and writing the model." if trained.adapters else "Writing the model."
    doing = "Writing the adapter." if format_.kind == "adapter" else merging
    progress(doing, None if format_.kind == "adapter" else 0.0)

    def done(share: float) -> None:
        progress(doing, share)

    try:
        match format_.kind, format_.names:
            case "adapter", "original":
                write_peft_adapter(trained, original_of(trained), to)
            case "adapter", _:
                writer.write_adapter(trained, to)
            case "gguf", _:
                gguf_file.write_gguf(trained, original_of(trained), format_.gguf_type, to / GGUF_FILE, done)
            case _, "original":
                write_merged(trained, original_of(trained), to, done)
            case _:
                model, config = writer.in_format(*trained.open_with_config(), format_)
                writer.write_model(model, config, trained.tokenizer, to, done)
    except OSError as error:
        raise UserError("export", f"The model cannot be written to {to.parent}: {cause(error)}.") from error
    finally:
        # mlx modules are in reference cycles, hence the explicit collection: the written model is loaded next.
        gc.collect()
        mx.clear_cache()


def _tolerance(trained: TrainedWeights, format_: ExportFormat) -> float | None:
    if format_.kind == "adapter":
        return TOLERANCE["float32"]
    model, _ = trained.open_with_config()
    if format_.gguf_type:
        return GGUF_TOLERANCE[format_.gguf_type]
    if format_.quantization or (format_.keeps_bits and policy.is_quantised(model)):
        return None
    return TOLERANCE[format_.dtype or str(writer.float_type(model)).rpartition(".")[2]]


def _verified(trained: TrainedWeights, format_: ExportFormat, built: Path, reference: Reference) -> Verification:
    if format_.kind == "adapter" and format_.names == "original":
        original = original_of(trained)
        return compare(built, reference, lambda: merged_model(read_peft_adapter(built), original))
    if format_.kind == "gguf":
        original = original_of(trained)
        return compare(built, reference, lambda: gguf_file.open_gguf(built / GGUF_FILE, original))
    if format_.kind == "adapter":
        files = AdapterFiles(built / "adapters.safetensors", built / "adapter_config.json")
        return compare(built, reference, replace(trained, adapters=files).open)

    def open_built() -> Any:
        model, _ = open_model(built)
        model.eval()
        return model

    try:
        return verify_folder(built, load_tokenizer(built), reference, open_built)
    except NotFiniteError:
        if format_.dtype != "float16":
            raise
        beyond = "Numbers of this model are beyond the range of float16 (65,504)"
        raise UserError("format", f"{beyond}; choose bf16, or full precision.") from None
