"""The Evaluate page: held-out figures before and after training with intervals, and the rows behind them."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QIntValidator, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QProgressBar, QSizePolicy, QSplitter, QStackedLayout, QWidget

from app import theme
from app.pages.evaluate.tables import FigureModel, FiguresTable, PromptRowModel, PromptRowTable, RowLine, figure_lines
from app.state import charts
from app.state.evaluations import Evaluations, Listed, checkpoint_steps
from app.state.session import Session
from app.widgets.basic.controls import ComboBox, ElidedLabel, NumberEdit, Segments
from app.widgets.basic.labels import EmptyState, button, label, plain_tip
from app.widgets.basic.layout import NestedStack, TabArea, column, holder, row
from app.widgets.basic.number_format import duration, moment
from app.widgets.run_header import BeforeAfter, ResultCard
from app.widgets.side_by_side import TITLES, SideBySide
from backend.trainer.evaluation.evaluation_rows import Decoding, DecodingName

SPLITS = {"test": "Test", "valid": "Validation", "train": "Training"}
KINDS = {"all": "All", "better": "Better", "worse": "Worse", "unchanged": "Same"}
BAR_STEPS = 1000
LEAST_TABLES, LEAST_DETAIL, DETAIL = 236, 150, 180
"""Heights in pixels: least of the tables and the completions, and of the completions at first."""
FIGURES_SHARE = 0.55
"""Share of the width that the figures have beside the prompts."""
NOT_YET = (
    "The model as it was before training and as it is now answer the same prompts.\n"
    "The result says how far apart the two are, and how sure that is."
)


class EvaluationForm(QWidget):
    """A row of fields, and below it the progress of an evaluation or the error of the last one."""

    started = Signal()
    stopped = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._is_running = False
        self.split, self.checkpoint = ComboBox(), ComboBox()
        for key, title in SPLITS.items():
            self.split.addItem(title, key)
        self.completions, self.limit = NumberEdit(), NumberEdit()
        for field, placeholder in ((self.completions, "as in training"), (self.limit, "all")):
            field.setValidator(QIntValidator(1, 1_000_000, field))
            field.setPlaceholderText(placeholder)
            field.setAlignment(Qt.AlignmentFlag.AlignRight)
            field.returnPressed.connect(self._press)
        self.completions.setToolTip("Sampled completions of each prompt, in addition to the greedy one.")
        self.limit.setToolTip("Only the first prompts of the split.")
        self.button = button("Evaluate", self._press, primary=True)
        self.bar = QProgressBar(textVisible=False, maximum=BAR_STEPS)
        self.bar.setAccessibleName("Progress of the evaluation")
        self.status = ElidedLabel(font=theme.figures_font())
        self.problem = label(role="problem", wrap=True, selectable=True)
        self._fields = {
            "Split": (self.split, 110),
            "Checkpoint": (self.checkpoint, 130),
            "Completions": (self.completions, 104),
            "Prompts": (self.limit, 64),
        }
        fields = row()
        for name, (field, width) in self._fields.items():
            caption = label(name, role="muted")
            caption.setBuddy(field)
            field.setAccessibleName(name)
            field.setMinimumWidth(theme.scaled(64))
            field.setMaximumWidth(theme.scaled(width))
            fields.addWidget(caption)
            fields.addWidget(field, 1)
            fields.addSpacing(theme.SPACE)
        fields.addStretch(1)
        fields.addWidget(self.button)
        column(fields, row((self.bar, 1), (self.status, 1), spacing=2 * theme.SPACE), self.problem, into=self)
        self.show_idle("")

    def set_checkpoints(self, steps: Sequence[int]) -> None:
        """Offer the newest, the best and every step."""
        items = {"end": "End", "best": "Best", **{str(step): f"Step {step:,}" for step in steps}}
        if [self.checkpoint.itemData(i) for i in range(self.checkpoint.count())] == list(items):
            return
        chosen = self.checkpoint.currentData()
        self.checkpoint.clear()
        for key, title in items.items():
            self.checkpoint.addItem(title, key)
        self.checkpoint.setCurrentIndex(max(0, self.checkpoint.findData(chosen)))

    def show_idle(self, problem: str, obstacle: str = "") -> None:
        """Nothing is running. `problem`: the error of the last evaluation; `obstacle`: why none can begin."""
        self._show_running(False)
        self.button.setEnabled(not obstacle)
        self.problem.setText(obstacle or problem)
        self.problem.setVisible(bool(obstacle or problem))

    def show_running(self, phase: str, done: float | None, left_s: float | None) -> None:
        self._show_running(True)
        self.button.setEnabled(True)
        self.problem.hide()
        self.bar.setValue(round(BAR_STEPS * (done or 0.0)))
        self.status.setText(f"{phase}, {duration(left_s)} left" if left_s is not None else f"{phase}…")

    def _show_running(self, running: bool) -> None:
        self._is_running = running
        self.button.setText("Stop" if running else "Evaluate")
        self.bar.setVisible(running)
        self.status.setVisible(running)
        for field, _ in self._fields.values():
            field.setEnabled(not running)

    def _press(self) -> None:
        if self.button.isEnabled():
            (self.stopped if self._is_running else self.started).emit()

    def options(self) -> list[str]:
        """The options of the verb that the fields describe."""
        options = ["--split", self.split.currentData(), "--checkpoint", str(self.checkpoint.currentData() or "end")]
        for flag, line in (("--n", self.completions), ("--limit", self.limit)):
            options += [flag, str(int(line.text()))] if line.hasAcceptableInput() else []
        return options


class EvaluatePage(QWidget):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.evaluations: Evaluations = session.evaluations
        self._build()
        self._connect()
        self._on_run_changed()

    def _build(self) -> None:
        sentence = "Once a run has trained, its model answers prompts that it has never seen."
        self.nothing = EmptyState("No run to evaluate", sentence, "Go to Train")
        self.about = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self.picker = ComboBox(name="Evaluation", length=34)
        self.form, self.card, self.detail = EvaluationForm(), ResultCard(), SideBySide()
        self.decoding = Segments({"greedy": "Greedy", "sampled": "Sampled"}, "Decoding")
        self.how = ElidedLabel()
        self.kind = Segments(KINDS, "Prompts")
        self.figures_model, self.row_model = FigureModel(self), PromptRowModel(self)
        self.figures, self.rows = FiguresTable(self.figures_model), PromptRowTable(self.row_model)
        self.tables = QSplitter(childrenCollapsible=False, handleWidth=theme.SPACE)
        above_figures, above_rows = row(self.decoding, (self.how, 1)), row(self.kind, None)
        self.tables.addWidget(holder(column(above_figures, (self.figures.in_card(), 1), spacing=6)))
        self.tables.addWidget(holder(column(above_rows, (self.rows.in_card(), 1), spacing=6)))
        self.tables.setMinimumHeight(theme.scaled(LEAST_TABLES))
        self.detail.setMinimumHeight(theme.scaled(LEAST_DETAIL))
        self.parts = QSplitter(Qt.Orientation.Vertical, childrenCollapsible=False, handleWidth=theme.SPACE)
        self.parts.addWidget(self.tables)
        self.parts.addWidget(self.detail)
        # Labels that wrap ask for more height the narrower they are; the page must not take that for its least height.
        self.parts.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self.parts.setMinimumHeight(theme.scaled(LEAST_TABLES + LEAST_DETAIL) + theme.SPACE)
        self.parts.setStretchFactor(0, 3)
        self.parts.setStretchFactor(1, 2)
        content = QWidget()
        centre = Qt.AlignmentFlag.AlignCenter
        self.not_yet = label("Not evaluated yet", theme.title_font(), align=centre)
        explanation = label(NOT_YET, role="muted", align=centre, wrap=True)
        self._result = NestedStack(content)
        self._result.addWidget(holder(column((None, 2), self.not_yet, explanation, (None, 3), spacing=2 * theme.SPACE)))
        self._result.addWidget(holder(column(self.card, (self.parts, 1), spacing=12)))
        head = row(label("Evaluate", theme.title_font()), (self.about, 1), self.picker)
        column(head, self.form, (self._result, 1), into=content, spacing=12, margins=theme.GUTTER)
        scrolled = TabArea()
        scrolled.setWidget(content)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.nothing)
        self._stack.addWidget(scrolled)

    def _connect(self) -> None:
        self.nothing.button_clicked.connect(lambda: self.session.page_requested.emit("train"))
        self.form.started.connect(self.start)
        self.form.stopped.connect(self.evaluations.stop)
        self.picker.activated.connect(lambda _: self.evaluations.refresh(self.picker.currentData()))
        self.decoding.chosen.connect(lambda _: self._show_decoding())
        self.kind.chosen.connect(lambda _: self._show_rows())
        self.rows.chosen.connect(self._show_row)
        self.evaluations.listed_changed.connect(self._show_listed)
        self.evaluations.rows_changed.connect(self._show_rows)
        self.evaluations.running_changed.connect(self._show_running)
        self.session.run_changed.connect(self._on_run_changed)
        self.session.run_state_changed.connect(lambda _: self._show_running())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.tables.setSizes([round(FIGURES_SHARE * self.width()), round((1 - FIGURES_SHARE) * self.width())])
        detail = max(theme.scaled(DETAIL), self.height() // 4)
        self.parts.setSizes([self.height() - detail, detail])

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._on_run_changed()

    # The run and its evaluations

    def _on_run_changed(self) -> None:
        run = self.session.run
        self._stack.setCurrentIndex(0 if run is None else 1)
        if not self.isVisible():
            return
        self.evaluations.set_run(run.folder if run is not None else None)
        if run is not None:
            self.about.setText(run.folder.name)
            self.form.set_checkpoints(checkpoint_steps(run.folder))
        self._show_running()

    def start(self) -> None:
        if self.session.run is not None and not self._obstacle():
            self.evaluations.start(self.form.options())

    def _obstacle(self) -> str:
        if self.session.is_training:
            return "A run is training and needs the memory; evaluate once it has ended."
        run = self.session.run
        if run is not None and not checkpoint_steps(run.folder):
            return "This run has no checkpoint yet."
        return ""

    def _show_running(self) -> None:
        running, run = self.evaluations.running, self.session.run
        self.not_yet.setText("Not evaluated yet" if running is None else "Evaluating")
        if running is None:
            self.form.show_idle(self.evaluations.problem, self._obstacle())
            return
        is_this = run is not None and run.folder == running.run
        phase = running.phase if is_this else f"{running.run.name}: {running.phase}"
        self.form.show_running(phase, running.done, running.left_s)

    def _show_listed(self) -> None:
        shown, listed = self.evaluations.shown, self.evaluations.listed
        self.picker.clear()
        for entry in listed:
            self.picker.addItem(_title(entry), entry.path)
        self.picker.setVisible(bool(listed))
        self._result.setCurrentIndex(0 if shown is None else 1)
        if shown is None:
            return
        self.picker.setCurrentIndex(self.picker.findData(shown.path))
        names = [function.name for function in shown.evaluation.functions]
        self.detail.set_rewards(names, [charts.label_of(name) for name in names])
        available = [decoding.name for decoding in shown.evaluation.decodings]
        for key in self.decoding.buttons:
            self.decoding.set_shown(key, key in available)
        self.decoding.buttons[self.decoding.key if self.decoding.key in available else available[0]].setChecked(True)
        self._show_decoding()

    # One evaluation

    @property
    def _decoding_name(self) -> DecodingName:
        return "sampled" if self.decoding.key == "sampled" else "greedy"

    def _show_decoding(self) -> None:
        shown = self.evaluations.shown
        if shown is None:
            return
        decodings = {decoding.name: decoding for decoding in shown.evaluation.decodings}
        decoding = decodings.get(self._decoding_name) or shown.evaluation.headline
        if decoding is None:
            return
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
        title, role = _verdict(decoding, evaluation.data.split)
        self.card.show_result(title, role, evaluation.sentence(decoding), " ".join(evaluation.notes), changes)

    def _show_rows(self) -> None:
        name = self._decoding_name
        lines = [
            RowLine(place, each.index + 1, each.prompt, *each.means[name])
            for place, each in enumerate(self.evaluations.rows)
            if name in each.means
        ]
        has_both = any(line.before is not None for line in lines) or not lines
        for key, word in KINDS.items():
            count = sum(key in ("all", line.kind) for line in lines)
            self.kind.show_word(key, f"{word} {count:,}" if lines else word)
            self.kind.set_shown(key, key == "all" or has_both)
        self.row_model.show_lines(lines, self.kind.key)

    def _show_row(self, place: int) -> None:
        rows = self.evaluations.rows
        shown = self.evaluations.row(rows[place]) if 0 <= place < len(rows) else None
        sides = (shown[self._decoding_name] or {}) if shown is not None else {}
        self.detail.show_row(shown, dict(sides))  # pyright: ignore[reportArgumentType]


def _title(entry: Listed) -> str:
    evaluation = entry.evaluation
    step = f", step {evaluation.subject.step:,}" if evaluation.subject.step is not None else ""
    return f"{evaluation.data.split}{step}, {evaluation.data.rows:,} prompts, {moment(evaluation.created)}"


def _verdict(decoding: Decoding, split: str) -> tuple[str, str]:
    if decoding.difference is None:
        return "Evaluated", "accent"
    change = decoding.difference.reward
    prompts = "the prompts of training" if split == "train" else "prompts not seen in training"
    if not change.excludes_zero:
        return f"No significant difference on {prompts}", "muted"
    return (f"Better on {prompts}", "good") if (change.value or 0) > 0 else (f"Worse on {prompts}", "bad")
