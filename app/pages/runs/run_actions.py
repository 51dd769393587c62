"""What can be done with the selected runs, as actions for buttons, menu and keys: each knows when it applies."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QFile, QObject, Signal
from PySide6.QtGui import QGuiApplication, QKeySequence
from PySide6.QtWidgets import QInputDialog, QMenu, QWidget

from app.state.run_state import LIVE
from app.state.session import Session
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.labels import REMOVE_KEYS, key_name
from backend.runs.run_folder import RunFolder
from backend.runs.run_lock import hold_lock
from backend.runs.run_record import RunRecord, change_notes, tags_in
from backend.utils.errors import UserError

# Runs moved to the desktop's trash, and back.

_LINUX_FILES, _LINUX_INFO = "files", "info"
"""Folders of a trash can on Linux: https://specifications.freedesktop.org/trash-spec/1.0/."""


@dataclass(frozen=True, slots=True)
class TrashedRun:
    """Where a run was, and where it lies now; `trashed` is None where the desktop does not tell."""

    path: Path
    trashed: Path | None


def move_to_trash(run: RunFolder) -> TrashedRun:
    """Move a run to the trash. It is locked meanwhile, so that no trainer begins in it.

    Raises UserError for a run that is being trained, and where the desktop has no trash for it.
    """
    handle = hold_lock(run)
    try:
        place = move_by_desktop(run.path)
    finally:
        os.close(handle)
    return TrashedRun(run.path, place if place != run.path and place.exists() else None)


def move_by_desktop(path: Path) -> Path:
    """Have the desktop move a folder to its trash; returns where it lies there, as far as the desktop tells. Raises UserError."""
    file = QFile(str(path))
    if not file.moveToTrash():
        raise UserError("run", f"{path} could not be moved to the trash: {file.errorString()}.")
    return Path(file.fileName())


def put_back(run: TrashedRun) -> None:
    """Move a run back out of the trash. Raises UserError where its place is taken, or it is no longer in the trash."""
    if run.trashed is None or not run.trashed.exists():
        raise UserError("run", f"{run.path.name} is no longer where it was put in the trash.")
    if run.path.exists():
        raise UserError("run", f"{run.path} exists again; move that one away first.")
    if not QFile.rename(str(run.trashed), str(run.path)):  # copies where the trash is on another disk
        raise UserError("run", f"{run.trashed} could not be moved back to {run.path}.")
    if run.trashed.parent.name == _LINUX_FILES:  # the trash would go on listing it
        (run.trashed.parents[1] / _LINUX_INFO / f"{run.trashed.name}.trashinfo").unlink(missing_ok=True)


# ── run actions ──────────────────────────────────────────────────────────────────────────────────────────────────────

RESUMABLE = ("stopped", "failed", "crashed")
Runs = Sequence[RunRecord]


@dataclass(frozen=True, slots=True)
class RunAction:
    """One entry of the menu. `applies(runs)` says whether it is enabled; `text(runs)` what it says then."""

    key: str
    text: Callable[[Runs], str]
    applies: Callable[[Runs], bool]
    keys: str = ""


def _one(runs: Runs) -> bool:
    return len(runs) == 1


def _at_rest(runs: Runs) -> bool:
    return bool(runs) and not any(run.summary.state in LIVE for run in runs)


def _has_trained(runs: Runs) -> bool:
    return _one(runs) and _at_rest(runs) and (runs[0].summary.step or 0) > 0


def _fixed(text: str) -> Callable[[Runs], str]:
    return lambda runs: text


def _toggled(name: str, on: str, off: str) -> Callable[[Runs], str]:
    return lambda runs: off if runs and all(getattr(run.notes, name) for run in runs) else on


ACTIONS: tuple[RunAction | None, ...] = (
    RunAction("open", _fixed("Open"), _one, "Return"),
    RunAction("compare", lambda runs: f"Compare {len(runs)} runs" if len(runs) > 1 else "Compare", lambda runs: len(runs) > 1, "Return"),
    RunAction("resume", _fixed("Resume"), lambda runs: _one(runs) and runs[0].summary.state in RESUMABLE),
    RunAction("queue", _fixed("Resume in the queue"), lambda runs: _one(runs) and runs[0].summary.state in RESUMABLE),
    RunAction("chat", _fixed("Chat"), _has_trained),
    RunAction("export", _fixed("Export…"), _has_trained),
    RunAction("evaluate", _fixed("Evaluate"), _has_trained),
    None,
    RunAction("clone", _fixed("New run from here…"), lambda runs: _one(runs) and (runs[0].summary.step or 0) > 0),
    RunAction("use_adapter", _fixed("Start a new run from its adapters"), _has_trained),
    RunAction("use_settings", _fixed("Use its settings"), _one),
    None,
    RunAction("favourite", _toggled("favourite", "Favourite", "No favourite"), bool, "Ctrl+Shift+F"),
    RunAction("rename", _fixed("Rename…"), _one, "F2"),
    RunAction("tag", _fixed("Add tags…"), bool),
    RunAction("archive", _toggled("archived", "Archive", "Take out of the archive"), bool),
    None,
    RunAction("show_folder", _fixed("Open folder"), _one),
    RunAction("copy_path", _fixed("Copy path"), bool),
    RunAction("free", _fixed("Free space…"), bool),
    RunAction("trash", lambda runs: f"Move {len(runs)} runs to trash" if len(runs) > 1 else "Move to trash", _at_rest, REMOVE_KEYS),
)  # fmt: skip
"""None is a separator."""


