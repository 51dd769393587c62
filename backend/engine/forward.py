"""The forward pass of training: log-probabilities of completions, each prompt prefilled once for its group.

    prompts but for their last token [P, K] ──prefill──► keys and values of each layer [P, J, K, d]
    the token before each completion token [B, T] ──attends to it──► states [B, T, H] ──head──► log π, entropy [B, T]

The state of each token predicts the next one. mlx is lazy: of a prompt's last layer only keys and values are computed.
Models whose layers cannot share a prompt read whole rows [B, L]. Letters: B completions, P prompts, T completion
tokens, K prompt tokens but for the last, L tokens of both, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from backend.engine.caches import PrefixMask, PrefixReader, PrefixRecorder
from backend.engine.images import PromptImages, hidden_with_images, padded_images, shifts
from backend.engine.layers import scatter_unique, take_distinct
from backend.engine.lm_head import Teacher, TokenScores, token_logps
from backend.engine.output_layer import SplitModel
from backend.engine.penalties import CompletionHistory, Penalties, distinct_tokens


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Completions and their prompts as arrays of the forward pass (`sequence_rows`)."""

    tokens_BL: mx.array  # prompt and completion, padded on the right; for models that cannot share prompts
    prompt_PK: mx.array  # every prompt once, but for its last token, padded on the right
    prompt_length_B: mx.array
    prompt_B: mx.array  # the index of each row's prompt
    completion_BT: mx.array
    input_BT: mx.array  # the tokens before those of the completion: the prompt's last first
    active_N: mx.array  # flat indices into [B, T] of the tokens that count
    full: bool  # every token counts
    even: bool  # prompts have equally many rows, which are consecutive
    ragged: bool  # prompts are padded
    images: Sequence[PromptImages | None] = ()  # of each prompt; empty where none has a picture

    def history(self, penalties: Penalties) -> CompletionHistory:
        """The tokens before the positions that count. Reads the prompts on the host."""
        _, first = np.unique(np.array(self.prompt_B), return_index=True)  # a row of each prompt
        rows, lengths = np.array(self.tokens_BL)[first], np.array(self.prompt_length_B)[first]
        tokens = distinct_tokens([row[:length].tolist() for row, length in zip(rows, lengths, strict=True)])
        of_rows = type(tokens)(*(array[self.prompt_B] for array in tokens))
        return CompletionHistory(penalties, of_rows, self.completion_BT, self.active_N)


def sequence_rows(
    tokens_BL: mx.array,
    prompt_length_B: mx.array,
    group_B: mx.array,
    completion_BT: mx.array,
    mask_BT: mx.array,
    images: Sequence[PromptImages | None] = (),
) -> SequenceRows:
    """The arrays of a batch, [B, …]. Rows of one group share a prompt. Waits for the device: call it once per batch."""
    tokens, lengths, groups = np.array(tokens_BL), np.array(prompt_length_B), np.array(group_B)
    _, first, prompt_of = np.unique(groups, return_index=True, return_inverse=True)
    # np.unique sorts by group number; argsort of argsort gives ranks, so prompts are numbered by first appearance.
    order = np.argsort(np.argsort(first))
    prompt_of, first = order[prompt_of], np.sort(first)
    P, K = len(first), max(1, int(lengths.max(initial=1)) - 1)
    # Zeros, not the pad id: no real token attends to the padding, so any valid token will do.
    inside = np.arange(K)[None] < lengths[first][:, None] - 1
    last_B1 = np.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    each = len(tokens) // max(P, 1)
    return SequenceRows(
        tokens_BL=tokens_BL,
        prompt_PK=mx.array(np.where(inside, _widened(tokens[first], K), 0)),
        prompt_length_B=prompt_length_B,
        prompt_B=mx.array(prompt_of),
        completion_BT=completion_BT,
        input_BT=mx.concatenate([mx.array(last_B1), completion_BT[:, :-1]], axis=1),
        active_N=mx.array(np.flatnonzero(np.array(mask_BT))),
        full=bool(np.array(mask_BT).all()),
        even=bool(P * each == len(tokens) and (prompt_of == np.repeat(np.arange(P), each)).all()),
        ragged=bool((lengths - 1 != K).any()),
        images=images,
    )


def _widened(x: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x, [(0, 0), (0, max(0, width - x.shape[1]))])[:, :width]


