"""A walk through a window by Tab alone: the stops in their order, and what stands in the way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from PySide6.QtCore import QPoint, QRect, Qt
from PySide6.QtGui import QAccessible
from PySide6.QtTest import QTest
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractItemView,
    QAbstractSlider,
    QAbstractSpinBox,
    QApplication,
    QComboBox,
    QHeaderView,
    QLineEdit,
    QPlainTextEdit,
    QProgressBar,
    QScrollBar,
    QTextBrowser,
    QTextEdit,
    QToolBar,
    QToolButton,
    QWidget,
)

from app.widgets.basic.controls import Segments
from app.widgets.charts.plot import Plot
from app.widgets.window_frame import Sidebar

CONTROLS = (QAbstractButton, QAbstractItemView, QAbstractSlider, QAbstractSpinBox, QComboBox, QLineEdit)
CONTROLS += (QPlainTextEdit, QTextEdit)
# What has controls of its own inside: another key than Tab does what those do (arrows in a row of segments and in the
# sidebar, the menu of a chart, Delete in a line of text)
PARTS_OF = (QComboBox, QAbstractItemView, QAbstractSpinBox, QLineEdit, QScrollBar, Segments, Sidebar, Plot)
MOST = 200  # presses of Tab, more than any window has stops and links


@dataclass
class TabWalk:
    """Stops of a window, from the one after the first focus on and round to it, and those of the way back."""

    forward: list[QWidget] = field(default_factory=list)
    backward: list[QWidget] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)  # stops of the way forward that were out of view
    traps: list[str] = field(default_factory=list)  # stops that Tab did not leave
    upward: list[str] = field(default_factory=list)  # pairs of stops, the second above the first and not right of it

    def unreached(self, window: QWidget) -> list[str]:
        """Controls of the window that no stop reaches: not by Tab, not as a part of a stop, not by a shortcut."""
        reached = {*self.forward, *window.findChildren(QScrollBar)}
        controls = [each for each in window.findChildren(QWidget) if isinstance(each, CONTROLS) and each not in reached]
        usable = [
            each for each in controls if each.window() is window and each.isVisibleTo(window) and each.isEnabled()
        ]
        parts = [each for each in usable if any(isinstance(parent, PARTS_OF) for parent in parents_of(each))]
        return [described(each) for each in usable if each not in parts and not has_shortcut(each)]


def walk_by_tab(window: QWidget) -> TabWalk:
    """Press Tab until the first stop comes round again, then Shift+Tab from there."""
    walk = TabWalk()
    first = QApplication.focusWidget()
    assert first is not None and first.window() is window, "the window has the keyboard"
    for stops, key in ((walk.forward, Qt.Key.Key_Tab), (walk.backward, Qt.Key.Key_Backtab)):
        stops += _stops(first, key, walk)
    return walk


def _stops(first: QWidget, key: Qt.Key, walk: TabWalk) -> list[QWidget]:
    stops: list[QWidget] = []
    first.setFocus(Qt.FocusReason.TabFocusReason)
    while first not in stops:
        before = QApplication.focusWidget()
        if before is None or len(stops) > MOST:
            walk.traps.append(described(stops[-1] if stops else first))
            break
        for _ in range(MOST if isinstance(before, QTextBrowser) else 1):  # which goes from link to link first
            QTest.keyClick(before, key)
            if QApplication.focusWidget() is not before:
                break
        after = QApplication.focusWidget()
        if (after is before and after is not first) or after in stops:
            walk.traps.append(described(before))
            break
        if after is not None and key == Qt.Key.Key_Tab:
            QApplication.processEvents()
            if not is_in_view(after):
                walk.unseen.append(described(after))
            last, place = (QRect(x.mapTo(x.window(), QPoint(0, 0)), x.size()) for x in (before, after))
            is_page = not any(isinstance(each, (QToolBar, Sidebar)) for each in (after, *parents_of(after)))
            if is_page and place.bottom() < last.top() and place.left() < last.right():
                walk.upward.append(f"{described(before)}, {described(after)}")
        if after is not None:
            stops.append(after)
        if after is before:  # the only stop
            break
    return stops


def is_in_view(widget: QWidget) -> bool:
    """Whether some of a widget lies within all that is around it."""
    around = [*parents_of(widget), widget.window()]
    return widget.isVisible() and all(
        QRect(widget.mapTo(parent, QPoint(0, 0)), widget.size()).intersects(parent.rect()) for parent in around
    )


def parents_of(widget: QWidget) -> list[QWidget]:
    """The widgets around one, from the inside out, within its window."""
    parents: list[QWidget] = []
    while (parent := (parents[-1] if parents else widget).parentWidget()) is not None and not parent.isWindow():
        parents.append(parent)
    return parents


def has_shortcut(widget: QWidget) -> bool:
    """Whether an action with keys of its own does what this button does, and its tool tip tells them."""
    action = widget.defaultAction() if isinstance(widget, QToolButton) else None
    keys = action.shortcut().toString(action.shortcut().SequenceFormat.NativeText) if action else ""
    return bool(action and keys and keys in widget.toolTip())


def unnamed(window: QWidget) -> list[str]:
    """The controls, charts and bars of a window that a screen reader has no name for, and the window itself."""
    parts = [x for x in window.findChildren(QWidget) if x.isVisible() and x.window() is window]
    read = [
        x
        for x in parts
        if isinstance(x, (*CONTROLS, Plot, QProgressBar)) and not isinstance(x, (QHeaderView, QScrollBar))
    ]
    icons = [x for x in read if isinstance(x, QToolButton) and isinstance(x.parent(), QLineEdit) and not x.toolTip()]
    return [described(x) for x in (window, *read) if x not in icons and not name_of(x)]


def name_of(widget: QWidget) -> str:
    """What a screen reader says of a widget."""
    return QAccessible.queryAccessibleInterface(widget).text(QAccessible.Text.Name).strip()


def unmarked(stops: Sequence[QWidget]) -> list[str]:
    """The stops that look the same with the focus and without it: one of each class and role is drawn."""
    same = []
    for stop in {(type(stop), stop.property("role")): stop for stop in stops}.values():
        stop.setFocus(Qt.FocusReason.TabFocusReason)
        focused = stop.grab().toImage()
        stop.clearFocus()
        same += [described(stop)] if stop.grab().toImage() == focused else []
    return same


def described(widget: QWidget) -> str:
    text = widget.text() if isinstance(widget, QAbstractButton) else ""
    return f"{type(widget).__name__} {widget.accessibleName() or text or widget.objectName()}"
