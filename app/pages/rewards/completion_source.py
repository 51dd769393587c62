"""The source of the completions on the bench: sampled from the model, out of a run, from a file or the clipboard."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication, QFrame, QLineEdit, QSizePolicy, QWidget

from app import theme
from app.state.reward_bench import MAX_ROWS, RewardBench
from app.widgets.basic.controls import ComboBox, ElidedLabel, NumberEdit, Segments
from app.widgets.basic.dialogs import open_file
from app.widgets.basic.labels import button, label, progress_bar
from app.widgets.basic.layout import NestedStack, column, holder, row

SOURCES = {"model": "Model", "run": "Run", "file": "File"}
ROW_CHOICES = {"random": "Random rows", "first": "First rows", "numbers": "These rows"}
_RANGES = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*")


class CompletionSource(QFrame):
    """A card with a segmented control of sources, the inputs of the chosen one, and a progress bar in their place."""

    sample_requested = Signal(str, int, list, int)  # how, count of rows, row numbers, completions of each
    refused = Signal(str)  # sentence

    def __init__(self, bench: RewardBench, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._bench = bench
        self.setProperty("role", "card")
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self.how = ComboBox(name="Which rows", length=12, items=ROW_CHOICES)
        self.rows, self.group_size = _count_edit("8", "Rows"), _count_edit("8", "Completions of each row")
        self.numbers = QLineEdit(placeholderText="1-4, 17")
        self.numbers.setAccessibleName("Row numbers")
        self.numbers.hide()
        sample_tip = "Sample completions from the chosen model (Ctrl+D)"
        self.sample = button("Sample", self._request_sample, primary=True, tip=sample_tip)
        self.how.currentIndexChanged.connect(self._show_rows)
        for line in (self.rows, self.numbers, self.group_size):
            line.returnPressed.connect(self._request_sample)
        times, completions = label("×", role="muted"), label("completions", role="muted")
        of_model = row(self.how, self.rows, self.numbers, times, self.group_size, completions, self.sample, None)

        self.runs = ComboBox(name="Run", length=14)
        self.step = _count_edit("", "Step", 72)
        self.step.setPlaceholderText("newest")
        self.step.returnPressed.connect(self._load_run)
        self.load = button("Load", self._load_run, primary=True)
        of_run = row(self.runs, label("Step", role="muted"), self.step, self.load, None)

        file_tip = "JSON lines: prompt, completion, answer; or a run's completions.jsonl"
        self.open = button("Open…", self.read_completions, tip=file_tip)
        paste_tip = "JSON lines from the clipboard, or plain text as one completion"
        self.paste = button("Paste", self.paste_completions, tip=paste_tip)
        of_file = row(self.open, self.paste, None)

        self._choosing = QWidget(self)
        self.sources = Segments(SOURCES, "Completions from", self._choosing)
        pages = NestedStack(self._choosing)
        for page in (of_model, of_run, of_file):
            pages.addWidget(holder(page))
        self.sources.chosen.connect(lambda key: pages.setCurrentIndex(list(SOURCES).index(key)))
        row(self.sources, (pages, 1), into=self._choosing, spacing=2 * theme.SPACE)

        self.doing, self.bar = ElidedLabel(), progress_bar("Progress")
        self.doing.setMinimumWidth(theme.scaled(160))
        self.bar.setMaximumWidth(theme.scaled(220))
        self.cancel = button("Cancel", bench.cancel)
        self._working = holder(row((self.doing, 1), (self.bar, 1), self.cancel, spacing=12, margins=(4, 0, 0, 0)))
        self._stack = NestedStack(self)
        self._stack.addWidget(self._choosing)
        self._stack.addWidget(self._working)
        column(self._stack, into=self, margins=(6, 6, theme.SPACE, 6))
        bench.busy_changed.connect(self.show_busy)
        bench.progress.connect(self._show_progress)

    def choose_rows(self, numbers: Sequence[int]) -> None:
        self.how.setCurrentIndex(self.how.findData("numbers"))
        self.numbers.setText(rows_text(numbers))

    def show_runs(self, runs: Sequence[Path]) -> None:
        self.runs.fill({str(path): path.name for path in runs}, self.runs.currentData())
        self.load.setEnabled(bool(runs))

    def show_size(self, size: int) -> None:
        if not self.group_size.isModified():
            self.group_size.setText(str(size))

    def show_busy(self, what: str) -> None:
        """Show the current work in place of the inputs; "" brings them back."""
        self.doing.setText(f"{what}…" if what else "")
        self.bar.setRange(0, 0)
        focused = QApplication.focusWidget()  # not `self.focusWidget()`, which may be on another page
        had_focus = focused is not None and self.isAncestorOf(focused)
        self._stack.setCurrentWidget(self._working if what else self._choosing)
        if had_focus:  # the focused widget is hidden now
            begin = {"model": self.sample, "run": self.load, "file": self.open}[self.sources.key]
            (self.cancel if what else begin).setFocus()

    def _show_progress(self, done: int, of: int) -> None:
        self.bar.setRange(0, of)
        self.bar.setValue(done)

    def _show_rows(self) -> None:
        named = self.how.currentData() == "numbers"
        self.rows.setVisible(not named)
        self.numbers.setVisible(named)

    def _request_sample(self) -> None:
        how, size = self.how.currentData(), max(1, int(self.group_size.text() or 8))
        numbers = row_numbers(self.numbers.text()) if how == "numbers" else []
        if how == "numbers" and not numbers:
            self.refused.emit("Write row numbers as 1-4, 17.")
            return
        self.sample_requested.emit(how, len(numbers) or int(self.rows.text() or 8), numbers, size)

    def _load_run(self) -> None:
        if self.runs.currentData():
            step = int(self.step.text()) if self.step.text() else None
            self._bench.load_run(Path(self.runs.currentData()), step)

    def read_completions(self) -> None:
        chosen = open_file(self, "completions", "Open completions", "Completions (*.jsonl)")
        if chosen is not None:
            self._bench.load_file(chosen)

    def paste_completions(self) -> None:
        text = QGuiApplication.clipboard().text()
        if text.strip():
            self._bench.load_text(text)
        else:
            self.refused.emit("There is no text on the clipboard.")


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


def _count_edit(text: str, name: str, width: int = 48) -> NumberEdit:
    line = NumberEdit(name=name, text=text, width=width, integers=(0, 10**9))
    line.setToolTip(name)
    return line
