"""The head of a run's page: its name and state, how far it is, what it is doing, how long it will take."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from app import theme
from app.widgets.controls import ElidedLabel
from app.widgets.numbers import duration
from app.widgets.parts import label
from app.widgets.state_chip import StateChip

_FINE = 1000
"""Parts that the bar can tell apart."""


class RunHeader(QWidget):
    """Title line (with room for controls at its right, `tools`), bar, and a line of captions."""

    def __init__(self) -> None:
        super().__init__()
        self._name = ElidedTitle()
        self._chip = StateChip()
        self.tools = QHBoxLayout()
        self.tools.setSpacing(theme.SPACE)
        self._bar = QProgressBar(textVisible=False, maximum=_FINE)
        self._doing = ElidedLabel()
        self._doing.setFont(theme.figures_font(theme.BODY))
        self._time = label(font=theme.figures_font(), role="muted")
        top = QHBoxLayout()
        top.setSpacing(theme.SPACE * 2)
        top.addWidget(self._name, 1)
        top.addWidget(self._chip)
        top.addLayout(self.tools)
        below = QHBoxLayout()
        below.addWidget(self._doing, 1)
        below.addWidget(self._time)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addLayout(top)
        column.addWidget(self._bar)
        column.addLayout(below)

    def show_run(self, name: str, state: str) -> None:
        self._name.setText(name)
        self._name.setToolTip(name)
        self._chip.show_state(state)

    def show_progress(self, step: int, total: int | None, doing: str = "", share: float | None = None) -> None:
        """`share` is how much of the present phase is done, 0 to 1."""
        self._bar.setValue(round(_FINE * min(1.0, step / total)) if total else 0)
        phase = f"{doing}, {share:.0%}" if doing and share is not None else doing
        where = f"Step {step:,} of {total:,}" if total else f"Step {step:,}"
        self._doing.setText(" · ".join(part for part in (where, phase) if part))

    def show_time(self, elapsed_s: float | None, eta_s: float | None) -> None:
        left = f"about {duration(eta_s)} left" if eta_s is not None else ""
        spent = f"{duration(elapsed_s)} of work" if elapsed_s else ""
        self._time.setText(" · ".join(part for part in (spent, left) if part))


class ElidedTitle(ElidedLabel):
    """A page title that gives way in the middle: the names of runs begin with the model and end with the date."""

    def __init__(self) -> None:
        super().__init__(Qt.TextElideMode.ElideMiddle)
        self.setFont(theme.title_font())

    def sizeHint(self) -> QSize:
        return QSize(120, super().sizeHint().height())

    minimumSizeHint = sizeHint

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(theme.palette().text)
        text = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideMiddle, self.width())
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignVCenter, text)
