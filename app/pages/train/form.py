"""A form: cards of fields in a scroll area. The page decides which fields are in which card, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from PySide6.QtCore import QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QApplication, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.layout import reserve_gutter
from app.widgets.basic.tab_area import TabArea
from app.widgets.form.field import Field, field_of
from app.widgets.form.settings_card import SettingsCard
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
