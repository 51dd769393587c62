"""Colours, fonts and spacing, light and dark: the only file with colour codes.

Widgets ask for a role (`palette().muted`), never for a colour, and repaint on `signals.changed`. Fusion with a small
stylesheet on Linux; on macOS the native controls stay native and only cards, captions and the Run button are ours.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields

from PySide6.QtCore import QObject, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontDatabase, QGuiApplication, QPalette, QPen
from PySide6.QtWidgets import QApplication

from app.stylesheet import CONTROLS, OURS
from backend.utils import places

SPACE = 8
"""The grid: every margin and gap is a multiple (or half) of this."""
GUTTER = 2 * SPACE
"""Between the content of a page and its edge."""
BODY, CAPTION, TITLE = 13, 11, 20
"""Type sizes in pixels, before the desktop's text scaling."""
LARGEST_SCALE = 2.0
USUAL_DPI = 72 if sys.platform == "darwin" else 96
MODES = ("system", "light", "dark")


@dataclass(frozen=True)
class Palette:
    """A colour for each use. `advantage_above` and `advantage_below` are blue and orange, which colour-blind users can tell apart."""

    window: QColor
    sidebar: QColor
    card: QColor
    field: QColor
    text: QColor
    muted: QColor
    faint: QColor
    """Text and icons of what is disabled; nothing else is this light."""
    placeholder: QColor
    """Text that waits to be replaced, line numbers, stars that are not lit."""
    hairline: QColor
    outline: QColor
    """The edge of something that can be edited or dragged: nothing else shows where it is."""
    edge: QColor
    """The edge of a button, a menu, a tip: their text shows where they are."""
    hover: QColor
    selection: QColor
    accent: QColor
    """The Run button, focus, and the reward curve."""
    accent_text: QColor
    accent_hover: QColor
    good: QColor
    warning: QColor
    bad: QColor
    kl: QColor
    clip: QColor
    length: QColor
    plot_background: QColor
    grid: QColor
    advantage_above: QColor
    advantage_below: QColor


def _palette(**colours: str) -> Palette:
    return Palette(**{role.name: QColor(colours[role.name]) for role in fields(Palette)})


LIGHT = _palette(
    window="#f5f5f7",
    sidebar="#ececf0",
    card="#ffffff",
    field="#ffffff",
    text="#1c1c21",
    muted="#5f5f67",
    faint="#a3a3ab",
    placeholder="#707078",
    hairline="#e1e1e6",
    outline="#8a8a93",
    edge="#cdcdd4",
    hover="#e4e4ea",
    selection="#dfe2fb",
    accent="#4453d0",
    accent_text="#ffffff",
    accent_hover="#3744b4",
    good="#15703f",
    warning="#8f5000",
    bad="#b32d24",
    kl="#9c3f8f",
    clip="#77690a",
    length="#2b7a8c",
    plot_background="#ffffff",
    grid="#d9d9df",
    advantage_above="#0065a0",
    advantage_below="#a84900",
)

DARK = _palette(
    window="#1a1a1e",
    sidebar="#151518",
    card="#232328",
    field="#1b1b1f",
    text="#ececf1",
    muted="#a9a9b3",
    faint="#686871",
    placeholder="#8a8a94",
    hairline="#34343b",
    outline="#6e6e78",
    edge="#4a4a53",
    hover="#303037",
    selection="#31355e",
    accent="#8f9aff",
    accent_text="#14152b",
    accent_hover="#a9b1ff",
    good="#5ac992",
    warning="#e6a94f",
    bad="#ff8378",
    kl="#dd8fd2",
    clip="#d2c25a",
    length="#6fc3d6",
    plot_background="#232328",
    grid="#3c3c44",
    advantage_above="#5ab2e8",
    advantage_below="#f08a3c",
)

# The hues of Okabe and Ito's eight (https://jfly.uni-koeln.de/color/), ordered so that neighbours differ most. On white all are
# deepened until a thin line has a contrast of 3, on black blue is lightened; the text colour replaces their black.
_REWARDS = {
    False: ("#0060a8", "#c28500", "#008a60", "#cf6fa6", "#389ade", "#b33c00", "#7d7a00", "#1c1c21"),
    True: ("#3d9ddb", "#e69f00", "#16b88a", "#d98bb5", "#7cc8f2", "#ef7a2b", "#f0e442", "#ececf1"),
}
_DASHES = (Qt.PenStyle.SolidLine, Qt.PenStyle.DashLine, Qt.PenStyle.DotLine, Qt.PenStyle.DashDotLine)


class _Signals(QObject):
    """Signals:
    changed – `palette()` returns another palette now; repaint.
    """

    changed = Signal()


signals = _Signals()
_scale: list[float] = []
"""Cache of `text_scale`, empty before the first call: widgets call it hundreds of times, and it never changes."""
_current = {"dark": False, "mode": "system", "is_connected": False, "is_applying": False}


