"""What a contender is, and what each is given alike: the prompts, the adapter's shape, the learning rate, the rewards."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from backend.bench.stopwatch import Stopwatch
from backend.bench.workloads import Case

Contender = Callable[[Case, Path, Stopwatch], None]
"""Gets ready, then measures a step whenever one is asked for; never returns."""

RANK, SCALE, RATE = 8, 20.0, 1e-6
"""Of the LoRA adapters, and the optimizer's learning rate."""


def prompt_ids(case: Case, number: int = 0) -> list[list[int]]:
    """The ids of the case's prompts: the same for every contender, others in every step."""
    import numpy as np

    rng = np.random.default_rng((7, number))
    return rng.integers(2, case.vocab, (case.prompts, case.prompt)).tolist()


def reward(text: str) -> float:
    """Something that differs from completion to completion and costs nothing."""
    return zlib.crc32(text.encode()) % 1000 / 1000
