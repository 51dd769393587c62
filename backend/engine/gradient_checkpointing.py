"""Gradient checkpointing by layer: activations are recomputed in the backward pass instead of kept (arXiv:1604.06174).

mlx-lm's own `grad_checkpoint` replaces the layer class's `__call__` for good and knows nothing of keys and values that must
carry a gradient from one pass to another. This one is a context, and handles three things that `mx.checkpoint` does not:

- weights and the prompt's keys and values are arguments and results of the recomputed function, because arrays that a function
  merely closes over get no gradient;
- dropout samples the same mask in both passes, from a seed per call;
- the order of the backward pass is fixed. mlx would otherwise put off the weights' gradients of layer after layer, and keep the
  activations that they are computed from: several times the memory, growing with depth.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from backend.engine import patches
from backend.engine.prefix_cache import PrefixReader, PrefixRecorder


@contextlib.contextmanager
def gradient_checkpointing(model: nn.Module, on: bool) -> Iterator[None]:
    """Inside, each of `model.layers` keeps its inputs alone and recomputes the rest in the backward pass; with `on` false
    nothing happens. Python looks `__call__` up on the class, so the layers' classes are patched, and put back at the end:
    sampling never pays for it."""
    if not on:
        yield
        return
    classes = {type(layer) for layer in model.layers}  # pyright: ignore
    # From mlx's generator, so the update's seed fixes every mask, and a resumed run repeats them.
    seeds = itertools.count(int(mx.random.randint(0, 1 << 30).item()))  # pyright: ignore
    replaced = [patches.replace(kind, "__call__", _checkpointed(kind.__call__, seeds)) for kind in classes]
    try:
        yield
    finally:
        for replacement in reversed(replaced):
            patches.restore(replacement)


def _checkpointed(call: Callable[..., Any], seeds: Iterator[int]) -> Callable[..., Any]:
    """A layer's `__call__` that recomputes its activations."""

    def checkpointed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Taken here, in the first pass: `run` is called again in the backward pass, in reverse order of the layers.
        seed = next(seeds)
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, (PrefixRecorder, PrefixReader))), None)
        prefix = [cache.keys, cache.values] if isinstance(cache, PrefixReader) else []
        trainable = layer.trainable_parameters()
        names = [name for name, _ in tree_flatten(trainable)]

        def run(x: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
            """The layer as a pure function: `arrays` are its trainable weights, then the prompt's keys and values it reads; a
            PrefixRecorder's keys and values are results, for later passes send gradients into them."""
            mx.random.seed(seed)  # the recomputed dropout mask must be the first pass's
            # strict=False: behind the weights `arrays` has the prompt's keys and values.
            layer.update(tree_unflatten(list(zip(names, arrays, strict=False))))
            if prefix:
                cache.keys, cache.values = arrays[len(names) :]  # pyright: ignore
            out = call(layer, x, *args[1:], **kwargs)
            return (out, cache.keys, cache.values) if isinstance(cache, PrefixRecorder) else (out,)

        out, *recorded = _recomputed(run)(args[0], *(array for _, array in tree_flatten(trainable)), *prefix)
        layer.update(trainable)  # tracing has left its placeholders there
        if isinstance(cache, PrefixRecorder):
            cache.keys, cache.values = recorded
        return out

    return checkpointed


def _recomputed(run: Callable[..., tuple[mx.array, ...]]) -> Callable[..., tuple[mx.array, ...]]:
    """`run`, with a VJP that calls it again. Two `mx.depends` order the backward pass: recomputation waits for the cotangents
    of the outputs (else all layers recompute at once), and dx is handed on only with all other gradients done (else mlx defers
    those, and the activations that they need stay in memory)."""
    function = mx.custom_function(run)

    @function.vjp
    def run_vjp(primals: Any, cotangents: Any, _outputs: Any) -> tuple[mx.array, ...]:
        d_out = list(cotangents) if isinstance(cotangents, (tuple, list)) else [cotangents]
        dx, *others = mx.vjp(run, mx.depends(list(primals), d_out), d_out)[1]
        return (mx.depends([dx], others)[0] if others else dx, *others)

    return function  # pyright: ignore[reportReturnType]: mlx's stubs know no signature of it
