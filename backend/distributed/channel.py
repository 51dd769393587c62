"""The control channel between rank 0, the leader, and every other rank, a worker: handshake, messages, heartbeats.
Each end answers the other's random challenge with an HMAC over both challenges, the rank and its role, so a proof
cannot be reflected or replayed. What follows is JSON, never pickles, and is not encrypted. The leader learns of a lost
worker at its next `check` or `receive`. A worker without a leader ends its process at once."""

from __future__ import annotations

import base64
import contextlib
import errno
import hmac
import os
import queue
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn

from backend.distributed.collectives import FlatCollectives
from backend.distributed.messages import MessageError, decode, encode
from backend.distributed.ranks import LEADER_LOST, LostRankError, RankInfo, WorkerError, own_addresses
from backend.trainer.machine import gpu_error
from backend.utils.errors import UserError

MEETING_PATIENCE_S = 60.0  # seconds for the ranks to connect
PROOF_PATIENCE_S = 10.0  # seconds for one whole proof
CONNECT_PATIENCE_S = 3.0
GOODBYE_PATIENCE_S = 10.0  # seconds for a worker to end after the leader's goodbye
CLOSING_PATIENCE_S = 3.0  # seconds to send the last messages
LOST_AFTER_S = 12.0  # seconds of silence until the other end is lost
HEARTBEAT_S = 1.0

MOST_STRANGERS = 128  # unproven connections; one more hangs up on the oldest. Below macOS's 256 open files
CHALLENGE = 32  # bytes
ANSWER = struct.Struct(f"<4s{CHALLENGE}s{CHALLENGE}s")  # a worker's rank, challenge and proof

PIECE = 1 << 20  # bytes read at once
HEARTBEAT, GOODBYE, FAULT = "heartbeat", "goodbye", "fault"
ENDED = "hung up: its process has ended"


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Listen on a free port at each of these addresses that this machine has. Raises OSError."""
    sockets: list[socket.socket] = []
    for address in dict.fromkeys(addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):
            sockets.append(socket.create_server((address, 0), family=family, backlog=MOST_STRANGERS))
    if not sockets:
        raise OSError(errno.EADDRNOTAVAIL, "this machine has no address to listen at")
    return sockets


def accept(listeners: list[socket.socket], secret: bytes, ranks: set[int], deadline: float) -> dict[int, socket.socket]:
    """The proven connection of each of `ranks`, until `deadline` (monotonic). Closes the listeners. A stranger holds up
    nobody: no call waits for a single connection, and each has PROOF_PATIENCE_S for its proof."""
    proven: dict[int, socket.socket] = {}
    strangers: dict[socket.socket, tuple[bytes, bytearray, float]] = {}  # oldest first: challenge, answer, deadline
    ready = selectors.DefaultSelector()

    def part_from(connection: socket.socket) -> socket.socket:
        del strangers[connection]
        ready.unregister(connection)
        return connection

    for listener in listeners:
        listener.setblocking(False)
        ready.register(listener, selectors.EVENT_READ)
    while len(proven) < len(ranks) and time.monotonic() < deadline:
        for key, _ in ready.select(0.2):
            connection: Any = key.fileobj
            try:
                if connection in listeners:
                    stranger, _ = connection.accept()
                    stranger.setblocking(False)
                    ends = time.monotonic() + PROOF_PATIENCE_S
                    strangers[stranger] = secrets.token_bytes(CHALLENGE), bytearray(), ends
                    ready.register(stranger, selectors.EVENT_READ)
                    stranger.send(strangers[stranger][0])
                    continue
                challenge, answer, _ = strangers[connection]
                piece = connection.recv(ANSWER.size - len(answer))
                answer += piece
                if not piece:
                    raise ConnectionError
                if len(answer) == ANSWER.size:
                    own_rank, theirs, proof = ANSWER.unpack(answer)
                    rank = int.from_bytes(own_rank, "little")
                    knows_secret = hmac.compare_digest(proof, _proof(secret, b"worker", challenge, theirs, own_rank))
                    if not knows_secret or rank not in ranks or rank in proven:
                        raise ConnectionError
                    connection.send(_proof(secret, b"leader", theirs, challenge, own_rank))
                    proven[rank] = part_from(connection)
            except OSError:
                if connection in strangers:
                    part_from(connection).close()
        while strangers and (len(strangers) > MOST_STRANGERS or time.monotonic() > next(iter(strangers.values()))[2]):
            part_from(next(iter(strangers))).close()
    ready.close()
    for each in (*listeners, *strangers):
        each.close()
    return proven


def _proof(secret: bytes, role: bytes, challenge: bytes, own: bytes, rank: bytes) -> bytes:
    return hmac.digest(secret, role + challenge + own + rank, "sha256")


def connect(addresses: Sequence[tuple[str, int]], secret: bytes, rank: int, deadline: float) -> socket.socket:
    """A worker's proven connection to the first address of rank 0 that answers. Raises OSError after `deadline`."""
    why: Exception = OSError("it named no address")
    while True:
        for address in addresses:
            try:
                return _connected(address, secret, rank)
            except OSError as error:  # nobody, or another program's port
                why = error
        if time.monotonic() > deadline:
            reason = str(why) or "another program answers there"
            raise OSError(errno.ETIMEDOUT, f"rank 0 cannot be reached: {reason}")
        time.sleep(0.1)


