"""The residual stream of a 16-bit model, kept in float32, so that its rounding does not accumulate over the layers:

    h ← h + branch(norm(round(h)))

Products keep 16-bit inputs. The first layer takes its input as float32 and the stream's norms round theirs: both calls
are patched and act on marked modules. `mark` finds them by following types through a trial pass; a model that does more
with its stream stays as it is. On Metal a kernel writes sum and rounding; other GPUs keep the model's stream, since a
decoding step is bound by launches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from backend.engine import patches

Call = Callable[..., Any]

NAMES = {mx.bfloat16: "bfloat16", mx.float16: "float16"}  # by name: a module with an `mx.Dtype` cannot be copied

WIDENS, ROUNDS = "takes_input_as_float32", "rounds_input_to"  # marks: True on the first layer; a type's name on norms

_replaced: dict[type, Call] = {}  # class → the `__call__` that `_act_on_marks` gave it


class Unmarked(Exception):
    """The stream cannot be kept in float32; the message is the reason."""


def is_float32(norm: nn.Module) -> bool:
    """True if this norm reads a stream in float32."""
    return ROUNDS in vars(norm)


def mark(model: nn.Module, run: Callable[[], mx.array]) -> None:
    """Keep the stream float32. `run` builds a pass's graph. Raises Unmarked or the model's error, leaving no marks."""
    if any(WIDENS in vars(module) for module in model.modules()):  # a copy, perhaps with other blocks around them
        _act_on_marks(model)
        return
    layers: list[nn.Module] = model.layers  # pyright: ignore[reportAssignmentType]
    before = _observe(model, run)
    if before.dtype not in NAMES:
        raise Unmarked("it does not compute in 16 bits")
    setattr(layers[0], WIDENS, True)
    try:
        _act_on_marks(model)
        after = _observe(model, run, NAMES[before.dtype], before.read_float32)
        if after.dtype != before.dtype:
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
        if WIDENS in marks or ROUNDS in marks:
            dtype = mx.float32 if WIDENS in marks else getattr(mx, marks[ROUNDS])
            if args:
                args = (args[0].astype(dtype), *args[1:])
            else:  # some models pass the input by its name (mlx_lm/models/gptj.py)
                name, x = next(iter(kwargs.items()))
                kwargs = kwargs | {name: x.astype(dtype)}
        return call(module, *args, **kwargs)

    return marked


class _Observed(NamedTuple):
    """A pass: the type of its result, and the ids of modules without children that read float32, of layers that return
    it, and of modules with matrices."""

    dtype: mx.Dtype
    read_float32: set[int]
    returned_float32: set[int]
    products: set[int]


def _observe(
    model: nn.Module, run: Callable[[], mx.array], dtype: str = "", left_alone: set[int] | None = None
) -> _Observed:
    """With a `dtype`, marks norms that read float32 and are not in `left_alone`."""
    layers = {id(layer) for layer in model.layers}  # pyright: ignore
    leaves = {id(part): part for part in model.modules() if not part.children()}
    ranks = {
        key: [array.ndim for array in leaf.values() if isinstance(array, mx.array)] for key, leaf in leaves.items()
    }
    kinds = {type(part) for part in [*leaves.values(), *model.layers]}  # pyright: ignore
    # Vectors alone, or no arrays where it is mlx's own without a scale.
    norms = {
        key
        for key, own in ranks.items()
        if set(own) == {1} or (not own and isinstance(leaves[key], (nn.LayerNorm, nn.RMSNorm)))
    }
    read_float32: set[int] = set()
    returned_float32: set[int] = set()

    def noting(call: Call) -> Call:
        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) in leaves and args and _is_float32(args[0]):
                read_float32.add(id(module))
                if dtype and id(module) in norms - (left_alone or set()):
                    setattr(module, ROUNDS, dtype)
                    args = (args[0].astype(getattr(mx, dtype)), *args[1:])
            result = call(module, *args, **kwargs)
            first = result[0] if isinstance(result, (tuple, list)) else result
            if id(module) in layers and _is_float32(first):
                returned_float32.add(id(module))
            return result

        return noted

    with patches.replaced((kind, "__call__", noting(kind.__call__)) for kind in kinds):
        result = run()
    products = {key for key, own in ranks.items() if any(rank > 1 for rank in own)}
    return _Observed(result.dtype, read_float32, returned_float32, products)


def _is_float32(x: Any) -> bool:
    return isinstance(x, mx.array) and x.dtype == mx.float32
