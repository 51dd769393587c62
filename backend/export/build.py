"""One export: check the place, take the reference, write the model, load it back and compare, move it into place.

A model is built in a hidden folder and moved by one rename, so an incomplete one is never visible. Replaces no model unless the
destination was told to.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from backend.export import atomic_folder, lm_studio_rules, merging, model_files
from backend.export.destinations import Destination
from backend.export.exports import ExportFormat, exported_bytes
from backend.export.gguf import gguf_file
from backend.export.model_files import write_safetensors
from backend.export.original import merged_weights
from backend.export.original.merged_weights import merged
from backend.export.original.original_files import Fetch, OriginalFiles, original_of, trained_on_original
from backend.export.original.row_trace import Rows, Trace, by_original, trace
from backend.export.original.trained_rows import LowRank, TrainedRows, trained_rows
from backend.export.trained_weights import AdapterFiles, TrainedWeights, open_model, open_tokenizer
from backend.export.verify import (
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
from backend.models import policy
from backend.models.peft.reading import ARRAYS, CONFIG, PREFIX, PeftLayer, merged_model, read_peft_adapter
from backend.models.peft.settings import is_tied, tidy
from backend.trainer.memory.model_shape import shape_of
from backend.utils.disk_faults import cause, disk_errors_of
from backend.utils.errors import UserError

# LoRA or DoRA adapters in the files of Hugging Face's peft: adapter_config.json and adapter_model.safetensors.

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""What transformers calls an embedding and the output layer in models that may tie them."""

MERGE_INSTEAD = "choose another format, which merges the adapter into the weights"


