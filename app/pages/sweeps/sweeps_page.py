"""The Sweeps page: a new sweep over the present form with what it would take, and below it the results of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PySide6.QtCore import QRect, QRectF, QSignalBlocker, Qt, Signal
from PySide6.QtGui import QHideEvent, QPainter, QShowEvent
from PySide6.QtWidgets import QHeaderView, QLineEdit, QWidget

from app import theme
from app.pages.sweeps.parallel import ParallelLine, ParallelPlot
from app.state.memory import amount
from app.state.messages import problems_to
from app.state.session import Session
from app.state.sweeps import RESUMABLE, SweepForm, Sweeps, free_name, offered_settings
from app.widgets.basic.controls import ComboBox, Segments, Switch
from app.widgets.basic.labels import button, label, plain_tip, show_text
from app.widgets.basic.layout import (
    TabArea,
    card,
    column,
    configure,
    connect,
    grid,
    holder,
    row,
    set_shown,
    set_style_property,
    set_tab_order,
    show_all,
    stack,
    wrap_in_card,
)
from app.widgets.basic.number_format import counted, duration, figure
from app.widgets.basic.tables import BaseTable, CellDelegate, Column, Index, RowsModel
from backend.config.config import SETTINGS
from backend.runs.run_names import name_of
from backend.runs.sweep import SweepPlan, text_of
from backend.runs.sweep_results import (
    MEMBER_STATES,
    ConfigurationResult,
    MemberResult,
    SweepResults,
    require_free_name,
    settings_of_runs,
    sign_of,
    sweep_folder,
)
from backend.utils.errors import UserError

DRAWS = {"list": "any of", "log_uniform": "log-uniform between", "uniform": "uniform between"}
HINTS = {"list": "1e-5, 3e-5, 1e-4", "uniform": "0.5, 1.5", "log_uniform": "1e-6, 1e-3"}
STATE_ROLES = {"finished": "good", "training": "accent", "failed": "bad", "stopped": "warning"}
FIGURES = (  # columns after that of the value
    Column("± sd", 72, True),
    Column("Seeds", 62, True),
    Column("Step", 72, True),
    Column("Completions", 104, True),
    Column("State", 116),
)
SETTING_WIDTH = 88
SHARE = Qt.ItemDataRole.UserRole  # item role of a cell with a bar: its length, 0 … 1
DECLINED = "The code was not allowed to run, so nothing was started."
BY_TRAINING = "so runs are ranked and stopped by training reward: its mean over the last quarter of their steps."
NO_ROWS, NO_EVALUATION = f"The data has no held-out rows, {BY_TRAINING}", f"Eval is 0, {BY_TRAINING}"
VIEWS = {"table": "Table", "parallel": "Parallel coordinates"}
RANKS = {"held_out": "Held-out reward", "training": "Training reward"}
NOTHING = (
    "No sweep yet. A sweep trains the present form with several values of a few settings, and shows which are best on "
    "held-out prompts."
)


class VariedRow(QWidget):
    def __init__(self, of: VariedRows, key: str, text: str, draw: str) -> None:
        super().__init__()
        labels, tips = {about.key: about.label for about in of.offered}, [about.help for about in of.offered]
        self.setting = ComboBox(name="Setting that varies", items=labels, tips=tips)
        self.draw = ComboBox(name="How its values are drawn", items=DRAWS)
        self.values = configure(QLineEdit(text), name="Its values", font=theme.figures_font())
        self.setting.choose(key)
        self.draw.choose(draw)
        self.remove = button("Remove", lambda: of.remove(self), name="Remove this setting")
        row((self.setting, 2), (self.draw, 2), (self.values, 3), self.remove, into=self)
        changed = (self.setting.currentIndexChanged, self.values.textChanged, self.draw.currentIndexChanged)
        connect(lambda _: of.edited.emit(), *changed)


class VariedRows(QWidget):
    edited = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.offered = offered_settings()
        self.rows: list[VariedRow] = []
        self.add_button = button("Add a setting", self.add_next)
        self._column = column((self.add_button, 0, Qt.AlignmentFlag.AlignLeft), into=self)

    def add(self, key: str, text: str, draw: str = "list") -> VariedRow:
        added = VariedRow(self, key, text, draw)
        self.rows.append(added)
        self._column.insertWidget(len(self.rows) - 1, added)
        self.edited.emit()
        return added

    def add_next(self) -> None:
        used = {each.setting.currentData() for each in self.rows}
        key = next((about.key for about in self.offered if about.key not in used), self.offered[0].key)
        self.add(key, "").values.setFocus(Qt.FocusReason.OtherFocusReason)

    def remove(self, removed: VariedRow) -> None:
        self.rows.remove(removed)
        removed.hide()
        removed.deleteLater()  # its button is what is being handled
        self.edited.emit()

    def show_draws(self, is_random: bool) -> None:
        for each in self.rows:
            each.values.setPlaceholderText(HINTS[each.draw.currentData()])
            set_shown(each.draw, is_random)
            each.remove.setEnabled(len(self.rows) > 1)
        stops = [stop for each in self.rows for stop in (each.setting, each.draw, each.values, each.remove)]
        set_tab_order(*stops, self.add_button)


def draw_bar(painter: QPainter, rect: QRect, share: float) -> None:
    theme.set_fill(painter, theme.palette().accent)
    length = max(2.0, share * (rect.width() - 16))
    painter.drawRoundedRect(QRectF(rect.left() + 8, rect.bottom() - 4, length, 3), 1.5, 1.5)


class SweepModel(RowsModel):
    results: SweepResults | None = None
    varied: Sequence[str] = ()

    def show_results(self, results: SweepResults | None) -> None:
        ranked = results.ranked if results is not None else []
        self.results, self.varied, self.columns = results, list(ranked[0].settings) if ranked else [], ()
        if results is not None and ranked:
            head = [Column("No.", 44), *(Column(SETTINGS[key].label) for key in self.varied)]
            self.columns = [*head, Column(results.measure.partition(" over ")[0].capitalize(), 120), *FIGURES]
        self.set_rows(ranked)

    def text(self, row: ConfigurationResult, column: int) -> str:
        winner = self.results.winner if self.results is not None else None
        is_best = winner is not None and winner.number == row.number
        state = "Best" if is_best else MEMBER_STATES.get(row.state, row.state).capitalize()
        seeds = f"{sum(run.value is not None for run in row.runs)} of {len(row.runs)}"
        texts = [str(row.number), *(text_of(value) for value in row.settings.values()), figure(row.value)]
        return [*texts, figure(row.sd), seeds, f"{row.step:,}", f"{row.completions:,}", state][column]

    def colour(self, row: ConfigurationResult, column: int) -> str:
        if column == len(self.columns) - 1:
            return STATE_ROLES.get(row.state, "muted")
        return "muted" if row.state == "given up" or not 0 < column <= len(self.varied) + 1 else "text"

    def tip(self, row: ConfigurationResult, column: int) -> str:
        lines = []
        for run in row.runs:
            state = MEMBER_STATES.get(run.state, run.state)
            lines.append(f"{run.run}: {state}, step {run.step:,}, {figure(run.value)}. {run.sentence}")
        return plain_tip("\n".join(lines))

    def extra(self, row: ConfigurationResult, index: Index, role: int) -> float | None:
        if role != SHARE or row.value is None or index.column() != len(self.varied) + 1 or self.results is None:
            return None
        sign = sign_of(self.results.metric)
        values = [sign * other.value for other in self.rows if other.value is not None]
        span = max(values) - min(values)
        # The worst keeps a little, to be seen.
        return 0.04 + 0.96 * (sign * row.value - min(values)) / span if span else 1.0


class SweepTable(BaseTable):
    def __init__(self) -> None:
        self.cells = SweepModel()
        super().__init__(model=self.cells, name="Configurations of the sweep", single=True)
        self.cells.setParent(self)
        self.setItemDelegate(CellDelegate(SHARE, draw_bar, self))
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Interactive)

    def show_results(self, results: SweepResults | None) -> None:
        # Whoever has chosen the best, as at first, has the best.
        chosen = None if self.selected_rows() == [0] else self.selected_row
        self.cells.show_results(results)
        if self.cells.rows:
            self.fit_columns()
            numbers = [each.number for each in self.cells.rows]
            self.selectRow(numbers.index(chosen.number) if chosen is not None and chosen.number in numbers else 0)

    def fit_columns(self) -> None:
        if count := len(self.cells.varied):
            widths = [theme.scaled(column.width) for column in self.cells.columns]
            rest = max(theme.scaled(SETTING_WIDTH), (self.viewport().width() - sum(widths)) // count)
            for place, width in enumerate(widths):
                self.setColumnWidth(place, width or rest)


class SweepsPage(QWidget):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.sweeps = Sweeps(self)
        self.plan: SweepPlan | None = None
        begin, muted = SweepForm(), partial(label, role="muted")
        self.name = _field(free_name(begin.name), "Name")
        self.name_problem = label(role="problem")
        tip = "Held-out rows show what was learned, not what was memorised."
        self.rank = Segments(RANKS, "Rank by", tip=tip)
        self.rank_note = label(role="muted", wrap=True)
        tip = "Sets Validation share to 0.1 in the form, and Eval where it is 0"
        self.hold_out = button("Hold out 10 %", session.draft.hold_out, tip=tip)
        self.hold_out.clicked.connect(lambda: self.rank.choose("held_out"))
        tip = "Grid: every combination. Random: as many draws as you say."
        self.search = Segments({"grid": "Grid", "random": "Random"}, "Search", tip=tip)
        self.trials = _field(begin.trials, "Configurations", width=64)
        tip = "Every configuration is trained once with each seed; results are means over them."
        self.seeds = _field(begin.seeds, "Seeds", tip=tip)
        self.halves = Switch(name="Stop weak configurations early", checked=begin.halves)
        self.first_rung = _field(begin.first_rung, "Steps before the first are stopped", width=64)
        self.keep = _field(begin.keep, "Share that continues", width=64)
        self.varied = VariedRows()
        for varied in begin.varied:
            self.varied.add(*varied)
        self.what = label(wrap=True, role="muted", name="What the sweep would take")
        self.problem = label(wrap=True, role="problem")
        self.start_button = button("Start the sweep", self.start, primary=True)
        lines = (self.name, self.trials, self.seeds, self.first_rung, self.keep)
        chosen = (self.search.chosen, self.halves.toggled, self.varied.edited, self.rank.chosen)
        connect(lambda *_: self._show_plan(), *(line.textChanged for line in lines), *chosen)

        self._trials_words = muted("configurations")
        after, keep, rest = self._rung_words = tuple(map(muted, ("after", "steps keep", "and so on")))
        rows = {
            "Name": holder(column(self.name, self.name_problem, spacing=2)),
            "Search": holder(row(self.search, self.trials, self._trials_words, None)),
            "Over": self.varied,
            "Seeds": self.seeds,
            "Rank by": holder(row(self.rank, (self.rank_note, 1), self.hold_out, None)),
            "Stop weak runs early": holder(row(self.halves, after, self.first_rung, keep, self.keep, rest, None)),
        }
        fields = grid((), stretch=1, spacing=(12, theme.SPACE), margins=(16, 12, 16, 12))
        for place, (words, widget) in enumerate(rows.items()):
            # Beside the first line of its field.
            title = muted(words, minimumHeight=self.name.sizeHint().height())
            fields.addWidget(title, place, 0, Qt.AlignmentFlag.AlignTop | Qt.AlignmentFlag.AlignLeft)
            fields.addWidget(widget, place, 1)
        texts = column(self.what, self.problem)
        end = row((texts, 1), (self.start_button, 0, Qt.AlignmentFlag.AlignBottom), spacing=2 * theme.SPACE)
        fields.addLayout(end, len(rows), 0, 1, 2)
        form_card = card(fields)

        self.chosen = ComboBox(name="Sweep on show", length=18, textActivated=self.sweeps.show)
        self.state = label(font=theme.heading_font())
        self.sentence = label(wrap=True, role="muted", selectable=True)
        self.nothing = label(NOTHING, role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        self.table = configure(SweepTable(), activated=lambda _: self.open_run())
        self.table.selectionModel().selectionChanged.connect(lambda *_: self._enable())
        self.plot = configure(ParallelPlot("Parallel coordinates of the runs"), chosen=self._open)
        results = QWidget()
        self._views = stack(self.table, self.plot, into=results)
        show_view = self._views.setCurrentIndex
        self.view = Segments(VIEWS, "Results as", chosen=lambda key: show_view(list(VIEWS).index(key)))
        self.card = wrap_in_card(results, minimumHeight=theme.scaled(220))
        self.open_button = button("Open its run", self.open_run, tip="On Monitor: the seed with the best value")
        tip, compare = "Their curves on the same charts", lambda: session.comparison_requested.emit(self._begun())
        self.compare_button = button("Compare the runs", compare, tip=tip)
        self.use_button = button("Use its settings", self.use_settings, tip="In the form")
        tip = "A new run that continues from its last step, to twice the length"
        self.clone_button = button(
            "Continue training the winner", lambda: session.starter.is_busy() or self.sweeps.clone_winner(), tip=tip
        )
        self.resume_button = button("Resume", self._resume)
        self.stop_button = button("Stop", self.sweeps.stop, tip="Save every run and end; it can be resumed")

        first = (self.compare_button, self.open_button, self.use_button, self.clone_button)
        title = label("Sweeps", theme.title_font(), minimumHeight=theme.scaled(28))
        above = (title, form_card, row(self.chosen, self.state, (self.sentence, 1), self.view))
        below = ((self.nothing, 1), (self.card, 1), row(*first, None, self.resume_button, self.stop_button))
        column(TabArea(content=holder(column(*above, *below, spacing=12, margins=2 * theme.SPACE))), into=self)
        configure(self.sweeps, changed=self._show_results, told=session.message)
        changed = (session.draft.changed, session.time_forecast.changed, session.dataset.changed)
        connect(lambda *_: self.isVisible() and self._show_plan(), *changed)

    def showEvent(self, event: QShowEvent) -> None:
        self.session.time_forecast.refresh()
        self.session.dataset.watch(self, count_all=False)
        self._show_plan()
        if self.sweeps.folder is None and (names := self.sweeps.names()):
            self.sweeps.show(names[0])
        self.sweeps.watch(True)
        self._show_results()

    def hideEvent(self, event: QHideEvent) -> None:
        self.session.dataset.unwatch(self)
        self.sweeps.watch(False)

    def form(self) -> SweepForm:
        rows = self.varied.rows
        return SweepForm(
            self.name.text(),
            self.search.key,
            tuple((each.setting.currentData(), each.values.text(), each.draw.currentData()) for each in rows),
            self.seeds.text(),
            self.trials.text(),
            self.halves.isChecked(),
            self.first_rung.text(),
            self.keep.text(),
            self.rank.key if self.can_rank_held_out() else "training",
        )

    def can_rank_held_out(self) -> bool:
        """False once it is known that no row will be held out, or none be evaluated."""
        draft, dataset = self.session.draft, self.session.dataset
        if not draft.value("steps_per_eval"):
            return False
        return bool(draft.value("validation_split")) or dataset.state != "ready" or "valid" in dataset.splits

    def _show_plan(self) -> None:
        is_random, draft = self.search.key == "random", self.session.draft
        show_all(is_random, self.trials, self._trials_words)
        show_all(self.halves.isChecked(), self.first_rung, self.keep, *self._rung_words)
        self.varied.show_draws(is_random)
        can_rank, is_training = self.can_rank_held_out(), self.rank.key == "training"
        self.rank.buttons["held_out"].setEnabled(can_rank)
        with QSignalBlocker(self.rank):
            self.rank.choose("training" if is_training or not can_rank else "held_out")
        show_text(self.rank_note, "" if can_rank else NO_ROWS if draft.value("steps_per_eval") else NO_EVALUATION)
        set_shown(self.hold_out, not can_rank)
        form = self.form()
        self.first_rung.setPlaceholderText(form.first_step(draft.values()))
        self.plan, problem, faults = None, "", dict[str, str]()
        try:
            self.plan = form.plan(draft.values())
            require_free_name(self.plan, sweep_folder(self.plan.name))
        except UserError as error:
            faults = {each.setting: each.sentence for each in error.faults}
            problem = next((sentence for key, sentence in faults.items() if key != "name"), "")
        for each in self.varied.rows:
            set_style_property(each.values, "problem", each.setting.currentData() in faults)
        set_style_property(self.name, "problem", "name" in faults)
        show_text(self.name_problem, faults.get("name", ""))
        show_text(self.problem, problem)
        set_shown(self.what, not faults)
        if self.plan is not None:
            seconds = self.session.time_forecast.seconds_per_completion(draft.valid_values())
            memory = self.session.starter.memory_parts()
            own = {name: size for name, _, size in memory.parts} if memory is not None else {}
            adapters = own.get("Adapters", 0.0) + own.get("Optimizer", 0.0)
            self.what.setText(forecast(self.plan, seconds, memory.total if memory is not None else None, adapters))
        self.start_button.setEnabled(not faults)

    def start(self) -> None:
        self._show_plan()
        if self.plan is None or not self.start_button.isEnabled():
            return
        if self.session.starter.is_busy() or self.sweeps.is_live:
            return
        if not self.session.consent.obtain(*self.plan.every_settings()):
            self.session.message.emit(DECLINED)
        elif self.sweeps.start(self.plan):
            self.name.setText(free_name(self.plan.name))

    def _show_results(self) -> None:
        names, folder, results = self.sweeps.names(), self.sweeps.folder, self.sweeps.results
        self.chosen.fill({name: name for name in names}, folder.name if folder is not None else None)
        set_shown(self.chosen, bool(names))
        show_all(results is None, self.nothing)
        show_all(results is not None, self.card, self.view)
        self.state.setText(self.sweeps.state.capitalize())
        sentence = results.sentence if results is not None and not self.sweeps.is_live else ""
        if results is not None and not sentence:
            alive, steps = results.alive, [run.step for each in results.alive for run in each.runs]
            reached = f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,}"
            going = f"{len(alive)} of {len(results.configurations)} configurations, step {reached}"
            sentence = f"{going}, {results.completions:,} completions. {' '.join(results.notes)}"
        self.sentence.setText(sentence)
        self.table.show_results(results)
        if results is not None and folder is not None:
            varied = list(results.configurations[0].settings)
            titles = [*(SETTINGS[key].label for key in varied), results.measure.partition(" over ")[0].capitalize()]
            lines = [
                ParallelLine(run.run, name_of(folder.run(run.run)), (*map(each.settings.get, varied), run.value))
                for each in results.configurations
                for run in each.runs
            ]
            self.plot.show_lines(titles, lines, sign_of(results.metric))
        self._enable()

    def _enable(self) -> None:
        results, run = self.sweeps.results, self._run()
        self.open_button.setEnabled(run is not None and run.state != "waiting")
        self.compare_button.setEnabled(bool(self._begun()))
        self.use_button.setEnabled(run is not None)
        self.clone_button.setEnabled(results is not None and results.winner is not None)
        self.resume_button.setEnabled(self.sweeps.state in RESUMABLE)
        self.stop_button.setEnabled(self.sweeps.is_live)
        set_style_property(self.start_button, "role", "" if self.sweeps.is_live else "primary")

    def _run(self) -> MemberResult | None:
        results = self.sweeps.results
        return results.best_run(self.table.selected_row) if results is not None else None

    def open_run(self) -> None:
        if (run := self._run()) is not None and run.state != "waiting":
            self._open(run.run)

    def _open(self, name: str) -> None:
        assert self.sweeps.folder is not None
        self.session.open_run(self.sweeps.folder.run(name).path)
        self.session.page_requested.emit("monitor")

    def _begun(self) -> list[Path]:
        folder, results = self.sweeps.folder, self.sweeps.results
        if results is None or folder is None:
            return []
        return [folder.run(run.run).path for each in results.ranked for run in each.runs if run.step]

    def use_settings(self) -> None:
        run, folder = self._run(), self.sweeps.folder
        if run is not None and folder is not None:
            self.session.settings_requested.emit(folder.run(run.run))

    def _resume(self) -> None:
        folder, say = self.sweeps.folder, self.session.message.emit
        with problems_to(say):
            if folder is None or self.session.starter.is_busy():
                return
            if self.session.consent.obtain(*settings_of_runs(folder), base=folder.path):
                self.sweeps.resume()
            else:
                say(DECLINED)


def forecast(plan: SweepPlan, seconds: float | None, run_bytes: float | None, own_bytes: float = 0.0) -> str:
    """“8 configurations × 3 seeds: 24 runs, …”: what a sweep takes at most.

    `seconds`: of a completion; `run_bytes`: memory of one run; `own_bytes`: the part that runs do not share.
    """
    configurations, seeds, groups = len(plan.configurations), len(plan.seeds), plan.groups()
    runs, rungs = len(plan.members()), plan.rungs()
    words = f"{counted(configurations, 'configuration')} × {counted(seeds, 'seed')}: {counted(runs, 'run')}"
    if plan.steps is not None:
        steps = plan.total_steps(plan.steps)
        per_step = ("group_size", "batch_size", "gradient_accumulation_steps", "steps_per_generation")
        completions = steps * math.prod(int(plan.base.get(key, SETTINGS[key].default)) for key in per_step)
        words += f", {counted(steps, 'step')}, {completions:,} training completions"
        words += f" ({steps / (runs * plan.steps):.0%} of a full sweep)" if rungs else ""
        words += f", about {duration(completions * seconds)}" if seconds is not None else ""
    words += "."
    if rungs:
        words += " Remaining: " + ", ".join(f"{rung.keep} after step {rung.step}" for rung in rungs) + "."
    if (sharing := max(map(len, groups))) > 1:
        words += f" {sharing} runs share one base model in memory"
        words += f", about {amount(run_bytes + (sharing - 1) * own_bytes)}." if run_bytes is not None else "."
    elif len(groups) > 1:
        words += " Full fine-tuning changes every weight, so the runs are loaded one after the other."
    return words


def _field(text: str, name: str, **settings: Any) -> QLineEdit:
    return configure(QLineEdit(text), name=name, font=theme.figures_font(), **settings)
