"""KV caches of a compiled decoding step: arrays of fixed capacity C. A step writes one slot (column), or N columns of
each row's own. Slot, mask and positions are arrays too, so one trace serves all steps of a (rows, capacity)."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from backend.engine.attention import PromptKV
from backend.engine.device import on_gpu
from backend.engine.layers import gather_with_repeats, turned_halves


class Rotations:
    """A rotary embedding of halves, which turns x = (x₁, x₂) into x₁ ⊗ rotation[:, 0] + x₂ ⊗ rotation[:, 1]."""

    def __init__(self, rope: Any, size: int) -> None:
        self.rope, self.size, self.table = rope, size, mx.zeros((0, 2, size))

    def at(self, position_N: mx.array, most: int) -> mx.array:
        """[N, 2, size] float32 at positions below `most`. On a CPU from a table: `rope` is 15 operations there."""
        if on_gpu():
            return self.turned(position_N)
        if len(self.table) < most:
            self.table = self.turned(mx.arange(1 << (most - 1).bit_length()))
            mx.eval(self.table)
        return self.table[position_N]

    def turned(self, position_N: mx.array) -> mx.array:
        """As `at`, computed by `rope`."""
        return turned_halves(self.rope, self.size, 1, position_N)[:, :, 0]


class StepContext:
    """State that all layers share in one decoding step. Rows are padded on the left, so all write the same `slot`;
    `position_B` is each row's own position. With `tokens` N, row b writes N columns from slot[b] on instead."""

    def __init__(
        self,
        slot: mx.array,
        pad_B: mx.array,
        column_C: mx.array,
        tokens: int | None = None,
        shift_B: mx.array | None = None,
    ) -> None:
        self.slot, self.pad_B, self.column_C, self.tokens = slot, pad_B, column_C, tokens
        self.position_B = slot - pad_B  # RoPE counts from each row's first real token
        if shift_B is not None:  # of pictures in the prompt
            self.position_B = self.position_B + shift_B
        self._masks: dict[tuple[int, int | None], mx.array] = {}
        self._rotations: dict[int, mx.array] = {}
        # the residual stream after the last block, in float32 and as the model passes it on
        self.stream: tuple[mx.array, mx.array] | None = None

    def stream_of(self, x: mx.array) -> mx.array:
        """The stream that `x` is the rounded form of, or `x` itself."""
        return self.stream[0] if self.stream and self.stream[1] is x else x

    def by_row(self, x: mx.array) -> mx.array:
        """[B · N, …, 1, d] of tokens → [B, …, N, d]."""
        if self.tokens is None:
            return x
        return mx.moveaxis(x.squeeze(-2).reshape(-1, self.tokens, *x.shape[1:-2], x.shape[-1]), 1, -2)

    def mask(self, heads: int = 1, window: int | None = None) -> mx.array:
        """[B, heads, N, C]: allows the columns between a row's padding and the slot, or the last `window` of them.
        Metal copies a mask that heads share for each head and layer, so it is made once for all heads."""
        if (heads, window) not in self._masks:
            pad_B1 = self.pad_B[:, None]
            if heads > 1:
                pad_B1 = mx.broadcast_to(self.pad_B[:, None, None, None], (len(self.pad_B), heads, 1, 1))
            # `<=`: the step writes column `slot` before it attends. Later columns hold nothing yet, or old numbers.
            slot = self.slot
            if self.tokens is not None:
                slot = (slot[:, None] + mx.arange(self.tokens))[:, None, :, None]
                pad_B1 = mx.broadcast_to(self.pad_B[:, None, None, None], (len(self.pad_B), heads, self.tokens, 1))
            mask = (self.column_C <= slot) & (self.column_C >= pad_B1)
            if window is not None:
                mask = mask & (self.column_C > slot - window)
            self._masks[heads, window] = mask if mask.ndim == 4 else mask[:, None, None]
        return self._masks[heads, window]

    def rotation(self, rope: Rotations) -> mx.array:
        """[B · N, 2, size] float32. One call serves queries and keys of all layers."""
        if id(rope) not in self._rotations:
            position = self.position_B
            if self.tokens is not None:
                position = (position[:, None] + mx.arange(self.tokens)).flatten()
            self._rotations[id(rope)] = rope.at(position, self.column_C.size)
        return self._rotations[id(rope)]


