"""The launcher with stand-ins for the ranks: processes with the real control channel and without MLX."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

from backend.cli.training import PreparedRun, hosts_setting, machine_settings
from backend.config.config import load, parse, problems
from backend.distributed.collectives import StepSnapshot
from backend.distributed.hosts_file import Host, HostsFile, parse_hosts
from backend.distributed.launcher import LaunchEnd, run_ranks, write_late_ending
from backend.distributed.machine_check import plan_machines, require_one_machine
from backend.distributed.ranks import STOPPED, LostRankError, Orders, RankInfo
from backend.export.writer import on_host, save_arrays
from backend.runs import checkpoint
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.steering import read_changes
from backend.trainer.control import handlers_restored
from backend.trainer.memory.estimate import GB, estimate_run, share_of
from backend.trainer.memory.model_shape import shape_from
from backend.trainer.run_context import RunContext, load_context
from backend.trainer.run_process import record_changes, train
from backend.trainer.trainer import RESTART, Ending
from backend.utils.command import backend_environment
from backend.utils.errors import UserError
from tests.support import small_run


class Bench:
    """A run folder, and how its stand-in ranks are launched."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunFolder(folder / "run")
        self.run.path.mkdir()
        self._monkeypatch = monkeypatch
        self.program = folder / "rank"
        self.program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m tests.support.standin_rank "$@"\n')
        self.program.chmod(0o755)
        monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
        monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")

    def launch(self, size=2, *, backend="ring", crashes: int | None = None, steps=4, **orders: Any) -> LaunchEnd:
        """`crashes`: the rank that does, at its start."""
        self._monkeypatch.setenv("GRPO_STUDIO_TEST_CRASHES", str(crashes))
        self._monkeypatch.setenv("GRPO_STUDIO_TEST_STEPS", str(steps))
        hosts = HostsFile(tuple(Host("127.0.0.1", ("127.0.0.1",), program=str(self.program)) for _ in range(size)))
        return run_ranks(self.run, hosts, backend, Orders("train", **orders))

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run.events) if not kinds or event["kind"] in kinds]

    def pids(self) -> list[int]:
        return [pid for event in self.events("started") for pid in event["pids"]]

    def when_step(self, step: int, work: Callable[[list[int]], None]) -> threading.Thread:
        """Calls `work` with the process ids of the ranks as soon as that step is in the event log."""

        def wait() -> None:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                if any(event["step"] >= step for event in self.events("step")):
                    work(self.pids())
                    return
                time.sleep(0.01)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def left(self) -> list[psutil.Process]:
        """Processes of this run that still live."""
        return [each for each in psutil.process_iter(["cmdline"]) if str(self.run.path) in (each.info["cmdline"] or [])]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, monkeypatch)
    yield made
    left = made.left()
    for each in left:
        each.kill()
    assert not left, "no process is left"


def kill(rank: int) -> Callable[[list[int]], None]:
    return lambda pids: os.kill(pids[rank], signal.SIGKILL)


def test_a_killed_rank_ends_the_run_and_is_named(bench: Bench) -> None:
    """Rank 0, which cannot say so itself; of another rank it does (`test_the_last_finished_step_is_saved`)."""
    thread = bench.when_step(2, kill(0))
    end = bench.launch(steps=400)
    thread.join()
    last = bench.events()[-1]
    assert (end.kind, end.exit_code, last["kind"]) == ("failed", 2, "failed") and last["step"] >= 2
    assert "The process of rank 0, on this machine, was killed (signal 9)." in last["sentence"]


