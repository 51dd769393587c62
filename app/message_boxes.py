"""The modal question with three answers, and what is asked before something is lost."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMessageBox, QWidget


def ask(parent: QWidget, question: str, detail: str, answers: Mapping[str, str]) -> str:
    """Ask, and return the key of the answer."""
    box = QuestionBox(parent, question, detail, answers)
    box.exec()
    return box.answer


class QuestionBox(QMessageBox):
    """`answer`: key of the button that was clicked, the last if it was closed."""

    def __init__(self, parent: QWidget, question: str, detail: str, answers: Mapping[str, str]) -> None:
        super().__init__(QMessageBox.Icon.NoIcon, "", question, parent=parent)
        self.setTextFormat(Qt.TextFormat.PlainText)  # names of runs and files are in them
        self.setInformativeText(detail)
        role = QMessageBox.ButtonRole
        roles = [role.AcceptRole, role.DestructiveRole, role.RejectRole]
        self._keys = list(answers)
        self._buttons = [self.addButton(text, kind) for text, kind in zip(answers.values(), roles, strict=True)]
        self.setDefaultButton(self._buttons[0])
        self.setEscapeButton(self._buttons[-1])

    @property
    def answer(self) -> str:
        clicked = self.clickedButton()
        return next((key for key, own in zip(self._keys, self._buttons, strict=True) if own is clicked), self._keys[-1])
