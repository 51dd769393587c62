"""Layout and style helpers: sizes of windows, cards, margins beside scroll bars, visibility, style sheet properties, emptying a layout."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QCoreApplication, QEvent, QPoint, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import (
    QAbstractScrollArea,
    QApplication,
    QBoxLayout,
    QFrame,
    QHBoxLayout,
    QLayout,
    QLayoutItem,
    QScrollArea,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from app import theme

FRAME = (8, 40)
"""Room for what a desktop adds around a window: its borders and its title bar."""


class NestedStack(QStackedLayout):
    """Pages, one of which is shown, for a place within another layout of `owner`.

    Qt shows the first page as it is added. One that has no parent yet is a window on the screen for that moment: it flashes, and the
    keyboard is the main window's no more.
    """

    def __init__(self, owner: QWidget) -> None:
        super().__init__()
        self._owner = owner

    def addWidget(self, w: QWidget) -> int:
        if w.parentWidget() is None:
            w.setParent(self._owner)
        return super().addWidget(w)


def on_screen(window: QWidget, width: int, height: int) -> QSize:
    """A window's size for text of the usual size: as large as the text is here, and never larger than the screen has room for."""
    screen = window.screen().availableSize() - QSize(*FRAME)
    return theme.scaled_size(QSize(width, height)).boundedTo(screen)


def wrap_in_card(view: QWidget) -> QFrame:
    """A card that holds one table or list."""
    card = QFrame()
    card.setProperty("role", "card")
    column = QVBoxLayout(card)
    column.setContentsMargins(4, 4, 4, 4)
    column.addWidget(view)
    return card


def set_shown(widget: QWidget, shown: bool) -> None:
    """`setVisible`, but only where that changes something.

    While the window is not on the screen yet, every `setVisible(True)` polishes and lays out the widget with all its
    children, and the window's own show event does it once more.
    """
    if widget.isHidden() == shown:
        widget.setVisible(shown)


def settle_layouts() -> None:
    """Lay out now what has changed.

    Left to the event loop, the layouts of nested widgets settle in several rounds, and Qt paints the whole window after each of them
    before it looks at a timer or the mouse: with six charts that is a tenth of a second.
    """
    QCoreApplication.sendPostedEvents(None, QEvent.Type.LayoutRequest)


def reserve_gutter(area: QAbstractScrollArea, content: QLayout) -> None:
    """End `content` one gutter before the right edge of its scroll area, with a vertical scroll bar or without.

    A scroll bar takes its width from the viewport, so it is subtracted from the margin: the right edges line up with
    what is above the area. Call it from the area's `resizeEvent`.
    """
    scroll_bar = area.width() - area.viewport().width()
    margins = content.contentsMargins()
    content.setContentsMargins(margins.left(), margins.top(), max(0, theme.GUTTER - scroll_bar), margins.bottom())


def set_style_property(widget: QWidget, name: str, value: object) -> None:
    """Set a dynamic property that the style sheet selects on, and apply the rules again if it changed.

    Qt evaluates such selectors when a widget is polished, and does not notice a later `setProperty`.
    """
    if widget.property(name) != value:
        widget.setProperty(name, value)
        widget.style().unpolish(widget)
        widget.style().polish(widget)


def clear_layout(layout: QLayout) -> None:
    """Remove and delete every widget and stretch of `layout`.

    Widgets are hidden now but deleted later: a click on one of them may be what is being handled.
    """
    while (item := layout.takeAt(0)) is not None:
        widget = item.widget()
        if widget is not None:
            widget.hide()
            widget.deleteLater()


Part = QWidget | QLayout | int | None
"""What a row or column is made of: a widget, a layout, a gap in pixels, or None for a stretch."""
Placed = Part | tuple[Part, int] | tuple[Part, int, Qt.AlignmentFlag]
"""A part, with its stretch and alignment where it has any."""
Margins = int | tuple[int, int, int, int]


def row(*parts: Placed, into: QWidget | None = None, spacing: int = theme.SPACE, margins: Margins = 0) -> QHBoxLayout:
    """Parts side by side; `into` is the widget that gets the layout. Margins are left, top, right, bottom."""
    layout = QHBoxLayout(into) if into is not None else QHBoxLayout()
    _fill_box(layout, parts, spacing, margins)
    return layout


