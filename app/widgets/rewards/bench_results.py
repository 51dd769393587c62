"""The results of the bench: the findings, the reward functions with their scores, and every completion."""

from __future__ import annotations

from typing import Any, Protocol

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QStackedLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import label
from app.widgets.rewards.bench_completion_table import BenchCompletionModel, BenchCompletionTable
from app.widgets.rewards.bench_function_table import BenchFunctionModel, BenchFunctionTable
from app.widgets.rewards.findings_card import FindingsCard

SHORT, TALL = 560, 760
"""Heights of the page, in pixels, below which fewer findings and functions are shown."""
STALE = {
    "level": "note",
    "sentence": "Settings or files have changed since these scores.",
    "advice": "Press Score again.",
}


class BenchState(Protocol):
    """The attributes of the bench that are shown; `app.model.reward_bench.RewardBench` has them."""

    groups: list[dict[str, Any]]
    findings: list[dict[str, str]]
    functions: list[dict[str, Any]]
    failed: dict[str, Any] | None
    stale: bool


class BenchResults(QWidget):
    """Findings, functions and completions; before there are any, what the page is for.

    Attributes:
        verdict – the findings.
        functions, board – the model and the table of reward functions.
        completions, table – the model and the table of completions.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        shown = QWidget(self)
        self.verdict = FindingsCard(shown)
        self.functions = BenchFunctionModel(self)
        self.board = BenchFunctionTable(self.functions)
        self.completions = BenchCompletionModel(self)
        self.table = BenchCompletionTable(self.completions)
        column = QVBoxLayout(shown)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(12)
        column.addWidget(self.verdict)
        column.addWidget(self.board.in_card())
        column.addWidget(self.table.in_card(), 1)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(_empty_card())
        self._stack.addWidget(shown)

    def fit(self, height: int) -> None:
        """Limit findings and functions so that the completions get some of a page of this height, in pixels."""
        height = round(height / theme.text_scale())
        self.verdict.show_at_most(1 if height < SHORT else 2 if height < TALL else 99)
        self.board.show_at_most(3 if height < SHORT else 5 if height < TALL else 8)

    def show_bench(self, bench: BenchState) -> None:
        """Show the bench's state; the current line of the completions stays current."""
        self._stack.setCurrentIndex(1 if bench.groups or bench.failed else 0)
        findings = [_failed(bench.failed)] if bench.failed else bench.findings
        self.verdict.show_findings(([STALE] if bench.stale and not bench.failed else []) + list(findings))
        self.functions.show_functions(bench.functions, bench.groups)
        names, labels = ([function[key] for function in bench.functions] for key in ("name", "label"))
        row = max(self.table.currentIndex().row(), 0)
        self.completions.show_groups(bench.groups, names, labels)
        self.table.reset_view()
        if 0 < row < self.completions.rowCount():
            self.table.selectRow(row)


def _failed(error: dict[str, Any]) -> dict[str, str]:
    return {"level": "error", "sentence": error["sentence"], "advice": "A run would stop before its first step."}


def _empty_card() -> QFrame:
    card = QFrame()
    card.setProperty("role", "card")
    column = QVBoxLayout(card)
    column.setContentsMargins(*(3 * theme.SPACE,) * 4)
    column.setSpacing(12)
    centre = Qt.AlignmentFlag.AlignCenter
    column.addStretch(2)
    column.addWidget(label("Try the rewards before training", theme.heading_font(), align=centre))
    sentence = (
        "Sample a few completions, and see what each function gives them, where the groups differ, and whether there is "
        "anything to learn from."
    )
    column.addWidget(label(sentence, role="muted", wrap=True, align=centre))
    column.addStretch(3)
    return card
