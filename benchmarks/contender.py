"""A contender: one implementation under measurement, ours or another. All share prompts, adapter shape, learning rate,
rewards.

`python -m benchmarks.contender` runs one contender on one case, in a process of its own, over JSON lines. The first
line on stdin is {"contender", "case", "model"}, answered by {"ready": …}. Each line after that runs one step and is
answered by its measurements. The end of stdin ends the process. It runs in our environment or in the peers', so it
imports nothing of ours that needs more than mlx and mlx-lm, unless the contender is ours.
"""

import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend.engine import cpu_setup
from backend.utils.child_process import claim_stdout
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import Case

Contender = Callable[[Case, Path, Stopwatch], None]
"""Loads the case's model, then runs one step for each request that the stopwatch receives, until stdin ends."""

RANK, SCALE, RATE = 8, 20.0, 1e-6  # rank and scale of the LoRA adapters, and the optimizer's learning rate


IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|image_pad|>")
"""The last ids of a vocabulary with pictures."""
PICTURES = 8


def prompt_ids(case: Case, number: int = 0) -> list[list[int]]:
    """Random prompts of step `number`, [prompts, prompt length]: the same for every contender, different in every
    step. A picture comes first."""
    import numpy as np

    rng = np.random.default_rng((7, number))
    if not case.image:
        return rng.integers(2, case.vocab, (case.prompts, case.prompt)).tolist()
    begin, end, _, feature = range(case.vocab - len(IMAGE_TOKENS), case.vocab)
    first = [begin, *[feature] * case.image_tokens, end]
    text = rng.integers(2, begin, (case.prompts, case.prompt - len(first))).tolist()
    return [first + ids for ids in text]


def picture(case: Case, folder: Path, prompt: int, number: int) -> str:
    """Path of the picture of a prompt of step `number`, made with the model."""
    return str(folder / f"{(number * case.prompts + prompt) % PICTURES}.png")


def reward(text: str) -> float:
    """A reward in [0, 1) that differs between completions and costs nothing: a checksum."""
    return zlib.crc32(text.encode()) % 1000 / 1000


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
