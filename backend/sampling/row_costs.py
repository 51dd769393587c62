"""The cost of a decoding step by its number of rows. On a CPU it is proportional; a GPU computes rows in tiles. Figures
are measured by others on Metal, for one matrix or model; only ratios are used."""

from collections.abc import Iterator
from dataclasses import dataclass

DRAFTED = 3  # tokens of a draft in speculative decoding


@dataclass(frozen=True, slots=True)
class RowCosts:
    """`measured`: (rows, time) by growing rows; r rows take the time of the first with at least r. The last: a tile."""

    measured: tuple[tuple[int, float], ...]

    @property
    def tile(self) -> int:
        return self.measured[-1][0]

    def cost(self, rows: int) -> float:
        """The time of a step with `rows` ≥ 1 rows, in steps of one row."""
        tiled = self._tiles(rows) * self.measured[-1][1]
        time = next((time for most, time in self.measured if rows <= most), tiled)
        return time / self.measured[0][1]

    @property
    def drafted_rows(self) -> int:
        """Most rows whose drafts are verified: a tile computes all. On a CPU few: they share the reading of weights."""
        return max(4, self.tile // (DRAFTED + 1))

    def planned(self, most: int) -> int:
        """Number of rows to decode together, of `most`: all of them within one tile, else full tiles."""
        return most if most <= self.tile else most // self.tile * self.tile

    def fewer(self, rows: int) -> Iterator[int]:
        """`rows`, and about half as many each time, down to 1."""
        while rows > 1:
            yield rows
            rows = self.tile * -(-self._tiles(rows) // 2) if rows > self.tile else -(-rows // 2)
        yield 1

    def compacted(self, rows: int, needed: int) -> int:
        """Rows to keep of `rows` when `needed` are still decoded: fewer where a step then costs a quarter less or
        attends to half the keys. Few sizes, since each is a trace: 1, 2, 3 or 4 times a power of two tiles."""
        if needed <= self.tile:
            size = min(1 << (needed - 1).bit_length(), self.tile)
        else:
            tiles = self._tiles(needed)
            power = 1 << max(0, (tiles - 1).bit_length() - 2)
            size = self.tile * (tiles if tiles < 4 else next(n * power for n in (2, 3, 4) if n * power >= tiles))
        pays = 4 * self.cost(size) <= 3 * self.cost(rows) or 2 * size <= rows
        return size if size < rows and pays else max(needed, rows)

    def _tiles(self, rows: int) -> int:
        return -(-rows // self.tile)


ON_CPU = RowCosts(((1, 1.0),))  # proportional to the rows

# ms, 5120 × 17408 in 4 bits on an M3 Max (ml-explore/mlx#3863)
QUANTIZED = RowCosts(((2, 0.129), (4, 0.165), (6, 0.263), (8, 0.323), (9, 0.405), (16, 0.509), (32, 0.513)))

# ms, 70 billion weights in 4 bits on an M5 Max (ml-explore/mlx#3791, #4171)
QUANTIZED_M5 = RowCosts(((1, 75.9), (3, 84.8), (5, 112.7), (8, 170.8), (12, 241.5), (32, 296.0), (64, 361.0)))

FLOAT = RowCosts(((1, 1.95), (15, 2.9), (64, 5.6)))  # ms, float16, 1024 × 151936 (ml-explore/mlx#3661, #3888)


def row_costs(gpu: bool, quantized: bool, chip: str = "") -> RowCosts:
    """The costs on this device. `chip` as in "Apple M5 Max"; others count as an M3."""
    if not gpu:
        return ON_CPU
    if not quantized:
        return FLOAT
    return QUANTIZED_M5 if chip.startswith("Apple M5") else QUANTIZED
