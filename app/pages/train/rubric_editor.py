"""The editor of a judge's rubric, which can be tried on the bench's completions before it is saved."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError
from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QAbstractItemView, QLineEdit, QWidget

from app import theme
from app.state.messages import problems_to
from app.state.reward_bench import RewardBench
from app.widgets.basic.controls import ProseEdit
from app.widgets.basic.dialogs import SAVING, Dialog, ask, save_file
from app.widgets.basic.labels import button, label, show_text
from app.widgets.basic.layout import column, configure, connect, holder, row, splitter
from app.widgets.basic.number_format import counted, figure
from app.widgets.basic.tables import BaseTable, Column, Index, TextsModel
from backend.judges.rubric import Rubric, bundled_rubrics, read_rubric, rubric_path
from backend.rewards.catalogue import JUDGE, RewardCall, find_call
from backend.utils.errors import UserError

SETTING = "reward_functions"
NAME, TEXT, CHOICES, WEIGHT = range(4)
TRIED = 4
LINES_HEIGHT = 40  # height of a row of two lines, in pixels
NEEDS = {
    "name": "needs a name, in one line and without quotation marks",
    "weight": "needs a weight above 0",
    "choices": "needs two or more choices, separated by commas",
}
HINT = (
    "Choices stand from worst to best and are worth 0 to 1 in even steps. Without criteria the judge gives one score."
)


class CriteriaModel(TextsModel):
    """Criteria as they are typed: name, text, choices with commas, weight."""

    columns = (
        Column("Criterion", 140),
        Column("What the judge looks for"),
        Column("Choices, worst to best", 190),
        Column("Weight", 64, is_figure=True),
    )
    rows: list[list[str]]

    def extra(self, row: Sequence[str], index: Index, role: int) -> Any:
        return row[index.column()] if role == Qt.ItemDataRole.EditRole else None

    def is_editable(self, row: int, column: int) -> bool:
        return True

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        self.rows[index.row()][index.column()] = str(value).strip()
        self.repaint()
        return True


class RubricEditor(Dialog):
    """`entry`: the judge, of `reward_functions`."""

    saved = Signal(object)  # Path

    def __init__(self, bench: RewardBench, entry: str, rubric: str, parent: QWidget | None = None) -> None:
        super().__init__("Rubric", parent, (960, 700))
        self._bench, self._entry, self._path = bench, entry, None
        self._folder = TemporaryDirectory()
        self.title = configure(QLineEdit(), placeholderText="Title", name="Title")
        self.text = ProseEdit(4, name="Instructions", placeholderText="Instructions: what the judge should know")
        self.model = CriteriaModel(self)
        edits = QAbstractItemView.EditTrigger
        self.table = BaseTable(
            model=self.model,
            single=True,
            name="Criteria",
            wordWrap=True,
            editTriggers=edits.DoubleClicked | edits.SelectedClicked | edits.EditKeyPressed | edits.AnyKeyPressed,
        )
        self.table.activated.connect(self.table.edit)
        self.table.verticalHeader().setDefaultSectionSize(theme.scaled(LINES_HEIGHT))
        acts = {"Add": self.add, "Remove": self.remove, "Up": partial(self.move, -1), "Down": partial(self.move, 1)}
        self.buttons = {text: button(text, act, autoDefault=False) for text, act in acts.items()}
        self.problem = label(role="problem", wrap=True, shown=False)
        self._say = partial(show_text, self.problem)
        self.try_button = button("Try", self.try_rubric, autoDefault=False)
        self.status = label(role="muted", wrap=True)
        columns = (Column("Completion"), Column("Score", 64, is_figure=True), Column("Reasons"))
        self.tried_model = TextsModel(self, columns)
        mode = QAbstractItemView.ScrollMode.ScrollPerPixel
        self.tried = BaseTable(model=self.tried_model, name="Scores", wordWrap=True, verticalScrollMode=mode)
        self.tried_card = configure(self.tried.in_card(), shown=False)
        self.save = button("Save", self.save_rubric, primary=True)
        save_as = button("Save as…", lambda: self.save_rubric(is_new=True), autoDefault=False)
        cancel = button("Cancel", self.reject, autoDefault=False)
        hint = label(HINT, theme.caption_font(), "muted", wrap=True)
        criteria = column((self.table.in_card(), 1), row(*self.buttons.values(), theme.SPACE, (hint, 1)))
        column(
            self.title,
            self.text,
            (splitter(holder(criteria), self.tried_card, upright=True, stretch=(1, 1), gap=12), 1),
            self.problem,
            row(self.try_button, (self.status, 1), cancel, save_as, self.save),
            into=self,
            spacing=12,
            margins=2 * theme.SPACE,
        )
        with problems_to(self._say):
            path, found = rubric_path(rubric), read_rubric(rubric)
            self._path = None if path in bundled_rubrics().values() else path
            self.title.setText(found.title)
            self.text.setPlainText(found.text.strip())
            rows = [[each.name, each.text, ", ".join(each.choices), f"{each.weight:g}"] for each in found.criteria]
            self.model.set_rows(rows)
        self._before = self._state()
        connect(self._show_enabled, self.table.selectionModel().currentRowChanged, bench.changed)
        self._show_enabled()

    def _state(self) -> tuple[Any, ...]:
        return self.title.text(), self.text.toPlainText(), [*map(tuple, self.model.rows)]

    def rubric(self) -> Rubric:
        """Raises UserError naming the row."""
        criteria = [
            {"name": name, "text": text, "weight": weight, "choices": [each.strip() for each in choices.split(",")]}
            for name, text, choices, weight in self.model.rows
        ]
        about = {"title": self.title.text().strip(), "text": self.text.toPlainText().strip(), "criteria": criteria}
        try:
            return Rubric.model_validate(about)
        except ValidationError as error:
            place, what = error.errors()[0]["loc"], error.errors()[0]["msg"].removeprefix("Value error, ")
            if len(place) > 2 and isinstance(place[1], int):
                self.table.selectRow(place[1])
                raise UserError(SETTING, f"Row {place[1] + 1} {NEEDS.get(str(place[2]), what)}.") from None
            raise UserError(SETTING, f"The rubric cannot be used: {what}.") from None

    def add(self) -> None:
        self.model.set_rows([*self.model.rows, ["", "", "no, yes", "1"]])
        self.table.setCurrentIndex(self.model.index(len(self.model.rows) - 1, NAME))
        self.table.edit(self.table.currentIndex())

    def remove(self) -> None:
        place = self.table.currentIndex().row()
        self.model.set_rows([each for i, each in enumerate(self.model.rows) if i != place])
        self.table.selectRow(min(place, len(self.model.rows) - 1))
        self._show_enabled()

    def move(self, by: int) -> None:
        place, rows = self.table.currentIndex().row(), [*self.model.rows]
        rows.insert(place + by, rows.pop(place))
        self.model.set_rows(rows)
        self.table.selectRow(place + by)

    def _show_enabled(self) -> None:
        place, count = self.table.currentIndex().row(), len(self.model.rows)
        for text, is_enabled in {"Remove": place >= 0, "Up": place > 0, "Down": 0 <= place < count - 1}.items():
            self.buttons[text].setEnabled(is_enabled)
        tried = len(self._tried_group()["completions"]) if self._bench.groups else 0
        self.try_button.setEnabled(bool(tried))
        show_text(self.try_button, f"Try on {counted(tried, 'completion')}" if tried else "Try")
        if not tried:
            self.status.setText("To try it, sample completions on the Rewards page.")

    def save_rubric(self, *, is_new: bool = False) -> None:
        self._say("")
        with problems_to(self._say):
            rubric, path = self.rubric(), self._path
            if path is None or is_new:
                path = save_file(self, "rubric", "Save rubric", "my_rubric.toml", "Rubrics (*.toml)", path)
            if path is not None:
                path = path if path.suffix else path.with_suffix(".toml")
                rubric.save(path)
                self._before = self._state()
                self.saved.emit(path)
                self.accept()

    def _tried_group(self) -> dict[str, Any]:
        group = self._bench.groups[0]
        return {**group, "completions": group["completions"][:TRIED]}

    def try_rubric(self) -> None:
        self._say("")
        with problems_to(self._say):
            file, group = Path(self._folder.name) / "rubric.toml", self._tried_group()
            self.rubric().save(file)
            call = find_call(self._entry) or RewardCall(JUDGE)
            entry = replace(call, arguments={**call.arguments, "rubric": str(file)}).text
            self.try_button.setEnabled(False)
            self.status.setText("Asking the judge…")
            self._bench.try_entry(entry, group, partial(self._show_tried, call.name, group), self._on_refused)

    def _show_tried(self, name: str, group: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        if error := answer["functions"][0]["error"]:
            self._on_refused(error["sentence"])
            return
        rows = [
            (row["text"].strip(), figure(scored["rewards"][name]), scored["logged"][f"{name}/explanation"])
            for row, scored in zip(group["completions"], answer["scored"][0], strict=True)
        ]
        self.tried_model.set_rows(rows)
        self.tried_card.show()
        self.tried.resizeRowsToContents()
        self._on_refused("")

    def _on_refused(self, sentence: str) -> None:
        self.status.setText("")
        self._say(sentence)
        self._show_enabled()

    def reject(self) -> None:
        is_edited = self._state() != self._before
        answer = ask(self, "Save the changes to the rubric?", "", SAVING) if is_edited else "discard"
        if answer == "save":
            self.save_rubric()
        elif answer == "discard":
            super().reject()
