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
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend.run.distributed.addresses import Address

CHALLENGE = 32
"""Bytes."""
RANK = struct.Struct("<I")
PROOF_PATIENCE_S = 10.0
"""How long the other side may take for its part of the proof."""
CONNECT_PATIENCE_S = (1.0, 3.0, 10.0)
"""How long the first, the second and every later attempt to reach an address may take: an address of another network answers never."""
MOST_STRANGERS = 32
"""Connections whose proof is awaited at one time; further ones wait in the kernel."""


class NoProof(Exception):
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
        missing = set(ranks)
        lock, slots = threading.Lock(), threading.Semaphore(MOST_STRANGERS)

        def prove(stranger: socket.socket) -> None:
            try:
                rank = admit(stranger, secret)
                with lock:
                    if rank in missing:
                        missing.remove(rank)
                        proven[rank] = stranger
                        return
            except (OSError, NoProof):
                pass
            finally:
                slots.release()
            stranger.close()

        try:
            with selectors.DefaultSelector() as selector:
                for each in self.sockets:
                    each.setblocking(False)
                    selector.register(each, selectors.EVENT_READ)
                while missing and time.monotonic() < deadline:
                    for key, _ in selector.select(timeout=0.1):
                        _accept_one(key.fileobj, slots, prove)
        finally:
            self.close()
        with lock:
            missing.clear()  # whoever proves itself from now on is turned away
            return proven

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def _accept_one(listener: object, slots: threading.Semaphore, prove: Callable[[socket.socket], None]) -> None:
    assert isinstance(listener, socket.socket)
    if not slots.acquire(blocking=False):
        time.sleep(0.01)
        return
    try:
        stranger, _ = listener.accept()
    except OSError:  # gone again
        slots.release()
        return
    stranger.settimeout(PROOF_PATIENCE_S)
    threading.Thread(target=prove, args=(stranger,), daemon=True, name="proof").start()


def admit(stranger: socket.socket, secret: bytes) -> int:
    """Rank 0's side. → the rank of the process at the other end, which knows the secret. Raises NoProof or OSError."""
    mine = secrets.token_bytes(CHALLENGE)
    stranger.sendall(mine)
    answer = read_exactly(stranger, RANK.size + CHALLENGE + CHALLENGE)
    rank, theirs, proof = answer[: RANK.size], answer[RANK.size : -CHALLENGE], answer[-CHALLENGE:]
    if not hmac.compare_digest(proof, _proof(secret, b"worker", mine, theirs, rank)):
        raise NoProof
    stranger.sendall(_proof(secret, b"leader", theirs, mine, rank))
    return RANK.unpack(rank)[0]


def introduce(connection: socket.socket, secret: bytes, rank: int) -> None:
    """A worker's side. Raises NoProof where rank 0 does not know the secret, or OSError."""
    mine, own_rank = secrets.token_bytes(CHALLENGE), RANK.pack(rank)
    theirs = read_exactly(connection, CHALLENGE)
    connection.sendall(own_rank + mine + _proof(secret, b"worker", theirs, mine, own_rank))
    if not hmac.compare_digest(read_exactly(connection, CHALLENGE), _proof(secret, b"leader", mine, theirs, own_rank)):
        raise NoProof


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
                connection.settimeout(PROOF_PATIENCE_S)
                introduce(connection, secret, rank)
            except (OSError, NoProof) as error:  # another program's port, or an address that several machines have
                connection.close()
                why = error
                continue
            return connection
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    raise OSError(errno.ETIMEDOUT, f"rank 0 cannot be reached: {str(why) or 'another program answers there'}")


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """That many bytes, within the socket's timeout for each piece. Raises NoProof where the other side hangs up."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise NoProof
        data += piece
    return bytes(data)


def _proof(secret: bytes, role: bytes, challenge: bytes, own: bytes, rank: bytes) -> bytes:
    return hmac.digest(secret, role + challenge + own + rank, "sha256")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
