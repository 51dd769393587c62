"""A question before something of a file is used for the first time: what is in it, what using it means, and No as the default answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QDialog, QFrame, QGridLayout, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.open_in_desktop import open_path

WIDTH = 520


@dataclass(frozen=True, slots=True)
class StatedFact:
    """A row of a card. `warns`: it is what should make a person think."""

    name: str
    text: str
    warns: bool = False


@dataclass(frozen=True, slots=True)
class ShownFile:
    """A file that the question is about, and the card of its facts."""

    path: Path
    facts: Sequence[StatedFact]


class AllowDialog(QDialog):
    """A modal question; Return and Escape both mean no.

    Attributes:
        allow, decline – its buttons.
    """

    def __init__(
        self, title: str, question: str, meaning: str, files: Sequence[ShownFile], yes: str, no: str, parent: QWidget | None = None
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setMinimumWidth(theme.scaled(WIDTH))
        column = QVBoxLayout(self)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addWidget(label(question, theme.heading_font(), wrap=True))
        column.addWidget(label(meaning, role="muted", wrap=True))
        for file in files:
            column.addWidget(_card(file.facts))
        self.allow, self.decline = QPushButton(yes), QPushButton(no)
        column.addLayout(self._buttons([file.path for file in files]))
        self.decline.setFocus()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        # Qt's size hint allows for wrapped labels at a narrower width than the dialog gets, and is too high.
        self.resize(self.width(), self.heightForWidth(self.width()))

    def is_allowed(self) -> bool:
        """Ask, and wait for the answer."""
        return self.exec() == QDialog.DialogCode.Accepted

    def _buttons(self, paths: Sequence[Path]) -> QHBoxLayout:
        # No QDialogButtonBox: with a default button in it, Tab passes over the first button of a dialog that has no other stops.
        show = button("Show the File", lambda: [open_path(path) for path in paths])
        row = QHBoxLayout()
        row.setSpacing(theme.SPACE)
        row.addWidget(show)
        row.addStretch(1)
        for answer in (self.decline, self.allow):
            row.addWidget(answer)
        for other in (self.allow, show):  # a focused button with autoDefault would take Return from the default one
            other.setAutoDefault(False)
        self.decline.setDefault(True)
        self.allow.clicked.connect(self.accept)
        self.decline.clicked.connect(self.reject)
        return row


def _card(facts: Sequence[StatedFact]) -> QFrame:
    card = QFrame()
    card.setProperty("role", "card")
    grid = QGridLayout(card)
    grid.setContentsMargins(12, 10, 12, 10)
    grid.setHorizontalSpacing(12)
    grid.setVerticalSpacing(4)
    grid.setColumnStretch(1, 1)
    for row, fact in enumerate(facts):
        grid.addWidget(label(fact.name, role="muted"), row, 0, Qt.AlignmentFlag.AlignTop)
        grid.addWidget(label(fact.text, role="problem" if fact.warns else "", wrap=True, selectable=True), row, 1)
    return card
