"""Undo and redo over the draft: every act upon the form, the reward table, opened files and presets included.

What is typed into one field in one go is one step. It keeps states and puts them back; it knows no widget.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QObject
from PySide6.QtGui import QUndoCommand, QUndoStack

from app.model.draft import Draft
from app.model.form_step import FormStep

PAUSE_S = 2.0
"""How long typing may rest before what follows is a step of its own."""
KEPT = 200
"""Steps that can be undone."""


class History(QUndoStack):
    """Steps back and forth; `undoText` and `redoText` name the next ones."""

    def __init__(
        self, draft: Draft, parent: QObject | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(parent)
        self._draft, self._clock = draft, clock
        self.setUndoLimit(KEPT)
        draft.edited.connect(self._take)
        draft.begun.connect(self.clear)

    def _take(self, edit: FormStep) -> None:
        self.push(_UndoStep(self._draft, edit, self._clock()))


class _UndoStep(QUndoCommand):
    """One edit. Qt calls `redo` when a step is pushed: by then it is done already."""

    def __init__(self, draft: Draft, edit: FormStep, at: float) -> None:
        super().__init__(edit.what)
        self.edit, self.at = edit, at
        self._draft, self._is_done = draft, True

    def id(self) -> int:
        return 1  # steps of one id may be merged

    def redo(self) -> None:
        if not self._is_done:
            self._draft.go_to(self.edit.after, file_too=self.edit.is_of_the_file)
        self._is_done = True

    def undo(self) -> None:
        self._is_done = False
        self._draft.go_to(self.edit.before, file_too=self.edit.is_of_the_file)

    def mergeWith(self, other: QUndoCommand) -> bool:
        assert isinstance(other, _UndoStep)
        goes_on = self.edit.typed and self.edit.typed == other.edit.typed and other.at - self.at < PAUSE_S
        if not goes_on:
            return False
        self.edit = FormStep(self.edit.what, self.edit.before, other.edit.after, self.edit.typed)
        self.at = other.at
        self.setObsolete(self.edit.changes_nothing)
        return True
