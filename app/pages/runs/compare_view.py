"""Several runs on the same charts, what differs in their settings, what each has reached, and what they write to the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PySide6.QtCore import QObject, Qt, QTimer, Signal
from PySide6.QtGui import (
    QGuiApplication,
    QHideEvent,
    QKeySequence,
    QResizeEvent,
    QShortcut,
    QShowEvent,
    QStandardItem,
    QStandardItemModel,
)
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHBoxLayout,
    QHeaderView,
    QMenu,
    QMessageBox,
    QSplitter,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.pages.runs.run_legend import ComparedName, RunLegend, letter_of
from app.pages.runs.shared_prompt_panel import SharedPromptPanel
from app.state.guide import place_of_chart
from app.state.run import Run
from app.state.run_comparison import AXES, ComparedMetric, RunComparison
from app.state.run_notices import rewards_at_the_ends
from app.state.run_state import Mark
from app.widgets.basic.controls import Segments
from app.widgets.basic.dialogs import save_file
from app.widgets.basic.labels import button, explain_at, label, plain_tip
from app.widgets.basic.number_format import duration, figure
from app.widgets.basic.tables import BaseTable
from app.widgets.charts.chart_grid import ChartContent, ChartExport, ChartGrid
from app.widgets.charts.curves import Trace
from app.widgets.charts.plot import Plot
from app.widgets.run_header import STATE_LABELS
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import (
    RunRecord,
    RunResult,
    as_csv,
    as_markdown,
    differing_settings,
    result_of,
    results_table,
    settings_in_course,
    settings_table,
    value_text,
)
from backend.utils.disk_faults import DiskError
from backend.utils.whole_file import save_as

# A read-only table of texts, such as the settings that differ between runs.

_WIDEST = 260
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter


class ComparisonTable(BaseTable):
    """The first row of a table is its header, its first column names the rows."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(name)
        self.table: list[list[str]] = []
        self._cells = QStandardItemModel(self)
        self.setModel(self._cells)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        self.horizontalHeader().setDefaultAlignment(_LEFT)
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Interactive)

    def show_table(self, table: Sequence[Sequence[str]]) -> None:
        """Show these rows; where only texts have changed, selection and scroll position stay."""
        rows = [list(row) for row in table]
        if rows == self.table:
            return
        is_same_shape = [len(row) for row in rows] == [len(row) for row in self.table]
        self.table = rows
        if is_same_shape:
            for i, row in enumerate(rows[1:]):
                for j, text in enumerate(row):
                    self._cells.item(i, j).setText(text)
        else:
            self._cells.clear()
            for row in rows[1:]:
                self._cells.appendRow([_cell(text) for text in row])
        self._cells.setHorizontalHeaderLabels(rows[0])
        self.resizeColumnsToContents()
        for column in range(self._cells.columnCount()):
            self.setColumnWidth(column, min(self.columnWidth(column) + theme.SPACE, theme.scaled(_WIDEST)))


def _cell(text: str) -> QStandardItem:
    item = QStandardItem(text)
    item.setFont(theme.figures_font())
    item.setToolTip(plain_tip(text))
    return item


# ── comparison export ────────────────────────────────────────────────────────────────────────────────────────────────

# The menu that copies or saves the two tables of a comparison, as CSV or Markdown.

Tables = Sequence[Sequence[Sequence[str]]]
KIND = "tables"
"""What the preferences remember the folder for."""


