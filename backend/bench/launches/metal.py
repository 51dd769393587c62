"""What mlx's Metal backend launches for one operation: a rule for each, after mlx/backend/metal/*.cpp and mlx/backend/gpu/*.cpp of 0.32.

Most operations are one kernel. The others are what this file is about: a copy of an input in the wrong layout, a product whose
summed axis is split and added up by a second kernel, a sort in passes. An operation without a rule raises, so that none is missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from string import ascii_lowercase

from backend.bench.launches.layout import Layout, broadcast, fresh, reshaped, sliced, strided, transposed
from backend.bench.launches.trace import Operation

HALF = {"float16", "bfloat16"}


@dataclass(frozen=True)
class Gpu:
    """A chip as mlx tells chips apart: `applegpu_g16s` is generation 16 (13 is M1, 17 is M5), size s (g: plain and Pro, s: Max,
    d: Ultra)."""

    generation: int = 16
    size: str = "s"

    @property
    def has_nax(self) -> bool:
        """Matrix units, from M5 on (mlx: `is_nax_available`)."""
        return self.generation >= 17


@dataclass(frozen=True)
class Launched:
    """The kernels of an operation, a name for each, and the layouts of its outputs."""

    kernels: list[str]
    outputs: list[Layout]


Rule = Callable[[Operation, list[Layout], Gpu], list[str]]

# ── views: no launch, unless a reshape has to copy ───────────────────────────────────────────────────────────────────


def view(operation: Operation, inputs: list[Layout]) -> Launched | None:
    """For operations that only describe their input's buffer anew; None for others. mlx/backend/gpu/primitives.cpp."""
    name, arguments, outputs = operation.name, operation.arguments, operation.outputs
    if name in ("Depends", "StopGradient", "Copy", "CustomTransforms"):
        return Launched([], inputs[: len(outputs)])
    first, shape = (inputs[0], outputs[0].shape) if inputs else (None, ())
    if first is None:
        return None
    if name == "Transpose":
        return Launched([], [transposed(first, arguments[0])])
    if name in ("Broadcast", "BroadcastAxes"):
        return Launched([], [broadcast(first, shape)])
    if name == "AsStrided":  # of an array in row-major order: what else comes is flattened, and so copied, first
        return Launched([], [strided(first, shape, arguments[1])])
    if name == "View" and _bits(outputs[0].dtype) == _bits(first.dtype):
        return Launched([], [replace(first, dtype=outputs[0].dtype)])
    if name == "Slice":
        return Launched([], [sliced(first, shape, arguments[2])])
    if name == "Split":
        return Launched([], [sliced(first, out.shape, [1] * len(out.shape)) for out in outputs])
    if name in ("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"):
        layout = reshaped(first, shape)
        return Launched([], [layout]) if layout else Launched(["copy to reshape"], [fresh(shape, first.dtype)])
    return None


def _bits(dtype: str) -> int:
    """Of a number of this type: 16 for "bfloat16", 8 for "bool"."""
    return int(dtype.lstrip(ascii_lowercase) or 8)


# ── matrix products ──────────────────────────────────────────────────────────────────────────────────────────────────


