"""Which elementwise operations of a traced function `mlx.core.compile` runs as one kernel.

Follows `compile_fuse` of mlx/compile.cpp: from each operation backwards through its inputs, as long as they are elementwise and nothing
outside the kernel reads them. A test compares the result with the kernels that mlx itself makes of the same step.
"""

from __future__ import annotations

from collections import defaultdict

from backend.bench.launches.trace import Operation, TracedStep

UNARY = {
    *("Abs", "ArcCos", "ArcCosh", "ArcSin", "ArcSinh", "ArcTan", "ArcTanh", "AsType", "Ceil", "Conjugate", "Cos"),
    *("Cosh", "Erf", "ErfInv", "Exp", "Expm1", "Floor", "Imag", "Log", "Log1p", "Log2", "Log10", "LogicalNot"),
    *("Negative", "Real", "Remainder", "Round", "Rsqrt", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Square"),
    *("Tan", "Tanh", "BitwiseInvert"),
}
BINARY = {
    *("Add", "ArcTan2", "BitwiseBinary", "Divide", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual"),
    *("LogAddExp", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Multiply", "NaNEqual", "NotEqual", "Power"),
    "Subtract",
}
ELEMENTWISE = UNARY | BINARY | {"Select"}

MAX_DEPTH = 11
MAX_ARRAYS = 24
"""Limits of a kernel: `max_compile_depth` and `max_compile_arrays`."""


def fused(trace: TracedStep) -> dict[int, list[int]]:
    """The operations, by number, that run in the kernel of the operation that is the key; only kernels of two and more."""
    return _Fuser(trace).kernels()


class _Fuser:
    def __init__(self, trace: TracedStep) -> None:
        self.operations = trace.operations
        self.producer = {out.name: i for i, operation in enumerate(trace.operations) for out in operation.outputs}
        self.results = trace.outputs
        self.readers: dict[str, set[int]] = defaultdict(set)
        for i, operation in enumerate(trace.operations):
            for array in operation.inputs:
                self.readers[array.name].add(i)

    def kernels(self) -> dict[int, list[int]]:
        kernels: dict[int, list[int]] = {}
        taken: set[int] = set()
        for i in reversed(range(len(self.operations))):
            if i in taken or self.operations[i].name not in ELEMENTWISE:
                continue
            members = self._members(i)
            if len(members) > 1:
                kernels[i] = sorted(members)
                taken |= {j for j in members if self.operations[j].name in ELEMENTWISE}
        return kernels

    def _members(self, root: int) -> set[int]:
        """The operations that can run in the kernel of `root`."""
        members: set[int] = set()
        arrays: set[str] = set()
        shape = self.operations[root].outputs[0].shape

        def visit(name: str, depth: int) -> None:
            i = self.producer.get(name)
            if i in members:
                return
            if i is None or depth >= MAX_DEPTH or not self._can_join(self.operations[i], shape):
                arrays.add(name)
                return
            if depth and not self.readers[name] <= members:
                # Something else reads it. A broadcast is repeated for this kernel (`split_one`), anything else stays outside.
                if self.operations[i].name == "Broadcast" and len(arrays) < MAX_ARRAYS:
                    members.add(i)
                    visit(self.operations[i].inputs[0].name, depth + 1)
                else:
                    arrays.add(name)
                return
            (arrays.add if name in self.results else arrays.discard)(name)
            if len(arrays) >= MAX_ARRAYS:
                return
            members.add(i)
            for array in self.operations[i].inputs:
                visit(array.name, depth + 1)

        visit(self.operations[root].outputs[0].name, 0)
        return members

    def _can_join(self, operation: Operation, shape: tuple[int, ...]) -> bool:
        out = operation.outputs[0]
        is_elementwise = operation.name in ELEMENTWISE or operation.name == "Broadcast"
        return is_elementwise and not (out.name in self.results and out.shape != shape)
