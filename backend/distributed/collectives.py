"""`Collectives` over `mlx.core.distributed` (ring, MPI, JACCL, NCCL), in a thread.

With a lost peer a collective of mlx may hang. So a communication thread makes the calls, the caller waits in short
turns, and `check` may raise between them. The process must end with `os._exit` then.

The calls run on the CPU: Metal ends a command buffer that waits 5 s for another rank (mlx#4475). Only NCCL sums on the
GPU.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import mlx.core as mx
import numpy as np

from backend.distributed.commands import FILES_VARIABLE, mlx_files
from backend.training.collectives import Collectives
from backend.utils.errors import UserError

POLL_S = 0.1
"""Seconds between two calls of `check`."""
REASON_WITHIN_S = 30.0
"""Seconds in which `check` may find the reason."""
FIRST_BYTES = 1016
"""Bytes that travel with the length; a longer value takes a second round."""


def do_nothing(*_: object) -> None: ...


class FlatCollectives(Collectives):
    """Collectives of any shape on top of two of flat vectors. Heartbeats report the number `entered` and `left`."""

    entered = left = 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.waiting: Callable[[float], None] = do_nothing
        self.waited_s = 0.0
        """Seconds of waiting for slower ranks."""
        self.summed_s = 0.0
        """Seconds of transfers."""

    def all_sum(self, x_N: mx.array) -> mx.array:
        """The sum over the ranks, evaluated."""
        raise NotImplementedError

    def all_gather(self, x_N: mx.array) -> mx.array:
        """Every rank's vector of the same length, one behind the other, evaluated."""
        raise NotImplementedError

    def pulse(self) -> dict[str, int]:
        return {"entered": self.entered, "left": self.left}

    def sum(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        began = time.perf_counter()
        total = self.all_sum(mx.concatenate([x.astype(mx.float32).reshape(-1) for x in arrays]))
        self.summed_s += time.perf_counter() - began
        return _split(total, [x.shape for x in arrays])

    def broadcast(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        began = time.perf_counter()
        # As whole numbers, because −0 + 0 is 0 in floating point; 0 from everybody else.
        own = mx.concatenate([_bytes(x) for x in arrays])
        words = mx.pad(own, (0, -own.size % 4)).view(mx.uint32)
        sent = self.all_sum(words if self.rank == 0 else mx.zeros_like(words)).view(mx.uint8)
        self.summed_s += time.perf_counter() - began
        parts = _split(sent[: own.size], [(x.nbytes,) for x in arrays])
        return [part.view(x.dtype).reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        began, own = time.perf_counter(), json.dumps(value).encode()
        length = np.array([len(own)], np.uint64).tobytes()
        first = self._gather_equal(length + own[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0"))
        lengths = [int(np.frombuffer(each[:8], np.uint64)[0]) for each in first]
        parts = [each[8:] for each in first]
        if (rest := max(lengths) - FIRST_BYTES) > 0:
            tails = self._gather_equal(own[FIRST_BYTES:].ljust(rest, b"\0"))
            parts = [head + tail for head, tail in zip(parts, tails, strict=True)]
        self.waited_s += time.perf_counter() - began
        return [json.loads(part[:length]) for part, length in zip(parts, lengths, strict=True)]

    def concatenate(self, x_N: mx.array) -> mx.array:
        lengths: list[int] = self.gather(x_N.size)
        if not (longest := max(lengths)):
            return mx.zeros(0)
        began = time.perf_counter()
        rows = self.all_gather(mx.pad(x_N.astype(mx.float32), (0, longest - x_N.size))).reshape(self.size, longest)
        self.waited_s += time.perf_counter() - began
        return mx.concatenate([row[:length] for row, length in zip(rows, lengths, strict=True)])

    def barrier(self) -> None:
        self.gather(None)

    def _gather_equal(self, own: bytes) -> list[bytes]:
        gathered = np.array(self.all_gather(mx.array(np.frombuffer(own, np.uint8)))).tobytes()
        return [gathered[i : i + len(own)] for i in range(0, len(gathered), len(own))]


def _bytes(x: mx.array) -> mx.array:
    return (x if x.dtype == mx.uint8 else mx.contiguous(x.reshape(-1)).view(mx.uint8)).reshape(-1)


def _split(flat: mx.array, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    parts: list[mx.array] = []
    start = 0
    for shape in shapes:
        end = start + math.prod(shape)
        parts.append(flat[start:end].reshape(shape))
        start = end
    return parts


class MlxCollectives(FlatCollectives):
    """Over a group of mlx."""

    def __init__(self, group: mx.distributed.Group, device: mx.DeviceType = mx.cpu) -> None:
        super().__init__(group.rank(), group.size())
        self.check: Callable[[], None] = do_nothing
        """Raises for a lost rank; called while waiting."""
        self.group = group
        self._device = device
        self._calls: queue.SimpleQueue[tuple[Callable[[], mx.array], Future[mx.array]]] = queue.SimpleQueue()
        threading.Thread(target=self._communicate, name="collectives", daemon=True).start()

    def all_sum(self, x_N: mx.array) -> mx.array:
        return self._call(x_N, lambda: mx.distributed.all_sum(x_N, group=self.group, stream=self._device))

    def all_gather(self, x_N: mx.array) -> mx.array:
        return self._call(x_N, lambda: mx.distributed.all_gather(x_N, group=self.group, stream=self._device))

    def _call(self, x_N: mx.array, operation: Callable[[], mx.array]) -> mx.array:
        mx.eval(x_N)
        result: Future[mx.array] = Future()
        self._calls.put((operation, result))
        began = time.monotonic()
        while True:
            try:
                error = result.exception(POLL_S)
            except TimeoutError:
                self.check()
                self.waiting(time.monotonic() - began)
                continue
            if error is None:
                return result.result()
            wait_for_reason(self.check, REASON_WITHIN_S)
            raise UserError("hosts", f"The ranks' link has failed: {error}") from error

    def _communicate(self) -> None:
        while True:
            operation, result = self._calls.get()
            self.entered += 1
            try:
                value = operation()
                mx.eval(value)
            except BaseException as error:
                result.set_exception(error)
                continue  # `left` stays behind: this collective has not returned on every rank
            self.left += 1
            result.set_result(value)


def wait_for_reason(check: Callable[[], None], within_s: float) -> None:
    """Let `check` raise what becomes known of the rank whose link has failed."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        check()
        time.sleep(POLL_S)


def init_collectives(backend: str) -> MlxCollectives:
    """Join the other ranks that the environment names. Raises UserError."""
    try:
        with mlx_files(json.loads(os.environ.get(FILES_VARIABLE, "{}"))):
            group = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        raise UserError("distributed_backend", f"The ranks cannot be joined over {backend}: {error}") from error
    return MlxCollectives(group, mx.gpu if backend == "nccl" else mx.cpu)
