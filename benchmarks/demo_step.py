"""Steps of a real run, the demo's or any config's: medians of the metrics that the trainer writes."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from backend.bench.report import TextTable, number

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


def measure(config_file: Path, steps: int, warm_up: int) -> dict[str, float]:
    """Median of each metric over `steps` steps of the config, after `warm_up` that do not count; in a temporary
    folder."""
    from backend.config.config import dump, parse, read
    from backend.runs.run_folder import make_run_folder
    from backend.trainer.run_process import train
    from backend.utils.disk import replace_file

    raw = read(config_file) | {
        "iters": warm_up + steps,
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
        settings, run = parse(raw), make_run_folder("bench", Path(folder))
        replace_file(run.config, dump(settings))
        ending = train(settings, run, command="bench", echo=collect)
    if ending.kind != "finished":
        raise SystemExit(ending.sentence)
    return {key: statistics.median(row[key] for row in rows[warm_up:]) for key in SHOWN}


def table(name: str, medians: dict[str, float]) -> TextTable:
    return TextTable(f"A step of {name}", ("what", "median"), [[SHOWN[key], number(x)] for key, x in medians.items()])
