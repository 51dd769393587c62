"""The Completions page: what does the model write? Every completion of a step, with each reward beside it.

Rows are shown as the trainer wrote them, group by group; this page scores nothing.
"""

from __future__ import annotations

from bisect import bisect_right

from PySide6.QtCore import Qt
from PySide6.QtGui import QIntValidator, QResizeEvent, QShowEvent
from PySide6.QtWidgets import (  # fmt: skip
    QHBoxLayout,
    QSplitter,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.model import charts
from app.model.run import Run
from app.model.session import Session
from app.widgets.basic.controls import CheckBox, ElidedLabel, NumberEdit
from app.widgets.basic.empty_state import EmptyState
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.completions.completion_detail import CompletionDetail
from app.widgets.completions.completion_table import CompletionModel, CompletionTable

DETAIL, BESIDE = 210, 720
"""Initial height of the detail below the table, and its initial width beside the table."""
WIDE = 1500
"""From this page width on the detail is beside the table."""


class CompletionsPage(QWidget):
    """The page.

    Attributes:
        session – the state shared with the other pages.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self._run: Run | None = None
        self._shown: tuple[Run, int] | None = None
        self._picked = 0
        self._compose()
        self._lay_out()
        session.run_changed.connect(self._on_run_changed)
        self._on_run_changed()

    def _compose(self) -> None:
        self.nothing = EmptyState("No completions yet", "They appear here with the first step of a run.", "Go to Train")
        self.nothing.button_clicked.connect(lambda: self.session.page_requested.emit("train"))
        self.model = CompletionModel(self)
        self.table = CompletionTable(self.model)
        self.detail = CompletionDetail()
        self.table.chosen.connect(self.detail.show_completion)
        self.table.touched.connect(self._stop_following)
        self.earlier = button("Earlier", self.show_earlier, tip="The step before (Ctrl+[)")
        self.later = button("Later", self.show_later, tip="The step after (Ctrl+])")
        self.step = NumberEdit()
        self.step.setValidator(QIntValidator(0, 2**31 - 1, self.step))
        self.step.setFixedWidth(theme.scaled(72))
        self.step.setAlignment(Qt.AlignmentFlag.AlignRight)
        self.step.setAccessibleName("Step")
        self.step.editingFinished.connect(self._pick_typed)
        self.newest = CheckBox("Follow newest")
        self.newest.setChecked(True)
        self.newest.toggled.connect(lambda _: self._refresh())
        self.about = ElidedLabel()
        self.about.setFont(theme.figures_font())

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(theme.SPACE)
        head.addWidget(label("Completions", theme.title_font()))
        head.addSpacing(2 * theme.SPACE)
        head.addWidget(self.about, 1)
        head.addWidget(self.newest)
        head.addSpacing(theme.SPACE)
        for part in (label("Step"), self.step, self.earlier, self.later):
            head.addWidget(part)
        self.parts = QSplitter(Qt.Orientation.Vertical, childrenCollapsible=False, handleWidth=theme.SPACE)
        self.parts.addWidget(self.table.in_card())
        self.parts.addWidget(self.detail)
        self.parts.setStretchFactor(0, 1)
        self.parts.setSizes([1000, theme.scaled(DETAIL)])
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addLayout(head)
        column.addWidget(self.parts, 1)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.nothing)
        self._stack.addWidget(content)

    def resizeEvent(self, event: QResizeEvent) -> None:
        """In a wide page the completion is beside the table, so that its lines are not too long to read."""
        super().resizeEvent(event)
        wide = self.width() >= theme.scaled(WIDE)
        orientation = Qt.Orientation.Horizontal if wide else Qt.Orientation.Vertical
        if (
            orientation != self.parts.orientation()
        ):  # sizes are set on a change only: the user may have moved the handle
            self.parts.setOrientation(orientation)
            self.detail.set_upright(wide)
            self.parts.setSizes([self.width(), theme.scaled(BESIDE)] if wide else [self.height(), theme.scaled(DETAIL)])

    # ── the run and its step ────────────────────────────────────────────────────────────────────

    def _on_run_changed(self) -> None:
        self._run, self._shown = self.session.run, None
        self.newest.setChecked(True)
        if self._run is not None:
            self._run.changed.connect(self._refresh)
            self._run.restarted.connect(self._forget)
        self._refresh()

    def _forget(self) -> None:
        """A resume has cut the file back: the step that is shown will get other rows."""
        self._shown = None

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._refresh()

    def _refresh(self) -> None:
        """Show the newest step, or the picked one. A hidden page does nothing."""
        if not self.isVisible():
            return
        steps = self._run.completion_steps() if self._run else []
        self._stack.setCurrentIndex(1 if steps else 0)
        if self._run is None or not steps:
            return
        step = steps[-1] if self.newest.isChecked() else _nearest(steps, self._picked)
        if not self.step.hasFocus():  # the user may be typing a number there
            self.step.setText(str(step))
        self.earlier.setEnabled(step > steps[0])
        self.later.setEnabled(step < steps[-1])
        if self._shown != (self._run, step):
            self._show_step(self._run, step)

    def _show_step(self, run: Run, step: int) -> None:
        self._shown = (run, step)
        rows = run.groups(step)
        names = run.reward_names
        self.model.show_groups(rows, names, [charts.label_of(name) for name in names])
        self.detail.set_rewards(names, [charts.label_of(name) for name in names])
        self.table.reset_view()
        count = sum(len(row.get("completions") or ()) for row in rows)
        self.about.setText(f"{_counted(len(rows), 'prompt')}, {_counted(count, 'completion')}")

    def pick(self, step: int) -> None:
        """Show this step, or the last one before it that has completions, until Follow newest is ticked."""
        self._picked = step
        blocked = self.newest.blockSignals(True)  # `toggled` would refresh a second time
        self.newest.setChecked(False)
        self.newest.blockSignals(blocked)
        self._refresh()

    def _stop_following(self) -> None:
        """Stop following a live run once a completion is selected, so that the next step does not replace it."""
        if self.newest.isChecked() and self._shown is not None and self._shown[0].is_live:
            self.pick(self._shown[1])

    def _pick_typed(self) -> None:
        if (
            self.step.isModified() and self.step.text()
        ):  # `editingFinished` comes also when the focus merely leaves the line
            self.step.setModified(False)
            self.pick(int(self.step.text()))

    def show_earlier(self) -> None:
        self.go(-1)

    def show_later(self) -> None:
        self.go(1)

    def go(self, by: int) -> None:
        """Move by this many steps, forwards or back, among those that have completions."""
        steps = self._run.completion_steps() if self._run else []
        if not steps or self._shown is None:
            return
        index = steps.index(_nearest(steps, self._shown[1])) + by
        if 0 <= index < len(steps):
            self.pick(steps[index])


def _nearest(steps: list[int], step: int) -> int:
    """The known step at or before `step`, else the first."""
    return steps[max(0, bisect_right(steps, step) - 1)]


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
