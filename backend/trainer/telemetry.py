"""What a run reports beside its metrics: completions, the phase of a step, findings about its health, versions."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from backend.runs.completion_rows import CompletionRow, GroupRow, TokenData
from backend.runs.events import Event, EventLog, read_events
from backend.trainer.health.watch import Watch
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
    """Writes the current phase of a step to the event log, at most every PHASE_EVERY_S seconds."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._last = 0.0

    def report(self, phase: str, progress: float | None = None) -> None:
        """`progress` is a fraction, 0 … 1, where it is known."""
        now = time.monotonic()
        if now - self._last >= PHASE_EVERY_S:
            self._last = now
            fields = {} if progress is None else {"progress": round(progress, 3)}
            self._event_log.write("phase", phase=phase, **fields)


class HealthReporter:
    """Follows the event log and writes to it what the health rules find: each finding when it begins, and when it is over."""

    def __init__(self, event_log: EventLog, settings: Mapping[str, Any]) -> None:
        """`settings`: the run's. What the event log holds already, when a run is resumed, is read first."""
        self._event_log = event_log
        self._watch = Watch.resumed(settings, read_events(event_log.path))
        event_log.followers.append(self._take)

    def _take(self, event: Event) -> None:
        for fields in self._watch.take(event):
            self._event_log.write("health", **fields)


def of_process() -> dict[str, Any]:
    """What the event log's `started` says of this process: its number, its device, the versions of what computes in it."""
    return {"pid": os.getpid(), "device": str(mx.default_device()), "versions": versions()}


def versions() -> dict[str, str]:
    names = ("grpo-studio", "mlx", "mlx-lm", "transformers")
    ours = {name: _version(name) for name in names}
    return {"python": platform.python_version(), "platform": platform.platform()} | ours


@cache
def _version(name: str) -> str:
    """Of an installed package. Its whole description is parsed for that, so once a process: a sweep has many runs."""
    return version(name)
