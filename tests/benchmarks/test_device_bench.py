"""`bench device`: the order of its tasks, its time limit, the death of a child, its file and tables, and a whole tiny bench."""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear
from typer.testing import CliRunner

from backend.__main__ import app
from backend.bench import about, command, plan, report, schema
from backend.bench import measures as random_policy
from backend.bench import workload as workload_module
from backend.bench.child import answer_to
from backend.bench.command import LEAST_PATIENCE_S, ModelProcesses, TimedRun, Unmeasured, impersonal, last_words
from backend.bench.measures import ModelBench, Side, rounds, same_model, seconds
from backend.bench.plan import Scale, tasks
from backend.bench.schema import (
    DeviceFile,
    GapNumbers,
    LaunchNumbers,
    LearningNumbers,
    Outcome,
    PrefillNumbers,
    Qwen3Shape,
    SamplingNumbers,
    SwitchNumbers,
    Task,
)
from backend.bench.switches import SWITCHES, Technique, switch_named
from backend.bench.workload import Workload, settings
from backend.engine import gathers, slot_cache
from backend.sampling import sampler
from backend.sampling.drawing import SamplingState
from backend.sampling.fused_model import FusedModel
from backend.sampling.kv_rows import WaitingQueue
from backend.sampling.outputs import CompletionBuffer
from backend.sampling.sampler import GREEDY
from backend.sampling.scheduler import Scheduler
from backend.trainer.memory.estimate import MemoryPlan
from backend.utils.child_process import ChildEnded
from backend.utils.errors import UserError
from backend.utils.machine import TREAT_CPU_AS

VERBS = app()
MICRO = Qwen3Shape(
    name="micro", hidden=64, layers=1, intermediate=128, heads=2, kv_heads=1, head_dim=32, vocab=256
)  # fmt: skip
MICRO_SCALE = Scale(
    "micro", (MICRO,), ("float32",), group_sizes=(8,), prompt=6, sampled=20, learned=8, prefilled=(2, 8),
    switches=(switch_named("adapters beside the weights"),), most_rounds=1,
)  # fmt: skip
PREFILL = PrefillNumbers(rounds=3, tokens_per_s=1234.5)


def task(shape: Qwen3Shape = MICRO, **changes: object) -> Task:
    common = {"shape": shape, "precision": "float32", "measure": "prefill", "prompt": 6, "completion": 20}
    return Task.model_validate(common | {"most_rounds": 1} | changes)


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scale", [plan.FULL, plan.SMALL, plan.QUICK, MICRO_SCALE], ids=lambda scale: scale.name)
def test_every_model_is_measured_in_every_way_and_nothing_twice(scale: Scale):
    planned = tasks(scale)
    assert len({task.model_dump_json() for task in planned}) == len(planned)
    for shape in scale.shapes:
        for precision in scale.precisions:
            own = [task for task in planned if task.shape == shape and task.precision == precision]
            sampled = {(task.group_size, task.filters) for task in own if task.measure == "sampling"}
            assert sampled == {(size, filters) for size in scale.group_sizes for filters in (True, False)}
            assert {task.kl for task in own if task.measure == "learning"} == {True, False}
            assert {"prefill", "gap"} <= {task.measure for task in own}
    assert [task.switch for task in planned if task.switch] == [
        switch.name for weights in ("4-bit", "float") for switch in scale.switches if switch.weights == weights
    ]


def test_the_most_telling_tasks_of_every_model_come_first():
    planned = tasks(plan.FULL)
    models = len(plan.FULL.shapes) * len(plan.FULL.precisions)
    first = planned[: 4 * models]
    assert len({task.model_name for task in first}) == models and not any(task.switch for task in first)
    assert planned[0].shape.name == "Qwen3-0.6B" and planned[0].filters and planned[0].group_size == 8
    switched = [i for i, task in enumerate(planned) if task.switch]
    assert switched == list(range(len(first), len(first) + len(plan.FULL.switches)))


