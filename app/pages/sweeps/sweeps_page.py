"""The Sweeps page: which settings are best, and what does it take to find out?

Above, a new sweep over the present form: what varies, with which seeds, and what that would take. Below, the results of one sweep.
"""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QGridLayout, QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from app import theme
from app.pages.sweeps.sweep_table import SweepModel, SweepTable
from app.state.memory import amount
from app.state.session import Session
from app.state.sweeps import RESUMABLE, SweepForecast, SweepForm, Sweeps, VariedSetting, forecast, offered_settings
from app.widgets.basic.controls import ComboBox, Segments, Switch
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import TabArea, set_shown, set_style_property
from app.widgets.basic.number_format import duration
from backend.config.setting import Setting
from backend.runs.sweeps.sweep import SweepPlan
from backend.runs.sweeps.sweep_results import MemberResult, SweepFolder, settings_of_runs
from backend.utils.errors import UserError

# The settings that vary in a sweep, a row each: the setting, its values as text, and in a random search how they are
# drawn.

DRAWS = {"list": "any of", "log_uniform": "between, in decades", "uniform": "between, evenly"}
HINTS = {"list": "1e-5, 3e-5, 1e-4", "uniform": "0.5, 1.5", "log_uniform": "1e-6, 1e-3"}


class VariedRow(QWidget):
    """One setting.

    Signals:
        edited – any of its fields was changed.
        removed – its button was pressed.
    """

    edited = Signal()
    removed = Signal()

    def __init__(self, offered: Sequence[Setting], key: str, text: str, draw: str) -> None:
        super().__init__()
        self.setting, self.draw, self.values = ComboBox(), ComboBox(), QLineEdit(text)
        for about in offered:
            self.setting.addItem(about.label, about.key)
            self.setting.setItemData(self.setting.count() - 1, about.help, Qt.ItemDataRole.ToolTipRole)
        for value, words in DRAWS.items():
            self.draw.addItem(words, value)
        self.setting.choose(key)
        self.draw.choose(draw)
        self.setting.setAccessibleName("Setting that varies")
        self.draw.setAccessibleName("How its values are drawn")
        self.values.setAccessibleName("Its values")
        self.values.setFont(theme.figures_font())
        self.remove = button("Remove", self.removed.emit)
        self.remove.setAccessibleName("Remove this setting")
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(theme.SPACE)
        row.addWidget(self.setting, 2)
        row.addWidget(self.draw, 2)
        row.addWidget(self.values, 3)
        row.addWidget(self.remove)
        self.setting.currentIndexChanged.connect(lambda _: self.edited.emit())
        self.draw.currentIndexChanged.connect(lambda _: self._on_draw())
        self.values.textChanged.connect(lambda _: self.edited.emit())
        self._on_draw()

    @property
    def key(self) -> str:
        return self.setting.currentData()

    def content(self) -> tuple[str, str, str]:
        """(setting, text of its values, how they are drawn)."""
        return self.key, self.values.text(), self.draw.currentData()

    def _on_draw(self) -> None:
        self.values.setPlaceholderText(HINTS[self.draw.currentData()])
        self.edited.emit()


