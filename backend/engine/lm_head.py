"""From hidden states to log-probabilities and entropies, without ever holding [tokens, vocabulary] for all tokens.

The vocabulary is worked out a chunk of tokens at a time, in the forward and in the backward pass. Knows the output layer of a
model and arrays; no prompts, no padding, no loss. Letters: N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from backend.engine.cpu.vector_exp import exp_below_zero
from backend.engine.evaluation_order import evaluate_after

Exp = Callable[[mx.array], mx.array]
Project = Callable[[mx.array], mx.array]
"""Hidden states [n, H] → logits [n, V]."""


class TokenScores(NamedTuple):
    """log π of each target in nats, and the entropy of each distribution in nats, both [N] float32."""

    logp_N: mx.array
    entropy_N: mx.array


def token_logps(
    project: Project,
    head: nn.Module | None,
    hidden_NH: mx.array,
    target_N: mx.array,
    *,
    temperature: float,
    chunk: int | None = None,
    learns: bool = True,
    entropy_gradient: bool = False,
) -> TokenScores:
    """What the distributions after `hidden_NH` say of `target_N`. Logits are divided by `temperature` in float32.

    `head` is the module that `project` uses, None where hidden states *are* logits. `chunk`: tokens at a time (None: all).
    Without `learns` there is no gradient, and none is prepared. The entropy carries one only with `entropy_gradient`.
    """
    size = chunk or hidden_NH.shape[0]
    if not learns:
        return _joined(_looked(project, x, t, temperature) for x, t in _chunks(hidden_NH, target_N, size))
    if head is None:
        return _joined(
            _look(project, x, t, temperature, entropy_gradient, mx.exp) for x, t in _chunks(hidden_NH, target_N, size)
        )
    score = _learning if tree_flatten(head.trainable_parameters()) else _frozen
    return score(project, head, hidden_NH, target_N, temperature, size, entropy_gradient)


# ── one chunk ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Mass(NamedTuple):
    """A chunk's softmax before it is divided: `centred` = logits / temperature − their peak; `mass` = exp(centred)."""

    centred_NV: mx.array
    mass_NV: mx.array
    total_N1: mx.array

    def scored(self, target_N: mx.array) -> TokenScores:
        log_total_N = mx.log(self.total_N1[:, 0])
        logp_N = mx.take_along_axis(self.centred_NV, target_N[:, None], axis=-1)[:, 0] - log_total_N
        # A product of rows and columns needs no second array of the vocabulary's size.
        crossed_N = (self.mass_NV[:, None, :] @ self.centred_NV[:, :, None])[:, 0, 0]
        return TokenScores(logp_N, log_total_N - crossed_N / self.total_N1[:, 0])

    def logp_slope(self, target_N: mx.array, along_N: mx.array | float) -> mx.array:
        """`along_N` × ∂ logp / ∂ scaled logits, which is onehot − p: [N, V]."""
        along_N1 = mx.broadcast_to(along_N, target_N.shape)[:, None]
        falling_NV = self.mass_NV * (-along_N1 / self.total_N1)
        at_target_N1 = mx.take_along_axis(falling_NV, target_N[:, None], axis=-1)
        return mx.put_along_axis(falling_NV, target_N[:, None], at_target_N1 + along_N1, axis=-1)

    def entropy_slope(self, entropy_N: mx.array, along_N: mx.array | float) -> mx.array:
        """`along_N` × ∂ entropy / ∂ scaled logits, which is −p (log p + entropy): [N, V]."""
        along_N1 = mx.broadcast_to(along_N, entropy_N.shape)[:, None]
        raised_NV = self.centred_NV + (entropy_N[:, None] - mx.log(self.total_N1))
        return raised_NV * self.mass_NV * (-along_N1 / self.total_N1)


def _mass(project: Project, hidden_NH: mx.array, temperature: float, exp: Exp = exp_below_zero) -> _Mass:
    scaled_NV = project(hidden_NH).astype(mx.float32)
    if temperature != 1:
        scaled_NV = scaled_NV * (1 / temperature)
    centred_NV = scaled_NV - mx.stop_gradient(scaled_NV.max(axis=-1, keepdims=True))
    mass_NV = exp(centred_NV)  # the one dear pass: softmax, log-probability, entropy and slopes all come from it
    return _Mass(centred_NV, mass_NV, mass_NV.sum(axis=-1, keepdims=True))


def _look(
    project: Project,
    hidden_NH: mx.array,
    target_N: mx.array,
    temperature: float,
    entropy_gradient: bool = False,
    exp: Exp = exp_below_zero,
) -> TokenScores:
    scored = _mass(project, hidden_NH, temperature, exp).scored(target_N)
    return scored if entropy_gradient else scored._replace(entropy_N=mx.stop_gradient(scored.entropy_N))


def _looked(project: Project, hidden_NH: mx.array, target_N: mx.array, temperature: float) -> TokenScores:
    """Worked out at once, as nothing waits for a gradient: mlx would lay out several chunks' arrays ahead of the device."""
    scored = _look(project, hidden_NH, target_N, temperature)
    mx.eval(scored)
    return scored


