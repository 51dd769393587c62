"""The header of a run's page: its name and state, and of a live run the step, the current phase and the time left."""

from __future__ import annotations

import re
from datetime import datetime

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QSizePolicy, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.labels import PlainLabel, label, plain_tip
from app.widgets.basic.number_format import duration

# A run's state as a coloured dot and a label; and the tables of labels and colours, for the status strip and tables.

STATE_LABELS = {
    "": "No run",
    "queued": "Queued",
    "starting": "Starting",
    "running": "Running",
    "paused": "Paused",
    "stopping": "Stopping",
    "finished": "Finished",
    "stopped": "Stopped",
    "failed": "Failed",
    "crashed": "Crashed",
}
"""A run's state → its label."""

STATE_ROLES = {
    "": "placeholder",
    "queued": "muted",
    "starting": "warning",
    "running": "good",
    "paused": "warning",
    "stopping": "warning",
    "finished": "good",
    "stopped": "muted",
    "failed": "bad",
    "crashed": "bad",
}
"""A run's state → its role in the palette."""


class StateDot(QWidget):
    """A run's state as a colour; it needs no accessible name, as the label beside it says the same."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._state = ""
        self.setFixedSize(theme.scaled_size(QSize(10, 10)))

    def show_state(self, state: str) -> None:
        self._state = state
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(getattr(theme.palette(), STATE_ROLES[self._state]))
        painter.drawEllipse(QRectF(self.rect()).adjusted(1, 1, -1, -1))


class StateChip(QWidget):
    """A run's state as a dot and a label."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._dot, self._label = StateDot(), PlainLabel()
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(6)
        row.addWidget(self._dot)
        row.addWidget(self._label)

    def show_state(self, state: str) -> None:
        self._label.setText(STATE_LABELS[state])
        self._dot.show_state(state)


# ── run header ───────────────────────────────────────────────────────────────────────────────────────────────────────

_BAR_STEPS = 1000
"""Resolution of the progress bar."""
_DEFAULT_NAME = re.compile(r"(.+)-(\d{4}-\d\d-\d\d-\d{6})((?:-\d+)?)")
"""A run's default name: model and kind of training, timestamp, and a number if that name existed already."""


class RunHeader(QWidget):
    """A title line, and for a live run a progress bar with a line of captions.

    Attributes:
        tools – a layout at the right of the title line for the page's own controls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._name = ElidedTitle()
        self._when = label(role="muted")
        self._chip = StateChip()
        self.tools = QHBoxLayout()
        self.tools.setSpacing(theme.SPACE)
        self._bar = QProgressBar(textVisible=False, maximum=_BAR_STEPS)
        self._bar.setAccessibleName("Progress of the run")
        self._doing = ElidedLabel()
        self._doing.setFont(theme.figures_font(theme.BODY))
        self._time = label(font=theme.figures_font(), role="muted")
        self._lay_out()

    def _lay_out(self) -> None:
        top = QHBoxLayout()
        top.setSpacing(12)
        for part in (self._name, self._when):
            top.addWidget(part, 0, Qt.AlignmentFlag.AlignBaseline)
        top.addStretch(1)
        top.addWidget(self._chip)
        top.addLayout(self.tools)
        self._live = QWidget()
        below = QHBoxLayout()
        below.addWidget(self._doing, 1)
        below.addWidget(self._time)
        progress = QVBoxLayout(self._live)
        progress.setContentsMargins(0, 0, 0, 0)
        progress.setSpacing(6)
        progress.addWidget(self._bar)
        progress.addLayout(below)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addLayout(top)
        column.addWidget(self._live)

    def show_run(self, name: str, state: str, *, live: bool) -> None:
        """Show name and state; the timestamp of a default name is shown apart, as a date. `live` shows the progress."""
        title, when = split_name(name)
        self._name.setText(title)
        self._name.setToolTip(plain_tip(name))
        self._when.setText(when)
        self._chip.show_state(state)
        self._live.setVisible(live)

    def show_progress(
        self, step: int, total: int | None, doing: str = "", share: float | None = None, figures: str = ""
    ) -> None:
        """Show the step and the phase (`doing`); `share` is how much of the phase is done, 0 to 1, `figures` amounts and rates of it."""
        # Otherwise setValue paints at once, and with the bar everything else that is due in the window.
        self._bar.setUpdatesEnabled(False)
        self._bar.setValue(round(_BAR_STEPS * min(1.0, step / total)) if total else 0)
        self._bar.setUpdatesEnabled(True)
        phase = f"{doing}, {share:.0%}" if doing and share is not None else doing
        where = f"Step {step:,} of {total:,}" if total else f"Step {step:,}"
        self._doing.setText(" · ".join(part for part in (where, phase, figures) if part))

    def show_time(self, elapsed_s: float | None, eta_s: float | None) -> None:
        left = f"about {duration(eta_s)} left" if eta_s is not None else ""
        spent = f"{duration(elapsed_s)} of work" if elapsed_s else ""
        self._time.setText(" · ".join(part for part in (spent, left) if part))


class ElidedTitle(ElidedLabel):
    """A page title that is elided in the middle, where run names differ least."""

    def __init__(self) -> None:
        super().__init__(Qt.TextElideMode.ElideMiddle)
        self.setFont(theme.title_font())
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(metrics.horizontalAdvance(self.text()) + 4, metrics.height())

    def minimumSizeHint(self) -> QSize:
        return QSize(120, self.fontMetrics().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(theme.palette().text)
        text = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideMiddle, self.width())
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignVCenter, text)


def split_name(name: str) -> tuple[str, str]:
    """A run's name as (title, creation time): “qwen-lora-grpo”, “3 Nov 2025, 14:05”. Other names are all title."""
    match = _DEFAULT_NAME.fullmatch(name)
    if match is None:
        return name, ""
    try:
        then = datetime.strptime(match[2], "%Y-%m-%d-%H%M%S")
    except ValueError:  # digits that are not a date
        return name, ""
    return f"{match[1]}{match[3]}", f"{then.day} {then:%b %Y, %H:%M}"
