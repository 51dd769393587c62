"""One connection between two ranks: handshake, messages, heartbeats.

Each end answers the other's random challenge with an HMAC over both challenges, the rank and its role, so a proof
cannot be reflected or replayed. What follows is JSON and arrays, never pickles, and is not encrypted.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hmac
import json
import math
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from datetime import time as clock_time
from decimal import Decimal
from typing import Any

import numpy as np

CHALLENGE = 32
"""Bytes."""
RANK = struct.Struct("<I")
PROOF_PATIENCE_S = 10.0
"""Seconds for one whole proof."""
CONNECT_PATIENCE_S = 3.0
MOST_STRANGERS = 128
"""Unproven connections at one time; one more hangs up on the oldest. Below the 256 open files of a macOS process."""

PREFIX = struct.Struct("<4sIQ")
"""MAGIC, bytes of the header, bytes of the arrays."""
MAGIC = b"GRS2"
LONGEST_HEADER, LONGEST_ARRAYS = 256 << 20, 16 << 30
"""Bytes."""
PIECE = 1 << 20
"""Bytes read at once."""
DTYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)

LOST_AFTER_S = 12.0
"""Seconds of silence until the other end is lost."""
HEARTBEAT_S = 1.0
CLOSING_PATIENCE_S = 3.0
"""Seconds to send the last messages."""

HEARTBEAT, GOODBYE = "heartbeat", "goodbye"
ENDED = "hung up: its process has ended"

Arrays = Mapping[str, np.ndarray]
Message = tuple[str, dict[str, Any], dict[str, np.ndarray]]
"""Kind, body, arrays."""
Frame = list[bytes | memoryview]


class HandshakeError(Exception):
    """The other end does not know the secret, or hung up."""


class ConnectionLostError(Exception):
    """The other end closed the connection, is silent, or sends garbage."""


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Listen on a free port at each of these addresses that this machine has. Raises OSError."""
    sockets: list[socket.socket] = []
    why: OSError = OSError(errno.EADDRNOTAVAIL, "this machine has no address to listen at")
    for address in dict.fromkeys(addresses):
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            sockets.append(socket.create_server((address, 0), family=family, backlog=MOST_STRANGERS))
        except OSError as error:
            why = error
    if not sockets:
        raise why
    return sockets


def accept(
    listeners: Sequence[socket.socket], secret: bytes, ranks: set[int], deadline: float
) -> dict[int, socket.socket]:
    """The proven connection of each of `ranks`, until `deadline` (monotonic). Closes the listeners.

    Each connection is proven in its own thread, so a silent stranger holds up nobody.
    """
    proven: dict[int, socket.socket] = {}
    strangers: dict[socket.socket, None] = {}  # the oldest first
    changed, done = threading.Condition(), threading.Event()

    def claim(rank: int, connection: socket.socket) -> None:
        with changed:
            if rank not in ranks or rank in proven or connection not in strangers or done.is_set():
                raise HandshakeError
            del strangers[connection]
            proven[rank] = connection
            changed.notify_all()

    def prove(connection: socket.socket) -> None:
        try:
            admit(connection, secret, lambda rank: claim(rank, connection))
        except (OSError, HandshakeError):
            with changed:
                strangers.pop(connection, None)
            connection.close()

    def receive(listener: socket.socket) -> None:
        listener.settimeout(0.2)
        while not done.is_set():
            with contextlib.suppress(OSError):  # nobody, or gone again
                connection, _ = listener.accept()
                with changed:
                    if len(strangers) >= MOST_STRANGERS:
                        oldest = next(iter(strangers))
                        del strangers[oldest]
                        oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
                    strangers[connection] = None
                threading.Thread(target=prove, args=(connection,), daemon=True, name="handshake").start()

    threads = [threading.Thread(target=receive, args=(each,), daemon=True, name="listener") for each in listeners]
    for thread in threads:
        thread.start()
    with changed:
        changed.wait_for(lambda: len(proven) == len(ranks), max(0.0, deadline - time.monotonic()))
        done.set()
    for thread, listener in zip(threads, listeners, strict=True):
        thread.join()
        listener.close()
    return proven


