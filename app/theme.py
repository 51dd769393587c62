"""Colours, fonts and spacing, light and dark: the only file with colour codes."""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import count

from PySide6.QtCore import QLocale, QObject, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QColor, QFont, QFontDatabase, QGuiApplication, QPaintDevice, QPainter, QPalette, QPen
from PySide6.QtWidgets import QApplication, QWidget

from backend.utils import places

SPACE = 8
GUTTER = 2 * SPACE
BODY, CAPTION, TITLE = 13, 11, 20  # type sizes in pixels, before the desktop's text scaling
LARGEST_SCALE = 2.0
USUAL_DPI = 72 if sys.platform == "darwin" else 96


class _Role:
    def __init__(self, light: str, dark: str) -> None:
        self._colours = QColor(light), QColor(dark)

    def __get__(self, palette: Palette, owner: type | None = None) -> QColor:
        return self._colours[palette.is_dark]


@dataclass(frozen=True)
class Palette:
    """A colour for each use. Advantages are blue and orange, which colour-blind users can tell apart."""

    is_dark: bool

    window = _Role("#f5f5f7", "#1a1a1e")
    sidebar = _Role("#ececf0", "#151518")
    card = _Role("#ffffff", "#232328")
    field = _Role("#ffffff", "#1b1b1f")
    text = _Role("#1c1c21", "#ececf1")
    muted = _Role("#5f5f67", "#a9a9b3")
    faint = _Role("#a3a3ab", "#686871")  # disabled
    placeholder = _Role("#707078", "#8a8a94")  # also line numbers, stars that are not lit
    hairline = _Role("#e1e1e6", "#34343b")
    outline = _Role("#8a8a93", "#6e6e78")  # of what can be edited or dragged
    edge = _Role("#cdcdd4", "#4a4a53")  # of buttons, menus, tips
    hover = _Role("#e4e4ea", "#303037")
    selection = _Role("#dfe2fb", "#31355e")
    accent = _Role("#4453d0", "#8f9aff")  # the Run button, focus, the reward curve
    accent_text = _Role("#ffffff", "#14152b")
    accent_hover = _Role("#3744b4", "#a9b1ff")
    good = _Role("#15703f", "#5ac992")
    warning = _Role("#8f5000", "#e6a94f")
    bad = _Role("#b32d24", "#ff8378")
    kl = _Role("#9c3f8f", "#dd8fd2")
    clip = _Role("#77690a", "#d2c25a")
    length = _Role("#2b7a8c", "#6fc3d6")
    plot_background = _Role("#ffffff", "#232328")
    grid = _Role("#d9d9df", "#3c3c44")
    advantage_above = _Role("#0065a0", "#5ab2e8")
    advantage_below = _Role("#a84900", "#f08a3c")


LIGHT, DARK = Palette(is_dark=False), Palette(is_dark=True)

# The hues of Okabe and Ito's eight (https://jfly.uni-koeln.de/color/), ordered so that neighbours differ most. On white
# all are deepened until a thin line has a contrast of 3, on black blue is lightened; the text colour replaces black.
_REWARDS = {
    False: ("#0060a8", "#c28500", "#008a60", "#cf6fa6", "#389ade", "#b33c00", "#7d7a00", "#1c1c21"),
    True: ("#3d9ddb", "#e69f00", "#16b88a", "#d98bb5", "#7cc8f2", "#ef7a2b", "#f0e442", "#ececf1"),
}
_DASHES = (Qt.PenStyle.SolidLine, Qt.PenStyle.DashLine, Qt.PenStyle.DotLine, Qt.PenStyle.DashDotLine)


class _Signals(QObject):
    changed = Signal()


signals = _Signals()
_current = {"dark": False, "mode": "system", "is_connected": False, "is_applying": False}


def palette() -> Palette:
    return DARK if _current["dark"] else LIGHT


reward_number: Callable[[str], int] = defaultdict[str, int](count().__next__).__getitem__
"""The number of a reward function among all that were ever seen. The window replaces it by that of its preferences."""


def reward_colour(name: str) -> QColor:
    return reward_pen(name).color()


