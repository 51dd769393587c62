"""The control channel of a run on several machines: TCP connections between rank 0, the leader, and each other rank, a worker.

Work and its results go through it as messages of JSON and arrays (`frames`); beside them each end sends a heartbeat every second from a
thread of its own (`connection`). The leader judges who is lost, and tells its main thread at its next `check` or `receive`; a worker
that has lost its leader ends its process at once, wherever its main thread is, since nothing that it holds is worth keeping.
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
from typing import Any, NoReturn, Protocol

import numpy as np

from backend.distributed import connection as wire
from backend.distributed.addresses import Address, own_addresses
from backend.distributed.connection import Connection
from backend.distributed.faults import LostRank, WorkerFault
from backend.distributed.frames import Arrays, encode
from backend.distributed.handshake import Listeners, connect
from backend.distributed.rank_info import RankInfo
from backend.distributed.rank_process import own_info
from backend.trainer.machine import gpu_error
from backend.utils.errors import UserError

# Sums over the ranks that never end: who is to blame where every rank answers and a sum is none the less not done.

SUSPICION_S = 3.0
"""How long after MLX has given up a sum the leader waits for the sign that another rank is gone, which is why."""
LEAST_LIMIT_S = 15.0
"""The least time that a sum may take which every rank has begun."""
SLOWEST_BANDWIDTH = 1e6
"""Bytes a second that a cable is always granted, however fast it was before."""
MARGIN = 3.0
"""How much slower than the fastest so far a sum may be."""


class SummingRank(Protocol):
    """How far the collectives of this rank are.

    `entered` and `left` count those that it has begun and ended, `failure` is what MLX said of one that broke, `pending_bytes` the size of
    the one under way, and `bandwidth` the most bytes a second that one has moved.
    """

    @property
    def entered(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def failure(self) -> str: ...
    @property
    def pending_bytes(self) -> int: ...
    @property
    def bandwidth(self) -> float: ...


def pulse_of(group: SummingRank) -> dict[str, Any]:
    """What a rank's heartbeat tells of its collectives."""
    return {"entered": group.entered, "left": group.left, "failure": group.failure}


@dataclass(frozen=True, slots=True)
class CollectiveProgress:
    """How far the collectives of one rank are, by its last heartbeat."""

    entered: int = 0
    left: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rank, and why the run cannot go on with it, to follow its name in a sentence."""

    rank: int
    why: str


class CollectiveWatch:
    """Judges by the heartbeats of all ranks. `take` is called in reading threads, `verdict` in the leader's main thread."""

    def __init__(self, group: SummingRank) -> None:
        """`group`: the leader's own collectives."""
        self._group = group
        self._lock = threading.Lock()
        self._progress: dict[int, CollectiveProgress] = {}
        self._stuck: tuple[int, float] = (0, 0.0)
        """The number of the collective that was under way at the last look, and since when every rank has begun it."""
        self._failed_since: float | None = None

    def take(self, rank: int, pulse: Mapping[str, Any]) -> None:
        """The heartbeat of a worker."""
        progress = CollectiveProgress(
            int(pulse.get("entered", 0)), int(pulse.get("left", 0)), str(pulse.get("failure", ""))
        )
        with self._lock:
            self._progress[rank] = progress

    def behind(self) -> list[int]:
        """The workers that have not begun the collective that the leader is in; the one that is furthest behind first."""
        with self._lock:
            entered = {rank: progress.entered for rank, progress in self._progress.items()}
        return sorted((rank for rank, count in entered.items() if count < self._group.entered), key=entered.__getitem__)

    def verdict(self, now: float) -> Verdict | None:
        """Who is to blame at `now` (monotonic seconds); None as long as nobody is."""
        with self._lock:
            workers = dict(self._progress)
        if not workers:
            return None
        everyone = workers | {0: CollectiveProgress(self._group.entered, self._group.left, self._group.failure)}
        return self._of_failure(everyone, now) or self._of_stuck(everyone, now)

    def _of_failure(self, everyone: Mapping[int, CollectiveProgress], now: float) -> Verdict | None:
        failed = [rank for rank in sorted(everyone, reverse=True) if everyone[rank].failure]
        if not failed:
            return None
        self._failed_since = self._failed_since or now
        if now - self._failed_since < SUSPICION_S:
            return None
        # With two ranks the leader's own failure is that of its link to the other.
        whom = failed[0] or max(everyone)
        return Verdict(whom, f"could not add up the gradients with the others ({everyone[failed[0]].failure})")

    def _of_stuck(self, everyone: Mapping[int, CollectiveProgress], now: float) -> Verdict | None:
        begun = min(progress.entered for progress in everyone.values())
        behind = [rank for rank, progress in everyone.items() if progress.left < begun]
        if not behind:
            self._stuck = (0, 0.0)
            return None
        if self._stuck[0] != begun:
            self._stuck = (begun, now)
        took = now - self._stuck[1]
        if took < self._limit_s():
            return None
        whom = max(behind) or max(everyone)
        return Verdict(whom, f"has answered, but a sum over all ranks did not end within {took:.0f} seconds")

    def _limit_s(self) -> float:
        size, bandwidth = self._group.pending_bytes, self._group.bandwidth
        return LEAST_LIMIT_S + max(size / SLOWEST_BANDWIDTH, MARGIN * size / bandwidth if bandwidth else 0.0)


