"""Our line icons (resources/icons, SVG in one colour), drawn in a colour of the palette. They hold no colour themselves."""

from __future__ import annotations

from functools import lru_cache

from PySide6.QtCore import QByteArray, QRectF, Qt
from PySide6.QtGui import QColor, QIcon, QPainter, QPixmap
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QToolButton, QWidget

from app import theme
from backend.spec import places

SIZE = 18


def icon(name: str, colour: QColor | None = None, size: int = SIZE) -> QIcon:
    """The icon in `colour` (else in that of text), and faint where it is disabled. Ask again when the theme changes."""
    found = QIcon()
    for mode, tint in (
        (QIcon.Mode.Normal, colour or theme.palette().text),
        (QIcon.Mode.Disabled, theme.palette().faint),
    ):
        for ratio in (1, 2):
            found.addPixmap(pixmap(name, tint, theme.scaled(size), ratio), mode)
    return found


def pixmap(name: str, colour: QColor, size: int = SIZE, ratio: float = 2) -> QPixmap:
    """The icon as a picture of `size` logical pixels. Raises FileNotFoundError for an icon we do not have."""
    return _drawn(name, colour.name(QColor.NameFormat.HexArgb), size, ratio)


@lru_cache(maxsize=512)
def _drawn(name: str, tint: str, size: int, ratio: float) -> QPixmap:
    """Drawn once: a form shows the same few icons many times."""
    colour = QColor(tint)
    picture = QPixmap(round(size * ratio), round(size * ratio))
    picture.fill(Qt.GlobalColor.transparent)
    painter = QPainter(picture)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    QSvgRenderer(QByteArray(_source(name).replace("currentColor", colour.name()).encode())).render(
        painter, QRectF(0, 0, size * ratio, size * ratio)
    )
    painter.end()
    picture.setDevicePixelRatio(ratio)
    return picture


class IconButton(QToolButton):
    """A flat button with one of our icons (and a word, if given), redrawn when the theme changes."""

    def __init__(self, name: str, text: str = "", tip: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._name = name
        self.setText(text)
        self.setToolTip(tip)
        self.setAccessibleName(text or tip)
        beside, alone = Qt.ToolButtonStyle.ToolButtonTextBesideIcon, Qt.ToolButtonStyle.ToolButtonIconOnly
        self.setToolButtonStyle(beside if text else alone)
        self._draw()
        theme.signals.changed.connect(self._draw)

    def set_icon(self, name: str) -> None:
        self._name = name
        self._draw()

    def _draw(self) -> None:
        self.setIcon(icon(self._name))


@lru_cache
def _source(name: str) -> str:
    return (places.resources() / "icons" / f"{name}.svg").read_text(encoding="utf-8")