def completion_logps(
    split_model: SplitModel,
    rows: SequenceRows,
    temperature: float,
    chunk: int | None = None,
    *,
    with_gradient: bool = True,
    entropy_gradient: bool = False,
    prefilled: PrefilledPrompts | None = None,
    penalties: Penalties | None = None,
    teacher: Teacher | None = None,
) -> TokenScores:
    """log π(completion | prompt), the entropy of each distribution and its divergence from the teacher's, [B, T] in
    nats, 0 where inactive. Logits are penalised, then divided by `temperature`, in float32, `chunk` positions at a
    time. Without `with_gradient` nothing carries a gradient; the entropy only with `entropy_gradient`."""
    B, T = rows.completion_BT.shape
    if rows.active_N.size == 0:  # every completion is masked, e.g. because all of them are truncated
        return TokenScores(*[mx.zeros((B, T))] * (2 if teacher is None else 3))
    target_N = rows.completion_BT.reshape(-1)
    scored = token_logps(
        split_model.logits,
        split_model.head,
        active_states(split_model, rows, prefilled),
        target_N if rows.full else target_N[rows.active_N],
        temperature=temperature,
        chunk=chunk,
        with_gradient=with_gradient,
        entropy_gradient=entropy_gradient,
        history=rows.history(penalties) if penalties else None,
        teacher=teacher,
        is_product=split_model.is_product,
    )
    if rows.full:
        return TokenScores(*(x.reshape(B, T) for x in scored.arrays))
    return TokenScores(*(scatter_unique((B * T,), rows.active_N, x).reshape(B, T) for x in scored.arrays))


def active_states(split_model: SplitModel, rows: SequenceRows, prefilled: PrefilledPrompts | None = None) -> mx.array:
    """The states that predict the completion tokens that count, [N, H]."""
    if split_model.prefix_layers:
        hidden_BTH = shared_prompt_states(split_model, rows, prefilled)
    else:
        hidden_BTH = whole_row_states(split_model, rows)
    flat_NH = hidden_BTH.reshape(rows.completion_BT.size, -1)
    # The gather selects before the head, so masked tokens cost no row of logits; with a full mask it would only copy.
    return flat_NH if rows.full else take_distinct(flat_NH, rows.active_N)


def whole_row_states(split_model: SplitModel, rows: SequenceRows) -> mx.array:
    """The states that predict each completion token, [B, T, H], from one pass over whole rows."""
    B, T = rows.completion_BT.shape
    tokens_BL = rows.tokens_BL[:, :-1]
    if rows.images:
        of_prompt: list[int] = rows.prompt_B.tolist()  # pyright: ignore[reportAssignmentType]: one axis
        images = padded_images([rows.images[p] for p in of_prompt], tokens_BL.shape[1])
        has_keys = [hasattr(layer, "self_attn") for layer in split_model.body.layers]
        cache = [PrefixRecorder(images.rotation) if each else None for each in has_keys]
        hidden_BLH = hidden_with_images(split_model, tokens_BL, images, cache)
    else:
        hidden_BLH = split_model.hidden(tokens_BL)
    # The state that predicts completion token t of row b is at position prompt_length[b] − 1 + t. In shorter rows the
    # last of the T positions may lie beyond the array; from its start again, so that all differ, they read a wrong
    # state, but they are not active.
    length = hidden_BLH.shape[1]
    position_BT = (rows.prompt_length_B[:, None] - 1 + mx.arange(T)[None]) % length
    flat_N = (mx.arange(B)[:, None] * length + position_BT).reshape(-1)
    return take_distinct(hidden_BLH.reshape(B * length, -1), flat_N).reshape(B, T, -1)


class PrefilledPrompts(NamedTuple):
    """Keys and values by layer, [P, J, K, d]."""

    keys: list[mx.array]
    values: list[mx.array]


def prefill_prompts(
    split_model: SplitModel, prompt_PK: mx.array, images: Sequence[PromptImages | None] = ()
) -> PrefilledPrompts:
    """One pass over prompts padded on the right, with gradient where the model learns."""
    # The recorders collect keys and values as a side effect of the pass, so call `hidden` before they are read.
    padded = padded_images(images, prompt_PK.shape[1]) if any(images) else None
    recorders = [PrefixRecorder(padded and padded.rotation) for _ in range(split_model.prefix_layers)]
    if padded is None:
        split_model.hidden(prompt_PK, recorders)
    else:
        hidden_with_images(split_model, prompt_PK, padded, recorders)
    return PrefilledPrompts([layer.keys for layer in recorders], [layer.values for layer in recorders])


def shared_prompt_states(
    split_model: SplitModel, rows: SequenceRows, prefilled: PrefilledPrompts | None = None
) -> mx.array:
    """As `whole_row_states`, with each prompt prefilled once; its gradient is summed over its rows."""
    P, K = rows.prompt_PK.shape
    prompts = prefilled or prefill_prompts(split_model, rows.prompt_PK, rows.images)
    rows_per_prompt = len(rows.prompt_B) // P if rows.even else 0
    # Prompts of one length need no mask array: an integer lets attention take its causal path.
    shift_P = shifts(rows.images)
    shift_B = None if shift_P is None else mx.array(shift_P)[rows.prompt_B]
    mask = PrefixMask(rows.prompt_B, rows_per_prompt, rows.prompt_length_B - 1 if rows.ragged else K, shift_B)
    readers = [PrefixReader(keys, values, mask) for keys, values in zip(prompts.keys, prompts.values, strict=True)]
    return split_model.hidden(rows.input_BT, readers)
