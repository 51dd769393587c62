"""What a launcher tells the ranks that it starts, and what rank 0 tells it: environment variables, and files in a private folder.

Only rank 0, which runs on the launcher's machine, sees the folder. A rank that was started by hand, by `mlx.launch` or `mpirun`, has none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from backend.distributed.rank_info import RankInfo

ORDERS_VARIABLE = "GRPO_STUDIO_LAUNCH"
"""Environment variable with the folder."""
WATCH_VARIABLE = "GRPO_STUDIO_WATCH_STDIN"
"""Environment variable that tells a rank to end itself at the end of its stdin, which its launcher holds open."""

RESTART_RANKS = 75
"""The exit code of a rank 0 that asks to have all ranks started anew; its run is saved and its event log has no ending."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What rank 0 is to know beside its run folder."""

    command: str
    """The command line of the launcher, for the event log."""
    is_checked: bool = False
    """Whether settings and files were checked already."""
    goes_on: bool = False
    """Whether the ranks are started again without one that was lost: then its loss does not end the run."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the event log."""
    warnings: list[str] = field(default_factory=list)
    """Sentences for the event log, as warnings."""


@dataclass(frozen=True, slots=True)
class OrdersFolder:
    path: Path

    @property
    def _orders(self) -> Path:
        return self.path / "orders.json"

    @property
    def _met(self) -> Path:
        return self.path / "ranks.json"

    @property
    def _lost(self) -> Path:
        return self.path / "lost.json"

    @property
    def _ended(self) -> Path:
        return self.path / "ended.json"

    # ── the launcher's side ──

    def give(self, orders: Orders) -> None:
        """Before the ranks are started; forgets what an earlier rank 0 has told."""
        for told in (self._met, self._lost, self._ended):
            told.unlink(missing_ok=True)
        _write(self._orders, asdict(orders))

    def met(self) -> list[RankInfo] | None:
        """Every rank, once all of them are connected; None before that."""
        told = _read(self._met)
        return None if told is None else [RankInfo.from_dict(each) for each in told]

    def lost(self) -> tuple[int, str] | None:
        """The rank that rank 0 has lost, and the sentence about it."""
        told = _read(self._lost)
        return None if told is None else (int(told["rank"]), str(told["sentence"]))

    def exit_code(self) -> int | None:
        """With which rank 0 has ended; None where it was killed."""
        told = _read(self._ended)
        return None if told is None else int(told)

    # ── rank 0's side ──

    def read(self) -> Orders:
        return Orders(**json.loads(self._orders.read_text(encoding="utf-8")))

    def tell_met(self, ranks: Sequence[RankInfo]) -> None:
        _write(self._met, [info.to_dict() for info in ranks])

    def tell_lost(self, rank: int, sentence: str) -> None:
        _write(self._lost, {"rank": rank, "sentence": sentence})

    def tell_end(self, exit_code: int) -> None:
        _write(self._ended, exit_code)


def given_orders() -> OrdersFolder | None:
    """The folder of the launcher that has started this process; None where there is none, or it is on another machine."""
    named = os.environ.get(ORDERS_VARIABLE, "")
    return OrdersFolder(Path(named)) if named and Path(named, "orders.json").is_file() else None


def _write(path: Path, value: Any) -> None:
    """Whole or not at all, for a reader that looks at any moment."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(value), encoding="utf-8")
    half.rename(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
