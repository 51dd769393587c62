"""The question before a user's code runs: which file, what is in it, and what it could reach.

The facts come from the source text (`backend.spec.rewards.user_code`); nothing is run to find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QFrame, QGridLayout, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.number_format import figure
from app.widgets.basic.open_in_desktop import open_path
from backend.spec.rewards.allowed_code import CodeToAllow

WIDTH = 520
MAX_NAMES = 12
"""Names shown of a long list."""


class ConsentDialog(QDialog):
    """A modal question with Allow and Do Not Run; Return and Escape both mean Do Not Run."""

    def __init__(self, files: Sequence[CodeToAllow], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Reward code")
        self.setMinimumWidth(theme.scaled(WIDTH))
        column = QVBoxLayout(self)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addWidget(label(_question(files), theme.heading_font(), wrap=True))
        column.addWidget(label(_rights(files), role="muted", wrap=True))
        for file in files:
            column.addWidget(_facts_card(file))
        column.addWidget(self._buttons([file.code.path for file in files]))

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        # Qt's size hint allows for wrapped labels at a narrower width than the dialog gets, and is too high.
        self.resize(self.width(), self.heightForWidth(self.width()))

    def _buttons(self, paths: Sequence[Path]) -> QDialogButtonBox:
        box, role = QDialogButtonBox(), QDialogButtonBox.ButtonRole
        self.allow = QPushButton("Allow and Run")
        self.decline = QPushButton("Do Not Run")
        box.addButton(self.allow, role.AcceptRole)
        box.addButton(self.decline, role.RejectRole)
        show = button("Show the File", lambda: [open_path(path) for path in paths])
        box.addButton(show, role.HelpRole)
        self.allow.setAutoDefault(False)  # a focused button with autoDefault would take Return from the default one
        show.setAutoDefault(False)
        self.decline.setDefault(True)
        self.allow.clicked.connect(self.accept)
        self.decline.clicked.connect(self.reject)
        return box


def ask_consent(files: Sequence[CodeToAllow], parent: QWidget | None = None) -> bool:
    """Ask, and wait for the answer: whether the files may run."""
    return ConsentDialog(files, parent).exec() == QDialog.DialogCode.Accepted


def _question(files: Sequence[CodeToAllow]) -> str:
    names = " and ".join(file.code.path.name for file in files)
    if all(file.changed for file in files):
        return (
            f"{names} {'has' if len(files) == 1 else 'have'} changed since you allowed it to run. Run it as it is now?"
        )
    return f"Run the code in {names}?"


def _rights(files: Sequence[CodeToAllow]) -> str:
    """What the code may do, where it runs; of several runs, the one with the most rights."""
    if any(file.rights.in_trainer for file in files):
        rights = "It runs inside the trainer, with your rights: it can read and change your files and use the network."
    elif any(file.rights.network for file in files):
        rights = (
            "It runs in a process of its own. It can read your files, though not keys and tokens in their usual places, "
            "and send what it reads over the network. It can change nothing outside a folder of its own."
        )
    else:
        rights = (
            "It runs in a process of its own. It can read your files, though not keys and tokens in their usual places. It "
            "has no network, and can change nothing outside a folder of its own."
        )
    limits = (
        ""
        if any(file.rights.in_trainer for file in files)
        else " Where the system cannot ensure that, the run says so."
    )
    return f"It is a program. {rights}{limits} Allow only code that you know."


def _facts_card(file: CodeToAllow) -> QFrame:
    code, card = file.code, QFrame()
    card.setProperty("role", "card")
    grid = QGridLayout(card)
    grid.setContentsMargins(12, 10, 12, 10)
    grid.setHorizontalSpacing(12)
    grid.setVerticalSpacing(4)
    grid.setColumnStretch(1, 1)
    rows = [
        ("File", str(code.path)),
        ("Size", f"{figure(code.size)} bytes{', changed' if file.changed else ''}"),
        ("Functions", _names(code.functions) or "none that can be read off its text"),
        ("Imports", _names(code.imports) or "none"),
    ]
    if code.reaches:
        rows.append(("Among them", f"{_names(code.reaches)}, for files, programs or the network"))
    if code.beside:
        rows.append(("Beside it", f"{_names(code.beside)}. Also run; a change there alone is not asked about."))
    for row, (name, fact) in enumerate(rows):
        grid.addWidget(label(name, role="muted"), row, 0, Qt.AlignmentFlag.AlignTop)
        value = label(fact, role="problem" if name == "Among them" else "", wrap=True, selectable=True)
        grid.addWidget(value, row, 1)
    return card


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
