"""Pictures of a prompt: small ones beside its text and in tables, one large in a dialog. Other threads read them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PySide6.QtCore import QObject, QRect, QRectF, QSize, Qt, QThreadPool, Signal
from PySide6.QtGui import (
    QImage,
    QImageIOHandler,
    QImageReader,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QPen,
    QShortcut,
    QTextOption,
)
from PySide6.QtWidgets import QAbstractButton, QSizePolicy, QWidget

from app import theme
from app.widgets.basic.dialogs import Dialog, open_path
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import TabArea, clear_layout, column, configure, holder, paint_ring, set_shown
from backend.runs.run_folder import modified_at
from backend.utils.files import is_file
from backend.utils.text import quote

SIDE = 96
"""Width and height of the box of a small picture, in pixels before scaling."""
SHARPNESS = 2
"""Pixels that are read for each one painted: screens of high density have two."""
MOST_BYTES = 128 << 20
"""Of the pictures that are held in memory."""


@dataclass(frozen=True, slots=True)
class Picture:
    """`image`: scaled down; `size`: of the file, in pixels; `problem`: why there is no image, or ""."""

    image: QImage
    size: QSize
    problem: str = ""


def read_picture(path: str, side: int) -> Picture:
    """Read a picture, `side` pixels wide and high at most. A JPEG is scaled while it is decoded."""
    name = quote(Path(path).name, 60)
    if not is_file(path):
        return Picture(QImage(), QSize(), f"{name} is missing.")
    reader = QImageReader(path)
    reader.setAutoTransform(True)
    reader.setDecideFormatFromContent(True)
    size, keep = reader.size(), Qt.AspectRatioMode.KeepAspectRatio
    if max(size.width(), size.height()) > side:
        reader.setScaledSize(size.scaled(side, side, keep).expandedTo(QSize(1, 1)))
    image = reader.read()
    if image.isNull():
        return Picture(image, QSize(), f"{name} cannot be shown: {reader.errorString().lower()}.")
    size = size if size.isValid() else image.size()
    is_turned = QImageIOHandler.Transformation.TransformationRotate90 in reader.transformation()
    return Picture(image, size.transposed() if is_turned else size)


class PictureReader(QObject):
    """Reads pictures on two threads and holds those used last."""

    arrived = Signal(str)  # path
    _done = Signal(object, object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._pool = QThreadPool(self, maxThreadCount=2)
        self._held: OrderedDict[tuple[str, int, float], Picture | None] = OrderedDict()
        self._done.connect(self._hold)

    def picture(self, path: str, side: int) -> Picture | None:
        """The picture, `side` pixels wide and high at most; None until it has been read, when `arrived` follows."""
        key = (path, side, modified_at(Path(path)) if is_file(path) else 0.0)
        if key not in self._held:
            self._held[key] = None
            self._pool.start(lambda: self._done.emit(key, read_picture(path, side)))
        self._held.move_to_end(key)
        return self._held[key]

    def _hold(self, key: tuple[str, int, float], picture: Picture) -> None:
        self._held[key] = picture
        self._held.move_to_end(key)
        while len(self._held) > 1 and sum(x.image.sizeInBytes() for x in self._held.values() if x) > MOST_BYTES:
            self._held.popitem(last=False)
        self.arrived.emit(key[0])


@cache
def pictures() -> PictureReader:
    return PictureReader(theme.application())


def describe(path: str, picture: Picture | None) -> str:
    """“red.png, 640 × 480 pixels”, or why it cannot be shown."""
    if picture is None:
        return quote(Path(path).name, 60)
    size = picture.size
    return picture.problem or f"{quote(Path(path).name, 60)}, {size.width():,} × {size.height():,} pixels"


def fitted(size: QSize, box: QSize) -> QSize:
    """The largest size with the proportions of `size` in a box."""
    return size.scaled(box, Qt.AspectRatioMode.KeepAspectRatio).expandedTo(QSize(1, 1))


def draw_picture(painter: QPainter, box: QRect, picture: Picture | None) -> None:
    """Draw a picture as large as fits into a box, or why there is none."""
    rect = QRect(box)
    if picture is not None and picture.problem:
        is_small = box.width() < theme.scaled(SIDE) // 2
        wrapped = QTextOption(Qt.AlignmentFlag.AlignCenter)
        wrapped.setWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        painter.setPen(theme.palette().warning)
        painter.drawText(QRectF(box.adjusted(4, 4, -4, -4)), "?" if is_small else picture.problem, wrapped)
    elif picture is not None:
        rect.setSize(fitted(picture.size, box.size()))
        rect.moveCenter(box.center())
        is_tiny = rect.width() > 2 * picture.size.width()  # its pixels are worth seeing
        painter.setRenderHint(QPainter.RenderHint.SmoothPixmapTransform, not is_tiny)
        painter.drawImage(rect, picture.image)
    painter.setPen(QPen(theme.palette().edge, 1))
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.drawRect(QRectF(rect).adjusted(0.5, 0.5, -0.5, -0.5))


def draw_pictures(painter: QPainter, cell: QRect, paths: Sequence[str]) -> None:
    """Draw the pictures of a row into a table's cell: as many as there is room for, and how many more there are."""
    box = QRect(cell.left() + theme.CELL_PADDING, cell.top() + 3, cell.height() - 6, cell.height() - 6)
    room = max(1, (cell.width() - theme.CELL_PADDING) // (box.width() + 4))
    shown = paths if len(paths) <= room else paths[: max(1, room - 1)]
    for path in shown:
        draw_picture(painter, box, pictures().picture(path, SHARPNESS * box.width()))
        box.translate(box.width() + 4, 0)
    if len(shown) < len(paths):
        painter.drawText(box, Qt.AlignmentFlag.AlignCenter, f"+{len(paths) - len(shown)}")


class PictureButton(QAbstractButton):
    """A small picture."""

    def __init__(self, path: str, about: str, side: int = SIDE) -> None:
        """`about`: which picture it is, for a screen reader; `side`: its most pixels, before scaling."""
        super().__init__()
        self.path, self.about, self._side = path, about, theme.scaled(side)
        fixed, hand = QSizePolicy.Policy.Fixed, Qt.CursorShape.PointingHandCursor
        configure(self, sizePolicy=(fixed, fixed), cursor=hand, focusPolicy=Qt.FocusPolicy.TabFocus)
        self.setFont(theme.caption_font())
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)
        pictures().arrived.connect(self.update_name)
        self.update_name(path)

    @property
    def picture(self) -> Picture | None:
        return pictures().picture(self.path, SHARPNESS * self._side)

    def sizeHint(self) -> QSize:
        square, picture = QSize(self._side, self._side), self.picture
        return square if picture is None or picture.problem else fitted(picture.size, square)

    def update_name(self, path: str) -> None:
        if path == self.path:
            about = describe(path, self.picture)
            configure(self, name=f"{self.about}: {about}", tip=plain_tip(f"{about}\n{path}"))
            self.updateGeometry()
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        draw_picture(theme.painter(self), self.rect(), self.picture)
        if self.focusPolicy() and (self.hasFocus() or self.underMouse()):
            paint_ring(self, 2)


