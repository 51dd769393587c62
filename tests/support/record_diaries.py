"""Records the event logs of `tests/golden/diaries/`: `python -m tests.support.record_diaries [NAME …]`, all of them by
default.

Each is a real run of the demo's model with some settings changed, trained in a process of its own; a healthy one for
every loss and kind of training, a sick one for every rule of the doctor that a model of this size can show. About half
a minute each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from backend.config.config import read
from backend.runs.events import Event, read_events
from backend.training.losses import LOSSES
from backend.utils.places import demo_config, project_root
from tests.support.diaries import Recording, recording

REWARDS = '''
import random
from backend.rewards import register_reward_function

@register_reward_function("brief")
def brief(prompts, completions, answer, types=None):
    """Pays for brevity and nothing else."""
    return [max(0, 60 - len(text)) / 60 for text in completions]

@register_reward_function("pluses")
def pluses(prompts, completions, answer, types=None):
    """Pays for every plus sign."""
    return [text.count("+") / 20 for text in completions]

@register_reward_function("hashes")
def hashes(prompts, completions, answer, types=None):
    """Looks for a mark that the model never writes."""
    return [float("####" in text) for text in completions]

@register_reward_function("dice")
def dice(prompts, completions, answer, types=None):
    """Chance: nothing can be learned from it."""
    return [random.random() for _ in completions]

@register_reward_function("digits")
def digits(prompts, completions, answer, types=None):
    """How many digits the text has: it varies even in the first few tokens."""
    return [float(sum(c.isdigit() for c in text)) for text in completions]
'''
STEPS = 64
CONSTANT = {"lr_schedule": "constant"}
KEPT_KINDS = ("started", "step", "eval", "checkpoint", "change", "note", "finished", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class Plan:
    """A recording to make: the demo's settings with `changes`, and the rules that must find something in it."""

    name: str
    story: str
    changes: dict[str, Any] = field(default_factory=dict)
    signs: tuple[str, ...] = ()
    steps: int = STEPS
    rows: int = 0
    """Rows of the training data that are left; 0 for all."""
    killed_at: int = 0
    """The step at which the process is killed."""


def own(*names: str) -> dict[str, Any]:
    """Settings of a run with these reward functions, of REWARDS and shipped ones."""
    return {"reward_functions": [*names], "reward_weights": [1.0] * len(names), "reward_functions_file": "rewards.py"}


