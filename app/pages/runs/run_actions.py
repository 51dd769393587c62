"""What can be done with the selected runs, as actions for buttons, menu and keys: each knows when it applies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QFile, QObject, Qt, Signal
from PySide6.QtGui import QGuiApplication, QKeySequence
from PySide6.QtWidgets import QInputDialog, QListWidget, QListWidgetItem, QMenu, QWidget

from app import theme
from app.state.messages import problems_to
from app.state.run_state import LIVE
from app.state.session import Session
from app.widgets.basic.dialogs import Dialog, open_path
from app.widgets.basic.labels import REMOVE_KEYS, button, key_name, label
from app.widgets.basic.layout import column, configure, row
from app.widgets.basic.number_format import counted, file_size
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.run_names import name_of
from backend.runs.run_record import FreeableSpace, RunRecord, change_notes, free_space, tags_in
from backend.utils.errors import UserError

RESUMABLE = ("stopped", "failed", "crashed")
Runs = Sequence[RunRecord]


@dataclass(frozen=True, slots=True)
class TrashedRun:
    """`trashed`: where it lies now, None if the desktop does not say."""

    path: Path
    trashed: Path | None


def move_to_trash(run: RunFolder) -> TrashedRun:
    """Raises UserError for a run that is being trained, or without a trash."""
    handle, file = hold_lock(run), QFile(str(run.path))
    try:
        if not file.moveToTrash():
            raise UserError("run", f"{run.path} could not be moved to the trash: {file.errorString()}.")
    finally:
        os.close(handle)
    place = Path(file.fileName())
    return TrashedRun(run.path, place if place != run.path and place.exists() else None)


def restore(run: TrashedRun) -> None:
    """Move a run back out of the trash. Raises UserError."""
    if run.trashed is None or not run.trashed.exists():
        raise UserError("run", f"{run.path.name} is no longer in the trash.")
    if run.path.exists():
        raise UserError("run", f"{run.path} exists again; move that one away first.")
    if not QFile.rename(str(run.trashed), str(run.path)):  # copies where the trash is on another disk
        raise UserError("run", f"{run.trashed} could not be moved back to {run.path}.")
    # On Linux (https://specifications.freedesktop.org/trash-spec/1.0/) the trash would go on listing it.
    if run.trashed.parent.name == "files":
        (run.trashed.parents[1] / "info" / f"{run.trashed.name}.trashinfo").unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class RunAction:
    """An entry of the menu: its text for a run, when it is enabled, its keys, its text for several runs.

    `toggles` is a flag of the notes; where all runs have it, the text is `off`.
    """

    key: str
    one: str
    applies: Callable[[Runs], bool]
    keys: str = ""
    several: str = ""
    toggles: str = ""
    off: str = ""

    def text(self, runs: Runs) -> str:
        if self.toggles and runs and all(getattr(run.notes, self.toggles) for run in runs):
            return self.off
        return self.several.format(len(runs)) if self.several and len(runs) > 1 else self.one


def _one(runs: Runs) -> bool:
    return len(runs) == 1


def _is_idle(runs: Runs) -> bool:
    return bool(runs) and not any(run.summary.state in LIVE for run in runs)


def _has_steps(runs: Runs) -> bool:
    return _one(runs) and (runs[0].summary.step or 0) > 0


def _has_trained(runs: Runs) -> bool:
    return _has_steps(runs) and _is_idle(runs)


def _can_resume(runs: Runs) -> bool:
    return _one(runs) and runs[0].summary.state in RESUMABLE


ACTIONS: tuple[RunAction | None, ...] = (
    RunAction("open", "Open", _one, "Return"),
    RunAction("compare", "Compare", lambda runs: len(runs) > 1, "Return", several="Compare {} runs"),
    RunAction("resume", "Resume", _can_resume),
    RunAction("queue", "Resume in the queue", _can_resume),
    RunAction("chat", "Chat", _has_trained),
    RunAction("export", "Export…", _has_trained),
    RunAction("evaluate", "Evaluate", _has_trained),
    None,
    RunAction("clone", "New run from here…", _has_steps),
    RunAction("use_adapter", "Start a new run from its adapters", _has_trained),
    RunAction("use_settings", "Use its settings", _one),
    None,
    RunAction(
        "favourite", "Add to favourites", bool, "Ctrl+Shift+F", toggles="favourite", off="Remove from favourites"
    ),
    RunAction("rename", "Rename…", _one, "F2"),
    RunAction("tag", "Add tags…", bool),
    RunAction("archive", "Archive", bool, toggles="archived", off="Remove from the archive"),
    None,
    RunAction("show_folder", "Open folder", _one),
    RunAction("copy_path", "Copy path", bool),
    RunAction("free", "Free space…", bool),
    RunAction("trash", "Move to trash", _is_idle, REMOVE_KEYS, several="Move {} runs to trash"),
)
"""None is a separator."""


class RunActions(QObject):
    """Does them. `of_page`: those that need the page itself."""

    changed = Signal(list)  # paths of runs whose notes were written
    moved = Signal()  # to the trash, or back
    refused = Signal(str)

    def __init__(
        self,
        session: Session,
        selected: Callable[[], Runs],
        of_page: Mapping[str, Callable[[], object]],
        parent: QWidget,
    ) -> None:
        super().__init__(parent)
        self.session = session
        self.trashed: list[TrashedRun] = []
        self._selected, self._window = selected, parent
        self._callbacks: dict[str, Callable[[], object]] = {
            "open": lambda: self._show_on("monitor"),
            "resume": lambda: session.starter.resume(self._folder()),
            "queue": lambda: session.starter.queue_existing(self._folder()),
            "chat": lambda: session.chat_with(self._folder()),
            "export": lambda: session.export_requested.emit(self._folder()),
            "evaluate": lambda: self._show_on("evaluate"),
            "use_adapter": self._use_adapter,
            "use_settings": lambda: session.settings_requested.emit(self._folder()),
            "favourite": lambda: self._toggle_note("favourite"),
            "tag": self._tag,
            "archive": lambda: self._toggle_note("archived"),
            "show_folder": lambda: open_path(self._folder().path),
            "copy_path": lambda: QGuiApplication.clipboard().setText("\n".join(run.summary.path for run in selected())),
            "trash": self.trash,
            **of_page,
        }

    def do(self, key: str) -> None:
        action = next(entry for entry in ACTIONS if entry is not None and entry.key == key)
        if action.applies(self._selected()):
            self._callbacks[key]()

    def menu(self, parent: QWidget) -> QMenu:
        menu, runs = QMenu(parent), self._selected()
        for entry in ACTIONS:
            if entry is None:
                menu.addSeparator()
                continue
            has_keys = entry.keys and not (entry.key == "open" and len(runs) > 1)
            keys = f"\t{key_name(QKeySequence(entry.keys))}" if has_keys else ""
            action = menu.addAction(entry.text(runs) + keys, lambda key=entry.key: self.do(key))
            action.setEnabled(entry.applies(runs))
        return menu

    def _folder(self) -> RunFolder:
        return RunFolder(Path(self._selected()[0].summary.path))

    def _show_on(self, page: str) -> None:
        self.session.open_run(self._folder().path)
        self.session.page_requested.emit(page)

    def _use_adapter(self) -> None:
        self.session.draft.use_adapter(str(self._folder().path))
        self.session.field_requested.emit("adapter")

    def _tag(self) -> None:
        new = tags_in(self.ask_for_tags())
        for run in self._selected() if new else ():
            self.note(Path(run.summary.path), {"tags": tuple(dict.fromkeys([*run.notes.tags, *new]))})

    def ask_for_tags(self) -> str:
        count = len(self._selected())
        of = "the run" if count == 1 else f"{count} runs"
        return QInputDialog.getText(self._window, "Add tags", f"Tags for {of}, separated by commas:")[0]

    def note(self, path: Path, changes: dict[str, Any]) -> None:
        with problems_to(self.refused.emit):
            change_notes(RunFolder(path), **changes)
        self.changed.emit([path])

    def _toggle_note(self, name: str) -> None:
        runs = self._selected()
        value = not all(getattr(run.notes, name) for run in runs)
        for run in runs:
            self.note(Path(run.summary.path), {name: value})

    def trash(self) -> None:
        """Move the runs to the desktop's trash, without a question: `undo_trash` restores them."""
        moved = []
        for path in [Path(run.summary.path) for run in self._selected()]:
            if self.session.run is not None and self.session.run.folder.path == path:
                self.session.close_run()
            with problems_to(self.refused.emit):
                moved.append(move_to_trash(RunFolder(path)))
        if moved:
            self.trashed = moved
        self.moved.emit()

    def undo_trash(self) -> None:
        for run in self.trashed:
            with problems_to(self.refused.emit):
                restore(run)
        self.trashed = []
        self.moved.emit()