def matmul(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """`Matmul` and `AddMM`, mlx/backend/metal/matmul.cpp: `check_transpose`, `gemv`, `gemv_wide` (mlx#3888), `steel_matmul_axpby`."""
    a, b = inputs[:2]
    rows, k, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    copies = [f"copy before {_product(operation)}" for x in (a, b) if not _is_matrix(x)]
    batch = math.prod(a.shape[:-2])
    # Batches that share b become rows of one product.
    if batch > 1 and a.is_row_contiguous and all(stride == 0 for stride in b.strides[:-2]):
        rows, batch = rows * batch, 1
    if min(rows, columns) == 1 or _is_wide_gemv(a, b, rows, k, columns, gpu):
        return [*copies, _product(operation)]
    split = batch == 1 and _is_split(rows, k, columns, a.dtype, gpu)
    return [*copies, _product(operation), *([f"split-K sum of {_product(operation)}"] if split else [])]


def _product(operation: Operation) -> str:
    return "product plus addend" if operation.name == "AddMM" else "product"


def _is_matrix(x: Layout) -> bool:
    """Whether the last two axes are row- or column-major (`check_transpose`)."""
    m, n, s, t = *x.shape[-2:], *x.strides[-2:]
    return (t == 1 and (m == 1 or s >= n)) or (s == 1 and (n == 1 or t >= m))


def _is_wide_gemv(a: Layout, b: Layout, rows: int, k: int, columns: int, gpu: Gpu) -> bool:
    """`gemv_wide`: 2 to 15 rows in 16 bits times a transposed matrix, from M3 on."""
    is_transposed = b.strides[-2] == 1 and columns > 1
    return gpu.generation >= 15 and a.dtype in HALF and 2 <= rows <= 15 and k % 4 == 0 and is_transposed


def _is_split(rows: int, k: int, columns: int, dtype: str, gpu: Gpu) -> bool:
    largest = max(rows, columns)
    if gpu.has_nax and dtype != "float32":
        return k >= 3 * largest or (largest <= 1024 and k > 2 * largest)
    tiles = math.ceil(rows / 16) * math.ceil(columns / 16)
    return tiles <= (2048 if gpu.size in "sd" else 1024) and k // 16 >= 8 and k >= largest


def quantized_matmul(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """mlx/backend/metal/quantized.cpp: `qmv` below `get_qmv_batch_limit` rows, `qmm_splitk` from there on."""
    x, group_size = inputs[0], operation.arguments[0]
    copies = [] if _rows_lie_behind_each_other(x) else ["copy before quantised product"]
    k, columns = x.shape[-1], operation.outputs[0].shape[-1]
    rows = x.size // k
    if rows < _qmv_limit(k, columns, gpu):
        return [*copies, "quantised product"]
    parts = min(max(1, 512 // (math.ceil(columns / 32) * math.ceil(rows / 32))), k // max(group_size, 32))
    while parts > 1 and k % (parts * max(group_size, 32)):
        parts -= 1
    return [*copies, "quantised product", *(["split-K sum of quantised product"] if parts > 1 else [])]


def _rows_lie_behind_each_other(x: Layout) -> bool:
    """`ensure_row_contiguous_matrix`, for a batch of one matrix."""
    return x.is_row_contiguous or (x.strides[-1] == 1 and x.strides[-2] == x.shape[-1])


def _qmv_limit(k: int, columns: int, gpu: Gpu) -> int:
    size = 0 if max(k, columns) <= 2048 else 1 if max(k, columns) <= 4096 else 2
    if gpu.size == "d":
        return (32, 18, 12)[size]
    return ((14, 10, 6) if gpu.generation <= 14 else (18, 12, 10))[size]


# ── mlx.fast ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def rms_norm(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """mlx/backend/metal/normalization.cpp: its rows must lie behind each other without gaps."""
    x = inputs[0]
    no_copy = x.is_contiguous and x.strides[-1] == 1
    if no_copy and len(x.shape) > 1:
        no_copy = x.strides[-2] in (0, x.shape[-1]) or x.shape[-2] == 1
    return ["norm"] if no_copy else ["copy before norm", "norm"]


def rope(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """mlx/backend/metal/rope.cpp, for rotations of whole heads."""
    x = inputs[0]
    axes = len(x.shape)
    heads, length, size = (1, 1, 1, *x.shape)[-3:]
    has_one_row = all(n == 1 for n in x.shape[:-3])
    heads_and_positions_swapped = axes == 4 and x.strides[:3] == (length * heads * size, size, heads * size)
    if x.is_row_contiguous or has_one_row or heads_and_positions_swapped:
        return ["rotary embedding"]
    return ["copy before rotary embedding", "rotary embedding"]


def attention(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """mlx/backend/metal/scaled_dot_product_attention.cpp for one query a row: `sdpa_vector`, in two passes where keys are many."""
    q, k, v, *masks = inputs
    kernels = []
    if not (q.is_row_contiguous or _is_lone(q)):
        kernels.append("copy of queries before attention")
    kernels += ["copy of keys or values before attention" for x in (k, v) if not _heads_lie_regularly(x)]
    for mask in masks:
        whole = broadcast(mask, (*q.shape[:3], k.shape[2]))  # mlx/fast.cpp
        if not (whole.is_row_contiguous or min(q.shape[:2]) == 1 or _heads_lie_regularly(whole)):
            kernels.append("copy of the mask before attention")
    columns, is_grouped = k.shape[2], k.shape[1] < q.shape[1]
    two_passes = (gpu.size in "sd" and columns >= 1024) or (is_grouped and columns >= 4096)
    return [*kernels, "attention", *(["second pass of attention"] if two_passes else [])]


def _is_lone(q: Layout) -> bool:
    """One row or one head: the other axis may be swapped with the positions (`q_copy_unless`)."""
    if min(q.shape[:2]) > 1:
        return False
    axis = 1 if q.shape[0] == 1 else 0
    return q.strides[3] == 1 and q.strides[2] == q.shape[3] * q.shape[axis] and q.strides[axis] == q.shape[3]


def _heads_lie_regularly(x: Layout) -> bool:
    """`kv_copy_unless` and `mask_copy_unless`: (row, head) pairs at one distance."""
    return x.strides[-1] == 1 and (min(x.shape[:2]) == 1 or x.strides[0] == x.strides[1] * x.shape[1])


def metal_kernel(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """mlx/backend/metal/custom_kernel.cpp: every input is made row-contiguous."""
    return [*["copy before a kernel of our own" for x in inputs if not x.is_row_contiguous], "kernel of our own"]


# ── everything else ──────────────────────────────────────────────────────────────────────────────────────────────────


def slice_update(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """`DynamicSliceUpdate`, mlx/backend/gpu/primitives.cpp: one thread computes the offset, then a copy writes there."""
    return ["offset of a slice update", "slice update"]


def sort(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """`Sort`, `Partition` and their index forms, mlx/backend/metal/sort.cpp: a merge sort in all cases."""
    x = inputs[0]
    length = x.shape[operation.arguments[-1]]
    wanted = math.ceil(length / 4)
    threads = next((n for n in (32, 64, 128, 256) if wanted <= n), 512)
    if threads == 512 and x.dtype.endswith("64"):
        threads = 256
    blocks = math.ceil(length / (4 * threads))
    if blocks == 1:
        return ["sort"]
    return ["sort", *(2 * math.ceil(math.log2(blocks)) * ["merge pass of a sort"]), "copy out of a sort"]


def scan(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """mlx/backend/metal/scan.cpp."""
    return ["running sum"] if inputs[0].is_contiguous else ["copy before running sum", "running sum"]


def reduce(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """mlx/backend/metal/reduce.cpp, over one axis: rows, or columns of an array in row-major order."""
    x, axes = inputs[0], list(operation.arguments[1])
    if axes == [len(x.shape) - 1]:
        return ["reduction"] if x.strides[-1] == 1 else ["copy before reduction", "reduction"]
    if len(axes) > 1 or not x.is_row_contiguous:
        raise NotImplementedError(f"a sum over axes {axes} of {x}")
    length, columns = x.shape[axes[0]], x.strides[axes[0]]
    is_long_and_narrow = columns < 32 and length >= 1024
    has_few_outputs = length > 256 and x.size // length // 32 < 1024
    passes = 2 if is_long_and_narrow or has_few_outputs else 1
    return passes * ["reduction"]


def concatenate(operation: Operation, inputs: list[Layout], gpu: Gpu) -> list[str]:
    """mlx/backend/metal/slicing.cpp: a copy of each part."""
    return ["copy to concatenate"] * len(inputs)


def one(name: str) -> Rule:
    """Always this kernel alone."""
    return lambda operation, inputs, gpu: [name]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Matmul", "AddMM"), matmul),
    **dict.fromkeys(("Sort", "Partition", "ArgSort", "ArgPartition"), sort),
    **dict.fromkeys(("Gather", "GatherAxis"), one("gather")),
    # Where the array is not used again (`is_donatable`) the update is written into its buffer; else a copy comes first.
    **dict.fromkeys(("Scatter", "ScatterAxis"), one("scatter")),
    "ArgReduce": one("reduction"),
    "Arange": one("arange"),
    "Concatenate": concatenate,
    "DynamicSliceUpdate": slice_update,
    "Full": one("fill"),
    "QuantizedMatmul": quantized_matmul,
    "Reduce": reduce,
    "Scan": scan,
    "Softmax": one("reduction"),
    "LogSumExp": one("reduction"),
    "attention": attention,
    "dequantize": one("dequantize"),
    "metal_kernel": metal_kernel,
    "rms_norm": rms_norm,
    "rope": rope,
}
