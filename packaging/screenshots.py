#!/usr/bin/env python3
"""Pictures of every page for the README, light and dark, drawn without a display.

    python packaging/screenshots.py RUN [RUN …]     the first run is looked at; the others stand in the archive beside it
    python packaging/screenshots.py --iters 32      trains the bundled demo first: about a minute
    … --out FOLDER                                  in place of docs/screenshots

It writes {train,monitor,completions,runs}-{light,dark}.png at 1280×800, and train-narrow-{light,dark}.png at 880×600.
Runs are copied into a folder of their own before they are looked at, and preferences start empty: nothing of the
machine, and nothing of whoever draws, is in the pictures.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PAGES = ("train", "monitor", "completions", "runs")
SIZE, NARROW = (1280, 800), (880, 600)
PATIENCE_S = 20.0
"""How long a page may take to settle."""
CALM_S = 0.6
"""How long a page must stay as it is to count as settled."""


def main() -> None:
    options = parse()
    apart = Path(tempfile.mkdtemp(prefix="screenshots-"))
    try:
        prepare(apart)
        runs = [Path(run) for run in options.runs] or [trained(apart / "trained", options.iters)]
        shown = [shutil.copytree(run, apart / "runs" / run.name) for run in runs]
        options.out.mkdir(parents=True, exist_ok=True)
        draw(shown[0], options.out)
    finally:
        shutil.rmtree(apart)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw every page of the window into PNG files.")
    parser.add_argument("runs", nargs="*", type=Path, help="run folders; the first is looked at")
    parser.add_argument("--iters", type=int, default=32, help="steps of the demo that is trained where no run is given")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "screenshots")
    return parser.parse_args()


def prepare(apart: Path) -> None:
    """Before anything of the window is imported: no display, runs and preferences that nobody else has."""
    os.environ |= {
        "QT_QPA_PLATFORM": "offscreen",
        "GRPO_STUDIO_RUNS": str(apart / "runs"),
        "GRPO_STUDIO_PREFS": str(apart / "prefs"),
    }


def trained(folder: Path, iters: int) -> Path:
    """A finished run of the bundled demo. Raises CalledProcessError when training fails."""
    from backend.spec.command import backend_command, backend_environment
    from backend.spec.places import default_run_name, demo_config

    name = default_run_name("demo", "full", "grpo")
    told = ("--runs-dir", str(folder), "--name", name, "--set", f"iters={iters}")
    command = backend_command("train", str(demo_config()), *told)
    subprocess.run(command, check=True, env=backend_environment(), stdout=sys.stderr)
    return next(folder.iterdir())


def draw(run: Path, out: Path) -> None:
    from PySide6.QtWidgets import QApplication

    from app import theme
    from app.studio import Studio
    from app.window import Window

    app = QApplication([])
    theme.apply(app, "light")
    studio = Studio()
    studio.restore()
    window = Window(studio)
    window.show()
    studio.open_run(run)
    settled(window)
    window.show_page("completions")
    window.pages["completions"].pick(telling_step(studio.run))
    for mode in ("light", "dark"):
        window.set_theme(mode)
        for page in PAGES:
            take(window, page, SIZE, out / f"{page}-{mode}.png")
        take(window, "train", NARROW, out / f"train-narrow-{mode}.png")


def telling_step(run) -> int:
    """The newest step whose first group has completions better and worse than its mean: there is something to see."""
    steps = run.completion_steps()
    return next((step for step in reversed(steps) if _is_mixed(run.groups(step)[0])), steps[-1])


def _is_mixed(group: dict) -> bool:
    advantages = [one["advantage"] or 0.0 for one in group["completions"]]
    return min(advantages) < 0 < max(advantages)


def take(window, page: str, size: tuple[int, int], file: Path) -> None:
    """Show the page, wait until nothing moves any more, and write the picture as small as PNG goes."""
    window.resize(*size)
    window.show_page(page)
    image = settled(window)
    image.save(str(file), "PNG", 0)  # pyright: ignore[reportCallIssue, reportArgumentType]
    sys.stderr.write(f"{file.name}  {file.stat().st_size / 1000:.0f} kB\n")


def settled(window):
    """The window as a picture, once two looks at it, `CALM_S` apart, are alike. Raises TimeoutError."""
    until = time.monotonic() + PATIENCE_S
    image = look(window)
    while time.monotonic() < until:
        before, image = image, look(window)
        if image == before:
            return image
    raise TimeoutError("The page never came to rest.")


def look(window):
    from PySide6.QtWidgets import QApplication

    until = time.monotonic() + CALM_S
    while time.monotonic() < until:
        QApplication.processEvents()
        time.sleep(0.01)
    return window.grab().toImage()


if __name__ == "__main__":
    main()
