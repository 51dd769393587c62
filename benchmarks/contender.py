"""A contender: one implementation under measurement, ours or another. All share prompts, adapter shape, learning rate,
rewards."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import Case

Contender = Callable[[Case, Path, Stopwatch], None]
"""Loads the case's model, then runs one step for each request that the stopwatch receives, until stdin ends."""

RANK, SCALE, RATE = 8, 20.0, 1e-6
"""Rank and scale of the LoRA adapters, and the optimizer's learning rate."""


def prompt_ids(case: Case, number: int = 0) -> list[list[int]]:
    """Random prompts of step `number`, [prompts, prompt length]: the same for every contender, different in every
    step."""
    import numpy as np

    rng = np.random.default_rng((7, number))
    return rng.integers(2, case.vocab, (case.prompts, case.prompt)).tolist()


def reward(text: str) -> float:
    """A reward in [0, 1) that differs between completions and costs nothing: a checksum."""
    return zlib.crc32(text.encode()) % 1000 / 1000
