"""Penalties on tokens that a sequence already has, as vLLM and Hugging Face define them, for sampling and learning
alike. For logits z before the temperature and a token v

    in prompt or completion:    z_v ← z_v / r  where z_v > 0,  else  z_v · r        repetition (CTRL, arXiv:1909.05858)
    n times in the completion:  z_v ← z_v − f · n − p                               frequency and presence

The penalised distribution is the policy. A position costs its length, not the vocabulary, and the result is the same on
every run. Letters: N positions, L columns of tokens that may be in the sequence, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

# weights of a column: a prompt's distinct tokens have one each, a completion's one each time
IN_PROMPT, IN_COMPLETION = 1, 2


@dataclass(frozen=True, slots=True)
class Penalties:
    """The defaults change nothing."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __bool__(self) -> bool:
        return self != NO_PENALTIES


NO_PENALTIES = Penalties()


class SeenTokens(NamedTuple):
    """The tokens before each position. `weight`: IN_PROMPT, IN_COMPLETION, or 0 where the column does not count."""

    token_NL: mx.array
    weight_NL: mx.array


def penalised(logits_NV: mx.array, seen: SeenTokens, penalties: Penalties) -> tuple[mx.array, mx.array]:
    """(float32 logits after the penalties [N, V], their slopes ∂ z′ / ∂ z at the columns of `seen` [N, L])."""
    logits_NV = logits_NV.astype(mx.float32)
    # IN_PROMPT where the column's token is in the prompt, plus IN_COMPLETION each time it is in the completion.
    row_N1, zeros_NV = mx.arange(seen.token_NL.shape[0])[:, None], mx.zeros(logits_NV.shape, mx.int32)
    count_NV = zeros_NV.at[row_N1, seen.token_NL].add(seen.weight_NL)
    count_NL = mx.take_along_axis(count_NV, seen.token_NL, axis=-1)
    before_NL = mx.take_along_axis(logits_NV, seen.token_NL, axis=-1)
    repetition = penalties.repetition
    slope_NL = mx.where(count_NL > 0, mx.where(before_NL > 0, 1 / repetition, repetition), 1.0)
    times_NL = count_NL // IN_COMPLETION
    additive_NL = penalties.frequency * times_NL + penalties.presence * (times_NL > 0)
    after_NL = before_NL * slope_NL - additive_NL
    return mx.put_along_axis(logits_NV, seen.token_NL, after_NL, axis=-1), slope_NL


def in_unpenalised(gradient_NV: mx.array, seen: SeenTokens, slope_NL: mx.array) -> mx.array:
    """The gradient in the logits before the penalties."""
    at_NL = mx.take_along_axis(gradient_NV, seen.token_NL, axis=-1)
    return mx.put_along_axis(gradient_NV, seen.token_NL, at_NL * slope_NL, axis=-1)


def penalised_with_autodiff(logits_NV: mx.array, seen: SeenTokens, penalties: Penalties) -> mx.array:
    """As `penalised`, differentiable: autodiff of its `put_along_axis` would count a token once per column."""
    constant_NV = mx.stop_gradient(logits_NV.astype(mx.float32))
    after_NV, slope_NL = penalised(constant_NV, seen, penalties)
    slope_NV = in_unpenalised(mx.ones_like(constant_NV), seen, slope_NL)
    return logits_NV.astype(mx.float32) * slope_NV + (after_NV - constant_NV * slope_NV)


@dataclass(frozen=True, slots=True)
class CompletionHistory:
    """The tokens before every position of some completions: their prompts' distinct tokens [B, U], and the completions
    [B, T]. `position_N`: flat indices into [B, T]."""

    penalties: Penalties
    prompt: SeenTokens
    completion_BT: mx.array
    position_N: mx.array

    def before(self, span: slice) -> SeenTokens:
        T = self.completion_BT.shape[1]
        position_n = self.position_N[span]
        row_n, t_n1 = position_n // T, (position_n % T)[:, None]
        weight_nT = (mx.arange(T)[None] < t_n1).astype(mx.int32) * IN_COMPLETION
        return SeenTokens(
            mx.concatenate([self.prompt.token_NL[row_n], self.completion_BT[row_n]], axis=1),
            mx.concatenate([self.prompt.weight_NL[row_n], weight_nT], axis=1),
        )


def distinct_tokens(prompts: list[list[int]], multiple: int = 1) -> SeenTokens:
    """Each prompt's distinct tokens, in as many columns as the longest needs, rounded up to a multiple."""
    distinct = [np.unique(np.array(prompt, np.int32)) for prompt in prompts]
    width = -(-max([1, *map(len, distinct)]) // multiple) * multiple
    token_PU = np.zeros((len(prompts), width), np.int32)
    weight_PU = np.zeros((len(prompts), width), np.int32)
    for row, tokens in enumerate(distinct):
        token_PU[row, : len(tokens)], weight_PU[row, : len(tokens)] = tokens, IN_PROMPT
    return SeenTokens(mx.array(token_PU), mx.array(weight_PU))
