"""What the leader and its workers need of the two ends of the control channel (`channel.LeaderChannel`, `channel.WorkerChannel`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import numpy as np

from backend.distributed.channel import ChannelMessage
from backend.distributed.rank_info import RankInfo


class Workers(Protocol):
    """All but `machines` raise LostRank and WorkerFault."""

    machines: list[RankInfo]
    """Every rank, the leader included, in the order of the ranks."""

    def send(
        self,
        rank: int,
        kind: str,
        body: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None: ...
    def send_to_all(
        self, kind: str, body: Mapping[str, Any] | None = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> None: ...
    def receive(self, timeout: float | None = None) -> ChannelMessage | None: ...
    def check(self) -> None: ...
    def behind(self) -> list[int]:
        """The workers that have not begun the collective that the leader is in, by their last heartbeats."""
        ...

    def give_up(self, rank: int, why: str) -> NoReturn:
        """Count a worker that answers as lost. `why` follows its name in the sentence. Raises LostRank."""
        ...


class LeaderLink(Protocol):
    """A worker's end."""

    def receive(self, timeout: float | None = None) -> ChannelMessage | None: ...
    def send(
        self, kind: str, body: Mapping[str, Any] | None = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> None: ...
