"""The panels around the charts: tiles with single figures, the machines of a run, and the log."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QColor, QFont, QFontMetrics, QGuiApplication, QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QSizePolicy, QVBoxLayout

from app import theme
from app.state.run_state import RankNow
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import label, plain_tip
from app.widgets.basic.layout import column, configure, row, set_shown
from app.widgets.basic.number_format import DASH, MINUS, THIN, figure, finite, signed
from app.widgets.basic.tables import BaseTable, Column, RowsModel
from backend.trainer.health.rules import RULES
from backend.utils.files import open_regular
from backend.utils.text import as_in_a_terminal


class MetricTile(QFrame):
    """A label, a figure in the colour of its metric in the charts, and the change since the start of the run."""

    def __init__(self, name: str, role: str = "text", unit: str = "", help: str = "") -> None:
        super().__init__()
        self._name, self._role, self._unit = name, role, unit
        configure(self, role="card", tip=help, minimumWidth=theme.scaled(84))
        # Ignored: tiles share the row's width equally, and a longer figure must not widen its tile during a run.
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        small = theme.figures_font(theme.CAPTION)
        name_line, self._caption = ElidedLabel(font=small, text=name), ElidedLabel(font=small)
        self._number = label(font=theme.figures_font(theme.TITLE, QFont.Weight.DemiBold))
        self._unit_label = label(font=theme.caption_font(), role="muted")
        number = row(self._number, (self._unit_label, 0, Qt.AlignmentFlag.AlignBottom), None, spacing=5)
        self._layout: QVBoxLayout = column(name_line, number, self._caption, into=self, spacing=0)
        self.set_low(False)
        theme.signals.changed.connect(self._recolour)
        self.show_value(None)

    def show_value(self, now: float | None, start: float | None = None, instead: str = "") -> None:
        """Show the value and its difference from `start`; `instead` replaces the caption (why there is no value)."""
        number, _, unit = figure(now, self._unit).partition(THIN)
        self._number.setText(number)
        self._unit_label.setText(unit)
        change = _change(finite(now), finite(start), number, unit)
        self._caption.setText(instead or (f"{change} since start" if change else ""))
        self.setAccessibleName(f"{self._name} {self.figure()} {self.caption()}".strip())
        self._recolour()
        self._fit()

    def set_low(self, low: bool) -> None:
        """Show the figure alone, in little height."""
        set_shown(self._caption, not low)
        self._layout.setContentsMargins(12, 2 if low else 6, 12, 3 if low else 7)

    def figure(self) -> str:
        return f"{self._number.text()}{THIN}{self._unit_label.text()}".removesuffix(THIN)

    def caption(self) -> str:
        return self._caption.text()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        needed = self._number.sizeHint().width() + 5 + self._unit_label.sizeHint().width()
        set_shown(self._unit_label, bool(self._unit_label.text()) and needed <= self.width() - 24)

    def _recolour(self) -> None:
        role = "placeholder" if self._number.text() == DASH else self._role
        self._number.setStyleSheet(f"color: {getattr(theme.palette(), role).name()};")


def _change(now: float | None, start: float | None, number: str, unit: str) -> str:
    if now is None or start is None:
        return ""
    fraction = number.partition(".")[2] if now else "000"
    change = (now - start) * {"%": 100, "MB": 1000}.get(unit, 1)
    if not fraction.isdigit() and fraction:  # a large number that has a letter for its scale
        return signed(change)
    size = f"{abs(change):,.{len(fraction)}f}"
    return f"{'+' if change > 0 else MINUS}{size}" if size.strip("0,.") else ""


MOST_RANKS = 4
"""Rows that are shown without scrolling: the charts need the room."""


class RankModel(RowsModel):
    columns = (
        Column("Rank", 48, True, "Rank 0 runs on this machine and writes the run folder"),
        Column("Machine"),
        Column("Chip"),
        Column("Sampling", 118, True, "Sampling speed in the newest step"),
        Column("Learning", 118, True, "Training speed in the newest step"),
        Column("Prompts", 64, True, "Prompts of the newest step that this rank sampled"),
        Column("Peak memory", 146, True, "Largest memory use so far, and the machine's memory"),
        Column("Waiting", 72, True, "Share of the newest step spent waiting"),
        Column("State", 56, tip="Lost: the machine stopped answering"),
    )

    def text(self, row: RankNow, column: int) -> str:
        info, peak = row.info, figure(row.memory_gb, "GB")
        return (
            *(str(info.rank), info.machine, info.chip),
            *(figure(row.sampling, "tokens/s"), figure(row.learning, "tokens/s")),
            figure(None if row.prompts is None else round(row.prompts)),
            f"{peak} of {figure(info.memory_gb, 'GB')}" if info.memory_gb else peak,
            *(figure(row.waiting_share, "share"), "Lost" if row.is_lost else ""),
        )[column]

    def colour(self, row: RankNow, column: int) -> QColor:
        title, colours = self.columns[column].title, theme.palette()
        if row.is_lost:
            return colours.bad if title in ("Machine", "State") else colours.muted
        waits_long = title == "Waiting" and (row.waiting_share or 0) > RULES["machines_wait"].threshold
        return colours.warning if waits_long else colours.text

    def tip(self, row: RankNow, column: int) -> str:
        info = row.info
        versions = ((name, number) for name, number in (("mlx", info.mlx), ("Python", info.python)) if number)
        where = f"at {info.address}" if info.address else "this machine" if info.rank == 0 else ""
        lines = (where, ", ".join(map(" ".join, versions)), f"Its output: {info.log}" if info.log else "")
        return plain_tip("\n".join(filter(None, lines)))


class RankTable(BaseTable):
    """The machines of a run as it trains, a row for each rank. `card` holds it."""

    def __init__(self) -> None:
        self._ranks = RankModel()
        super().__init__(model=self._ranks, name="Machines of the run", resizable=True)
        self._ranks.setParent(self)
        self.card = self.in_card()
        self.card.hide()

    def show_ranks(self, ranks: Sequence[RankNow]) -> None:
        set_shown(self.card, bool(ranks))
        if list(ranks) != self._ranks.rows:
            self._ranks.set_rows(ranks)
        self.fit_rows(MOST_RANKS, 4)


MAX_READ = 64 << 10
"""Bytes read at a time."""


class LogView(QFrame):
    """The tail of a log file, followed while it is visible: its last line when folded, a panel when unfolded."""

    def __init__(self) -> None:
        super().__init__()
        self._path: Path | None = None
        self._offset = 0
        self._partial = b""
        self._last_line = ""
        self.setProperty("role", "card")
        self._timer = configure(QTimer(self, interval=500), timeout=self.read_on)
        self.toggle = IconButton("chevron-right", "Log", "Show or fold the log", checkable=True, toggled=self._fold)
        self._line = ElidedLabel(font=theme.mono_font(theme.CAPTION))
        self.text = QPlainTextEdit(readOnly=True, maximumBlockCount=2000)
        configure(self.text, name="Log", font=theme.mono_font(), lineWrapMode=QPlainTextEdit.LineWrapMode.NoWrap)
        self._height = QFontMetrics(self.text.font()).lineSpacing() * 9 + 16
        self.fill(False)
        put = QGuiApplication.clipboard().setText
        copy = LinkButton(
            "Copy", on_click=lambda: put(self.text.toPlainText()), tip="Copy the log", name="Copy the log"
        )
        reveal = LinkButton("Open log", on_click=self.open_file)
        head = row(self.toggle, (self._line, 1), copy, reveal, spacing=2 * theme.SPACE)
        column(head, self.text, into=self, spacing=2, margins=(4, 2, 12, 2))
        self._fold(False)

    def follow(self, path: Path | None) -> None:
        self._path, self._offset, self._partial, self._last_line = path, 0, b"", ""
        self.text.clear()
        self.read_on()

    def unfold(self, open: bool = True) -> None:
        self.toggle.setChecked(open)

    def fill(self, fills: bool) -> None:
        """Take all the height there is when unfolded."""
        self.text.setMinimumHeight(0 if fills else self._height)
        self.text.setMaximumHeight(10_000 if fills else self._height)

    def open_file(self) -> None:
        if self._path is not None and self._path.exists():
            open_path(self._path)

    def read_on(self) -> None:
        complete, newline, self._partial = (self._partial + self._read_new()).rpartition(b"\n")
        if newline:
            lines = [as_in_a_terminal(line) for line in complete.decode("utf-8", errors="replace").split("\n")]
            bar = self.text.verticalScrollBar()
            at_end = bar.value() >= bar.maximum() - 4  # a user who has scrolled up is reading, and must not be moved
            self.text.appendPlainText("\n".join(lines))
            if at_end:
                bar.setValue(bar.maximum())
            self._last_line = next((line for line in reversed(lines) if line.strip()), self._last_line)
        self._show_last_line()

    def _read_new(self) -> bytes:
        if self._path is None:
            return b""
        try:
            with open_regular(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # truncated, so it is read from the start again
                    self._offset, self._partial = 0, b""
                    self.text.clear()
                behind = size - self._offset > MAX_READ
                file.seek(size - MAX_READ if behind else self._offset)
                chunk = file.read(MAX_READ)
        except OSError:
            return b""
        self._offset = size if behind else self._offset + len(chunk)
        if behind:
            self._partial = b""
            chunk = chunk.partition(b"\n")[2]  # the first line is cut
        return chunk

    def _show_last_line(self) -> None:
        newest = as_in_a_terminal(self._partial.decode("utf-8", errors="replace")) or self._last_line
        self._line.setText("" if self.toggle.isChecked() else newest.strip())

    def _fold(self, open: bool) -> None:
        self.text.setVisible(open)
        self.toggle.set_icon("chevron-down" if open else "chevron-right")
        self._show_last_line()
        bar = self.text.verticalScrollBar()
        bar.setValue(bar.maximum())

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._timer.start()
        self.read_on()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._timer.stop()