def column(
    *parts: Placed, into: QWidget | None = None, spacing: int = theme.SPACE, margins: Margins = 0
) -> QVBoxLayout:
    """Parts one below the other; arguments as for `row`."""
    layout = QVBoxLayout(into) if into is not None else QVBoxLayout()
    _fill_box(layout, parts, spacing, margins)
    return layout


def _fill_box(layout: QBoxLayout, parts: Sequence[Placed], spacing: int, margins: Margins) -> None:
    layout.setContentsMargins(*(margins if isinstance(margins, tuple) else (margins,) * 4))
    layout.setSpacing(spacing)
    for placed in parts:
        part, stretch, *alignment = placed if isinstance(placed, tuple) else (placed, 0)
        if part is None:
            layout.addStretch(stretch or 1)
        elif isinstance(part, int):
            layout.addSpacing(part)
        elif isinstance(part, QLayout):
            layout.addLayout(part, stretch)
        else:
            layout.addWidget(part, stretch, *alignment)


class FlowLayout(QLayout):
    """Left to right, then down; its height follows from its width."""

    def __init__(
        self, parent: QWidget | None = None, spacing: int = theme.SPACE, line_spacing: int | None = None
    ) -> None:
        """`spacing` between widgets of a line, in pixels, and between lines unless these have another."""
        super().__init__(parent)
        self._items: list[QLayoutItem] = []
        self._line_spacing = spacing if line_spacing is None else line_spacing
        self.setContentsMargins(0, 0, 0, 0)
        self.setSpacing(spacing)

    def addItem(self, item: QLayoutItem) -> None:
        self._items.append(item)

    def count(self) -> int:
        return len(self._items)

    def itemAt(self, index: int) -> QLayoutItem | None:  # type: ignore[override]
        return self._items[index] if 0 <= index < len(self._items) else None

    def takeAt(self, index: int) -> QLayoutItem | None:  # type: ignore[override]
        return self._items.pop(index) if 0 <= index < len(self._items) else None

    def expandingDirections(self) -> Qt.Orientation:
        return Qt.Orientation(0)

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        return self._place(QRect(0, 0, width, 0), move=False)

    def setGeometry(self, rect: QRect) -> None:
        super().setGeometry(rect)
        self._place(rect, move=True)

    def sizeHint(self) -> QSize:
        return self.minimumSize()

    def minimumSize(self) -> QSize:
        size = QSize()
        for item in self._items:
            size = size.expandedTo(item.minimumSize())
        return size

    def _place(self, rect: QRect, *, move: bool) -> int:
        """Put the items into lines; returns the height of all lines."""
        x, y, line_height = rect.x(), rect.y(), 0
        for item in (item for item in self._items if not item.isEmpty()):  # a hidden widget takes no room
            size = item.sizeHint().boundedTo(QSize(max(rect.width(), 1), item.sizeHint().height()))
            if x > rect.x() and x + size.width() > rect.right() + 1:
                x, y, line_height = rect.x(), y + line_height + self._line_spacing, 0
            if move:
                item.setGeometry(QRect(QPoint(x, y), size))
            x += size.width() + self.spacing()
            line_height = max(line_height, size.height())
        return y + line_height - rect.y()


class TabArea(QScrollArea):
    """Without a frame, as wide as its content is made. Qt scrolls to what Tab reaches from within such an area, and not when Tab or
    Shift+Tab enters it."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        app = QApplication.instance()
        assert isinstance(app, QApplication)
        app.focusChanged.connect(self.follow_focus)

    def follow_focus(self) -> None:
        """Scroll to what has the focus, unless it fills half of the view: that is read from where the user has scrolled to."""
        # A slot that takes none of the signal's arguments: the widget that lost the focus may be half destroyed, and PySide must not wrap
        # it in a Python object.
        widget, page = QApplication.focusWidget(), self.widget()
        if widget is None or page is None or not page.isAncestorOf(widget):
            return
        if widget.height() < self.viewport().height() // 2:
            self.ensureWidgetVisible(widget, 0, theme.SPACE)


BY_KEYBOARD = (Qt.FocusReason.TabFocusReason, Qt.FocusReason.BacktabFocusReason, Qt.FocusReason.ShortcutFocusReason)
WIDTH = 2
"""Of its line, in pixels."""


def paint_ring(widget: QWidget, radius: float) -> None:
    """Paint the ring along the edge of `widget`, in its `paintEvent`."""
    painter = QPainter(widget)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(QPen(theme.palette().accent, WIDTH))
    painter.drawRoundedRect(QRectF(widget.rect()).adjusted(1, 1, -1, -1), radius, radius)
