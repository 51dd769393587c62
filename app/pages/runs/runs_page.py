"""The Runs page: which runs are there, how do they differ, and what can be done with them?

Composes the table of runs, its search, the details of the selected run and the actions; comparing several runs replaces all of that until
Escape. Runs are read by `app.state.run_list`, in slices, and again only when a file has changed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QFileSystemWatcher, QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QKeySequence, QResizeEvent, QShortcut, QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLineEdit, QSplitter, QStackedLayout, QVBoxLayout, QWidget

from app import theme
from app.pages.runs.clone_dialog import CloneDialog
from app.pages.runs.column_dialog import ColumnDialog
from app.pages.runs.compare_view import CompareView
from app.pages.runs.free_space_dialog import FreeSpaceDialog
from app.pages.runs.queue_panel import QueuePanel, QueueRow
from app.pages.runs.run_actions import ACTIONS, RunActions
from app.pages.runs.run_details import RunDetails
from app.pages.runs.run_table import RunModel, RunTable
from app.state.processes import VerbProcess
from app.state.run_list import RunList
from app.state.session import Session
from app.widgets.basic.controls import CheckBox
from app.widgets.basic.labels import EmptyState, button, label
from app.widgets.basic.layout import wrap_in_card
from backend.runs.archive import raw_settings
from backend.runs.disk_use import freeable_space
from backend.runs.queue import is_fresh
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import RunRecord
from backend.runs.run_search import HINT, all_keys, asks_for_archived, search
from backend.utils import places
from backend.utils.errors import UserError

# The queue on the Runs page: the panel of waiting runs, connected to the session's queue.


class QueuePart(QWidget):
    """The panel, as large as the queue is long; nothing where nothing waits.

    Attributes:
        panel – the widget.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._known: dict[Path, tuple[int, QueueRow]] = {}
        self.panel = QueuePanel()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self.panel)
        queue, panel = session.queue, self.panel
        panel.moved.connect(lambda path, place: queue.move(RunFolder(path), place))
        panel.removed.connect(lambda path: queue.remove(RunFolder(path)))
        panel.edit_requested.connect(lambda path: session.waiting_settings_requested.emit(RunFolder(path)))
        panel.pause_requested.connect(queue.set_paused)
        panel.pause_after_failure_requested.connect(queue.set_pauses_after_failure)
        queue.changed.connect(self._show)
        self._show()

    def _show(self) -> None:
        queue = self._session.queue
        rows = [self._row(run) for run in queue.waiting]
        self.panel.show_queue(
            rows,
            queue.problem or self._status() if rows or queue.problem else "",
            is_paused=queue.now.is_paused,
            pauses_after_failure=queue.now.pauses_after_failure,
        )
        self.setVisible(self.panel.isVisibleTo(self))

    def _status(self) -> str:
        queue = self._session.queue
        if queue.now.is_paused:
            return "Paused: no other run is started."
        if queue.now.starting is not None:
            return f"After {queue.now.starting.name}, which trains now."
        return (
            "The first begins when the present run has ended." if self._session.is_training else "The first begins now."
        )

    def _row(self, run: RunFolder) -> QueueRow:
        """The run's row; its settings are read again when the file has changed."""
        try:
            written = run.config.stat().st_mtime_ns
        except OSError:
            written = -1
        known = self._known.get(run.path)
        if known is None or known[0] != written:
            settings = raw_settings(run)
            steps = settings.get("iters")
            model = str(settings.get("model", ""))
            known_steps = steps if isinstance(steps, int) and not isinstance(steps, bool) else None
            row = QueueRow(run.path, model, known_steps, has_begun=not is_fresh(run))
            known = self._known[run.path] = (written, row)
        return known[1]


# ── undo bar ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# A line that says what was just done, with a button that undoes it.


class UndoBar(QFrame):
    """Hidden until `show_done`.

    Signals:
        undone – Undo was pressed.
    """

    undone = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "banner")
        self.sentence = label(wrap=True)
        self.undo = button("Undo", self._undo)
        self.dismiss = button("Dismiss", self.hide)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 6, 8, 6)
        row.addWidget(self.sentence, 1)
        row.addWidget(self.undo)
        row.addWidget(self.dismiss)
        self.hide()

    def show_done(self, sentence: str, *, can_undo: bool) -> None:
        self.sentence.setText(sentence)
        self.undo.setVisible(can_undo)
        self.show()

    def _undo(self) -> None:
        self.hide()
        self.undone.emit()


# ── runs page ────────────────────────────────────────────────────────────────────────────────────────────────────────

EVERY_MS = 2000
"""How often the runs are checked for changes while the page is visible."""
BESIDE = 980
"""From this page width on the details are beside the table, and below it on a narrower page."""
SPARE = ("clone", "chat", "export", "resume")
"""Buttons that are hidden, in this order, where their row is too narrow: *More…* has every action."""
DETAILS_WIDTH, DETAILS_HEIGHT, LOWEST = 300, 190, 300
"""Of the details beside and below the table, and the least height of table and details below each other; else the table has it all."""


