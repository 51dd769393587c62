"""The Evaluate page: did training help on prompts that it never saw? Before and after with intervals, and the rows behind them.

Shows an evaluation of the run that Monitor shows, and starts a new one. It computes nothing: figures and intervals are in the file.
"""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QIntValidator, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QSizePolicy, QSplitter, QStackedLayout, QVBoxLayout, QWidget

from app import theme
from app.pages.evaluate.tables import FigureModel, FiguresTable, PromptRowModel, PromptRowTable, RowLine, figure_lines
from app.state import charts
from app.state.evaluations import EvaluationRequest, Evaluations, Listed, checkpoint_steps
from app.state.session import Session
from app.widgets.basic.controls import ComboBox, ElidedLabel, NumberEdit, Segments
from app.widgets.basic.labels import EmptyState, button, label, plain_tip
from app.widgets.basic.layout import NestedStack, TabArea
from app.widgets.basic.number_format import duration, moment
from app.widgets.run_header import BeforeAfter, ResultCard
from app.widgets.side_by_side import TITLES, SideBySide
from backend.trainer.evaluation.evaluation_rows import Decoding, DecodingName

# What to evaluate: the split, the checkpoint, completions of each prompt, how many prompts; and the button that
# begins or stops.

SPLITS = {"test": "Test", "valid": "Validation", "train": "Training"}
_BAR_STEPS = 1000


