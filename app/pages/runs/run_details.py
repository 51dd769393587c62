"""What is known of the selected run beside the table: title, note and tags to edit, its family, its settings, its disk use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from PySide6.QtCore import QEvent, QObject, Qt, QTimer, Signal
from PySide6.QtWidgets import (
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QTreeWidget,
    QTreeWidgetItem,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton, ProseEdit
from app.widgets.basic.labels import label, plain_tip
from app.widgets.basic.layout import TabArea, clear_layout, set_shown
from app.widgets.basic.number_format import file_size, moment
from app.widgets.run_header import StateChip
from backend.config.config import SETTINGS
from backend.runs.archive import Summary
from backend.runs.disk_use import PARTS
from backend.runs.run_record import RunRecord, tags_in, value_text

# A run's family as a tree: the run that all were cloned from at the top, each clone below its parent.

MOST_ROWS = 8
"""Rows that are visible without scrolling."""


class LineageTree(QTreeWidget):
    """Signals:
    run_chosen(name) – a run of the family was clicked, or chosen with Enter.
    """

    run_chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setHeaderHidden(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setAccessibleName("Parents and clones of the run")
        self.setIndentation(theme.scaled(16))
        self.setItemsExpandable(False)
        self.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.itemClicked.connect(lambda item, _column: self.run_chosen.emit(item.data(0, Qt.ItemDataRole.UserRole)))
        self.itemActivated.connect(lambda item, _column: self.run_chosen.emit(item.data(0, Qt.ItemDataRole.UserRole)))

    def show_family(self, family: Mapping[str, Sequence[str]], titles: Mapping[str, str], current: str) -> None:
        """`family`: run → its clones, the oldest first (`RunList.family_of`); `titles`: run → its title. A run without a title is no
        longer there."""
        self.clear()
        items: dict[str, QTreeWidgetItem] = {}
        for name, children in family.items():
            item = items.get(name) or self._item(name, titles, current)
            if name not in items:
                self.addTopLevelItem(item)
            for child in children:
                if child not in items:  # a hand-edited parent.json could close a circle
                    items[child] = self._item(child, titles, current)
                    item.addChild(items[child])
            items[name] = item
        self.expandAll()
        self.setFixedHeight(min(len(items), MOST_ROWS) * self.sizeHintForRow(0) + 2 * self.frameWidth() + 2)

    def _item(self, name: str, titles: Mapping[str, str], current: str) -> QTreeWidgetItem:
        item = QTreeWidgetItem([titles.get(name, f"{name} (not here)")])
        item.setData(0, Qt.ItemDataRole.UserRole, name)
        item.setToolTip(0, plain_tip(name))
        font = theme.heading_font() if name == current else theme.body_font()
        item.setFont(0, font)
        if name not in titles:
            item.setForeground(0, theme.palette().muted)
        return item


# ── run details ──────────────────────────────────────────────────────────────────────────────────────────────────────

SAVE_AFTER_MS = 600
"""How long after the last key a note is saved; leaving the field saves it at once."""
_FAINT_PARTS = 0.005
"""Parts of the disk use below this share are not listed."""


class RunDetails(TabArea):
    """Shows one run, or how many are selected.

    Signals:
        notes_changed(path, changes) – the user has changed fields of the notes (`backend.runs.run_record`).
        run_chosen(name) – a relative was clicked.
        free_requested – *Free space…* was pressed.
    """

    notes_changed = Signal(object, dict)
    run_chosen = Signal(str)
    free_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._record: RunRecord | None = None
        self._family: Mapping[str, Sequence[str]] = {}
        self._save_timer = QTimer(self, singleShot=True, interval=SAVE_AFTER_MS)
        self._save_timer.timeout.connect(self.save)
        self._build()
        self._lay_out()
        self.show_runs([], {}, {})

    def _build(self) -> None:
        self.title, self.tags, self.note = QLineEdit(), QLineEdit(), ProseEdit(3)
        self.title.setAccessibleName("Title")
        self.title.setToolTip(
            "Shown in place of the folder's name, which stays: exports and clones know the run by it."
        )
        self.tags.setAccessibleName("Tags")
        self.tags.setPlaceholderText("math, first-try")
        self.note.setAccessibleName("Note")
        self.note.setPlaceholderText("What was tried, and what came of it")
        for edit in (self.title, self.tags):
            edit.textEdited.connect(lambda _text: self._save_timer.start())
            edit.editingFinished.connect(self.save)
        self.note.textChanged.connect(self._on_note)
        self.note.installEventFilter(self)
        self.folder = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self.chip, self.when = StateChip(), label(role="muted")
        self.problem = label(role="problem", wrap=True)
        self.family = LineageTree()
        self.family.run_chosen.connect(self.run_chosen)
        self.machines = label(wrap=True)
        self.settings, self.disk = QGridLayout(), QGridLayout()
        self.free = LinkButton("Free space…")
        self.free.clicked.connect(self.free_requested)
        self.several = label(role="muted", wrap=True, align=Qt.AlignmentFlag.AlignTop)

    def _lay_out(self) -> None:
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName("Details of the run")
        page, self._one = QWidget(), QWidget()
        page.setObjectName("page")
        state = QHBoxLayout()
        state.addWidget(self.chip)
        state.addStretch(1)
        state.addWidget(self.when)
        column = QVBoxLayout(self._one)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addWidget(self.title)
        column.addWidget(self.folder)
        column.addLayout(state)
        column.addWidget(self.problem)
        self._heading(column, "Tags")
        column.addWidget(self.tags)
        self._heading(column, "Note")
        column.addWidget(self.note)
        self._family_heading = self._heading(column, "Cloned from and to")
        column.addWidget(self.family)
        self._machines_heading = self._heading(column, "Machines")
        column.addWidget(self.machines)
        self._heading(column, "Settings that differ from the defaults")
        column.addLayout(self.settings)
        self._disk_heading = self._heading(column, "Disk")
        column.addLayout(self.disk)
        column.addWidget(self.free, 0, Qt.AlignmentFlag.AlignLeft)
        outer = QVBoxLayout(page)
        outer.setContentsMargins(12, 12, 12, 12)
        outer.addWidget(self.several)
        outer.addWidget(self._one)
        outer.addStretch(1)
        self.setWidget(page)
        for grid in (self.settings, self.disk):
            grid.setContentsMargins(0, 0, 0, 0)
            grid.setHorizontalSpacing(theme.SPACE)
            grid.setVerticalSpacing(2)
            grid.setColumnStretch(1, 1)

    def _heading(self, column: QVBoxLayout, text: str) -> QWidget:
        column.addSpacing(6)
        heading = label(text, theme.caption_font(), "muted")
        column.addWidget(heading)
        return heading

    def show_runs(
        self, records: Sequence[RunRecord], family: Mapping[str, Sequence[str]], titles: Mapping[str, str]
    ) -> None:
        """Show a run with its family (`RunList.family_of`) and the titles of all runs; of none or several, how many they are."""
        record = records[0] if len(records) == 1 else None
        is_same = self._record is not None and record is not None and self._record.summary.path == record.summary.path
        if not is_same:
            self.save()
        set_shown(self._one, record is not None)
        set_shown(self.several, record is None)
        total = file_size(sum(one.bytes for one in records))
        self.several.setText(f"{len(records)} runs selected, {total} on disk." if records else "No run is selected.")
        if record is None:
            self._record = None
        elif record != self._record or family != self._family:
            self._show(record, family, titles, is_same)

    def _show(
        self, record: RunRecord, family: Mapping[str, Sequence[str]], titles: Mapping[str, str], is_same: bool
    ) -> None:
        self._record, self._family = record, dict(family)
        about, notes = record.summary, record.notes
        if not (is_same and self._save_timer.isActive()):  # the user is typing, and is ahead of what was saved
            self._put(self.title, notes.title)
            self._put(self.tags, ", ".join(notes.tags))
            if self.note.toPlainText() != notes.note:
                self.note.blockSignals(True)
                self.note.setPlainText(notes.note)
                self.note.blockSignals(False)
        self.title.setPlaceholderText(about.name)
        self.folder.setText(about.name)
        set_shown(self.folder, bool(notes.title))  # without a title the name is in its place
        self.folder.setToolTip(plain_tip(about.path))
        self.chip.show_state(about.state)
        self.when.setText(moment(about.began) if about.began else "")
        self.problem.setText(record.notes_problem)
        for widget in (self.title, self.tags, self.note):
            widget.setEnabled(not record.notes_problem)
        set_shown(self.problem, bool(record.notes_problem))
        for part in (self._family_heading, self.family):
            set_shown(part, bool(family))
        self.family.show_family(family, titles, about.name)
        self.machines.setText(_machines(about))
        for part in (self._machines_heading, self.machines):
            set_shown(part, bool(self.machines.text()))
        settings = [(SETTINGS[key].label, value_text(value)) for key, value in record.settings.items()]
        _fill(self.settings, settings or [("All are the defaults.", "")])
        listed = [
            (PARTS[part], file_size(size)) for part, size in record.disk.items() if size > record.bytes * _FAINT_PARTS
        ]
        _fill(self.disk, [("Together", file_size(record.bytes)), *listed])

    def _put(self, edit: QLineEdit, text: str) -> None:
        if edit.text() != text:
            edit.setText(text)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self.note and event.type() == QEvent.Type.FocusOut:
            self.save()
        return super().eventFilter(watched, event)

    def _on_note(self) -> None:
        self._save_timer.start()

    def save(self) -> None:
        """Emit what was edited and is not saved yet."""
        self._save_timer.stop()
        if self._record is None or self._record.notes_problem:
            return
        now = {
            "title": self.title.text().strip(),
            "tags": tags_in(self.tags.text()),
            "note": self.note.toPlainText().rstrip(),
        }
        changes = {key: value for key, value in now.items() if value != getattr(self._record.notes, key)}
        if changes:
            self.notes_changed.emit(Path(self._record.summary.path), changes)


def _fill(grid: QGridLayout, rows: Sequence[tuple[str, str]]) -> None:
    """Names at the left, values at the right of them, wrapped."""
    clear_layout(grid)
    for row, (name, value) in enumerate(rows):
        grid.addWidget(label(name, role="muted", wrap=True), row, 0, Qt.AlignmentFlag.AlignTop)
        grid.addWidget(
            label(value, theme.figures_font(), wrap=True, selectable=True), row, 1, Qt.AlignmentFlag.AlignTop
        )


def _machines(about: Summary) -> str:
    """The machines of a run on several ranks, how many of these each has, and "" for a run on one."""
    if (about.ranks or 1) < 2:
        return ""
    counts = Counter(about.machines)
    named = [f"{name} ({count} ranks)" if count > 1 else name for name, count in counts.items()]
    return ", ".join(named) or f"{about.ranks} ranks"
