"""Synthetic runs for tests of the window: an event log as a trainer writes it, with plausible metrics."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from backend.runs.events import EventLog, JsonLines
from backend.runs.run_folder import RunFolder

# Reward function → the mean of its scores at the start, what learning adds, and how noisy they are
MEANS = {
    "r1_accuracy_reward_func": (0.6, 1.1, 3),
    "r1_int_reward_func": (0.30, 0.18, 1 / 3),
    "r1_strict_format_reward_func": (0.05, 0.42, 1 / 2),
    "r1_soft_format_reward_func": (0.15, 0.33, 1 / 2),
    "r1_count_xml": (0.25, 0.22, 1 / 4),
}
REWARDS = tuple(MEANS)


def metrics(step: int, total: int, dice: random.Random) -> dict[str, float]:
    """The metrics of a step of a run that learns well."""
    done = step / total
    learned = 1 / (1 + math.exp(-8 * (done - 0.35)))
    noise = dice.gauss(0, 0.05)
    parts = {name: start + gain * learned + share * noise for name, (start, gain, share) in MEANS.items()}
    length = 60 - 22 * learned + dice.gauss(0, 2)
    values: dict[str, float] = {
        "loss": 0.0004 + 0.008 * done + dice.gauss(0, 0.001),
        "reward": sum(parts.values()),
        "reward_std": 0.9 - 0.45 * learned + dice.gauss(0, 0.04),
        "frac_reward_zero_std": max(0.0, 0.05 + 0.3 * learned + dice.gauss(0, 0.05)),
        "kl": 0.001 + 0.09 * learned + abs(dice.gauss(0, 0.006)),
        "entropy": 1.4 - 0.8 * learned + dice.gauss(0, 0.03),
        "clip_ratio_low": abs(dice.gauss(0.03, 0.01)),
        "clip_ratio_high": abs(dice.gauss(0.05, 0.015)),
        "completions/mean_length": length,
        "completions/min_length": length * 0.55,
        "completions/max_length": min(96.0, length * 1.6),
        "hit_max_tokens_ratio": max(0.0, 0.2 - 0.25 * learned + dice.gauss(0, 0.02)),
        "learning_rate": 1e-4 * min(1, step / 8) * (1 - 0.6 * done),
        "grad_norm": 0.4 + abs(dice.gauss(0, 0.12)),
        "rollout_tokens_per_second": 5200 + dice.gauss(0, 240),
        "train_tokens_per_second": 9100 + dice.gauss(0, 300),
        "time/rollout": 0.62 + dice.gauss(0, 0.03),
        "time/reward": 0.004 + abs(dice.gauss(0, 0.001)),
        "time/train": 0.48 + dice.gauss(0, 0.02),
        "peak_memory_gb": 0.41 + 0.02 * done,
        "num_tokens": 3100.0 * step,
    }
    values["clip_ratio_total"] = values["clip_ratio_low"] + values["clip_ratio_high"]
    values["time/step"] = values["time/rollout"] + values["time/reward"] + values["time/train"]
    for name, mean in parts.items():
        values[f"rewards/{name}/mean"] = mean
        values[f"rewards/{name}/std"] = abs(dice.gauss(0.2, 0.02))
    return values


VERSIONS = {"mlx": "0.32.4", "python": "3.12.4"}
MACHINES = [
    {"rank": 0, "machine": "anna-mbp.local", "chip": "Apple M4 Max", "memory_gb": 64.0},
    {"rank": 1, "machine": "studio.local", "address": "10.0.0.2", "chip": "Apple M2 Ultra", "memory_gb": 128.0},
    {"rank": 2, "machine": "air.local", "address": "10.0.0.3", "chip": "Apple M2", "memory_gb": 16.0},
]
LOST = "hosts: {machine} (rank {rank}) has not been heard for 12 s. Step 60 is saved."


def rank_metrics(ranks: int, dice: random.Random) -> dict[str, float]:
    """What a step of a run on several machines has besides: rank 2 is a third as fast, and the others wait for it."""
    values: dict[str, float] = {"waiting_share": 0.06 + abs(dice.gauss(0, 0.02)), "time/gradient_sum": 0.03}
    for rank in range(ranks):
        speed = (1.0, 1.4, 0.35)[rank]
        values |= {
            f"ranks/{rank}/prompts": round(4 * speed) or 1.0,
            f"ranks/{rank}/tokens_per_second": speed * (2600 + dice.gauss(0, 90)),
            f"ranks/{rank}/learn_tokens_per_second": speed * (4700 + dice.gauss(0, 120)),
            f"ranks/{rank}/waiting": abs(dice.gauss(0.08, 0.03)) if rank < 2 else 0.01,
            f"ranks/{rank}/memory": 0.38 + 0.01 * rank,
        }
    return values


def make_run(
    path: Path,
    *,
    steps: int = 60,
    total: int = 60,
    ending: str | None = "finished",
    seconds: float = 1.2,
    now: bool = False,
    ranks: int = 1,
    lost_rank: int | None = None,
    **config,
) -> RunFolder:
    """A run folder with `steps` steps of `total`; `ending` is the kind of the last event, None for none."""
    what = (steps, total, ending, seconds, ranks, lost_rank, config)
    key = json.dumps(what, default=str)
    if key not in _MADE:
        _MADE[key] = TemporaryDirectory(prefix="grpo-studio-made-up-run-")
        _write_run(Path(_MADE[key].name), *what)
    shutil.copytree(_MADE[key].name, path, copy_function=shutil.copyfile, dirs_exist_ok=True)
    folder = RunFolder(path)
    if now:
        later = time.time() - steps * seconds - 3 - Clock().t
        events = [event | {"t": event["t"] + later} for event in map(json.loads, folder.events.open())]
        folder.events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return folder


# Runs that were made in this process, by their arguments: copying takes a hundredth of the time
_MADE: dict[str, TemporaryDirectory[str]] = {}


def _write_run(
    path: Path, steps: int, total: int, ending: str | None, seconds: float, ranks: int, lost: Any, config: Any
) -> RunFolder:
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    inputs = {"model": "demo/model", "data": "demo/data", "reward_functions": list(REWARDS)}
    sizes = {"iters": total, "beta": 0.05, "steps_per_eval": 20, "group_size": 8, "batch_size": 4}
    settings = inputs | sizes | config
    folder.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    told = [f"step {n}/60  reward {1.4 + n / 40:.3f}  kl {0.001 * n:.4f}\n" for n in range(10, steps + 1, 10)]
    folder.log.write_text("mlx 0.32.4 on cpu, BLAS openblas\nLoaded demo/model.\n" + "".join(told), encoding="utf-8")
    event_log, dice, clock = EventLog(folder.events), random.Random(7), Clock()
    rows = JsonLines(folder.completions)
    about: dict[str, Any] = {"model": "demo/model", "iterations": total, "ranks": ranks}
    about |= {"device": "cpu", "versions": {}}
    if ranks > 1:
        about |= {"machines": [machine | VERSIONS for machine in MACHINES[:ranks]], "distributed_backend": "ring"}
    write(event_log, clock, "started", **about)
    write(event_log, clock.after(0.1), "phase", phase="loading")
    for step in range(1, steps + 1):
        write(event_log, clock.after(2.0 if step == 1 else 0.1), "phase", phase="sampling")
        of_ranks = rank_metrics(ranks, random.Random(step)) if ranks > 1 else {}
        write(event_log, clock.after(seconds - 0.1), "step", step=step, metrics=metrics(step, total, dice) | of_ranks)
        for row in groups(step, total, dice):
            rows.append(row)
        if step % 20 == 0 or step == 1:
            write(event_log, clock, "eval", step=step, metrics=held_out(step, total))
    if ending:
        told = (
            {"sentence": LOST.format(**MACHINES[lost]), "lost_rank": lost} if lost else {"sentence": SENTENCES[ending]}
        )
        write(event_log, clock.after(0.5), ending, step=steps, reason="done", **told)
    event_log.close()
    rows.close()
    return folder


SENTENCES = {
    "finished": "All 60 steps are done.",
    "stopped": "Stopped by request; everything is saved.",
    "failed": "The reward function r1_int_reward_func returned 3 scores for 8 completions.",
}


class Clock:
    """Unix seconds that a test advances by hand."""

    def __init__(self, t: float = 1_760_000_000.0) -> None:
        self.t = t

    def after(self, seconds: float) -> Clock:
        self.t += seconds
        return self


def write(event_log: EventLog, clock: Clock, kind: str, **carries) -> None:
    """An event at the clock's time."""
    event_log.write(kind, **{"t": clock.t, **carries})