def _chunks(hidden_NH: mx.array, target_N: mx.array, size: int) -> Iterator[tuple[mx.array, mx.array]]:
    for start in range(0, hidden_NH.shape[0], size):
        yield hidden_NH[start : start + size], target_N[start : start + size]


def _joined(parts: Iterator[TokenScores]) -> TokenScores:
    made = list(parts)
    return (
        made[0]
        if len(made) == 1
        else TokenScores(*(mx.concatenate(list(column)) for column in zip(*made, strict=True)))
    )


# ── a head that stands still ─────────────────────────────────────────────────────────────────────────────────────────


def _frozen(
    project: Project,
    head: nn.Module,
    hidden_NH: mx.array,
    target_N: mx.array,
    temperature: float,
    size: int,
    entropy_gradient: bool,
) -> TokenScores:
    """A token's log-probability hangs on its own hidden state alone, so its slope in it, [N, H], is worked out while the logits
    are there: the backward pass only scales it by what comes from the loss, and no logits are made twice."""

    @mx.custom_function
    def score(hidden_NH: mx.array) -> tuple[mx.array, ...]:
        made: list[tuple[mx.array, ...]] = []
        for x, t in _chunks(hidden_NH, target_N, size):
            x = evaluate_after(x, list(made[-1]) if made else [])
            mass = _mass(project, x, temperature)
            scored = mass.scored(t)
            slopes = [mass.logp_slope(t, 1 / temperature)]
            if entropy_gradient:
                slopes.append(mass.entropy_slope(scored.entropy_N, 1 / temperature))
            made.append((*scored, *(_pulled_back(project, [x], slope)[0] for slope in slopes)))
        return tuple(mx.concatenate(list(column)) for column in zip(*made, strict=True))

    @score.vjp
    def score_vjp(_primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        slopes = outputs[2:]
        pulled = [along[:, None] * slope for along, slope in zip(cotangents, slopes, strict=False)]
        return sum(pulled[1:], pulled[0]).astype(hidden_NH.dtype)

    logp_N, entropy_N, *_ = score(hidden_NH)  # pyright: ignore[reportGeneralTypeIssues]
    return TokenScores(logp_N, entropy_N if entropy_gradient else mx.stop_gradient(entropy_N))


# ── a head that learns ───────────────────────────────────────────────────────────────────────────────────────────────


def _learning(
    project: Project,
    head: nn.Module,
    hidden_NH: mx.array,
    target_N: mx.array,
    temperature: float,
    size: int,
    entropy_gradient: bool,
) -> TokenScores:
    """The head's own gradient needs the slopes of all tokens at once, so the backward pass works the logits out again, a chunk
    at a time, and adds the chunks' gradients up."""
    names, weights = zip(*tree_flatten(head.trainable_parameters()), strict=True)

    def projected(x: mx.array, *weights: mx.array) -> mx.array:
        mine = head.trainable_parameters()
        head.update(tree_unflatten(list(zip(names, weights, strict=True))))
        try:
            return project(x)
        finally:
            head.update(mine)

    @mx.custom_function
    def score(hidden_NH: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
        made: list[tuple[mx.array, ...]] = []
        for x, t in _chunks(hidden_NH, target_N, size):
            x = evaluate_after(x, list(made[-1]) if made else [])
            made.append(tuple(_look(lambda x: projected(x, *weights), x, t, temperature)))
        return tuple(mx.concatenate(list(column)) for column in zip(*made, strict=True))

    @score.vjp
    def score_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        hidden_NH, *weights = primals
        pulled: list[mx.array] = []
        total: list[mx.array] = []
        for start in range(0, hidden_NH.shape[0], size):
            here = slice(start, start + size)
            x = evaluate_after(hidden_NH[here], pulled[-1:] + total)
            mass = _mass(lambda x: projected(x, *weights), x, temperature)
            along_logp_n, along_entropy_n = (along[here] / temperature for along in cotangents)
            slope_NV = mass.logp_slope(target_N[here], along_logp_n)
            if entropy_gradient:
                slope_NV = slope_NV + mass.entropy_slope(outputs[1][here], along_entropy_n)
            back, *grads = _pulled_back(projected, [x, *weights], slope_NV)
            pulled.append(back)
            total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
        return (mx.concatenate(pulled), *total)

    logp_N, entropy_N = score(hidden_NH, *weights)  # pyright: ignore[reportGeneralTypeIssues]
    return TokenScores(logp_N, entropy_N if entropy_gradient else mx.stop_gradient(entropy_N))


def _pulled_back(project: Callable[..., mx.array], inputs: list[mx.array], slope_NV: mx.array) -> list[mx.array]:
    """A slope in the logits, taken back through the head to what it was made from."""
    dtype = project(*inputs).dtype  # nothing is worked out for this: arrays are lazy
    return mx.vjp(project, inputs, [slope_NV.astype(dtype)])[1]
