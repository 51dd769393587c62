"""Several runs on the same charts, their settings and results in tables, and completions of the same prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from PySide6.QtCore import QItemSelectionModel, QPointF, QRect, QSignalBlocker, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QGuiApplication, QMouseEvent, QPaintEvent, QPen, QResizeEvent, QShortcut, QShowEvent
from PySide6.QtWidgets import QAbstractButton, QHeaderView, QMenu, QMessageBox, QWidget

from app import theme
from app.state import charts
from app.state.messages import problems_to
from app.state.run import Mark
from app.state.run_comparison import AXES, ComparedMetric, RunComparison, figure_of
from app.state.run_notices import finite_values
from app.state.session import Session
from app.widgets.basic.controls import ComboBox, Segments
from app.widgets.basic.dialogs import save_file
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import (
    FlowLayout,
    TabArea,
    clear_layout,
    column,
    configure,
    holder,
    row,
    set_tab_order,
    show_all,
    splitter,
    stack,
)
from app.widgets.basic.number_format import DASH, duration, figure
from app.widgets.basic.tables import BaseTable, Column, TextsModel
from app.widgets.charts.chart_grid import SMOOTHING, ChartContent, ChartGrid, plots_of
from app.widgets.charts.curves import Trace
from app.widgets.charts.plot_view import StepScale
from app.widgets.completion_detail import SideBySide
from app.widgets.completion_table import one_line
from app.widgets.run_header import STATE_LABELS
from backend.runs.completion_rows import CompletionRow, GroupRow
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
    with_measure,
)
from backend.utils.disk import save_as

SCALES = {
    "step": StepScale(),
    "tokens": StepScale("tokens", "{:,} tokens".format),
    "time": StepScale("working time", lambda ms: duration(ms / 1000), is_time=True),
}
RESULT = "Result, 95 % interval"
SHORT_RESULTS = ["Run", "State", "Steps", RESULT, "Reward", "Held-out", "Best held-out", "Tokens", "Worked"]
"""Columns of the table of results, which has fewer than the exported one."""
PARTS = {"results": "Results", "settings": "Settings that differ", "completions": "Completions"}
NO_SHARED_PROMPT = "These two runs have no prompt in common in the newest steps that both recorded."
TABLES_HEIGHT, TABLES_WIDTH, NARROWEST_COLUMN = 210, 1000, 56
LEGEND_HEIGHT, WIDE = 100, 2000  # most of the legend; from this width on the tables are beside the charts
NEWS_MS = 500  # tables and charts are drawn at most this often while runs are read or train
SELECT_ROW = QItemSelectionModel.SelectionFlag.Select | QItemSelectionModel.SelectionFlag.Rows
Write = Callable[[Sequence[Sequence[str]]], str]


@dataclass(frozen=True, slots=True)
class ComparedName:
    """`letter` in the charts, `title` in the legend; `index` is that of its colour."""

    index: int
    letter: str
    title: str
    name: str

    @property
    def text(self) -> str:
        return f"{self.letter}  {self.title}"


def letter_of(index: int) -> str:
    """A, B, … Z, AA, AB, …"""
    rest, letter = divmod(index, 26)
    return (letter_of(rest - 1) if rest else "") + chr(ord("A") + letter)


class RunChip(QAbstractButton):
    solo_requested = Signal()

    def __init__(self, run: ComparedName) -> None:
        super().__init__()
        self.run = run
        tip = plain_tip(f"{run.name}\nClick to hide its curves or show them again. Double-click for these alone.")
        configure(self, text=run.text, toolTip=tip, name=f"Curves of {run.letter}, {run.title}", checkable=True)
        configure(self, font=theme.body_font(), cursor=Qt.CursorShape.PointingHandCursor)

    def sizeHint(self) -> QSize:
        width = theme.scaled(20) + self.fontMetrics().horizontalAdvance(self.text()) + 24
        return QSize(min(theme.scaled(320), width), self.fontMetrics().height() + theme.SPACE)

    minimumSizeHint = sizeHint

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self.solo_requested.emit()

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, painter, middle, end = theme.palette(), theme.painter(self), self.height() / 2, 6 + theme.scaled(20)
        if self.hasFocus():
            painter.setPen(QPen(colours.accent, 1))
            painter.drawRoundedRect(self.rect().adjusted(0, 0, -1, -1), 6, 6)
        painter.setPen(theme.reward_pen(self.run.index, 2.5) if self.isChecked() else QPen(colours.faint, 1))
        painter.drawLine(QPointF(6, middle), QPointF(end, middle))
        font = self.font()
        font.setStrikeOut(not self.isChecked())
        painter.setFont(font)
        painter.setPen(colours.text if self.isChecked() else colours.muted)
        box = QRect(self.rect()).adjusted(end + 6, 0, -6, 0)
        text = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideMiddle, box.width())
        painter.drawText(box, Qt.AlignmentFlag.AlignVCenter, text)


class RunLegend(QWidget):
    shown_changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.chips: list[RunChip] = []
        self._flow = FlowLayout(self)

    def show_names(self, names: Sequence[ComparedName]) -> None:
        if [chip.run for chip in self.chips] == list(names):
            return
        hidden = {chip.run.name for chip in self.chips if not chip.isChecked()}
        clear_layout(self._flow)
        self.chips = [RunChip(name) for name in names]
        for chip in self.chips:
            chip.setChecked(chip.run.name not in hidden)
            # All of them again instead of none: charts without curves would be empty.
            chip.toggled.connect(lambda: self.shown_changed.emit() if self.shown() else self.solo(""))
            chip.solo_requested.connect(partial(self.solo, chip.run.name))
            self._flow.addWidget(chip)

    def solo(self, name: str) -> None:
        """Show this run alone; all runs for ""."""
        for chip in self.chips:
            with QSignalBlocker(chip):
                chip.setChecked(name in ("", chip.run.name))
            chip.update()
        self.shown_changed.emit()

    def shown(self) -> list[ComparedName]:
        return [chip.run for chip in self.chips if chip.isChecked()]


class ComparisonTable(BaseTable):
    def __init__(self, name: str) -> None:
        self._texts = TextsModel()
        super().__init__(model=self._texts, name=name, textElideMode=Qt.TextElideMode.ElideMiddle)
        self._texts.setParent(self)
        self.table: list[list[str]] = []
        self._natural: list[int] = []
        header, mode = self.horizontalHeader(), QHeaderView.ResizeMode.Interactive
        configure(header, sectionResizeMode=mode, textElideMode=Qt.TextElideMode.ElideMiddle)

    def show_table(self, table: Sequence[Sequence[str]]) -> None:
        rows = [list(cells) for cells in table]
        if rows == self.table:
            return
        chosen, self.table = self.selected_rows(), rows
        self._texts.columns = [Column(title) for title in rows[0]]
        self._texts.set_rows(rows[1:])
        self.resizeColumnsToContents()
        self._natural = [self.columnWidth(place) + theme.SPACE for place in range(len(rows[0]))]
        self.fit_columns()
        for number in chosen:
            self.selectionModel().select(self._texts.index(number, 0), SELECT_ROW)

    def fit_columns(self) -> None:
        most = room = self.viewport().width()
        while most > theme.scaled(NARROWEST_COLUMN) and sum(min(width, most) for width in self._natural) > room:
            most -= 4
        for place, width in enumerate(self._natural):
            self.setColumnWidth(place, min(width, most))


class SharedPromptPanel(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self._comparison: RunComparison | None = None
        self._shown: tuple[object, ...] = ()
        self.shared: list[tuple[GroupRow, GroupRow]] = []  # rows of both runs with the same prompt
        self.runs = [ComboBox(name=f"{which} run", activated=self.refresh) for which in ("First", "Second")]
        self.prompt = ComboBox(name="Shared prompt", currentIndexChanged=lambda _: self._show_prompt())
        self.where = label(font=theme.figures_font(), role="muted")
        self.sides = SideBySide()
        self.nothing = label(NO_SHARED_PROMPT, role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        head = row(*((box, 1) for box in self.runs), (self.prompt, 2), self.where)
        column(head, (self.sides, 1), (self.nothing, 1), into=self)

    def show_runs(self, comparison: RunComparison, names: Sequence[ComparedName]) -> None:
        is_new = comparison is not self._comparison
        for place, box in enumerate(self.runs):
            box.fill({name.index: name.text for name in names}, place if is_new else box.currentData())
        self._comparison = comparison
        self.refresh()

    def showEvent(self, event: QShowEvent) -> None:
        self.refresh()

    def refresh(self) -> None:
        if not self.isVisible() or self._comparison is None:
            return
        places = [box.currentIndex() for box in self.runs]
        if max(places) >= len(self._comparison.runs) or min(places) < 0:
            return
        first, second = (self._comparison.runs[place] for place in places)
        newest = tuple(steps[-1] if (steps := run.index.steps()) else 0 for run in (first, second))
        if (first, second, newest) == self._shown:
            return
        self._shown = (first, second, newest)
        self.shared = self._comparison.shared_prompts(first, second)
        rewards = list(dict.fromkeys([*first.reward_names, *second.reward_names]))
        self.sides.set_rewards(rewards, [charts.label_of(name) for name in rewards])
        kept = self.prompt.currentText()
        with QSignalBlocker(self.prompt):
            self.prompt.fill({i: one_line(row["prompt"]) for i, (row, _) in enumerate(self.shared)})
            self.prompt.setCurrentIndex(max(0, self.prompt.findText(kept)))
        self._show_prompt()

    def _show_prompt(self) -> None:
        found = bool(self.shared)
        show_all(found, self.sides, self.prompt)
        show_all(not found, self.nothing)
        self.where.setText(f"step {self.shared[0][0]['step']:,}" if found else "")
        if found:
            rows, best = self.shared[max(0, self.prompt.currentIndex())], dict[str, list[CompletionRow]]()
            for box, completions in zip(self.runs, (row.get("completions") or [] for row in rows), strict=True):
                scored = [one for one in completions if one.get("reward") is not None] or completions[:1]
                highest = max(scored, key=lambda one: one.get("reward") or 0.0, default=None)
                best[box.currentText()] = [highest] if highest else []
            self.sides.show_row(rows[0], best)


class CompareView(QWidget):
    closed = Signal()

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.comparison: RunComparison | None = None
        self.grid: ChartGrid | None = None
        self._records: list[RunRecord] = []
        self._metrics: list[ComparedMetric] = []
        self._differences: dict[str, list[Any]] = {}
        self._news = configure(QTimer(self, singleShot=True, interval=NEWS_MS), timeout=self.refresh)
        self.back = button("Back to the list", self.closed.emit, tip="Escape")
        QShortcut("Esc", self, self.closed.emit, context=Qt.ShortcutContext.WidgetWithChildrenShortcut)
        self.title = label(font=theme.title_font())
        self.axis = Segments(AXES, "Horizontal axis", chosen=lambda _: self._draw_charts(is_new_axis=True))
        self.smoothing = ComboBox(name="Smoothing of the charts", length=11, items=SMOOTHING)
        self.smoothing.currentIndexChanged.connect(
            lambda _: self.grid and self.grid.set_smoothing(self.smoothing.currentData())
        )
        self.legend = configure(RunLegend(), shown_changed=self._draw_charts)
        self.results, self.settings = ComparisonTable("Results of the runs"), ComparisonTable("Settings that differ")
        self.same = label("Their settings are the same.", role="muted", align=Qt.AlignmentFlag.AlignCenter)
        self.prompts = SharedPromptPanel()
        self.export_button = button("Export…", tip="Both tables, as CSV or Markdown", menu=self.export_menu())

        settings, tables = QWidget(), QWidget()
        self._settings = stack(self.settings.in_card(), self.same, into=settings)
        self._tables = stack(self.results.in_card(), settings, self.prompts, into=tables)
        show_part = self._tables.setCurrentIndex
        self.part = Segments(PARTS, "Below the charts", chosen=lambda key: show_part(list(PARTS).index(key)))
        self._charts = column()
        below = column(row(self.part, None, self.export_button), (tables, 1))
        tables_part = holder(below, minimumHeight=theme.scaled(110))
        self.parts = splitter(holder(self._charts), tables_part, stretch=(1, 0), upright=True)
        head = row(self.back, (self.title, 1), self.smoothing, self.axis)
        self._legend_area = TabArea(content=self.legend, accessibleName="Legend of the runs")
        column(head, self._legend_area, (self.parts, 1), into=self, spacing=12, margins=2 * theme.SPACE)
        set_tab_order(self.back, self.smoothing, *self.axis.buttons.values())

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._fit_legend()
        wide = self.width() >= theme.scaled(WIDE)
        orientation = Qt.Orientation.Horizontal if wide else Qt.Orientation.Vertical
        if self.parts.orientation() != orientation or event.oldSize().width() < 0:
            self.parts.setOrientation(orientation)
            height = min(theme.scaled(TABLES_HEIGHT), self.height() // 3)
            self.parts.setSizes([10_000, theme.scaled(TABLES_WIDTH) if wide else height])

    def _fit_legend(self) -> None:
        needed = self.legend.heightForWidth(self.width() - 4 * theme.SPACE - theme.GUTTER)
        self._legend_area.setFixedHeight(min(needed, theme.scaled(LEGEND_HEIGHT)))

    def compare(self, records: Sequence[RunRecord]) -> None:
        self.close_runs()
        self._records, self._metrics = list(records), []
        folders = [Path(record.summary.path) for record in records]
        self._differences = differing_settings([settings_in_course(RunFolder(folder)) for folder in folders])
        self.title.setText(f"Compare {len(records)} runs")
        self.comparison = RunComparison(folders, self)
        self.comparison.changed.connect(self._on_news)
        self.refresh()

    def update_records(self, records: Sequence[RunRecord]) -> None:
        new = {record.summary.path: record for record in records}
        current = [new.get(record.summary.path, record) for record in self._records]
        if current != self._records:
            self._records = current
            self._on_news()

    def close_runs(self) -> None:
        if self.comparison is not None:
            self.comparison.close()
            self.comparison.deleteLater()
            self.comparison = None

    def showEvent(self, event: QShowEvent) -> None:
        self.refresh()

    def _on_news(self) -> None:
        if self.isVisible() and not self._news.isActive():
            self._news.start()

    def refresh(self) -> None:
        if self.comparison is None:
            return
        names = self.names()
        self.legend.show_names(names)
        self._fit_legend()
        self.settings.show_table(settings_table([name.text for name in names], self._differences))
        self._settings.setCurrentIndex(0 if self._differences else 1)
        table = [SHORT_RESULTS]
        for name, result in zip(names, self._results(), strict=True):
            courses = []
            for what in ("reward", "held_out"):
                first, last = (result[f"{what}_{end}"] for end in ("first", "last"))
                course = f"{figure(first)} → {figure(last)}" if last is not None else DASH
                courses.append(with_measure(f"{what}_last", result, course))
            step = result["best_step"]
            best = f"{figure(result['held_out_best'])} at {step:,}" if step is not None else DASH
            cells = (name.text, STATE_LABELS[result["state"]], f"{result['steps']:,}", result[RESULT] or DASH)
            table.append([*cells, *courses, best, figure(result["tokens"]), duration(result["worked_s"])])
        self.results.show_table(table)
        self.prompts.show_runs(self.comparison, names)
        metrics = self.comparison.metrics()
        if metrics != self._metrics or not metrics:  # `compare` has emptied them
            self._metrics, self.grid = metrics, None
            clear_layout(self._charts)
        if metrics and self.grid is None:
            plots = plots_of(((one.title, one.chart) for one in metrics), self._session.guide_requested)
            for plot in plots:
                plot.leads_to_completions = False
            self.grid = ChartGrid(plots, self._content, prefs=self._session.prefs)
            self.grid.set_smoothing(self.smoothing.currentData())
            self.grid.run_name = "comparison"
            self.grid.reported.connect(self._session.message)
            self._charts.addWidget(self.grid)
        self._draw_charts()

    def names(self) -> list[ComparedName]:
        return [ComparedName(i, letter_of(i), each.title, each.summary.name) for i, each in enumerate(self._records)]

    def _draw_charts(self, *, is_new_axis: bool = False) -> None:
        if self.grid is not None and self.comparison is not None:
            if is_new_axis:
                self.grid.forget_span()  # a range on the old axis means nothing on the new one
            for plot in self.grid.plots:
                plot.steps = SCALES[self.axis.key]
            self.grid.refresh(self.comparison.span(self.axis.key))

    def _content(self, i: int) -> ChartContent:
        if self.comparison is None:
            return ChartContent()
        traces, marks = [], []
        for name in self.legend.shown():
            if name.index >= len(self.comparison.runs):
                continue
            run = self.comparison.runs[name.index]
            x, y = self.comparison.curve(run, self._metrics[i], self.axis.key)
            # Cut after the last value: the legend shows it also of a run that ended early.
            end = int(np.flatnonzero(np.isfinite(y))[-1]) + 1 if np.isfinite(y).any() else 0
            traces.append(Trace(name.letter, f"reward:{name.index}", x[:end], y[:end], column=name.title))
            changes = self.comparison.changes(run, self.axis.key)
            marks += [Mark(place, "change", f"{name.letter}: {sentence}") for place, sentence in changes]
        shown = [trace for trace in traces if trace.has_data]
        return ChartContent(shown, "None of the runs shown has this metric.", marks)

    def tables(self) -> list[list[list[str]]]:
        titles, found = [name.text for name in self.names()], self._results()
        results = results_table(found)
        results[0].append(RESULT)
        for cells, title, result in zip(results[1:], titles, found, strict=True):
            cells[0] = title
            cells.append(result[RESULT])
        return [settings_table(titles, self._differences), results]

    def _results(self) -> list[RunResult]:
        assert self.comparison is not None
        results = []
        for record, run in zip_longest(self._records, self.comparison.runs):
            if run is None or not run.has_caught_up:
                results.append(result_of(record, []) | {RESULT: ""})
                continue
            measure, of, result = record.summary.measure, figure_of(run), ""
            steps, values = run.series(measure, held_out=True)
            pairs = [pair for pair in zip(steps.tolist(), values.tolist(), strict=True) if pair[1] == pair[1]]
            if of is not None:  # “0.86, 0.81 to 0.90, test”
                value, low, high, where = of
                ends = f"{figure(low)} to {figure(high)}" if low is not None and high is not None else ""
                result = ", ".join(filter(None, (figure(value), ends, where)))
            results.append(result_of(record, pairs, finite_values(run, measure)) | {RESULT: result})
        return results

    def export_menu(self) -> QMenu:
        menu, clipboard = QMenu(self), QGuiApplication.clipboard()
        formats: tuple[tuple[str, str, Write], ...] = (("Markdown", ".md", as_markdown), ("CSV", ".csv", as_csv))
        for name, _, write in formats:
            menu.addAction(
                f"Copy as {name}", lambda write=write: clipboard.setText("\n".join(map(write, self.tables())))
            )
        menu.addSeparator()
        for name, suffix, write in formats:
            menu.addAction(f"Save as {name}…", partial(self.save_tables, name, suffix, write))
        return menu

    def save_tables(self, name: str, suffix: str, write: Write) -> None:
        path = save_file(self, "tables", "Save the tables", f"comparison{suffix}", f"{name} (*{suffix})")
        with problems_to(partial(QMessageBox.warning, self, "Not saved")):
            if path is not None:
                save_as(path, "\n".join(map(write, self.tables())))
