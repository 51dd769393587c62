"""The reward functions as a block of the form: the table, its problem, and two buttons.

Names, weights and the user's file are ordinary fields below it: other views of the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import QModelIndex, Qt, Signal
from PySide6.QtWidgets import QApplication, QFrame, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels_and_buttons import PlainLabel
from app.widgets.rewards.reward_arguments import RewardArguments
from app.widgets.rewards.reward_delegates import LABEL
from app.widgets.rewards.reward_table import RewardModel, RewardTable
from backend.spec.rewards.catalog import BUILT_IN, DEFAULT_REWARDS, RewardEntry

NONE_TICKED = "No function is ticked, so the five defaults score: Accuracy, Integer Answer, Strict Format, Soft Format and XML Count."


class RewardPanel(QWidget):
    """The reward table with its heading and buttons.

    Attributes:
        model, table – the RewardModel and its view.
        arguments – the detail of the current row, with fields for its arguments.

    Signals:
        picked(names, weights) – the user changed the table.
        file_requested – a reward file is to be added.
    """

    picked = Signal(list, list)
    file_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.model = RewardModel(self)
        self.table = RewardTable(self.model)
        self.model.picked.connect(self.picked)
        self.arguments = RewardArguments()
        self.arguments.changed.connect(self._take_arguments)
        self._current = ""
        self.table.selectionModel().currentRowChanged.connect(self._show_current)
        self._count = PlainLabel()
        self._count.setProperty("role", "muted")
        self.problem = PlainLabel(wordWrap=True)
        self.problem.setProperty("role", "problem")
        self.problem.setFont(theme.caption_font())
        self.problem.hide()
        self.none_ticked = PlainLabel(NONE_TICKED, wordWrap=True)
        self.none_ticked.setProperty("role", "muted")
        self.none_ticked.hide()
        self.use_defaults = QPushButton("Use All Defaults")
        self.use_defaults.clicked.connect(lambda: self.model.use_only(DEFAULT_REWARDS))
        self.add_file = QPushButton("Add File…")
        self.add_file.setToolTip("A Python file of your own. Its functions are read from the text; nothing is run.")
        self.add_file.clicked.connect(self.file_requested)
        self.more = LinkButton("")
        self.more.clicked.connect(self.show_all)
        self._last_shown: tuple[Sequence[RewardEntry], Any, Any] = ((), [], [])
        self._visible_names: set[str] = set()
        self._lay_out()

    def show_rewards(self, entries: Sequence[RewardEntry], names: Any, weights: Any) -> None:
        """Show rows for the default functions, the user's own, and the ticked ones; the others with `show_all`."""
        self._last_shown = (entries, names, weights)
        visible = {*DEFAULT_REWARDS, *self._visible_names, *(names if isinstance(names, list) else ())}
        rows = [entry for entry in entries if entry.name in visible or entry.source != BUILT_IN]
        self._visible_names = {entry.name for entry in rows}  # a row that is unticked stays in the table
        self.model.show_rewards(rows, names, weights)
        self._restore_current()
        self._show_count()
        self.more.setText(f"Show {len(entries) - len(rows)} more")
        self.more.setVisible(len(entries) > len(rows))

    def _show_count(self) -> None:
        """How many functions are used; with no tick the defaults, as in mlx-lm-lora."""
        ticked = len(self.model.ticked)
        self._count.setText(f"{ticked} used" if ticked else f"the {len(DEFAULT_REWARDS)} defaults used")
        self.none_ticked.setVisible(not ticked)

    def show_means(self, means: Mapping[str, float]) -> None:
        """Show the mean score of each function on the bench, by metric name."""
        self.table.show_means(means)

    def show_all(self) -> None:
        """Show a row for every function."""
        entries, names, weights = self._last_shown
        self._visible_names = {entry.name for entry in entries}
        self.show_rewards(entries, names, weights)

    def _show_current(self, index: QModelIndex) -> None:
        """Show the detail of the row that the user has chosen."""
        if index.isValid():
            entry = self.model.rows[index.row()].entry
            self._current = entry.name
            self.arguments.show_entry(entry)

    def _restore_current(self) -> None:
        """Choose the same function again after the rows were replaced."""
        rows = (i for i, row in enumerate(self.model.rows) if row.entry.name == self._current)
        row = next(rows, None)
        if row is None:
            self.arguments.show_entry(None)
        elif self.table.currentIndex().row() != row:
            self.table.setCurrentIndex(self.model.index(row, LABEL))
        else:
            self.arguments.show_entry(self.model.rows[row].entry)

    def _take_arguments(self, old: str, new: str) -> None:
        """Use a function with other arguments: in place of the entry with the old ones, or besides, if that was not ticked."""
        ticked = {row.entry.name: 1.0 if row.weight is None else row.weight for row in self.model.ticked}
        weights = {new if name == old else name: weight for name, weight in ticked.items()}
        weights.setdefault(new, 1.0)
        self._current = new
        all_one = all(weight == 1 for weight in weights.values())
        self.picked.emit(list(weights), [] if all_one else list(weights.values()))

    def show_problem(self, sentence: str) -> None:
        self.problem.setText(sentence)
        self.problem.setVisible(bool(sentence))

    def tab_stops(self) -> list[QWidget]:
        """The widgets that Tab visits, in order."""
        return [self.table, self.use_defaults, self.add_file, self.more]

    def focusNextPrevChild(self, forward: bool) -> bool:
        """The fields of the arguments come and go, and so cannot be in the page's fixed order: Tab goes from the table to them."""
        fields, focused = self.arguments.tab_stops(), QApplication.focusWidget()
        chain = [self.table, *fields, self.use_defaults]
        if fields and focused in chain:
            following = chain.index(focused) + (1 if forward else -1)
            if 0 <= following < len(chain):
                reason = Qt.FocusReason.TabFocusReason if forward else Qt.FocusReason.BacktabFocusReason
                chain[following].setFocus(reason)
                return True
        return super().focusNextPrevChild(forward)

    def _lay_out(self) -> None:
        title = PlainLabel("Default Reward Functions")
        title.setFont(theme.heading_font())
        above, below, rule = QHBoxLayout(), QHBoxLayout(), QFrame()
        above.addWidget(title)
        above.addStretch()
        above.addWidget(self._count)
        below.addWidget(self.use_defaults)
        below.addWidget(self.add_file)
        below.addStretch()
        below.addWidget(self.more)
        rule.setProperty("role", "rule")
        column = QVBoxLayout(self)
        column.setContentsMargins(0, theme.SPACE // 2, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addLayout(above)
        for part in (rule, self.table, self.none_ticked, self.arguments, self.problem):
            column.addWidget(part)
        column.addLayout(below)
