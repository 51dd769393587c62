"""One export: check the place, take the reference, write the model, load it back and compare, move it into place.

A model is built in a hidden folder and moved by one rename, so an incomplete one is never visible. Replaces no model unless the
destination was told to.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from backend.models import policy
from backend.models.export import atomic_folder, lm_studio_rules, merging, model_files
from backend.models.export.destinations import Destination
from backend.models.export.gguf import gguf_file
from backend.models.export.original import merged_weights
from backend.models.export.original.original_files import Fetch, original_of, trained_on_original
from backend.models.export.trained_weights import (
    AdapterFiles,
    TrainedWeights,
    open_model,
    open_tokenizer,
)
from backend.models.export.verify import (
    TOLERANCE,
    AnsweredPrompt,
    Reference,
    Unanswerable,
    Verification,
    compare,
    kept_bytes,
    make_reference,
    verify_folder,
)
from backend.models.peft.reading import merged_model, read_peft_adapter
from backend.models.peft.writing import write_peft_adapter
from backend.spec.disk_faults import cause, disk_errors_of
from backend.spec.exports import ExportFormat, exported_bytes
from backend.spec.faults import Mistake
from backend.spec.memory.model_shape import shape_of

GGUF_FILE = "model.gguf"
GGUF_TOLERANCE = {"f16": TOLERANCE["float16"], "bf16": TOLERANCE["bfloat16"], "q8_0": None}

SLACK = 16 << 20
"""Bytes beside the weights: tokenizer files, headers."""


class Progress(Protocol):
    """Receives a sentence for the user at each stage, and the stage's fraction done where it is known."""

    def __call__(self, sentence: str, done: float | None = None) -> None: ...


def silent(sentence: str, done: float | None = None) -> None:
    """A Progress that says nothing."""


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """Place and size of an export, and how it was found to differ from the trained model. `path` is the folder, where there is one."""

    place: str
    path: Path
    bytes: int
    verification: Verification
    extra: Any
    """What `also` returned."""
    notes: tuple[str, ...] = ()
    """What else is to be said of it, in sentences."""


def build(
    trained: TrainedWeights,
    format_: ExportFormat,
    destination: Destination,
    samples: list[AnsweredPrompt],
    *,
    also: Callable[[TrainedWeights, Path], Any] = lambda trained, built: None,
    progress: Progress = silent,
    fetch: Fetch | None = None,
) -> BuiltModel:
    """Export trained weights. `also` is called with the weights and the finished, verified folder before that is moved. `fetch` downloads
    original weights that are not on this disk; None refuses them.

    Raises Mistake for a model that cannot be used, an existing target or too little disk space; RuntimeError when the written model's
    logits differ from the trained one's. In every case, and when `also` raises, nothing new is left behind and an existing model stays.
    """
    check_kind(trained, format_)
    destination.check()
    asked = trained
    if format_.names == "original":
        trained = trained_on_original(trained, fetch)
    if format_.kind == "gguf":
        gguf_file.check(original_of(trained), trained.tokenizer)
    atomic_folder.check_free_space(destination.workshop, needed_bytes(trained, format_, len(samples)))
    with (
        disk_errors_of(destination.target),
        atomic_folder.staging_folder(destination.workshop, destination.target) as staging,
    ):
        trained, built = trained.pinned(staging / "adapters"), staging / "new"
        tokenizer = open_tokenizer(trained.tokenizer)
        progress("Computing what the trained model answers.")
        tolerance = _tolerance(trained, format_)
        reference = make_reference(trained, tokenizer, samples, tolerance, staging / "reference")
        write_in_format(trained, format_, built, progress)
        atomic_folder.drop_hidden_files(built)
        progress("Loading it back and comparing.")
        verification = _verified(trained, format_, built, reference)
        for warning in lm_studio_rules.warnings(built) if format_.kind == "model" else ():
            progress(warning.sentence)
        extra = also(replace(asked, adapters=trained.adapters), built)
        size = atomic_folder.folder_bytes(built)
        place = destination.deliver(built)
    return BuiltModel(place, destination.target, size, verification, extra, _notes(asked, trained))


def _notes(asked: TrainedWeights, written: TrainedWeights) -> tuple[str, ...]:
    if written.base == asked.base and written.quantization == asked.quantization:
        return ()
    return (
        f"The adapters were trained on quantised weights and are now on the original ones of {written.name}, with which these "
        "logits were compared: in use, its answers differ from the run's by what quantisation had changed.",
    )