HEALTHY = [
    *(Plan(f"healthy-{loss}", f"The demo with the loss {loss}.", {"grpo_loss_type": loss}) for loss in LOSSES),
    Plan("healthy-gspo", "The demo with ratios of whole completions.",
         {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": None}),
    Plan("healthy-lora", "The demo with adapters, no KL and one update a rollout.",
         {"train_type": "lora", "num_layers": -1, "learning_rate": 1e-4, "beta": 0.0, "num_iterations": 1}),
    Plan("healthy-long", "Three times as many steps: the model has learned its sums long before the end.", steps=200),
]  # fmt: skip

SICK = [
    Plan("identical", "Temperature 0.02: every completion of a group is the same.", {"temperature": 0.02},
         ("identical", "no_signal"), steps=30),
    Plan("no-signal", "The only reward function gives the same to every completion.",
         {"reward_functions": ["r1_int_reward_func"], "reward_weights": [1.0]}, ("no_signal",), steps=30),
    Plan("never-scores", "A function looks for a mark that the model never writes.",
         own("r1_accuracy_reward_func", "hashes"), ("never_scores",), steps=30),
    Plan("cut-off", "Completions are cut after 6 tokens.", {"max_completion_length": 6}, ("cut_off",), steps=30),
    Plan("lr-1", "A learning rate of 1: the second gradient is not a number, which ends the run.",
         {"learning_rate": 1.0, **CONSTANT}, steps=30),
    Plan("not-a-number", "A KL that is only measured overflows: temperature 0.05 makes twenty times as much of every change.",
         own("dice") | {"temperature": 0.05, "beta": 0.0, "log_kl": True, "num_iterations": 4, "learning_rate": 1e-2, **CONSTANT},
         ("not_a_number",), steps=20),
    Plan("lr-high", "A learning rate thirty times too high.", {"learning_rate": 3e-3, **CONSTANT},
         ("drifting", "kl_exploding")),
    Plan("collapsed", "A learning rate thirty times too high, and no KL term: the model forgets the sums that it knew.",
         {"learning_rate": 3e-3, "beta": 0.0, **CONSTANT}, ("reward_fell",), steps=24),
    Plan("clipping", "Four updates a rollout, rewards by chance, and ratios of whole completions with an epsilon of 0.0001.",
         own("dice") | {"epsilon": 1e-4, "epsilon_high": None, "num_iterations": 4, "importance_sampling_level": "sequence"},
         ("moving_fast",), steps=30),
    Plan("lr-tiny", "A learning rate of 1e-12.", {"learning_rate": 1e-12, **CONSTANT}, ("too_slow", "never_clips")),
    Plan("hacking", "Right answers are learned first; then a function pays for brevity, with ten times the weight.",
         {**own("r1_accuracy_reward_func", "brief"), "learning_rate": 2e-4, **CONSTANT,
          "stages": [{"iters": 30, "reward_weights": [1.0, 0.0]}, {"iters": 40, "reward_weights": [0.1, 1.0]}]},
         ("hacking",), steps=70),
    Plan("repetition", "A function pays for every plus sign.",
         own("pluses") | {"learning_rate": 3e-4, **CONSTANT, "max_completion_length": 56, "max_seq_length": 80, "beta": 0.0},
         ("repetition",)),
    Plan("entropy", "Rewards by chance, a high learning rate and no KL term.",
         own("dice") | {"learning_rate": 2e-3, **CONSTANT, "beta": 0.0, "num_iterations": 4}, ("entropy_collapse",)),
    Plan("mode-collapse", "The same: texts of a group still differ, and are more and more made of the same words.",
         own("dice") | {"learning_rate": 2e-3, **CONSTANT, "beta": 0.0, "num_iterations": 4}, ("mode_collapse",)),
    Plan("zero-gradient", "Every completion is cut off, and cut-off completions are not trained on.",
         own("digits") | {"max_completion_length": 6, "mask_truncated_completions": True}, ("gradient_zero", "cut_off"),
         steps=30),
    Plan("straggler", "At temperature 4 lengths are as chance has it: most completions are short, one of 128 is long; and no reward, so "
         "that learning takes no time.",
         own("hashes") | {"max_completion_length": 400, "max_seq_length": 460, "temperature": 4.0, "learning_rate": 1e-6, **CONSTANT, "batch_size": 8,
          "group_size": 16, "num_iterations": 1, "beta": 0.0, "steps_per_eval": 0}, ("straggler",), steps=14),
    Plan("few-rows", "Four rows of training data.", {}, ("seen_often",), rows=4),
    Plan("flat", "Rewards by chance: they have no trend.", own("dice") | {"learning_rate": 2e-5, **CONSTANT}, ("flat",), steps=90),
    Plan("crashed", "The process was killed.", killed_at=20),
]  # fmt: skip


def record(plan: Plan) -> Recording:
    """Train it, and keep its event log."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        raw = {
            **read(demo_config()),
            "iters": plan.steps,
            "fuse": False,
            "val_batches": 4,
            "save_every": 16,
            **plan.changes,
        }
        data = project_root() / "resources" / "demo" / "data"
        if plan.rows:
            data = _few_rows(data, folder / "data", plan.rows)
        (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
        config = folder / "config.yaml"
        paths = {"model": str(project_root() / "resources" / "demo" / "model"), "data": str(data)}
        config.write_text(yaml.safe_dump({**raw, **paths}), encoding="utf-8")
        run = folder / "runs" / "run"
        _train(config, run, plan.killed_at)
        events = [_tidy(event) for event in read_events(run / "events.jsonl") if event["kind"] in KEPT_KINDS]
        for number, event in enumerate(events):
            event["seq"] = number
    settings = {key: value for key, value in raw.items() if key not in ("model", "data")}
    return Recording(
        plan.name, plan.story, settings | {"model": "demo/model", "data": "demo/data"}, list(plan.signs), events
    )


def _few_rows(data: Path, folder: Path, count: int) -> Path:
    folder.mkdir()
    for split in ("train", "valid"):
        lines = (data / f"{split}.jsonl").read_text("utf-8").splitlines(keepends=True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:count] if split == "train" else lines), "utf-8")
    return folder


def _train(config: Path, run: Path, killed_at: int) -> None:
    command = [sys.executable, "-m", "backend", "train", str(config), "--runs-dir", str(run.parent), "--name", run.name]
    with (run.parent.parent / "out.txt").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=project_root())
    while killed_at and process.poll() is None:
        if any(event.get("step") == killed_at for event in read_events(run / "events.jsonl")):
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    process.wait()
    if not (run / "events.jsonl").exists():
        sys.exit((run.parent.parent / "out.txt").read_text("utf-8"))


def _tidy(event: Event) -> Event:
    """The event without this machine's paths, numbers in six digits."""
    tidied = json.loads(json.dumps(event), parse_float=lambda text: float(f"{float(text):.6g}"))
    tidied["t"] = round(event["t"], 3)
    if event["kind"] == "started":
        tidied |= {"command": "python -m backend train config.yaml", "model": "demo/model", "pid": 1}
        tidied["versions"].pop("platform", None)
    return tidied


# ── what cannot be provoked ──────────────────────────────────────────────────────────────────────────────────────────


def half_written() -> Recording:
    """The crashed run, killed in the middle of its last line."""
    crashed = recording("crashed")
    last = json.dumps(crashed.events[-1], ensure_ascii=False)
    return replace(
        crashed, name="half-written", story="The process was killed while it wrote a line.", events=crashed.events[:-1],
        tail=last[: len(last) // 2], constructed="From “crashed”: the second half of its last line was cut off.",
    )  # fmt: skip


# Name → story, the rule that finds something, and the metrics of a step that differ from those of a healthy run
WITH_METRICS: dict[str, tuple[str, str, Callable[[int, dict[str, Any]], dict[str, Any]]]] = {
    "memory": (
        "A leak: every step holds 2 % more memory than the one before.",
        "memory_creeping",
        lambda step, metrics: {"peak_memory_gb": round(metrics["peak_memory_gb"] * 1.02**step, 6)},
    ),
    "sampler-gap": (
        "Sampling and learning differ as in a 16-bit model with broken rounding.",
        "sampler_differs",
        lambda step, metrics: {"sampling/logp_gap/mean": 0.08},
    ),
    "waiting": (  # rank 0 is the slow one: the other waits for it, and it waits for nobody
        "Two machines, of which the second waits for the first in 60 % of each step.",
        "machines_wait",
        lambda step, metrics: {
            "waiting_share": 0.3,
            "ranks/0/waiting": 0.0,
            "ranks/1/waiting": round(0.6 * metrics["time/step"], 6),
        },
    ),
}


def with_metrics(name: str) -> Recording:
    """A healthy recording whose metrics were changed."""
    healthy, (story, sign, change) = recording("healthy-grpo"), WITH_METRICS[name]
    events = [
        event | {"metrics": event["metrics"] | change(event["step"], event["metrics"])} if event["kind"] == "step" else event
        for event in healthy.events
    ]  # fmt: skip
    return replace(
        healthy, name=name, story=story, signs=[sign], events=events,
        constructed="From “healthy-grpo”: the sickness cannot be provoked on a model of this size.",
    )  # fmt: skip


def main() -> None:
    wanted = set(sys.argv[1:])
    for plan in [*HEALTHY, *SICK]:
        if not wanted or plan.name in wanted:
            path = record(plan).save()
            print(f"{path.name}  {path.stat().st_size:,} bytes", flush=True)
    made = [half_written, *(partial(with_metrics, name) for name in WITH_METRICS)]
    for name, construct in zip(("half-written", *WITH_METRICS), made, strict=True):
        if not wanted or name in wanted:
            print(construct().save().name)


if __name__ == "__main__":
    main()
