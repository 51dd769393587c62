"""The report of a problem: shown in full, to be read, changed, and copied or saved. It sends nothing."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QPlainTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.file_dialogs import save_file
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.layout import on_screen
from backend.utils.disk_faults import DiskError
from backend.utils.whole_file import save_as

SIZE = (680, 560)
EXPLANATION = (
    "Nothing is sent. Read the report, take out what you would rather keep, and paste it into a message or an issue yourself. "
    "Your home folder, user name and access tokens were left out, and the paths and prompts of your settings."
)


class ProblemDialog(QDialog):
    """Shows one report, which can be edited. Not modal: the window may still be needed to say what was done.

    Attributes:
        text – the editor with the report.
        done_label – says what became of it.
    """

    def __init__(self, title: str, report: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.resize(on_screen(self, *SIZE))
        self.setWindowTitle("Report a problem")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.text = QPlainTextEdit(report)
        self.text.setTabChangesFocus(True)
        self.text.setFont(theme.mono_font())
        self.text.setAccessibleName("Report")
        self.done_label = label(role="muted", wrap=True)
        self.done_label.hide()
        column = QVBoxLayout(self)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(2 * theme.SPACE)
        column.addWidget(label(title, theme.heading_font(), wrap=True))
        column.addWidget(label(EXPLANATION, role="muted", wrap=True))
        column.addWidget(self.text, 1)
        column.addWidget(self.done_label)
        column.addWidget(self._buttons())

    def copy(self) -> None:
        """Put the report, as edited, into the clipboard."""
        QGuiApplication.clipboard().setText(self.text.toPlainText())
        self._tell("Copied.")

    def save(self) -> None:
        """Write the report, as edited, to a file that the user chooses."""
        path = self.choose_path()
        if path is None:
            return
        try:
            save_as(path, self.text.toPlainText())
        except DiskError as fault:
            self._tell(fault.faults[0].sentence)
        else:
            self._tell(f"Saved as {path.name}.")

    def _tell(self, sentence: str) -> None:
        self.done_label.setText(sentence)
        self.done_label.show()

    def choose_path(self) -> Path | None:
        name = f"grpo-studio-problem-{date.today():%Y-%m-%d}.txt"
        return save_file(self, "report", "Save the report", name, "Text (*.txt)")

    def _buttons(self) -> QDialogButtonBox:
        box, role = QDialogButtonBox(QDialogButtonBox.StandardButton.Close), QDialogButtonBox.ButtonRole
        box.addButton(button("Copy", self.copy, primary=True), role.ActionRole)
        box.addButton(button("Save…", self.save), role.ActionRole)
        box.rejected.connect(self.reject)
        return box
