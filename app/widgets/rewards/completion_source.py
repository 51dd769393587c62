"""Where the completions on the bench come from: the model, an earlier run, or a file; and what is being done now.

It asks for nothing itself; it says what a person wants.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QIntValidator
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLineEdit,
    QProgressBar,
    QSizePolicy,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.controls import ComboBox, ElidedLabel, NumberEdit
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.segments import Segments

SOURCES = {"model": "Model", "run": "Run", "file": "File"}
ROW_CHOICES = (("random", "Random rows"), ("first", "First rows"), ("numbers", "These rows"))
MAX_ROWS = 1000
_RANGES = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*")


class CompletionSource(QFrame):
    """Signals: sample_wanted(how, count, numbers, completions of each); run_wanted(folder, step or None); file_wanted;
    paste_wanted; cancelled; refused(sentence)."""

    sample_requested = Signal(str, int, list, int)
    run_requested = Signal(object, object)
    file_requested = Signal()
    paste_requested = Signal()
    cancelled = Signal()
    refused = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self._choosing = QWidget(self)
        self.sources = Segments(SOURCES, "Completions from", self._choosing)
        self._pages = QStackedLayout()
        self._pages.setContentsMargins(0, 0, 0, 0)
        for page in (self._model(), self._run(), self._file()):
            self._pages.addWidget(page)
        self.sources.chosen.connect(lambda key: self._pages.setCurrentIndex(list(SOURCES).index(key)))
        self._working = self._progress()
        row = QHBoxLayout(self._choosing)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2 * theme.SPACE)
        row.addWidget(self.sources)
        row.addLayout(self._pages, 1)
        around = QVBoxLayout(self)
        around.setContentsMargins(6, 6, theme.SPACE, 6)
        self._whole = QStackedLayout()
        around.addLayout(self._whole)
        self._whole.addWidget(self._choosing)
        self._whole.addWidget(self._working)

    # The sources

    def _model(self) -> QWidget:
        self.how = ComboBox()
        for key, word in ROW_CHOICES:
            self.how.addItem(word, key)
        self.how.setMinimumContentsLength(12)
        self.how.setAccessibleName("Which rows")
        self.rows, self.numbers, self.each = _count("8", "Rows"), QLineEdit(), _count("8", "Completions of each row")
        self.numbers.setPlaceholderText("1-4, 17")
        self.numbers.setAccessibleName("Row numbers")
        self.numbers.hide()
        self.sample = button(
            "Sample", self._ask_sample, primary=True, tip="Draw completions from the chosen model (Ctrl+D)"
        )
        self.how.currentIndexChanged.connect(lambda _: self._show_rows())
        for line in (self.rows, self.numbers, self.each):
            line.returnPressed.connect(self._ask_sample)
        return _row(
            [
                self.how,
                self.rows,
                self.numbers,
                label("×", role="muted"),
                self.each,
                label("completions", role="muted"),
                self.sample,
            ]
        )

    def _run(self) -> QWidget:
        self.runs = ComboBox()
        self.runs.setMinimumContentsLength(14)
        self.runs.setAccessibleName("Run")
        self.step = _count("", "Step")
        self.step.setPlaceholderText("newest")
        self.step.setFixedWidth(theme.scaled(72))
        self.load = button("Load", self._ask_run, primary=True)
        self.step.returnPressed.connect(self._ask_run)
        return _row([self.runs, label("Step", role="muted"), self.step, self.load])

    def _file(self) -> QWidget:
        self.open = button(
            "Open…",
            self.file_requested.emit,
            tip="JSON lines: prompt, completion, answer; or a run's completions.jsonl",
        )
        self.paste = button(
            "Paste", self.paste_requested.emit, tip="JSON lines from the clipboard, or plain text as one completion"
        )
        return _row([self.open, self.paste])

    def _progress(self) -> QWidget:
        self.doing, self.bar = ElidedLabel(), QProgressBar(textVisible=False)
        self.doing.setMinimumWidth(theme.scaled(160))
        self.bar.setMaximumWidth(theme.scaled(220))
        self.bar.setAccessibleName("Progress")
        self.cancel = button("Cancel", self.cancelled.emit)
        working = QWidget()
        row = QHBoxLayout(working)
        row.setContentsMargins(4, 0, 0, 0)
        row.setSpacing(12)
        row.addWidget(self.doing, 1)
        row.addWidget(self.bar, 1)
        row.addWidget(self.cancel)
        return working

    def choose_rows(self, numbers: Sequence[int]) -> None:
        """As if these numbers of rows had been typed."""
        self.how.setCurrentIndex(self.how.findData("numbers"))
        self.numbers.setText(rows_text(numbers))

    # What they show

    def show_runs(self, runs: Sequence[Path]) -> None:
        """Runs that can be chosen, the newest first; the chosen one stays chosen."""
        chosen = self.runs.currentData()
        self.runs.clear()
        for path in runs:
            self.runs.addItem(path.name, str(path))
        self.runs.setCurrentIndex(max(0, self.runs.findData(chosen)))
        self.load.setEnabled(bool(runs))

    def show_size(self, size: int) -> None:
        """The run's own group size, until a person writes another."""
        if not self.each.isModified():
            self.each.setText(str(size))

    def show_busy(self, what: str) -> None:
        """What is being done in place of the choices; "" brings them back."""
        self.doing.setText(f"{what}…" if what else "")
        self.bar.setRange(0, 0)
        had_focus = self.isAncestorOf(self.focusWidget()) if self.focusWidget() else False
        self._whole.setCurrentWidget(self._working if what else self._choosing)
        if had_focus and what:
            self.cancel.setFocus()

    def show_progress(self, done: int, of: int) -> None:
        self.bar.setRange(0, of)
        self.bar.setValue(done)

    # What a person wants

    def _show_rows(self) -> None:
        named = self.how.currentData() == "numbers"
        self.rows.setVisible(not named)
        self.numbers.setVisible(named)

    def _ask_sample(self) -> None:
        how, numbers = self.how.currentData(), row_numbers(self.numbers.text())
        if how == "numbers" and not numbers:
            self.refused.emit("Row numbers are written as 1-4, 17.")
            return
        count = len(numbers) if how == "numbers" else int(self.rows.text() or 8)
        self.sample_requested.emit(how, count, numbers if how == "numbers" else [], max(1, int(self.each.text() or 8)))

    def _ask_run(self) -> None:
        if self.runs.currentData():
            self.run_requested.emit(Path(self.runs.currentData()), int(self.step.text()) if self.step.text() else None)


def row_numbers(text: str) -> list[int]:
    """1-4, 17 → [1, 2, 3, 4, 17]; empty for what is written otherwise, or names too many rows."""
    if not _RANGES.fullmatch(text):
        return []
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if end - begin >= MAX_ROWS:
            return []
        found += range(begin, end + 1)
    return list(dict.fromkeys(found))


def rows_text(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 4, 17] → 1-4, 17."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


def _count(text: str, name: str) -> NumberEdit:
    line = NumberEdit()
    line.setText(text)
    line.setValidator(QIntValidator(0, 10**9, line))
    line.setMinimumWidth(0)
    line.setFixedWidth(theme.scaled(48))
    line.setAlignment(Qt.AlignmentFlag.AlignRight)
    line.setAccessibleName(name)
    line.setToolTip(name)
    return line


def _row(parts: Sequence[QWidget]) -> QWidget:
    page = QWidget()
    row = QHBoxLayout(page)
    row.setContentsMargins(0, 0, 0, 0)
    row.setSpacing(theme.SPACE)
    for part in parts:
        row.addWidget(part)
    row.addStretch(1)
    return page
