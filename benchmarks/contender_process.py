"""`python -m benchmarks.contender_process`: one contender on one case, in a process of its own, over JSON lines.

The first line on stdin is {"contender", "case", "model"}, answered by {"ready": …}. Each line after that runs one step
and is answered by its measurements. The end of stdin ends the process. It runs in our environment or in the peers', so
it imports nothing of ours that needs more than mlx and mlx-lm, unless the contender is ours.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from backend.engine import cpu_setup
from backend.utils.child_process import claim_stdout
from benchmarks.contender import Contender
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import Case


def contender(name: str) -> Contender:
    """The function behind a contender's name. Raises KeyError for an unknown one."""
    if name.startswith("ours"):
        from benchmarks import our_contenders

        return our_contenders.contender(name)
    from benchmarks import baseline_contenders, peer_contenders

    return (peer_contenders.CONTENDERS | baseline_contenders.CONTENDERS)[name]


def main() -> None:
    blas_sentence = cpu_setup.load_openblas()
    stopwatch = Stopwatch(sys.stdin, claim_stdout())
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    import mlx.core as mx

    run = contender(request["contender"])
    mx.random.seed(0)
    stopwatch.reply(ready={"blas": blas_sentence, "device": str(mx.default_device())})
    run(Case(**request["case"]), Path(request["model"]), stopwatch)


if __name__ == "__main__":
    main()
