"""The real window under load, in a process of its own, so that nothing of a test runner is in its figures.

    python -m tests.support.window_under_load play 60     a run of 50 steps a second is followed for a minute
    python -m tests.support.window_under_load open FOLDER  a run is opened, until its charts are drawn

Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

from backend.runs.events import EventLog, JsonLines
from backend.runs.run_folder import RunFolder
from backend.runs.run_lock import hold_lock
from tests.support import made_up_runs

STEPS_PER_SECOND = 50
PAGES = ("monitor", "completions")
PAGE_MS = 5000
"""How long each of the two pages is shown in turn."""
SIZE = (1280, 800)
PATIENCE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("play", "open", "write"))
    parser.add_argument("argument")
    options = parser.parse_args()
    if options.what == "write":
        write_forever(RunFolder(Path(options.argument)))
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    figures = play(float(options.argument)) if options.what == "play" else open_run(Path(options.argument))
    print(json.dumps(figures))


def write_forever(folder: RunFolder) -> None:
    """Be the trainer of a run of 50 steps a second, with a group of completions each, until killed."""
    handle, dice = hold_lock(folder), random.Random(1)
    event_log, rows = EventLog(folder.events), JsonLines(folder.completions)
    event_log.write("started", iterations=100_000)
    began, step = time.monotonic(), 0
    while handle:
        step += 1
        event_log.write("step", step=step, metrics=made_up_runs.metrics(step, 30_000, dice))
        for row in made_up_runs.groups(step, 30_000, dice, prompts=1):
            rows.append(row)
        if step % 100 == 0:
            event_log.write("eval", step=step, metrics=made_up_runs.held_out(step, 30_000))
        if step % 500 == 0:
            event_log.write("checkpoint", step=step, path=f"checkpoints/{step:06}")
        time.sleep(max(0.0, began + step / STEPS_PER_SECOND - time.monotonic()))


def play(seconds: float) -> dict[str, float]:
    """Follow such a run for a while, with both pages open and shown in turn."""
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        folder.path.mkdir()
        folder.config.write_text("iters: 100000\n", encoding="utf-8")
        command = [sys.executable, "-m", "tests.support.window_under_load", "write", str(folder.path)]
        writer = subprocess.Popen(command)
        try:
            return _follow(folder, seconds, Path(place))
        finally:
            writer.kill()
            writer.wait(10)


def _follow(folder: RunFolder, seconds: float, place: Path) -> dict[str, float]:
    from PySide6.QtCore import QEventLoop, QTimer

    from tests.support.latency import LatencyProbe

    app, window = _window(place)
    window.session.open_run(folder.path)
    for page in PAGES:
        window.show_page(page)
    _wait(app, lambda: window.session.run.step > STEPS_PER_SECOND)
    probe, began, used = LatencyProbe(window), time.monotonic(), time.process_time()
    steps, pages = window.session.run.step, cycle(PAGES)
    turner = QTimer(window, interval=PAGE_MS)
    turner.timeout.connect(lambda: window.show_page(next(pages)))
    turner.start()
    loop = QEventLoop()  # not the application's own: its quit asks the window, which asks what should become of the run
    QTimer.singleShot(round(seconds * 1000), loop.quit)
    loop.exec()
    took = time.monotonic() - began
    share = (time.process_time() - used) / took
    window.session.service.close()
    return {
        "seconds": round(took, 1),
        "steps": window.session.run.step - steps,
        "share_of_a_core": round(share, 3),
        "peak_memory_mb": round(_peak_mb()),
        "longest_block_ms": round(max(probe.work)),
    }


def open_run(path: Path) -> dict[str, float]:
    """Open a run, as a click on the Runs page does, and wait until the charts in view show all of it. A short run is
    shown before: what the page costs when it is first shown is not the long run's."""
    from tests.support.latency import LatencyProbe

    with tempfile.TemporaryDirectory() as place:
        app, window = _window(Path(place))
        window.show_page("monitor")
        grid = window.pages["monitor"].grid
        window.session.open_run(made_up_runs.make_run(Path(place) / "short", steps=30).path)
        _wait(
            app, lambda: window.session.run.state == "finished" and grid.plots[0].traces and not grid.turns.isActive()
        )
        probe, began, used = LatencyProbe(window), time.perf_counter(), time.process_time()
        window.session.open_run(path)
        run = window.session.run
        _wait(app, lambda: run.state == "finished" and not grid.turns.isActive() and not run._has_news)
        took, cpu = time.perf_counter() - began, time.process_time() - used
        drawn = len(grid.plots[0].traces[0].x)
        window.session.service.close()
    return {
        "seconds": round(took, 2),
        "cpu_seconds": round(cpu, 2),
        "steps_drawn": drawn,
        "peak_memory_mb": round(_peak_mb()),
        "longest_block_ms": round(max(probe.work)),
    }


def _window(place: Path):
    from PySide6.QtWidgets import QApplication

    from app import theme
    from app.state.prefs import Prefs
    from app.state.session import Session
    from app.window import Window

    app = QApplication([])
    theme.apply(app, "light")
    window = Window(Session(Prefs(place / "prefs")))
    window.resize(*SIZE)
    window.show()
    return app, window


def _wait(app, condition) -> None:
    """Raises TimeoutError."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("The window never came to rest.")
        app.processEvents()
        time.sleep(0.001)


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)


if __name__ == "__main__":
    main()
