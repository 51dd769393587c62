"""What two of the compared runs wrote to the same prompt: a prompt to choose, and the best completion of each run beside the other's."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app import theme
from app.pages.runs.run_legend import ComparedName
from app.state import charts
from app.state.run_comparison import RunComparison, SharedPrompt
from app.widgets.basic.controls import ComboBox
from app.widgets.basic.labels import label
from app.widgets.completions.completion_model import one_line
from app.widgets.side_by_side import SideBySide

NOTHING = "These two were not asked the same prompt at any of the newest steps that both recorded."


class SharedPromptPanel(QWidget):
    """Two combo boxes choose the runs, a third the prompt. Nothing is read while it is hidden."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._comparison: RunComparison | None = None
        self._names: list[ComparedName] = []
        self._prompts: list[SharedPrompt] = []
        self._shown: tuple[object, ...] = ()
        self.runs = (ComboBox(), ComboBox())
        for box, which in zip(self.runs, ("First", "Second"), strict=True):
            box.setAccessibleName(f"{which} run")
            box.activated.connect(lambda _: self.refresh())
        self.prompt = ComboBox()
        self.prompt.setAccessibleName("Prompt that both were asked")
        self.prompt.currentIndexChanged.connect(lambda _: self._show_prompt())
        self.where = label(font=theme.figures_font(), role="muted")
        self.sides = SideBySide()
        self.nothing = label(NOTHING, role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        head = QHBoxLayout()
        head.setSpacing(theme.SPACE)
        for box in self.runs:
            head.addWidget(box, 1)
        head.addWidget(self.prompt, 2)
        head.addWidget(self.where)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addLayout(head)
        column.addWidget(self.sides, 1)
        column.addWidget(self.nothing, 1)

    def show_runs(self, comparison: RunComparison, names: Sequence[ComparedName]) -> None:
        """Offer these runs; the choice stays where it can."""
        titles = [f"{name.letter}  {name.title}" for name in names]
        if comparison is not self._comparison or titles != [
            self.runs[0].itemText(i) for i in range(self.runs[0].count())
        ]:
            is_new = comparison is not self._comparison
            for place, box in enumerate(self.runs):
                kept = place if is_new else box.currentIndex()
                box.clear()
                box.addItems(titles)
                box.setCurrentIndex(kept)
        self._comparison, self._names = comparison, list(names)
        self.refresh()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.refresh()

    def refresh(self) -> None:
        """Read the newest step that both chosen runs recorded, if it is another than is shown."""
        if not self.isVisible() or self._comparison is None:
            return
        places = [box.currentIndex() for box in self.runs]
        if max(places) >= len(self._comparison.runs) or min(places) < 0:
            return
        first, second = (self._comparison.runs[place] for place in places)
        now = (
            id(first),
            id(second),
            *(steps[-1] if (steps := run.completion_steps()) else 0 for run in (first, second)),
        )
        if now == self._shown:
            return
        self._shown = now
        self._prompts = self._comparison.shared_prompts(first, second)
        rewards = list(dict.fromkeys([*first.reward_names, *second.reward_names]))
        self.sides.set_rewards(rewards, [charts.label_of(name) for name in rewards])
        kept = self.prompt.currentText()
        self.prompt.blockSignals(True)
        self.prompt.clear()
        self.prompt.addItems([one_line(shared.prompt) for shared in self._prompts])
        self.prompt.setCurrentIndex(max(0, self.prompt.findText(kept)))
        self.prompt.blockSignals(False)
        self._show_prompt()

    def _show_prompt(self) -> None:
        found = bool(self._prompts)
        self.sides.setVisible(found)
        self.nothing.setVisible(not found)
        self.prompt.setEnabled(found)
        self.where.setText(f"step {self._prompts[0].step:,}" if found else "")
        if found:
            shared = self._prompts[max(0, self.prompt.currentIndex())]
            names = [self._names[box.currentIndex()] for box in self.runs]
            first, second = shared.best()
            sides = {
                f"{name.letter}  {name.title}": [best] if best else []
                for name, best in zip(names, (first, second), strict=True)
            }
            self.sides.show_row(shared.groups[0], sides)
