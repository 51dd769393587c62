"""A form: cards of fields in a scroll area. The page decides which fields are in which card, and their order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QApplication,
    QFrame,
    QGridLayout,
    QScrollArea,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels_and_buttons import PlainLabel
from app.widgets.basic.layout import reserve_gutter, set_shown
from app.widgets.form.field import Field, field_of
from app.widgets.form.fields import make_field
from backend.spec.faults import Fault
from backend.spec.setting import Setting

COLUMN, MAX_COLUMNS = 200, 4
"""Least width of a column of fields, in pixels, and most columns; a card has as many as fit."""


class FieldGrid(QWidget):
    """Fields in as many columns as the width allows, without gaps where fields are hidden. Fields of a group stand below its heading, in
    rows of their own.

    Attributes:
        fields – all fields, shown or not, in order.
    """

    def __init__(self, settings: Iterable[Setting], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.fields = [make_field(setting, self) for setting in settings]
        self._columns = 0
        self._shown: set[Field] = set(self.fields)
        self._fillers: list[QWidget] = []
        groups = dict.fromkeys(field.setting.group for field in self.fields if field.setting.group)
        self._headings = {group: _heading(group, self) for group in groups}
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(2 * theme.SPACE)
        self._grid.setVerticalSpacing(theme.SPACE + 4)
        self._flow(2)

    def show_only(self, keys: set[str]) -> None:
        """Show the fields of these settings, hide the others."""
        shown = {field for field in self.fields if field.setting.key in keys}
        if shown != self._shown:
            self._shown = shown
            self._flow(self._columns)

    @property
    def is_empty(self) -> bool:
        return not self._shown

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        spacing = 2 * theme.SPACE
        columns = max(1, min(MAX_COLUMNS, (self.width() + spacing) // (theme.scaled(COLUMN) + spacing)))
        if columns != self._columns:
            self._flow(columns)

    def _flow(self, columns: int) -> None:
        self._columns = columns
        for widget in (*self.fields, *self._headings.values()):
            self._grid.removeWidget(widget)
        for field in self.fields:
            set_shown(field, field in self._shown)
        row = column = 0
        group = ""
        groups: set[str] = set()
        for field in (field for field in self.fields if field in self._shown):
            span = columns if field.wide else 1
            if field.setting.group != group:
                row, column, group = row + (column > 0), 0, field.setting.group
                if group:
                    self._grid.addWidget(self._headings[group], row, 0, 1, columns)
                    row += 1
                    groups.add(group)
            if column + span > columns:
                row, column = row + 1, 0
            self._grid.addWidget(field, row, column, 1, span, Qt.AlignmentFlag.AlignTop)
            column += span
        for name, heading in self._headings.items():
            set_shown(heading, name in groups)
        for i in range(MAX_COLUMNS):
            self._grid.setColumnStretch(i, 1 if i < columns else 0)
        self._fill_empty_columns(columns)

    def _fill_empty_columns(self, columns: int) -> None:
        """Put empty widgets into empty columns: QGridLayout drops the spacing of a column that has no widget, and the
        columns would not line up with those of the card above."""
        for filler in self._fillers:
            self._grid.removeWidget(filler)
        empty = [i for i in range(columns) if self._grid.itemAtPosition(0, i) is None]
        while len(self._fillers) < len(empty):
            self._fillers.append(QWidget(self))
        for filler, i in zip(self._fillers, empty, strict=False):
            self._grid.addWidget(filler, 0, i)


class SettingsCard(QFrame):
    """A card of the form: a title, its basic fields, and the others once a button is pressed. Of those, the ones that differ from their
    default are shown all the same: nothing that a run does is out of sight. Open or closed, the fields keep their order.

    Attributes:
        key – names the card.
        fields – setting → field, folded ones included.
        middle – a layout for the page's own widgets, between the fields of `first` and the others.
        more – the button that shows and hides the other fields.

    Signals:
        opened(bool) – the user clicked the button.
    """

    opened = Signal(bool)

    def __init__(
        self,
        key: str,
        title: str,
        first: Iterable[Setting],
        others: Iterable[Setting],
        basic: Container[str],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.key = key
        self.setProperty("role", "card")
        self._changed: set[str] = set()
        self._grids = (FieldGrid(first, self), FieldGrid(others, self))
        self.fields: dict[str, Field] = {field.setting.key: field for grid in self._grids for field in grid.fields}
        self._basic = {key for key in self.fields if key in basic}
        self._applying = set(self.fields)
        self._lay_out(title)
        self._flow()

    def _lay_out(self, title: str) -> None:
        self.title = PlainLabel(title, self)
        self.title.setFont(theme.heading_font())
        self.middle = QVBoxLayout()
        self.middle.setSpacing(12)
        self.more: QToolButton = IconButton("chevron-right", parent=self)
        self.more.setCheckable(True)
        self.more.setProperty("role", "disclosure")
        self.more.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.more.toggled.connect(self._flow)
        self.more.clicked.connect(self.opened)
        column = QVBoxLayout(self)
        column.setContentsMargins(2 * theme.SPACE, 12, 2 * theme.SPACE, 12)
        column.setSpacing(12)
        column.addWidget(self.title)
        above, below = self._grids
        column.addWidget(above)
        column.addLayout(self.middle)
        column.addWidget(below)
        column.addWidget(self.more, 0, Qt.AlignmentFlag.AlignLeft)

    def tab_order(self, middle: Iterable[QWidget] = ()) -> list[QWidget]:
        """The widgets that Tab visits, from top to bottom; `middle` are those that the page has added."""
        above, below = ([widget for field in grid.fields for widget in field.tab_stops()] for grid in self._grids)
        return [*above, *middle, *below, self.more]

    @property
    def is_open(self) -> bool:
        return self.more.isChecked()

    def set_open(self, opened: bool) -> None:
        """Show all fields, or only the basic ones and those that differ from their default."""
        self.more.setChecked(opened)

    def uncover(self, key: str) -> None:
        """Open the card if it hides this field."""
        if key in self.fields.keys() - self._basic - self._changed:
            self.set_open(True)

    def show_only(self, applying: set[str]) -> None:
        """Hide the fields of settings that do not apply, or disable those that stay visible."""
        self._applying = {key for key, field in self.fields.items() if key in applying or field.setting.stays_visible}
        for key, field in self.fields.items():
            if field.setting.stays_visible:
                field.show_idle(key not in applying)
        self._flow()

    def show_changed(self, changed: set[str], *, afresh: bool) -> None:
        """Show the fields of these settings, which differ from their default, also while the card is closed. Only `afresh` are others
        hidden again: a field must not vanish while its default is typed into it."""
        self._changed = changed if afresh else self._changed | changed
        self._flow()

    def _flow(self) -> None:
        shown = {key for key in self._applying if self.is_open or key in self._basic | self._changed}
        for grid in self._grids:
            grid.show_only(shown)
            set_shown(grid, not grid.is_empty)
        hidden = len(self._applying - self._basic - self._changed)
        what = "more settings" if self._applying & (self._basic | self._changed) else "settings"
        count = f"{hidden} {what if hidden > 1 else what.removesuffix('s')}"
        self.more.setText("Fewer settings" if self.is_open else f"Show {count}")
        self.more.setAccessibleName(f"{self.more.text()} of {self.title.text()}")
        self.more.set_icon("chevron-down" if self.is_open else "chevron-right")  # type: ignore[attr-defined]
        set_shown(self.more, bool(hidden))


def _heading(text: str, parent: QWidget) -> QWidget:
    heading = PlainLabel(text, parent)
    heading.setFont(theme.heading_font())
    return heading


class Form(QScrollArea):
    """Cards in a column that scrolls.

    Attributes:
        fields – setting → field, of all cards and of `adopt`.

    Signals:
        edited(key, raw value) – the user changed a field.
        focused(key) – a field got the focus.
        opened(key of a card, is open) – the user opened or closed it.
    """

    edited = Signal(str, object)
    focused = Signal(str)
    opened = Signal(str, bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)  # Tab visits the fields alone, and the view scrolls with it
        self.fields: dict[str, Field] = {}
        self._cards: list[SettingsCard] = []
        page = self.page = QWidget(self)
        page.setObjectName("page")
        self.column = QVBoxLayout(page)
        self.column.setContentsMargins(0, 0, theme.GUTTER, 2 * theme.SPACE)
        self.column.setSpacing(12)
        self.setWidget(page)
        app = QApplication.instance()
        assert isinstance(app, QApplication)
        app.focusChanged.connect(self._follow_focus)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        reserve_gutter(self, self.column)

    def add(self, widget: QWidget) -> None:
        """Add a widget at the bottom."""
        self.column.addWidget(widget)

    def add_card(self, card: SettingsCard) -> None:
        self._cards.append(card)
        card.opened.connect(lambda opened: self.opened.emit(card.key, opened))
        self.add(card)
        self.adopt(card.fields.values())

    def adopt(self, fields: Iterable[Field]) -> None:
        """Treat fields inside another widget as the form's own."""
        for field in fields:
            self.fields[field.setting.key] = field
            field.edited.connect(self.edited)

    def show_values(self, values: Mapping[str, Any]) -> None:
        """Show the raw values of the settings."""
        for key, field in self.fields.items():
            if key in values:
                field.show_value(values[key])

    def show_only(self, keys: set[str]) -> None:
        """Hide every field that is not named."""
        for card in self._cards:
            card.show_only(keys)

    def show_problems(self, faults: Iterable[Fault]) -> None:
        """Show the first fault of each field below it, open the card that hides it, and remove old ones."""
        sentences: dict[str, str] = {}
        for fault in faults:
            sentences.setdefault(fault.setting, fault.sentence)
        for key, field in self.fields.items():
            field.show_problem(sentences.get(key, ""))
        for key in sentences:
            self._uncover(key)

    def show_warnings(self, warnings: Iterable[Fault]) -> None:
        """Show what is unusual below its field, and remove older warnings."""
        sentences = {warning.setting: warning.sentence for warning in warnings}
        for key, field in self.fields.items():
            field.show_warning(sentences.get(key, ""))

    def show_changed(self, changed: set[str], *, afresh: bool) -> None:
        """Show the fields of these settings, which differ from their default, also in cards that are closed."""
        for card in self._cards:
            card.show_changed(changed & card.fields.keys(), afresh=afresh)

    def open_cards(self, keys: Iterable[str]) -> None:
        """Open these cards and close the others."""
        for card in self._cards:
            card.set_open(card.key in set(keys))

    def _uncover(self, key: str) -> None:
        """Open the card that hides a field."""
        for card in self._cards:
            card.uncover(key)

    def reveal(self, key: str) -> bool:
        """Uncover a field, focus it and scroll to it; False if it does not apply now and is hidden."""
        field = self.fields.get(key)
        if field is None:
            return False
        self._uncover(key)
        if field.isHidden():
            return False
        if not field.control.isEnabled():
            self.scroll_to(field)
            return False
        field.control.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.scroll_to(field)
        return True

    def _follow_focus(self) -> None:
        # The slot takes none of the signal's arguments: the widget that lost the focus may be half destroyed, and PySide
        # must not wrap it in a Python object.
        widget = QApplication.focusWidget()
        if widget is not None and self.page.isAncestorOf(widget) and widget.height() < self.viewport().height() // 2:
            # Qt scrolls to what Tab reaches from within the view, and not when Tab enters it.
            self.ensureWidgetVisible(widget, 0, theme.SPACE)
        field = field_of(widget)
        if field is not None and self.fields.get(field.setting.key) is field:
            self.focused.emit(field.setting.key)

    def scroll_to(self, widget: QWidget) -> None:
        """Scroll to a widget, on the next turn of the event loop: what was just shown for it is laid out by then."""
        QTimer.singleShot(0, self, lambda: self.ensureWidgetVisible(widget, 0, 8 * theme.SPACE))
