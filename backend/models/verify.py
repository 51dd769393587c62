"""Verify that a model written to disk equals the model that was in memory: its files, its tokenizer, its logits.

A reference is computed before anything is written; the folder is then loaded back and compared with it. Does not judge quality.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils

TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}
"""Most that a written model's logits may differ at a typical position, as a share of their spread, by the precision of
its weights. Wide for 16 bits, whose rounding adds up over layers; a wrong or missing tensor is off by about 1."""

SAMPLE_TOKENS, COMPARED_POSITIONS = 256, 48
"""The last tokens of a sample that the model reads, and how many of the last positions' logits are compared."""


@dataclass(frozen=True, slots=True)
class Verification:
    """How a written model differs from the model in memory, over the compared positions.

    `max_error` is the largest absolute difference of a logit. `agreement` is the share of positions where the likeliest
    token is the same. `lost` is the root mean square of the difference over that of the change by training;
    None where the untrained model is not known.
    """

    max_error: float
    agreement: float
    lost: float | None


@dataclass(slots=True)
class Reference:
    """A trained model's logits on samples, computed before anything is written.

    `tokens[i]` are the ids of the (prompt, answer) `samples[i]`, `logits[i]` [≤48, V] the logits at the last of them, and
    `untrained` the same without adapters, where they are known. `tolerance` is a value of TOLERANCE, or None for a model
    that is quantised on its way out, which no bound fits.
    """

    samples: list[tuple[str, str]]
    tokens: list[list[int]]
    logits: list[mx.array]
    untrained: list[mx.array] | None
    tolerance: float | None


# ── comparing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def verify(folder: Path, reference: Reference) -> Verification:
    """Load a written model back and compare it with `reference`.

    Raises RuntimeError when a file is not what LM Studio and mlx-lm need, the tokenizer reads text differently, or the
    answers differ by more than rounding.
    """
    check_files(folder)
    model, tokenizer = mlx_lm_utils.load(str(folder), lazy=True)[:2]
    if tokenize_samples(tokenizer, reference.samples) != reference.tokens:
        raise RuntimeError(f"The tokenizer written to {folder} reads text differently from the run's.")
    return _compare(folder, reference, last_logits(model, reference.tokens))


def tokenize_samples(tokenizer: Any, samples: list[tuple[str, str]]) -> list[list[int]]:
    """Token ids of (prompt, answer) pairs in the chat template, each cut to its last 256."""
    return [_tokens(tokenizer, prompt, answer)[-SAMPLE_TOKENS:] for prompt, answer in samples]


def _tokens(tokenizer: Any, prompt: str, answer: str) -> list[int]:
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(prompt + answer))
    prompt_ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return [*prompt_ids, *tokenizer.encode(answer, add_special_tokens=False)]


def last_logits(model: Any, tokens: list[list[int]]) -> list[mx.array]:
    """The last logits [≤48, V] of each sequence, float32."""
    logits: list[mx.array] = []
    for ids in tokens:
        logits.append(model(mx.array(ids)[None])[0, -COMPARED_POSITIONS:].astype(mx.float32))
        mx.eval(logits[-1])
    return logits


def _rms_difference(a: list[mx.array], b: list[mx.array]) -> float:
    return _number(mx.sqrt(mx.mean(mx.square(mx.concatenate(a) - mx.concatenate(b)))))


def _number(array: mx.array) -> float:
    return float(array.item())  # pyright: ignore[reportArgumentType]


def _compare(folder: Path, reference: Reference, logits: list[mx.array]) -> Verification:
    expected_PV, written_PV = mx.concatenate(reference.logits), mx.concatenate(logits)
    error_PV = written_PV - expected_PV
    # The median over positions: a token that rounding routes to another expert is no error, and a wrong tensor shows everywhere.
    typical = _number(mx.median(mx.sqrt(mx.mean(mx.square(error_PV), axis=-1)) / mx.std(expected_PV, axis=-1)))
    if not math.isfinite(typical) or (reference.tolerance is not None and typical > reference.tolerance):
        raise RuntimeError(
            f"The model written to {folder} does not answer like the run's: its logits are off by {typical:.1%}."
        )
    same = mx.sum(mx.argmax(written_PV, axis=-1) == mx.argmax(expected_PV, axis=-1))
    return Verification(
        _number(mx.max(mx.abs(error_PV))), _number(same) / len(written_PV), _lost_share(reference, logits)
    )


def _lost_share(reference: Reference, logits: list[mx.array]) -> float | None:
    """The error's root mean square over that of what training changed; None when it changed nothing, as at step 0."""
    if reference.untrained is None:
        return None
    effect = _rms_difference(reference.logits, reference.untrained)
    return _rms_difference(logits, reference.logits) / effect if effect else None


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_files(folder: Path) -> None:
    """Raise RuntimeError unless the folder is a complete model without other files, and every weight file has a metadata object."""
    weights = sorted(folder.glob("model*.safetensors"))
    for file in weights:
        if not isinstance(safetensors_header(file).get("__metadata__"), dict):
            raise RuntimeError(f"{file} has no metadata object in its header, and LM Studio refuses such a file.")
    for needed in ("config.json", "tokenizer_config.json"):
        if not weights or not (folder / needed).is_file():
            raise RuntimeError(f"{folder} is not a complete model: weights or {needed} are missing.")
    stray = [file.name for file in folder.iterdir() if file.name.startswith("adapter") or file.is_dir()]
    if stray:
        raise RuntimeError(f"{folder} holds {stray[0]}, which is no part of a model.")


def safetensors_header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: its length in eight little-endian bytes, then the JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(length))
