"""The check of judges and reward models: agreement with the user's labels and with itself, and what biases it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QFont
from PySide6.QtWidgets import QFrame, QWidget

from app import theme
from app.state.judges import JudgeCheck
from app.widgets.basic.controls import ComboBox, Dot, NumberEdit
from app.widgets.basic.labels import REMOVE_KEYS, button, explain_at, label, progress_bar, show_text
from app.widgets.basic.layout import card, column, configure, connect, row, set_shown
from app.widgets.basic.number_format import DASH, counted, figure, signed
from app.widgets.basic.tables import BaseTable, Column, TextsModel
from app.widgets.completion_table import one_line

NO_LABEL = "Your score must be a number from 0 to 1."
UNCHECKED = "Not checked yet."
NO_COMPLETIONS = "Sample or load completions first."
TOO_FEW = "It compares completions: give two of one prompt."
COUNTING = "Counting the calls…"
LINE = 24
"""Height of a figure's row, in pixels."""
NO_LABELS = "To compare it with your own scores, save its rubric as a file (Train, Edit…), then label completions here."
LABELS = "Your scores, kept beside the rubric. Label answers in the view Completion; twenty tell something."


def figures(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The rows of the table: measure, value, explanation."""

    def share(value: float | None) -> str:
        return DASH if value is None else f"{value:.0%}"

    of_pairs, rank = f"of {counted(found['pairs'], 'pair')}", figure(found["spearman"])
    yield "With your labels", share(found["accuracy"]), f"{of_pairs}, rank correlation {rank}" if found["pairs"] else ""
    is_group = found["kind"] == "group"
    yield "With itself", share(found["itself"]), "of pairs, in another order" if is_group else "of pairs, asked again"
    yield "Length", signed((found["length"] or {}).get("points")), "for filler without content"
    if is_group:
        yield "Place", signed((found["place"] or {}).get("points")), f"for {found['which']} in the list"
    yield "Without a score", share(found["failed"]), f"in {counted(found['calls'], 'call')}"


class AgreementModel(TextsModel):
    columns = (Column("Agreement", 128), Column("Value", 84, is_figure=True), Column("Meaning"))

    def font(self, row: Any, column: int) -> QFont:
        return theme.figures_font(theme.CAPTION) if column == 2 else theme.figures_font()


class LabelModel(TextsModel):
    columns = (Column("Completion"), Column("Yours", 64, is_figure=True), Column("Judge's", 64, is_figure=True))


class JudgePanel(QFrame):
    """Checks one of the form's models, and lists the user's labels for it."""

    def __init__(self, check: JudgeCheck, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        configure(self, role="card")
        explain_at(self, "../judges.md#trust")
        self._check = check
        self.given: Mapping[str, Mapping[str, float | None]] = {}  # completion → scores on the bench
        self.which = ComboBox(name="Judge", currentIndexChanged=self._show_one)
        self.dot = Dot("muted", 18)
        self.verdict = label(UNCHECKED, theme.heading_font(), wrap=True, selectable=True)
        self.model, self.labels = AgreementModel(self), LabelModel(self)
        self.table = BaseTable(model=self.model, name="Agreement")
        self.table.horizontalHeader().hide()
        self.table.verticalHeader().setDefaultSectionSize(theme.scaled(LINE))
        self.about = label(role="muted", wrap=True)
        self.start = button("Check this judge", lambda: check.check(self.name), primary=True, default=False)
        self.bar = progress_bar("Progress", shown=False)
        self.cancel = button("Cancel", check.cancel, shown=False)
        self.kept = label(role="muted", wrap=True)
        self.label_table = BaseTable(model=self.labels, name="Your labels", single=True)
        tip = f"Remove the selected label ({REMOVE_KEYS})"
        self.drop = button("Remove", self._drop, tip=tip)
        top = Qt.AlignmentFlag.AlignTop
        column(
            self.which,
            row((self.dot, 0, top), (self.verdict, 1)),
            self.table,
            row(self.start, (self.about, 1), (self.bar, 1), self.cancel),
            card(role="rule"),
            row((self.kept, 1), (self.drop, 0, top)),
            (self.label_table, 1),
            into=self,
            spacing=12,
            margins=12,
        )
        check.changed.connect(self.show_check)
        check.progress.connect(lambda done, of: configure(self.bar, range=(0, of), value=done))
        connect(self._show_enabled, self.label_table.selectionModel().currentRowChanged)

    @property
    def name(self) -> str:
        return self.which.currentData() or ""

    def show_check(self) -> None:
        check = self._check
        self.which.blockSignals(True)
        self.which.fill({name: name for name in check.models}, self.name)
        self.which.blockSignals(False)
        set_shown(self.which, self.which.count() > 1)
        self._show_one()

    def _show_one(self) -> None:
        check, name = self._check, self.name
        found = check.results.get(name)
        self.verdict.setText(found["verdict"] if found else UNCHECKED)
        role = "muted" if not found else "warning" if found["concerns"] else "good"
        self.dot.show_colour("muted" if found and not found["concerns"] and found["accuracy"] is None else role)
        self.model.set_rows([*figures(found)] if found else [])
        self.table.setFixedHeight(theme.scaled(LINE) * len(self.model.rows) + 2)
        set_shown(self.table, bool(found))
        for widget in (self.bar, self.cancel):
            set_shown(widget, bool(check.busy))
        for widget in (self.start, self.about):
            set_shown(widget, not check.busy)
        calls = check.calls.get(name)
        nothing = (COUNTING if calls is None else TOO_FEW) if self.given else NO_COMPLETIONS
        self.about.setText(f"Asks {counted(calls, 'time')}." if calls else nothing)
        self.start.setEnabled(bool(calls))
        labels = check.labels.get(name, []) if check.labels_file(name) else []
        show_text(self.kept, LABELS if check.labels_file(name) else NO_LABELS)
        self.labels.set_rows([self._label_row(name, case) for case in labels])
        for widget in (self.label_table, self.drop):
            set_shown(widget, bool(labels))
        self._show_enabled()

    def _label_row(self, name: str, case: Mapping[str, Any]) -> tuple[str, str, str]:
        text = case["completion"]
        return one_line(text), figure(case["expected"].get(name)), figure(self.given.get(text, {}).get(name))

    def _show_enabled(self) -> None:
        self.drop.setEnabled(bool(self.label_table.selected_rows()))

    def _drop(self) -> None:
        for place in self.label_table.selected_rows():
            self._check.edit_labels(self.name, do="drop", place=place)


class LabelLine(QWidget):
    """Takes the user's score of a completion. Return keeps it and goes to the next completion."""

    kept = Signal(str, float)  # name of the judge, score

    def __init__(self, check: JudgeCheck) -> None:
        super().__init__()
        self._check = check
        self.which = ComboBox(name="Label for")
        self.score = NumberEdit(name="Your score", width=64, placeholderText="0 to 1", returnPressed=self._keep)
        tip = "Keep your score of this completion to check the judge with (Return)"
        self.keep = button("Keep label", self._keep, tip=tip)
        row(label("Your score", role="muted"), self.score, self.which, self.keep, None, into=self)
        check.changed.connect(self.show_judges)

    def show_judges(self) -> None:
        names = [name for name in self._check.models if self._check.labels_file(name)]
        self.which.fill({name: name for name in names}, self.which.currentData())
        set_shown(self.which, len(names) > 1)
        set_shown(self, bool(names))

    def _keep(self) -> None:
        try:
            score = float(self.score.text().replace(",", "."))
        except ValueError:
            score = -1.0
        if not 0 <= score <= 1:
            self._check.refused.emit(NO_LABEL)
            return
        self.kept.emit(self.which.currentData(), score)
        self.score.clear()
