"""A row for one download: name, progress, and buttons to pause, resume and cancel."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QGridLayout, QProgressBar, QWidget

from app import theme
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels_and_buttons import label, plain_tip
from app.widgets.basic.number_format import THIN, duration
from app.widgets.picker.picker_rows import size_text

BAR_STEPS = 1000
"""Resolution of the progress bar. Its range cannot be in bytes: QProgressBar counts in 32-bit integers."""
_PHASES = {"asking": "Asking the Hub", "checking": "Checking", "linking": "Almost there"}


class DownloadRow(QWidget):
    """A download.

    Attributes:
        name, status, bar, trouble – labels and progress bar; `trouble` says why it failed.
        pause, cancel – the buttons; `pause` resumes a download that is not running.

    Signals:
        paused, resumed, given_up – the button was clicked.
    """

    paused = Signal()
    resumed = Signal()
    given_up = Signal()

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._running = False
        self.name = label(name)
        self.status = label(font=theme.figures_font(theme.CAPTION), role="muted", align=Qt.AlignmentFlag.AlignRight)
        self.bar = QProgressBar(textVisible=False, maximum=BAR_STEPS)
        self.bar.setAccessibleName(f"Download of {name}")
        self.trouble = label(font=theme.caption_font(), role="problem", wrap=True, selectable=True)
        self.pause = IconButton("pause", tip=f"Pause the download of {name}")
        self.cancel = IconButton("stop", tip=f"Cancel the download of {name} and throw away what is unfinished")
        self.pause.clicked.connect(lambda: (self.paused if self._running else self.resumed).emit())
        self.cancel.clicked.connect(self.given_up)
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(theme.SPACE)
        grid.setVerticalSpacing(4)
        grid.addWidget(self.name, 0, 0)
        grid.addWidget(self.status, 0, 1)
        grid.addWidget(self.bar, 1, 0, 1, 2)
        grid.addWidget(self.trouble, 2, 0, 1, 2)
        grid.addWidget(self.pause, 0, 2, 2, 1)
        grid.addWidget(self.cancel, 0, 3, 2, 1)
        grid.setColumnStretch(1, 1)
        self.trouble.hide()

    def show_progress(
        self,
        state: str,
        phase: str,
        done: int,
        total: int | None,
        speed: float | None,
        remaining_s: float | None,
        sentence: str,
    ) -> None:
        """`state` is running, paused or failed; sizes in bytes, speed in bytes per second; `sentence` says what failed."""
        self._running = state == "running"
        self.bar.setValue(round(BAR_STEPS * done / total) if total else 0)
        self.status.setText(_status(state, phase, done, total, speed, remaining_s))
        self.trouble.setText(sentence)
        self.trouble.setVisible(bool(sentence))
        self.pause.set_icon("pause" if self._running else "play")
        tip = f"{'Pause' if self._running else 'Resume'} the download of {self.name.text()}"
        self.pause.setToolTip(plain_tip(tip))
        self.pause.setAccessibleName(tip)


def _status(
    state: str, phase: str, done: int, total: int | None, speed: float | None, remaining_s: float | None
) -> str:
    """“1.24 GB of 4.29 GB · 48.1 MB/s · 1 min 04 s left”, as far as it is known."""
    parts = [f"{size_text(done) if done else f'0{THIN}B'} of {size_text(total)}"] if total else []
    if state == "running":
        parts += [_PHASES[phase]] if phase in _PHASES else []
        parts += [f"{size_text(speed)}/s"] if speed else []
        parts += [f"{duration(remaining_s)} left"] if remaining_s is not None else []
    else:
        parts.append({"paused": "paused", "failed": "stopped"}.get(state, state))
    return "  ·  ".join(parts)
