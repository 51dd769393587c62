"""Where ranks that compute a model together wait for one another outside of its sums.

A rank that waits inside a pass waits in a sum: on Metal the GPU's work is killed after 5 s of that (mlx#4475). So all ranks meet on the
control channel before a call begins and wherever the trainer looks up from its work, between two chunks of decoding steps or two
micro-batches: a pause, a slow disk or a slow host cost time there. Between two meetings ranks differ by no more than the time of one pass.
"""

from __future__ import annotations

from collections.abc import Callable

from backend.distributed.channel import ChannelMessage
from backend.distributed.workers import LeaderLink, Workers

HERE, GO, GIVE_UP = "divided: here", "divided: go", "divided: give up"


class PeerLostError(Exception):
    """Rank 0 has given the call up; `then` is what it announced instead of going on, if that came at once."""

    def __init__(self, then: ChannelMessage | None = None) -> None:
        super().__init__("rank 0 has given the call up")
        self.then = then


def lead(workers: Workers, own: Callable[[], None] = lambda: None) -> None:
    """Do what rank 0 does at a meeting, wait for the others, and let them go on. What `own` raises gives the call up everywhere."""
    try:
        own()
    except BaseException:
        workers.send_to_all(GIVE_UP)
        raise
    absent = len(workers.machines) - 1
    while absent:
        message = workers.receive()
        absent -= message is not None and message.kind == HERE
    workers.send_to_all(GO)


def follow(leader: LeaderLink) -> None:
    """Tell rank 0 that this rank has come so far, and wait until it lets all go on. Raises GivenUp."""
    leader.send(HERE)
    message = leader.receive()
    if message is None or message.kind == GIVE_UP:
        raise PeerLostError
    if message.kind != GO:  # rank 0's call has failed between two meetings
        raise PeerLostError(message)
