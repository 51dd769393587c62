"""Real runs for screenshots of lists, comparisons and sweeps: short trainings of the bundled demo that differ in what
they are told.

Each is trained by the command line, so what a page shows of it is what a user would see; only its notes are made up.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from backend.config import config
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import change_notes
from backend.utils.command import backend_command, backend_environment
from backend.utils.places import demo_config
from tests.support.diaries import recording

STEPS = 16
"""Of each run beside the first: enough for a curve that is its own."""
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "demo-slow": (
        {"learning_rate": 1e-5, "seed": 3},
        {"title": "Tenth of the learning rate", "tags": ("lr",), "note": "Learns, but needs four times the steps."},
    ),
    "demo-hot": (
        {"temperature": 1.3, "beta": 0.0, "seed": 5},
        {"title": "Warmer, without KL", "tags": ("sampling", "no-kl"), "favourite": True},
    ),
    "demo-small-groups": ({"group_size": 4, "seed": 7}, {"title": "Groups of four", "tags": ("groups",)}),
}
"""Name → settings that differ from the demo's, and notes."""
SWEEP = {
    "name": "learning-rate",
    "over": {"learning_rate": [2e-5, 1e-4]},
    "seeds": [0, 1],
    "halving": {"first_rung": 4, "keep": 0.5},
}
SWEEP_STEPS = 8


def train_demo(folder: Path, name: str, **settings: Any) -> Path:
    """A finished run of the bundled demo in the runs folder `folder`. Raises CalledProcessError when training fails."""
    changes = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    _run("train", str(demo_config()), "--runs-dir", str(folder), "--name", name, *changes)
    return folder / name


def train_variants(folder: Path) -> None:
    """Train VARIANTS in `folder` and note what VARIANTS says. Raises CalledProcessError."""
    for name, (settings, notes) in VARIANTS.items():
        change_notes(RunFolder(train_demo(folder, name, iters=STEPS, steps_per_eval=4, **settings)), **notes)


def train_sweep(folder: Path) -> None:
    """Train SWEEP over the demo in `folder`. Raises CalledProcessError."""
    base = config.read(demo_config()) | {"iters": SWEEP_STEPS, "steps_per_eval": 4}
    file = folder.parent / "sweep.yaml"
    file.write_text(yaml.safe_dump(SWEEP | {"base": base}), encoding="utf-8")
    _run("sweep", str(file), "--runs-dir", str(folder))


def unpack_sick_run(folder: Path) -> Path:
    """A recorded run of the tests in which health rules find something, as a run folder."""
    return recording("hacking").unpack(folder / "reward-hacking").path


def _run(*arguments: str) -> None:
    subprocess.run(backend_command(*arguments), check=True, env=backend_environment(), stdout=sys.stderr)
