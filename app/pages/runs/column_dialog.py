"""The dialog in which the columns of the table of runs are chosen and ordered."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import (
    QAbstractItemView,
    QDialog,
    QHBoxLayout,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.pages.runs.run_columns import DEFAULT_COLUMNS, NAME
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import on_screen
from backend.runs.run_search import field_of

KEY = Qt.ItemDataRole.UserRole


class ColumnDialog(QDialog):
    """A list with check boxes: the shown columns first, in their order, then everything else. A change applies at once.

    Attributes:
        list, search – the list, and the line that filters it.

    Signals:
        chosen([keys]) – the columns to show, in order.
    """

    chosen = Signal(list)

    def __init__(self, shown: Sequence[str], offered: Sequence[str], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._offered = list(offered)
        self.setWindowTitle("Columns")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.resize(on_screen(self, 420, 520))
        self.search = QLineEdit()
        self.search.setPlaceholderText("Find a setting or metric")
        self.search.setAccessibleName("Find a column")
        self.search.setClearButtonEnabled(True)
        self.search.textChanged.connect(self._filter)
        self.list = QListWidget()
        self.list.setAccessibleName("Columns of the table of runs")
        self.list.setDragDropMode(QAbstractItemView.DragDropMode.InternalMove)
        self.list.itemChanged.connect(lambda _item: self._emit())
        self.list.model().rowsMoved.connect(lambda *_: self._emit())
        up, down = (
            button("Up", lambda: self.move(-1), tip="Alt+Up"),
            button("Down", lambda: self.move(1), tip="Alt+Down"),
        )
        for keys, by in (("Alt+Up", -1), ("Alt+Down", 1)):
            QShortcut(QKeySequence(keys), self, lambda by=by: self.move(by))
        buttons = QHBoxLayout()
        for part in (up, down, button("Default columns", lambda: self._fill(DEFAULT_COLUMNS))):
            buttons.addWidget(part)
        buttons.addStretch(1)
        buttons.addWidget(button("Close", self.close, primary=True))
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(theme.SPACE)
        column.addWidget(self.search)
        column.addWidget(self.list, 1)
        column.addWidget(label("Ticked ones are shown, in this order. Drag them, or use Alt+Up and Alt+Down.", role="muted", wrap=True))  # fmt: skip
        column.addLayout(buttons)
        self._fill(shown)

    def _fill(self, shown: Sequence[str]) -> None:
        self.list.blockSignals(True)
        self.list.clear()
        for key in [*shown, *(key for key in self._offered if key not in shown)]:
            field = field_of(key)
            if field is None:
                continue
            item = QListWidgetItem(field.title if field.title == key else f"{field.title}  –  {key}")
            item.setData(KEY, key)
            item.setToolTip(f"<p>{field.help}</p>" if field.help else "")
            item.setCheckState(Qt.CheckState.Checked if key in shown else Qt.CheckState.Unchecked)
            if key == NAME:
                item.setFlags(item.flags() & ~Qt.ItemFlag.ItemIsUserCheckable)
            self.list.addItem(item)
        self.list.blockSignals(False)
        self._emit()

    def keys(self) -> list[str]:
        """The ticked columns, in order."""
        items = [self.list.item(i) for i in range(self.list.count())]
        return [item.data(KEY) for item in items if item.checkState() == Qt.CheckState.Checked]

    def move(self, by: int) -> None:
        """Move the current column up or down."""
        row = self.list.currentRow()
        if row >= 0 and 0 <= row + by < self.list.count():
            item = self.list.takeItem(row)
            self.list.insertItem(row + by, item)
            self.list.setCurrentRow(row + by)
            self._emit()

    def _filter(self, text: str) -> None:
        for i in range(self.list.count()):
            item = self.list.item(i)
            item.setHidden(text.lower() not in item.text().lower())

    def _emit(self) -> None:
        self.chosen.emit(self.keys())
