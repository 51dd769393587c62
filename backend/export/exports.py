"""What a run can be exported as and where to: the tables that the command line and the window show, and the size of the result.

A format or a target is one row here and one function in `backend.models.export` (`merging`, `destinations`). Reads headers of
weight files; loads no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backend.trainer.memory.model_shape import Linear, ModelShape, packed_width, shape_of
from backend.trainer.memory.phases import QUANTIZED
from backend.utils.errors import UserError

Kind = Literal["adapter", "model", "gguf"]
"""Adapters to be loaded beside their base, a folder that is a model complete in itself, or one file that is."""


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """One form of the weights. `label` and `sentence` are for people."""

    key: str
    label: str
    sentence: str
    kind: Kind = "model"
    dtype: str = ""
    """The float type of every weight: bfloat16 or float16; "" keeps the base's."""
    quantization: dict[str, Any] = field(default_factory=dict[str, Any])
    """bits, group_size and mode of mlx's `quantize`; {} for floats."""
    keeps_bits: bool = False
    """Whether layers of a quantised base stay quantised, each with its own bits."""
    names: Literal["mlx", "original"] = "mlx"
    """Whose names the weights have: mlx-lm's, or those of the original Hugging Face weights, which other programs read."""
    gguf_type: str = ""
    """The type of matrices in a GGUF file: q8_0, f16 or bf16."""
    matrix_bits: float = 0
    """Bits of a number of a matrix, where neither the base nor `quantization` tells them."""


def _affine(bits: int, sentence: str) -> ExportFormat:
    return ExportFormat(f"{bits}bit", f"{bits} bits", sentence,
                        quantization={"bits": bits, "group_size": 64, "mode": "affine"})  # fmt: skip


def _gguf(type_: str, bits: float, sentence: str) -> ExportFormat:
    return ExportFormat(f"gguf-{type_}", f"GGUF {type_.upper()}", f"One file for llama.cpp, Ollama and LM Studio, {sentence}",
                        kind="gguf", names="original", gguf_type=type_, matrix_bits=bits)  # fmt: skip


FORMATS: dict[str, ExportFormat] = {
    row.key: row
    for row in (
        ExportFormat(
            "full", "Full precision", "The floats of the base model; a quantised base is unpacked. Nothing is lost."
        ),
        ExportFormat(
            "fused",
            "As the base came",
            "The base model's own bits, layer by layer. On a quantised base, rounding the merged weights again loses a part of "
            "what was learned.",
            keeps_bits=True,
        ),
        _affine(8, "About half of 16 bits in size; the loss is hardly measurable."),
        _affine(6, "A little smaller than 8 bits, with a small loss."),
        _affine(4, "The smallest and the fastest to answer; loses the most."),
        ExportFormat(
            "mxfp4",
            "MXFP4",
            "4-bit floats in blocks of 32 (OCP microscaling), for hardware and programs that compute with them.",
            quantization={"bits": 4, "group_size": 32, "mode": "mxfp4"},
        ),
        ExportFormat("bf16", "bfloat16", "Every weight as a 16-bit float with the range of float32.", dtype="bfloat16"),
        ExportFormat(
            "fp16",
            "float16",
            "Every weight as a 16-bit float with three digits more than bfloat16, up to 65,504.",
            dtype="float16",
        ),
        ExportFormat(
            "adapter",
            "Adapter alone",
            "What training added, in mlx-lm's files: small, and of use only with the base model.",
            kind="adapter",
        ),
        ExportFormat(
            "original",
            "Hugging Face weights",
            "The original files with what was trained merged into them, name by name: for transformers, vLLM and llama.cpp.",
            names="original",
        ),
        ExportFormat(
            "peft",
            "Adapter for peft",
            "What training added, in the files of Hugging Face's peft: for transformers and vLLM, beside the original model.",
            kind="adapter",
            names="original",
        ),
        _gguf("q8_0", 8.5, "in 8 bits: half of 16 bits in size, and the loss is hardly measurable."),
        _gguf("f16", 16, "in float16; llama-quantize makes smaller ones of it."),
        _gguf("bf16", 16, "in bfloat16: nothing of a model in bfloat16 is lost."),
    )
}
"""Format by the word that `--format` takes, in the order of menus; the first is what an export writes unless told otherwise."""

DEFAULT_FORMAT = next(iter(FORMATS))


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """One place that an export goes to."""

    key: str
    label: str
    asks_for_folder: bool = False
    kinds: tuple[Kind, ...] = ("model", "adapter", "gguf")
    """What it can take."""
    refusal: str = ""
    """The sentence for a kind that it cannot take."""
    store: str = ""
    """Where a program keeps the model in files of its own; "" for a folder on this disk, which can be looked at before and shown after."""
    takes_settings: bool = False
    """Whether it takes the run's settings, to train elsewhere, and no weights."""


PUBLISHER = "grpo-studio"
"""The folder under LM Studio's models that ours go into; its layout is <publisher>/<model>/files."""

TARGETS: dict[str, ExportTarget] = {
    row.key: row
    for row in (
        ExportTarget(
            "lmstudio",
            "LM Studio",
            kinds=("model", "gguf"),
            refusal="LM Studio loads complete models only, so an adapter alone cannot go there; choose another format, or a folder.",
        ),
        ExportTarget("folder", "A folder", asks_for_folder=True),
        ExportTarget(
            "ollama",
            "Ollama",
            kinds=("gguf",),
            refusal="Ollama takes GGUF files only; choose a GGUF format.",
            store="Among Ollama's own models.",
        ),
        ExportTarget(
            "hub",
            "Hugging Face",
            kinds=("model", "adapter"),
            refusal="GGUF files are not uploaded from here; export to a folder, and upload that with `hf upload`.",
        ),
        ExportTarget(
            "trl",
            "TRL, on CUDA machines",
            asks_for_folder=True,
            kinds=(),
            refusal="TRL gets the settings of a run and no weights, so there is no format to choose.",
            takes_settings=True,
        ),
    )
}
"""Target by the word that `--to` takes."""


def format_named(key: str) -> ExportFormat:
    """Raises UserError for a word that names no format."""
    if key not in FORMATS:
        raise UserError("format", f"There is no format {key}; there are {', '.join(FORMATS)}.")
    return FORMATS[key]


def target_for(key: str, format_: ExportFormat) -> ExportTarget:
    """Raises UserError for a word that names no target, or a target that cannot take this format."""
    if key not in TARGETS:
        raise UserError("to", f"There is no target {key}; there are {', '.join(TARGETS)}.")
    if format_.kind not in TARGETS[key].kinds:
        raise UserError("format", TARGETS[key].refusal)
    return TARGETS[key]


# ── how large ────────────────────────────────────────────────────────────────────────────────────────────────────────


def exported_bytes(base: Path, format_: ExportFormat, quantization: str = "none") -> int | None:
    """About how many bytes of weights an export has: within a few per cent. None where `base` does not tell its sizes.

    `base` is the folder of the model that the weights are put on; `quantization` is the run's setting, how it quantised the model after
    loading. For complete models: an adapter is as large as its file.
    """
    shape = shape_of(base)
    if shape is None or not shape.exact:
        return None
    others = shape.weights - sum(matrix.bytes for matrix in shape.matrices)
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