def test_the_last_one_goes_on_alone(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    thread = bench.when_step(3, kill(1))
    end = bench.launch(2, steps=12, goes_on=True)
    thread.join()
    assert end == LaunchEnd("finished", 0) and bench.events()[-1]["kind"] == "finished"
    assert [event["ranks"] for event in bench.events("started")] == [2, 1]
    assert "rank 0 has ended" in capfd.readouterr().out, "what rank 0 prints is the launcher's output"
    assert (bench.run.path / "ranks" / "rank-1.log").read_text() == "this worker works\n"


def test_a_stop_of_the_launcher_is_a_stop_of_rank_0(bench: Bench) -> None:
    thread = bench.when_step(2, lambda pids: os.kill(os.getpid(), signal.SIGTERM))
    end = bench.launch(steps=400)
    thread.join()
    assert (end.kind, end.exit_code) == ("stopped", 3) and bench.events()[-1]["kind"] == "stopped"


def test_a_rank_that_does_not_start_is_told_with_its_last_words(bench: Bench) -> None:
    end = bench.launch(crashes=1)
    assert end.exit_code == 2
    assert "ended before the run began: no such library" in bench.events()[-1]["sentence"]


needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")


@needs_mpi
@pytest.mark.proof
def test_three_ranks_of_mpirun_train_to_the_end(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.launch(3, backend="mpi") == LaunchEnd("finished", 0)
    out = capfd.readouterr().out
    assert "rank 0 has ended" in out and "works" not in out and "pid" not in out
    logs = [(bench.run.path / "ranks" / f"rank-{rank}.log").read_text() for rank in (1, 2)]
    assert logs == ["this worker works\n"] * 2


def test_a_machine_is_left_out_with_the_devices_that_lead_to_it() -> None:
    hosts = parse_hosts(
        [{"ssh": name, "rdma": [None if other == name else f"to_{other}" for other in "abc"]} for name in "abc"], "f"
    )
    left = hosts.without(1)
    assert [host.ssh for host in left.hosts] == ["a", "c"]
    assert [host.rdma for host in left.hosts] == [(None, "to_c"), ("to_a", None)]
    assert HostsFile((Host("a"), Host("b"))).without(1).hosts == (Host("a"),)


MAC = RankInfo(1, "mac-b", log="ranks/rank-1.log in the run folder")


class LosingParts:
    """Parts of one process that lose a machine during step `step`: before its updates or after the first of several."""

    def __init__(self, step: int, *, after_updates: int = 0) -> None:
        self.step, self.after_updates = step, after_updates
        self.kept: list[StepSnapshot] = []

    def load(self, *about: Any) -> RunContext:
        own = self

        class Parts(RunContext):
            def take_back(self) -> None:
                own.kept[-1].restore(self.learner)

            def learn(self, groups: Any, config: Any, poll: Callable[[], None]) -> dict[str, float]:
                learner = self.learner
                own.kept.append(StepSnapshot.of(learner, config))
                begun, update = learner.updates, learner.update

                def failing(*batch: Any, **about: Any) -> dict[str, float]:
                    if len(own.kept) == own.step and learner.updates - begun == own.after_updates:
                        raise LostRankError(MAC, "hung up: its process has ended")
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


@pytest.fixture(scope="module")
def whole(raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return small_run.trained(raw, RunFolder(tmp_path_factory.mktemp("whole") / "run"))


@pytest.mark.parametrize("after_updates", [0, 1])
def test_the_last_finished_step_is_saved(
    raw: dict[str, Any], whole: RunFolder, tmp_path: Path, after_updates: int
) -> None:
    run = RunFolder(tmp_path / "lost")
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
    mine, theirs = small_run.weights(run), small_run.weights(whole)
    assert small_run.same(mine, theirs), "as if nothing had happened, to the bit"


def test_a_sharded_model_is_saved_without_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that a lost rank has left hanging may hold all the work that mlx takes on at once."""
    arrays, file = on_host({"x": mx.arange(6.0).reshape(2, 3)}), tmp_path / "x.safetensors"
    with monkeypatch.context() as patches:
        for call in ("clear_cache", "contiguous", "eval", "synchronize"):
            patches.setattr(mx, call, lambda *_: pytest.fail("mlx is called"))
        save_arrays(file, arrays)
    assert np.array_equal(mx.load(str(file))["x"], [[0, 1, 2], [3, 4, 5]])


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


def test_an_ending_is_written_once_and_never_into_a_run_that_trains(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    lock = hold_lock(run)
    write_late_ending(run, "failed", "Killed.")
    assert not run.events.exists()
    os.close(lock)
    for sentence in ("Killed.", "Again."):
        write_late_ending(run, "failed", sentence)
    assert [event["sentence"] for event in read_events(run.events)] == ["Killed."]


WORKER = """
import time
from backend.distributed.ranks import leave_stops_to_leader
leave_stops_to_leader(0.5)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_rank_waits_for_rank_0_to_stop_the_run_and_ends_by_itself_where_it_does_not() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=backend_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        began = time.monotonic()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            worker.send_signal(number)
        _, said = worker.communicate(timeout=20)
        assert worker.returncode == STOPPED and time.monotonic() - began >= 0.45
        assert said == "a stop signal came, and rank 0 goes on; this process ends.\n"


QWEN3_32B = (
    {"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
)


def test_what_cannot_be_trained_divided_is_refused() -> None:
    refused: dict[str, Any] = {"parallelism": "pipeline", "dropout": 0.1, "modules_to_save": ["norm"]}
    refused |= {"reference_model_path": "another", "sync_ref_model": True, "use_speculative_decoding": True}
    for setting, value in (*refused.items(), ("train_type", "dora"), ("train_type", "full")):
        raw = {"model": "m", "data": "d", "hosts": "hosts.json", "parallelism": "tensor", "beta": 0.1, setting: value}
        (fault,) = [fault for fault in problems(raw) if fault.setting == setting]
        assert len(fault.sentence) <= 200
        assert not [fault for fault in problems(raw | {"hosts": ""}) if fault.setting == setting], "one machine can"


def test_the_estimate_is_that_of_one_machine(tmp_path: Path) -> None:
    shape = shape_from(QWEN3_32B)
    assert shape is not None
    embeddings = 2 * 151936 * 5120 * 2
    for machines in (2, 4):
        share = share_of(shape, machines)
        assert share.weights == pytest.approx((shape.weights - embeddings) / machines + embeddings, rel=0.01)
        assert (share.heads, share.kv_heads) == (64 // machines, 8 // machines)
        assert share.cached_numbers(1000) == shape.cached_numbers(1000) // machines
    (tmp_path / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    raw = {"model": "m", "data": "d", "hosts": str(tmp_path / "hosts.json")}
    whole, half = (
        estimate_run(parse(raw | {"parallelism": kind}), shape, 64 * GB, gpu=True).training.total
        for kind in ("data", "tensor")
    )
    assert 0.4 * whole < half < 0.7 * whole
