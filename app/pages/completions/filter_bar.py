"""The line above the completions: search, whether one step or the whole run is shown, a filter, and the next of its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QAction, QDoubleValidator
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QSizePolicy, QVBoxLayout, QWidget

from app import theme
from app.state.completion_facts import ALL, FILTERS, SCORE, Query
from app.widgets.basic import icons
from app.widgets.basic.controls import ComboBox, ElidedLabel, LinkButton, NumberEdit, Segments
from app.widgets.basic.labels import button
from app.widgets.basic.layout import set_shown

STEP, RUN = "step", "run"
"""Scopes: the completions of one step, or of all."""
TYPING_MS = 300
"""How long after the last key the search begins."""
_PLAIN = (("reward", "Reward"), ("advantage", "Advantage"), ("tokens", "Tokens"))


class FilterBar(QWidget):
    """Attributes:
        search, scope, filter, previous, next – its controls.

    Signals:
        query_changed – `query` is another now, by the user's doing or by `show_query`.
        scope_changed – `scope.key` is another now.
        searched(str) – search the run for this text; "" ends the search.
        moved(int) – go to the next (1) or the previous (−1) completion that the filter leaves.
    """

    query_changed = Signal()
    scope_changed = Signal()
    searched = Signal(str)
    moved = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._prompt: int | None = None
        self.search = SearchLine()
        self.scope = Segments({STEP: "This step", RUN: "Whole run"}, "Completions of")
        self.filter = ComboBox()
        self.filter.setAccessibleName("Filter")
        self.filter.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Fixed)
        for place, (name, about) in enumerate(FILTERS.items()):
            self.filter.addItem(about.label, name)
            self.filter.setItemData(place, about.sentence, Qt.ItemDataRole.ToolTipRole)
        self.filter.setMinimumContentsLength(20)
        self.previous = button(
            "Previous",
            lambda: self.moved.emit(-1),
            tip="The one before that the filter leaves, in earlier steps too (Ctrl+Shift+G)",
        )
        self.next = button(
            "Next", lambda: self.moved.emit(1), tip="The next one that the filter leaves, in later steps too (Ctrl+G)"
        )
        self._build_condition()
        self.prompt = LinkButton("All prompts again")
        self.found = ElidedLabel(Qt.TextElideMode.ElideRight)
        self.found.setFont(theme.figures_font(theme.CAPTION))
        self._lay_out()
        self._connect()

    def _build_condition(self) -> None:
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
        self._condition = (self.measure, self.side, self.limit)
        self.set_measures([], [])

    def _lay_out(self) -> None:
        first, second = QHBoxLayout(), QHBoxLayout()
        first.addWidget(self.search, 1)
        for part in (self.scope, self.filter, self.previous, self.next):
            first.addWidget(part)
        for part in (*self._condition, self.prompt):
            second.addWidget(part)
        second.addWidget(self.found, 1)
        second.setContentsMargins(0, 0, 0, 0)
        self._second = QWidget()
        self._second.setLayout(second)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addLayout(first)
        column.addWidget(self._second)
        for row in (first, second):
            row.setSpacing(theme.SPACE)
        self._show_condition()

    def _connect(self) -> None:
        self.search.searched.connect(self.searched)
        self.scope.chosen.connect(lambda _key: self.scope_changed.emit())
        self.filter.currentIndexChanged.connect(lambda _index: self._changed())
        self.measure.currentIndexChanged.connect(lambda _index: self._changed())
        self.side.currentIndexChanged.connect(lambda _index: self._changed())
        self.limit.editingFinished.connect(self._changed)
        self.prompt.clicked.connect(lambda _checked=False: self.follow_prompt(None))

    def tell(self, sentence: str) -> None:
        """Say how much was found; "" says nothing."""
        self.found.setText(sentence)
        self._show_condition()

    # ── the query ───────────────────────────────────────────────────────────────────────────────

    @property
    def query(self) -> Query:
        number = self.limit.locale().toDouble(self.limit.text())
        return Query(
            self.filter.currentData(),
            self.measure.currentData() or "reward",
            is_above=bool(self.side.currentData()),
            limit=number[0],  # pyright: ignore[reportIndexIssue]: (value, whether it is one)
            prompt=self._prompt,
        )

    def show_filter(self, name: str) -> None:
        """Choose a filter by its name; an unknown one chooses all."""
        self.filter.setCurrentIndex(max(0, self.filter.findData(name)))

    def reset(self) -> None:
        """No filter, no search, no prompt, one step; without a signal."""
        blocked = self.blockSignals(True)
        self.show_filter(ALL)
        self.search.forget()
        self._prompt = None
        self.scope.choose(STEP)
        self.tell("")
        self.blockSignals(blocked)

    def follow_prompt(self, prompt: int | None) -> None:
        """Leave this prompt alone, wherever it was sampled, or every prompt again."""
        self._prompt = prompt
        self.scope.choose(RUN if prompt is not None else self.scope.key)
        self._changed()

    def set_measures(
        self, names: Sequence[str], labels: Sequence[str], logged: Mapping[str, bool] | None = None
    ) -> None:
        """The numbers that a condition may be about: scores of functions, and what they `logged`, where that is numbers."""
        scores = ((f"score:{name}", text) for name, text in zip(names, labels, strict=True))
        numbers = ((f"logged:{name}", name) for name, is_number in (logged or {}).items() if is_number)
        listed = [*_PLAIN, *scores, *numbers]
        chosen = str(self.measure.currentData())
        if chosen.startswith("logged:") and chosen not in dict(listed):
            listed.append(
                (chosen, self.measure.currentText())
            )  # what a condition is about stays, where a step has none of it
        if [self.measure.itemData(at) for at in range(self.measure.count())] == [key for key, _ in listed]:
            return
        blocked = self.measure.blockSignals(True)
        self.measure.clear()
        for key, text in listed:
            self.measure.addItem(text, key)
        self.measure.setCurrentIndex(max(0, self.measure.findData(chosen)))
        self.measure.blockSignals(blocked)

    @property
    def is_filtering(self) -> bool:
        return self.query.filter != ALL or self._prompt is not None

    def _changed(self) -> None:
        self._show_condition()
        self.query_changed.emit()

    def _show_condition(self) -> None:
        for part in self._condition:
            set_shown(part, self.filter.currentData() == SCORE)
        set_shown(self.prompt, self._prompt is not None)
        needed = self.filter.currentData() == SCORE or self._prompt is not None or bool(self.found.text())
        set_shown(self._second, needed)
        self.filter.setToolTip(FILTERS[self.filter.currentData()].sentence)


class SearchLine(QLineEdit):
    """Signals:
    searched(str) – the text, a moment after the last key, and at once on Return.
    """

    searched = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setPlaceholderText("Find text in prompts and completions")
        self.setAccessibleName("Find text in prompts and completions")
        self.setToolTip("In prompts, completions, and texts that reward functions logged, over the whole run")
        self.setClearButtonEnabled(True)
        self.setProperty("role", "search")
        self.setMinimumWidth(theme.scaled(140))
        self._icon: QAction = self.addAction(icons.icon("search"), QLineEdit.ActionPosition.LeadingPosition)
        self._last = ""
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._search)
        self.textChanged.connect(lambda _text: self._timer.start(TYPING_MS))
        self.returnPressed.connect(self._search)
        theme.signals.changed.connect(self._draw)
        self._draw()

    def forget(self) -> None:
        """Empty the line without a search."""
        self._last = ""
        self.clear()
        self._timer.stop()

    def _draw(self) -> None:
        self._icon.setIcon(icons.icon("search", theme.palette().muted))

    def _search(self) -> None:
        self._timer.stop()
        if self.text() != self._last:
            self._last = self.text()
            self.searched.emit(self._last)
