"""A button with the name of what a page shows, whose menu lists the others and finds one by typing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QEvent, QObject, QPoint, QRect, QSize, Qt, Signal
from PySide6.QtGui import QFont, QKeyEvent, QPaintEvent
from PySide6.QtWidgets import QFrame, QPushButton, QSizePolicy, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.controls import SearchEdit
from app.widgets.basic.labels import plain_tip
from app.widgets.basic.layout import column, configure, paint_ring
from app.widgets.basic.number_format import moment
from app.widgets.basic.tables import BaseTable, Column, RowsModel
from backend.runs.run_folder import RunFolder, all_runs, modified_at
from backend.runs.run_names import name_of

MENU_SIZE = QSize(460, 360)
CHEVRON, PADDING = 12, 8
_MOVES = {Qt.Key.Key_Down: 1, Qt.Key.Key_Up: -1, Qt.Key.Key_PageDown: 10, Qt.Key.Key_PageUp: -10}


@dataclass(frozen=True, slots=True)
class Choice:
    """An entry of the menu: its value, its text, and a muted word at the right."""

    value: str
    text: str
    about: str = ""


def run_choices(*, trained: bool = False) -> list[Choice]:
    """Every run, the newest first; those that have saved weights if `trained`."""
    runs = all_runs()
    if trained:
        runs = [run for run in runs if any(map(Path.is_dir, (run.checkpoints, run.adapters, run.model)))]
    return [Choice(str(run.path), name_of(run), moment(modified_at(run.config))) for run in runs]


class Switcher(QPushButton):
    """Shows the name of a `kind` of thing; a click or Space opens the menu of `choices()`."""

    chosen = Signal(str)  # value of a choice

    def __init__(
        self,
        kind: str = "Run",
        choices: Callable[[], Sequence[Choice]] = run_choices,
        font: QFont | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.value, self._kind, self.choices = "", kind, choices
        policies = QSizePolicy.Policy
        configure(self, font=font or theme.heading_font(), sizePolicy=(policies.Preferred, policies.Fixed), **settings)
        self.clicked.connect(self.open)

    def show_choice(self, value: str, text: str) -> None:
        self.value = value
        configure(self, text=text, name=f"{self._kind}: {text}", toolTip=plain_tip(value))
        self.updateGeometry()

    def show_run(self, run: RunFolder) -> None:
        self.show_choice(str(run.path), name_of(run))

    def open(self) -> None:
        menu = SwitcherMenu(self.choices(), self.value, self._kind, self)
        menu.chosen.connect(self.chosen)
        menu.resize(theme.scaled_size(MENU_SIZE))
        menu.move(self.mapToGlobal(QPoint(0, self.height() + 2)))
        menu.show()
        menu.search.setFocus()

    def sizeHint(self) -> QSize:
        room = 2 * PADDING + theme.scaled(CHEVRON) + 6
        return QSize(self.fontMetrics().horizontalAdvance(self.text()) + room + 2, self.fontMetrics().height() + 2)

    def minimumSizeHint(self) -> QSize:
        return QSize(theme.scaled(96), self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, colours, side = theme.painter(self), theme.palette(), theme.scaled(CHEVRON)
        if self.underMouse() or self.isDown():
            theme.set_fill(painter, colours.hover)
            painter.drawRoundedRect(self.rect(), 6, 6)
        room = self.rect().adjusted(PADDING, 0, -PADDING - side - 6, 0)
        text = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideMiddle, room.width())
        painter.setPen(colours.text if self.isEnabled() else colours.faint)
        painter.drawText(room, Qt.AlignmentFlag.AlignVCenter, text)
        shown = min(room.width(), self.fontMetrics().horizontalAdvance(text))
        place = QRect(room.left() + shown + 6, (self.height() - side) // 2, side, side)
        painter.drawPixmap(place, icons.pixmap("chevron-down", colours.muted, side))
        painter.end()
        if self.hasFocus():
            paint_ring(self, 6)


class ChoiceModel(RowsModel):
    columns = (Column("Name"), Column("When", 128, is_figure=True, colour="muted"))

    def text(self, row: Choice, column: int) -> str:
        return (row.text, row.about)[column]

    def tip(self, row: Choice, column: int) -> str:
        return plain_tip(row.value)


class SwitcherMenu(QFrame):
    """The list below the button. Typing finds, arrows move, Enter chooses, Escape closes."""

    chosen = Signal(str)

    def __init__(self, choices: Sequence[Choice], current: str, kind: str, parent: QWidget) -> None:
        super().__init__(parent, Qt.WindowType.Popup)
        self._opener = parent
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        configure(self, name=f"{kind}s", role="card")
        self._choices = choices
        self.search = SearchEdit(f"Find a {kind.lower()}", textChanged=self._show, returnPressed=self._take)
        self.model = ChoiceModel(self)
        self.table = BaseTable(model=self.model, single=True, name=f"{kind}s")
        self.table.horizontalHeader().hide()
        self.table.clicked.connect(self._take)
        self.table.activated.connect(self._take)
        column(self.search, (self.table, 1), into=self, margins=theme.SPACE)
        self.search.installEventFilter(self)
        self._show("")
        values = [choice.value for choice in self.model.rows]
        if current in values:
            self.table.selectRow(values.index(current))

    def _show(self, typed: str) -> None:
        words = typed.lower().split()
        found = [choice for choice in self._choices if all(word in choice.text.lower() for word in words)]
        self.model.set_rows(found)
        if found:
            self.table.selectRow(0)

    def _take(self) -> None:
        place = self.table.currentIndex().row()
        if place < 0:
            return
        value = self.model.rows[place].value
        self.close()
        self._opener.setFocus()
        self.chosen.emit(value)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress and event.key() in _MOVES:
            place = self.table.currentIndex().row() + _MOVES[Qt.Key(event.key())]
            if self.model.rows:
                self.table.selectRow(max(0, min(len(self.model.rows) - 1, place)))
            return True
        return super().eventFilter(watched, event)
