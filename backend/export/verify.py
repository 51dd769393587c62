"""Verify that a model written to disk equals the trained one: its files, its tokenizer, its logits on the run's own completions.

The trained model's logits are computed first and kept on disk; the written folder is then loaded back and compared with them. Both passes
hold one layer at a time (`forward_pass`). Rewards on held-out prompts are `backend.export.export_run`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.export import lm_studio_rules
from backend.export.forward_pass import OpenModel, logits_at
from backend.export.trained_weights import TrainedWeights
from backend.models.saving import save_arrays
from backend.utils.errors import UserError

TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}
"""Most that a written model's logits may differ at a typical position, as a share of their spread, by the precision of
its weights. Wide for 16 bits, whose rounding adds up over layers; a wrong or missing tensor is off by about 1."""

SAMPLE_TOKENS, COMPARED_TOKENS = 256, 48
"""The last tokens of a sample that the model reads, and how many of an answer's last tokens are compared."""


class Unanswerable(RuntimeError):
    """A written model whose logits are infinite or no numbers, although the trained one's are finite."""


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt as the run put it, and an answer to it."""

    messages: list[dict[str, Any]]
    answer: str
    template_variables: Mapping[str, Any] = field(default_factory=dict)


SAMPLES = [
    AnsweredPrompt([{"role": "user", "content": "What is 17 plus 25?"}], "17 plus 25 is 42."),
    AnsweredPrompt(
        [{"role": "user", "content": "Write one sentence about the sea."}],
        "The sea was calm, and the light lay on it like a road.",
    ),
]
"""What models are compared on when the run has no completions."""


@dataclass(frozen=True, slots=True)
class TokenizedSample:
    """`ids` are those of prompt and answer; the last `compared` of them are the answer's."""

    ids: list[int]
    compared: int


@dataclass(frozen=True, slots=True)
class Verification:
    """How a written model differs from the trained one, over the compared tokens.

    `max_error` is the largest absolute difference of a logit. `nats` is the mean absolute difference of an answer token's
    log-probability. `agreement` is the share of positions where the likeliest token is the same. `lost` is the root mean square of the
    logits' difference over that of their change by training; None where the untrained model is not known, or training changed nothing.
    """

    max_error: float
    nats: float
    agreement: float
    lost: float | None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


@dataclass(slots=True)
class Reference:
    """A trained model's logits on samples.

    `logits(i)` [≤48, V], float32, predict the compared tokens of `tokens[i]`; they are in files in `folder`, because of a large vocabulary
    they would take hundreds of megabytes. `effect` is the root mean square of what training changed in them, None where that is not
    known. `tolerance` is a value of TOLERANCE, or None for a model that is quantised on its way out, which no bound fits.
    """

    samples: list[AnsweredPrompt]
    tokens: list[TokenizedSample]
    folder: Path
    effect: float | None
    tolerance: float | None

    def logits(self, index: int) -> mx.array:
        arrays: Any = mx.load(str(_logits_file(self.folder, index)))
        return arrays["logits"]


def _logits_file(folder: Path, index: int) -> Path:
    return folder / f"logits-{index}.safetensors"


def kept_bytes(vocabulary: int, samples: int) -> int:
    """Bytes of a reference's files."""
    return 4 * vocabulary * COMPARED_TOKENS * samples


# ── the reference ────────────────────────────────────────────────────────────────────────────────────────────────────


def make_reference(
    trained: TrainedWeights, tokenizer: Any, samples: list[AnsweredPrompt], tolerance: float | None, folder: Path
) -> Reference:
    """Compute the trained model's logits, and what training changed in them. Raises UserError where they are not finite."""
    tokens = tokenize_samples(tokenizer, samples)
    folder.mkdir()
    for index, logits in enumerate(answer_logits(trained.open, tokens)):
        if not mx.all(mx.isfinite(logits)).item():
            raise UserError("run", "The trained model gives no finite numbers, so there is nothing worth writing.")
        save_arrays(_logits_file(folder, index), {"logits": logits})
    reference = Reference(samples, tokens, folder, None, tolerance)
    if trained.untrained is not None:
        reference.effect = _rms_difference(reference, answer_logits(trained.open_untrained, tokens))
    return reference


def tokenize_samples(tokenizer: Any, samples: list[AnsweredPrompt]) -> list[TokenizedSample]:
    """Token ids of prompt and answer, each cut to its last 256."""
    return [_tokenized(tokenizer, sample) for sample in samples]


