#!/usr/bin/env python3
"""Take screenshots of every page and dialog, without a display.

    python packaging/screenshots.py RUN [RUN …]     opens the first run; the others are listed in the archive
    python packaging/screenshots.py --iters 32      trains the bundled demo first: about a minute
    … --out FOLDER                                  writes there and not into docs/screenshots
    … --text 1.5                                    with text 1.5 times as large

It writes PAGE-light.png at 1280×800 for every page of the sidebar, the states of `screenshot_scenes` (compared runs, a
filter, coloured tokens, health findings, a paused run …), and every dialog. Beside the first run stand three short
ones, a sweep and a recorded sick run, which `samples` makes: a few minutes on two cores. Images are reduced to 256
colours, which keeps every colour of the theme and takes a third of the bytes. Runs are copied into a temporary folder,
the home folder holds the models and datasets of `samples`, and preferences start empty, so that no image shows
anything of this machine or its user.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "packaging")]

import samples  # noqa: E402
import screenshot_scenes  # noqa: E402

from tests.support.diaries import recording  # noqa: E402

SIZE = (1280, 800)  # of the window, in pixels
MODES = ("light",)
COMMON, UNLIKE = 160, 24
"""How many of an image's 256 colours are its most frequent ones, and how far each further colour must be from all
chosen before it (sum of the absolute differences of the three channels)."""
PATIENCE_S = 60.0  # how long a page may take to settle
CALM_S = 0.6  # how long a page must not change to count as settled

EXAMPLE_TRACEBACK = """Traceback (most recent call last):
  File "app/pages/example_page.py", line 12, in show
    raise ValueError("an example")
ValueError: an example"""


def main() -> None:
    options = parse()
    folder = Path(tempfile.mkdtemp(prefix="screenshots-"))
    try:
        prepare(folder, options.text)
        samples.fill(folder / "home")
        runs = folder / "runs"
        copies = [shutil.copytree(run, runs / run.name) for run in options.runs]
        copies = copies or [samples.train_demo(runs, "demo-full-grpo", iters=options.iters)]
        samples.train_variants(runs)
        samples.train_sweep(runs)
        sick = recording("hacking").unpack(runs / "reward-hacking").path  # health rules find something in it
        options.out.mkdir(parents=True, exist_ok=True)
        evaluate(copies[0])
        take_all(copies[0], sick, options.out)
    finally:
        shutil.rmtree(folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw every page of the window into PNG files.")
    parser.add_argument("runs", nargs="*", type=Path, help="run folders; the first is opened")
    parser.add_argument("--iters", type=int, default=32, help="steps of the demo that is trained where no run is given")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "screenshots")
    parser.add_argument("--text", type=float, default=1.0, help="how much larger than usual text is, 1 to 2")
    return parser.parse_args()


def prepare(folder: Path, text: float) -> None:
    """Point home, runs and preferences at `folder` and Qt at no display. Call before anything of the window is
    imported."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    screen = (
        folder / "screen.json"
    )  # large enough for every size; Qt's own without a display is 800×800, and dialogs would be bounded by that
    screen.write_text(json.dumps({"screens": [{"name": "screen", "x": 0, "y": 0, "width": 2600, "height": 1500}]}))
    os.environ |= {
        "HOME": str(folder / "home"),
        "QT_QPA_PLATFORM": f"offscreen:configfile={screen}",
        "GRPO_STUDIO_RUNS": str(folder / "runs"),
        "GRPO_STUDIO_PREFS": str(folder / "prefs"),
        "HF_HUB_OFFLINE": "1",
        "QT_FONT_DPI": str(round(96 * text)),
        "QT_ENABLE_HIGHDPI_SCALING": "0",  # otherwise widgets grow with the text, and text never has to fit
    }


