"""How long a rank that answers may take for its work before it counts as hung: by what such work has taken so far.

Heartbeats come from a thread of their own. They tell that a process is alive, and nothing of its main thread, which may hang in a driver, a
deadlock or a disk of the network. What is merely slow, by heat or by other programs, is slow by a factor, and is waited for.
"""

from __future__ import annotations

LEAST_S = 120.0
"""What any work may take, such as kernels that are compiled first."""
TIMES = 10.0
"""How many times as long as usual work may take besides."""
UNSEEN_TIMES = 30.0
"""The same of a rank that has done none yet: what is usual is then that of the others."""


def limit_s(usual_s: float, *, is_seen: bool = True) -> float:
    """Seconds that work may take which usually takes `usual_s`."""
    return LEAST_S + (TIMES if is_seen else UNSEEN_TIMES) * usual_s


class LearningPatience:
    """Of the updates of a step. Before the first step is learned nothing is usual, and there is no limit."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    def observe(self, seconds: float) -> None:
        """A step was learned."""
        self._longest_s = max(self._longest_s, seconds)

    def overdue(self, waited_s: float) -> str:
        """Why a rank that the others have waited for so long counts as hung, to follow its name; "" as long as it does not."""
        if not self._longest_s or waited_s <= limit_s(self._longest_s):
            return ""
        return (
            f"answers, but the others have waited {waited_s:.0f} s for it to learn; a step took {self._longest_s:.1f} s"
        )
