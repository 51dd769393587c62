"""From logits to tokens: temperature, top-k, top-p, min-p, one inverse-CDF sample a row, and its log-probability.

Inverse CDF: with masses m_v = exp((logit_v − max) / temperature), 0 where filtered, and a uniform u in [0, 1), the
first token whose running sum reaches u · Σ m. So a row's sample does not depend on its batch. `logp` is
the policy's before any filter; the token was sampled with exp(logp − log_kept), which importance correction needs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import NamedTuple

import mlx.core as mx
import numpy as np

# Not on first use, where numpy imports it: its C modules drop the exception of a signal that comes meanwhile.
from numpy.random import Generator, Philox

from backend.config.config import Config
from backend.engine.cpu import exp_nonpositive, row_sums
from backend.engine.device import on_cpu, on_gpu
from backend.engine.graph import evaluate_after
from backend.engine.penalties import IN_COMPLETION, NO_PENALTIES, Penalties, SeenTokens, distinct_tokens, penalised
from backend.sampling.filters import largest, least_inside, masked, nucleus_floor, per_row, row_max, row_sum
from backend.sampling.grammar import Grammar, GrammarState

# The inverse CDF of `backend.sampling.sampler` for a GPU, where a step of few rows is bound by its number of
# kernels: nine of them.


class Sums(NamedTuple):
    """Masses and the sum before each, over the last axis. For a GPU, where a step is bound by its number of kernels."""

    mass: mx.array
    before: mx.array

    @classmethod
    def of(cls, mass: mx.array) -> Sums:
        return cls(mass, mx.cumsum(mass, axis=-1, inclusive=False))

    def part(self, m: int) -> Sums:
        return Sums(part(self.mass, m), part(self.before, m))

    def total(self, shape: tuple[int, ...]) -> mx.array:
        """The sum of all, broadcast to `shape`."""
        return mx.broadcast_to(self.before[..., -1:], shape) + mx.broadcast_to(self.mass[..., -1:], shape)

    def can_be_last(self, target: mx.array) -> mx.array:
        """Where a mass lies whose sum before is below the target: the last of them reaches it. Only indices with mass
        count: a GPU sums in blocks, so running sums may fall by a rounding, and a filtered token must never be sampled.
        """
        return (self.mass > 0) & ((self.before < target) | (self.before <= 0))


def inverse_cdf(masses_MBV: mx.array, uniform_B1: mx.array, width: int) -> tuple[mx.array, Sums]:
    """The first token [B, 1] at which the last item's running sum reaches `uniform` times its total; and the sums [M,
    B, V / width] of blocks of `width` tokens."""
    M, B, V = masses_MBV.shape
    blocks_MBNW = masses_MBV.reshape(M, B, V // width, width)
    sums = Sums.of(blocks_MBNW.sum(axis=-1))
    kept = sums.part(M - 1)
    block_B1, before_B1 = _reaching_block(kept, uniform_B1)
    inside = Sums.of(mx.take_along_axis(part(blocks_MBNW, M - 1), block_B1[:, None], axis=1)[:, 0])
    target_BW = mx.broadcast_to(uniform_B1, (B, width)) * kept.total((B, width)) - before_B1
    token_BW = block_B1 * width + _indices(width)
    return mx.where(inside.can_be_last(target_BW), token_BW, 0).max(axis=-1, keepdims=True), sums


def _reaching_block(sums: Sums, uniform_B1: mx.array) -> tuple[mx.array, mx.array]:
    """[B, 1]: the first block whose running sum reaches `uniform` times the total, and the sum before it."""
    shape = sums.mass.shape
    is_last_BN = sums.can_be_last(mx.broadcast_to(uniform_B1, shape) * sums.total(shape))
    # One maximum for both: floats that are not negative order like their bits, so both are integers.
    is_index = mx.array([True, False]).reshape(2, 1, 1)
    both_2BN = mx.where(is_index, _indices(shape[-1]), sums.before.view(mx.uint32))
    best_2B1 = mx.where(is_last_BN, both_2BN, 0).max(axis=-1, keepdims=True)
    return part(best_2B1, 0), part(best_2B1, 1).view(mx.float32)


def _indices(count: int) -> mx.array:
    return mx.array(np.arange(count, dtype=np.uint32))


def part(array: mx.array, m: int) -> mx.array:
    """array[m] as a view, where mlx would gather."""
    return array[m : m + 1].squeeze(0)


IN_CACHE = 1 << 17  # logits that a CPU samples from together; longer rows go one by one, in its cache


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 takes the likeliest; top_p 1, top_k 0 and min_p 0 filter nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    penalties: Penalties = NO_PENALTIES
    grammar: Grammar | None = None
    without: tuple[int, ...] = ()  # ids that are never sampled: those that stand for a picture

    @classmethod
    def of(cls, config: Config) -> Sampling:
        """The sampling of a run."""
        penalties = Penalties(*config.penalties)
        return cls(config.temperature, config.top_p, config.top_k, config.min_p, penalties, Grammar.of(config))

    @classmethod
    def greedy(cls, config: Config) -> Sampling:
        """The likeliest tokens under the same penalties and grammar."""
        return cls(0.0, penalties=Penalties(*config.penalties), grammar=Grammar.of(config))

    @property
    def has_filters(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


GREEDY = Sampling(temperature=0.0)


class SampledTokens(NamedTuple):
    """One token a row, its log-probability in nats before any filter, and the log of the mass that the filters kept."""

    token_B: mx.array
    logp_B: mx.array
    log_kept_B: mx.array


class ConstrainedTokens(NamedTuple):
    """As `SampledTokens`; `log_held`: log of the mass that the grammar allows, which `log_kept` includes."""

    token_B: mx.array
    logp_B: mx.array
    log_kept_B: mx.array
    log_held_B: mx.array


Sampled = SampledTokens | ConstrainedTokens


def sample_tokens(
    logits_BV: mx.array,
    uniform_B: mx.array,
    sampling: Sampling,
    seen: SeenTokens | None = None,
    mask_BM: mx.array | None = None,
) -> Sampled:
    """One token a row. Log-probabilities are the policy's at `temperature` before any filter (greedy: temperature 1),
    penalised for the tokens `seen`. `mask_BM`: the tokens that a grammar allows, 32 bits to a number. Filters apply
    after temperature and grammar: top-k, then top-p, then min-p."""
    if seen is not None:
        logits_BV, _ = penalised(logits_BV, seen, sampling.penalties)
    if mask_BM is None:
        sample = _sample_without if sampling.without else _sample
        return sample(logits_BV, uniform_B, sampling)
    # A sample of what the grammar allows, by its own largest logit: against the policy's all of it may be 0 in float32.
    logits_BV = logits_BV.astype(mx.float32)
    bits_BMW = (mask_BM[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1  # the lowest first
    is_allowed_BV = bits_BMW.reshape(mask_BM.shape[0], -1)[:, : logits_BV.shape[-1]] > 0
    held_BV = mx.where(is_allowed_BV, logits_BV, -mx.inf)
    token_B, logp_B, log_kept_B = _sample(held_BV, uniform_B, sampling)
    temperature = sampling.temperature or 1.0
    # log Z of all, by the same blocks as the sample's.
    logit_B = _tempered(_at(logits_BV, token_B[:, None]), temperature)[:, 0]
    peak_B1 = row_max(logits_BV)
    total_B = mx.log(row_sum(_mass(logits_BV, mx.broadcast_to(peak_B1, logits_BV.shape), temperature)))[:, 0]
    policy_logp_B = logit_B - _tempered(peak_B1[:, 0], temperature) - total_B
    # Rounding may make the share of a grammar that allows everything larger than 1.
    log_held_B = mx.minimum(policy_logp_B - logp_B, 0.0)
    return ConstrainedTokens(token_B, policy_logp_B, log_kept_B + log_held_B, log_held_B)


def _sample_without(logits_BV: mx.array, uniform_B: mx.array, sampling: Sampling) -> SampledTokens:
    V, temperature = logits_BV.shape[-1], sampling.temperature or 1.0
    left_out = [token for token in sampling.without if token < V]
    is_held_V = mx.array(~np.isin(np.arange(V), left_out))  # pyright: ignore[reportArgumentType]: numpy's type of bool
    token_B, logp_B, log_kept_B = _sample(mx.where(is_held_V, logits_BV, -mx.inf), uniform_B, sampling)
    # log(Z of the others / Z of all) from few numbers: no second pass over the vocabulary.
    log_others_B = _tempered(_at(logits_BV, token_B[:, None]), temperature)[:, 0] - logp_B
    log_left_out_B = mx.logsumexp(_tempered(logits_BV[:, mx.array(left_out)], temperature), axis=-1)
    log_held_B = log_others_B - mx.logaddexp(log_others_B, log_left_out_B)
    return SampledTokens(token_B, logp_B + log_held_B, log_kept_B + log_held_B)


def _sample(logits_BV: mx.array, uniform_B: mx.array, sampling: Sampling) -> SampledTokens:
    B, V = logits_BV.shape
    if on_gpu() and sampling.temperature > 0:
        return _sample_on_gpu(logits_BV, uniform_B, sampling)
    rows = max(1, IN_CACHE // V) if on_cpu() else B
    if rows >= B:
        return _sample_together(logits_BV, uniform_B, sampling)
    parts: list[SampledTokens] = []
    for i in range(0, B, rows):
        # Otherwise mlx would evaluate up to 20 rows in turns, and all of them would be in memory.
        part_BV = evaluate_after(logits_BV[i : i + rows], parts[-1] if parts else [])
        parts.append(_sample_together(part_BV, uniform_B[i : i + rows], sampling))
    return SampledTokens(*(mx.concatenate(list(field)) for field in zip(*parts, strict=True)))


def _sample_together(logits_BV: mx.array, uniform_B: mx.array, sampling: Sampling) -> SampledTokens:
    B, temperature = len(logits_BV), sampling.temperature or 1.0
    top_BK = None
    if sampling.temperature > 0 and 0 < sampling.top_k < logits_BV.shape[-1]:
        top_BK = largest(logits_BV, sampling.top_k)
    peak_B1 = row_max(logits_BV) if top_BK is None else top_BK[:, -1:]
    mass_BV = _mass(logits_BV, peak_B1, temperature)
    if sampling.temperature == 0:
        logp_B = -mx.log(row_sum(mass_BV)[:, 0])
        return SampledTokens(mx.argmax(logits_BV, axis=-1), logp_B, mx.zeros_like(logp_B))
    # Zeros, no renumbering: the running sum passes over them, so token ids stay indices into [V].
    kept_BV = _kept(logits_BV, mass_BV, top_BK, sampling)
    token_B1, kept_sum_B1 = _inverse_cdf(kept_BV, uniform_B[:, None])
    # log π of the policy before any filter divides by the whole mass; without filters `_inverse_cdf` has summed it.
    total_B1 = row_sum(mass_BV) if sampling.has_filters else kept_sum_B1
    # From numpy the zeros are a constant of a compiled step.
    log_kept_B = mx.log(kept_sum_B1 / total_B1)[:, 0] if sampling.has_filters else mx.array(np.zeros(B, np.float32))
    logp_B1 = _tempered(_at(logits_BV, token_B1), temperature) - _tempered(peak_B1, temperature) - mx.log(total_B1)
    return SampledTokens(token_B1[:, 0], logp_B1[:, 0], log_kept_B)


def _sample_on_gpu(logits_BV: mx.array, uniform_B: mx.array, sampling: Sampling) -> SampledTokens:
    (B, V), temperature = logits_BV.shape, sampling.temperature
    top_BK = largest(logits_BV, sampling.top_k) if 0 < sampling.top_k < V else None
    peak_B1 = row_max(logits_BV) if top_BK is None else top_BK[:, -1:]
    mass_BV = _mass(logits_BV, mx.broadcast_to(peak_B1, (B, V)), temperature)
    masses_MBV, is_kept = mass_BV[None], mx.array([False, True]).reshape(2, 1, 1)
    if sampling.has_filters:  # all masses and the kept ones: one kernel makes both, and one sums both
        masses_MBV = mx.where(is_kept, _kept(logits_BV, mass_BV, top_BK, sampling), mass_BV)
    token_B1, sums = inverse_cdf(masses_MBV, uniform_B[:, None], _block_width(V))
    # The log-probability and the log of the kept share in one kernel: the logs of the token's and the kept mass, less
    # the log of the whole mass.
    shape = (2, B, 1)
    logit_2B1, peak_2B1 = (
        _tempered(mx.broadcast_to(x_B1, shape), temperature) for x_B1 in (_at(logits_BV, token_B1), peak_B1)
    )
    log_2B1 = mx.where(is_kept, mx.log(sums.part(len(masses_MBV) - 1).total(shape)), logit_2B1 - peak_2B1)
    log_2B1 = log_2B1 - mx.log(sums.part(0).total(shape))
    return SampledTokens(token_B1[:, 0], part(log_2B1, 0)[:, 0], part(log_2B1, 1)[:, 0])


def _mass(logits_BV: mx.array, peak_B1: mx.array, temperature: float) -> mx.array:
    """exp((logit − peak) / temperature) in float32, at most 1."""
    return exp_nonpositive(_tempered(logits_BV, temperature) - per_row(_tempered(peak_B1, temperature)))


def _tempered(logits: mx.array, temperature: float) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits if temperature == 1 else logits * (1 / temperature)


def _at(values_BV: mx.array, index_B1: mx.array) -> mx.array:
    return mx.take_along_axis(values_BV, index_B1, axis=-1)


def _inverse_cdf(kept_BV: mx.array, uniform_B1: mx.array) -> tuple[mx.array, mx.array]:
    """The first token at which the running sum of the kept masses reaches `uniform` times their sum, and that sum, [B,
    1]. Two levels, blocks of about √V tokens and tokens in a block. For a CPU."""
    B, V = kept_BV.shape
    blocks_BNW = kept_BV.reshape(B, -1, _block_width(V))
    sum_BN = row_sums(blocks_BNW)[..., 0]
    kept_sum_B1 = sum_BN.sum(axis=-1, keepdims=True)
    target_B1 = uniform_B1 * kept_sum_B1
    block_B1, before_B1 = _first_reaching(sum_BN, target_B1)
    inside_BW = mx.take_along_axis(blocks_BNW, block_B1[..., None], axis=1)[:, 0]
    index_B1, _ = _first_reaching(inside_BW, target_B1 - before_B1)
    return block_B1 * _block_width(V) + index_B1, kept_sum_B1


def _first_reaching(mass_BN: mx.array, target_B1: mx.array) -> tuple[mx.array, mx.array]:
    """[B, 1]: the first index at which the running sum reaches the target, and the sum before it. Only indices with
    mass count; a target above every edge takes the highest."""
    before_BN = mx.cumsum(mass_BN, axis=-1, inclusive=False)
    # Every edge at or beyond the target is 0, the others are negative; argmax takes the first of equal maxima.
    short_BN = mx.where(mass_BN > 0, mx.minimum(before_BN + mass_BN - target_B1, 0), -mx.inf)
    index_B1 = mx.argmax(short_BN, axis=-1, keepdims=True)
    return index_B1, _at(before_BN, index_B1)


@cache
def _block_width(V: int) -> int:
    """The largest divisor of V up to √V."""
    return next(width for width in range(math.isqrt(V), 0, -1) if V % width == 0)


def _kept(logits_BV: mx.array, mass_BV: mx.array, top_BK: mx.array | None, sampling: Sampling) -> mx.array:
    """[B, V]: the masses, 0 where a filter removes the token. `top_BK`: the top-k logits in rising order."""
    keep_BV = []
    if top_BK is not None:
        # By logit: a mass that another kernel computed from the same logit may differ by a rounding on a GPU.
        floor_B1 = top_BK[:, :1]
        if sampling.top_p < 1:  # on what top-k leaves
            floor_B1 = least_inside(top_BK, _mass(top_BK, top_BK[:, -1:], sampling.temperature), sampling.top_p)
        keep_BV.append(logits_BV >= per_row(floor_B1))
    elif sampling.top_p < 1:
        keep_BV.append(mass_BV >= per_row(nucleus_floor(mass_BV, sampling.top_p)))
    # min-p keeps p(v) ≥ min_p · max p (arXiv:2407.01082); in masses max is 1, and normalisation cancels.
    if sampling.min_p > 0:
        keep_BV.append(mass_BV >= sampling.min_p)
    return reduce(masked, keep_BV, mass_BV)


def keyed_uniforms(seed: int, keys: list[tuple[int, ...]], count: int) -> np.ndarray:
    """[len(keys), count] float32 in [0, 1): row i depends on `seed` and keys[i] alone (Philox)."""
    rows: list[np.ndarray] = []
    for key in keys:
        # Not Python's hash(), which has 64 bits and may differ between versions; Philox takes a key of 128.
        digest = hashlib.blake2b(repr((seed, key)).encode(), digest_size=16).digest()
        generator = Generator(Philox(key=int.from_bytes(digest, "little")))
        rows.append(generator.random(count, np.float32))
    return np.stack(rows)


Agree = Callable[[Sequence[mx.array]], Sequence[mx.array]]  # rank 0's values of arrays that every rank has computed


def alone(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
    return arrays


PROMPT_COLUMNS = 64  # a prompt's distinct tokens take a multiple of these: every width is a trace


class TokenHistory(NamedTuple):
    """Each row's tokens so far, [B, W]: its prompt's distinct ones, then its completion. `next_B`: the next column."""

    token_BW: mx.array
    weight_BW: mx.array
    next_B: mx.array

    @classmethod
    def of_prompts(cls, prompt: SeenTokens, max_tokens: int, written: Sequence[Sequence[int]] = ()) -> TokenHistory:
        """`written`: each row's completion so far."""
        B, U = prompt.token_NL.shape
        token_BW, weight_BW = (mx.pad(array, [(0, 0), (0, max_tokens)]) for array in prompt)
        for row, tokens in enumerate(written):
            token_BW[row, U : U + len(tokens)] = mx.array(list(tokens), mx.int32)
            weight_BW[row, U : U + len(tokens)] = IN_COMPLETION
        next_B = [U + len(tokens) for tokens in written] or [U] * B
        return cls(token_BW, weight_BW, mx.array(next_B, mx.int32))

    @property
    def seen(self) -> SeenTokens:
        return SeenTokens(self.token_BW, self.weight_BW)

    def with_token(self, token_B: mx.array) -> TokenHistory:
        column_B1 = mx.minimum(self.next_B, self.token_BW.shape[1] - 1)[:, None]
        weight_B1 = mx.full(column_B1.shape, IN_COMPLETION, mx.int32)
        return TokenHistory(
            mx.put_along_axis(self.token_BW, column_B1, token_B[:, None].astype(mx.int32), axis=1),
            mx.put_along_axis(self.weight_BW, column_B1, weight_B1, axis=1),
            self.next_B + 1,
        )


