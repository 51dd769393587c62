"""The dialog that exports a run's model: choices, progress, and the result of loading it back."""

from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import QFrame, QLineEdit, QScrollArea, QWidget

from app import theme
from app.state.processes import ProcessOutcome, Service
from app.widgets.basic.controls import CheckBox, ComboBox, ElidedLabel
from app.widgets.basic.dialogs import first_folder, open_folder, open_link, open_path
from app.widgets.basic.labels import button, from_home, label, plain_tip, show_text
from app.widgets.basic.layout import clear_layout, column, configure, connect, grid, row, set_tab_order, show_all
from app.widgets.basic.number_format import figure
from app.widgets.hub_dialogs import UploadDialog, VerbDialog
from app.widgets.run_header import Switcher, run_choices
from backend.config.config import SETTINGS
from backend.config.other_programs.into_trl import into_trl
from backend.export import exports
from backend.export.exports import FORMATS, PUBLISHER, TARGETS
from backend.runs.archive import raw_settings
from backend.runs.events import event_ends
from backend.runs.run_folder import RunFolder
from backend.runs.run_names import name_of
from backend.utils.command import backend_command
from backend.utils.disk import room_on
from backend.utils.errors import UserError
from backend.utils.files import exists
from backend.utils.places import lm_studio_models

HELD_OUT_PROMPTS = 32  # prompts on which rewards are compared: enough to see a model that lost what it learned
LM_STUDIO_LINK = "lmstudio://"
"""Brings LM Studio to the front, where the model is under My Models: no documented link names a model on this disk."""
README_HINT = "Its README.md says how to run it on one machine, on several GPUs, and as a job of Hugging Face."
DECLINED_COMPARING = "The code was not allowed to run. Export without comparing rewards."
DECLINED_CARRYING = "The code was not allowed to run, and the folder would take it to another machine."


