"""Ranks as threads of one process, one of which computes at a time: collectives and control channel."""

import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from backend.distributed.channel import GOODBYE, ChannelMessage, LeaderChannel, WorkerChannel
from backend.distributed.collectives import FlatCollectives
from backend.distributed.ranks import RankInfo

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


class TurnTaking:
    """A channel during whose waits the others compute."""

    turn: threading.Lock

    def receive(self, *wait: Any) -> Any:
        self.turn.release()
        try:
            return super().receive(*wait)  # pyright: ignore
        finally:
            self.turn.acquire()


class ThreadWorkers(TurnTaking, LeaderChannel):
    pass


class ThreadLeader(TurnTaking, WorkerChannel):
    def _end_process(self, why: str) -> None:  # of the leader, which has failed: its error is the one to show
        self._connection.hang_up()  # as the end of a process does; a leader that lives would wait for it forever
        self._inbox.put(ChannelMessage(0, GOODBYE, {}))


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def thread_channel(ranks: ThreadCollectives, pairs: dict[int, tuple[socket.socket, socket.socket]]) -> Any:
    """The end of the channel of one of `ranks`; `pairs`: a connected pair of sockets for each rank but 0."""
    if ranks.rank:
        channel = ThreadLeader(pairs[ranks.rank][1], ranks)
    else:
        machines = [RankInfo(rank, f"thread-{rank}", memory_gb=64.0) for rank in range(ranks.size)]
        channel = ThreadWorkers({rank: pair[0] for rank, pair in pairs.items()}, machines)
    channel.turn = ranks.meeting.turn
    return channel
