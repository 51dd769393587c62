"""Basic input widgets: number, combo box, switch, check box, path, search, link, segments."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PySide6.QtCore import QMimeData, QPoint, QPointF, QRect, QRectF, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QColor,
    QDragEnterEvent,
    QDropEvent,
    QFontMetrics,
    QGuiApplication,
    QIcon,
    QIntValidator,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QPen,
    QShortcut,
    QWheelEvent,
)
from PySide6.QtWidgets import (
    QAbstractButton,
    QCheckBox,
    QComboBox,
    QLabel,
    QLineEdit,
    QMenu,
    QPlainTextEdit,
    QPushButton,
    QSizePolicy,
    QToolButton,
    QWidget,
)

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.labels import key_name
from app.widgets.basic.layout import configure, row

CHECK_BOX = 16  # its side in pixels, before scaling


class NumberEdit(QLineEdit):
    """A line edit for a number, with its unit painted in grey at the right edge."""

    def __init__(
        self,
        unit: str = "",
        parent: QWidget | None = None,
        *,
        width: int = 0,
        integers: tuple[int, int] | None = None,
        **settings: Any,
    ) -> None:
        """`width` in pixels before scaling; `integers`: only whole numbers from the first to the second."""
        super().__init__(parent)
        self._unit = unit
        self.setFont(theme.figures_font())
        self.setTextMargins(0, 0, QFontMetrics(self.font()).horizontalAdvance(unit) + 8 if unit else 0, 0)
        self.setMinimumWidth(theme.scaled(72))
        if width:
            self.setAlignment(Qt.AlignmentFlag.AlignRight)
        if integers:
            self.setValidator(QIntValidator(*integers, self))
        configure(self, width=width, **settings)

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if self._unit:
            painter = QPainter(self)
            painter.setPen(theme.palette().muted)
            right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
            painter.drawText(self.rect().adjusted(0, 0, -9, 0), right, self._unit)


class SearchEdit(QLineEdit):
    def __init__(self, placeholder: str, name: str = "", **settings: Any) -> None:
        super().__init__(placeholderText=placeholder, clearButtonEnabled=True)
        configure(self, name=name or placeholder, role="search", **settings)
        icons.Tint(self.addAction(QIcon(), QLineEdit.ActionPosition.LeadingPosition), "search")

    def take_focus(self) -> None:
        self.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.selectAll()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        super().keyPressEvent(event)
        matches = self.completer().popup() if self.completer() else None  # which take Return while they are shown
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and not (matches and matches.isVisible()):
            event.accept()  # it would press the main button of the dialog


class ComboBox(QComboBox):
    """A combo box. The wheel scrolls the page below the pointer and never changes the value."""

    def __init__(
        self,
        parent: QWidget | None = None,
        *,
        length: int = 6,
        items: Mapping[Any, str] | None = None,
        tips: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        """`length`: the minimum width, in characters; `items`: value → text; `tips`: tool tips of the items."""
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)  # not WheelFocus, which takes the focus while scrolling
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.setMinimumContentsLength(length)
        self.fill(items or {})
        for place, tip in enumerate(tips):
            self.setItemData(place, tip, Qt.ItemDataRole.ToolTipRole)
        configure(self, **settings)

    def fill(self, items: Mapping[Any, str], chosen: Any = None) -> None:
        """Replace the items (value → text), unless they are the same, and select `chosen`, else the first."""
        if [(self.itemData(i), self.itemText(i)) for i in range(self.count())] != list(items.items()):
            self.clear()
            for value, text in items.items():
                self.addItem(text, value)
        self.setCurrentIndex(max(0, self.findData(chosen)))

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # Qt then offers the event to the scroll area of the page

    def choose(self, value: str) -> None:
        index = self.findData(value)
        if index < 0:
            self.addItem(f"{value} (unknown)", value)
            index = self.count() - 1
        self.setCurrentIndex(index)


class Switch(QAbstractButton):
    def __init__(self, parent: QWidget | None = None, **settings: Any) -> None:
        super().__init__(parent, checkable=True)
        self._track = theme.scaled_size(QSize(32, 18))
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        configure(self, **settings)

    def sizeHint(self) -> QSize:
        return QSize(self._track.width() + 8 + self.fontMetrics().horizontalAdvance("Off") + 4, theme.scaled(28))

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, is_on = theme.palette(), self.isChecked()
        painter = theme.painter(self)
        track = QRectF(1, (self.height() - self._track.height()) / 2, self._track.width(), self._track.height())
        painter.setPen(QPen(colours.text, 1.5) if self.hasFocus() else Qt.PenStyle.NoPen)
        painter.setBrush(colours.accent if is_on else colours.outline)
        painter.drawRoundedRect(track, track.height() / 2, track.height() / 2)
        theme.set_fill(painter, colours.accent_text if is_on else colours.card)
        radius = track.height() / 2 - 2.5
        centre = track.right() - track.height() / 2 if is_on else track.left() + track.height() / 2
        painter.drawEllipse(QPointF(centre, track.center().y()), radius, radius)
        painter.setPen(colours.text if is_on else colours.muted)
        text_rect = self.rect().adjusted(self._track.width() + 9, 0, 0, 0)
        painter.drawText(text_rect, Qt.AlignmentFlag.AlignVCenter, "On" if is_on else "Off")


class CheckBox(QCheckBox):
    """A check box painted in the theme's colours, which a style sheet cannot give to the mark."""

    def __init__(self, text: str, **settings: Any) -> None:
        super().__init__(text)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)
        configure(self, **settings)

    def sizeHint(self) -> QSize:
        text, side = self.fontMetrics().size(0, self.text()), theme.scaled(CHECK_BOX)
        return QSize(side + 8 + text.width() + 4, max(side, text.height()) + 8)

    minimumSizeHint = sizeHint

    def hitButton(self, pos: QPoint) -> bool:
        return self.rect().contains(pos)

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, painter, side = theme.palette(), QPainter(self), theme.scaled(CHECK_BOX)
        box = QRect(1, (self.height() - side) // 2, side, side)
        draw_check_box(painter, box, self.isChecked(), focused=self.hasFocus())
        painter.setPen(colours.text if self.isEnabled() else colours.faint)
        painter.drawText(self.rect().adjusted(side + 8, 0, 0, 0), Qt.AlignmentFlag.AlignVCenter, self.text())


def draw_check_box(painter: QPainter, box: QRect, ticked: bool, *, focused: bool = False) -> None:
    colours = theme.palette()
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    edge = colours.text if focused else colours.accent if ticked else colours.muted
    painter.setPen(QPen(edge, 1.5 if focused else 1.0))
    painter.setBrush(colours.accent if ticked else colours.field)
    painter.drawRoundedRect(QRectF(box).adjusted(0.5, 0.5, -0.5, -0.5), 4, 4)
    if ticked:
        painter.drawPixmap(box.topLeft() + QPoint(1, 1), icons.pixmap("check", colours.accent_text, box.width() - 2))


class PathEdit(QLineEdit):
    """A line edit that takes a file or folder dropped on it if `accepts(path)`."""

    def __init__(self, accepts: Callable[[Path], bool], **settings: Any) -> None:
        super().__init__()
        self._accepts = accepts
        self.setAcceptDrops(True)
        configure(self, **settings)

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        path = dropped_path(event.mimeData())
        if path is None:
            super().dragEnterEvent(event)
        elif self._accepts(path):
            event.acceptProposedAction()
        else:
            event.ignore()  # QLineEdit would insert the URL as text

    def dropEvent(self, event: QDropEvent) -> None:
        path = dropped_path(event.mimeData())
        if path is None or not self._accepts(path):
            super().dropEvent(event)
            return
        self.setText(str(path))
        self.setFocus(Qt.FocusReason.OtherFocusReason)
        self.textEdited.emit(str(path))
        event.acceptProposedAction()


def dropped_path(mime: QMimeData) -> Path | None:
    """The one local file or folder that is dragged; None for anything else."""
    urls = mime.urls()
    return Path(urls[0].toLocalFile()) if len(urls) == 1 and urls[0].isLocalFile() else None


def add_list_arrow(line: QLineEdit, on_open: Callable[[], object]) -> None:
    """Add an arrow to a line that opens a list, as the Down key does."""
    arrow = line.addAction(QIcon(), QLineEdit.ActionPosition.TrailingPosition)
    arrow.setText(f"Choose from a list ({key_name(QKeySequence(Qt.Key.Key_Down))})")
    arrow.triggered.connect(on_open)
    QShortcut(QKeySequence(Qt.Key.Key_Down), line, on_open).setContext(Qt.ShortcutContext.WidgetShortcut)
    icons.Tint(arrow, "chevron-down")


class ListedEdit(QLineEdit):
    """A line with a menu of suggestions; `fill(menu, take)` makes it, and `take(text)` puts a text into the line."""

    def __init__(self, fill: Callable[[QMenu, Callable[[str], object]], object], **settings: Any) -> None:
        super().__init__()
        self._fill, self.menu = fill, QMenu(self)
        add_list_arrow(self, self.open_menu)
        configure(self, **settings)

    def open_menu(self) -> None:
        self.menu.clear()
        self._fill(self.menu, self.take)
        self.menu.popup(self.mapToGlobal(self.rect().bottomLeft()))

    def take(self, text: str) -> None:
        if text:
            self.setText(text)
            self.editingFinished.emit()


class ProseEdit(QPlainTextEdit):
    def __init__(self, lines: int, parent: QWidget | None = None, **settings: Any) -> None:
        super().__init__(parent, tabChangesFocus=True)
        self.setFixedHeight(self.fontMetrics().lineSpacing() * lines + 18)
        configure(self, **settings)


class LinkButton(QPushButton):
    def __init__(
        self,
        text: str,
        parent: QWidget | None = None,
        *,
        on_click: Callable[[], object] | None = None,
        role: str = "link",
        **settings: Any,
    ) -> None:
        super().__init__(text, parent, flat=True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        configure(self, role=role, **settings)
        if on_click is not None:
            self.clicked.connect(lambda _checked=False: on_click())


class ElidedLink(LinkButton):
    """A link in one line of small text, elided where it does not fit. `colour`: a role of the palette."""

    def __init__(self, text: str, parent: QWidget | None = None, **settings: Any) -> None:
        super().__init__(text, parent, **settings)
        self.colour = "muted"
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)

    def sizeHint(self) -> QSize:
        return QSize(120, self.fontMetrics().lineSpacing() + 4)

    minimumSizeHint = sizeHint

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, colours = QPainter(self), theme.palette()
        is_active = self.isEnabled() and (self.underMouse() or self.hasFocus())
        font = theme.caption_font()
        font.setUnderline(is_active)
        painter.setFont(font)
        painter.setPen(colours.accent if is_active and self.colour == "muted" else getattr(colours, self.colour))
        text = painter.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, self.width())
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop, text)


