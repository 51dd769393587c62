"""A dialog that exports a run's model, shows how far that is, and what was found when the model was loaded back.

It builds the command line and reads the JSON lines that the verb prints; the process is started by a factory that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QDialog, QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.layout import set_shown
from app.widgets.basic.number_format import figure
from app.widgets.basic.open_in_desktop import open_link, open_path
from app.widgets.runs.export_choices import ExportChoices, from_home
from app.widgets.runs.upload_dialog import LogIn, UploadDialog, UploadPreview
from app.widgets.runs.verb_task import MakeTask, VerbTask, is_held_open, json_object, without_setting
from backend.spec.command import backend_command
from backend.spec.exports import TARGETS
from backend.spec.run_folder import RunFolder

LM_STUDIO_LINK = "lmstudio://"
"""Brings LM Studio to the front, where the model is under My Models. Its documented links (open_from_hf, add_mcp) lead to Hugging Face
and to tool servers; none names a model on this disk."""

READ_ME = "Its README.md says how to run it on one machine, on several GPUs, and as a job of Hugging Face."
_WIDTH = 560

DECLINED_COMPARING = "The reward file was not allowed to run; export without comparing rewards."
DECLINED_CARRYING = (
    "The reward file was not allowed to run, and the folder would carry it to another machine, where it does."
)


class ExportPanel(QDialog):
    """Not modal: the window stays usable during an export. Closing the dialog cancels the export.

    Attributes:
        run – the run folder to export.
        choices – the form.
        outcome_label – what is in the way, or how the export ended, in sentences.
    """

    def __init__(
        self, run: RunFolder, make_task: MakeTask, parent: QWidget | None = None, log_in: LogIn | None = None,
        may_run_code: Callable[[RunFolder], bool] = lambda _run: True,
    ) -> None:  # fmt: skip
        """`may_run_code`: whether the run's reward files may be run, which is how rewards are compared."""
        super().__init__(parent)
        self.run = run
        self._make_task, self._log_in, self._may_run_code = make_task, log_in, may_run_code
        self._task: VerbTask | None = None
        self._result: dict[str, Any] | None = None
        self.setWindowTitle(f"Export {run.name}")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setMinimumWidth(theme.scaled(_WIDTH))
        self._build()
        self._lay_out()
        self.choices.changed.connect(self._show_ready)
        self._show_ready()

    def _build(self) -> None:
        self.choices = ExportChoices(self.run)
        self.progress_label = label(role="muted", wrap=True)
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName("Progress of the export")
        self.outcome_label = label(wrap=True, selectable=True)
        self.details_label = label(role="muted", wrap=True, selectable=True)
        for widget in (self.progress_label, self.progress, self.outcome_label, self.details_label):
            widget.hide()
        self.close_button = button("Close", self.close)
        self.reveal = button("Show in folder", self._show_exported)
        self.open_app = button("Open in LM Studio", self._open_lm_studio, tip="The model is under My Models there")
        self.reveal.hide()
        self.open_app.hide()
        self.start = button("Export", self.start_export, primary=True)
        self.start.setDefault(True)

    def _lay_out(self) -> None:
        buttons = QHBoxLayout()
        buttons.addStretch(1)
        for widget in (self.close_button, self.reveal, self.open_app, self.start):
            buttons.addWidget(widget)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(theme.SPACE * 2)
        column.addWidget(self.choices)
        for widget in (self.progress_label, self.progress, self.outcome_label, self.details_label):
            column.addWidget(widget)
        column.addLayout(buttons)

    def open_beside(self) -> None:
        """Show the dialog without blocking the window, with the name selected for typing."""
        self.show()
        self.raise_()
        self.choices.name.setFocus()
        self.choices.name.selectAll()

    def command(self) -> list[str]:
        """The command line for the present choices."""
        preview = ["--preview"] if self.choices.is_upload else []
        return backend_command("export", *self.choices.arguments(), *preview, "--json")

    def _show_ready(self) -> None:
        """Enable Export, or say what is in the way. An ended export's result stays until a choice is made."""
        if self._is_running:
            return
        self.start.setEnabled(not self.choices.obstacle)
        self.start.setText("Preview…" if self.choices.is_upload else "Export")
        for widget in (self.details_label, self.reveal, self.open_app):
            set_shown(widget, False)
        self._say(self.choices.obstacle, "warning")

    # ── the export ──────────────────────────────────────────────────────────────────────────────

    @property
    def _is_running(self) -> bool:
        return self._task is not None and self._task.is_running

    def start_export(self) -> None:
        """Start the command; the Close button becomes Cancel."""
        for widget in (self.outcome_label, self.details_label, self.reveal, self.open_app):
            widget.hide()
        self._result = None
        uses_code = self.choices.compares_rewards or self.choices.takes_settings
        if uses_code and not self._may_run_code(self.run):
            self._say(DECLINED_CARRYING if self.choices.takes_settings else DECLINED_COMPARING, "warning")
            return
        self._task = self._make_task(self.command(), self)
        self._task.line.connect(self._read)
        self._task.done.connect(self._end)
        self.choices.setEnabled(False)
        self._show_progress("Starting.", None)
        self._task.start()
        self.close_button.setText("Cancel")
        self.start.setEnabled(False)

    def _read(self, line: str) -> None:
        """A line of the verb's output: progress, or the result."""
        content = json_object(line)
        if "progress" in content:
            self._show_progress(content["progress"], content.get("done"))
        elif "path" in content or "preview" in content:
            self._result = content

    def _show_progress(self, sentence: str, done: float | None) -> None:
        self.progress_label.setText(sentence)
        self.progress.setRange(0, 0 if done is None else 1000)  # 0 to 0: busy, without an end in sight
        if done is not None:
            self.progress.setValue(round(1000 * done))
        set_shown(self.progress_label, True)
        set_shown(self.progress, True)

    def _end(self, outcome: Any) -> None:
        self.close_button.setText("Close")
        self.progress_label.hide()
        self.progress.hide()
        self.choices.setEnabled(True)
        if outcome.ok and self._result is not None and "preview" in self._result:
            self._open_upload(UploadPreview.read(self._result["preview"]))
        elif outcome.ok and self._result is not None:
            self.choices.refresh()
            self._show_result(self._result)
        else:
            self._say(without_setting(outcome.sentence), "bad")
            self.start.setEnabled(not self.choices.obstacle)

    def _open_upload(self, preview: UploadPreview) -> None:
        """Go on in the dialog that uploads; this one closes."""
        self.choices.repo.setText(preview.repo)  # with its owner, where only the preview knew it
        command = backend_command("export", *self.choices.arguments(), "--json")
        assert self._log_in is not None
        UploadDialog(preview, command, self._make_task, self._log_in, self.parentWidget()).show()
        self.close()

    def _show_result(self, result: dict[str, Any]) -> None:
        size = figure(result["bytes"] / 1e9, "GB")
        target = TARGETS[self.choices.target.currentData()]
        what = "folder for TRL" if target.takes_settings else "model"
        self._say(f"The {what} is {'in' if target.store else 'at'} {from_home(result['place'])} ({size}).", "good")
        # What an export for TRL leaves out stands above already.
        self.details_label.setText(READ_ME if target.takes_settings else "\n".join(result["sentences"]))
        self.details_label.show()
        self.reveal.setVisible(not target.store)
        self.open_app.setVisible(self.choices.target.currentData() == "lmstudio")
        self.start.setEnabled(False)  # the name is taken now; another one enables it

    def _say(self, sentence: str, role: str) -> None:
        self.outcome_label.setText(sentence)
        self.outcome_label.setStyleSheet(f"color: {getattr(theme.palette(), role).name()};")
        set_shown(self.outcome_label, bool(sentence))

    def _show_exported(self) -> None:
        if self._result is not None:
            open_path(Path(self._result["path"]))

    def _open_lm_studio(self) -> None:
        if not open_link(LM_STUDIO_LINK):
            self._say("LM Studio did not answer to its link; start it, and look under My Models.", "warning")

    def closeEvent(self, event: QCloseEvent) -> None:
        if not is_held_open(self, self._task, event):
            super().closeEvent(event)
