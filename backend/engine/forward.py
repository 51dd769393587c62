"""The forward pass of training: log-probabilities of completions, each prompt read once for all of its completions.

Knows a model and arrays; no files, no settings, no loss. Letters: B completions, P prompts, T completion tokens, K prompt
tokens, H hidden.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from backend.engine.cpu.small_matmul import times_transposed
from backend.engine.lm_head import TokenScores, token_logps
from backend.engine.patches import install
from backend.engine.prefix_cache import PrefixMask, PrefixReader, PrefixRecorder

Hidden = Callable[..., mx.array]


@dataclass(slots=True)
class SplitModel:
    """A causal language model in two halves, so that the vocabulary is only computed where it is needed.

    `hidden(tokens_BL, cache)` → [B, L, H]; `logits(hidden)` → [..., V]. A model that does more than a linear head after
    its last norm is kept whole: its hidden states are its logits.
    """

    hidden: Hidden
    logits: Callable[[mx.array], mx.array]
    head: nn.Module | None = None
    """The module whose weights `logits` uses; None where the model is kept whole."""
    layers: int = 0
    """Layers that remember keys and values, where a prompt may be read once for all of its completions; else 0."""
    vocabulary: int = 0
    slow_paths: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Completions and their prompts, as the forward pass reads them. Built by `sequence_rows`."""

    tokens_BL: mx.array
    """Prompt and completion, padded on the right: for models whose prompts cannot be shared."""
    prompt_PK: mx.array
    """Every prompt once, padded on the right."""
    prompt_length_P: mx.array
    prompt_length_B: mx.array
    prompt_B: mx.array
    """Which prompt each row has."""
    completion_BT: mx.array
    active_N: mx.array
    """Flat indices into [B, T] of the tokens that count; B · T, which is none of them, where the number was rounded up."""
    full: bool
    """Whether every token counts."""
    even: bool
    """Whether each prompt has as many rows as every other, one after another."""
    ragged: bool
    """Whether prompts differ in length."""


def sequence_rows(
    tokens_BL: mx.array,
    prompt_length_B: mx.array,
    group_B: mx.array,
    completion_BT: mx.array,
    mask_BT: mx.array,
    multiple: int = 1,
) -> SequenceRows:
    """Rows of one group have the same prompt. Inputs are looked at on the host: call it once for a batch, not once a pass.

    Sizes are rounded up to `multiple`; what is made up is never looked at."""
    tokens, lengths, groups = np.array(tokens_BL), np.array(prompt_length_B), np.array(group_B)
    _, first, prompt_of = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))  # groups in the order in which they come
    prompt_of, first = order[prompt_of], np.sort(first)
    P, K = len(first), _rounded(int(lengths.max(initial=1)), multiple)
    inside = np.arange(K)[None] < lengths[first][:, None]
    each = len(tokens) // max(P, 1)
    return SequenceRows(
        tokens_BL=tokens_BL,
        prompt_PK=mx.array(np.where(inside, _widened(tokens[first], K), 0)),
        prompt_length_P=mx.array(lengths[first]),
        prompt_length_B=prompt_length_B,
        prompt_B=mx.array(prompt_of),
        completion_BT=completion_BT,
        active_N=mx.array(_active(np.array(mask_BT), multiple)),
        full=bool(np.array(mask_BT).all()),
        even=bool(P * each == len(tokens) and (prompt_of == np.repeat(np.arange(P), each)).all()),
        ragged=bool((lengths != K).any()),
    )


def _rounded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _widened(x: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x, [(0, 0), (0, max(0, width - x.shape[1]))])[:, :width]


def _active(mask_BT: np.ndarray, multiple: int) -> np.ndarray:
    found = np.flatnonzero(mask_BT)
    size = min(_rounded(found.size, 8 * multiple), mask_BT.size) if multiple > 1 else found.size
    return np.pad(found, (0, size - found.size), constant_values=mask_BT.size)


# ── halves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def split(model: nn.Module) -> SplitModel:
    """The halves of a model, in which ours stand in for some of its functions. They are checked by a probe against the whole: a
    soft cap or scale after the head is not lost."""
    install(model)
    inner = getattr(model, "language_model", model)
    body = getattr(inner, "model", None)
    head = getattr(inner, "lm_head", None)
    if head is None and hasattr(body, "embed_tokens"):
        head = body.embed_tokens  # pyright: ignore
        logits = head.as_linear
    else:
        logits = head
    if body is not None and logits is not None and _halves_agree(model, body, logits):
        if type(head) is nn.Embedding or (type(head) is nn.Linear and "bias" not in head):
            logits = partial(_times_weight, head)
        split_model = SplitModel(lambda tokens, cache=None: body(tokens, cache=cache), logits, head)
    else:
        split_model = SplitModel(lambda tokens, cache=None: model(tokens, cache=cache), lambda hidden: hidden)
    split_model.layers = _shared_layers(model, split_model)
    # Only the shape is asked for: nothing runs.
    split_model.vocabulary = split_model.logits(split_model.hidden(mx.array([[1]]))).shape[-1]
    return split_model


