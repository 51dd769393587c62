"""The Completions page: the completions of a step, or those that a filter or search finds in the run."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PySide6.QtCore import QItemSelectionModel, QSignalBlocker, Qt, QTimer, Signal
from PySide6.QtGui import (
    QActionGroup,
    QDoubleValidator,
    QGuiApplication,
    QHideEvent,
    QKeySequence,
    QResizeEvent,
    QShowEvent,
)
from PySide6.QtWidgets import QBoxLayout, QFileDialog, QMenu, QProgressDialog, QSizePolicy, QWidget

from app import theme
from app.pages.completions.reading_pane import GREY, HINT, ReadingPane
from app.state import charts
from app.state.correctness import correctness_of, entries_of, marked_reward
from app.state.messages import problems_to
from app.state.run import Run
from app.state.run_completions import (
    ALL,
    FILTERS,
    SCORE,
    CompletionFacts,
    Query,
    RunCompletions,
    select,
    sort,
    why_empty,
)
from app.state.session import Session
from app.widgets.basic.controls import CheckBox, ComboBox, ElidedLabel, LinkButton, NumberEdit, SearchEdit, Segments
from app.widgets.basic.labels import EmptyState, button, label, show_text
from app.widgets.basic.layout import column, configure, connect, holder, row, set_shown, set_tab_order, splitter, stack
from app.widgets.basic.number_format import counted, finite
from app.widgets.completion_detail import CompletionDetail
from app.widgets.completion_table import CompletionLine, CompletionModel, CompletionTable, lines_of_row
from app.widgets.run_header import Switcher
from backend.runs.completion_rows import (
    SUFFIXES,
    conversation_text,
    export_completions,
    listed_completions,
    prompt_key,
    scores_of,
    turns_of,
)
from backend.runs.run_record import change_notes
from backend.trainer.evaluation.evaluation_rows import default_pass_rule

DETAIL, BESIDE = 250, 720
NARROW, WIDE = 1200, 1500
MOST_LINES = 100_000
KEPT_LINES = 512  # lines kept once read: a table asks for each of the visible ones a hundred times a repaint
NOTHING = "No completions yet", "They appear here with the first step of a run.", "Go to Train"
ANSWERS = "No completions", "SFT learns the answers of its dataset and samples none. Chat shows what it writes now."
"""Title, sentence and button of the page without completions."""
STEP, RUN = "step", "run"
TYPING_MS, SAVING_MS = 300, 500  # pause in typing before a search; time that saving takes before it shows its progress


class RunLines(Sequence[CompletionLine]):
    """Completions of a run by their numbers among `facts`; `read_row` reads the row at an offset when it is shown."""

    def __init__(
        self, facts: CompletionFacts, numbers: np.ndarray, read_row: Callable[[int], Mapping[str, Any] | None]
    ) -> None:
        self._offsets = facts.per_completion("offset")[numbers]
        self._places = facts.column("place")[numbers]
        self._read_row = read_row
        self._lines: dict[int, CompletionLine] = {}

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if index not in self._lines:
            if len(self._lines) >= KEPT_LINES:
                self._lines.clear()
            offset, place = self.place(index)
            row = self._read_row(offset) or {}
            listed = listed_completions(row)  # shorter where the file was cut back since: it is about to be read again
            completion = listed[place] if place < len(listed) else {}
            self._lines[index] = CompletionLine(0, row, completion, offset, place)
        return self._lines[index]

    def place(self, index: int) -> tuple[int, int]:
        """(offset of its row, place in it) of a line, without reading it."""
        return int(self._offsets[index]), int(self._places[index])

    def begins_with(self, other: Sequence[CompletionLine]) -> bool:
        pairs = ((self._offsets, other._offsets), (self._places, other._places)) if isinstance(other, RunLines) else ()
        return bool(pairs) and all(np.array_equal(mine[: len(theirs)], theirs) for mine, theirs in pairs)


def weights_at(run: Run, step: int, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The weight of each of `run.reward_names` at a step: those that explain the rewards of the rows, or none."""
    names, logged = run.reward_names, list[float]()
    for name in names:
        steps, values = run.series(f"reward_weights/{name}")
        logged += values[steps == step].tolist()
    configured = run.config.get("reward_weights") or []
    with_environments = [*configured, *[1.0] * (len(names) - len(configured))]
    completions = [one for row in rows for one in listed_completions(row) if finite(one.get("reward")) is not None]
    rewards = [one["reward"] for one in completions]
    scores = [[finite(scores_of(one).get(name)) or 0.0 for name in names] for one in completions]
    for weights in (logged, with_environments):
        if names and len(weights) == len(names):
            totals = np.reshape(scores, (-1, len(names))) @ weights
            if np.allclose(totals, rewards, rtol=1e-6, atol=1e-6):
                return weights
    return []