def evaluate(run: Path) -> None:
    """Evaluate a run that has no evaluation yet, for its page. Raises CalledProcessError when that fails."""
    from backend.utils.command import backend_command, backend_environment

    if not any((run / "evaluations").glob("*.json")):
        command = backend_command("evaluate", str(run), "--n", "4")
        subprocess.run(command, check=True, env=backend_environment(), stdout=sys.stderr)


def take_all(run: Path, sick: Path, out: Path) -> None:
    from PySide6.QtWidgets import QApplication

    from app import theme
    from app.pages import PAGES
    from app.state.session import Session
    from app.window import Window

    app = QApplication([])
    app.setCursorFlashTime(0)  # a blinking cursor would be in some images and not in others
    theme.apply(app, "light")
    session = Session()
    session.restore()
    window = Window(session)
    window.show()
    window.resize(*SIZE)
    for mode in MODES:
        window.set_theme(mode)
        window.show_page("train")
        take(window, window, out / f"first-start-{mode}.png")
    take_live(window, out)
    tokens = session.run.folder.path
    session.open_run(run)
    settled(window, window)
    window.show_page("completions")
    window.pages["completions"].pick(mixed_step(session.run))
    try_rewards(window)
    ask_the_model(window)
    show_worse_row(window)
    window.help.show_guide("settings.md#setting-beta")
    for mode in MODES:
        window.set_theme(mode)
        for page in PAGES:
            window.show_page(page.key)
            take(window, window, out / f"{page.key}-{mode}.png")
        runs = [run, *(run.parent / name for name in samples.VARIANTS)]
        for name in screenshot_scenes.page_scenes(window, wait_until, sick, tokens, runs):
            take(window, window, out / f"{name}-{mode}.png")
        session.open_run(run)
        settled(window, window)
        for name, dialog in dialogs(window):
            dialog.resize(dialog.sizeHint() if dialog.sizeHint().width() > dialog.width() else dialog.size())
            take(window, dialog, out / f"{name}-{mode}.png")
            dialog.close()
    window.pages["chat"].chat.unload()
    session.service.close()


def take_live(window, out: Path) -> None:
    """Train in the window, and show it at each scene: what trains never comes to rest."""
    window.resize(*SIZE)
    form = window.session.draft.state
    for name, widget in screenshot_scenes.live_scenes(window, wait_until):
        for mode in MODES:
            window.set_theme(mode)
            write(grabbed(widget), out / f"{name}-{mode}.png")
    window.session.draft.restore_state(form, with_file=True)


def dialogs(window):
    """Open each dialog in turn and yield (name, dialog)."""
    from app.pages.runs.run_actions import CloneDialog
    from app.pages.train.picker import Picker
    from app.widgets.export_panel import ExportPanel
    from app.widgets.menu_dialogs import AboutDialog, PreferencesDialog, PresetPanel, ProblemDialog

    window.show_page("train")
    page, prefs = window.pages["train"], window.session.prefs
    for kind, key in (("model", "model"), ("dataset", "data")):
        prefs.set_member(f"favourite_{kind}", samples.FAVOURITE[kind], True)
        prefs.remember_used(kind, samples.RECENT[kind])
        page.form.fields[key].pick_requested.emit()
        yield f"picker-{kind}", next(picker for picker in window.findChildren(Picker) if picker.kind == kind)
    window.files.show_presets()
    panel = window.findChild(PresetPanel)
    panel.list.setCurrentRow(1)
    yield "presets", panel
    window.show_export(window.session.run.folder)
    yield "export", window.findChild(ExportPanel)
    window.show_export(window.session.run.folder)
    export = window.findChildren(ExportPanel)[-1]
    export.choices.target.setCurrentIndex(export.choices.target.findData("trl"))
    yield "export-trl", export
    window.show_page("runs")
    runs = window.pages["runs"]
    runs.clone(next(row for row in runs.model.rows if row.summary.path == str(window.session.run.folder.path)))
    yield "clone", runs.findChildren(CloneDialog)[-1]
    window.show_preferences()
    yield "preferences", window.findChildren(PreferencesDialog)[-1]
    yield "upload", upload_dialog(window)
    window.help.show_about()
    yield "about", window.findChild(AboutDialog)
    window.help.report_caught("Something went wrong in the window: ValueError: an example", EXAMPLE_TRACEBACK)
    yield "problem-report", window.findChild(ProblemDialog)


