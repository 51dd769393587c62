"""The stylesheet, with a role of the palette (`@muted`) wherever a colour goes, and `@12px` where a length grows with the text;
`app.theme` puts both in.

OURS holds on every platform; CONTROLS draws the ordinary controls too, where they are Fusion's and not the system's.
"""

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
    background: transparent; border: 1px solid @outline; color: @muted; border-radius: 4px; padding: 0px 5px; min-height: 14px;
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
QTextEdit[role="reading"]:focus, QTableView[role="table"]:focus, QTreeView[role="contents"]:focus { border-color: @accent; }
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
QHeaderView::up-arrow, QHeaderView::down-arrow { subcontrol-position: top center; width: 10px; height: 10px; top: -1px; }
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
