"""`from backend import train`: a program's functions, rows, callbacks, optimizer, schedule, in a run like any other."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import optimizers
from mlx.optimizers import Optimizer, schedulers

import backend
from backend import Callback, RunFailed, StopTraining, TrainedRun, UserError, resume, train
from backend.cli.train import resume as verb_resume
from backend.config.config import load, parse
from backend.runs.clone import clone
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.library.own_engine import given_updates
from backend.trl import GRPOConfig, GRPOTrainer
from backend.trl.rewards import accuracy_reward, get_cosine_scaled_reward, get_repetition_penalty_reward
from tests.support import small_run
from tests.support.cases import cases
from tests.support.tool_tokenizers import TEMPLATES

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"What is {n} plus {n}?", "answer": str(2 * n), "level": n} for n in range(8)]
QUICK = {key: value for key, value in small_run.QUICK.items() if not key.startswith("reward_")}
QUICK |= {"iters": 2, "reward_isolation": "thread"}


@pytest.fixture
def trained(model: str, tmp_path: Path) -> Iterator[Callable[..., TrainedRun]]:
    """`train` of a quick run, in a folder of runs of its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def trained(settings: dict[str, Any] | None = None, **options: Any) -> TrainedRun:
        options = {"dataset": ROWS, "runs_dir": tmp_path / "runs"} | options
        return train(QUICK | {"model": model} | (settings or {}), **options)

    yield trained
    assert {number: signal.getsignal(number) for number in handlers} == handlers


class Told(Callback):
    """Keeps what it is told; `stop` is called with every step."""

    def __init__(self, stop: Callable[[int], None] = lambda step: None) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.stop = stop

    def on_step(self, step: int, metrics: Any) -> None:
        self.events.append(("step", step))
        assert metrics["loss"] is not None
        self.stop(step)

    def on_evaluation(self, step: int, metrics: Any, split: str) -> None:
        self.events.append(("eval", step, split))

    def on_save(self, step: int, checkpoint: Path) -> None:
        self.events.append(("save", step, (checkpoint / "state.json").is_file()))

    def on_end(self, run: TrainedRun) -> None:
        self.events.append(("end", run.ending, run.step))