class CompletionsPage(QWidget):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.completions: RunCompletions | None = None
        self.order: tuple[str, bool] = ("", True)
        self._run: Run | None = None
        self._shown: tuple[Run, int] | None = None
        self._picked = 0

        self.nothing = EmptyState(button_clicked=lambda: session.page_requested.emit("train"))
        self.model = CompletionModel(self)
        self.table = CompletionTable(self.model)
        self.pane = ReadingPane("Completion")
        self.pane.setting.clicked.connect(lambda: session.show_setting("record_tokens"))
        self.detail = CompletionDetail(pane=self.pane)
        tip = "Every time that this prompt was sampled in the run"
        self.follow_prompt = LinkButton("Follow this prompt", on_click=self._follow_prompt, tip=tip)
        self.show_its_step = LinkButton("Show its step", on_click=self.go_to_step)
        for link in (self.follow_prompt, self.show_its_step):
            self.detail.head.addWidget(link, 0, Qt.AlignmentFlag.AlignTop)
        menu = QMenu(self)
        menu.addAction("Selected completions…", lambda: self.save_rows(self.table.selected_rows()))
        menu.addAction("Everything shown…", lambda: self.save_rows(range(self.model.rowCount())))
        self.save = button("Save", menu=menu, tip="Save completions as JSON lines or Markdown")
        self.switcher, self.bar = Switcher(chosen=session.open_run), FilterBar()
        self.search = self.bar.search
        self.earlier = button("Earlier", lambda: self.go(-1), tip="The step before (Ctrl+[)")
        self.later = button("Later", lambda: self.go(1), tip="The step after (Ctrl+])")
        self.step = NumberEdit(name="Step", width=72, integers=(0, 2**31 - 1), editingFinished=self._on_typed)
        self.newest = CheckBox("Follow newest", checked=True, toggled=self._set_following)
        self.about = ElidedLabel(font=theme.figures_font())
        steps = row(self.newest, None, label("Step"), self.step, self.earlier, self.later, self.save)
        self._steps_row = holder(steps)
        self._head = row((row(label("Completions", theme.title_font()), self.switcher, (self.about, 1)), 1))
        self._head.addWidget(self._steps_row)
        sizes = (1000, theme.scaled(DETAIL))
        self.parts = splitter(self.table.in_card(), self.detail, stretch=(3, 1), upright=True, sizes=sizes)
        content, page = holder(column(self.bar, (self.parts, 1))), QWidget()
        self._stack = stack(self.nothing, content, into=page)
        self._head_holder = holder(self._head)
        column(self._head_holder, (page, 1), into=self, margins=2 * theme.SPACE)

        stops = (*self.pane.folds.values(), self.pane.measure, self.pane.setting, self.pane.text)
        set_tab_order(self.table, self.follow_prompt, self.show_its_step, self.detail.prompt, *stops)
        # Both, as Qt changes the selection before the current line.
        connect(self._show_picked, self.table.picked, self.table.chosen)
        self.table.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        to_screen = self.table.viewport().mapToGlobal
        self.table.customContextMenuRequested.connect(lambda at: self.menu().popup(to_screen(at)))
        configure(self.table, touched=self._stop_following, activated=self.go_to_step, sort_requested=self.sort)
        configure(self.bar, changed=self._show_again, moved=self.move, searched=self.find)
        session.run_changed.connect(self._on_run_changed)
        self._on_run_changed()

    def resizeEvent(self, event: QResizeEvent) -> None:
        # In a wide page the completion is beside the table, so that its lines are not too long to read.
        wide = self.width() >= theme.scaled(WIDE)
        orientation = Qt.Orientation.Horizontal if wide else Qt.Orientation.Vertical
        if orientation != self.parts.orientation():  # on a change only: the user may have moved the handle
            self.detail.parts.setOrientation(self.parts.orientation())  # each way the two split in turn
            self.parts.setOrientation(orientation)
            self.parts.setSizes([self.width(), theme.scaled(BESIDE)] if wide else [self.height(), theme.scaled(DETAIL)])
        directions, narrow = QBoxLayout.Direction, self.width() < theme.scaled(NARROW)
        self._head.setDirection(directions.TopToBottom if narrow else directions.LeftToRight)

    def _on_run_changed(self) -> None:
        self._run, self._shown, self.completions = self.session.run, None, None
        with QSignalBlocker(self.newest):
            self.newest.setChecked(True)
        self.bar.reset()
        self.about.setText("")
        if self._run is not None:
            self.switcher.show_run(self._run.folder)
            configure(self._run, changed=self._refresh, restarted=self._forget)
            completions = RunCompletions(self._run.folder.completions, self._run)
            self.completions = configure(completions, grew=self._grow, voided=self._show_again)
        self._refresh()

    def _forget(self) -> None:
        self._shown = None  # a resume has cut the file back: what is shown will get other rows
        if self.completions is not None:
            self.completions.clear()

    def showEvent(self, event: QShowEvent) -> None:
        self._refresh()

    def hideEvent(self, event: QHideEvent) -> None:
        self._read_on()

    def _steps(self) -> list[int]:
        return self._run.index.steps() if self._run else []

    def _read_on(self) -> None:
        if self.completions is not None:
            self.completions.follow(self.isVisible() and (self.bar.scope.key == RUN or self.bar.is_filtering))

    def _refresh(self) -> None:
        if not self.isVisible():
            return
        self._read_on()
        steps = self._steps()
        self._stack.setCurrentIndex(1 if steps else 0)
        set_shown(self._head_holder, self._run is not None)
        set_shown(self._steps_row, bool(steps))
        self.nothing.show_notice(*(ANSWERS if self._run and self._run.config.get("train_mode") == "sft" else NOTHING))
        if self._run is None or self.completions is None or not steps:
            return
        right = correctness_of(self._run)
        self.model.right = (right.reward, right.full) if right is not None else None
        self.bar.right = marked_reward(self._run)
        step = steps[-1] if self.newest.isChecked() else _nearest(steps, self._picked)
        if not self.step.hasFocus() or not self.step.isModified():  # the user may be typing a number there
            self.step.setText(str(step))
        self.earlier.setEnabled(step > steps[0])
        self.later.setEnabled(step < steps[-1])
        if self._shown == (self._run, step):
            return
        self._shown = (self._run, step)
        of_run = self.bar.scope.key == RUN
        set_shown(self.show_its_step, of_run)
        if of_run:
            self._show_run(self._run, self.completions)
        else:
            self._show_step(self._run, self.completions, step)
        self._show_picked()

    def _show_again(self) -> None:
        self._shown = None
        self._refresh()

    def _show_step(self, run: Run, completions: RunCompletions, step: int) -> None:
        placed = run.index.placed_rows(step)  # (offset, row) of each prompt
        rows = [row for _, row in placed]
        facts = CompletionFacts()
        for offset, of_prompt in placed:
            facts.append(of_prompt, offset)
        names, labels = run.reward_names, labels_of(run)
        self.model.set_columns(names, labels, weights_at(run, step, rows), facts.logged)
        self.bar.set_measures(names, labels, facts.logged)
        found = select(facts, self.bar.query, completions.facts.largest or None)
        numbers = sort(facts, found, self.order[0], descending=self.order[1])
        of_row = facts.column("row")[numbers]
        lines: list[CompletionLine] = []
        for group, (offset, of_prompt) in enumerate(placed):
            prompt, *listed = lines_of_row(group, of_prompt, offset)
            chosen = facts.column("place")[numbers[of_row == group]].tolist()
            if chosen or not listed:
                lines += [prompt, *(listed[place] for place in chosen)]
        self._show_lines(lines)
        count = sum(len(row.get("completions") or ()) for row in rows)
        shown = sum(line.completion is not None for line in self.model.rows)
        about = f"{counted(len(rows), 'prompt')}, {counted(count, 'completion')}"
        if self.model.right is not None:
            name, full = self.model.right
            scores = (scores_of(one).get(name) for row in rows for one in listed_completions(row))
            about += f", {sum(isinstance(score, int | float) and score >= full for score in scores):,} correct"
        self.about.setText(about)
        report = f"{shown:,} of {counted(count, 'completion')} of this step" if self.bar.is_filtering else ""
        self.bar.report(report if shown else why_empty(self.bar.query, names) or report)

    def _show_run(self, run: Run, completions: RunCompletions) -> None:
        names, labels, logged = run.reward_names, labels_of(run), completions.shown.facts.logged
        self.model.set_columns(names, labels, (), logged, has_steps=True)
        self.bar.set_measures(names, labels, logged)
        self._show_lines(self._run_lines(completions), completions.facts.largest or None)
        self._report_run(run, completions)

    def _grow(self) -> None:
        run, completions, model = self._run, self.completions, self.model
        if not self.isVisible() or self.bar.scope.key != RUN or run is None or completions is None:
            return
        # A list that is full stays. Sorting a million takes a tenth of a second: once, at the end.
        is_full = not self.order[0] and model.is_flat and model.rowCount() == MOST_LINES
        if (not self.order[0] or completions.shown.is_done) and not is_full:
            lines = self._run_lines(completions)
            continues = model.is_flat and model.rowCount() and lines.begins_with(model.rows)
            if not continues or model.logged != completions.shown.facts.logged:
                self._show_run(run, completions)
                return
            model.extend(lines)
        self._report_run(run, completions)

    def _run_lines(self, completions: RunCompletions) -> RunLines:
        facts = completions.shown.facts
        numbers = sort(facts, completions.select(self.bar.query), self.order[0], descending=self.order[1])
        return RunLines(facts, numbers[:MOST_LINES], completions.row_at)

    def _show_lines(self, lines: Sequence[CompletionLine], largest: dict[str, float] | None = None) -> None:
        self.model.show_lines(lines, largest)
        self.table.reset_view()
        self.table.show_sorting(self.order[0], descending=self.order[1])

    def _report_run(self, run: Run, completions: RunCompletions) -> None:
        count = self.model.rowCount()
        is_cut = count == MOST_LINES or (completions.search is not None and completions.search.is_cut_short)
        parts = [f"The first {count:,} completions" if is_cut else counted(count, "completion")]
        if not completions.shown.is_done:
            parts.append(f"{completions.shown.share:.0%} of the file read")
        self.about.setText("Whole run")
        is_empty = not count and completions.shown.is_done
        self.bar.report((is_empty and why_empty(self.bar.query, run.reward_names)) or ", ".join(parts))

    def find(self, text: str) -> None:
        if self.completions is not None:
            self.completions.find(text)
            self.bar.scope.choose(RUN if text else STEP)

    def sort(self, key: str, descending: bool) -> None:
        self.order = (key, descending)
        self._show_again()

    def _show_picked(self) -> None:
        line, completions, run = self.table.current_line, self.completions, self._run
        set_shown(self.follow_prompt, line is not None)
        if line is None:
            self.detail.show_completion({}, None)
            return
        if completions is not None and run is not None:
            step = line.row.get("step")
            weights = weights_at(run, step, [line.row]) if isinstance(step, int) else []
            self.pane.set_rewards(run.reward_names, labels_of(run), weights)
            self.pane.load_tokens = partial(completions.token_data, line.offset, line.place)
        pair = self.table.selected_lines if len(self.table.selected_rows()) == 2 else []
        first, second = (one.completion for one in pair) if len(pair) == 2 else (None, None)
        others = self.model.rowCount() - 1 if self.model.is_flat else len(listed_completions(line.row)) - 1
        can_compare = line.completion is not None and len(pair) != 2 and others > 0
        has_results = any(turn.get("result_tokens") for turn in turns_of(line.completion or {}))
        show_text(self.pane.hint, " ".join([GREY] * has_results + [HINT] * can_compare))
        if first is not None and second is not None:
            self.detail.show_completion(pair[1].row, second)
            names = [f"step {each.row.get('step')}, number {each.place + 1}" for each in pair]
            self.pane.show_difference(first, second, f"From {names[0]} to {names[1]}")
        else:
            self.detail.show_completion(line.row, line.completion)

    def menu(self) -> QMenu:
        menu, line, run = QMenu(self), self.table.current_line, self._run
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        if line is None or run is None:
            return menu
        copy, prompt = QGuiApplication.clipboard().setText, str(line.row.get("prompt") or "")
        text = conversation_text(line.completion or {})
        menu.addAction("Copy completion", lambda: copy(text)).setEnabled(line.completion is not None)
        menu.addAction("Copy prompt", lambda: copy(prompt))
        menu.addAction("Copy rows as a table", QKeySequence.StandardKey.Copy, self.table.copy)
        menu.addSeparator()
        rewards = {
            at: reward
            for at, other in enumerate(() if self.model.is_flat or line.completion is None else self.model.rows)
            if other.completion is not None and other.group == line.group and other.place != line.place
            if (reward := finite(other.completion.get("reward"))) is not None
        }
        best, flags = max(rewards, key=lambda at: rewards[at], default=-1), QItemSelectionModel.SelectionFlag
        add = partial(self.table.selectionModel().select, self.model.index(best, 0), flags.Select | flags.Rows)
        menu.addAction("Compare with the best of its group", add).setEnabled(best >= 0)
        menu.addAction("Follow this prompt", self._follow_prompt)
        menu.addAction("Find in Evaluate", lambda: self.session.prompt_requested.emit(prompt_key(line.row)))
        menu.addSeparator()
        judges = menu.addMenu("Correct according to")
        group, marked = QActionGroup(judges), marked_reward(run)
        automatic = default_pass_rule(entries_of(run))
        names = {"": f"Automatic: {charts.label_of(automatic.reward) if automatic else 'none known'}"}
        for name, shown in (names | dict(zip(run.reward_names, labels_of(run), strict=True))).items():
            action = group.addAction(judges.addAction(shown, partial(self._mark, run, name)))
            action.setCheckable(True)
            action.setChecked(name == marked)
        return menu

    def _mark(self, run: Run, name: str) -> None:
        with problems_to(self.session.message.emit):
            change_notes(run.folder, correctness=name)
            self._show_again()
            if (right := correctness_of(run)) is not None:
                told = f"{charts.label_of(right.reward)} says what is correct, also on Monitor and Evaluate."
            else:
                graded = f"{charts.label_of(name)} gives partial scores: it does not say what is correct."
                told = graded if name else "No reward function here is known to say what is correct."
            self.session.message.emit(told)

    def _follow_prompt(self) -> None:
        if (line := self.table.current_line) is not None:
            self.bar.follow_prompt(hash(prompt_key(line.row)))

    def save_rows(self, rows: Sequence[int]) -> None:
        lines = self.model.rows
        if isinstance(lines, RunLines):  # without reading what is not shown
            places = [lines.place(row) for row in rows]
        else:
            places = [(line.offset, line.place) for line in (lines[row] for row in rows) if line.completion is not None]
        if self.completions is None or not places:
            return
        filters = ";;".join(f"{name} (*{suffix})" for suffix, name in SUFFIXES.items())
        start = str(Path.home() / f"{self.completions.path.parent.name} completions.jsonl")
        chosen, name = QFileDialog.getSaveFileName(self, "Save completions", start, filters)
        if not chosen:
            return
        target, say = Path(chosen), self.session.message.emit
        if target.suffix not in SUFFIXES:
            suffix = next((suffix for suffix, text in SUFFIXES.items() if name.startswith(text)), ".jsonl")
            target = target.with_name(target.name + suffix)
        progress = QProgressDialog(f"Saving {counted(len(places), 'completion')}…", "Cancel", 0, len(places), self)
        configure(progress, modal=True, minimumDuration=SAVING_MS, attribute=Qt.WidgetAttribute.WA_DeleteOnClose)
        progress.setValue(0)
        with problems_to(say), closing(export_completions(self.completions.path, places, target)) as saving:
            for written in saving:
                progress.setValue(written)  # which handles events while it is shown
                if progress.wasCanceled():
                    say(f"{target.name} was not saved.")
                    break
            else:
                say(f"Saved {counted(len(places), 'completion')} in {target.name}.")
        progress.close()

    def show_requested(self, step: int, name: str | None) -> None:
        """`name`: of a filter; None shows all."""
        self.bar.reset()
        self.bar.show_filter(name or ALL)
        self._shown = None  # the step may be the one on screen, with the filter it had
        self.pick(step)

    def pick(self, step: int) -> None:
        steps = self._steps()
        self._picked = _nearest(steps, step) if steps else step  # the nearest now: a step beyond the end would follow
        with QSignalBlocker(self.newest):
            self.newest.setChecked(False)
        if self.bar.scope.key == RUN:
            self.bar.scope.choose(STEP)
        self._refresh()
        if self._picked != step:
            self.session.message.emit(f"Step {step:,} has no completions. The nearest is step {self._picked:,}.")

    def _on_typed(self) -> None:
        if self.step.isModified() and self.step.text():  # `editingFinished` also comes when the focus merely leaves
            self.step.setModified(False)
            self.pick(int(self.step.text()))

    def _set_following(self, follow: bool) -> None:
        if not follow and self._shown is not None:
            self._picked = self._shown[1]
        self._refresh()

    def _stop_following(self) -> None:
        if self.newest.isChecked() and self._shown is not None and self._shown[0].is_live:
            self.newest.setChecked(False)

    def go(self, by: int) -> None:
        if (steps := self._steps()) and self._shown is not None:
            index = steps.index(_nearest(steps, self._shown[1])) + by
            if 0 <= index < len(steps):
                self.pick(steps[index])

    def go_to_step(self) -> None:
        line = self.table.current_line
        if line is not None and self.bar.scope.key == RUN and isinstance(step := line.row.get("step"), int):
            self._go_to(step, line.offset, line.place)

    def _go_to(self, step: int, offset: int, place: int) -> None:
        self.pick(step)
        lines = self.model.rows
        row = next((at for at, line in enumerate(lines) if (line.offset, line.place) == (offset, place)), None)
        if row is not None:
            self.table.selectRow(row)

    def move(self, by: int) -> None:
        line, completions = self.table.current_line, self.completions
        if completions is None or line is None:
            return
        if self.bar.scope.key == RUN:
            row = self.table.currentIndex().row() + by
            if 0 <= row < self.model.rowCount():
                self.table.selectRow(row)
            return
        completions.follow(True)
        facts, chosen = completions.shown.facts, completions.select(self.bar.query)
        offsets, places = facts.per_completion("offset")[chosen], facts.column("place")[chosen]
        side = "right" if by > 0 else "left"  # the sums ascend: a row has more bytes than completions
        at = int(np.searchsorted(offsets + places, line.offset + line.place, side=side)) - (by < 0)
        if 0 <= at < len(chosen):
            self._go_to(int(facts.per_completion("step")[chosen[at]]), int(offsets[at]), int(places[at]))
            return
        where, what = "later" if by > 0 else "earlier", FILTERS[self.bar.query.filter].label.lower()
        what = completions.search.text if completions.search is not None else what
        so_far = "" if completions.shown.is_done else f" in the {completions.shown.share:.0%} of the file read so far"
        self.session.message.emit(f"There is no {where} completion of “{what}”{so_far}.")


