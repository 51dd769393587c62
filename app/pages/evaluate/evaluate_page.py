"""The Evaluate page: held-out figures before and after training with intervals, and the rows behind them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent, QShowEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app import theme
from app.pages.evaluate.tables import FigureModel, FiguresTable, PromptRowModel, PromptRowTable, RowLine, figure_lines
from app.state import charts
from app.state.dataset import ANSWER_SETTINGS, LIMIT_SETTINGS
from app.state.evaluations import Listed, checkpoint_steps
from app.state.session import Session
from app.widgets.basic.controls import ComboBox, ElidedLabel, LinkButton, NumberEdit, Segments
from app.widgets.basic.dialogs import open_file
from app.widgets.basic.labels import EmptyState, button, label, plain_tip, progress_bar, show_text
from app.widgets.basic.layout import FlowLayout, TabArea, column, configure, connect, holder, row, splitter, stack
from app.widgets.basic.number_format import duration, moment
from app.widgets.run_header import BeforeAfter, ResultCard
from app.widgets.run_switcher import RunSwitcher
from app.widgets.side_by_side import TITLES, SideBySide
from backend.runs.run_folder import RunFolder
from backend.runs.run_names import name_of
from backend.runs.steering import run_config
from backend.trainer.evaluation.evaluation_rows import Data, Decoding, DecodingName
from backend.utils.errors import UserError

SPLITS = {"": "Held out", "test": "Test", "valid": "Validation", "train": "Training"}
KINDS = {"all": "All", "better": "Better", "worse": "Worse", "unchanged": "Same"}
LEAST_TABLES, LEAST_DETAIL, DETAIL = 236, 150, 180
"""Heights in pixels: least of the tables and the completions, and of the completions at first."""
FIGURES_SHARE = 0.55
NOT_YET = (
    "The model before and after training answers the same prompts.\n"
    "The result says how far apart the two are, and how sure that is."
)
NOTHING_HELD_OUT = "No rows of this run's dataset are held out, so it answers the prompts that it has trained on."
HELD_OUT_NEXT = "The next run holds a tenth of its rows out, and evaluates on them."
DATA_FILES = "Data (*.csv *.json *.jsonl *.parquet)"
PREVIEW_SETTINGS = (*ANSWER_SETTINGS, *LIMIT_SETTINGS)


class EvaluationForm(QWidget):
    pressed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.button = button("Evaluate", self.pressed.emit, primary=True)
        self.own = button(
            "Evaluate a file…", tip="Prompts of your own, in columns named as the run's: CSV, JSON lines, …"
        )
        self.hint = label(NOTHING_HELD_OUT, role="muted", wrap=True)
        self.hold_out = LinkButton("Hold 10 % out next time")
        right, start = Qt.AlignmentFlag.AlignRight, self.button.click
        whole = {"integers": (1, 1_000_000), "alignment": right, "returnPressed": start}
        tip = "Sampled completions of each prompt, in addition to the greedy one."
        self.split, self.checkpoint = ComboBox(items=SPLITS), ComboBox()
        self.completions = NumberEdit(tip=tip, placeholderText="as in training", **whole)
        self.limit = NumberEdit(tip="Only the first prompts of the split.", placeholderText="all", **whole)
        self.bar = progress_bar("Progress of the evaluation")
        self.status = ElidedLabel(font=theme.figures_font())
        self.problem = label(role="problem", wrap=True, selectable=True)
        fields = FlowLayout(spacing=2 * theme.SPACE)
        for name, field, width in (
            ("Split", self.split, 150),
            ("Checkpoint", self.checkpoint, 130),
            ("Completions", self.completions, 104),
            ("Prompts", self.limit, 64),
        ):
            configure(field, name=name, width=width)
            fields.addWidget(holder(row(label(name, role="muted", buddy=field), field)))
        self._nothing_held_out = holder(row((self.hint, 1), self.hold_out), visible=False)
        head = row((column(holder(fields), margins=(0, 2, 0, 2)), 1), self.own, self.button)
        progress = row((self.bar, 1), (self.status, 1), spacing=2 * theme.SPACE)
        column(head, self._nothing_held_out, progress, self.problem, into=self)
        self.show_state("")

    def show_splits(self, rows: Mapping[str, int] | None) -> None:
        """Offer the splits, with their `rows` where these are known."""
        items = SPLITS if rows is None else {split: f"{SPLITS.get(split, split)}, {rows[split]:,}" for split in rows}
        self.split.fill(items, self.split.currentData())
        self._nothing_held_out.setVisible(list(items) == ["train"])

    def show_state(self, phase: str, done: float | None = None, left_s: float | None = None, problem: str = "") -> None:
        """Show a running evaluation or, without `phase`, that none is."""
        status = f"{phase}, {duration(left_s)} left" if left_s is not None else f"{phase}…"
        self.button.setText("Stop" if phase else "Evaluate")
        configure(self.bar, visible=bool(phase), value=round(self.bar.maximum() * (done or 0.0)))
        configure(self.status, visible=bool(phase), text=status)
        show_text(self.problem, problem)
        for field in (self.split, self.checkpoint, self.completions, self.limit, self.own):
            field.setEnabled(not phase)

    def options(self, data: str = "") -> list[str]:
        """`data`: a file in place of the split."""
        options = ["--data", data] if data else ["--split", self.split.currentData()]
        options += ["--checkpoint", str(self.checkpoint.currentData() or "end")]
        for flag, line in (("--n", self.completions), ("--limit", self.limit)):
            options += [flag, str(int(line.text()))] if line.hasAcceptableInput() else []
        return options


class EvaluatePage(QWidget):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self._wanted: tuple[str, ...] = ()  # the `prompt_key` whose row is shown as soon as it is read
        self._splits_of: RunFolder | None = None
        evaluations = self.evaluations = session.evaluations
        sentence = "Once a run has trained, its model answers prompts that it has never seen."
        go = partial(session.page_requested.emit, "train")
        nothing = EmptyState("No run to evaluate", sentence, "Go to Train", button_clicked=go)
        self.switcher = RunSwitcher(session.open_run)
        self.picker = ComboBox(name="Evaluation", length=34)
        self.form, self.card, self.detail = EvaluationForm(), ResultCard(), SideBySide()
        self.decoding = Segments({"greedy": "Greedy", "sampled": "Sampled"}, "Decoding")
        self.how = ElidedLabel()
        self.kind = Segments(KINDS, "Prompts")
        self.figures_model, self.row_model = FigureModel(self), PromptRowModel(self)
        self.figures, self.rows = FiguresTable(self.figures_model), PromptRowTable(self.row_model)
        figures = column(row(self.decoding, (self.how, 1)), (self.figures.in_card(), 1), spacing=6)
        rows = column(row(self.kind, None), (self.rows.in_card(), 1), spacing=6)
        self.tables = splitter(holder(figures), holder(rows), minimumHeight=theme.scaled(LEAST_TABLES))
        self.detail.setMinimumHeight(theme.scaled(LEAST_DETAIL))
        self.parts = splitter(self.tables, self.detail, stretch=(3, 2), upright=True)
        # Labels that wrap ask for more height the narrower they are; the page must not take that for its least height.
        self.parts.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self.parts.setMinimumHeight(theme.scaled(LEAST_TABLES + LEAST_DETAIL) + theme.SPACE)
        content = QWidget()
        head = row(label("Evaluate", theme.title_font()), self.switcher, None, self.picker)
        page = column(head, self.form, into=content, spacing=12, margins=theme.GUTTER)
        self.not_yet = EmptyState("Not evaluated yet", NOT_YET)
        result = holder(column(self.card, (self.parts, 1), spacing=12))
        self._result = stack(self.not_yet, result, into=content, nested=True)
        page.addLayout(self._result, 1)
        scrolled = TabArea()
        scrolled.setWidget(content)
        self._stack = stack(nothing, scrolled, into=self)

        self.form.own.clicked.connect(self.evaluate_file)
        self.form.hold_out.clicked.connect(lambda: session.draft.hold_out())
        self.form.hold_out.clicked.connect(lambda: session.message.emit(HELD_OUT_NEXT))
        self.form.pressed.connect(lambda: self.start() if evaluations.running is None else evaluations.stop())
        self.picker.activated.connect(lambda: evaluations.refresh(self.picker.currentData()))
        self.decoding.chosen.connect(self._show_decoding)
        self.rows.chosen.connect(self._show_row)
        evaluations.listed_changed.connect(self._show_listed)
        connect(self._show_rows, self.kind.chosen, evaluations.rows_changed)
        connect(self._show_running, evaluations.running_changed, session.run_state_changed)
        session.run_changed.connect(self._on_run_changed)
        self._on_run_changed()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.tables.setSizes([round(FIGURES_SHARE * self.width()), round((1 - FIGURES_SHARE) * self.width())])
        detail = max(theme.scaled(DETAIL), self.height() // 4)
        self.parts.setSizes([self.height() - detail, detail])

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._on_run_changed()

    def _on_run_changed(self) -> None:
        run = self.session.run
        self._stack.setCurrentIndex(0 if run is None else 1)
        if not self.isVisible():
            return
        self.evaluations.set_run(run.folder if run is not None else None)
        if run is not None:
            self.switcher.show_run(run.folder)
            self._ask_for_splits(run.folder)
            steps = {str(step): f"Step {step:,}" for step in checkpoint_steps(run.folder)}
            chosen = self.form.checkpoint.currentData()
            self.form.checkpoint.fill({"end": "End", "best": "Best", **steps}, chosen)
        self._show_running()

    def _ask_for_splits(self, run: RunFolder) -> None:
        if run == self._splits_of:
            return
        self._splits_of = run
        self.form.show_splits(None)

        def on_answer(answer: Mapping[str, Any]) -> None:
            found = answer.get("splits") or {}
            if run == self._splits_of and found:
                rows = {split: found[split]["rows"] for split in SPLITS if split in found}
                self.form.show_splits(rows)

        with suppress(UserError):  # broken settings, which evaluating reports
            values = run_config(run).model_dump()
            settings = {key: values[key] for key in PREVIEW_SETTINGS}
            ignored = {"on_refused": lambda _faults: None, "owner": self}
            self.session.service.ask("preview", on_answer, settings=settings, fetch=False, **ignored)

    def start(self, data: str = "") -> None:
        if self.session.run is not None and not self._obstacle():
            self.evaluations.start(self.form.options(data))

    def evaluate_file(self) -> None:
        chosen = open_file(self, "data", "Evaluate on the prompts of a file", DATA_FILES)
        if chosen is not None:
            self.start(str(chosen))

    def _obstacle(self) -> str:
        if self.session.is_training:
            return "A run is training and needs the memory; evaluate once it has ended."
        run = self.session.run
        if run is not None and not checkpoint_steps(run.folder):
            return "This run has no checkpoint yet."
        return ""

    def _show_running(self) -> None:
        running, run = self.evaluations.running, self.session.run
        self.not_yet.title.setText("Not evaluated yet" if running is None else "Evaluating")
        obstacle = self._obstacle()
        self.form.button.setEnabled(running is not None or not obstacle)
        if running is None:
            self.form.show_state("", problem=obstacle or self.evaluations.problem)
            self.form.own.setEnabled(not obstacle)
            return
        is_this = run is not None and run.folder == running.run
        phase = running.phase if is_this else f"{name_of(running.run)}: {running.phase}"
        self.form.show_state(phase, running.done, running.left_s)

    def _show_listed(self) -> None:
        shown, listed = self.evaluations.shown, self.evaluations.listed
        titles = {}
        for entry in listed:
            made, step = entry.evaluation, entry.evaluation.subject.step
            split = SPLITS.get(made.data.split, made.data.split)
            where = f"{split}, step {step:,}" if step is not None else split
            titles[entry.path] = f"{where}, {made.data.rows:,} prompts, {moment(made.created)}"
        self.picker.fill(titles, shown.path if shown is not None else None)
        self.picker.setVisible(bool(listed))
        self._result.setCurrentIndex(0 if shown is None else 1)
        if shown is None:
            return
        names = [function.name for function in shown.evaluation.functions]
        self.detail.set_rewards(names, [charts.label_of(name) for name in names])
        available = [decoding.name for decoding in shown.evaluation.decodings]
        for key in self.decoding.buttons:
            self.decoding.set_shown(key, key in available)
        self.decoding.buttons[self.decoding.key if self.decoding.key in available else available[0]].setChecked(True)
        self._show_decoding()

    @property
    def _decoding_name(self) -> DecodingName:
        return "sampled" if self.decoding.key == "sampled" else "greedy"

    def _show_decoding(self) -> None:
        shown = self.evaluations.shown
        if shown is None:
            return
        decodings = {decoding.name: decoding for decoding in shown.evaluation.decodings}
        decoding = decodings.get(self._decoding_name) or shown.evaluation.headline
        self._show_card(shown, decoding)
        if decoding.name == "greedy":
            self.how.setText("the likeliest token at every step")
        else:
            count = f"{decoding.completions} completions" if decoding.completions > 1 else "one completion"
            self.how.setText(f"{count} of each prompt at temperature {decoding.temperature:g}")
        rule = shown.evaluation.pass_rule
        self.figures.setToolTip(plain_tip(rule.sentence() if rule is not None else ""))
        labels = {function.name: charts.label_of(function.name) for function in shown.evaluation.functions}
        after = "tuned" if decoding.difference is not None else next(iter(decoding.sides))
        self.figures_model.show_lines(figure_lines(decoding, labels), TITLES[after])
        self._show_rows()

    def _show_card(self, shown: Listed, decoding: Decoding) -> None:
        evaluation = shown.evaluation
        last = (decoding.sides.get("tuned") or next(iter(decoding.sides.values()))).figures
        first = decoding.sides["base"].figures if decoding.difference is not None else None
        changes = [BeforeAfter("Reward", first.reward.value if first else None, last.reward.value)]
        for k in dict.fromkeys([*list(last.pass_at)[:1], *list(last.pass_at)[-1:]]):
            before = first.pass_at[k].value if first else None
            changes.append(BeforeAfter(f"Pass@{k}", before, last.pass_at[k].value, "share"))
        changes.append(BeforeAfter("Tokens", first.tokens.value if first else None, last.tokens.value))
        prompts = prompts_of(evaluation.data)
        if decoding.difference is None:
            title, role = "Evaluated", "accent"
        elif not decoding.difference.reward.excludes_zero:
            title, role = f"No significant difference on {prompts}", "muted"
        else:
            is_better = (decoding.difference.reward.value or 0) > 0
            title, role = (f"Better on {prompts}", "good") if is_better else (f"Worse on {prompts}", "bad")
        self.card.show_result(title, role, evaluation.sentence(decoding), " ".join(evaluation.notes), changes)

    def _show_rows(self) -> None:
        name = self._decoding_name
        lines = [
            RowLine(place, each.index + 1, each.key[0], *each.means[name])
            for place, each in enumerate(self.evaluations.rows)
            if name in each.means
        ]
        has_both = any(line.before is not None for line in lines) or not lines
        for key, word in KINDS.items():
            count = sum(key in ("all", line.kind) for line in lines)
            self.kind.show_word(key, f"{word} {count:,}" if lines else word)
            self.kind.set_shown(key, key == "all" or has_both)
        self.row_model.show_lines(lines, self.kind.key)
        keys = [each.key for each in self.evaluations.rows]
        at = next((at for at, line in enumerate(self.row_model.rows) if keys[line.place] == self._wanted), -1)
        if at >= 0:
            self._wanted = ()
            self.rows.selectRow(at)

    def show_prompt(self, prompt: tuple[str, ...]) -> None:
        """Show the newest evaluation that has the prompt of this `prompt_key`, and its row."""
        found = self.evaluations.with_prompt(prompt)
        if found is None:
            self.session.message.emit("No evaluation of this run has this prompt. Evaluate the split that it is in.")
            return
        self.kind.choose("all")
        self.evaluations.refresh(found)
        self._wanted = prompt  # at last: each of these shows the rows anew, the first one selected
        self._show_rows()

    def _show_row(self, place: int) -> None:
        rows = self.evaluations.rows
        shown = self.evaluations.row(rows[place]) if 0 <= place < len(rows) else None
        sides = (shown[self._decoding_name] or {}) if shown is not None else {}
        self.detail.show_row(shown, dict(sides))  # pyright: ignore[reportArgumentType]


def prompts_of(data: Data) -> str:
    """Whose prompts they are, for the result's title."""
    if data.split == "train" or data.trained_on == data.rows:
        return "the prompts of training"
    if data.split not in SPLITS:
        return data.split
    return "held-out prompts" if data.trained_on else "prompts not seen in training"
