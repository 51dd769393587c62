"""What to evaluate: the split, the checkpoint, completions of each prompt, how many prompts; and the button that begins or stops."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QIntValidator
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ComboBox, ElidedLabel, NumberEdit
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.number_format import duration

SPLITS = {"test": "Test", "valid": "Validation", "train": "Training"}
_BAR_STEPS = 1000


class EvaluationForm(QWidget):
    """A row of fields, below it the progress of an evaluation that is being made, or why the last one failed.

    Signals:
        started, stopped – the button was pressed.
    """

    started = Signal()
    stopped = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._is_running = False
        self.split, self.checkpoint = ComboBox(), ComboBox()
        for key, title in SPLITS.items():
            self.split.addItem(title, key)
        self.completions, self.limit = NumberEdit(), NumberEdit()
        for field, placeholder in ((self.completions, "as in training"), (self.limit, "all")):
            field.setValidator(QIntValidator(1, 1_000_000, field))
            field.setPlaceholderText(placeholder)
            field.setAlignment(Qt.AlignmentFlag.AlignRight)
            field.returnPressed.connect(self._press)
        self.completions.setToolTip("Sampled completions of each prompt, beside the greedy one.")
        self.limit.setToolTip("Only the first prompts of the split.")
        self.button = button("Evaluate", self._press, primary=True)
        self.bar = QProgressBar(textVisible=False, maximum=_BAR_STEPS)
        self.bar.setAccessibleName("Progress of the evaluation")
        self.status = ElidedLabel()
        self.status.setFont(theme.figures_font())
        self.problem = label(role="problem", wrap=True, selectable=True)
        self._lay_out()
        self.show_idle("")

    def _lay_out(self) -> None:
        fields = QHBoxLayout()
        fields.setSpacing(theme.SPACE)
        widths = {"Split": 110, "Checkpoint": 130, "Completions": 104, "Prompts": 64}
        for (name, width), field in zip(
            widths.items(), (self.split, self.checkpoint, self.completions, self.limit), strict=True
        ):
            caption = label(name, role="muted")
            caption.setBuddy(field)
            field.setAccessibleName(name)
            field.setMinimumWidth(theme.scaled(min(width, 64)))
            field.setMaximumWidth(theme.scaled(width))
            fields.addWidget(caption)
            fields.addWidget(field, 1)
            fields.addSpacing(theme.SPACE)
        fields.addStretch(1)
        fields.addWidget(self.button)
        progress = QHBoxLayout()
        progress.setSpacing(2 * theme.SPACE)
        progress.addWidget(self.bar, 1)
        progress.addWidget(self.status, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addLayout(fields)
        column.addLayout(progress)
        column.addWidget(self.problem)

    def set_checkpoints(self, steps: Sequence[int]) -> None:
        """Offer the newest, the best and every step; the choice stays where it still exists."""
        items = [("End", "end"), ("Best", "best"), *((f"Step {step:,}", str(step)) for step in steps)]
        if [self.checkpoint.itemData(i) for i in range(self.checkpoint.count())] == [key for _, key in items]:
            return
        chosen = self.checkpoint.currentData()
        self.checkpoint.clear()
        for title, key in items:
            self.checkpoint.addItem(title, key)
        self.checkpoint.setCurrentIndex(max(0, self.checkpoint.findData(chosen)))

    def show_idle(self, problem: str, obstacle: str = "") -> None:
        """Nothing is running. `problem`: why the last one failed; `obstacle`: why none can begin."""
        self._is_running = False
        self._set_running_shown(False)
        self.button.setText("Evaluate")
        self.button.setEnabled(not obstacle)
        self.problem.setText(obstacle or problem)
        self.problem.setVisible(bool(obstacle or problem))

    def show_running(self, phase: str, done: float | None, left_s: float | None) -> None:
        self._is_running = True
        self._set_running_shown(True)
        self.button.setText("Stop")
        self.button.setEnabled(True)
        self.problem.hide()
        self.bar.setValue(round(_BAR_STEPS * (done or 0.0)))
        self.status.setText(f"{phase}, {duration(left_s)} left" if left_s is not None else f"{phase}…")

    def _set_running_shown(self, shown: bool) -> None:
        for part in (self.bar, self.status):
            part.setVisible(shown)
        for field in (self.split, self.checkpoint, self.completions, self.limit):
            field.setEnabled(not shown)

    def _press(self) -> None:
        if self.button.isEnabled():
            (self.stopped if self._is_running else self.started).emit()

    @staticmethod
    def number(field: NumberEdit) -> int | None:
        """The number in a field; None where it is empty, which leaves the choice to the evaluation."""
        return int(field.text()) if field.hasAcceptableInput() else None
