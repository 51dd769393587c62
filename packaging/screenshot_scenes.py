"""States of pages beyond the one in which they open: a filter set, two completions compared, a run paused, runs
compared.

Each scene puts the window into its state and yields the name of its image; `packaging/screenshots.py` takes it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import samples
from PySide6.QtWidgets import QApplication

Wait = Callable[[Callable[[], Any]], None]  # process events until a condition holds. Raises TimeoutError

LIVE_STEPS, SHOWN_AT = 24, 6  # length of the run that is trained in the window, and the step at which it is paused


def live_scenes(window: Any, wait: Wait) -> Iterator[tuple[str, Any]]:
    """Train in the window, with recorded tokens: (image, widget) while it trains, while it is paused, with the panel of
    settings.

    Leaves the run finished, with a changed setting. Raises TimeoutError.
    """
    session = window.session
    session.draft.update({"record_tokens": True, "iters": LIVE_STEPS, "lr_schedule": "constant"})
    window.session.starter.start()
    wait(lambda: session.run is not None and session.run.step >= SHOWN_AT)
    run = session.run
    yield "monitor-live", window
    run.send("pause")
    wait(lambda: run.state == "paused")
    yield "monitor-paused", window
    page = window.pages["monitor"]
    page.change_settings()
    panel = page.steering
    panel._on_edited("temperature", 0.8)
    panel.fields["temperature"].show_value(0.8)
    yield "change-settings", panel
    panel.apply_button.click()
    wait(lambda: run.data.notes)  # the trainer says from which step on it holds
    panel.close()
    run.send("resume")
    wait(lambda: not run.is_live)


def page_scenes(window: Any, wait: Wait, sick: Path, tokens: Path, runs: list[Path]) -> Iterator[str]:
    """States of pages, one after the other. `sick`: a run with findings; `tokens`: one with recorded tokens and a
    change of settings."""
    session = window.session
    yield from settings_scenes(window)
    yield from machine_scenes(window)
    yield from _monitor_scenes(window, wait, sick, tokens)
    yield from _completion_scenes(window, wait)
    window.show_page("runs")
    page = window.pages["runs"]
    wait(lambda: len(page.model.rows) >= len(runs) and not page.runs.is_reading)
    if not session.queue.waiting:
        session.queue.set_paused(True)
        for _ in range(2):
            session.starter.queue()
        wait(lambda: len(session.queue.waiting) == 2)
    page.table.choose(runs[0])
    yield "runs-queue"
    page.table.choose(*runs[:3])
    page.compare(page.table.selected_runs())
    yield "compare"
    page._close_comparison()


def settings_scenes(window: Any) -> Iterator[str]:
    """The settings of training, all of them; the essentials are back afterwards."""
    window.show_page("train")
    page = window.pages["train"]
    page.show_density("all")
    QApplication.processEvents()  # the block has its height only once it is laid out
    page.form.scroll_to(page.form.fields["mask_prompt"])
    yield "train-settings"
    page.show_density("essentials")


def machine_scenes(window: Any) -> Iterator[str]:
    """The Machines card with two Macs that were checked; the form is as before afterwards."""
    session, form = window.session, window.session.draft.state
    window.show_page("train")
    page = window.pages["train"]
    session.draft.set("hosts", samples.hosts_file())
    session.machines.report = samples.machine_report()
    session.machines.changed.emit()
    page.show_density("all")
    QApplication.processEvents()
    page.form.verticalScrollBar().setValue(page.machines.y())
    yield "train-machines"
    session.draft.restore_state(form, with_file=True)
    page.show_density("essentials")


def _monitor_scenes(window: Any, wait: Wait, sick: Path, tokens: Path) -> Iterator[str]:
    session = window.session
    window.show_page("monitor")
    for name, run in (("monitor-health", sick), ("monitor-change", tokens)):
        session.open_run(run)
        wait(lambda: session.run.read_share is None and session.run.step)
        if name == "monitor-change":
            _zoom(window)
        yield name
    window.pages["monitor"].grid.zoom(None)


def _zoom(window: Any) -> None:
    """Show part of the steps, and the KL, whose spikes flatten the rest, on a log axis."""
    grid = window.pages["monitor"].grid
    grid.zoom((2.0, LIVE_STEPS - 2.0))
    kl = next(plot for plot in grid.plots if plot.title == "KL from the reference")
    kl.set_log(True)


def _completion_scenes(window: Any, wait: Wait) -> Iterator[str]:
    window.show_page("completions")
    page = window.pages["completions"]
    page.pick(SHOWN_AT)
    page.table.selectRow(1)  # the first line is the prompt's
    page.pane.measure.setCurrentIndex(page.pane.measure.findData("ratio"))
    yield "completions-tokens"
    page.pane.measure.setCurrentIndex(0)
    page.bar.show_filter("best")
    page.bar.scope.choose("run")
    wait(lambda: page.completions.shown.is_done)
    yield "completions-filter"
    page.bar.scope.choose("step")
    page.bar.show_filter("all")
    page.table.selectRow(1)
    model = page.table.selectionModel()
    kind = model.SelectionFlag.Select | model.SelectionFlag.Rows
    model.select(page.table.model().index(2, 0), kind)
    yield "completions-difference"
    page.table.selectRow(1)
