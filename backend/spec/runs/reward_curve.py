"""A run's reward as a few points, for a sparkline: read from places spread evenly over the diary, however long it is."""

from __future__ import annotations

import math
import mmap
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from backend.spec.events import Event, parse_line
from backend.spec.regular_file import open_regular

POINTS = 40
WINDOW = 8 << 10
"""Bytes read for one point of a long diary: a few steps, whose mean is the point."""
EVALUATION = b'"kind": "eval"'
REACH = 16 << 20
"""How far from the end of the diary an evaluation is looked for: ten thousand steps."""


def reward_curve(diary: Path, points: int = POINTS) -> tuple[float, ...]:
    """At most `points` rewards in the order of the steps; empty before the first step.

    Of a short diary every step is read. Of a long one each point is the mean over the steps in a window of WINDOW bytes.
    """
    try:
        with open_regular(diary) as file:
            size = file.seek(0, 2)
            if size <= points * WINDOW:
                file.seek(0)
                return _thinned([value for line in file if (value := _reward(line)) is not None], points)
            means = (_mean_reward(file, size * index // points) for index in range(points))
            return tuple(mean for mean in means if mean is not None)
    except OSError:
        return ()


def newest_evaluation(diary: Path) -> Event | None:
    """The last evaluation on held-out prompts in the last REACH bytes of a diary; that of the test split is none."""
    try:
        with open_regular(diary) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end, floor = len(text), max(0, len(text) - REACH)
            while (found := text.rfind(EVALUATION, floor, end)) >= 0:
                start = text.rfind(b"\n", 0, found) + 1
                stop = text.find(b"\n", found)
                event = parse_line(text[start:stop]) if stop >= 0 else None
                if event is not None and event.get("kind") == "eval" and event.get("split") != "test":
                    return event
                end = start
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None
    return None


def _mean_reward(file: BinaryIO, offset: int) -> float | None:
    file.seek(offset)
    chunk = file.read(WINDOW)
    lines = chunk.split(b"\n")[0 if offset == 0 else 1 : -1]  # the first and the last line of a window are cut
    rewards = [value for line in lines if (value := _reward(line)) is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _reward(line: bytes) -> float | None:
    if b'"step"' not in line:
        return None
    event = parse_line(line)
    metrics = event.get("metrics") if event is not None and event.get("kind") == "step" else None
    reward = cast("dict[str, Any]", metrics).get("reward") if isinstance(metrics, dict) else None
    if not isinstance(reward, int | float) or isinstance(reward, bool) or not math.isfinite(reward):
        return None
    return float(reward)


def _thinned(values: list[float], points: int) -> tuple[float, ...]:
    """Means of `points` runs of neighbours of about equal length."""
    if len(values) <= points:
        return tuple(values)
    edges = [len(values) * index // points for index in range(points + 1)]
    return tuple(sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges))
