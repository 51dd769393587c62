"""The runs that wait, in their order: reordered by dragging or with keys, edited, removed, paused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QColor, QKeySequence, QShortcut
from PySide6.QtWidgets import QAbstractItemView, QFrame, QWidget

from app import theme
from app.state.session import Session
from app.widgets.basic.controls import CheckBox, ElidedLabel
from app.widgets.basic.labels import REMOVE_KEYS, button, label, plain_tip
from app.widgets.basic.layout import column, configure, row
from app.widgets.basic.number_format import DASH
from app.widgets.basic.tables import ROW_HEIGHT, BaseTable, Column, DraggedRowsModel, Index
from backend.runs.archive import raw_settings
from backend.runs.queue import is_fresh
from backend.runs.run_folder import RunFolder
from backend.runs.run_names import name_of

SHOWN_ROWS = 3


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A waiting run. One that `has_begun` will be resumed, so its settings are fixed."""

    run: RunFolder
    model: str
    steps: int | None
    has_begun: bool = False


class QueueModel(DraggedRowsModel):
    """The rows in the order of the queue. `dropped(from, to)`: a row was dragged; the queue changes the order."""

    DRAG_TYPE = "application/x-grpo-studio-queue-place"
    columns = (Column("Place", 40, is_figure=True), Column("Run"), Column("Model", 260), Column("Steps", 100, True))
    dropped = Signal(int, int)

    rows: list[QueueRow]

    def text(self, row: QueueRow, column: int) -> str:
        steps = DASH if row.steps is None else f"to step {row.steps:,}" if row.has_begun else f"{row.steps:,} steps"
        model = "/".join(Path(row.model).parts[-2:]) or DASH
        return (str(self.rows.index(row) + 1), name_of(row.run), model, steps)[column]

    def colour(self, row: QueueRow, column: int) -> QColor:
        return theme.palette().text if column == 1 else theme.palette().muted

    def tip(self, row: QueueRow, column: int) -> str | None:
        return plain_tip(str(row.run.path) if column == 1 else row.model) if column in (1, 2) else None

    def flags(self, index: Index) -> Qt.ItemFlag:
        if not index.isValid():
            return Qt.ItemFlag.ItemIsDropEnabled  # between two rows; dropping onto one would mean nothing
        return super().flags(index) | Qt.ItemFlag.ItemIsDragEnabled

    def drop_row(self, origin: int, target: int) -> None:
        self.dropped.emit(origin, target - 1 if target > origin else target)