class ComparisonExport(QObject):
    """`tables()` returns the tables as they are now."""

    def __init__(self, tables: Callable[[], Tables], parent: QWidget) -> None:
        super().__init__(parent)
        self._tables, self._window = tables, parent

    def menu(self, parent: QWidget) -> QMenu:
        menu = QMenu(parent)
        menu.addAction("Copy as Markdown", lambda: self.copy(as_markdown))
        menu.addAction("Copy as CSV", lambda: self.copy(as_csv))
        menu.addSeparator()
        menu.addAction("Save as Markdown…", lambda: self.save_as("Markdown", ".md", as_markdown))
        menu.addAction("Save as CSV…", lambda: self.save_as("CSV", ".csv", as_csv))
        return menu

    def copy(self, write: Callable[[Sequence[Sequence[str]]], str]) -> None:
        """Put both tables on the clipboard, with an empty line between them."""
        QGuiApplication.clipboard().setText("\n".join(map(write, self._tables())))

    def save_as(self, format: str, suffix: str, write: Callable[[Sequence[Sequence[str]]], str]) -> None:
        """Ask for a file, and write both tables into it."""
        name, pattern = f"comparison{suffix}", f"{format} (*{suffix})"
        if path := save_file(self._window, KIND, "Save the tables", name, pattern):
            self.save(path, write)

    def save(self, path: Path, write: Callable[[Sequence[Sequence[str]]], str]) -> None:
        try:
            save_as(path, "\n".join(map(write, self._tables())))
        except DiskError as fault:
            QMessageBox.warning(self._window, "Not saved", fault.faults[0].sentence)


# ── compare view ─────────────────────────────────────────────────────────────────────────────────────────────────────

POSITIONS: dict[str, tuple[str, Callable[[int], str]]] = {
    "step": ("step", lambda x: f"step {x:,}"),
    "tokens": ("tokens", lambda x: f"{x:,} tokens"),
    "time": ("working time", duration),
}
"""Key of an x axis → its title below the charts, and the name of a position."""
PARTS = {"results": "Results", "settings": "Settings that differ", "completions": "Completions"}
TABLES_HEIGHT, TABLES_WIDTH = 210, 760
WIDE = 1700
"""From this width on the tables are beside the charts."""
NEWS_MS = 500
"""At most this often tables and charts are drawn again while runs are read or train."""