class EvaluationForm(QWidget):
    """A row of fields, below it the progress of an evaluation that is being made, or why the last one failed.

    Signals:
        started, stopped – the button was pressed.
    """

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
        self.completions.setToolTip("Sampled completions of each prompt, beside the greedy one.")
        self.limit.setToolTip("Only the first prompts of the split.")
        self.button = button("Evaluate", self._press, primary=True)
        self.bar = QProgressBar(textVisible=False, maximum=_BAR_STEPS)
        self.bar.setAccessibleName("Progress of the evaluation")
        self.status = ElidedLabel()
        self.status.setFont(theme.figures_font())
        self.problem = label(role="problem", wrap=True, selectable=True)
        self._lay_out()
        self.show_idle("")

    def _lay_out(self) -> None:
        fields = QHBoxLayout()
        fields.setSpacing(theme.SPACE)
        widths = {"Split": 110, "Checkpoint": 130, "Completions": 104, "Prompts": 64}
        for (name, width), field in zip(
            widths.items(), (self.split, self.checkpoint, self.completions, self.limit), strict=True
        ):
            caption = label(name, role="muted")
            caption.setBuddy(field)
            field.setAccessibleName(name)
            field.setMinimumWidth(theme.scaled(min(width, 64)))
            field.setMaximumWidth(theme.scaled(width))
            fields.addWidget(caption)
            fields.addWidget(field, 1)
            fields.addSpacing(theme.SPACE)
        fields.addStretch(1)
        fields.addWidget(self.button)
        progress = QHBoxLayout()
        progress.setSpacing(2 * theme.SPACE)
        progress.addWidget(self.bar, 1)
        progress.addWidget(self.status, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addLayout(fields)
        column.addLayout(progress)
        column.addWidget(self.problem)

    def set_checkpoints(self, steps: Sequence[int]) -> None:
        """Offer the newest, the best and every step; the choice stays where it still exists."""
        items = [("End", "end"), ("Best", "best"), *((f"Step {step:,}", str(step)) for step in steps)]
        if [self.checkpoint.itemData(i) for i in range(self.checkpoint.count())] == [key for _, key in items]:
            return
        chosen = self.checkpoint.currentData()
        self.checkpoint.clear()
        for title, key in items:
            self.checkpoint.addItem(title, key)
        self.checkpoint.setCurrentIndex(max(0, self.checkpoint.findData(chosen)))

    def show_idle(self, problem: str, obstacle: str = "") -> None:
        """Nothing is running. `problem`: why the last one failed; `obstacle`: why none can begin."""
        self._is_running = False
        self._set_running_shown(False)
        self.button.setText("Evaluate")
        self.button.setEnabled(not obstacle)
        self.problem.setText(obstacle or problem)
        self.problem.setVisible(bool(obstacle or problem))

    def show_running(self, phase: str, done: float | None, left_s: float | None) -> None:
        self._is_running = True
        self._set_running_shown(True)
        self.button.setText("Stop")
        self.button.setEnabled(True)
        self.problem.hide()
        self.bar.setValue(round(_BAR_STEPS * (done or 0.0)))
        self.status.setText(f"{phase}, {duration(left_s)} left" if left_s is not None else f"{phase}…")

    def _set_running_shown(self, shown: bool) -> None:
        for part in (self.bar, self.status):
            part.setVisible(shown)
        for field in (self.split, self.checkpoint, self.completions, self.limit):
            field.setEnabled(not shown)

    def _press(self) -> None:
        if self.button.isEnabled():
            (self.stopped if self._is_running else self.started).emit()

    @staticmethod
    def number(field: NumberEdit) -> int | None:
        """The number in a field; None where it is empty, which leaves the choice to the evaluation."""
        return int(field.text()) if field.hasAcceptableInput() else None


# ── evaluate page ────────────────────────────────────────────────────────────────────────────────────────────────────

LEAST_TABLES, LEAST_DETAIL, DETAIL = 236, 150, 180
"""Heights in pixels that tables and completions have at least, where the page would rather scroll, and that of the completions at first."""
FIGURES_SHARE = 0.55
"""Share of the width that the figures have beside the prompts."""
NOT_YET = (
    "The model as it was before training and as it is now answer the same prompts.\n"
    "The result says how far apart the two are, and how sure that is."
)
KINDS = {"all": "All", "better": "Better", "worse": "Worse", "unchanged": "Same"}


class EvaluatePage(QWidget):
    """The page.

    Attributes:
        session – the state shared with the other pages.
        evaluations – the evaluations of the session's run.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.evaluations: Evaluations = session.evaluations
        self._lines: list[RowLine] = []
        self._shown_row = -1
        self._compose()
        self._lay_out()
        self._connect()
        self._on_run_changed()

    # ── composition ─────────────────────────────────────────────────────────────────────────────

    def _compose(self) -> None:
        self.nothing = EmptyState(
            "No run to evaluate",
            "Once a run has trained, its model answers prompts that it has never seen.",
            "Go to Train",
        )
        self.not_yet = label("Not evaluated yet", theme.title_font(), align=Qt.AlignmentFlag.AlignCenter)
        self.about = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self.picker = ComboBox()
        self.picker.setAccessibleName("Evaluation")
        self.picker.setMinimumContentsLength(34)
        self.form = EvaluationForm()
        self.card = ResultCard()
        self.decoding = Segments({"greedy": "Greedy", "sampled": "Sampled"}, "Decoding")
        self.how = ElidedLabel()
        self.kind = Segments(KINDS, "Prompts")
        self.figures_model, self.row_model = FigureModel(self), PromptRowModel(self)
        self.figures, self.rows = FiguresTable(self.figures_model), PromptRowTable(self.row_model)
        self.detail = SideBySide()

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(theme.SPACE)
        head.addWidget(label("Evaluate", theme.title_font()))
        head.addWidget(self.about, 1)
        head.addWidget(self.picker)
        self.tables = QSplitter(childrenCollapsible=False, handleWidth=theme.SPACE)
        self.tables.addWidget(_headed(self.decoding, self.figures.in_card(), self.how))
        self.tables.addWidget(_headed(self.kind, self.rows.in_card()))
        self.parts = QSplitter(Qt.Orientation.Vertical, childrenCollapsible=False, handleWidth=theme.SPACE)
        self.parts.addWidget(self.tables)
        self.parts.addWidget(self.detail)
        self.tables.setMinimumHeight(theme.scaled(LEAST_TABLES))
        self.detail.setMinimumHeight(theme.scaled(LEAST_DETAIL))
        # Else their wishes would count as the page's least height, for labels that wrap make it ask for one by its width.
        self.parts.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self.parts.setMinimumHeight(theme.scaled(LEAST_TABLES + LEAST_DETAIL) + theme.SPACE)
        self.parts.setStretchFactor(0, 3)
        self.parts.setStretchFactor(1, 2)
        result = QWidget()
        results = QVBoxLayout(result)
        results.setContentsMargins(0, 0, 0, 0)
        results.setSpacing(12)
        results.addWidget(self.card)
        results.addWidget(self.parts, 1)
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addLayout(head)
        column.addWidget(self.form)
        self._result = NestedStack(content)
        self._result.addWidget(_in_the_middle(self.not_yet, NOT_YET))
        self._result.addWidget(result)
        column.addLayout(self._result, 1)
        scrolled = TabArea()
        scrolled.setWidget(content)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.nothing)
        self._stack.addWidget(scrolled)

    def _connect(self) -> None:
        self.nothing.button_clicked.connect(lambda: self.session.page_requested.emit("train"))
        self.form.started.connect(self.start)
        self.form.stopped.connect(self.evaluations.stop)
        self.picker.activated.connect(lambda _: self.evaluations.show(self.picker.currentData()))
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

    # ── the run and its evaluations ─────────────────────────────────────────────────────────────

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
        """Evaluate the run as the form says."""
        if self.session.run is None or self._obstacle():
            return
        form = self.form
        self.evaluations.start(
            EvaluationRequest(
                split=form.split.currentData(),
                checkpoint=form.checkpoint.currentData() or "end",
                completions=form.number(form.completions),
                limit=form.number(form.limit),
            )
        )

    def _obstacle(self) -> str:
        """Why no evaluation can begin now; "" where one can."""
        if self.session.is_training:
            return "A run is training and needs the memory; evaluate once it has ended."
        run = self.session.run
        if run is not None and not checkpoint_steps(run.folder):
            return "This run has no checkpoint yet, so there is nothing to evaluate."
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
        self.picker.clear()
        for entry in self.evaluations.listed:
            self.picker.addItem(_title(entry), entry.path)
        shown = self.evaluations.shown
        self.picker.setVisible(len(self.evaluations.listed) > 0)
        self._result.setCurrentIndex(0 if shown is None else 1)
        if shown is None:
            return
        self.picker.setCurrentIndex(self.picker.findData(shown.path))
        names = [function.name for function in shown.evaluation.functions]
        self.detail.set_rewards(names, [charts.label_of(name) for name in names])
        available = [decoding.name for decoding in shown.evaluation.decodings]
        for key in ("greedy", "sampled"):
            self.decoding.set_shown(key, key in available)
        self.decoding.buttons[self.decoding.key if self.decoding.key in available else available[0]].setChecked(True)
        self._show_decoding()

    # ── one evaluation ──────────────────────────────────────────────────────────────────────────

    @property
    def _decoding(self) -> Decoding | None:
        shown = self.evaluations.shown
        if shown is None:
            return None
        decodings = {decoding.name: decoding for decoding in shown.evaluation.decodings}
        return decodings.get(self._decoding_name) or shown.evaluation.headline

    @property
    def _decoding_name(self) -> DecodingName:
        return "sampled" if self.decoding.key == "sampled" else "greedy"

    def _show_decoding(self) -> None:
        shown, decoding = self.evaluations.shown, self._decoding
        if shown is None or decoding is None:
            return
        self._show_card(shown, decoding)
        self.how.setText(_how(decoding))
        rule = shown.evaluation.pass_rule
        self.figures.setToolTip(plain_tip(rule.sentence() if rule is not None else ""))
        labels = {function.name: charts.label_of(function.name) for function in shown.evaluation.functions}
        after = "tuned" if decoding.difference is not None else next(iter(decoding.sides))
        self.figures_model.show_lines(figure_lines(decoding, labels), TITLES[after])
        self._show_rows()

    def _show_card(self, shown: Listed, decoding: Decoding) -> None:
        evaluation, change = shown.evaluation, decoding.difference
        title, role = _verdict(decoding, evaluation.data.split)
        advice = " ".join(evaluation.notes)
        last = (decoding.sides.get("tuned") or next(iter(decoding.sides.values()))).figures
        first = decoding.sides["base"].figures if change is not None else None
        changes = [BeforeAfter("Reward", first.reward.value if first else None, last.reward.value)]
        for k in list(last.pass_at)[:1] + list(last.pass_at)[1:][-1:]:
            before = first.pass_at[k].value if first else None
            changes.append(BeforeAfter(f"Pass@{k}", before, last.pass_at[k].value, "share"))
        changes.append(BeforeAfter("Tokens", first.tokens.value if first else None, last.tokens.value))
        self.card.show_result(title, role, evaluation.sentence(decoding), advice, changes)

    def _show_rows(self) -> None:
        """Fill the table of prompts; the words of the filter say how many there are of each kind."""
        name, lines = self._decoding_name, list[RowLine]()
        for place, row in enumerate(self.evaluations.rows):
            if name in row.means:
                before, after = row.means[name]
                lines.append(RowLine(place, row.index + 1, row.prompt, before, after))
        for key, word in KINDS.items():
            count = len(lines) if key == "all" else sum(line.kind == key for line in lines)
            self.kind.show_word(key, f"{word} {count:,}" if lines else word)
            self.kind.set_shown(key, key == "all" or any(line.before is not None for line in lines) or not lines)
        kind = self.kind.key
        self.row_model.show_lines(lines, kind)  # pyright: ignore[reportArgumentType]

    def _show_row(self, place: int) -> None:
        rows = self.evaluations.rows
        row = self.evaluations.row(rows[place]) if 0 <= place < len(rows) else None
        sides = (row[self._decoding_name] or {}) if row is not None else {}
        self.detail.show_row(row, dict(sides))  # pyright: ignore[reportArgumentType]


def _in_the_middle(title: QWidget, sentence: str) -> QWidget:
    made = QWidget()
    column = QVBoxLayout(made)
    column.setSpacing(2 * theme.SPACE)
    column.addStretch(2)
    column.addWidget(title)
    column.addWidget(label(sentence, role="muted", align=Qt.AlignmentFlag.AlignCenter, wrap=True))
    column.addStretch(3)
    return made


def _headed(head: QWidget, body: QWidget, note: QWidget | None = None) -> QWidget:
    """A widget with a row of choices above it, and a note beside them."""
    made = QWidget()
    row = QHBoxLayout()
    row.setSpacing(theme.SPACE)
    row.addWidget(head)
    row.addWidget(note or QWidget(), 1)
    column = QVBoxLayout(made)
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(6)
    column.addLayout(row)
    column.addWidget(body, 1)
    return made


def _title(entry: Listed) -> str:
    evaluation = entry.evaluation
    step = f", step {evaluation.subject.step:,}" if evaluation.subject.step is not None else ""
    return f"{evaluation.data.split}{step}, {evaluation.data.rows:,} prompts, {moment(evaluation.created)}"


def _how(decoding: Decoding) -> str:
    """How completions were decoded, beside the word for it."""
    if decoding.name == "greedy":
        return "the likeliest token at every step"
    count = (
        f"{decoding.completions} completions of each prompt"
        if decoding.completions > 1
        else "one completion of each prompt"
    )
    return f"{count} at temperature {decoding.temperature:g}"


def _verdict(decoding: Decoding, split: str) -> tuple[str, str]:
    """The title of the result and the role of its colour."""
    if decoding.difference is None:
        return "Evaluated", "accent"
    change = decoding.difference.reward
    prompts = "the prompts that it trained on" if split == "train" else "prompts that training never saw"
    if not change.excludes_zero:
        return f"No difference on {prompts} that could not be chance", "muted"
    if (change.value or 0) > 0:
        return f"Better on {prompts}", "good"
    return f"Worse on {prompts}", "bad"
