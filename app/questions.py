"""What the window asks people, and what they drop on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PySide6.QtGui import QDropEvent
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


def dropped_config(event: QDropEvent) -> Path | None:
    """The one YAML file that is being dropped, if that is what it is."""
    urls = event.mimeData().urls()
    path = Path(urls[0].toLocalFile()) if len(urls) == 1 and urls[0].isLocalFile() else None
    return path if path is not None and path.suffix in (".yaml", ".yml") else None
