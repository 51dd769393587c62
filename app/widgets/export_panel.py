"""A dialog that exports a run's model, shows how far that is, and what was found when the model was loaded back.

It builds the command line and reads the JSON lines that the verb prints; the process is started by a factory that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import (
    QDialog,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QProgressBar,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.controls import CheckBox, ComboBox, ElidedLabel
from app.widgets.basic.dialogs import first_folder, open_folder, open_link, open_path
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import set_shown
from app.widgets.basic.number_format import figure
from app.widgets.upload_dialog import (
    LogIn,
    MakeTask,
    UploadDialog,
    UploadPreview,
    VerbTask,
    is_held_open,
    json_object,
    without_setting,
)
from backend.config.config import SETTINGS
from backend.config.other_programs.into_trl import LeftOut, into_trl
from backend.export import export_choices
from backend.export.exports import FORMATS, TARGETS
from backend.runs.run_folder import RunFolder
from backend.utils.command import backend_command
from backend.utils.errors import UserError
from backend.utils.files import exists
from backend.utils.places import lm_studio_models

# What becomes of a run's settings in an export for TRL: those that are not carried over, and those that the folder's
# own files carry.

_HEIGHT = 190
_WITHOUT = "Nothing is left out: every setting of this run has its counterpart."


class SettingsAccount(QScrollArea):
    """A list of settings with a clause each, of a fixed height.

    Attributes:
        text – the label that holds it.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, widgetResizable=True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFixedHeight(theme.scaled(_HEIGHT))
        self.setAccessibleName("Settings that are not carried over")
        self.text = label(wrap=True, align=Qt.AlignmentFlag.AlignTop, selectable=True)
        self.text.setTextFormat(Qt.TextFormat.RichText)  # `_section` escapes what it shows
        self.setWidget(self.text)

    def show_account(self, left_out: Sequence[LeftOut], by_files: Mapping[str, str]) -> None:
        """`by_files`: setting → how a file of the folder carries it."""
        muted = theme.palette().muted.name()
        rows = [(f"{_called(left.setting)}: {left.shown}", left.instead) for left in left_out]
        parts = [_section("Not carried over, and what stands in", rows, muted) if rows else f"<p>{_WITHOUT}</p>"]
        if by_files:
            parts.append(
                _section(
                    "Carried by the folder's own files", [(_called(key), how) for key, how in by_files.items()], muted
                )
            )
        self.text.setText("".join(parts))


def _called(setting: str) -> str:
    return SETTINGS[setting].label


def _section(title: str, rows: Sequence[tuple[str, str]], muted: str) -> str:
    lines = [f"{escape(setting)}<br><span style='color: {muted}'>{escape(clause)}</span>" for setting, clause in rows]
    return f"<p><b>{escape(title)}</b></p><p>{'</p><p>'.join(lines)}</p>"


# ── export choices ───────────────────────────────────────────────────────────────────────────────────────────────────

# The form of an export: which weights of a run, in which format, to which target, under which name.

HELD_OUT_PROMPTS = 32
"""How many prompts rewards are compared on: enough to see a model that lost what it learned, in seconds for a small one."""


