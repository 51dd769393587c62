#!/usr/bin/env python3
"""Pictures of every page, light and dark, small and large, and of the dialogs, drawn without a display.

    python packaging/screenshots.py RUN [RUN …]     the first run is looked at; the others stand in the archive beside it
    python packaging/screenshots.py --iters 32      trains the bundled demo first: about a minute
    … --out FOLDER                                  in place of docs/screenshots
    … --text 1.5                                    with text that much larger, as a desktop may want it

It writes PAGE-{light,dark}.png at 1280×800 for every page of the sidebar, PAGE-narrow-… at 880×600 and PAGE-wide-… at
2560×1440, and picker-model, picker-dataset and presets. Pictures have 256 colours: that is all there are, and a third of
the bytes. Runs are copied into a folder of their own before they are looked at, the home is an empty one with models and
datasets that are made up, and preferences start empty: nothing of the machine, and nothing of whoever draws, is in the
pictures.
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
sys.path[:0] = [str(ROOT), str(ROOT / "packaging")]

import made_up  # noqa: E402

SIZES = {"": (1280, 800), "-narrow": (880, 600), "-wide": (2560, 1440)}
"""What a picture's name ends in → size of the window."""
COMMON, UNLIKE = 160, 24
"""How many of a picture's 256 colours are its commonest; how far (in all three channels together) the others must be."""
PATIENCE_S = 60.0
"""How long a page may take to settle."""
CALM_S = 0.6
"""How long a page must stay as it is to count as settled."""


def main() -> None:
    options = parse()
    apart = Path(tempfile.mkdtemp(prefix="screenshots-"))
    try:
        prepare(apart, options.text)
        made_up.fill(apart / "home")
        runs = [Path(run) for run in options.runs] or [trained(apart / "trained", options.iters)]
        copies = [shutil.copytree(run, apart / "runs" / run.name) for run in runs]
        options.out.mkdir(parents=True, exist_ok=True)
        draw(copies[0], options.out)
    finally:
        shutil.rmtree(apart)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw every page of the window into PNG files.")
    parser.add_argument("runs", nargs="*", type=Path, help="run folders; the first is looked at")
    parser.add_argument("--iters", type=int, default=32, help="steps of the demo that is trained where no run is given")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "screenshots")
    parser.add_argument("--text", type=float, default=1.0, help="how much larger than usual text is, 1 to 2")
    return parser.parse_args()