# ── channel ──────────────────────────────────────────────────────────────────────────────────────────────────────────

MEETING_PATIENCE_S = 60.0
"""How long the ranks may take to connect, once all of them have met in MLX."""
GOODBYE_PATIENCE_S = 10.0
"""How long a worker may take to end once its leader has closed the channel."""
LEADER_LOST = 74
"""The exit code of a worker that has lost its leader."""

HELLO, FAULT = "hello", "fault"
"""Kinds of message that are the channel's own, beside those of its connections."""
GOODBYE = wire.GOODBYE
"""The kind of the last message of the leader, when it closes the channel."""


class MeetingRanks(SummingRank, Protocol):
    """What the channel needs of the collectives: a way to publish rank 0's address and secret, and how far the sums are."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """One message. `rank`: its sender; `arrays` are its receiver's own."""

    rank: int
    kind: str
    body: dict[str, Any]
    arrays: dict[str, np.ndarray]


def open_channel(group: MeetingRanks) -> LeaderChannel | WorkerChannel:
    """Connect this rank; every rank of `group` calls it at the same time. Raises LostRank on rank 0 where one does not come, and OSError on
    the others where rank 0 cannot be reached."""
    if group.rank == 0:
        return _open_leader(group)
    (meeting,) = group.gather(None)[:1]
    addresses = [Address(str(host), int(port)) for host, port in meeting["addresses"]]
    secret = base64.b64decode(meeting["secret"])
    return WorkerChannel(connect(addresses, secret, group.rank, time.monotonic() + MEETING_PATIENCE_S), group)


def _open_leader(group: MeetingRanks) -> LeaderChannel:
    secret, listeners = secrets.token_bytes(32), Listeners.at(own_addresses())
    try:
        # One gather that carries rank 0's word to all: so the secret is in no command line, environment or file.
        group.gather({"addresses": listeners.addresses, "secret": base64.b64encode(secret).decode()})
        deadline = time.monotonic() + MEETING_PATIENCE_S
        connections = listeners.accept(secret, set(range(1, group.size)), deadline)
    finally:
        listeners.close()
    if missing := sorted(set(range(1, group.size)) - connections.keys()):
        for each in connections.values():
            each.close()
        raise LostRank(missing[0], "a machine", f"did not connect to rank 0 within {MEETING_PATIENCE_S:g} seconds")
    return LeaderChannel(connections, group)


