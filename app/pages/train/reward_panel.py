"""The reward functions as a block of the form: the table, the arguments of its current row, and two buttons."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from PySide6.QtCore import QModelIndex, Qt, Signal
from PySide6.QtWidgets import QAbstractItemView, QInputDialog, QLineEdit, QMenu, QWidget

from app import theme
from app.pages.train.rubric_editor import RubricEditor
from app.state.reward_bench import DEFAULT_URL, LOCAL, JudgeServers, RewardBench, address_of, is_remote
from app.widgets.basic import icons
from app.widgets.basic.controls import ComboBox, ElidedLabel, ElidedLink, LinkButton, ListedEdit
from app.widgets.basic.dialogs import open_file
from app.widgets.basic.labels import REMOVE_KEYS, button, label, on_remove, plain_tip, show_text
from app.widgets.basic.layout import card, clear_layout, column, configure, connect, grid, holder, row, set_tab_order
from app.widgets.basic.number_format import DASH, counted, figure
from app.widgets.basic.tables import BaseTable, Column, Index, RowsModel
from app.widgets.form import value_text
from app.widgets.reward_delegates import TickDelegate, WeightDelegate
from backend.config.setting import has_default_rewards
from backend.judges.rubric import bundled_rubrics, read_rubric
from backend.rewards import catalogue
from backend.rewards.catalogue import BUILT_IN, JUDGE, Parameter, RewardCall, RewardEntry, find_call, metric_name

USE, LABEL, FUNCTION, SCORES, SOURCE, MEAN, WEIGHT = range(7)
ROW, COMPACT_ROW = 38, 30  # height of a row in pixels: two lines of text, or one
TRIED_ROWS = 4
TRY_TIP = f"Samples completions to {TRIED_ROWS} random prompts from the model, and scores them"
MIN_SCORES_WIDTH = 184
COLUMNS = 3
NOT_FOUND = "No function of this name was found."
NONE_TICKED = (
    "No function is ticked, so the five defaults score: "
    "Accuracy, Integer Answer, Strict Format, Soft Format and XML Count."
)
RUBRICS = "Rubrics (*.toml *.json)"
JUDGE_CHOICES = {
    "mode": {"group": "A group together", "single": "Each answer alone"},
    "when_unreachable": {"pause": "Pause the run", "skip": "Go on without its scores"},
}
_YES_NO = {"true": "Yes", "false": "No"}
_KIND_WORDS = {"bool": "yes or no", "int": "whole number", "float": "number", "list": "list", "str": "text"}


@dataclass
class RewardRow:
    """One function. `weight` is None if it is not a number; `known` is False without such a function."""

    entry: RewardEntry
    ticked: bool = False
    weight: float | None = 1.0
    known: bool = True


class RewardModel(RowsModel):
    columns = (
        Column("Use", 44, font=theme.body_font),
        Column("Reward", 136, font=theme.body_font),
        Column("Function", 212, colour="muted", font=partial(theme.mono_font, theme.CAPTION)),
        Column("What it scores", colour="muted", font=theme.caption_font),
        Column("Source", 108, colour="muted", font=theme.caption_font),
        Column("Mean", 72, is_figure=True, colour="muted"),
        Column("Weight", 72, is_figure=True),
    )
    picked = Signal(object)  # name → weight, in order: a dict would arrive sorted
    rows: list[RewardRow]

    means: Mapping[str, float] = {}

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
            each.ticked, each.weight = each.entry.name in catalogue.DEFAULT_REWARDS, 1.0
        self._emit_picked()

    @property
    def ticked(self) -> list[RewardRow]:
        return [row for row in self.rows if row.ticked]

    def _emit_picked(self) -> None:
        self.repaint()
        self.picked.emit({row.entry.name: row.weight for row in self.ticked})

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = super().flags(index)
        return flags | Qt.ItemFlag.ItemIsUserCheckable if index.isValid() and index.column() == USE else flags

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

    def colour(self, row: RewardRow, column: int) -> str:
        if not row.known and column in (LABEL, SCORES):
            return "warning"
        return super().colour(row, column) if row.ticked else "muted"

    def tip(self, row: RewardRow, column: int) -> str:
        entry = row.entry
        where = f"{entry.source}, line {entry.line}" if entry.line and entry.source != BUILT_IN else entry.source
        lines = (entry.scores, f"{entry.name} ({where})") if row.known else (NOT_FOUND,)
        return "".join(f"<p>{escape(line)}</p>" for line in lines)


def kind_of(entry: RewardEntry) -> str:
    """ "judge", "reward model" or "function"."""
    if (call := find_call(entry.name)) is not None and call.is_model:
        return "reward model"
    return JUDGE if call is not None and call.function == JUDGE and entry.source == BUILT_IN else "function"


def has_arguments(entry: RewardEntry) -> bool:
    """True for what exists in the setting only: a model, or a function with arguments, a name or a file."""
    call = find_call(entry.name)
    return call is not None and bool(call.arguments or call.alias or call.file or call.is_model)


class RewardTable(BaseTable):
    """The table, as high as its rows. Space toggles the current row, a click or a digit edits its weight."""

    def __init__(self, model: RewardModel) -> None:
        super().__init__(model=model, name="Reward functions", single=True)
        self._model = model
        self.setItemDelegateForColumn(USE, TickDelegate(self))
        self.setItemDelegateForColumn(WEIGHT, WeightDelegate(self))
        edit, no_bar = QAbstractItemView.EditTrigger, Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        self.setAccessibleDescription("Space ticks a row; a digit changes its weight.")
        self.setEditTriggers(edit.SelectedClicked | edit.DoubleClicked | edit.EditKeyPressed | edit.AnyKeyPressed)
        configure(self, wordWrap=True, verticalScrollBarPolicy=no_bar, horizontalScrollBarPolicy=no_bar)
        self.verticalHeader().setDefaultSectionSize(theme.scaled(ROW))
        self.clicked.connect(lambda index: index.column() == WEIGHT and self.edit(index))
        model.modelReset.connect(lambda: self.fit_rows(len(model.rows)))
        self.fit_rows(0)

    def set_compact(self, is_compact: bool) -> None:
        self.verticalHeader().setDefaultSectionSize(theme.scaled(COMPACT_ROW if is_compact else ROW))
        self.fit_rows(len(self._model.rows))

    def fit_columns(self) -> None:
        width = [each.width for each in self._model.columns]
        space = self.width() / theme.text_scale() - sum(width[each] for each in (USE, LABEL, MEAN, WEIGHT))
        self.setColumnHidden(FUNCTION, space - width[FUNCTION] < MIN_SCORES_WIDTH)
        self.setColumnHidden(SOURCE, space - width[FUNCTION] - width[SOURCE] < MIN_SCORES_WIDTH)


class RewardPanel(QWidget):
    model_wanted = Signal(str, object)  # kind of the picker, and what takes the chosen id or folder

    def __init__(self, bench: RewardBench, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._bench, self._draft, self._seed = bench, bench.draft, 0
        self.model = RewardModel(self)
        self.table = RewardTable(self.model)
        self.servers = JudgeServers(bench.service, self)
        self.arguments = RewardArguments(self.servers, after=self.table)
        self._current = self._removed = ""
        self._visible_names: set[str] = set()
        self.count = label(role="muted")
        self.none_ticked = label(NONE_TICKED, role="muted", wrap=True, visible=False)
        self.problem = label(font=theme.caption_font(), role="problem", wrap=True, visible=False)
        self.use_defaults = button("Use All Defaults", self.model.use_defaults)
        tip = "Your own Python file. Its functions are read from the text; nothing is run."
        self.add_file = button("Add File…", tip=tip)
        self.menu = QMenu(self)
        self.menu.addAction("Reward model…", lambda: self.model_wanted.emit("reward model", self.add))
        self.menu.addAction("Judge", self.add_judge)
        self.menu.aboutToShow.connect(self.servers.refresh)
        self.add_model = button("Add Model", menu=self.menu, tip="A model that scores: a reward model, or a judge")
        self.try_button = button("Try", self._try, tip=TRY_TIP)
        self.result = ElidedLink("", tip="Show the scores of every completion")
        self.more = LinkButton("", on_click=self.show_all)
        buttons = self._buttons = (self.use_defaults, self.add_file, self.add_model, self.try_button)
        self.model.picked.connect(self._pick)
        connect(self._show_bench, bench.busy_changed, bench.changed)
        bench.progress.connect(lambda done, of: self._say(f"{bench.busy}, {done:,} of {of:,}" if of else bench.busy))
        bench.refused.connect(self._say)
        bench.refused.connect(self.servers.refresh)  # a judge's may be gone
        self._show_bench()
        self.arguments.changed.connect(self._take_arguments)
        self.arguments.remove.clicked.connect(self.remove)
        on_remove(self.table, self.remove)
        self.arguments.edit.clicked.connect(self._edit_rubric)
        self.arguments.model_wanted.connect(lambda take: self.model_wanted.emit("model", take))

        def show_current(index: QModelIndex) -> None:
            if index.isValid():
                entry = self.model.rows[index.row()].entry
                self._current = entry.name
                self.arguments.show_entry(entry)

        self.table.selectionModel().currentRowChanged.connect(show_current)
        head = row(label("Default Reward Functions", theme.heading_font()), None, self.count, self.more)
        parts = (self.table, self.none_ticked, self.arguments, self.problem, row(*buttons, None), self.result)
        column(head, card(role="rule"), *parts, into=self, margins=(0, 4, 0, 0))

    @property
    def tab_stops(self) -> list[QWidget]:
        return [self.more, self.table, *self.arguments.tab_stops, *self._buttons, self.result]

    def _try(self) -> None:
        if self._bench.busy:
            self._bench.cancel()
        else:
            self._seed += 1
            self._bench.sample("random", TRIED_ROWS, [], int(self._draft.valid_values()["group_size"]), self._seed)

    def _show_bench(self, _activity: str = "") -> None:
        bench = self._bench
        self.try_button.setText("Cancel" if bench.busy else "Try")
        found = bench.failed or next(iter(bench.findings), None)
        result = found["sentence"] if found else "Scores are ready" if bench.functions else ""
        self._say(f"{bench.busy}…" if bench.busy else result if bench.is_of_form else "")

    def _say(self, text: str) -> None:
        configure(self.result, text=text, accessibleName=f"Rewards: {text}", visible=bool(text))

    def _pick(self, weights: Mapping[str, float | None]) -> None:
        """The draft gets no weights if all are 1."""
        values = [1.0 if weight is None else weight for weight in weights.values()]
        listed = [] if all(value == 1 for value in values) else values
        self._draft.update({"reward_functions": list(weights), "reward_weights": listed})

    def show_rewards(self) -> None:
        """Show rows for the default functions, the user's own, and the ticked ones; the others with `show_all`."""
        entries, names = self._draft.rewards(), self._draft.reward_names
        listed = {entry.name for entry in entries}
        # What has arguments exists only in the setting; unticked, it must not be lost.
        kept = [row.entry for row in self.model.rows if has_arguments(row.entry)]
        entries = [*entries, *(entry for entry in kept if entry.name not in listed | {self._removed})]
        visible = {*catalogue.DEFAULT_REWARDS, *self._visible_names, *names}
        rows = [entry for entry in entries if entry.name in visible or entry.source != BUILT_IN]
        self._visible_names = {entry.name for entry in rows}  # a row that is unticked stays in the table
        self.model.means = self._bench.means
        self._show_bench()
        self.model.show_rewards(rows, names, self._draft.value("reward_weights"))
        place = next((i for i, row in enumerate(self.model.rows) if row.entry.name == self._current), None)
        if place is not None and self.table.currentIndex().row() != place:
            self.table.setCurrentIndex(self.model.index(place, LABEL))
        else:
            self.arguments.show_entry(None if place is None else self.model.rows[place].entry)
        ticked = len(self.model.ticked)
        uses_defaults = has_default_rewards(self._draft.values()) and not ticked
        used = f"the {len(catalogue.DEFAULT_REWARDS)} defaults" if uses_defaults else ticked or "none"
        self.count.setText(f"{used} used")
        self.none_ticked.setVisible(uses_defaults)
        configure(self.more, text=f"Show {len(entries) - len(rows)} more", visible=len(entries) > len(rows))

    def forget_rows(self) -> None:
        """Forget which functions without a tick have a row, and their weights: the form is another."""
        self._visible_names, self.model.rows = set(), []

    def show_all(self) -> None:
        self._visible_names = {entry.name for entry in self._draft.rewards()}
        self.show_rewards()

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
        self.add(RewardCall(JUDGE, {"rubric": "helpful_answer", **found}).text)

    def remove(self) -> None:
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
        weights = {new if row.entry.name == old else row.entry.name: row.weight for row in self.model.ticked}
        weights.setdefault(new, 1.0)
        weights.pop("", None)
        self._current, self._removed = new, old
        self._pick(weights)
        self.show_rewards()  # an unticked one is not in the setting


