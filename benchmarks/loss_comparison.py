"""`python -m benchmarks.loss_comparison OUT.jsonl [--only NAME]`: trains the demo with each loss and each level of the
ratio.

Every variant is the demo's preset with the changes in VARIANTS, for three seeds; greedy accuracy over the
whole test split before and after, held-out reward, and seconds. Variants already in OUT.jsonl are left out.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from backend.engine import cpu_setup

SEEDS = (0, 1, 2)
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {"grpo_loss_type": "bnpo"},
    "dr_grpo": {"grpo_loss_type": "dr_grpo"},
    "dapo": {"grpo_loss_type": "dapo"},
    "luspo, sequence": {"grpo_loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo, epsilon_high 5": {"grpo_loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"grpo_loss_type": "sapo"},
    "vespo": {"grpo_loss_type": "vespo"},
    "grpo, sequence (GSPO)": {"importance_sampling_level": "sequence"},
    "grpo, μ = 1": {"num_iterations": 1},
    "grpo, μ = 4": {"num_iterations": 4},
    "grpo, ratio against the reference, ε = 1e-4": {
        "ratio_against": "reference",
        "epsilon": 1e-4,
        "epsilon_high": None,
    },
}


def measure(changes: dict[str, Any], seed: int) -> dict[str, float]:
    """One run of the demo with `changes`."""
    from backend.config.config import dump, parse, read
    from backend.demo import test_accuracy
    from backend.runs.run_folder import make_run_folder
    from backend.trainer.run_process import train
    from backend.utils.disk import replace_file
    from backend.utils.places import demo_config

    config = parse(read(demo_config()) | changes | {"seed": seed, "fuse": False})
    steps: list[dict[str, Any]] = []
    evals: list[dict[str, Any]] = []

    def collect(event: dict[str, Any]) -> None:
        {"step": steps, "eval": evals}.get(event["kind"], []).append(event.get("metrics", {}))

    with tempfile.TemporaryDirectory() as folder:
        run = make_run_folder("learning", Path(folder))
        replace_file(run.config, dump(config))
        began = time.monotonic()
        ending = train(config, run, command="bench.learning", echo=collect)
        seconds = time.monotonic() - began
        if ending.kind != "finished":
            raise SystemExit(ending.sentence)
        after = test_accuracy(config, run)
    clip_ratios = [step["clip_ratio_total"] or 0.0 for step in steps if "clip_ratio_total" in step]
    return {
        "before": test_accuracy(config, None),
        "after": after,
        "reward_before": evals[0]["reward"],
        "reward_held_out": evals[-1]["reward"],
        "clip": max(clip_ratios, default=0.0),
        "kl": steps[-1]["kl"],
        "seconds": round(seconds, 1),
    }


def main(
    out: Annotated[Path, typer.Argument(help="Where to append the results, one JSON object a line.")],
    only: Annotated[str | None, typer.Option(help="One variant.")] = None,
) -> None:
    """Measure what has not been measured yet."""
    cpu_setup.load_openblas()
    lines = out.read_text().splitlines() if out.exists() else []
    done = {(row["variant"], row["seed"]) for row in map(json.loads, lines)}
    for name, changes in VARIANTS.items():
        for seed in SEEDS:
            if (name, seed) in done or only not in (None, name):
                continue
            row = {"variant": name, "seed": seed} | measure(changes, seed)
            with out.open("a") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    typer.run(main)