class RunActions(QObject):
    """Does them. What needs the page itself (compare, rename, free space, clone) is a signal.

    Attributes:
        trashed – the runs of the last move to the trash.

    Signals:
        compare_requested, rename_requested, free_requested, clone_requested – the user wants it for the selected runs.
        changed([paths]) – notes of these runs were written.
        moved – runs were moved to the trash, or back.
        refused(sentence) – why something was not done.
    """

    compare_requested = Signal()
    rename_requested = Signal()
    free_requested = Signal()
    clone_requested = Signal(object)
    changed = Signal(list)
    moved = Signal()
    refused = Signal(str)

    def __init__(self, session: Session, selected: Callable[[], Runs], parent: QWidget) -> None:
        super().__init__(parent)
        self.session = session
        self.trashed: list[TrashedRun] = []
        self._selected = selected
        self._window = parent

    def do(self, key: str) -> None:
        """Do an action with the selected runs, if it applies to them."""
        if _ACTION[key].applies(self._selected()):
            getattr(self, key)()

    def menu(self, parent: QWidget) -> QMenu:
        """Every action, enabled as the selection allows."""
        menu, runs = QMenu(parent), self._selected()
        for entry in ACTIONS:
            if entry is None:
                menu.addSeparator()
                continue
            keys = (
                f"\t{key_name(QKeySequence(entry.keys))}"
                if entry.keys and not (entry.key == "open" and len(runs) > 1)
                else ""
            )
            action = menu.addAction(entry.text(runs) + keys, lambda key=entry.key: self.do(key))
            action.setEnabled(entry.applies(runs))
        return menu

    # ── elsewhere in the window ─────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Show the run on the Monitor page."""
        self.session.open_run(self._path())
        self.session.page_requested.emit("monitor")

    def compare(self) -> None:
        self.compare_requested.emit()

    def resume(self) -> None:
        self.session.starter.resume(RunFolder(self._path()))

    def queue(self) -> None:
        """Let the run wait until no other trains."""
        self.session.starter.queue_existing(RunFolder(self._path()))

    def chat(self) -> None:
        self.session.chat_with(RunFolder(self._path()))

    def export(self) -> None:
        self.session.export_requested.emit(RunFolder(self._path()))

    def evaluate(self) -> None:
        """Show the run's evaluations, from where a new one can be started."""
        self.session.open_run(self._path())
        self.session.page_requested.emit("evaluate")

    def clone(self) -> None:
        self.clone_requested.emit(self._selected()[0])

    def use_adapter(self) -> None:
        """Name the run as the start of the one in the form."""
        self.session.draft.use_adapter(str(self._path()))
        self.session.field_requested.emit("adapter")

    def use_settings(self) -> None:
        """Load the run's settings into the form."""
        self.session.settings_requested.emit(RunFolder(self._path()))

    def show_folder(self) -> None:
        open_path(self._path())

    def copy_path(self) -> None:
        QGuiApplication.clipboard().setText("\n".join(str(path) for path in self._paths()))

    # ── notes ───────────────────────────────────────────────────────────────────────────────────

    def favourite(self) -> None:
        self._toggle("favourite")

    def archive(self) -> None:
        """Hide the runs from the list, or show them again; nothing is moved."""
        self._toggle("archived")

    def rename(self) -> None:
        self.rename_requested.emit()

    def tag(self) -> None:
        text = self.ask_for_tags()
        new = tags_in(text)
        if new:
            for run in self._selected():
                self.note(Path(run.summary.path), {"tags": tuple(dict.fromkeys([*run.notes.tags, *new]))})

    def ask_for_tags(self) -> str:
        """The tags to add; "" for none. Tests replace it by an answer."""
        count = len(self._selected())
        of = "the run" if count == 1 else f"{count} runs"
        return QInputDialog.getText(self._window, "Add tags", f"Tags for {of}, between commas:")[0]

    def note(self, path: Path, changes: dict[str, Any]) -> None:
        """Write fields of a run's notes."""
        try:
            change_notes(RunFolder(path), **changes)
        except UserError as mistake:
            self.refused.emit(mistake.faults[0].sentence)
        self.changed.emit([path])

    def _toggle(self, name: str) -> None:
        runs = self._selected()
        value = not all(getattr(run.notes, name) for run in runs)
        for run in runs:
            self.note(Path(run.summary.path), {name: value})

    # ── disk ────────────────────────────────────────────────────────────────────────────────────

    def free(self) -> None:
        self.free_requested.emit()

    def trash(self) -> None:
        """Move the runs to the desktop's trash, from where `undo_trash` puts them back. No question is asked: nothing is lost."""
        moved = []
        for path in self._paths():
            if self.session.run is not None and self.session.run.folder.path == path:
                self.session.close_run()
            try:
                moved.append(move_to_trash(RunFolder(path)))
            except UserError as mistake:
                self.refused.emit(mistake.faults[0].sentence)
        if moved:
            self.trashed = moved
        self.moved.emit()

    def undo_trash(self) -> None:
        """Put the runs of the last move back."""
        for run in self.trashed:
            try:
                put_back(run)
            except UserError as mistake:
                self.refused.emit(mistake.faults[0].sentence)
        self.trashed = []
        self.moved.emit()

    def _paths(self) -> list[Path]:
        return [Path(run.summary.path) for run in self._selected()]

    def _path(self) -> Path:
        return self._paths()[0]


_ACTION = {action.key: action for action in ACTIONS if action is not None}
