"""The two lines above the completions: which step is shown, and which of its completions or of the whole run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PySide6.QtCore import QSignalBlocker, Qt, QTimer, Signal
from PySide6.QtGui import QDoubleValidator, QIntValidator
from PySide6.QtWidgets import QLineEdit, QPushButton, QSizePolicy, QWidget

from app import theme
from app.state.completion_facts import ALL, FILTERS, SCORE, Query
from app.widgets.basic import icons
from app.widgets.basic.controls import CheckBox, ComboBox, ElidedLabel, LinkButton, NumberEdit, Segments
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import column, row, set_shown

STEP, RUN = "step", "run"
TYPING_MS = 300
"""Pause after the last key before the search begins."""


class StepHead(QWidget):
    """The head of the page: what is shown, which step, and whether the newest is followed."""

    moved = Signal(int)
    typed = Signal(int)
    followed = Signal(bool)

    def __init__(self, save: QPushButton) -> None:
        super().__init__()
        self.earlier = button("Earlier", lambda: self.moved.emit(-1), tip="The step before (Ctrl+[)")
        self.later = button("Later", lambda: self.moved.emit(1), tip="The step after (Ctrl+])")
        self.step = NumberEdit()
        self.step.setValidator(QIntValidator(0, 2**31 - 1, self.step))
        self.step.setFixedWidth(theme.scaled(72))
        self.step.setAlignment(Qt.AlignmentFlag.AlignRight)
        self.step.setAccessibleName("Step")
        self.step.editingFinished.connect(self._type)
        self.newest = CheckBox("Follow newest")
        self.newest.setChecked(True)
        self.newest.toggled.connect(self.followed)
        self.about = ElidedLabel()
        self.about.setFont(theme.figures_font())
        title, steps = label("Completions", theme.title_font()), (label("Step"), self.step, self.earlier, self.later)
        row(title, 2 * theme.SPACE, (self.about, 1), self.newest, theme.SPACE, *steps, save, into=self)

    def show_step(self, step: int, first: int, last: int) -> None:
        if not self.step.hasFocus() or not self.step.isModified():  # the user may be typing a number there
            self.step.setText(str(step))
        self.earlier.setEnabled(step > first)
        self.later.setEnabled(step < last)

    def follow(self, newest: bool) -> None:
        with QSignalBlocker(self.newest):
            self.newest.setChecked(newest)

    def _type(self) -> None:
        # `editingFinished` comes also when the focus merely leaves the line.
        if self.step.isModified() and self.step.text():
            self.step.setModified(False)
            self.typed.emit(int(self.step.text()))


class FilterBar(QWidget):
    """Search, scope, filter, and moving to the next completion that the filter leaves."""

    query_changed = Signal()
    scope_changed = Signal()
    searched = Signal(str)
    moved = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._prompt: int | None = None
        self.search = SearchLine()
        self.search.searched.connect(self.searched)
        self.scope = Segments({STEP: "This step", RUN: "Whole run"}, "Completions of")
        self.scope.chosen.connect(lambda _key: self.scope_changed.emit())
        self.filter = ComboBox()
        self.filter.setAccessibleName("Filter")
        self.filter.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Fixed)
        for place, (name, about) in enumerate(FILTERS.items()):
            self.filter.addItem(about.label, name)
            self.filter.setItemData(place, about.sentence, Qt.ItemDataRole.ToolTipRole)
        self.filter.setMinimumContentsLength(20)
        before, after = "Previous match, in earlier steps too (Ctrl+Shift+G)", "Next match, in later steps too (Ctrl+G)"
        self.previous = button("Previous", lambda: self.moved.emit(-1), tip=before)
        self.next = button("Next", lambda: self.moved.emit(1), tip=after)
        self.measure, self.side, self.limit = ComboBox(), ComboBox(), NumberEdit()
        self.measure.setAccessibleName("Score")
        self.measure.setMinimumContentsLength(14)
        self.side.setAccessibleName("Above or below")
        self.side.setMinimumContentsLength(5)
        self.side.addItem("above", True)
        self.side.addItem("below", False)
        self.limit.setAccessibleName("Value")
        self.limit.setValidator(QDoubleValidator(self.limit))
        self.limit.setText("0")
        self.limit.setFixedWidth(theme.scaled(72))
        self.limit.editingFinished.connect(self._changed)
        self.prompt = LinkButton("All prompts again")
        self.prompt.clicked.connect(lambda _checked=False: self.follow_prompt(None))
        self.found = ElidedLabel(Qt.TextElideMode.ElideRight)
        self.found.setFont(theme.figures_font(theme.CAPTION))
        self._second = QWidget()
        row(self.measure, self.side, self.limit, self.prompt, (self.found, 1), into=self._second)
        first = row((self.search, 1), self.scope, self.filter, self.previous, self.next)
        column(first, self._second, into=self)
        self.set_measures([], [])
        for box in (self.filter, self.measure, self.side):
            box.currentIndexChanged.connect(lambda _index: self._changed())
        self._show_condition()

    def report(self, sentence: str) -> None:
        self.found.setText(sentence)
        self._show_condition()

    @property
    def query(self) -> Query:
        limit: tuple[float, bool] = self.limit.locale().toDouble(self.limit.text())  # pyright: ignore
        is_above, measure = bool(self.side.currentData()), self.measure.currentData() or "reward"
        return Query(self.filter.currentData(), measure, is_above=is_above, limit=limit[0], prompt=self._prompt)

    @property
    def is_filtering(self) -> bool:
        return self.query.filter != ALL or self._prompt is not None

    def show_filter(self, name: str) -> None:
        self.filter.setCurrentIndex(max(0, self.filter.findData(name)))

    def reset(self) -> None:
        """No filter, no search, no prompt, one step."""
        with QSignalBlocker(self):
            self.show_filter(ALL)
            self.search.forget()
            self._prompt = None
            self.scope.choose(STEP)
            self.report("")

    def follow_prompt(self, prompt: int | None) -> None:
        self._prompt = prompt
        self.scope.choose(RUN if prompt is not None else self.scope.key)
        self._changed()

    def set_measures(
        self, names: Sequence[str], labels: Sequence[str], logged: Mapping[str, bool] | None = None
    ) -> None:
        """The numbers that a condition may be about: scores of functions, and what they `logged` if it is numbers."""
        plain = [("reward", "Reward"), ("advantage", "Advantage"), ("tokens", "Tokens")]
        scores = ((f"score:{name}", text) for name, text in zip(names, labels, strict=True))
        numbers = ((f"logged:{name}", name) for name, is_number in (logged or {}).items() if is_number)
        listed = [*plain, *scores, *numbers]
        chosen = str(self.measure.currentData())
        if chosen.startswith("logged:") and chosen not in dict(
            listed
        ):  # the condition stays where a step has none of it
            listed.append((chosen, self.measure.currentText()))
        if [self.measure.itemData(at) for at in range(self.measure.count())] == [key for key, _ in listed]:
            return
        with QSignalBlocker(self.measure):
            self.measure.clear()
            for key, text in listed:
                self.measure.addItem(text, key)
            self.measure.setCurrentIndex(max(0, self.measure.findData(chosen)))

    def _changed(self) -> None:
        self._show_condition()
        self.query_changed.emit()

    def _show_condition(self) -> None:
        is_score = self.filter.currentData() == SCORE
        for part in (self.measure, self.side, self.limit):
            set_shown(part, is_score)
        set_shown(self.prompt, self._prompt is not None)
        set_shown(self._second, is_score or self._prompt is not None or bool(self.found.text()))
        self.filter.setToolTip(FILTERS[self.filter.currentData()].sentence)


class SearchLine(QLineEdit):
    """The search, a moment after the last key, and at once on Return."""

    searched = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        self.setPlaceholderText("Find text in prompts and completions")
        self.setAccessibleName("Find text in prompts and completions")
        self.setToolTip("Searches prompts, completions and texts that reward functions logged, over the whole run")
        self.setClearButtonEnabled(True)
        self.setProperty("role", "search")
        self.setMinimumWidth(theme.scaled(140))
        self._icon = self.addAction(icons.icon("search"), QLineEdit.ActionPosition.LeadingPosition)
        self._last = ""
        self._timer = QTimer(self, singleShot=True, interval=TYPING_MS)
        self._timer.timeout.connect(self._search)
        self.textChanged.connect(lambda _text: self._timer.start())
        self.returnPressed.connect(self._search)
        theme.signals.changed.connect(self._recolour)
        self._recolour()

    def forget(self) -> None:
        self._last = ""
        self.clear()
        self._timer.stop()

    def _recolour(self) -> None:
        self._icon.setIcon(icons.icon("search", theme.palette().muted))

    def _search(self) -> None:
        self._timer.stop()
        if self.text() != self._last:
            self._last = self.text()
            self.searched.emit(self._last)
