"""Basic input widgets: a number with its unit, a combo box that ignores the wheel, a switch, a check box, a path line.

They know values and the theme; settings and fields are in `app.widgets.form`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from PySide6.QtCore import QPoint, QPointF, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QDragEnterEvent,
    QDropEvent,
    QFontMetrics,
    QPainter,
    QPaintEvent,
    QPen,
    QWheelEvent,
)
from PySide6.QtWidgets import (
    QAbstractButton,
    QButtonGroup,
    QCheckBox,
    QComboBox,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QToolButton,
    QWidget,
)

from app import theme
from app.widgets.basic import icons


def check_box_side() -> int:
    """Side length of a check box, in pixels."""
    return theme.scaled(16)


class NumberEdit(QLineEdit):
    """A line edit for a number, with its unit painted in grey at the right edge."""

    def __init__(self, unit: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._unit = unit
        font = theme.figures_font()
        self.setFont(font)
        # The margin keeps typed text off the unit, which QLineEdit knows nothing of.
        self.setTextMargins(0, 0, QFontMetrics(font).horizontalAdvance(unit) + 8 if unit else 0, 0)
        self.setMinimumWidth(theme.scaled(72))

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if self._unit:
            painter = QPainter(self)
            painter.setPen(theme.palette().muted)
            right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
            painter.drawText(self.rect().adjusted(0, 0, -9, 0), right, self._unit)


class ComboBox(QComboBox):
    """A combo box. The wheel scrolls the page below the pointer and never changes the value."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)  # the default, WheelFocus, would take the focus while scrolling
        # The default makes the longest item the minimum width, and one long id then widens the page.
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.setMinimumContentsLength(6)

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # Qt then offers the event to the parent, and so to the scroll area of the page

    def choose(self, value: str) -> None:
        """Select the item with this value. An unknown value gets an item of its own, so showing a form never changes it."""
        index = self.findData(value)
        if index < 0:
            self.addItem(f"{value} (unknown)", value)
            index = self.count() - 1
        self.setCurrentIndex(index)


