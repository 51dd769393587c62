"""The reward functions as a block of the form: the table, the arguments of its current row, and two buttons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from PySide6.QtCore import QModelIndex, Qt, Signal
from PySide6.QtGui import QColor, QFont, QKeyEvent
from PySide6.QtWidgets import QAbstractItemView, QApplication, QLineEdit, QMenu, QWidget

from app import theme
from app.pages.train.judge_fields import JudgeFields
from app.state.judges import DEFAULT_URL, JudgeServers
from app.state.reward_bench import RewardBench
from app.widgets.basic import icons
from app.widgets.basic.controls import ComboBox, ElidedLabel, ElidedLink, LinkButton, ListedEdit
from app.widgets.basic.labels import REMOVE_KEYS, button, explain_at, label, plain_tip
from app.widgets.basic.layout import card, clear_layout, column, configure, connect, grid, holder, row
from app.widgets.basic.number_format import DASH, figure
from app.widgets.basic.tables import BaseTable, Column, DraggedRowsModel, Index
from app.widgets.form import value_text
from app.widgets.reward_delegates import TickDelegate, WeightDelegate, toggle_tick
from app.widgets.rubric_editor import RubricEditor
from backend.rewards.catalogue import (
    ALIAS,
    BUILT_IN,
    DEFAULT_REWARDS,
    JUDGE,
    Parameter,
    RewardCall,
    RewardEntry,
    find_call,
    metric_name,
)

USE, LABEL, FUNCTION, SCORES, SOURCE, MEAN, WEIGHT = range(7)
ROW, COMPACT_ROW = 38, 30
"""Height of a row in pixels: two lines of text, or one."""
TRIED_ROWS = 4
TRY_TIP = f"Samples completions to {TRIED_ROWS} random prompts from the model, and scores them"
MIN_SCORES_WIDTH = 184
COLUMNS = 3
FIRST_RUBRIC = "helpful_answer"
NOT_FOUND = "No function of this name was found."
NONE_TICKED = (
    "No function is ticked, so the five defaults score: "
    "Accuracy, Integer Answer, Strict Format, Soft Format and XML Count."
)
_STEPS = {Qt.Key.Key_Up: -1, Qt.Key.Key_Down: 1}
_YES_NO = {"true": "Yes", "false": "No"}
_KIND_WORDS = {"bool": "yes or no", "int": "whole number", "float": "number", "list": "list", "str": "text"}


@dataclass
class RewardRow:
    """One function. `weight` is None if it is not a number; `known` is False without such a function."""

    entry: RewardEntry
    ticked: bool = False
    weight: float | None = 1.0
    known: bool = True


class RewardModel(DraggedRowsModel):
    """Functions as rows, the ticked ones in the order of the setting."""

    DRAG_TYPE = "application/x-grpo-studio-reward"
    columns = (
        Column("Use", 44),
        Column("Reward", 136),
        Column("Function", 212),
        Column("What it scores"),
        Column("Source", 108),
        Column("Mean", 72, is_figure=True),
        Column("Weight", 72, is_figure=True),
    )
    picked = Signal(list, list)  # names, weights
    rows: list[RewardRow]

    means: Mapping[str, float] = {}

    def show_means(self, means: Mapping[str, float]) -> None:
        self.means = dict(means)
        self.repaint()

    def show_rewards(self, entries: Sequence[RewardEntry], listed: Sequence[str], weights: Any) -> None:
        if not isinstance(weights, list) or not weights:
            weights = [1.0 if weights in ([], None, "") else None] * len(listed)
        numbers = [float(weight) if isinstance(weight, int | float) else None for weight in weights]
        before = {row.entry.name: row.weight for row in self.rows}  # the weight of an unticked row is kept
        before |= dict(zip(listed, numbers + [None] * len(listed), strict=False))
        rows = [RewardRow(each, each.name in listed, before.get(each.name, 1.0)) for each in entries]
        unticked = [row.entry.name for row in self.rows if not row.known and not row.ticked]  # they keep their rows
        for name in dict.fromkeys([*listed, *unticked]):
            if all(row.entry.name != name for row in rows):
                entry = RewardEntry(name, name, NOT_FOUND, "", 0)
                rows.append(RewardRow(entry, name in listed, before[name], known=False))
        places = {row.entry.name: place for place, row in enumerate(self.rows)}
        if places.keys() == {row.entry.name for row in rows}:  # a tick moves no row
            rows.sort(key=lambda row: places[row.entry.name])
        in_order = iter(sorted((row for row in rows if row.ticked), key=lambda row: listed.index(row.entry.name)))
        rows = [next(in_order) if row.ticked else row for row in rows]
        if [row.entry for row in rows] == [row.entry for row in self.rows]:
            self.rows = rows
            self.repaint()
        else:
            self.set_rows(rows)

    def use_defaults(self) -> None:
        for each in self.rows:
            each.ticked, each.weight = each.entry.name in DEFAULT_REWARDS, 1.0
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

    def drop_row(self, origin: int, target: int) -> None:
        self.move(origin, target)

    @property
    def ticked(self) -> list[RewardRow]:
        return [row for row in self.rows if row.ticked]

    def _emit_picked(self) -> None:
        self.repaint()
        self.picked.emit(*names_and_weights({row.entry.name: row.weight for row in self.ticked}))

    def flags(self, index: Index) -> Qt.ItemFlag:
        if not index.isValid():
            return Qt.ItemFlag.ItemIsDropEnabled
        flags = super().flags(index)
        if self.rows[index.row()].ticked:
            flags |= Qt.ItemFlag.ItemIsDragEnabled
        return flags | Qt.ItemFlag.ItemIsUserCheckable if index.column() == USE else flags

    def is_editable(self, row: int, column: int) -> bool:
        return column == WEIGHT

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        row = self.rows[index.row()]
        if role == Qt.ItemDataRole.CheckStateRole:
            row.ticked = Qt.CheckState(value) == Qt.CheckState.Checked
        else:
            row.weight = float(value)
        self._emit_picked()
        return True

    def text(self, row: RewardRow, column: int) -> str | None:
        entry = row.entry
        weight = DASH if row.weight is None else value_text.number_text(row.weight)
        source = entry.source if entry.source in (BUILT_IN, "") else Path(entry.source).name
        if (kind := kind_of(entry)) != "function":
            source = kind
        mean = figure(self.means.get(metric_name(entry.name)))
        return (None, entry.label, entry.name, entry.scores.replace("`", ""), source, mean, weight)[column]

    def extra(self, row: RewardRow, index: Index, role: int) -> Any:
        match role, index.column():
            case Qt.ItemDataRole.EditRole, 6:
                return row.weight
            case Qt.ItemDataRole.AccessibleDescriptionRole, 6:
                return row.entry.label
            case Qt.ItemDataRole.CheckStateRole, 0:
                return Qt.CheckState.Checked if row.ticked else Qt.CheckState.Unchecked
            case Qt.ItemDataRole.AccessibleTextRole, 0:
                return f"{row.entry.label}, {'used' if row.ticked else 'not used'}"
            case Qt.ItemDataRole.DecorationRole, 1:
                name = metric_name(row.entry.name)
                colour = theme.reward_colour(name) if row.ticked else theme.palette().hairline
                return icons.dot(colour.name(), 10, 3, 0)
        return None

    def colour(self, row: RewardRow, column: int) -> QColor:
        colours = theme.palette()
        if not row.known and column in (LABEL, SCORES):
            return colours.warning
        return colours.text if row.ticked and column in (LABEL, WEIGHT) else colours.muted

    def font(self, row: RewardRow, column: int) -> QFont | None:
        if column == FUNCTION:
            return theme.mono_font(theme.CAPTION)
        if column in (SCORES, SOURCE):
            return theme.caption_font()
        return theme.figures_font() if column in (MEAN, WEIGHT) else None

    def tip(self, row: RewardRow, column: int) -> str:
        entry = row.entry
        where = f"{entry.source}, line {entry.line}" if entry.line and entry.source != BUILT_IN else entry.source
        lines = (entry.scores, f"{entry.name} ({where})") if row.known else (NOT_FOUND,)
        return "".join(f"<p>{escape(line)}</p>" for line in lines)


def kind_of(entry: RewardEntry) -> str:
    """ "judge", "reward model" or "function"."""
    call = find_call(entry.name)
    if call is not None and call.is_model:
        return "reward model"
    return JUDGE if call is not None and call.function == JUDGE and entry.source == BUILT_IN else "function"


def has_arguments(entry: RewardEntry) -> bool:
    """True for what exists in the setting only: a model, or a function with arguments, a name or a file."""
    call = find_call(entry.name)
    return call is not None and bool(call.arguments or call.alias or call.file or call.is_model)


def names_and_weights(weights: Mapping[str, float | None]) -> tuple[list[str], list[float]]:
    """The two settings for functions with their weights; no weights if all are 1."""
    values = [1.0 if weight is None else weight for weight in weights.values()]
    return list(weights), [] if all(value == 1 for value in values) else values


class RewardTable(BaseTable):
    """The table, as high as its rows. Space toggles the current row, a click or a digit edits its weight."""

    remove_requested = Signal()

    def __init__(self, model: RewardModel) -> None:
        super().__init__(model=model, name="Reward functions", single=True)
        self._model = model
        self.setItemDelegateForColumn(USE, TickDelegate(self))
        self.setItemDelegateForColumn(WEIGHT, WeightDelegate(self))
        edit, no_bar = QAbstractItemView.EditTrigger, Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        configure(
            self,
            accessibleDescription="Space ticks a row; a digit changes its weight; Alt with the arrows moves it.",
            editTriggers=edit.SelectedClicked | edit.DoubleClicked | edit.EditKeyPressed | edit.AnyKeyPressed,
            dragDropMode=QAbstractItemView.DragDropMode.InternalMove,
            dragDropOverwriteMode=False,
            wordWrap=True,
            verticalScrollBarPolicy=no_bar,
            horizontalScrollBarPolicy=no_bar,
        )
        self.verticalHeader().setDefaultSectionSize(theme.scaled(ROW))
        self.clicked.connect(lambda index: index.column() == WEIGHT and self.edit(index))
        model.modelReset.connect(lambda: self.fit_rows(len(model.rows)))
        self.fit_rows(0)

    def set_compact(self, is_compact: bool) -> None:
        """One line of text in a row instead of two."""
        self.verticalHeader().setDefaultSectionSize(theme.scaled(COMPACT_ROW if is_compact else ROW))
        self.fit_rows(len(self._model.rows))

    def fit_columns(self) -> None:
        width = [each.width for each in self._model.columns]
        space = self.width() / theme.text_scale() - sum(width[each] for each in (USE, LABEL, MEAN, WEIGHT))
        self.setColumnHidden(FUNCTION, space - width[FUNCTION] < MIN_SCORES_WIDTH)
        self.setColumnHidden(SOURCE, space - width[FUNCTION] - width[SOURCE] < MIN_SCORES_WIDTH)

    def move_row(self, by: int) -> None:
        """Move the current row up (−1) or down (1) among the ticked ones."""
        row, rows = self.currentIndex().row(), self._model.rows
        if not 0 <= row < len(rows):
            return
        moved = rows[row]
        others = [i for i, other in enumerate(rows) if other.ticked and (i - row) * by > 0]
        if others and self._model.move(row, others[0] + 1 if by > 0 else others[-1]):
            place = next(i for i, other in enumerate(self._model.rows) if other.entry.name == moved.entry.name)
            self.setCurrentIndex(self._model.index(place, self.currentIndex().column()))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        current = self.currentIndex()
        if event.key() == Qt.Key.Key_Space and current.isValid():
            toggle_tick(self._model, current.siblingAtColumn(USE))
        elif event.modifiers() & Qt.KeyboardModifier.AltModifier and event.key() in _STEPS:
            self.move_row(_STEPS[Qt.Key(event.key())])
        elif event.key() in (Qt.Key.Key_Delete, Qt.Key.Key_Backspace):
            self.remove_requested.emit()
        else:
            super().keyPressEvent(event)


class RewardPanel(QWidget):
    picked = Signal(list, list)  # names, weights
    model_wanted = Signal(str, object)  # kind of the picker, and what takes the chosen id or folder

    def __init__(self, bench: RewardBench, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._bench, self._seed = bench, 0
        self.has_defaults = True
        self.model = RewardModel(self)
        self.table = RewardTable(self.model)
        self.servers = JudgeServers(bench.service, self)
        self.judge_fields = JudgeFields(self.servers, self)
        self.arguments = RewardArguments(self.judge_fields)
        self._current = self._removed = ""
        self._last_shown: tuple[Sequence[RewardEntry], Sequence[str], Any] = ((), [], [])
        self._visible_names: set[str] = set()
        self.count = label(role="muted")
        self.none_ticked = label(NONE_TICKED, role="muted", wrap=True, visible=False)
        self.problem = label(font=theme.caption_font(), role="problem", wrap=True, visible=False)
        self.use_defaults = button("Use All Defaults", self.model.use_defaults)
        self.add_file = button(
            "Add File…", tip="Your own Python file. Its functions are read from the text; nothing is run."
        )
        self.menu = QMenu(self)
        self.menu.addAction("Reward model…", lambda: self.model_wanted.emit("reward model", self.add))
        self.menu.addAction("Judge", self.add_judge)
        self.menu.aboutToShow.connect(self.servers.refresh)
        self.add_model = button("Add Model", menu=self.menu, tip="A model that scores: a reward model, or a judge")
        self.try_button = button("Try", self._try, tip=TRY_TIP)
        self.result = BenchLine(bench)
        self.more = LinkButton("", on_click=self.show_all)
        buttons = (self.use_defaults, self.add_file, self.add_model, self.try_button)
        self.tab_stops: list[QWidget] = [self.table, *buttons, self.result, self.more]
        self.model.picked.connect(self.picked)
        bench.busy_changed.connect(self._show_busy)
        self.arguments.changed.connect(self._take_arguments)
        connect(self.remove, self.arguments.remove.clicked, self.table.remove_requested)
        self.judge_fields.edit_wanted.connect(self._edit_rubric)
        self.judge_fields.model_wanted.connect(lambda take: self.model_wanted.emit("model", take))
        self.table.selectionModel().currentRowChanged.connect(self._show_current)
        column(
            row(label("Default Reward Functions", theme.heading_font()), None, self.count),
            card(role="rule"),
            self.table,
            self.none_ticked,
            self.arguments,
            self.problem,
            row(*buttons, (self.result, 1), self.more),
            into=self,
            margins=(0, 4, 0, 0),
        )

    def _try(self) -> None:
        if self._bench.busy:
            self._bench.cancel()
        else:
            self._seed += 1
            size = int(self._bench.draft.valid_values()["group_size"])
            self._bench.sample("random", TRIED_ROWS, [], size, self._seed)

    def _show_busy(self, activity: str) -> None:
        self.try_button.setText("Cancel" if activity else "Try")

    def show_rewards(self, entries: Sequence[RewardEntry], names: Sequence[str], weights: Any) -> None:
        """Show rows for the default functions, the user's own, and the ticked ones; the others with `show_all`."""
        listed = {entry.name for entry in entries}
        # What has arguments exists only in the setting; unticked, it must not be lost.
        kept = [row.entry for row in self.model.rows if has_arguments(row.entry)]
        self._last_shown = (entries, names, weights)
        entries = [*entries, *(entry for entry in kept if entry.name not in listed | {self._removed})]
        visible = {*DEFAULT_REWARDS, *self._visible_names, *names}
        rows = [entry for entry in entries if entry.name in visible or entry.source != BUILT_IN]
        self._visible_names = {entry.name for entry in rows}  # a row that is unticked stays in the table
        self.model.show_rewards(rows, names, weights)
        place = next((i for i, row in enumerate(self.model.rows) if row.entry.name == self._current), None)
        if place is not None and self.table.currentIndex().row() != place:
            self.table.setCurrentIndex(self.model.index(place, LABEL))
        else:
            self.arguments.show_entry(None if place is None else self.model.rows[place].entry)
        ticked = len(self.model.ticked)
        uses_defaults = self.has_defaults and not ticked
        self.count.setText(f"the {len(DEFAULT_REWARDS)} defaults used" if uses_defaults else f"{ticked or 'none'} used")
        self.none_ticked.setVisible(uses_defaults)
        self.more.setText(f"Show {len(entries) - len(rows)} more")
        self.more.setVisible(len(entries) > len(rows))

    def forget_rows(self) -> None:
        """Forget which functions without a tick have a row, and their weights: the form is another."""
        self._visible_names, self.model.rows = set(), []

    def show_all(self) -> None:
        self._visible_names = {entry.name for entry in self._last_shown[0]}
        self.show_rewards(*self._last_shown)

    def _show_current(self, index: QModelIndex) -> None:
        if index.isValid():
            entry = self.model.rows[index.row()].entry
            self._current = entry.name
            self.arguments.show_entry(entry)

    def add(self, entry: str) -> None:
        """Tick a new entry, under a name of its own if its name is taken, and show its arguments."""
        names = {metric_name(row.entry.name) for row in self.model.rows if row.ticked or has_arguments(row.entry)}
        call, number = find_call(entry), 2
        if call is None:
            return
        alias = name = call.name
        while alias in names:
            alias, number = f"{name}_{number}", number + 1
        text = replace(call, alias=alias if alias != name else call.alias).text
        self._take_arguments("", text)

    def add_judge(self) -> None:
        found = {} if self.servers.at(DEFAULT_URL) or not self.servers.found else {"url": self.servers.found[0]["url"]}
        self.add(RewardCall(JUDGE, {"rubric": FIRST_RUBRIC, **found}).text)

    def remove(self) -> None:
        """Remove the current row, if it is more than a function's name."""
        row = next((row for row in self.model.rows if row.entry.name == self._current), None)
        if row is not None and (has_arguments(row.entry) or not row.known):
            self._take_arguments(row.entry.name, "")

    def _edit_rubric(self) -> None:
        field = self.arguments.fields["rubric"]
        assert isinstance(field, ListedEdit)
        editor = RubricEditor(self._bench, self._current, field.text() or field.placeholderText(), self.window())
        editor.saved.connect(lambda path: field.take(str(path)))
        editor.open()

    def _take_arguments(self, old: str, new: str) -> None:
        """Replace an entry by another; "" is none."""
        weights = {new if row.entry.name == old else row.entry.name: row.weight for row in self.model.ticked}
        weights.setdefault(new, 1.0)
        weights.pop("", None)
        self._current, self._removed = new, old
        self.picked.emit(*names_and_weights(weights))
        self.show_rewards(*self._last_shown)  # an unticked one is not in the setting

    def focusNextPrevChild(self, forward: bool) -> bool:
        fields, focused = self.arguments.tab_stops, QApplication.focusWidget()
        chain = [self.table, *fields, self.use_defaults]
        if fields and focused in chain:
            following = chain.index(focused) + (1 if forward else -1)
            if 0 <= following < len(chain):
                reason = Qt.FocusReason.TabFocusReason if forward else Qt.FocusReason.BacktabFocusReason
                chain[following].setFocus(reason)
                return True
        return super().focusNextPrevChild(forward)