class PictureStrip(TabArea):
    """The pictures of a prompt one below the other. It hides itself where there are none."""

    def __init__(self) -> None:
        self._column, self.paths = column(), list[str]()
        content = holder(self._column)
        super().__init__(content=content, name="Pictures of the prompt", shown=False)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Ignored)

    def show_pictures(self, paths: Sequence[str]) -> None:
        if list(paths) == self.paths:  # made again, they would lose the focus
            return
        self.paths = list(paths)
        clear_layout(self._column)
        for place, path in enumerate(self.paths):
            view = PictureButton(path, f"Picture {place + 1} of {len(paths)}" if len(paths) > 1 else "Picture")
            view.clicked.connect(lambda _=False, place=place: PictureDialog(self.paths, place, self.window()).show())
            self._column.addWidget(view, 0, Qt.AlignmentFlag.AlignLeft)
        self._column.addStretch()
        self.setFixedWidth(theme.scaled(SIDE) + (self.verticalScrollBar().sizeHint().width() if len(paths) > 1 else 0))
        set_shown(self, bool(self.paths))


class PictureDialog(Dialog):
    """The pictures of a prompt, one at a time and large. A click or an arrow key goes to the next."""

    def __init__(self, paths: Sequence[str], place: int, parent: QWidget | None = None) -> None:
        super().__init__("", parent, (820, 680))
        self._paths, self._place = list(paths), place
        screen, grow = self.screen().size(), QSizePolicy.Policy.Expanding
        self.view = PictureButton(paths[place], "Picture", max(screen.width(), screen.height()))
        configure(self.view, sizePolicy=(grow, grow), focusPolicy=Qt.FocusPolicy.NoFocus, clicked=lambda: self.go(1))
        self.about = label(font=theme.figures_font(), wrap=True, selectable=True)
        self.steps = [button("‹", lambda: self.go(-1), name="Previous"), button("›", lambda: self.go(1), name="Next")]
        self.open_file = button("Open", lambda: open_path(Path(self.view.path)), tip="In the program for such files")
        box = self.close_box(*(self.steps if len(paths) > 1 else ()), self.open_file)
        column((self.view, 1), self.about, box, into=self, margins=2 * theme.SPACE)
        for key, by in ((Qt.Key.Key_Left, -1), (Qt.Key.Key_Right, 1)):
            QShortcut(QKeySequence(key), self, lambda by=by: self.go(by))
        pictures().arrived.connect(self._show_about)
        self.go(0)

    def go(self, by: int) -> None:
        self._place = (self._place + by) % len(self._paths)
        self.view.path = self._paths[self._place]
        self.view.update_name(self.view.path)
        self._show_about()

    def _show_about(self) -> None:
        count, path = len(self._paths), self.view.path
        which = f"{self._place + 1} of {count}: " if count > 1 else ""
        self.setWindowTitle(which + describe(path, self.view.picture))
        self.about.setText(f"{self.windowTitle()}\n{path}")
        self.open_file.setEnabled(is_file(path))
