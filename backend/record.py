"""How a run is told: a group as a line of completions.jsonl, the phases of a step, the versions it ran with."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version
from typing import Any

from backend.nouns import Completion, Group
from backend.spec.events import Diary

PHASE_EVERY_S = 0.5
"""Phases of a step are told to the diary at most this often."""


def group_line(step: int, group: Group) -> dict[str, Any]:
    """One line of completions.jsonl."""
    problem = group.problem
    return {
        "step": step,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "type": problem.type,
        "completions": [_completion(one) for one in group.completions],
    }


def _completion(one: Completion) -> dict[str, Any]:
    told = {
        "text": one.text,
        "tokens": len(one.tokens),
        "stop": one.stop,
        "rewards": one.scores,
        "reward": one.reward,
        "advantage": one.advantage,
    }
    return told | ({"logged": one.logged} if one.logged else {})


class Phases:
    """Tells the diary what a step is doing, now and then."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary
        self._told = 0.0

    def tell(self, phase: str, progress: float | None = None) -> None:
        """`progress` is a share, 0 … 1, where it is known."""
        now = time.monotonic()
        if now - self._told >= PHASE_EVERY_S:
            self._told = now
            share = {} if progress is None else {"progress": round(progress, 3)}
            self._diary.write("phase", phase=phase, **share)


def versions() -> dict[str, str]:
    names = ("grpo-studio", "mlx", "mlx-lm", "transformers")
    ours = {name: version(name) for name in names}
    return {"python": platform.python_version(), "platform": platform.platform()} | ours
