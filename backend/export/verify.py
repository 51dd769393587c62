"""Verify that a written model equals the trained one: files, tokenizer, and logits on the run's completions.

Both passes run in float32 with one layer in memory, so models differ by weights alone. Quantised layers are unpacked,
which is exact.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm import utils as mlx_lm_utils

from backend.data.problems import apply_chat_template
from backend.export import lm_studio_rules
from backend.export.trained_weights import TrainedWeights
from backend.utils.errors import UserError

TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}
"""Largest typical logit difference, as a share of their spread, by precision. A wrong tensor is off by about 1."""
SAMPLE_TOKENS, COMPARED_TOKENS = 256, 48  # tokens of a sample to read, and of its answer to compare
HEAD_ROWS = 1 << 14  # vocabulary rows to unpack at once

OpenModel = Callable[[], nn.Module]  # opens a new lazy model at each call


class NotFiniteError(RuntimeError):
    """A written model's logits are not finite, although the trained one's are."""


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    messages: list[dict[str, Any]]
    answer: str
    template_variables: Mapping[str, Any] = field(default_factory=dict)


SAMPLES = [  # for a run without completions
    AnsweredPrompt([{"role": "user", "content": "What is 17 plus 25?"}], "17 plus 25 is 42."),
    AnsweredPrompt(
        [{"role": "user", "content": "Write one sentence about the sea."}],
        "The sea was calm, and the light lay on it like a road.",
    ),
]


TokenizedSample = tuple[list[int], int]  # ids of prompt and answer, and how many of the last, the answer's, to compare


@dataclass(frozen=True, slots=True)
class Verification:
    """Difference between written and trained model over the compared tokens. `max_error`: largest logit difference.
    `nats`: mean absolute log-probability difference. `agreement`: share of equal top tokens. `lost`: RMS logit
    difference over the RMS change by training, or None."""

    max_error: float
    nats: float
    agreement: float
    lost: float | None


@dataclass(frozen=True, slots=True)
class Reference:
    """A trained model's logits on samples. `logits`: for each of `tokens` the [≤48, V] float32 logits for its compared
    tokens. `effect`: RMS change by training or None. `tolerance`: one of TOLERANCE, or None if the export quantises."""

    samples: list[AnsweredPrompt]
    tokens: list[TokenizedSample]
    logits: list[mx.array]
    effect: float | None
    tolerance: float | None


def make_reference(
    trained: TrainedWeights, tokenizer: Any, samples: list[AnsweredPrompt], tolerance: float | None
) -> Reference:
    """Compute the trained model's logits and the effect of training. Raises UserError if not finite."""
    tokens, effect = tokenize_samples(tokenizer, samples), None
    logits = list(answer_logits(trained.open, tokens))
    mx.eval(logits)
    if not all(mx.all(mx.isfinite(logits_PV)).item() for logits_PV in logits):
        raise UserError("run", "The trained model gives no finite numbers, so there is nothing worth writing.")
    if trained.untrained is not None:
        squares = 0.0
        untrained = replace(trained, base=trained.untrained, adapters=None, arrays=None)
        for logits_PV, other_PV in zip(logits, answer_logits(untrained.open, tokens), strict=True):
            squares += float(mx.sum(mx.square(logits_PV - other_PV)))
        effect = math.sqrt(squares / sum(logits_PV.size for logits_PV in logits))
    return Reference(samples, tokens, logits, effect, tolerance)


def tokenize_samples(tokenizer: Any, samples: list[AnsweredPrompt]) -> list[TokenizedSample]:
    """Token ids of prompt and answer, each cut to the last 256."""
    tokenized: list[TokenizedSample] = []
    for sample in samples:
        answer = list(tokenizer.encode(sample.answer, add_special_tokens=False))
        prompt = apply_chat_template(sample.messages, tokenizer, sample.template_variables)
        ids = [*prompt, *answer][-SAMPLE_TOKENS:]
        # An empty answer still has a prompt whose last token is predicted by those before it.
        tokenized.append((ids, max(1, min(len(answer), COMPARED_TOKENS, len(ids) - 1))))
    return tokenized


def verify_folder(folder: Path, tokenizer: Any, reference: Reference, open_: OpenModel) -> Verification:
    """`compare`, after files and tokenizer. Raises RuntimeError if they or the logits differ beyond rounding."""
    if broken := lm_studio_rules.faults(folder):
        raise RuntimeError(f"{folder} is not a model that LM Studio opens. {broken[0]}")
    if tokenize_samples(tokenizer, reference.samples) != reference.tokens:
        raise RuntimeError(f"The tokenizer written to {folder} reads text differently from the run's.")
    return compare(folder, reference, open_)


