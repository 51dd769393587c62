"""The launches of a traced step, by what launches them."""

from __future__ import annotations

from collections import Counter

from backend.bench.launches.fusion import ELEMENTWISE, fused
from backend.bench.launches.layout import Layout, fresh
from backend.bench.launches.metal import RULES, Gpu, view
from backend.bench.launches.trace import Array, Operation, TracedStep


def launches(trace: TracedStep, gpu: Gpu | None = None) -> Counter[str]:
    """Kernel → how often it is launched."""
    gpu = gpu or Gpu()
    kernels = fused(trace)
    inside = {i for root, members in kernels.items() for i in members if i != root}
    layouts = {array.name: fresh(array.shape, array.dtype) for array in trace.inputs}
    counted: Counter[str] = Counter()
    for i, operation in enumerate(trace.operations):
        inputs = [layouts.get(array.name) or _constant(array, trace) for array in operation.inputs]
        if seen := view(operation, inputs):
            # A broadcast inside a kernel is read by its stride; outside it is the same view.
            counted.update(seen.kernels)
            layouts |= _named(operation, seen.outputs)
            continue
        layouts |= _named(operation, [fresh(out.shape, out.dtype) for out in operation.outputs])
        if operation.name in ELEMENTWISE:
            counted["elementwise"] += i not in inside
        else:
            counted.update(RULES[operation.name](operation, inputs, gpu))
    return counted


def _named(operation: Operation, layouts: list[Layout]) -> dict[str, Layout]:
    return {array.name: layout for array, layout in zip(operation.outputs, layouts, strict=True)}


def _constant(array: Array, trace: TracedStep) -> Layout:
    """Weights and other arrays that the function has captured. Their strides are not told; the engine's own are row-major."""
    assert array.name in trace.constants, f"{array} comes from nowhere"
    return fresh(array.shape, array.dtype)
