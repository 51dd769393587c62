"""The modal question with three answers."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtWidgets import QMessageBox, QWidget


def ask(parent: QWidget, question: str, detail: str, answers: Mapping[str, str]) -> str:
    """Ask, and return the key of the answer. There are three: Return chooses the first, Escape the last."""
    box = QMessageBox(QMessageBox.Icon.NoIcon, "", question, parent=parent)
    box.setInformativeText(detail)
    role = QMessageBox.ButtonRole
    roles = [role.AcceptRole, role.DestructiveRole, role.RejectRole]
    buttons = {box.addButton(text, kind): key for (key, text), kind in zip(answers.items(), roles, strict=True)}
    last = list(buttons)[-1]
    box.setDefaultButton(next(iter(buttons)))
    box.setEscapeButton(last)
    box.exec()
    return buttons.get(box.clickedButton(), buttons[last])  # type: ignore[arg-type]