class QueuePanel(QFrame):
    """A card with the waiting runs and what can be done with them. Hidden while there is nothing to say."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)  # before `refresh` shows it: a widget without a parent opens as a window
        self.setProperty("role", "card")
        self._session, self._queue = session, session.queue
        self.model = configure(QueueModel(self), dropped=self._move)
        self.table = table = BaseTable(
            model=self.model,
            name="Waiting runs, in their order",
            single=True,
            resizable=True,
            dragDropMode=QAbstractItemView.DragDropMode.InternalMove,
            dragDropOverwriteMode=False,
            dropIndicatorShown=True,
            textElideMode=Qt.TextElideMode.ElideMiddle,  # names of runs and models differ at their end
            activated=lambda _: self._edit(),
        )
        table.selectionModel().selectionChanged.connect(lambda *_: self._show_choice())
        table.horizontalHeader().hide()  # for a copy it names the columns; here they explain themselves
        keys = {
            "Alt+Up": lambda: self._shift(-1),
            "Alt+Down": lambda: self._shift(1),
            "Alt+Home": self._run_next,
            REMOVE_KEYS: self._remove,
        }
        for sequence, slot in keys.items():
            QShortcut(QKeySequence(sequence), table, slot).setContext(Qt.ShortcutContext.WidgetShortcut)
        self.status = ElidedLabel(role="muted")
        tip = "Put it first (Alt+Home); Alt+Up, Alt+Down and dragging move it"
        self.next_button = button("Run next", self._run_next, tip=tip)
        self.edit_button = button("Edit settings", self._edit, tip="Load its settings into the form (Return)")
        self.remove_button = button("Remove", self._remove)
        self.after_failure = CheckBox("Pause after a failure")
        change = partial(session.queue.change, session.queue.file.change)
        self.after_failure.clicked.connect(lambda on: change(pauses_after_failure=on))
        self.pause = button("Pause", lambda: self._queue.set_paused(self._queue.is_active))
        self._parts = (self.next_button, self.edit_button, self.remove_button, self.after_failure)
        title = label("Queue", theme.heading_font())
        margins = (2 * theme.SPACE, theme.SPACE, 2 * theme.SPACE, theme.SPACE)
        column(row(title, (self.status, 1), *self._parts, self.pause), table, into=self, margins=margins)
        self._queue.changed.connect(self.refresh)
        self.refresh()

    def refresh(self) -> None:
        queue, rows, chosen = self._queue, list[QueueRow](), self.selected()
        for run in queue.waiting:
            settings = raw_settings(run)
            steps = settings.get("iters")
            known_steps = steps if isinstance(steps, int) and not isinstance(steps, bool) else None
            rows.append(QueueRow(run, str(settings.get("model", "")), known_steps, has_begun=not is_fresh(run)))
        if queue.problem or not rows:
            status = queue.problem
        elif queue.now.is_paused:
            status = "Paused: no other run is started."
        elif queue.now.starting is not None:
            status = f"After {name_of(queue.now.starting)}, which trains now."
        elif not queue.is_active:
            status = "No process starts them."
        else:
            status = "The first starts as soon as nothing else trains."
        if rows != self.model.rows:
            self.model.set_rows(rows)
            runs = [each.run for each in rows]
            if chosen is not None and chosen.run in runs:  # the selected run stays selected wherever it goes
                self.table.selectRow(runs.index(chosen.run))
            self.table.setFixedHeight(min(len(rows), SHOWN_ROWS) * theme.scaled(ROW_HEIGHT) + 2)
        self._show_choice()
        configure(self.status, text=status, toolTip=plain_tip(status))
        if queue.now.is_paused or (rows and not queue.is_active):
            configure(self.pause, text="Resume" if queue.now.is_paused else "Start", toolTip="Start the waiting runs")
        else:
            configure(self.pause, text="Pause", toolTip="Start no other run; the present one continues")
        self.after_failure.setChecked(queue.now.pauses_after_failure)
        for part in (self.table, *self._parts):
            part.setVisible(bool(rows))
        self.setVisible(bool(rows) or bool(status))

    def selected(self) -> QueueRow | None:
        chosen = self.table.selected_rows()
        return self.model.rows[chosen[0]] if chosen else None

    def _show_choice(self) -> None:
        chosen = self.selected()
        has_begun = chosen is not None and chosen.has_begun
        goes = "Removes it from the queue; the run stays" if has_begun else "Removes it and moves it to the trash"
        self.remove_button.setToolTip(f"{goes} ({REMOVE_KEYS})")
        for part, enabled in (
            (self.next_button, chosen is not None and self.model.rows.index(chosen) > 0),
            (self.edit_button, chosen is not None and not has_begun),
            (self.remove_button, chosen is not None),
        ):
            if not enabled and part.hasFocus():  # Qt would pass the focus on to the next button, Remove in the end
                self.table.setFocus(Qt.FocusReason.OtherFocusReason)
            part.setEnabled(enabled)

    def _run_next(self) -> None:
        if (chosen := self.selected()) is not None:
            self._move(self.model.rows.index(chosen), 0)

    def _shift(self, by: int) -> None:
        if (chosen := self.selected()) is not None:
            place = self.model.rows.index(chosen)
            self._move(place, place + by)

    def _move(self, origin: int, place: int) -> None:
        if origin != place and 0 <= place < len(self.model.rows):
            self._queue.change(self._queue.file.move, self.model.rows[origin].run, place)

    def _edit(self) -> None:
        if (chosen := self.selected()) is not None and not chosen.has_begun:
            self._session.waiting_settings_requested.emit(chosen.run)

    def _remove(self) -> None:
        if (chosen := self.selected()) is not None:
            self._queue.remove(chosen.run)