def prepare(apart: Path, text: float) -> None:
    """Before anything of the window is imported: no display, runs and preferences that nobody else has."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    os.environ |= {
        "HOME": str(apart / "home"),
        "QT_QPA_PLATFORM": "offscreen",
        "GRPO_STUDIO_RUNS": str(apart / "runs"),
        "GRPO_STUDIO_PREFS": str(apart / "prefs"),
        "HF_HUB_OFFLINE": "1",
        "QT_FONT_DPI": str(round(96 * text)),
        "QT_ENABLE_HIGHDPI_SCALING": "0",  # else all would grow with the text, which proves nothing
    }


def trained(folder: Path, iters: int) -> Path:
    """A finished run of the bundled demo. Raises CalledProcessError when training fails."""
    from backend.spec.command import backend_command, backend_environment
    from backend.spec.places import default_run_name, demo_config

    name = default_run_name("demo", "full", "grpo")
    flags = ("--runs-dir", str(folder), "--name", name, "--set", f"iters={iters}")
    command = backend_command("train", str(demo_config()), *flags)
    subprocess.run(command, check=True, env=backend_environment(), stdout=sys.stderr)
    return next(folder.iterdir())


def draw(run: Path, out: Path) -> None:
    from PySide6.QtWidgets import QApplication

    from app import theme
    from app.model.session import Session
    from app.pages import PAGES
    from app.window import Window

    app = QApplication([])
    app.setCursorFlashTime(0)  # a blinking cursor would be in some pictures and not in others
    theme.apply(app, "light")
    session = Session()
    session.restore()
    window = Window(session)
    window.show()
    session.open_run(run)
    settled(window, window)
    window.show_page("completions")
    window.pages["completions"].pick(telling_step(session.run))
    try_rewards(window)
    for mode in ("light", "dark"):
        window.set_theme(mode)
        for page in PAGES:
            for suffix, size in SIZES.items():
                window.resize(*size)
                window.show_page(page.key)
                take(window, window, out / f"{page.key}{suffix}-{mode}.png")
        window.resize(*SIZES[""])
        for name, dialog in dialogs(window):
            dialog.resize(dialog.sizeHint() if dialog.sizeHint().width() > dialog.width() else dialog.size())
            take(window, dialog, out / f"{name}-{mode}.png")
            dialog.close()
    session.desk.close()


def dialogs(window):
    """(name, dialog) of each, open now."""
    from app.widgets.form.preset_panel import PresetPanel
    from app.widgets.picker.picker import Picker

    window.show_page("train")
    page, prefs = window.pages["train"], window.session.prefs
    for kind, key in (("model", "model"), ("dataset", "data")):
        prefs.set_favourite(kind, made_up.FAVOURITE[kind], True)
        prefs.remember_used(kind, made_up.RECENT[kind])
        page.picking.open(page.form.fields[key])
        yield f"picker-{kind}", next(picker for picker in window.findChildren(Picker) if picker.repo_type == kind)
    window.show_presets()
    panel = window.findChild(PresetPanel)
    panel.list.setCurrentRow(1)
    yield "presets", panel


def try_rewards(window) -> None:
    """Have the bench sample and score some completions. Raises TimeoutError."""
    window.show_page("rewards")
    page = window.pages["rewards"]
    page.source.sample.click()
    settled(window, window)
    if page.bench.busy:
        raise TimeoutError("The bench never came to rest.")


def telling_step(run) -> int:
    """The newest step whose first group has completions better and worse than its mean: there is something to see."""
    steps = run.completion_steps()
    return next((step for step in reversed(steps) if _is_mixed(run.groups(step)[0])), steps[-1])


def _is_mixed(group: dict) -> bool:
    advantages = [completion["advantage"] or 0.0 for completion in group["completions"]]
    return min(advantages) < 0 < max(advantages)


def take(window, shown, file: Path) -> None:
    """Wait until nothing moves any more in what is shown, and write its picture as small as PNG goes."""
    image = settled(window, shown)
    in_few_colours(image).save(str(file), "PNG", 0)
    sys.stderr.write(f"{file.name}  {file.stat().st_size / 1000:.0f} kB\n")


def in_few_colours(image):
    """The picture with 256 colours: those it has most of, and those that are like none of them, such as a small dot's."""
    import numpy as np
    from PySide6.QtCore import Qt
    from PySide6.QtGui import QImage

    image = image.convertToFormat(QImage.Format.Format_RGB32)
    colours, counts = np.unique(np.frombuffer(image.constBits(), np.uint32), return_counts=True)
    colours = colours[np.argsort(counts)[::-1]]
    parts = np.stack([colours >> shift & 255 for shift in (16, 8, 0)], axis=1).astype(int)
    chosen = list(range(min(COMMON, len(colours))))
    for index in range(len(chosen), len(colours)):
        if len(chosen) < 256 and np.abs(parts[chosen] - parts[index]).sum(axis=1).min() > UNLIKE:
            chosen.append(index)
    table = [int(colours[index]) for index in chosen]
    return image.convertToFormat(QImage.Format.Format_Indexed8, table, Qt.ImageConversionFlag.ThresholdDither)


def settled(window, shown):
    """What is shown as a picture, once two looks at it, `CALM_S` apart, are alike. Raises TimeoutError."""
    until = time.monotonic() + PATIENCE_S
    image = look(shown)
    while time.monotonic() < until:
        before, image = image, look(shown)
        if image == before and not waits_for_an_answer(window):
            return image
    raise TimeoutError("The page never came to rest.")


def waits_for_an_answer(window) -> bool:
    """Whether the page has asked the helper process something that it will show."""
    desk = window.session._desk
    return desk is not None and bool(desk._asked)


def look(shown):
    from PySide6.QtWidgets import QApplication

    until = time.monotonic() + CALM_S
    while time.monotonic() < until:
        QApplication.processEvents()
        time.sleep(0.01)
    return shown.grab().toImage()


if __name__ == "__main__":
    main()
