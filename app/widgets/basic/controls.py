"""The bare controls of a form: a number with its unit, a menu that ignores the passing wheel, a switch, a field for
paths. They know values and the theme, and nothing of settings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QPoint, QPointF, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QDragEnterEvent,
    QDropEvent,
    QEnterEvent,
    QFontMetrics,
    QPainter,
    QPaintEvent,
    QPen,
    QWheelEvent,
)
from PySide6.QtWidgets import (
    QAbstractButton,
    QCheckBox,
    QComboBox,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QWidget,
)

from app import theme
from app.widgets.basic import icons


def check_box_side() -> int:
    """Side of a box to tick, in pixels."""
    return theme.scaled(16)


class NumberEdit(QLineEdit):
    """A line for a number, with its unit in grey at the right edge."""

    def __init__(self, unit: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._unit = unit
        font = theme.figures_font()
        self.setFont(font)
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
    """A menu. The wheel scrolls the page over it, instead of changing a setting in passing."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.setMinimumContentsLength(6)

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()

    def choose(self, value: str) -> None:
        """Show this value; one that the menu does not know is added to it, so that nothing changes unseen."""
        place = self.findData(value)
        if place < 0:
            self.addItem(f"{value} (unknown)", value)
            place = self.count() - 1
        self.setCurrentIndex(place)


class Switch(QAbstractButton):
    """On or off, with the word beside it; space and a click turn it."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._track = theme.scaled_size(QSize(32, 18))
        self.setCheckable(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        theme.signals.changed.connect(self.update)

    def sizeHint(self) -> QSize:
        return QSize(self._track.width() + 8 + self.fontMetrics().horizontalAdvance("Off") + 4, theme.scaled(28))

    def enterEvent(self, event: QEnterEvent) -> None:
        super().enterEvent(event)
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, on = theme.palette(), self.isChecked()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        track = QRectF(1, (self.height() - self._track.height()) / 2, self._track.width(), self._track.height())
        painter.setPen(QPen(colours.text, 1.5) if self.hasFocus() else Qt.PenStyle.NoPen)
        painter.setBrush(colours.accent if on else colours.outline)
        painter.drawRoundedRect(track, track.height() / 2, track.height() / 2)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colours.card if not on else colours.accent_text)
        radius = track.height() / 2 - 2.5
        centre = track.right() - track.height() / 2 if on else track.left() + track.height() / 2
        painter.drawEllipse(QPointF(centre, track.center().y()), radius, radius)
        painter.setPen(colours.text if on else colours.muted)
        word = self.rect().adjusted(self._track.width() + 9, 0, 0, 0)
        painter.drawText(word, Qt.AlignmentFlag.AlignVCenter, "On" if on else "Off")


class CheckBox(QCheckBox):
    """A box to tick and its words, in the theme's colours: a style sheet cannot recolour the mark."""

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(text, parent)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)

    def sizeHint(self) -> QSize:
        words, side = self.fontMetrics().size(0, self.text()), check_box_side()
        return QSize(side + 8 + words.width() + 4, max(side, words.height()) + 8)

    minimumSizeHint = sizeHint

    def hitButton(self, pos: QPoint) -> bool:
        return self.rect().contains(pos)

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, painter, side = theme.palette(), QPainter(self), check_box_side()
        box = QRect(1, (self.height() - side) // 2, side, side)
        draw_check_box(painter, box, self.isChecked(), focused=self.hasFocus())
        painter.setPen(colours.text if self.isEnabled() else colours.faint)
        painter.drawText(self.rect().adjusted(side + 8, 0, 0, 0), Qt.AlignmentFlag.AlignVCenter, self.text())


def draw_check_box(painter: QPainter, box: QRect, ticked: bool, *, focused: bool = False) -> None:
    """A box with or without its mark; unticked it must still be seen, so its edge is darker than that of a field."""
    colours = theme.palette()
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    edge = colours.text if focused else colours.accent if ticked else colours.muted
    painter.setPen(QPen(edge, 1.5 if focused else 1.0))
    painter.setBrush(colours.accent if ticked else colours.field)
    painter.drawRoundedRect(QRectF(box).adjusted(0.5, 0.5, -0.5, -0.5), 4, 4)
    if ticked:
        painter.drawPixmap(box.topLeft() + QPoint(1, 1), icons.pixmap("check", colours.accent_text, box.width() - 2))


class PathEdit(QLineEdit):
    """A line that takes a file or folder dropped on it, if it is of a kind that it `wants`; others are left to what it
    stands in."""

    def __init__(self, wants: Callable[[Path], bool] = lambda path: True, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._wants = wants
        self.setAcceptDrops(True)

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if self._wanted(event):
            event.acceptProposedAction()
        elif _dropped_path(event):
            event.ignore()
        else:
            super().dragEnterEvent(event)

    def _wanted(self, event: QDropEvent) -> str:
        path = _dropped_path(event)
        return path if path and self._wants(Path(path)) else ""

    def dropEvent(self, event: QDropEvent) -> None:
        path = self._wanted(event)
        if path:
            self.setText(path)
            self.setFocus(Qt.FocusReason.OtherFocusReason)
            self.textEdited.emit(path)
            event.acceptProposedAction()
        else:
            super().dropEvent(event)


class ProseEdit(QPlainTextEdit):
    """Text of a few lines; Tab leaves it, as in every other field."""

    edited = Signal()

    def __init__(self, lines: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTabChangesFocus(True)
        self.setFixedHeight(self.fontMetrics().lineSpacing() * lines + 18)
        self.textChanged.connect(self.edited)


class LinkButton(QPushButton):
    """A button that looks like a link: for what leads somewhere and changes nothing."""

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(text, parent)
        self.setProperty("role", "link")
        self.setFlat(True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)


class ElidedLabel(QLabel):
    """One line of grey text that gives way at one end or in the middle; `text()` stays whole."""

    def __init__(
        self, gives_way: Qt.TextElideMode = Qt.TextElideMode.ElideRight, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._gives_way = gives_way

    def sizeHint(self) -> QSize:
        return QSize(40, super().sizeHint().height())

    minimumSizeHint = sizeHint

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(theme.palette().muted)
        text = self.fontMetrics().elidedText(self.text(), self._gives_way, self.width())
        painter.drawText(self.rect(), self.alignment(), text)


def _dropped_path(event: QDropEvent) -> str:
    urls = event.mimeData().urls()
    return urls[0].toLocalFile() if len(urls) == 1 and urls[0].isLocalFile() else ""
