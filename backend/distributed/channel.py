"""The control channel of a run on several machines: a connection between rank 0, the leader, and each other rank, a
worker.

Work and its results go through it; beside them each end sends a heartbeat every second. The leader judges who is lost,
and tells its main thread at its next `check` or `receive`. A worker that has lost its leader ends its process at once,
wherever its main thread is, since nothing that it holds is worth keeping.
"""

from __future__ import annotations

import base64
import os
import secrets
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from backend.distributed import wire
from backend.distributed.collectives import FlatCollectives
from backend.distributed.rank_process import LEADER_LOST, own_addresses
from backend.distributed.ranks import LostRankError, RankInfo, WorkerError
from backend.distributed.wire import GOODBYE, Arrays, Connection, encode
from backend.trainer.machine import gpu_error
from backend.utils.errors import UserError

MEETING_PATIENCE_S = 60.0
"""Seconds for the ranks to connect, once all of them have met in MLX."""
GOODBYE_PATIENCE_S = 10.0
"""Seconds for a worker to end once its leader has closed the channel."""
SUSPICION_S = 3.0
"""How long the leader waits after a failed sum for the sign that another rank is gone, which is why."""
LEAST_LIMIT_S = 15.0
"""The least time that a sum may take which every rank has begun."""
SLOWEST_BANDWIDTH = 1e6
"""Bytes a second that a cable is always granted."""
MARGIN = 3.0
"""How much slower than the fastest so far a sum may be."""

HELLO, FAULT = "hello", "fault"


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """One message. `rank`: its sender; `arrays` are its receiver's own."""

    rank: int
    kind: str
    body: dict[str, Any]
    arrays: dict[str, np.ndarray]


def open_channel(ranks: FlatCollectives) -> LeaderChannel | WorkerChannel:
    """Connect this rank; every rank calls it at the same time. Raises LostRankError on rank 0 where one does not come,
    and OSError on the others where rank 0 cannot be reached.

    One gather carries rank 0's addresses and secret to all, so the secret is in no command line, environment or file.
    """
    if ranks.rank == 0:
        secret, listeners = secrets.token_bytes(32), wire.listen(own_addresses())
        addresses = [each.getsockname()[:2] for each in listeners]
        ranks.gather({"addresses": addresses, "secret": base64.b64encode(secret).decode()})
        others = set(range(1, ranks.size))
        connections = wire.accept(listeners, secret, others, time.monotonic() + MEETING_PATIENCE_S)
        if missing := sorted(others - connections.keys()):
            for each in connections.values():
                each.close()
            why = f"did not connect to rank 0 within {MEETING_PATIENCE_S:g} seconds"
            raise LostRankError(RankInfo(missing[0], "a machine"), why)
        return LeaderChannel(connections, ranks)
    meeting = ranks.gather(None)[0]
    addresses = [(str(host), int(port)) for host, port in meeting["addresses"]]
    secret = base64.b64decode(meeting["secret"])
    return WorkerChannel(wire.connect(addresses, secret, ranks.rank, time.monotonic() + MEETING_PATIENCE_S), ranks)