def compare(folder: Path, reference: Reference, open_: OpenModel) -> Verification:
    """Raises RuntimeError beyond the reference's tolerance, NotFiniteError for logits that are not finite."""
    typical: list[mx.array] = []
    largest, same, nats, squares = 0.0, 0.0, 0.0, 0.0
    written = answer_logits(open_, reference.tokens)
    for (ids, compared), expected_PV, written_PV in zip(reference.tokens, reference.logits, written, strict=True):
        error_PV = written_PV - expected_PV
        typical.append(mx.sqrt(mx.mean(mx.square(error_PV), axis=-1)) / mx.std(expected_PV, axis=-1))
        largest = max(largest, float(mx.max(mx.abs(error_PV))))
        same += float(mx.sum(mx.argmax(written_PV, axis=-1) == mx.argmax(expected_PV, axis=-1)))
        answer = mx.array(ids[-compared:])
        nats += float(mx.sum(mx.abs(_logps(written_PV, answer) - _logps(expected_PV, answer))))
        squares += float(mx.sum(mx.square(error_PV)))
    # The median over positions: rounding may route a token to another expert, but a wrong tensor shows everywhere.
    off = float(mx.median(mx.concatenate(typical)))
    if not math.isfinite(off):
        raise NotFiniteError(f"The model written to {folder} gives no finite numbers.")
    if reference.tolerance is not None and off > reference.tolerance:
        differs = "does not answer like the run's: its logits are off by"
        raise RuntimeError(f"The model written to {folder} {differs} {off:.1%}.")
    count = sum(compared for _, compared in reference.tokens)
    rms = math.sqrt(squares / sum(logits_PV.size for logits_PV in reference.logits))
    return Verification(largest, nats / count, same / count, rms / reference.effect if reference.effect else None)


def _logps(logits_PV: mx.array, token_P: mx.array) -> mx.array:
    return mx.take_along_axis(logits_PV, token_P[:, None], axis=-1)[:, 0] - mx.logsumexp(logits_PV, axis=-1)


def answer_logits(open_: OpenModel, tokens: list[TokenizedSample]) -> Iterator[mx.array]:
    """Per sample the logits [compared, V], float32, of its compared tokens, computed layer by layer to save memory.
    Their mean is 0: a shift of all logits changes no probability, and where embeddings share a direction, rounding
    shifts them by more than their spread."""
    longest, most = max(len(ids) for ids, _ in tokens), max(compared for _, compared in tokens)
    # Padded on the right, where no earlier token sees it.
    tokens_BL = mx.array([ids + [0] * (longest - len(ids)) for ids, _ in tokens])
    first_B1 = mx.array([[len(ids) - 1 - compared] for ids, compared in tokens])
    position_BP = mx.minimum(first_B1 + mx.arange(most), longest - 1)
    is_selected = False

    def logits_of_answers(head: Any, hidden_BLH: mx.array) -> mx.array:
        nonlocal is_selected
        is_selected = True
        return _products(head, mx.take_along_axis(hidden_BLH, position_BP[..., None], axis=1))

    model = open_()
    for index, layer in enumerate(list(getattr(model, "layers", ()))):
        _free_after_use(layer, lambda index=index: open_().layers[index])  # pyright: ignore
    for name, module in model.named_modules():
        # An output layer that is not known computes every position: more memory and time, the same logits. So does the
        # one within an adapter (mlx-lm calls it `embedding`), which adds its part to all of them.
        if type(module) in (nn.Embedding, nn.QuantizedEmbedding) and not name.endswith(".embedding"):
            _replace_method(module, "as_linear", logits_of_answers)
        elif type(module) in (nn.Linear, nn.QuantizedLinear) and name.rpartition(".")[2] == "lm_head":
            _replace_method(module, "__call__", logits_of_answers)
    logits: mx.array = model(tokens_BL)  # pyright: ignore
    if not is_selected:
        logits = mx.take_along_axis(logits, position_BP[..., None], axis=1)
    for logits_PV, (_, compared) in zip(logits, tokens, strict=True):
        answered_PV = logits_PV[:compared].astype(mx.float32)
        yield answered_PV - mx.mean(answered_PV, axis=-1, keepdims=True)


def _free_after_use(layer: nn.Module, reopened: Callable[[], nn.Module]) -> None:
    kind, is_freed = type(layer), False

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_freed
        if is_freed:
            self.update(in_float32(reopened()).parameters())
        else:
            in_float32(self)
        result = kind.__call__(self, *tree_map(_widened, args), **tree_map(_widened, kwargs))  # pyright: ignore
        mx.eval([array for _, array in tree_flatten(result) if isinstance(array, mx.array)])
        self.update(tree_map(lambda _: mx.array([]), self.parameters()))
        is_freed = True
        return result

    _replace_method(layer, "__call__", call)


def _replace_method(module: nn.Module, name: str, method: Callable[..., Any]) -> None:
    # Python looks `__call__` up on the class, and modules of one class differ here: each gets a subclass.
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: method})


def _widened(argument: Any) -> Any:
    is_float = isinstance(argument, mx.array) and mx.issubdtype(argument.dtype, mx.floating)
    return argument.astype(mx.float32) if is_float else argument


def in_float32(module: nn.Module) -> nn.Module:
    module.set_dtype(mx.float32)  # scales and biases, so that affine weights unpack exactly
    mlx_lm_utils.dequantize_model(module)
    module.set_dtype(mx.float32)  # mx and nv formats unpack to bfloat16, which holds them exactly
    return module


def _products(head: Any, hidden: mx.array) -> mx.array:
    hidden, parts = hidden.astype(mx.float32), []
    for start in range(0, head.weight.shape[0], HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        weight = head.weight[rows]
        if "scales" in head:
            biases = head.biases[rows].astype(mx.float32) if head.get("biases") is not None else None
            scales = head.scales[rows]
            scales = scales.astype(mx.float32) if mx.issubdtype(scales.dtype, mx.floating) else scales
            weight = mx.dequantize(weight, scales, biases, head.group_size, head.bits, head.mode)
        parts.append(hidden @ weight.astype(mx.float32).T)
        mx.eval(parts[-1])
    logits = mx.concatenate(parts, axis=-1)
    return logits + head.bias if "bias" in head else logits
