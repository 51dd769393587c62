"""The head of the Completions page: what is shown, which step, and whether the newest is followed."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QIntValidator
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QWidget

from app import theme
from app.widgets.basic.controls import CheckBox, ElidedLabel, NumberEdit
from app.widgets.basic.labels import button, label


class StepHead(QWidget):
    """Attributes:
        about – what is shown.
        newest, step, earlier, later – its controls.

    Signals:
        moved(int) – go one step on (1) or back (−1).
        typed(int) – the user typed this step.
        followed(bool) – follow the newest step, or stay.
    """

    moved = Signal(int)
    typed = Signal(int)
    followed = Signal(bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.earlier = button("Earlier", lambda: self.moved.emit(-1), tip="The step before (Ctrl+[)")
        self.later = button("Later", lambda: self.moved.emit(1), tip="The step after (Ctrl+])")
        self.step = NumberEdit()
        self.step.setValidator(QIntValidator(0, 2**31 - 1, self.step))
        self.step.setFixedWidth(theme.scaled(72))
        self.step.setAlignment(Qt.AlignmentFlag.AlignRight)
        self.step.setAccessibleName("Step")
        self.newest = CheckBox("Follow newest")
        self.newest.setChecked(True)
        self.about = ElidedLabel()
        self.about.setFont(theme.figures_font())
        self.step.editingFinished.connect(self._type)
        self.newest.toggled.connect(self.followed)
        self._row = QHBoxLayout(self)
        self._row.setContentsMargins(0, 0, 0, 0)
        self._row.setSpacing(theme.SPACE)
        self._row.addWidget(label("Completions", theme.title_font()))
        self._row.addSpacing(2 * theme.SPACE)
        self._row.addWidget(self.about, 1)
        self._row.addWidget(self.newest)
        self._row.addSpacing(theme.SPACE)
        for part in (label("Step"), self.step, self.earlier, self.later):
            self._row.addWidget(part)

    def add_button(self, made: QPushButton) -> None:
        self._row.addWidget(made)

    def show_step(self, step: int, first: int, last: int) -> None:
        """Show this step, of those from `first` to `last`."""
        if not self.step.hasFocus() or not self.step.isModified():  # the user may be typing a number there
            self.step.setText(str(step))
        self.earlier.setEnabled(step > first)
        self.later.setEnabled(step < last)

    def follow(self, newest: bool) -> None:
        """Tick or untick *Follow newest* without a signal."""
        blocked = self.newest.blockSignals(True)
        self.newest.setChecked(newest)
        self.newest.blockSignals(blocked)

    def _type(self) -> None:
        # `editingFinished` comes also when the focus merely leaves the line.
        if self.step.isModified() and self.step.text():
            self.step.setModified(False)
            self.typed.emit(int(self.step.text()))