class Switch(QAbstractButton):
    """A toggle switch with the word On or Off beside it; a click and the space bar toggle it."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._track = theme.scaled_size(QSize(32, 18))
        self.setCheckable(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        theme.signals.changed.connect(self.update)

    def sizeHint(self) -> QSize:
        return QSize(self._track.width() + 8 + self.fontMetrics().horizontalAdvance("Off") + 4, theme.scaled(28))

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, is_on = theme.palette(), self.isChecked()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        track = QRectF(1, (self.height() - self._track.height()) / 2, self._track.width(), self._track.height())
        painter.setPen(QPen(colours.text, 1.5) if self.hasFocus() else Qt.PenStyle.NoPen)
        painter.setBrush(colours.accent if is_on else colours.outline)
        painter.drawRoundedRect(track, track.height() / 2, track.height() / 2)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colours.accent_text if is_on else colours.card)
        radius = track.height() / 2 - 2.5
        centre = track.right() - track.height() / 2 if is_on else track.left() + track.height() / 2
        painter.drawEllipse(QPointF(centre, track.center().y()), radius, radius)
        painter.setPen(colours.text if is_on else colours.muted)
        text_rect = self.rect().adjusted(self._track.width() + 9, 0, 0, 0)
        painter.drawText(text_rect, Qt.AlignmentFlag.AlignVCenter, "On" if is_on else "Off")


class CheckBox(QCheckBox):
    """A check box painted in the theme's colours: a style sheet can replace the mark by an image but not recolour it."""

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(text, parent)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)  # Qt repaints it when the pointer enters or leaves

    def sizeHint(self) -> QSize:
        text, side = self.fontMetrics().size(0, self.text()), check_box_side()
        return QSize(side + 8 + text.width() + 4, max(side, text.height()) + 8)

    minimumSizeHint = sizeHint

    def hitButton(self, pos: QPoint) -> bool:
        return self.rect().contains(pos)  # QCheckBox asks the style, which would put box and text elsewhere

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, painter, side = theme.palette(), QPainter(self), check_box_side()
        box = QRect(1, (self.height() - side) // 2, side, side)
        draw_check_box(painter, box, self.isChecked(), focused=self.hasFocus())
        painter.setPen(colours.text if self.isEnabled() else colours.faint)
        painter.drawText(self.rect().adjusted(side + 8, 0, 0, 0), Qt.AlignmentFlag.AlignVCenter, self.text())


def draw_check_box(painter: QPainter, box: QRect, ticked: bool, *, focused: bool = False) -> None:
    """Paint a check box into `box`. Its edge is darker than a field's: of an unticked box only the edge is visible."""
    colours = theme.palette()
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    edge = colours.text if focused else colours.accent if ticked else colours.muted
    painter.setPen(QPen(edge, 1.5 if focused else 1.0))
    painter.setBrush(colours.accent if ticked else colours.field)
    painter.drawRoundedRect(QRectF(box).adjusted(0.5, 0.5, -0.5, -0.5), 4, 4)
    if ticked:
        painter.drawPixmap(box.topLeft() + QPoint(1, 1), icons.pixmap("check", colours.accent_text, box.width() - 2))


class PathEdit(QLineEdit):
    """A line edit that takes a file or folder dropped on it if `accepts(path)`; other files are left to the parent."""

    def __init__(self, accepts: Callable[[Path], bool] = lambda path: True, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._accepts = accepts
        self.setAcceptDrops(True)

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if self._accepted_path(event):
            event.acceptProposedAction()
        elif _dropped_path(event):
            event.ignore()  # QLineEdit would accept it and insert the URL as text
        else:
            super().dragEnterEvent(event)

    def _accepted_path(self, event: QDropEvent) -> str:
        path = _dropped_path(event)
        return path if path and self._accepts(Path(path)) else ""

    def dropEvent(self, event: QDropEvent) -> None:
        path = self._accepted_path(event)
        if path:
            self.setText(path)
            self.setFocus(Qt.FocusReason.OtherFocusReason)
            self.textEdited.emit(path)
            event.acceptProposedAction()
        else:
            super().dropEvent(event)


class ProseEdit(QPlainTextEdit):
    """A plain text edit of a fixed number of lines; Tab leaves it, as in every other field.

    Signals:
        edited – the text changed, by the user or by `setPlainText`.
    """

    edited = Signal()

    def __init__(self, lines: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTabChangesFocus(True)
        self.setFixedHeight(self.fontMetrics().lineSpacing() * lines + 18)
        self.textChanged.connect(self.edited)


class LinkButton(QPushButton):
    """A button that looks like a link: for navigation, not for changes."""

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(text, parent)
        self.setProperty("role", "link")
        self.setFlat(True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)


class ElidedLabel(QLabel):
    """One line of grey text, elided where it does not fit; `text()` stays complete."""

    def __init__(
        self, elide_mode: Qt.TextElideMode = Qt.TextElideMode.ElideRight, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._elide_mode = elide_mode

    def sizeHint(self) -> QSize:
        # QLabel's hint is the width of its text, which would make it the minimum width of the window.
        return QSize(40, super().sizeHint().height())

    minimumSizeHint = sizeHint

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(theme.palette().muted)
        text = self.fontMetrics().elidedText(self.text(), self._elide_mode, self.width())
        painter.drawText(self.rect(), self.alignment(), text)


def _dropped_path(event: QDropEvent) -> str:
    urls = event.mimeData().urls()
    return urls[0].toLocalFile() if len(urls) == 1 and urls[0].isLocalFile() else ""


class Segments(QWidget):
    """Segmented control over `labels` (key → text); the first one is checked at the start.

    Attributes:
        buttons – key → button.

    Signals:
        chosen(key) – a segment was clicked, or `choose` was called.
    """

    chosen = Signal(str)

    def __init__(self, labels: Mapping[str, str], name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: dict[str, QToolButton] = {}
        self._group = QButtonGroup(self)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2)
        self.setAccessibleName(name)
        for key, text in labels.items():
            button = QToolButton()
            button.setText(text)
            button.setCheckable(True)
            button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
            button.setAccessibleName(f"{name}: {text}")
            button.clicked.connect(lambda _checked=False, key=key: self.choose(key))
            self._group.addButton(button)
            self.buttons[key] = button
            row.addWidget(button)
        next(iter(self.buttons.values())).setChecked(True)

    @property
    def key(self) -> str:
        """The key of the checked segment."""
        return next(key for key, button in self.buttons.items() if button.isChecked())

    def choose(self, key: str) -> None:
        """Check a segment and emit `chosen`."""
        self.buttons[key].setChecked(True)
        self.chosen.emit(key)

    def show_word(self, key: str, word: str) -> None:
        self.buttons[key].setText(word)
        self.buttons[key].setAccessibleName(f"{self.accessibleName()}: {word}")

    def set_shown(self, key: str, shown: bool) -> None:
        self.buttons[key].setVisible(shown)
