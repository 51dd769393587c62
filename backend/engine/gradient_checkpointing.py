"""Gradient checkpointing by layer: activations are recomputed in the backward pass (arXiv:1604.06174).

Unlike `mx.checkpoint` and mlx-lm's own: weights, keys and values, and arrays from other layers are arguments and
results, so they get gradients; dropout repeats its mask; the order of the backward pass is fixed, or mlx would put off
the weights' gradients and keep all activations.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from backend.engine import patches
from backend.engine.caches import PrefixReader, PrefixRecorder

PLAIN = (mx.array, str, int, float, type(None))  # types of a layer's arguments that hold no array


@contextlib.contextmanager
def gradient_checkpointing(model: nn.Module, on: bool) -> Iterator[None]:
    """With `on`, each of `model.layers` keeps only its inputs and recomputes the rest. Patches the layers' classes, and
    puts them back: sampling never pays for it. A layer given an unknown object, which may hold arrays, keeps all."""
    if not on:
        yield
        return
    classes = {type(layer) for layer in model.layers}  # pyright: ignore
    # From mlx's generator, so the update's seed fixes every mask, and a resumed run repeats them.
    seeds = itertools.count(int(mx.random.randint(0, 1 << 30).item()))  # pyright: ignore
    with patches.replaced((kind, "__call__", _checkpointed(kind.__call__, seeds)) for kind in classes):
        yield


def _checkpointed(call: Callable[..., Any], seeds: Iterator[int]) -> Callable[..., Any]:
    def checkpointed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Taken here, in the first pass: `run` is called again in the backward pass, in reverse order of the layers.
        seed = next(seeds)
        given = (args, kwargs)
        caches = [x for x in _leaves(given) if isinstance(x, (PrefixRecorder, PrefixReader))]
        if any(not isinstance(x, (*PLAIN, PrefixRecorder, PrefixReader)) for x in _leaves(given)):
            return call(layer, *args, **kwargs)  # an object that may hold arrays: their gradients would be lost
        cached = [cache for cache in caches if hasattr(cache, "keys")]
        trainable = layer.trainable_parameters()
        names = [name for name, _ in tree_flatten(trainable)]
        results: list[Any] = []

        def run(*arrays: mx.array) -> tuple[mx.array, ...]:
            """The layer as a pure function of the arrays among its arguments, its trainable weights, and its cache's
            keys and values. Those that a PrefixRecorder keeps are results too: later passes send gradients into them.
            """
            mx.random.seed(seed)  # the recomputed dropout mask must be the first pass's
            rest = iter(arrays)
            own_args, own_kwargs = _with_arrays(given, rest)
            layer.update(tree_unflatten([(name, next(rest)) for name in names]))
            for cache in cached:
                cache.keys, cache.values = next(rest), next(rest)
            results[:] = [call(layer, *own_args, **own_kwargs)]
            recorded = [x for cache in caches if isinstance(cache, PrefixRecorder) for x in (cache.keys, cache.values)]
            return (*_arrays(results), *recorded)

        kept = [x for cache in cached for x in (cache.keys, cache.values)]
        arrays = [*_arrays(given), *(array for _, array in tree_flatten(trainable)), *kept]
        outputs = iter(_recomputed(run)(*arrays))
        layer.update(trainable)  # tracing has left its placeholders there, and in the caches
        for cache, keys, values in zip(cached, kept[::2], kept[1::2], strict=True):
            cache.keys, cache.values = keys, values
        (result,) = _with_arrays(results, outputs)
        for cache in caches:
            if isinstance(cache, PrefixRecorder):
                cache.keys, cache.values = next(outputs), next(outputs)
        return result

    return checkpointed


def _leaves(tree: Any) -> list[Any]:
    return [leaf for _, leaf in tree_flatten(tree)]  # pyright: ignore


def _arrays(tree: Any) -> list[mx.array]:
    return [leaf for leaf in _leaves(tree) if _is_float(leaf)]


def _with_arrays(tree: Any, arrays: Iterator[mx.array]) -> Any:
    return tree_map(lambda leaf: next(arrays) if _is_float(leaf) else leaf, tree)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)


def _recomputed(run: Callable[..., tuple[mx.array, ...]]) -> Callable[..., tuple[mx.array, ...]]:
    function = mx.custom_function(run)

    @function.vjp
    def run_vjp(primals: Any, cotangents: Any, _outputs: Any) -> tuple[mx.array, ...]:
        d_out = list(cotangents) if isinstance(cotangents, (tuple, list)) else [cotangents]
        dx, *others = mx.vjp(run, mx.depends(list(primals), d_out), d_out)[1]
        return (mx.depends([dx], others)[0] if others else dx, *others)

    return function  # pyright: ignore[reportReturnType]: mlx's stubs know no signature of it
