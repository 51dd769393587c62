"""One proven connection of the control channel: a thread that reads, a thread that writes, and the signs of life between the two ends.

Every received byte is a sign of life, so a long message over a slow cable is none the less heard of. Silence is counted in seconds
during which this process has itself been listening: a machine that was asleep, or a process that was stopped, finds on waking what has
arrived meanwhile and does not take its own absence for the other's.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from backend.distributed import frames
from backend.distributed.frames import BadFrame

LOST_AFTER_S = 12.0
"""Seconds of silence after which the other end counts as lost."""
HEARTBEAT_S = 1.0
"""Between two signs of life; also how often silence is looked at."""
CLOSING_PATIENCE_S = 3.0
"""How long a connection that is closed may take to send what is still waiting."""

HEARTBEAT, GOODBYE = "heartbeat", "goodbye"
"""Kinds of message that are the connection's own."""

ENDED = "hung up: its process has ended"
"""Of a connection that is closed without a goodbye."""

Handler = Callable[[str, dict[str, Any], dict[str, np.ndarray]], None]
Parts = list[bytes | memoryview]


class Lost(Exception):
    """The other end has closed the connection, is silent, or sends what is no message. Its text says which, after its name."""


class Connection:
    """A connection whose messages go to `take`, called in the reading thread. `lost` is called once, in that thread, with why the other
    end is gone; not after its goodbye, which is given to `take` as any message. `pulse` returns the body of each heartbeat."""

    def __init__(
        self,
        connection: socket.socket,
        take: Handler,
        lost: Callable[[str], None],
        pulse: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._socket = connection
        self._take, self._lost, self._pulse = take, lost, pulse
        self._outbox: queue.SimpleQueue[Parts | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        connection.settimeout(HEARTBEAT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = threading.Thread(target=self._read, daemon=True, name="channel reader")
        self._writer = threading.Thread(target=self._write, daemon=True, name="channel writer")

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    @property
    def peer(self) -> str:
        """The address of the other end."""
        with contextlib.suppress(OSError):
            return str(self._socket.getpeername()[0])
        return ""

    def send(self, kind: str, body: Mapping[str, Any], arrays: frames.Arrays) -> None:
        """Queue a message and return at once; arrays must not be written to from then on."""
        self.send_frame(frames.encode(kind, body, arrays))

    def send_frame(self, parts: Parts) -> None:
        """As `send`, of a message that is encoded already."""
        self._outbox.put(parts)

    def close(self) -> None:
        """Send what is waiting and a goodbye, for CLOSING_PATIENCE_S at most, and hang up."""
        if not self._is_closed.is_set():
            self.send(GOODBYE, {}, {})
            self._outbox.put(None)
            self._writer.join(CLOSING_PATIENCE_S)
        self.hang_up()

    def hang_up(self) -> None:
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._outbox.put(None)

    # ── the two threads ──────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        try:
            while True:
                kind, body, arrays = frames.decode(self._read_exactly)
                self._take(kind, body, arrays)
                if kind == GOODBYE:
                    return
        except Lost as lost:
            why = str(lost)
        except BadFrame as bad:
            why = f"sent what is no message: {bad}"
        except (ConnectionResetError, BrokenPipeError):  # it ended before it had read everything
            why = ENDED
        except (OSError, ValueError) as error:  # a ValueError where this end is closed already
            why = f"broke the connection ({getattr(error, 'strerror', None) or error})"
        except MemoryError:
            why = "sent a message for which there is no memory"
        if not self._is_closed.is_set():
            self._lost(why)

    def _read_exactly(self, count: int) -> bytearray:
        data = bytearray()
        silent_s = 0.0
        while len(data) < count:
            try:
                piece = self._socket.recv(min(frames.PIECE, count - len(data)))
            except TimeoutError:
                silent_s += HEARTBEAT_S
                if silent_s >= LOST_AFTER_S:
                    raise Lost(f"has not answered for {LOST_AFTER_S:g} seconds") from None
                continue
            if not piece:
                raise Lost(ENDED)
            silent_s = 0.0
            data += piece
        return data

    def _write(self) -> None:
        next_beat = time.monotonic()
        while not self._is_closed.is_set():
            parts: Parts | None = None
            if (wait := next_beat - time.monotonic()) > 0:
                try:
                    parts = self._outbox.get(timeout=wait)
                except queue.Empty:
                    continue
                if parts is None:
                    return
            else:
                next_beat = time.monotonic() + HEARTBEAT_S
                parts = frames.encode(HEARTBEAT, self._pulse(), {})
            try:
                for part in parts:
                    self._send_all(memoryview(part))
            except (OSError, ValueError):
                return  # the reader finds out why

    def _send_all(self, data: memoryview) -> None:
        """Send all of it, however long it takes: whether the other end is lost is for the reader to judge."""
        while data and not self._is_closed.is_set():
            with contextlib.suppress(TimeoutError):
                data = data[self._socket.send(data[: frames.PIECE]) :]
