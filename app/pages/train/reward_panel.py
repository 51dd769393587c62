"""The reward functions as a block of the form: the table, its problem, and two buttons.

Names, weights and the user's file are ordinary fields below it: other views of the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PySide6.QtCore import QModelIndex, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFont, QKeyEvent, QPainter, QPixmap, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QApplication,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QHeaderView,
    QLineEdit,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.controls import ComboBox, ElidedLabel, LinkButton
from app.widgets.basic.labels import PlainLabel, label, plain_tip
from app.widgets.basic.layout import clear_layout
from app.widgets.basic.number_format import figure
from app.widgets.basic.tables import BaseTable, DraggedRowsModel
from app.widgets.form import value_text
from app.widgets.reward_delegates import (
    FUNCTION,
    LABEL,
    MEAN,
    SCORES,
    SOURCE,
    USE,
    WEIGHT,
    Index,
    TickDelegate,
    WeightDelegate,
    toggle_tick,
)
from backend.rewards.catalogue.catalog import BUILT_IN, DEFAULT_REWARDS, RewardEntry, metric_name
from backend.rewards.catalogue.entry import RewardCall, read_call
from backend.rewards.catalogue.parse import Parameter
from backend.utils.errors import UserError

# The table of reward functions: check box, colour, label, function, what it scores, source, last mean, weight.

HEADERS = ("Use", "Reward", "Function", "What it scores", "Source", "Mean", "Weight")
ROW = 38
"""Height of a row: two lines of what it scores."""
WIDTHS = {USE: 44, LABEL: 136, FUNCTION: 212, SOURCE: 108, MEAN: 60, WEIGHT: 72}
MIN_SCORES_WIDTH = 184
"""Least width of the column “What it scores”; in a narrower table other columns are hidden."""
_STEPS = {Qt.Key.Key_Up: -1, Qt.Key.Key_Down: 1}
NOT_FOUND = "No function of this name was found."
_ROOT = QModelIndex()


@dataclass
class RewardRow:
    """One function. `weight` is None if the config's weight is not a number; `known` is False for a name that no
    function has."""

    entry: RewardEntry
    ticked: bool = False
    weight: float | None = 1.0
    known: bool = True


class RewardModel(DraggedRowsModel):
    """Functions as rows, the ticked ones in the order of the setting.

    Attributes:
        rows – all rows.
        means – metric name → mean score on the bench.

    Signals:
        picked(names, weights) – the user changed ticks, weights or order; weights are empty if all are 1.
    """

    DRAG_TYPE = "application/x-grpo-studio-reward"
    picked = Signal(list, list)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows: list[RewardRow] = []
        self.means: Mapping[str, float] = {}

    def show_means(self, means: Mapping[str, float]) -> None:
        """Show the mean score of each function on the bench, by metric name."""
        self.means = dict(means)
        self._all_changed()

    def show_rewards(self, entries: Sequence[RewardEntry], names: Any, weights: Any) -> None:
        """Show the functions with the config's ticks and weights; a name without a function gets a row that says so."""
        listed = [str(name) for name in names] if isinstance(names, list) else []
        rows = _rows(entries, listed, {row.entry.name: row.weight for row in self.rows})
        for row, weight in zip(_ticked(rows, listed), _aligned(weights, len(listed)), strict=True):
            row.weight = weight
        if [row.entry for row in rows] == [row.entry for row in self.rows]:
            self.rows = rows
            self._all_changed()
        else:
            self.beginResetModel()
            self.rows = rows
            self.endResetModel()

    def use_only(self, names: Sequence[str]) -> None:
        """Tick exactly these functions, each with weight 1."""
        for row in self.rows:
            row.ticked, row.weight = row.entry.name in names, 1.0
        self._emit_picked()

    def move(self, row: int, to: int) -> bool:
        """Move a ticked row before row `to`, counting only ticked rows; False if that changes nothing."""
        ticked = [i for i, other in enumerate(self.rows) if other.ticked]
        if row not in ticked:
            return False
        old, new = ticked.index(row), sum(i < to for i in ticked)
        new -= new > old  # removing the row shifts those after it
        if new == old:
            return False
        order = [self.rows[i] for i in ticked]
        order.insert(new, order.pop(old))
        for i, moved in zip(ticked, order, strict=True):
            self.rows[i] = moved
        self._emit_picked()
        return True

    @property
    def ticked(self) -> list[RewardRow]:
        return [row for row in self.rows if row.ticked]

    # QAbstractTableModel

    def rowCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(HEADERS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return HEADERS[section]
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if section in (MEAN, WEIGHT) else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        return None

    def flags(self, index: Index) -> Qt.ItemFlag:
        if not index.isValid():
            return Qt.ItemFlag.ItemIsDropEnabled
        usual = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        if self.rows[index.row()].ticked:
            usual |= Qt.ItemFlag.ItemIsDragEnabled
        if index.column() == USE:
            return usual | Qt.ItemFlag.ItemIsUserCheckable
        return usual | Qt.ItemFlag.ItemIsEditable if index.column() == WEIGHT else usual

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], index.column()
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return figure(self.means.get(metric_name(row.entry.name))) if column == MEAN else _text(row, column)
            case Qt.ItemDataRole.EditRole:
                return row.weight if column == WEIGHT else None
            case Qt.ItemDataRole.CheckStateRole if column == USE:
                return Qt.CheckState.Checked if row.ticked else Qt.CheckState.Unchecked
            case Qt.ItemDataRole.DecorationRole if column == LABEL:
                return self._swatch(row)
            case Qt.ItemDataRole.ForegroundRole:
                return _colour(row, column)
            case Qt.ItemDataRole.FontRole:
                return _font(column)
            case Qt.ItemDataRole.TextAlignmentRole if column in (MEAN, WEIGHT):
                return Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
            case Qt.ItemDataRole.ToolTipRole:
                return _tip(row)
            case Qt.ItemDataRole.AccessibleTextRole if column == USE:
                return f"{row.entry.label}, {'used' if row.ticked else 'not used'}"
        return None

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        row = self.rows[index.row()]
        if index.column() == USE and role == Qt.ItemDataRole.CheckStateRole:
            row.ticked = Qt.CheckState(value) == Qt.CheckState.Checked
        elif index.column() == WEIGHT and role == Qt.ItemDataRole.EditRole:
            row.weight = float(value)
        else:
            return False
        self._emit_picked()
        return True

    # Dragging

    def drop_row(self, origin: int, target: int) -> None:
        self.move(origin, target)

    def _emit_picked(self) -> None:
        self._all_changed()
        weights = [1.0 if row.weight is None else row.weight for row in self.ticked]
        all_one = all(weight == 1 for weight in weights)
        self.picked.emit([row.entry.name for row in self.ticked], [] if all_one else weights)

    def _all_changed(self) -> None:
        # All rows: a tick changes the colours of every ticked row below it.
        if self.rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.rows) - 1, len(HEADERS) - 1))

    def _swatch(self, row: RewardRow) -> QPixmap:
        ratio = 2
        pixmap = QPixmap(QSize(10, 10) * ratio)
        pixmap.fill(Qt.GlobalColor.transparent)
        painter = QPainter(pixmap)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        index = next((i for i, other in enumerate(self.ticked) if other is row), None)
        painter.setBrush(theme.palette().hairline if index is None else theme.reward_colour(index))
        painter.drawRoundedRect(QRect(0, 0, 10 * ratio, 10 * ratio), 3 * ratio, 3 * ratio)
        painter.end()
        pixmap.setDevicePixelRatio(ratio)
        return pixmap