def test_a_gpu_measures_the_shapes_of_real_models_and_a_cpu_small_ones():
    assert [shape.name for shape in plan.scale_for("gpu", quick=False).shapes] == [
        "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B",
    ]  # fmt: skip
    assert all(shape.hidden <= 256 for shape in plan.scale_for("cpu", quick=False).shapes)
    assert plan.scale_for("gpu", quick=True).precisions == ("4-bit", "bf16")


# ── the time limit ───────────────────────────────────────────────────────────────────────────────────────────────────


class FakeTaker:
    """Takes tasks in no time by a clock of its own, which each task moves on by the next of `seconds`."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.seconds, self.allowances, self.timeouts, self.stopped = 0.0, list(seconds), [], [], False

    def take(self, task: Task, allowance_s: float, timeout_s: float) -> schema.Numbers:
        self.allowances.append(allowance_s)
        self.timeouts.append(timeout_s)
        took = self.seconds.pop(0)
        self.now += min(took, timeout_s)
        if took > timeout_s:
            raise Unmeasured("Too slow.")
        return PREFILL

    def stop(self) -> None:
        self.stopped = True


def run(taker: FakeTaker, count: int, limit_s: float) -> TimedRun:
    timed_run = TimedRun([task() for _ in range(count)], limit_s, clock=lambda: taker.now)
    timed_run.run(taker, lambda task: None, lambda outcome: None)
    assert taker.stopped
    return timed_run


def test_tasks_share_the_time_that_is_left():
    taker = FakeTaker(10, 50, 0)
    timed_run = run(taker, 3, 120)
    assert taker.allowances == [40, 55, 60]
    assert timed_run.ended == "finished" and not timed_run.unmeasured
    assert [(outcome.at_s, outcome.took_s) for outcome in timed_run.outcomes] == [(0, 10), (10, 50), (60, 0)]


def test_the_bench_ends_at_its_limit_and_keeps_what_it_has():
    timed_run = run(FakeTaker(30, 30, 70, 1), 4, 100)
    assert timed_run.ended == "out of time" and timed_run.elapsed_s == 100
    assert [outcome.numbers for outcome in timed_run.outcomes] == [PREFILL, PREFILL]
    assert len(timed_run.unmeasured) == 2, "the task that the limit cut off is not blamed on the task"


def test_a_task_that_hangs_costs_some_of_the_time_and_not_all():
    taker = FakeTaker(10**6, 1, 1)
    timed_run = run(taker, 3, 600)
    assert taker.timeouts[0] == 600 and timed_run.ended == "out of time"  # 8 × 200 s would be more than there is
    taker = FakeTaker(10**6, *[1] * 199)
    timed_run = run(taker, 200, 600)
    assert taker.timeouts[0] == LEAST_PATIENCE_S
    assert (
        timed_run.outcomes[0].error == "Too slow." and len(timed_run.outcomes) == 200 and timed_run.ended == "finished"
    )


def test_ctrl_c_ends_the_bench_with_what_there_is():
    taker = FakeTaker(1, 1, 1)
    timed_run = TimedRun([task()] * 3, 100, clock=lambda: taker.now)

    def interrupt(outcome: Outcome) -> None:
        if len(timed_run.outcomes) == 2:
            raise KeyboardInterrupt

    timed_run.run(taker, lambda task: None, interrupt)
    assert timed_run.ended == "interrupted" and len(timed_run.outcomes) == 2 and len(timed_run.unmeasured) == 1
    assert taker.stopped


@pytest.mark.parametrize(("allowance_s", "expected"), [(0, 1), (5.9, 4), (6.1, 5), (100, 5)])
def test_rounds_as_many_as_the_allowance_lasts(allowance_s: float, expected: int):
    now = 0.0

    def take_a_second() -> float:
        nonlocal now
        now += 1
        return now

    taken = rounds(take_a_second, allowance_s, 5, clock=lambda: now)
    assert taken == [2 + i for i in range(expected)], "the first run only warms up"


def test_seconds_are_wall_time_on_a_gpu_and_on_a_cpu_those_of_its_threads(
    as_on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
):
    def sleep() -> None:
        time.sleep(0.1)

    assert seconds(sleep) < 0.09
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")
    assert seconds(sleep) >= 0.1


# ── child processes ──────────────────────────────────────────────────────────────────────────────────────────────────


def scripted(body: str) -> list[str]:
    """A child that runs `body` for every request; `number` counts its requests, `reply` answers."""
    return [
        sys.executable, "-c",
        "import json, os, sys, time\n"
        "def reply(**values): print(json.dumps(values), flush=True)\n"
        "for number, line in enumerate(sys.stdin):\n"
        "    task = json.loads(line)['task']\n" + "".join(f"    {line}\n" for line in body.splitlines()),
    ]  # fmt: skip


ANSWER = "reply(numbers={'measure': 'prefill', 'rounds': 1 + number, 'tokens_per_s': os.getpid()})"


def taken(processes: ModelProcesses, task: Task, timeout_s: float = 20) -> PrefillNumbers:
    numbers = processes.take(task, 1, timeout_s)
    assert isinstance(numbers, PrefillNumbers)
    return numbers


def test_a_model_keeps_its_process_and_the_next_model_gets_another():
    processes = ModelProcesses(scripted(ANSWER))
    first, second = taken(processes, task()), taken(processes, task(measure="gap"))
    assert first.tokens_per_s == second.tokens_per_s and (first.rounds, second.rounds) == (1, 2)
    assert taken(processes, task(precision="bf16")).rounds == 1
    processes.stop()


def test_a_child_that_dies_is_told_and_the_next_task_goes_on():
    processes = ModelProcesses(scripted(f"if task['prompts'] == 2: os._exit(3)\n{ANSWER}"))
    with pytest.raises(Unmeasured, match=r"^The process ended with exit code 3"):
        processes.take(task(prompts=2), 1, 20)
    assert taken(processes, task()).rounds == 1
    processes.stop()


def test_the_last_line_of_a_child_that_died_is_told_without_its_path():
    ended = ChildEnded(-9, f"Traceback\nOSError: no {Path.home()}/x.py\n")
    assert last_words(ended) == "The process ended with signal 9: OSError: no …."
    assert last_words(ChildEnded(1)) == "The process ended with exit code 1."


def test_after_an_error_of_the_device_the_next_task_has_a_fresh_process():
    errs = "if task['prompts'] == 2: reply(error='Metal: Impacting Interactivity.', is_usable=False); continue"
    processes = ModelProcesses(scripted(f"{errs}\n{ANSWER}"))
    with pytest.raises(Unmeasured, match="Impacting Interactivity"):
        processes.take(task(prompts=2), 1, 20)
    assert taken(processes, task()).rounds == 1
    processes.stop()


def test_a_child_that_hangs_is_killed():
    processes = ModelProcesses(scripted(f"if task['prompts'] == 2: time.sleep(60)\n{ANSWER}"))
    taken(processes, task())  # it has started
    with pytest.raises(Unmeasured, match="not done after 0 seconds"):
        processes.take(task(prompts=2), 1, 0.2)
    assert taken(processes, task()).rounds == 1
    processes.stop()


def test_an_error_of_the_gpu_is_explained_and_costs_the_process():
    class Failing:
        def take(self, task: Task, allowance_s: float) -> schema.Numbers:
            raise RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity (0000000e:kIOGPU…)")

    reply = answer_to(Failing(), {"task": task().model_dump(), "allowance_s": 1.0})
    assert reply["error"].startswith("macOS stopped the GPU's work because it held up the display")
    assert reply["is_usable"] is False


def test_a_mistake_is_told_and_costs_no_process():
    class Refusing:
        def take(self, task: Task, allowance_s: float) -> schema.Numbers:
            raise UserError("memory_limit", "It does not fit.")

    reply = answer_to(Refusing(), {"task": task().model_dump(), "allowance_s": 1.0})
    assert reply == {"error": "It does not fit.", "is_usable": True}


def test_sentences_hold_no_path():
    home = Path.home()
    for path in (f"{home}/a/b.py", "/opt/x-1.2/lib/y.so", "~/.cache/hub", "/Users/jane/Library/"):
        assert impersonal(f"cannot open {path}: gone.") == "cannot open …: gone."
    assert impersonal("8 × 512 tokens/s and 1/2.") == "8 × 512 tokens/s and 1/2."


def test_sentences_hold_no_name_even_with_a_space_in_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/Users/Jane Doe")
    assert impersonal("cannot open /Users/Jane Doe/models/x.py: gone.") == "cannot open …: gone."


# ── the random model ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("precision", ["4-bit", "bf16", "float32"])
def test_random_weights_keep_activations_at_the_size_of_a_trained_model(precision: schema.Precision):
    shape = MICRO.model_copy(update={"layers": 2, "hidden": 128, "vocab": 2048})
    about_model = random_policy.model_config(shape, precision)
    model = random_policy.random_model(about_model)
    logits = model(mx.arange(64)[None]).astype(mx.float32)
    assert 2 < float(logits.std()) < 4
    kinds = {array.dtype for _, array in tree_flatten(model.parameters())}  # pyright: ignore
    floats = mx.float32 if precision == "float32" else mx.bfloat16
    assert kinds == ({floats, mx.uint32} if precision == "4-bit" else {floats})
    if precision == "4-bit":
        packed = model.model.layers[0].mlp.up_proj.weight  # pyright: ignore
        nibbles = mx.concatenate([(packed >> shift) & 15 for shift in range(0, 32, 4)])
        counts = [int((nibbles == value).sum()) for value in range(16)]
        assert min(counts) > 0.8 * nibbles.size / 16, "all 32 bits are random"


def test_making_a_model_takes_no_float_copy_of_it():
    shape = MICRO.model_copy(update={"layers": 6, "hidden": 512, "intermediate": 2048, "vocab": 4096})
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = random_policy.random_model(random_policy.model_config(shape, "4-bit"))
    held, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
    # In floats of 16 bits it would be 3.5 times as much.
    assert peak < 2 * held
    del model


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def bench_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.mark.proof
@pytest.mark.parametrize(
    "switch",
    # One in four in CI: each takes a second or two.
    [pytest.param(switch, marks=pytest.mark.proof if i % 4 else ()) for i, switch in enumerate(SWITCHES)],
    ids=lambda switch: switch.name,
)
def test_every_switch_runs_on_and_off(bench_folder: Path, switch: Technique, monkeypatch: pytest.MonkeyPatch):
    """With the choices of a GPU, of which many are what is switched off."""
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")
    precision = "4-bit float32" if switch.weights == "4-bit" else "bf16"
    turns = task(
        measure="switch", switch=switch.name, precision=precision, prompts=switch.prompts, group_size=2,
        filters=switch.filters, completion=10,
    )  # fmt: skip
    numbers = ModelBench(bench_folder).take(turns, 0)
    assert isinstance(numbers, SwitchNumbers) and numbers.rounds == 1
    assert numbers.on_s > 0 and numbers.off_s > 0 and (numbers.on_gap_nats is not None) == switch.has_gap
    assert switch.meaning.endswith(".")


@pytest.mark.proof
def test_every_plain_way_is_another_way(bench_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """What a rollout and a learner are made of, with a GPU's choices and with each technique off."""
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")
    bench = ModelBench(bench_folder)
    bench.take(task(measure="prefill", precision="bf16", completion=1), 0)
    done = task(precision="bf16", completion=1)
    config = settings(done, bench_folder)
    assert bench.policy is not None and bench.kept is not None

    def choices() -> dict[str, object]:
        workload = Workload(done, config, MemoryPlan(8, 64, True, 64, 64, False), same_model(bench.policy))  # type: ignore
        rollout, learner = workload.rollout(), workload.learner()
        queue = WaitingQueue([[2, 3]], 1, rollout._prefill)
        scheduler = Scheduler(
            queue,
            CompletionBuffer(1, 1, None, [1], ()),
            np.zeros((1, 1)),
            SamplingState(GREEDY),
            print,
            1,
            rollout.row_costs,
        )
        return {
            "filters without a sort": sampler.largest,
            "steps queued ahead": scheduler.waits_for_inputs,
            "fused blocks": rollout.fused.packs_cache,
            "kernels of our own": FusedModel.use_kernels,
            "adapters beside the weights": [fused.is_merged for fused in rollout.fused.fused_linears],
            "transposed A": [fused.projection.stores_transposed for fused in rollout.fused.fused_linears],
            "full tiles of rows": rollout.row_costs,
            "adapters rounded alike": LoRALinear.__call__,
            "importance correction": learner.algorithm.correction,  # pyright: ignore
            "gathers in order": gathers.on_gpu(),
            "one kernel a cache write": slot_cache.on_gpu(),
            "buffers kept": workload_module.release_cached_buffers,
        }

    usual = choices()
    for name in usual:
        with switch_named(name).off():
            changed = [other for other, choice in choices().items() if choice != usual[other]]
        assert changed == [name]
    assert choices() == usual, "every context leaves things as they were"


