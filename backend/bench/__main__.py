"""`python -m backend.bench [CONFIG.yaml] [--steps N]`: medians over N steps of a run, after two to warm up."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from backend import blas

WARM_UP = 2
SHOWN = {
    "rollout_tokens_per_second": "tokens/s, sampling",
    "train_tokens_per_second": "tokens/s, learning",
    "time/rollout": "s, sampling",
    "time/reward": "s, scoring",
    "time/train": "s, learning",
    "time/step": "s, whole step",
    "cpu_s": "CPU s, whole step",
    "peak_memory_gb": "GB, peak",
}


def measure(config_file: Path, steps: int) -> dict[str, float]:
    """Medians by metric over `steps` steps of the config, in a folder that is thrown away."""
    from backend.spec.config import parse, read
    from backend.spec.places import make_run_folder
    from backend.trainer import train

    raw = read(config_file) | {
        "iters": WARM_UP + steps,
        "epochs": 0,
        "steps_per_eval": 0,
        "save_every": 10**6,
        "fuse": False,
    }
    rows: list[dict[str, Any]] = []
    cpu = [time.process_time()]

    def collect(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            cpu.append(time.process_time())
            rows.append(event["metrics"] | {"cpu_s": cpu[-1] - cpu[-2]})

    with tempfile.TemporaryDirectory() as folder:
        ending = train(parse(raw), make_run_folder("bench", Path(folder)), command="bench", echo=collect)
    if ending.kind != "finished":
        raise SystemExit(ending.sentence)
    return {key: statistics.median(row[key] for row in rows[WARM_UP:]) for key in SHOWN}


def main(
    config: Annotated[Path | None, typer.Argument(help="The settings, a YAML file; the demo's if left out.")] = None,
    steps: Annotated[int, typer.Option(help="Steps to take the median of.")] = 7,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure the steps of one config."""
    said = blas.prepare()
    from backend.spec.places import demo_config

    medians = measure(config or demo_config(), steps)
    if as_json:
        print(json.dumps({"blas": said, "steps": steps, "medians": medians}))
        return
    print(said)
    for key, label in SHOWN.items():
        print(f"{medians[key]:12.4g} {label}")


if __name__ == "__main__":
    typer.run(main)
