"""Colours, fonts and spacing, light and dark: the only file with colour codes."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields

from PySide6.QtCore import QLocale, QObject, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontDatabase, QGuiApplication, QPalette, QPen
from PySide6.QtWidgets import QApplication

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
    """A colour for each use. Advantages are blue and orange, which colour-blind users can tell apart."""

    window: QColor
    sidebar: QColor
    card: QColor
    field: QColor
    text: QColor
    muted: QColor
    faint: QColor
    """Text and icons of what is disabled."""
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


COLOURS = {
    "window": ("#f5f5f7", "#1a1a1e"),
    "sidebar": ("#ececf0", "#151518"),
    "card": ("#ffffff", "#232328"),
    "field": ("#ffffff", "#1b1b1f"),
    "text": ("#1c1c21", "#ececf1"),
    "muted": ("#5f5f67", "#a9a9b3"),
    "faint": ("#a3a3ab", "#686871"),
    "placeholder": ("#707078", "#8a8a94"),
    "hairline": ("#e1e1e6", "#34343b"),
    "outline": ("#8a8a93", "#6e6e78"),
    "edge": ("#cdcdd4", "#4a4a53"),
    "hover": ("#e4e4ea", "#303037"),
    "selection": ("#dfe2fb", "#31355e"),
    "accent": ("#4453d0", "#8f9aff"),
    "accent_text": ("#ffffff", "#14152b"),
    "accent_hover": ("#3744b4", "#a9b1ff"),
    "good": ("#15703f", "#5ac992"),
    "warning": ("#8f5000", "#e6a94f"),
    "bad": ("#b32d24", "#ff8378"),
    "kl": ("#9c3f8f", "#dd8fd2"),
    "clip": ("#77690a", "#d2c25a"),
    "length": ("#2b7a8c", "#6fc3d6"),
    "plot_background": ("#ffffff", "#232328"),
    "grid": ("#d9d9df", "#3c3c44"),
    "advantage_above": ("#0065a0", "#5ab2e8"),
    "advantage_below": ("#a84900", "#f08a3c"),
}
"""Role → its colour in the light and in the dark theme."""
LIGHT, DARK = (Palette(**{role: QColor(pair[i]) for role, pair in COLOURS.items()}) for i in (0, 1))

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
_scale: list[float] = []
_current = {"dark": False, "mode": "system", "is_connected": False, "is_applying": False}


def palette() -> Palette:
    return DARK if _current["dark"] else LIGHT


def is_dark() -> bool:
    return bool(_current["dark"])


def reward_colour(index: int) -> QColor:
    """The colour of the reward function with this index among those ticked."""
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
    """Apply a theme to the application: system (follow the desktop), light or dark."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, not {mode!r}")
    numbers = QLocale.c()  # typed as in a config, also on a German desktop: 1200, 0.5
    numbers.setNumberOptions(QLocale.NumberOption.RejectGroupSeparator | QLocale.NumberOption.OmitGroupSeparator)
    QLocale.setDefault(numbers)
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
    text = OURS if sys.platform == "darwin" else CONTROLS + OURS
    for role in sorted((role.name for role in fields(Palette)), key=len, reverse=True):
        text = text.replace(f"@{role}", getattr(colours, role).name())
    text = re.sub(r"@(\d+)px", lambda length: f"{scaled(int(length[1]))}px", text)
    return text.replace("@icons", (places.resources() / "icons").as_posix())


CELL_PADDING = 8
"""At both sides of a table's cells and headers, in pixels."""
STYLE_PADDING = 3
"""As much of it as the style adds to a cell by itself."""

