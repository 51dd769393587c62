"""The two lines above the completions: which step is shown, and which of its completions or of the whole run's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from PySide6.QtCore import QSignalBlocker, Qt, QTimer, Signal
from PySide6.QtGui import QDoubleValidator
from PySide6.QtWidgets import QPushButton, QSizePolicy, QWidget

from app import theme
from app.state.completion_facts import ALL, FILTERS, SCORE, Query
from app.widgets.basic.controls import CheckBox, ComboBox, ElidedLabel, LinkButton, NumberEdit, SearchEdit, Segments
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import column, configure, connect, holder, row, set_shown
from app.widgets.run_switcher import RunSwitcher

STEP, RUN = "step", "run"
TYPING_MS = 300


class StepHead(QWidget):
    moved = Signal(int)
    typed = Signal(int)

    def __init__(self, open_run: Callable[[str], object], save: QPushButton) -> None:
        super().__init__()
        self.switcher = RunSwitcher(open_run)
        self.earlier = button("Earlier", lambda: self.moved.emit(-1), tip="The step before (Ctrl+[)")
        self.later = button("Later", lambda: self.moved.emit(1), tip="The step after (Ctrl+])")
        self.step = NumberEdit(name="Step", width=72, integers=(0, 2**31 - 1), editingFinished=self._type)
        self.newest = CheckBox("Follow newest", checked=True)
        self.about = ElidedLabel(font=theme.figures_font())
        title, steps = label("Completions", theme.title_font()), (label("Step"), self.step, self.earlier, self.later)
        row(title, self.switcher, (self.about, 1), self.newest, theme.SPACE, *steps, save, into=self)

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
    changed = Signal()  # query or scope
    moved = Signal(int)

    def __init__(self) -> None:
        super().__init__()
        self._prompt: int | None = None
        self.right = ""  # the reward function that tells a right completion
        self.search = SearchLine()
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
        self.scope.chosen.connect(lambda: self.changed.emit())
        boxes = (self.filter, self.measure, self.side)
        connect(self._change, self.limit.editingFinished, *(box.currentIndexChanged for box in boxes))
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
            self.search.forget()
            self._prompt = None
            self.scope.choose(STEP)
            self.report("")

    def follow_prompt(self, prompt: int | None) -> None:
        self._prompt = prompt
        self.scope.choose(RUN if prompt is not None else self.scope.key)
        self._change()

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

    def _change(self) -> None:
        self._show_condition()
        self.changed.emit()

    def _show_condition(self) -> None:
        is_score = self.filter.currentData() == SCORE
        for part in (self.measure, self.side, self.limit):
            set_shown(part, is_score)
        set_shown(self.prompt, self._prompt is not None)
        set_shown(self._second, is_score or self._prompt is not None or bool(self.found.text()))
        self.filter.setToolTip(FILTERS[self.filter.currentData()].sentence)


class SearchLine(SearchEdit):
    """The search, a moment after the last key, and at once on Return."""

    searched = Signal(str)

    def __init__(self) -> None:
        super().__init__("Find text in prompts and completions")
        tip = "Searches prompts, completions and texts that reward functions logged, over the whole run"
        configure(self, toolTip=tip, minimumWidth=theme.scaled(140), returnPressed=self._search)
        self._last = ""
        self._timer = configure(QTimer(self, singleShot=True, interval=TYPING_MS), timeout=self._search)
        self.textChanged.connect(lambda: self._timer.start())

    def forget(self) -> None:
        self._last = ""
        self.clear()
        self._timer.stop()

    def _search(self) -> None:
        self._timer.stop()
        if self.text() != self._last:
            self._last = self.text()
            self.searched.emit(self._last)
