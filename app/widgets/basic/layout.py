"""Layouts in one expression, cards, scroll areas, and helpers for visibility and style sheet properties."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from PySide6.QtCore import QObject, QPoint, QRect, QRectF, QSize, Qt, SignalInstance
from PySide6.QtGui import QColor, QPen
from PySide6.QtWidgets import (
    QAbstractScrollArea,
    QApplication,
    QBoxLayout,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLayout,
    QLayoutItem,
    QScrollArea,
    QSplitter,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from app import theme

WINDOW_FRAME = QSize(8, 40)
BY_KEYBOARD = (Qt.FocusReason.TabFocusReason, Qt.FocusReason.BacktabFocusReason, Qt.FocusReason.ShortcutFocusReason)

W = TypeVar("W", bound=QObject)
Box = TypeVar("Box", bound=QBoxLayout)
Part = QWidget | QLayout | int | None  # of a row or column: a widget, a layout, a gap in pixels, or None for a stretch
Placed = Part | tuple[Part, int] | tuple[Part, int, Qt.AlignmentFlag]
Margins = int | tuple[int, int, int, int]


def row(*parts: Placed, into: QWidget | None = None, spacing: int = theme.SPACE, margins: Margins = 0) -> QHBoxLayout:
    """Parts side by side, or below each other in `column`; `into` is the widget that gets the layout."""
    return _fill(QHBoxLayout(), parts, into, spacing, margins)


def column(
    *parts: Placed, into: QWidget | None = None, spacing: int = theme.SPACE, margins: Margins = 0
) -> QVBoxLayout:
    return _fill(QVBoxLayout(), parts, into, spacing, margins)


def _fill(layout: Box, parts: Sequence[Placed], into: QWidget | None, spacing: int, margins: Margins) -> Box:
    if into is not None:
        into.setLayout(layout)
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
    return layout


def grid(
    rows: Sequence[Sequence[QWidget | QLayout | None]],
    into: QWidget | None = None,
    *,
    stretch: int = -1,
    spacing: tuple[int, int] = (2 * theme.SPACE, theme.SPACE),
    margins: Margins = 0,
) -> QGridLayout:
    """Rows of parts; column `stretch` gets the spare width. `spacing`: between columns, between rows."""
    layout = QGridLayout(into) if into is not None else QGridLayout()
    layout.setContentsMargins(*(margins if isinstance(margins, tuple) else (margins,) * 4))
    layout.setHorizontalSpacing(spacing[0])
    layout.setVerticalSpacing(spacing[1])
    if stretch >= 0:
        layout.setColumnStretch(stretch, 1)
    for place, parts in enumerate(rows):
        for across, part in enumerate(parts):
            if isinstance(part, QLayout):
                layout.addLayout(part, place, across)
            elif part is not None:
                layout.addWidget(part, place, across)
    return layout


def splitter(
    *parts: QWidget,
    gap: int = theme.SPACE,
    stretch: Sequence[int] = (),
    upright: bool = False,
    sizes: Sequence[int] = (),
    **settings: Any,
) -> QSplitter:
    """Parts that the user can resize, beside each other or, if `upright`, one above the other."""
    made = QSplitter(childrenCollapsible=False, handleWidth=gap)
    made.setOrientation(Qt.Orientation.Vertical if upright else Qt.Orientation.Horizontal)
    for part in parts:
        made.addWidget(part)
    for place, share in enumerate(stretch):
        made.setStretchFactor(place, share)
    if sizes:
        made.setSizes(sizes)
    return configure(made, **settings)


def configure(
    widget: W, *, name: str = "", tip: str = "", role: str = "", width: int = 0, shown: bool = True, **settings: Any
) -> W:
    """Set what a widget needs and return it; the builders and widgets of this folder pass their `**settings` here.

    `name` is the accessible name, `tip` the tool tip, `role` the style sheet's, `width` fixed, in pixels before
    scaling. Other settings are Qt properties (`placeholderText="none"`), what has a setter (`buddy=self.field`; a
    tuple holds the setter's arguments) and slots for signals (`textEdited=self.search`). Raises AttributeError for an
    unknown one.
    """
    if name:
        settings["accessibleName"] = name
    if tip:
        settings["toolTip"] = tip
    if role:
        widget.setProperty("role", role)
    if width:
        settings["fixedWidth"] = theme.scaled(width)
    if not shown:
        settings["visible"] = False
    slots = {key: slot for key, slot in settings.items() if isinstance(getattr(widget, key, None), SignalInstance)}
    for key, value in settings.items():
        if key not in slots:
            setter = getattr(widget, f"set{key[0].upper()}{key[1:]}")
            setter(*value) if isinstance(value, tuple) else setter(value)
    for key, slot in slots.items():  # after the values: setting one calls no slot
        getattr(widget, key).connect(slot)
    return widget


def connect(slot: Callable[..., object], *signals: SignalInstance) -> None:
    for signal in signals:
        signal.connect(slot)


def holder(layout: QLayout, **settings: Any) -> QWidget:
    widget = QWidget()
    widget.setLayout(layout)
    return configure(widget, **settings)


def card(layout: QLayout | None = None, role: str = "card", **settings: Any) -> QFrame:
    frame = QFrame()
    if layout is not None:
        frame.setLayout(layout)
    return configure(frame, role=role, **settings)


def wrap_in_card(view: QWidget, **settings: Any) -> QFrame:
    return card(column(view, margins=4), **settings)


def stack(*widgets: QWidget, into: QWidget, nested: bool = False) -> QStackedLayout:
    """One of the widgets at a time, filling `into`, or `nested` in another of its layouts."""
    layout = QStackedLayout() if nested else QStackedLayout(into)
    for widget in widgets:
        if widget.parentWidget() is None:  # the stack shows the first, which would be a window
            widget.setParent(into)
        layout.addWidget(widget)
    return layout


class TabArea(QScrollArea):
    """A scroll area without a frame that takes no focus itself and scrolls to the widget that gets it."""

    def __init__(self, parent: QWidget | None = None, *, content: QWidget | None = None, **settings: Any) -> None:
        """`content` gets the look of a page."""
        super().__init__(parent, widgetResizable=True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        if content is not None:
            content.setObjectName("page")
            self.setWidget(content)
        configure(self, **settings)
        theme.application().focusChanged.connect(self.follow_focus)

    def follow_focus(self) -> None:
        # The slot ignores the signal's arguments: PySide must not wrap a widget that is half destroyed.
        widget, page = QApplication.focusWidget(), self.widget()
        if widget is None or page is None or not page.isAncestorOf(widget):
            return
        if widget.height() < self.viewport().height() // 2:
            self.ensureWidgetVisible(widget, 0, theme.SPACE)


class FlowLayout(QLayout):
    """Widgets from left to right in as many lines as the width needs."""

    def __init__(
        self, parent: QWidget | None = None, spacing: int = theme.SPACE, line_spacing: int | None = None
    ) -> None:
        """`spacing` in pixels between the widgets of a line, and between lines unless `line_spacing` is given."""
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

    def put_in_order(self, widgets: Sequence[QWidget]) -> None:
        """Its widgets, all of them, in this order. To take one out and add it again looks through all of them."""
        places: dict[QWidget | None, int] = {widget: place for place, widget in enumerate(widgets)}
        self._items.sort(key=lambda item: places[item.widget()])
        self.invalidate()

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
        size = QSize()
        for item in self._items:
            size = size.expandedTo(item.minimumSize())
        return size

    minimumSize = sizeHint

    def _place(self, rect: QRect, *, move: bool) -> int:
        x, y, line_height = rect.x(), rect.y(), 0
        for item in (item for item in self._items if not item.isEmpty()):
            size = item.sizeHint().boundedTo(QSize(max(rect.width(), 1), item.sizeHint().height()))
            if x > rect.x() and x + size.width() > rect.right() + 1:
                x, y, line_height = rect.x(), y + line_height + self._line_spacing, 0
            if move:
                item.setGeometry(QRect(QPoint(x, y), size))
            x += size.width() + self.spacing()
            line_height = max(line_height, size.height())
        return y + line_height - rect.y()


def on_screen(window: QWidget, width: int, height: int) -> QSize:
    """The size of a window, scaled with the text and no larger than the screen."""
    screen = window.screen().availableSize() - WINDOW_FRAME
    return theme.scaled_size(QSize(width, height)).boundedTo(screen)


def set_shown(widget: QWidget, shown: bool) -> None:
    """`setVisible` only where that changes something: each call lays out the widget with all its children."""
    if widget.isHidden() == shown:
        widget.setVisible(shown)


def show_all(shown: object, *widgets: QWidget) -> None:
    for widget in widgets:
        set_shown(widget, bool(shown))


def set_tab_order(*stops: QWidget) -> None:
    for stop, following in pairwise(stops):
        QWidget.setTabOrder(stop, following)


def set_style_property(widget: QWidget, name: str, value: object) -> None:
    """Set a property that the style sheet selects on, and polish the widget again if it changed."""
    if widget.property(name) != value:
        widget.setProperty(name, value)
        widget.style().unpolish(widget)
        widget.style().polish(widget)


def clear_layout(layout: QLayout) -> None:
    while (item := layout.takeAt(0)) is not None:
        widget = item.widget()
        if widget is not None:
            widget.hide()
            widget.deleteLater()


def reserve_gutter(area: QAbstractScrollArea, content: QLayout) -> None:
    """End `content` one gutter before the right edge of its scroll area, with or without a vertical scroll bar."""
    scroll_bar = area.width() - area.viewport().width()
    margins = content.contentsMargins()
    content.setContentsMargins(margins.left(), margins.top(), max(0, theme.GUTTER - scroll_bar), margins.bottom())


def paint_edge(widget: QWidget, colour: QColor, margin: int) -> None:
    """Paint a coloured bar along the left edge of a card, in its `paintEvent`."""
    theme.painter(widget, colour).drawRoundedRect(QRectF(6, margin, 3, widget.height() - 2 * margin), 1.5, 1.5)


def paint_ring(widget: QWidget, radius: float) -> None:
    """Paint the focus ring along the edge of `widget`, in its `paintEvent`."""
    painter = theme.painter(widget)
    painter.setPen(QPen(theme.palette().accent, 2))
    painter.drawRoundedRect(QRectF(widget.rect()).adjusted(1, 1, -1, -1), radius, radius)
