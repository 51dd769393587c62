"""What may go wrong on another machine of a run, as sentences that name it."""

from __future__ import annotations

from backend.distributed.rank_info import RankInfo
from backend.utils.errors import UserError
from backend.utils.text import quote

SETTING = "hosts"


class LostRank(UserError):
    """A rank that is gone: its process has ended, its machine is silent, or its cable is out. `why` follows its name in the sentence."""

    def __init__(self, rank: int, machine: str, why: str, log: str = "") -> None:
        self.rank, self.machine, self.why = rank, machine, why
        told = f" What it printed: {quote(log, 70)}." if log else ""
        super().__init__(SETTING, f"{quote(machine, 40)} (rank {rank}) {quote(why, 90)}.{told}")

    @classmethod
    def of(cls, info: RankInfo, why: str) -> LostRank:
        return cls(info.rank, info.machine, why, info.log)


class WorkerFault(UserError):
    """A mistake, a bug or an error of the GPU on another machine."""

    def __init__(
        self, info: RankInfo, sentence: str, *, exit_code: int = 2, traceback: str = "", gpu_text: str = ""
    ) -> None:
        """`sentence` as that machine has put it; `traceback` of a bug; `gpu_text`: mlx's own words, of an error of its GPU."""
        self.rank, self.machine, self.exit_code = info.rank, info.machine, exit_code
        self.traceback, self.gpu_text = traceback, gpu_text
        self.place = f"On {quote(info.machine, 40)} (rank {info.rank})"
        super().__init__(SETTING, f"{self.place}: {sentence}")
