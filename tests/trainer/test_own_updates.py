"""An optimizer and a schedule that are objects of the program: `train(…, optimizer=…, schedule=…)`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import optimizers
from mlx.optimizers import Optimizer, schedulers

from backend import Callback, StopTraining, TrainedRun, UserError, resume, train
from backend.cli.train import resume as verb_resume
from backend.config.config import load, parse
from backend.runs.clone import clone
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.library.own_updates import GivenUpdates
from backend.trainer.preflight import check
from tests.support import small_run
from tests.support.cases import cases

ROWS = [{"prompt": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(8)]
QUICK = {key: value for key, value in small_run.QUICK.items() if not key.startswith("reward_")} | {"iters": 4}
RUN = {"model": "m", "data": "d"}


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 7) for text in completions]


def halves(update: int) -> float:
    return 1e-2 * 0.5**update


class Averaging(Optimizer):
    """SGD along a running mean, in plain Python between arrays: nothing that a compiled update could be traced from."""

    def __init__(self, learning_rate: float, memory: float = 0.5) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)
        self.memory = memory

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        state["mean"] = mx.zeros_like(parameter)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        assert int(self.step) >= 1  # which reads an array, as no traced code can
        state["mean"] = self.memory * state["mean"] + gradient
        return parameter - self.learning_rate * state["mean"]


@pytest.fixture
def trained(model: str, tmp_path: Path) -> Callable[..., TrainedRun]:
    def trained(settings: dict[str, Any] | None = None, **options: Any) -> TrainedRun:
        options = {"dataset": ROWS, "runs_dir": tmp_path / "runs", "reward_functions": [length]} | options
        return train(QUICK | {"model": model} | (settings or {}), **options)

    return trained


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.last = step

    def on_step(self, step: int, metrics: Any) -> None:
        if step == self.last:
            raise StopTraining


def weights(run: TrainedRun) -> bytes:
    return (run.folder / "adapters" / "adapters.safetensors").read_bytes()


def rates(run: TrainedRun) -> list[float]:
    return [step["learning_rate"] for step in run.metrics]


def test_a_resumed_run_has_the_weights_of_one_that_was_not_stopped(trained: Any) -> None:
    given: Any = {"optimizer": Averaging(1.0), "schedule": halves}
    whole = trained(**given)
    assert rates(whole) == [1e-2, 5e-3, 2.5e-3, 1.25e-3]
    assert int(given["optimizer"].step) == 0, "the program's own object stays as it was"
    stopped = trained(callbacks=[StopAfter(2)], **given)
    assert stopped.step == 2 and weights(stopped) != weights(whole)
    event_log = (stopped.folder / "events.jsonl").read_bytes()
    for others, sentence in (
        ({"optimizer": None}, "optimizer: .* with Averaging(memory=0.5) of a program; give it again: backend.resume"),
        ({"schedule": lambda n: 0.01}, "schedule: .* with halves: 0.01, 0.005 at updates 0, 1, and given is lambda: "),
        (
            {"optimizer": Averaging(1.0, 0.4)},
            "optimizer: .* with Averaging(memory=0.5), and given is Averaging(memory=0.4)",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(sentence).replace(r"\.\*", ".*")):
            resume(stopped.folder, reward_functions=[length], **given | others)
    assert (stopped.folder / "events.jsonl").read_bytes() == event_log, "a refused resume changes nothing"
    resumed = resume(stopped.folder, reward_functions=[length], **given)
    assert (resumed.step, weights(resumed)) == (4, weights(whole))


def test_mlxs_adamw_as_an_object_is_the_setting_adamw_bit_for_bit(trained: Any) -> None:
    adamw = optimizers.AdamW(1e-3, [0.9, 0.999], 1e-8, 0.01, bias_correction=True)
    run = trained({"iters": 2, "lr_schedule": "linear", "lr_warmup_steps": 1}, optimizer=adamw)
    named = trained({"iters": 2, "lr_schedule": "linear", "lr_warmup_steps": 1, "learning_rate": 1e-3})
    assert weights(run) == weights(named) and rates(run) == rates(named)
    config = load(run.folder / "config.yaml")
    assert (config.optimizer, config.learning_rate, config.lr_schedule) == ("own", 1e-3, "linear")
    assert config.own_optimizer == "AdamW(betas=[0.9, 0.999], eps=1e-08, bias_correction=True, weight_decay=0.01)"
    notes = [event["sentence"] for event in read_events(RunFolder(run.folder).events) if event["kind"] == "note"]
    assert f"The optimizer is {config.own_optimizer}, an object of the program that called train()." in notes


def test_what_is_no_program_refuses_the_run_and_says_how_to_go_on(trained: Any, tmp_path: Path) -> None:
    """The command line and the window, which starts it; a clone waits for its program as well."""
    of_a_file = {"reward_functions": ["r1_int"], "callbacks": [StopAfter(1)]}
    run = trained({"iters": 2, "reward_isolation": "thread"}, optimizer=Averaging, schedule=halves, **of_a_file)
    for folder in (
        run.folder,
        *(clone(RunFolder(run.folder), warm=warm, runs_dir=tmp_path / str(warm)).path for warm in (True, False)),
    ):
        event_log = (folder / "events.jsonl").read_bytes()
        with pytest.raises(UserError) as mistake:
            verb_resume.__wrapped__.__wrapped__(str(folder))
        assert "with backend.resume(run, optimizer=…)" in str(mistake.value)
        assert (folder / "events.jsonl").read_bytes() == event_log
    faults = check(load(run.folder / "config.yaml").model_dump())
    assert [fault.setting for fault in faults] == ["optimizer", "lr_schedule"]
    cold = tmp_path / "False" / f"{run.folder.name}-from-1"
    again = resume(cold, optimizer=Averaging, schedule=halves)
    assert again.step == 2 and rates(again) == [1e-2, 5e-3]


class Late(Averaging):
    """Makes a part of its state at the first update."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        state["late"] = gradient
        return super().apply_single(gradient, parameter, state)


