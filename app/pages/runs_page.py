"""The Runs page: which runs are there, and what can be done with them?

Composes the table of runs, its filter, and buttons to open, resume, export and trash the selected one. Runs are read one per turn of
the event loop, and again only when their diary has grown.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from PySide6.QtCore import QFile, QFileSystemWatcher, QTimer
from PySide6.QtGui import QHideEvent, QKeySequence, QShortcut, QShowEvent
from PySide6.QtWidgets import (  # fmt: skip
    QHBoxLayout,
    QLineEdit,
    QMessageBox,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.model.run_state import LIVE
from app.model.session import Session
from app.widgets.basic.empty_state import EmptyState
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.open_in_desktop import open_path
from app.widgets.runs.run_table import RunModel, RunRow, RunTable
from backend.spec import archive, places
from backend.spec.places import RunFolder

EVERY_MS = 2000
"""How often live runs are read while the page is visible."""
RESUMABLE = ("stopped", "failed", "crashed")


class RunsPage(QWidget):
    """The page.

    Attributes:
        session – the state shared with the other pages.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self._queue: deque[RunFolder] = deque()
        self._known: dict[Path, tuple[int, str]] = {}
        self._watcher = QFileSystemWatcher(self)
        self._watcher.directoryChanged.connect(lambda _: self.refresh())
        self._refresh_timer = QTimer(self, interval=EVERY_MS)
        self._refresh_timer.timeout.connect(self.refresh)
        self._read_timer = QTimer(self, interval=0)  # one run per turn of the event loop: input is handled in between
        self._read_timer.timeout.connect(self._read_next)
        self._compose()
        self._lay_out()
        self._show_choice()

    # ── composition ─────────────────────────────────────────────────────────────────────────────

    def _compose(self) -> None:
        self.nothing = EmptyState(
            "No runs yet", "Every run is kept here, with its charts, completions and model.", "Go to Train"
        )
        self.nothing.button_clicked.connect(lambda: self.session.page_requested.emit("train"))
        self.model = RunModel(self)
        self.table = RunTable(self.model)
        self.table.activated.connect(lambda _: self.open())
        self.table.selectionModel().selectionChanged.connect(lambda *_: self._show_choice())
        self.model.dataChanged.connect(lambda *_: self._show_choice())
        self.search = QLineEdit()
        self.search.setPlaceholderText("Filter by name or model")
        self.search.setClearButtonEnabled(True)
        self.search.setMaximumWidth(theme.scaled(260))
        self.search.setAccessibleName("Filter the runs")
        self.search.textChanged.connect(self.table.sorted.setFilterFixedString)
        self.open_button = button("Open", self.open, primary=True)
        self.resume_button = button("Resume", self.resume)
        self.chat_button = button("Chat", self.chat, tip="Ask it and its base the same things")
        self.export_button = button("Export…", self.export)
        self.evaluate_button = button("Evaluate", self.evaluate)
        self.settings_button = button("Use its settings", self.use_settings)
        self.folder_button = button("Open folder", self.show_folder)
        self.trash_button = button("Move to trash…", self.move_to_trash, tip="Delete key")
        QShortcut(QKeySequence.StandardKey.Delete, self.table, self.move_to_trash)

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.addWidget(label("Runs", theme.title_font()), 1)
        head.addWidget(self.search, 1)
        buttons = QHBoxLayout()
        buttons.setSpacing(theme.SPACE)
        for action in (
            self.open_button,
            self.resume_button,
            self.chat_button,
            self.export_button,
            self.evaluate_button,
            self.settings_button,
            self.folder_button,
        ):
            buttons.addWidget(action)
        buttons.addStretch(1)
        buttons.addWidget(self.trash_button)
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addLayout(head)
        column.addWidget(self.table.in_card(), 1)
        column.addLayout(buttons)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.nothing)
        self._stack.addWidget(content)

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.refresh()
        self._refresh_timer.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._refresh_timer.stop()
        self._read_timer.stop()

    def refresh(self) -> None:
        """List the runs folder. Live runs, and runs whose diary has grown, are then read one by one."""
        if not self.isVisible():
            return
        runs = places.runs_folder()  # it may not exist before the first run
        if runs.is_dir() and str(runs) not in self._watcher.directories():
            self._watcher.addPath(str(runs))
        folders = list(places.all_runs())
        self.model.set_paths([folder.path for folder in folders])
        self._stack.setCurrentIndex(1 if folders else 0)
        self._queue = deque(folder for folder in folders if self._must_be_read(folder))
        self._read_timer.start()

    def _must_be_read(self, folder: RunFolder) -> bool:
        size, state = self._known.get(folder.path, (-1, ""))
        return state in LIVE or size != _size(folder.events) or folder.is_locked()

    def _read_next(self) -> None:
        if not self._queue:
            self._read_timer.stop()
            if not self.table.selected_rows():
                self.table.selectRow(0)
            return
        folder = self._queue.popleft()
        size = _size(folder.events)
        row = _row(archive.summary(folder), self._live_state(folder))
        self._known[folder.path] = (size, row.state)
        self.model.set_row(row)

    def _live_state(self, folder: RunFolder) -> str:
        """The state of the run that Monitor follows, which also knows pauses; empty for every other run."""
        run = self.session.run
        return run.state if run is not None and run.is_live and run.folder.path == folder.path else ""

    # ── actions ────────────────────────────────────────────────────────────────────

    def _show_choice(self) -> None:
        """Enable the buttons that apply to the selected run."""
        row = self.table.selected_run()
        for action in (self.open_button, self.settings_button, self.folder_button):
            action.setEnabled(row is not None)
        self.resume_button.setEnabled(row is not None and row.state in RESUMABLE)
        for action in (self.chat_button, self.export_button, self.evaluate_button):
            action.setEnabled(row is not None and row.state not in LIVE and row.step > 0)
        self.trash_button.setEnabled(row is not None and row.state not in LIVE)

    def open(self) -> None:
        """Show the run on the Monitor page."""
        row = self.table.selected_run()
        if row is not None:
            self.session.open_run(row.path)
            self.session.page_requested.emit("monitor")

    def resume(self) -> None:
        row = self.table.selected_run()
        if row is not None and row.state in RESUMABLE:
            self.session.resume_run(RunFolder(row.path))

    def chat(self) -> None:
        row = self.table.selected_run()
        if row is not None:
            self.session.chat_with(RunFolder(row.path))

    def export(self) -> None:
        row = self.table.selected_run()
        if row is not None:
            self.session.export_requested.emit(RunFolder(row.path))

    def evaluate(self) -> None:
        """Show the run's evaluations, from where a new one can be started."""
        row = self.table.selected_run()
        if row is not None:
            self.session.open_run(row.path)
            self.session.page_requested.emit("evaluate")

    def use_settings(self) -> None:
        """Load the run's settings into the form."""
        row = self.table.selected_run()
        if row is not None:
            self.session.settings_requested.emit(RunFolder(row.path))

    def show_folder(self) -> None:
        row = self.table.selected_run()
        if row is not None:
            open_path(row.path)

    def move_to_trash(self) -> None:
        """Ask, then move the folder to the desktop's trash. A run that is training stays."""
        row = self.table.selected_run()
        if row is None or RunFolder(row.path).is_locked() or not self._is_confirmed(row):
            return
        if self.session.run is not None and self.session.run.folder.path == row.path:
            self.session.close_run()
        if not QFile.moveToTrash(str(row.path)):
            self.session.message.emit(f"{row.path} could not be moved to the trash.")
        self.refresh()

    def _is_confirmed(self, row: RunRow) -> bool:
        box = QMessageBox(self)
        box.setWindowTitle("Move to trash")
        box.setText(f"Move {row.path.name} to the trash?")
        box.setInformativeText("Its charts, completions, checkpoints and adapters go with it.")
        move = box.addButton("Move to trash", QMessageBox.ButtonRole.DestructiveRole)
        box.setDefaultButton(box.addButton(QMessageBox.StandardButton.Cancel))
        box.exec()
        return box.clickedButton() is move


def _row(summary: archive.Summary, state: str) -> RunRow:
    before, after = summary.reward_before, summary.reward_after
    return RunRow(
        path=Path(summary.path),
        state=state or summary.state,
        model=summary.model,
        step=summary.step or 0,
        iterations=summary.iterations,
        reward=after,
        change=None if before is None or after is None else after - before,
        began=summary.began,
        worked_s=summary.worked_s,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