class BenchLine(ElidedLink):
    """What the bench does, or what it has found."""

    def __init__(self, bench: RewardBench) -> None:
        super().__init__("", tip="Show the scores of every completion")
        self._bench = bench
        connect(self._show, bench.busy_changed, bench.changed)
        bench.progress.connect(lambda done, of: self._say(f"{bench.busy}, {done:,} of {of:,}" if of else bench.busy))
        self._show()

    def _show(self, _activity: str = "") -> None:
        bench = self._bench
        first = bench.findings[0]["sentence"] if bench.findings else ""
        failed = (bench.failed or {}).get("sentence", "")
        self._say(f"{bench.busy}…" if bench.busy else failed or first or (bench.count and "Scores are ready") or "")

    def _say(self, text: str) -> None:
        configure(self, text=text, accessibleName=f"Rewards: {text}", enabled=bool(text))


class RewardArguments(QWidget):
    changed = Signal(str, str)  # old entry, new entry

    def __init__(self, judge: JudgeFields) -> None:
        super().__init__()
        self._judge = judge
        self._entry: RewardEntry | None = None
        self._signature: tuple[str, Sequence[Parameter]] = ("", ())
        self.fields: dict[str, QLineEdit | ComboBox] = {}
        self.about = label(font=theme.caption_font(), role="muted", wrap=True, selectable=True)
        self.remove = LinkButton("Remove", tip=f"Remove this row ({REMOVE_KEYS})")
        self._grid = grid((), spacing=(2 * theme.SPACE, 4))
        for i in range(COLUMNS):
            self._grid.setColumnStretch(i, 1)
        top = Qt.AlignmentFlag.AlignTop
        parts = (row((self.about, 1), (self.remove, 0, top)), self._grid, judge.line)
        column(*parts, into=self, margins=(theme.SPACE, 0, theme.SPACE, theme.SPACE))
        self.hide()

    @property
    def tab_stops(self) -> list[QWidget]:
        more = [self._judge.edit, self._judge.key, self.remove]
        return [*self.fields.values(), *(each for each in more if each.isVisibleTo(self))]

    def show_entry(self, entry: RewardEntry | None) -> None:
        """Show this function; None hides the widget."""
        if entry == self._entry:
            return
        self._entry = entry
        self.setVisible(entry is not None)
        if entry is None:
            return
        call, kind = find_call(entry.name) or RewardCall(entry.name), kind_of(entry)
        self.about.setText(f"{entry.label}: {entry.scores.replace('`', '') or 'no docstring'}")
        self.remove.setVisible(has_arguments(entry))
        parameters = entry.parameters
        if kind != "function":
            parameters = (*parameters, Parameter(ALIAS, "str", repr(replace(call, alias="").name)))
        # Rebuilt only for another function: after a change the next field has the focus already, and must keep it.
        if (signature := (f"{call.file}::{call.function}", parameters)) != self._signature:
            self._signature = signature
            self._build(entry, parameters, is_judge=kind == JUDGE)
        for name, field in self.fields.items():
            value = call.alias if name == ALIAS else call.arguments.get(name)
            if isinstance(field, ComboBox):
                value = field.property("default") if value is None else value
                field.setCurrentIndex(max(0, field.findData(str(value).lower())))
            else:
                field.setText(value_text.list_text(value) if isinstance(value, list) else value_text.number_text(value))
        self._judge.use(self.fields if kind == JUDGE else {})
        explain_at(self, "../judges.md" if kind != "function" else "")

    def _build(self, entry: RewardEntry, parameters: Sequence[Parameter], *, is_judge: bool) -> None:
        self._judge.edit.setParent(self)  # it outlives the fields
        clear_layout(self._grid)
        self.fields = {}
        for i, parameter in enumerate(parameters):
            own = self._judge.editor(parameter.name) if is_judge else None
            field = self.fields[parameter.name] = self._editor(entry, parameter, own)
            kind = next((words for name, words in _KIND_WORDS.items() if name in parameter.kind), "")
            text = " · ".join(filter(None, [parameter.name.replace("_", " "), "" if is_judge else kind]))
            title = ElidedLabel(text=text, toolTip=plain_tip(text), buddy=field)
            line, place = divmod(i, COLUMNS)
            self._grid.addWidget(title, 2 * line, place)
            if is_judge and parameter.name == "rubric":
                self._grid.addWidget(holder(row((field, 1), self._judge.edit)), 2 * line + 1, place)
            else:
                self._grid.addWidget(field, 2 * line + 1, place)

    def _editor(
        self, entry: RewardEntry, parameter: Parameter, own: QLineEdit | ComboBox | None
    ) -> QLineEdit | ComboBox:
        default = (parameter.default or "").strip("\"'")
        if own is None and parameter.kind == "bool":
            word = _YES_NO.get(default.lower(), "").lower()
            own = ComboBox(items={"": f"Default ({word})" if word else "Choose", **_YES_NO})
            default = ""
        field = own or QLineEdit()
        if isinstance(field, ComboBox):
            field.setProperty("default", default)
            field.activated.connect(self._emit_changed)
        else:
            hint = "required" if parameter.default is None else default.removesuffix(".0")
            configure(field, placeholderText=hint, editingFinished=self._emit_changed)
        tip = plain_tip("Required" if parameter.default is None else f"Default: {parameter.default}")
        return configure(field, accessibleName=f"{parameter.name} of {entry.label}", toolTip=tip)

    def _emit_changed(self) -> None:
        if self._entry is None:
            return
        call = find_call(self._entry.name) or RewardCall(self._entry.name)
        arguments, kinds = dict(call.arguments), {each.name: each.kind for each in self._signature[1]}
        for name, field in self.fields.items():
            is_menu = isinstance(field, ComboBox)
            typed = field.currentData() if is_menu else field.text()
            if typed.strip() and not (is_menu and typed == field.property("default")):
                arguments[name] = _value(typed, kinds[name])
            else:
                arguments.pop(name, None)
        alias = str(arguments.pop(ALIAS, "")) if ALIAS in kinds else call.alias
        text = RewardCall(call.function, arguments, alias, call.file).text
        if text != call.text:
            self.changed.emit(self._entry.name, text)


def _value(typed: str, kind: str) -> Any:
    if kind == "bool":
        return typed == "true"
    if "list" in kind:
        return value_text.list_value(typed)
    if "int" in kind or "float" in kind:
        value = value_text.number_value(typed, "float" not in kind)
        return value if isinstance(value, int | float) else value_text.float_value(value)
    return typed