class RewardTable(BaseTable):
    """The table view, as high as its rows. Space toggles the current row, a click or a digit edits its weight."""

    def __init__(self, model: RewardModel, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setModel(model)
        self.setItemDelegateForColumn(USE, TickDelegate(self))
        self.setItemDelegateForColumn(WEIGHT, WeightDelegate(self))
        self.setAccessibleName("Reward functions")
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        triggers = QAbstractItemView.EditTrigger
        self.setEditTriggers(
            triggers.SelectedClicked | triggers.DoubleClicked | triggers.EditKeyPressed | triggers.AnyKeyPressed
        )
        self.setDragDropMode(QAbstractItemView.DragDropMode.InternalMove)
        self.setDragDropOverwriteMode(False)
        self.setAccessibleDescription("Space ticks a row; a digit changes its weight; Alt with the arrows moves it.")
        self.setWordWrap(True)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._shape_header()
        model.modelReset.connect(self._fit)
        theme.signals.changed.connect(self.viewport().update)
        self._fit()

    def _shape_header(self) -> None:
        self.verticalHeader().setDefaultSectionSize(theme.scaled(ROW))
        header = self.horizontalHeader()
        header.setMinimumSectionSize(40)
        for column, width in WIDTHS.items():
            header.setSectionResizeMode(column, QHeaderView.ResizeMode.Fixed)
            self.setColumnWidth(column, theme.scaled(width))
        header.setSectionResizeMode(SCORES, QHeaderView.ResizeMode.Stretch)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._hide_columns()

    def _hide_columns(self) -> None:
        """Hide the mean while the bench has none, and in a narrow table the source, then the function's name."""
        has_means = bool(self.model().means)  # type: ignore[attr-defined]
        fixed = (USE, LABEL, WEIGHT, *([MEAN] if has_means else []))
        available = self.width() / theme.text_scale() - sum(WIDTHS[column] for column in fixed)
        with_name = available - WIDTHS[FUNCTION]
        self.setColumnHidden(MEAN, not has_means)
        self.setColumnHidden(FUNCTION, with_name < MIN_SCORES_WIDTH)
        self.setColumnHidden(SOURCE, with_name - WIDTHS[SOURCE] < MIN_SCORES_WIDTH)

    def show_means(self, means: Mapping[str, float]) -> None:
        self.model().show_means(means)  # type: ignore[attr-defined]
        self._hide_columns()

    def move_row(self, by: int) -> None:
        """Move the current row up (−1) or down (1) among the ticked ones; it stays current."""
        model: Any = self.model()
        row = self.currentIndex().row()
        if not 0 <= row < len(model.rows):
            return
        name, column = model.rows[row].entry.name, self.currentIndex().column()
        others = [i for i, other in enumerate(model.rows) if other.ticked and (i - row) * by > 0]
        if others and model.move(row, others[0] + 1 if by > 0 else others[-1]):
            moved = next(i for i, other in enumerate(model.rows) if other.entry.name == name)
            self.setCurrentIndex(model.index(moved, column))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        current = self.currentIndex()
        if event.key() == Qt.Key.Key_Space and current.isValid():
            toggle_tick(self.model(), current.row())
        elif event.modifiers() & Qt.KeyboardModifier.AltModifier and event.key() in _STEPS:
            self.move_row(_STEPS[Qt.Key(event.key())])
        else:
            super().keyPressEvent(event)

    def _fit(self) -> None:
        rows = self.model().rowCount()
        self.setFixedHeight(self.horizontalHeader().sizeHint().height() + rows * theme.scaled(ROW) + 2)


def _rows(entries: Iterable[RewardEntry], listed: list[str], weights: dict[str, float | None]) -> list[RewardRow]:
    """Entries as rows, then the names that no function has; ticked rows are in the config's order among themselves."""
    rows = [RewardRow(entry, entry.name in listed, weights.get(entry.name, 1.0)) for entry in entries]
    unknown = [name for name in dict.fromkeys(listed) if name not in {row.entry.name for row in rows}]
    rows += [RewardRow(RewardEntry(name, name, NOT_FOUND, "", 0), True, 1.0, known=False) for name in unknown]
    in_order = iter(sorted((row for row in rows if row.ticked), key=lambda row: listed.index(row.entry.name)))
    return [next(in_order) if row.ticked else row for row in rows]


def _ticked(rows: list[RewardRow], listed: list[str]) -> list[RewardRow]:
    by_name = {row.entry.name: row for row in rows}
    return [by_name[name] for name in listed]


def _aligned(weights: Any, count: int) -> list[float | None]:
    """A weight for each name: 1 for all if the setting is empty, None where it cannot be read or is too short."""
    if not isinstance(weights, list) or not weights:
        return [1.0 if weights in ([], None, "") else None] * count
    read = [float(weight) if isinstance(weight, int | float) else None for weight in weights]
    return (read + [None] * count)[:count]


def _text(row: RewardRow, column: int) -> str | None:
    if column == WEIGHT:
        return "–" if row.weight is None else value_text.number_text(row.weight)
    if column == SOURCE:
        return row.entry.source if row.entry.source in (BUILT_IN, "") else Path(row.entry.source).name
    return {LABEL: row.entry.label, FUNCTION: row.entry.name, SCORES: row.entry.scores.replace("`", "")}.get(column)


def _colour(row: RewardRow, column: int) -> QColor:
    colours = theme.palette()
    if not row.known and column in (LABEL, SCORES):
        return colours.warning
    if not row.ticked:
        return colours.muted
    return colours.muted if column in (FUNCTION, SCORES, SOURCE, MEAN) else colours.text


def _font(column: int) -> QFont | None:
    figures, caption = theme.figures_font(), theme.caption_font()
    fonts = {
        FUNCTION: theme.mono_font(theme.CAPTION), SCORES: caption, SOURCE: caption, MEAN: figures, WEIGHT: figures
    }  # fmt: skip
    return fonts.get(column)


def _tip(row: RewardRow) -> str:
    where = row.entry.source if row.entry.source == BUILT_IN else f"{row.entry.source}, line {row.entry.line}"
    lines = (row.entry.scores, f"{row.entry.name} ({where})") if row.known else (NOT_FOUND,)
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


# ── reward panel ─────────────────────────────────────────────────────────────────────────────────────────────────────

NONE_TICKED = "No function is ticked, so the five defaults score: Accuracy, Integer Answer, Strict Format, Soft Format and XML Count."


class RewardPanel(QWidget):
    """The reward table with its heading and buttons.

    Attributes:
        model, table – the RewardModel and its view.
        arguments – the detail of the current row, with fields for its arguments.

    Signals:
        picked(names, weights) – the user changed the table.
        file_requested – a reward file is to be added.
    """

    picked = Signal(list, list)
    file_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.model = RewardModel(self)
        self.table = RewardTable(self.model)
        self.model.picked.connect(self.picked)
        self.arguments = RewardArguments()
        self.arguments.changed.connect(self._take_arguments)
        self._current = ""
        self.table.selectionModel().currentRowChanged.connect(self._show_current)
        self._count = PlainLabel()
        self._count.setProperty("role", "muted")
        self.problem = PlainLabel(wordWrap=True)
        self.problem.setProperty("role", "problem")
        self.problem.setFont(theme.caption_font())
        self.problem.hide()
        self.none_ticked = PlainLabel(NONE_TICKED, wordWrap=True)
        self.none_ticked.setProperty("role", "muted")
        self.none_ticked.hide()
        self.use_defaults = QPushButton("Use All Defaults")
        self.use_defaults.clicked.connect(lambda: self.model.use_only(DEFAULT_REWARDS))
        self.add_file = QPushButton("Add File…")
        self.add_file.setToolTip("A Python file of your own. Its functions are read from the text; nothing is run.")
        self.add_file.clicked.connect(self.file_requested)
        self.more = LinkButton("")
        self.more.clicked.connect(self.show_all)
        self._last_shown: tuple[Sequence[RewardEntry], Any, Any] = ((), [], [])
        self._visible_names: set[str] = set()
        self._lay_out()

    def show_rewards(self, entries: Sequence[RewardEntry], names: Any, weights: Any) -> None:
        """Show rows for the default functions, the user's own, and the ticked ones; the others with `show_all`."""
        self._last_shown = (entries, names, weights)
        visible = {*DEFAULT_REWARDS, *self._visible_names, *(names if isinstance(names, list) else ())}
        rows = [entry for entry in entries if entry.name in visible or entry.source != BUILT_IN]
        self._visible_names = {entry.name for entry in rows}  # a row that is unticked stays in the table
        self.model.show_rewards(rows, names, weights)
        self._restore_current()
        self._show_count()
        self.more.setText(f"Show {len(entries) - len(rows)} more")
        self.more.setVisible(len(entries) > len(rows))

    def _show_count(self) -> None:
        """How many functions are used; with no tick the defaults, as in mlx-lm-lora."""
        ticked = len(self.model.ticked)
        self._count.setText(f"{ticked} used" if ticked else f"the {len(DEFAULT_REWARDS)} defaults used")
        self.none_ticked.setVisible(not ticked)

    def show_means(self, means: Mapping[str, float]) -> None:
        """Show the mean score of each function on the bench, by metric name."""
        self.table.show_means(means)

    def show_all(self) -> None:
        """Show a row for every function."""
        entries, names, weights = self._last_shown
        self._visible_names = {entry.name for entry in entries}
        self.show_rewards(entries, names, weights)

    def _show_current(self, index: QModelIndex) -> None:
        """Show the detail of the row that the user has chosen."""
        if index.isValid():
            entry = self.model.rows[index.row()].entry
            self._current = entry.name
            self.arguments.show_entry(entry)

    def _restore_current(self) -> None:
        """Choose the same function again after the rows were replaced."""
        rows = (i for i, row in enumerate(self.model.rows) if row.entry.name == self._current)
        row = next(rows, None)
        if row is None:
            self.arguments.show_entry(None)
        elif self.table.currentIndex().row() != row:
            self.table.setCurrentIndex(self.model.index(row, LABEL))
        else:
            self.arguments.show_entry(self.model.rows[row].entry)

    def _take_arguments(self, old: str, new: str) -> None:
        """Use a function with other arguments: in place of the entry with the old ones, or besides, if that was not ticked."""
        ticked = {row.entry.name: 1.0 if row.weight is None else row.weight for row in self.model.ticked}
        weights = {new if name == old else name: weight for name, weight in ticked.items()}
        weights.setdefault(new, 1.0)
        self._current = new
        all_one = all(weight == 1 for weight in weights.values())
        self.picked.emit(list(weights), [] if all_one else list(weights.values()))

    def show_problem(self, sentence: str) -> None:
        self.problem.setText(sentence)
        self.problem.setVisible(bool(sentence))

    def tab_stops(self) -> list[QWidget]:
        """The widgets that Tab visits, in order."""
        return [self.table, self.use_defaults, self.add_file, self.more]

    def focusNextPrevChild(self, forward: bool) -> bool:
        """The fields of the arguments come and go, and so cannot be in the page's fixed order: Tab goes from the table to them."""
        fields, focused = self.arguments.tab_stops(), QApplication.focusWidget()
        chain = [self.table, *fields, self.use_defaults]
        if fields and focused in chain:
            following = chain.index(focused) + (1 if forward else -1)
            if 0 <= following < len(chain):
                reason = Qt.FocusReason.TabFocusReason if forward else Qt.FocusReason.BacktabFocusReason
                chain[following].setFocus(reason)
                return True
        return super().focusNextPrevChild(forward)

    def _lay_out(self) -> None:
        title = PlainLabel("Default Reward Functions")
        title.setFont(theme.heading_font())
        above, below, rule = QHBoxLayout(), QHBoxLayout(), QFrame()
        above.addWidget(title)
        above.addStretch()
        above.addWidget(self._count)
        below.addWidget(self.use_defaults)
        below.addWidget(self.add_file)
        below.addStretch()
        below.addWidget(self.more)
        rule.setProperty("role", "rule")
        column = QVBoxLayout(self)
        column.setContentsMargins(0, theme.SPACE // 2, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addLayout(above)
        for part in (rule, self.table, self.none_ticked, self.arguments, self.problem):
            column.addWidget(part)
        column.addLayout(below)


COLUMNS = 3
"""Fields side by side."""
_YES_NO = {"true": "Yes", "false": "No"}
_KIND_WORDS = (("bool", "yes or no"), ("int", "whole number"), ("float", "number"), ("list", "list"), ("str", "text"))


class RewardArguments(QWidget):
    """What a function scores, and its arguments as typed fields; an empty field stands for the default.

    Signals:
        changed(entry as it was, entry as it is now) – the user changed an argument.
    """

    changed = Signal(str, str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._entry: RewardEntry | None = None
        self.fields: dict[str, QLineEdit | ComboBox] = {}
        self._about = label(font=theme.caption_font(), role="muted", wrap=True, selectable=True)
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(2 * theme.SPACE)
        self._grid.setVerticalSpacing(4)
        for column in range(COLUMNS):
            self._grid.setColumnStretch(column, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(theme.SPACE, 0, theme.SPACE, theme.SPACE)
        column.setSpacing(theme.SPACE)
        column.addWidget(self._about)
        column.addLayout(self._grid)
        self.hide()

    def show_entry(self, entry: RewardEntry | None) -> None:
        """Show this function; None hides it all."""
        if entry == self._entry:
            return
        # Rebuilt only for another function: after a change the next field has the focus already, and must keep it.
        is_same = entry is not None and self._entry is not None and _signature(entry) == _signature(self._entry)
        self._entry = entry
        self.setVisible(entry is not None)
        if entry is None:
            return
        scores = entry.scores.replace("`", "") or "Its docstring does not say what it scores."
        self._about.setText(f"{entry.label}: {scores}")
        if not is_same:
            clear_layout(self._grid)
            self.fields = {}
            for index, parameter in enumerate(entry.parameters):
                self._add_field(index, parameter)
        self._show_values(_call(entry).arguments)

    def tab_stops(self) -> list[QWidget]:
        return list(self.fields.values())

    def _show_values(self, given: Mapping[str, Any]) -> None:
        for name, field in self.fields.items():
            value = given.get(name)
            if isinstance(field, ComboBox):
                field.setCurrentIndex(max(0, field.findData("" if value is None else str(value).lower())))
            elif field.text() != _argument_text(value):
                field.setText(_argument_text(value))

    def _add_field(self, index: int, parameter: Parameter) -> None:
        kind = next((words for name, words in _KIND_WORDS if name in parameter.kind), "")
        title = ElidedLabel()  # a long name must not make the page wider than the window
        title.setText(" · ".join(filter(None, [parameter.name.replace("_", " "), kind])))
        title.setToolTip(plain_tip(title.text()))
        field = self._editor(parameter)
        field.setAccessibleName(f"{parameter.name} of {self._entry.label if self._entry else ''}")
        field.setToolTip(
            plain_tip("It must be given." if parameter.default is None else f"Default: {parameter.default}")
        )
        title.setBuddy(field)
        row, column = divmod(index, COLUMNS)
        self._grid.addWidget(title, 2 * row, column)
        self._grid.addWidget(field, 2 * row + 1, column)
        self.fields[parameter.name] = field

    def _editor(self, parameter: Parameter) -> QLineEdit | ComboBox:
        if parameter.kind == "bool":
            menu = ComboBox()
            default = _YES_NO.get((parameter.default or "").lower(), "")
            menu.addItem(f"Default ({default.lower()})" if default else "Choose", "")
            for key, word in _YES_NO.items():
                menu.addItem(word, key)
            menu.activated.connect(self._emit_changed)
            return menu
        line = QLineEdit()
        line.setPlaceholderText("must be given" if parameter.default is None else parameter.default.strip("\"'"))
        line.editingFinished.connect(self._emit_changed)
        return line

    def _emit_changed(self) -> None:
        if self._entry is None:
            return
        call = _call(self._entry)
        arguments = dict(call.arguments)
        for parameter in self._entry.parameters:
            value = _value(self._typed(parameter.name), parameter.kind)
            if value is None:
                arguments.pop(parameter.name, None)
            else:
                arguments[parameter.name] = value
        text = RewardCall(call.function, arguments, call.alias, call.file).text
        if text != call.text:
            self.changed.emit(self._entry.name, text)

    def _typed(self, name: str) -> str:
        field = self.fields[name]
        return field.currentData() if isinstance(field, ComboBox) else field.text()


def _signature(entry: RewardEntry) -> tuple[str, tuple[Parameter, ...]]:
    call = _call(entry)
    return f"{call.file}::{call.function}", entry.parameters


def _call(entry: RewardEntry) -> RewardCall:
    try:
        return read_call(entry.name)
    except UserError:  # a name that cannot be parsed is shown as one; the form's problems say why
        return RewardCall(entry.name)


def _argument_text(value: Any) -> str:
    if isinstance(value, list):
        return value_text.list_text(value)
    return "" if value is None else value_text.number_text(value) if isinstance(value, float) else str(value)


def _value(typed: str, kind: str) -> Any:
    """The value of a typed argument: None for an empty one; text that is no number stays text, which the form's check refuses."""
    if not typed.strip():
        return None
    if kind == "bool":
        return typed == "true"
    if "list" in kind:
        return value_text.list_value(typed)
    if "int" in kind or "float" in kind:
        return _number(typed, whole="float" not in kind)
    return typed


def _number(typed: str, *, whole: bool) -> float | str:
    value = value_text.number_value(typed, whole)
    try:
        return value if isinstance(value, int | float) else float(value)
    except ValueError:
        return value
