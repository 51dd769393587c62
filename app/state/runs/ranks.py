"""The ranks of a run on several machines, from its event log: who they are, how fast, how long they wait, and who was lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from backend.distributed.hosts_file import MOST_HOSTS
from backend.distributed.rank_info import RankInfo


@dataclass(frozen=True, slots=True)
class RankNow:
    """A rank at the newest step; None where nothing was measured."""

    info: RankInfo
    sampling: float | None
    """Tokens per second."""
    learning: float | None
    """Tokens per second."""
    prompts: float | None
    memory_gb: float | None
    waiting_share: float | None
    """Of the step's time."""
    is_lost: bool = False


def ranks_of(
    started: Mapping[str, Any] | None, ending: Mapping[str, Any] | None, latest: Callable[[str], Any]
) -> list[RankNow]:
    """The ranks of a run's newest process; none for a run on one machine. `latest`: the newest value of a metric, or None."""
    infos = _infos(started or {})
    step_s, lost = _number(latest("time/step")), (ending or {}).get("lost_rank")

    def rank_now(info: RankInfo) -> RankNow:
        def of(name: str) -> float | None:
            return _number(latest(f"ranks/{info.rank}/{name}"))

        waited = of("waiting")
        share = waited / step_s if waited is not None and step_s else None
        return RankNow(
            info, of("tokens_per_second"), of("learn_tokens_per_second"), of("prompts"), of("memory"), share, lost == info.rank
        )  # fmt: skip

    return [rank_now(info) for info in infos]


def _infos(started: Mapping[str, Any]) -> list[RankInfo]:
    """What `started` tells of every rank; a rank that a damaged event log does not describe has its number alone."""
    ranks = started.get("ranks")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 < ranks <= MOST_HOSTS:
        return []
    told: dict[int, RankInfo] = {}
    entries: Any = started.get("machines")
    for entry in cast("list[Any]", entries) if isinstance(entries, list) else []:
        with suppress(TypeError, ValueError, KeyError):
            info = RankInfo.from_dict(entry)
            told[info.rank] = info
    return [told.get(rank) or RankInfo(rank, "") for rank in range(ranks)]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
