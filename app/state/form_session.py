"""The form's part of the session: what fills the form as a whole, and the messages about it.

The base class of `app.state.service_session.ServiceSession`, which adds the services, and through it of the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, Signal

from app.state.draft import Draft
from app.state.messages import Messages, Offer
from app.state.prefs import Prefs
from app.state.presets import Preset
from backend.runs.run_folder import RunFolder
from backend.runs.steering import changed_values, read_changes
from backend.utils import places
from backend.utils.errors import UserError
from backend.utils.files import resolved

FORM = "form"
"""The cause of messages about what was done to the whole form."""


class FormSession(QObject):
    """The form and what can replace it: a file, a preset, a run's settings, a dataset.

    Attributes:
        prefs, draft – the app's own settings, and the form.
        messages – what the status strip says.

    Signals:
        page_requested(str) – show the page with this key.
        field_requested(str) – show and focus this setting on the Train page.
        guide_requested(str) – show this place of the guide.
        undo_requested – undo the last change of the form.
        message(str) – something has happened: one sentence for the status strip, for a while. What is true for as long as its
            cause is said with `messages.say`.
    """

    page_requested = Signal(str)
    field_requested = Signal(str)
    guide_requested = Signal(str)
    undo_requested = Signal()
    message = Signal(str)

    def __init__(self, prefs: Prefs, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.prefs = prefs
        self.draft = Draft(prefs.draft_file, self)
        self.messages = Messages(self)
        self.message.connect(self.messages.note)
        self.draft.changed.connect(self.messages.review_soon)
        self.draft.problems_changed.connect(self.messages.review_soon)
        self.draft.changed.connect(self._remember_file)
        self.draft.saved.connect(self._remember_file)

    def restore(self) -> None:
        """Restore the form of the last session, or load the demo on the first launch."""
        try:
            if self.prefs.draft_file.exists():
                self.draft.restore(self.prefs.config_file)
            else:
                self.draft.load(places.demo_config(), as_preset=True)
                self.draft.history_cleared.emit()
        except UserError as mistake:
            self.messages.say(
                f"{mistake.faults[0].sentence} The form shows the defaults.", FORM, self.while_form_stays()
            )

    def load_config(self, path: Path) -> None:
        """Open a YAML file in the form. If it cannot be read, the form stays unchanged, and a message says why."""
        path = resolved(Path(path))
        if self._load_form(path):
            self.prefs.remember(path)
            self.messages.say(f"Opened {path.name}{self._words_read()}", FORM, self.while_form_stays())

    def _words_read(self) -> str:
        """The end of the sentence that a file was opened: whose file it is, and how many words were translated and left out."""
        if (translation := self.draft.translation) is None:
            return "."
        fates = [word.fate for word in translation.words]
        counts = {"translated": fates.count("translated"), "left out": fates.count("without effect")}
        told = ", ".join(f"{count} {fate}" for fate, count in counts.items() if count)
        whose = f", a file for {translation.program.name}" if translation.program else ""
        return f"{whose}. Of its words, {told}." if told else f"{whose}."

    def apply_preset(self, preset: Preset) -> None:
        """Apply a preset to the form, and show it."""
        self.draft.apply(preset)
        self.page_requested.emit("train")
        self._say_undoable(f"{preset.title} is set.")

    def use_data(self, name: str) -> None:
        """Set the dataset to this file, folder or Hub id, and map the columns that can be guessed from it.

        A form that still holds the demo or no model also gets a model and settings to start from.
        """
        from app.state.data_choice import data_choice

        choice, before = data_choice(self.draft, name), self.draft.values()
        change = self.draft.start_from if choice.begins else self.draft.update
        change(choice.values, f"Data {choice.called}")
        self.page_requested.emit("train")
        self.field_requested.emit("data")
        if self.draft.values() != before:
            self._say_undoable(choice.sentence)

    def use_two_updates(self) -> None:
        """Set the form to two updates per rollout, so that the next run has a ratio that can be clipped."""
        self.draft.set("num_iterations", 2)
        self._say_undoable(
            "Updates per rollout is 2 in the form, for the next run; a run that has begun keeps its own."
        )

    def _say_undoable(self, sentence: str) -> None:
        """Say what was done to the form, with a link that undoes it while nothing else was changed."""
        self.messages.say(sentence, FORM, self.while_form_stays(), Offer("Undo", self.undo_requested.emit))

    def while_form_stays(self) -> Callable[[], bool]:
        """Whether the form is still the one of now."""
        values, path = self.draft.values(), self.draft.path
        return lambda: (self.draft.values(), self.draft.path) == (values, path)

    def use_path(self, key: str, path: Path) -> None:
        """Put a file or folder into a setting, and show it there."""
        if key == "reward_functions_file":
            self.draft.use_reward_file(str(path))
        else:
            self.draft.set(key, str(path))
        self.page_requested.emit("train")
        self.field_requested.emit(key)

    def _remember_file(self, key: str = "") -> None:
        """Remember the file behind the form; only a change of all settings (`key` empty) can have replaced it."""
        if not key and self.prefs.config_file != self.draft.path:
            self.prefs.config_file = self.draft.path

    def load_settings(self, folder: RunFolder) -> bool:
        """Load a run's settings, as they were at its end, into the form; returns whether they could be read. Saving then asks for a new
        file: the run's own is a record."""
        try:
            over = changed_values(read_changes(folder))
        except UserError as mistake:
            self.messages.say(mistake.faults[0].sentence, FORM, self.while_form_stays())
            return False
        loaded = self._load_form(folder.config, as_preset=True, over=over)
        if loaded:
            when = ", as they were at its end" if over else ""
            self._say_undoable(f"These are the settings of {folder.name}{when}.")
        return loaded

    def _load_form(self, path: Path, *, as_preset: bool = False, over: Mapping[str, Any] | None = None) -> bool:
        try:
            self.draft.load(path, as_preset=as_preset, over=over)
        except UserError as mistake:
            self.messages.say(mistake.faults[0].sentence, FORM, self.while_form_stays())
            return False
        self.page_requested.emit("train")
        return True
