"""The cost of a decoding step by its number of rows, and the row counts that are worth decoding.

A decoding step multiplies one token of each row by every weight. On a CPU that takes time in proportion to the rows. A
GPU computes rows in tiles: 10 rows take as long as 32, and 33 as long as 64, so rows are planned in full tiles. The
figures are measured by others on Metal, for one matrix or one model, and only their ratios are used. They leave out
what else a step does: attention, which grows with the rows, and launching kernels, which does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowCosts:
    """`measured`: (rows, time) by growing rows. A step of r rows takes the time of the first entry with at least r
    rows; the last entry is one full tile, and more rows take that time for each tile begun."""

    measured: tuple[tuple[int, float], ...]

    @property
    def tile(self) -> int:
        return self.measured[-1][0]

    def cost(self, rows: int) -> float:
        """The time of a step with `rows` ≥ 1 rows, in units of a step with one."""
        within = next((time for most, time in self.measured if rows <= most), None)
        time = within if within is not None else self._tiles(rows) * self.measured[-1][1]
        return time / self.measured[0][1]

    def planned(self, most: int) -> int:
        """The number of `most` rows to decode together: all within one tile, else as many as fill tiles."""
        return most if most <= self.tile else most // self.tile * self.tile

    def filled(self, rows: int) -> int:
        """`rows` rounded up to full tiles."""
        return self.tile * self._tiles(rows)

    def time_of(self, completions: int) -> float:
        """The time per token of that many completions of equal length: the planned rows, and then those that waited."""
        together = self.planned(completions)
        return self.cost(together) + (self.time_of(completions - together) if completions > together else 0)

    def fewer(self, rows: int) -> Iterator[int]:
        """`rows`, and about half as many each time, down to 1: counts to plan with when memory is short."""
        while rows > 1:
            yield rows
            rows = self.tile * -(-self._tiles(rows) // 2) if rows > self.tile else -(-rows // 2)
        yield 1

    def compacted(self, rows: int, needed: int) -> int:
        """The number of rows to keep of `rows` when only `needed` of them are still decoded: `rows`, or fewer where a
        step then costs a quarter less, or attends to half of the keys and values.

        Few sizes, since each is a trace of the compiled step: powers of two within a tile, else 1, 2, 3 or 4 times a
        power of two tiles.
        """
        if needed <= self.tile:
            size = min(1 << (needed - 1).bit_length(), self.tile)
        else:
            size = self.tile * _few(self._tiles(needed))
        pays = 4 * self.cost(size) <= 3 * self.cost(rows) or 2 * size <= rows
        return size if size < rows and pays else max(needed, rows)

    def _tiles(self, rows: int) -> int:
        return -(-rows // self.tile)


def _few(count: int) -> int:
    """The smallest of 1, 2, 3 or 4 times a power of two that is at least `count` ≥ 1."""
    power = 1 << max(0, (count - 1).bit_length() - 2)
    return count if count < 4 else next(n * power for n in (2, 3, 4) if n * power >= count)


ON_CPU = RowCosts(((1, 1.0),))
"""A tile of one row: the time is proportional to the rows."""

QUANTIZED = RowCosts(((2, 0.129), (4, 0.165), (6, 0.263), (8, 0.323), (9, 0.405), (16, 0.509), (32, 0.513)))
"""ms, a matrix of 5120 × 17408 in 4 bits on an M3 Max (ml-explore/mlx#3863). Up to 9 rows a kernel reads the weights
once for a few rows; from 10 on it is the matrix product, in tiles of 32 rows."""

QUANTIZED_M5 = RowCosts(((1, 75.9), (3, 84.8), (5, 112.7), (8, 170.8), (12, 241.5), (32, 296.0), (64, 361.0)))
"""ms, a model of 70 billion weights in 4 bits on an M5 Max, to 16 rows (ml-explore/mlx#3791). The matrix product takes
14 to 32 rows in equal time and 64 in 1.22 times that (a base M5, ml-explore/mlx#4171): the last two entries are
computed with these ratios."""

FLOAT = RowCosts(((1, 1.95), (15, 2.9), (64, 5.6)))
"""ms, a float16 matrix of 1024 × 151936: a tile of 64 rows for anything above one row (ml-explore/mlx#3661), about
twice as fast up to 15 rows since ml-explore/mlx#3888."""


def row_costs(gpu: bool, quantized: bool, chip: str = "") -> RowCosts:
    """The costs on a CPU or GPU with quantised or float weights. `chip` as in "Apple M5 Max"; "" or an unknown one
    counts as an M3, whose kernels the M1 to M4 share."""
    if not gpu:
        return ON_CPU
    if not quantized:
        return FLOAT
    return QUANTIZED_M5 if chip.startswith("Apple M5") else QUANTIZED
