"""What the window asks people."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtWidgets import QMessageBox, QWidget


def ask(parent: QWidget, question: str, detail: str, answers: Mapping[str, str]) -> str:
    """The key of the answer among three: the first is what Return means, the last what Escape means."""
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