class VariedRows(QWidget):
    """All of them, and a button for one more.

    Signals:
        edited – any was changed, added or removed.
    """

    edited = Signal()

    def __init__(self, offered: Sequence[Setting]) -> None:
        super().__init__()
        self._offered = offered
        self._is_random = False
        self.rows: list[VariedRow] = []
        self.add_button = button("Add a setting", self.add_next)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(theme.SPACE)
        self._column.addWidget(self.add_button, 0, Qt.AlignmentFlag.AlignLeft)

    def add(self, key: str, text: str, draw: str = "list") -> VariedRow:
        row = VariedRow(self._offered, key, text, draw)
        row.edited.connect(self.edited)
        row.removed.connect(lambda: self.remove(row))
        self.rows.append(row)
        self._column.insertWidget(len(self.rows) - 1, row)
        self._show()
        self.edited.emit()
        return row

    def add_next(self) -> None:
        """A row for the first setting that has none, ready to be typed in."""
        used = {row.key for row in self.rows}
        key = next((about.key for about in self._offered if about.key not in used), self._offered[0].key)
        self.add(key, "").values.setFocus(Qt.FocusReason.OtherFocusReason)

    def remove(self, row: VariedRow) -> None:
        self.rows.remove(row)
        self._column.removeWidget(row)
        row.hide()
        row.deleteLater()  # its button is what is being handled
        self._show()
        self.edited.emit()

    def show_draws(self, is_random: bool) -> None:
        """Whether rows say how values are drawn."""
        self._is_random = is_random
        self._show()

    def show_problems(self, keys: set[str]) -> None:
        """Mark the rows of these settings."""
        for row in self.rows:
            set_style_property(row.values, "problem", row.key in keys)

    def _show(self) -> None:
        for row in self.rows:
            set_shown(row.draw, self._is_random)
            row.remove.setEnabled(len(self.rows) > 1)


# ── sweeps page ──────────────────────────────────────────────────────────────────────────────────────────────────────

STATES = {"starting": "Starting", "running": "Running", "finished": "Finished", "stopped": "Stopped", "failed": "Failed",
          "interrupted": "Interrupted", "waiting": "Waiting"}  # fmt: skip
DECLINED = "The reward file was not allowed to run, so nothing was started."


