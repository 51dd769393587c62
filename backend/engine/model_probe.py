"""Splits a model into body and head, and tries by small passes which fast paths it allows. No architecture is named:
where fast and plain path differ, or the code raises, the plain one is used and `SplitModel.slow_paths` says why."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from backend.engine import residual_stream
from backend.engine.caches import PrefixRecorder, new_prompt_cache
from backend.engine.cpu import matmul_transposed
from backend.engine.device import has_metal, on_cpu
from backend.engine.forward import sequence_rows, shared_prompt_states, whole_row_states
from backend.engine.output_layer import PROBE, NoOutputLayer, SplitModel, cut_before_output_layer
from backend.engine.patches import install

UNSPLIT = "The vocabulary is computed for every token, prompts included, instead of for completions alone: {reason}."
UNSHARED = "Prompts are read once per completion instead of once per group: {reason}."
# mlx-lm's caches that cannot share a prompt, and the reason
CACHES = {
    ArraysCache: "some layers keep a state instead of keys and values",
    CacheList: "its layers keep more state than keys and values",
}


class _Unsupported(Exception):
    """A fast path does not fit the model; the message is the reason."""


def split(model: nn.Module) -> SplitModel:
    """The model as body and head, patched, with every fast path that agrees with the plain one."""
    install(model)
    try:
        split_model, states = _body_and_linear_head(model) or cut_before_output_layer(model)
    except NoOutputLayer as reason:
        split_model, states = _uncut(model), model(PROBE)
        split_model.slow_paths.append(UNSPLIT.format(reason=reason))
    split_model, states = _sharing_keys(model, split_model, states)
    # Where the stream cannot be kept in float32, sampler and learner both have the model's own, and nothing is slower.
    # On other devices a float32 stream takes additional launches.
    if states.dtype in residual_stream.NAMES and (on_cpu() or has_metal()):
        hidden = split_model.hidden
        try:
            residual_stream.mark(model, lambda: hidden(PROBE))
            if not _are_close(hidden(PROBE), states):
                residual_stream.unmark(model)
        except Exception:  # the code of any model runs here, with types that it was not written for
            residual_stream.unmark(model)
    # mlx is lazy: shape and type are known without running anything.
    split_model.vocab_size, split_model.dtype = split_model.logits(states).shape[-1], states.dtype
    try:
        split_model.prefix_layers = _prefix_layers(model, split_model)
    except _Unsupported as reason:
        split_model.slow_paths.append(UNSHARED.format(reason=reason))
    except Exception as error:  # not narrower: the code of any model runs here, with caches that it was not written for
        split_model.slow_paths.append(
            UNSHARED.format(reason=f"its code does not take a shared prompt ({describe_error(error)})")
        )
    return split_model


def _body_and_linear_head(model: nn.Module) -> tuple[SplitModel, mx.array] | None:
    """The model by the names that most give their parts, and the states of PROBE; None for other models."""
    if (parts := _body_and_head(model)) is None:
        return None
    body, _, logits = parts
    try:
        # The probe runs the head itself: a sliced product rounds differently and would look like a soft cap. Both run
        # the same operations, so the tolerance can be tight.
        whole, states = model(PROBE), body(PROBE)
        parts = logits(states)
        is_whole = whole.shape == parts.shape and mx.allclose(whole, parts, rtol=1e-5, atol=1e-6)
        return (_cut_before_head(model), states) if is_whole else None
    except (TypeError, ValueError, AttributeError):
        return None


def _body_and_head(model: nn.Module) -> tuple[Any, Any, Callable[[mx.array], mx.array]] | None:
    # Models that also read images wrap their text model.
    inner = getattr(model, "language_model", model)
    body = getattr(inner, "model", None)
    head: Any = getattr(inner, "lm_head", None)
    if body is not None and head is not None:
        return body, head, head
    if hasattr(body, "embed_tokens"):  # tied weights
        return body, body.embed_tokens, body.embed_tokens.as_linear  # pyright: ignore
    return None


def _cut_before_head(model: nn.Module) -> SplitModel:
    parts = _body_and_head(model)
    assert parts is not None
    body, head, own_logits = parts
    # By exact type: a quantised or adapted head computes more than x Wᵀ, and so does one with a bias.
    is_product = type(head) is nn.Embedding or (type(head) is nn.Linear and "bias" not in head)

    def logits(hidden: mx.array) -> mx.array:
        return matmul_transposed(hidden, head.weight) if is_product else own_logits(hidden)

    split_model = SplitModel(lambda tokens, cache=None: body(tokens, cache=cache), logits, head, cut=_cut_before_head)
    split_model.body, split_model.is_product = body, is_product
    return split_model


def _uncut(model: nn.Module) -> SplitModel:
    return SplitModel(lambda tokens, cache=None: model(tokens, cache=cache), lambda hidden: hidden, cut=_uncut)


def _sharing_keys(model: nn.Module, split_model: SplitModel, alone: mx.array) -> tuple[SplitModel, mx.array]:
    count, kinds = len(caches := new_prompt_cache(model)), {type(cache) for cache in caches}
    if not kinds <= {KVCache, RotatingKVCache}:
        return split_model, alone
    try:
        cached = split_model.hidden(PROBE, [PrefixRecorder() for _ in range(count)])
        if _are_close(cached, alone):
            return split_model, alone
    except Exception:  # the code of any model runs here; one that does not take our cache keeps its own way
        return split_model, alone
    return _with_caches(split_model, count), cached


def _with_caches(split_model: SplitModel, count: int) -> SplitModel:
    hidden, cut = split_model.hidden, split_model.cut
    return replace(
        split_model,
        hidden=lambda tokens, cache=None: hidden(tokens, cache or [PrefixRecorder() for _ in range(count)]),
        cut=lambda tree: _with_caches(cut(tree), count),
    )


def _are_close(actual: mx.array, expected: mx.array) -> bool:
    tolerance = 1e-3 if expected.dtype == mx.float32 else 0.1
    # NaN must fail too.
    return bool(mx.abs(actual - expected).max() <= tolerance * mx.abs(expected).max())


def _prefix_layers(model: nn.Module, split_model: SplitModel) -> int:
    training = model.training
    try:
        caches = new_prompt_cache(model)
        for cache in caches:
            # A subclass may keep more than keys and values, so it does not count.
            if type(cache) not in (KVCache, RotatingKVCache):
                raise _Unsupported(CACHES.get(type(cache), f"some layers keep a {type(cache).__name__}"))
        if len(caches) < len(getattr(model, "layers", caches)):
            raise _Unsupported("some layers read the keys of earlier ones")
        tokens = mx.array([[1, 2, 3, 6, 7], [1, 2, 3, 8, 9], [4, 5, 10, 11, 0]])
        completions = mx.array([[6, 7], [8, 9], [10, 11]])
        rows = sequence_rows(tokens, mx.array([3, 3, 2]), mx.array([0, 0, 1]), completions, mx.ones((3, 2)))
        model.eval()  # dropout would differ between the two passes
        shared = shared_prompt_states(replace(split_model, prefix_layers=len(caches)), rows)
        whole = whole_row_states(split_model, rows)
        if not _are_close(shared, whole):
            raise _Unsupported("with a shared prompt the model gives other numbers")
        return len(caches)
    finally:
        model.train(training)


def is_causal(model: nn.Module) -> bool:
    """True if a token's logits depend on earlier tokens alone: two rows that differ in their second token have the same
    first logits. Raises what the model's code raises."""
    first_BV = model(mx.array([[0, 0], [0, 1]]))[:, 0]
    finite_BV = mx.where(mx.isfinite(first_BV), first_BV, 0)  # −inf: tokens that a model never gives
    difference = mx.abs(finite_BV[0] - finite_BV[1]).max()
    # Within one batch both rows take the same kernels, and differ by rounding at most.
    return (difference <= 1e-2 * mx.abs(finite_BV).max()).item()  # pyright: ignore


def tracing_error(model: nn.Module) -> str:
    """The error that the model's code raises in a forward pass, or "". Computes nothing."""
    try:
        model(mx.array([[0, 1, 2]]))
    except Exception as error:  # a model's own code may raise anything; the reason goes to the user
        return describe_error(error)
    return ""


def gradient_error(model: nn.Module) -> str:
    """mlx's error for an operation without a gradient in the trainable arrays, or "". Computes nothing."""
    parameters, training = model.trainable_parameters(), model.training
    try:
        model.train()
        nn.value_and_grad(model, lambda tokens: model(tokens).sum())(mx.array([[0, 1, 2]]))
    except ValueError as error:
        if "vjp" not in str(error).casefold():
            raise
        return str(error).strip().splitlines()[0].rstrip(".")
    finally:
        model.update(parameters)  # differentiation leaves its tracers in the model
        model.train(training)
    return ""


def describe_error(error: Exception) -> str:
    """Type and first line of an exception, without a full stop."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip().rstrip('.')}" if lines else type(error).__name__
