"""The dialog before checkpoints are deleted: which runs have some to spare, and how much that frees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QDialog, QHBoxLayout, QListWidget, QListWidgetItem, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import on_screen
from app.widgets.basic.number_format import file_size
from backend.runs.disk_use import FreeableSpace, free_space
from backend.utils.errors import UserError

SPACE = Qt.ItemDataRole.UserRole


class FreeSpaceDialog(QDialog):
    """A list of runs with check boxes, all ticked; the button says what ticking them frees.

    Attributes:
        list, start, outcome – the list, the button, and the sentence below.

    Signals:
        freed([paths]) – checkpoints of these runs were deleted.
    """

    freed = Signal(list)

    def __init__(
        self,
        spaces: Sequence[FreeableSpace],
        free: Callable[[Any], int] = free_space,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._free = free
        self.setWindowTitle("Free space")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.resize(on_screen(self, 560, 420))
        self.list = QListWidget()
        self.list.setAccessibleName("Runs with checkpoints to spare")
        for space in spaces:
            item = QListWidgetItem(f"{space.run.name}  –  {_steps(space)}, {file_size(space.bytes)}")
            item.setData(SPACE, space)
            item.setCheckState(Qt.CheckState.Checked)
            self.list.addItem(item)
        self.list.itemChanged.connect(lambda _item: self._show_sum())
        self.outcome = label(wrap=True)
        self.start = button("", self.delete, primary=True)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addWidget(
            label(
                "Of each run the best and the newest checkpoint stay; the others are deleted, which cannot be undone. EventLog, completions "
                "and exported models stay. A run that is training is never touched.",
                wrap=True,
            )
        )
        column.addWidget(self.list, 1)
        column.addWidget(self.outcome)
        buttons = QHBoxLayout()
        buttons.addStretch(1)
        buttons.addWidget(button("Close", self.close))
        buttons.addWidget(self.start)
        column.addLayout(buttons)
        self._show_sum()

    def chosen(self) -> list[FreeableSpace]:
        items = [self.list.item(i) for i in range(self.list.count())]
        return [item.data(SPACE) for item in items if item.checkState() == Qt.CheckState.Checked]

    def delete(self) -> None:
        """Delete the checkpoints of the ticked runs; a run that cannot be touched is told, and the others go on."""
        chosen, refused, total = self.chosen(), list[str](), 0
        done = []
        for space in chosen:
            try:
                total += self._free(space.run)
                done.append(space.run.path)
            except UserError as mistake:
                refused.append(mistake.faults[0].sentence)
        for i in reversed(range(self.list.count())):
            if self.list.item(i).data(SPACE).run.path in done:
                self.list.takeItem(i)
        self._show_sum()
        self.outcome.setText(" ".join([f"{file_size(total)} were freed.", *refused]))
        self.freed.emit(done)

    def _show_sum(self) -> None:
        total = sum(space.bytes for space in self.chosen())
        self.start.setText(f"Delete checkpoints, free {file_size(total)}" if total else "Nothing to delete")
        self.start.setEnabled(total > 0)
        nothing = "No run has checkpoints beside its best and its newest."
        self.outcome.setText("" if self.list.count() else nothing)


def _steps(space: FreeableSpace) -> str:
    steps = [f"{saved.step:,}" for saved in space.checkpoints]
    listed = ", ".join(steps) if len(steps) <= 4 else f"{steps[0]} … {steps[-1]}"
    return f"{len(steps)} {'checkpoint' if len(steps) == 1 else 'checkpoints'} (step {listed})"
