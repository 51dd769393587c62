"""Runs of a sweep compute the same as alone, share one base in memory, and outlive its stops, kills and GPU errors."""

import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from backend.config.config import parse
from backend.models.policy import load_base
from backend.runs import run_sweep as sweep_module
from backend.runs.archive import WorkClock, summary
from backend.runs.events import read_events
from backend.runs.run_folder import LOCK_VARIABLE, RunFolder, hold_lock, inherited_lock
from backend.runs.run_sweep import Sweep, SweepInputs
from backend.runs.sweep import SweepPlan, parse_sweep
from backend.runs.sweep_results import SweepFolder, SweepResults, make_runs, make_sweep, read_results, write_results
from backend.trainer.control import STOP_SIGNALS
from backend.trainer.run_context import RunContext, SharedResources, load_context
from backend.trainer.trainer import RESTART, Ending
from backend.training.learner import Learner
from backend.utils.command import backend_command, backend_environment
from tests.support import failing_gpu, small_run
from tests.support.random_models import tiny_model
from tests.support.verbs import run_ok

FOUR: dict[str, Any] = {"learning_rate": [1e-3, 1e-2], "rank": [2, 4]}  # four configurations, two shapes of adapters
TWO: dict[str, Any] = {"rank": [2, 4]}  # one of each shape