class SlotCache:
    """A layer's keys [B, J, C, d] and values [B, J, C, e] in mlx-lm's cache protocol. A layer with a sliding `window`
    keeps all columns and masks those outside it, so rows of unequal length share one array."""

    def __init__(self, keys: mx.array, values: mx.array, step: StepContext, window: int | None = None) -> None:
        self.keys, self.values, self.step, self.offset, self.window = keys, values, step, step.position_B, window

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.keys, self.values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = written(self.keys, keys, self.step), written(self.values, values, self.step)
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.step.mask(window=window_size)


class PackedSlotCache(SlotCache):
    """A layer's keys and values in one array [B, J, 2, C, d], which a GPU writes in one launch. Metal's attention
    copies arrays whose (row, head) pairs lie at uneven distances; here they do not."""

    def __init__(self, kv: mx.array, step: StepContext, window: int | None = None) -> None:
        self.kv, self.step, self.offset, self.window = kv, step, step.position_B, window

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.kv,)

    def write(self, kv_BJ2Nd: mx.array) -> tuple[mx.array, mx.array]:
        """Write this step's columns; return all C columns of keys and values, as views."""
        self.kv = written(self.kv, kv_BJ2Nd, self.step)
        return self.kv[:, :, 0], self.kv[:, :, 1]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.write(mx.stack([keys, values], axis=2))


def written(cache: mx.array, new: mx.array, step: StepContext) -> mx.array:
    """`cache` [B, …, C, d] with `new` [B, …, N, d] in the step's columns, in place if nothing else holds the array."""
    slot, N = step.slot, step.tokens
    if N is not None and not on_gpu():  # a scatter would copy the whole cache
        for row in range(len(new)):
            start = mx.stack([mx.array(row, slot.dtype), slot[row]])
            cache = mx.slice_update(cache, new[row : row + 1], start, axes=(0, cache.ndim - 2))
        return cache
    if N is not None:
        column_BN = slot[:, None] + mx.arange(N)
        index = column_BN.reshape(len(new), *[1] * (cache.ndim - 3), N, 1)
        return mx.put_along_axis(cache, mx.broadcast_to(index, new.shape), new, axis=-2)
    if on_gpu():  # one kernel; a slice update has another one compute the offset
        return mx.put_along_axis(cache, slot.reshape([1] * cache.ndim), new, axis=-2)
    return mx.slice_update(cache, new, slot, axes=(cache.ndim - 2,))


def new_prompt_cache(model: nn.Module) -> list[Any]:
    """Empty caches as the model itself makes them, else one KVCache per layer. Some wrappers (mistral3) do not pass
    mlx-lm's question on to their text model, which loses its sliding windows."""
    text_model: Any = getattr(model, "language_model", None)
    asks_text_model = not hasattr(model, "make_cache") and hasattr(text_model, "make_cache")
    return make_prompt_cache(text_model if asks_text_model else model)


def windows_of(model: nn.Module) -> list[int | None]:
    """The sliding window of each cache of `new_prompt_cache`, in tokens; None where a layer attends to all."""
    return [getattr(cache, "max_size", None) for cache in new_prompt_cache(model)]


class AttentionInputs(NamedTuple):
    """Keys and values of the rows' own tokens, [B, J, N, d], and of their prompts."""

    keys: mx.array
    values: mx.array
    prompts: PromptKV | None = None


class PrefixRecorder:
    """A layer's cache while prompts are prefilled: keeps keys and values [P, J, K, d] in the graph. Also for whole rows
    of a model whose layers find each other's keys and values in caches alone (gemma3n)."""

    # mlx-lm's layers read `offset` for the rotary embedding before they hand keys over. Keys arrive rotated, so a
    # prompt's positions stay right for every row that attends to it.
    def __init__(self, offset: Any = None) -> None:
        self.offset = 0 if offset is None else offset
        self.keys: mx.array
        self.values: mx.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        # Not copied and not evaluated: the completions' gradient flows through these nodes into the prefill.
        self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For layers that reuse an earlier layer's keys and values."""
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return create_attention_mask(mx.zeros((1, N, 1)), None, window_size, return_array)

    def attention_inputs(self, keys: mx.array, values: mx.array, mask: Any) -> AttentionInputs | None:
        """Inputs of blocked attention; None if the model has changed what this cache returned."""
        # By identity, which costs nothing; comparing values would evaluate the graph.
        unchanged = keys is self.keys and values is self.values and _is_causal(mask, keys)
        return AttentionInputs(keys, values) if unchanged else None


