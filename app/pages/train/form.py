"""The form of the Train page in two densities: the essentials on one screen, or all settings in their blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from PySide6.QtCore import QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QApplication, QBoxLayout, QFrame, QWidget

from app import theme
from app.pages.train.tools_field import ToolsField
from app.state.draft import Draft
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import label, on_remove, plain_tip
from app.widgets.basic.layout import (
    FlowLayout,
    TabArea,
    card,
    column,
    configure,
    grid,
    reserve_gutter,
    row,
    set_shown,
    set_tab_order,
)
from app.widgets.form.fields import Field, field_of, make_field
from app.widgets.form.value_text import value_label
from backend.config.checks import default_score
from backend.config.config import SECTIONS, SETTINGS
from backend.config.setting import Setting
from backend.utils.errors import ConfigProblem

COLUMN, MAX_COLUMNS = 200, 4
ESSENTIALS = {  # block → its settings among the essentials
    "model_data": ("model", "data", "teacher_model"),
    "fine_tune": ("train_mode", "train_type", "rank"),
    "training": ("iters", "batch_size", "learning_rate"),
    "generation": ("group_size", "max_completion_length", "temperature", "beta", "grpo_loss_type"),
}
ESSENTIAL = frozenset(key for keys in ESSENTIALS.values() for key in keys)
BUILT_FIRST = ESSENTIAL | {key for key in SETTINGS if SETTINGS[key].kind in ("model", "dataset", "adapter", "file")}
"""Settings whose fields are built with the form: those on show, and those that Train connects to its pickers."""
ROOMY, FEW_COLUMNS = 740, 3  # room from which a block's essentials stand in one row, and the columns of a narrower form
MAX_CHARS = 28  # of a value on a chip


class Form(TabArea):
    edited = Signal(str, object)  # key, raw value
    focused = Signal(str)  # key

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, horizontalScrollBarPolicy=Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.fields: dict[str, Field] = {}
        self.is_compact = False
        self._blocks: dict[QWidget, tuple[FieldGrid, ...]] = {}  # of all settings, from top to bottom
        self._grids: list[FieldGrid] = []
        self._applying = set(SETTINGS)
        self.page = configure(QWidget(self), objectName="page")
        self.essentials = configure(Essentials(self), visible=False)
        self.column = column(self.essentials, into=self.page, margins=(0, 0, theme.GUTTER, 2 * theme.SPACE))
        self.setWidget(self.page)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        reserve_gutter(self, self.column)
        self.essentials.fit(event.size().width())

    def add_block(self, block: QWidget, *grids: FieldGrid) -> None:
        """Add a block of all settings, which is shown while a setting of these grids applies."""
        self._blocks[block] = grids
        self._grids += (each for each in grids if each not in self._grids)
        self.column.addWidget(block)
        self._list_fields()

    def build_next(self) -> bool:
        """Build the missing fields of one grid; False if there are none."""
        for each in self._grids:
            if len(each.fields) < len(each.settings):
                each.build(SETTINGS)
                self._list_fields()
                return True
        return False

    def _list_fields(self) -> None:
        known, self.fields = self.fields, {field.setting.key: field for each in self._grids for field in each.fields}
        for key in self.fields.keys() - known:
            self.fields[key].edited.connect(self.edited)

    def set_compact(self, is_compact: bool) -> None:
        """Show the essentials, or all settings. Both show the same fields, which move."""
        self.is_compact = is_compact
        self._show_blocks()
        essential = {self.fields[key] for key in ESSENTIAL}
        for field in essential:  # in narrow columns the caption is cut, and the unit says as much
            set_shown(field.hint, not is_compact and bool(field.hint.text()))
            if field.explanation is not None:
                set_shown(field.explanation, not is_compact)
        lent = essential if is_compact else set[Field]()
        for each in self._grids:
            each.lend(lent)
        if is_compact:
            self.essentials.flow()
        set_shown(self.essentials, is_compact)
        self.verticalScrollBar().setValue(0)

    def show_applying(self, values: Mapping[str, Any]) -> set[str]:
        """Hide what does not apply with these values, and return the other keys. What stays visible is disabled
        instead, and so are the essentials that fit the mode."""
        keys = self._applying = {key for key, setting in SETTINGS.items() if setting.applies(values)}
        if not values["best_metric"] and default_score(values) != "reward":
            keys.discard("best_is_lowest")  # of a loss or divergence the lowest is the best, whatever the file says
        for key, field in self.fields.items():
            if field.setting.stays_visible or key in ESSENTIAL:
                field.show_idle(key not in keys)
        for each in self._grids:
            each.show_applying(keys)
        self.essentials.show_fitting({key for key in ESSENTIAL if SETTINGS[key].fits_mode(values)})
        self._show_blocks()
        return keys

    def _show_blocks(self) -> None:
        for block, grids in self._blocks.items():
            settings = [setting for each in grids for setting in each.settings]
            set_shown(block, not self.is_compact and any(setting.key in self._applying for setting in settings))

    def show_problems(self, problems: Iterable[ConfigProblem], warnings: Iterable[ConfigProblem]) -> None:
        wrong = {problem.setting: problem.sentence for problem in reversed(list(problems))}
        unusual = {warning.setting: warning.sentence for warning in warnings}
        for key, field in self.fields.items():
            field.show_problem(wrong.get(key, ""), unusual.get(key, ""))

    def reveal(self, key: str) -> bool:
        """Focus a field and scroll to it; False if the setting does not apply now."""
        if (field := self.fields.get(key)) is None or field.isHidden():
            return False
        if not field.control.isEnabled():
            self.scroll_to(field)
            return False
        self._focus(field)
        return True

    def focus_group(self, direction: int) -> None:
        """Focus the first field of the next group of settings (`direction` 1), or of this or the last (−1)."""
        if (focused := QApplication.focusWidget()) is None or not self.page.isAncestorOf(focused):
            here = (self.verticalScrollBar().value() - 1, 0)
        else:
            here = self._place(field_of(focused) or focused)
        starts = [self.fields[keys[0]] for keys in ESSENTIALS.values()] if self.is_compact else list[Field]()
        for each in () if self.is_compact else self._grids:
            starts += {field.setting.group: field for field in reversed(each.fields) if field in each.applying}.values()
        places = {self._place(start): start for start in starts if start.isVisible()}
        beyond = [place for place in places if (place > here if direction > 0 else place < here)]
        if beyond:
            self._focus(places[min(beyond) if direction > 0 else max(beyond)])

    def _place(self, part: QWidget) -> tuple[int, int]:
        corner = part.mapTo(self.page, QPoint())
        return corner.y(), corner.x()

    def _focus(self, field: Field) -> None:
        field.control.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.scroll_to(field)

    def follow_focus(self) -> None:
        super().follow_focus()
        field = field_of(QApplication.focusWidget())
        if field is not None and self.fields.get(field.setting.key) is field:
            self.focused.emit(field.setting.key)

    def scroll_to(self, widget: QWidget) -> None:
        QTimer.singleShot(0, self, lambda: self.ensureWidgetVisible(widget, 0, 8 * theme.SPACE))


class SettingsCard(QFrame):
    def __init__(self, title: str, parent: QWidget | None = None, *, is_compact: bool = False) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.title = label(title, theme.heading_font(), parent=self)
        gap = theme.SPACE if is_compact else 12
        self.parts = column(spacing=gap)
        margins = (2 * theme.SPACE, gap, 2 * theme.SPACE, gap + 2)
        column(self.title, self.parts, None, into=self, spacing=gap, margins=margins)


class Essentials(QWidget):
    """What users change most, in the same places for every config of a mode, whatever applies."""

    def __init__(self, form: Form) -> None:
        super().__init__(form.page)
        self._form = form
        self.cards = {key: SettingsCard(SECTIONS[key], self, is_compact=True) for key in ESSENTIALS}
        self._fitting = set(ESSENTIAL)
        self._is_narrow = False
        self._cells = {key: grid((), spacing=(2 * theme.SPACE, theme.SPACE)) for key in ESSENTIALS}
        for key, cells in self._cells.items():
            self.cards[key].parts.addLayout(cells)
        first, *beside, last = self.cards
        self._middle = row(*((self.cards[key], len(ESSENTIALS[key])) for key in beside))
        self.foot = column()
        column(self.cards[first], self._middle, self.cards[last], self.foot, None, into=self)

    def show_fitting(self, keys: set[str]) -> None:
        if keys != self._fitting:
            self._fitting = keys
            if not self.isHidden():
                self.flow()

    def fit(self, room: int) -> None:
        """Flow the fields into `room` pixels; the own width never falls below that of the rows as they are."""
        if (room < theme.scaled(ROOMY)) != self._is_narrow:
            self._is_narrow = not self._is_narrow
            if not self.isHidden():  # else the fields are among all settings
                self.flow()

    def flow(self) -> None:
        is_narrow, directions = self._is_narrow, QBoxLayout.Direction
        self._middle.setDirection(directions.TopToBottom if is_narrow else directions.LeftToRight)
        for block, cells in self._cells.items():
            fields = [self._form.fields[key] for key in ESSENTIALS[block]]
            fitting = [field for field in fields if field.setting.key in self._fitting]
            set_shown(self.cards[block], bool(fitting))
            few, many = (1, 2) if fields[-1].wide else (FEW_COLUMNS, len(fields))
            columns = min(len(fitting), few if is_narrow else many)
            for field in fields:
                cells.removeWidget(field)
            for place, field in enumerate(fitting):
                cells.addWidget(field, *divmod(place, columns), Qt.AlignmentFlag.AlignTop)
            for place, field in enumerate(fields):
                set_shown(field, field in fitting)
                cells.setColumnStretch(place, 1 if place < columns else 0)


class FieldGrid(QWidget):
    """Fields in as many columns as the width allows, below the headings of their groups."""

    def __init__(self, settings: Iterable[Setting], parent: QWidget | None = None, *, follows: bool = False) -> None:
        """`follows`: other content of the card stands above, so the first heading gets a line too."""
        super().__init__(parent)
        self.settings, self.fields = list(settings), list[Field]()
        self._columns, self._follows = 2, follows
        self.applying, self._lent = set[Field](), set[Field]()
        self._fillers = [QWidget(self) for _ in range(MAX_COLUMNS)]
        self._rules, self._headings = dict[str, QWidget](), dict[str, QWidget]()
        for group in dict.fromkeys(setting.group for setting in self.settings if setting.group):
            self._rules[group], self._headings[group] = card(role="rule"), QWidget(self)
            column(self._rules[group], label(group, theme.heading_font()), into=self._headings[group])
        self._grid = grid((), self, spacing=(2 * theme.SPACE, theme.SPACE + 4))
        self.build(BUILT_FIRST)

    def build(self, keys: Collection[str]) -> None:
        built = {field.setting.key: field for field in self.fields}
        wanted = [each for each in self.settings if each.key in keys]
        make = {"tools": ToolsField}  # elsewhere it is a list of names
        self.fields = [built.get(each.key) or make.get(each.key, make_field)(each, self) for each in wanted]
        self.applying = set(self.fields)
        self._flow()

    def show_applying(self, keys: set[str]) -> None:
        applying = {each for each in self.fields if each.setting.key in keys or each.setting.stays_visible}
        if applying != self.applying:
            self.applying = applying
            self._flow()

    def lend(self, fields: set[Field]) -> None:
        self._lent = fields
        self._flow()

    def resizeEvent(self, event: QResizeEvent) -> None:
        spacing = 2 * theme.SPACE
        columns = max(1, min(MAX_COLUMNS, (self.width() + spacing) // (theme.scaled(COLUMN) + spacing)))
        if columns != self._columns:
            self._columns = columns
            self._flow()

    def _flow(self) -> None:
        columns, cells = self._columns, self._grid
        own = [field for field in self.fields if field not in self._lent]
        for widget in (*own, *self._headings.values(), *self._fillers):
            cells.removeWidget(widget)
        place = across = filled = 0  # `filled`: columns of the first row with something in them
        group, groups = "", set[str]()
        for field in (field for field in own if field in self.applying):
            span = columns if field.wide else 1
            if field.setting.group != group:
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
        for field in own:  # after they have a parent again: a new one hides what it gets
            set_shown(field, field in self.applying)
        for name, heading in self._headings.items():
            set_shown(heading, name in groups)
        for i in range(MAX_COLUMNS):
            cells.setColumnStretch(i, 1 if i < columns else 0)
        # QGridLayout drops the spacing of an empty column, and the columns of two cards would not line up.
        for i in range(filled, columns):
            cells.addWidget(self._fillers[i], 0, i)


class ChangedChips(QWidget):
    pressed = Signal(str)  # key

    def __init__(self, draft: Draft, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._draft = draft
        self.count = label(role="muted", minimumHeight=theme.scaled(24))
        self.chips: dict[str, Chip] = {}
        self.after: QWidget = self  # the widget before the chips in the order of Tab
        line = QWidget(self)
        self._flow = FlowLayout(line, theme.SPACE, 6)
        self._flow.addWidget(self.count)
        column(line, into=self, margins=(theme.SPACE, 0, theme.SPACE, 0))

    def show_changes(self, values: Mapping[str, Any]) -> None:
        keys = list(self.chips)
        here = QApplication.focusWidget()
        focused = next((i for i, chip in enumerate(self.chips.values()) if here and chip.isAncestorOf(here)), -1)
        gone = [self.chips.pop(key) for key in keys if key not in values]
        self.count.setText(f"{len(values)} changed" if values else "Everything else is at its default.")
        for key, value in values.items():
            if (chip := self.chips.pop(key, None)) is None:
                chip = Chip(SETTINGS[key], self)
                chip.text.clicked.connect(partial(self.pressed.emit, key))
                chip.remove.clicked.connect(partial(self._draft.set, key, SETTINGS[key].default))
                self._flow.addWidget(chip)
            self.chips[key] = chip  # all in the order of `values`
            chip.show_value(value)
        if gone and focused >= 0 and self.chips:  # Qt would move the focus to the next widget in line
            list(self.chips.values())[min(focused, len(self.chips) - 1)].text.setFocus()
        set_tab_order(self.after, *self.tab_stops)
        for chip in gone:
            self._flow.removeWidget(chip)
            chip.hide()
            chip.deleteLater()
        if keys != list(self.chips):
            self._flow.put_in_order([self.count, *self.chips.values()])

    @property
    def tab_stops(self) -> list[QWidget]:
        return [stop for chip in self.chips.values() for stop in (chip.text, chip.remove)]


class Chip(QFrame):
    def __init__(self, setting: Setting, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("role", "chip")
        self._setting = setting
        self.text = LinkButton("", role="chip")
        self.remove = IconButton("close", name=f"Reset {setting.label}", role="chip")
        self.remove.setToolTip(plain_tip(f"Reset to the default: {value_label(setting, setting.default)}"))
        self.remove.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        on_remove(self, self.remove.click)
        row(self.text, self.remove, into=self, spacing=0, margins=(theme.SPACE, 0, 2, 0))

    def show_value(self, value: Any) -> None:
        shown = value_label(self._setting, value)
        text = shown if len(shown) <= MAX_CHARS else f"{shown[: MAX_CHARS - 1]}…"
        whole = f"{self._setting.label}: {shown}"
        configure(self.text, text=f"{self._setting.label}  {text}".replace("&", "&&"), name=whole, tip=plain_tip(whole))
