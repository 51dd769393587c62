"""The rows of one rollout at work: who is decoded now, who waits, who goes; and the steps between two looks.

Knows when rows come and go and in what order the device is given its work; the step itself, what its numbers mean and when
a completion ends are others' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.cpu.vector_exp import on_cpu
from backend.generation.kv_rows import Admissions, KVRows, WaitingQueue
from backend.generation.outputs import OPEN, Outputs
from backend.generation.sampler import Drawn, Sampling, draw
from backend.spec.memory.chunking import capacity

BURST = 8
"""Tokens between two looks at what has been drawn; the device works on while Python looks."""

COPYABLE = 64 << 20
"""Bytes of keys and values that a GPU copies in less time than it would wait for its next step to be handed over."""


class Scheduler:
    """The rows of one call that are decoded now, and those that wait for their places: who comes, stays and goes."""

    def __init__(
        self,
        line: WaitingQueue,
        outputs: Outputs,
        numbers_NT: np.ndarray,
        sampling: Sampling,
        step: Callable[..., Any],
        limit: int,
    ) -> None:
        self.line, self.outputs, self.numbers_NT = line, outputs, numbers_NT
        self.sampling, self.step, self.limit = sampling, step, min(limit, line.waiting)
        self.rows = KVRows()
        self.copyable = 0 if on_cpu() else COPYABLE
        self.latest: Drawn | None = None
        """Drawn, and not yet read."""

    def arrange(self) -> bool:
        """Rows that ended make room: for those that wait, else for a smaller batch. → whether any row is left."""
        rows = self.rows
        is_open = self.outputs.stop[rows.index] == OPEN
        alive = np.flatnonzero(is_open)
        coming = self._coming(len(alive))
        if not len(alive) and not coming:
            return False
        size = self._size(len(alive) + coming)
        keep = np.concatenate([alive, np.flatnonzero(~is_open)[: size - len(alive) - coming]])
        if coming or size != len(rows) or self._ill_fitting(alive):
            entrants = self.line.take(coming) if coming else []
            ahead = self._ahead(1 if coming else int(rows.age[alive].min()))
            self._take_over(keep, entrants)
            rows.relay(keep, len(alive), entrants, ahead)
        return True

    def burst(self) -> None:
        """Decode a few tokens in every row, and read all but the last ones while the device works on those."""
        rows = self.rows
        is_open = self.outputs.stop[rows.index] == OPEN
        steps = self._ahead(int(rows.age[is_open].min()))
        fresh = self._decode(steps)
        rows.age = rows.age + steps
        goes_on = (rows.age[is_open] < self.outputs.max_tokens).any()
        self.outputs.read(rows.index, *on_host(fresh[:-1] if goes_on else fresh))

    def _decode(self, steps: int) -> list[Drawn]:
        """What was drawn last, and what so many steps draw after it."""
        assert self.latest is not None
        rows, fresh = self.rows, [self.latest]
        column_SB = np.minimum(rows.age + np.arange(steps)[:, None], self.numbers_NT.shape[1] - 1)
        for uniform_B in mx.array(self.numbers_NT[rows.index, column_SB]) if steps else ():
            token_B, slot = fresh[-1].token_B, mx.array(rows.slot)
            parts, rows.keys, rows.values = self.step(
                token_B, slot, rows.pad_B, uniform_B, rows.place_C, rows.keys, rows.values
            )
            # An array that a step still runs on is copied and not written into. So the graph of the next step is made while
            # the device works, and handed over when it has done.
            if rows.nbytes > self.copyable:
                mx.eval(token_B)
            fresh.append(Drawn(*parts))
            rows.slot += 1
            mx.async_eval(parts, rows.keys, rows.values)
        self.latest = fresh[-1]
        return fresh

    def _ahead(self, youngest: int) -> int:
        return min(BURST, self.outputs.max_tokens - youngest)

    def _coming(self, alive: int) -> int:
        """Places are filled when an eighth of them is free: each filling lays all rows anew."""
        free = self.limit - alive
        worth = free >= max(1, self.limit // 8) or not alive
        return min(free, self.line.waiting) if worth else 0

    def _size(self, wanted: int) -> int:
        """Few sizes, few traces: as many rows as now, or two or three times a power of two once a quarter have ended."""
        power = 1 << max(0, (wanted - 1).bit_length() - 2)
        size = wanted if wanted < 4 else next(n * power for n in (2, 3, 4) if n * power >= wanted)
        return size if 4 * size <= 3 * len(self.rows) else max(wanted, len(self.rows))

    def _ill_fitting(self, alive: np.ndarray) -> bool:
        """Whether the columns do not last for a burst, or most would do without those that no living row uses."""
        rows = self.rows
        ahead = self._ahead(int(rows.age[alive].min()))
        needed = capacity(rows.slot - rows.spare(alive) + ahead)
        return rows.slot + ahead > rows.columns or 4 * needed <= 3 * rows.columns

    def _take_over(self, keep: np.ndarray, entrants: Sequence[Admissions]) -> None:
        """What was drawn last in the rows that stay, and the first tokens of those that come."""
        pieces: list[Drawn] = []
        if self.latest is not None and len(keep):
            pieces.append(Drawn(*(part[mx.array(keep)] for part in self.latest)))
        for entrant in entrants:
            uniform_B = mx.array(self.numbers_NT[entrant.index, 0])
            pieces.append(draw(entrant.logits(), uniform_B, self.sampling))
        self.latest = Drawn(*(mx.concatenate(list(parts)) for parts in zip(*pieces, strict=True)))
        mx.async_eval(*self.latest)


def on_host(fresh: Sequence[Drawn]) -> Iterator[np.ndarray]:
    """Tokens, log-probabilities and kept mass, each [N, B]. Read one by one: stacking them would be work for the device."""
    parts = zip(*fresh, strict=True) if fresh else ((), (), ())
    return (np.array([np.array(array) for array in part]) for part in parts)
