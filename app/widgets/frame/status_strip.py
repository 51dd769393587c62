"""The status strip at the bottom of the window: run state, step of total, time left, peak memory, and one sentence.

It holds no reference to a run: the window pushes values into it.
"""

from __future__ import annotations

import html
from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QSizePolicy, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.labels_and_buttons import PlainLabel
from app.widgets.basic.number_format import duration, figure
from app.widgets.run_header import STATE_LABELS, StateDot


class StatusStrip(QFrame):
    """A state dot, four labels of figures and a sentence that is elided when the window is narrow.

    Attributes:
        state – the label of the state.
        step, left, memory – labels of the step, the time left and the peak memory.
        sentence – the elided label; its tool tip has all of it.
        waiting – the link that says how many runs wait in the queue, hidden where none does.
        offer – the link beside it, hidden where there is nothing to offer.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._dot = StateDot()
        self.state, self.step, self.left, self.memory = (_figure() for _ in range(4))
        self.sentence = ElidedLabel()
        right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        self.sentence.setAlignment(right)
        self.sentence.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        across = QHBoxLayout(self)
        across.setContentsMargins(12, 0, 12, 0)
        across.setSpacing(theme.SPACE)
        self.waiting = LinkButton("")
        self.waiting.setToolTip("Show the queue")
        self.waiting.hide()
        for part in (self._dot, self.state, self.step, self.left, self.memory, self.waiting):
            across.addWidget(part)
        across.addWidget(self.sentence, 1)
        self.offer = LinkButton("")
        self._take: Callable[[], object] | None = None
        self.offer.clicked.connect(self._take_offer)
        self.offer.hide()
        across.addWidget(self.offer)
        self.setFixedHeight(theme.scaled(28))
        self.show_state("")
        theme.signals.changed.connect(self.update)

    def show_state(self, state: str) -> None:
        self.state.setText(STATE_LABELS[state])
        self._dot.show_state(state)

    def show_progress(self, step: int, total: int, eta_s: float | None, memory_gb: float | None) -> None:
        """Show a run's progress; a total of 0 and None hide their label."""
        self.step.setText(f"step {step:,} of {total:,}" if total else "")
        self.left.setText(f"{duration(eta_s)} left" if eta_s is not None else "")
        self.memory.setText(f"peak {figure(memory_gb, 'GB')}" if memory_gb is not None else "")
        for label in (self.step, self.left, self.memory):
            label.setVisible(bool(label.text()))

    def show_waiting(self, count: int, *, is_paused: bool = False) -> None:
        """Show how many runs wait in the queue; 0 hides it."""
        self.waiting.setText(f"{count} waiting{', paused' if is_paused else ''}")
        self.waiting.setAccessibleName(f"{count} runs wait in the queue")
        self.waiting.setVisible(count > 0)

    def show_sentence(self, sentence: str, offer: str = "", take: Callable[[], object] | None = None) -> None:
        """Show a sentence and, where `offer` is not empty, a link of that text that calls `take()`."""
        self.sentence.setText(sentence)
        self.sentence.setToolTip(f"<p>{html.escape(sentence)}</p>" if sentence else "")
        self._take = take
        self.offer.setText(offer)
        self.offer.setVisible(bool(offer))

    def _take_offer(self) -> None:
        if self._take is not None:
            self._take()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), theme.palette().window)
        painter.fillRect(0, 0, self.width(), 1, theme.palette().hairline)


def _figure() -> QLabel:
    label = PlainLabel()
    label.setFont(theme.figures_font(12))
    label.setProperty("role", "muted")
    return label