class SweepsPage(QWidget):
    """The page.

    Attributes:
        session – the state shared with the other pages.
        sweeps – the sweep that is looked at.
        plan – the sweep that the fields describe; None while they have a fault.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.sweeps = Sweeps(self)
        self.plan: SweepPlan | None = None
        self._compose_form()
        self._compose_results()
        self._lay_out()
        self.sweeps.changed.connect(self._show_results)
        self.sweeps.told.connect(self.session.message)
        self.session.draft.changed.connect(lambda _: self._when_visible())
        self.session.time_forecast.changed.connect(self._when_visible)

    # ── composition ─────────────────────────────────────────────────────────────────────────────

    def _compose_form(self) -> None:
        begin = SweepForm()
        self.name = _field(begin.name, "Name")
        self.search = Segments({"grid": "Grid", "random": "Random"}, "Search")
        self.search.setToolTip("Grid: every combination. Random: as many draws as you say.")
        self.trials = _field(begin.trials, "Configurations", width=64)
        self.seeds = _field(begin.seeds, "Seeds")
        self.seeds.setToolTip("Every configuration is trained once with each; results are means over them.")
        self.halves = Switch()
        self.halves.setChecked(begin.halves)
        self.halves.setAccessibleName("Give weak configurations up early")
        self.first_rung = _field(begin.first_rung, "Steps before the first are given up", width=64)
        self.keep = _field(begin.keep, "Share that goes on", width=64)
        self.varied = VariedRows(offered_settings())
        for row in begin.varied:
            self.varied.add(row.key, row.text, row.draw)
        self.what, self.problem = label(wrap=True, role="muted"), label(wrap=True, role="problem")
        self.what.setAccessibleName("What the sweep would take")
        self.start_button = button("Start the sweep", self.start, primary=True)
        for line in (self.name, self.trials, self.seeds, self.first_rung, self.keep):
            line.textChanged.connect(lambda _: self._show_plan())
        self.search.chosen.connect(lambda _: self._show_plan())
        self.halves.toggled.connect(lambda _: self._show_plan())
        self.varied.edited.connect(self._show_plan)

    def _compose_results(self) -> None:
        self.chosen = ComboBox()
        self.chosen.setAccessibleName("Sweep to look at")
        self.chosen.setMinimumContentsLength(18)
        self.chosen.activated.connect(lambda _: self.sweeps.show(self.chosen.currentText()))
        self.state = label(font=theme.heading_font())
        self.sentence = label(wrap=True, role="muted", selectable=True)
        self.nothing = label(
            "No sweep yet. A sweep trains the present form with several values of a few settings, and shows which are best on "
            "held-out prompts.", role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter,
        )  # fmt: skip
        self.model = SweepModel(self)
        self.table = SweepTable(self.model)
        self.table.activated.connect(lambda _: self.open_run())
        self.table.selectionModel().selectionChanged.connect(lambda *_: self._enable())
        self.open_button = button("Open its run", self.open_run, tip="On Monitor: the seed with the highest value")
        self.use_button = button("Use its settings", self.use_settings, tip="In the form")
        self.clone_button = button(
            "Train the winner on",
            self.sweeps.clone_winner,
            tip="A new run that goes on from its last step, to twice the length",
        )
        self.resume_button = button("Resume", self._resume)
        self.stop_button = button("Stop", self.sweeps.stop, tip="Save every run and end; it can be resumed")

    def _lay_out(self) -> None:
        content = QWidget()
        content.setObjectName("page")
        column = QVBoxLayout(content)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addWidget(label("Sweeps", theme.title_font()))
        column.addWidget(self._form_card())
        head = QHBoxLayout()
        head.setSpacing(theme.SPACE)
        head.addWidget(self.chosen)
        head.addWidget(self.state)
        head.addWidget(self.sentence, 1)
        column.addLayout(head)
        column.addWidget(self.nothing, 1)
        self.card = self.table.in_card()
        self.card.setMinimumHeight(theme.scaled(200))
        column.addWidget(self.card, 1)
        buttons = QHBoxLayout()
        buttons.setSpacing(theme.SPACE)
        for action in (self.open_button, self.use_button, self.clone_button):
            buttons.addWidget(action)
        buttons.addStretch(1)
        for action in (self.resume_button, self.stop_button):
            buttons.addWidget(action)
        column.addLayout(buttons)
        area = TabArea()
        area.setWidget(content)
        whole = QVBoxLayout(self)
        whole.setContentsMargins(0, 0, 0, 0)
        whole.addWidget(area)

    def _form_card(self) -> QFrame:
        card = QFrame()
        card.setProperty("role", "card")
        grid = QGridLayout(card)
        grid.setContentsMargins(16, 12, 16, 12)
        grid.setHorizontalSpacing(12)
        grid.setVerticalSpacing(theme.SPACE)
        grid.setColumnStretch(1, 1)
        self._trials_words = label("configurations", role="muted")
        search = _across(self.search, self.trials, self._trials_words)
        self._rung_words = (
            label("after", role="muted"),
            label("steps keep", role="muted"),
            label("and so on", role="muted"),
        )
        after, keep, rest = self._rung_words
        halving = _across(self.halves, after, self.first_rung, keep, self.keep, rest)
        rows = (
            ("Name", self.name), ("Search", search), ("Over", self.varied), ("Seeds", self.seeds),
            ("Give up early", halving),
        )  # fmt: skip
        for row, (words, widget) in enumerate(rows):
            title = label(words, role="muted")
            title.setMinimumHeight(self.name.sizeHint().height())  # beside the first line of its field
            grid.addWidget(title, row, 0, Qt.AlignmentFlag.AlignTop | Qt.AlignmentFlag.AlignLeft)
            grid.addWidget(widget, row, 1)
        end = QHBoxLayout()
        end.setSpacing(2 * theme.SPACE)
        sentences = QVBoxLayout()
        sentences.addWidget(self.what)
        sentences.addWidget(self.problem)
        end.addLayout(sentences, 1)
        end.addWidget(self.start_button, 0, Qt.AlignmentFlag.AlignBottom)
        grid.addLayout(end, len(rows), 0, 1, 2)
        return card

    # ── the new sweep ───────────────────────────────────────────────────────────────────────────

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.session.time_forecast.refresh()
        self._show_plan()
        if self.sweeps.folder is None and (names := self.sweeps.names()):
            self.sweeps.show(names[0])
        self.sweeps.watch(True)
        self._show_results()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self.sweeps.watch(False)

    def _when_visible(self) -> None:
        if self.isVisible():
            self._show_plan()

    def form(self) -> SweepForm:
        """What the fields hold."""
        return SweepForm(
            self.name.text(), self.search.key, tuple(VariedSetting(*row.content()) for row in self.varied.rows),
            self.seeds.text(), self.trials.text(), self.halves.isChecked(), self.first_rung.text(), self.keep.text(),
        )  # fmt: skip

    def _show_plan(self) -> None:
        """Check the fields against the present form, and say what the sweep would take."""
        is_random, halves = self.search.key == "random", self.halves.isChecked()
        for widget in (self.trials, self._trials_words):
            set_shown(widget, is_random)
        for widget in (self.first_rung, self.keep, *self._rung_words):
            set_shown(widget, halves)
        self.varied.show_draws(is_random)
        every = self.session.draft.value("steps_per_eval")
        self.first_rung.setPlaceholderText(str(every or ""))
        self.plan, problem, keys = None, "", set[str]()
        try:
            self.plan = self.form().plan(self.session.draft.values())
        except UserError as mistake:
            problem = mistake.faults[0].sentence
            keys = {fault.setting for fault in mistake.faults}
        self.varied.show_problems(keys)
        self.problem.setText(problem)
        self.what.setText(self._forecast_words(self.plan) if self.plan is not None else "")
        set_shown(self.problem, bool(problem))
        set_shown(self.what, not problem)
        self.start_button.setEnabled(self.plan is not None)

    def _forecast_words(self, plan: SweepPlan) -> str:
        seconds = self.session.time_forecast.seconds_per_completion(self.session.draft.valid_values())
        memory = self.session.starter.memory_parts()
        own = {part.name: part.bytes for part in memory.parts} if memory is not None else {}
        return forecast_words(
            forecast(
                plan, seconds, memory.total if memory is not None else None,
                own.get("Adapters", 0.0) + own.get("Optimizer", 0.0),
            )
        )  # fmt: skip

    def start(self) -> None:
        """Start the sweep in a process of its own, if the user's reward code may run and no other training is alive."""
        self._show_plan()
        if self.plan is None:
            return
        if self.session.is_training or self.sweeps.is_live:
            self.session.message.emit("One training at a time: stop the present one first, or let it finish.")
        elif not self.session.consent.obtain_all(self.plan.every_settings()):
            self.session.message.emit(DECLINED)
        elif self.sweeps.start(self.plan):
            self.name.setText(_next_name(self.plan.name, set(self.sweeps.names())))

    # ── results ─────────────────────────────────────────────────────────────────────────────────

    def _show_results(self) -> None:
        names, folder, results = self.sweeps.names(), self.sweeps.folder, self.sweeps.results
        if names != [self.chosen.itemText(index) for index in range(self.chosen.count())]:
            self.chosen.clear()
            self.chosen.addItems(names)
        if folder is not None:
            self.chosen.setCurrentText(folder.name)
        set_shown(self.chosen, bool(names))
        set_shown(self.nothing, results is None)
        set_shown(self.card, results is not None)
        self.state.setText(STATES.get(self.sweeps.state, ""))
        self.sentence.setText(self._sentence())
        self.table.show_results(results)
        self._enable()

    def _sentence(self) -> str:
        """How the sweep ended, or where it is."""
        results = self.sweeps.results
        if results is None:
            return ""
        if results.sentence and not self.sweeps.is_live:
            return results.sentence
        alive, steps = results.alive, [run.step for each in results.alive for run in each.runs]
        reached = f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,}"
        going = f"{len(alive)} of {len(results.configurations)} configurations, step {reached}"
        return f"{going}, {results.completions:,} completions. {' '.join(results.notes)}"

    def _enable(self) -> None:
        results, run = self.sweeps.results, self._run()
        self.open_button.setEnabled(run is not None and run.state != "waiting")
        self.use_button.setEnabled(run is not None)
        self.clone_button.setEnabled(results is not None and results.winner is not None)
        self.resume_button.setEnabled(self.sweeps.state in RESUMABLE)
        self.stop_button.setEnabled(self.sweeps.is_live)

    def _run(self) -> MemberResult | None:
        """Of the selected configuration, the run with the highest value; the first before there is any."""
        chosen = self.table.selected_configuration()
        return (
            max(chosen.runs, key=lambda run: (run.value is not None, run.value or 0.0)) if chosen is not None else None
        )

    def open_run(self) -> None:
        run, folder = self._run(), self.sweeps.folder
        if run is not None and folder is not None and run.state != "waiting":
            self.session.open_run(folder.run(run.run).path)
            self.session.page_requested.emit("monitor")

    def use_settings(self) -> None:
        """Load the selected configuration's settings into the form."""
        run, folder = self._run(), self.sweeps.folder
        if run is not None and folder is not None:
            self.session.settings_requested.emit(folder.run(run.run))

    def _resume(self) -> None:
        if self.session.is_training:
            self.session.message.emit("One training at a time: stop the present one first, or let it finish.")
        elif self.sweeps.folder is not None and self._may_run_code(self.sweeps.folder):
            self.sweeps.resume()

    def _may_run_code(self, folder: SweepFolder) -> bool:
        """Whether the reward code that a sweep's folder names may run; says so where it may not."""
        try:
            allowed = self.session.consent.obtain_all(settings_of_runs(folder), folder.path)
        except UserError as mistake:
            self.session.message.emit(mistake.faults[0].sentence)
            return False
        if not allowed:
            self.session.message.emit(DECLINED)
        return allowed


