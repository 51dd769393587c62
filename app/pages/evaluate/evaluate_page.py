"""The Evaluate page: held-out figures before and after training with intervals, and the rows behind them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from PySide6.QtCore import QPointF, QRect, QRectF, Qt
from PySide6.QtGui import QFont, QPainter, QPen, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QHeaderView, QSizePolicy, QWidget

from app import theme
from app.state import charts
from app.state.correctness import correctness_of, marked_reward
from app.state.dataset import ANSWER_SETTINGS, LIMIT_SETTINGS
from app.state.evaluations import RowSummary, checkpoint_steps
from app.state.session import Session
from app.theme import CELL_PADDING
from app.widgets.basic.controls import ComboBox, ElidedLabel, LinkButton, NumberEdit, Segments
from app.widgets.basic.dialogs import open_file
from app.widgets.basic.labels import EmptyState, button, label, plain_tip, progress_bar, show_text
from app.widgets.basic.layout import FlowLayout, TabArea, column, configure, connect, holder, row, splitter, stack
from app.widgets.basic.number_format import DASH, MINUS, counted, duration, figure, moment, signed
from app.widgets.basic.tables import BaseTable, CellDelegate, Column, Index, RowsModel
from app.widgets.completion_detail import TITLES, SideBySide
from app.widgets.completion_table import advantage_colour, one_line, reward_dot
from app.widgets.run_header import BeforeAfter, ResultCard, Switcher
from backend.runs.run_folder import RunFolder
from backend.runs.run_names import name_of
from backend.runs.steering import run_config
from backend.trainer.evaluation.evaluation_rows import Data, Decoding, DecodingName, MeanWithInterval
from backend.utils.errors import UserError

SPLITS = {"": "Held out", "test": "Test", "valid": "Validation", "train": "Training"}
KINDS = {"all": "All", "better": "Better", "worse": "Worse", "unchanged": "Same"}
LEAST_TABLES, LEAST_DETAIL, DETAIL = 236, 150, 180  # heights in pixels: least ones, and that of completions at first
FIGURES_SHARE = 0.55
NOT_YET = (
    "The model before and after training answers the same prompts.\n"
    "The result says how far apart the two are, and how sure that is."
)
NOTHING_HELD_OUT = "No rows of this run's dataset are held out, so it answers the prompts that it has trained on."
HELD_OUT_NEXT = "The next run holds a tenth of its rows out, and evaluates on them."
DATA_FILES = "Data (*.csv *.json *.jsonl *.parquet)"
NAME, BEFORE, AFTER, FOREST, CHANGE, INTERVAL = range(6)
MIN_FOREST, MIN_NAME, MAX_NAME = 80, 104, 200
INTERVAL_ROLE = Qt.ItemDataRole.UserRole  # (low, value, high, zero) as places from 0 to 1 on the axis, and the colour
ROW_BEFORE, ROW_CHANGE = 2, 4


class EvaluationForm(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self.button = button("Evaluate", primary=True)
        tip = "Prompts of your own, in columns named as the run's: CSV, JSON lines, …"
        self.own = button("Evaluate a file…", tip=tip)
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
        items = SPLITS if rows is None else {split: f"{SPLITS.get(split, split)}, {rows[split]:,}" for split in rows}
        self.split.fill(items, self.split.currentData())
        self._nothing_held_out.setVisible(list(items) == ["train"])

    def show_state(self, phase: str, done: float | None = None, left_s: float | None = None, problem: str = "") -> None:
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
            options += [flag, str(int(line.text()))] if line.text() else []
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
        self.switcher = Switcher(chosen=session.open_run)
        self.picker = ComboBox(name="Evaluation", length=34)
        self.form, self.card, self.detail = EvaluationForm(), ResultCard(), SideBySide()
        self.decoding = Segments({"greedy": "Greedy", "sampled": "Sampled"}, "Decoding", chosen=self._show_decoding)
        self.how = ElidedLabel()
        self.kind = Segments(KINDS, "Prompts")
        self.figures_model, self.row_model = FigureModel(self), PromptRowModel(self)
        self.row_model.show_summaries([], "greedy", "all")
        self.figures, self.rows = FiguresTable(self.figures_model), BaseTable(model=self.row_model, name="Prompts")
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

        ask = partial(open_file, self, "data", "Evaluate on the prompts of a file", DATA_FILES)
        self.form.own.clicked.connect(lambda: (chosen := ask()) is not None and self.start(str(chosen)))
        self.form.hold_out.clicked.connect(lambda: session.draft.hold_out())
        self.form.hold_out.clicked.connect(lambda: session.message.emit(HELD_OUT_NEXT))
        self.form.button.clicked.connect(lambda: self.start() if evaluations.running is None else evaluations.stop())
        self.picker.activated.connect(lambda: evaluations.refresh(self.picker.currentData()))
        self.rows.selectionModel().currentRowChanged.connect(lambda now, _: now.isValid() and self._show_row(now.row()))
        evaluations.listed_changed.connect(self._show_listed)
        connect(self._show_rows, self.kind.chosen, evaluations.rows_changed)
        typed = self.form.completions.textChanged, self.form.limit.textChanged
        connect(self._show_running, evaluations.running_changed, session.run_state_changed, *typed)
        session.run_changed.connect(self._on_run_changed)
        self._on_run_changed()

    def resizeEvent(self, event: QResizeEvent) -> None:
        self.tables.setSizes([round(FIGURES_SHARE * self.width()), round((1 - FIGURES_SHARE) * self.width())])
        detail = max(theme.scaled(DETAIL), self.height() // 3)
        self.parts.setSizes([self.height() - detail, detail])

    def showEvent(self, event: QShowEvent) -> None:
        self._on_run_changed()

    def _on_run_changed(self) -> None:
        run = self.session.run
        self._stack.setCurrentIndex(0 if run is None else 1)
        if not self.isVisible():
            return
        self.evaluations.set_run(run.folder if run is not None else None)
        if run is not None:
            self.switcher.show_run(run.folder)
            if run.folder != self._splits_of:
                self._splits_of, of = run.folder, run.folder
                self.form.show_splits(None)

                def on_answer(answer: Mapping[str, Any]) -> None:
                    found = answer.get("splits") or {}
                    if of == self._splits_of and found:
                        self.form.show_splits({split: found[split]["rows"] for split in SPLITS if split in found})

                with suppress(UserError):  # broken settings, which evaluating reports
                    values = run_config(of).model_dump()
                    settings = {key: values[key] for key in (*ANSWER_SETTINGS, *LIMIT_SETTINGS)}
                    ignored = {"on_refused": lambda _faults: None, "owner": self}
                    self.session.service.ask("preview", on_answer, settings=settings, fetch=False, **ignored)
            steps = {str(step): f"Step {step:,}" for step in checkpoint_steps(run.folder)}
            self.form.checkpoint.fill({"end": "End", "best": "Best", **steps}, self.form.checkpoint.currentData())
        self._show_running()

    def start(self, data: str = "") -> None:
        if (run := self.session.run) is not None and not self._obstacle():
            right = correctness_of(run) if marked_reward(run) else None
            passing = ["--pass", f"{right.reward}>={right.full}"] if right is not None else []
            self.evaluations.start([*self.form.options(data), *passing])

    def _obstacle(self) -> str:
        if self.session.is_training:
            return "A run is training and needs the memory; evaluate once it has ended."
        if (run := self.session.run) is not None and not checkpoint_steps(run.folder):
            return "This run has no checkpoint yet."
        for line in (self.form.completions, self.form.limit):
            if line.text() and not line.hasAcceptableInput():
                return f"{line.accessibleName()} must be between 1 and 1,000,000."
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
            titles[entry.path] = f"{where}, {counted(made.data.rows, 'prompt')}, {moment(made.created)}"
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
        evaluation, difference = shown.evaluation, decoding.difference
        last = (decoding.sides.get("tuned") or next(iter(decoding.sides.values()))).figures
        first = decoding.sides["base"].figures if difference is not None else None
        changes = [BeforeAfter("Reward", first.reward.value if first else None, last.reward.value)]
        for k in dict.fromkeys([*list(last.pass_at)[:1], *list(last.pass_at)[-1:]]):
            before = first.pass_at[k].value if first else None
            changes.append(BeforeAfter(f"Pass@{k}", before, last.pass_at[k].value, "share"))
        changes.append(BeforeAfter("Tokens", first.tokens.value if first else None, last.tokens.value))
        prompts, title, role = prompts_of(evaluation.data), "Evaluated", "accent"
        if difference is not None and not difference.reward.excludes_zero:
            title, role = f"No significant difference on {prompts}", "muted"
        elif difference is not None:
            is_better = (difference.reward.value or 0) > 0
            title, role = (f"Better on {prompts}", "good") if is_better else (f"Worse on {prompts}", "bad")
        self.card.show_result(title, role, evaluation.sentence(decoding), " ".join(evaluation.notes), changes)
        if decoding.name == "greedy":
            self.how.setText("the likeliest token at every step")
        else:
            count = f"{decoding.completions} completions" if decoding.completions > 1 else "one completion"
            self.how.setText(f"{count} of each prompt at temperature {decoding.temperature:g}")
        rule = evaluation.pass_rule
        self.figures.setToolTip(plain_tip(rule.sentence() if rule is not None else ""))
        labels = {function.name: charts.label_of(function.name) for function in evaluation.functions}
        after = "tuned" if difference is not None else next(iter(decoding.sides))
        self.figures_model.show_lines(figure_lines(decoding, labels), TITLES[after])
        self._show_rows()

    def _show_rows(self) -> None:
        name = self._decoding_name
        rows = [each for each in self.evaluations.rows if name in each.means]
        kinds = Counter(kind for each in rows for kind in ("all", each.means[name].kind))
        has_both = any(each.means[name].before is not None for each in rows)
        for key, word in KINDS.items():
            self.kind.show_word(key, f"{word} {kinds[key]:,}" if rows else word)
            self.kind.set_shown(key, key == "all" or has_both or not rows)
        self.row_model.show_summaries(rows, name, self.kind.key)
        for place in (ROW_BEFORE, ROW_CHANGE):
            self.rows.setColumnHidden(place, not has_both)
        at = next((at for at, row in enumerate(self.row_model.rows) if row.key == self._wanted), -1)
        self._wanted = () if at >= 0 else self._wanted
        if self.row_model.rows:
            self.rows.selectRow(max(0, at))
        else:
            self._show_row(-1)

    def show_prompt(self, prompt: tuple[str, ...]) -> None:
        if (found := self.evaluations.with_prompt(prompt)) is None:
            self.session.message.emit("No evaluation of this run has this prompt. Evaluate the split that it is in.")
            return
        self.kind.choose("all")
        self.evaluations.refresh(found)
        self._wanted = prompt  # at last: each of these shows the rows anew, the first one selected
        self._show_rows()

    def _show_row(self, at: int) -> None:
        shown = self.evaluations.row(self.row_model.rows[at]) if at >= 0 else None
        sides = (shown[self._decoding_name] or {}) if shown is not None else {}
        self.detail.show_row(shown, dict(sides))  # pyright: ignore[reportArgumentType]


def prompts_of(data: Data) -> str:
    if data.split == "train" or data.trained_on == data.rows:
        return "the prompts of training"
    if data.split not in SPLITS:
        return data.split
    return "held-out prompts" if data.trained_on else "prompts not seen in training"


@dataclass(frozen=True, slots=True)
class FigureLine:
    """A figure of both sides and its difference; of a single side, `after` alone.

    `reward` names the reward function, if it is of one. `on_axis` is False for a figure in another unit.
    `better` is 1 where more is better, −1 where less is, 0 where neither.
    """

    name: str
    before: MeanWithInterval | None
    after: MeanWithInterval
    difference: MeanWithInterval | None
    reward: str = ""
    unit: str = ""
    is_total: bool = False
    on_axis: bool = True
    better: int = 1

    @property
    def interval(self) -> MeanWithInterval:
        return self.after if self.difference is None else self.difference

    def fixed(self, value: float | None) -> str:
        if value is None:
            return DASH
        factor = 100 if self.unit == "share" else 1
        means = [mean.value for mean in (self.before, self.after, self.difference) if mean is not None]
        largest = max((abs(mean) * factor for mean in means if mean is not None), default=0.0)
        decimals = max(int(factor > 1), 2 - math.floor(math.log10(largest))) if largest > 0 else 2
        text = f"{abs(value) * factor:.{min(decimals, 6)}f}"
        if not float(text):
            return "0"
        return f"{MINUS if value < 0 else '+' if self.difference is not None else ''}{text}"


def figure_lines(decoding: Decoding, labels: Mapping[str, str]) -> list[FigureLine]:
    after = (decoding.sides.get("tuned") or next(iter(decoding.sides.values()))).figures
    before = decoding.sides["base"].figures if decoding.difference is not None else None
    change = decoding.difference

    def line(name: str, of: Any, **more: Any) -> FigureLine:
        return FigureLine(name, of(before) if before else None, of(after), of(change) if change else None, **more)

    lines = [line("Reward", lambda figures: figures.reward, is_total=True)]
    for name in after.rewards:
        lines.append(line(labels.get(name, name), lambda figures, name=name: figures.rewards[name], reward=name))
    for k in after.pass_at:
        lines.append(line(f"Pass@{k}", lambda figures, k=k: figures.pass_at[k], unit="share"))
    lines.append(line("Tokens", lambda figures: figures.tokens, on_axis=False))
    lines.append(line("Cut off", lambda figures: figures.cut_off, unit="share", better=-1))
    if all(side.figures.spread is not None for side in decoding.sides.values()):
        lines.append(line("Spread of a prompt", lambda figures: figures.spread, better=0))
        lines.append(line("Different texts", lambda figures: figures.different, unit="share", better=0))
    return lines


class FigureModel(RowsModel):
    rows: Sequence[FigureLine]

    _axis = (0.0, 1.0)
    has_difference = False

    def show_lines(self, lines: Sequence[FigureLine], after: str) -> None:
        """`after` heads the column of the later side, or of the only one."""
        intervals = [line.interval for line in lines if line.on_axis]
        ends = [end for each in intervals for end in (each.low, each.value, each.high) if end is not None]
        low, high = min([0.0, *ends]), max([0.0, *ends])
        margin = 0.04 * (high - low or 1.0)
        self._axis = (low - margin, high + margin)
        self.has_difference = any(line.difference is not None for line in lines)
        plot_tip = "Change of the mean with its 95 % interval. The line is zero."
        self.columns = (
            Column(""),
            Column("Base", 72, is_figure=True, colour="muted"),
            Column(after, 72, is_figure=True),
            Column("Difference" if self.has_difference else "", tip=plot_tip),
            Column("Change", 84, is_figure=True, tip="Tuned minus base; of shares, in percentage points."),
            Column("95 % interval", 152, is_figure=True, tip="95 % bootstrap interval over prompts.", colour="muted"),
        )
        self.set_rows(lines)

    def text(self, row: FigureLine, column: int) -> str:
        interval = row.interval
        has_interval = interval.low is not None and interval.high is not None
        return (
            row.name,
            figure(row.before.value, row.unit) if row.before is not None else "",
            figure(row.after.value, row.unit),
            "",
            row.fixed(row.difference.value) if row.difference is not None else "",
            f"{row.fixed(interval.low)} to {row.fixed(interval.high)}" if has_interval else DASH,
        )[column]

    def colour(self, row: FigureLine, column: int) -> str:
        if column == CHANGE and row.difference is not None and row.difference.excludes_zero and row.on_axis:
            rise = (row.difference.value or 0) * row.better
            return "good" if rise > 0 else "bad" if rise < 0 else "text"
        return super().colour(row, column)

    def font(self, row: FigureLine, column: int) -> QFont:
        return theme.figures_font(theme.BODY, QFont.Weight.DemiBold if row.is_total else QFont.Weight.Normal)

    def extra(self, row: FigureLine, index: Index, role: int) -> Any:
        if role == Qt.ItemDataRole.DecorationRole and index.column() == NAME and row.reward:
            return reward_dot(row.reward)
        if role != INTERVAL_ROLE or index.column() != FOREST or not row.on_axis or row.interval.value is None:
            return None
        value, colours = row.interval.value, theme.palette()
        low = value if row.interval.low is None else row.interval.low
        high = value if row.interval.high is None else row.interval.high
        left, right = self._axis
        places = tuple((place - left) / (right - left) for place in (low, value, high, 0.0))
        if row.reward:
            return (*places, theme.reward_colour(row.reward))
        return (*places, colours.accent if row.is_total else colours.muted)


def draw_interval(painter: QPainter, rect: QRect, interval: tuple[Any, ...]) -> None:
    *places, colour = interval
    left, width = rect.left() + CELL_PADDING, rect.width() - 2 * CELL_PADDING
    low, value, high, zero = (left + place * width for place in places)
    middle = rect.center().y() + 0.5
    painter.setPen(QPen(theme.palette().outline, 1))
    painter.drawLine(QPointF(zero, rect.top()), QPointF(zero, rect.bottom() + 1))
    painter.setPen(QPen(colour, 2, Qt.PenStyle.SolidLine, Qt.PenCapStyle.FlatCap))
    painter.drawLine(QPointF(low, middle), QPointF(high, middle))
    for end in (low, high):
        painter.drawLine(QPointF(end, middle - 3.5), QPointF(end, middle + 3.5))
    theme.set_fill(painter, colour)
    painter.drawEllipse(QRectF(value - 4, middle - 4, 8, 8))


class FiguresTable(BaseTable):
    """The table of figures. A narrow one leaves out the interval as text, then the sides: the plot stays."""

    def __init__(self, model: FigureModel) -> None:
        model.show_lines([], "Tuned")
        super().__init__(model=model, name="Figures with intervals")
        self._figures = model
        self.setItemDelegateForColumn(FOREST, CellDelegate(INTERVAL_ROLE, draw_interval, self))
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        model.modelReset.connect(self.fit_columns)

    def fit_columns(self) -> None:
        model, available, least = self._figures, self.viewport().width(), theme.scaled(MIN_FOREST)
        widths = {place: theme.scaled(each.width) for place, each in enumerate(model.columns) if each.width}
        longest = max((self.fontMetrics().horizontalAdvance(line.name) for line in model.rows), default=0)
        name = max(theme.scaled(MIN_NAME), min(theme.scaled(MAX_NAME), longest + theme.scaled(36)))
        shown = [BEFORE, AFTER, CHANGE, INTERVAL] if model.has_difference else [AFTER, INTERVAL]
        for dropped in (INTERVAL, BEFORE, AFTER):
            if name + sum(widths[place] for place in shown) + least <= available:
                break
            shown = [place for place in shown if place != dropped]
        for place, width in widths.items():
            self.setColumnHidden(place, place not in shown)
            self.setColumnWidth(place, width)
        self.setColumnWidth(NAME, name)
        self.setColumnWidth(FOREST, max(least, available - name - sum(widths[place] for place in shown)))


class PromptRowModel(RowsModel):
    """The prompts of one kind: better ones by the largest gain, worse ones by the largest loss, else in split order."""

    rows: Sequence[RowSummary]
    decoding: DecodingName = "greedy"

    def show_summaries(self, rows: Sequence[RowSummary], decoding: DecodingName, kind: str) -> None:
        self.decoding, tip = decoding, "Mean reward of the prompt's completions."
        has_both = any(row.means[decoding].before is not None for row in rows)
        self.columns = (
            Column("Row", 48, is_figure=True, colour="muted"),
            Column("Prompt", font=theme.mono_font),
            Column("Base", 62, is_figure=True, tip=tip, colour="muted"),
            Column("Tuned" if has_both else "Reward", 62, is_figure=True, tip=tip),
            Column("Change", 74, is_figure=True),
        )
        chosen = [row for row in rows if kind in ("all", row.means[decoding].kind)]
        if kind in ("better", "worse"):
            chosen.sort(key=lambda row: -abs(row.means[decoding].change or 0.0))
        self.set_rows(chosen)

    def text(self, row: RowSummary, column: int) -> str:
        means, prompt = row.means[self.decoding], one_line(row.key[0])
        return (str(row.index + 1), prompt, figure(means.before), figure(means.after), signed(means.change))[column]

    def colour(self, row: RowSummary, column: int) -> Any:
        change = row.means[self.decoding].change
        return advantage_colour(change) if column == ROW_CHANGE else super().colour(row, column)
