"""Computes an endpoint's answers in one thread. Requests with the same model and sampling are decoded together by a
rollout's scheduler, and join while others are decoded: long prompts are read in pieces, between their tokens. Others
(constrained decoding, penalties, top log-probabilities, models with other caches) take turns, token by token."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx
import numpy as np

from backend.endpoint.models import ServedModel
from backend.engine.chunk_sizes import PREFILL_TOKENS
from backend.engine.device import release_cached_buffers
from backend.runs.completion_rows import Stop
from backend.sampling.cached_sequence import CachedSequence, SampledToken
from backend.sampling.outputs import LENGTH, OPEN, REASONS, CompletionBuffer
from backend.sampling.rollout import Prompts
from backend.sampling.sampler import Sampling, SamplingState, keyed_uniforms
from backend.sampling.scheduler import AdmittedRows, ParkedRow, Scheduler
from backend.utils.errors import UserError
from backend.utils.machine import machine_bytes

CHUNK = 4  # decoding steps between two looks at the requests
LONGEST = 32_768  # tokens of an answer
EXPECTED = 1024  # further tokens of an answer, for which memory is reserved
PIECE, PIECE_ALONE = 512, 2048  # tokens of a prompt that are read at once, while other rows are decoded and without any
REUSED = 32  # fewest tokens of a prompt worth taking from the cache
MOST_PREFIXES = 64
MODEL_FAILED = "model"  # the setting of an error that no request has caused

Tell = Callable[[Sequence[SampledToken], Stop | UserError | None], None]


@dataclass(eq=False)
class Job:
    """An answer to compute. `tell` gets new tokens, with the last ones the reason of the end, or an error, in the
    engine's thread. `top`: likeliest tokens to report. `choice`: its number among answers to one prompt. `is_cancelled`
    may be set in any thread."""

    model: ServedModel
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    seed: int
    tell: Tell
    choice: int = 0
    top: int = 0
    is_cancelled: bool = False

    def uniforms(self) -> np.ndarray:
        return keyed_uniforms(self.seed, [(0, self.choice)], self.max_tokens)[0]


class Engine:
    """Call `run` in the thread that loads models, `submit` or `stop` in any. `rows`: most answers at once per model."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._changed = threading.Condition()
        self._submitted: list[Job] = []
        self._is_stopped = False
        self._lanes: dict[tuple[str, Sampling], Lane] = {}
        self._singles: list[Iterator[None]] = []
        self._sequences: dict[str, CachedSequence] = {}  # that no answer uses, for prompts that go on
        self._refreshed: list[ServedModel] = []
        self._prefixes = PrefixCache(machine_bytes(mx.get_active_memory()) // 16)

    @property
    def running(self) -> int:
        """Answers that are computed or wait."""
        batched = sum(len(lane.open_jobs()) for lane in [*self._lanes.values()])
        return len(self._submitted) + len(self._singles) + batched

    def submit(self, job: Job) -> None:
        with self._changed:
            self._submitted.append(job)
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def run(self) -> None:
        """Compute answers until `stop`."""
        while True:
            with self._changed:
                while not (self._submitted or self._lanes or self._singles or self._is_stopped):
                    self._changed.wait()
                if self._is_stopped:
                    return
                submitted, self._submitted = self._submitted, []
            for job in submitted:
                try:
                    if not job.is_cancelled:
                        self._begin(job)
                except Exception as error:  # such as no memory for the merged weights
                    _fail([job], error)
            self._advance_lanes()
            self._singles = [steps for steps in self._singles if not next(steps, True)]

    def _advance_lanes(self) -> None:
        for key, lane in list(self._lanes.items()):
            try:
                is_done = not lane.advance()
            except Exception as error:  # one request must not end the others
                _fail(lane.open_jobs(), error)
                is_done = True
            if is_done:
                del self._lanes[key], lane
                release_cached_buffers()

    def _begin(self, job: Job) -> None:
        model = job.model
        is_constrained = job.sampling.grammar or job.sampling.penalties or job.top
        if is_constrained or not model.sampler.has_continuous_batching:
            self._singles.append(_decoded_alone(job, self._sequences, self._advance_lanes))
            return
        key = model.name, job.sampling
        if key not in self._lanes:
            used = {name for name, _ in self._lanes} | {model.name}
            for other in [other for other in self._refreshed if other.name not in used]:
                other.sampler.fused.release()
                self._refreshed.remove(other)
            if model not in self._refreshed:
                model.sampler.fused.refresh()
                self._refreshed.append(model)
            self._lanes[key] = Lane(model, job.sampling, self.rows, self._prefixes)
        self._lanes[key].arrived.append(job)


def _fail(jobs: Sequence[Job], error: Exception) -> None:
    if not isinstance(error, UserError):
        traceback.print_exception(error)
        error = UserError(MODEL_FAILED, f"The model failed: {error}")
    for job in jobs:
        job.tell((), error)


class Lane:
    """Answers of one model with one way to sample, decoded together; each has a place in `_outputs` meanwhile."""

    def __init__(self, model: ServedModel, sampling: Sampling, rows: int, prefixes: PrefixCache) -> None:
        sampler, policy = model.sampler, model.policy
        self.model, self.sampler, self._prefixes = model, sampler, prefixes
        self.arrived: deque[Job] = deque()
        self._jobs: dict[int, Job] = {}  # by place
        self._reading: Iterator[None] | None = None
        self._read: list[AdmittedRows] = []
        # Twice as many places as rows: the places of ended rows are taken until the batch is compacted.
        self._outputs = CompletionBuffer(2 * rows, LONGEST, policy.tokenizer, policy.eos_ids, ())
        self._reported = np.zeros(2 * rows, np.int64)
        self._uniform_NT = np.zeros((2 * rows, LONGEST), np.float32)
        active = mx.get_active_memory()
        self._most_columns = (machine_bytes(active) - active) // 2 // max(1, model.bytes_per_token)
        step = sampler.compiled_step(sampling)
        drawing = SamplingState(sampling, agree=sampler.agree)
        self._scheduler = Scheduler(
            self, self._outputs, self._uniform_NT, drawing, step, rows, sampler.row_costs, chunk=CHUNK
        )

    def open_jobs(self) -> list[Job]:
        return [*self._jobs.values(), *self.arrived]

    @property
    def waiting(self) -> int:
        """Answers whose prompts are read."""
        return sum(len(each.index) for each in self._read)

    def admit(self, count: int) -> list[AdmittedRows]:
        """All that are `waiting`: no more prompts are read than rows are free."""
        admissions, self._read = self._read, []
        return admissions

    def _startable(self) -> int:
        """How many of the arrived answers have a row, and room in memory. All rows have the length of the longest."""
        begun = [_columns(job, int(self._reported[place])) for place, job in self._jobs.items()]
        longest, most = max(begun, default=0), self._scheduler.max_rows
        if begun and most - len(begun) < max(1, most // 8):  # as the scheduler admits them: several are read together
            return 0
        for count, job in enumerate(islice(self.arrived, most - len(begun))):
            longest = max(longest, _columns(job, 0))
            if (len(begun) + count + 1) * longest > self._most_columns:
                return count if begun else max(count, 1)
        return min(len(self.arrived), most - len(begun))

    def _start(self, count: int) -> Iterator[None]:
        """Read the prompts of the next `count` answers, piece by piece. Equal prompts are read once, and what the cache
        has is not read again."""
        jobs = [self.arrived.popleft() for _ in range(count)]
        taken = {*self._jobs, *self._scheduler.rows.index.tolist()}
        free = (place for place in range(len(self._reported)) if place not in taken)
        places: dict[tuple[int, ...], list[int]] = {}  # of each prompt
        for job, place in zip(jobs, free, strict=False):
            self._jobs[place] = job
            self._outputs.restart(place, job.max_tokens)
            self._reported[place] = 0
            self._uniform_NT[place, : job.max_tokens] = job.uniforms()
            places.setdefault(tuple(job.prompt), []).append(place)
        cached = {prompt: self._prefixes.longest(self.model.name, list(prompt)) for prompt in places}
        for prompts in _alike(list(places), {prompt: len(row.unread) for prompt, row in cached.items() if row}):
            rows = [row for prompt in prompts if (row := cached[prompt]) is not None]
            whole: Prompts = [(list(prompt), None) for prompt in prompts]
            index = np.array([place for prompt in prompts for place in places[prompt]])
            prompt_of = np.repeat(np.arange(len(prompts)), [len(places[prompt]) for prompt in prompts])
            for prefilled in self.sampler.read_on_pieces(rows) if rows else self.sampler.prefill_pieces(whole):
                if not any(place in self._jobs for place in index):  # their clients have left
                    break
                if prefilled is None:
                    yield
                else:
                    self._read.append(AdmittedRows(prefilled, index, prompt_of))

    def advance(self) -> bool:
        """Decode some tokens in every row, and read a piece of the prompts that come next. False: there are none."""
        for place, job in list(self._jobs.items()):
            if job.is_cancelled:
                self._outputs.stop[place] = LENGTH
                del self._jobs[place]
        self.arrived = deque(job for job in self.arrived if not job.is_cancelled)
        if self._reading is None and (count := self._startable()):
            self._reading = self._start(count)
        decodes = bool((self._outputs.stop[self._scheduler.rows.index] == OPEN).any())
        self.sampler.prefill_chunk = PIECE if decodes else PIECE_ALONE
        if self._reading is not None and next(self._reading, True):
            self._reading = None
        for each in self._read:
            is_open = np.isin(each.index, [*self._jobs])  # the others' clients have left
            each.index, each.prompt = each.index[is_open], each.prompt[is_open]
        self._read = [each for each in self._read if len(each.index)]
        if not self._scheduler.schedule():
            return self._reading is not None or bool(self.arrived)
        self._scheduler.decode_chunk()
        for place, job in list(self._jobs.items()):
            start, end = int(self._reported[place]), int(self._outputs.length[place])
            if end == start:
                continue
            self._reported[place], stop = end, int(self._outputs.stop[place])
            new = [SampledToken(*each) for each in zip(*self._outputs.arrays(place, start), strict=True)]
            job.tell(new, REASONS[stop] if stop >= 0 else None)
            if stop < 0:
                continue
            # The answer has ended. Its keys and values are kept: the next prompt of its conversation begins with it.
            del self._jobs[place]
            tokens = job.prompt + self._outputs.tokens(place)[:-1]  # the last token may not have been read
            if REUSED < len(tokens) <= self._prefixes.most_bytes // self.model.bytes_per_token:
                rows = self._scheduler.rows
                (row,) = np.flatnonzero(rows.index == place)
                self._prefixes.add(self.model.name, tokens, ParkedRow(*rows.copied(int(row), len(tokens)), read=0))
        return True


def _columns(job: Job, written: int) -> int:
    """Those that its row takes, or soon will: few answers are as long as they may be."""
    return len(job.prompt) + min(job.max_tokens, written + EXPECTED)


def _alike(prompts: list[tuple[int, ...]], unread: dict[tuple[int, ...], int]) -> list[list[tuple[int, ...]]]:
    """Prompts to read together: of about the same length, with or without a part in the cache (`unread`: the rest)."""
    batches: list[list[tuple[int, ...]]] = []
    for prompt in sorted(prompts, key=lambda prompt: (prompt in unread, unread.get(prompt, len(prompt)))):
        length = unread.get(prompt, len(prompt))
        if batches:
            last, first = batches[-1], batches[-1][0]
            is_alike = (first in unread) == (prompt in unread) and length <= 2 * unread.get(first, len(first)) + REUSED
            if is_alike and (len(last) + 1) * length <= PREFILL_TOKENS:
                last.append(prompt)
                continue
        batches.append([prompt])
    return batches


class PrefixCache:
    """Keys and values of ended answers, the newest last, of at most `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._entries: list[tuple[str, np.ndarray, ParkedRow]] = []

    def longest(self, model: str, prompt: list[int]) -> ParkedRow | None:
        """The row that has most of the prompt's first tokens, cut to these; its last token is never among them."""
        asked = np.array(prompt[:-1])
        found = [(_common(tokens, asked), row) for name, tokens, row in self._entries if name == model]
        read, row = max(found, key=lambda each: each[0], default=(0, None))
        if row is None or read < REUSED:
            return None
        keys, values = ([array[..., :read, :] for array in arrays] for arrays in (row.keys, row.values))
        return ParkedRow(keys, values, read, unread=prompt[read:])

    def add(self, model: str, tokens: list[int], row: ParkedRow) -> None:
        """Keep a row in place of those that it continues."""
        ids = np.array(tokens)
        entries = [each for each in self._entries if each[0] != model or _common(each[1], ids) < len(each[1])]
        entries.append((model, ids, row))
        sizes = [sum(array.nbytes for array in (*row.keys, *row.values)) for _, _, row in entries]
        while sum(sizes) > self.most_bytes or len(entries) > MOST_PREFIXES:
            del entries[0], sizes[0]
        self._entries = entries


def _common(a: np.ndarray, b: np.ndarray) -> int:
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def _decoded_alone(job: Job, idle: dict[str, CachedSequence], meanwhile: Callable[[], None]) -> Iterator[None]:
    """Decode one answer by itself; yields after every CHUNK tokens. `idle`: sequences that no answer uses, by model.
    `meanwhile` is called between pieces of the prompt."""
    model, policy, new = job.model, job.model.policy, list[SampledToken]()
    try:
        sequence = idle.pop(model.name, None) or CachedSequence(policy.model, policy.split_model)
        held = model.sampler.grammars.state(job.sampling.grammar)
        steps = sequence.generate(job.prompt, job.sampling, job.uniforms(), meanwhile, held, top=job.top)
        with closing(steps):
            for count, token in enumerate(steps, 1):
                new.append(token)
                stop: Stop | None = "length" if count == job.max_tokens else None
                stop = "eos" if token.token in policy.eos_ids else stop
                if stop or len(new) == CHUNK:
                    job.tell(new, stop)
                    new = []
                    if stop or job.is_cancelled:
                        break
                    yield
        idle[model.name] = sequence
    except Exception as error:  # one request must not end the others
        _fail([job], error)
