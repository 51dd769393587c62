"""The residual stream of a 16-bit model, kept in float32, so that its rounding does not accumulate over the layers:

    h ← h + branch(norm(round(h)))

Products keep 16-bit inputs. The first layer takes its input as float32 and the stream's norms round theirs: both calls
are patched and act on marked modules. `mark` finds them by following types through a trial pass; a model that does more
with its stream stays as it is. On Metal a kernel writes sum and rounding; other GPUs keep the model's stream, since a
decoding step is bound by launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from backend.engine import patches
from backend.engine.device import has_metal, on_cpu

Call = Callable[..., Any]
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]

NAMES = {mx.bfloat16: "bfloat16", mx.float16: "float16"}  # by name: a module with an `mx.Dtype` cannot be copied

WIDENS, ROUNDS = "takes_input_as_float32", "rounds_input_to"  # marks: True on the first layer; a type's name on norms

_replaced: dict[type, Call] = {}  # class → the `__call__` that `_act_on_marks` gave it


class Unmarked(Exception):
    """The stream cannot be kept in float32; the message is the reason."""


def costs_nothing() -> bool:
    """True if a float32 stream takes no launches of its own."""
    return on_cpu() or has_metal()


def is_float32(norm: nn.Module) -> bool:
    """True if this norm reads a stream in float32."""
    return ROUNDS in vars(norm)


def mark(model: nn.Module, run: Callable[[], mx.array]) -> None:
    """Keep the stream in float32. `run` builds the graph of a pass. Raises Unmarked, or what the model's code raises,
    and leaves no marks."""
    if any(
        WIDENS in vars(module) for module in model.modules()
    ):  # a copy, perhaps with other blocks around the marked ones
        _act_on_marks(model)
        return
    layers: list[nn.Module] = model.layers  # pyright: ignore[reportAssignmentType]
    with _Observer(model, None) as before:
        dtype = run().dtype
    if dtype not in NAMES:
        raise Unmarked("it does not compute in 16 bits")
    setattr(layers[0], WIDENS, True)
    try:
        _act_on_marks(model)
        with _Observer(model, NAMES[dtype], before.read_float32) as after:
            if run().dtype != dtype:
                raise Unmarked("its last norm does not read the stream")
        if wide := after.products & after.read_float32 - before.read_float32:
            raise Unmarked(f"products of {len(wide)} layers would read float32")
        if not after.returned_float32 >= {id(layer) for layer in layers}:
            raise Unmarked("some layers round the stream themselves")
        _act_on_marks(model)
    except BaseException:
        unmark(model)
        raise


def unmark(model: nn.Module) -> None:
    for module in model.modules():
        for name in (WIDENS, ROUNDS):
            vars(module).pop(name, None)


def _act_on_marks(model: nn.Module) -> None:
    for module in model.modules():
        kind = type(module)
        is_marked = WIDENS in vars(module) or ROUNDS in vars(module)
        if is_marked and (kind not in _replaced or kind.__call__ is not _replaced[kind]):
            _replaced[kind] = _with_marks(kind.__call__)
            patches.replace(kind, "__call__", _replaced[kind])


def _with_marks(call: Call) -> Call:
    def marked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        marks = vars(module)
        if WIDENS in marks:
            args, kwargs = _with_first_input(args, kwargs, mx.float32)
        elif ROUNDS in marks:
            args, kwargs = _with_first_input(args, kwargs, getattr(mx, marks[ROUNDS]))
        return call(module, *args, **kwargs)

    return marked


def _with_first_input(args: Arguments, kwargs: Keywords, dtype: mx.Dtype) -> tuple[Arguments, Keywords]:
    if args:
        return (args[0].astype(dtype), *args[1:]), kwargs
    name, x = next(iter(kwargs.items()))
    return args, kwargs | {name: x.astype(dtype)}


class _Observer(contextlib.AbstractContextManager["_Observer"]):
    """Notes which modules without children read float32, and which layers return it; with a `dtype`, marks norms that
    read float32 and are not in `left_alone`."""

    def __init__(self, model: nn.Module, dtype: str | None, left_alone: set[int] | None = None) -> None:
        self.layers = {id(layer) for layer in model.layers}  # pyright: ignore
        self.leaves = {id(part): part for part in model.modules() if not part.children()}
        self.products = {key for key, leaf in self.leaves.items() if any(array.ndim > 1 for array in _arrays(leaf))}
        self.kinds = {type(part) for part in [*self.leaves.values(), *model.layers]}  # pyright: ignore
        self.dtype, self.left_alone = dtype, left_alone or set()
        self.read_float32: set[int] = set()
        self.returned_float32: set[int] = set()

    def __enter__(self) -> _Observer:
        self._replacements = [patches.replace(kind, "__call__", self._noting(kind.__call__)) for kind in self.kinds]
        return self

    def __exit__(self, *error: object) -> None:
        for replacement in reversed(self._replacements):
            patches.restore(replacement)

    def _noting(self, call: Call) -> Call:
        def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) in self.leaves and args and _is_float32(args[0]):
                self.read_float32.add(id(module))
                if self.dtype and _is_norm(module) and id(module) not in self.left_alone:
                    setattr(module, ROUNDS, self.dtype)
                    args = (args[0].astype(getattr(mx, self.dtype)), *args[1:])
            result = call(module, *args, **kwargs)
            first = result[0] if isinstance(result, (tuple, list)) else result
            if id(module) in self.layers and _is_float32(first):
                self.returned_float32.add(id(module))
            return result

        return noting


def _arrays(leaf: nn.Module) -> Iterator[mx.array]:
    return (array for array in leaf.values() if isinstance(array, mx.array))


def _is_norm(leaf: nn.Module) -> bool:
    ranks = [array.ndim for array in _arrays(leaf)]
    return set(ranks) == {1} or (not ranks and isinstance(leaf, (nn.LayerNorm, nn.RMSNorm)))


def _is_float32(x: Any) -> bool:
    return isinstance(x, mx.array) and x.dtype == mx.float32
