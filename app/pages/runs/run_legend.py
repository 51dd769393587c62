"""The legend of a comparison: a line, a letter and a name for each run; a click hides its curves and shows them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRect, QSize, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QAbstractButton, QWidget

from app import theme
from app.widgets.basic.labels import plain_tip
from app.widgets.basic.layout import FlowLayout, clear_layout

_LINE, _GAP = 20, 6
_WIDEST = 320


@dataclass(frozen=True, slots=True)
class ComparedName:
    """How a run is named in a comparison: `letter` in the charts, `title` beside it in the legend; `index` is its colour's."""

    index: int
    letter: str
    title: str
    name: str


def letter_of(index: int) -> str:
    """A, B, … Z, AA, AB, …"""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


class RunLegend(QWidget):
    """Signals:
    shown_changed – a run was hidden or shown.
    """

    shown_changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName("Legend of the runs")
        self.chips: list[RunChip] = []
        self._flow = FlowLayout(self)

    def show_names(self, names: Sequence[ComparedName]) -> None:
        """Show these runs; those that were hidden stay so."""
        if [chip.run for chip in self.chips] == list(names):
            return
        hidden = {chip.run.name for chip in self.chips if not chip.isChecked()}
        clear_layout(self._flow)
        self.chips = [RunChip(name, self) for name in names]
        for chip in self.chips:
            chip.setChecked(chip.run.name not in hidden)
            chip.toggled.connect(lambda _on: self.shown_changed.emit())
            self._flow.addWidget(chip)
            chip.show()

    def shown(self) -> list[ComparedName]:
        """The runs that are not hidden."""
        return [chip.run for chip in self.chips if chip.isChecked()]


class RunChip(QAbstractButton):
    """One entry; checked while its run is shown."""

    def __init__(self, run: ComparedName, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.run = run
        self.setCheckable(True)
        self.setChecked(True)
        self.setText(f"{run.letter}  {run.title}")
        self.setToolTip(plain_tip(f"{run.name}\nClick to hide its curves, or show them again"))
        self.setAccessibleName(f"Curves of {run.letter}, {run.title}")
        self.setFont(theme.body_font())
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        theme.signals.changed.connect(self.update)

    def sizeHint(self) -> QSize:
        text = self.fontMetrics().horizontalAdvance(self.text())
        width = min(theme.scaled(_WIDEST), theme.scaled(_LINE) + text + 4 * _GAP)
        return QSize(width, self.fontMetrics().height() + theme.SPACE)

    minimumSizeHint = sizeHint

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, painter, line = theme.palette(), QPainter(self), theme.scaled(_LINE)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if self.hasFocus():
            painter.setPen(QPen(colours.accent, 1))
            painter.drawRoundedRect(self.rect().adjusted(0, 0, -1, -1), 6, 6)
        pen = theme.reward_pen(self.run.index, 2.5) if self.isChecked() else QPen(colours.faint, 1)
        painter.setPen(pen)
        middle = self.height() / 2
        painter.drawLine(QPointF(_GAP, middle), QPointF(_GAP + line, middle))
        font = self.font()
        font.setStrikeOut(not self.isChecked())
        painter.setFont(font)
        painter.setPen(colours.text if self.isChecked() else colours.muted)
        box = QRect(self.rect()).adjusted(2 * _GAP + line, 0, -_GAP, 0)
        text = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideMiddle, box.width())
        painter.drawText(box, Qt.AlignmentFlag.AlignVCenter, text)
