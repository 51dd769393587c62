"""A dialog that exports a run's model to LM Studio or a folder, and shows how that went.

It builds the command line and shows the output; the process is started by a factory that is passed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from PySide6.QtCore import Qt
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import (  # fmt: skip
    QDialog,
    QFileDialog,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QPlainTextEdit,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.controls import CheckBox, ComboBox, ElidedLabel
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.open_in_desktop import open_path
from backend.spec.command import backend_command
from backend.spec.places import RunFolder, lm_studio_models


class ExportTask(Protocol):
    """What the dialog needs of a running command; `app.model.processes.VerbProcess` has it.

    Signals:
        line(str) – a line of output.
        done(outcome) – it has ended; the outcome has `ok`, `sentence` and `output`.
    """

    line: Any  # of type Signal, which pyright cannot match with a class attribute of the implementation
    done: Any

    @property
    def is_running(self) -> bool: ...
    def start(self) -> None: ...
    def cancel(self) -> None: ...


MakeTask = Callable[[list[str], QWidget], ExportTask]
"""Makes a task that has not been started, from a command line and a parent."""

_SETTING_PREFIX = re.compile(r"^[a-z_]+: ")
_WIDTH = 520
PRECISIONS = (("As trained", ""), ("8-bit", "8"), ("6-bit", "6"), ("4-bit", "4"))


class ExportPanel(QDialog):
    """Not modal: the window stays usable during an export. Closing the dialog cancels the export.

    Attributes:
        run – the run folder to export.
        outcome_label – how the export ended, in a sentence.
    """

    def __init__(self, run: RunFolder, make_task: MakeTask, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.run = run
        self._make_task = make_task
        self._task: ExportTask | None = None
        self._exported: Path | None = None
        self.setWindowTitle(f"Export {run.name}")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setMinimumWidth(theme.scaled(_WIDTH))
        self._build()
        self._lay_out()
        self._choose_destination()

    def _build(self) -> None:
        self.destination, self.precision = ComboBox(), ComboBox()
        self.destination.addItem("LM Studio", "lmstudio")
        self.destination.addItem("A folder", "folder")
        self.destination.currentIndexChanged.connect(self._choose_destination)
        for word, bits in PRECISIONS:
            self.precision.addItem(word, bits)
        self.folder = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self.choose = button("Choose…", self._choose_folder)
        self.name = QLineEdit(self.run.name)
        self.name.textChanged.connect(self._show_ready)
        self.overwrite = CheckBox("Replace a model of that name")
        self.output = QPlainTextEdit()
        self.output.setReadOnly(True)
        self.output.hide()
        self.output.setFont(theme.mono_font(theme.CAPTION))
        self.output.setFixedHeight(96)
        self.outcome_label = label(wrap=True, selectable=True)
        self.outcome_label.hide()
        self.close_button = button("Close", self.close)
        self.reveal = button("Show folder", self._show_exported)
        self.reveal.hide()
        self.start = button("Export", self.start_export, primary=True)
        self.start.setDefault(True)

    def _lay_out(self) -> None:
        place = QHBoxLayout()
        place.addWidget(self.folder, 1)
        place.addWidget(self.choose)
        form = QGridLayout()
        form.setHorizontalSpacing(2 * theme.SPACE)
        form.setVerticalSpacing(theme.SPACE)
        form.setColumnStretch(1, 1)
        right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        fields = (("To", self.destination), ("Name", self.name), ("Precision", self.precision), ("", self.overwrite))
        for index, (name, field) in enumerate(fields):
            row = index + (index > 0)  # row 1, below “To”, is the folder's
            caption = label(name, role="muted", align=right)
            caption.setBuddy(field)
            if name:
                field.setAccessibleName(name)
            form.addWidget(caption, row, 0)
            form.addWidget(field, row, 1)
        form.addLayout(place, 1, 1)
        buttons = QHBoxLayout()
        buttons.addStretch(1)
        for widget in (self.close_button, self.reveal, self.start):
            buttons.addWidget(widget)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(theme.SPACE * 2)
        column.addLayout(form)
        column.addWidget(self.output)
        column.addWidget(self.outcome_label)
        column.addLayout(buttons)

    def open_beside(self) -> None:
        """Show the dialog without blocking the window, with the name selected for typing."""
        self.show()
        self.raise_()
        self.name.setFocus()
        self.name.selectAll()

    # ── choices ─────────────────────────────────────────────────────────────────────────────────

    def command(self) -> list[str]:
        """The command line for the dialog's present choices."""
        destination = self.destination.currentData()
        arguments = [str(self.run.path), "--to", destination, "--name", self.name.text().strip()]
        if destination == "folder":
            arguments += ["--folder", str(self._folder)]
        if self.precision.currentData():
            arguments += ["--quantize", self.precision.currentData()]
        return backend_command("export", *arguments, *(["--overwrite"] if self.overwrite.isChecked() else []))

    def _choose_destination(self) -> None:
        is_lm_studio = self.destination.currentData() == "lmstudio"
        self._set_folder(lm_studio_models() if is_lm_studio else Path.home())
        self.choose.setVisible(not is_lm_studio)
        self._show_ready()

    def _choose_folder(self) -> None:
        path = QFileDialog.getExistingDirectory(self, "Folder to put the model into", str(self._folder))
        if path:
            self._set_folder(Path(path))

    def _set_folder(self, folder: Path) -> None:
        self._folder, home = folder, Path.home()
        below = folder != home and folder.is_relative_to(home)
        self.folder.setText(f"~/{folder.relative_to(home).as_posix()}" if below else str(folder))
        self.folder.setToolTip(str(folder))

    def _show_ready(self) -> None:
        self.start.setEnabled(bool(self.name.text().strip()) and not self._is_running)

    # ── the export ──────────────────────────────────────────────────────────────────────────────

    @property
    def _is_running(self) -> bool:
        return self._task is not None and self._task.is_running

    def start_export(self) -> None:
        """Start the command; the Close button becomes Cancel."""
        self.output.clear()
        self.output.show()
        self.outcome_label.hide()
        self.reveal.hide()
        self._task = self._make_task(self.command(), self)
        self._task.line.connect(self.output.appendPlainText)
        self._task.done.connect(self._end)
        self._task.start()
        self.close_button.setText("Cancel")
        self.start.setEnabled(False)

    def _end(self, outcome: Any) -> None:
        self.close_button.setText("Close")
        self.output.setVisible("\n" in outcome.output)  # a single line is the sentence below
        if outcome.ok:
            self._exported = Path(outcome.sentence)
            self._show_result(f"The model is at {outcome.sentence}, loaded back and compared.", "good")
            self.reveal.show()
        else:
            self._show_result(_SETTING_PREFIX.sub("", outcome.sentence), "bad")
        self.start.setEnabled(True)

    def _show_result(self, sentence: str, role: str) -> None:
        self.outcome_label.setText(sentence)
        self.outcome_label.setStyleSheet(f"color: {getattr(theme.palette(), role).name()};")
        self.outcome_label.show()

    def _show_exported(self) -> None:
        if self._exported is not None:
            open_path(self._exported)

    def closeEvent(self, event: QCloseEvent) -> None:
        if self._task is not None and self._is_running:
            # Closing deletes the process object, which kills the process. So terminate it, let it clean up, and close then.
            self._task.done.connect(self.close)
            self._task.cancel()
            event.ignore()
        else:
            super().closeEvent(event)