class RunsPage(QWidget):
    """The page.

    Attributes:
        session – the state shared with the other pages.
        runs – the records of the runs folder.
        run_actions – what can be done with the selection.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.runs = RunList(session.prefs.folder, parent=self)
        self.runs.listed.connect(self._on_listed)
        self.runs.read.connect(self._on_read)
        self.runs.settled.connect(self._on_settled)
        self._watcher = QFileSystemWatcher(self)
        self._watcher.directoryChanged.connect(lambda _: self.refresh())
        self._refresh_timer = QTimer(self, interval=EVERY_MS)
        self._refresh_timer.timeout.connect(self.refresh)
        self._compose()
        self._connect()
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
        self.table.show_columns(self.session.prefs.run_columns)
        self.details = RunDetails()
        self.run_actions = RunActions(self.session, self.table.selected_runs, self)
        self.undo_bar = UndoBar()
        self._comparison: CompareView | None = None
        self.search = QLineEdit(clearButtonEnabled=True)
        self.search.setPlaceholderText("Search: lr>1e-5 tag:math state:failed")
        self.search.setToolTip(f"<p>{HINT}</p>")
        self.search.setAccessibleName("Search the runs")
        self.search.setAccessibleDescription(HINT)
        self.search_line = label(role="muted", wrap=True)
        self.favourites, self.archived = CheckBox("Favourites"), CheckBox("Archived")
        self.favourites.setToolTip("Show only runs with a star")
        self.archived.setToolTip("Show archived runs too")
        self.columns_button = button("Columns…", self.choose_columns)
        self.details_button = button("Details", self.toggle_details, tip="Show or hide the details of the selected run")
        self.details_button.setCheckable(True)
        self.details_button.setChecked(self.session.prefs.run_details_shown)
        self.buttons = {
            key: button(text, lambda key=key: self.run_actions.do(key), primary=key == "open")
            for key, text in (("open", "Open"), ("compare", "Compare"), ("resume", "Resume"), ("chat", "Chat"), ("export", "Export…"),
                              ("clone", "New run from here…"), ("trash", "Move to trash"))
        }  # fmt: skip
        self.more_button = button(
            "More…", self._show_menu_of_button, tip="Everything that can be done with the selected runs"
        )

    def _connect(self) -> None:
        self.table.opened.connect(self.open)
        self.table.star_pressed.connect(self._toggle_star)
        self.table.columns_changed.connect(lambda columns: setattr(self.session.prefs, "run_columns", columns))
        self.table.customContextMenuRequested.connect(self._show_menu)
        self.table.horizontalHeader().customContextMenuRequested.connect(lambda _: self.choose_columns())
        self.table.selectionModel().selectionChanged.connect(lambda *_: self._show_choice())
        self.model.dataChanged.connect(lambda *_: self._show_choice())
        for box in (self.favourites, self.archived):
            box.toggled.connect(lambda _: self._filter())
        self.search.textChanged.connect(lambda _: self._filter())
        self.details.notes_changed.connect(self.run_actions.note)
        self.details.run_chosen.connect(self._choose_name)
        self.details.free_requested.connect(self.free_space)
        actions = self.run_actions
        actions.changed.connect(lambda paths: [self.runs.reread(path) for path in paths])
        actions.refused.connect(self.session.message)
        actions.moved.connect(self._on_moved)
        actions.compare_requested.connect(self.compare)
        actions.clone_requested.connect(self.clone)
        actions.rename_requested.connect(self._rename)
        actions.free_requested.connect(self.free_space)
        self.undo_bar.undone.connect(actions.undo_trash)
        for entry in ACTIONS:
            if entry is not None and entry.keys and entry.keys != "Return":  # the table handles Return itself
                QShortcut(QKeySequence(entry.keys), self.table, lambda key=entry.key: actions.do(key)).setContext(
                    Qt.ShortcutContext.WidgetShortcut
                )

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(theme.SPACE)
        head.addWidget(label("Runs", theme.title_font()))
        head.addSpacing(2 * theme.SPACE)
        head.addWidget(self.search, 1)
        for part in (self.favourites, self.archived, self.columns_button, self.details_button):
            head.addWidget(part)
        row = QHBoxLayout()
        row.setSpacing(theme.SPACE)
        for key in ("open", "compare", "resume", "chat", "export", "clone"):
            row.addWidget(self.buttons[key])
        row.addWidget(self.more_button)
        row.addStretch(1)
        row.addWidget(self.buttons["trash"])
        self.parts = QSplitter(Qt.Orientation.Horizontal, childrenCollapsible=False, handleWidth=theme.SPACE)
        self.parts.addWidget(self.table.in_card())
        self._details_card = wrap_in_card(self.details)
        self.parts.addWidget(self._details_card)
        self._details_card.setVisible(self.details_button.isChecked())
        self.parts.setStretchFactor(0, 1)
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addLayout(head)
        column.addWidget(self.search_line)
        self.search_line.hide()
        column.addWidget(QueuePart(self.session))
        column.addWidget(self.parts, 1)
        column.addWidget(self.undo_bar)
        column.addLayout(row)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.nothing)
        self._stack.addWidget(content)

    @property
    def compare_view(self) -> CompareView:
        """Where runs are compared: built when it is first asked for, as most visits to the page never do."""
        if self._comparison is None:
            view = self._comparison = CompareView(self)
            view.closed.connect(self._close_comparison)
            view.guide_requested.connect(self.session.guide_requested)
            view.told.connect(self.session.message)
            self._stack.addWidget(view)
        return self._comparison

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        beside = self.width() >= theme.scaled(BESIDE)
        orientation = Qt.Orientation.Horizontal if beside else Qt.Orientation.Vertical
        if self.parts.orientation() != orientation or event.oldSize().width() < 0:
            self.parts.setOrientation(orientation)
            self.parts.setSizes([10_000, theme.scaled(DETAILS_WIDTH if beside else DETAILS_HEIGHT)])
        self._fit()

    def _fit(self) -> None:
        """Hide the buttons for which there is no room, and below the table the details of several runs, which say hardly more than it."""
        row, hidden = [*self.buttons.values(), self.more_button], set()
        room = self.width() - theme.SPACE * (4 + len(row))
        for key in SPARE:
            if sum(part.sizeHint().width() for part in row if part not in hidden) <= room:
                break
            hidden.add(self.buttons[key])
        for key in SPARE:
            self.buttons[key].setVisible(self.buttons[key] not in hidden)
        beside = self.parts.orientation() == Qt.Orientation.Horizontal
        fits = self.parts.height() >= theme.scaled(LOWEST) and len(self.table.selected_runs()) == 1
        self._details_card.setVisible(self.details_button.isChecked() and (beside or fits))

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.refresh()
        self._refresh_timer.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self.details.save()
        self._refresh_timer.stop()
        self.runs.stop()

    def refresh(self) -> None:
        """List the runs folder; what has changed is then read slice by slice."""
        if not self.isVisible() or self.runs.is_reading:
            return
        folder = places.runs_folder()  # it may not exist before the first run
        if folder.is_dir() and str(folder) not in self._watcher.directories():
            self._watcher.addPath(str(folder))
        self.runs.refresh()

    def _on_listed(self, paths: set[Path]) -> None:
        self.model.keep_only(paths)
        if self._comparison is None or self._comparison.isHidden():
            self._stack.setCurrentIndex(1 if paths else 0)

    def _on_read(self, records: list[RunRecord]) -> None:
        shown = [self._with_live_state(record) for record in records]
        self.model.set_rows(shown)
        if self._comparison is not None:
            self._comparison.update_records(shown)

    def _with_live_state(self, record: RunRecord) -> RunRecord:
        """The state of the run that Monitor follows, which also knows pauses."""
        run = self.session.run
        if run is None or not run.is_live or str(run.folder.path) != record.summary.path:
            return record
        return replace(record, summary=replace(record.summary, state=run.state))

    def _on_settled(self) -> None:
        if not self.table.selected_rows() and self.table.sorted.rowCount():
            self.table.selectRow(0)
        self._show_choice()

    # ── what is shown ───────────────────────────────────────────────────────────────────────────

    def _filter(self) -> None:
        """Apply search and check boxes. A query that is none says why, and what was shown before stays."""
        query = self.search.text()
        try:
            passes = search(query, all_keys(self.model.rows))
        except UserError as mistake:
            self._tell_search(mistake.faults[0].sentence)
            return
        favourites, archived = self.favourites.isChecked(), self.archived.isChecked() or asks_for_archived(query)
        self.table.set_test(
            lambda record: (
                (record.notes.favourite or not favourites)
                and (archived or not record.notes.archived)
                and passes(record)
            )
        )
        shown = self.table.sorted.rowCount()
        narrowed = bool(query.strip()) or favourites
        self._tell_search(f"{shown:,} of {len(self.model.rows):,} runs." if narrowed else "")
        if shown and not self.table.selected_rows():
            self.table.selectRow(0)

    def _tell_search(self, sentence: str) -> None:
        self.search_line.setText(sentence)
        self.search_line.setVisible(bool(sentence))

    def _show_choice(self) -> None:
        """Enable the buttons that apply to the selected runs, and show the details of one."""
        runs = self.table.selected_runs()
        for entry in ACTIONS:
            if entry is not None and entry.key in self.buttons:
                self.buttons[entry.key].setEnabled(entry.applies(runs))
                self.buttons[entry.key].setText(entry.text(runs))
        self.more_button.setEnabled(bool(runs))
        self._fit()
        if self.details_button.isChecked():
            family = self.runs.family_of(Path(runs[0].summary.path)) if len(runs) == 1 else {}
            titles = {record.summary.name: record.title for record in self.model.rows} if family else {}
            self.details.show_runs(runs, family, titles)

    def toggle_details(self) -> None:
        shown = self.details_button.isChecked()
        self.session.prefs.run_details_shown = shown
        self._show_choice()

    def choose_columns(self) -> None:
        """Open the dialog of the columns; what is ticked there applies at once."""
        dialog = ColumnDialog([field.key for field in self.model.columns], all_keys(self.model.rows), self)
        dialog.chosen.connect(self._set_columns)
        dialog.show()

    def _set_columns(self, keys: list[str]) -> None:
        widths = dict(self.table.columns())
        if keys != list(widths):
            chosen = [Path(run.summary.path) for run in self.table.selected_runs()]
            self.table.show_columns([(key, widths.get(key, 0)) for key in keys])
            self.session.prefs.run_columns = self.table.columns()
            self.table.choose(*chosen)

    # ── actions ────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Show the selected run on the Monitor page; compare several."""
        self.run_actions.do("compare" if len(self.table.selected_rows()) > 1 else "open")

    def compare(self) -> None:
        """Show the selected runs on the same charts, in the order of the table, until Escape."""
        self.compare_view.compare(self.table.selected_runs())
        self._stack.setCurrentWidget(self.compare_view)
        self.compare_view.back.setFocus()

    def _close_comparison(self) -> None:
        self.compare_view.close_runs()
        self._stack.setCurrentIndex(1)
        self.table.setFocus()

    def clone(self, record: RunRecord) -> None:
        """Open the dialog that makes a new run from a checkpoint of this one."""
        folder = RunFolder(Path(record.summary.path))
        dialog = CloneDialog(
            folder, record.title, VerbProcess, self, will_wait=self.session.is_training, may_run_code=self.session.consent.obtain
        )  # fmt: skip
        dialog.cloned.connect(self._open_clone)
        dialog.show()

    def _open_clone(self, path: Path, starts: bool) -> None:
        """Show the new run on the Monitor page; while another one trains, let it wait and show it among the runs."""
        if starts and self.session.is_training:
            self.session.starter.queue_existing(RunFolder(path))
            self.refresh()
            return
        self.refresh()
        if starts:
            self.session.starter.resume(RunFolder(path))
        if self.session.run is None or self.session.run.folder.path != path:  # it is not to be started
            self.session.open_run(path)
        self.session.page_requested.emit("monitor")

    def _show_menu(self, at: QPoint) -> None:
        self.run_actions.menu(self).popup(self.table.viewport().mapToGlobal(at))  # returns immediately, unlike exec

    def _show_menu_of_button(self) -> None:
        self.run_actions.menu(self).popup(self.more_button.mapToGlobal(QPoint(0, self.more_button.height())))

    def _toggle_star(self, path: Path) -> None:
        record = self.model.record_at(path)
        if record is not None:
            self.run_actions.note(path, {"favourite": not record.notes.favourite})

    def _choose_name(self, name: str) -> None:
        """Select the run of this name, even where the search leaves it out."""
        record = next((record for record in self.model.rows if record.summary.name == name), None)
        if record is None:
            self.session.message.emit(f"{name} is not in the runs folder.")
            return
        self.search.clear()
        self.favourites.setChecked(False)
        self.archived.setChecked(self.archived.isChecked() or record.notes.archived)
        self.table.choose(Path(record.summary.path))

    def _rename(self) -> None:
        """Go to the title in the details."""
        if not self.details_button.isChecked():
            self.details_button.click()
        self.details.title.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.details.title.selectAll()

    def free_space(self) -> None:
        """Offer to delete checkpoints of the selected runs; of all, where fewer than two are selected."""
        chosen = self.table.selected_runs()
        records = chosen if len(chosen) > 1 else self.model.rows
        folders = [RunFolder(Path(record.summary.path)) for record in records if record.disk.get("checkpoints")]
        dialog = FreeSpaceDialog(freeable_space(folders), parent=self)
        dialog.freed.connect(lambda paths: [self.runs.reread(path) for path in paths])
        dialog.show()

    def _on_moved(self) -> None:
        moved = self.run_actions.trashed
        if moved:
            what = moved[0].path.name if len(moved) == 1 else f"{len(moved)} runs"
            can_undo = all(run.trashed is not None for run in moved)
            self.undo_bar.show_done(f"Moved {what} to the trash.", can_undo=can_undo)
        self.refresh()
