"""`python -m backend.bench.worker`: one contender at one case, in a process of its own, speaking JSON lines.

The first line on stdin says {"contender", "case", "model"}; {"ready": …} answers it. Each line after that asks for one
step and is answered by what the step took. The end of stdin ends the process. It runs in our environment or in the
peers', so it imports nothing of ours that needs more than mlx and mlx-lm but where the contender is ourselves.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from backend import blas
from backend.bench.cases import Case
from backend.bench.contender import Contender
from backend.bench.meter import Meter


def contender(name: str) -> Contender:
    """The function behind a contender's name. Raises KeyError for an unknown one."""
    if name.startswith("ours"):
        from backend.bench import ours

        return ours.contender(name)
    from backend.bench import others, plain

    return (others.CONTENDERS | plain.CONTENDERS)[name]


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