def _times_weight(head: Any, hidden: mx.array) -> mx.array:
    return times_transposed(hidden, head.weight)


def _halves_agree(model: nn.Module, body: Any, logits: Any) -> bool:
    """The very same operations give the very same numbers, so a soft cap shows even where it bends them by a hair."""
    probe = mx.array([[1, 2, 3]])
    try:
        whole, parts = model(probe), logits(body(probe))
        return whole.shape == parts.shape and mx.allclose(whole, parts, rtol=1e-5, atol=1e-6).item()  # pyright: ignore
    except (TypeError, ValueError, AttributeError):
        return False


def _shared_layers(model: nn.Module, split_model: SplitModel) -> int:
    """How many layers remember keys and values, if that is all they remember and reading a prompt once gives the hidden states
    of reading it for every row. Tried on prompts of unequal length: some models want one position for all rows."""
    training = model.training
    try:
        caches = make_prompt_cache(model)
        if any(type(cache) is not KVCache for cache in caches):
            return 0
        rows = _probe()
        model.eval()
        split_model.layers = len(caches)
        shared = _states_shared(split_model, rows)
        whole = _states_whole(split_model, rows)
        tolerance = 1e-3 if whole.dtype == mx.float32 else 0.1
        scale = mx.abs(whole).max()
        return len(caches) if (mx.abs(shared - whole).max() <= tolerance * scale).item() else 0
    except Exception:  # whatever a model's code does not take: it is read row by row
        return 0
    finally:
        model.train(training)
        split_model.layers = 0


def _probe() -> SequenceRows:
    prompts, completions = [[1, 2, 3], [4, 5, 0]], [[6, 7], [8, 9], [10, 11]]
    tokens = [[1, 2, 3, 6, 7], [1, 2, 3, 8, 9], [4, 5, 10, 11, 0]]
    return SequenceRows(
        tokens_BL=mx.array(tokens), prompt_PK=mx.array(prompts), prompt_length_P=mx.array([3, 2]),
        prompt_length_B=mx.array([3, 3, 2]),
        prompt_B=mx.array([0, 0, 1]), completion_BT=mx.array(completions), active_N=mx.arange(6),
        full=True, even=False, ragged=True,
    )  # fmt: skip


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def completion_logps(
    split_model: SplitModel,
    rows: SequenceRows,
    temperature: float,
    chunk: int | None = None,
    *,
    learns: bool = True,
    entropy_gradient: bool = False,
    prompted: PrefilledPrompts | None = None,
) -> TokenScores:
    """log π(completion | prompt) and the entropy of each distribution, both [B, T] in nats, 0 where inactive.

    Logits are divided by `temperature` first, in float32. The vocabulary is computed at the active positions only, `chunk` at
    a time. The entropy carries a gradient only where `entropy_gradient` asks for one; nothing does without `learns`. `prompted`: the
    prompts, where they have been read before.
    """
    B, T = rows.completion_BT.shape
    if rows.active_N.size == 0:  # every completion was left out: truncated ones, where those are masked
        return TokenScores(mx.zeros((B, T)), mx.zeros((B, T)))
    hidden_BTH = _states_shared(split_model, rows, prompted) if split_model.layers else _states_whole(split_model, rows)
    flat_NH, target_N = hidden_BTH.reshape(B * T, -1), rows.completion_BT.reshape(-1)
    if not rows.full:
        there_N = mx.minimum(rows.active_N, B * T - 1)
        flat_NH, target_N = flat_NH[there_N], target_N[there_N]
    scored = token_logps(
        split_model.logits, split_model.head, flat_NH, target_N,
        temperature=temperature, chunk=chunk, learns=learns, entropy_gradient=entropy_gradient,
    )  # fmt: skip
    if rows.full:
        return TokenScores(*(x.reshape(B, T) for x in scored))
    blank = mx.zeros(B * T + 1)
    return TokenScores(*(blank.at[rows.active_N].add(x)[:-1].reshape(B, T) for x in scored))


