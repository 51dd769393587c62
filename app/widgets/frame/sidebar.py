"""The list of pages at the left of the window: icon and title, or icons alone when collapsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from PySide6.QtCore import QRectF, QSize, Qt, Signal
from PySide6.QtGui import QFocusEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QAbstractButton, QButtonGroup, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.focus_ring import BY_KEYBOARD, paint_ring

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