class ExportChoices(QWidget):
    """The fields.

    Attributes:
        obstacle – why the present choices cannot be exported, in a sentence; "" where they can.

    Signals:
        changed – a choice was made, or `obstacle` has changed.
    """

    changed = Signal()

    def __init__(self, run: RunFolder, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.run = run
        self.obstacle = ""
        self._build()
        self._lay_out()
        self._choose_target()

    def _build(self) -> None:
        self.weights, self.format, self.target = ComboBox(), ComboBox(), ComboBox()
        for choice in export_choices.weights_choices(self.run):
            self.weights.addItem(choice.label, choice.key)
        for key, row in FORMATS.items():
            if row.kind != "adapter" or export_choices.has_adapter(self.run):
                self.format.addItem(row.label, key)
        for key, row in TARGETS.items():
            self.target.addItem(row.label, key)
        self.format_line = label(role="caption", wrap=True)
        # Room for two lines from the start: the dialog does not jump when another format is chosen.
        self.format_line.setMinimumHeight(2 * self.format_line.fontMetrics().lineSpacing())
        self.format_line.setAlignment(Qt.AlignmentFlag.AlignTop | Qt.AlignmentFlag.AlignLeft)
        self.folder = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self.choose = button("Choose…", self._choose_folder)
        self.name = QLineEdit(self.run.name)
        self.repo = QLineEdit()
        self.repo.setPlaceholderText(f"{self.run.name}, under your own name; or owner/name")
        self.public = CheckBox("Public: everybody can see it")
        self.held_out = CheckBox(f"Compare rewards on {HELD_OUT_PROMPTS} held-out prompts")
        self.held_out.setToolTip(
            "Samples them from the trained and from the exported model, with the same random numbers."
        )
        self._can_compare = export_choices.has_held_out_prompts(self.run)
        self.held_out.setChecked(self._can_compare)
        self.overwrite = CheckBox("")
        self.account = SettingsAccount()
        self._unreadable = ""
        self.replace = CheckBox("Replace what the repository has")
        self.target.currentIndexChanged.connect(self._choose_target)
        for box in (self.weights, self.format):
            box.currentIndexChanged.connect(self._show_choice)
        self.name.textChanged.connect(self._show_choice)
        self.repo.textChanged.connect(self._show_choice)
        self.overwrite.toggled.connect(self._show_choice)

    def _lay_out(self) -> None:
        place = QHBoxLayout()
        place.addWidget(self.folder, 1)
        place.addWidget(self.choose)
        self._captions: dict[str, QWidget] = {}
        form = QGridLayout(self)
        form.setContentsMargins(0, 0, 0, 0)
        form.setHorizontalSpacing(2 * theme.SPACE)
        form.setVerticalSpacing(theme.SPACE)
        form.setColumnStretch(1, 1)
        rows = (
            *(("Weights", self.weights), ("Format", self.format), ("", self.format_line), ("To", self.target)),
            *(("", place), ("Name", self.name), ("Repository", self.repo), ("", self.public), ("", self.replace)),
            *(("", self.overwrite), ("", self.held_out), ("", self.account)),
        )
        for row, (text, field) in enumerate(rows):
            if text:
                caption = label(text, role="muted", align=Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
                form.addWidget(caption, row, 0)
                self._captions[text] = caption
            if isinstance(field, QWidget):
                form.addWidget(field, row, 1)
                field.setAccessibleName(text or field.accessibleName())
            else:
                form.addLayout(field, row, 1)

    # ── choices ─────────────────────────────────────────────────────────────────────────────────

    def arguments(self) -> list[str]:
        """Arguments of the verb `export` for the present choices."""
        target, format_ = self.target.currentData(), self.format.currentData()
        arguments = [str(self.run.path), "--to", target, *self._name_arguments()]
        if not self.takes_settings:
            arguments += ["--format", format_]
            arguments += ["--checkpoint", self.weights.currentData()] if self.weights.currentData() else []
        if TARGETS[target].asks_for_folder:
            arguments += ["--folder", str(self._folder)]
        if self.compares_rewards:
            arguments += ["--held-out", str(HELD_OUT_PROMPTS)]
        may_replace = self.overwrite.isChecked() and not self.overwrite.isHidden()
        return [*arguments, *(["--overwrite"] if may_replace else [])]

    @property
    def compares_rewards(self) -> bool:
        """Whether the reward functions are run, on completions of held-out prompts."""
        has_model = FORMATS[self.format.currentData()].kind == "model" and not self.takes_settings
        return self.held_out.isChecked() and has_model and not self.is_upload

    @property
    def is_upload(self) -> bool:
        """Whether it goes to Hugging Face, where a preview comes first."""
        return self.target.currentData() == "hub"

    @property
    def takes_settings(self) -> bool:
        """Whether what is exported are settings, for a program that trains with them, and no weights."""
        return TARGETS[self.target.currentData()].takes_settings

    def _name_arguments(self) -> list[str]:
        if not self.is_upload:
            return ["--name", self.name.text().strip()]
        repo = ["--repo", self.repo.text().strip()] if self.repo.text().strip() else []
        flags = (("--public", self.public), ("--overwrite", self.replace))
        return [*repo, *(flag for flag, box in flags if box.isChecked())]

    def target_folder(self) -> Path:
        return export_choices.target_folder(self.target.currentData(), self.name.text().strip(), self._folder)

    def refresh(self) -> None:
        """Look at the disk again, after an export."""
        self.overwrite.setChecked(False)
        self._show_choice()

    def _choose_target(self) -> None:
        target = TARGETS[self.target.currentData()]
        for widget in (self.repo, self.public, self.replace, self._captions["Repository"]):
            widget.setVisible(self.is_upload)
        for widget in (self.name, self.folder, self._captions["Name"]):
            widget.setVisible(not self.is_upload)
        about_weights = (
            self.weights,
            self.format,
            self.format_line,
            self._captions["Weights"],
            self._captions["Format"],
        )
        for widget in about_weights:
            widget.setVisible(not self.takes_settings)
        # An upload's card has the evaluation of the whole split, where one was made.
        self.held_out.setVisible(self._can_compare and not self.is_upload and not self.takes_settings)
        self.overwrite.setText(f"Replace the {'folder' if self.takes_settings else 'model'} of that name")
        self.account.setVisible(self.takes_settings)
        if self.takes_settings:
            self._show_account()
        self.choose.setVisible(target.asks_for_folder)
        # What goes into another program's store or to the Hub is prepared in the run's folder.
        home = self.run.path if target.store or self.is_upload else lm_studio_models()
        self._set_folder(first_folder("export") if target.asks_for_folder else home)
        if target.store:
            self.folder.setText(target.store)
            self.folder.setToolTip("")

    def _show_account(self) -> None:
        """What becomes of the settings; why they cannot be read."""
        self._unreadable = ""
        try:
            settings = into_trl(export_choices.settings_of(self.run))
        except UserError as mistake:
            self._unreadable = mistake.faults[0].sentence
        else:
            self.account.show_account(settings.left_out, settings.by_files)

    def _choose_folder(self) -> None:
        path = open_folder(
            self, "export", f"Folder to put the {'folder for TRL' if self.takes_settings else 'model'} into"
        )
        if path is not None:
            self._set_folder(path)

    def _set_folder(self, folder: Path) -> None:
        self._folder = folder
        self.folder.setText(from_home(str(folder)))
        self.folder.setToolTip(plain_tip(str(folder)))
        self._show_choice()

    def _is_taken(self) -> bool:
        is_folder = not (TARGETS[self.target.currentData()].store or self.is_upload)
        return is_folder and bool(self.name.text().strip()) and exists(self.target_folder())

    def _show_choice(self) -> None:
        """Show what the present choices amount to."""
        format_, is_taken = FORMATS[self.format.currentData()], self._is_taken()
        size = export_choices.export_size(self.run, format_, self.weights.currentData() or "")
        free = export_choices.free_bytes(self._folder)
        about = "" if size is None else f" About {figure(size / 1e9, 'GB')}."
        self.format_line.setText(format_.sentence + about)
        self.held_out.setEnabled(format_.kind == "model")
        # What a program keeps by itself is only known once it is asked.
        set_shown(self.overwrite, is_taken or bool(TARGETS[self.target.currentData()].store))
        what = "folder" if self.takes_settings else "model"
        if self.takes_settings and self._unreadable:
            self.obstacle = self._unreadable
        elif not self.takes_settings and not self.weights.count():
            self.obstacle = "This run has saved no weights yet."
        elif not self.takes_settings and format_.kind not in TARGETS[self.target.currentData()].kinds:
            self.obstacle = TARGETS[self.target.currentData()].refusal
        elif not self.is_upload and not self.name.text().strip():
            self.obstacle = f"Give the {what} a name."
        elif is_taken and not self.overwrite.isChecked():
            self.obstacle = f"There is a {what} of that name already."
        elif not self.takes_settings and size is not None and free is not None and size > free:
            self.obstacle = f"Its disk has only {figure(free / 1e9, 'GB')} free."
        else:
            self.obstacle = ""
        self.changed.emit()


def from_home(path: str) -> str:
    """A path as people write it: what lies in their home folder begins with ~."""
    home = f"{Path.home()}/"
    return f"~/{path.removeprefix(home)}" if path.startswith(home) else path


# ── export panel ─────────────────────────────────────────────────────────────────────────────────────────────────────

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
