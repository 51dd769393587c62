"""The bench: the source of its completions, its findings, the reward functions with their scores, every completion."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PySide6.QtCore import QModelIndex, QRect, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QGuiApplication, QPainter, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QApplication, QFrame, QLineEdit, QSizePolicy, QWidget

from app import theme
from app.state.reward_bench import MAX_ROWS, RewardBench
from app.theme import CELL_PADDING
from app.widgets.basic.controls import ComboBox, Dot, ElidedLabel, LinkButton, NumberEdit, Segments
from app.widgets.basic.dialogs import open_file
from app.widgets.basic.labels import EmptyState, button, label, progress_bar, show_text
from app.widgets.basic.layout import TabArea, clear_layout, column, configure, connect, holder, row, stack, wrap_in_card
from app.widgets.basic.number_format import DASH, figure, short_duration
from app.widgets.basic.tables import LEFT, BaseTable, CellDelegate, Column, Index, RowsModel
from app.widgets.completion_table import CompletionModel, CompletionTable, reward_dot
from app.widgets.form.value_text import number_text
from app.widgets.reward_delegates import WeightDelegate

SOURCES = {"model": "Model", "run": "Run", "file": "File"}
ROW_CHOICES = {"random": "Random rows", "first": "First rows", "numbers": "These rows"}
_RANGES = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*")
REWARD, SCORES, MEAN, WEIGHT, TIME = range(5)
HISTOGRAM_ROLE = Qt.ItemDataRole.UserRole  # item role of the Scores column: (scores, colour)
BINS, MAX_BAR_WIDTH = 24, 16
MOST_ROWS, FEW_ROWS = 6, 3  # functions on the board without scrolling, and where the results are lower than LOW
LOW = 480
STALE = {
    "level": "note",
    "sentence": "Settings or files have changed since these scores.",
    "advice": "Press Score again.",
}
NOT_RUN_ADVICE = "A run would stop before its first step."


class BenchFunctionModel(RowsModel):
    columns = (
        Column("Reward", 148),
        Column("Scores", colour="muted", font=theme.caption_font),
        Column("Mean", 64, is_figure=True),
        Column("Weight", 60, is_figure=True, tip="Enter or a double click changes a weight."),
        Column("Time", 72, is_figure=True, colour="muted"),
    )
    weighed = Signal(list)  # all weights
    rows: list[Mapping[str, Any]]

    def is_editable(self, row: int, column: int) -> bool:
        return column == WEIGHT

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        self.rows[index.row()] = {**self.rows[index.row()], "weight": float(value)}
        self.repaint()
        self.weighed.emit([float(each["weight"]) for each in self.rows])
        return True

    def text(self, row: Mapping[str, Any], column: int) -> str:
        error, scores = row["error"], row["known"]
        if column == SCORES and error:
            return f"failed on line {error['line']}" if error["line"] else "failed"
        mean = figure(sum(scores) / len(scores)) if scores else DASH
        time = DASH if error or row["seconds"] is None else short_duration(row["seconds"])
        unscored = "not scored yet" if row["seconds"] is None else "no opinion"
        return (row["label"], "" if scores else unscored, mean, number_text(float(row["weight"])), time)[column]

    def colour(self, row: Mapping[str, Any], column: int) -> str:
        if row["error"]:
            return "bad" if column in (REWARD, SCORES) else "muted"
        return super().colour(row, column)

    def tip(self, row: Mapping[str, Any], column: int) -> str:
        if row["error"]:
            return row["error"]["sentence"]
        return f"{row['name']}\n\nIt printed:\n{row['printed'].rstrip()}" if row.get("printed") else row["name"]

    def extra(self, row: Mapping[str, Any], index: Index, role: int) -> Any:
        match role, index.column():
            case Qt.ItemDataRole.EditRole, 3:
                return float(row["weight"])
            case Qt.ItemDataRole.AccessibleDescriptionRole, 3:
                return row["label"]
            case Qt.ItemDataRole.DecorationRole, 0:
                return reward_dot(row["name"])
            case _, 1 if role == HISTOGRAM_ROLE and row["known"]:
                return row["known"], theme.reward_colour(row["name"])
        return None


def draw_histogram(painter: QPainter, cell: QRect, shown: tuple[Sequence[float], QColor]) -> None:
    scores, colour = shown
    rect, low, high = cell.adjusted(CELL_PADDING, 4, -CELL_PADDING, -4), min(scores), max(scores)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)
    painter.setFont(theme.figures_font(theme.CAPTION))
    painter.setPen(theme.palette().muted)
    edge = painter.fontMetrics().horizontalAdvance("−0.000") + 4  # the same in every row, so that the bars line up
    bars = rect.adjusted(edge, 0, -edge, 0)
    bars.setWidth(min(bars.width(), BINS * MAX_BAR_WIDTH))
    painter.drawText(rect, LEFT, figure(low))
    if low != high:
        painter.drawText(QRect(bars.right() + 6, rect.top(), edge, rect.height()), LEFT, figure(high))
    counts = [0] * BINS
    for score in scores:
        counts[min(BINS - 1, int((score - low) / (high - low) * BINS)) if high > low else 0] += 1
    width = bars.width() / BINS
    painter.fillRect(QRectF(bars.left(), bars.bottom(), bars.width(), 1), theme.palette().hairline)
    for i, count in enumerate(counts):
        if count:  # at least three pixels: one outlier among a thousand scores must be visible
            height = max(3.0, bars.height() * count / max(counts))
            bar = QRectF(bars.left() + i * width, bars.bottom() - height, max(width - 1, 2), height)
            painter.fillRect(bar, colour)


class FindingsCard(QFrame):
    def __init__(self, results: QWidget) -> None:
        super().__init__(results)
        self.results = results
        policies = QSizePolicy.Policy
        configure(self, role="card", name="Verdict", sizePolicy=(policies.Preferred, policies.Maximum))
        self._column = column(spacing=6)
        self._area = TabArea(content=holder(self._column))

        def turn_fold() -> None:
            self._is_folded = not self._is_folded
            self.show_findings(self.findings)

        self.more = LinkButton("", on_click=turn_fold)
        row((self._area, 1), (self.more, 0, Qt.AlignmentFlag.AlignTop), into=self, margins=(12, 8, 12, 8))
        self.findings: Sequence[Mapping[str, str]] = ()
        self._is_folded = True

    def show_findings(self, findings: Sequence[Mapping[str, str]]) -> None:
        self.findings = findings
        clear_layout(self._column)
        for i, finding in enumerate(findings[: 1 if self._is_folded else None]):
            font = theme.heading_font() if i == 0 and finding["level"] != "error" else None
            texts = [label(finding["sentence"], font, wrap=True, selectable=True)]
            if finding["advice"]:
                texts.append(label(finding["advice"], role="muted", wrap=True, selectable=True))
            dot = Dot({"error": "bad", "warning": "warning", "good": "good"}.get(finding["level"], "muted"), 18)
            shown = holder(row((dot, 0, Qt.AlignmentFlag.AlignTop), (column(*texts, spacing=0), 1)))
            self._column.addWidget(shown)
            shown.show()  # at once, since its height counts
        more = f"{len(findings) - 1} more" if self._is_folded else "Show the first only"
        show_text(self.more, more if len(findings) > 1 else "")
        self.setVisible(bool(findings))
        self.fit()

    def fit(self) -> None:
        """Show all in at most two fifths of the height that there is; beyond it the findings scroll."""
        needed = self._column.heightForWidth(self._area.viewport().width())  # −1 of none
        self._area.setFixedHeight(min(max(0, needed), self.results.height() * 2 // 5))

    def resizeEvent(self, event: QResizeEvent) -> None:
        self.fit()


class BenchResults(QWidget):
    error_requested = Signal(object)  # of a function

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        below = QWidget(self)
        self.verdict = FindingsCard(self)
        self.functions, self.completions = BenchFunctionModel(self), CompletionModel(self, is_brief=True)
        no_bar, edit = Qt.ScrollBarPolicy.ScrollBarAlwaysOff, QAbstractItemView.EditTrigger
        edits = edit.SelectedClicked | edit.DoubleClicked | edit.EditKeyPressed
        board = self.board = BaseTable(model=self.functions, name="Reward functions and their scores")
        configure(board, editTriggers=edits, horizontalScrollBarPolicy=no_bar)
        board.activated.connect(  # Return in the editor reaches the table too
            lambda at: board.state() != BaseTable.State.EditingState and board.edit(at.siblingAtColumn(WEIGHT))
        )
        board.setItemDelegateForColumn(SCORES, CellDelegate(HISTOGRAM_ROLE, draw_histogram, board))
        board.setItemDelegateForColumn(WEIGHT, WeightDelegate(board, is_framed=True))
        self.functions.modelReset.connect(self._fit_board)
        connect(self._show_error, board.clicked, board.activated)
        self.table = CompletionTable(self.completions)
        text = "Sample a few completions to see the scores of each function and how much the groups differ."
        empty = EmptyState("Try the rewards before training", text, "", theme.heading_font())
        self._stack = stack(wrap_in_card(empty), self.table.in_card(), into=below)
        column(self.verdict, self.board.in_card(), (below, 1), into=self, spacing=12)

    def resizeEvent(self, event: QResizeEvent) -> None:
        self.verdict.fit()
        self._fit_board()

    def _fit_board(self) -> None:
        self.board.fit_rows(MOST_ROWS if self.height() >= theme.scaled(LOW) else FEW_ROWS)

    def _show_error(self, index: QModelIndex) -> None:
        if error := self.functions.rows[index.row()]["error"]:
            self.error_requested.emit(error)

    def show_verdict(self, bench: RewardBench, refusal: str = "") -> None:
        if bench.failed:
            findings = [{"level": "error", "sentence": bench.failed["sentence"], "advice": NOT_RUN_ADVICE}]
        else:
            findings = [{"level": "error", "sentence": refusal, "advice": ""}] if refusal else []
            findings += [*([STALE] if bench.stale else []), *bench.findings]
        self.verdict.show_findings(findings)

    def show_bench(self, bench: RewardBench) -> None:
        self._stack.setCurrentIndex(1 if bench.groups else 0)
        self.show_verdict(bench)
        self.functions.set_rows(bench.functions or bench.chosen_functions())
        names, labels = ([function[key] for function in bench.functions] for key in ("name", "label"))
        current = max(self.table.currentIndex().row(), 0)
        self.completions.show_groups(bench.groups, names, labels)
        self.table.reset_view()
        if 0 < current < self.completions.rowCount():
            self.table.selectRow(current)


class CompletionSource(QFrame):
    def __init__(self, bench: RewardBench, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._bench, self._seed = bench, 0
        configure(self, role="card", sizePolicy=(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed))
        self.rows, self.group_size = _count_edit("8", "Rows"), _count_edit("8", "Completions of each row")
        self.numbers = configure(QLineEdit(placeholderText="1-4, 17"), name="Row numbers", shown=False)

        def show_rows() -> None:
            is_named = self.how.currentData() == "numbers"
            self.rows.setVisible(not is_named)
            self.numbers.setVisible(is_named)

        self.how = ComboBox(name="Which rows", length=12, items=ROW_CHOICES, currentIndexChanged=show_rows)
        sample_tip = "Sample completions from the chosen model (Ctrl+D)"
        self.sample = button("Sample", self._request_sample, primary=True, tip=sample_tip)
        connect(self._request_sample, *(each.returnPressed for each in (self.rows, self.numbers, self.group_size)))
        times, completions = label("×", role="muted"), label("completions", role="muted")
        of_model = row(self.how, self.rows, self.numbers, times, self.group_size, completions, self.sample, None)

        self.runs = ComboBox(name="Run", length=14)
        self.step = _count_edit("", "Step", 72, placeholderText="newest", returnPressed=self._load_run)
        self.load = button("Load", self._load_run, primary=True)
        of_run = row(self.runs, label("Step", role="muted"), self.step, self.load, None)

        file_tip = "JSON lines: prompt, completion, answer; or a run's completions.jsonl"
        self.open = button("Open…", self.read_completions, tip=file_tip)
        paste_tip = "JSON lines from the clipboard, or plain text as one completion"
        self.paste = button("Paste", self.paste_completions, tip=paste_tip)
        of_file = row(self.open, self.paste, None)

        self._choosing = QWidget(self)
        self.sources = Segments(SOURCES, "Completions from", self._choosing)
        pages = stack(*map(holder, (of_model, of_run, of_file)), into=self._choosing, nested=True)
        self.sources.chosen.connect(lambda key: pages.setCurrentIndex(list(SOURCES).index(key)))
        row(self.sources, (pages, 1), into=self._choosing, spacing=2 * theme.SPACE)

        self.doing = ElidedLabel(minimumWidth=theme.scaled(160))
        self.bar = progress_bar("Progress", maximumWidth=theme.scaled(220))
        self.cancel = button("Cancel", bench.cancel)
        self._working = holder(row((self.doing, 1), (self.bar, 1), self.cancel, spacing=12, margins=(4, 0, 0, 0)))
        self._stack = stack(self._choosing, self._working, into=self, nested=True)
        column(self._stack, into=self, margins=(6, 6, theme.SPACE, 6))
        bench.busy_changed.connect(self.show_busy)
        bench.progress.connect(lambda done, of: configure(self.bar, range=(0, of), value=done))

    def show_runs(self, runs: Sequence[Path]) -> None:
        self.runs.fill({str(path): path.name for path in runs}, self.runs.currentData())
        self.load.setEnabled(bool(runs))

    def show_size(self, size: int) -> None:
        if not self.group_size.isModified():
            self.group_size.setText(str(size))

    def show_busy(self, what: str) -> None:
        self.doing.setText(f"{what}…" if what else "")
        self.bar.setRange(0, 0)
        focused = QApplication.focusWidget()  # not `self.focusWidget()`, which may be on another page
        had_focus = focused is not None and self.isAncestorOf(focused)
        self._stack.setCurrentWidget(self._working if what else self._choosing)
        if had_focus:  # the focused widget is hidden now
            begin = {"model": self.sample, "run": self.load, "file": self.open}[self.sources.key]
            (self.cancel if what else begin).setFocus()

    def _request_sample(self) -> None:
        how, size = self.how.currentData(), max(1, int(self.group_size.text() or 8))
        numbers = row_numbers(self.numbers.text()) if how == "numbers" else []
        if how == "numbers" and not numbers:
            self._bench.refused.emit(f"Enter up to {MAX_ROWS:,} row numbers, such as 1-4, 17.")
            return
        self._seed += 1  # the same rows give other completions each time
        self._bench.sample(how, len(numbers) or int(self.rows.text() or 8), numbers, size, self._seed)

    def _load_run(self) -> None:
        if self.runs.currentData():
            self._bench.load_run(Path(self.runs.currentData()), int(self.step.text()) if self.step.text() else None)

    def read_completions(self) -> None:
        if (chosen := open_file(self, "completions", "Open completions", "Completions (*.jsonl)")) is not None:
            self._bench.load_file(chosen)

    def paste_completions(self) -> None:
        text = QGuiApplication.clipboard().text()
        if text.strip():
            self._bench.load_text(text)
        else:
            self._bench.refused.emit("There is no text on the clipboard.")


def row_numbers(text: str) -> list[int]:
    """Parse row numbers: 1-4, 17 → [1, 2, 3, 4, 17]."""
    if not _RANGES.fullmatch(text):
        return []
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if end - begin >= MAX_ROWS:
            return []
        numbers += range(begin, end + 1)
    return list(dict.fromkeys(numbers))


def rows_text(numbers: Sequence[int]) -> str:
    """Format row numbers: [1, 2, 3, 4, 17] → 1-4, 17."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


def _count_edit(text: str, name: str, width: int = 48, **settings: Any) -> NumberEdit:
    return NumberEdit(name=name, tip=name, text=text, width=width, integers=(0, 10**9), **settings)
