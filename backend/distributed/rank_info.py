"""What is known of one rank of a run, and of the machine that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank as it introduces itself, and as the event log's `started` tells it."""

    rank: int
    machine: str
    """Its name in sentences: as in the hosts file, or what the machine calls itself."""
    address: str = ""
    """Where rank 0 sees it; of rank 0 itself empty."""
    pid: int = 0
    chip: str = ""
    memory_gb: float = 0.0
    mlx: str = ""
    python: str = ""
    log: str = ""
    """Where what it prints is, for a person."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RankInfo:
        """Of a mapping that may have more keys, or fewer. Raises TypeError, ValueError or KeyError for one that is of no rank."""
        known: dict[str, Any] = {field.name: raw[field.name] for field in fields(cls) if field.name in raw}
        known |= {"rank": int(raw["rank"]), "machine": str(raw["machine"])}
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def called(self) -> str:
        """“mac-b (rank 1)”."""
        return f"{self.machine} (rank {self.rank})"