class CompareView(QWidget):
    """Shows the runs passed to `compare`; `update_records` keeps states and titles current.

    Attributes:
        comparison – the runs being followed; None before the first comparison and after `close_runs`.

    Signals:
        closed – back to the list.
        guide_requested(str) – show this place of the guide.
        told(str) – a sentence for the user.
    """

    closed = Signal()
    guide_requested = Signal(str)
    told = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.comparison: RunComparison | None = None
        self.grid: ChartGrid | None = None
        self._records: list[RunRecord] = []
        self._metrics: list[ComparedMetric] = []
        self._differences: dict[str, list[Any]] = {}
        self._news = QTimer(self, singleShot=True, interval=NEWS_MS)
        self._news.timeout.connect(self.refresh)
        self._compose()
        self._lay_out()

    def _compose(self) -> None:
        self.back = button("Back to the list", self.closed.emit, tip="Escape")
        escape = QShortcut(QKeySequence(Qt.Key.Key_Escape), self, self.closed.emit)
        escape.setContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
        self.title = label(font=theme.title_font())
        self.axis = Segments(AXES, "Horizontal axis")
        self.axis.chosen.connect(lambda _: self._change_axis())
        self.legend = RunLegend()
        self.legend.shown_changed.connect(self._draw_charts)
        self.part = Segments(PARTS, "Below the charts")
        self.part.chosen.connect(lambda key: self._tables.setCurrentIndex(list(PARTS).index(key)))
        self.results, self.settings = ComparisonTable("Results of the runs"), ComparisonTable("Settings that differ")
        self.same = label("Their settings are the same.", role="muted", align=Qt.AlignmentFlag.AlignCenter)
        self.prompts = SharedPromptPanel()
        self.export = ComparisonExport(self.tables, self)
        self.export_button = button("Export…", self._show_export_menu, tip="Both tables, as CSV or Markdown")

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(theme.SPACE)
        head.addWidget(self.back)
        head.addWidget(self.title, 1)
        head.addWidget(self.axis)
        lower_head = QHBoxLayout()
        lower_head.addWidget(self.part)
        lower_head.addStretch(1)
        lower_head.addWidget(self.export_button)
        self._settings = QStackedWidget()
        self._settings.addWidget(self.settings.in_card())
        self._settings.addWidget(self.same)
        self._tables = QStackedWidget()
        for part in (self.results.in_card(), self._settings, self.prompts):
            self._tables.addWidget(part)
        lower = QWidget()
        below = QVBoxLayout(lower)
        below.setContentsMargins(0, 0, 0, 0)
        below.setSpacing(theme.SPACE)
        below.addLayout(lower_head)
        below.addWidget(self._tables, 1)
        self._charts = QWidget()
        charts = QVBoxLayout(self._charts)
        charts.setContentsMargins(0, 0, 0, 0)
        self.parts = QSplitter(Qt.Orientation.Vertical, childrenCollapsible=False, handleWidth=theme.SPACE)
        self.parts.addWidget(self._charts)
        self.parts.addWidget(lower)
        self.parts.setStretchFactor(0, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addLayout(head)
        column.addWidget(self.legend)
        column.addWidget(self.parts, 1)
        for first, second in pairwise([self.back, *self.axis.buttons.values()]):
            QWidget.setTabOrder(first, second)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        wide = self.width() >= theme.scaled(WIDE)
        orientation = Qt.Orientation.Horizontal if wide else Qt.Orientation.Vertical
        if self.parts.orientation() != orientation or event.oldSize().width() < 0:
            self.parts.setOrientation(orientation)
            self.parts.setSizes([10_000, theme.scaled(TABLES_WIDTH if wide else TABLES_HEIGHT)])

    # ── the runs ────────────────────────────────────────────────────────────────────────────────

    def compare(self, records: Sequence[RunRecord]) -> None:
        """Compare these runs from now on, in this order."""
        self.close_runs()
        self._drop_grid()
        self._records, self._metrics = list(records), []
        folders = [Path(record.summary.path) for record in records]
        self._differences = differing_settings([settings_in_course(RunFolder(folder)) for folder in folders])
        self.title.setText(f"Compare {len(records)} runs")
        self.comparison = RunComparison(folders, self)
        self.comparison.changed.connect(self._on_news)
        self.refresh()

    def update_records(self, records: Sequence[RunRecord]) -> None:
        """Take the new records of runs that are compared."""
        new = {record.summary.path: record for record in records}
        current = [new.get(record.summary.path, record) for record in self._records]
        if current != self._records:
            self._records = current
            self._on_news()

    def close_runs(self) -> None:
        """Stop following the runs."""
        if self.comparison is not None:
            self.comparison.close()
            self.comparison.deleteLater()
            self.comparison = None

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._news.stop()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.refresh()

    def _on_news(self) -> None:
        if self.isVisible() and not self._news.isActive():
            self._news.start()

    def refresh(self) -> None:
        """Show what has been read so far."""
        if self.comparison is None:
            return
        names = self.names()
        self.legend.show_names(names)
        self._show_tables(names)
        self.prompts.show_runs(self.comparison, names)
        metrics = self.comparison.metrics()
        if metrics != self._metrics:
            self._metrics = metrics
            self._build_grid()
        self._draw_charts()

    def names(self) -> list[ComparedName]:
        return [
            ComparedName(i, letter_of(i), record.title, record.summary.name) for i, record in enumerate(self._records)
        ]

    # ── charts ──────────────────────────────────────────────────────────────────────────────────

    def _build_grid(self) -> None:
        """A plot for each metric. New metrics come while the first run is read, and hardly ever after that."""
        self._drop_grid()
        plots = [Plot(one.title, one.axis, one.unit, one.help) for one in self._metrics]
        for plot, metric in zip(plots, self._metrics, strict=True):
            place = place_of_chart(metric.chart)
            explain_at(plot, place)
            plot.explanation_requested.connect(partial(self.guide_requested.emit, place))
        self.grid = ChartGrid(plots, self._content, lambda i: True)
        ChartExport(self.grid, lambda: "comparison", self.told.emit)  # the grid owns it
        layout = self._charts.layout()
        assert layout is not None
        layout.addWidget(self.grid)

    def _change_axis(self) -> None:
        """A range that was zoomed into on the old axis is none on the new one."""
        if self.grid is not None:
            self.grid.forget_span()
        self._draw_charts()

    def _drop_grid(self) -> None:
        if self.grid is not None:
            self.grid.hide()
            self.grid.deleteLater()
            self.grid = None

    def _draw_charts(self) -> None:
        if self.grid is not None and self.comparison is not None:
            for plot in self.grid.plots:
                plot.set_step_axis(*POSITIONS[self.axis.key], is_time=self.axis.key == "time")
            self.grid.refresh(self.comparison.span(self.axis.key))

    def _content(self, i: int) -> ChartContent:
        assert self.comparison is not None
        names = [name for name in self.legend.shown() if name.index < len(self.comparison.runs)]
        traces = [self._trace(name, self._metrics[i]) for name in names]
        marks = [mark for name in names for mark in self._changes(name)]
        return ChartContent(
            [trace for trace in traces if trace.has_data], "None of the runs shown has this metric.", marks
        )

    def _changes(self, name: ComparedName) -> list[Mark]:
        """The changes of settings during a run, each with the run's letter."""
        assert self.comparison is not None
        run = self.comparison.runs[name.index]
        found = self.comparison.changes(run, self.axis.key)
        return [Mark(x, "change", f"{name.letter}: {sentence}") for x, sentence in found]

    def _trace(self, name: ComparedName, metric: ComparedMetric) -> Trace:
        assert self.comparison is not None
        x, y = self.comparison.curve(self.comparison.runs[name.index], metric, self.axis.key)
        end = int(np.flatnonzero(np.isfinite(y))[-1]) + 1 if np.isfinite(y).any() else 0
        return Trace(
            name.letter, f"reward:{name.index}", x[:end], y[:end], columns=(name.title,)
        )  # the legend shows the last value of a run that ended early

    # ── tables ──────────────────────────────────────────────────────────────────────────────────

    def _show_tables(self, names: Sequence[ComparedName]) -> None:
        settings, results = self.tables(_shown_text)
        self.settings.show_table(settings)
        self._settings.setCurrentIndex(0 if self._differences else 1)
        self.results.show_table(results)

    def tables(
        self, write: Callable[[str, Any], str] = lambda _name, value: value_text(value)
    ) -> list[list[list[str]]]:
        """The settings that differ and the results, as rows of texts; `write(field of a RunResult, value)` gives a result's."""
        titles = [f"{name.letter}  {name.title}" for name in self.names()]
        results = results_table(self._results(), write)
        for row, title in zip(results[1:], titles, strict=True):
            row[0] = title
        return [settings_table(titles, self._differences), results]

    def _results(self) -> list[RunResult]:
        """Of runs that are not read yet what their records tell."""
        assert self.comparison is not None
        runs: list[Run | None] = [*self.comparison.runs]
        runs += [None] * (len(self._records) - len(runs))
        return [self._result(record, run) for record, run in zip(self._records, runs, strict=True)]

    def _result(self, record: RunRecord, run: Run | None) -> RunResult:
        if run is None or not run.has_caught_up or self.comparison is None:
            return result_of(record, [])
        steps, rewards = run.eval_series("reward")
        pairs = zip(steps.tolist(), rewards.tolist(), strict=True)
        return result_of(record, [pair for pair in pairs if pair[1] == pair[1]], rewards_at_the_ends(run))

    def _show_export_menu(self) -> None:
        self.export.menu(self).popup(self.export_button.mapToGlobal(self.export_button.rect().bottomLeft()))


def _shown_text(name: str, value: Any) -> str:
    """A result as the window shows it, with the digits that matter; exports have them all."""
    if name == "state":
        return STATE_LABELS[value]
    return duration(value) if name == "worked_s" else figure(value)
