"""The reward functions as a block of the form: the table, what is wrong with it, and two buttons. Names, weights and
the person's file are ordinary fields below it, other views of the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton
from app.widgets.rewards.reward_table import RewardModel, RewardTable
from backend.spec.rewards.catalog import BUILT_IN, DEFAULT_REWARDS, RewardEntry


class RewardPanel(QWidget):
    """Signals: picked(names, weights) after a person's change; file_wanted – a reward file is to be added."""

    picked = Signal(list, list)
    file_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.model = RewardModel(self)
        self.table = RewardTable(self.model)
        self.model.picked.connect(self.picked)
        self._count = QLabel()
        self._count.setProperty("role", "muted")
        self.problem = QLabel(wordWrap=True)
        self.problem.setProperty("role", "problem")
        self.problem.setFont(theme.caption_font())
        self.problem.hide()
        self.use_defaults = QPushButton("Use All Defaults")
        self.use_defaults.clicked.connect(lambda: self.model.use_only(DEFAULT_REWARDS))
        self.add_file = QPushButton("Add File…")
        self.add_file.setToolTip("A Python file of your own. Its functions are read from the text; nothing is run.")
        self.add_file.clicked.connect(self.file_requested)
        self.more = LinkButton("")
        self.more.clicked.connect(self.show_all)
        self._given: tuple[Sequence[RewardEntry], Any, Any] = ((), [], [])
        self._once_shown: set[str] = set()
        self._lay_out()

    def show_rewards(self, entries: Sequence[RewardEntry], names: Any, weights: Any) -> None:
        """Rows for the defaults, the person's own, and whatever is ticked; the others on demand."""
        self._given = (entries, names, weights)
        wanted = {*DEFAULT_REWARDS, *self._once_shown, *(names if isinstance(names, list) else ())}
        rows = [entry for entry in entries if entry.name in wanted or entry.source != BUILT_IN]
        self._once_shown = {entry.name for entry in rows}  # a row whose tick is taken away stays where it was
        self.model.show_rewards(rows, names, weights)
        self._count.setText(f"{len(self.model.ticked)} used")
        self.more.setText(f"Show {len(entries) - len(rows)} more")
        self.more.setVisible(len(entries) > len(rows))

    def show_means(self, means: Mapping[str, float]) -> None:
        """The mean score of each function on the bench, by name."""
        self.table.show_means(means)

    def show_all(self) -> None:
        entries, names, weights = self._given
        self._once_shown = {entry.name for entry in entries}
        self.show_rewards(entries, names, weights)

    def show_problem(self, sentence: str) -> None:
        self.problem.setText(sentence)
        self.problem.setVisible(bool(sentence))

    def tab_stops(self) -> list[QWidget]:
        """Where Tab halts."""
        return [self.table, self.use_defaults, self.add_file, self.more]

    def _lay_out(self) -> None:
        title = QLabel("Default reward functions")
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
        for part in (rule, self.table, self.problem):
            column.addWidget(part)
        column.addLayout(below)
