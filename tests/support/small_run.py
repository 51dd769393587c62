"""A very short run: a tiny random model, eight rows, and settings under which a step takes a few milliseconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from backend.config.config import parse
from backend.rewards.allowed_code import allow_named
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.utils.errors import ConfigProblem, UserError
from tests.support.random_models import tiny_model

# Rewards are scored in the trainer's process: to start another takes longer than such a run
QUICK: dict[str, Any] = {"iters": 3, "group_size": 2, "max_completion_length": 6, "max_seq_length": 200}
QUICK |= {"num_layers": -1, "rank": 2, "beta": 0.0, "steps_per_eval": 0, "save_every": 100, "fuse": False}
QUICK |= {"reward_functions": ["r1_int", "r1_count_xml"], "reward_weights": [1.0, 0.5], "reward_isolation": "thread"}


def write_rows(path: Path, count: int = 8) -> Path:
    """Sums with their answers, as JSON lines."""
    rows = [{"prompt": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


LOW_HALF = '''
from backend.rewards import register_reward_function
@register_reward_function("low_half")
def low_half(prompts, completions, answer, types=None, completion_ids=None):
    """Share of the low half of the vocabulary."""
    return [sum(token < 160 for token in ids) / len(ids) for ids in completion_ids]
'''


def low_half(folder: Path) -> dict[str, Any]:
    """Settings of a reward that varies even over a random model's completions; its file is written into `folder`."""
    (folder / "low_half.py").write_text(LOW_HALF)
    where = {"reward_functions_file": str(folder / "low_half.py")}
    return {"reward_functions": ["low_half"], "reward_weights": []} | where


def settings_for(folder: Path, *, layers: int = 1, **changes: Any) -> dict[str, Any]:
    """Raw settings of a quick run; the model and the rows are written to `folder` the first time."""
    if not (folder / "model").exists():
        tiny_model(folder / "model", layers=layers)
        write_rows(folder / "rows.jsonl")
    return QUICK | {"model": str(folder / "model"), "data": str(folder / "rows.jsonl")} | changes


def check(raw: dict[str, Any]) -> list[ConfigProblem]:
    """The problems that a run with these settings would be refused for."""
    from backend.trainer.preflight import preflight

    try:
        preflight(parse(raw)).scorer.close()
    except UserError as error:
        return error.faults
    return []


def write_config(path: Path, raw: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def prepare(run: RunFolder, raw: dict[str, Any]) -> None:
    """A run as the window prepares it for `train --run`: settings in its folder, the code they name allowed."""
    write_config(run.config, raw)
    allow_named(raw)


def train_here(raw: dict[str, Any], run: RunFolder, echo: Any = None, *, may_restart: bool = False) -> Any:
    """Train in this process, in the main thread; returns the trainer's Ending."""
    from backend.trainer.run_process import train

    run.path.mkdir(parents=True, exist_ok=True)
    write_config(run.config, raw)
    return train(parse(raw), run, command="a test", echo=echo, may_restart=may_restart)


def trained(raw: dict[str, Any], run: RunFolder, echo: Any = None) -> RunFolder:
    """The run, trained to its end; for fixtures too, which outlive the signal handlers of a test."""
    from backend.trainer.control import handlers_restored

    with handlers_restored():
        assert train_here(raw, run, echo).kind == "finished"
    return run


def stop_after(run: RunFolder, step: int) -> Callable[[dict[str, Any]], None]:
    """An echo that stops the run after a step."""
    return lambda event: run.say("stop") if event["kind"] == "step" and event["step"] == step else None


def train_with_stops(raw: dict[str, Any], run: RunFolder, *steps: int) -> None:
    """Train with a stop after each of these steps, resumed each time, to the end."""
    for step in steps:
        ending = train_here(raw, run, stop_after(run, step))
        assert (ending.kind, ending.step) == ("stopped", step)
    assert train_here(raw, run).kind == "finished"


def resumed_and_whole(raw: dict[str, Any], folder: Path, *stops: int) -> RunFolder:
    """Train in one go, and with a stop after each of these steps; both are the same run. → the first."""
    whole, parted = RunFolder(folder / "whole"), RunFolder(folder / "parted")
    assert train_here(raw, whole).kind == "finished"
    train_with_stops(raw, parted, *stops)
    assert_same_run(parted, whole)
    return whole


def numbers(run: RunFolder) -> list[tuple[Any, ...]]:
    """Every step and evaluation with the metrics that a second run with the same settings repeats."""
    machine = ("time/", "per_second", "memory", "process/", "machine/", "/seconds", "/calls", "/cached")

    def repeated(metrics: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in metrics.items() if not any(word in name for word in machine)}

    return [(event["kind"], event["step"], repeated(event["metrics"])) for event in events(run, "step", "eval")]


def assert_same_run(run: RunFolder, other: RunFolder) -> None:
    """Every step once, with the same metrics and completions; the same weights, moments and state to the last bit."""
    from backend.runs import checkpoint

    assert numbers(run) == numbers(other)
    assert run.completions.read_text() == other.completions.read_text()
    order = [event["seq"] for event in read_events(run.events)]
    assert order == list(range(len(order)))
    mine, theirs = (checkpoint.newest(each) for each in (run, other))
    assert mine is not None and theirs is not None
    for name in ("step", "updates", "cursor", "num_tokens", "reward_weights"):
        assert getattr(mine.state, name) == getattr(theirs.state, name), name
    pairs = [(each.path / "optimizer.safetensors", each.weights_file) for each in (mine, theirs)]
    pairs = [*zip(*pairs, strict=True), *[(r.adapters / "adapters.safetensors" for r in (run, other))]]
    for first, second in pairs:
        if first.exists():
            assert same(arrays(first), arrays(second)), first.name


def kinds(run: RunFolder) -> list[str]:
    """The kinds of a run's event log, phases left out."""
    return [event["kind"] for event in read_events(run.events) if event["kind"] != "phase"]


def steps(run: RunFolder) -> list[int]:
    return [event["step"] for event in read_events(run.events) if event["kind"] == "step"]


def rows(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of completions.jsonl."""
    return [json.loads(line) for line in run.completions.read_text().splitlines()]


def metrics(run: RunFolder, kind: str = "step") -> list[dict[str, Any]]:
    return [event["metrics"] for event in events(run, kind)]


def events(run: RunFolder, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.events) if event["kind"] in kinds]


def notes(run: RunFolder) -> list[str]:
    return [event["sentence"] for event in events(run, "note")]


def arrays(path: Path) -> dict[str, Any]:
    """The arrays of a safetensors file, as numpy's."""
    import mlx.core as mx
    import numpy as np

    loaded: Any = mx.load(str(path))
    return {name: np.array(x) for name, x in loaded.items()}


def weights(run: RunFolder) -> dict[str, Any]:
    """The weights of the newest checkpoint."""
    from backend.runs import checkpoint

    saved = checkpoint.newest(run)
    assert saved is not None
    return arrays(saved.weights_file)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """True if the arrays are equal to the last bit."""
    import numpy as np

    return first.keys() == second.keys() and all(np.array_equal(x, second[name]) for name, x in first.items())
