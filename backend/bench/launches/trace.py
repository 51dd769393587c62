"""The operations of one decoding step, with their shapes, as mlx would run it on a GPU.

`mlx.core.export_function` lists what a function computes without computing it. On a CPU mlx builds a norm, a rotary embedding and an
attention from many operations; on a GPU each is one. So while the step is traced, they and the kernels of our own are replaced by
one operation each that nothing else uses: a reverse exclusive scan (`MARKS`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.engine import device, patches
from backend.engine.swiglu import rounded_once
from backend.spec import machine

MARKS = {"rms_norm": mx.cumprod, "rope": mx.cummax, "attention": mx.cummin}
"""The scan that stands for each of mlx's fast operations."""

SCAN_NAMES = {3: "rms_norm", 0: "rope", 1: "attention"}
"""The first argument of `Scan` (mlx: `Scan::ReduceType`, in the order max, min, sum, product) → what it stands for."""


@dataclass(frozen=True)
class Array:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Operation:
    """A primitive of mlx, or one of "rms_norm", "rope", "attention", "dequantize" and "metal_kernel"."""

    name: str
    arguments: list[Any]
    inputs: list[Array]
    outputs: list[Array]


@dataclass
class TracedStep:
    inputs: list[Array] = field(default_factory=list)
    constants: dict[str, mx.array] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    outputs: set[str] = field(default_factory=set)


def traced(function: Callable[..., Any], *arrays: Any, has_metal: bool = False) -> TracedStep:
    """What `function` computes on a GPU from these arrays (nested in lists), which are not read. `has_metal`: with kernels of our own."""
    events: list[dict[str, Any]] = []
    flat = [array for _, array in tree_flatten(list(arrays))]  # pyright: ignore

    def flat_function(*flat: mx.array) -> list[mx.array]:
        values = iter(flat)
        return [array for _, array in tree_flatten(function(*_like(arrays, values)))]  # pyright: ignore

    with as_on_a_gpu(has_metal):
        mx.export_function(events.append, flat_function, *flat)
    return _read(events)


def _like(arrays: Any, values: Iterator[mx.array]) -> Any:
    if isinstance(arrays, (list, tuple)):
        return [_like(array, values) for array in arrays]
    return next(values)


def _read(events: Sequence[dict[str, Any]]) -> TracedStep:
    trace = TracedStep()
    for event in events:
        kind = event["type"]
        if kind == "inputs":
            trace.inputs = [_array(entry) for entry in event["inputs"]]
        elif kind == "outputs":
            trace.outputs = {name for name, *_ in event["outputs"]}
        elif kind == "constants":
            trace.constants = dict(event["constants"])
        elif kind == "primitive":
            inputs, outputs = ([_array(entry) for entry in event[side]] for side in ("inputs", "outputs"))
            trace.operations.append(Operation(event["name"], event["arguments"], inputs, outputs))
    trace.operations = _with_stand_ins_named(trace)
    return trace


def _array(entry: tuple[str, tuple[int, ...], Any]) -> Array:
    name, shape, dtype = entry
    return Array(name, tuple(shape), str(dtype).rsplit(".", 1)[-1])


def _with_stand_ins_named(trace: TracedStep) -> list[Operation]:
    """The operations, marks renamed. `Depends` adds the other inputs of an attention or a kernel to the first one."""
    named: list[Operation] = []
    marks: dict[str, Operation] = {}
    for operation in trace.operations:
        first = operation.inputs[0].name if operation.inputs else ""
        if _is_mark(operation):
            operation = Operation(SCAN_NAMES[operation.arguments[0]], [], operation.inputs, operation.outputs)
            if operation.name == "attention":
                marks[operation.outputs[0].name] = operation
                continue
        elif operation.name == "Depends" and first in marks:
            operation = Operation("attention", [], marks[first].inputs + operation.inputs[1:], operation.outputs)
        elif operation.name == "Depends" and first in trace.constants:
            name = KERNELS[int(trace.constants[first].flatten()[0].item())]  # pyright: ignore
            operation = Operation(name, [], operation.inputs[len(operation.outputs) :], operation.outputs)
        named.append(operation)
    return named


def _is_mark(operation: Operation) -> bool:
    """Whether a scan stands for another operation: reversed and exclusive, which no scan of the engine is but its sums."""
    return (
        operation.name == "Scan" and operation.arguments[2:] == [True, False] and operation.arguments[0] in SCAN_NAMES
    )


# ── stand-ins ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def as_on_a_gpu(has_metal: bool = False, stand_ins: bool = True) -> Iterator[None]:
    """The engine's choices those of a GPU, and with `stand_ins` mlx's fast operations one operation each, which compute nothing."""

    def marked(kind: str, x: mx.array, *others: Any) -> mx.array:
        mark = MARKS[kind](x, axis=-1, reverse=True, inclusive=False)
        arrays = [other for other in others if isinstance(other, mx.array)]
        return mx.depends(mark, arrays) if arrays else mark  # pyright: ignore

    def attention(q: mx.array, k: mx.array, v: mx.array, **rest: Any) -> mx.array:
        return marked("attention", q, k, v, *rest.values())

    fast: dict[str, Any] = {
        "rms_norm": lambda x, weight=None, *rest, **more: marked("rms_norm", x, weight),
        "rope": lambda x, *rest, offset=0, **more: marked("rope", x, offset),
        "scaled_dot_product_attention": attention,
        "metal_kernel": lambda **how: _metal_kernel,
    }
    with contextlib.ExitStack() as held:
        if stand_ins:
            for name, stand_in in fast.items():
                held.enter_context(mock.patch.object(mx.fast, name, stand_in))
            held.enter_context(mock.patch.object(mx, "dequantize", _dequantize))
        held.enter_context(mock.patch.dict("os.environ", {machine.TREAT_CPU_AS: "gpu"}))
        held.enter_context(mock.patch.object(device, "has_metal", lambda: has_metal))
        # A function with a gradient of its own cannot be exported; this one computes the same without.
        held.enter_context(mock.patch.object(patches, "swiglu_16", rounded_once))
        yield


def _metal_kernel(*, inputs: list[mx.array], output_shapes: list[Any], output_dtypes: list[Any], **how: Any) -> Any:
    return _one_kernel("metal_kernel", inputs, list(zip(output_shapes, output_dtypes, strict=True)))


def _dequantize(w: mx.array, scales: mx.array, biases: mx.array | None = None, *_: Any, **how: Any) -> mx.array:
    shape = (*scales.shape[:-1], scales.shape[-1] * how["group_size"])
    arrays = [array for array in (w, scales, biases) if array is not None]
    return _one_kernel("dequantize", arrays, [(shape, scales.dtype)])[0]


KERNELS = ("metal_kernel", "dequantize")


def _one_kernel(name: str, inputs: list[mx.array], outputs: list[tuple[Any, mx.Dtype]]) -> list[mx.array]:
    """One operation with these inputs and outputs. Its name is told by the value of constants, which is all that a trace shows."""
    constants = [mx.full(shape, KERNELS.index(name), dtype) for shape, dtype in outputs]
    mx.eval(constants)  # or they would be operations of the trace
    return mx.depends(constants, inputs)  # pyright: ignore