def upload_dialog(window):
    """The dialog before an upload, for an account that is made up: nobody is asked for one."""
    from app.widgets.hub_dialogs import UploadDialog
    from backend.utils.command import backend_command

    run = str(window.session.run.folder.path)
    command = backend_command("export", run, "--to", "hub", "--repo", "someone/sums-grpo", "--preview", "--json")
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    account = {"name": "someone", "organisations": [], "can_write": True, "source": "keychain"}
    preview = json.loads(printed.splitlines()[-1])["preview"] | {"account": account}
    dialog = UploadDialog(preview, [], window.session.service, window)
    dialog.show()
    return dialog


def try_rewards(window) -> None:
    """Have the bench sample and score some completions. Raises TimeoutError."""
    window.show_page("rewards")
    page = window.pages["rewards"]
    page.source.sample.click()
    settled(window, window)
    if page.bench.busy:
        raise TimeoutError("The bench never came to rest.")


def ask_the_model(window) -> None:
    """Have base and tuned answer two prompts of the test split, scored. Raises TimeoutError."""
    window.show_page("chat")
    page = window.pages["chat"]
    page.load()
    wait_until(lambda: page.chat.is_loaded)
    for _ in range(2):
        page.rows.next.click()
        wait_until(lambda: page.prompt.toPlainText())
        page.send()
        answers = page.chat.turns[-1].answers.values()
        wait_until(lambda answers=answers: all(answer.scores for answer in answers))


def wait_until(condition) -> None:
    """Raises TimeoutError."""
    from PySide6.QtWidgets import QApplication

    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("No answer came.")
        QApplication.processEvents()
        time.sleep(0.01)


def show_worse_row(window) -> None:
    """Show the sampled completions of a prompt that got worse, where there is one."""
    window.show_page("evaluate")
    page = window.pages["evaluate"]
    settled(window, window)
    page.decoding.choose("sampled")
    kinds = {row.means[page.row_model.decoding].kind for row in page.row_model.rows}
    page.kind.choose("worse" if "worse" in kinds else "all")


def mixed_step(run) -> int:
    """The newest step whose first group has advantages of both signs, so that the page has both to show; else the
    newest."""
    steps = run.index.steps()
    for step in reversed(steps):
        advantages = [completion["advantage"] or 0.0 for completion in run.index.rows(step)[0]["completions"]]
        if min(advantages) < 0 < max(advantages):
            return step
    return steps[-1]


def take(window, widget, file: Path) -> None:
    """Wait until the widget has settled and write its image."""
    write(settled(window, widget), file)


def write(image, file: Path) -> None:
    """Write an image, with PNG's strongest compression."""
    in_few_colours(image).save(str(file), "PNG", 0)
    sys.stderr.write(f"{file.name}  {file.stat().st_size / 1000:.0f} kB\n")


def in_few_colours(image):
    """The image in 256 colours: the most frequent ones, and rare ones far from all of them, such as that of a small
    dot."""
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


def settled(window, widget):
    """The widget's image, once two grabs `CALM_S` apart are equal and no answer is pending. Raises TimeoutError."""
    until = time.monotonic() + PATIENCE_S
    image = grabbed(widget)
    while time.monotonic() < until:
        before, image = image, grabbed(widget)
        service = vars(window.session).get("service")
        if image == before and not (service and service._questions):
            return image
    raise TimeoutError("The page never came to rest.")


def grabbed(widget):
    from PySide6.QtWidgets import QApplication

    until = time.monotonic() + CALM_S
    while time.monotonic() < until:
        QApplication.processEvents()
        time.sleep(0.01)
    return widget.grab().toImage()


if __name__ == "__main__":
    main()