OURS = (
    """
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
QPushButton[role="primary"]:focus { border: 2px solid @text; padding: 5px 15px; }
QPushButton[role="primary"]:disabled { background: @hover; border-color: @hover; color: @faint; }
QPushButton[role="small"] {
    background: transparent; border: 1px solid @outline; color: @muted; border-radius: 4px; padding: 0px 5px;
    min-height: 14px;
    font-size: @11px;
}
QPushButton[role="small"]:hover { background: @hover; color: @text; }
QPushButton[role="small"]:checked { background: @selection; color: @text; border-color: @accent; }
QPushButton[role="link"] {
    background: transparent; border: none; color: @accent; padding: 2px 0px; text-align: left;
}
QPushButton[role="group"] { background: transparent; border: none; color: @muted; padding: 0px; min-height: 22px; }
QPushButton[role="group"]:hover, QPushButton[role="group"]:focus { color: @text; text-decoration: underline; }
QPushButton[role="link"]:hover, QPushButton[role="link"]:focus { text-decoration: underline; }
QToolButton[role="disclosure"] { padding: 4px 8px 4px 0px; border: none; color: @muted; }
QToolButton[role="disclosure"]:hover, QToolButton[role="disclosure"]:focus { background: transparent; color: @text; }
QToolButton[role="disclosure"]:checked { background: transparent; }
QTreeView[role="contents"] { background: transparent; }
QTextEdit[role="plain"] { background: transparent; border: none; padding: 0px; }
QTextEdit[role="reading"] { background: transparent; border: 1px solid transparent; border-radius: 6px; padding: 0px; }
QTextEdit[role="reading"]:focus, QTableView[role="table"]:focus, QTreeView[role="contents"]:focus {
    border-color: @accent;
}
QTableView[role="table"], QTreeView[role="contents"] { border: 1px solid transparent; border-radius: 6px; }
QScrollArea, QScrollArea > QWidget > QWidget#page { background: transparent; border: none; }
QSplitter::handle { background: transparent; }
"""
    + f"""
QTableView[role="table"]::item {{ padding: 0px {CELL_PADDING - STYLE_PADDING}px; }}
QTableView[role="table"] QHeaderView::section {{ padding: 4px {CELL_PADDING}px; }}
"""
)

CONTROLS = """
QToolTip { background: @card; color: @text; border: 1px solid @edge; padding: 4px 6px; }
QLineEdit, QPlainTextEdit, QTextEdit, QComboBox {
    background: @field; color: @text; border: 1px solid @outline; border-radius: 6px; padding: 4px 7px;
    selection-background-color: @accent; selection-color: @accent_text; placeholder-text-color: @placeholder;
}
QLineEdit, QComboBox { min-height: 18px; }
QLineEdit, QPlainTextEdit { padding: 4px 5px; }
QLineEdit[role="search"] { padding-left: 0px; }
QLineEdit:focus, QPlainTextEdit:focus, QTextEdit:focus, QComboBox:focus { border-color: @accent; }
QLineEdit:disabled, QComboBox:disabled { color: @faint; background: @window; }
QLineEdit[problem="true"], QPlainTextEdit[problem="true"], QComboBox[problem="true"] { border-color: @warning; }
QTableView QLineEdit { border-color: @accent; padding: 0px 3px; min-height: 0px; }
QComboBox::drop-down { border: none; width: @22px; }
QComboBox::down-arrow { image: url("@icons/menu-arrow.svg"); width: @12px; height: @12px; margin-right: 6px; }
QPushButton::menu-indicator {
    image: url("@icons/menu-arrow.svg"); width: @12px; height: @12px; subcontrol-position: center right; right: 8px;
}
QPushButton[menu="true"] { padding-right: @26px; }
QComboBox QAbstractItemView {
    background: @card; border: 1px solid @edge; outline: none; padding: 4px;
    selection-background-color: @selection; selection-color: @text;
}
QPushButton {
    background: @card; color: @text; border: 1px solid @edge; border-radius: 6px; padding: 4px 12px; min-height: 18px;
}
QPushButton:hover { background: @hover; }
QPushButton:pressed { background: @hairline; }
QPushButton { outline: none; }
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
QMenu { background: @card; color: @text; border: 1px solid @edge; padding: 4px; }
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
QHeaderView::up-arrow, QHeaderView::down-arrow {
    subcontrol-position: top center; width: 10px; height: 10px; top: -1px;
}
QHeaderView::up-arrow { image: url("@icons/menu-arrow-up.svg"); }
QHeaderView::down-arrow { image: url("@icons/menu-arrow.svg"); }
QAbstractScrollArea::corner { background: transparent; border: none; }
QListView[role="matches"] { border: 1px solid @edge; }
QListView[role="matches"]::item { padding: 3px 6px; }
QDialogButtonBox, QMessageBox { dialogbuttonbox-buttons-have-icons: 0; }
QTableCornerButton::section { background: @card; border: none; }
QProgressBar { background: @hover; border: none; border-radius: 3px; max-height: 6px; min-height: 6px; }
QProgressBar::chunk { background: @accent; border-radius: 3px; }
QScrollBar:vertical { background: transparent; width: 10px; margin: 0px; }
QScrollBar:horizontal { background: transparent; height: 10px; margin: 0px; }
QScrollBar::handle { background: @outline; border-radius: 3px; margin: 2px; }
QScrollBar::handle:vertical { min-height: 32px; }
QScrollBar::handle:horizontal { min-width: 32px; }
QScrollBar::handle:hover { background: @muted; }
QScrollBar::add-line, QScrollBar::sub-line { width: 0px; height: 0px; }
QScrollBar::add-page, QScrollBar::sub-page { background: transparent; }
"""
