"""A Metal kernel of our own: a name, the names of its arrays, and the body of its function.

`mlx.core.fast.metal_kernel` writes the function's signature around the body and compiles it when it first runs. The bodies use a small
part of Metal only, which `tests/support/metal_shim.py` compiles as C++, so that their arithmetic is tested on machines without Metal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Shaped = tuple[tuple[int, ...], mx.Dtype]


@dataclass(frozen=True, slots=True)
class MetalKernel:
    """`inputs` and `outputs` are row-major arrays of any shape; the body counts their elements itself."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str

    def __call__(
        self,
        arrays: Sequence[mx.array],
        outputs: Sequence[Shaped],
        constants: dict[str, Any],
        threads: tuple[int, int, int],
        group: tuple[int, int, int],
    ) -> list[mx.array]:
        """Run `threads` threads in groups of `group`. `constants` are the body's template arguments: integers, booleans, types."""
        kernel: Any = mx.fast.metal_kernel(
            name=self.name, input_names=list(self.inputs), output_names=list(self.outputs), source=self.body
        )
        return kernel(
            inputs=list(arrays),
            template=list(constants.items()),
            grid=threads,
            threadgroup=group,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )
