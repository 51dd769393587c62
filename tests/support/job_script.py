"""Stands in for train.py of a job, without TRL: what it prints, and the adapter that it leaves.

Its arguments: an adapter's folder, and the number of steps."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

REPORT = "GRPO_STUDIO_JOB"


def lines(steps: int) -> list[str]:
    """As resources/trl/train.py prints them, of a run with two updates a step."""

    def report(**what: Any) -> str:
        return f"{REPORT} {json.dumps(what)}"

    found = ["Installed 60 packages", report(updates=2 * steps)]
    for step in range(1, steps + 1):
        rewards = {"low_half": 1.0, "length_target": step / 10}
        completions = [{"text": f"<answer>{step}</answer>", "advantage": 0.5, "rewards": rewards}] * 2
        found.append(report(update=2 * step, group={"prompt": "What is 1 plus 1?", "completions": completions}))
        logs = {"loss": 0.5 / step, "reward": step / 10, "reward_std": 0.2, "kl": 0.01, "epoch": 0.1, "step_time": 2.0}
        logs |= {"clip_ratio/region_mean": 0.03, "rewards/low_half/mean": 1.0, "frac_reward_zero_std": 0.25}
        found += [f"{{'loss': '{0.5 / step}'}}", report(update=2 * step, logs=logs)]
    held_out = {"eval_loss": 0.0, "eval_runtime": 3.0, "eval_reward": 0.6, "eval_rewards/low_half/mean": 0.7}
    found.append(report(update=2 * steps, logs=held_out))
    found.append(report(update=2 * steps, logs={"test_loss": 0.0, "test_runtime": 1.0, "eval_test_reward": 0.8}))
    return [*found, report(update=2 * steps, logs={"train_loss": 0.1, "train_runtime": 9.0})]


if __name__ == "__main__":
    assert os.environ[REPORT] and os.environ["HF_TOKEN"], "what a job is given"
    assert Path("train.py").is_file() and Path("grpo_config.yaml").is_file()
    print(*lines(int(sys.argv[2])), sep="\n", flush=True)
    shutil.copytree(sys.argv[1], "output")