class LeaderChannel:
    """Rank 0's end. Its methods are for the main thread, and raise LostRankError or WorkerError there as soon as one is
    known.

    `machines`: every rank, itself included, in the order of the ranks.
    """

    def __init__(self, connections: Mapping[int, socket.socket], ranks: FlatCollectives) -> None:
        """From proven connections by rank. Raises LostRankError where a rank does not introduce itself."""
        self._ranks = ranks
        self._changed = threading.Condition()
        self._inbox: deque[ChannelMessage] = deque()
        self._failure: LostRankError | WorkerError | None = None
        self._gone: set[int] = set()
        self._infos: dict[int, RankInfo] = {0: RankInfo.of_this_process(0)}
        self._pulses: dict[int, dict[str, Any]] = {}
        self._stuck: tuple[int, float] = (0, 0.0)
        """The number of the collective that was under way at the last look, and since when every rank has begun it."""
        self._failed_since: float | None = None
        self.on_failure: Callable[[LostRankError | WorkerError], None] = lambda failure: None
        """Called once, in any thread, as soon as a failure is known."""
        self._connections = {rank: self._connection(rank, each) for rank, each in connections.items()}
        for each in self._connections.values():
            each.start()
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._infos) > len(connections), wire.LOST_AFTER_S)
            silent = sorted(connections.keys() - self._infos.keys())
        if self._failure is None and silent:
            self._fail(LostRankError(self._info(silent[0]), "did not introduce itself"))
        if self._failure is not None:
            self.close()
            raise self._failure
        self.machines = [self._infos[rank] for rank in sorted(self._infos)]

    def _connection(self, rank: int, connection: socket.socket) -> Connection:
        return Connection(
            connection,
            lambda kind, body, arrays: self._take(ChannelMessage(rank, kind, body, arrays)),
            lambda why: self._on_lost(rank, why),
        )

    def send(self, rank: int, kind: str, body: Mapping[str, Any] | None = None, arrays: Arrays | None = None) -> None:
        """Queue a message to a worker and return at once; `arrays` must not be written to from then on."""
        self._connections[rank].send(encode(kind, body or {}, arrays or {}))

    def send_to_all(self, kind: str, body: Mapping[str, Any] | None = None, arrays: Arrays | None = None) -> None:
        """As `send`, to every worker; the message is encoded once."""
        frame = encode(kind, body or {}, arrays or {})
        for each in self._connections.values():
            each.send(frame)

    def receive(self, timeout: float | None = None) -> ChannelMessage | None:
        """The next message of any worker; None after `timeout` seconds without one (None waits for ever)."""
        ends = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = wire.HEARTBEAT_S if ends is None else min(wire.HEARTBEAT_S, ends - time.monotonic())
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._failure is not None, max(0.0, wait))
                message = self._inbox.popleft() if self._inbox and self._failure is None else None
            self.check()
            if message is not None or (ends is not None and time.monotonic() >= ends):
                return message

    def check(self) -> None:
        """Raise the LostRankError or WorkerError that is known, if any. Cheap: it is called in every poll."""
        if self._failure is None:
            self._judge_sums(time.monotonic())
        if self._failure is not None:
            raise self._failure

    def behind(self) -> list[int]:
        """The workers that have not begun the collective that the leader is in, the furthest behind first."""
        entered = {rank: pulse["entered"] for rank, pulse in dict(self._pulses).items()}
        return sorted((rank for rank, count in entered.items() if count < self._ranks.entered), key=entered.__getitem__)

    def give_up(self, rank: int, why: str) -> NoReturn:
        """Count a worker as lost whose connection lives. Raises LostRankError, or what was known before."""
        self._fail(LostRankError(self._info(rank), why))
        assert self._failure is not None
        raise self._failure

    def close(self) -> None:
        """Send what is waiting and a goodbye, and hang up; for a few seconds at most, however many workers there
        are."""
        closing = [threading.Thread(target=each.close, daemon=True) for each in self._connections.values()]
        for each in closing:
            each.start()
        for each in closing:
            each.join(wire.CLOSING_PATIENCE_S + 1)

    def _judge_sums(self, now: float) -> None:
        """Find the rank to blame where every rank answers, and a sum over them has failed or does not end."""
        if not (pulses := dict(self._pulses)):
            return
        everyone = pulses | {0: self._ranks.pulse()}
        if failed := [rank for rank in sorted(everyone, reverse=True) if everyone[rank]["failure"]]:
            self._failed_since = self._failed_since or now
            if now - self._failed_since >= SUSPICION_S:
                # With two ranks the leader's own failure is that of its link to the other.
                why = f"could not add up the gradients with the others ({everyone[failed[0]]['failure']})"
                self._fail(LostRankError(self._info(failed[0] or max(everyone)), why))
            return
        begun = min(pulse["entered"] for pulse in everyone.values())
        behind = [rank for rank, pulse in everyone.items() if pulse["left"] < begun]
        if not behind:
            self._stuck = (0, 0.0)
            return
        if self._stuck[0] != begun:
            self._stuck = (begun, now)
        size, bandwidth = self._ranks.pending_bytes, self._ranks.bandwidth
        limit = LEAST_LIMIT_S + max(size / SLOWEST_BANDWIDTH, MARGIN * size / bandwidth if bandwidth else 0.0)
        if (took := now - self._stuck[1]) >= limit:
            why = f"has answered, but a sum over all ranks did not end within {took:.0f} seconds"
            self._fail(LostRankError(self._info(max(behind) or max(everyone)), why))

    # In the reading threads:

    def _take(self, message: ChannelMessage) -> None:
        rank, body = message.rank, message.body
        if message.kind == wire.HEARTBEAT:
            self._pulses[rank] = {"entered": 0, "left": 0, "failure": ""} | body
        elif message.kind == HELLO:
            try:
                info = replace(RankInfo.from_dict(body), rank=rank, address=self._connections[rank].peer)
            except (TypeError, ValueError, KeyError):
                info = self._info(rank)
            with self._changed:
                self._infos[rank] = info
                self._changed.notify_all()
        elif message.kind == FAULT:
            self._fail(WorkerError(self._info(rank), **body))
        elif message.kind == GOODBYE:
            self._gone.add(rank)
        else:
            with self._changed:
                self._inbox.append(message)
                self._changed.notify_all()

    def _on_lost(self, rank: int, why: str) -> None:
        if rank not in self._gone:
            self._fail(LostRankError(self._info(rank), why))

    def _info(self, rank: int) -> RankInfo:
        return self._infos.get(rank, RankInfo(rank, "a machine"))

    def _fail(self, failure: LostRankError | WorkerError) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            self._changed.notify_all()
        self.on_failure(failure)