class ExportChoices(QWidget):
    changed = Signal()

    def __init__(self, run: RunFolder) -> None:
        super().__init__()
        self.run = run
        self.obstacle = self.unreadable = ""
        self._folder = run.path
        evaluations = (event for event in event_ends(run.events) if event["kind"] == "eval")
        self._can_compare = any("reward" in (event.get("metrics") or {}) for event in evaluations)
        has_adapter = raw_settings(run).get("train_type") != "full"
        formats = {key: about.label for key, about in FORMATS.items() if about.kind != "adapter" or has_adapter}
        self.weights = ComboBox(items=exports.weights_choices(run))
        self.format = ComboBox(items=formats)
        self.target = ComboBox(items={key: about.label for key, about in TARGETS.items()})
        top_left = Qt.AlignmentFlag.AlignTop | Qt.AlignmentFlag.AlignLeft
        self.format_line = label(role="caption", wrap=True, align=top_left)
        # Room for two lines from the start: the dialog does not jump when another format is chosen.
        self.format_line.setMinimumHeight(2 * self.format_line.fontMetrics().lineSpacing())
        self.folder = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self.choose = button("Choose…", self._choose_folder)
        self.name = QLineEdit(run.name)
        self.repo = QLineEdit(placeholderText=run.name)
        self.repo.setToolTip("Under your own name, unless you type owner/name")
        self.public = CheckBox("Public: everybody can see it")
        self.replace = CheckBox("Replace what the repository has")
        self.overwrite = CheckBox("")
        self.held_out = CheckBox(
            f"Compare rewards on {HELD_OUT_PROMPTS} held-out prompts",
            tip="Samples from the trained and from the exported model, with the same random numbers.",
            checked=self._can_compare,
        )
        rich = Qt.TextFormat.RichText
        self.account = label(wrap=True, align=Qt.AlignmentFlag.AlignTop, selectable=True, textFormat=rich)
        self._account_area = configure(
            QScrollArea(widgetResizable=True),
            name="Settings that are not carried over",
            frameShape=QFrame.Shape.NoFrame,
            horizontalScrollBarPolicy=Qt.ScrollBarPolicy.ScrollBarAlwaysOff,
            fixedHeight=theme.scaled(190),
        )
        self._account_area.setWidget(self.account)

        right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        fields = {"Weights": self.weights, "Format": self.format, "To": self.target}
        fields |= {"Name": self.name, "Repository": self.repo}
        captions = self._captions = {text: label(text, role="muted", align=right) for text in fields}
        for text, field in fields.items():
            field.setAccessibleName(text)
        lines = (self.public, self.replace, self.overwrite, self.held_out, self._account_area)
        rows = (
            *((captions["Weights"], self.weights), (captions["Format"], self.format), (None, self.format_line)),
            *((captions["To"], self.target), (None, row((self.folder, 1), self.choose))),
            *((captions["Name"], self.name), (captions["Repository"], self.repo)),
            *((None, line) for line in lines),
        )
        grid(rows, into=self, stretch=1)
        self.target.currentIndexChanged.connect(self._choose_target)
        menus = (self.weights.currentIndexChanged, self.format.currentIndexChanged)
        connect(self.show_choice, *menus, self.overwrite.toggled, self.name.textChanged, self.repo.textChanged)
        self._choose_target()

    def arguments(self) -> list[str]:
        target = self.target.currentData()
        arguments = [str(self.run.path), "--to", target]
        if self.is_upload:
            repo = self.repo.text().strip()
            arguments += ["--repo", repo] if repo else []
            flags = (("--public", self.public), ("--overwrite", self.replace))
            arguments += [flag for flag, box in flags if box.isChecked()]
        else:
            arguments += ["--name", self.name.text().strip()]
        if not self.takes_settings:
            arguments += ["--format", self.format.currentData()]
            arguments += ["--checkpoint", self.weights.currentData()] if self.weights.currentData() else []
        if TARGETS[target].asks_for_folder:
            arguments += ["--folder", str(self._folder)]
        if self.compares_rewards:
            arguments += ["--held-out", str(HELD_OUT_PROMPTS)]
        may_replace = self.overwrite.isChecked() and not self.overwrite.isHidden()
        return [*arguments, *(["--overwrite"] if may_replace else [])]

    @property
    def compares_rewards(self) -> bool:
        has_model = FORMATS[self.format.currentData()].kind == "model" and not self.takes_settings
        return self.held_out.isChecked() and has_model and not self.is_upload

    @property
    def is_upload(self) -> bool:
        return self.target.currentData() == "hub"

    @property
    def takes_settings(self) -> bool:
        return TARGETS[self.target.currentData()].takes_settings

    def _choose_target(self) -> None:
        target = TARGETS[self.target.currentData()]
        captions, upload, weights = self._captions, self.is_upload, not self.takes_settings
        show_all(upload, self.repo, self.public, self.replace, captions["Repository"])
        show_all(not upload, self.name, self.folder, captions["Name"])
        show_all(weights, self.weights, self.format, self.format_line, captions["Weights"], captions["Format"])
        # An upload's card has the evaluation of the whole split, where one was made.
        self.held_out.setVisible(self._can_compare and not upload and weights)
        self.overwrite.setText(f"Replace the {'model' if weights else 'folder'} of that name")
        self._account_area.setVisible(not weights)
        if not weights:
            self._show_account()
        self.choose.setVisible(target.asks_for_folder)
        # What goes into another program's store or to the Hub is prepared in the run's folder.
        home = self.run.path if target.store or upload else lm_studio_models()
        self.set_folder(first_folder("export") if target.asks_for_folder else home)
        if target.store:
            self.folder.setText(target.store)
            self.folder.setToolTip("")

    def _show_account(self) -> None:
        self.unreadable = ""
        try:
            settings = into_trl(exports.settings_of(self.run))
        except UserError as error:
            self.unreadable = error.faults[0].sentence
            return
        left_out = [(f"{SETTINGS[left.setting].label}: {left.shown}", left.instead) for left in settings.left_out]
        by_files = [(SETTINGS[key].label, how) for key, how in settings.by_files.items()]
        text = "" if left_out else "<p>Nothing is left out: TRL has every setting of this run.</p>"
        muted = theme.palette().muted.name()
        for title, rows in (
            ("Not carried over, and what stands in", left_out),
            ("Carried by the folder's own files", by_files),
        ):
            text += f"<p><b>{escape(title)}</b></p>" if rows else ""
            for name, how in rows:
                text += f"<p>{escape(name)}<br><span style='color: {muted}'>{escape(how)}</span></p>"
        self.account.setText(text)

    def _choose_folder(self) -> None:
        what = "folder for TRL" if self.takes_settings else "model"
        if path := open_folder(self, "export", f"Folder to put the {what} into"):
            self.set_folder(path)

    def set_folder(self, folder: Path) -> None:
        self._folder = folder
        self.folder.setText(from_home(str(folder)))
        self.folder.setToolTip(plain_tip(str(folder)))
        self.show_choice()

    def show_choice(self) -> None:
        target, about = TARGETS[self.target.currentData()], FORMATS[self.format.currentData()]
        name, weights = self.name.text().strip(), not self.takes_settings
        size = exports.export_size(self.run, about, self.weights.currentData() or "")
        self.format_line.setText(about.sentence + ("" if size is None else f" About {figure(size / 1e9, 'GB')}."))
        self.held_out.setEnabled(about.kind == "model")
        is_folder = not (target.store or self.is_upload) and bool(name)
        parent = lm_studio_models() / PUBLISHER if target.key == "lmstudio" else self._folder
        is_taken = is_folder and exists(parent / name)
        # What a program keeps by itself is only known once it is asked.
        show_all(is_taken or target.store, self.overwrite)
        what, room = "model" if weights else "folder", room_on(self._folder)
        obstacles = {
            self.unreadable: not weights,
            "This run has saved no weights yet.": weights and not self.weights.count(),
            target.refusal: weights and about.kind not in target.kinds,
            f"Give the {what} a name.": not self.is_upload and not name,
            f"A {what} of that name exists.": is_taken and not self.overwrite.isChecked(),
        }
        if weights and size is not None and room is not None:
            obstacles[f"The disk has only {figure(room / 1e9, 'GB')} free."] = size > room
        self.obstacle = next((sentence for sentence, holds in obstacles.items() if holds and sentence), "")
        self.changed.emit()


