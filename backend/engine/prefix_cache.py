"""What a layer remembers while learning reads: prompts first, once each; then completions, which look back at them.

Both memories speak mlx-lm's cache protocol, so that any model's code takes them; where its attention is the usual one, it is
given what they saw without copies (`seen`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from backend.engine.attention import PromptKV


class Seen(NamedTuple):
    """Keys and values of the tokens that look, [B, heads, N, d], and what they look back at."""

    keys: mx.array
    values: mx.array
    prompts: PromptKV | None = None


class PrefixRecorder:
    """A layer's memory while prompts are read: it keeps their keys and values, [P, heads, K, d], with gradient. Padding on the
    right is never looked at by what comes before it."""

    offset = 0

    def __init__(self) -> None:
        self.keys: mx.array
        self.values: mx.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        _refuse_window(window_size)
        if return_array:
            return mx.arange(N)[:, None] >= mx.arange(N)[None]
        return None if N == 1 else "causal"

    def seen(self, keys: mx.array, values: mx.array, mask: Any) -> Seen | None:
        """What is looked at, if these are the keys and the mask that were given out."""
        ours = keys is self.keys and values is self.values and _is_causal(mask, keys)
        return Seen(keys, values) if ours else None


@dataclass(frozen=True, slots=True)
class PrefixMask:
    """What the rows of a batch may look at: their prompt (of `length_B` tokens) and what they have said themselves."""

    prompt_B: mx.array
    each: int
    """Rows of every prompt, one after another; 0 where prompts have unequally many."""
    length_B: mx.array | int
    """Tokens of each row's prompt; one number where they are all alike, and nothing needs to be hidden."""
    masks: list[mx.array] = field(default_factory=list)
    """Those that were given out."""

    def spread(self, x_P: mx.array) -> mx.array:
        """What belongs to a prompt, for each of its rows. Repeating is cheaper than looking up, in the backward pass too."""
        if self.each == 1:
            return x_P
        return mx.repeat(x_P, self.each, axis=0) if self.each else x_P[self.prompt_B]

    def prompts(self, keys: mx.array, values: mx.array) -> PromptKV:
        """For rows one after another nothing is repeated."""
        length_B = None if isinstance(self.length_B, int) else self.length_B
        if self.each:
            return PromptKV(keys, values, None if length_B is None else length_B[:: self.each])
        return PromptKV(self.spread(keys), self.spread(values), length_B)

    def mask(self, N: int, K: int, as_array: bool) -> Any:
        """For N tokens after prompts of width K."""
        if isinstance(self.length_B, int) and not as_array:
            return None if N == 1 else "causal"
        own_NS = mx.arange(N)[:, None] >= mx.arange(N)[None]
        prompt_BK = mx.arange(K)[None] < mx.array(self.length_B).reshape(-1, 1)
        B = prompt_BK.shape[0]
        sides = [mx.broadcast_to(prompt_BK[:, None, None], (B, 1, N, K)), mx.broadcast_to(own_NS, (B, 1, N, N))]
        self.masks.append(mx.concatenate(sides, axis=-1))
        return self.masks[-1]


class PrefixReader:
    """A layer's memory while completions are read after their prompts, which came before: [P, heads, K, d]."""

    def __init__(self, keys: mx.array, values: mx.array, sight: PrefixMask) -> None:
        self.keys, self.values, self.sight = keys, values, sight
        self.offset = sight.length_B
        self._own: tuple[mx.array, mx.array]
        self._given: tuple[mx.array, mx.array]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What is never asked for is never put together: arrays are lazy."""
        spread = self.sight.spread
        self._own = keys, values
        self._given = tuple(  # pyright: ignore
            mx.concatenate([spread(before), now], axis=2) for before, now in ((self.keys, keys), (self.values, values))
        )
        return self._given

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        _refuse_window(window_size)
        return self.sight.mask(N, self.keys.shape[2], return_array)

    def seen(self, keys: mx.array, values: mx.array, mask: Any) -> Seen | None:
        """What is looked at, if these are the keys and the mask that were given out."""
        ours = keys is self._given[0] and values is self._given[1]
        known = any(mask is one for one in self.sight.masks) or _is_causal(mask, self._own[0])
        return Seen(*self._own, self.sight.prompts(self.keys, self.values)) if ours and known else None


def _is_causal(mask: Any, keys: mx.array) -> bool:
    """Whether it is the mask without numbers that lets each of these tokens look at what came before it."""
    return mask == "causal" if isinstance(mask, str) else mask is None and keys.shape[2] == 1


def _refuse_window(window_size: int | None) -> None:
    if window_size is not None:
        raise ValueError(
            "A sliding window looks back from each token's own place, which a shared prompt does not keep."
        )
