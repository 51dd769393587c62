"""Colours, type and spacing, light and dark: the only file with a hex code.

Widgets ask for a role (`palette().muted`), never for a colour, and repaint on `signals.changed`. Fusion with a small
stylesheet on Linux; on macOS the native controls stay native and only cards, captions and the Run button are ours.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontDatabase, QGuiApplication, QPalette, QPen
from PySide6.QtWidgets import QApplication

from backend.spec import places

SPACE = 8
"""The grid: every margin and gap is a multiple (or half) of this."""
RADIUS = 8
BODY, CAPTION, TITLE = 13, 11, 20
"""Type sizes in pixels."""
MODES = ("system", "light", "dark")


@dataclass(frozen=True)
class Palette:
    """What a colour is for. `advantage_above` and `advantage_below` are blue and orange: safe for colour-blind eyes."""

    window: QColor
    sidebar: QColor
    card: QColor
    field: QColor
    text: QColor
    muted: QColor
    faint: QColor
    """Disabled text and other things that may be overlooked."""
    hairline: QColor
    outline: QColor
    """The edge of something that can be edited or pressed."""
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
    muted="#65656d",
    faint="#a3a3ab",
    hairline="#e1e1e6",
    outline="#cdcdd4",
    hover="#e4e4ea",
    selection="#dfe2fb",
    accent="#4453d0",
    accent_text="#ffffff",
    accent_hover="#3744b4",
    good="#1a7f4b",
    warning="#9a5700",
    bad="#c0352b",
    kl="#9c3f8f",
    clip="#a85b00",
    length="#2b7a8c",
    plot_background="#ffffff",
    grid="#d9d9df",
    advantage_above="#0072b2",
    advantage_below="#d55e00",
)

DARK = _palette(
    window="#1a1a1e",
    sidebar="#151518",
    card="#232328",
    field="#1b1b1f",
    text="#ececf1",
    muted="#a1a1ab",
    faint="#686871",
    hairline="#34343b",
    outline="#4a4a53",
    hover="#303037",
    selection="#383d6b",
    accent="#8f9aff",
    accent_text="#14152b",
    accent_hover="#a9b1ff",
    good="#5ac992",
    warning="#e6a94f",
    bad="#ff8378",
    kl="#dd8fd2",
    clip="#e0a257",
    length="#6fc3d6",
    plot_background="#232328",
    grid="#3c3c44",
    advantage_above="#4aa8e0",
    advantage_below="#f08a3c",
)

# Okabe and Ito's eight (https://jfly.uni-koeln.de/color/), ordered so that neighbours differ most. Yellow is deepened
# on white and blue lifted on black, where the originals all but vanish; their black is whatever text is.
_REWARDS = {
    False: ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a600", "#1c1c21"),
    True: ("#3d9ddb", "#e69f00", "#16b88a", "#d98bb5", "#7cc8f2", "#ef7a2b", "#f0e442", "#ececf1"),
}
_DASHES = (Qt.PenStyle.SolidLine, Qt.PenStyle.DashLine, Qt.PenStyle.DotLine, Qt.PenStyle.DashDotLine)


class _Signals(QObject):
    """Signals: changed – the palette is another one now; ask for colours again and repaint."""

    changed = Signal()


signals = _Signals()
_now = {"dark": False, "mode": "system", "following": False}


def palette() -> Palette:
    """The colours in force."""
    return DARK if _now["dark"] else LIGHT


def is_dark() -> bool:
    return bool(_now["dark"])


def reward_colour(index: int) -> QColor:
    """The colour of the reward function at this place among those ticked; after eight they repeat, with dashes."""
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
    """For numbers that change in place or stand in columns: every digit as wide as the next."""
    font = _font(size, weight)
    if hasattr(font, "setFeature"):  # Qt 6.7
        font.setFeature(QFont.Tag("tnum"), 1)
    return font


def mono_font(size: int = 12) -> QFont:
    """For prompts, completions, code and logs only."""
    font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
    font.setPixelSize(size)
    return font


def _font(size: int, weight: QFont.Weight = QFont.Weight.Normal) -> QFont:
    font = QFontDatabase.systemFont(QFontDatabase.SystemFont.GeneralFont)
    font.setPixelSize(size)
    font.setWeight(weight)
    return font


def apply(app: QApplication, mode: str = "system") -> None:
    """Dress the application. `mode` is system (follow the desktop, also when it changes later), light or dark."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, not {mode!r}")
    _now["mode"] = mode
    _ask_platform_for(mode)
    if not _now["following"]:
        _now["following"] = True
        QGuiApplication.styleHints().colorSchemeChanged.connect(lambda _scheme: _dress(app))
        if sys.platform != "darwin":
            app.setStyle("Fusion")
    _dress(app)