def _tokenized(tokenizer: Any, sample: AnsweredPrompt) -> TokenizedSample:
    answer = list(tokenizer.encode(sample.answer, add_special_tokens=False))
    if tokenizer.has_chat_template:
        prompt = tokenizer.apply_chat_template(sample.messages, add_generation_prompt=True, **sample.template_variables)
    else:
        prompt = tokenizer.encode("\n\n".join(message["content"] for message in sample.messages))
    ids = [*prompt, *answer][-SAMPLE_TOKENS:]
    # An empty answer still has a prompt whose last token is predicted by those before it.
    return TokenizedSample(ids, max(1, min(len(answer), COMPARED_TOKENS, len(ids) - 1)))


def answer_logits(open_: OpenModel, tokens: list[TokenizedSample]) -> Iterator[mx.array]:
    """For each sample the logits [compared, V], float32, that predict its compared tokens."""
    positions = [list(range(len(sample.ids) - 1 - sample.compared, len(sample.ids) - 1)) for sample in tokens]
    return logits_at(open_, [sample.ids for sample in tokens], positions)


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def verify_folder(folder: Path, tokenizer: Any, reference: Reference, open_: OpenModel) -> Verification:
    """Compare a complete model, written to `folder` and read back with `tokenizer`, with `reference`.

    Raises RuntimeError when a file is not what LM Studio and mlx-lm need, the tokenizer reads text differently, or the
    answers differ by more than rounding.
    """
    if broken := lm_studio_rules.faults(folder):
        raise RuntimeError(f"{folder} is not a model that LM Studio opens. {broken[0]}")
    if tokenize_samples(tokenizer, reference.samples) != reference.tokens:
        raise RuntimeError(f"The tokenizer written to {folder} reads text differently from the run's.")
    return compare(folder, reference, open_)


def compare(folder: Path, reference: Reference, open_: OpenModel) -> Verification:
    """Compare what was written to `folder`, which `open_` opens, with the reference. Raises RuntimeError where it differs by more than the
    reference's tolerance, or gives no numbers."""
    typical: list[mx.array] = []
    largest, same, nats, squares, logits_count, count = 0.0, 0.0, 0.0, 0.0, 0, 0
    for index, written_PV in enumerate(answer_logits(open_, reference.tokens)):
        expected_PV, sample = reference.logits(index), reference.tokens[index]
        error_PV = written_PV - expected_PV
        typical.append(mx.sqrt(mx.mean(mx.square(error_PV), axis=-1)) / mx.std(expected_PV, axis=-1))
        largest = max(largest, _number(mx.max(mx.abs(error_PV))))
        same += _number(mx.sum(mx.argmax(written_PV, axis=-1) == mx.argmax(expected_PV, axis=-1)))
        answer = mx.array(sample.ids[-sample.compared :])
        nats += _number(mx.sum(mx.abs(_logps(written_PV, answer) - _logps(expected_PV, answer))))
        squares += _number(mx.sum(mx.square(error_PV)))
        logits_count, count = logits_count + error_PV.size, count + sample.compared
    _check_typical(folder, reference, _number(mx.median(mx.concatenate(typical))))
    rms = math.sqrt(squares / logits_count)
    return Verification(largest, nats / count, same / count, rms / reference.effect if reference.effect else None)


def _check_typical(folder: Path, reference: Reference, typical: float) -> None:
    # The median over positions: a token that rounding routes to another expert is no error, and a wrong tensor shows everywhere.
    if not math.isfinite(typical):
        raise Unanswerable(f"The model written to {folder} gives no finite numbers.")
    if reference.tolerance is not None and typical > reference.tolerance:
        raise RuntimeError(
            f"The model written to {folder} does not answer like the run's: its logits are off by {typical:.1%}."
        )


def _logps(logits_PV: mx.array, token_P: mx.array) -> mx.array:
    chosen = mx.take_along_axis(logits_PV, token_P[:, None], axis=-1)[:, 0]
    return chosen - mx.logsumexp(logits_PV, axis=-1)


def _rms_difference(reference: Reference, others: Iterator[mx.array]) -> float:
    squares, count = 0.0, 0
    for index, other_PV in enumerate(others):
        squares += _number(mx.sum(mx.square(reference.logits(index) - other_PV)))
        count += other_PV.size
    return math.sqrt(squares / count)


def _number(array: mx.array) -> float:
    return float(array.item())  # pyright: ignore[reportArgumentType]
