"""Record the event logs of `tests/golden/diaries/` again: `python -m tests.support.record_diaries [NAME …]`.

Each is a real run of the demo's model, trained in a process of its own for about half a minute, with the settings, the
story and the signs that its recording begins with: a healthy one for every loss and kind of training, a sick one for
every rule of the doctor that a model of this size can show. A new one:

    python -m tests.support.record_diaries lr-2 --story "A rate of 2." --signs not_a_number --set learning_rate=2.0
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from backend.config.config import read
from backend.runs.events import Event, read_events
from backend.utils.places import demo_config, project_root
from tests.support.diaries import Recording, names, recording

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
TOOL = '''
def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers and operators.
    """
    {body}
'''
TOOL_BODIES = {"tools-fail": "raise RuntimeError('out of order')", "results-dropped": "return '0' * 400"}
"""What the tool of a recording does; it calculates in the others."""
KEPT_KINDS = ("started", "step", "eval", "checkpoint", "change", "note", "finished", "stopped", "failed")
RESOURCES = project_root() / "resources"
TRAIN_ROWS = {"few-rows": 4, "solved": 4}  # of the training data; all of it for the others
KILLED_AT = {"crashed": 20}  # the step at which the process is killed


def record(plan: Recording) -> Recording:
    """Train with the plan's settings, and keep the event log."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = folder / "data"
        data.mkdir()
        demo = RESOURCES / ("calculator" if "tools_file" in plan.settings else "demo")
        (folder / "tools.py").write_text(TOOL.format(body=TOOL_BODIES.get(plan.name, "return str(eval(expression))")))
        for split in ("train", "valid"):
            lines = (demo / "data" / f"{split}.jsonl").read_text("utf-8").splitlines(keepends=True)
            count = TRAIN_ROWS.get(plan.name) if split == "train" else None
            (data / f"{split}.jsonl").write_text("".join(lines[:count]), "utf-8")
        (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
        settings = plan.settings | {"model": str(demo / "model"), "data": str(data)}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        train(folder, KILLED_AT.get(plan.name, 0))
        events = [tidy(event) for event in read_events(folder / "run" / "events.jsonl") if event["kind"] in KEPT_KINDS]
    return replace(plan, events=[event | {"seq": number} for number, event in enumerate(events)])


def train(folder: Path, killed_at: int) -> None:
    command = [sys.executable, "-m", "backend", "train", str(folder / "config.yaml")]
    log = folder / "run" / "events.jsonl"
    with (folder / "out.txt").open("wb") as out:
        where = ["--runs-dir", str(folder), "--name", "run"]
        process = subprocess.Popen([*command, *where], stdout=out, stderr=out, cwd=project_root())
    while killed_at and process.poll() is None:
        if any(event.get("step") == killed_at for event in read_events(log)):
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    process.wait()
    if not log.exists():
        sys.exit((folder / "out.txt").read_text("utf-8"))


def tidy(event: Event) -> Event:
    """The event without this machine's paths, numbers in six digits."""
    tidied = json.loads(json.dumps(event), parse_float=lambda text: float(f"{float(text):.6g}"))
    tidied["t"] = round(event["t"], 3)
    if event["kind"] == "started":
        tidied |= {"command": "python -m backend train config.yaml", "model": "demo/model", "pid": 1}
        tidied["versions"].pop("platform", None)
    return tidied


# Recordings of what cannot be provoked on a model of this size → how a step's metrics differ from those of healthy-grpo
WITH_METRICS: dict[str, Callable[[int, dict[str, Any]], dict[str, Any]]] = {
    "memory": lambda step, metrics: {"peak_memory_gb": round(metrics["peak_memory_gb"] * 1.02**step, 6)},
    "sampler-gap": lambda step, metrics: {"sampling/logp_gap/mean": 0.08},
    "judge": lambda step, metrics: {
        "judge/helpful/failed": 0.25,
        "judge/helpful/saturated": 0.95,
        "judge/helpful/length_correlation": round(min(0.9, step / 20), 6),
    },
    # Rank 0 is the slow one: the other waits for it, and it waits for nobody.
    "waiting": lambda step, metrics: {
        "waiting_share": 0.3,
        "ranks/0/waiting": 0.0,
        "ranks/1/waiting": round(0.6 * metrics["time/step"], 6),
    },
}


def construct(plan: Recording) -> Recording:
    """A recording made from another: “half-written” from “crashed”, the rest from a healthy run."""
    if plan.name == "half-written":
        *events, last = recording("crashed").events
        line = json.dumps(last, ensure_ascii=False)
        return replace(plan, events=events, tail=line[: len(line) // 2])
    events = [
        event | {"metrics": event["metrics"] | WITH_METRICS[plan.name](event["step"], event["metrics"])}
        if event["kind"] == "step"
        else event
        for event in recording("healthy-grpo").events
    ]
    return replace(plan, events=events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--story", help="of a new recording, whose name is the only one given")
    parser.add_argument("--signs", nargs="*", default=[], help="the rules that must find something in it")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="its settings, beside the demo's")
    options = parser.parse_args()
    if options.story:
        with_tools = any(each.startswith("tools_file=") for each in options.set)
        usual = read(RESOURCES / "presets" / "calculator.yaml" if with_tools else demo_config())
        usual |= {"iters": 64, "fuse": False, "val_batches": 4, "save_every": 16}
        changes = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in options.set)}
        settings = usual | changes | {"model": "demo/model", "data": "demo/data"}
        plans = [Recording(options.names[0], options.story, settings, options.signs, [])]
    else:
        plans = [recording(name) for name in options.names or names()]
    for plan in sorted(plans, key=lambda plan: bool(plan.constructed)):  # these are made from the others
        path = construct(plan).save() if plan.constructed else record(plan).save()
        recording.cache_clear()
        print(f"{path.name}  {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