def mode() -> str:
    return str(_now["mode"])


def _ask_platform_for(mode: str) -> None:
    """Native controls, menus and title bars follow where the platform can (Qt 6.8)."""
    scheme = {"light": Qt.ColorScheme.Light, "dark": Qt.ColorScheme.Dark}.get(mode, Qt.ColorScheme.Unknown)
    hints = QGuiApplication.styleHints()
    if hasattr(hints, "setColorScheme"):
        hints.setColorScheme(scheme)


def _dress(app: QApplication) -> None:
    wanted = _now["mode"]
    system_dark = QGuiApplication.styleHints().colorScheme() == Qt.ColorScheme.Dark
    _now["dark"] = wanted == "dark" or (wanted == "system" and system_dark)
    colours = palette()
    app.setFont(body_font())
    app.setPalette(_qt_palette(colours))
    app.setStyleSheet(_sheet(colours))
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
        (role.PlaceholderText, colours.faint),
        (role.Highlight, colours.accent),
        (role.HighlightedText, colours.accent_text),
        (role.Link, colours.accent),
        (role.Mid, colours.outline),
        (role.Light, colours.hairline),
    ):
        qt.setColor(name, colour)
    for name in (role.WindowText, role.Text, role.ButtonText):
        qt.setColor(QPalette.ColorGroup.Disabled, name, colours.faint)
    return qt


def _sheet(colours: Palette) -> str:
    """The stylesheet: our own parts everywhere, the controls too where Fusion draws them."""
    text = _OURS if sys.platform == "darwin" else _CONTROLS + _OURS
    for role in sorted((role.name for role in fields(Palette)), key=len, reverse=True):
        text = text.replace(f"@{role}", getattr(colours, role).name())
    return text.replace("@icons", (places.resources() / "icons").as_posix())


_OURS = """
QFrame[role="card"] { background: @card; border: 1px solid @hairline; border-radius: 8px; }
QFrame[role="banner"] { background: @selection; border: none; border-radius: 8px; }
QFrame[role="rule"] { background: @hairline; border: none; max-height: 1px; min-height: 1px; }
QLabel[role="muted"], QLabel[role="caption"] { color: @muted; }
QLabel[role="problem"] { color: @warning; }
QPushButton[role="primary"] {
    background: @accent; color: @accent_text; border: 1px solid @accent; border-radius: 6px;
    padding: 6px 16px; font-weight: 600;
}
QPushButton[role="primary"]:hover { background: @accent_hover; border-color: @accent_hover; }
QPushButton[role="primary"]:disabled { background: @hover; border-color: @hover; color: @faint; }
QPushButton[role="link"] {
    background: transparent; border: none; color: @accent; padding: 2px 0px; text-align: left;
}
QPushButton[role="link"]:hover, QPushButton[role="link"]:focus { text-decoration: underline; }
QToolButton[role="disclosure"] { padding: 4px 8px 4px 0px; border: none; color: @muted; }
QToolButton[role="disclosure"]:hover, QToolButton[role="disclosure"]:focus { background: transparent; color: @text; }
QToolButton[role="disclosure"]:checked { background: transparent; }
QScrollArea, QScrollArea > QWidget > QWidget#page { background: transparent; border: none; }
"""

