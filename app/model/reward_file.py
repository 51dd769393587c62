"""The user's reward file as it is edited in the window: written atomically, and watched for changes by other programs.

Contents saved here are allowed to run if the contents before them were: the user wrote both.
"""

from __future__ import annotations

import stat
from pathlib import Path

from PySide6.QtCore import QFileSystemWatcher, QObject, Signal

from app.model.consent import Consent
from backend.spec.disk_faults import DiskFault
from backend.spec.faults import Mistake
from backend.spec.rewards.allowed_code import Rights
from backend.spec.rewards.user_code import read_code
from backend.spec.whole_file import replace_file

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
        """Switch to another file, or to none. Raises Mistake when it cannot be read."""
        if self._watcher.files():
            self._watcher.removePaths(self._watcher.files())
        self.path, self.text = None, ""
        if path is not None:
            self.text = _read(path)
            self.path = path
            self._watcher.addPath(str(path))

    @property
    def matches_disk(self) -> bool:
        """Whether the file on disk still holds `text`."""
        try:
            return self.path is not None and _read(self.path) == self.text
        except Mistake:
            return False

    def save(self, text: str) -> None:
        """Write the file. Raises Mistake."""
        assert self.path is not None
        rights = self._rights(self.path)
        _write(self.path, text)
        self.text = text
        self._watcher.addPath(str(self.path))  # saved by rename, it is a new inode, which the watcher has not seen
        if rights is not None:
            self._consent.allow(read_code(self.path.resolve()), rights)

    def create(self, path: Path) -> None:
        """Write a new file from the template, allow it to run, as its code is ours, and open it. Raises Mistake."""
        _write(path, TEMPLATE)
        self._consent.allow(read_code(path.resolve()), Rights())
        self.open(path)

    def _rights(self, path: Path) -> Rights | None:
        try:
            return self._consent.rights(read_code(path.resolve()))
        except Mistake:
            return None

    def _check_disk(self) -> None:
        if self.path is not None and self.path.exists():
            self._watcher.addPath(str(self.path))
            if not self.matches_disk:
                self.changed_elsewhere.emit()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Mistake("reward_functions_file", f"{path.name} is not UTF-8 text.") from None
    except OSError as error:
        raise Mistake("reward_functions_file", f"{path} cannot be read: {error.strerror}.") from None


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text, mode=stat.S_IMODE(path.stat().st_mode) if path.exists() else None)
    except DiskFault as fault:
        raise Mistake("reward_functions_file", fault.faults[0].sentence) from None
