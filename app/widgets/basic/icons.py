"""Our line icons (resources/icons, SVG with `currentColor`) as QIcon and QPixmap in a colour of the palette."""

from functools import cache, lru_cache
from typing import Any

from PySide6.QtCore import QByteArray, QObject, QRectF, Qt
from PySide6.QtGui import QAction, QColor, QIcon, QPixmap
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QToolButton, QWidget

from app import theme
from app.widgets.basic.layout import configure
from backend.utils import places

SIZE = 18


def icon(name: str, colour: QColor | None = None, size: int = SIZE) -> QIcon:
    made = QIcon()
    tints = {QIcon.Mode.Normal: colour or theme.palette().text, QIcon.Mode.Disabled: theme.palette().faint}
    for mode, tint in tints.items():
        for ratio in (1, 2):
            made.addPixmap(pixmap(name, tint, theme.scaled(size), ratio), mode)
    return made


def pixmap(name: str, colour: QColor, size: int = SIZE, ratio: float = 2) -> QPixmap:
    """The icon as a pixmap of `size` logical pixels at a device pixel ratio. Raises FileNotFoundError."""
    return _render(name, colour.name(QColor.NameFormat.HexArgb), size, ratio)


@lru_cache(maxsize=512)
def _render(name: str, tint: str, size: int, ratio: float) -> QPixmap:
    source = (places.resources() / "icons" / f"{name}.svg").read_text(encoding="utf-8")
    svg = source.replace("currentColor", QColor(tint).name())
    made = QPixmap(round(size * ratio), round(size * ratio))
    made.fill(Qt.GlobalColor.transparent)
    painter = theme.painter(made)
    QSvgRenderer(QByteArray(svg.encode())).render(painter, QRectF(0, 0, size * ratio, size * ratio))
    painter.end()
    made.setDevicePixelRatio(ratio)  # after painting, which was in device pixels
    return made


class Tint(QObject):
    def __init__(self, action: QAction, name: str) -> None:
        super().__init__(action)
        self._action, self._name = action, name
        theme.signals.changed.connect(self._draw)
        self._draw()

    def _draw(self) -> None:
        self._action.setIcon(icon(self._name, theme.palette().muted, 16))


@cache
def dot(colour: str, side: int = 8, corner: float = 3, inset: float = 1) -> QPixmap:
    """A dot, or a square with round corners, of `side` logical pixels; `colour` is its name."""
    made = QPixmap(2 * side, 2 * side)
    made.fill(Qt.GlobalColor.transparent)
    painter = theme.painter(made, QColor(colour))
    shape = QRectF(0, 0, 2 * side, 2 * side).adjusted(2 * inset, 2 * inset, -2 * inset, -2 * inset)
    painter.drawRoundedRect(shape, 2 * corner, 2 * corner)
    painter.end()
    made.setDevicePixelRatio(2)  # sharp on a high-DPI screen too
    return made


def star_cell(starred: bool, role: int, faint: QColor) -> QIcon | str | None:
    """The data of a table's cell with a star, which is `faint` unless starred."""
    if role == Qt.ItemDataRole.DecorationRole:
        return icon("star-filled" if starred else "star", theme.palette().clip if starred else faint, 16)
    if role == Qt.ItemDataRole.AccessibleTextRole:
        return "favourite" if starred else "not a favourite"
    return None


def app_icon() -> QIcon:
    made = QIcon()
    for file in (places.resources() / "icons" / "app").glob("*.png"):
        made.addFile(str(file))
    return made


class IconButton(QToolButton):
    def __init__(
        self, icon_name: str, text: str = "", tip: str = "", parent: QWidget | None = None, **settings: Any
    ) -> None:
        super().__init__(parent)
        self.setText(text)
        self._name = icon_name
        configure(self, tip=tip, **{"name": text or tip, **settings})
        beside, alone = Qt.ToolButtonStyle.ToolButtonTextBesideIcon, Qt.ToolButtonStyle.ToolButtonIconOnly
        self.setToolButtonStyle(beside if text else alone)
        self._draw()
        theme.signals.changed.connect(self._draw)

    def set_icon(self, name: str) -> None:
        self._name = name
        self._draw()

    def _draw(self) -> None:
        self.setIcon(icon(self._name))