def _connected(address: tuple[str, int], secret: bytes, rank: int) -> socket.socket:
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, timeout=CONNECT_PATIENCE_S))
        ends = time.monotonic() + PROOF_PATIENCE_S

        def read() -> bytes:
            data = b""
            while len(data) < CHALLENGE:
                connection.settimeout(max(ends - time.monotonic(), 0.001))
                piece = connection.recv(CHALLENGE - len(data))
                if not piece:
                    raise ConnectionError
                data += piece
            return data

        mine, own_rank = secrets.token_bytes(CHALLENGE), rank.to_bytes(4, "little")
        theirs = read()
        connection.sendall(ANSWER.pack(own_rank, mine, _proof(secret, b"worker", theirs, mine, own_rank)))
        if not hmac.compare_digest(read(), _proof(secret, b"leader", mine, theirs, own_rank)):
            raise ConnectionError
        stack.pop_all()
        return connection


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """One message. `rank`: its sender."""

    rank: int
    kind: str
    body: dict[str, Any]


class Connection:
    """A proven connection to `rank`, with a reading and a writing thread. `take` receives messages, in the reading
    thread; `lost` the reason, once, unless a goodbye came; `pulse` returns the body of a heartbeat. Silence is counted
    in seconds of listening, so a process that was asleep does not blame the other end."""

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        take: Callable[[ChannelMessage], None],
        lost: Callable[[str], object],
        pulse: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._socket, self._rank = connection, rank
        self._take, self._lost, self._pulse = take, lost, pulse
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_closed = False
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._writer = threading.Thread(target=self._write, daemon=True, name="channel writer")
        self._writer.start()
        threading.Thread(target=self._read, daemon=True, name="channel reader").start()

    def send(self, frame: bytes) -> None:
        self._outbox.put(frame)

    def close(self) -> None:
        """Send what is waiting and a goodbye, for CLOSING_PATIENCE_S at most, and hang up."""
        if not self._is_closed:
            self.send(encode(GOODBYE, {}))
            self._outbox.put(None)
            self._writer.join(CLOSING_PATIENCE_S)
        self.hang_up()

    def hang_up(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the threads
        self._socket.close()
        self._outbox.put(None)

    def _read(self) -> None:
        try:
            while True:
                kind, body = decode(self._read_exactly)
                self._take(ChannelMessage(self._rank, kind, body))
                if kind == GOODBYE:
                    return
        except MessageError as error:
            why = str(error)
        except (ConnectionResetError, BrokenPipeError):  # it ended before it had read everything
            why = ENDED
        except (OSError, ValueError) as error:  # a ValueError where this end is closed already
            why = f"broke the connection ({getattr(error, 'strerror', None) or error})"
        if not self._is_closed:
            self._lost(why)

    def _read_exactly(self, count: int) -> bytearray:
        data, silent_s = bytearray(), 0.0
        while len(data) < count:
            if not select.select([self._socket], [], [], HEARTBEAT_S)[0]:
                silent_s += HEARTBEAT_S
                if silent_s >= LOST_AFTER_S:
                    raise MessageError(f"has not answered for {LOST_AFTER_S:g} seconds")
            elif piece := self._socket.recv(min(PIECE, count - len(data))):
                silent_s = 0.0
                data += piece
            else:
                raise MessageError(ENDED)
        return data

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader finds out why
            while True:
                try:
                    frame = self._outbox.get(timeout=HEARTBEAT_S)
                except queue.Empty:
                    frame = encode(HEARTBEAT, self._pulse())
                if frame is None:
                    return
                self._socket.sendall(frame)


def open_channel(ranks: FlatCollectives) -> LeaderChannel | WorkerChannel:
    """Connect this rank; every rank calls it at the same time. Raises LostRankError on rank 0, OSError on the others.
    One gather carries rank 0's addresses and secret, so the secret is in no command line, environment or file."""
    own = asdict(RankInfo.of_this_process(ranks.rank))
    if ranks.rank != 0:
        meeting = ranks.gather({"info": own})[0]
        addresses = [(str(host), int(port)) for host, port in meeting["addresses"]]
        secret = base64.b64decode(meeting["secret"])
        return WorkerChannel(connect(addresses, secret, ranks.rank, time.monotonic() + MEETING_PATIENCE_S), ranks)
    secret, listeners = secrets.token_bytes(32), listen(own_addresses())
    addresses = [each.getsockname()[:2] for each in listeners]
    gathered = ranks.gather({"info": own, "addresses": addresses, "secret": base64.b64encode(secret).decode()})
    machines = [RankInfo.from_dict(each["info"]) for each in gathered]
    others = set(range(1, ranks.size))
    connections = accept(listeners, secret, others, time.monotonic() + MEETING_PATIENCE_S)
    if missing := sorted(others - connections.keys()):
        for each in connections.values():
            each.close()
        raise LostRankError(machines[missing[0]], f"did not connect to rank 0 within {MEETING_PATIENCE_S:g} seconds")
    for rank, connection in connections.items():
        machines[rank] = replace(machines[rank], address=str(connection.getpeername()[0]))
    return LeaderChannel(connections, machines)


class LeaderChannel:
    """Rank 0's end, for the main thread. Every method raises a known LostRankError or WorkerError."""

    def __init__(self, connections: Mapping[int, socket.socket], machines: Sequence[RankInfo]) -> None:
        self.machines = list(machines)
        self.on_failure: Callable[[LostRankError | WorkerError], None] = lambda failure: None  # gets the first
        self._inbox: queue.SimpleQueue[ChannelMessage | None] = queue.SimpleQueue()
        self._failure: LostRankError | WorkerError | None = None
        self._failing = threading.Lock()
        self._pulses: dict[int, dict[str, int]] = {}
        self._connections = {
            rank: Connection(each, rank, self._take, partial(self._lost, rank)) for rank, each in connections.items()
        }

    def send(self, rank: int, kind: str, **body: Any) -> None:
        self._connections[rank].send(encode(kind, body))

    def send_to_all(self, kind: str, **body: Any) -> None:
        frame = encode(kind, body)
        for each in self._connections.values():
            each.send(frame)

    def receive(self, timeout: float | None = None) -> ChannelMessage | None:
        """The next message of any worker; None after `timeout` seconds."""
        self.check()
        message = None
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(timeout=timeout)
        self.check()
        return message

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def slowest(self) -> int:
        """The worker that has begun and ended the fewest collectives."""
        counts = {rank: (pulse["entered"], pulse["left"]) for rank, pulse in dict(self._pulses).items()}
        return min(self._connections, key=lambda rank: (*counts.get(rank, (0, 0)), -rank))

    def give_up(self, rank: int, why: str) -> NoReturn:
        """Count a worker as lost whose connection lives. Raises LostRankError, or what was known before."""
        raise self._lost(rank, why)

    def close(self) -> None:
        for each in self._connections.values():
            each.close()

    # In the reading threads:

    def _take(self, message: ChannelMessage) -> None:
        if message.kind == HEARTBEAT:
            self._pulses[message.rank] = message.body
        elif message.kind == FAULT:
            self._fail(WorkerError(self.machines[message.rank], **message.body))
        elif message.kind != GOODBYE:
            self._inbox.put(message)

    def _lost(self, rank: int, why: str) -> LostRankError | WorkerError:
        return self._fail(LostRankError(self.machines[rank], why))

    def _fail(self, failure: LostRankError | WorkerError) -> LostRankError | WorkerError:
        with self._failing:
            if self._failure is not None:
                return self._failure
            self._failure = failure
        self._inbox.put(None)  # wakes the main thread
        self.on_failure(failure)
        return failure


class WorkerChannel:
    """A worker's end. The process ends itself when the leader is lost."""

    def __init__(self, connection: socket.socket, ranks: FlatCollectives) -> None:
        self._rank = ranks.rank
        self._inbox: queue.SimpleQueue[ChannelMessage] = queue.SimpleQueue()
        self._leaving = threading.Timer(GOODBYE_PATIENCE_S, lambda: self._end_process("has closed the channel"))
        self._leaving.daemon = True
        self._connection = Connection(connection, 0, self._take, self._end_process, ranks.pulse)

    def send(self, kind: str, **body: Any) -> None:
        self._connection.send(encode(kind, body))

    def receive(self) -> ChannelMessage:
        """The next message of the leader, at last GOODBYE."""
        return self._inbox.get()

    def fault(self, error: BaseException) -> None:
        if isinstance(error, UserError):
            told = {"sentence": " ".join(fault.sentence for fault in error.faults)}
        elif (gpu := gpu_error(error)) is not None:
            told = {"sentence": f"{gpu.happened} {gpu.advice}", "gpu_text": str(error)}
        else:
            lines = "".join(traceback.format_exception(error))
            told = {"sentence": f"{type(error).__name__}: {error}", "exit_code": 1, "traceback": lines}
        self.send(FAULT, **told)
        self._connection.close()

    def close(self) -> None:
        self._leaving.cancel()
        self._connection.close()

    def _take(self, message: ChannelMessage) -> None:
        if message.kind != HEARTBEAT:
            self._inbox.put(message)
        if message.kind == GOODBYE:  # its main thread may be in a sum that never ends
            self._leaving.start()

    def _end_process(self, why: str) -> None:
        os.write(2, f"rank {self._rank}: the leader {why}; this process ends.\n".encode())
        os._exit(LEADER_LOST)
