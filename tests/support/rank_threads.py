"""Ranks as threads of one process, one of which computes at a time: collectives and control channel."""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import mlx.core as mx
import numpy as np

from backend.distributed.channel import GOODBYE, ChannelMessage
from backend.distributed.collectives import FlatCollectives
from backend.distributed.messages import decode, encode
from backend.distributed.ranks import LostRankError, RankInfo

T = TypeVar("T")
LOST_S = 60.0  # how long a rank waits for the others: one of them has failed then, and its error is the one to show


class Meeting:
    """Where the ranks lay down what they have, and take what all have laid down."""

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(size)
        self._values: list[np.ndarray | None] = [None] * size

    def exchange(self, rank: int, value: np.ndarray) -> list[np.ndarray]:
        self._values[rank] = value
        self.turn.release()
        try:
            self._barrier.wait(LOST_S)
            values = [value for value in self._values if value is not None]
            self._barrier.wait(LOST_S)  # before anybody lays down the next
        finally:
            self.turn.acquire()
        assert len({(value.dtype, value.shape) for value in values}) == 1, "the ranks do not make the same call"
        return values

    def break_off(self) -> None:
        self._barrier.abort()

    @property
    def is_broken(self) -> bool:
        return self._barrier.broken


class ThreadCollectives(FlatCollectives):
    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self.meeting = meeting

    def all_sum(self, x_N: mx.array) -> mx.array:
        return mx.array(sum(self.meeting.exchange(self.rank, np.array(x_N))))

    def all_gather(self, x_N: mx.array) -> mx.array:
        return mx.array(np.concatenate(self.meeting.exchange(self.rank, np.array(x_N))))


def on_ranks(size: int, work: Callable[[ThreadCollectives], T]) -> list[T]:
    """What `work` returns on each of `size` ranks."""
    meeting = Meeting(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def of_rank(rank: int) -> None:
        with meeting.turn:
            try:
                results[rank] = work(ThreadCollectives(rank, size, meeting))
            except BaseException as error:
                if not isinstance(error, threading.BrokenBarrierError):
                    errors.append(error)
                meeting.break_off()
            finally:
                mx.clear_streams()  # else mlx aborts the process at its end

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


class ThreadLink:
    """One end of the channel of `ranks`; rank 0 has an inbox that all workers write to."""

    def __init__(self, ranks: ThreadCollectives, inboxes: list[queue.SimpleQueue[ChannelMessage]]) -> None:
        self._ranks, self._inboxes = ranks, inboxes
        self.machines = [RankInfo(rank, f"thread-{rank}") for rank in range(len(inboxes))]

    def receive(self, timeout: float | None = None) -> ChannelMessage | None:
        meeting, ends = self._ranks.meeting, None if timeout is None else time.monotonic() + timeout
        while True:
            meeting.turn.release()
            try:
                return self._inboxes[self._ranks.rank].get(timeout=0.01)
            except queue.Empty:
                if meeting.is_broken:
                    raise threading.BrokenBarrierError from None
            finally:
                meeting.turn.acquire()
            if ends is not None and time.monotonic() >= ends:
                return None

    def check(self) -> None: ...

    def _put(self, rank: int, kind: str, body: Mapping[str, Any]) -> None:
        stream = io.BytesIO(encode(kind, body))
        message = decode(lambda count: bytearray(stream.read(count)))
        self._inboxes[rank].put(ChannelMessage(self._ranks.rank, *message))

    def close(self) -> None:
        """Of the leader."""
        for rank in range(1, len(self._inboxes)):
            self._put(rank, GOODBYE, {})


class ThreadWorkers(ThreadLink):
    def slowest(self) -> int:
        return 1

    def give_up(self, rank: int, why: str) -> NoReturn:
        raise LostRankError(self.machines[rank], why)

    def send(self, rank: int, kind: str, **body: Any) -> None:
        self._put(rank, kind, body)

    def send_to_all(self, kind: str, **body: Any) -> None:
        for rank in range(1, len(self._inboxes)):
            self._put(rank, kind, body)


class ThreadLeader(ThreadLink):
    def send(self, kind: str, **body: Any) -> None:
        self._put(0, kind, body)


def inboxes(size: int) -> list[queue.SimpleQueue[ChannelMessage]]:
    return [queue.SimpleQueue() for _ in range(size)]
