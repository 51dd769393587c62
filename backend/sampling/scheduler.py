"""Continuous batching with left padding: which completions of a rollout are decoded now, and in which rows.

A rollout has N completions and at most `max_rows` ≤ N rows. Keys and values lie in arrays [B, heads, C, head_dim] per
layer; all B rows write into one column, `slot`, so row b starts with pad[b] columns that its mask hides. Work
alternates between `schedule` and `decode_chunk` (up to 8 tokens a row, read one step late, so that the device rarely
waits for Python).

Rows are **compacted** (copied into smaller arrays) when enough of them have ended for a step to cost less, which
depends on the device (`backend.sampling.row_costs`), and the columns are cut when most living rows would fit in three
quarters of them. Row counts are few, and capacities multiples of 64, because every (B, C) is a new trace of the
compiled step. Rows are **refilled** from the waiting queue when an eighth of them is free: each refill copies all rows.

A step that is submitted while its inputs are still being computed cannot write into them and copies the KV cache. A CPU
therefore waits for them. A GPU never waits but to read tokens, a chunk late: mlx lets it run about ten command buffers
behind, less than a step of most models, so by the time a layer's step is submitted its last step is done. Where that is
not so, the copies add up to a chunk's at most; should they take more memory than there is (`HEADROOM`), the rest of the
rollout waits, and `waits_for_memory` tells.

Randomness comes in as uniform_NT, a number for each completion and token, keyed by (seed, prompt number, completion
number), so that the result does not depend on which rows are decoded together, on `max_rows`, or on the order of
admission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.chunk_sizes import capacity
from backend.engine.device import on_cpu
from backend.sampling.kv_rows import AdmittedRows, KVRows, WaitingQueue
from backend.sampling.outputs import OPEN, CompletionBuffer
from backend.sampling.row_costs import RowCosts
from backend.sampling.sampler import Sampled, SamplingState

DECODE_CHUNK = 8
"""Decoding steps between two reads of the sampled tokens. The device continues while Python reads."""

HEADROOM = 0.95
"""Share of MLX's memory limit up to which a GPU may copy KV caches. Plans aim at less
(`backend.trainer.memory.estimate`)."""


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
        self.waits_for_memory = False
        """True if a GPU has begun to wait, since copies of the KV cache took too much memory."""
        self.latest: Sampled | None = None
        """Sampled and not yet read: the next step's input."""

    def schedule(self) -> bool:
        """Replace rows that ended by waiting ones, or compact the batch. Returns whether any row is left to decode."""
        rows = self.rows
        is_open = self.outputs.stop[rows.index] == OPEN
        alive = np.flatnonzero(is_open)
        admitted = self._admission_count(len(alive))
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
            self._carry_over(keep, admissions)
            rows.compact(keep, len(alive), admissions, steps)
        return True

    def decode_chunk(self) -> None:
        """Decode up to 8 tokens in every row, and read all but the last while the device computes."""
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
        """Run `steps` steps. Returns the tokens sampled before them and in each of them."""
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

    def _admission_count(self, alive: int) -> int:
        """The number of waiting completions to admit: none until an eighth of the rows is free, as an admission copies
        every row."""
        free = self.max_rows - alive
        is_worth_it = free >= max(1, self.max_rows // 8) or not alive
        return min(free, self.queue.waiting) if is_worth_it else 0

    def _has_wrong_capacity(self, alive: np.ndarray) -> bool:
        """True if the columns do not last for a chunk, or three quarters of them would, without the unused ones on the
        left."""
        rows = self.rows
        steps = self._chunk_steps(int(rows.generated[alive].min()))
        needed = capacity(rows.slot - rows.unused_columns(alive) + steps)
        return rows.slot + steps > rows.capacity or 4 * needed <= 3 * rows.capacity

    def _carry_over(self, keep: np.ndarray, admissions: Sequence[AdmittedRows]) -> None:
        """Make `latest` fit the new rows: the last tokens of the kept rows, then the first tokens of the admitted
        ones."""
        pieces: list[Sampled] = []
        if self.latest is not None and len(keep):
            pieces.append(type(self.latest)(*(part[mx.array(keep)] for part in self.latest)))
        self.drawing.keep(keep)
        for admitted in admissions:
            uniform_B = mx.array(self.uniform_NT[admitted.index, 0])
            pieces.append(self.drawing.first(admitted.index, admitted.logits(), uniform_B))
        parts = zip(*pieces, strict=True)
        self.latest = type(pieces[0])(*(mx.concatenate(list(part)) for part in parts))
        mx.async_eval(*self.latest)


def to_host(sampled: Sequence[Sampled]) -> Iterator[np.ndarray]:
    """Tokens, log-probabilities, log of the kept mass, and of the held mass where output is held; each [steps, B]. Read
    step by step: stacking would be device work."""
    parts = zip(*sampled, strict=True) if sampled else ((), (), ())
    return (np.array([np.array(array) for array in part]) for part in parts)