def palette() -> Palette:
    """The current colours."""
    return DARK if _current["dark"] else LIGHT


def is_dark() -> bool:
    return bool(_current["dark"])


def reward_colour(index: int) -> QColor:
    """The colour of the reward function with this index among those ticked; after eight they repeat, dashed."""
    return QColor(_REWARDS[is_dark()][index % 8])


def reward_pen(index: int, width: float = 1.0) -> QPen:
    """The line of that reward function: solid for the first eight, then dashed, dotted, dash-dotted."""
    pen = QPen(reward_colour(index), width)
    pen.setStyle(_DASHES[index // 8 % len(_DASHES)])
    pen.setCosmetic(True)
    return pen


def body_font() -> QFont:
    return _font(BODY)


def title_font() -> QFont:
    return _font(TITLE, QFont.Weight.DemiBold)


def heading_font() -> QFont:
    return _font(BODY, QFont.Weight.DemiBold)


def caption_font() -> QFont:
    return _font(CAPTION)


def figures_font(size: int = BODY, weight: QFont.Weight = QFont.Weight.Normal) -> QFont:
    """Tabular figures, all of one width: for numbers in columns or that change in place."""
    font = _font(size, weight)
    if hasattr(font, "setFeature"):  # Qt 6.7
        font.setFeature(QFont.Tag("tnum"), 1)
    return font


def mono_font(size: int = 12) -> QFont:
    """For prompts, completions, code and logs only."""
    font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
    font.setPixelSize(scaled(size))
    return font


def text_scale() -> float:
    """The desktop's text scale (or that of QT_FONT_DPI), 1 to 2."""
    if not _scale:
        screen = QGuiApplication.primaryScreen()
        desktop_scale = screen.logicalDotsPerInch() / USUAL_DPI if screen is not None else 1.0
        _scale.append(min(LARGEST_SCALE, max(1.0, desktop_scale)))
    return _scale[0]


def scaled(size: int) -> int:
    """A length in pixels that contains text, multiplied by the desktop's text scale."""
    return round(size * text_scale())


def scaled_size(size: QSize) -> QSize:
    return QSize(scaled(size.width()), scaled(size.height()))


def _font(size: int, weight: QFont.Weight = QFont.Weight.Normal) -> QFont:
    font = QFontDatabase.systemFont(QFontDatabase.SystemFont.GeneralFont)
    font.setPixelSize(scaled(size))
    font.setWeight(weight)
    return font


def apply(app: QApplication, mode: str = "system") -> None:
    """Apply a theme to the application. `mode` is system (follow the desktop, also when it changes later), light or dark."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, not {mode!r}")
    first = not _current["is_connected"]
    _current.update(mode=mode, is_connected=True, is_applying=True)
    if first:
        QGuiApplication.styleHints().colorSchemeChanged.connect(lambda _scheme: _on_scheme_changed(app))
        if sys.platform != "darwin":
            app.setStyle("Fusion")
    app.setStyleSheet("")
    _ask_platform_for(mode)
    _current["is_applying"] = False
    _apply_palette(app)


def mode() -> str:
    return str(_current["mode"])


def _on_scheme_changed(app: QApplication) -> None:
    """The desktop's colour scheme changed. Where `apply` itself asked for it, `apply` continues with the palette."""
    if not _current["is_applying"]:
        _apply_palette(app)


def _ask_platform_for(mode: str) -> None:
    """Have native controls, menus and title bars follow the theme where the platform can (Qt 6.8)."""
    scheme = {"light": Qt.ColorScheme.Light, "dark": Qt.ColorScheme.Dark}.get(mode, Qt.ColorScheme.Unknown)
    hints = QGuiApplication.styleHints()
    if hasattr(hints, "setColorScheme"):
        hints.setColorScheme(scheme)


def _apply_palette(app: QApplication) -> None:
    mode = _current["mode"]
    system_dark = QGuiApplication.styleHints().colorScheme() == Qt.ColorScheme.Dark
    _current["dark"] = mode == "dark" or (mode == "system" and system_dark)
    colours = palette()
    app.setStyleSheet("")  # replacing one stylesheet by another makes Qt restyle every widget once per ancestor
    if app.font() != body_font():
        app.setFont(body_font())
    app.setPalette(_qt_palette(colours))
    app.setStyleSheet(_stylesheet(colours))
    signals.changed.emit()


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


def _stylesheet(colours: Palette) -> str:
    """The stylesheet with colours and lengths filled in: our roles everywhere, controls only where Fusion draws them."""
    text = OURS if sys.platform == "darwin" else CONTROLS + OURS
    for role in sorted((role.name for role in fields(Palette)), key=len, reverse=True):
        text = text.replace(f"@{role}", getattr(colours, role).name())
    text = re.sub(r"@(\d+)px", lambda length: f"{scaled(int(length[1]))}px", text)
    return text.replace("@icons", (places.resources() / "icons").as_posix())
