"""Runs the body of a Metal kernel as C++: the small part of Metal that the bodies use, on threads."""

import shutil
import subprocess
import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.metal import GATE, MetalKernel
from backend.engine.patches import swiglu

COMPILER = shutil.which("g++")
FLAGS = ("-std=c++20", "-O0", "-pthread")

METAL = r"""
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

// bfloat16: the upper half of a float32, rounded to the nearest even.
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    bits = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
  }
};
using float16_t = _Float16;
using uint = unsigned;

#define device
#define threadgroup static  // one threadgroup runs at a time

struct uint3 { uint x, y, z; };
thread_local uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
thread_local uint thread_index_in_simdgroup, simdgroup_index_in_threadgroup;

namespace metal {
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float exp(float x) { return std::exp(x); }
}

struct Simdgroup { std::barrier<> lanes{32}; float values[32]; };
std::vector<std::unique_ptr<Simdgroup>> simdgroups;
std::unique_ptr<std::barrier<>> whole_group;

enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { whole_group->arrive_and_wait(); }

inline float simd_sum(float x) {
  auto& simd = *simdgroups[simdgroup_index_in_threadgroup];
  simd.values[thread_index_in_simdgroup] = x;
  simd.lanes.arrive_and_wait();
  float sum = 0;
  for (float value : simd.values) sum += value;
  simd.lanes.arrive_and_wait();
  return sum;
}

// Threads (x, y, z) in groups along x; mlx's grids count threads, not groups.
template <typename Body>
void launch(uint3 grid, uint group, Body body) {
  whole_group = std::make_unique<std::barrier<>>(group);
  for (uint i = 0; i < group / 32; ++i) simdgroups.push_back(std::make_unique<Simdgroup>());
  for (uint z = 0; z < grid.z; ++z) for (uint y = 0; y < grid.y; ++y) for (uint g = 0; g < grid.x / group; ++g) {
    std::vector<std::thread> threads;
    for (uint t = 0; t < group; ++t) threads.emplace_back([=] {
      thread_position_in_grid = {g * group + t, y, z};
      thread_position_in_threadgroup = {t, 0, 0};
      threadgroup_position_in_grid = {g, y, z};
      thread_index_in_simdgroup = t % 32;
      simdgroup_index_in_threadgroup = t / 32;
      body();
    });
    for (auto& thread : threads) thread.join();
  }
}

template <typename T> std::vector<T> read(const char* name, size_t count) {
  std::vector<T> values(count);
  FILE* file = std::fopen(name, "rb");
  if (std::fread(values.data(), sizeof(T), count, file) != count) std::abort();
  std::fclose(file);
  return values;
}
template <typename T> void write(const char* name, const std::vector<T>& values) {
  FILE* file = std::fopen(name, "wb");
  std::fwrite(values.data(), sizeof(T), values.size(), file);
  std::fclose(file);
}
"""

TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}


def run(
    kernel: MetalKernel,
    folder: Path,
    arrays: list[mx.array],
    outputs: list[tuple[tuple[int, ...], mx.Dtype]],
    constants: dict[str, Any],
    threads: tuple[int, int, int],
    group: tuple[int, int, int],
) -> list[mx.array]:
    """What `kernel(arrays, …)` returns on Metal."""
    assert COMPILER and group[1:] == (1, 1) and threads[0] % group[0] == 0
    work = next(path for i in count() if not (path := folder / f"{kernel.name}-{i}").exists())
    work.mkdir()
    for name, array in zip(kernel.inputs, arrays, strict=True):
        (work / name).write_bytes(_bytes(array))
    (work / "kernel.cpp").write_text(_program(kernel, arrays, outputs, constants, threads, group[0]))
    header = f"-I{_header_folder(COMPILER)}"
    subprocess.run([COMPILER, *FLAGS, header, "kernel.cpp", "-o", "kernel"], cwd=work, check=True)
    subprocess.run(["./kernel"], cwd=work, check=True)
    return [_array((work / name).read_bytes(), *shaped) for name, shaped in zip(kernel.outputs, outputs, strict=True)]


@cache
def _header_folder(compiler: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="grpo-studio-metal-"))
    (folder / "metal.h").write_text(METAL)
    subprocess.run([compiler, *FLAGS, "-x", "c++-header", "metal.h", "-o", "metal.h.gch"], cwd=folder, check=True)
    return folder


def _program(
    kernel: MetalKernel, arrays: list[mx.array], outputs: Any, constants: dict[str, Any], threads: Any, group: int
) -> str:
    read, kept = [], []
    for name, array in zip(kernel.inputs, arrays, strict=True):
        kind = TYPES[array.dtype]
        read.append(f'auto {name}_ = read<{kind}>("{name}", {array.size}); const {kind}* {name} = {name}_.data();')
    for name, (shape, dtype) in zip(kernel.outputs, outputs, strict=True):
        kind = TYPES[dtype]
        read.append(f"std::vector<{kind}> {name}_({np.prod(shape)}); {kind}* {name} = {name}_.data();")
        kept.append(f'write("{name}", {name}_);')
    # As template arguments, so that `constexpr` in the body is what it is in Metal.
    named = [f"using {name} = {TYPES[value]};" for name, value in constants.items() if isinstance(value, mx.Dtype)]
    named += [f"constexpr int {name} = {int(v)};" for name, v in constants.items() if not isinstance(v, mx.Dtype)]
    grid = "{" + ", ".join(map(str, threads)) + "}"
    lines = [*named, *read, f"launch({grid}, {group}, [=] {{{kernel.body}}});", *kept]
    return "\n".join(['#include "metal.h"', "int main() {", *lines, "}"])


def _bytes(array: mx.array) -> bytes:
    is_bfloat16 = array.dtype == mx.bfloat16
    return np.array(mx.contiguous(array).view(mx.uint16) if is_bfloat16 else array).tobytes()


def _array(data: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bfloat16:
        return mx.array(np.frombuffer(data, np.uint16)).view(mx.bfloat16).reshape(shape)
    return mx.array(np.frombuffer(data, np.float16 if dtype == mx.float16 else np.float32)).reshape(shape)


def adapted_plain(base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array, after: int) -> mx.array:
    """`metal.adapted` in plain mlx."""
    y_BN = mx.addmm(base_BN, x_BK @ a_RK.T, b_RN)
    return swiglu(*mx.split(y_BN, 2, axis=-1)) if after == GATE else y_BN


def added_plain(
    stream_BN: mx.array, base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array
) -> tuple[mx.array, mx.array]:
    """`metal.added` in plain mlx."""
    total_BN = stream_BN.astype(mx.float32) + mx.addmm(base_BN, x_BK @ a_RK.T, b_RN)
    return total_BN, total_BN.astype(base_BN.dtype)