class Numbered(Averaging):
    """Has a plain number in its state."""

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        super().init_single(parameter, state)
        state["number"] = 3


class Hidden(Averaging):
    """Depends on how often any object of its class was asked."""

    asked = itertools.count()

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        return super().apply_single(gradient * next(self.asked), parameter, state)


class Broken(Averaging):
    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        raise KeyError("momentum " * 50)


def used() -> Optimizer:
    optimizer = optimizers.Adam(1e-3)
    optimizer.init({"a": mx.zeros(3)})
    return optimizer


def unsteady(update: int, asked: Any = itertools.count()) -> float:
    return 1e-3 * next(asked)


INSIDE = optimizers.SGD(schedulers.cosine_decay(1e-3, 10))
NEITHER = "optimizer: An optimizer is one of mlx.optimizers, or gives one when called with a learning rate; "
REFUSED: list[tuple[Any, Any, str]] = [
    (3, None, f"{NEITHER}int is neither."),
    ("adamw", None, f"{NEITHER}str is neither."),
    (lambda rate: None, None, "optimizer: Called with a learning rate, it gave NoneType and no optimizer"),
    (lambda: None, None, "optimizer: Called with the learning rate 1e-05, it raised TypeError: "),
    (used(), None, "optimizer: This Adam has a state from elsewhere; a run begins with a new optimizer."),
    *(
        (kind, None, f"optimizer: An update of {kind.__name__} depends on more than")
        for kind in (Late, Numbered, Hidden)
    ),
    (Broken, None, "optimizer: An update of Broken raised KeyError: "),
    (INSIDE, halves, "schedule: The optimizer has several learning rates, none, or a schedule inside, so a schedule"),
    (None, 1e-3, "schedule: A schedule is called with the number of an update, from 0, and gives its learning rate"),
    (None, lambda update: "much", "schedule: lambda gave much for update 0; a learning rate is a finite number"),
    (None, lambda update: -update, "schedule: lambda gave -1 for update 1; a learning rate is a finite number"),
    (None, [1e-3].__getitem__, "schedule: __getitem__ raised IndexError: list index out of range"),
    (None, unsteady, "schedule: unsteady gives another rate when it is asked for update 0 again; it may depend on"),
]


@cases(("optimizer", "schedule", "sentence"), REFUSED)
def test_what_a_checkpoint_cannot_keep_is_refused(optimizer: Any, schedule: Any, sentence: str) -> None:
    config = parse(RUN | {"num_iterations": 1})
    with pytest.raises(UserError) as mistake:
        GivenUpdates(optimizer, schedule, config).settings(config)
    assert str(mistake.value).startswith(sentence) and len(mistake.value.faults[0].sentence) <= 200
