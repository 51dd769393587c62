"""The control channel: a connection between rank 0, the leader, and each other rank, a worker, with a heartbeat every
second.

The leader learns of a lost worker at its next `check` or `receive`. A worker without a leader ends its process at once.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
"""Seconds for the ranks to connect."""
GOODBYE_PATIENCE_S = 10.0
"""Seconds for a worker to end after the leader's goodbye."""
FAULT = "fault"


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """One message. `rank`: its sender; `arrays` are its receiver's own."""

    rank: int
    kind: str
    body: dict[str, Any]
    arrays: dict[str, np.ndarray]


def open_channel(ranks: FlatCollectives) -> LeaderChannel | WorkerChannel:
    """Connect this rank; every rank calls it at the same time. Raises LostRankError on rank 0, OSError on the others.

    One gather carries rank 0's addresses and secret, so the secret is in no command line, environment or file.
    """
    own = asdict(RankInfo.of_this_process(ranks.rank))
    if ranks.rank != 0:
        meeting = ranks.gather({"info": own})[0]
        addresses = [(str(host), int(port)) for host, port in meeting["addresses"]]
        secret = base64.b64decode(meeting["secret"])
        return WorkerChannel(wire.connect(addresses, secret, ranks.rank, time.monotonic() + MEETING_PATIENCE_S), ranks)
    secret, listeners = secrets.token_bytes(32), wire.listen(own_addresses())
    addresses = [each.getsockname()[:2] for each in listeners]
    gathered = ranks.gather({"info": own, "addresses": addresses, "secret": base64.b64encode(secret).decode()})
    machines = [RankInfo.from_dict(each["info"]) for each in gathered]
    others = set(range(1, ranks.size))
    connections = wire.accept(listeners, secret, others, time.monotonic() + MEETING_PATIENCE_S)
    if missing := sorted(others - connections.keys()):
        for each in connections.values():
            each.close()
        raise LostRankError(machines[missing[0]], f"did not connect to rank 0 within {MEETING_PATIENCE_S:g} seconds")
    for rank, connection in connections.items():
        machines[rank] = replace(machines[rank], address=str(connection.getpeername()[0]))
    return LeaderChannel(connections, ranks, machines)


class LeaderChannel:
    """Rank 0's end, for the main thread. Every method raises a known LostRankError or WorkerError."""

    def __init__(
        self, connections: Mapping[int, socket.socket], ranks: FlatCollectives, machines: Sequence[RankInfo]
    ) -> None:
        self.machines = list(machines)
        self.on_failure: Callable[[LostRankError | WorkerError], None] = lambda failure: None
        """Receives the first failure, in any thread."""
        self._ranks = ranks
        self._changed = threading.Condition()
        self._inbox: deque[ChannelMessage] = deque()
        self._failure: LostRankError | WorkerError | None = None
        self._gone: set[int] = set()
        self._pulses: dict[int, dict[str, int]] = {}
        self._connections = {rank: self._connection(rank, each) for rank, each in connections.items()}
        for each in self._connections.values():
            each.start()

    def _connection(self, rank: int, connection: socket.socket) -> Connection:
        return Connection(
            connection,
            lambda kind, body, arrays: self._take(ChannelMessage(rank, kind, body, arrays)),
            lambda why: None if rank in self._gone else self._fail(LostRankError(self.machines[rank], why)),
        )

    def send(self, rank: int, kind: str, body: Mapping[str, Any] | None = None, arrays: Arrays | None = None) -> None:
        """Queue a message to a worker; `arrays` must not be written to from then on."""
        self._connections[rank].send(kind, body, arrays)

    def send_to_all(self, kind: str, body: Mapping[str, Any] | None = None, arrays: Arrays | None = None) -> None:
        frame = encode(kind, body or {}, arrays or {})
        for each in self._connections.values():
            each.send_frame(frame)

    def receive(self, timeout: float | None = None) -> ChannelMessage | None:
        """The next message of any worker; None after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._failure is not None, timeout)
            self.check()
            return self._inbox.popleft() if self._inbox else None

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def slowest(self) -> int:
        """The worker that has begun and ended the fewest collectives."""
        counts = {rank: (pulse["entered"], pulse["left"]) for rank, pulse in dict(self._pulses).items()}
        return min(self._connections, key=lambda rank: (*counts.get(rank, (0, 0)), -rank))

    def give_up(self, rank: int, why: str) -> NoReturn:
        """Count a worker as lost whose connection lives. Raises LostRankError, or what was known before."""
        self._fail(LostRankError(self.machines[rank], why))
        assert self._failure is not None
        raise self._failure

    def close(self) -> None:
        for each in self._connections.values():
            each.close()

    # In the reading threads:

    def _take(self, message: ChannelMessage) -> None:
        if message.kind == wire.HEARTBEAT:
            self._pulses[message.rank] = message.body
        elif message.kind == FAULT:
            self._fail(WorkerError(self.machines[message.rank], **message.body))
        elif message.kind == GOODBYE:
            self._gone.add(message.rank)
        else:
            with self._changed:
                self._inbox.append(message)
                self._changed.notify_all()

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
        self._connection = Connection(connection, self._take, lambda why: self._end_process(why), ranks.pulse)
        self.send = self._connection.send
        self._connection.start()

    def receive(self) -> ChannelMessage:
        """The next message of the leader, at last GOODBYE."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox)
            return self._inbox.popleft()

    def fault(self, error: BaseException) -> None:
        """Send the error to the leader, and hang up."""
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