_CONTROLS = """
QToolTip { background: @card; color: @text; border: 1px solid @outline; padding: 4px 6px; }
QLineEdit, QPlainTextEdit, QTextEdit, QAbstractSpinBox, QComboBox {
    background: @field; color: @text; border: 1px solid @outline; border-radius: 6px; padding: 4px 7px;
    selection-background-color: @accent; selection-color: @accent_text;
}
QLineEdit, QComboBox, QAbstractSpinBox { min-height: 18px; }
QLineEdit, QPlainTextEdit { padding: 4px 5px; }
QLineEdit[role="search"] { padding-left: 0px; }
QLineEdit:focus, QPlainTextEdit:focus, QTextEdit:focus, QAbstractSpinBox:focus, QComboBox:focus {
    border-color: @accent;
}
QLineEdit:disabled, QComboBox:disabled { color: @faint; background: @window; }
QLineEdit[problem="true"], QPlainTextEdit[problem="true"], QComboBox[problem="true"] { border-color: @warning; }
QTableView QAbstractSpinBox, QTableView QLineEdit { border-radius: 0px; padding: 0px 4px; }
QComboBox::drop-down { border: none; width: 22px; }
QComboBox::down-arrow { image: url("@icons/menu-arrow.svg"); width: 12px; height: 12px; margin-right: 6px; }
QPushButton::menu-indicator {
    image: url("@icons/menu-arrow.svg"); width: 12px; height: 12px; subcontrol-position: center right; right: 8px;
}
QPushButton[menu="true"] { padding-right: 26px; }
QComboBox QAbstractItemView {
    background: @card; border: 1px solid @outline; outline: none; padding: 4px;
    selection-background-color: @selection; selection-color: @text;
}
QPushButton {
    background: @card; color: @text; border: 1px solid @outline; border-radius: 6px; padding: 4px 12px; min-height: 18px;
}
QPushButton:hover { background: @hover; }
QPushButton:pressed { background: @hairline; }
QPushButton:focus { border-color: @accent; }
QPushButton:disabled { color: @faint; border-color: @hairline; }
QToolButton { background: transparent; border: none; border-radius: 6px; padding: 4px 8px; }
QToolButton:hover { background: @hover; }
QToolButton:pressed, QToolButton:checked { background: @hairline; }
QToolButton:focus { border: 1px solid @accent; padding: 3px 7px; }
QToolButton:disabled { color: @faint; background: transparent; }
QToolBar { background: @window; border: none; border-bottom: 1px solid @hairline; spacing: 4px; padding: 4px 8px; }
QMenuBar { background: @window; color: @text; border-bottom: 1px solid @hairline; }
QMenuBar::item { padding: 4px 8px; background: transparent; border-radius: 4px; }
QMenuBar::item:selected { background: @hover; }
QMenu { background: @card; color: @text; border: 1px solid @outline; padding: 4px; }
QMenu::item { padding: 4px 24px 4px 20px; border-radius: 4px; }
QMenu::item:selected { background: @selection; }
QMenu::item:disabled { color: @faint; background: transparent; }
QMenu::separator { height: 1px; background: @hairline; margin: 4px 8px; }
QTableView, QListView, QTreeView {
    background: @card; color: @text; border: none; gridline-color: @hairline; outline: none;
    selection-background-color: @selection; selection-color: @text;
}
QHeaderView { background: @card; }
QHeaderView::section {
    background: @card; color: @muted; border: none; border-bottom: 1px solid @hairline; padding: 4px;
}
QTableCornerButton::section { background: @card; border: none; }
QSplitter::handle { background: @hairline; }
QProgressBar { background: @hover; border: none; border-radius: 3px; max-height: 6px; min-height: 6px; }
QProgressBar::chunk { background: @accent; border-radius: 3px; }
QScrollBar:vertical { background: transparent; width: 10px; margin: 0px; }
QScrollBar:horizontal { background: transparent; height: 10px; margin: 0px; }
QScrollBar::handle { background: @outline; border-radius: 3px; margin: 2px; }
QScrollBar::handle:vertical { min-height: 32px; }
QScrollBar::handle:horizontal { min-width: 32px; }
QScrollBar::handle:hover { background: @faint; }
QScrollBar::add-line, QScrollBar::sub-line { width: 0px; height: 0px; }
QScrollBar::add-page, QScrollBar::sub-page { background: transparent; }
"""