def admit(connection: socket.socket, secret: bytes, claim: Callable[[int], None]) -> None:
    """Rank 0's side of a handshake: `claim` the proven rank, then prove itself. Raises HandshakeError or OSError."""
    ends = time.monotonic() + PROOF_PATIENCE_S
    mine = secrets.token_bytes(CHALLENGE)
    connection.sendall(mine)
    answer = _read_by(connection, RANK.size + 2 * CHALLENGE, ends)
    rank, theirs, proof = answer[: RANK.size], answer[RANK.size : -CHALLENGE], answer[-CHALLENGE:]
    if not hmac.compare_digest(proof, _proof(secret, b"worker", mine, theirs, rank)):
        raise HandshakeError
    claim(RANK.unpack(rank)[0])
    connection.sendall(_proof(secret, b"leader", theirs, mine, rank))


def introduce(connection: socket.socket, secret: bytes, rank: int) -> None:
    """A worker's side. Raises HandshakeError where rank 0 does not know the secret, or OSError."""
    ends = time.monotonic() + PROOF_PATIENCE_S
    mine, own_rank = secrets.token_bytes(CHALLENGE), RANK.pack(rank)
    theirs = _read_by(connection, CHALLENGE, ends)
    connection.sendall(own_rank + mine + _proof(secret, b"worker", theirs, mine, own_rank))
    proof = _read_by(connection, CHALLENGE, ends)
    if not hmac.compare_digest(proof, _proof(secret, b"leader", mine, theirs, own_rank)):
        raise HandshakeError


def _proof(secret: bytes, role: bytes, challenge: bytes, own: bytes, rank: bytes) -> bytes:
    return hmac.digest(secret, role + challenge + own + rank, "sha256")