def check_kind(trained: TrainedWeights, format_: ExportFormat) -> None:
    """Raise Mistake for weights that a format cannot have, and for a base whose files cannot go along."""
    if format_.kind == "adapter" and trained.adapters is None:
        raise Mistake(
            "format", "Full fine-tuning changed every weight, so there is no adapter to export; choose another format."
        )
    if format_.kind != "adapter":
        model_files.kept_files(trained.tokenizer)


def needed_bytes(trained: TrainedWeights, format_: ExportFormat, samples: int) -> int:
    """About the bytes that an export needs on its disk, what it keeps only for the time being included."""
    shape = shape_of(trained.base)
    reference = kept_bytes(shape.vocabulary if shape else 0, samples)
    adapters = 2 * trained.adapters.arrays.stat().st_size if trained.adapters else 0
    if format_.kind == "adapter":
        return adapters + reference
    size = exported_bytes(trained.base, format_, trained.quantization)
    if size is None:  # sizes that the files do not tell: as large as the base, or as 4 bits in 16
        is_packed = shape is not None and shape.quantised
        size = sum(file.stat().st_size for file in trained.base.glob("model*.safetensors")) * (4 if is_packed else 1)
    return int(1.02 * size) + SLACK + reference + adapters


def write_in_format(trained: TrainedWeights, format_: ExportFormat, to: Path, progress: Progress = silent) -> None:
    """Write trained weights in a format into a new folder. Raises Mistake when that cannot be done."""
    try:
        if format_.kind == "adapter":
            progress("Writing the adapter.")
            if format_.names == "original":
                write_peft_adapter(trained, original_of(trained), to)
            else:
                model_files.write_adapter(trained, to)
            return
        doing = "Merging the adapters and writing the model." if trained.adapters else "Writing the model."
        progress(doing, 0.0)
        if format_.kind == "gguf":
            original = original_of(trained)
            gguf_file.write_gguf(
                trained, original, format_.gguf_type, to / GGUF_FILE, lambda done: progress(doing, done)
            )
            return
        if format_.names == "original":
            merged_weights.write_merged(trained, original_of(trained), to, lambda done: progress(doing, done))
            return
        model, config = merging.in_format(*trained.open_with_config(), format_)
        model_files.write_model(model, config, trained.tokenizer, to, lambda done: progress(doing, done))
    except OSError as error:
        raise Mistake("export", f"The model cannot be written to {to.parent}: {cause(error)}.") from error
    finally:
        # mlx modules are in reference cycles, hence the explicit collection: the written model is loaded next.
        gc.collect()
        mx.clear_cache()


def _tolerance(trained: TrainedWeights, format_: ExportFormat) -> float | None:
    """How exactly the written model must answer; None where it is rounded to few bits."""
    if format_.kind == "adapter":
        return TOLERANCE["float32"]
    model, _ = trained.open_with_config()
    if format_.gguf_type:
        return GGUF_TOLERANCE[format_.gguf_type]
    if format_.quantization or (format_.keeps_bits and policy.is_quantised(model)):
        return None
    return TOLERANCE[format_.dtype or str(merging.float_type(model)).rpartition(".")[2]]


def _verified(trained: TrainedWeights, format_: ExportFormat, built: Path, reference: Reference) -> Verification:
    if format_.kind == "adapter" and format_.names == "original":
        original = original_of(trained)
        return compare(built, reference, lambda: merged_model(read_peft_adapter(built), original))
    if format_.kind == "gguf":
        original = original_of(trained)
        return compare(built, reference, lambda: gguf_file.open_gguf(built / GGUF_FILE, original))
    if format_.kind == "adapter":
        files = AdapterFiles(built / "adapters.safetensors", built / "adapter_config.json")
        return compare(built, reference, trained.with_adapters(files).open)
    try:
        return verify_folder(built, open_tokenizer(built), reference, lambda: _evaluating(built))
    except Unanswerable:
        if format_.dtype != "float16":
            raise
        raise Mistake(
            "format", "Numbers of this model are beyond the range of float16 (65,504); choose bf16, or full precision."
        ) from None


def _evaluating(folder: Path) -> Any:
    model, _ = open_model(folder)
    model.eval()
    return model
