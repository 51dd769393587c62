"""Continuous batching with left padding: which completions of a rollout are decoded now, and in which rows.

Rows are compacted (copied into smaller arrays) when a step then costs less, and refilled from the queue when an eighth
is free; row counts are few and capacities bucketed, since every (B, C) is a trace. A step submitted while its inputs
are still computed cannot write into them and copies the KV cache, so a CPU waits for them. A GPU waits only once copies
take too much memory. Randomness is keyed by completion and token, so results do not depend on batching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.chunk_sizes import capacity
from backend.engine.device import on_cpu
from backend.sampling.kv_rows import KVRows, WaitingQueue
from backend.sampling.outputs import OPEN, CompletionBuffer
from backend.sampling.row_costs import RowCosts
from backend.sampling.sampler import Sampled, SamplingState

DECODE_CHUNK = 8  # steps between two reads of the sampled tokens

HEADROOM = 0.95  # of MLX's memory limit, up to which a GPU may copy KV caches


class Scheduler:
    """Decodes the completions of one rollout: call `decode_chunk` as long as `schedule` returns True."""

    def __init__(
        self,
        queue: WaitingQueue,
        outputs: CompletionBuffer,
        uniform_NT: np.ndarray,
        drawing: SamplingState,
        step: Callable[..., Any],
        max_rows: int,
        row_costs: RowCosts,
    ) -> None:
        self.queue, self.outputs, self.uniform_NT = queue, outputs, uniform_NT
        self.drawing, self.step, self.row_costs = drawing, step, row_costs
        self.max_rows = row_costs.planned(min(max_rows, queue.waiting))
        self.rows = KVRows()
        self.waits_for_inputs = on_cpu()
        self.waits_for_memory = False  # a GPU waits: copies took too much memory
        self.latest: Sampled | None = None  # sampled and not yet read: the next step's input

    def schedule(self) -> bool:
        """Replace ended rows by waiting ones, or compact the batch. Returns False when nothing is left to decode."""
        rows = self.rows
        is_open = self.outputs.stop[rows.index] == OPEN
        alive = np.flatnonzero(is_open)
        # No admission until an eighth of the rows is free: it copies every row.
        free = self.max_rows - len(alive)
        admitted = min(free, self.queue.waiting) if free >= max(1, self.max_rows // 8) or not len(alive) else 0
        if not len(alive) and not admitted:
            return False
        size = self.row_costs.compacted(len(rows), len(alive) + admitted)
        # Ended rows fill the batch up to `size`, which has a trace already. Living rows come first: `compact` relies on
        # it.
        keep = np.concatenate([alive, np.flatnonzero(~is_open)[: size - len(alive) - admitted]])
        if admitted or size != len(rows) or self._has_wrong_capacity(alive):
            admissions = self.queue.admit(admitted) if admitted else []
            # An admitted row has 1 token, from its prefill; the row with the fewest decides how long the next chunk is.
            steps = self._chunk_steps(1 if admitted else int(rows.generated[alive].min()))
            # The last tokens of the kept rows, then the first tokens of the admitted ones.
            pieces: list[Sampled] = []
            if self.latest is not None and len(keep):
                pieces.append(type(self.latest)(*(part[mx.array(keep)] for part in self.latest)))
            self.drawing.keep(keep)
            for admitted_rows in admissions:
                uniform_B = mx.array(self.uniform_NT[admitted_rows.index, 0])
                pieces.append(self.drawing.first(admitted_rows.index, admitted_rows.logits(), uniform_B))
            parts = zip(*pieces, strict=True)
            self.latest = type(pieces[0])(*(mx.concatenate(list(part)) for part in parts))
            mx.async_eval(*self.latest)
            rows.compact(keep, len(alive), admissions, steps)
        return True

    def decode_chunk(self) -> None:
        """Decode up to DECODE_CHUNK tokens in every row, and read all but the last while the device computes."""
        rows = self.rows
        is_open = self.outputs.stop[rows.index] == OPEN
        steps = self._chunk_steps(int(rows.generated[is_open].min()))
        unread = self._decode(steps)
        rows.generated = rows.generated + steps
        # The last tokens are the next chunk's first input; they are read with that chunk, without a wait now. If no row
        # continues, no chunk follows, so they are read at once.
        continues = (rows.generated[is_open] < self.outputs.max_tokens).any()
        self.outputs.append(rows.index, *to_host(unread[:-1] if continues else unread))

    def _decode(self, steps: int) -> list[Sampled]:
        assert self.latest is not None
        rows, unread = self.rows, [self.latest]
        # Token t of a completion uses column t, whatever row or step it is decoded in. A row at its length limit runs
        # on with the others; its tokens are discarded, so any column will do.
        column_SB = np.minimum(rows.generated + np.arange(steps)[:, None], self.uniform_NT.shape[1] - 1)
        for uniform_B in mx.array(self.uniform_NT[rows.index, column_SB]) if steps else ():
            token_B, slot = unread[-1].token_B, mx.array(rows.slot)
            results, rows.keys, rows.values = self.step(
                token_B, slot, rows.pad_B, uniform_B, rows.column_C, rows.keys, rows.values, *self.drawing.state
            )
            # The step above is only a graph so far. mlx writes the new column in place only if nothing else holds the
            # cache any more; a step that is still running does, and the cache would be copied. So wait for that step,
            # then submit.
            if self.waits_for_inputs:
                mx.eval(token_B)
            rows.slot += 1
            mx.async_eval(results, rows.keys, rows.values)
            unread.append(self.drawing.results(results, rows.index, token_B, uniform_B))
            # Arrays are allocated as they are submitted, so copies show at once.
            if not self.waits_for_inputs and mx.get_active_memory() > HEADROOM * mx.get_memory_limit():
                self.waits_for_inputs = self.waits_for_memory = True
        self.latest = unread[-1]
        return unread

    def _chunk_steps(self, fewest_generated: int) -> int:
        return min(DECODE_CHUNK, self.outputs.max_tokens - fewest_generated)

    def _has_wrong_capacity(self, alive: np.ndarray) -> bool:
        rows = self.rows
        steps = self._chunk_steps(int(rows.generated[alive].min()))
        needed = capacity(rows.slot - rows.unused_columns(alive) + steps)
        return rows.slot + steps > rows.capacity or 4 * needed <= 3 * rows.capacity


def to_host(sampled: Sequence[Sampled]) -> Iterator[np.ndarray]:
    """Tokens, log-probabilities, log of the kept and of the held mass (constrained output), each [steps, B]."""
    parts = zip(*sampled, strict=True) if sampled else ((), (), ())
    return (np.array([np.array(array) for array in part]) for part in parts)
