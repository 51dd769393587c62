"""What a run reports beside its metrics: completions, the phase of a step, findings about its health, versions."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from backend.spec.completion_rows import CompletionRow, GroupRow, TokenData
from backend.spec.events import Diary
from backend.spec.health import LONG, findings
from backend.types import Completion, Group

PHASE_EVERY_S = 0.5
"""Least seconds between two `phase` events within a step."""


def group_row(step: int, group: Group, token_data: Sequence[TokenData] = ()) -> GroupRow:
    """One line of completions.jsonl; `token_data` has one entry for each completion, or none at all."""
    problem = group.problem
    rows = [completion_row(completion) for completion in group.completions]
    for row, data in zip(rows, token_data, strict=False):
        row["token_data"] = data
    return GroupRow(step=step, prompt=problem.prompt, answer=problem.answer, type=problem.type, completions=rows)


def completion_row(completion: Completion) -> CompletionRow:
    """One completion of such a line."""
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
    """Writes the current phase of a step to the diary, at most every PHASE_EVERY_S seconds."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary
        self._last = 0.0

    def report(self, phase: str, progress: float | None = None) -> None:
        """`progress` is a fraction, 0 … 1, where it is known."""
        now = time.monotonic()
        if now - self._last >= PHASE_EVERY_S:
            self._last = now
            fields = {} if progress is None else {"progress": round(progress, 3)}
            self._diary.write("phase", phase=phase, **fields)


class HealthReporter:
    """Writes the findings of the health rules to the diary, each once until it no longer applies."""

    def __init__(self, diary: Diary, steps: Iterable[Mapping[str, Any]] = ()) -> None:
        """`steps`: metrics of the steps before, when a run is resumed; their findings are in the diary already."""
        self._diary = diary
        self._steps = deque(steps, maxlen=LONG)
        self._reported = {finding.code for finding in findings(list(self._steps))}

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Apply the rules to the metrics of a finished step and those before it."""
        self._steps.append(metrics)
        current = findings(list(self._steps))
        for finding in current:
            if finding.code not in self._reported:
                self._diary.write("health", **asdict(finding))
        self._reported = {finding.code for finding in current}


def versions() -> dict[str, str]:
    names = ("grpo-studio", "mlx", "mlx-lm", "transformers")
    ours = {name: version(name) for name in names}
    return {"python": platform.python_version(), "platform": platform.platform()} | ours
