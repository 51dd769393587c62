"""Continuous batching with left padding: which completions of a rollout are decoded now, and in which rows.

Rows are compacted (copied into smaller arrays) when a step then costs less, and refilled from the queue when an eighth
is free; row counts are few and capacities bucketed, since every (B, C) is a trace. A step submitted while its inputs
are still computed cannot write into them and copies the KV cache, so a CPU waits for them. A GPU waits only once copies
take too much memory. Randomness is keyed by completion and token, so results do not depend on batching.

A completion that waits for tools leaves the batch with its keys and values (`ParkedRow`). Others are decoded meanwhile;
then it reads the results and joins again.

A layer holds keys and values [B, heads, C, head_dim], or both in `keys` as [B, heads, 2, C, head_dim]. All rows write
the same column, `slot`; row b is real in the columns pad[b] … end[b] − 1, and end[b] is `slot`. Passes that verify
drafts (`speculation`) write each row from its own end on, and what is not accepted is written over; they leave rows of
different ends, which `compact` aligns again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from backend.engine.chunk_sizes import PREFILL_TOKENS, capacity
from backend.engine.device import on_cpu
from backend.sampling.conversations import WAIT_S, Rollout
from backend.sampling.outputs import OPEN, CompletionBuffer
from backend.sampling.row_costs import DRAFTED, RowCosts
from backend.sampling.sampler import Sampled, SampledTokens, SamplingState
from backend.sampling.speculation import Speculation

DECODE_CHUNK = 8  # steps between two reads of the sampled tokens, in a rollout

HEADROOM = 0.95  # of MLX's memory limit, up to which a GPU may copy KV caches


class Scheduler:
    """Decodes the completions of one rollout: call `decode_chunk` as long as `schedule` returns True. `max_rows`: most
    rows; `chunk`: steps between two reads of the sampled tokens."""

    def __init__(
        self,
        queue: RowQueue,
        outputs: CompletionBuffer,
        uniform_NT: np.ndarray,
        drawing: SamplingState,
        step: Callable[..., Any],
        max_rows: int,
        row_costs: RowCosts,
        conversations: Rollout | None = None,
        read_on: Callable[[list[ParkedRow]], Prefilled] | None = None,
        poll: Callable[[], None] = lambda: None,
        speculation: Speculation | None = None,
        chunk: int = DECODE_CHUNK,
    ) -> None:
        self.queue, self.outputs, self.uniform_NT = queue, outputs, uniform_NT
        self.drawing, self.step, self.row_costs = drawing, step, row_costs
        self.max_rows, self.chunk = row_costs.planned(max_rows), chunk
        self.rows = KVRows()
        self.waits_for_inputs = on_cpu()
        self.waits_for_memory = False  # a GPU waits: copies took too much memory
        self.latest: Sampled | None = None  # sampled and not yet read: the next step's input
        self.conversations, self.read_on, self.poll = conversations, read_on, poll
        self.speculation = speculation
        self.passes = 0  # of the next chunk that verify drafts; 0: it decodes step by step
        self.parked: dict[int, ParkedRow] = {}  # of completions whose tools run, or have their results

    def schedule(self) -> bool:
        """Replace ended rows by waiting ones, or compact the batch. Returns False when nothing is left to decode."""
        rows = self.rows
        is_open = self.outputs.stop[rows.index] == OPEN
        alive = np.flatnonzero(is_open)
        ready = self._with_results(is_idle=not len(alive))
        # No admission until an eighth of the rows is free: it copies every row. A parked row keeps its memory.
        free = self.max_rows - len(alive) - len(self.parked)
        fresh = min(free, self.queue.waiting) if free >= max(1, self.max_rows // 8) or not len(alive) else 0
        if not fresh and len(ready) < len(alive) // 2:  # nor of results until half as many can be read together
            ready = []
        admitted = fresh + len(ready)
        if not len(alive) and not admitted:
            return False
        size = self.row_costs.compacted(len(rows), len(alive) + admitted)
        # Ended rows fill the batch up to `size`, which has a trace already. Living rows come first: `compact` relies on
        # it. A parked row that returns is not kept twice.
        ended = np.flatnonzero(~is_open & ~np.isin(rows.index, ready))
        keep = np.concatenate([alive, ended[: size - len(alive) - admitted]])
        has_right_columns = False
        self.passes = self.speculation.passes(size, rows.is_ragged(alive)) if self.speculation is not None else 0
        if not admitted and size == len(rows) and (self.passes or not rows.is_ragged(alive)):
            # Columns last for a chunk, and three quarters of them would not, without the unused ones on the left.
            steps = DRAFTED + 1 if self.passes else self._chunk_steps(rows.index[alive], rows.generated[alive])
            unused = int(rows.pad[alive].min(initial=rows.slot))
            needed = capacity(rows.slot - unused + steps)
            has_right_columns = rows.slot + steps <= rows.capacity and 4 * needed > 3 * rows.capacity
        if not has_right_columns:
            admissions = self._begin(fresh, ready) + self._read_results(ready)
            # An admitted row has one token more, from its prefill; the row that may still have most decides how long
            # the next chunk is.
            lengths = [self.outputs.length[each.index] + 1 for each in admissions]
            index = np.concatenate([rows.index[alive], *(each.index for each in admissions)])
            steps = self._chunk_steps(index, np.concatenate([rows.generated[alive], *lengths]))
            # The last tokens of the kept rows, then the first tokens of the admitted ones.
            pieces: list[Sampled] = []
            if self.latest is not None and len(keep):
                pieces.append(type(self.latest)(*(part[mx.array(keep)] for part in self.latest)))
            self.drawing.keep(keep)
            for each in admissions:
                uniform_B = mx.array(self.uniform_NT[each.index, self.outputs.length[each.index]])
                written = [self.outputs.tokens(row) for row in each.index] if self.conversations else []
                logits_BV = each.prefilled.logits_PV[mx.array(each.prompt)]
                pieces.append(self.drawing.first(each.index, logits_BV, uniform_B, written))
            parts = zip(*pieces, strict=True)
            self.latest = type(pieces[0])(*(mx.concatenate(list(part)) for part in parts))
            mx.async_eval(*self.latest)
            rows.compact(keep, len(alive), admissions, lengths, max(steps, self.passes * (DRAFTED + 1)))
        return True

    def _begin(self, count: int, ready: list[int]) -> list[AdmittedRows]:
        """The next `count` completions. Those with more prompt after the group's shared part become `ready`."""
        admissions: list[AdmittedRows] = []
        for each in self.queue.admit(count):
            goes_on = self.outputs.length[each.index] > 0
            for row, prompt in zip(each.index[goes_on].tolist(), each.prompt[goes_on].tolist(), strict=True):
                self.parked[row] = each.prefilled.parked(prompt)
                ready.append(row)
            if not goes_on.all():
                admissions.append(AdmittedRows(each.prefilled, each.index[~goes_on], each.prompt[~goes_on]))
        return admissions

    def _with_results(self, *, is_idle: bool) -> list[int]:
        """The parked completions whose tools have answered. `is_idle`: wait for one where none can begin either."""
        ready = [row for row, parked in self.parked.items() if parked.is_ready]
        while self.conversations is not None and self.conversations.waiting:
            waits = is_idle and not ready and not (self.queue.waiting and len(self.parked) < self.max_rows)
            found, ended = self.conversations.results(self.outputs, WAIT_S if waits else 0.0, self.poll)
            for row in ended:
                del self.parked[row]
            for row in found:
                self.parked[row].is_ready = True
            ready += found
            if not waits:
                break
        return ready

    def _read_results(self, ready: list[int]) -> list[AdmittedRows]:
        admissions: list[AdmittedRows] = []
        while ready:
            for row in ready:
                self.parked[row].unread = self.outputs.tokens(row, self.parked[row].read)
            most = max(len(self.parked[row].unread) for row in ready)
            together, ready = ready[: max(1, PREFILL_TOKENS // most)], ready[max(1, PREFILL_TOKENS // most) :]
            assert self.read_on is not None
            prefilled = self.read_on([self.parked.pop(row) for row in together])
            self.outputs.stop[together] = OPEN
            admissions.append(AdmittedRows(prefilled, np.array(together), np.arange(len(together))))
        return admissions

    def _park(self, ended: np.ndarray) -> None:
        """Take the rows at these places out of the batch whose turn has ended in calls."""
        if self.conversations is None or not len(ended):
            return
        rows = self.rows
        waiting = self.conversations.end_turns(rows.index[ended].tolist(), self.outputs, self.poll)
        for place in ended[np.isin(rows.index[ended], waiting)].tolist():
            row = int(rows.index[place])
            # The last token may have been fed already, and others after it; it is read again with the results.
            read = int(self.outputs.length[row]) - 1
            prompt = int(rows.lengths[place] - rows.generated[place]) + 1
            self.parked[row] = ParkedRow(*rows.copied(place, prompt + read), read, int(rows.shift[place]))

    def decode_chunk(self) -> None:
        """Decode up to `chunk` tokens a row, all but the last read as the device computes, or verify as many drafts."""
        rows, began = self.rows, time.perf_counter()
        is_open = self.outputs.stop[rows.index] == OPEN
        if self.passes:
            self._verify()
            return
        steps = self._chunk_steps(rows.index[is_open], rows.generated[is_open])
        unread = self._decode(steps)
        rows.generated = rows.generated + steps
        # The last tokens are the next chunk's first input; they are read with that chunk, without a wait now. If no row
        # continues, no chunk follows, so they are read at once.
        continues = (rows.generated[is_open] < self.outputs.limit[rows.index[is_open]]).any()
        self.outputs.append(rows.index, *to_host(unread[:-1] if continues else unread))
        if self.speculation is not None and steps:
            seconds = (time.perf_counter() - began) / steps
            self.speculation.decoded(rows.index[is_open], (len(rows), rows.capacity), steps, seconds)
        self._park(np.flatnonzero(is_open & (self.outputs.stop[rows.index] != OPEN)))

    def _decode(self, steps: int) -> list[Sampled]:
        assert self.latest is not None
        rows, unread = self.rows, [self.latest]
        # Token t of a completion uses column t, in any row and step. A row at its length limit continues with the
        # others; its tokens are discarded, so any column will do.
        column_SB = np.minimum(rows.generated + np.arange(steps)[:, None], self.uniform_NT.shape[1] - 1)
        for uniform_B in map(mx.array, self.uniform_NT[rows.index, column_SB]):
            token_B, slot = unread[-1].token_B, mx.array(rows.slot)
            results, rows.keys, rows.values = self.step(
                token_B, slot, rows.pad_B, uniform_B, rows.column_C, rows.keys, rows.values, *self.drawing.state
            )
            # The step above is only a graph so far. mlx writes the new column in place only if nothing else holds the
            # cache; a step still running does, and the cache would be copied. So wait for that step, then submit.
            if self.waits_for_inputs:
                mx.eval(token_B)
            rows.end = rows.end + 1
            mx.async_eval(results, rows.keys, rows.values)
            unread.append(self.drawing.results(results, rows.index, token_B, uniform_B))
            # Arrays are allocated as they are submitted, so copies show at once.
            if not self.waits_for_inputs and mx.get_active_memory() > HEADROOM * mx.get_memory_limit():
                self.waits_for_inputs = self.waits_for_memory = True
        self.latest = unread[-1]
        return unread

    def _verify(self) -> None:
        """Verify drafts in every row while columns last. Up to DRAFTED tokens and the one after them are new."""
        assert self.latest is not None and self.speculation is not None
        rows, outputs, N = self.rows, self.outputs, DRAFTED + 1
        latest = [np.array(part) for part in self.latest]
        for _ in range(self.passes):
            is_open = outputs.stop[rows.index] == OPEN
            if not is_open.any() or rows.slot + N > rows.capacity:
                break
            began = time.perf_counter()
            column_BN = np.minimum(rows.generated[:, None] + np.arange(N), self.uniform_NT.shape[1] - 1)
            uniform_BN = self.uniform_NT[rows.index[:, None], column_BN]
            token_BN = np.zeros((len(rows), N), np.int32)
            token_BN[:, 0] = latest[0]
            drafts = self.speculation.drafts.drafts(rows.index[is_open], latest[0][is_open], uniform_BN[is_open])
            if drafts is None:
                token_BN, uniform_BN = token_BN[:, :1], uniform_BN[:, :1]
            else:
                token_BN[is_open, 1:] = drafts
            tokens, ends = mx.array(token_BN), mx.array(rows.end.astype(np.int32))
            results, rows.keys, rows.values = self.step(
                tokens, ends, rows.pad_B, mx.array(uniform_BN.flatten()), rows.column_C, rows.keys, rows.values
            )
            mx.eval(results, rows.keys, rows.values)
            drawn = [np.array(part).reshape(token_BN.shape) for part in results]
            accepted_B = np.cumprod(drawn[0][:, :-1] == token_BN[:, 1:], axis=1).sum(axis=1)
            # The last new token is the next pass's first input, and read with that pass; unless it ends its row.
            read = (np.concatenate([last[:, None], new[:, :-1]], 1).T for last, new in zip(latest, drawn, strict=True))
            outputs.append(rows.index, *read, count_B=1 + accepted_B)
            latest = [part[np.arange(len(rows)), accepted_B] for part in drawn]
            rows.end = rows.end + np.where(is_open, 1 + accepted_B, 0)
            rows.generated = rows.generated + np.where(is_open, 1 + accepted_B, 0)
            ends_B = outputs.is_eos(latest[0]) | (rows.generated >= outputs.limit[rows.index])
            outputs.append(rows.index[ends_B], *(part[None, ends_B] for part in latest))
            shape, drafted = (len(rows), rows.capacity), token_BN.shape[1] - 1
            self.speculation.verified(accepted_B[is_open], shape, drafted, time.perf_counter() - began)
        self.latest = SampledTokens(*map(mx.array, latest))

    def _chunk_steps(self, index: np.ndarray, generated: np.ndarray) -> int:
        return min(self.chunk, int((self.outputs.limit[index] - generated).max()))


def to_host(sampled: Sequence[Sampled]) -> Iterator[np.ndarray]:
    """Tokens, log-probabilities, log of the kept and of the held mass (constrained output), each [steps, B]."""
    parts = zip(*sampled, strict=True) if sampled else ((), (), ())
    return (np.array([np.array(array) for array in part]) for part in parts)


@dataclass(slots=True)
class Prefilled:
    """Left-padded prompts after prefill: logits after the last token [P, V], keys and values by layer [P, heads,
    columns, head_dim], padding [P]. `values` is empty where `keys` holds both. `shift_P`: of positions, by pictures."""

    logits_PV: mx.array
    keys: list[mx.array]
    values: list[mx.array]
    pad_P: np.ndarray
    shift_P: np.ndarray | None = None

    @property
    def columns(self) -> int:
        return self.keys[0].shape[-2]

    def parked(self, prompt: int) -> ParkedRow:
        """A row of one prompt that reads on."""
        copies = _copied((self.keys, self.values), prompt, int(self.pad_P[prompt]), self.columns)
        return ParkedRow(*copies, read=0, shift=0 if self.shift_P is None else int(self.shift_P[prompt]))


@dataclass(slots=True)
class AdmittedRows:
    """Rows about to join the batch: the completion `index` of each, and its prompt's row in `prefilled`."""

    prefilled: Prefilled
    index: np.ndarray
    prompt: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.prefilled.columns - self.prefilled.pad_P[self.prompt]

    @property
    def shift(self) -> np.ndarray:
        of_prompts = self.prefilled.shift_P
        return np.zeros(len(self.prompt), np.int32) if of_prompts is None else of_prompts[self.prompt]


@dataclass(slots=True)
class ParkedRow:
    """Keys and values by layer [1, heads, columns, head_dim] of a completion that waits for tools, as in `KVRows`, of
    its prompt and its first `read` tokens. `unread`: the tokens after those, once the results are there."""

    keys: list[mx.array]
    values: list[mx.array]
    read: int
    shift: int = 0
    unread: list[int] = field(default_factory=list)
    is_ready: bool = False

    @property
    def columns(self) -> int:
        return self.keys[0].shape[-2]

    def layer(self, index: int) -> tuple[mx.array, mx.array]:
        """Keys and values of a layer."""
        if self.values:
            return self.keys[index], self.values[index]
        return self.keys[index][:, :, 0], self.keys[index][:, :, 1]


class RowQueue(Protocol):
    """Completions that wait for a row."""

    @property
    def waiting(self) -> int: ...

    def admit(self, count: int) -> list[AdmittedRows]: ...


class WaitingQueue:
    """Completions that wait for a row, G to a prompt, in order. A prompt is prefilled once, when the first completion
    of its group is admitted, with the others admitted then."""

    def __init__(self, prompts: int, G: int, prefill: Callable[[range], Prefilled]) -> None:
        self._prompts, self._G, self._prefill = prompts, G, prefill
        self._next = 0
        self._prefilled: Prefilled | None = None
        self._prefilled_prompts = range(0)

    @property
    def waiting(self) -> int:
        return self._prompts * self._G - self._next

    def admit(self, count: int) -> list[AdmittedRows]:
        """The next `count` completions, one `AdmittedRows` for each prefill that they come from."""
        admissions: list[AdmittedRows] = []
        # A group that the previous call began has its prefill still; the rest of `count` may need a new one.
        while count:
            first = self._next // self._G
            if first not in self._prefilled_prompts:
                # All prompts that this admission reaches in one pass: fewer, larger products than one by one.
                last = (self._next + count - 1) // self._G
                self._prefilled_prompts = range(first, min(self._prompts, last + 1))
                self._prefilled = self._prefill(self._prefilled_prompts)
            assert self._prefilled is not None
            end = self._prefilled_prompts.stop * self._G
            index = np.arange(self._next, min(self._next + count, end))
            admissions.append(AdmittedRows(self._prefilled, index, index // self._G - self._prefilled_prompts.start))
            self._next += len(index)
            count -= len(index)
            if self._next == end:
                self._prefilled = None  # the last rows are admitted: free the arrays as soon as those are copied
        return admissions


class KVRows:
    """Keys, values and bookkeeping of the decoded rows."""

    def __init__(self) -> None:
        self.index = np.zeros(0, np.int64)  # the completion of each row
        self.generated = np.zeros(0, np.int64)  # tokens sampled in each row
        self.pad = np.zeros(0, np.int64)
        self.shift = np.zeros(0, np.int32)  # of positions, by pictures in the prompt
        self.end = np.zeros(0, np.int64)  # the column of each row's next token
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.pad_B: mx.array | tuple[mx.array, mx.array]  # `pad` on the device, and `shift` where there is any
        self.column_C = mx.zeros(0, mx.int32)  # 0 … C − 1 on the device

    def __len__(self) -> int:
        return len(self.index)

    @property
    def slot(self) -> int:
        """The next token's column, of the row with the most."""
        return int(self.end.max(initial=0))

    def is_ragged(self, alive: np.ndarray) -> bool:
        """True if the rows `alive` end in different columns."""
        return bool((self.end[alive] != self.slot).any())

    @property
    def lengths(self) -> np.ndarray:
        return self.end - self.pad

    @property
    def capacity(self) -> int:
        return self.column_C.size

    def copied(self, row: int, columns: int) -> tuple[list[mx.array], list[mx.array]]:
        """Keys and values of the first `columns` of a row."""
        return _copied((self.keys, self.values), row, int(self.pad[row]), int(self.pad[row]) + columns)

    def compact(
        self,
        keep: np.ndarray,
        alive: int,
        admissions: Sequence[AdmittedRows],
        generated: Sequence[np.ndarray],
        free_columns: int,
    ) -> None:
        """Copy the rows `keep` and the admitted ones, with `generated` tokens each, into new arrays, right-aligned,
        with `free_columns` after them.
        `slot` becomes the longest length among the first `alive` of `keep` and the admitted; the other rows of `keep`
        have ended and only fill up the row count."""
        # Columns can move freely: positions are baked into rotated keys, and count from a row's first real token
        # (slot − pad), which shifting does not change.
        lengths = [self.lengths[keep][:alive], *(admitted.lengths for admitted in admissions)]
        slot = int(np.concatenate(lengths).max())
        columns = capacity(slot + free_columns)
        before = self.slot
        # Rows that end before it are turned round, so that all end there.
        turned_BC = (np.arange(before) + self.end[keep][:, None]) % before if self.is_ragged(keep) else None
        # With every row kept in order a slice will do; a gather would copy the layer once more.
        keeps_all = len(keep) == len(self) and (keep == np.arange(len(self))).all()

        def compacted(old: list[mx.array], admitted: list[list[mx.array]], layer: int) -> mx.array:
            pieces: list[mx.array] = []
            if len(keep):
                filled = old[layer][..., :before, :]
                filled = filled if keeps_all else filled[mx.array(keep)]
                if turned_BC is not None:
                    index = mx.array(turned_BC.reshape(len(keep), *[1] * (filled.ndim - 3), before, 1))
                    filled = mx.take_along_axis(filled, mx.broadcast_to(index, filled.shape), axis=-2)
                pieces.append(_aligned(filled, slot, columns))
            for source, arrays in zip(admissions, admitted, strict=True):
                pieces.append(_aligned(arrays[layer][mx.array(source.prompt)], slot, columns))
            return mx.concatenate(pieces)

        layers = len(self.keys or admissions[0].prefilled.keys)
        has_values = bool(self.values or (admissions and admissions[0].prefilled.values))
        olds, prefilled = [self.keys], [[admitted.prefilled.keys for admitted in admissions]]
        if has_values:
            olds, prefilled = [*olds, self.values], [*prefilled, [admitted.prefilled.values for admitted in admissions]]
        news: list[list[Any]] = [[None] * layers for _ in olds]
        # Evaluated layer by layer, dropping the old arrays as it goes: at most one layer is in memory twice.
        for layer in range(layers):
            for old, new, admitted in zip(olds, news, prefilled, strict=True):
                new[layer] = compacted(old, admitted, layer)
                if old:
                    old[layer] = None  # pyright: ignore
            mx.eval([new[layer] for new in news])
        self.keys, self.values = news if has_values else (*news, [])
        lengths = np.concatenate([self.lengths[keep], *(admitted.lengths for admitted in admissions)])
        self.index = np.concatenate([self.index[keep], *(admitted.index for admitted in admissions)])
        self.generated = np.concatenate([self.generated[keep], *generated])
        # Ended rows may be longer than `slot`: their padding is 0, not negative.
        self.pad = np.maximum(slot - lengths, 0)
        self.end, self.column_C = np.full(len(self), slot), mx.arange(columns)
        self.pad_B = mx.array(self.pad.astype(np.int32))
        self.shift = np.concatenate([self.shift[keep], *(admitted.shift for admitted in admissions)])
        if self.shift.any():
            self.pad_B = self.pad_B, mx.array(self.shift)


def _copied(
    layers: tuple[list[mx.array], list[mx.array]], row: int, start: int, end: int
) -> tuple[list[mx.array], list[mx.array]]:
    keys, values = ([mx.contiguous(x[row : row + 1, ..., start:end, :]) for x in arrays] for arrays in layers)
    mx.eval(keys, values)
    return keys, values


def _aligned(filled: mx.array, slot: int, columns: int) -> mx.array:
    excess = filled.shape[-2] - slot
    filled = filled[..., max(excess, 0) :, :]
    return mx.pad(filled, [(0, 0)] * (filled.ndim - 2) + [(max(-excess, 0), columns - slot), (0, 0)])
