"""The File menu: open, save and export configs, apply presets, and ask before edits are lost."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QApplication

from app.state.messages import problems_to
from app.state.presets import presets
from app.state.processes import ProcessOutcome, VerbProcess
from app.state.run_starter import START
from app.state.session import FORM
from app.widgets.basic.dialogs import SAVING, ask, open_file, open_folder, save_file
from app.widgets.job_dialog import JobDialog
from app.widgets.menu_dialogs import PresetPanel
from backend.config.config import Config, dump
from backend.config.other_programs.files import mlx_lm_lora_yaml
from backend.runs.run_folder import RunFolder
from backend.utils.command import backend_command
from backend.utils.disk import save_as

if TYPE_CHECKING:
    from app.window import Window

YAML = "Config (*.yaml)"


class ConfigFiles(QObject):
    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self._window, self.session = window, window.session

    def new(self) -> None:
        if self._may_replace_form():
            self.session.messages.withdraw(FORM, START)  # what they say is about the form that was there
            self.session.draft.reset()
            self._window.show_page("train")

    def open(self) -> None:
        types = "Config (*.yaml *.yml)"
        if path := open_file(self._window, "config", "Open config", types, self.session.draft.path):
            self.open_path(path)

    def open_path(self, path: Path) -> None:
        if self._may_replace_form():
            self.session.load_config(path)

    def edit_waiting(self, run: RunFolder) -> None:
        """Load the settings of a waiting run into the form, which then keeps them for it."""
        if self._may_replace_form() and self.session.load_settings(run):
            self.session.queue.edit(run)

    def show_presets(self) -> None:
        with problems_to(self.session.messages.say):
            panel = PresetPanel(presets(), self.session.draft.values(), self._window)
            panel.taken.connect(self.session.apply_preset)
            panel.open()

    def save(self) -> bool:
        """False if it was cancelled or failed."""
        path = self.session.draft.path
        return self._save_to(path) if path is not None else self.save_as()

    def save_as(self) -> bool:
        path = self.choose_save_path()
        return self._save_to(path) if path is not None else False

    def _save_to(self, path: Path) -> bool:
        with problems_to(self.session.messages.say):
            self.session.draft.save(path)
            self.session.prefs.remember(path)
            self.session.messages.say(f"Saved {path.name}.")
            return True
        return False

    def copy_command(self) -> None:
        QApplication.clipboard().setText(self.session.draft.command_text())
        self.session.messages.say("Copied the command that trains what the form says.")

    def export_for_mlx_lm_lora(self) -> None:
        with problems_to(self.session.messages.say):
            text, missing = mlx_lm_lora_yaml(self.session.draft.config())
            if path := self.choose_export_path():
                save_as(path, text)
                left = f" Left out, as mlx-lm-lora has no such setting: {', '.join(missing)}." if missing else ""
                self.session.messages.say(f"Wrote {path.name}.{left}")

    def export_for_trl(self) -> None:
        with problems_to(self.session.messages.say):
            text = dump(self.session.draft.config())
            if (parent := self.choose_trl_folder()) is None:
                return
            own = self.session.draft.path
            file = Path(tempfile.mkdtemp(prefix="for-trl-")) / f"{own.stem if own else 'settings'}.yaml"
            file.write_text(text, encoding="utf-8")
            command = backend_command("export", str(file), "--to", "trl", "--folder", str(parent), "--json")
            task = VerbProcess(command, self)
            task.done.connect(lambda outcome: self.show_trl_outcome(outcome, file))
            task.start()

    def train_on_hugging_face(self, settings: Config | None = None) -> None:
        """Ask for the machine of a job that trains these settings, or the form's, and submit it."""
        session = self.session
        if settings is None and not session.starter.check_form():
            return
        with problems_to(session.messages.say):
            settings = settings or session.draft.config()
            dialog = JobDialog(settings, session.service, self._window)
            dialog.submitted.connect(partial(session.starter.start_job, settings))
            dialog.open()

    def show_trl_outcome(self, outcome: ProcessOutcome, file: Path) -> None:
        shutil.rmtree(file.parent, ignore_errors=True)
        text = outcome.sentence
        if outcome.ok:
            exported = json.loads(outcome.output.splitlines()[-1])
            left = ", ".join(each["setting"] for each in exported["left_out"])
            text = f"Wrote {exported['path']}."
            text += f" Not carried over: {left}; its README.md says what stands in." if left else ""
        self.session.messages.say(text)

    def _may_replace_form(self) -> bool:
        if not self.session.draft.dirty:
            return True
        answer = self.ask_about_edits()
        return self.save() if answer == "save" else answer == "discard"

    # Questions: one method each, which tests replace by an answer

    def choose_save_path(self) -> Path | None:
        path = self.session.draft.path
        return save_file(self._window, "config", "Save config", path.name if path else "config.yaml", YAML, path)

    def choose_export_path(self) -> Path | None:
        return save_file(self._window, "config", "Export for mlx-lm-lora", "mlx-lm-lora.yaml", YAML)

    def choose_trl_folder(self) -> Path | None:
        return open_folder(self._window, "export", "Folder to put the folder for TRL into")

    def ask_about_edits(self) -> str:
        return ask(self._window, "Save the changes to this config?", "They are lost otherwise.", SAVING)
