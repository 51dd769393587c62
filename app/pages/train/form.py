"""A form: cards of fields in a scroll area. The page decides which fields are in which card, and their order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import partial
from typing import Any

from PySide6.QtCore import QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QApplication, QFrame, QGridLayout, QToolButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import PlainLabel
from app.widgets.basic.layout import FlowLayout, TabArea, reserve_gutter, set_shown
from app.widgets.form.field import Field, field_of
from app.widgets.form.fields import make_field
from backend.config.setting import Setting
from backend.utils.errors import ConfigProblem


class Form(TabArea):
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
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.fields: dict[str, Field] = {}
        self._cards: list[SettingsCard] = []
        page = self.page = QWidget(self)
        page.setObjectName("page")
        self.column = QVBoxLayout(page)
        self.column.setContentsMargins(0, 0, theme.GUTTER, 2 * theme.SPACE)
        self.column.setSpacing(12)
        self.setWidget(page)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        reserve_gutter(self, self.column)

    def add(self, widget: QWidget) -> None:
        """Add a widget at the bottom."""
        self.column.addWidget(widget)

    def add_card(self, card: SettingsCard) -> None:
        self._cards.append(card)
        card.opened.connect(lambda opened: self.opened.emit(card.key, opened))
        card.group_requested.connect(self._focus)
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

    def show_problems(self, faults: Iterable[ConfigProblem]) -> None:
        """Show the first fault of each field below it, open the card that hides it, and remove old ones."""
        sentences: dict[str, str] = {}
        for fault in faults:
            sentences.setdefault(fault.setting, fault.sentence)
        for key, field in self.fields.items():
            field.show_problem(sentences.get(key, ""))
        for key in sentences:
            self._uncover(key)

    def show_warnings(self, warnings: Iterable[ConfigProblem]) -> None:
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
        self._focus(field)
        return True

    def focus_group(self, direction: int) -> None:
        """Focus the first field of the next group of settings (`direction` 1), or of this group, then of the one before (-1)."""
        starts = [start for card in self._cards if card.isVisible() for start in card.group_starts()]
        here = self._focused_row()
        beyond = [start for start in starts if (self._row(start) - here) * direction > 0]
        if beyond:
            self._focus(min(beyond, key=lambda start: abs(self._row(start) - here)))

    def _focused_row(self) -> int:
        """Where the focus is on the page; where it is elsewhere, just above what is in view."""
        widget = QApplication.focusWidget()
        if widget is None or not self.page.isAncestorOf(widget):
            return self.verticalScrollBar().value() - 1
        return self._row(field_of(widget) or widget)

    def _row(self, widget: QWidget) -> int:
        """The top edge of a widget, from that of the page."""
        return widget.mapTo(self.page, QPoint()).y()

    def _focus(self, part: QWidget) -> None:
        """Focus a field or a button, and scroll to it."""
        (part.control if isinstance(part, Field) else part).setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.scroll_to(part)

    def follow_focus(self) -> None:
        super().follow_focus()
        field = field_of(QApplication.focusWidget())
        if field is not None and self.fields.get(field.setting.key) is field:
            self.focused.emit(field.setting.key)

    def scroll_to(self, widget: QWidget) -> None:
        """Scroll to a widget, on the next turn of the event loop: what was just shown for it is laid out by then."""
        QTimer.singleShot(0, self, lambda: self.ensureWidgetVisible(widget, 0, 8 * theme.SPACE))


# Fields in as many columns as the width allows, below the headings of their groups.

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


# ── settings card ────────────────────────────────────────────────────────────────────────────────────────────────────


class SettingsCard(QFrame):
    """A card of the form: a title, its basic fields, and the others once a button is pressed. Of those, the ones that differ from their
    default are shown all the same: nothing that a run does is out of sight. Open or closed, the fields keep their order.

    An open card has the headings of its settings. A closed one has a link for each, which opens the card there.

    Attributes:
        key – names the card.
        fields – setting → field, folded ones included.
        middle – a layout for the page's own widgets, between the fields of `first` and the others.
        more – the button that shows and hides the other fields.
        links – heading → the link to it.

    Signals:
        opened(bool) – the user clicked the button or a link.
        group_requested(field) – the user clicked a link: the first field below that heading.
    """

    opened = Signal(bool)
    group_requested = Signal(QWidget)

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
        self._grids = (FieldGrid(first, self), FieldGrid(others, self, follows=True))
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
        foot = QVBoxLayout()
        foot.setSpacing(0)
        foot.addWidget(self.more, 0, Qt.AlignmentFlag.AlignLeft)
        foot.addWidget(self._group_links())
        column.addLayout(foot)

    def _group_links(self) -> QWidget:
        """A line with a link to every heading."""
        groups = dict.fromkeys(field.setting.group for field in self.fields.values() if field.setting.group)
        self.links: dict[str, LinkButton] = {}
        self._link_line = QWidget(self)
        flow = FlowLayout(self._link_line, 2 * theme.SPACE, 0)
        self._link_line.setContentsMargins(icons.SIZE + theme.SPACE, 0, 0, 0)  # below the words of the button
        for group in groups:
            link = self.links[group] = LinkButton(group, self._link_line)
            link.setProperty("role", "group")
            link.setFont(theme.caption_font())
            link.setAccessibleName(f"{group} of {self.title.text()}")
            link.clicked.connect(partial(self._open_at, group))
            flow.addWidget(link)
        return self._link_line

    def _open_at(self, group: str) -> None:
        self.set_open(True)
        self.opened.emit(True)
        self.group_requested.emit(next(field for field in self._shown_fields() if field.setting.group == group))

    def _shown_fields(self) -> list[Field]:
        return [field for field in self.fields.values() if not field.isHidden()]

    def group_starts(self) -> list[QWidget]:
        """The first field below each heading; of a closed card its first field, or the button where it shows none."""
        starts: dict[str, QWidget] = {}
        for field in self._shown_fields():
            starts.setdefault(field.setting.group if self.is_open else "", field)
        return list(starts.values()) or [self.more]

    def tab_order(self, middle: Iterable[QWidget] = ()) -> list[QWidget]:
        """The widgets that Tab visits, from top to bottom; `middle` are those that the page has added."""
        above, below = ([widget for field in grid.fields for widget in field.tab_stops()] for grid in self._grids)
        return [*above, *middle, *below, self.more, *self.links.values()]

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
            grid.show_only(shown, headings=self.is_open)
            set_shown(grid, not grid.is_empty)
        hidden = len(self._applying - self._basic - self._changed)
        what = "more settings" if self._applying & (self._basic | self._changed) else "settings"
        count = f"{hidden} {what if hidden > 1 else what.removesuffix('s')}"
        self.more.setText("Fewer settings" if self.is_open else f"Show {count}")
        self.more.setAccessibleName(f"{self.more.text()} of {self.title.text()}")
        self.more.set_icon("chevron-down" if self.is_open else "chevron-right")  # type: ignore[attr-defined]
        set_shown(self.more, bool(hidden))
        groups = {group for key in self._applying if (group := self.fields[key].setting.group)}
        for group, link in self.links.items():
            set_shown(link, group in groups)
        # Of a single group the button says as much.
        set_shown(self._link_line, len(groups) > 1 and bool(hidden) and not self.is_open)
