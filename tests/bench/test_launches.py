"""Launches are counted as mlx would launch them on Metal: fused as mlx fuses, and each of Metal's extra kernels seen."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from backend.bench.launches import fusion, layout
from backend.bench.launches.count import launches
from backend.bench.launches.decoding_step import (
    DEFAULTS,
    QWEN3_600M,
    SMALL,
    Blocks,
    UntriedRollout,
    qwen3_policy,
    step_arrays,
    step_launches,
)
from backend.bench.launches.metal import Gpu
from backend.bench.launches.trace import as_on_a_gpu, traced
from backend.engine.metal.heads import HeadNorms, Heads, rotated_heads_plain
from backend.engine.slot_cache import PackedSlotCache, StepContext

M1, M4, M5 = Gpu(13, "g"), Gpu(16, "s"), Gpu(17, "s")


def counted(function: Callable[..., Any], *arrays: Any, gpu: Gpu = M4) -> Counter[str]:
    return launches(traced(function, *arrays), gpu)


# ── fusion ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def small_step(layers: int) -> tuple[UntriedRollout, list[Any]]:
    rollout = UntriedRollout(qwen3_policy(bits=4, layers=layers), 8)
    rollout.fused.refresh()
    return rollout, step_arrays(rollout, SMALL, rows=8, columns=64)


def test_elementwise_operations_fuse_as_mlx_itself_fuses_them() -> None:
    rollout, arrays = small_step(2)
    mx.eval(arrays)
    step = rollout.compiled_step(DEFAULTS)
    with as_on_a_gpu():
        graph = io.StringIO()
        mx.export_to_dot(graph, *[array for _, array in tree_flatten(step(*arrays))])  # pyright: ignore
    trace = traced(step, *arrays)
    ours = ["".join(trace.operations[i].name for i in kernel) for kernel in fusion.fused(trace).values()]
    mlx_s = re.findall(r'label ="Compiled([^"]+)"', graph.getvalue())
    # mlx repeats a broadcast for each use, and tells the kinds of `BitwiseBinary` apart.
    names = [[re.sub("Broadcast|Bitwise[A-Z][a-z]+", "", name) for name in all_names] for all_names in (ours, mlx_s)]
    assert sorted(map(sorted, names[0])) == sorted(map(sorted, names[1])) and len(ours) > 10


# ── layouts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_view_is_free_and_a_reshape_that_moves_elements_is_a_copy() -> None:
    x = mx.zeros((4, 6))
    assert counted(lambda x: x.T[1:3].reshape(2, 4, 1), x) == {}
    assert counted(lambda x: x.T.reshape(4, 6), x) == {"copy to reshape": 1}


def test_layouts_know_what_is_contiguous() -> None:
    x = layout.fresh((2, 3, 4), "float32")
    assert x.is_row_contiguous and x.is_contiguous
    swapped = layout.transposed(x, (1, 0, 2))
    assert swapped.is_contiguous and not swapped.is_row_contiguous
    piece = layout.sliced(x, (2, 3, 2), (1, 1, 1))
    assert (
        not piece.is_contiguous and layout.reshaped(piece, (6, 2)) is not None and layout.reshaped(piece, (12,)) is None
    )


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_thin_product_is_split_and_a_gemv_is_not() -> None:
    x, a = mx.zeros((8, 1, 1024), mx.bfloat16), mx.zeros((1024, 8), mx.bfloat16)
    split = {"product": 1, "split-K sum of product": 1}
    assert counted(mx.matmul, x, a) == split
    transposed = mx.zeros((8, 1024), mx.bfloat16)
    # Few rows times a transposed matrix are a wide gemv from M3 on, up to 15 rows.
    assert counted(lambda x, a: x @ a.T, x, transposed) == {"product": 1}
    assert counted(lambda x, a: x @ a.T, x, transposed, gpu=M1) == split
    assert counted(lambda x, a: x @ a.T, mx.zeros((32, 1, 1024), mx.bfloat16), transposed) == split
    # A matrix times one vector a row is a gemv for all rows and chips.
    for gpu in (M1, M4, M5):
        assert counted(lambda x, a: a @ x.reshape(-1, 1024, 1), x, transposed, gpu=gpu) == {"product": 1}


def test_a_quantised_product_of_many_rows_is_split() -> None:
    w, scales = mx.zeros((4096, 128), mx.uint32), mx.zeros((4096, 16), mx.bfloat16)
    for rows, parts in ((8, 1), (32, 2)):
        x = mx.zeros((rows, 1, 1024), mx.bfloat16)
        got = counted(lambda x, w, s: mx.quantized_matmul(x, w, s, s, True, 64, 4), x, w, scales)
        assert got.total() == parts and got["quantised product"] == 1


@pytest.mark.parametrize(("length", "kernels"), [(2000, 1), (4096, 4), (151_936, 16)])
def test_a_long_sort_takes_passes(length: int, kernels: int) -> None:
    assert counted(lambda x: mx.sort(x, axis=-1), mx.zeros((4, length))).total() == kernels


@pytest.mark.parametrize(
    ("shape", "kernels"), [((4, 64, 2374), 1), ((4, 512, 512), 2), ((64, 512, 512), 1), ((4, 2048, 8), 2)]
)
def test_a_maximum_over_long_columns_takes_two_passes_where_it_leaves_few_results(
    shape: tuple[int, ...], kernels: int
) -> None:
    assert counted(lambda x: x.max(axis=1), mx.zeros(shape)) == {"reduction": kernels}


def test_a_norm_copies_a_slice_but_not_whole_heads() -> None:
    x = mx.zeros((8, 512))
    assert counted(lambda x: mx.fast.rms_norm(x.reshape(8, 4, 128), None, 1e-6), x) == {"norm": 1}
    part = counted(lambda x: mx.fast.rms_norm(x[:, :256].reshape(8, 2, 128), None, 1e-6), x)
    assert part == {"copy before norm": 1, "norm": 1}


def test_attention_copies_what_lies_otherwise() -> None:
    def attend(q: mx.array, kv: mx.array, mask: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, kv[..., :64], kv[..., 64:], scale=1, mask=mask)

    q, kv = mx.zeros((8, 4, 1, 64)), mx.zeros((8, 2, 32, 128))
    assert counted(attend, q, kv, mx.zeros((8, 4, 1, 32), mx.bool_)) == {"attention": 1}
    shared = counted(attend, q, kv, mx.zeros((8, 1, 1, 32), mx.bool_))
    assert shared == {"attention": 1, "copy of the mask before attention": 1}
    halves = counted(lambda kv, q: attend(q, kv.reshape(2, 8, 32, 128).swapaxes(0, 1), None), kv, q)  # pyright: ignore
    assert halves["copy of keys or values before attention"] == 2


@pytest.mark.parametrize(("H", "J"), [(4, 4), (4, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize("has_norms", [True, False])
def test_heads_become_queries_and_a_written_cache_without_a_copy(H: int, J: int, has_norms: bool) -> None:
    """Whatever the ratio of queries to keys."""
    heads, weight = Heads(H, J, 64), mx.ones(64, mx.bfloat16)
    mx.eval(weight)
    norms = HeadNorms(weight, weight, 1e-6) if has_norms else None

    def attend(qkv: mx.array, rotation: mx.array, cache: mx.array, slot: mx.array) -> tuple[mx.array, mx.array]:
        queries, kv = rotated_heads_plain(qkv, rotation, heads, norms)
        packed = PackedSlotCache(cache, StepContext(slot, slot, slot))
        return mx.fast.scaled_dot_product_attention(queries, *packed.write(kv), scale=1.0), packed.kv

    arrays = [
        mx.zeros((8, heads.all * 64), mx.bfloat16),
        mx.zeros((8, 2, 64)),
        mx.zeros((8, J, 2, 32, 64), mx.bfloat16),
    ]
    expected = {"elementwise": 1, "scatter": 1, "attention": 1} | ({"norm": 1} if has_norms else {})
    assert counted(attend, *arrays, mx.array(3)) == expected


def test_a_slice_update_computes_its_offset_in_a_kernel_and_a_scatter_does_not() -> None:
    cache, new, slot = mx.zeros((8, 2, 32, 64)), mx.zeros((8, 2, 1, 64)), mx.array(3)
    assert counted(lambda c, n, s: mx.slice_update(c, n, s, (2,)), cache, new, slot).total() == 2
    assert counted(lambda c, n, s: mx.put_along_axis(c, s.reshape(1, 1, 1, 1), n, 2), cache, new, slot).total() == 1


def test_an_operation_without_a_rule_is_an_error() -> None:
    with pytest.raises(KeyError, match="FFT"):
        counted(lambda x: mx.abs(mx.fft.rfft(x)), mx.zeros((2, 8)))


# ── a decoding step ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_layer_launches_the_same() -> None:
    """So that one and two layers tell the number of all."""

    def of(layers: int) -> int:
        rollout, arrays = small_step(layers)
        return counted(rollout.compiled_step(DEFAULTS), *arrays).total()

    one, two, three = map(of, (1, 2, 3))
    assert three - two == two - one > 20


BARS = [(Blocks.OWN, 4, 784), (Blocks.FUSED, 4, 617), (Blocks.KERNELS, 4, 393), (Blocks.FUSED, None, 614)]
"""What is reached; a change that needs more is seen here."""


@pytest.mark.parametrize(("blocks", "bits", "most"), BARS)
def test_launches_of_a_decoding_step(blocks: Blocks, bits: int | None, most: int) -> None:
    """28 layers, default sampling over Qwen3's vocabulary, eight rows, an M4 Max. Width matters to products that are split only."""
    size = replace(SMALL, vocabulary=QWEN3_600M.vocabulary)
    assert step_launches(blocks, bits=bits, size=size).total() <= most


@pytest.mark.proof
@pytest.mark.parametrize(("blocks", "bits", "most"), BARS)
def test_launches_of_a_decoding_step_of_real_width(blocks: Blocks, bits: int | None, most: int) -> None:
    assert step_launches(blocks, bits=bits).total() <= most