def reward_pen(name: str | int, width: float = 1.0) -> QPen:
    """The line of a reward function or, by number, of a compared run: eight are solid, the next dashed, dotted."""
    number = reward_number(name) if isinstance(name, str) else name
    pen = QPen(QColor(_REWARDS[bool(_current["dark"])][number % 8]), width)
    pen.setStyle(_DASHES[number // 8 % len(_DASHES)])
    pen.setCosmetic(True)
    return pen


def _font(size: int, weight: QFont.Weight = QFont.Weight.Normal) -> QFont:
    font = QFontDatabase.systemFont(QFontDatabase.SystemFont.GeneralFont)
    font.setPixelSize(scaled(size))
    font.setWeight(weight)
    return font


body_font = partial(_font, BODY)
heading_font = partial(_font, BODY, QFont.Weight.DemiBold)
title_font = partial(_font, TITLE, QFont.Weight.DemiBold)
caption_font = partial(_font, CAPTION)


def figures_font(size: int = BODY, weight: QFont.Weight = QFont.Weight.Normal) -> QFont:
    """Tabular figures, for numbers in columns or that change in place."""
    font = _font(size, weight)
    font.setFeature(QFont.Tag("tnum"), 1)
    return font


def mono_font(size: int = 12) -> QFont:
    font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
    font.setPixelSize(scaled(size))
    return font


@cache
def text_scale() -> float:
    screen = QGuiApplication.primaryScreen()
    desktop_scale = screen.logicalDotsPerInch() / USUAL_DPI if screen is not None else 1.0
    return min(LARGEST_SCALE, max(1.0, desktop_scale))


def scaled(size: int) -> int:
    """A length in pixels, multiplied by the text scale of the desktop."""
    return round(size * text_scale())


def scaled_size(size: QSize) -> QSize:
    return QSize(scaled(size.width()), scaled(size.height()))


def application() -> QApplication:
    app = QApplication.instance()
    assert isinstance(app, QApplication)
    return app


def apply(app: QApplication, mode: str = "system") -> None:
    numbers = QLocale.c()  # typed as in a config, also on a German desktop: 1200, 0.5
    numbers.setNumberOptions(QLocale.NumberOption.RejectGroupSeparator | QLocale.NumberOption.OmitGroupSeparator)
    QLocale.setDefault(numbers)
    _current["mode"] = mode
    if not _current["is_connected"]:
        _current["is_connected"] = True
        changed = QGuiApplication.styleHints().colorSchemeChanged
        changed.connect(lambda _scheme: _current["is_applying"] or _restyle(app))
        if sys.platform != "darwin":
            app.setStyle("Fusion")
    _restyle(app)


def mode() -> str:
    return str(_current["mode"])


def _restyle(app: QApplication) -> None:
    mode, hints, widgets = _current["mode"], QGuiApplication.styleHints(), app.allWidgets()
    for widget in widgets:
        widget.setAttribute(_OWN_STYLE)  # Qt skips widgets with a style of their own; hidden ones are styled later
        if not widget.isVisible() and not widget.property("role"):  # a role's colours must go, for it may change
            widget.setAttribute(POLISHED, False)
    app.setStyleSheet("")  # replacing one stylesheet by another makes Qt restyle every widget once per ancestor
    schemes = {"light": Qt.ColorScheme.Light, "dark": Qt.ColorScheme.Dark}
    _current["is_applying"] = True
    hints.setColorScheme(schemes.get(mode, Qt.ColorScheme.Unknown))  # native controls, menus and title bars follow
    _current["is_applying"] = False
    _current["dark"] = mode == "dark" or (mode == "system" and hints.colorScheme() == Qt.ColorScheme.Dark)
    if app.font() != body_font():
        app.setFont(body_font())
    app.setPalette(_qt_palette(palette()))
    for widget in widgets:
        widget.setAttribute(_OWN_STYLE if widget.isVisible() else POLISHED, False)
    files = ("ours.qss",) if sys.platform == "darwin" else ("controls.qss", "ours.qss")
    app.setStyleSheet(style_sheet(*files))
    for widget in widgets:
        widget.setAttribute(_OWN_STYLE, False)
    QTimer.singleShot(0, _restyle_hidden)
    signals.changed.emit()


POLISHED, _OWN_STYLE = Qt.WidgetAttribute.WA_WState_Polished, Qt.WidgetAttribute.WA_SetStyle


def _restyle_hidden() -> None:
    """Style what was hidden, 20 ms at a time: Qt takes half a second for the 2,500 widgets of a window. What has been
    shown since comes first and at once: Qt does not polish it again."""
    waiting = [widget for widget in application().allWidgets() if not widget.testAttribute(POLISHED)]
    waiting.sort(key=QWidget.isVisible, reverse=True)
    end = time.monotonic() + 0.02
    for widget in waiting:
        if time.monotonic() > end and not widget.isVisible():
            QTimer.singleShot(0, _restyle_hidden)
            return
        widget.style().polish(widget)
        widget.setAttribute(POLISHED)
        widget.update()


def _qt_palette(colours: Palette) -> QPalette:
    role = QPalette.ColorRole
    qt = QPalette()
    for name, colour in (
        (role.Window, colours.window),
        (role.WindowText, colours.text),
        (role.Base, colours.field),
        (role.AlternateBase, colours.window),
        (role.Text, colours.text),
        (role.Button, colours.card),
        (role.ButtonText, colours.text),
        (role.ToolTipBase, colours.card),
        (role.ToolTipText, colours.text),
        (role.PlaceholderText, colours.placeholder),
        (role.Highlight, colours.accent),
        (role.HighlightedText, colours.accent_text),
        (role.Link, colours.accent),
        (role.Mid, colours.edge),
        (role.Light, colours.hairline),
    ):
        qt.setColor(name, colour)
    for name in (role.WindowText, role.Text, role.ButtonText):
        qt.setColor(QPalette.ColorGroup.Disabled, name, colours.faint)
    return qt


def painter(device: QPaintDevice, fill: QColor | None = None) -> QPainter:
    """A painter without jagged edges; with `fill` it paints areas in that colour, without an outline."""
    made = QPainter(device)
    made.setRenderHint(QPainter.RenderHint.Antialiasing)
    if fill is not None:
        set_fill(made, fill)
    return made


def set_fill(painter: QPainter, colour: QColor) -> None:
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(colour)


def style_sheet(*names: str) -> str:
    """Files of resources/style with the theme's colours, lengths and fonts."""
    folder, colours = places.resources() / "style", palette()
    text = "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
    roles = (name for name, role in vars(Palette).items() if isinstance(role, _Role))
    for role in sorted(roles, key=len, reverse=True):
        text = text.replace(f"@{role}", getattr(colours, role).name())
    text = text.replace("@mono", mono_font().family())
    text = re.sub(r"@(\d+)px", lambda length: f"{scaled(int(length[1]))}px", text)
    return text.replace("@icons", (places.resources() / "icons").as_posix())


CELL_PADDING = 8  # at both sides of a table's cells and headers, in pixels, as in resources/style/ours.qss
