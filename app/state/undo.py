"""Undo and redo of the draft: every change of the form, including the reward table, opened files and presets.

Typing into a field without a pause is one step. It stores states of the draft and restores them; it knows no widget.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QObject
from PySide6.QtGui import QUndoCommand, QUndoStack

from app.state.draft import Draft
from app.state.form_step import FormStep

PAUSE_S = 2.0
"""Seconds that typing may rest before it starts another step."""
KEPT = 200
"""Steps that can be undone."""


class History(QUndoStack):
    """The undo stack of a draft; `undoText` and `redoText` name the next steps."""

    def __init__(
        self, draft: Draft, parent: QObject | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(parent)
        self._draft, self._clock = draft, clock
        self.setUndoLimit(KEPT)
        draft.edited.connect(self._push)
        draft.history_cleared.connect(self.clear)

    def _push(self, step: FormStep) -> None:
        self.push(_UndoStep(self._draft, step, self._clock()))


class _UndoStep(QUndoCommand):
    """One FormStep on the stack. Qt calls `redo` on push, when the draft has already changed."""

    def __init__(self, draft: Draft, step: FormStep, at: float) -> None:
        super().__init__(step.what)
        self.step, self.at = step, at
        self._draft, self._is_done = draft, True

    def id(self) -> int:
        return 1  # Qt offers commands of the same id to mergeWith

    def redo(self) -> None:
        if not self._is_done:
            self._draft.restore_state(self.step.after, with_file=self.step.replaces_file)
        self._is_done = True

    def undo(self) -> None:
        self._is_done = False
        self._draft.restore_state(self.step.before, with_file=self.step.replaces_file)

    def mergeWith(self, other: QUndoCommand) -> bool:
        assert isinstance(other, _UndoStep)
        is_continued = self.step.typed and self.step.typed == other.step.typed and other.at - self.at < PAUSE_S
        if not is_continued:
            return False
        self.step = FormStep(self.step.what, self.step.before, other.step.after, self.step.typed)
        self.at = other.at
        self.setObsolete(self.step.is_empty)
        return True