class SamplingState:
    """Samples the tokens of completions numbered from 0, `group_size` for each prompt. Call `first` for completions
    that join, `keep` when rows leave, and for each step run a compiled one with `state` and pass its results to
    `results`, or pass logits to `next`."""

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[list[int]] = (),
        group_size: int = 1,
        max_tokens: int = 0,
        held: GrammarState | None = None,
        agree: Agree = alone,
    ) -> None:
        self.sampling, self.held, self._agree = sampling, held, agree
        self._group_size, self._max_tokens = group_size, max_tokens
        self._prompts = distinct_tokens(list(prompts), PROMPT_COLUMNS) if sampling.penalties else None
        self._history: TokenHistory | None = None

    def first(
        self, index: np.ndarray, logits_BV: mx.array, uniform_B: mx.array, written: Sequence[Sequence[int]] = ()
    ) -> Sampled:
        """The next tokens of the completions `index`, which begin or go on after their `written` tokens."""
        history = None
        if self._prompts is not None:
            row_B = mx.array(index // self._group_size)
            history = TokenHistory.of_prompts(
                SeenTokens(*(array[row_B] for array in self._prompts)), self._max_tokens, written
            )
            others = [] if self._history is None else [self._history]
            self._history = TokenHistory(*(mx.concatenate(list(parts)) for parts in zip(*others, history, strict=True)))
        return self._drawn(index, logits_BV, uniform_B, history)

    def next(self, index: np.ndarray, token_B: mx.array, logits_BV: mx.array, uniform_B: mx.array) -> Sampled:
        """The tokens after `token_B`, from the logits after it. A grammar waits for the tokens, not for the logits."""
        if self._history is not None:
            self._history = self._history.with_token(token_B)
        if self.held is not None:
            self.held.read(index, np.array(token_B))
        return self._drawn(index, logits_BV, uniform_B, self._history)

    def keep(self, rows: np.ndarray) -> None:
        """Keep these rows of the batch, in this order."""
        if self._history is not None:
            self._history = TokenHistory(*(array[mx.array(rows)] for array in self._history)) if len(rows) else None

    @property
    def state(self) -> tuple[mx.array, ...]:
        """Further arguments of a compiled step: the history, where tokens are penalised."""
        return tuple(self._history) if self._history is not None and self.held is None else ()

    def results(
        self, results: Sequence[mx.array], index: np.ndarray, token_B: mx.array, uniform_B: mx.array
    ) -> Sampled:
        """The tokens of a compiled step (`step_results`), which returns logits where output is constrained."""
        if self.held is not None:
            return self.next(index, token_B, results[0], uniform_B)
        if self._history is not None:
            self._history = TokenHistory(*results[3:])
        return SampledTokens(*results[:3])

    def _drawn(
        self, index: np.ndarray, logits_BV: mx.array, uniform_B: mx.array, history: TokenHistory | None
    ) -> Sampled:
        seen = None if history is None else history.seen
        mask_BM = None if self.held is None else self.held.masks(index)
        sampled = sample_tokens(logits_BV, uniform_B, self.sampling, seen, mask_BM)
        sampled = type(sampled)(*self._agree(sampled))
        mx.async_eval(*sampled)
        return sampled


def step_results(
    logits_BV: mx.array,
    token_B: mx.array,
    uniform_B: mx.array,
    sampling: Sampling,
    history: tuple[mx.array, ...],
    agree: Agree = alone,
) -> tuple[mx.array, ...]:
    """The result of a compiled step for `SamplingState.results`: the sampled tokens, and the new history if any."""
    if not history:
        return tuple(agree(sample_tokens(logits_BV, uniform_B, sampling)))
    now = TokenHistory(*history).with_token(token_B)
    return (*agree(sample_tokens(logits_BV, uniform_B, sampling, now.seen)), *now)
