"""The forward pass of training: log-probabilities of completions, without the vocabulary where it is not needed.

Knows a model and arrays; no files, no settings, no loss.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

CHUNK_BYTES = 64 << 20
"""Most bytes of float32 logits held at once while log-probabilities are worked out."""


@dataclass(slots=True)
class Halves:
    """A causal language model in two halves, so that the vocabulary is only computed where it is needed.

    `hidden(tokens_BL, cache)` → [B, L, H]; `logits(hidden)` → [..., V]. A model that does more than a linear head after
    its last norm is kept whole: its hidden states are its logits.
    """

    hidden: Callable[..., mx.array]
    logits: Callable[[mx.array], mx.array]
    head: nn.Module | None = None
    """The module whose weights `logits` uses; None where the model is kept whole."""


# ── halves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def split(model: nn.Module) -> Halves:
    """The halves of a model, checked by a probe against the whole: a soft cap or scale after the head is not lost."""
    inner = getattr(model, "language_model", model)
    body = getattr(inner, "model", None)
    head = getattr(inner, "lm_head", None)
    logits = head
    if head is None and hasattr(body, "embed_tokens"):
        head = body.embed_tokens  # pyright: ignore
        logits = head.as_linear
    if body is not None and logits is not None and _halves_agree(model, body, logits):
        return Halves(lambda tokens, cache=None: body(tokens, cache=cache), logits, head)
    return Halves(lambda tokens, cache=None: model(tokens, cache=cache), lambda hidden: hidden)


def _halves_agree(model: nn.Module, body: Any, logits: Any) -> bool:
    """The very same operations give the very same numbers, so a soft cap shows even where it bends them by a hair."""
    probe = mx.array([[1, 2, 3]])
    try:
        whole, parts = model(probe), logits(body(probe))
        return whole.shape == parts.shape and mx.allclose(whole, parts, rtol=1e-5, atol=1e-6).item()  # pyright: ignore
    except (TypeError, ValueError, AttributeError):
        return False


# ── log-probabilities ────────────────────────────────────────────────────────────────────────────────────────────────


def completion_logps(
    halves: Halves,
    tokens_BL: mx.array,
    prompt_length_B: mx.array,
    completion_BT: mx.array,
    active_N: mx.array,
    temperature: float,
    chunk: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[mx.array, mx.array]:
    """log π(completion | prompt) and the entropy of each distribution, both [B, T] in nats, 0 where inactive.

    tokens_BL: prompt and completion of each row, padded on the right; prompt_length_B: tokens of each prompt;
    completion_BT: the sampled ids; active_N: flat indices into [B, T] of the real completion tokens. Logits are divided
    by `temperature` first, in float32. The vocabulary is computed at the active positions only, `chunk` at a time.
    The entropy carries a gradient only where `entropy_gradient` asks for one.
    """
    B, T = completion_BT.shape
    if active_N.size == 0:  # every completion was left out: truncated ones, where those are masked
        return mx.zeros((B, T)), mx.zeros((B, T))
    hidden_BLH = halves.hidden(tokens_BL[:, :-1])
    # The state that predicts completion token t of row b stands at prompt_length[b] − 1 + t.
    place_BT = mx.minimum(prompt_length_B[:, None] - 1 + mx.arange(T)[None], tokens_BL.shape[1] - 2)
    flat_N = (mx.arange(B)[:, None] * hidden_BLH.shape[1] + place_BT).reshape(-1)[active_N]
    hidden_NH = hidden_BLH.reshape(-1, hidden_BLH.shape[-1])[flat_N]
    logp_N, entropy_N = _chunked(
        halves, hidden_NH, completion_BT.reshape(-1)[active_N], temperature, chunk, entropy_gradient
    )
    blank = mx.zeros(B * T)
    return blank.at[active_N].add(logp_N).reshape(B, T), blank.at[active_N].add(entropy_N).reshape(B, T)


def _chunked(
    halves: Halves,
    hidden_NH: mx.array,
    target_N: mx.array,
    temperature: float,
    chunk: int | None,
    entropy_gradient: bool,
) -> tuple[mx.array, mx.array]:
    def one(hidden: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
        scaled = halves.logits(hidden).astype(mx.float32) / temperature
        norm = mx.logsumexp(scaled, axis=-1)
        logp = mx.take_along_axis(scaled, mx.stop_gradient(target)[:, None], axis=-1)[:, 0] - norm
        free, norm = (scaled, norm) if entropy_gradient else (mx.stop_gradient(scaled), mx.stop_gradient(norm))
        entropy = norm - (mx.softmax(free, axis=-1) * free).sum(axis=-1)
        return logp, entropy

    N = hidden_NH.shape[0]
    size = chunk or N
    if size >= N:
        return one(hidden_NH, target_N)
    # The backward pass works the logits out again, a chunk at a time. Only what is handed to a checkpointed function gets
    # a gradient: a head that learns hands its weights over, or full fine-tuning would never move it.
    recomputed = mx.checkpoint(one) if halves.head is None else nn.utils.checkpoint(halves.head, one)
    parts = [recomputed(hidden_NH[i : i + size], target_N[i : i + size]) for i in range(0, N, size)]
    return mx.concatenate([part[0] for part in parts]), mx.concatenate([part[1] for part in parts])


def head_chunk(model_config: dict[str, Any], wanted: int | None = None) -> int:
    """Completion tokens whose logits fit CHUNK_BYTES together, or what the person asked for."""
    text = model_config.get("text_config", model_config)
    return wanted or max(16, CHUNK_BYTES // (4 * int(text.get("vocab_size", 1 << 15))))


@contextlib.contextmanager
def recomputed_layers(model: nn.Module, on: bool) -> Iterator[None]:
    """Within this context each layer's activations are worked out again in the backward pass instead of being kept.

    A module's call belongs to its class, so the class is changed and changed back: sampling never pays for it.
    """
    if not on:
        yield
        return
    kinds = {type(layer) for layer in model.layers}  # pyright: ignore
    plain = {kind: kind.__call__ for kind in kinds}
    seeds = itertools.count(int(mx.random.randint(0, 1 << 30).item()))  # pyright: ignore
    for kind in kinds:
        kind.__call__ = _recomputing(plain[kind], seeds)
    try:
        yield
    finally:
        for kind in kinds:
            kind.__call__ = plain[kind]


def _recomputing(call: Callable[..., Any], seeds: Iterator[int]) -> Callable[..., Any]:
    def checkpointed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seed = next(seeds)

        def inner(parameters: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            mx.random.seed(seed)  # the second pass must drop what the first one dropped
            layer.update(parameters)
            return call(layer, *args, **kwargs)

        return mx.checkpoint(inner)(layer.trainable_parameters(), *args, **kwargs)

    return checkpointed
