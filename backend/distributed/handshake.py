"""How the control channel's connections come about: rank 0 listens, every other rank connects, and both prove that they know the secret.

Before the proof nothing but fixed numbers of bytes is read, and nothing in them is interpreted. Each side answers the other's fresh
random challenge with an HMAC over both challenges, the rank and its own role, so that neither can be reflected or replayed. What follows
is not encrypted: the connection is for a network of one's own, as are MLX's (`docs/machines.md`).
"""

from __future__ import annotations

import errno
import hmac
import itertools
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

from backend.distributed.addresses import Address

CHALLENGE = 32
"""Bytes."""
RANK = struct.Struct("<I")
PROOF_PATIENCE_S = 10.0
"""How long one whole proof may take, however its bytes arrive."""
CONNECT_PATIENCE_S = (1.0, 3.0, 10.0)
"""How long the first, the second and every later attempt to reach an address may take: an address of another network answers never."""
MOST_STRANGERS = 128
"""Connections whose proof is awaited at one time. One more takes the place of the oldest: a proof takes one round trip, so who merely
waits loses the place. Below the 256 open files that macOS allows a process."""
ANSWER = RANK.size + CHALLENGE + CHALLENGE
"""Bytes of a worker's answer: its rank, its challenge, its proof."""


class HandshakeError(Exception):
    """The other side does not know the secret, or hung up."""


@dataclass(slots=True)
class Listeners:
    """Rank 0's sockets, one for each of its addresses, until every other rank is connected."""

    sockets: list[socket.socket]

    @classmethod
    def at(cls, addresses: Sequence[str]) -> Listeners:
        """Listen on a free port at each of these addresses of this machine; those that it does not have are left out. Raises OSError
        where none is left."""
        sockets: list[socket.socket] = []
        why: OSError | None = None
        for address in dict.fromkeys(addresses):
            try:
                sockets.append(socket.create_server((address, 0), family=_family(address), backlog=MOST_STRANGERS))
            except OSError as error:
                why = error
        if not sockets:
            raise why or OSError(errno.EADDRNOTAVAIL, "this machine has no address to listen at")
        return cls(sockets)

    @property
    def addresses(self) -> list[Address]:
        return [Address(*each.getsockname()[:2]) for each in self.sockets]

    def accept(self, secret: bytes, ranks: set[int], deadline: float) -> dict[int, socket.socket]:
        """The proven connection of each of `ranks`; those that did not come by `deadline` (monotonic) are missing. Closes the
        listeners."""
        proven: dict[int, socket.socket] = {}
        waiting: dict[socket.socket, Stranger] = {}  # the oldest first
        selector = selectors.DefaultSelector()

        def drop(connection: socket.socket) -> None:
            del waiting[connection]
            selector.unregister(connection)
            connection.close()

        try:
            for each in self.sockets:
                each.setblocking(False)
                selector.register(each, selectors.EVENT_READ)
            while len(proven) < len(ranks) and (now := time.monotonic()) < deadline:
                for connection in [each for each, stranger in waiting.items() if now >= stranger.ends]:
                    drop(connection)
                for connection in [key.fileobj for key, _ in selector.select(timeout=0.1)]:
                    assert isinstance(connection, socket.socket)
                    if connection in self.sockets:
                        if (stranger := _accept_one(connection)) is not None:
                            if len(waiting) == MOST_STRANGERS:
                                drop(next(iter(waiting)))
                            waiting[stranger.connection] = stranger
                            selector.register(stranger.connection, selectors.EVENT_READ)
                    elif connection in waiting:
                        try:
                            rank = waiting[connection].read(secret, ranks - proven.keys())
                        except (OSError, HandshakeError):
                            drop(connection)
                            continue
                        if rank is not None:
                            del waiting[connection]
                            selector.unregister(connection)
                            proven[rank] = connection
        finally:
            for connection in list(waiting):
                drop(connection)
            selector.close()
            self.close()
        return proven

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def _accept_one(listener: socket.socket) -> Stranger | None:
    try:
        connection, _ = listener.accept()
    except OSError:  # gone again
        return None
    try:
        connection.setblocking(False)
        return Stranger(connection)
    except OSError:
        connection.close()
        return None


class Stranger:
    """Rank 0's side of one proof. Nothing in it waits, so a silent stranger holds up nobody."""

    def __init__(self, connection: socket.socket) -> None:
        """Send the challenge. Raises OSError."""
        self.connection = connection
        self.ends = time.monotonic() + PROOF_PATIENCE_S
        self._challenge = secrets.token_bytes(CHALLENGE)
        self._answer = bytearray()
        connection.sendall(self._challenge)

    def read(self, secret: bytes, ranks: Set[int]) -> int | None:
        """Read what has come. → the rank at the other end, one of `ranks`, once it is proven. Raises HandshakeError or OSError."""
        piece = self.connection.recv(ANSWER - len(self._answer))
        if not piece:
            raise HandshakeError
        self._answer += piece
        if len(self._answer) < ANSWER:
            return None
        answer = bytes(self._answer)
        rank, theirs, proof = answer[: RANK.size], answer[RANK.size : -CHALLENGE], answer[-CHALLENGE:]
        if not hmac.compare_digest(proof, _proof(secret, b"worker", self._challenge, theirs, rank)):
            raise HandshakeError
        if (number := RANK.unpack(rank)[0]) not in ranks:
            raise HandshakeError
        self.connection.sendall(_proof(secret, b"leader", theirs, self._challenge, rank))
        return number


def introduce(connection: socket.socket, secret: bytes, rank: int) -> None:
    """A worker's side. Raises HandshakeError where rank 0 does not know the secret, or OSError."""
    ends = time.monotonic() + PROOF_PATIENCE_S
    mine, own_rank = secrets.token_bytes(CHALLENGE), RANK.pack(rank)
    theirs = _read_exactly(connection, CHALLENGE, ends)
    connection.sendall(own_rank + mine + _proof(secret, b"worker", theirs, mine, own_rank))
    proof = _read_exactly(connection, CHALLENGE, ends)
    if not hmac.compare_digest(proof, _proof(secret, b"leader", mine, theirs, own_rank)):
        raise HandshakeError


def connect(addresses: Sequence[Address], secret: bytes, rank: int, deadline: float) -> socket.socket:
    """A worker's proven connection to rank 0, at the first of its addresses that answers. Raises OSError where none does by `deadline`."""
    why: Exception = OSError(errno.EADDRNOTAVAIL, "rank 0 named no address")
    patiences = itertools.chain(CONNECT_PATIENCE_S, itertools.repeat(CONNECT_PATIENCE_S[-1]))
    for longest in patiences:
        for address in addresses:
            patience = min(longest, max(0.1, deadline - time.monotonic()))
            try:
                connection = socket.create_connection((address.host, address.port), timeout=patience)
            except OSError as error:
                why = error
                continue
            try:
                introduce(connection, secret, rank)
            except (
                OSError,
                HandshakeError,
            ) as error:  # another program's port, or an address that several machines have
                connection.close()
                why = error
                continue
            return connection
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    raise OSError(errno.ETIMEDOUT, f"rank 0 cannot be reached: {str(why) or 'another program answers there'}")


def _read_exactly(connection: socket.socket, count: int, ends: float) -> bytes:
    """That many bytes, all of them by `ends` (monotonic). Raises OSError after that, and HandshakeError where the other side hangs up."""
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


def _proof(secret: bytes, role: bytes, challenge: bytes, own: bytes, rank: bytes) -> bytes:
    return hmac.digest(secret, role + challenge + own + rank, "sha256")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