@dataclass(frozen=True, slots=True)
class PrefixMask:
    """The prompt that each row attends to, and its length. One object for all layers of a pass."""

    prompt_B: mx.array
    rows_per_prompt: int  # if they are consecutive and equally many; else 0
    length_B: mx.array | int  # tokens of each row's prompt; a number where all are equal
    shift_B: mx.array | None = None  # of the rows' positions, by pictures in their prompts
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
        # An integer means equal lengths: nothing to mask.
        length_B = None if isinstance(self.length_B, int) else self.length_B
        if self.rows_per_prompt:
            return PromptKV(keys, values, None if length_B is None else length_B[:: self.rows_per_prompt])
        # Uneven groups (rows were split by length) have no [P, B / P] shape: one copy of the prompt for each row.
        return PromptKV(self.repeat_for_rows(keys), self.repeat_for_rows(values), length_B)

    def mask(self, N: int, K: int, as_array: bool, window: int | None = None) -> Any:
        """The mask of N completion tokens after prompts of width K: [B, 1, N, K + N], or "causal"."""
        if window is not None and window < K + N:
            return self._windowed(N, K, window)
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

    def _windowed(self, N: int, K: int, window: int) -> mx.array:
        """As `mask`, [B or 1, 1, N, K + N]. Left out of `issued_masks`, since blocked attention has no windows."""
        length_B111 = mx.array(self.length_B).reshape(-1, 1, 1, 1)
        query_N1, prompt_K, own_N = mx.arange(N)[:, None], mx.arange(K), mx.arange(N)
        of_prompt = (prompt_K < length_B111) & (prompt_K > length_B111 + query_N1 - window)
        of_row = mx.broadcast_to((own_N <= query_N1) & (own_N > query_N1 - window), (*of_prompt.shape[:3], N))
        return mx.concatenate([of_prompt, of_row], axis=-1)


class PrefixReader:
    """A layer's cache in a pass over completions, which see the prompt's keys and values [P, J, K, d] and their own."""

    def __init__(self, keys: mx.array, values: mx.array, prefix_mask: PrefixMask) -> None:
        self.keys, self.values, self.prefix_mask = keys, values, prefix_mask
        # Each row's first token comes right after its own prompt, not after the padded width K. [B] or one number for
        # all; mlx's rope takes both.
        self.offset = (
            prefix_mask.length_B if prefix_mask.shift_B is None else prefix_mask.length_B + prefix_mask.shift_B
        )
        self._own: tuple[mx.array, mx.array]
        self._issued: tuple[mx.array, mx.array]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values of prompt and row, [B, J, K + N, d]; never evaluated if blocked attention takes segments."""
        repeat = self.prefix_mask.repeat_for_rows
        self._own = keys, values
        self._issued = tuple(  # pyright: ignore
            mx.concatenate([repeat(prompt), own], axis=2) for prompt, own in ((self.keys, keys), (self.values, values))
        )
        return self._issued

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self.prefix_mask.mask(N, self.keys.shape[2], return_array, window_size)

    def attention_inputs(self, keys: mx.array, values: mx.array, mask: Any) -> AttentionInputs | None:
        unchanged = keys is self._issued[0] and values is self._issued[1]
        # Models ask the first layer's cache for a mask and pass it to all layers, so one list serves the whole pass.
        known = any(mask is issued for issued in self.prefix_mask.issued_masks) or _is_causal(mask, self._own[0])
        if not (unchanged and known):
            return None
        return AttentionInputs(*self._own, self.prefix_mask.prompts(self.keys, self.values))


def _is_causal(mask: Any, keys: mx.array) -> bool:
    return mask == "causal" if isinstance(mask, str) else mask is None and keys.shape[2] == 1