def base(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings that use every kind of state: moments, dropout, a reference, held-out evaluations, checkpoints."""
    whole = (
        {"iters": 3, "batch_size": 2, "group_size": 4, "num_iterations": 2, "beta": 0.05, "epsilon": 1e-3}
        | {"dropout": 0.1, "lr_schedule": "cosine", "lr_warmup_steps": 2, "lr_final": 0.0, "save_every": 2}
        | {"steps_per_eval": 2, "validation_split": 0.25, "max_completion_length": 4}
    )
    return small_run.settings_for(folder, **whole | small_run.low_half(folder) | changes)


def sweep_of(folder: Path, over: dict[str, Any], **more: Any) -> tuple[SweepPlan, SweepFolder]:
    """A sweep whose folders are made."""
    plan = parse_sweep({"name": "s", "base": base(folder), "over": over, "round_steps": 2} | more)
    made = make_sweep(plan, folder / "swept")
    make_runs(plan, made)
    return plan, made


def train(plan: SweepPlan, folder: SweepFolder, **more: Any) -> tuple[Ending, SweepResults]:
    ending = Sweep(plan, folder, SweepInputs(), command="a test", **more).run(
        inherited_lock(folder) or hold_lock(folder)
    )
    results = read_results(folder)
    assert results is not None
    return ending, results


def worked(run: RunFolder) -> float:
    clock = WorkClock()
    for event in read_events(run.events):
        clock.take(event)
    return clock.seconds


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="float32"),
        pytest.param({"dtype": "bfloat16"}, id="bfloat16", marks=pytest.mark.proof),
        pytest.param({"quantization": "4"}, id="4-bit", marks=pytest.mark.proof),
    ],
)
def test_four_runs_in_turns_equal_four_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = base(tmp_path, **changes)
    if "quantization" in changes:  # groups of 64 weights
        settings["model"] = str(tiny_model(tmp_path / "wide", hidden=64))
    plan, folder = sweep_of(tmp_path, FOUR, base=settings)
    began = time.monotonic()
    ending, results = train(plan, folder)
    took = time.monotonic() - began
    assert ending.exit_code == 0, ending.sentence
    assert sum(worked(folder.run(member.run)) for member in plan.members()) < took, "without the turns of the others"
    assert results.notes == ["4 runs share one base model in memory."]
    for member in plan.members()[::3]:  # of another learning rate and another rank
        alone = RunFolder(tmp_path / "alone" / member.run)
        assert small_run.train_here(plan.raw_settings(member), alone).kind == "finished"
        small_run.assert_same_run(folder.run(member.run), alone)
    weights = [small_run.weights(folder.run(member.run)) for member in plan.members()]
    assert any(not np.array_equal(weights[0][name], weights[2][name]) for name in weights[0])  # of two learning rates


@pytest.mark.parametrize(
    "changes",
    [pytest.param({"dtype": "bfloat16"}, id="packed"), pytest.param({}, id="merged", marks=pytest.mark.proof)],
)
def test_one_base_is_in_memory_however_many_runs_there_are(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = base(tmp_path, **changes) | {"model": str(tiny_model(tmp_path / "large", hidden=320, layers=1))}
    plan = parse_sweep({"name": "s", "base": settings, "over": {"learning_rate": [1e-3, 1e-2, 2e-2]}})
    configs = [parse(plan.raw_settings(member)) for member in plan.members()]

    def memory() -> int:
        gc.collect()
        mx.synchronize()  # the thread that computes releases its last inputs after it has said that it is done
        return mx.get_active_memory()

    before = memory()
    shared = SharedResources(load_base(configs[0]), (configs[0].dtype, ""))
    parts: list[RunContext] = []
    after: list[int] = []
    for config in configs:
        parts.append(load_context(config, lambda sentence: None, shared=shared))
        mx.eval(parts[-1].learner.optimizer.state)
        after.append(memory() - before)
    assert shared.base is not None
    own = sum(x.nbytes for _, x in tree_flatten([parts[0].policy.parameters(), parts[0].learner.optimizer.state]))
    weights = sum(x.nbytes for _, x in tree_flatten(shared.base.model.parameters()))
    assert weights > 10 * own
    assert after[0] < 1.1 * (weights + own)
    # Each further run costs its adapters and optimizer; with a GPU's choices the adapters have a packed form besides.
    assert 0.8 * 2 * own < after[-1] - after[0] < 2 * 2 * own


@pytest.mark.proof
def test_halving_gives_up_the_runs_of_the_weaker_configurations(tmp_path: Path) -> None:
    over = {"learning_rate": [1e-6, 1e-2, 1e-3, 1e-5]}
    settings = base(tmp_path, iters=6)
    plan, folder = sweep_of(tmp_path, over, base=settings, seeds=[0, 1], halving={"first_rung": 2, "keep": 0.5})
    told: list[str] = []
    ending, results = train(plan, folder, echo=lambda results: told.append(results.state))
    assert ending.exit_code == 0, ending.sentence
    assert [(rung.step, len(rung.kept)) for rung in results.rungs] == [(2, 2), (4, 1)]
    assert results.winner is not None and results.rungs[-1].kept == [results.winner.number]
    states = sorted(each.state for each in results.configurations)
    assert states == ["finished", "given up", "given up", "given up"]
    for each in results.configurations:
        steps = {small_run.steps(folder.run(run.run))[-1] for run in each.runs}
        assert steps == {each.step} and len(each.runs) == 2
        last = list(read_events(folder.run(each.runs[0].run).events))[-1]
        assert last["kind"] == ("finished" if each is results.winner else "stopped")
        assert each is results.winner or f"Stopped at step {each.step}" in last["sentence"]
        assert each.completions == 2 * (each.step * 8 + (each.step // 2 + 1) * 8)  # 2 × 4 a step, 2 × 4 an evaluation
    first: dict[int, float] = {}
    for each in results.configurations:
        evals = [event for run in each.runs for event in small_run.events(folder.run(run.run), "eval")]
        first[each.number] = np.mean([event["metrics"]["reward"] for event in evals if event["step"] == 2])
    assert set(results.rungs[0].kept) == set(sorted(first, key=first.__getitem__)[2:])


@pytest.mark.parametrize("held_out", [True, False])
def test_the_best_learning_rate_wins_with_and_without_held_out_rows(held_out: bool, tmp_path: Path) -> None:
    """As the verb runs it: by held-out reward, else by the training reward, which it says before it starts."""
    settings = base(tmp_path, iters=4, validation_split=0.25 if held_out else 0.0)
    raw = {"base": settings, "over": {"learning_rate": [1e-6, 3e-2]}, "halving": {"first_rung": 2, "keep": 0.5}}
    file = small_run.write_config(tmp_path / "rates.yaml", raw)
    measure = "held-out reward" if held_out else "training reward over the last quarter of steps"
    assert f"Ranked by {measure}." in run_ok("sweep", str(file), "--plan").stdout
    done = run_ok("sweep", str(file), "--runs-dir", str(tmp_path / "runs"))
    assert ("no held-out rows" in done.stderr) is not held_out
    assert done.stdout.count("stopped early") == 2 and "given up" not in done.stdout, "as in the window"
    results = read_results(SweepFolder(tmp_path / "runs" / "sweeps" / "rates"))
    assert results is not None and results.measure == measure and results.rungs[0].kept == [2]
    assert f"is 2 (Learning Rate 0.03): {measure}" in results.sentence
    stopped, won = (each.runs[0] for each in results.configurations)
    assert (stopped.state, stopped.step) == ("given up", 2) and f"by {measure}" in stopped.sentence
    if not held_out:
        steps = small_run.events(RunFolder(tmp_path / "runs" / won.run), "step")
        assert won.value == pytest.approx(np.mean([event["metrics"]["reward"] for event in steps[-1:]]))


def test_a_rung_without_a_metric_stops_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sweep_module, "measured", lambda *_: None)
    plan, folder = sweep_of(tmp_path, TWO, halving={"first_rung": 2, "keep": 0.5})
    _, results = train(plan, folder)
    assert [each.state for each in results.configurations] == [
        "finished"
    ] * 2 and "No run was stopped" in results.notes[-1]


@pytest.fixture
def full_sweep(tmp_path: Path) -> tuple[SweepPlan, SweepFolder]:
    """Two full fine-tunings, one of which is parked while the other trains."""
    settings = base(tmp_path, train_type="full", steps_per_eval=2, save_every=4, iters=4, dropout=0.0)
    halving = {"first_rung": 2, "keep": 0.5}
    return sweep_of(tmp_path, {"learning_rate": [1e-4, 1e-3]}, base=settings, halving=halving)


def test_full_runs_that_are_parked_when_the_sweep_stops_can_go_on(full_sweep: tuple[SweepPlan, SweepFolder]) -> None:
    plan, folder = full_sweep
    stopped, results = train(plan, folder, echo=_stop_after(folder, 4))
    assert stopped.kind == "stopped"
    assert "failed" not in [run.state for each in results.configurations for run in each.runs]
    assert train(plan, folder)[0].kind == "finished"


def test_full_runs_that_are_given_up_while_parked_keep_their_models(full_sweep: tuple[SweepPlan, SweepFolder]) -> None:
    plan, folder = full_sweep
    states = list[str]()

    def look(results: SweepResults) -> None:
        first, second = (each.runs[0] for each in results.configurations)
        if second.step == 2 and not results.rungs:
            states.append(summary(folder.run(first.run)).state)

    ending, results = train(plan, folder, echo=look)
    assert ending.kind == "finished", ending.sentence
    assert set(states) == {"queued"}, "the list of runs takes a parked run for one that trains"
    runs = {each.runs[0].state: each.runs[0] for each in results.configurations}
    run, best = folder.run(runs["given up"].run), runs["finished"]
    events = list(read_events(run.events))
    assert events[-1]["kind"] == "stopped" and (run.model / "config.json").is_file()
    assert [event["phase"] for event in events if "phase" in event][-2:] == ["saving", "waiting"], "it does not train"
    # As if the sweep had been killed when this run's event log had ended.
    said, best.state, best.sentence = best.sentence, "training", ""
    write_results(folder, results)
    _, again = train(plan, folder)
    assert (again.run(best.run).state, again.run(best.run).sentence) == ("finished", said) and said


def test_a_run_that_fails_costs_its_configuration_the_sweep_and_nothing_else(tmp_path: Path) -> None:
    """A search over learning rates finds sooner or later one at which the gradient becomes infinite."""
    over = {"reward_functions": [["low_half"], ["breaks"]]}
    settings = base(tmp_path)
    path = Path(settings["reward_functions_file"])
    breaks = "def breaks(prompts, completions, answer, types=None):\n    raise ValueError"
    path.write_text(f'{path.read_text()}\n@register_reward_function("breaks")\n{breaks}\n')
    settings.pop("reward_functions")
    plan, folder = sweep_of(tmp_path, over, base=settings | {"reward_functions": ["low_half"]})
    ending, results = train(plan, folder)
    assert ending.exit_code == 0 and results.winner is not None and results.winner.number == 1
    failed = results.configurations[1]
    assert failed.state == "failed" and failed.value is None and "breaks" in failed.runs[0].sentence


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    halving = {"first_rung": 2, "keep": 0.5}
    settings = base(tmp_path, iters=4)
    plan, folder = sweep_of(tmp_path, TWO, base=settings, halving=halving)
    stopped, results = train(plan, folder, echo=_stop_after(folder, 5))
    assert stopped.kind == "stopped" and stopped.exit_code == 3 and results.state == "stopped"
    assert {run.state for each in results.configurations for run in each.runs} == {"stopped"}
    for member in plan.members():
        assert small_run.kinds(folder.run(member.run))[-1] == "stopped"
        assert small_run.steps(folder.run(member.run)) == [1, 2], "with moments to keep"
    ending, results = train(plan, folder)
    assert ending.exit_code == 0, ending.sentence
    other = make_sweep(plan, tmp_path / "uninterrupted")
    make_runs(plan, other)
    _, expected = train(plan, other)
    assert [rung.kept for rung in results.rungs] == [rung.kept for rung in expected.rungs]
    for member in plan.members():
        small_run.assert_same_run(folder.run(member.run), other.run(member.run))
    assert [each.value for each in results.ranked] == [each.value for each in expected.ranked]


@pytest.mark.usefixtures("signal_handlers_restored")
@pytest.mark.parametrize("during", ["the base", "an update"])
def test_ctrl_c_while_mlx_compiles_stops_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, during: str) -> None:
    """A terminal sends SIGINT to mlx's compiler too, and mlx then finds no library to load."""
    plan, folder = sweep_of(tmp_path, TWO)

    def interrupted(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("Could not load C++ shared library kernel.so: cannot open shared object file")

    owner, name = (sweep_module, "load_base") if during == "the base" else (Learner, "_apply")
    monkeypatch.setattr(owner, name, interrupted)
    ending, results = train(plan, folder)
    assert (ending.kind, ending.exit_code, results.state) == ("stopped", 3, "stopped")
    first = results.run(plan.members()[0].run)
    assert (first.state, first.step) == ("waiting" if during == "the base" else "stopped", 0)
    assert "SIGINT was received" in (ending.sentence if during == "the base" else first.sentence)


def _stop_after(folder: SweepFolder, reports: int) -> Callable[[SweepResults], None]:
    """Asks the sweep to stop at its `reports`th report."""
    seen: list[int] = []

    def echo(results: SweepResults) -> None:
        seen.append(1)
        if len(seen) == reports:
            folder.say("stop")

    return echo


@pytest.mark.proof
def test_a_killed_sweep_goes_on_with_the_verb(tmp_path: Path) -> None:
    """SIGKILL between any two instructions of a process of its own; then `resume`, as a user types it."""
    settings = base(tmp_path, iters=400, save_every=4, steps_per_eval=100)
    file = small_run.write_config(tmp_path / "kill.yaml", {"base": settings, "over": {"learning_rate": [1e-3, 1e-2]}})
    runs = ("--runs-dir", str(tmp_path / "runs"))
    command, quiet = backend_command("sweep", str(file), *runs), subprocess.DEVNULL
    process = subprocess.Popen(command, env=backend_environment(), stdout=quiet, stderr=quiet)
    folder = SweepFolder(tmp_path / "runs" / "sweeps" / "kill")
    _wait_for(lambda: len(small_run.steps(folder.run("kill-2-seed0"))) > 12)
    process.kill()
    process.wait()
    assert not folder.is_locked() and read_results(folder) is not None
    resume, environment = backend_command("resume", "kill", *runs), backend_environment()
    going_on = subprocess.Popen(resume, env=environment, stdout=subprocess.PIPE, text=True)
    _wait_for(lambda: len(small_run.steps(folder.run("kill-2-seed0"))) > 24)
    going_on.send_signal(signal.SIGINT)
    output, _ = going_on.communicate(timeout=100)
    assert going_on.returncode == 3, output
    for name in ("kill-1-seed0", "kill-2-seed0"):
        steps = small_run.steps(folder.run(name))
        assert steps == list(range(1, len(steps) + 1)) and small_run.kinds(folder.run(name))[-1] == "stopped"
    results = read_results(folder)
    assert results is not None and results.state == "stopped" and "SIGINT" in results.sentence


def test_a_gpu_error_of_one_run_restarts_the_sweep(tmp_path: Path) -> None:
    """The GPU refuses all work of a process that has caused an error, so every run goes on in the next process."""
    plan, folder = sweep_of(tmp_path, {"learning_rate": [1e-3, 1e-2]})
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            failing_gpu.install(monkeypatch, [["sampling", 3, failing_gpu.OUT_OF_MEMORY]])
            ending, results = train(plan, folder, may_restart=True)
        assert ending.kind == RESTART and results.state == "running"
        assert folder.is_locked() and "stopped" not in small_run.kinds(folder.run("s-2-seed0"))
        ending, results = train(plan, folder, may_restart=True)  # as the next program
        assert ending.kind == "finished", ending.sentence
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if LOCK_VARIABLE in os.environ:
            os.close(int(os.environ.pop(LOCK_VARIABLE)))
    for member in plan.members():
        assert small_run.steps(folder.run(member.run)) == [1, 2, 3]


def _wait_for(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 200
    while not is_true():
        assert time.monotonic() < until, "waited for minutes"
        time.sleep(0.05)