class CopyLink(LinkButton):
    def __init__(self, name: str, tip: str = "") -> None:
        super().__init__("Copy", on_click=self.copy, tip=tip, name=name)
        self.content = ""

    def copy(self) -> None:
        QGuiApplication.clipboard().setText(self.content)
        self.setText("Copied")
        QTimer.singleShot(1500, self, lambda: self.setText("Copy"))


class Dot(QWidget):
    """A dot, or a square with round corners, in a palette colour or that of `colour()`."""

    def __init__(self, colour: str | Callable[[], QColor], height: int = 10, *, square: bool = False) -> None:
        super().__init__()
        self.colour = colour
        self._square = square
        self.setFixedSize(theme.scaled_size(QSize(10, height)))

    def show_colour(self, role: str) -> None:
        self.colour = role
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        colour = getattr(theme.palette(), self.colour) if isinstance(self.colour, str) else self.colour()
        painter = theme.painter(self, colour)
        if self._square:
            painter.drawRoundedRect(self.rect(), 3, 3)
        else:
            painter.drawEllipse(QRectF(self.rect()).center(), 0.4 * self.width(), 0.4 * self.width())


class ElidedLabel(QLabel):
    """One line of text in a palette's colour, elided where it does not fit; `text()` stays complete."""

    def __init__(
        self,
        elide_mode: Qt.TextElideMode = Qt.TextElideMode.ElideRight,
        parent: QWidget | None = None,
        *,
        colour: str = "muted",
        **settings: Any,
    ) -> None:
        super().__init__(parent)
        self._elide_mode, self._colour = elide_mode, colour
        configure(self, **settings)

    def sizeHint(self) -> QSize:
        return QSize(40, super().sizeHint().height())  # QLabel's hint would widen the window to the text

    minimumSizeHint = sizeHint

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(getattr(theme.palette(), self._colour))
        text = self.fontMetrics().elidedText(self.text(), self._elide_mode, self.width())
        painter.drawText(self.rect(), self.alignment(), text)


