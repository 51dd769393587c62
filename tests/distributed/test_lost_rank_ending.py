"""A run that lost a machine, or whose worker failed, is saved at its last finished step and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.cli.training import PreparedRun, hosts_setting, machine_settings
from backend.config.config import load, parse
from backend.distributed.collectives import StepSnapshot
from backend.distributed.launcher import write_late_ending
from backend.distributed.machine_check import plan_machines, require_one_machine
from backend.distributed.ranks import LostRankError, RankInfo
from backend.runs import checkpoint
from backend.runs.checkpoint import arrays_of
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.steering import read_changes
from backend.trainer.control import handlers_restored
from backend.trainer.run_context import RunContext, load_context
from backend.trainer.run_process import record_changes, train
from backend.trainer.trainer import RESTART, Ending
from backend.utils.errors import UserError
from tests.support import small_run

MAC = RankInfo(1, "mac-b", log="ranks/rank-1.log in the run folder")
LOST = LostRankError(MAC, "hung up: its process has ended")


class LosingParts:
    """Parts of one process that lose a machine in the course of step `step`: before its updates, or after the first of
    several."""

    def __init__(self, step: int, *, after_updates: int = 0, failure: UserError = LOST) -> None:
        self.step, self.after_updates, self.failure = step, after_updates, failure
        self.kept: list[StepSnapshot] = []

    def load(self, *about: Any) -> RunContext:
        own = self

        class Parts(RunContext):
            def take_back(self) -> None:
                own.kept[-1].restore(self)

            def learn(self, groups: Any, config: Any, poll: Callable[[], None]) -> dict[str, float]:
                learner = self.learner
                own.kept.append(StepSnapshot.of(self, config))
                begun, update = learner.updates, learner.update

                def failing(*batch: Any, **about: Any) -> dict[str, float]:
                    if len(own.kept) == own.step and learner.updates - begun == own.after_updates:
                        raise own.failure
                    return update(*batch, **about)

                learner.update = failing
                try:
                    return RunContext.learn(self, groups, config, poll)
                finally:
                    learner.update = update

        return load_context(*about, make=Parts)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    changes = {"iters": 3, "num_iterations": 2, "save_every": 100, "learning_rate": 1e-2, "max_completion_length": 4}
    return small_run.settings_for(folder, **small_run.low_half(folder) | changes)


def trained(raw: dict[str, Any], run: RunFolder, losing: LosingParts | None = None, *, goes_on: bool = False) -> Ending:
    run.path.mkdir(exist_ok=True)
    if not run.config.exists():
        small_run.write_config(run.config, raw)
    about = {"command": "a test", "goes_on": goes_on, "may_restart": True}
    with handlers_restored():
        return train(load(run.config), run, load=losing.load if losing else load_context, **about)


def weights(run: RunFolder) -> dict[str, mx.array]:
    return arrays_of(checkpoint.all_checkpoints(run)[-1], "weights")


@pytest.mark.parametrize("after_updates", [0, 1])
def test_the_last_finished_step_is_saved(raw: dict[str, Any], tmp_path: Path, after_updates: int) -> None:
    whole, run = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "lost")
    assert trained(raw, whole).kind == "finished"
    ending = trained(raw, run, LosingParts(3, after_updates=after_updates))
    assert (ending.kind, ending.exit_code, ending.step, ending.lost_rank) == ("failed", 2, 2, 1)
    assert list(read_events(run.events))[-1]["lost_rank"] == 1, "for the window, which marks the machine"
    assert ending.sentence == (
        "hosts: mac-b (rank 1) hung up: its process has ended. What it printed: ranks/rank-1.log in the run folder. "
        "Step 2 is saved. Resume the run when the machine is back, or without it: resume RUN --hosts FILE, "
        "or --hosts none for this machine alone."
    )
    assert [saved.state.step for saved in checkpoint.all_checkpoints(run)] == [2]
    assert trained(raw, run).kind == "finished"
    mine, theirs = weights(run), weights(whole)
    assert all(mx.array_equal(mine[name], x) for name, x in theirs.items()), "as if nothing had happened, to the bit"


def test_a_run_that_goes_on_without_a_machine_has_no_ending_and_is_saved(raw: dict[str, Any], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    ending = trained(raw, run, LosingParts(2), goes_on=True)
    assert ending.kind == RESTART
    assert not [event for event in read_events(run.events) if event["kind"] == "failed"]
    assert [saved.state.step for saved in checkpoint.all_checkpoints(run)] == [1]


def test_the_machines_of_a_resumed_run_are_those_that_were_asked_for_last(raw: dict[str, Any], tmp_path: Path) -> None:
    run, file = RunFolder(tmp_path / "run"), tmp_path / "two.json"
    trained(raw, run, LosingParts(2))
    config = load(run.config)
    asked = hosts_setting(str(file)) | {"on_lost_rank": "go_on"}
    assert machine_settings(PreparedRun(run, config)).hosts == ""
    chosen = machine_settings(PreparedRun(run, config, changes=asked))
    assert (chosen.hosts, chosen.on_lost_rank) == (str(file), "go_on")
    record_changes(config, run, asked)
    assert read_changes(run)[0].step == 2 and machine_settings(PreparedRun(run, config)).hosts == str(file)
    assert machine_settings(PreparedRun(run, config, changes=hosts_setting("none"))).hosts == ""
    assert trained(raw, run).kind == "finished", "a recorded machine changes nothing of what is learned"


def test_hosts_that_cannot_be_used_are_refused_before_anything_begins(raw: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    config = parse(raw | {"hosts": str(file)})
    with pytest.raises(UserError, match="There is no file"):
        plan_machines(config)
    file.write_text('[{"ssh": "127.0.0.1"}, {"ssh": "mac-b"}]')
    with pytest.raises(UserError, match="ips"):
        plan_machines(config)
    file.write_text(
        '[{"ssh": "a", "ips": ["127.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}, {"ssh": "a", "ips": ["127.0.0.1"]}]'
    )
    hosts, choice = plan_machines(config.model_copy(update={"distributed_backend": "ring"}))
    assert [host.ssh for host in hosts.hosts] == ["a", "b", "a"] and choice.backend == "ring"
    with pytest.raises(UserError, match="A sweep trains on this machine alone"):
        require_one_machine(config, "A sweep")
    require_one_machine(parse(raw), "A sweep")


def test_an_ending_is_written_once_and_never_into_a_run_that_trains(raw: dict[str, Any], tmp_path: Path) -> None:
    import os

    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    lock = hold_lock(run)
    assert not write_late_ending(run, "failed", "Killed.")
    os.close(lock)
    assert write_late_ending(run, "failed", "Killed.") and not write_late_ending(run, "failed", "Again.")
    assert [event["sentence"] for event in read_events(run.events)] == ["Killed."]
