"""What the scores mean, in words: the first sentence large, the others below it, each with a dot in the colour of its
weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PySide6.QtCore import QPointF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import label

LEVEL_ROLES = {"error": "bad", "warning": "warning", "note": "muted", "good": "good"}
"""Level of a finding → role of the palette."""


class FindingsCard(QFrame):
    """A card; `tell` fills it."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setAccessibleName("Verdict")
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Maximum)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(12, 10, 12, 10)
        self._column.setSpacing(6)
        self._told: Sequence[Mapping[str, str]] = ()
        self._most = 99

    def tell(self, findings: Sequence[Mapping[str, str]]) -> None:
        """Findings in their order; the first one is the headline."""
        self._told = findings
        self._show()

    def show_at_most(self, count: int) -> None:
        """Tell so many findings, where there is little room."""
        if count != self._most:
            self._most = count
            self._show()

    def sentences(self) -> list[str]:
        return [one["sentence"] for one in self._told]

    def _show(self) -> None:
        while (item := self._column.takeAt(0)) is not None:
            if (widget := item.widget()) is not None:
                widget.hide()
                widget.deleteLater()
        for place, one in enumerate(self._told[: self._most]):
            self._column.addWidget(_Finding(one, first=place == 0))
        self.setVisible(bool(self._told))


class _Finding(QWidget):
    def __init__(self, one: Mapping[str, str], *, first: bool) -> None:
        super().__init__()
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(theme.SPACE)
        row.addWidget(_LevelDot(LEVEL_ROLES.get(one["level"], "muted")), 0, Qt.AlignmentFlag.AlignTop)
        words = QVBoxLayout()
        words.setSpacing(0)
        words.addWidget(
            label(
                one["sentence"],
                theme.heading_font() if first and one["level"] != "error" else None,
                wrap=True,
                selectable=True,
            )
        )
        if one["advice"]:
            words.addWidget(label(one["advice"], role="muted", wrap=True, selectable=True))
        row.addLayout(words, 1)


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