class Segments(QWidget):
    """Exclusive buttons in a row over `labels` (key → text)."""

    chosen = Signal(str)  # key

    def __init__(self, labels: Mapping[str, str], name: str, parent: QWidget | None = None, **settings: Any) -> None:
        super().__init__(parent)
        configure(self, name=name, **settings)
        self.buttons = {key: QToolButton(self) for key in labels}
        for key, button in self.buttons.items():
            configure(button, checkable=True, autoExclusive=True, focusPolicy=Qt.FocusPolicy.StrongFocus)
            button.clicked.connect(lambda _checked=False, key=key: self.choose(key))
            self.show_word(key, labels[key])
        next(iter(self.buttons.values())).setChecked(True)
        row(*self.buttons.values(), into=self, spacing=2)

    @property
    def key(self) -> str:
        return next(key for key, button in self.buttons.items() if button.isChecked())

    def choose(self, key: str) -> None:
        self.buttons[key].setChecked(True)
        self.chosen.emit(key)

    def show_word(self, key: str, word: str) -> None:
        self.buttons[key].setText(word.replace("&", "&&"))
        self.buttons[key].setAccessibleName(f"{self.accessibleName()}: {word}")

    def set_shown(self, key: str, shown: bool) -> None:
        self.buttons[key].setVisible(shown)
