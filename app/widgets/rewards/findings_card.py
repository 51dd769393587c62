"""The findings of the bench in words: the first one as headline, each with a dot in the colour of its level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PySide6.QtCore import QPointF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import label
from app.widgets.basic.layout import clear_layout

LEVEL_ROLES = {"error": "bad", "warning": "warning", "note": "muted", "good": "good"}
"""Level of a finding → role of the palette."""


class FindingsCard(QFrame):
    """A card of findings; hidden while there are none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setAccessibleName("Verdict")
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Maximum)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(12, 10, 12, 10)
        self._column.setSpacing(6)
        self._findings: Sequence[Mapping[str, str]] = ()
        self._max_count = 99

    def show_findings(self, findings: Sequence[Mapping[str, str]]) -> None:
        """Show findings {"level", "sentence", "advice"} in their order; the first one is the headline."""
        self._findings = findings
        self._show()

    def show_at_most(self, count: int) -> None:
        """Show only the first `count` findings, for a page of little height."""
        if count != self._max_count:
            self._max_count = count
            self._show()

    def sentences(self) -> list[str]:
        """The sentences of all findings, shown or not."""
        return [finding["sentence"] for finding in self._findings]

    def _show(self) -> None:
        clear_layout(self._column)
        for i, finding in enumerate(self._findings[: self._max_count]):
            self._column.addWidget(_FindingRow(finding, first=i == 0))
        self.setVisible(bool(self._findings))


class _FindingRow(QWidget):
    """A dot, the sentence, and the advice below it."""

    def __init__(self, finding: Mapping[str, str], *, first: bool) -> None:
        super().__init__()
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(theme.SPACE)
        row.addWidget(_LevelDot(LEVEL_ROLES.get(finding["level"], "muted")), 0, Qt.AlignmentFlag.AlignTop)
        text = QVBoxLayout()
        text.setSpacing(0)
        font = theme.heading_font() if first and finding["level"] != "error" else None
        text.addWidget(label(finding["sentence"], font, wrap=True, selectable=True))
        if finding["advice"]:
            text.addWidget(label(finding["advice"], role="muted", wrap=True, selectable=True))
        row.addLayout(text, 1)


class _LevelDot(QWidget):
    """A dot at the height of the first line of text."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role
        self.setFixedSize(theme.scaled_size(QSize(10, 18)))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(getattr(theme.palette(), self._role))
        across = theme.scaled(10)
        painter.drawEllipse(QPointF(across / 2, self.height() / 2), 0.4 * across, 0.4 * across)
