"""Speed on a CPU: Python's and mlx's threads on one core, and x86 stand-ins for what mlx computes slowly there.

One core: on Linux mlx hands every operation of some 10 µs to a thread of its own; on two cores waking it costs as much
as the operation.
Exponentials: mlx's is scalar on x86 (13 ns). e^x = 2^n · 2^r, n the nearest whole number to x · log2 e, 2^r a
polynomial on [−½, ½]. mlx ends a fusion at depth 11, and a constant beyond it makes the kernel three times slower: the
longest chain has ten operations.
Small products: OpenBLAS packs both factors unless the product is small, so W is taken as a batch of slices (a view).
Sums of rows are products with ones: mlx's take 1.8 ns a number.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.engine import cpu_setup
from backend.engine.device import on_cpu, on_x86
from backend.engine.graph import compiled_by_shape

MIN_CPU_SHARE = 0.7  # CPU seconds per second; below, another process uses the core: take another next time

MIN_DURATION_S = 0.1  # shorter measurements are ignored

TASKS = Path("/proc/self/task")
_other_core: list[int] = []  # the core to take next time; empty: the calling thread's


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep the calling thread and mlx's on one core. Does nothing where mlx computes elsewhere or pinning is not
    allowed."""
    applies = sys.platform == "linux" and on_cpu() and os.environ.get(cpu_setup.THREADS) == "1"
    threads = [threading.get_native_id(), *_mlx_threads()] if applies else []
    allowed = [os.sched_getaffinity(thread) for thread in threads]
    if len(threads) != 2 or len(allowed[0]) == 1:
        yield
        return
    # The core that the thread is on has its data in cache already; another is taken only if it was shared.
    core = _other_core.pop() if _other_core else _core_of(threads[0])
    core = core if core in allowed[0] else min(allowed[0])
    before = time.perf_counter(), _cpu_seconds(threads)
    try:
        for thread in threads:
            _pin(thread, {core})
        yield
    finally:
        # Each thread's own set: mlx's thread need not have been allowed the same cores as Python's.
        for thread, cores in zip(threads, allowed, strict=True):
            _pin(thread, cores)
        wall_s, cpu_s = time.perf_counter() - before[0], _cpu_seconds(threads) - before[1]
        if wall_s > MIN_DURATION_S and cpu_s < MIN_CPU_SHARE * wall_s:  # else two runs could share a core for ever
            # From the system's entropy, not the run's seed: two runs with one seed would choose the same core again.
            _other_core[:] = [random.SystemRandom().choice(sorted(allowed[0] - {core}))]


@cache
def _mlx_threads() -> list[int]:
    """mlx's CPU thread id, in a list: the thread that sleeps (a voluntary switch) after each operation. Empty where it
    is not found."""
    mx.eval(mx.array(0) + 1)  # mlx starts its thread with the first operation
    # This thread's id is asked for: in a fork, Python still gives the one that it had before.
    python_threads = {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}
    others = [int(task.name) for task in TASKS.iterdir() if int(task.name) not in python_threads]
    before = {task: _voluntary_switches(task) for task in others}
    # mlx has no call that names its thread. An idle one sleeps (a voluntary switch) after each of these operations;
    # threads of a BLAS or of Qt do not.
    tries = 20
    for number in range(tries):
        mx.eval(mx.array(number) + 1)
    woken = {task: _voluntary_switches(task) - before[task] for task in others}
    thread = max(woken, key=lambda task: woken[task], default=0)
    try:
        # Read once at the start, so that `on_one_core` cannot fail later on a file that does not exist here.
        _cpu_seconds([thread]), _core_of(thread)
    except (OSError, ValueError, IndexError):
        return []
    return [thread] if woken[thread] > tries // 2 else []