def test_a_side_of_a_switch_runs_inside_its_context():
    inside, seen = [False], []

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    side = Side(off, lambda: seen.append(inside[0]), lambda: np.array([float(inside[0])]))
    took, _ = side.turn()
    assert seen == [True] and took >= 0 and side.mean_gap() == 1.0 and not inside[0]


def test_a_gap_is_measured_and_not_assumed(bench_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """float32 agrees; learning at another temperature than sampling does not."""
    bench, gap_task = ModelBench(bench_folder), task(measure="gap")
    numbers = bench.take(gap_task, 0)
    assert isinstance(numbers, GapNumbers) and numbers.tokens == 8 * 20
    assert numbers.mean_nats <= numbers.p99_nats <= numbers.max_nats < 1e-4
    shorter = bench.take(task(measure="gap", completion=5), 0)
    assert isinstance(shorter, GapNumbers) and shorter.tokens == 8 * 5, "the rollout is shared, its length is not"

    made = Workload.learner

    def other_temperature(workload: Workload) -> object:
        learner = made(workload)
        learner.forward.temperature = 1.6
        return learner

    monkeypatch.setattr(Workload, "learner", other_temperature)
    wrong = bench.take(gap_task, 0)
    assert isinstance(wrong, GapNumbers) and wrong.mean_nats > 0.1


def test_a_model_that_does_not_fit_is_told_before_it_is_made(bench_folder: Path, monkeypatch: pytest.MonkeyPatch):
    from backend.bench import measures

    monkeypatch.setattr(measures, "machine_bytes", lambda held, working_set: 10_000)
    monkeypatch.setattr(measures, "random_policy", lambda *_: pytest.fail("it was made"))
    with pytest.raises(UserError, match="does not fit"):
        ModelBench(bench_folder).take(task(), 0)


def test_a_whole_tiny_bench(tmp_path: Path):
    result, path = command.bench_device(5, MICRO_SCALE, about.this_machine(), tmp_path)
    assert schema.read(path) == result and path.name == result.file_name and list(tmp_path.iterdir()) == [path]
    assert result.ended == "finished" and not result.unmeasured and [o.error for o in result.outcomes if o.error] == []
    assert [outcome.task for outcome in result.outcomes] == tasks(MICRO_SCALE)
    for outcome in result.outcomes:
        numbers = outcome.numbers
        assert numbers is not None and numbers.measure == outcome.task.measure
        if isinstance(numbers, (SamplingNumbers, LearningNumbers)):
            assert numbers.tokens_per_s > 0 and 0.3 < numbers.peak_gb / numbers.estimate_gb < 1.5
    text = path.read_text("utf-8")
    personal = {platform.node(), getpass.getuser(), str(Path.home()), str(tmp_path)}
    assert not [word for word in personal if len(word) > 3 and word in text]


def test_the_file_is_whole_after_every_task(tmp_path: Path):
    measured: list[int] = []

    class Reader(FakeTaker):
        def take(self, task: Task, allowance_s: float, timeout_s: float) -> schema.Numbers:
            measured.extend(len(schema.read(path).outcomes) for path in tmp_path.glob("device-*.json"))
            return PREFILL

    command.bench_device(5, MICRO_SCALE, about.this_machine(), tmp_path, Reader())
    assert measured == list(range(1, len(tasks(MICRO_SCALE))))


# ── the file and the tables ──────────────────────────────────────────────────────────────────────────────────────────


def made_up(chip: str = "Apple M4 Max", computes_on: str = "gpu", ended: str = "finished") -> DeviceFile:
    common = {"rounds": 3, "peak_gb": 1.5, "estimate_gb": 2.0, "reductions": []}

    def outcome(numbers: schema.Numbers | None, error: str = "", **fields: Any) -> Outcome:
        done = task(measure=numbers.measure if numbers else "prefill", **fields)
        return Outcome(task=done, at_s=1.0, took_s=2.0, numbers=numbers, error=error)

    return DeviceFile.model_validate({
        "date": "2026-11-25",
        "machine": {"chip": chip, "cores": 16, "memory_gb": 64.0, "working_set_gb": 48.0, "system": "macOS 15.1",
                    "computes_on": computes_on},
        "versions": {"mlx": "0.32.4"}, "settings": {"minutes": 10, "scale": "full", "sampling": "temperature 0.8", "clock": "wall"},
        "ended": ended, "took_s": 300.0, "unmeasured": [],
        "outcomes": [
            outcome(PREFILL),
            outcome(SamplingNumbers(tokens_per_s=1500.4, step_ms=5.3, **common), filters=True, group_size=8),
            outcome(SamplingNumbers(tokens_per_s=2900, step_ms=11, **common), filters=True, group_size=32),
            outcome(SamplingNumbers(tokens_per_s=1800, step_ms=4.4, **common), group_size=8),
            outcome(LearningNumbers(step_s=1.25, tokens_per_s=1638, **common), kl=True),
            outcome(GapNumbers(tokens=99, mean_nats=0.011, p99_nats=0.12, max_nats=0.5)),
            outcome(LaunchNumbers(launches={"own": 900, "fused": 612, "kernels": 450}, by_kernel={"product": 450})),
            outcome(
                SwitchNumbers(rounds=2, on_s=0.5, off_s=0.75, on_peak_gb=1, off_peak_gb=1.25, on_gap_nats=0.03,
                              off_gap_nats=0.042), switch="merged adapters",
            ),
            outcome(None, "It does not fit.", precision="bf16"),
        ],
    })  # fmt: skip


def test_a_file_reads_back_as_it_was_written(tmp_path: Path):
    file = made_up()
    assert file.file_name == "device-apple-m4-max-2026-11-25.json"
    file.write(tmp_path / file.file_name)
    assert schema.read(tmp_path / file.file_name) == file
    assert [path.name for path in tmp_path.iterdir()] == [file.file_name], "nothing unfinished stays"


@pytest.mark.parametrize(
    "change", [lambda raw: raw.update(format=2), lambda raw: raw.update(user="x"), lambda raw: raw.pop("machine")]
)
def test_another_format_is_refused(tmp_path: Path, change: Callable[[dict[str, object]], object]):
    raw = json.loads(made_up().model_dump_json())
    change(raw)
    (tmp_path / "f.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="validation error"):
        schema.read(tmp_path / "f.json")


def test_tables_show_every_number_once():
    tables = {table.title: table.rows for table in report.tables(made_up())}
    model = "micro, float32"
    assert tables["Sampling, tokens/s"] == [
        [model, "default", "1500", "2900", "1234"],
        [model, "none", "1800", "–", "–"],
    ]
    assert tables["Learning"] == [[model, "8 × 20", "on", "1.25", "1638"]]
    assert tables["Memory"] == [
        [model, "sampling, G 32, default filters", "1.5", "2", "0.75", "–"],
        [model, "learning, with KL", "1.5", "2", "0.75", "–"],
    ]
    assert tables["Sampler against learner, and launches"] == [[model, "0.011", "0.12", "0.5", "900 / 612 / 450"]]
    assert tables["Switches"] == [["merged adapters", model, "0.5", "0.75", "1.5", "250", "0.03", "0.042", "2"]]
    assert tables["Not measured"] == [["micro, bf16: prefill", "It does not fit."]]


def test_a_line_for_every_outcome():
    lines = [report.line(outcome) for outcome in made_up().outcomes]
    assert lines[1].startswith("micro, float32: sampling, G 8, default filters  1500 tokens/s, 5.3 ms a step")
    assert "off takes 1.5 times as long; gap on 0.03 nats, off 0.042" in lines[-2]
    assert lines[-1] == "micro, bf16: prefill  It does not fit."


def test_a_report_has_a_section_for_each_file_and_gpus_first():
    text = report.markdown([made_up("AMD", "cpu"), made_up(), made_up("Apple M1")])
    titles = [line for line in text.splitlines() if line.startswith("### ")]
    assert titles == ["### Apple M1", "### Apple M4 Max", "### AMD, CPU only"]
    assert "*2026-11-25: 16 cores, 64 GB (working set 48 GB), macOS 15.1;" in text
    assert report.markdown([]) == "No device has been measured yet.\n"


# ── the verbs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(VERBS, ["bench", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_verb_report_prints_markdown(tmp_path: Path):
    made_up().write(tmp_path / "a.json")
    assert call("report", tmp_path / "a.json") == (0, report.markdown([made_up()]) + "\n", "")


def test_the_verb_report_refuses_other_files_in_a_sentence(tmp_path: Path):
    (tmp_path / "a.json").write_text("{}")
    code, _, stderr = call("report", tmp_path / "a.json")
    assert code == 2 and "is not a file that bench device of this version wrote." in stderr
    code, _, stderr = call("report", tmp_path / "none.json")
    assert code == 2 and "cannot be read: No such file or directory." in stderr


@pytest.mark.parametrize("ended", ["finished", "interrupted"])
def test_the_verb_device_shows_its_tables_and_says_where_the_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str
):
    asked: list[object] = []

    def bench_device(minutes: float, scale: Scale, device: schema.Machine, folder: Path) -> tuple[DeviceFile, Path]:
        asked.extend((minutes, scale.name, folder))
        return made_up(ended=ended), folder / "f.json"

    monkeypatch.setattr(command, "bench_device", bench_device)
    code, stdout, _ = call("device", "--quick", "--out", tmp_path)
    assert asked == [1.0, "quick", tmp_path]
    assert code == (3 if ended == "interrupted" else 0)
    assert "Sampling, tokens/s" in stdout and f"Written: {tmp_path / 'f.json'}." in stdout


def test_the_verb_device_refuses_a_folder_that_is_not_there(tmp_path: Path):
    code, _, stderr = call("device", "--out", tmp_path / "none")
    assert code == 2 and "There is no folder" in stderr