class Game:
    """An environment that scores by itself."""

    def reset(self, level: int, **row: Any) -> str:
        self.level = level
        return f" Guess below {level + 1}."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: A guess.
        """
        return "right" if number == self.level else "wrong"

    def get_reward(self) -> float:
        return float(self.level)


def test_tools_and_environments_of_the_program(trained: Any, model: str, tmp_path: Path) -> None:
    def now() -> str:
        """Tell the time."""
        return "noon"

    for file in Path(model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    settings = {"model": str(tmp_path), "max_seq_length": 1000}
    run = trained(
        settings, tools=[now], environment_factory={"game": Game}, dataset=[{**ROWS[3], "environment": "game"}]
    )
    assert run.metrics[0]["rewards/Game/mean"] == 3.0 and run.metrics[0]["tools/call_frequency"] == 0.0
    written = load(run.folder / "config.yaml")
    assert (written.tools, written.environment) == (["now"], {"game": f"{run.folder / 'own_tools.py'}::Game"})
    with pytest.raises(UserError, match="with objects of a program, and now, game is not given now"):
        resume(run.folder, changes={"iters": 3})
    resumed = resume(run.folder, tools=[now], environment_factory={"game": Game}, changes={"iters": 3})
    assert (resumed.ending, resumed.step) == ("finished", 3)


def test_functions_rows_and_callbacks_of_the_program(trained: Any, tmp_path: Path) -> None:
    seen: list[Any] = []
    told = Told()

    def share(completions: list[str], level: list[int], answer: list[str], **columns: Any) -> list[float]:
        seen.append((level, answer, threading.current_thread() is threading.main_thread()))
        return [len(text) / 100 for text in completions]

    functions = ["r1_int", share, lambda completions, **_: [0.5] * len(completions)]
    given = {"dataset": {"train": ROWS, "validation": ROWS[:1]}, "callbacks": [told], "name": "mine"}
    run = trained({"steps_per_eval": 1, "val_batches": 1}, reward_functions=functions, **given)
    assert (run.folder, run.ending, run.step) == (tmp_path / "runs" / "mine", "finished", 2)
    assert run.sentence == "Finished after 2 steps."
    assert [step["step"] for step in run.metrics] == [1, 2]
    assert run.metrics[0]["rewards/lambda_1/mean"] == 0.5 and "rewards/share/mean" in run.metrics[0]
    assert run.evaluations[0].items() >= {"step": 0, "split": "valid"}.items()
    of_steps = [event for step in (1, 2) for event in (("step", step), ("eval", step, "valid"))]
    assert told.events == [("eval", 0, "valid"), *of_steps, ("save", 2, True), ("end", "finished", 2)]
    level, answer, is_main = seen[0]
    assert answer == [str(2 * n) for n in level] and not is_main  # in a thread with a time limit
    assert load(run.folder / "config.yaml").data == str(run.folder / "data")
    assert any("call" in note for note in small_run.notes(RunFolder(run.folder)))


def test_a_callback_stops_the_run_and_it_is_resumed_with_its_functions(trained: Any) -> None:
    def stop_at_2(step: int) -> None:
        if step == 2:
            raise StopTraining("two are enough")

    def constant(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    run = trained({"iters": 4}, reward_functions=[constant], callbacks=[Told(stop_at_2)])
    assert (run.ending, run.step) == ("stopped", 2)
    assert run.sentence == "Stopped at step 2 because two are enough; everything is saved."

    with pytest.raises(
        UserError, match="reward_functions: The run was trained with functions of a program, and constant is not"
    ):
        resume(run.folder)
    told = Told()
    resumed = resume(run.folder, reward_functions=[constant], callbacks=[told], changes={"learning_rate": 2e-5})
    assert (resumed.ending, resumed.step) == ("finished", 4)
    assert told.events == [("step", 3), ("step", 4), ("save", 4, True), ("end", "finished", 4)]
    assert [step["step"] for step in resumed.metrics] == [1, 2, 3, 4]
    with pytest.raises(UserError, match="has finished; give it more steps"):
        resume(run.folder, reward_functions=[constant])


def test_a_callback_that_raises_ends_the_run_saved_with_its_name(trained: Any) -> None:
    def fail(step: int) -> None:
        raise KeyError("loss")

    with pytest.raises(
        RunFailed, match=r"callbacks: on_step of Told raised KeyError: 'loss' \(test_library.py, line \d+\)"
    ) as failed:
        trained(reward_functions=["r1_int"], callbacks=[Told(fail)])
    run = failed.value.run
    assert (run.ending, run.step) == ("failed", 1) and RunFolder(run.folder).has_event_log
    assert (run.folder / "checkpoints" / "000001" / "state.json").is_file()
    assert len(str(failed.value)) <= 200


@pytest.mark.parametrize(
    ("settings", "options", "sentence"),
    [
        ({"iterz": 3}, {}, "iterz: There is no setting iterz. Did you mean iters?"),
        ({}, {"reward_functions": [3]}, "reward_functions: A reward function is a name or can be called; int is"),
        ({}, {"reward_functions": ["nothing"]}, "reward_functions: There is no reward function nothing"),
        ({}, {"reward_functions": [" "]}, "reward_functions: A reward function is a name or can be called"),
        ({}, {"reward_funcs": ["r1_int"]}, "reward_funcs: reward_funcs is TRL's name for reward_functions"),
        ({}, {"dataset": []}, "data: The dataset"),
        ({}, {"dataset": "rows.jsonl"}, "dataset: Rows are an iterable of mappings, not str"),
        ({}, {"dataset": {"trian": ROWS}}, "dataset: A dataset has the splits train, valid and test, not trian."),
        ({}, {"dataset": [*ROWS, "row"]}, "dataset: Row 9 of train is str, not a mapping of columns."),
        ({}, {"dataset": [{"prompt": "p", "when": object()}]}, "dataset: The column when in row 1 of train"),
        ({}, {"dataset": [{"prompt": "p", "image": object()}]}, "data: The column image of row 1 of train"),
        ({"prompt_feature": "question"}, {}, "prompt_feature: There is no column question"),
        ({}, {"callbacks": [print]}, "callbacks: builtin_function_or_method has none of on_step"),
    ],
)
def test_mistakes_leave_nothing_behind(
    trained: Any, tmp_path: Path, settings: dict[str, Any], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as mistake:
        trained(settings, **{"reward_functions": ["r1_int"]} | options)
    assert str(mistake.value).startswith(sentence) and len(str(mistake.value)) <= 200
    assert not [*tmp_path.glob("runs/*")]


def test_it_trains_in_a_thread_and_leaves_signals_alone(trained: Any) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), list[Any]()
    told = Told(lambda step: seen.append(signal.getsignal(signal.SIGTERM)))
    options = {"reward_functions": ["r1_int"], "callbacks": [told]}
    thread = threading.Thread(target=lambda: seen.append(trained({"reward_isolation": "process"}, **options)))
    thread.start()
    thread.join()
    assert seen[0] is before and isinstance(seen[-1], TrainedRun) and seen[-1].ending == "finished"


def test_ctrl_c_saves_and_train_returns(trained: Any) -> None:
    interrupt = Told(lambda step: os.kill(os.getpid(), signal.SIGINT))
    run = trained({"iters": 50}, reward_functions=["r1_int"], callbacks=[interrupt])
    assert run.ending == "stopped" and run.sentence.startswith("Stopped at step 1 because SIGINT was received")
    assert (run.folder / "checkpoints" / "000001").is_dir()


def test_importing_it_loads_nothing_and_offers_everything() -> None:
    code = """if True:
        import sys, backend
        assert not [name for name in sys.modules if name.startswith("backend.")]
        from backend import train, Config
        loaded = {"mlx", "mlx.core", "mlx_lm", "transformers", "datasets", "numpy"} & set(sys.modules)
        assert not loaded, loaded
        import grpo_studio
        assert grpo_studio.train is train
        print(sorted(set(dir(backend)) & set(backend.__all__)))
    """
    environment, command = os.environ | {"PYTHONPATH": str(ROOT)}, [sys.executable, "-P", "-c", code]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=10)
    assert said.stdout.strip() == str(sorted(backend.__all__)), said.stderr
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        backend.trian  # noqa: B018


def test_the_documented_example_runs(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    example, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    example, changed = re.subn(r'^MODEL = ".*"$', f"MODEL = {model!r}", example, count=1, flags=re.MULTILINE)
    lengths = r'"iters": 20, (.*)"max_completion_length": 64', r'"iters": 2, \1"max_completion_length": 8'
    shorter, cut = re.subn(*lengths, example)
    assert changed == cut == 1
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path))
    exec(compile(shorter, "docs/library.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "Finished after 2 steps." in said and str(tmp_path) in said


def test_trl_trainer(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "output"
    args = GRPOConfig(str(folder), max_steps=1, num_generations=2, max_completion_length=4, dtype="float32")
    assert (args.num_generations, args.beta, args.learning_rate) == (2, 0.0, 1e-6), "TRL's defaults for the rest"
    assert (args.gradient_accumulation_steps, args.num_iterations) == (1, 1) and not hasattr(args, "odd")

    def brevity(completions: list[str], level: list[int], **columns: Any) -> list[float]:
        return [-float(len(text)) for text in completions]

    peft = {"r": 4, "target_modules": {"v_proj"}}
    rows = [{"prompt": row["prompt"], "solution": row["answer"], "level": row["level"]} for row in ROWS]
    trainer = GRPOTrainer(model, [accuracy_reward, brevity], args, rows, peft_config=peft)
    with pytest.raises(UserError, match="nothing to save"):
        trainer.save_model()
    trainer.train()
    settings = load(folder / "config.yaml")
    assert (settings.rank, settings.lora_keys, settings.answer_feature) == (4, ["v_proj"], "solution")
    assert settings.reward_functions[0] == "accuracy_reward" and settings.group_size == 2
    assert [sorted(step)[0] for step in trainer.log_history] and "rewards/brevity/mean" in trainer.log_history[0]
    saved = trainer.save_model(str(tmp_path / "saved"))
    assert saved == tmp_path / "saved" and {path.name for path in saved.iterdir()} >= {"adapters.safetensors"}
    assert trainer.save_model(str(folder)).parent == folder
    mistakes: list[tuple[Any, str]] = [
        (lambda: GRPOTrainer(object()), "model: The model is a Hub id or a folder"),  # pyright: ignore
        (lambda: GRPOTrainer(model, args=args, eval_dataset={"a": rows}), "eval_dataset"),
        (lambda: GRPOTrainer(model, brevity, GRPOConfig(num_generation=2), rows).train(), "num_generations"),
    ]
    for mistake, message in mistakes:
        with pytest.raises(UserError, match=message):
            mistake()


def test_trl_s_rewards_with_arguments(model: str, tmp_path: Path) -> None:
    entries = [get_cosine_scaled_reward(100, -2.0, max_value_correct=3), get_repetition_penalty_reward(2, -0.5)]
    args = GRPOConfig(
        str(tmp_path / "output"), max_steps=1, num_generations=2, max_completion_length=4, dtype="float32"
    )
    rows = [{"prompt": row["prompt"], "solution": row["answer"]} for row in ROWS]
    (step,) = GRPOTrainer(model, entries, args, rows, peft_config={"r": 4}).train().metrics
    settings = load(tmp_path / "output" / "config.yaml")
    assert settings.answer_feature == "solution" and settings.reward_functions[0].startswith("cosine_scaled_reward(")
    assert "max_completion_length=100, min_value_wrong=-2.0, max_value_correct=3" in settings.reward_functions[0]
    assert -2.0 < step["rewards/cosine_scaled_reward/mean"] < -1.9
    assert -0.5 <= step["rewards/repetition_penalty_reward/mean"] <= 0


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
def own_trained(trained: Callable[..., TrainedRun]) -> Callable[..., TrainedRun]:
    """`trained`, of four steps, with a reward function of the program."""
    return lambda settings=None, **options: trained(
        {"iters": 4, "reward_isolation": "process"} | (settings or {}), **{"reward_functions": [length]} | options
    )


def stop_after(step: int) -> Told:
    def stop(done: int) -> None:
        if done == step:
            raise StopTraining

    return Told(stop)


def weights(run: TrainedRun) -> bytes:
    return (run.folder / "adapters" / "adapters.safetensors").read_bytes()


def rates(run: TrainedRun) -> list[float]:
    return [step["learning_rate"] for step in run.metrics]


def test_a_resumed_run_has_the_weights_of_one_that_was_not_stopped(own_trained: Any) -> None:
    given: Any = {"optimizer": Averaging(1.0), "schedule": halves}
    whole = own_trained(**given)
    assert rates(whole) == [1e-2, 5e-3, 2.5e-3, 1.25e-3]
    assert int(given["optimizer"].step) == 0, "the program's own object stays as it was"
    stopped = own_trained(callbacks=[stop_after(2)], **given)
    assert stopped.step == 2 and weights(stopped) != weights(whole)
    event_log = (stopped.folder / "events.jsonl").read_bytes()
    for others, sentence in (
        ({"optimizer": None}, "optimizer: .* with Averaging(memory=0.5) of a program; give it again: backend.resume"),
        ({"schedule": lambda n: 0.01}, "schedule: .* with halves, and given is lambda; only the same goes on exactly"),
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


def test_mlxs_adamw_as_an_object_is_the_setting_adamw_bit_for_bit(own_trained: Any) -> None:
    adamw = optimizers.AdamW(1e-3, [0.9, 0.999], 1e-8, 0.01, bias_correction=True)
    run = own_trained({"iters": 2, "lr_schedule": "linear", "lr_warmup_steps": 1}, optimizer=adamw)
    named = own_trained({"iters": 2, "lr_schedule": "linear", "lr_warmup_steps": 1, "learning_rate": 1e-3})
    assert weights(run) == weights(named) and rates(run) == rates(named)
    config = load(run.folder / "config.yaml")
    assert (config.optimizer, config.learning_rate, config.lr_schedule) == ("own", 1e-3, "linear")
    assert config.own_optimizer == "AdamW(betas=[0.9, 0.999], eps=1e-08, bias_correction=True, weight_decay=0.01)"
    notes = [event["sentence"] for event in read_events(RunFolder(run.folder).events) if event["kind"] == "note"]
    assert f"The optimizer is {config.own_optimizer}, an object of the program that called train()." in notes


def test_what_is_no_program_refuses_the_run_and_says_how_to_go_on(own_trained: Any, tmp_path: Path) -> None:
    """The command line and the window, which starts it; a clone waits for its program as well."""
    of_a_file = {"reward_functions": ["r1_int"], "callbacks": [stop_after(1)]}
    run = own_trained({"iters": 2, "reward_isolation": "thread"}, optimizer=Averaging, schedule=halves, **of_a_file)
    for folder in (
        run.folder,
        *(clone(RunFolder(run.folder), warm=warm, runs_dir=tmp_path / str(warm)).path for warm in (True, False)),
    ):
        event_log = (folder / "events.jsonl").read_bytes()
        with pytest.raises(UserError) as mistake:
            verb_resume.__wrapped__.__wrapped__(str(folder))
        assert "with backend.resume(run, optimizer=…)" in str(mistake.value)
        assert (folder / "events.jsonl").read_bytes() == event_log
    faults = small_run.check(load(run.folder / "config.yaml").model_dump())
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
    (None, lambda update: update - 1, "schedule: lambda gave -1 for update 0; a learning rate is a finite number"),
    (None, [].__getitem__, "schedule: For update 0, __getitem__ raised IndexError: list index out of range"),
]


@cases(("optimizer", "schedule", "sentence"), REFUSED)
def test_what_a_checkpoint_cannot_keep_is_refused(optimizer: Any, schedule: Any, sentence: str) -> None:
    config = parse({"model": "m", "data": "d", "num_iterations": 1})
    with pytest.raises(UserError) as mistake:
        given_updates(optimizer, schedule, config)
    assert str(mistake.value).startswith(sentence) and len(mistake.value.faults[0].sentence) <= 200