class ExportPanel(VerbDialog):
    """Closing it cancels the export."""

    job_requested = Signal(object)  # settings of a run to train on Hugging Face

    def __init__(
        self,
        run: RunFolder,
        service: Service,
        parent: QWidget | None = None,
        may_run_code: Callable[[RunFolder], bool] = lambda _run: True,
    ) -> None:
        """`may_run_code` asks if the run's reward files may be run, for comparing rewards."""
        super().__init__(f"Export {name_of(run)}", "export", parent)
        self.run, self._service, self._may_run_code = run, service, may_run_code
        self._result: dict[str, Any] = {}
        self.setMinimumWidth(theme.scaled(560))
        self.switcher = Switcher(choices=partial(run_choices, trained=True), chosen=self.show_run)
        self._holder = row()
        self.progress_label = label(role="muted", wrap=True)
        self.details_label = label(role="muted", wrap=True, selectable=True)
        self.close_button = button("Close", self.close)
        self.reveal = button("Show in folder", lambda: open_path(Path(self._result["path"])))
        self.open_app = button("Open in LM Studio", self._open_lm_studio, tip="The model is under My Models there")
        self.train_there = button("Train on Hugging Face…", self._train_there)
        self.start = button("Export", self.start_export, primary=True)
        outcome = (self.progress_label, self.progress, self.outcome_label, self.details_label)
        self._of_result = (self.details_label, self.reveal, self.open_app)
        for widget in (*outcome, *self._of_result):
            widget.hide()
        self._buttons = (self.close_button, self.reveal, self.open_app, self.train_there, self.start)
        parts = (row(self.switcher, None), self._holder, *outcome, None, row(None, *self._buttons))
        column(*parts, into=self, spacing=2 * theme.SPACE, margins=2 * theme.SPACE)
        self.show_run(str(run.path))

    def show_run(self, path: str) -> None:
        clear_layout(self._holder)
        self.run = RunFolder(Path(path))
        self.setWindowTitle(f"Export {name_of(self.run)}")
        self.switcher.show_run(self.run)
        self.choices = ExportChoices(self.run)
        self._holder.addWidget(self.choices)
        set_tab_order(self.choices.held_out, *self._buttons)
        self.choices.changed.connect(self._show_ready)
        # In a turn of its own: the form's layout asks for another height only then.
        self.choices.target.currentIndexChanged.connect(lambda: QTimer.singleShot(0, self, self._fit))
        self._show_ready()

    def _fit(self) -> None:
        """Give back the room of what the target has no use for."""
        layout = self.layout()
        assert layout is not None
        self.resize(self.width(), layout.totalHeightForWidth(self.width()))

    def open_beside(self) -> None:
        self.show()
        self.raise_()
        self.choices.name.setFocus()
        self.choices.name.selectAll()

    def command(self) -> list[str]:
        preview = ["--preview"] if self.choices.is_upload else []
        return backend_command("export", *self.choices.arguments(), *preview, "--json")

    def _show_ready(self) -> None:
        if self.is_running:
            return
        self.start.setEnabled(not self.choices.obstacle)
        self.start.setText("Preview…" if self.choices.is_upload else "Export")
        show_all(False, *self._of_result)
        show_all(self.choices.takes_settings, self.train_there)
        self.train_there.setEnabled(not self.choices.unreadable)
        self.report(self.choices.obstacle, "warning")

    def start_export(self) -> None:
        show_all(False, self.outcome_label, *self._of_result)
        self._result = {}
        uses_code = self.choices.compares_rewards or self.choices.takes_settings
        if uses_code and not self._may_run_code(self.run):
            self.report(DECLINED_CARRYING if self.choices.takes_settings else DECLINED_COMPARING, "warning")
            return
        self.choices.setEnabled(False)
        self.switcher.setEnabled(False)
        self.close_button.setText("Cancel")
        self.start.setEnabled(False)
        self.run_verb(self.command())

    def _train_there(self) -> None:
        self.job_requested.emit(exports.settings_of(self.run))
        self.close()

    def show_progress(self, sentence: str, done: float | None) -> None:
        super().show_progress(sentence, done)
        show_text(self.progress_label, sentence)

    def on_result(self, content: dict[str, Any]) -> None:
        if "path" in content or "preview" in content:
            self._result = content

    def on_end(self, outcome: ProcessOutcome) -> None:
        self.close_button.setText("Close")
        self.progress_label.hide()
        self.choices.setEnabled(True)
        self.switcher.setEnabled(True)
        QTimer.singleShot(0, self, self._fit)  # what came of it takes room
        if not outcome.ok or not self._result:
            self.report(outcome.problem, "bad")
            self.start.setEnabled(not self.choices.obstacle)
        elif "preview" in self._result:
            preview = self._result["preview"]
            self.choices.repo.setText(preview["repo"])  # with its owner, which only the preview knows
            command = backend_command("export", *self.choices.arguments(), "--json")
            UploadDialog(preview, command, self._service, self.parentWidget()).show()
            self.close()
        else:
            self.choices.overwrite.setChecked(False)
            self.choices.show_choice()  # its name is taken now
            target, result = TARGETS[self.choices.target.currentData()], self._result
            what, where = "folder for TRL" if target.takes_settings else "model", "in" if target.store else "at"
            size = figure(result["bytes"] / 1e9, "GB")
            self.report(f"The {what} is {where} {from_home(result['place'])} ({size}).", "good")
            # The settings that an export for TRL leaves out are listed in the form already.
            self.details_label.setText(README_HINT if target.takes_settings else "\n".join(result["sentences"]))
            self.details_label.show()
            self.reveal.setVisible(not target.store)
            self.open_app.setVisible(self.choices.target.currentData() == "lmstudio")
            self.start.setEnabled(False)  # another name enables it

    def _open_lm_studio(self) -> None:
        if not open_link(LM_STUDIO_LINK):
            self.report("LM Studio did not open. Start it, and look under My Models.", "warning")
