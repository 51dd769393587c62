"""The runs that wait, in their order: reordered by dragging or with keys, edited, removed, paused.

It knows no queue: a page shows rows in it and does what its signals ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import (
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPoint,
    Qt,
    Signal,
)
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QAbstractItemView, QFrame, QHBoxLayout, QHeaderView, QMenu, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import CheckBox, ElidedLabel
from app.widgets.basic.labels import REMOVE_KEYS, button, label, plain_tip
from app.widgets.basic.number_format import DASH
from app.widgets.basic.tables import ROW_HEIGHT, BaseTable, DraggedRowsModel

Index = QModelIndex | QPersistentModelIndex
SHOWN_ROWS = 3
"""Rows in sight; a longer queue scrolls."""
_HEADS = ("Place", "Run", "Model", "Steps")
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A waiting run: its folder, its model, and how many steps it will take, None where that is not known. `has_begun`: it is to be
    resumed, so its settings stand and its folder stays."""

    path: Path
    model: str
    steps: int | None
    has_begun: bool = False


class QueueModel(DraggedRowsModel):
    """The rows in the order of the queue.

    Signals:
        dropped(from, to) – a row was dragged to a place, both from 0; the order changes when the queue says so.
    """

    DRAG_TYPE = "application/x-grpo-studio-queue-place"
    dropped = Signal(int, int)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: tuple[QueueRow, ...] = ()

    def set_rows(self, rows: Sequence[QueueRow]) -> None:
        self.beginResetModel()
        self.rows = tuple(rows)
        self.endResetModel()

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(_HEADS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _RIGHT if section in (0, 3) else _LEFT
        return _HEADS[section] if role == Qt.ItemDataRole.DisplayRole else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            steps = f"{row.steps:,} steps" if row.steps is not None else DASH
            steps = f"to step {row.steps:,}" if row.has_begun and row.steps is not None else steps
            return (str(index.row() + 1), row.path.name, "/".join(Path(row.model).parts[-2:]) or DASH, steps)[column]
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _RIGHT if column in (0, 3) else _LEFT
        if role == Qt.ItemDataRole.FontRole:
            return theme.figures_font()
        if role == Qt.ItemDataRole.ForegroundRole:
            return theme.palette().text if column == 1 else theme.palette().muted
        if role == Qt.ItemDataRole.ToolTipRole and column in (1, 2):
            return plain_tip(str(row.path) if column == 1 else row.model)
        return None

    # Dragging

    def flags(self, index: Index) -> Qt.ItemFlag:
        if not index.isValid():
            return Qt.ItemFlag.ItemIsDropEnabled  # between two rows; dropping onto one would mean nothing
        return super().flags(index) | Qt.ItemFlag.ItemIsDragEnabled

    def drop_row(self, origin: int, target: int) -> None:
        self.dropped.emit(origin, target - 1 if target > origin else target)


class QueuePanel(QFrame):
    """A card with the waiting runs and what can be done with them. Hidden while there is nothing to say.

    Attributes:
        table, model – the rows.
        status – a sentence about the queue.
        pause, after_failure – the pause button and the check box of pausing after a failure.
        next_button, edit_button, remove_button – of the selected run.

    Signals:
        moved(Path, place) – give this run another place, from 0.
        removed(Path), edit_requested(Path) – of a run.
        pause_requested(bool), pause_after_failure_requested(bool) – of the queue.
    """

    moved = Signal(object, int)
    removed = Signal(object)
    edit_requested = Signal(object)
    pause_requested = Signal(bool)
    pause_after_failure_requested = Signal(bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self._is_paused = False
        self._build_table()
        self.status = ElidedLabel()
        self.status.setProperty("role", "muted")
        self.next_button = button("Run next", self.run_next, tip="Put the run first (Alt+Home)")
        self.edit_button = button("Edit settings", self._edit, tip="Load its settings into the form (Return)")
        self.remove_button = button("Remove", self._remove)
        self.after_failure = CheckBox("Pause after a failure")
        self.after_failure.clicked.connect(self.pause_after_failure_requested)
        self.pause = button("Pause", lambda: self.pause_requested.emit(not self._is_paused))
        self._lay_out()
        self._show_choice()
        self.hide()

    def _build_table(self) -> None:
        self.model = QueueModel(self)
        self.model.dropped.connect(self._move)
        self.table = BaseTable()
        self.table.setModel(self.model)
        self.table.setAccessibleName("Waiting runs, in their order")
        self.table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.table.setDragDropMode(QAbstractItemView.DragDropMode.InternalMove)
        self.table.setDragDropOverwriteMode(False)
        self.table.setDropIndicatorShown(True)
        self.table.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.table.customContextMenuRequested.connect(self._show_menu)
        self.table.activated.connect(lambda _: self._edit())
        self.table.selectionModel().selectionChanged.connect(lambda *_: self._show_choice())
        head = self.table.horizontalHeader()
        head.hide()  # for a copy it names the columns; here they explain themselves
        head.setSectionResizeMode(1, QHeaderView.ResizeMode.Stretch)
        self.table.setTextElideMode(Qt.TextElideMode.ElideMiddle)  # names of runs and models differ at their end
        for column, width in ((0, 40), (2, 260), (3, 100)):
            self.table.setColumnWidth(column, theme.scaled(width))
        for keys, slot in (("Alt+Up", lambda: self._shift(-1)), ("Alt+Down", lambda: self._shift(1)),
                           ("Alt+Home", self.run_next), (REMOVE_KEYS, self._remove)):  # fmt: skip
            shortcut = QShortcut(QKeySequence(keys), self.table, slot)
            shortcut.setContext(Qt.ShortcutContext.WidgetShortcut)

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(theme.SPACE)
        head.addWidget(label("Queue", theme.heading_font()))
        head.addWidget(self.status, 1)
        for part in (self.next_button, self.edit_button, self.remove_button, self.after_failure, self.pause):
            head.addWidget(part)
        column = QVBoxLayout(self)
        column.setContentsMargins(2 * theme.SPACE, theme.SPACE, 2 * theme.SPACE, theme.SPACE)
        column.setSpacing(theme.SPACE)
        column.addLayout(head)
        column.addWidget(self.table)

    # Showing

    def show_queue(
        self, rows: Sequence[QueueRow], status: str, *, is_paused: bool = False, pauses_after_failure: bool = False
    ) -> None:
        """Show these runs and a sentence; without either the panel hides."""
        if tuple(rows) != self.model.rows:  # the selected run stays selected wherever it goes
            chosen = self.selected()
            self.model.set_rows(rows)
            self._choose(chosen.path if chosen is not None else None)
            self._fit_height()
        self._is_paused = is_paused
        self.status.setText(status)
        self.status.setToolTip(plain_tip(status))
        self.pause.setText("Resume" if is_paused else "Pause")
        self.pause.setToolTip("Let the queue go on" if is_paused else "Start no other run; one that trains goes on")
        self.after_failure.setChecked(pauses_after_failure)
        self.table.setVisible(bool(rows))
        for part in (self.next_button, self.edit_button, self.remove_button, self.after_failure):
            part.setVisible(bool(rows))
        self.setVisible(bool(rows) or bool(status))

    def _fit_height(self) -> None:
        shown = min(len(self.model.rows), SHOWN_ROWS)
        self.table.setFixedHeight(shown * theme.scaled(ROW_HEIGHT) + 2)

    def selected(self) -> QueueRow | None:
        chosen = self.table.selected_rows()
        return self.model.rows[chosen[0]] if chosen else None

    def _choose(self, path: Path | None) -> None:
        places = [place for place, row in enumerate(self.model.rows) if row.path == path]
        if places:
            self.table.selectRow(places[0])
        self._show_choice()

    def _show_choice(self) -> None:
        chosen = self.table.selected_rows()
        has_begun = bool(chosen) and self.model.rows[chosen[0]].has_begun
        goes = "Out of the queue; the run stays as it is" if has_begun else "Out of the queue and into the trash"
        self.remove_button.setToolTip(f"{goes} ({REMOVE_KEYS})")
        for part, enabled in (
            (self.next_button, bool(chosen) and chosen[0] > 0),
            (self.edit_button, bool(chosen) and not has_begun),
            (self.remove_button, bool(chosen)),
        ):
            if not enabled and part.hasFocus():  # Qt would pass the focus on to the next button, Remove in the end
                self.table.setFocus(Qt.FocusReason.OtherFocusReason)
            part.setEnabled(enabled)

    def _show_menu(self, where: QPoint) -> None:
        row = self.selected()
        if row is None:
            return
        place, last = self.model.rows.index(row), len(self.model.rows) - 1
        menu = QMenu(self)
        for text, slot, enabled in (
            ("Run next", self.run_next, place > 0),
            ("Move up", lambda: self._shift(-1), place > 0),
            ("Move down", lambda: self._shift(1), place < last),
            ("Edit settings", self._edit, not row.has_begun),
            ("Remove", self._remove, True),
        ):
            menu.addAction(text, slot).setEnabled(enabled)
        menu.popup(self.table.viewport().mapToGlobal(where))

    # What the user asks for

    def run_next(self) -> None:
        """Put the selected run first."""
        row = self.selected()
        if row is not None:
            self.moved.emit(row.path, 0)

    def _move(self, origin: int, place: int) -> None:
        if origin != place and origin < len(self.model.rows):
            self.moved.emit(self.model.rows[origin].path, place)

    def _shift(self, by: int) -> None:
        row = self.selected()
        if row is not None:
            place = self.model.rows.index(row) + by
            if 0 <= place < len(self.model.rows):
                self.moved.emit(row.path, place)

    def _edit(self) -> None:
        row = self.selected()
        if row is not None and not row.has_begun:
            self.edit_requested.emit(row.path)

    def _remove(self) -> None:
        row = self.selected()
        if row is not None:
            self.removed.emit(row.path)
