"""A form: cards of fields in a scroll area. Which fields stand in which card, and in what order, is the page's business."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QApplication,
    QFrame,
    QGridLayout,
    QLabel,
    QScrollArea,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.icons import IconButton
from app.widgets.basic.layout import reserve_gutter, set_shown
from app.widgets.form.field import Field
from app.widgets.form.fields import make_field
from backend.spec.faults import Fault
from backend.spec.setting import Setting

COLUMN, MAX_COLUMNS = 200, 4
"""Narrowest column of fields, in pixels; a card takes as many as fit."""


class FieldGrid(QWidget):
    """Fields in as many columns as the width allows; hidden ones leave no hole."""

    def __init__(self, settings: Iterable[Setting], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.fields = [make_field(setting, self) for setting in settings]
        self._columns = 0
        self._shown: set[Field] = set(self.fields)
        self._fillers: list[QWidget] = []
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(2 * theme.SPACE)
        self._grid.setVerticalSpacing(theme.SPACE + 4)
        self._flow(2)

    def show_only(self, keys: set[str]) -> None:
        shown = {one for one in self.fields if one.setting.key in keys}
        if shown != self._shown:
            self._shown = shown
            self._flow(self._columns)

    @property
    def is_empty(self) -> bool:
        return not self._shown

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        room, each = self.width() + 2 * theme.SPACE, theme.scaled(COLUMN) + 2 * theme.SPACE
        columns = max(1, min(MAX_COLUMNS, room // each))
        if columns != self._columns:
            self._flow(columns)

    def _flow(self, columns: int) -> None:
        self._columns = columns
        row = column = 0
        for one in self.fields:
            self._grid.removeWidget(one)
            set_shown(one, one in self._shown)
        for one in (each for each in self.fields if each in self._shown):
            span = columns if one.wide else 1
            if column + span > columns:
                row, column = row + 1, 0
            self._grid.addWidget(one, row, column, 1, span, Qt.AlignmentFlag.AlignTop)
            column += span
        for place in range(MAX_COLUMNS):
            self._grid.setColumnStretch(place, 1 if place < columns else 0)
        self._keep_gaps(columns)

    def _keep_gaps(self, columns: int) -> None:
        """A column with nothing in it would lose its gap, and the others would not line up with the card above."""
        for filler in self._fillers:
            self._grid.removeWidget(filler)
        empty = [place for place in range(columns) if self._grid.itemAtPosition(0, place) is None]
        while len(self._fillers) < len(empty):
            self._fillers.append(QWidget(self))
        for filler, place in zip(self._fillers, empty, strict=False):
            self._grid.addWidget(filler, 0, place)


class Disclosure(QWidget):
    """A line that opens and closes what is below it."""

    def __init__(self, title: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(theme.SPACE)
        self.button: QToolButton = IconButton("chevron-right", title)
        self.button.setCheckable(True)
        self.button.setProperty("role", "disclosure")
        self.button.toggled.connect(self.set_open)
        self._column.addWidget(self.button, 0, Qt.AlignmentFlag.AlignLeft)

    def hold(self, content: QWidget) -> None:
        """Put below the line what it opens."""
        self.content = content
        self._column.addWidget(content)
        set_shown(content, self.is_open)

    @property
    def is_open(self) -> bool:
        return self.button.isChecked()

    def set_open(self, opened: bool) -> None:
        self.button.setChecked(opened)
        set_shown(self.content, opened)
        self.button.set_icon("chevron-down" if opened else "chevron-right")  # type: ignore[attr-defined]


class SettingsCard(QFrame):
    """One block of the form: a title, its fields, and the seldom-needed ones behind Advanced.

    `key` names the block; `fields` maps key to field; `middle` is room for what a page adds between the fields and
    Advanced.
    """

    def __init__(self, key: str, title: str, settings: Iterable[Setting], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.key = key
        self.setProperty("role", "card")
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(2 * theme.SPACE, 12, 2 * theme.SPACE, 12)
        self._column.setSpacing(12)
        self.title = QLabel(title, self)
        self.title.setFont(theme.heading_font())
        self._column.addWidget(self.title)
        listed = list(settings)
        self.grid = FieldGrid((setting for setting in listed if not setting.advanced), self)
        set_shown(self.grid, bool(self.grid.fields))
        self._column.addWidget(self.grid)
        self.middle = QVBoxLayout()
        self.middle.setSpacing(12)
        self._column.addLayout(self.middle)
        self.advanced = Disclosure("Advanced", self)
        self.seldom = FieldGrid((setting for setting in listed if setting.advanced), self.advanced)
        self.advanced.hold(self.seldom)
        made = [*self.grid.fields, *self.seldom.fields]
        self.fields: dict[str, Field] = {
            setting.key: one for setting in listed for one in made if one.setting is setting
        }
        self.advanced.button.setAccessibleName(f"Advanced settings of {title}")
        self._column.addWidget(self.advanced)
        set_shown(self.advanced, bool(self.seldom.fields))

    def tab_order(self, middle: Iterable[QWidget] = ()) -> list[QWidget]:
        """What takes the focus, in the order of the eye; `middle` is what a page has added."""
        usual = [widget for one in self.grid.fields for widget in one.tab_stops()]
        seldom = [widget for one in self.seldom.fields for widget in one.tab_stops()]
        return [*usual, *middle, self.advanced.button, *seldom]

    def show_only(self, keys: set[str]) -> None:
        for grid in (self.grid, self.seldom):
            grid.show_only(keys)
        set_shown(self.advanced, not self.seldom.is_empty)


class Form(QScrollArea):
    """Cards below one another.

    Signals: edited(key, raw value) by a person; focused(key) when the cursor goes into a field; opened(key of a card,
    whether its Advanced is open now) by a person.
    """

    edited = Signal(str, object)
    focused = Signal(str)
    opened = Signal(str, bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)  # Tab halts in the fields alone, and the view follows it
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
        """Put a widget below what is there."""
        self.column.addWidget(widget)

    def add_card(self, card: SettingsCard) -> None:
        self._cards.append(card)
        card.advanced.button.clicked.connect(lambda opened: self.opened.emit(card.key, opened))
        self.add(card)
        self.adopt(card.fields.values())

    def adopt(self, fields: Iterable[Field]) -> None:
        """Count fields that stand somewhere inside as the form's own."""
        for one in fields:
            self.fields[one.setting.key] = one
            one.edited.connect(self.edited)

    def show_values(self, values: Mapping[str, Any]) -> None:
        for key, one in self.fields.items():
            if key in values:
                one.show_value(values[key])

    def show_only(self, keys: set[str]) -> None:
        """Hide every field that is not named."""
        for card in self._cards:
            card.show_only(keys)

    def show_problems(self, faults: Iterable[Fault]) -> None:
        """Each field's first problem below it, with what hides it opened; other fields' problems go."""
        sentences: dict[str, str] = {}
        for fault in faults:
            sentences.setdefault(fault.setting, fault.sentence)
        for key, one in self.fields.items():
            one.show_problem(sentences.get(key, ""))
        for key in sentences:
            self._uncover(key)

    def open_cards(self, keys: Iterable[str]) -> None:
        """Open Advanced of these cards, as they were left."""
        for card in self._cards:
            card.advanced.set_open(card.key in set(keys))

    def _uncover(self, key: str) -> None:
        """Open what hides a field."""
        for card in self._cards:
            if key in card.fields and card.fields[key].setting.advanced:
                card.advanced.set_open(True)

    def reveal(self, key: str) -> bool:
        """Open what hides the field, scroll to it and put the cursor there; False where it is not shown now."""
        one = self.fields.get(key)
        if one is None:
            return False
        self._uncover(key)
        if one.isHidden():
            return False
        one.control.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.scroll_to(one)
        return True

    def _follow_focus(self) -> None:
        """Takes none of the signal's arguments: the widget that had the focus may be half destroyed, and Python must not
        make an object of it."""
        now = QApplication.focusWidget()
        while now is not None and not isinstance(now, Field):
            now = now.parentWidget()
        if now is not None and self.fields.get(now.setting.key) is now:
            self.focused.emit(now.setting.key)

    def scroll_to(self, widget: QWidget) -> None:
        """Bring a widget into sight, once what was opened or shown for it has its place."""
        QTimer.singleShot(0, self, lambda: self.ensureWidgetVisible(widget, 0, 8 * theme.SPACE))