def _pin(thread: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:
        return  # some containers forbid it: everything works there, as fast as without


def _core_of(thread: int) -> int:
    return int((TASKS / str(thread) / "stat").read_text().rpartition(")")[2].split()[36])


def _voluntary_switches(thread: int) -> int:
    try:
        words = (TASKS / str(thread) / "status").read_text().split()
        return int(words[words.index("voluntary_ctxt_switches:") + 1])
    except (OSError, ValueError):
        return 0


def _cpu_seconds(threads: list[int]) -> float:
    return sum(int((TASKS / str(thread) / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


COMPILER = "g++"
# mlx's errors where the compiler left no library, as one does that a signal has ended
LEFT_NOTHING = ("Could not load C++ shared library", "Failed to execute command with return code")
_SLOWER = "so compiled functions run one operation at a time, and sampling takes somewhat longer"


def left_nothing(error: RuntimeError) -> bool:
    """True if mlx raised this because its compiler failed or was interrupted."""
    return str(error).startswith(LEFT_NOTHING)


@cache
def check_compiler() -> str:
    """Try mlx's compiler (g++), and turn compiling off if it fails. Returns a sentence where nothing is compiled, else
    ""."""
    if not on_cpu():
        return ""
    if shutil.which(COMPILER) is None:
        return f"{COMPILER} is not installed, {_SLOWER}."
    try:
        mx.eval(mx.compile(lambda x: mx.exp(x) + x)(mx.zeros((2, 2))))
    except RuntimeError:
        mx.disable_compile()
        return f"{COMPILER} is installed but cannot compile (are the C++ headers missing?), {_SLOWER}."
    return ""


LOG2_E = 1 / math.log(2)

# 2^r as a polynomial in r (Remez): relative error below 1e-7 on [−½, ½]
EXP2_COEFFICIENTS = (1.0, 0.6931469776, 0.2402224209, 0.0555073374, 0.0096715126, 0.0013264727)

MIN_EXPONENT = -127.0  # its bits are all zero: the number 0

# has no fraction bits: adding it rounds to a whole number, plus float32's bias of 127
ROUND_AND_BIAS = 1.5 * 2.0**23 + 127

SAME_LOW_BITS = ROUND_AND_BIAS + 512  # with the same last 9 bits: the same sum in two kernels would become a third one


def exp_is_scalar() -> bool:
    return on_x86()


def exp_nonpositive(x: mx.array) -> mx.array:
    """e^x for float32 x ≤ 0, as exact as mlx's; below the smallest normal float32 0. No gradient."""
    return _exp(x) if exp_is_scalar() else mx.exp(x)


def exp_clipped(x: mx.array) -> mx.array:
    """e^x for any float32 x, at most 2^127. For use under `compiled_by_shape`."""
    return _exp2(mx.clip(x * LOG2_E, MIN_EXPONENT, -MIN_EXPONENT))


def _exp2(y: mx.array) -> mx.array:
    # The sum is a whole number below 2^24. Shifting by 23 moves its low byte, n + 127 ≤ 254, into the exponent field
    # and pushes everything above it out.
    power = mx.left_shift((y + SAME_LOW_BITS).astype(mx.int32), 23).view(mx.float32)
    # (y + ROUND_AND_BIAS) − ROUND_AND_BIAS is exactly n, so r = y − n lies in [−½, ½].
    r = y - ((y + ROUND_AND_BIAS) - ROUND_AND_BIAS)
    value: Any = EXP2_COEFFICIENTS[-1]
    for coefficient in reversed(EXP2_COEFFICIENTS[1:-1]):  # Horner, but for the last step
        value = value * r + coefficient
    # The last step, with both terms times 2^n: that changes their exponents only, so it adds no rounding error, and the
    # kernel is one operation less deep than with a product at the end. n = −127 gives the bits of 0.
    result = value * (r * power) + power
    return mx.contiguous(result)  # copies nothing, and ends the fusion


@compiled_by_shape
def _exp(x: mx.array) -> mx.array:
    # One bound suffices for x ≤ 0. It also turns −inf, a masked score, into 2^−127, whose bits are those of 0.
    return _exp2(mx.maximum(x * LOG2_E, MIN_EXPONENT))


def row_sums(x: mx.array) -> mx.array:
    """Sums over the last axis, [..., 1], of float32."""
    return x @ mx.ones((x.shape[-1], 1)) if on_x86() else x.sum(axis=-1, keepdims=True)


# OpenBLAS multiplies up to this rows · columns · inner and rows · columns without packing
UNPACKED_FLOPS, UNPACKED_SIZE = 10**6, 1024

MIN_WIDTH, MAX_WIDTH = 32, 512  # columns of a slice

MAX_ROWS = 16  # with more rows packing costs little

STORED_WIDTH = 64  # columns of a slice of weights that are copied anyway, so stored as the product reads them


def sliced(weight: mx.array) -> mx.array:
    """W [out, in] as `matmul_transposed` takes the least time to read it, for weights that are copied anyway: on x86
    slices [n, in, STORED_WIDTH]."""
    outer, inner = weight.shape
    if outer % STORED_WIDTH or weight.dtype != mx.float32 or not on_x86():
        return weight
    return mx.contiguous(weight.reshape(-1, STORED_WIDTH, inner).swapaxes(1, 2))


def matmul_transposed(x: mx.array, weight: mx.array) -> mx.array:
    """[…, in] times the transpose of W [out, in] or `sliced(W)`; in slices for few float32 rows on x86."""
    *before, inner = x.shape
    rows, slices = x.size // inner, weight
    if weight.ndim == 2:
        width = slice_width(rows, *reversed(weight.shape)) if x.dtype == weight.dtype == mx.float32 and on_x86() else 0
        if not width:
            return x @ weight.T
        # Transposed views: BLAS takes the transposition as a flag, so W is read where it is.
        slices = weight.reshape(-1, width, inner).swapaxes(1, 2)
    return (x.reshape(1, rows, inner) @ slices).swapaxes(0, 1).reshape(*before, -1)


def slice_width(rows: int, inner: int, outer: int) -> int:
    """Rows of W in a slice, the most that make an unpacked product; 0 where none do, or all of W does."""
    width = MAX_WIDTH if rows <= MAX_ROWS else 0
    while width >= MIN_WIDTH and (
        rows * width > UNPACKED_SIZE or rows * width * inner > UNPACKED_FLOPS or outer % width
    ):
        width //= 2
    return width if MIN_WIDTH <= width < outer else 0


def _sigmoid(x: mx.array) -> mx.array:
    return 1 / (1 + exp_clipped(-x)) if exp_is_scalar() else mx.sigmoid(x)


@compiled_by_shape
def _forward(gate: mx.array, up: mx.array) -> mx.array:
    gate_32 = gate.astype(mx.float32)
    return (gate_32 * _sigmoid(gate_32) * up.astype(mx.float32)).astype(up.dtype)


@compiled_by_shape
def _backward(gate: mx.array, up: mx.array, d_out: mx.array) -> tuple[mx.array, mx.array]:
    gate_32, up_32, d_out_32 = (x.astype(mx.float32) for x in (gate, up, d_out))
    sigmoid = _sigmoid(gate_32)
    silu = gate_32 * sigmoid
    d_gate = d_out_32 * up_32 * (sigmoid + silu - silu * sigmoid)  # silu' = σ + g σ (1 − σ)
    return d_gate.astype(gate.dtype), (d_out_32 * silu).astype(up.dtype)


@mx.custom_function
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up, elementwise, of any shape they share, rounded once to the type of `up`."""
    return _forward(gate, up)


@swiglu.vjp
def _swiglu_vjp(primals: Any, d_out: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
    return _backward(*primals, d_out)