def labels_of(run: Run) -> list[str]:
    return [charts.label_of(name) for name in run.reward_names]


def _nearest(steps: list[int], step: int) -> int:
    at = bisect_left(steps, step)
    return min(steps[max(0, at - 1) : at + 1] or steps[-1:], key=lambda known: (abs(known - step), known))


class FilterBar(QWidget):
    changed = Signal()  # query or scope
    moved = Signal(int)
    searched = Signal(str)  # another text, "" for none

    def __init__(self) -> None:
        super().__init__()
        self._prompt: int | None = None
        self._sought = ""
        self.right = ""  # the reward function that says what is correct
        self._typing = configure(QTimer(self, singleShot=True, interval=TYPING_MS), timeout=self._search)
        tip = "Searches prompts, completions and texts that reward functions logged, over the whole run"
        self.search = SearchEdit("Find text in prompts and completions", tip=tip, returnPressed=self._search)
        configure(self.search, minimumWidth=theme.scaled(140), textChanged=lambda _: self._typing.start())
        self.scope = Segments({STEP: "This step", RUN: "Whole run"}, "Completions of")
        labels = {name: about.label for name, about in FILTERS.items()}
        tips = [each.sentence for each in FILTERS.values()]
        policy = (QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Fixed)
        self.filter = ComboBox(name="Filter", length=20, items=labels, tips=tips, sizePolicy=policy)
        before, after = "Previous match, in earlier steps too (Ctrl+Shift+G)", "Next match, in later steps too (Ctrl+G)"
        self.previous = button("Previous", lambda: self.moved.emit(-1), tip=before)
        self.next = button("Next", lambda: self.moved.emit(1), tip=after)
        self.measure = ComboBox(name="Score", length=14)
        self.side = ComboBox(name="Above or below", length=5, items={True: "above", False: "below"})
        left = Qt.AlignmentFlag.AlignLeft
        self.limit = NumberEdit(name="Value", text="0", width=72, alignment=left, validator=QDoubleValidator(self))
        self.prompt = LinkButton("All prompts again", on_click=lambda: self.follow_prompt(None))
        self.found = ElidedLabel(font=theme.figures_font(theme.CAPTION))
        self._second = holder(row(self.measure, self.side, self.limit, self.prompt, (self.found, 1)))
        column(row((self.search, 1), self.scope, self.filter, self.previous, self.next), self._second, into=self)
        self.set_measures([], [])
        boxes = (self.filter, self.measure, self.side)
        conditions = (self.limit.editingFinished, *(box.currentIndexChanged for box in boxes))
        connect(self._show_condition, *conditions)
        connect(lambda *_: self.changed.emit(), *conditions, self.scope.chosen)
        self._show_condition()

    def report(self, sentence: str) -> None:
        self.found.setText(sentence)
        self._show_condition()

    @property
    def query(self) -> Query:
        limit: tuple[float, bool] = self.limit.locale().toDouble(self.limit.text())  # pyright: ignore
        is_above, measure = bool(self.side.currentData()), self.measure.currentData() or "reward"
        name, value = self.filter.currentData(), limit[0]
        return Query(name, measure, is_above=is_above, limit=value, prompt=self._prompt, right=self.right)

    @property
    def is_filtering(self) -> bool:
        return self.query.filter != ALL or self._prompt is not None

    def show_filter(self, name: str) -> None:
        self.filter.setCurrentIndex(max(0, self.filter.findData(name)))

    def reset(self) -> None:
        with QSignalBlocker(self):
            self.show_filter(ALL)
            self._sought = ""
            self.search.clear()
            self._typing.stop()
            self._prompt = None
            self.scope.choose(STEP)
            self.report("")

    def follow_prompt(self, prompt: int | None) -> None:
        self._prompt = prompt
        self._show_condition()
        self.scope.choose(RUN if prompt is not None else self.scope.key)  # which emits `changed`

    def set_measures(
        self, names: Sequence[str], labels: Sequence[str], logged: Mapping[str, bool] | None = None
    ) -> None:
        """The numbers that a condition may be about: scores of functions, and what they `logged` if it is numbers."""
        listed = {"reward": "Reward", "advantage": "Advantage", "tokens": "Tokens"}
        listed |= {f"score:{name}": text for name, text in zip(names, labels, strict=True)}
        listed |= {f"logged:{name}": name for name, is_number in (logged or {}).items() if is_number}
        chosen = str(self.measure.currentData())
        if chosen.startswith("logged:"):
            listed.setdefault(chosen, self.measure.currentText())  # the condition stays where a step has none of it
        with QSignalBlocker(self.measure):
            self.measure.fill(listed, chosen)

    def _show_condition(self) -> None:
        is_score = self.filter.currentData() == SCORE
        for part in (self.measure, self.side, self.limit):
            set_shown(part, is_score)
        set_shown(self.prompt, self._prompt is not None)
        set_shown(self._second, is_score or self._prompt is not None or bool(self.found.text()))
        self.filter.setToolTip(FILTERS[self.filter.currentData()].sentence)

    def _search(self) -> None:
        self._typing.stop()
        if self.search.text() != self._sought:
            self._sought = self.search.text()
            self.searched.emit(self._sought)
