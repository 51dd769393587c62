"""A rank without MLX for tests of the launcher: the real control channel, and a gather through files."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from backend.distributed import ranks
from backend.distributed.channel import GOODBYE, LeaderChannel, WorkerChannel, open_channel
from backend.distributed.collectives import FlatCollectives
from backend.distributed.launcher import write_late_ending
from backend.distributed.ranks import LostRankError, Orders, WorkerError
from backend.runs.events import EventLog, read_events
from backend.runs.run_folder import RunFolder, hold_lock
from backend.utils.errors import UserError

STEP_S = 0.05


class FileGroup(FlatCollectives):
    """The collectives that a channel asks for, over files; `token` tells one start of the ranks from another."""

    def __init__(self, run: Path, rank: int, size: int, token: str) -> None:
        super().__init__(rank, size)
        self._folder = run / f"meeting-{token}"
        self._folder.mkdir(exist_ok=True)

    def gather(self, value: Any) -> list[Any]:
        half = self._folder / f"{self.rank}.half"
        half.write_text(json.dumps(value))
        half.rename(self._folder / f"{self.rank}.json")
        files = [self._folder / f"{rank}.json" for rank in range(self.size)]
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        return [json.loads(file.read_text()) for file in files]


def main() -> NoReturn:
    run = RunFolder(Path(sys.argv[sys.argv.index("--run") + 1]))
    rank, size, token = 0, 1, ""
    if hosts := json.loads(os.environ.get(ranks.FILES_VARIABLE, "{}")).get("MLX_HOSTFILE"):
        ring = json.loads(hosts)
        rank, size, token = int(os.environ["MLX_RANK"]), len(ring), ring[0][0].rpartition(":")[2]
    elif "OMPI_COMM_WORLD_SIZE" in os.environ:
        rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
        token = os.environ["PMIX_NAMESPACE"].replace("/", "-")
    if os.environ.get("GRPO_STUDIO_TEST_CRASHES") == str(rank):
        print("no such library", file=sys.stderr)
        os._exit(1)
    if os.environ.get(ranks.WATCH_VARIABLE):
        ranks.end_with_stdin()
    orders = Orders.given()
    if rank == 0:
        orders.report(pid=os.getpid())
    if size == 1:
        lead(run, orders, None)
    if rank:
        print("this worker works", flush=True)
    try:
        channel = open_channel(FileGroup(run.path, rank, size, token))
    except UserError as mistake:
        write_late_ending(run, "failed", str(mistake))
        os._exit(2)
    if isinstance(channel, WorkerChannel):
        work(channel)
    lead(run, orders, channel)


def work(channel: WorkerChannel) -> NoReturn:
    while channel.receive().kind != GOODBYE:
        pass
    channel.close()
    os._exit(0)


def lead(run: RunFolder, orders: Orders, channel: LeaderChannel | None) -> NoReturn:
    if channel:
        channel.on_failure = lambda failure: (
            orders.report(lost=[failure.rank, failure.faults[0].sentence])
            if isinstance(failure, LostRankError)
            else None
        )
        orders.report(met=True)
    hold_lock(run)
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    event_log = EventLog(run.events)
    pids = [info.pid for info in channel.machines] if channel else []
    event_log.write("started", ranks=len(pids) or 1, pids=pids)
    for sentence in orders.warnings:
        event_log.write("note", level="warning", sentence=sentence)
    code = _steps(event_log, orders, channel, stops)
    if channel:
        channel.close()
    orders.report(exit_code=code)
    print("rank 0 has ended", flush=True)
    os._exit(code)


def _steps(event_log: EventLog, given: Orders, channel: LeaderChannel | None, stops: list[int]) -> int:
    step = max((event["step"] for event in read_events(event_log.path) if event["kind"] == "step"), default=0)
    last = int(os.environ.get("GRPO_STUDIO_TEST_STEPS", "10"))
    try:
        while step < last or (channel and given.goes_on):  # this start ends with the loss of a worker
            time.sleep(STEP_S)
            if channel:
                channel.check()
            if stops:
                event_log.write("stopped", step=step, reason="stopped", sentence="Stopped.")
                return 3
            step += 1
            event_log.write("step", step=step, metrics={})
    except (LostRankError, WorkerError) as failure:
        if isinstance(failure, LostRankError) and given.goes_on:
            return ranks.RESTART_RANKS
        event_log.write("failed", step=step, reason="failed", sentence=str(failure))
        return 2
    event_log.write("finished", step=step, reason="finished", sentence="Finished.")
    return 0


if __name__ == "__main__":
    main()