def write_peft_adapter(trained: TrainedWeights, original: OriginalFiles, to: Path) -> None:
    """Write the adapters into a new folder, with a README. Raises UserError for a layer that peft has no adapter for."""
    learned, traced = trained_rows(trained), trace(original)
    _check_names(original, learned, traced)
    layers = dict(_layers(original, learned, traced))
    to.mkdir(parents=True)
    arrays: dict[str, mx.array] = {}
    for name, layer in layers.items():
        arrays[f"{PREFIX}{name}.lora_A.weight"] = layer.a.astype(mx.float32)
        arrays[f"{PREFIX}{name}.lora_B.weight"] = layer.b.astype(mx.float32)
        if layer.magnitude is not None:
            arrays[f"{PREFIX}{name}.lora_magnitude_vector"] = layer.magnitude.astype(mx.float32)
    whole = _whole_tensors(original, learned, traced)
    arrays |= {f"{PREFIX}{name}": tensor for name, tensor in whole.items()}
    write_safetensors(to / ARRAYS, arrays, metadata={"format": "pt"})
    assert trained.adapters is not None
    config = _config(original.name, layers, trained.adapters.about())
    config["modules_to_save"] = sorted({name.rpartition(".")[0] for name in whole}) or None
    (to / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (to / "README.md").write_text(_readme(original.name, config["use_dora"]), encoding="utf-8")


# ── what peft has no adapter for ─────────────────────────────────────────────────────────────────────────────────────


def _check_names(original: OriginalFiles, learned: TrainedRows, traced: Trace) -> None:
    names = original.shapes
    for array, adapter in sorted(learned.adapters.items()):
        layer = array.removesuffix(".weight")
        if array not in traced:
            raise UserError(
                "format",
                f"Which of the original weights {layer} comes from could not be found out; choose mlx-lm's adapter.",
            )
        if not adapter.is_linear:
            raise UserError(
                "format", f"{layer} is no plain linear layer, and peft's adapters would not do; {MERGE_INSTEAD}."
            )
        for run in traced[array]:
            module = run.original.removesuffix(".weight")
            # transformers 5 holds experts, and the layer that chooses among them, as parameters of their own.
            if any(name.startswith(f"{module.rpartition('.')[0]}.experts.") for name in names):
                raise UserError("format", f"transformers has no linear layer {module} for an adapter; {MERGE_INSTEAD}.")
            if module.startswith("language_model."):
                raise UserError("format", f"transformers renames {module} when it loads this model; {MERGE_INSTEAD}.")


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _layers(original: OriginalFiles, learned: TrainedRows, traced: Trace) -> Iterator[tuple[str, PeftLayer]]:
    """The adapters by the names of the original layers."""
    weights, shapes = original.arrays(), original.shapes
    rows = (run for array in learned.adapters for run in traced[array])
    for name, runs in by_original(rows).items():
        yield name.removesuffix(".weight"), _layer(runs, learned.adapters, shapes[name], weights[name])


def _whole_tensors(original: OriginalFiles, learned: TrainedRows, traced: Trace) -> dict[str, mx.array]:
    """The original tensors, float32, of the modules that were trained as a whole. Raises UserError where one cannot be found."""
    if lost := sorted(learned.arrays.keys() - traced.keys()):
        raise UserError(
            "format", f"Which of the original weights {lost[0]} comes from could not be found out; {MERGE_INSTEAD}."
        )
    tensors = original.arrays()
    runs = by_original(run for array in learned.arrays for run in traced[array])
    whole = {name: merged(tensors[name].astype(mx.float32), rows, learned) for name, rows in runs.items()}
    if is_tied(original.config, traced) and (inputs := [name for name in whole if name.endswith(EMBEDDING)]):
        # peft takes a module that is trained as a whole out of what ties it: the output layer would stay the base's.
        whole[HEAD] = whole[inputs[0]]
    return whole


def _layer(runs: list[Rows], adapters: Mapping[str, LowRank], shape: tuple[int, ...], weight: mx.array) -> PeftLayer:
    """One adapter of an original layer [out, in] from those of the mlx-lm layers in it, side by side along the rank."""
    arrays = list(dict.fromkeys(run.array for run in runs))
    column: dict[str, int] = {}
    for array in arrays:
        column[array] = sum(adapters[before].rank for before in column)
    ranks = sum(adapters[array].rank for array in arrays)
    b = mx.zeros((shape[0], ranks))
    # Rows without an adapter keep the length that they have.
    uses_dora = adapters[arrays[0]].magnitude is not None
    magnitude = mx.linalg.norm(weight.astype(mx.float32), axis=1) if uses_dora else None
    for run in runs:
        adapter = adapters[run.array]
        here, there = slice(run.original_start, run.original_start + run.count), slice(run.start, run.start + run.count)
        # One alpha / r for the whole layer, so each adapter's own scale is brought to the first one's.
        relative = adapter.scale / adapters[arrays[0]].scale
        b[here, column[run.array] : column[run.array] + adapter.rank] = relative * adapter.b[there]
        if magnitude is not None and adapter.magnitude is not None:
            magnitude[here] = adapter.magnitude[there]
    a = mx.concatenate([adapters[array].a[0] for array in arrays])
    return PeftLayer(a, b, magnitude, adapters[arrays[0]].scale)


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _config(base: str, layers: Mapping[str, PeftLayer], about: Mapping[str, Any]) -> dict[str, Any]:
    """peft's adapter_config.json; `about` is mlx-lm's. alpha is scale · rank, under rsLoRA scale · √rank. Layers go by their full names: a
    last part like q_proj would also fit layers that were not trained."""
    ranks = {name: layer.a.shape[0] for name, layer in layers.items()}
    usual = min(ranks.values())
    others = {name: rank for name, rank in ranks.items() if rank != usual}
    scale, rslora = next(iter(layers.values())).scale, about.get("use_rslora") is True
    alphas = {rank: _whole(tidy(scale * (math.sqrt(rank) if rslora else rank))) for rank in ranks.values()}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "revision": None,
        "inference_mode": True, "r": usual, "lora_alpha": alphas[usual], "bias": "none",
        "lora_dropout": about["lora_parameters"].get("dropout", 0.0),
        "target_modules": sorted(layers), "rank_pattern": others,
        "alpha_pattern": {name: alphas[rank] for name, rank in others.items()},
        "use_dora": any(layer.magnitude is not None for layer in layers.values()), "use_rslora": rslora,
        "fan_in_fan_out": False, "modules_to_save": None, "layers_to_transform": None, "layers_pattern": None,
    }  # fmt: skip


def _whole(number: float) -> float:
    """As an integer where it is one, as peft itself writes alpha."""
    return int(number) if number == int(number) else number


def _readme(base: str, is_dora: bool) -> str:
    return (
        f"---\nbase_model: {base}\nlibrary_name: peft\n---\n\n{'DoRA' if is_dora else 'LoRA'} adapters for {base}, trained with GRPO Studio.\n\n"
        "```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), ".")\n```\n'
    )


# ── build ────────────────────────────────────────────────────────────────────────────────────────────────────────────

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

    Raises UserError for a model that cannot be used, an existing target or too little disk space; RuntimeError when the written model's
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
    """Raise UserError for weights that a format cannot have, and for a base whose files cannot go along."""
    if format_.kind == "adapter" and trained.adapters is None:
        raise UserError(
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
    """Write trained weights in a format into a new folder. Raises UserError when that cannot be done."""
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
        raise UserError("export", f"The model cannot be written to {to.parent}: {cause(error)}.") from error
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
        raise UserError(
            "format", "Numbers of this model are beyond the range of float16 (65,504); choose bf16, or full precision."
        ) from None


def _evaluating(folder: Path) -> Any:
    model, _ = open_model(folder)
    model.eval()
    return model
