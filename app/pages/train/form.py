"""The form of the Train page: cards of fields in a scroll area."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Set
from functools import partial
from typing import Any

from PySide6.QtCore import QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QApplication, QFrame, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import PlainLabel, label
from app.widgets.basic.layout import FlowLayout, TabArea, card, column, configure, grid, reserve_gutter, set_shown
from app.widgets.basic.number_format import counted
from app.widgets.form.field import Field, field_of
from app.widgets.form.fields import make_field
from backend.config.setting import Setting
from backend.utils.errors import ConfigProblem

COLUMN, MAX_COLUMNS = 200, 4


class Form(TabArea):
    edited = Signal(str, object)  # key, raw value
    focused = Signal(str)  # key
    opened = Signal(str, bool)  # key of a card, is open

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, horizontalScrollBarPolicy=Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.fields: dict[str, Field] = {}
        self._cards: list[SettingsCard] = []
        self.page = configure(QWidget(self), objectName="page")
        self.column = column(into=self.page, spacing=12, margins=(0, 0, theme.GUTTER, 2 * theme.SPACE))
        self.setWidget(self.page)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        reserve_gutter(self, self.column)

    def add_card(self, card: SettingsCard) -> None:
        self._cards.append(card)
        card.opened.connect(lambda opened: self.opened.emit(card.key, opened))
        card.group_requested.connect(self._focus)
        self.column.addWidget(card)
        self.adopt(card.fields.values())

    def adopt(self, fields: Iterable[Field]) -> None:
        for field in fields:
            self.fields[field.setting.key] = field
            field.edited.connect(self.edited)

    def show_values(self, values: Mapping[str, Any]) -> None:
        for key, field in self.fields.items():
            if key in values:
                field.show_value(values[key])

    def show_only(self, keys: set[str]) -> None:
        for each in self._cards:
            each.show_only(keys)

    def show_problems(self, problems: Iterable[ConfigProblem], warnings: Iterable[ConfigProblem]) -> None:
        wrong = {problem.setting: problem.sentence for problem in reversed(list(problems))}
        unusual = {warning.setting: warning.sentence for warning in warnings}
        for key, field in self.fields.items():
            field.show_problem(wrong.get(key, ""))
            field.show_warning(unusual.get(key, ""))
        for each in self._cards:
            each.uncover(wrong.keys())

    def show_changed(self, changed: set[str], *, afresh: bool) -> None:
        for each in self._cards:
            each.show_changed(changed & each.fields.keys(), afresh=afresh)

    def open_cards(self, keys: Iterable[str]) -> None:
        for each in self._cards:
            each.more.setChecked(each.key in set(keys))

    def reveal(self, key: str) -> bool:
        """Uncover a field, focus it and scroll to it; False if the setting does not apply now."""
        field = self.fields.get(key)
        if field is None:
            return False
        for each in self._cards:
            each.uncover({key})
        if field.isHidden():
            return False
        if not field.control.isEnabled():
            self.scroll_to(field)
            return False
        self._focus(field)
        return True

    def focus_group(self, direction: int) -> None:
        """Focus the first field of the next group of settings (`direction` 1), or of this or the last (−1)."""
        focused = QApplication.focusWidget()
        if focused is None or not self.page.isAncestorOf(focused):
            here = self.verticalScrollBar().value() - 1
        else:
            here = (field_of(focused) or focused).mapTo(self.page, QPoint()).y()
        starts = [start for each in self._cards if each.isVisible() for start in each.group_starts()]
        distances = [((start.mapTo(self.page, QPoint()).y() - here) * direction, start) for start in starts]
        beyond = [(distance, start) for distance, start in distances if distance > 0]
        if beyond:
            self._focus(min(beyond, key=lambda found: found[0])[1])

    def _focus(self, part: QWidget) -> None:
        (part.control if isinstance(part, Field) else part).setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.scroll_to(part)

    def follow_focus(self) -> None:
        super().follow_focus()
        field = field_of(QApplication.focusWidget())
        if field is not None and self.fields.get(field.setting.key) is field:
            self.focused.emit(field.setting.key)

    def scroll_to(self, widget: QWidget) -> None:
        QTimer.singleShot(0, self, lambda: self.ensureWidgetVisible(widget, 0, 8 * theme.SPACE))


class SettingsCard(QFrame):
    """A card with a title, its basic fields, and a button that shows the others."""

    opened = Signal(bool)
    group_requested = Signal(QWidget)  # field

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
        self.fields: dict[str, Field] = {field.setting.key: field for each in self._grids for field in each.fields}
        self._basic = {key for key in self.fields if key in basic}
        self._applying = set(self.fields)
        self.title = configure(PlainLabel(title, self), font=theme.heading_font())
        self.middle = column(spacing=12)
        self.more = IconButton("chevron-right", parent=self, checkable=True, role="disclosure", clicked=self.opened)
        self.more.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.more.toggled.connect(self._flow)
        self._link_line = QWidget(self)
        self._link_line.setContentsMargins(icons.SIZE + theme.SPACE, 0, 0, 0)  # below the text of the button
        flow = FlowLayout(self._link_line, 2 * theme.SPACE, 0)
        self.links: dict[str, LinkButton] = {}
        for group in filter(None, dict.fromkeys(field.setting.group for field in self.fields.values())):
            link = LinkButton(group, self._link_line, on_click=partial(self._open_at, group), role="group")
            self.links[group] = configure(link, accessibleName=f"{group} of {title}", font=theme.caption_font())
            flow.addWidget(link)
        above, below = self._grids
        foot = column((self.more, 0, Qt.AlignmentFlag.AlignLeft), self._link_line, spacing=0)
        margins = (2 * theme.SPACE, 12, 2 * theme.SPACE, 12)
        column(self.title, above, self.middle, below, foot, into=self, spacing=12, margins=margins)
        self._flow()

    @property
    def is_open(self) -> bool:
        return self.more.isChecked()

    def uncover(self, keys: Set[str]) -> None:
        if keys & (self.fields.keys() - self._basic - self._changed):
            self.more.setChecked(True)

    def _open_at(self, group: str) -> None:
        self.more.setChecked(True)
        self.opened.emit(True)
        shown = (field for field in self.fields.values() if not field.isHidden())
        self.group_requested.emit(next(field for field in shown if field.setting.group == group))

    def group_starts(self) -> list[QWidget]:
        starts: dict[str, QWidget] = {}
        for field in self.fields.values():
            if not field.isHidden():
                starts.setdefault(field.setting.group if self.is_open else "", field)
        return list(starts.values()) or [self.more]

    def tab_order(self, middle: Iterable[QWidget] = ()) -> list[QWidget]:
        """The widgets that Tab visits, from top to bottom; `middle` are those that the page has added."""
        above, below = ([widget for field in each.fields for widget in field.tab_stops] for each in self._grids)
        return [*above, *middle, *below, self.more, *self.links.values()]

    def show_only(self, applying: set[str]) -> None:
        self._applying = {key for key, field in self.fields.items() if key in applying or field.setting.stays_visible}
        for key, field in self.fields.items():
            if field.setting.stays_visible:
                field.show_idle(key not in applying)
        self._flow()

    def show_changed(self, changed: set[str], *, afresh: bool) -> None:
        self._changed = changed if afresh else self._changed | changed
        self._flow()

    def _flow(self) -> None:
        always = self._basic | self._changed
        shown = {key for key in self._applying if self.is_open or key in always}
        for fields in self._grids:
            fields.show_only(shown, headings=self.is_open)
            set_shown(fields, bool(fields.shown))
        hidden = len(self._applying - always)
        noun = "more setting" if self._applying & always else "setting"
        self.more.setText("Fewer settings" if self.is_open else f"Show {counted(hidden, noun)}")
        self.more.setAccessibleName(f"{self.more.text()} of {self.title.text()}")
        self.more.set_icon("chevron-down" if self.is_open else "chevron-right")
        set_shown(self.more, bool(hidden))
        groups = {group for key in self._applying if (group := self.fields[key].setting.group)}
        for group, link in self.links.items():
            set_shown(link, group in groups)
        set_shown(self._link_line, len(groups) > 1 and bool(hidden) and not self.is_open)


class FieldGrid(QWidget):
    """Fields in as many columns as the width allows, below the headings of their groups."""

    def __init__(self, settings: Iterable[Setting], parent: QWidget | None = None, *, follows: bool = False) -> None:
        """`follows`: other content of the card stands above, so the first heading gets a line too."""
        super().__init__(parent)
        self.fields = [make_field(setting, self) for setting in settings]
        self._columns, self._follows = 2, follows
        self.shown: set[Field] = set(self.fields)
        self._has_headings = True
        self._fillers = [QWidget(self) for _ in range(MAX_COLUMNS)]
        self._rules, self._headings = dict[str, QWidget](), dict[str, QWidget]()
        for group in dict.fromkeys(field.setting.group for field in self.fields if field.setting.group):
            self._rules[group], self._headings[group] = card(role="rule"), QWidget(self)
            column(self._rules[group], label(group, theme.heading_font()), into=self._headings[group])
        self._grid = grid((), self, spacing=(2 * theme.SPACE, theme.SPACE + 4))
        self._flow()

    def show_only(self, keys: set[str], *, headings: bool = True) -> None:
        shown = {field for field in self.fields if field.setting.key in keys}
        if (shown, headings) != (self.shown, self._has_headings):
            self.shown, self._has_headings = shown, headings
            self._flow()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        spacing = 2 * theme.SPACE
        columns = max(1, min(MAX_COLUMNS, (self.width() + spacing) // (theme.scaled(COLUMN) + spacing)))
        if columns != self._columns:
            self._columns = columns
            self._flow()

    def _flow(self) -> None:
        columns, cells = self._columns, self._grid
        for widget in (*self.fields, *self._headings.values(), *self._fillers):
            cells.removeWidget(widget)
        for field in self.fields:
            set_shown(field, field in self.shown)
        place = across = filled = 0  # `filled`: columns of the first row with something in them
        group, groups = "", set[str]()
        for field in (field for field in self.fields if field in self.shown):
            span = columns if field.wide else 1
            if self._has_headings and field.setting.group != group:
                place, across, group = place + (across > 0), 0, field.setting.group
                if group:
                    set_shown(self._rules[group], place > 0 or self._follows)
                    cells.addWidget(self._headings[group], place, 0, 1, columns)
                    filled = filled or columns
                    place += 1
                    groups.add(group)
            if across + span > columns:
                place, across = place + 1, 0
            cells.addWidget(field, place, across, 1, span, Qt.AlignmentFlag.AlignTop)
            across += span
            filled = max(filled, across) if place == 0 else filled
        for name, heading in self._headings.items():
            set_shown(heading, name in groups)
        for i in range(MAX_COLUMNS):
            cells.setColumnStretch(i, 1 if i < columns else 0)
        # QGridLayout drops the spacing of an empty column, and the columns of two cards would not line up.
        for i in range(filled, columns):
            cells.addWidget(self._fillers[i], 0, i)