def _states_whole(split_model: SplitModel, rows: SequenceRows) -> mx.array:
    """The states that predict each completion token, [B, T, H], with the prompt read for every row."""
    B, T = rows.completion_BT.shape
    hidden_BLH = split_model.hidden(rows.tokens_BL[:, :-1])
    # The state that predicts completion token t of row b stands at prompt_length[b] − 1 + t.
    place_BT = mx.minimum(rows.prompt_length_B[:, None] - 1 + mx.arange(T)[None], rows.tokens_BL.shape[1] - 2)
    flat_N = (mx.arange(B)[:, None] * hidden_BLH.shape[1] + place_BT).reshape(-1)
    return hidden_BLH.reshape(-1, hidden_BLH.shape[-1])[flat_N].reshape(B, T, -1)


class PrefilledPrompts(NamedTuple):
    """Prompts that have been read: the state after the last token of each, and keys and values by layer, [P, heads, K, d]."""

    last_PH: mx.array
    keys: list[mx.array]
    values: list[mx.array]


def prefill_prompts(split_model: SplitModel, prompt_PK: mx.array, length_P: mx.array) -> PrefilledPrompts:
    """Each prompt, padded on the right, read once."""
    reading = [PrefixRecorder() for _ in range(split_model.layers)]
    hidden_PKH = split_model.hidden(prompt_PK, reading)
    last_PH = hidden_PKH[mx.arange(len(length_P)), length_P - 1]
    return PrefilledPrompts(last_PH, [layer.keys for layer in reading], [layer.values for layer in reading])


def _states_shared(split_model: SplitModel, rows: SequenceRows, prompted: PrefilledPrompts | None = None) -> mx.array:
    """The same with each prompt read once. Its gradient is the sum over the rows that look at it, so nothing is lost."""
    T, (P, K) = rows.completion_BT.shape[1], rows.prompt_PK.shape
    read = prompted or prefill_prompts(split_model, rows.prompt_PK, rows.prompt_length_P)
    last_BH = read.last_PH[rows.prompt_B]
    if T == 1:
        return last_BH[:, None]
    each = len(rows.prompt_B) // P if rows.even else 0
    sight = PrefixMask(rows.prompt_B, each, rows.prompt_length_B if rows.ragged else K)
    following = [PrefixReader(keys, values, sight) for keys, values in zip(read.keys, read.values, strict=True)]
    hidden_BSH = split_model.hidden(rows.completion_BT[:, :-1], following)
    return mx.concatenate([last_BH[:, None], hidden_BSH], axis=1)


# ── activations worked out again ─────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def gradient_checkpointing(model: nn.Module, on: bool) -> Iterator[None]:
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
        memory = next((x for x in (*args, *kwargs.values()) if isinstance(x, (PrefixRecorder, PrefixReader))), None)
        given = [memory.keys, memory.values] if isinstance(memory, PrefixReader) else []
        mine = layer.trainable_parameters()
        names = [name for name, _ in tree_flatten(mine)]

        def inner(x: mx.array, *more: mx.array) -> tuple[mx.array, ...]:
            """All that gets a gradient comes in as an argument and goes out as a result: the prompt's keys and values too."""
            mx.random.seed(seed)  # the second pass must drop what the first one dropped
            layer.update(tree_unflatten(list(zip(names, more, strict=False))))
            if given:
                memory.keys, memory.values = more[len(names) :]  # pyright: ignore
            made = call(layer, x, *args[1:], **kwargs)
            return (made, memory.keys, memory.values) if isinstance(memory, PrefixRecorder) else (made,)

        made, *read = _worked_out_again(inner)(args[0], *(array for _, array in tree_flatten(mine)), *given)
        layer.update(mine)
        if isinstance(memory, PrefixRecorder):
            memory.keys, memory.values = read
        return made

    return checkpointed


def _worked_out_again(inner: Callable[..., tuple[mx.array, ...]]) -> Callable[..., tuple[mx.array, ...]]:
    """`inner`, whose gradient begins with a second pass, not before the slopes of its results are there; and which lets the
    slope of its first argument go on only once all others stand. Else MLX leaves these for later, layer after layer, and
    what they are made from stays in memory: several times as much, and more the more layers there are."""
    run = mx.custom_function(inner)

    @run.vjp
    def slopes(primals: Any, cotangents: Any, _outputs: Any) -> tuple[mx.array, ...]:
        back = list(cotangents) if isinstance(cotangents, (tuple, list)) else [cotangents]
        first, *others = mx.vjp(inner, mx.depends(list(primals), back), back)[1]
        return (mx.depends([first], others)[0] if others else first, *others)

    return run  # pyright: ignore[reportReturnType]: mlx's stubs know no signature of it
