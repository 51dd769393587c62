"""KV caches of the training pass, in mlx-lm's cache protocol: each prompt is prefilled once, and the completions of its
group attend to it.

    prefill       tokens [P, K], right-padded     PrefixRecorder keeps keys and values [P, J, K, d], with gradient
    completions   tokens [B, T]                   PrefixReader lets B rows attend to their prompt's, then to their own

Autodiff sums a prompt's dK and dV over its rows. A completion starts at `offset`, its own prompt's length. Only for
layers that keep all keys and values. Patched attention asks `attention_inputs` for the two segments and copies no
prompt; other models get concatenated arrays [B, J, K + T, d].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from backend.engine.attention import PromptKV
from backend.engine.gathers import gather_with_repeats


class AttentionInputs(NamedTuple):
    """Keys and values of the rows' own tokens, [B, J, N, d], and those of their prompts."""

    keys: mx.array
    values: mx.array
    prompts: PromptKV | None = None


class PrefixRecorder:
    """A layer's cache while prompts are prefilled: keeps keys and values [P, J, K, d] in the graph."""

    # mlx-lm's layers read `offset` for the rotary embedding before they hand keys over. Keys arrive rotated, so a
    # prompt's positions stay right for every row that attends to it.
    offset = 0

    def __init__(self) -> None:
        self.keys: mx.array
        self.values: mx.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        # Not copied and not evaluated: the completions' gradient flows through these nodes into the prefill.
        self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For layers that use those of an earlier one."""
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        _refuse_window(window_size)
        if return_array:
            return mx.arange(N)[:, None] >= mx.arange(N)[None]
        return None if N == 1 else "causal"

    def attention_inputs(self, keys: mx.array, values: mx.array, mask: Any) -> AttentionInputs | None:
        """Inputs of blocked attention; None if the model has changed what this cache returned."""
        # By identity, which costs nothing; comparing values would evaluate the graph.
        unchanged = keys is self.keys and values is self.values and _is_causal(mask, keys)
        return AttentionInputs(keys, values) if unchanged else None


class WholeRowCache(PrefixRecorder):
    """For whole rows of a model whose layers find each other's keys and values in caches alone (gemma3n)."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return create_attention_mask(mx.zeros((1, N, 1)), None, window_size, return_array)


@dataclass(frozen=True, slots=True)
class PrefixMask:
    """The prompt that each row attends to, and its length. One object for all layers of a pass."""

    prompt_B: mx.array
    rows_per_prompt: int  # if they are consecutive and equally many; else 0
    length_B: mx.array | int  # tokens of each row's prompt; a number where all are equal
    issued_masks: list[mx.array] = field(default_factory=list)  # mask arrays returned so far, to recognise them

    def repeat_for_rows(self, x_P: mx.array) -> mx.array:
        """[P, …] → [B, …]. `mx.repeat` is cheaper than a gather, backwards too."""
        if self.rows_per_prompt == 1:
            return x_P
        return (
            mx.repeat(x_P, self.rows_per_prompt, axis=0)
            if self.rows_per_prompt
            else gather_with_repeats(x_P, self.prompt_B)
        )

    def prompts(self, keys: mx.array, values: mx.array) -> PromptKV:
        """Keys and values for blocked attention: shared by consecutive rows, else repeated for each."""
        # An integer means equal lengths, so there is no padding to mask.
        length_B = None if isinstance(self.length_B, int) else self.length_B
        if self.rows_per_prompt:
            return PromptKV(keys, values, None if length_B is None else length_B[:: self.rows_per_prompt])
        # Uneven groups (rows were split by length) have no [P, B / P] shape: one copy of the prompt for each row.
        return PromptKV(self.repeat_for_rows(keys), self.repeat_for_rows(values), length_B)

    def mask(self, N: int, K: int, as_array: bool) -> Any:
        """The mask of N completion tokens after prompts of width K: [B, 1, N, K + N], or "causal"."""
        # mlx aligns "causal" at the lower right: query i of N sees keys up to K + i, the whole prompt included.
        if isinstance(self.length_B, int) and not as_array:
            return None if N == 1 else "causal"
        own_NS = mx.arange(N)[:, None] >= mx.arange(N)[None]
        # One length for all rows gives B = 1 below, which broadcasts over the rows.
        prompt_BK = mx.arange(K)[None] < mx.array(self.length_B).reshape(-1, 1)
        B = prompt_BK.shape[0]
        segments = [mx.broadcast_to(prompt_BK[:, None, None], (B, 1, N, K)), mx.broadcast_to(own_NS, (B, 1, N, N))]
        self.issued_masks.append(mx.concatenate(segments, axis=-1))
        return self.issued_masks[-1]


class PrefixReader:
    """A layer's cache in the pass over completions, which attend to their prompt's keys and values [P, J, K, d] and
    their own."""

    def __init__(self, keys: mx.array, values: mx.array, prefix_mask: PrefixMask) -> None:
        self.keys, self.values, self.prefix_mask = keys, values, prefix_mask
        # Each row's first token comes right after its own prompt, not after the padded width K. [B] or one number for
        # all; mlx's rope takes both.
        self.offset = prefix_mask.length_B
        self._own: tuple[mx.array, mx.array]
        self._issued: tuple[mx.array, mx.array]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values of prompt and row, [B, J, K + N, d]; never evaluated where blocked attention takes the
        segments."""
        repeat = self.prefix_mask.repeat_for_rows
        self._own = keys, values
        self._issued = tuple(  # pyright: ignore
            mx.concatenate([repeat(prompt), own], axis=2) for prompt, own in ((self.keys, keys), (self.values, values))
        )
        return self._issued

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        _refuse_window(window_size)
        return self.prefix_mask.mask(N, self.keys.shape[2], return_array)

    def attention_inputs(self, keys: mx.array, values: mx.array, mask: Any) -> AttentionInputs | None:
        unchanged = keys is self._issued[0] and values is self._issued[1]
        # Models ask the first layer's cache for a mask and pass it to all layers, so one list serves the whole pass.
        known = any(mask is issued for issued in self.prefix_mask.issued_masks) or _is_causal(mask, self._own[0])
        if not (unchanged and known):
            return None
        return AttentionInputs(*self._own, self.prefix_mask.prompts(self.keys, self.values))


def _is_causal(mask: Any, keys: mx.array) -> bool:
    return mask == "causal" if isinstance(mask, str) else mask is None and keys.shape[2] == 1


def _refuse_window(window_size: int | None) -> None:
    if window_size is not None:
        raise ValueError(
            "A sliding window looks back from each token's own place, which a shared prompt does not keep."
        )
