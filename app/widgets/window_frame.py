"""The parts of the main window around the pages: sidebar and status strip."""

import html
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from PySide6.QtCore import QRectF, QSize, Qt, Signal
from PySide6.QtGui import QFocusEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QAbstractButton, QFrame, QSizePolicy, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.labels import label, show_text
from app.widgets.basic.layout import BY_KEYBOARD, column, configure, paint_ring, row
from app.widgets.basic.number_format import counted, duration, figure
from app.widgets.basic.tables import RIGHT
from app.widgets.run_header import StateChip

WIDE, NARROW, ROW, CORNER = 176, 56, 34, 6  # sidebar: its widths, the height of a row, and the radius of its corners


class Sidebar(QWidget):
    """The list of pages (`app.pages.PageEntry`): icon and title, or icons alone when collapsed."""

    chosen = Signal(str)  # page key

    def __init__(self, entries: Sequence[Any]) -> None:
        super().__init__()
        self.buttons = {entry.key: PageButton(entry) for entry in entries}
        for key, button in self.buttons.items():
            button.clicked.connect(partial(self.chosen.emit, key))
        margins = (theme.SPACE, 2 * theme.SPACE, theme.SPACE, theme.SPACE)
        column(*self.buttons.values(), None, into=self, spacing=2, margins=margins)
        self.set_collapsed(False)

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

    def __init__(self, entry: Any) -> None:
        super().__init__()
        self._icon = entry.icon
        self.collapsed = False
        self._has_ring = False
        tip = f"{entry.title} ({entry.shortcut})"
        configure(self, tip=tip, text=entry.title, checkable=True, autoExclusive=True)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)

    def sizeHint(self) -> QSize:
        return theme.scaled_size(QSize(40, ROW))

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self._has_ring = event.reason() in BY_KEYBOARD

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, checked, painter = theme.palette(), self.isChecked(), theme.painter(self)
        if checked or self.underMouse() or self.hasFocus():
            theme.set_fill(painter, colours.selection if checked else colours.hover)
            painter.drawRoundedRect(QRectF(self.rect()), CORNER, CORNER)
        size = theme.scaled(icons.SIZE)
        colour = colours.accent if checked else colours.muted
        pixmap = icons.pixmap(self._icon, colour, size, self.devicePixelRatioF())  # another ratio would look blurred
        left = (self.width() - size) // 2 if self.collapsed else theme.scaled(10)
        painter.drawPixmap(left, (self.height() - size) // 2, pixmap)
        if not self.collapsed:
            painter.setPen(colours.text)
            painter.setFont(theme.heading_font() if checked else theme.body_font())
            text = self.rect().adjusted(theme.scaled(38), 0, 0, 0)
            painter.drawText(text, Qt.AlignmentFlag.AlignVCenter, self.text())
        painter.end()
        if self._has_ring and self.hasFocus():
            paint_ring(self, CORNER)


class StatusStrip(QFrame):
    def __init__(self) -> None:
        super().__init__()
        figures = theme.figures_font(12)
        self.state = StateChip(theme.SPACE, font=figures, role="muted")
        self.step, self.left, self.memory = (label(font=figures, role="muted") for _ in range(3))
        wide = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        self.sentence = ElidedLabel(alignment=RIGHT, sizePolicy=wide)
        self.waiting = LinkButton("", tip="Show the queue", shown=False)
        self._take: Callable[[], object] | None = None
        self.offer = LinkButton("", on_click=lambda: self._take and self._take(), shown=False)
        self.drop = ElidedLabel(colour="text", font=theme.heading_font(), shown=False)  # what dropping a file would do
        labels = ((self.drop, 1), self.state, self.step, self.left, self.memory, self.waiting)
        row(*labels, (self.sentence, 1), self.offer, into=self, margins=(12, 0, 12, 0))
        self.setFixedHeight(theme.scaled(28))
        self.state.show_state("")

    def show_progress(self, step: int, total: int, eta_s: float | None, memory_gb: float | None) -> None:
        show_text(self.step, f"step {step:,} of {total:,}" if total else "")
        show_text(self.left, f"{duration(eta_s)} left" if eta_s is not None else "")
        show_text(self.memory, f"peak {figure(memory_gb, 'GB')}" if memory_gb is not None else "")

    def show_waiting(self, count: int, *, is_paused: bool = False) -> None:
        self.waiting.setText(f"{count} waiting{', paused' if is_paused else ''}")
        self.waiting.setAccessibleName(f"{counted(count, 'run')} in the queue")
        self.waiting.setVisible(count > 0)

    def show_sentence(self, sentence: str, offer: str = "", take: Callable[[], object] | None = None) -> None:
        """Show a sentence and, where `offer` is not empty, a link of that text that calls `take()`."""
        self.sentence.setText(sentence)
        self.sentence.setToolTip(f"<p>{html.escape(sentence)}</p>" if sentence else "")
        self._take = take
        show_text(self.offer, offer)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), theme.palette().window if self.drop.isHidden() else theme.palette().selection)
        painter.fillRect(0, 0, self.width(), 1, theme.palette().hairline)