class LeaderChannel:
    """Rank 0's end. Its methods are for the main thread, and raise LostRank or WorkerFault there from the moment that one is known.

    `machines`: every rank, itself included, in the order of the ranks.
    """

    def __init__(self, connections: Mapping[int, socket.socket], group: MeetingRanks) -> None:
        """Of proven connections by rank. Raises LostRank where a rank does not introduce itself."""
        self._changed = threading.Condition()
        self._inbox: deque[ChannelMessage] = deque()
        self._failure: LostRank | WorkerFault | None = None
        self._gone: set[int] = set()
        self._infos: dict[int, RankInfo] = {0: own_info(0)}
        self._watch = CollectiveWatch(group)
        self.on_failure: Callable[[LostRank | WorkerFault], None] = lambda failure: None
        """Called once, in any thread, as soon as a failure is known."""
        self._connections = {rank: self._connection(rank, each, group) for rank, each in connections.items()}
        for each in self._connections.values():
            each.start()
        self._await_hellos()
        self.machines = [self._infos[rank] for rank in sorted(self._infos)]

    def _connection(self, rank: int, connection: socket.socket, group: MeetingRanks) -> Connection:
        return Connection(
            connection,
            lambda kind, body, arrays: self._take(rank, kind, body, arrays),
            lambda why: self._on_lost(rank, why),
            dict,
        )

    def _await_hellos(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or len(self._infos) > len(self._connections), wire.LOST_AFTER_S
            )
            silent = sorted(self._connections.keys() - self._infos.keys())
        try:
            self.check()
            if silent:
                raise LostRank(silent[0], "a machine", "did not introduce itself")
        except UserError:
            self.close()
            raise

    # ── for the main thread ──────────────────────────────────────────────────────────────────────────────────────────

    def send(self, rank: int, kind: str, body: Mapping[str, Any] | None = None, arrays: Arrays | None = None) -> None:
        """Send a message to a worker; returns once it is queued, and `arrays` must not be written to from then on."""
        self._connections[rank].send(kind, body or {}, arrays or {})

    def send_to_all(self, kind: str, body: Mapping[str, Any] | None = None, arrays: Arrays | None = None) -> None:
        """As `send`, to every worker; the message is encoded once."""
        parts = encode(kind, body or {}, arrays or {})
        for each in self._connections.values():
            each.send_frame(parts)

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
        """Raise the LostRank or WorkerFault that is known, if any. Cheap: it is called in every poll."""
        if self._failure is None and (verdict := self._watch.verdict(time.monotonic())) is not None:
            self._fail(LostRank.of(self._info(verdict.rank), verdict.why))
        if self._failure is not None:
            raise self._failure

    def behind(self) -> list[int]:
        return self._watch.behind()

    def give_up(self, rank: int, why: str) -> NoReturn:
        """Count a worker as lost whose connection lives. Raises LostRank, or what was known before."""
        self._fail(LostRank.of(self._info(rank), why))
        assert self._failure is not None
        raise self._failure

    def close(self) -> None:
        """Send what is waiting and a goodbye, and hang up; for a few seconds at most, however many workers there are."""
        closing = [threading.Thread(target=each.close, daemon=True) for each in self._connections.values()]
        for each in closing:
            each.start()
        for each in closing:
            each.join(wire.CLOSING_PATIENCE_S + 1)

    # ── for the reading threads ──────────────────────────────────────────────────────────────────────────────────────

    def _take(self, rank: int, kind: str, body: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        if kind == wire.HEARTBEAT:
            self._watch.take(rank, body)
        elif kind == HELLO:
            self._introduce(rank, body)
        elif kind == FAULT:
            self._on_fault(rank, body)
        elif kind == GOODBYE:
            with self._changed:
                self._gone.add(rank)
        else:
            with self._changed:
                self._inbox.append(ChannelMessage(rank, kind, body, arrays))
                self._changed.notify_all()

    def _introduce(self, rank: int, body: dict[str, Any]) -> None:
        try:
            info = replace(RankInfo.from_dict(body), rank=rank, address=self._connections[rank].peer)
        except (TypeError, ValueError, KeyError):
            info = RankInfo(rank, "a machine")
        with self._changed:
            self._infos[rank] = info
            self._changed.notify_all()

    def _on_fault(self, rank: int, body: dict[str, Any]) -> None:
        info = self._info(rank)
        self._fail(
            WorkerFault(
                info, str(body.get("sentence")), exit_code=int(body.get("exit_code", 1)),
                traceback=str(body.get("traceback", "")), gpu_text=str(body.get("gpu_text", "")),
            )
        )  # fmt: skip

    def _on_lost(self, rank: int, why: str) -> None:
        if rank not in self._gone:
            self._fail(LostRank.of(self._info(rank), why))

    def _info(self, rank: int) -> RankInfo:
        return self._infos.get(rank, RankInfo(rank, "a machine"))

    def _fail(self, failure: LostRank | WorkerFault) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            self._changed.notify_all()
        self.on_failure(failure)


class WorkerChannel:
    """A worker's end. The process ends itself when the leader is lost."""

    def __init__(self, connection: socket.socket, group: MeetingRanks) -> None:
        self._rank = group.rank
        self._changed = threading.Condition()
        self._inbox: deque[ChannelMessage] = deque()
        self._leaving = threading.Timer(GOODBYE_PATIENCE_S, lambda: self._end_process("has closed the channel"))
        self._leaving.daemon = True
        self._connection = Connection(connection, self._take, self._end_process, lambda: pulse_of(group))
        self._connection.send(HELLO, own_info(group.rank).to_dict(), {})
        self._connection.start()

    def receive(self, timeout: float | None = None) -> ChannelMessage | None:
        """The next message of the leader; one of kind GOODBYE when it has closed the channel. None after `timeout` seconds without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox, timeout)
            return self._inbox.popleft() if self._inbox else None

    def send(self, kind: str, body: Mapping[str, Any] | None = None, arrays: Arrays | None = None) -> None:
        """As `LeaderChannel.send`, to the leader."""
        self._connection.send(kind, body or {}, arrays or {})

    def fault(self, error: BaseException) -> None:
        """Tell the leader what went wrong here, and hang up; this process is of no use from then on."""
        self.send(FAULT, _told(error))
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


def _told(error: BaseException) -> dict[str, Any]:
    """An exception of a worker as the leader is told it."""
    if isinstance(error, UserError):
        return {"sentence": " ".join(fault.sentence for fault in error.faults), "exit_code": 2}
    if (gpu := gpu_error(error)) is not None:
        return {"sentence": f"{gpu.happened} {gpu.advice}", "exit_code": 2, "gpu_text": str(error)}
    lines = "".join(traceback.format_exception(error))
    return {"sentence": f"{type(error).__name__}: {error}", "exit_code": 1, "traceback": lines}
