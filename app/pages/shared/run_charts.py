"""The charts of one run, and the controls above them: which curves each chart has, what they show, and where a click leads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject, QTimer, Signal
from PySide6.QtGui import QAction, QActionGroup
from PySide6.QtWidgets import QMenu, QPushButton

from app.state import charts
from app.state.charts import CHARTS, NAMINGS, Chart, Curve, Naming, column_names
from app.state.guide import place_of_chart
from app.state.run import Run
from app.state.session import Session
from app.widgets.basic.controls import ComboBox
from app.widgets.basic.dialogs import open_folder, save_file
from app.widgets.basic.labels import explain_at
from app.widgets.charts.chart_files import FORMATS, Format, write_csv, write_png, write_svg
from app.widgets.charts.chart_grid import ChartContent, ChartGrid, ZoomButton
from app.widgets.charts.plot import Plot, Trace
from backend.utils.disk_faults import DiskError

# Saving the charts of a grid as files: one of them, or all into a folder. The dialogs begin in the folder that was
# used last.

KIND = "charts"
"""What the preferences remember the folder for."""


class ChartExport(QObject):
    """Asks where to, and writes one chart per turn of the event loop.

    `run_name()` begins the files' names; `tell` shows one sentence about what was written, or why not.
    """

    def __init__(self, grid: ChartGrid, run_name: Callable[[], str], tell: Callable[[str], object]) -> None:
        super().__init__(grid)
        self._grid, self._run_name, self._tell = grid, run_name, tell
        self._queue: list[Plot] = []
        self._written = 0
        self._target: tuple[Path, Format] = (Path(), "png")
        self._turns = QTimer(self, interval=0)
        self._turns.timeout.connect(self._write_next)
        grid.save_requested.connect(self.save)

    def save(self, plot: Plot, format: Format) -> None:
        """Ask for a file, and write this chart to it."""
        name = self._file_name(plot, format)
        path = save_file(self._grid, KIND, f"Save {plot.title}", name, f"{FORMATS[format]} (*.{format})")
        if path is None:
            return
        target = path if path.suffix else path.with_suffix(f".{format}")
        if self._write(plot, target, format):
            self._tell(f"{plot.title} is in {target.name}.")

    def save_all(self, format: Format) -> None:
        """Ask for a folder, and write every chart that has data into it, in a file of its own."""
        folder = open_folder(self._grid, KIND, f"A folder for every chart as {FORMATS[format]}")
        if folder is not None:
            self.write_all(folder, format)

    def write_all(self, folder: Path, format: Format) -> None:
        """Begin to write every chart that has data into `folder`."""
        self._queue, self._written = self._grid.included_plots(), 0
        self._target = (folder, format)
        self._turns.start()

    def _write_next(self) -> None:
        folder, format = self._target
        if not self._queue:
            self._turns.stop()
            self._tell(f"{self._written} charts are in {folder.name}.")
            return
        plot = self._queue.pop(0)
        self._grid.draw(plot)
        if not any(trace.has_data for trace in plot.traces):
            return
        if self._write(plot, folder / self._file_name(plot, format), format):
            self._written += 1
        else:  # the others would fail alike, and the sentence says why
            self._turns.stop()

    def _write(self, plot: Plot, path: Path, format: Format) -> bool:
        try:
            if format == "csv":
                write_csv(plot.traces, path)
            elif format == "svg":
                write_svg(plot, path, plot.title)
            else:
                write_png(plot, path)
        except DiskError as fault:
            self._tell(fault.faults[0].sentence)
            return False
        return True

    def _file_name(self, plot: Plot, format: Format) -> str:
        chart = re.sub(r"\W+", "-", plot.title.lower()).strip("-")
        return f"{self._run_name()}-{chart}.{format}"


# ── run charts ───────────────────────────────────────────────────────────────────────────────────────────────────────

# The button above a grid of charts with what concerns all of them: marks, hidden curves, saving as files, the columns
# of tables.


class ChartsMenu(QPushButton):
    """A button that opens the menu.

    Attributes:
        marks – the action that shows or hides the marks; checked while they are shown.

    Signals:
        naming_chosen(str) – tables shall call their columns so.
    """

    naming_chosen = Signal(str)

    def __init__(self, grid: ChartGrid, export: ChartExport) -> None:
        super().__init__("Charts")
        self.setProperty("menu", "true")
        self.setAccessibleName("What to do with the charts")
        menu = QMenu(self)
        self.marks: QAction = menu.addAction("Show marks")
        self.marks.setCheckable(True)
        self.marks.setToolTip("Evaluations, saves, changes of settings, findings and resumes")
        menu.addAction("Show all curves", lambda: _show_all_curves(grid))
        menu.addAction("Show all steps", lambda: grid.zoom(None))
        menu.addSeparator()
        for name, text in FORMATS.items():
            menu.addAction(f"Save all as {text}s…", lambda name=name: export.save_all(name))
        columns = menu.addMenu("Columns of CSV tables")
        names = QActionGroup(columns)
        self._namings: dict[Naming, QAction] = {}
        for naming, text in NAMINGS.items():
            action = self._namings[naming] = names.addAction(columns.addAction(text))
            action.setCheckable(True)
            action.triggered.connect(lambda _, naming=naming: self.naming_chosen.emit(naming))
        self.setMenu(menu)

    def choose_naming(self, naming: Naming) -> None:
        """Mark a naming as the chosen one."""
        self._namings[naming].setChecked(True)


def _show_all_curves(grid: ChartGrid) -> None:
    for plot in grid.plots:
        for name in list(plot.hidden):
            plot.toggle_curve(name)


# ── run charts ───────────────────────────────────────────────────────────────────────────────────────────────────────

TWO_UPDATES = "Set Updates per rollout to 2 in the form"
SMOOTHING = (("No smoothing", 0.0), ("Light smoothing", 0.6), ("Strong smoothing", 0.9))


class RunCharts:
    """A grid with the charts of `app.state.charts`, filled from a run.

    Attributes:
        grid – the grid.
        tools – the controls above it, from the left: the way back from a zoom, the smoothing, and the menu.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._run: Run | None = None
        self._curves: list[list[Curve]] = [[] for _ in CHARTS]
        self._curves_for: tuple[object, ...] = ()
        self._shows_marks = session.prefs.chart_marks
        self.grid = ChartGrid(
            [Plot(chart.title, chart.axis, chart.unit, chart.help) for chart in CHARTS],
            self._content_of,
            lambda index: bool(self._curves[index]),
        )
        self.smoothing = self._smoothing_box()
        export = ChartExport(self.grid, self._run_name, session.message.emit)
        self.menu = ChartsMenu(self.grid, export)
        self.tools = (ZoomButton(self.grid), self.smoothing, self.menu)
        self._connect()

    def _smoothing_box(self) -> ComboBox:
        box = ComboBox()
        for label, weight in SMOOTHING:
            box.addItem(label, weight)
        box.setMinimumContentsLength(13)
        box.setAccessibleName("Smoothing of the charts")
        box.currentIndexChanged.connect(lambda _: self.grid.set_smoothing(box.currentData()))
        return box

    def _connect(self) -> None:
        prefs = self._session.prefs
        for plot in self.grid.plots:
            place = place_of_chart(plot.title)
            explain_at(plot, place)
            plot.explanation_requested.connect(partial(self._session.guide_requested.emit, place))
            plot.offer_taken.connect(self._session.use_two_updates)
            plot.set_log(plot.title in prefs.log_charts)
            plot.log_changed.connect(partial(prefs.set_log_chart, plot.title))
        self.grid.step_chosen.connect(lambda step: self._session.completions_requested.emit(step, None))
        self.menu.marks.setChecked(self._shows_marks)
        self.menu.marks.toggled.connect(self.show_marks)
        self.menu.choose_naming(prefs.chart_columns)
        self.menu.naming_chosen.connect(self.set_naming)

    def show_run(self, run: Run | None) -> None:
        """Show this run from the next refresh on, all of its steps."""
        self._run, self._curves_for = run, ()
        self.grid.forget_span()

    def refresh(self) -> None:
        """Draw what the run holds now."""
        if self._run is not None:
            self._find_curves(self._run)
            self.grid.refresh(self._run.span)

    def show_marks(self, shown: bool) -> None:
        """Show or hide the marks on all charts, now and at the next launch."""
        self._session.prefs.chart_marks = self._shows_marks = shown
        self.refresh()

    def set_naming(self, naming: Naming) -> None:
        """What tables call the columns of a chart, now and at the next launch."""
        self._session.prefs.chart_columns = naming
        self.refresh()

    def _columns(self, run: Run, chart: Chart, curve: Curve) -> tuple[str, ...]:
        return column_names(chart, curve, self._session.prefs.chart_columns, run.config.get("scale_rewards", "group"))

    def _run_name(self) -> str:
        return self._run.folder.name if self._run is not None else "charts"

    def _find_curves(self, run: Run) -> None:
        """Decide each chart's curves. Those of the reward functions are included before their first value, so that no chart
        moves when it comes."""
        key = (len(run.metric_names()), len(run.eval_metric_names()), tuple(run.reward_names), bool(run.step))
        if key == self._curves_for:
            return
        self._curves_for = key
        expected = [f"rewards/{name}/{kind}" for name in run.reward_names for kind in ("mean", "std")]
        steps = list(dict.fromkeys([*run.metric_names(), *expected]))
        evals = list(dict.fromkeys([*run.eval_metric_names(), *expected])) if run.eval_metric_names() else []
        self._curves = [self._curves_of(chart, evals if chart.held_out else steps, run) for chart in CHARTS]

    def _curves_of(self, chart: Chart, names: list[str], run: Run) -> list[Curve]:
        """The curves of a chart, of which there are metrics with these names; none where the run has nothing for it."""
        curves = charts.curves_of(chart, names, run.reward_names)
        return curves if charts.has_place(chart, curves, names, has_steps=bool(run.step)) else []

    def _content_of(self, index: int) -> ChartContent:
        run, chart = self._run, CHARTS[index]
        if run is None:
            return ChartContent()
        read = run.eval_series if chart.held_out else run.series
        traces = [
            replace(
                trace_of(curve, read, stacked=curve.metric in chart.stacked), columns=self._columns(run, chart, curve)
            )
            for curve in self._curves[index]
        ]
        waiting = charts.placeholder(chart, run.config, is_live=run.is_live, steps=run.step)
        marks = run.marks if self._shows_marks else ()
        shown = [trace for trace in traces if trace.has_data]
        reason = charts.flat_reason(chart, run.config)
        if reason and not any((trace.y > 0).any() for trace in shown):
            return ChartContent((), reason, marks, TWO_UPDATES)
        return ChartContent(shown, waiting, marks)


def trace_of(curve: Curve, read: Callable, *, stacked: bool = False) -> Trace:
    """The curve's numbers, and its band where it has one; `read(metric)` returns (steps, values)."""
    x, y = read(curve.metric)
    low = high = None
    if curve.spread:
        spread = read(curve.spread)[1]
        if len(spread):
            low, high = y - spread, y + spread
    elif curve.low and len(read(curve.low)[1]) and len(read(curve.high)[1]):
        low, high = read(curve.low)[1], read(curve.high)[1]
    return Trace(curve.label, curve.colour, x, y, low, high, stacked)