def forecast_words(taken: SweepForecast) -> str:
    """“8 configurations × 3 seeds: 24 runs, …”."""
    seeds = taken.runs // taken.configurations
    words = f"{taken.configurations} configurations × {seeds} {'seed' if seeds == 1 else 'seeds'}: {taken.runs} runs"
    if taken.steps is not None and taken.completions is not None and taken.share is not None:
        words += f", {taken.steps:,} steps, {taken.completions:,} training completions"
        words += f" ({taken.share:.0%} of what they take without giving up)" if taken.rungs else ""
    words += f", about {duration(taken.seconds)}" if taken.seconds is not None else ""
    words += "."
    if taken.rungs:
        words += " Going on: " + ", ".join(f"{keep} after step {step}" for step, keep in taken.rungs) + "."
    if taken.sharing > 1:
        words += f" {taken.sharing} runs share one base model in memory"
        words += f", about {amount(taken.bytes)}." if taken.bytes is not None else "."
    elif taken.alone:
        words += " Full fine-tuning changes every weight, so the runs are loaded one after the other."
    return words


def _field(text: str, name: str, width: int = 0) -> QLineEdit:
    line = QLineEdit(text)
    line.setAccessibleName(name)
    line.setFont(theme.figures_font())
    if width:
        line.setFixedWidth(theme.scaled(width))
    return line


def _across(*widgets: QWidget) -> QWidget:
    """Widgets side by side, at the left."""
    holder = QWidget()
    row = QHBoxLayout(holder)
    row.setContentsMargins(0, 0, 0, 0)
    row.setSpacing(theme.SPACE)
    for widget in widgets:
        row.addWidget(widget)
    row.addStretch(1)
    return holder


def _next_name(name: str, taken: set[str]) -> str:
    """The name, or it with the first number that makes it new."""
    number = 2
    while name in taken:
        name = f"{name.rstrip('0123456789').rstrip('-')}-{number}"
        number += 1
    return name
