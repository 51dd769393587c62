"""How a run is told: a group as a line of completions.jsonl, the phases of a step, findings about its health, versions."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from backend.spec.completions import CompletionRow, GroupRow
from backend.spec.events import Diary
from backend.spec.health import LONG, Finding, findings
from backend.types import Completion, Group

PHASE_EVERY_S = 0.5
"""Phases of a step are told to the diary at most this often."""


def group_row(step: int, group: Group) -> GroupRow:
    """One line of completions.jsonl."""
    problem = group.problem
    rows = [_completion_row(completion) for completion in group.completions]
    return GroupRow(step=step, prompt=problem.prompt, answer=problem.answer, type=problem.type, completions=rows)


def _completion_row(completion: Completion) -> CompletionRow:
    row = CompletionRow(
        text=completion.text,
        tokens=len(completion.tokens),
        stop=completion.stop,
        rewards=completion.scores,
        reward=completion.reward,
        advantage=completion.advantage,
    )
    if completion.logged:
        row["logged"] = completion.logged
    return row


class PhaseReporter:
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


class HealthReporter:
    """Tells the diary what the rules find, each finding once for as long as it holds."""

    def __init__(self, diary: Diary, steps: Iterable[Mapping[str, Any]] = ()) -> None:
        """`steps`: the metrics of the steps there were before, when a run is resumed."""
        self._diary = diary
        self._steps = deque(steps, maxlen=LONG)
        self._told = {finding.code for finding in self._found()}

    def _found(self) -> list[Finding]:
        return findings(list(self._steps))

    def look(self, metrics: Mapping[str, Any]) -> None:
        """Take in the metrics of a step that has ended."""
        self._steps.append(metrics)
        found = self._found()
        for finding in found:
            if finding.code not in self._told:
                self._diary.write("health", **asdict(finding))
        self._told = {finding.code for finding in found}


def versions() -> dict[str, str]:
    names = ("grpo-studio", "mlx", "mlx-lm", "transformers")
    ours = {name: version(name) for name in names}
    return {"python": platform.python_version(), "platform": platform.platform()} | ours
