"""Which rows of which original tensor each of mlx-lm's arrays consists of, found by running the family's own `sanitize` on numbered arrays.

`sanitize` renames tensors, and for some families splits, joins or stacks them. Here it gets arrays of the original names and shapes whose
numbers say where they are: in one pass the tensor, in others the row and the column. What comes out tells where each number went. A row is
everything along the last axis; a vector has rows of one number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from backend.export.original.original_files import OriginalFiles, empty_model

LARGEST = 1 << 24
"""Whole numbers up to here are exact in float32."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of mlx-lm's array `array` from `start` on, which are those of the tensor `original` from `original_start` on."""

    array: str
    start: int
    original: str
    original_start: int
    count: int


Trace = dict[str, list[Rows]]
"""By the name of mlx-lm's array. One whose numbers `sanitize` computes, or whose rows it mixes, is not there."""


def trace(original: OriginalFiles) -> Trace:
    """Where every array of mlx-lm comes from. Reads no weights."""
    shapes = original.shapes
    # Random codes: `sanitize` adding 1 to an array would turn a counted code into its neighbour's.
    codes = dict(zip(shapes, random.Random(0).sample(range(1, LARGEST), len(shapes)), strict=True))
    tagged = {name: _filled(codes[name], shape) for name, shape in shapes.items()}
    origins = {id(array): name for name, array in tagged.items()}
    passed = _sanitized(original, dict(tagged))
    found: Trace = {}
    changed: list[str] = []
    for name, array in passed.items():
        if id(array) in origins:
            source = origins[id(array)]
            found[name] = [Rows(name, 0, source, 0, _row_count(shapes[source]))]
        else:
            changed.append(name)
    if changed:
        row_numbers = _sanitized(original, _numbered(shapes, _row_numbers))
        column_numbers = _sanitized(original, _numbered(shapes, _column_numbers))
        names = {code: name for name, code in codes.items()}
        for name in changed:
            if runs := _runs(name, passed[name], row_numbers[name], column_numbers[name], names, shapes):
                found[name] = runs
    return found


def by_original(rows: Iterable[Rows]) -> dict[str, list[Rows]]:
    """The same rows by original tensor, from its first row to its last."""
    grouped: dict[str, list[Rows]] = {}
    for run in rows:
        grouped.setdefault(run.original, []).append(run)
    return {name: sorted(runs, key=lambda run: run.original_start) for name, runs in grouped.items()}


# ── numbered arrays ──────────────────────────────────────────────────────────────────────────────────────────────────

Shape = tuple[int, ...]


def _sanitized(original: OriginalFiles, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    model: Any = empty_model(original)
    return model.sanitize(arrays) if hasattr(model, "sanitize") else arrays


def _numbered(shapes: Mapping[str, Shape], numbers: Callable[[Shape], mx.array]) -> dict[str, mx.array]:
    return {name: numbers(shape) for name, shape in shapes.items()}


def _filled(number: int, shape: Shape) -> mx.array:
    return mx.broadcast_to(mx.array(float(number)), shape)  # takes the memory of one number


def _row_numbers(shape: Shape) -> mx.array:
    rows = mx.arange(_row_count(shape), dtype=mx.float32)
    return rows.reshape(shape) if len(shape) < 2 else mx.broadcast_to(rows.reshape(*shape[:-1], 1), shape)


def _column_numbers(shape: Shape) -> mx.array:
    width = shape[-1] if len(shape) > 1 else 1
    columns = mx.arange(width, dtype=mx.float32)
    return mx.broadcast_to(columns, shape) if len(shape) > 1 else mx.zeros(shape)


def _row_count(shape: Shape) -> int:
    return math.prod(shape) if len(shape) < 2 else math.prod(shape[:-1])


# ── reading them ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _runs(
    name: str,
    tensors: mx.array,
    rows: mx.array,
    columns: mx.array,
    names: Mapping[int, str],
    shapes: Mapping[str, Shape],
) -> list[Rows]:
    """Runs of neighbouring rows; [] where the array does not consist of whole rows of original tensors."""
    if not tensors.shape == rows.shape == columns.shape or not tensors.size:
        return []
    width = tensors.shape[-1] if tensors.ndim > 1 else 1
    tensors, rows, columns = (array.astype(mx.float32).reshape(-1, width) for array in (tensors, rows, columns))
    is_whole = mx.all(tensors == tensors[:, :1]) & mx.all(rows == rows[:, :1]) & mx.all(columns == mx.arange(width))
    if not is_whole.item():
        return []
    codes, numbers = _integers(tensors[:, 0]), _integers(rows[:, 0])
    runs: list[Rows] = []
    for at, (code, row) in enumerate(zip(codes, numbers, strict=True)):
        source = names.get(code)
        if source is None or _width(shapes[source]) != width:
            return []
        last = runs[-1] if runs else None
        if last and last.original == source and last.original_start + last.count == row:
            runs[-1] = Rows(name, last.start, source, last.original_start, last.count + 1)
        else:
            runs.append(Rows(name, at, source, row, 1))
    return runs


def _width(shape: Shape) -> int:
    return shape[-1] if len(shape) > 1 else 1


def _integers(numbers: mx.array) -> list[int]:
    values: Any = numbers.tolist()
    return [int(value) if value == int(value) else -1 for value in values]
