"""A card of the form: the settings of a section, the basic ones first shown alone."""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import partial

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QToolButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.flow_layout import FlowLayout
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels_and_buttons import PlainLabel
from app.widgets.basic.layout import set_shown
from app.widgets.form.field import Field
from app.widgets.form.field_grid import FieldGrid
from backend.spec.setting import Setting


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
