"""The tail of a log file, followed while it is visible: its last line when folded, a monospaced panel when unfolded."""

from __future__ import annotations

import os
from pathlib import Path

from PySide6.QtCore import QTimer
from PySide6.QtGui import QFontMetrics, QGuiApplication, QHideEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPlainTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.icons import IconButton
from backend.utils.regular_file import open_regular
from backend.utils.text import as_in_a_terminal

POLL_MS = 500
MAX_READ = 64 << 10
"""Bytes read at a time; if the log grew by more, only its end is shown."""
MAX_LINES = 2000


class LogView(QFrame):
    """Follows one file at a time. It reads bytes and decodes up to the last newline, so no character is cut in two."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._path: Path | None = None
        self._offset = 0
        self._partial = b""
        self._last_line = ""
        self.setProperty("role", "card")
        self._timer = QTimer(self, interval=POLL_MS)
        self._timer.timeout.connect(self.read_on)
        self._build()

    def _build(self) -> None:
        self._toggle = IconButton("chevron-right", "Log", "Show or fold the log")
        self._toggle.setCheckable(True)
        self._toggle.toggled.connect(self._fold)
        self._line = ElidedLabel()
        self._line.setFont(theme.mono_font(theme.CAPTION))
        copy, reveal = LinkButton("Copy"), LinkButton("Open log")
        copy.setToolTip("Copy the log")
        copy.setAccessibleName("Copy the log")
        copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(self.text.toPlainText()))
        reveal.clicked.connect(self.open_file)
        head = QHBoxLayout()
        head.setSpacing(theme.SPACE * 2)
        head.addWidget(self._toggle)
        head.addWidget(self._line, 1)
        head.addWidget(copy)
        head.addWidget(reveal)
        self.text = QPlainTextEdit(readOnly=True, lineWrapMode=QPlainTextEdit.LineWrapMode.NoWrap, maximumBlockCount=MAX_LINES)  # fmt: skip
        self.text.setFont(theme.mono_font())
        self.text.setAccessibleName("Log")
        self.text.setFixedHeight(QFontMetrics(self.text.font()).lineSpacing() * 9 + 16)
        column = QVBoxLayout(self)
        column.setContentsMargins(4, 2, 12, 2)
        column.setSpacing(2)
        column.addLayout(head)
        column.addWidget(self.text)
        self._fold(False)

    def follow(self, path: Path | None) -> None:
        """Show this file from now on; None shows nothing."""
        self._path, self._offset, self._partial, self._last_line = path, 0, b"", ""
        self.text.clear()
        self._show_last_line()
        self.read_on()

    def unfold(self, open: bool = True) -> None:
        self._toggle.setChecked(open)

    def open_file(self) -> None:
        """Open the file in the desktop's own program for it."""
        if self._path is not None and self._path.exists():
            open_path(self._path)

    def read_on(self) -> None:
        """Show what was appended to the file since the last call."""
        chunk = self._read_new()
        complete, newline, self._partial = (self._partial + chunk).rpartition(b"\n")
        if newline:
            lines = [as_in_a_terminal(line) for line in complete.decode("utf-8", errors="replace").split("\n")]
            self._append(lines)
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

    def _append(self, lines: list[str]) -> None:
        bar = self.text.verticalScrollBar()
        at_end = bar.value() >= bar.maximum() - 4  # a user who has scrolled up is reading, and must not be moved
        self.text.appendPlainText("\n".join(lines))
        if at_end:
            bar.setValue(bar.maximum())

    def _show_last_line(self) -> None:
        """Show the newest line beside the word Log while the panel is folded; of a progress line, its current state."""
        newest = as_in_a_terminal(self._partial.decode("utf-8", errors="replace")) or self._last_line
        self._line.setText("" if self._toggle.isChecked() else newest.strip())

    def _fold(self, open: bool) -> None:
        self.text.setVisible(open)
        self._toggle.set_icon("chevron-down" if open else "chevron-right")
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
