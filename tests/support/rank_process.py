"""One rank of a run as a process, started with the environment that `mlx.launch` sets: `python -m tests.support.rank_process RUN BACKEND`.

Rank 0 trains the run folder's config, or resumes it; the others work for it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from backend.run.distributed.channel import LeaderChannel, open_channel
from backend.run.distributed.collectives import init_collectives
from backend.run.distributed.leader import Leader
from backend.run.distributed.worker import work
from backend.run.run_process import train
from backend.spec.config import load
from backend.spec.places import RunFolder


def main(folder: Path, backend: str) -> int:
    ranks = init_collectives(backend)
    channel = open_channel(ranks)
    if isinstance(channel, LeaderChannel):
        ranks.check = channel.check
        leader = Leader(channel, ranks, backend)
        run = RunFolder(folder)
        ending = train(load(run.config), run, command="a test", load=leader.load_parts)
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
