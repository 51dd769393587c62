"""The source of the completions on the bench: the model, an earlier run, or a file; and the progress while it is busy.

It emits the user's requests; the page passes them to the bench.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QIntValidator
from PySide6.QtWidgets import (
    QApplication,
    QFrame,
    QHBoxLayout,
    QLineEdit,
    QProgressBar,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.controls import ComboBox, ElidedLabel, NumberEdit, Segments
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import NestedStack

SOURCES = {"model": "Model", "run": "Run", "file": "File"}
ROW_CHOICES = (("random", "Random rows"), ("first", "First rows"), ("numbers", "These rows"))
MAX_ROWS = 1000
"""Most rows that can be sampled in one request."""
_RANGES = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*")


class CompletionSource(QFrame):
    """A card with a segmented control of sources, the inputs of the chosen one, and a progress bar in their place.

    Attributes:
        sources – the segmented control.

    Signals:
        sample_requested(how, count of rows, row numbers, completions of each).
        run_requested(folder, step, or None for the newest).
        file_requested, paste_requested, cancelled.
        refused(sentence) – the inputs cannot be used.
    """

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
        self._pages = NestedStack(self._choosing)
        self._pages.setContentsMargins(0, 0, 0, 0)
        for page in (self._model_page(), self._run_page(), self._file_page()):
            self._pages.addWidget(page)
        self.sources.chosen.connect(lambda key: self._pages.setCurrentIndex(list(SOURCES).index(key)))
        self._working = self._progress_page()
        row = QHBoxLayout(self._choosing)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2 * theme.SPACE)
        row.addWidget(self.sources)
        row.addLayout(self._pages, 1)
        around = QVBoxLayout(self)
        around.setContentsMargins(6, 6, theme.SPACE, 6)
        self._stack = NestedStack(self)
        around.addLayout(self._stack)
        self._stack.addWidget(self._choosing)
        self._stack.addWidget(self._working)

    # The sources

    def _model_page(self) -> QWidget:
        self.how = ComboBox()
        for key, text in ROW_CHOICES:
            self.how.addItem(text, key)
        self.how.setMinimumContentsLength(12)
        self.how.setAccessibleName("Which rows")
        self.rows, self.group_size = _count_edit("8", "Rows"), _count_edit("8", "Completions of each row")
        self.numbers = QLineEdit()
        self.numbers.setPlaceholderText("1-4, 17")
        self.numbers.setAccessibleName("Row numbers")
        self.numbers.hide()
        self.sample = button(
            "Sample", self._request_sample, primary=True, tip="Draw completions from the chosen model (Ctrl+D)"
        )
        self.how.currentIndexChanged.connect(lambda _: self._show_rows())
        for line in (self.rows, self.numbers, self.group_size):
            line.returnPressed.connect(self._request_sample)
        return _row(
            [
                self.how,
                self.rows,
                self.numbers,
                label("×", role="muted"),
                self.group_size,
                label("completions", role="muted"),
                self.sample,
            ]
        )

    def _run_page(self) -> QWidget:
        self.runs = ComboBox()
        self.runs.setMinimumContentsLength(14)
        self.runs.setAccessibleName("Run")
        self.step = _count_edit("", "Step")
        self.step.setPlaceholderText("newest")
        self.step.setFixedWidth(theme.scaled(72))
        self.load = button("Load", self._request_run, primary=True)
        self.step.returnPressed.connect(self._request_run)
        return _row([self.runs, label("Step", role="muted"), self.step, self.load])

    def _file_page(self) -> QWidget:
        self.open = button(
            "Open…",
            self.file_requested.emit,
            tip="JSON lines: prompt, completion, answer; or a run's completions.jsonl",
        )
        self.paste = button(
            "Paste", self.paste_requested.emit, tip="JSON lines from the clipboard, or plain text as one completion"
        )
        return _row([self.open, self.paste])

    def _progress_page(self) -> QWidget:
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
        """Enter these row numbers, as if they had been typed."""
        self.how.setCurrentIndex(self.how.findData("numbers"))
        self.numbers.setText(rows_text(numbers))

    # Showing

    def show_runs(self, runs: Sequence[Path]) -> None:
        """Offer these runs, the newest first; the selected one stays selected."""
        selected = self.runs.currentData()
        self.runs.clear()
        for path in runs:
            self.runs.addItem(path.name, str(path))
        self.runs.setCurrentIndex(max(0, self.runs.findData(selected)))
        self.load.setEnabled(bool(runs))

    def show_size(self, size: int) -> None:
        """Show the form's group size as number of completions, until the user types another."""
        if not self.group_size.isModified():
            self.group_size.setText(str(size))

    def show_busy(self, what: str) -> None:
        """Show what is being done in place of the inputs; "" brings them back."""
        self.doing.setText(f"{what}…" if what else "")
        self.bar.setRange(0, 0)
        # The application's focus: `self.focusWidget()` is what had it here last, even while the user types on another page.
        focused = QApplication.focusWidget()
        had_focus = focused is not None and self.isAncestorOf(focused)
        self._stack.setCurrentWidget(self._working if what else self._choosing)
        if had_focus:  # the focused widget is hidden now, and Qt would move the focus to any widget after it
            begin = {"model": self.sample, "run": self.load, "file": self.open}[self.sources.key]
            (self.cancel if what else begin).setFocus()

    def show_progress(self, done: int, of: int) -> None:
        self.bar.setRange(0, of)
        self.bar.setValue(done)

    # Requests

    def _show_rows(self) -> None:
        named = self.how.currentData() == "numbers"
        self.rows.setVisible(not named)
        self.numbers.setVisible(named)

    def _request_sample(self) -> None:
        how, numbers = self.how.currentData(), row_numbers(self.numbers.text())
        if how == "numbers" and not numbers:
            self.refused.emit("Row numbers are written as 1-4, 17.")
            return
        count = len(numbers) if how == "numbers" else int(self.rows.text() or 8)
        self.sample_requested.emit(
            how, count, numbers if how == "numbers" else [], max(1, int(self.group_size.text() or 8))
        )

    def _request_run(self) -> None:
        if self.runs.currentData():
            self.run_requested.emit(Path(self.runs.currentData()), int(self.step.text()) if self.step.text() else None)


def row_numbers(text: str) -> list[int]:
    """Parse row numbers: 1-4, 17 → [1, 2, 3, 4, 17]; empty if malformed or if a range has more than MAX_ROWS rows."""
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


def _count_edit(text: str, name: str) -> NumberEdit:
    line = NumberEdit()
    line.setText(text)
    line.setValidator(QIntValidator(0, 10**9, line))
    line.setMinimumWidth(0)
    line.setFixedWidth(theme.scaled(48))
    line.setAlignment(Qt.AlignmentFlag.AlignRight)
    line.setAccessibleName(name)
    line.setToolTip(plain_tip(name))
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
