"""Pictures of a prompt: small ones beside its text and in tables, one large in a dialog. Other threads read them."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PySide6.QtCore import QObject, QRect, QRectF, QSize, Qt, QThreadPool, Signal
from PySide6.QtGui import QImage, QImageIOHandler, QImageReader, QPainter, QPaintEvent, QPen, QShortcut, QTextOption
from PySide6.QtWidgets import QAbstractButton, QSizePolicy, QWidget

from app import theme
from app.widgets.basic.dialogs import Dialog
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import TabArea, clear_layout, column, configure, holder, paint_ring, set_shown
from backend.runs.run_folder import modified_at
from backend.utils.files import is_file
from backend.utils.text import quote

SIDE = 96  # pixels of a small picture at most, before scaling
IN_A_CELL = 3
MOST_BYTES = 128 << 20  # of the pictures that are held in memory


@dataclass(frozen=True, slots=True)
class Picture:
    """`size`: of the file; `about`: its name and size, or why `image` is null, or "" until it has been read."""

    image: QImage
    size: QSize
    about: str = ""


NOT_READ = Picture(QImage(), QSize())


def read_picture(path: str, side: int) -> Picture:
    """Read a picture to paint on `side` pixels at most, or twice as many where the screen has a high density."""
    name = quote(Path(path).name, 60)
    if not is_file(path):
        return Picture(QImage(), QSize(), f"{name} is missing.")
    reader = QImageReader(path)
    reader.setAutoTransform(True)
    reader.setDecideFormatFromContent(True)
    size = reader.size()
    if max(size.width(), size.height()) > 2 * side:
        reader.setScaledSize(fitted(size, QSize(2 * side, 2 * side)))  # a JPEG is scaled while it is decoded
    image = reader.read()
    if image.isNull():
        return Picture(image, QSize(), f"{name} cannot be shown: {reader.errorString().lower()}.")
    if QImageIOHandler.Transformation.TransformationRotate90 in reader.transformation():
        size.transpose()
    return Picture(image, size, f"{name}, {size.width():,} × {size.height():,} pixels")


def fitted(size: QSize, box: QSize) -> QSize:
    return size.scaled(box, Qt.AspectRatioMode.KeepAspectRatio).expandedTo(QSize(1, 1))


class PictureReader(QObject):
    """Reads pictures on two threads and holds those used last."""

    arrived = Signal(str)  # path
    _done = Signal(object, object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._pool = QThreadPool(self, maxThreadCount=2)
        self._held: OrderedDict[tuple[str, int, float], Picture] = OrderedDict()
        self._done.connect(self._hold)

    def picture(self, path: str, side: int) -> Picture:
        """The picture for `side` pixels at most; NOT_READ until `arrived`."""
        key = (path, side, modified_at(Path(path)) if is_file(path) else 0.0)
        if key not in self._held:
            self._held[key] = NOT_READ
            self._pool.start(lambda: self._done.emit(key, read_picture(path, side)))
        self._held.move_to_end(key)
        return self._held[key]

    def _hold(self, key: tuple[str, int, float], picture: Picture) -> None:
        self._held[key] = picture
        self._held.move_to_end(key)
        while len(self._held) > 1 and sum(x.image.sizeInBytes() for x in self._held.values()) > MOST_BYTES:
            self._held.popitem(last=False)
        self.arrived.emit(key[0])


@cache
def pictures() -> PictureReader:
    return PictureReader(theme.application())


def draw_picture(painter: QPainter, box: QRect, picture: Picture) -> None:
    """Draw a picture as large as fits into a box, or why there is none."""
    rect = QRect(box)
    if picture.image.isNull():
        about = picture.about if box.width() > theme.scaled(SIDE) // 2 else "?" * bool(picture.about)
        wrapped = QTextOption(Qt.AlignmentFlag.AlignCenter)
        wrapped.setWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        painter.setPen(theme.palette().warning)
        painter.drawText(QRectF(box.adjusted(4, 4, -4, -4)), about, wrapped)
    else:
        rect.setSize(fitted(picture.size, box.size()))
        rect.moveCenter(box.center())
        is_tiny = rect.width() > 2 * picture.size.width()  # its pixels are worth seeing
        painter.setRenderHint(QPainter.RenderHint.SmoothPixmapTransform, not is_tiny)
        painter.drawImage(rect, picture.image)
    painter.setPen(QPen(theme.palette().edge, 1))
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.drawRect(QRectF(rect).adjusted(0.5, 0.5, -0.5, -0.5))


def draw_pictures(painter: QPainter, cell: QRect, paths: Sequence[str]) -> None:
    """Draw the first IN_A_CELL pictures into a table's cell, and how many more there are."""
    box = QRect(cell.left() + theme.CELL_PADDING, cell.top() + 3, cell.height() - 6, cell.height() - 6)
    for path in paths[:IN_A_CELL]:
        draw_picture(painter, box, pictures().picture(path, box.width()))
        box.translate(box.width() + 4, 0)
    painter.setPen(theme.palette().muted)
    if len(paths) > IN_A_CELL:
        painter.drawText(box, Qt.AlignmentFlag.AlignVCenter, f"+{len(paths) - IN_A_CELL}")


class PictureButton(QAbstractButton):
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

    def sizeHint(self) -> QSize:
        square, size = QSize(self._side, self._side), self.picture.size
        return fitted(size, square) if size.isValid() else square

    def update_name(self, path: str) -> None:
        if path == self.path:
            self.picture = pictures().picture(path, self._side)
            self.named = self.picture.about or Path(path).name
            configure(self, name=f"{self.about}: {self.named}", tip=plain_tip(f"{self.named}\n{path}"))
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
        super().__init__(content=holder(self._column), name="Pictures of the prompt", shown=False)
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
        steps = [button("‹", lambda: self.go(-1), name="Previous"), button("›", lambda: self.go(1), name="Next")]
        box = self.close_box(*(steps if len(paths) > 1 else ()))
        column((self.view, 1), self.about, box, into=self, margins=2 * theme.SPACE)
        QShortcut(Qt.Key.Key_Left, self, lambda: self.go(-1))
        QShortcut(Qt.Key.Key_Right, self, lambda: self.go(1))
        pictures().arrived.connect(self._show)  # no lambda, which would outlive the dialog
        self._show()

    def go(self, by: int) -> None:
        self._place = (self._place + by) % len(self._paths)
        self._show()

    def _show(self) -> None:
        path, count = self._paths[self._place], len(self._paths)
        self.view.path = path
        self.view.update_name(path)
        self.setWindowTitle((f"{self._place + 1} of {count}: " if count > 1 else "") + self.view.named)
        self.about.setText(f"{self.windowTitle()}\n{path}")
