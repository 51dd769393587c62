"""Runs with a tracker beside the same run without: what has to be the same of both."""

from __future__ import annotations

import json
import re
from typing import Any

from backend.runs.run_folder import RunFolder

# Keys of an event that differ from one process to the next
OF_THE_MOMENT = ("t", "mono", "seq", "pid", "command", "path", "versions")
# What metrics of time and memory begin with
OF_THE_PROCESS = ("time/", "process/", "machine/", "peak_memory_gb", "rollout_tokens_per", "train_tokens_per")


def events_of(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.events.read_text().splitlines()]


def event_log_without_times(run: RunFolder, tracker: str = "") -> list[dict[str, Any]]:
    """The events that the settings determine: without phases and without what is said of a tracker."""
    kept = [event for event in events_of(run) if event["kind"] not in ("phase", "health")]
    return [
        {key: _without_times(value) for key, value in event.items() if key not in OF_THE_MOMENT}
        for event in kept
        if not (tracker and event["kind"] == "note" and re.search(rf"\b{tracker}\b", event["sentence"]))
    ]


def _without_times(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if not name.startswith(OF_THE_PROCESS)}


def assert_same_but_for_the_tracker(run: RunFolder, alone: RunFolder, tracker: str) -> None:
    """EventLog, completions, and the weights of every checkpoint."""
    assert event_log_without_times(run, tracker) == event_log_without_times(alone)
    assert run.completions.read_bytes() == alone.completions.read_bytes()
    weights = sorted(path.relative_to(alone.path) for path in alone.path.glob("checkpoints/*/*.safetensors"))
    assert weights
    for path in weights:
        assert (run.path / path).read_bytes() == (alone.path / path).read_bytes(), path
