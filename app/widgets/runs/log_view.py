"""The tail of a log file, followed while it is on screen: one line folded, a monospaced panel unfolded."""

from __future__ import annotations

import os
from pathlib import Path

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtGui import QDesktopServices, QFontMetrics, QGuiApplication, QHideEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPlainTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.icons import IconButton

POLL_MS = 500
MAX_READ = 64 << 10
"""Bytes read at once; of a log that grew by more, only the end is shown."""
MAX_LINES = 2000


class LogView(QFrame):
    """Follows one file at a time. It reads bytes, cuts at the last newline, then decodes: no character is torn."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._path: Path | None = None
        self._place = 0
        self._rest = b""
        self._last = ""
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
        self._path, self._place, self._rest, self._last = path, 0, b"", ""
        self.text.clear()
        self._tell_last()
        self.read_on()

    def unfold(self, open: bool = True) -> None:
        self._toggle.setChecked(open)

    def open_file(self) -> None:
        """In whatever the desktop opens text files with."""
        if self._path is not None and self._path.exists():
            QDesktopServices.openUrl(QUrl.fromLocalFile(str(self._path)))

    def read_on(self) -> None:
        """Show what was written since the last look."""
        chunk = self._new_bytes()
        whole, newline, self._rest = (self._rest + chunk).rpartition(b"\n")
        if newline:
            lines = [_last_state(line) for line in whole.decode("utf-8", errors="replace").split("\n")]
            self._append(lines)
            self._last = next((line for line in reversed(lines) if line.strip()), self._last)
        self._tell_last()

    def _new_bytes(self) -> bytes:
        if self._path is None:
            return b""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._place:
                    self._place, self._rest = 0, b""
                    self.text.clear()
                behind = size - self._place > MAX_READ
                file.seek(size - MAX_READ if behind else self._place)
                chunk = file.read(MAX_READ)
        except OSError:
            return b""
        self._place = size if behind else self._place + len(chunk)
        if behind:
            self._rest = b""
            chunk = chunk.partition(b"\n")[2]
        return chunk

    def _append(self, lines: list[str]) -> None:
        bar = self.text.verticalScrollBar()
        at_end = bar.value() >= bar.maximum() - 4
        self.text.appendPlainText("\n".join(lines))
        if at_end:
            bar.setValue(bar.maximum())

    def _tell_last(self) -> None:
        """The newest line beside the word Log, while the panel is folded; a progress line in its present state."""
        now = _last_state(self._rest.decode("utf-8", errors="replace")) or self._last
        self._line.setText("" if self._toggle.isChecked() else now.strip())

    def _fold(self, open: bool) -> None:
        self.text.setVisible(open)
        self._toggle.set_icon("chevron-down" if open else "chevron-right")
        self._tell_last()
        bar = self.text.verticalScrollBar()
        bar.setValue(bar.maximum())

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._timer.start()
        self.read_on()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._timer.stop()


def _last_state(line: str) -> str:
    """A progress line's last state."""
    return line.rstrip("\r").rpartition("\r")[2]
