"""Open, edit, save and create the user's reward file on the Rewards page.

Connects the file on disk, the panel that shows it, the setting that names it and the bench that scores with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PySide6.QtCore import QFileSystemWatcher, QObject, Signal

from app.pages.rewards.reward_file_panel import RewardFilePanel
from app.state.consent import Consent
from app.state.session import Session
from app.widgets.basic.file_dialogs import open_file, save_file
from backend.rewards.catalogue.allowed_code import Rights, read_code
from backend.utils.errors import UserError
from backend.utils.files import read_text
from backend.utils.whole_file import save_as

# The user's reward file as it is edited in the window: written atomically, and watched for changes by other programs.

TEMPLATE = '''"""Reward functions: each gets all completions of a step and gives each a number, or None for no opinion."""

from backend.rewards import register_reward_function


@register_reward_function("concise", label="Concise")
def concise(completions, **kwargs):
    """1.0 for short answers, falling to 0 at 200 words."""
    return [max(0.0, 1.0 - len(text.split()) / 200) for text in completions]


@register_reward_function("mentions_answer", label="Mentions Answer")
def mentions_answer(completions, answer, **kwargs):
    """1.0 when the dataset's answer stands anywhere in the completion."""
    return [1.0 if right and right in text else 0.0 for text, right in zip(completions, answer)]
'''
"""The contents of a new file: two functions that work."""


class EditedRewardFile(QObject):
    """The file being edited.

    Attributes:
        path – the file, or None.
        text – its contents when it was last read or written.

    Signals:
        changed_elsewhere – another program wrote it.
    """

    changed_elsewhere = Signal()

    def __init__(self, consent: Consent, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.path: Path | None = None
        self.text = ""
        self._consent = consent
        self._watcher = QFileSystemWatcher(self)
        self._watcher.fileChanged.connect(lambda _path: self._check_disk())

    def open(self, path: Path | None) -> None:
        """Switch to another file, or to none. Raises UserError when it cannot be read."""
        if self._watcher.files():
            self._watcher.removePaths(self._watcher.files())
        self.path, self.text = None, ""
        if path is not None:
            self.text = read_text(path, "reward_functions_file")
            self.path = path
            self._watcher.addPath(str(path))

    @property
    def matches_disk(self) -> bool:
        """Whether the file on disk still holds `text`."""
        try:
            return self.path is not None and read_text(self.path, "reward_functions_file") == self.text
        except UserError:
            return False

    def save(self, text: str) -> None:
        """Write the file. Raises UserError."""
        assert self.path is not None
        rights = self._rights(self.path)
        save_as(self.path, text)
        self.text = text
        self._watcher.addPath(str(self.path))  # saved by rename, it is a new inode, which the watcher has not seen
        if rights is not None:
            self._consent.allow(read_code(self.path.resolve()), rights)

    def create(self, path: Path) -> None:
        """Write a new file from the template, allow it to run, as its code is ours, and open it. Raises UserError."""
        save_as(path, TEMPLATE)
        self._consent.allow(read_code(path.resolve()), Rights())
        self.open(path)

    def _rights(self, path: Path) -> Rights | None:
        try:
            return self._consent.rights(read_code(path.resolve()))
        except UserError:
            return None

    def _check_disk(self) -> None:
        if self.path is not None and self.path.exists():
            self._watcher.addPath(str(self.path))
            if not self.matches_disk:
                self.changed_elsewhere.emit()


# ── reward editing ───────────────────────────────────────────────────────────────────────────────────────────────────

SETTING = "reward_functions_file"


class RewardEditing(QObject):
    """The controller of a RewardFilePanel.

    Attributes:
        session, draft, bench – the state shared with the pages.
        panel – the panel.
        file – the file being edited.

    Signals:
        opened(str) – another file is shown: its name, or "".
    """

    opened = Signal(str)

    def __init__(self, session: Session, panel: RewardFilePanel, parent: QObject) -> None:
        super().__init__(parent)
        self.session, self.draft, self.bench, self.panel = session, session.draft, session.reward_bench, panel
        self.file = EditedRewardFile(session.consent, self)
        panel.save_requested.connect(self.save)
        panel.new_requested.connect(self.create)
        panel.open_requested.connect(self.choose)
        panel.reload_requested.connect(self._reload)
        self.file.changed_elsewhere.connect(self._on_changed_elsewhere)

    def open(self) -> None:
        """Show the file that the settings name, unless it is shown already."""
        path = self.bench.reward_file
        if path == self.file.path and path is not None:
            return
        try:
            self.file.open(path)
        except UserError as mistake:
            self.session.message.emit(mistake.faults[0].sentence)
        self.panel.show_file(str(self.file.path or ""), self.file.text if self.file.path else None)
        self.opened.emit(path.name if path else "")

    def mark(self, error: Mapping[str, Any] | None) -> bool:
        """Mark the line of an error; returns whether it is in this file."""
        is_ours = error is not None and self.file.path is not None and Path(error["file"]) == self.file.path.resolve()
        self.panel.show_error(error if is_ours else None)
        return is_ours

    def save(self) -> None:
        """Save the edits, and score again."""
        if self.file.path is None:
            return
        if not self.file.matches_disk and self.panel.reload.isHidden():
            self.panel.say(
                f"{self.file.path.name} was changed by another program. Save again to write over that.", reload=True
            )
            return
        try:
            self.file.save(self.panel.editor.toPlainText())
        except UserError as mistake:
            self.panel.say(mistake.faults[0].sentence)
            return
        self.panel.say("")
        self.panel.editor.document().setModified(False)
        self.draft.changed.emit(SETTING)  # its functions may be others now
        self.bench.score()

    def _reload(self) -> None:
        self.panel.say("")
        path, self.file.path = self.file.path, None
        if path is not None:
            self.open()
            self.draft.changed.emit(SETTING)  # its functions may be others now
            self.bench.score_quietly()

    def _on_changed_elsewhere(self) -> None:
        if self.panel.is_edited:
            self.panel.say(f"{self.panel.path.toolTip()} was changed by another program.", reload=True)
        else:
            self._reload()

    def create(self) -> None:
        """Create a file from the template at a path that the user chooses."""
        path = self.choose_new_file()
        if path is None:
            return
        try:
            self.file.create(path)
        except UserError as mistake:
            self.session.message.emit(mistake.faults[0].sentence)
            return
        self.file.path = None
        self.draft.use_reward_file(str(path))

    def choose(self) -> None:
        path = self.choose_file()
        if path is not None:
            self.draft.use_reward_file(str(path))

    # Questions: one method each, which tests replace by an answer

    def choose_file(self) -> Path | None:
        return open_file(self.panel, SETTING, "Open reward file", "Python (*.py *.txt)")

    def choose_new_file(self) -> Path | None:
        return save_file(self.panel, SETTING, "New reward file", "my_rewards.py", "Python (*.py)")
