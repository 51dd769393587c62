"""Which scores of a completion can be kept as a case of the user's reward file: those of the file's own functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.spec.faults import Mistake
from backend.spec.rewards import catalog


@dataclass(frozen=True, slots=True)
class RewardCase:
    """`expected` scores by metric name, and `calls` the entry of `reward_functions` behind each name."""

    file: Path
    expected: dict[str, float | None]
    calls: dict[str, str]


def reward_file(settings: Mapping[str, Any]) -> Path | None:
    """The user's reward file, where these settings name one that exists."""
    text = str(settings.get("reward_functions_file") or "").strip()
    path = catalog.locate_reward_file(text) if text else None
    return path if path is not None and path.is_file() else None


def case_of(settings: Mapping[str, Any], scores: Mapping[str, float | None]) -> RewardCase | None:
    """The case that a completion with these scores makes; None without a file, or where no function of it gave a score."""
    file = reward_file(settings)
    if file is None or not scores:
        return None
    calls = {catalog.metric_name(str(entry)): str(entry) for entry in settings["reward_functions"]}
    own = _names_of_file(file, calls)
    expected = {name: score for name, score in scores.items() if name in own}
    return RewardCase(file, expected, calls) if expected else None


def _names_of_file(file: Path, calls: Mapping[str, str]) -> set[str]:
    """Metric names of the chosen reward functions that are the file's own."""
    try:
        registered = {entry.name for entry in catalog.rewards_in_file(file)}
    except Mistake:  # the file cannot be read any more, as scoring has said
        return set()
    shipped = {entry.name for entry in catalog.builtin_rewards()}
    parsed = {name: catalog.reward_call(entry, shipped | registered) for name, entry in calls.items()}
    # A file may register a function under a shipped name; the name is then the file's.
    return {name for name, call in parsed.items() if call.file or call.function not in shipped - registered}
