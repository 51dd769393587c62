"""The runs that wait, in their order: reordered by dragging or with keys, edited, removed, paused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QModelIndex, QObject, QPersistentModelIndex, QPoint, Qt, Signal
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QAbstractItemView, QFrame, QHeaderView, QMenu, QWidget

from app import theme
from app.state.session import Session
from app.widgets.basic.controls import CheckBox, ElidedLabel
from app.widgets.basic.labels import REMOVE_KEYS, button, label, plain_tip
from app.widgets.basic.layout import column, row
from app.widgets.basic.number_format import DASH
from app.widgets.basic.tables import ROW_HEIGHT, BaseTable, DraggedRowsModel
from backend.runs.archive import raw_settings
from backend.runs.queue import is_fresh
from backend.runs.run_folder import RunFolder

Index = QModelIndex | QPersistentModelIndex
SHOWN_ROWS = 3
"""Rows in sight."""
HEADS = ("Place", "Run", "Model", "Steps")


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A waiting run. One that `has_begun` will be resumed, so its settings are fixed."""

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
        return 0 if parent.isValid() else len(HEADS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        is_title = orientation == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole
        return HEADS[section] if is_title else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        run, place = self.rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            steps = DASH if run.steps is None else f"to step {run.steps:,}" if run.has_begun else f"{run.steps:,} steps"
            model = "/".join(Path(run.model).parts[-2:]) or DASH
            return (str(index.row() + 1), run.path.name, model, steps)[place]
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if place in (0, 3) else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        if role == Qt.ItemDataRole.FontRole:
            return theme.figures_font()
        if role == Qt.ItemDataRole.ForegroundRole:
            return theme.palette().text if place == 1 else theme.palette().muted
        if role == Qt.ItemDataRole.ToolTipRole and place in (1, 2):
            return plain_tip(str(run.path) if place == 1 else run.model)
        return None

    def flags(self, index: Index) -> Qt.ItemFlag:
        if not index.isValid():
            return Qt.ItemFlag.ItemIsDropEnabled  # between two rows; dropping onto one would mean nothing
        return super().flags(index) | Qt.ItemFlag.ItemIsDragEnabled

    def drop_row(self, origin: int, target: int) -> None:
        self.dropped.emit(origin, target - 1 if target > origin else target)


class QueuePanel(QFrame):
    """A card with the waiting runs and what can be done with them. Hidden while there is nothing to say."""

    moved = Signal(object, int)  # a run's path, and its new place from 0
    removed = Signal(object)  # a run's path
    edit_requested = Signal(object)  # a run's path
    pause_requested = Signal(bool)
    pause_after_failure_requested = Signal(bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self._is_paused = False
        self.model = QueueModel(self)
        self.model.dropped.connect(self._move)
        self.table = BaseTable()
        self.table.setModel(self.model)
        self.table.setAccessibleName("Waiting runs, in their order")
        self.table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.table.setDragDropMode(QAbstractItemView.DragDropMode.InternalMove)
        self.table.setDragDropOverwriteMode(False)
        self.table.setDropIndicatorShown(True)
        self.table.setTextElideMode(Qt.TextElideMode.ElideMiddle)  # names of runs and models differ at their end
        self.table.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.table.customContextMenuRequested.connect(self._show_menu)
        self.table.activated.connect(lambda _: self._edit())
        self.table.selectionModel().selectionChanged.connect(lambda *_: self._show_choice())
        head = self.table.horizontalHeader()
        head.hide()  # for a copy it names the columns; here they explain themselves
        head.setSectionResizeMode(1, QHeaderView.ResizeMode.Stretch)
        for place, width in ((0, 40), (2, 260), (3, 100)):
            self.table.setColumnWidth(place, theme.scaled(width))
        keys = {
            "Alt+Up": lambda: self._shift(-1),
            "Alt+Down": lambda: self._shift(1),
            "Alt+Home": self.run_next,
            REMOVE_KEYS: self._remove,
        }
        for sequence, slot in keys.items():
            shortcut = QShortcut(QKeySequence(sequence), self.table, slot)
            shortcut.setContext(Qt.ShortcutContext.WidgetShortcut)
        self.status = ElidedLabel()
        self.status.setProperty("role", "muted")
        self.next_button = button("Run next", self.run_next, tip="Put the run first (Alt+Home)")
        self.edit_button = button("Edit settings", self._edit, tip="Load its settings into the form (Return)")
        self.remove_button = button("Remove", self._remove)
        self.after_failure = CheckBox("Pause after a failure")
        self.after_failure.clicked.connect(self.pause_after_failure_requested)
        self.pause = button("Pause", lambda: self.pause_requested.emit(not self._is_paused))
        self._parts = (self.next_button, self.edit_button, self.remove_button, self.after_failure)
        title = label("Queue", theme.heading_font())
        margins = (2 * theme.SPACE, theme.SPACE, 2 * theme.SPACE, theme.SPACE)
        column(row(title, (self.status, 1), *self._parts, self.pause), self.table, into=self, margins=margins)
        self._show_choice()
        self.hide()

    def show_queue(
        self, rows: Sequence[QueueRow], status: str, *, is_paused: bool = False, pauses_after_failure: bool = False
    ) -> None:
        if tuple(rows) != self.model.rows:
            chosen = self.selected()
            self.model.set_rows(rows)
            paths = [each.path for each in rows]
            if chosen is not None and chosen.path in paths:  # the selected run stays selected wherever it goes
                self.table.selectRow(paths.index(chosen.path))
            self._show_choice()
            self.table.setFixedHeight(min(len(rows), SHOWN_ROWS) * theme.scaled(ROW_HEIGHT) + 2)
        self._is_paused = is_paused
        self.status.setText(status)
        self.status.setToolTip(plain_tip(status))
        self.pause.setText("Resume" if is_paused else "Pause")
        self.pause.setToolTip(
            "Start waiting runs again" if is_paused else "Start no other run; the present one continues"
        )
        self.after_failure.setChecked(pauses_after_failure)
        for part in (self.table, *self._parts):
            part.setVisible(bool(rows))
        self.setVisible(bool(rows) or bool(status))

    def selected(self) -> QueueRow | None:
        chosen = self.table.selected_rows()
        return self.model.rows[chosen[0]] if chosen else None

    def _show_choice(self) -> None:
        run = self.selected()
        has_begun = run is not None and run.has_begun
        goes = "Removes it from the queue; the run stays" if has_begun else "Removes it and moves it to the trash"
        self.remove_button.setToolTip(f"{goes} ({REMOVE_KEYS})")
        for part, enabled in (
            (self.next_button, run is not None and self.model.rows.index(run) > 0),
            (self.edit_button, run is not None and not has_begun),
            (self.remove_button, run is not None),
        ):
            if not enabled and part.hasFocus():  # Qt would pass the focus on to the next button, Remove in the end
                self.table.setFocus(Qt.FocusReason.OtherFocusReason)
            part.setEnabled(enabled)

    def _show_menu(self, where: QPoint) -> None:
        run = self.selected()
        if run is None:
            return
        place, last = self.model.rows.index(run), len(self.model.rows) - 1
        menu = QMenu(self)
        for text, slot, enabled in (
            ("Run next", self.run_next, place > 0),
            ("Move up", lambda: self._shift(-1), place > 0),
            ("Move down", lambda: self._shift(1), place < last),
            ("Edit settings", self._edit, not run.has_begun),
            ("Remove", self._remove, True),
        ):
            menu.addAction(text, slot).setEnabled(enabled)
        menu.popup(self.table.viewport().mapToGlobal(where))

    def run_next(self) -> None:
        if (run := self.selected()) is not None:
            self.moved.emit(run.path, 0)

    def _move(self, origin: int, place: int) -> None:
        if origin != place:
            self.moved.emit(self.model.rows[origin].path, place)

    def _shift(self, by: int) -> None:
        if (run := self.selected()) is not None:
            place = self.model.rows.index(run) + by
            if 0 <= place < len(self.model.rows):
                self.moved.emit(run.path, place)

    def _edit(self) -> None:
        if (run := self.selected()) is not None and not run.has_begun:
            self.edit_requested.emit(run.path)

    def _remove(self) -> None:
        if (run := self.selected()) is not None:
            self.removed.emit(run.path)


class SessionQueue(QueuePanel):
    """The panel over a session's queue."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        queue = session.queue
        self.moved.connect(lambda path, place: queue.change(queue.file.move, RunFolder(path), place))
        self.removed.connect(lambda path: queue.remove(RunFolder(path)))
        self.edit_requested.connect(lambda path: session.waiting_settings_requested.emit(RunFolder(path)))
        self.pause_requested.connect(queue.set_paused)
        self.pause_after_failure_requested.connect(lambda on: queue.change(queue.file.set_pauses_after_failure, on))
        queue.changed.connect(self._refresh)
        self._refresh()

    def _refresh(self) -> None:
        queue = self._session.queue
        rows = []
        for run in queue.waiting:
            settings = raw_settings(run)
            steps = settings.get("iters")
            known_steps = steps if isinstance(steps, int) and not isinstance(steps, bool) else None
            rows.append(QueueRow(run.path, str(settings.get("model", "")), known_steps, has_begun=not is_fresh(run)))
        if queue.problem or not rows:
            status = queue.problem
        elif queue.now.is_paused:
            status = "Paused: no other run is started."
        elif queue.now.starting is not None:
            status = f"After {queue.now.starting.name}, which trains now."
        else:
            status = (
                "The first starts when the present run ends." if self._session.is_training else "The first starts now."
            )
        pauses = queue.now.pauses_after_failure
        self.show_queue(rows, status, is_paused=queue.now.is_paused, pauses_after_failure=pauses)
