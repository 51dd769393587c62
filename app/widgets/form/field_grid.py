"""Fields in as many columns as the width allows, below the headings of their groups."""

from __future__ import annotations

from collections.abc import Iterable

from PySide6.QtCore import Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QGridLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import PlainLabel
from app.widgets.basic.layout import set_shown
from app.widgets.form.field import Field
from app.widgets.form.fields import make_field
from backend.spec.setting import Setting

COLUMN, MAX_COLUMNS = 200, 4
"""Least width of a column of fields, in pixels, and most columns; a grid has as many as fit."""


class FieldGrid(QWidget):
    """Fields without gaps where fields are hidden. Under headings, fields of a group stand below its heading, in rows of their own.
    `follows`: other content of the card stands above, from which the first heading is parted too.

    Attributes:
        fields – all fields, shown or not, in order.
    """

    def __init__(self, settings: Iterable[Setting], parent: QWidget | None = None, *, follows: bool = False) -> None:
        super().__init__(parent)
        self.fields = [make_field(setting, self) for setting in settings]
        self._columns, self._follows = 0, follows
        self._shown: set[Field] = set(self.fields)
        self._has_headings = True
        self._fillers: list[QWidget] = []
        groups = dict.fromkeys(field.setting.group for field in self.fields if field.setting.group)
        self._headings = {group: _Heading(group, self) for group in groups}
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(2 * theme.SPACE)
        self._grid.setVerticalSpacing(theme.SPACE + 4)
        self._flow(2)

    def show_only(self, keys: set[str], *, headings: bool = True) -> None:
        """Show the fields of these settings, below the headings of their groups or without any, and hide the others."""
        shown = {field for field in self.fields if field.setting.key in keys}
        if (shown, headings) != (self._shown, self._has_headings):
            self._shown, self._has_headings = shown, headings
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
            if self._has_headings and field.setting.group != group:
                row, column, group = row + (column > 0), 0, field.setting.group
                if group:
                    self._headings[group].show_line(row > 0 or self._follows)
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


class _Heading(QWidget):
    """The name of a group, below a hairline that parts it from the group above."""

    def __init__(self, text: str, parent: QWidget) -> None:
        super().__init__(parent)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        self._line = QFrame(self)
        self._line.setProperty("role", "rule")
        self.label = PlainLabel(text, self)
        self.label.setFont(theme.heading_font())
        column.addWidget(self._line)
        column.addWidget(self.label)

    def show_line(self, shown: bool) -> None:
        """The first heading of a card stands below its title, without a line."""
        set_shown(self._line, shown)
