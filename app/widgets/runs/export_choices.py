"""The form of an export: which weights of a run, in which format, to which target, under which name.

It knows a run folder and the tables of `backend.spec.exports`; the command is started elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QLineEdit, QWidget

from app import theme
from app.widgets.basic.controls import CheckBox, ComboBox, ElidedLabel
from app.widgets.basic.file_dialogs import first_folder, open_folder
from app.widgets.basic.labels_and_buttons import button, label, plain_tip
from app.widgets.basic.layout import set_shown
from app.widgets.basic.number_format import figure
from app.widgets.runs.settings_account import SettingsAccount
from backend.spec import export_choices
from backend.spec.exports import FORMATS, TARGETS
from backend.spec.faults import Mistake
from backend.spec.other_programs.into_trl.exported import into_trl
from backend.spec.places import lm_studio_models
from backend.spec.run_folder import RunFolder

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
        except Mistake as mistake:
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
        return is_folder and bool(self.name.text().strip()) and self.target_folder().exists()

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