def held_out(step: int, total: int) -> dict[str, float]:
    learned = step / total
    return {
        "reward": 1.3 + 1.8 * learned,
        "accuracy": 0.25 + 0.6 * learned,
        **{f"rewards/{name}/mean": 0.2 + (1.4 if "accuracy" in name else 0.25) * learned for name in REWARDS},
    }


def groups(step: int, total: int, dice: random.Random, prompts: int = 4, size: int = 8) -> list[dict]:
    """The rows of completions.jsonl at a step."""
    rows = []
    for _ in range(prompts):
        a, b = dice.randint(2, 60), dice.randint(2, 60)
        completions = [_completion(a, b, dice.random() < 0.25 + 0.7 * step / total, dice) for _ in range(size)]
        mean = sum(completion["reward"] for completion in completions) / size
        spread = math.sqrt(sum((completion["reward"] - mean) ** 2 for completion in completions) / (size - 1))
        for completion in completions:
            completion["advantage"] = (completion["reward"] - mean) / (spread + 1e-4)
        prompt = f"<|user|>What is {a} + {b}? Think first, then answer.<|assistant|>"
        rows.append({"step": step, "prompt": prompt, "answer": str(a + b), "type": "add", "completions": completions})
    return rows


def _completion(a: int, b: int, right: bool, dice: random.Random) -> dict:
    total = a + b if right else a + b + dice.choice((-10, -1, 1, 10))
    tidy = right or dice.random() < 0.4
    text = f"<think>{a} plus {b}: {a % 10 + b % 10} ones, {a // 10 + b // 10} tens.</think>\n<answer>{total}</answer>"
    text = text if tidy else text.replace("</answer>", "") + " and so on and so on"
    scores = dict(
        zip(REWARDS, (2.0 * (right and tidy), 0.5 * tidy, 0.5 * tidy, 0.5 * tidy, 0.5 if tidy else 0.375), strict=True)
    )
    told = {"text": text, "tokens": len(text) // 2, "stop": "eos" if tidy else "length"}
    return told | {"rewards": scores, "reward": sum(scores.values()), "advantage": 0.0}
