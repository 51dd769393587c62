"""A scrolling grid of plots, and what concerns all of them: zoom, the menu of the charts, saving them as files."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from PySide6.QtCore import QEvent, QObject, Qt, QTimer, Signal, SignalInstance
from PySide6.QtGui import QResizeEvent, QShowEvent
from PySide6.QtWidgets import QApplication, QPushButton, QWidget

from app import theme
from app.state.charts import Chart
from app.state.guide import place_of
from app.state.messages import problems_to
from app.state.prefs import Prefs
from app.state.run import Mark
from app.widgets.basic.dialogs import open_folder, save_file
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import button
from app.widgets.basic.layout import TabArea, configure, grid, reserve_gutter, set_tab_order
from app.widgets.basic.number_format import counted
from app.widgets.charts.curves import Trace
from app.widgets.charts.plot import FORMATS, Format, Plot, write_chart

PLOT_HEIGHT, LEAST_HEIGHT = 214, 148
MIN_WIDTH, COMFORTABLE_WIDTH = 300, 440
MAX_COLUMNS = 4
TURN_MS = 12
SMOOTHING = {0.0: "No smoothing", 0.6: "Light smoothing", 0.9: "Strong smoothing"}


class ChartContent(NamedTuple):
    """Arguments of `Plot.show_traces`."""

    traces: Sequence[Trace] = ()
    waiting: str = ""
    marks: Sequence[Mark] = ()
    offer: str = ""


class ChartGrid(TabArea):
    """Plots in rows of one to four, those of a section under its heading, which folds them away.

    `content_of(i)` returns what plot `i` shows now, `is_included(i)` if it is in the grid at all. `prefs` keep which
    sections are folded. `run_name` begins the names of files.
    """

    zoomed = Signal(object)  # range of steps (first, last) that all plots show, or None
    step_chosen = Signal(int)
    reported = Signal(str)  # what was written to files, or why nothing was

    def __init__(
        self,
        plots: Sequence[Plot],
        content_of: Callable[[int], ChartContent],
        is_included: Callable[[int], bool] = lambda i: True,
        prefs: Prefs | None = None,
    ) -> None:
        page = QWidget()
        super().__init__(content=page, name="Charts")
        self.plots, self._prefs, self.run_name = list(plots), prefs, "charts"
        folded = prefs.folded_charts.split("\n") if prefs is not None else ()
        self.span: tuple[float, float] | None = None
        self.stale: dict[int, None] = {}  # in the order in which they are drawn
        self._content_of, self._is_included = content_of, is_included
        self._all_steps: tuple[float, float] | None = None
        self._arrangement: tuple[object, ...] = ()
        # One plot per timeout: all visible ones in a single handler would hold up input.
        self.turns = configure(QTimer(self, interval=TURN_MS), timeout=self._draw_next)
        # A click on a zoomed plot may be the first half of a double click, which shows all steps.
        self._clicked_step = 0
        self._click = configure(
            QTimer(self, singleShot=True), timeout=lambda: self.step_chosen.emit(self._clicked_step)
        )
        self._grid = grid((), into=page, spacing=(theme.SPACE, theme.SPACE))
        for plot in self.plots:
            plot.setParent(page)
            plot.setFixedHeight(theme.scaled(PLOT_HEIGHT))
            plot.hide()
            configure(plot, hovered=self.mark_step, zoomed=self.zoom, step_chosen=self._choose)
            plot.save_requested.connect(partial(self.save, plot))
            plot.installEventFilter(self)
        self.sections: dict[str, IconButton] = {}
        for section, members in groupby(self.plots, lambda plot: plot.section):
            if section:
                heading = IconButton(
                    "chevron-down", section, parent=page, checkable=True, role="disclosure", shown=False
                )
                configure(heading, font=theme.heading_font(), checked=section not in folded)
                heading.toggled.connect(self._fold)
                self.sections[section] = heading
                set_tab_order(heading, *members)

    def refresh(self, all_steps: tuple[float, float] | None = None) -> None:
        """Redraw the visible plots now, the others when they scroll into view. `all_steps`: the first and last."""
        self._all_steps = all_steps
        self._arrange()
        # Those that still wait come first: on a busy machine the last ones would never have their turn.
        self.stale = dict.fromkeys([*self.stale, *range(len(self.plots))])
        self.turns.start()

    def set_smoothing(self, weight: float) -> None:
        for plot in self.plots:
            plot.smoothing = weight
        self.refresh(self._all_steps)

    def forget_span(self) -> None:
        self.span = None
        self.zoomed.emit(None)

    def zoom(self, span: tuple[float, float] | None) -> None:
        """Show this range of steps in all plots; None, or a range of all steps, shows all."""
        self._click.stop()
        if span is not None and self._all_steps is not None:
            first, last = self._all_steps
            width = max(2.0, span[1] - span[0])
            start = min(max(span[0], first), last - width)
            span = None if width >= last - first else (start, start + width)
        self.span = span
        self.zoomed.emit(span)
        self.refresh(self._all_steps)

    def zoom_button(self) -> QPushButton:
        """Says which steps are shown while these are not all; a click shows all."""
        tip = "Show all steps (Esc, or a double click on a chart)"
        shown = button("", lambda: self.zoom(None), tip=tip, shown=False)

        def show_span(span: tuple[float, float] | None) -> None:
            shown.setVisible(span is not None)
            if span is not None:
                shown.setText(f"Steps {span[0]:,.0f} – {span[1]:,.0f}  ✕")
                shown.setAccessibleName(f"Only steps {span[0]:,.0f} to {span[1]:,.0f} are shown. Show all steps")

        self.zoomed.connect(show_span)
        return shown

    def included_plots(self) -> list[Plot]:
        return [plot for i, plot in enumerate(self.plots) if self._is_included(i)]

    def draw(self, plot: Plot) -> None:
        i = self.plots.index(plot)
        self.stale.pop(i, None)
        plot.span, plot.all_steps = self.span, self._all_steps
        plot.show_traces(*self._content_of(i))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        reserve_gutter(self, self._grid)
        heading = max((heading.sizeHint().height() + theme.SPACE for heading in self.sections.values()), default=0)
        usual, height = theme.scaled(PLOT_HEIGHT), self.viewport().height() - heading
        rows = max(2, round(height / (usual + theme.SPACE)))
        fitting = (height - (rows - 1) * theme.SPACE) // rows
        for plot in self.plots:
            plot.setFixedHeight(min(max(theme.scaled(LEAST_HEIGHT), fitting), usual * 5 // 4))
        self._arrange()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.turns.start()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        # Qt has no signal for scrolling into view, but it paints what does; if it is stale, it is redrawn.
        if event.type() in (QEvent.Type.Paint, QEvent.Type.Resize) and self.stale and not self.turns.isActive():
            self.turns.start()
        return False

    def _draw_next(self) -> None:
        for i in self.stale:
            plot = self.plots[i]
            # isVisible alone is true of a plot that is scrolled out of view; its visible region is then empty.
            if plot.isVisible() and not plot.visibleRegion().isEmpty():
                self.draw(plot)
                return
        unbuilt = (plot for plot in self.plots if not plot.is_built and not plot.isHidden())
        if self.isVisible() and (plot := next(unbuilt, None)) is not None:
            plot.build()  # so that what scrolls into view has its title at once
        else:
            self.turns.stop()

    def _arrange(self) -> None:
        width = self.width() - theme.GUTTER + theme.SPACE
        fitting = width // (theme.scaled(MIN_WIDTH) + theme.SPACE)
        comfortable = width // (theme.scaled(COMFORTABLE_WIDTH) + theme.SPACE)
        columns = max(1, min(MAX_COLUMNS, max(comfortable, min(fitting, MAX_COLUMNS - 1))))
        included = self.included_plots()
        unfolded = [plot for plot in included if plot.section not in self.folded]
        if (columns, included, unfolded) == self._arrangement:
            return
        self._arrangement = (columns, included, unfolded)
        for widget in (*self.plots, *self.sections.values()):
            self._grid.removeWidget(widget)
        rows = 0
        for section, grouped in groupby(included, lambda plot: plot.section):
            members, is_open = [*grouped], section not in self.folded
            if heading := self.sections.get(section):
                heading.set_icon("chevron-down" if is_open else "chevron-right")
                heading.setText(section if is_open else f"{section}, {counted(len(members), 'chart')}")
                self._grid.addWidget(heading, rows, 0, 1, columns, Qt.AlignmentFlag.AlignLeft)
                rows += 1
            for cell, plot in enumerate(members if is_open else ()):
                self._grid.addWidget(plot, rows + cell // columns, cell % columns)
            rows += -(-len(members) // columns) if is_open else 0
        for plot in self.plots:
            plot.setVisible(plot in unfolded)
        for section, heading in self.sections.items():
            heading.setVisible(any(plot.section == section for plot in included))
        # A QGridLayout never shrinks: columns and rows of an earlier arrangement stay, and must not stretch any more.
        for column in range(MAX_COLUMNS):
            self._grid.setColumnStretch(column, 1 if column < columns else 0)
        for row in range(self._grid.rowCount() + 1):
            self._grid.setRowStretch(row, 1 if row == rows else 0)  # the row below the last takes the spare height
        self.stale |= dict.fromkeys(i for i, plot in enumerate(self.plots) if plot in unfolded)
        self.turns.start()

    @property
    def folded(self) -> set[str]:
        return {section for section, heading in self.sections.items() if not heading.isChecked()}

    def _fold(self) -> None:
        self._arrange()
        if self._prefs is not None:
            self._prefs.folded_charts = "\n".join(self.folded)

    def mark_step(self, step: int | None) -> None:
        for plot in self.plots:
            if plot.isVisible() or step is None:
                plot.set_step(step)

    def _choose(self, step: int) -> None:
        self._clicked_step = step
        if self.span is None:
            self.step_chosen.emit(step)
        else:
            self._click.start(QApplication.doubleClickInterval())

    def save(self, plot: Plot, format: Format) -> None:
        filters = f"{FORMATS[format]} (*.{format})"
        path = save_file(self, "charts", f"Save {plot.title}", self._file_name(plot, format), filters)
        if path is not None:
            target = path if path.suffix else path.with_suffix(f".{format}")
            with problems_to(self.reported.emit):
                self._write(plot, target, format)
                self.reported.emit(f"Saved {plot.title} as {target.name}.")

    def save_all(self, format: Format) -> None:
        folder, written = open_folder(self, "charts", f"Folder for all charts as {FORMATS[format]}"), 0
        if folder is None:
            return
        with problems_to(self.reported.emit):
            for plot in self.included_plots():
                self.draw(plot)
                if any(trace.has_data for trace in plot.traces):
                    self._write(plot, folder / self._file_name(plot, format), format)
                    written += 1
            self.reported.emit(f"Saved {counted(written, 'chart')} in {folder.name}.")

    def _write(self, plot: Plot, path: Path, format: Format) -> None:
        shown, height = max(self.plots, key=QWidget.isVisible), plot.minimumHeight()
        plot.setFixedHeight(max(height, theme.scaled(PLOT_HEIGHT)))  # a low window leaves out titles of axes
        if plot.isHidden():  # in a folded section, where it has no width yet
            plot.resize(shown.width(), plot.minimumHeight())
        write_chart(plot, path, format)
        plot.setFixedHeight(height)

    def _file_name(self, plot: Plot, format: Format) -> str:
        chart = re.sub(r"\W+", "-", plot.title.lower()).strip("-")
        return f"{self.run_name}-{chart}.{format}"


def plots_of(charts: Iterable[tuple[str, Chart]], explain: SignalInstance) -> list[Plot]:
    """Plots for charts by title; `explain` is emitted with the place of the guide when one asks to be explained."""
    plots = []
    for title, chart in charts:
        place, plot = place_of("chart", chart.title), Plot(title, chart.axis, chart.unit, chart.help, chart.section)
        plot.setProperty("guide", place)
        plots.append(configure(plot, explanation_requested=partial(explain.emit, place)))
    return plots
