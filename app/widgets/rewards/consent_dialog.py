"""The question before a person's code runs: whose it is, what stands in it, and what it could reach. Nothing is run to
find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QFrame, QGridLayout, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.desktop import open_path
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.number_format import figure
from backend.spec.rewards.user_code import Code

WIDTH = 520
MAX_NAMES = 12
"""Names that are shown of a long list."""


@dataclass(frozen=True, slots=True)
class ConsentFile:
    """A file to be told of; `changed` since it was last allowed."""

    code: Code
    changed: bool


class ConsentDialog(QDialog):
    """Run it, or not: Return and Escape both mean not."""

    def __init__(self, files: Sequence[ConsentFile], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Reward code")
        self.setMinimumWidth(theme.scaled(WIDTH))
        column = QVBoxLayout(self)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addWidget(label(_question(files), theme.heading_font(), wrap=True))
        told = "It is a program, and runs with your rights: it can read and change your files. Allow only code that you know."
        column.addWidget(label(told, role="muted", wrap=True))
        for one in files:
            column.addWidget(_about(one))
        column.addWidget(self._buttons([one.code.path for one in files]))

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.resize(self.width(), self.heightForWidth(self.width()))  # sentences wrap, which Qt leaves room for twice

    def _buttons(self, paths: Sequence[Path]) -> QDialogButtonBox:
        box, role = QDialogButtonBox(), QDialogButtonBox.ButtonRole
        self.allow = QPushButton("Allow and Run")
        self.decline = QPushButton("Do Not Run")
        box.addButton(self.allow, role.AcceptRole)
        box.addButton(self.decline, role.RejectRole)
        look = button("Show the File", lambda: [open_path(path) for path in paths])
        box.addButton(look, role.HelpRole)
        self.allow.setAutoDefault(False)
        look.setAutoDefault(False)
        self.decline.setDefault(True)
        self.allow.clicked.connect(self.accept)
        self.decline.clicked.connect(self.reject)
        return box


def ask_consent(files: Sequence[ConsentFile], parent: QWidget | None = None) -> bool:
    """Ask, and wait for the answer."""
    return ConsentDialog(files, parent).exec() == QDialog.DialogCode.Accepted


def _question(files: Sequence[ConsentFile]) -> str:
    names = " and ".join(one.code.path.name for one in files)
    if all(one.changed for one in files):
        return (
            f"{names} {'has' if len(files) == 1 else 'have'} changed since you allowed it to run. Run it as it is now?"
        )
    return f"Run the code in {names}?"


def _about(one: ConsentFile) -> QFrame:
    code, card = one.code, QFrame()
    card.setProperty("role", "card")
    grid = QGridLayout(card)
    grid.setContentsMargins(12, 10, 12, 10)
    grid.setHorizontalSpacing(12)
    grid.setVerticalSpacing(4)
    grid.setColumnStretch(1, 1)
    rows = [
        ("File", str(code.path)),
        ("Size", f"{figure(code.size)} bytes{', changed' if one.changed else ''}"),
        ("Functions", _names(code.functions) or "none that can be read off its text"),
        ("Imports", _names(code.imports) or "none"),
    ]
    if code.reaches:
        rows.append(("Can reach", f"files, programs or the network, through {_names(code.reaches)}"))
    for row, (name, told) in enumerate(rows):
        grid.addWidget(label(name, role="muted"), row, 0, Qt.AlignmentFlag.AlignTop)
        said = label(told, role="problem" if name == "Can reach" else "", wrap=True, selectable=True)
        grid.addWidget(said, row, 1)
    return card


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
