"""What the next token of a row depends on besides the model's logits and a random number: the tokens before it, where they are penalised,
and the state of a grammar that the output is held to. A `Drawing` keeps both.

Without penalties and without a grammar it keeps nothing, and a token is drawn as by `sample_tokens` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from backend.engine.penalties import IN_COMPLETION, SeenTokens, distinct_tokens
from backend.sampling.grammar import GrammarState
from backend.sampling.sampler import Sampled, SampledTokens, Sampling, sample_tokens

Agree = Callable[[Sequence[mx.array]], Sequence[mx.array]]
"""Where several ranks compute one model: what all of them go on with of arrays that each has computed (`Policy.broadcast_from_rank0`)."""


def alone(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
    """One rank goes on with what it has computed."""
    return arrays


PROMPT_COLUMNS = 64
"""A prompt's distinct tokens take a multiple of these, because every width is a trace of the compiled step."""


class TokenHistory(NamedTuple):
    """The tokens of each row so far, [B, W]: its prompt's distinct ones, then its completion. `next_B` is the column of the next."""

    token_BW: mx.array
    weight_BW: mx.array
    next_B: mx.array

    @classmethod
    def of_prompts(cls, prompt: SeenTokens, max_tokens: int) -> TokenHistory:
        """Before the first token, with room for `max_tokens`."""
        B, U = prompt.token_NL.shape
        token_BW, weight_BW = (mx.pad(array, [(0, 0), (0, max_tokens)]) for array in prompt)
        return cls(token_BW, weight_BW, mx.full(B, U, mx.int32))

    @property
    def seen(self) -> SeenTokens:
        return SeenTokens(self.token_BW, self.weight_BW)

    def with_token(self, token_B: mx.array) -> TokenHistory:
        """With one token more in every row. A row that has ended runs on beside the others, and overwrites its last column."""
        column_B1 = mx.minimum(self.next_B, self.token_BW.shape[1] - 1)[:, None]
        weight_B1 = mx.full(column_B1.shape, IN_COMPLETION, mx.int32)
        return TokenHistory(
            mx.put_along_axis(self.token_BW, column_B1, token_B[:, None].astype(mx.int32), axis=1),
            mx.put_along_axis(self.weight_BW, column_B1, weight_B1, axis=1),
            self.next_B + 1,
        )


class SamplingState:
    """Draws the tokens of completions that are numbered from 0, `group_size` for each prompt.

    A batch calls `first` for the completions that join it, behind its other rows, `keep` when rows leave, and for each step either
    runs a compiled one with `state` and passes what it returns to `results`, or passes logits to `next`.
    """

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

    def first(self, index: np.ndarray, logits_BV: mx.array, uniform_B: mx.array) -> Sampled:
        """The first tokens of the completions `index`, from the logits after their prompts."""
        history = None
        if self._prompts is not None:
            row_B = mx.array(index // self._group_size)
            history = TokenHistory.of_prompts(SeenTokens(*(array[row_B] for array in self._prompts)), self._max_tokens)
            others = [] if self._history is None else [self._history]
            self._history = TokenHistory(*(mx.concatenate(list(parts)) for parts in zip(*others, history, strict=True)))
        return self._drawn(index, logits_BV, uniform_B, history)

    def next(self, index: np.ndarray, token_B: mx.array, logits_BV: mx.array, uniform_B: mx.array) -> Sampled:
        """The tokens after `token_B`, from the logits after it. A grammar reads the tokens: that waits for them, but not for the logits."""
        if self._history is not None:
            self._history = self._history.with_token(token_B)
        if self.held is not None:
            self.held.read(index, np.array(token_B))
        return self._drawn(index, logits_BV, uniform_B, self._history)

    def keep(self, rows: np.ndarray) -> None:
        """Keep these rows of the batch, in this order."""
        if self._history is not None:
            self._history = TokenHistory(*(array[mx.array(rows)] for array in self._history)) if len(rows) else None

    # ── compiled steps ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> tuple[mx.array, ...]:
        """Further arguments of a compiled step: the history, where tokens are penalised in it."""
        return tuple(self._history) if self._history is not None and self.held is None else ()

    def results(
        self, results: Sequence[mx.array], index: np.ndarray, token_B: mx.array, uniform_B: mx.array
    ) -> Sampled:
        """The tokens of a compiled step, which returns them and the new history (`step_results`), or logits where output is held."""
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
    """What a compiled step returns for `Drawing.results`: the sampled tokens, and the new history where there is one."""
    if not history:
        return tuple(agree(sample_tokens(logits_BV, uniform_B, sampling)))
    now = TokenHistory(*history).with_token(token_B)
    return (*agree(sample_tokens(logits_BV, uniform_B, sampling, now.seen)), *now)