class RewardArguments(QWidget):
    """The arguments of a function; those of a judge have editors of their own, and a note on its server."""

    changed = Signal(str, str)  # old entry, new entry
    model_wanted = Signal(object)  # takes the chosen id or folder

    def __init__(self, servers: JudgeServers, after: QWidget) -> None:
        """`after`: the widget before the fields in the order of Tab."""
        super().__init__()
        self.servers, self._after = servers, after
        self._entry: RewardEntry | None = None
        self._is_judge = False
        self._signature: tuple[str, Sequence[Parameter]] = ("", ())
        self.fields: dict[str, QLineEdit | ComboBox] = {}
        self.about = label(font=theme.caption_font(), role="muted", wrap=True, selectable=True)
        self.remove = LinkButton("Remove", tip=f"Remove this row ({REMOVE_KEYS})")
        self.edit = button("Edit…", tip="Change the rubric, or make one of your own")
        self.note = label(role="muted", wrap=True)
        self.key = button("Key…", self._ask_key, tip="The server's key, which is kept in the keychain")
        self._grid = grid((), spacing=(2 * theme.SPACE, 4))
        for i in range(COLUMNS):
            self._grid.setColumnStretch(i, 1)
        top = Qt.AlignmentFlag.AlignTop
        parts = (row((self.about, 1), (self.remove, 0, top)), self._grid, row((self.note, 1), self.key))
        column(*parts, into=self, margins=(theme.SPACE, 0, theme.SPACE, theme.SPACE))
        servers.changed.connect(self.show_note)
        self.hide()

    @property
    def tab_stops(self) -> list[QWidget]:
        edit = [self.edit] if self._is_judge else []
        return [*self.fields.values(), *edit, self.key, self.remove]

    def show_entry(self, entry: RewardEntry | None) -> None:
        if entry == self._entry:
            return
        self._entry = entry
        self.setVisible(entry is not None)
        if entry is None:
            return
        call, kind = find_call(entry.name) or RewardCall(entry.name), kind_of(entry)
        self._is_judge = kind == JUDGE
        self.about.setText(f"{entry.label}: {entry.scores.replace('`', '') or 'no docstring'}")
        self.remove.setVisible(has_arguments(entry))
        parameters = entry.parameters
        if kind != "function":
            parameters = (*parameters, Parameter(catalogue.ALIAS, "str", repr(replace(call, alias="").name)))
        # Rebuilt only for another function: after a change the next field has the focus already, and must keep it.
        if (signature := (f"{call.file}::{call.function}", parameters)) != self._signature:
            self._signature = signature
            self._build(entry, parameters)
        for name, field in self.fields.items():
            value = call.alias if name == catalogue.ALIAS else call.arguments.get(name)
            if isinstance(field, ComboBox):
                value = field.property("default") if value is None else value
                field.setCurrentIndex(max(0, field.findData(str(value).lower())))
            else:
                field.setText(value_text.list_text(value) if isinstance(value, list) else value_text.number_text(value))
        if self._is_judge:
            self.servers.refresh()
        self.show_note()
        self.setProperty("guide", "../judges.md" if kind != "function" else "")

    def _build(self, entry: RewardEntry, parameters: Sequence[Parameter]) -> None:
        self.edit.setParent(self)  # it outlives the fields
        clear_layout(self._grid)
        self.fields = {}
        lists = {"rubric": self._list_rubrics, "url": self._list_servers, "model": self._list_models}
        for i, parameter in enumerate(parameters):
            name, default = parameter.name, (parameter.default or "").strip("\"'")
            field: QLineEdit | ComboBox = QLineEdit()
            if self._is_judge and name in JUDGE_CHOICES:
                field = ComboBox(items=JUDGE_CHOICES[name])
            elif self._is_judge and name in lists:
                field = ListedEdit(lists[name])
            elif parameter.kind == "bool":
                word = _YES_NO.get(default.lower(), "").lower()
                field, default = ComboBox(items={"": f"Default ({word})" if word else "Choose", **_YES_NO}), ""
            if isinstance(field, ComboBox):
                field.setProperty("default", default)
                field.activated.connect(self._emit_changed)
            else:
                hint = "required" if parameter.default is None else default.removesuffix(".0")
                configure(field, placeholderText=hint, editingFinished=self._emit_changed)
            tip = plain_tip("Required" if parameter.default is None else f"Default: {parameter.default}")
            self.fields[name] = configure(field, accessibleName=f"{name} of {entry.label}", toolTip=tip)
            kind = next((words for kind, words in _KIND_WORDS.items() if kind in parameter.kind), "")
            text = " · ".join(filter(None, [name.replace("_", " "), "" if self._is_judge else kind]))
            line, place = divmod(i, COLUMNS)
            self._grid.addWidget(ElidedLabel(text=text, toolTip=plain_tip(text), buddy=field), 2 * line, place)
            has_edit = self._is_judge and name == "rubric"
            self._grid.addWidget(holder(row((field, 1), self.edit)) if has_edit else field, 2 * line + 1, place)
        set_tab_order(self._after, *self.tab_stops)

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
        alias = str(arguments.pop(catalogue.ALIAS, "")) if catalogue.ALIAS in kinds else call.alias
        text = RewardCall(call.function, arguments, alias, call.file).text
        if text != call.text:
            self.changed.emit(self._entry.name, text)

    @property
    def url(self) -> str:
        field = self.fields["url"]
        assert isinstance(field, QLineEdit)
        return field.text().strip() or field.placeholderText()

    def show_note(self) -> None:
        if not self._is_judge:
            self.note.hide()
            self.key.hide()
            return
        url, server, address = self.url, self.servers.at(self.url), address_of(self.url)
        first = "required" if url == LOCAL else server["models"][0] if server and server["models"] else "the first"
        configure(self.fields["model"], placeholderText=first)
        if url == LOCAL:
            text = "The run loads this model itself and shares its memory with it."
        elif server is not None:
            text = f"{server['name']} answers at {address} with {counted(len(server['models']), 'model')}."
        elif is_remote(url):
            text = f"Prompts and completions are sent to {address}."
        elif self.servers.found is None:
            text = "Looking for servers on this machine…"
        else:
            text = f"Nothing answers at {address}. Start the server there, or choose one of the list."
        show_text(self.note, text)
        self.key.setVisible(is_remote(url))

    def _list_rubrics(self, menu: QMenu, take: Callable[[str], object]) -> None:
        for name, path in bundled_rubrics().items():
            menu.addAction(read_rubric(str(path)).title or name, lambda name=name: take(name))
        menu.addSeparator()
        menu.addAction("File…", lambda: take(str(open_file(menu, "rubric", "Open rubric", RUBRICS) or "")))

    def _list_servers(self, menu: QMenu, take: Callable[[str], object]) -> None:
        self.servers.refresh()  # for the next time
        for server in self.servers.found or ():
            text = f"{server['name']}, {address_of(server['url'])}, {counted(len(server['models']), 'model')}"
            menu.addAction(text, lambda url=server["url"]: take(url))
        if not self.servers.found:
            menu.addAction("No server answers on this machine").setEnabled(False)
        menu.addSeparator()
        menu.addAction("Load a model in the run", lambda: take(LOCAL))

    def _list_models(self, menu: QMenu, take: Callable[[str], object]) -> None:
        server = self.servers.at(self.url)
        for model in server["models"] if server is not None else ():
            menu.addAction(model, lambda model=model: take(model))
        if self.url == LOCAL:
            menu.addAction("Choose a model…", lambda: self.model_wanted.emit(take))
        elif server is None:
            menu.addAction("The server has not said which it has").setEnabled(False)

    def _ask_key(self) -> None:
        address, hidden = address_of(self.url), QLineEdit.EchoMode.Password
        text = f"The key for {address}, kept in the system's keychain. An empty one is deleted."
        key, is_given = QInputDialog.getText(self.window(), "Key of the judge's server", text, hidden)
        if is_given:
            self.servers.store_key(self.url, key, self.note.setText)


def _value(typed: str, kind: str) -> Any:
    if kind == "bool":
        return typed == "true"
    if "list" in kind:
        return value_text.list_value(typed)
    if "int" in kind or "float" in kind:
        value = value_text.number_value(typed, "float" not in kind)
        return value if isinstance(value, int | float) else value_text.float_value(value)
    return typed
