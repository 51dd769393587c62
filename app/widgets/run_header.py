"""The header of a run's page, its menu of the other runs, and the card with a run's result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QEvent, QObject, QPoint, QRect, QSize, Qt, Signal
from PySide6.QtGui import QFont, QKeyEvent, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QApplication, QBoxLayout, QFrame, QPushButton, QSizePolicy, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.controls import Dot, ElidedLabel, SearchEdit
from app.widgets.basic.labels import button, label, plain_tip, progress_bar, show_text
from app.widgets.basic.layout import clear_layout, column, configure, holder, paint_edge, paint_ring, row
from app.widgets.basic.number_format import duration, figure, moment
from app.widgets.basic.tables import BaseTable, Column, RowsModel
from backend.runs.run_folder import RunFolder, all_runs, modified_at
from backend.runs.run_names import name_of, split_name

STATES = {  # a run's state → its label and its role in the palette
    "": ("No run", "placeholder"),
    "queued": ("Queued", "muted"),
    "reading": ("Reading", "muted"),
    "starting": ("Starting", "warning"),
    "running": ("Running", "good"),
    "paused": ("Paused", "warning"),
    "stopping": ("Stopping", "warning"),
    "finished": ("Finished", "good"),
    "stopped": ("Stopped", "muted"),
    "failed": ("Failed", "bad"),
    "crashed": ("Crashed", "bad"),
}
STATE_LABELS = {state: text for state, (text, _) in STATES.items()}
STATE_ROLES = {state: role for state, (_, role) in STATES.items()}

NARROW = 860
MENU_SIZE = QSize(460, 360)
CHEVRON, PADDING = 12, 8
_MOVES = (Qt.Key.Key_Down, Qt.Key.Key_Up, Qt.Key.Key_PageDown, Qt.Key.Key_PageUp)


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
            return QApplication.sendEvent(self.table, event)
        return super().eventFilter(watched, event)


class StateChip(QWidget):
    def __init__(self, spacing: int = 6, **settings: Any) -> None:
        super().__init__()
        self._dot, self.label = Dot("placeholder"), label(**settings)
        row(self._dot, self.label, into=self, spacing=spacing)

    def show_state(self, state: str) -> None:
        text, role = STATES[state]
        self.label.setText(text)
        self._dot.show_colour(role)


class RunHeader(QWidget):
    def __init__(self, open_run: Callable[[str], object]) -> None:
        super().__init__()
        self.switcher = Switcher(font=theme.title_font(), chosen=open_run)
        self._when, self._chip = label(role="muted"), StateChip()
        self.tools = row()
        self._bar = progress_bar("Progress of the run")
        self.doing = ElidedLabel(font=theme.figures_font(theme.BODY))
        self._time = label(font=theme.figures_font(), role="muted")
        top = row(self.switcher, self._when, None, self._chip, self.tools, spacing=12)
        self._live = holder(column(self._bar, row((self.doing, 1), self._time), spacing=6))
        column(top, self._live, into=self, spacing=6)

    def show_run(self, run: RunFolder, state: str, *, live: bool) -> None:
        """Show name and state; the timestamp of a default name is shown apart, as a date. `live` shows the progress."""
        self.switcher.show_run(run)
        self._when.setText(split_name(run.name)[1])
        self._chip.show_state(state)
        self._live.setVisible(live)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._when.setVisible(self.width() >= NARROW)  # else it leaves the name no room

    def show_progress(
        self, step: int, total: int | None, doing: str = "", share: float | None = None, figures: str = ""
    ) -> None:
        """Show the step and the phase (`doing`) with the share of it that is done, 0 to 1, and its figures."""
        # Otherwise setValue paints at once, and with the bar everything else that is due in the window.
        self._bar.setUpdatesEnabled(False)
        self._bar.setValue(round(self._bar.maximum() * min(1.0, step / total)) if total else 0)
        self._bar.setUpdatesEnabled(True)
        phase = f"{doing}, {share:.0%}" if doing and share is not None else doing
        where = f"Step {step:,} of {total:,}" if total else f"Step {step:,}"
        self.doing.setText(" · ".join(part for part in (where, phase, figures) if part))

    def show_time(self, elapsed_s: float | None, eta_s: float | None) -> None:
        left = f"about {duration(eta_s)} left" if eta_s is not None else ""
        spent = f"{duration(elapsed_s)} elapsed" if elapsed_s else ""
        self._time.setText(" · ".join(part for part in (spent, left) if part))


@dataclass(frozen=True, slots=True)
class CardAction:
    text: str
    callback: Callable[[], object]
    primary: bool = False


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """A metric before and after the run; `before` None shows the second figure alone. `most`: the largest possible."""

    label: str
    before: float | None
    after: float | None
    unit: str = ""
    most: float | None = None


class ResultCard(QFrame):
    def __init__(self) -> None:
        super().__init__()
        self._role = "muted"
        self._content: tuple[object, ...] = ()
        self.setProperty("role", "card")
        self.title = label(font=theme.heading_font())
        self.sentence = label(wrap=True, selectable=True)
        self.advice = label(role="muted", wrap=True, selectable=True)
        self._changes, self._button_row = row(spacing=2 * theme.SPACE), row(None)
        self.buttons: list[QPushButton] = []
        self._box = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._box.setContentsMargins(theme.GUTTER, 12, 12, 12)
        self._box.addLayout(column(self.title, self._changes, self.sentence, self.advice, spacing=4), 1)
        self._box.addLayout(self._button_row)

    def show_result(
        self,
        title: str,
        role: str,
        sentence: str = "",
        advice: str = "",
        changes: Sequence[BeforeAfter] = (),
        actions: Sequence[CardAction] = (),
    ) -> None:
        """Fill the card; `role` names the palette colour of its edge."""
        # The page calls this at every refresh. Rebuilding the buttons then would delete the one under the mouse button.
        texts = tuple((action.text, action.primary) for action in actions)
        content = (title, role, sentence, advice, tuple(changes), texts)
        if content == self._content:
            return
        self._content, self._role = content, role
        self.title.setText(title)
        show_text(self.sentence, sentence)
        show_text(self.advice, advice)
        clear_layout(self._changes)
        for change in changes:
            figures, font = row(spacing=6), theme.figures_font(theme.TITLE, QFont.Weight.DemiBold)
            if change.before is not None:
                before = f"{figure(change.before, change.unit)} →"
                figures.addWidget(label(before, theme.figures_font(theme.TITLE), "muted"))
            figures.addWidget(label(figure(change.after, change.unit), font))
            if change.most:
                most = label(f"of {figure(change.most)}", theme.figures_font(), "muted")
                figures.addWidget(most, 0, Qt.AlignmentFlag.AlignBottom)
            figures.addStretch(1)
            caption = label(change.label, theme.caption_font(), "caption")
            self._changes.addWidget(holder(column(figures, caption, spacing=0)))
        if changes:
            self._changes.addStretch(1)
        clear_layout(self._button_row)
        self._button_row.addStretch(1)
        self.buttons = [button(action.text, action.callback, primary=action.primary) for action in actions]
        for widget in self.buttons:
            self._button_row.addWidget(widget, 0, Qt.AlignmentFlag.AlignVCenter)
        self.update()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        figures, buttons = (part.minimumSize().width() for part in (self._changes, self._button_row))
        narrow, directions = self.width() < max(NARROW, figures + buttons + 7 * theme.SPACE), QBoxLayout.Direction
        self._box.setDirection(directions.TopToBottom if narrow else directions.LeftToRight)
        self._box.setSpacing(12 if narrow else theme.SPACE * 3)

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        paint_edge(self, getattr(theme.palette(), self._role), 10)