class FreeSpaceDialog(Dialog):
    """Deletes checkpoints: a list of runs with check boxes, all ticked."""

    freed = Signal(list)

    def __init__(self, spaces: Sequence[FreeableSpace], parent: QWidget | None = None) -> None:
        super().__init__("Free space", parent, (560, 420))
        self.list = configure(QListWidget(), accessibleName="Runs with checkpoints to spare")
        for space in spaces:
            steps = [f"{saved.step:,}" for saved in space.checkpoints]
            listed = ", ".join(steps) if len(steps) <= 4 else f"{steps[0]} … {steps[-1]}"
            count = f"{counted(len(steps), 'checkpoint')} (step {listed})"
            item = QListWidgetItem(f"{name_of(space.run)}  –  {count}, {file_size(space.bytes)}")
            item.setData(Qt.ItemDataRole.UserRole, space)
            item.setCheckState(Qt.CheckState.Checked)
            self.list.addItem(item)
        self.list.itemChanged.connect(lambda _item: self._show_sum())
        self.outcome = label(wrap=True)
        self.start = button("", self.delete, primary=True, default=False)  # it cannot be undone
        intro = label(
            "Deletes all checkpoints but the best and the newest of each run. This cannot be undone. Event logs, "
            "completions and exported models stay. A run that is training is left alone.",
            wrap=True,
        )
        buttons = row(None, button("Close", self.close), self.start)
        parts = (intro, (self.list, 1), self.outcome, buttons)
        column(*parts, into=self, spacing=12, margins=2 * theme.SPACE)
        self._show_sum()

    def chosen(self) -> list[FreeableSpace]:
        items = [self.list.item(i) for i in range(self.list.count())]
        ticked = [item for item in items if item.checkState() == Qt.CheckState.Checked]
        return [item.data(Qt.ItemDataRole.UserRole) for item in ticked]

    def delete(self) -> None:
        refused, done, total = list[str](), list[Path](), 0
        for space in self.chosen():
            with problems_to(refused.append):
                total += free_space(space.run)
                done.append(space.run.path)
        for i in reversed(range(self.list.count())):
            if self.list.item(i).data(Qt.ItemDataRole.UserRole).run.path in done:
                self.list.takeItem(i)
        self._show_sum()
        self.outcome.setText(" ".join([f"Freed {file_size(total)}.", *refused]))
        self.freed.emit(done)

    def _show_sum(self) -> None:
        total = sum(space.bytes for space in self.chosen())
        self.start.setText(f"Delete checkpoints, free {file_size(total)}" if total else "Nothing to delete")
        self.start.setEnabled(total > 0)
        self.outcome.setText("" if self.list.count() else "No run has other checkpoints than its best and its newest.")
