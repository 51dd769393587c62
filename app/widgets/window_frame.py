"""What the window shows while a file is dragged over it: what dropping the file would do."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Protocol

from PySide6.QtCore import QEvent, QObject, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFocusEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import (
    QAbstractButton,
    QButtonGroup,
    QFrame,
    QHBoxLayout,
    QLabel,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.labels import PlainLabel
from app.widgets.basic.layout import BY_KEYBOARD, paint_ring
from app.widgets.basic.number_format import duration, figure
from app.widgets.run_header import STATE_LABELS, StateDot

MARGIN, RADIUS = 12, 12
VEIL_ALPHA = 235
"""How opaque the veil over the window is, of 255: the text on it must be readable."""


class DropOverlay(QWidget):
    """A veil over its parent with a dashed frame and a sentence, hidden until `show_sentence`. The pointer goes through it."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._covered = parent
        self._sentence = ""
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.hide()
        parent.installEventFilter(self)

    @property
    def sentence(self) -> str:
        """What is shown; "" while it is hidden."""
        return self._sentence if not self.isHidden() else ""

    def show_sentence(self, sentence: str) -> None:
        """Say what a drop would do; "" hides it."""
        self._sentence = sentence
        self.setGeometry(self._covered.rect())
        self.setVisible(bool(sentence))
        self.raise_()
        self.update()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Resize and not self.isHidden():
            self.setGeometry(self._covered.rect())
        return super().eventFilter(watched, event)

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, painter = theme.palette(), QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        veil = QColor(colours.selection)
        veil.setAlpha(VEIL_ALPHA)
        painter.fillRect(self.rect(), veil)
        pen = QPen(colours.accent, 2, Qt.PenStyle.DashLine)
        painter.setPen(pen)
        inside = QRectF(self.rect()).adjusted(MARGIN, MARGIN, -MARGIN, -MARGIN)
        painter.drawRoundedRect(inside, RADIUS, RADIUS)
        painter.setPen(colours.text)
        painter.setFont(theme.title_font())
        flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
        painter.drawText(inside.adjusted(MARGIN, MARGIN, -MARGIN, -MARGIN), flags, self._sentence)


WIDE, NARROW, ROW, CORNER = 176, 56, 34, 6


class SidebarEntry(Protocol):
    """What the sidebar needs to know about a page; `app.pages.PageEntry` is one."""

    @property
    def key(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def icon(self) -> str: ...
    @property
    def shortcut(self) -> str: ...


class Sidebar(QWidget):
    """One exclusive button for each page.

    Attributes:
        buttons – page key → button.

    Signals:
        chosen(page key) – a button was clicked.
    """

    chosen = Signal(str)

    def __init__(self, entries: Sequence[SidebarEntry], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: dict[str, PageButton] = {}
        self._group = QButtonGroup(self)
        column = QVBoxLayout(self)
        column.setContentsMargins(theme.SPACE, 2 * theme.SPACE, theme.SPACE, theme.SPACE)
        column.setSpacing(2)
        for entry in entries:
            column.addWidget(self._button(entry))
        column.addStretch()
        self.set_collapsed(False)
        theme.signals.changed.connect(self.update)

    def _button(self, entry: SidebarEntry) -> PageButton:
        button = PageButton(entry)
        button.clicked.connect(lambda: self.chosen.emit(entry.key))
        self._group.addButton(button)
        self.buttons[entry.key] = button
        return button

    def show_page(self, key: str) -> None:
        self.buttons[key].setChecked(True)

    def set_collapsed(self, collapsed: bool) -> None:
        self.setFixedWidth(theme.scaled(NARROW if collapsed else WIDE))
        for button in self.buttons.values():
            button.collapsed = collapsed
            button.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), theme.palette().sidebar)
        painter.fillRect(self.width() - 1, 0, 1, self.height(), theme.palette().hairline)


class PageButton(QAbstractButton):
    """A page's icon and title, painted by us: a style sheet cannot recolour an SVG icon by state."""

    def __init__(self, entry: SidebarEntry, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._icon = entry.icon
        self.collapsed = False
        self._has_ring = False
        self.setText(entry.title)
        self.setToolTip(f"{entry.title} ({entry.shortcut})")
        self.setCheckable(True)
        self.setAutoExclusive(True)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)

    def sizeHint(self) -> QSize:
        return theme.scaled_size(QSize(40, ROW))

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self._has_ring = event.reason() in BY_KEYBOARD

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self._has_ring = False

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, checked = theme.palette(), self.isChecked()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if checked or self.underMouse() or self.hasFocus():
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(colours.selection if checked else colours.hover)
            painter.drawRoundedRect(QRectF(self.rect()), CORNER, CORNER)
        size = theme.scaled(icons.SIZE)
        # Rendered at the screen's own ratio: a pixmap of another ratio would be resampled and look blurred.
        colour = colours.accent if checked else colours.muted
        pixmap = icons.pixmap(self._icon, colour, size, self.devicePixelRatioF())
        left = (self.width() - size) // 2 if self.collapsed else theme.scaled(10)
        painter.drawPixmap(left, (self.height() - size) // 2, pixmap)
        if not self.collapsed:
            painter.setPen(colours.text)
            painter.setFont(theme.heading_font() if checked else theme.body_font())
            painter.drawText(
                self.rect().adjusted(theme.scaled(38), 0, 0, 0), Qt.AlignmentFlag.AlignVCenter, self.text()
            )
        painter.end()
        if self._has_ring:
            paint_ring(self, CORNER)


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
