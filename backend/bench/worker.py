"""`python -m backend.bench.worker`: one contender at one case, in a process of its own, speaking JSON lines.

The first line on stdin says {"contender", "case", "model"}; {"ready": …} answers it. Each line after that asks for one
step and is answered by what the step took. The end of stdin ends the process. It runs in our environment or in the
peers', so it imports nothing of ours that needs more than mlx and mlx-lm but where the contender is ourselves.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from backend import blas
from backend.bench.cases import Case
from backend.bench.meter import Meter

Contender = Callable[[Case, Path, Meter], None]
"""Gets ready, then measures a step whenever one is asked for; never returns."""


def contender(name: str) -> Contender:
    """The function behind a contender's name. Raises KeyError for an unknown one."""
    if name.startswith("ours"):
        from backend.bench import ours

        return ours.contender(name)
    from backend.bench import others, plain

    return (others.CONTENDERS | plain.CONTENDERS)[name]


def prompt_ids(case: Case, number: int = 0) -> list[list[int]]:
    """The ids of the case's prompts: the same for every contender, others in every step."""
    import numpy as np

    rng = np.random.default_rng((7, number))
    return rng.integers(2, case.vocab, (case.prompts, case.prompt)).tolist()


def reward(text: str) -> float:
    """Something that differs from completion to completion and costs nothing."""
    return zlib.crc32(text.encode()) % 1000 / 1000


def own_stdout() -> TextIO:
    """stdout for our lines alone: whatever else is printed goes to stderr."""
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return mine


def main() -> None:
    said = blas.prepare()
    meter = Meter(sys.stdin, own_stdout())
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    import mlx.core as mx

    run = contender(asked["contender"])
    mx.random.seed(0)
    meter.say(ready={"blas": said, "device": str(mx.default_device())})
    run(Case(**asked["case"]), Path(asked["model"]), meter)


if __name__ == "__main__":
    main()