def _read_by(connection: socket.socket, count: int, ends: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        if (left := ends - time.monotonic()) <= 0:
            raise TimeoutError("the proof took too long")
        connection.settimeout(left)
        piece = connection.recv(count - len(data))
        if not piece:
            raise HandshakeError
        data += piece
    return bytes(data)


def connect(addresses: Sequence[tuple[str, int]], secret: bytes, rank: int, deadline: float) -> socket.socket:
    """A worker's proven connection to the first address of rank 0 that answers. Raises OSError after `deadline`."""
    while True:
        why: Exception = OSError("it named no address")
        for address in addresses:
            try:
                connection = socket.create_connection(address, timeout=CONNECT_PATIENCE_S)
            except OSError as error:
                why = error
                continue
            try:
                introduce(connection, secret, rank)
                return connection
            except (OSError, HandshakeError) as error:  # another program's port
                connection.close()
                why = error
        if time.monotonic() > deadline:
            reason = str(why) or "another program answers there"
            raise OSError(errno.ETIMEDOUT, f"rank 0 cannot be reached: {reason}")
        time.sleep(0.1)


TYPE, VALUE = "\0type", "\0value"
"""Keys of a mapping that JSON lacks."""
_READ: dict[str, Callable[[str], Any]] = {
    "bytes": base64.b64decode,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": clock_time.fromisoformat,
    "Decimal": Decimal,
}


def _pack(value: Any) -> dict[str, str]:
    kind = type(value).__name__
    if kind not in _READ:
        raise TypeError(f"a {kind}")
    if isinstance(value, bytes):
        return {TYPE: kind, VALUE: base64.b64encode(value).decode()}
    return {TYPE: kind, VALUE: str(value) if isinstance(value, Decimal) else value.isoformat()}


def to_json(value: Any) -> str:
    """JSON with the common types of a dataset's rows. Raises TypeError ("a set") or ValueError."""
    return json.dumps(value, ensure_ascii=False, default=_pack)


def from_json(text: str) -> Any:
    return json.loads(text, object_hook=lambda found: _READ[found[TYPE]](found[VALUE]) if TYPE in found else found)


def encode(kind: str, body: Mapping[str, Any], arrays: Arrays) -> Frame:
    """The parts of a message. Raises TypeError or ValueError for what cannot be sent."""
    about = [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    values = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]
    header = to_json({"kind": kind, "body": body, "arrays": about}).encode(errors="surrogatepass")
    size = sum(value.nbytes for value in values)
    if len(header) > LONGEST_HEADER or size > LONGEST_ARRAYS:
        raise ValueError(f"a message of {len(header):,} and {size:,} bytes is too long")
    return [PREFIX.pack(MAGIC, len(header), size) + header, *values]


def decode(read: Callable[[int], bytearray]) -> Message:
    """The next message, with writable arrays. `read` takes memory only as bytes arrive. Raises ConnectionLostError."""
    magic, header_bytes, array_bytes = PREFIX.unpack(read(PREFIX.size))
    if magic != MAGIC or header_bytes > LONGEST_HEADER or array_bytes > LONGEST_ARRAYS:
        raise ConnectionLostError("sent what is no message")
    raw = read(header_bytes)
    try:
        header = from_json(raw.decode(errors="surrogatepass"))
        layout = [(str(name), np.dtype(dtype), tuple(map(int, shape))) for name, dtype, shape in header["arrays"]]
        if any(dtype.name not in DTYPES or min(shape, default=0) < 0 for _, dtype, shape in layout):
            raise ValueError("an array that cannot be")
        sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in layout]
        if sum(sizes) != array_bytes:
            raise ValueError("arrays of another length")
        kind, body = str(header["kind"]), dict(header["body"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConnectionLostError(f"sent what is no message ({error})") from error
    values, arrays, offset = read(array_bytes), dict[str, np.ndarray](), 0
    for (name, dtype, shape), size in zip(layout, sizes, strict=True):
        arrays[name] = np.ndarray(shape, dtype, values, offset) if size else np.empty(shape, dtype)
        offset += size
    return kind, body, arrays


class Connection:
    """A proven connection with a reading and a writing thread. `take` receives messages, in the reading thread; `lost`
    the reason, once, unless a goodbye came; `pulse` returns the body of a heartbeat.

    Silence is counted in seconds of listening, so a process that was asleep does not blame the other end.
    """

    def __init__(
        self,
        connection: socket.socket,
        take: Callable[[str, dict[str, Any], dict[str, np.ndarray]], None],
        lost: Callable[[str], None],
        pulse: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._socket = connection
        self._take, self._lost, self._pulse = take, lost, pulse
        self._outbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        connection.settimeout(HEARTBEAT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = threading.Thread(target=self._read, daemon=True, name="channel reader")
        self._writer = threading.Thread(target=self._write, daemon=True, name="channel writer")

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    def send(self, kind: str, body: Mapping[str, Any] | None = None, arrays: Arrays | None = None) -> None:
        """Queue a message; its arrays must not be written to from then on."""
        self.send_frame(encode(kind, body or {}, arrays or {}))

    def send_frame(self, frame: Frame) -> None:
        self._outbox.put(frame)

    def close(self) -> None:
        """Send what is waiting and a goodbye, for CLOSING_PATIENCE_S at most, and hang up."""
        if not self._is_closed.is_set():
            self.send(GOODBYE)
            self._outbox.put(None)
            self._writer.join(CLOSING_PATIENCE_S)
        self.hang_up()

    def hang_up(self) -> None:
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._socket.close()
        self._outbox.put(None)

    def _read(self) -> None:
        try:
            while True:
                kind, body, arrays = decode(self._read_exactly)
                self._take(kind, body, arrays)
                if kind == GOODBYE:
                    return
        except ConnectionLostError as error:
            why = str(error)
        except (ConnectionResetError, BrokenPipeError):  # it ended before it had read everything
            why = ENDED
        except (OSError, ValueError) as error:  # a ValueError where this end is closed already
            why = f"broke the connection ({getattr(error, 'strerror', None) or error})"
        if not self._is_closed.is_set():
            self._lost(why)

    def _read_exactly(self, count: int) -> bytearray:
        data = bytearray()
        silent_s = 0.0
        while len(data) < count:
            try:
                piece = self._socket.recv(min(PIECE, count - len(data)))
            except TimeoutError:
                silent_s += HEARTBEAT_S
                if silent_s >= LOST_AFTER_S:
                    raise ConnectionLostError(f"has not answered for {LOST_AFTER_S:g} seconds") from None
                continue
            if not piece:
                raise ConnectionLostError(ENDED)
            silent_s = 0.0
            data += piece
        return data

    def _write(self) -> None:
        next_beat = time.monotonic()
        while not self._is_closed.is_set():
            try:
                frame = self._outbox.get(timeout=max(0.0, next_beat - time.monotonic()))
            except queue.Empty:
                next_beat = time.monotonic() + HEARTBEAT_S
                frame = encode(HEARTBEAT, self._pulse(), {})
            if frame is None:
                return
            try:
                for part in frame:
                    self._send_all(memoryview(part))
            except (OSError, ValueError):
                return  # the reader finds out why

    def _send_all(self, data: memoryview) -> None:
        while data and not self._is_closed.is_set():
            with contextlib.suppress(TimeoutError):
                data = data[self._socket.send(data[:PIECE]) :]