class WorkerChannel:
    """A worker's end. The process ends itself when the leader is lost."""

    def __init__(self, connection: socket.socket, ranks: FlatCollectives) -> None:
        self._rank = ranks.rank
        self._changed = threading.Condition()
        self._inbox: deque[ChannelMessage] = deque()
        self._leaving = threading.Timer(GOODBYE_PATIENCE_S, lambda: self._end_process("has closed the channel"))
        self._leaving.daemon = True
        self._connection = Connection(connection, self._take, self._end_process, ranks.pulse)
        self.send(HELLO, RankInfo.of_this_process(ranks.rank).to_dict())
        self._connection.start()

    def receive(self) -> ChannelMessage:
        """The next message of the leader; one of kind GOODBYE when it has closed the channel."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox)
            return self._inbox.popleft()

    def send(self, kind: str, body: Mapping[str, Any] | None = None, arrays: Arrays | None = None) -> None:
        """As `LeaderChannel.send`, to the leader."""
        self._connection.send(encode(kind, body or {}, arrays or {}))

    def fault(self, error: BaseException) -> None:
        """Tell the leader what went wrong here, and hang up; this process is of no use from then on."""
        if isinstance(error, UserError):
            told = {"sentence": " ".join(fault.sentence for fault in error.faults)}
        elif (gpu := gpu_error(error)) is not None:
            told = {"sentence": f"{gpu.happened} {gpu.advice}", "gpu_text": str(error)}
        else:
            lines = "".join(traceback.format_exception(error))
            told = {"sentence": f"{type(error).__name__}: {error}", "exit_code": 1, "traceback": lines}
        self.send(FAULT, told)
        self._connection.close()

    def close(self) -> None:
        self._leaving.cancel()
        self._connection.close()

    def _take(self, kind: str, body: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        if kind == wire.HEARTBEAT:
            return
        with self._changed:
            self._inbox.append(ChannelMessage(0, kind, body, arrays))
            self._changed.notify_all()
        if kind == GOODBYE:  # its main thread may be in a sum that never ends
            self._leaving.start()

    def _end_process(self, why: str) -> None:
        os.write(2, f"rank {self._rank}: the leader {why}; this process ends.\n".encode())
        os._exit(LEADER_LOST)
