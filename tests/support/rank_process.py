"""One rank of a run as a process, started with the environment that `mlx.launch` sets: `python -m
tests.support.rank_process RUN BACKEND`.

Rank 0 trains the run folder's config, or resumes it; the others work for it. GRPO_TEST_TOKEN_S is a list of seconds by
rank, as JSON, that every sampled token takes at least; a learned one takes a third. GRPO_TEST_EQUAL_SPLIT splits all
work equally, as a plain data-parallel trainer would.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from backend.config.config import load
from backend.distributed import scheduling
from backend.distributed.channel import LeaderChannel, open_channel
from backend.distributed.collectives import init_collectives
from backend.distributed.leader import Leader
from backend.distributed.scheduling import StepShares
from backend.distributed.worker import work
from backend.runs.run_folder import RunFolder
from backend.sampling.rollout import Sampler
from backend.trainer.run_process import train
from backend.training.learner import Learner


def slow_down(token_s: float) -> None:
    """Let every token of this rank take at least so long."""
    sample, backward = Sampler.sample, Learner._backward

    def slow_sample(self: Sampler, *arguments: Any) -> Any:
        *others, poll = arguments
        done = 0

        def poll_slowly(tokens: int) -> None:
            nonlocal done
            time.sleep((tokens - done) * token_s)
            done = tokens
            poll(tokens)

        return sample(self, *others, poll_slowly)

    def slow_backward(self: Learner, micro_batch: Any, *arguments: Any) -> Any:
        time.sleep(float(micro_batch.batch.length_B.sum()) * token_s / 3)
        return backward(self, micro_batch, *arguments)

    Sampler.sample, Learner._backward = slow_sample, slow_backward


def split_equally() -> None:
    """Everything at once, and as much to each rank."""
    scheduling.RankPaces.__getitem__ = lambda self, rank: scheduling.Pace(0.0, 1.0)
    scheduling.RankPaces.speeds = lambda self: [1.0] * len(self._rounds)
    scheduling.FIRST_SHARE = scheduling.UNKNOWN_SHARE = 1.0
    StepShares.speeds = lambda self, of_sampling: list(of_sampling)


def main(folder: Path, backend: str) -> int:
    ranks = init_collectives(backend)
    channel = open_channel(ranks)
    if slowness := os.environ.get("GRPO_TEST_TOKEN_S"):
        slow_down(json.loads(slowness)[ranks.rank])
    if os.environ.get("GRPO_TEST_EQUAL_SPLIT"):
        split_equally()
    if isinstance(channel, LeaderChannel):
        ranks.check = channel.check
        leader = Leader(channel, ranks, backend)
        run = RunFolder(folder)
        ending = train(load(run.config), run, command="a test", load=leader.load_context)
        print(ending.kind, ending.sentence, flush=True)
        channel.close()
        return ending.exit_code
    try:
        work(channel, ranks)
    except BaseException as error:
        channel.fault(error)
        raise
    channel.close()
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(code)
