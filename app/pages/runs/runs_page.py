"""The Runs page: the archive of runs, with search, details and actions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from PySide6.QtCore import QPoint, Qt, QTimer
from PySide6.QtGui import QGuiApplication, QHideEvent, QKeySequence, QResizeEvent, QShortcut, QShowEvent
from PySide6.QtWidgets import QFrame, QInputDialog, QMenu, QWidget

from app import theme
from app.pages.runs.compare_view import CompareView
from app.pages.runs.run_actions import CloneDialog, FreeSpaceDialog, RunAction, restore
from app.pages.runs.run_details import RunDetails
from app.pages.runs.run_table import ColumnDialog, RunModel, RunTable
from app.state.messages import problems_to
from app.state.run_list import RunList, move_to_trash, read_named
from app.state.session import Session
from app.widgets.basic.controls import CheckBox, ElidedLabel, SearchEdit
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.labels import REMOVE_KEYS, EmptyState, button, key_name, label, plain_tip, show_text
from app.widgets.basic.layout import card, column, configure, connect, holder, row, splitter, stack, wrap_in_card
from app.widgets.basic.number_format import DASH
from app.widgets.basic.tables import ROW_HEIGHT, BaseTable, Column, RowsModel
from backend.runs.archive import raw_settings
from backend.runs.queue import is_fresh
from backend.runs.run_folder import RunFolder
from backend.runs.run_names import name_of
from backend.runs.run_record import RunRecord, change_notes, freeable_space, tags_in
from backend.runs.run_search import HINT, all_keys, asks_for_archived, search
from backend.utils.errors import UserError

EVERY_MS = 2000  # interval at which the runs are checked for changes while the page is visible
BESIDE = 980  # from this page width on the details are beside the table, and below it on a narrower page
BUTTONS = ("open", "compare", "resume", "chat", "export", "clone", "trash")
SPARE = ("clone", "chat", "export", "resume")  # buttons that go first where their row is too narrow: *More…* has all
DETAILS_WIDTH, DETAILS_HEIGHT, LOWEST = 264, 190, 300
"""Of the details beside and below the table; least height of both, below which the table has all of it."""
SHOWN_ROWS = 3


class RunsPage(QWidget):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.runs = RunList(session.prefs.folder, self)
        configure(self.runs, listed=self._on_listed, read=self._on_read, settled=self._on_settled)
        self._refresh_timer = configure(QTimer(self, interval=EVERY_MS), timeout=self.refresh)
        self._comparison: CompareView | None = None

        hint, to_train = "Every run is kept here, with its charts, completions and model.", "Go to Train"
        go = partial(session.page_requested.emit, "train")
        self.nothing = EmptyState("No runs yet", hint, to_train, button_clicked=go)
        self.model = RunModel(self)
        table = self.table = RunTable(self.model)
        chosen, clipboard, path_of = table.selected_runs, QGuiApplication.clipboard(), attrgetter("summary.path")
        use_settings = session.settings_requested.emit
        star, archive = partial(self._toggle_note, "favourite"), partial(self._toggle_note, "archived")
        self.table.show_columns(session.prefs.run_columns)
        details = self.details = RunDetails()
        self.trashed: dict[Path, Path | None] = {}  # where it was → where it lies in the trash, if that is known
        # None is a separator.
        self.actions: tuple[RunAction | None, ...] = (
            RunAction("open", "Open", "one", lambda: self._show_on("monitor"), "Return"),
            RunAction("compare", "Compare", "several", lambda: self.compare(chosen()), "Return", "Compare {} runs"),
            RunAction("resume", "Resume", "ended", lambda: session.starter.resume(self._folder())),
            RunAction("queue", "Resume in the queue", "ended", lambda: session.starter.queue_existing(self._folder())),
            RunAction("chat", "Chat", "trained", lambda: session.chat_with(self._folder())),
            RunAction("export", "Export…", "trained", lambda: session.export_requested.emit(self._folder())),
            RunAction("evaluate", "Evaluate", "trained", lambda: self._show_on("evaluate")),
            None,
            RunAction("clone", "New run from here…", "steps", lambda: self.clone(chosen()[0])),
            RunAction("use_adapter", "Start a new run from its adapters", "adapters", self._use_adapter),
            RunAction("use_settings", "Use its settings", "one", lambda: use_settings(self._folder())),
            None,
            RunAction("favourite", "Add to favourites", "any", star, "Ctrl+Shift+F", off="Remove from favourites"),
            RunAction("rename", "Rename…", "one", table.rename, "F2"),
            RunAction("tag", "Add tags…", "any", self._tag),
            RunAction("archived", "Archive", "any", archive, off="Remove from the archive"),
            None,
            RunAction("show_folder", "Open folder", "one", lambda: open_path(self._folder().path)),
            RunAction("copy_path", "Copy path", "any", lambda: clipboard.setText("\n".join(map(path_of, chosen())))),
            RunAction("free", "Free space…", "any", self.free_space),
            RunAction("trash", "Move to trash", "idle", self.trash, REMOVE_KEYS, "Move {} runs to trash"),
        )
        by_key = self._by_key = {action.key: action for action in self.actions if action is not None}
        self.undo_text = label(wrap=True)
        self.undo_button = button("Undo", self.undo_trash)
        dismiss = button("Dismiss", lambda: self.undo_bar.hide())
        undo = row((self.undo_text, 1), self.undo_button, dismiss, margins=(12, 6, 8, 6))
        self.undo_bar = card(undo, "banner", visible=False)
        hint, about = "Search: lr>1e-5 tag:math state:failed", {"tip": f"<p>{HINT}</p>", "accessibleDescription": HINT}
        self.search = SearchEdit(hint, "Search the runs", **about)
        self.search_line = label(role="muted", wrap=True, visible=False)
        self.favourites = CheckBox("Favourites", toolTip="Show only runs with a star")
        self.archived = CheckBox("Archived", toolTip="Show archived runs too")
        self.columns_button = button("Columns…", self.choose_columns)
        tip, shown = "Show or hide the details of the selected run", session.prefs.run_details_shown
        self.details_button = button("Details", self._show_choice, tip=tip, checkable=True, checked=shown)
        self.details_button.toggled.connect(partial(setattr, session.prefs, "run_details_shown"))
        self.buttons = {key: button(by_key[key].one, partial(self.do, key), primary=key == "open") for key in BUTTONS}
        more = self.more_button = button("More…", tip="All actions for the selected runs")
        more.clicked.connect(lambda: self.menu().popup(more.mapToGlobal(QPoint(0, more.height()))))
        checks = (self.favourites, self.archived, self.columns_button, self.details_button)
        head = row(label("Runs", theme.title_font()), 2 * theme.SPACE, (self.search, 1), *checks)
        *first, trash = self.buttons.values()
        self._details_card = wrap_in_card(self.details, shown=shown)
        self.parts = splitter(self.table.in_card(), self._details_card, stretch=(1, 0))
        content = column(
            *(head, self.search_line, QueuePanel(session, self), (self.parts, 1)),
            *(self.undo_bar, row(*first, self.more_button, None, trash)),
            spacing=12,
            margins=2 * theme.SPACE,
        )
        self._stack = stack(self.nothing, holder(content), into=self)

        table.opened.connect(self.open)
        table.star_pressed.connect(
            lambda run: self.note(Path(run.summary.path), {"favourite": not run.notes.favourite})
        )
        table.columns_changed.connect(lambda columns: setattr(session.prefs, "run_columns", columns))
        table.customContextMenuRequested.connect(lambda at: self.menu().popup(table.viewport().mapToGlobal(at)))
        table.horizontalHeader().customContextMenuRequested.connect(lambda _: self.choose_columns())
        connect(lambda *_: self._show_choice(), table.selectionModel().selectionChanged, self.model.dataChanged)
        connect(lambda _: self._filter(), self.favourites.toggled, self.archived.toggled, self.search.textChanged)
        self.model.renamed.connect(lambda run, title: self.note(Path(run.summary.path), {"title": title}))
        configure(details, notes_changed=self.note, run_chosen=self._choose_name, free_requested=self.free_space)
        for key, action in self._by_key.items():
            if action.keys and action.keys != "Return":  # the table handles Return itself
                QShortcut(action.keys, table, partial(self.do, key), context=Qt.ShortcutContext.WidgetShortcut)
        self._show_choice()

    @property
    def compare_view(self) -> CompareView:
        """Where runs are compared: built when it is first asked for, as most visits to the page never do."""
        if self._comparison is None:
            view = self._comparison = CompareView(self.session, self)
            view.closed.connect(self._close_comparison)
            self._stack.addWidget(view)
        return self._comparison

    def resizeEvent(self, event: QResizeEvent) -> None:
        beside = self.width() >= theme.scaled(BESIDE)
        orientation = Qt.Orientation.Horizontal if beside else Qt.Orientation.Vertical
        if self.parts.orientation() != orientation or event.oldSize().width() < 0:
            self.parts.setOrientation(orientation)
            self.parts.setSizes([10_000, theme.scaled(DETAILS_WIDTH if beside else DETAILS_HEIGHT)])
        self._fit()

    def _fit(self) -> None:
        shown = [*self.buttons.values(), self.more_button]
        room = self.width() - theme.SPACE * (4 + len(shown))
        for key in SPARE:
            if sum(part.sizeHint().width() for part in shown) > room:
                shown.remove(self.buttons[key])
        for key in SPARE:
            self.buttons[key].setVisible(self.buttons[key] in shown)
        beside = self.parts.orientation() == Qt.Orientation.Horizontal
        fits = self.parts.height() >= theme.scaled(LOWEST) and len(self.table.selected_rows()) == 1
        self._details_card.setVisible(self.details_button.isChecked() and (beside or fits))

    def showEvent(self, event: QShowEvent) -> None:
        self.refresh()
        self._refresh_timer.start()

    def hideEvent(self, event: QHideEvent) -> None:
        self.details.save()
        self._refresh_timer.stop()
        self.runs.timer.stop()

    def refresh(self) -> None:
        if self.isVisible() and not self.runs.is_reading:
            self.runs.refresh()

    def _on_listed(self, paths: set[Path]) -> None:
        self.model.keep_only(paths)
        if self._comparison is None or self._comparison.isHidden():
            self._stack.setCurrentIndex(1 if paths else 0)

    def _on_read(self, records: list[RunRecord]) -> None:
        run = self.session.run
        # Monitor's state of the run is newer, and includes pauses.
        if run is not None and run.is_live and run.state != "reading":
            for place, record in enumerate(records):
                if record.summary.path == str(run.folder.path):
                    records[place] = replace(record, summary=replace(record.summary, state=run.state))
        self.model.set_rows(records)
        if self._comparison is not None:
            self._comparison.update_records(records)

    def _on_settled(self) -> None:
        if self.model.set_sweeps(self.runs.sweeps):
            self.table.sorted.invalidate()
        if not self.table.selected_rows() and self.table.sorted.rowCount():
            self.table.selectRow(max(0, self.table.currentIndex().row()))  # beside a run that is gone
        self._show_choice()

    def _filter(self) -> None:
        query = self.search.text()
        try:
            passes = search(query, all_keys(self.model.rows))
        except UserError as error:
            show_text(self.search_line, error.faults[0].sentence)
            return
        favourites, archived = self.favourites.isChecked(), self.archived.isChecked() or asks_for_archived(query)

        self.table.sorted.test = lambda run: (
            (run.notes.favourite or not favourites) and (archived or not run.notes.archived) and passes(run)
        )
        narrowed = bool(query.strip()) or favourites
        self.table.sorted.folds = not narrowed
        self.table.sorted.invalidate()
        shown, runs = self.table.sorted.rowCount(), len(self.model.rows) - len(self.model.sweeps)
        show_text(self.search_line, f"{shown:,} of {runs:,} runs." if narrowed else "")
        if shown and not self.table.selected_rows():
            self.table.selectRow(0)

    def _show_choice(self) -> None:
        runs = self.table.selected_runs()
        for key, part in self.buttons.items():
            configure(part, enabled=self._by_key[key].applies(runs), text=self._by_key[key].text(runs))
        self.more_button.setEnabled(bool(runs))
        self._fit()
        if self.details_button.isChecked():
            self.details.show_runs(runs, self.model.rows)

    def choose_columns(self) -> None:
        def set_columns(keys: list[str]) -> None:
            widths = dict(self.table.columns())
            if keys != list(widths):
                chosen = [Path(run.summary.path) for run in self.table.selected_runs()]
                self.table.show_columns([(key, widths.get(key, 0)) for key in keys])
                self.session.prefs.run_columns = self.table.columns()
                self.table.choose(*chosen)

        shown, offered = [field.key for field in self.model.columns], all_keys(self.model.rows)
        configure(ColumnDialog(shown, offered, self), chosen=set_columns).show()

    def do(self, key: str) -> None:
        if self._by_key[key].applies(self.table.selected_runs()):
            self._by_key[key].do()

    def menu(self) -> QMenu:
        menu, runs = QMenu(self), self.table.selected_runs()
        for entry in self.actions:
            if entry is None:
                menu.addSeparator()
            else:
                has_keys = entry.keys and not (entry.key == "open" and len(runs) > 1)
                keys = f"\t{key_name(QKeySequence(entry.keys))}" if has_keys else ""
                menu.addAction(entry.text(runs) + keys, partial(self.do, entry.key)).setEnabled(entry.applies(runs))
        return menu

    def _folder(self) -> RunFolder:
        return RunFolder(Path(self.table.selected_runs()[0].summary.path))

    def _show_on(self, page: str) -> None:
        self.session.open_run(self._folder().path)
        self.session.page_requested.emit(page)

    def _use_adapter(self) -> None:
        self.session.draft.use_adapter(str(self._folder().path))
        self.session.show_setting("adapter")

    def _tag(self) -> None:
        runs = self.table.selected_runs()
        of = "the run" if len(runs) == 1 else f"{len(runs)} runs"
        new = tags_in(QInputDialog.getText(self, "Add tags", f"Tags for {of}, separated by commas:")[0])
        for run in runs if new else ():
            self.note(Path(run.summary.path), {"tags": tuple(dict.fromkeys([*run.notes.tags, *new]))})

    def note(self, path: Path, changes: dict[str, Any]) -> None:
        with problems_to(self.session.message.emit):
            change_notes(RunFolder(path), **changes)
        self.runs.reread(path)

    def _toggle_note(self, name: str) -> None:
        runs = self.table.selected_runs()
        value = not all(getattr(run.notes, name) for run in runs)
        for run in runs:
            self.note(Path(run.summary.path), {name: value})

    def trash(self) -> None:
        """Move the runs to the desktop's trash, without a question: `undo_trash` restores them."""
        moved = {}
        for path in [Path(run.summary.path) for run in self.table.selected_runs()]:
            if self.session.run is not None and self.session.run.folder.path == path:
                self.session.close_run()
            with problems_to(self.session.message.emit):
                moved[path] = move_to_trash(RunFolder(path))
        self.trashed = moved or self.trashed
        self._on_moved()

    def undo_trash(self) -> None:
        for path, trashed in self.trashed.items():
            with problems_to(self.session.message.emit):
                restore(path, trashed)
        self.trashed = {}
        self._on_moved()

    def open(self) -> None:
        self.do("compare" if len(self.table.selected_runs()) > 1 else "open")

    def compare(self, records: Sequence[RunRecord]) -> None:
        self.compare_view.compare(records)
        self._stack.setCurrentWidget(self.compare_view)
        self.compare_view.back.setFocus()

    def compare_folders(self, paths: list[Path]) -> None:
        self.compare([self.runs.records.get(path) or read_named(RunFolder(path)) for path in paths])

    def _close_comparison(self) -> None:
        self.compare_view.close_runs()
        self._stack.setCurrentIndex(1)
        self.table.setFocus()

    def clone(self, record: RunRecord) -> None:
        session, folder = self.session, RunFolder(Path(record.summary.path))

        def open_clone(path: Path, starts: bool) -> None:
            self.runs.refresh()
            if starts and session.is_training:
                session.starter.queue_existing(RunFolder(path))
                return
            if starts:
                session.starter.resume(RunFolder(path))
            if session.run is None or session.run.folder.path != path:  # it is not to be started
                session.open_run(path)
            session.page_requested.emit("monitor")

        may_run, waits = session.consent.obtain, session.is_training
        dialog = CloneDialog(folder, record.title, self, will_wait=waits, may_run_code=may_run)
        configure(dialog, cloned=open_clone).show()

    def _choose_name(self, name: str) -> None:
        record = next(record for record in self.model.rows if record.summary.name == name)
        self.search.clear()
        self.favourites.setChecked(False)
        self.archived.setChecked(self.archived.isChecked() or record.notes.archived)
        self.table.choose(Path(record.summary.path))

    def free_space(self) -> None:
        chosen = self.table.selected_runs()
        records = chosen if len(chosen) > 1 else self.runs.records.values()
        folders = [RunFolder(Path(record.summary.path)) for record in records if record.disk.get("checkpoints")]
        dialog = FreeSpaceDialog(freeable_space(folders), self)
        configure(dialog, freed=lambda paths: [self.runs.reread(path) for path in paths]).show()

    def _on_moved(self) -> None:
        moved = self.trashed
        titles = [row.title for row in self.model.rows if Path(row.summary.path) in moved]
        self.undo_text.setText(f"Moved {titles[0] if len(titles) == 1 else f'{len(moved)} runs'} to the trash.")
        self.undo_button.setVisible(None not in moved.values())
        self.undo_bar.setVisible(bool(moved))
        self.runs.refresh()  # also where it is reading: it began with the folders of before


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A waiting run. One that `has_begun` will be resumed, so its settings are fixed."""

    run: RunFolder
    model: str
    steps: int | None
    has_begun: bool = False


class QueueModel(RowsModel):
    columns = (
        Column("Place", 40, is_figure=True, colour="muted"),
        Column("Run"),
        Column("Model", 260, colour="muted"),
        Column("Steps", 100, is_figure=True, colour="muted"),
    )
    rows: list[QueueRow]

    def text(self, row: QueueRow, column: int) -> str:
        steps = DASH if row.steps is None else f"to step {row.steps:,}" if row.has_begun else f"{row.steps:,} steps"
        model = "/".join(Path(row.model).parts[-2:]) or DASH
        return (str(self.rows.index(row) + 1), name_of(row.run), model, steps)[column]

    def tip(self, row: QueueRow, column: int) -> str | None:
        return plain_tip(str(row.run.path) if column == 1 else row.model) if column in (1, 2) else None


class QueuePanel(QFrame):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)  # before `refresh` shows it: a widget without a parent opens as a window
        self.setProperty("role", "card")
        self._session, self._queue = session, session.queue
        self.model = QueueModel(self)
        name = "Waiting runs, in their order"
        table = self.table = BaseTable(model=self.model, name=name, single=True, resizable=True)
        table.setTextElideMode(Qt.TextElideMode.ElideMiddle)  # names of runs and models differ at their end
        table.selectionModel().selectionChanged.connect(lambda *_: self._show_choice())
        table.horizontalHeader().hide()  # for a copy it names the columns; here they explain themselves
        table.setContextMenuPolicy(Qt.ContextMenuPolicy.ActionsContextMenu)
        for text, keys, slot in (
            ("Run next", "Alt+Home", lambda: self._shift()),
            ("Move up", "Alt+Up", lambda: self._shift(-1)),
            ("Move down", "Alt+Down", lambda: self._shift(1)),
            ("Remove", REMOVE_KEYS, lambda: self._remove()),
        ):
            action = table.addAction(text, QKeySequence(keys), slot)
            action.setShortcutContext(Qt.ShortcutContext.WidgetShortcut)
        self.status = ElidedLabel(role="muted")
        self.next_button = button("Run next", self._shift, tip="Put it first (Alt+Home); Alt+Up and Alt+Down move it")
        self.remove_button = button("Remove", self._remove)
        self.after_failure = CheckBox("Pause after a failure")
        change = partial(session.queue.change, session.queue.file.change)
        self.after_failure.clicked.connect(lambda on: change(pauses_after_failure=on))
        self.pause = button("Pause", lambda: self._queue.set_paused(self._queue.is_active))
        self._parts = (self.next_button, self.remove_button, self.after_failure)
        title = label("Queue", theme.heading_font())
        margins = (2 * theme.SPACE, theme.SPACE, 2 * theme.SPACE, theme.SPACE)
        column(row(title, (self.status, 1), *self._parts, self.pause), table, into=self, margins=margins)
        self._queue.changed.connect(self.refresh)
        self.refresh()

    def refresh(self) -> None:
        queue, rows, chosen = self._queue, list[QueueRow](), self.table.selected_row
        for run in queue.waiting:
            settings = raw_settings(run)
            steps = settings.get("iters")
            known_steps = steps if isinstance(steps, int) and not isinstance(steps, bool) else None
            rows.append(QueueRow(run, str(settings.get("model", "")), known_steps, has_begun=not is_fresh(run)))
        if queue.problem or not rows:
            status = queue.problem
        elif queue.now.is_paused:
            status = "Paused: no other run is started."
        elif queue.now.starting is not None:
            status = f"After {name_of(queue.now.starting)}, which trains now."
        elif not queue.is_active:
            status = "No process starts them."
        else:
            status = "The first starts as soon as nothing else trains."
        if rows != self.model.rows:
            self.model.set_rows(rows)
            runs = [each.run for each in rows]
            if chosen is not None and chosen.run in runs:  # the selected run stays selected wherever it goes
                self.table.selectRow(runs.index(chosen.run))
            self.table.setFixedHeight(min(len(rows), SHOWN_ROWS) * theme.scaled(ROW_HEIGHT) + 2)
        self._show_choice()
        configure(self.status, text=status, toolTip=plain_tip(status))
        if queue.now.is_paused or (rows and not queue.is_active):
            configure(self.pause, text="Resume" if queue.now.is_paused else "Start", toolTip="Start the waiting runs")
        else:
            configure(self.pause, text="Pause", toolTip="Start no other run; the present one continues")
        self.after_failure.setChecked(queue.now.pauses_after_failure)
        for part in (self.table, *self._parts):
            part.setVisible(bool(rows))
        self.setVisible(bool(rows) or bool(status))

    def _show_choice(self) -> None:
        chosen: QueueRow | None = self.table.selected_row
        has_begun = chosen is not None and chosen.has_begun
        goes = "Removes it from the queue; the run stays" if has_begun else "Removes it and moves it to the trash"
        self.remove_button.setToolTip(f"{goes} ({REMOVE_KEYS})")
        for part, enabled in (
            (self.next_button, chosen is not None and self.model.rows.index(chosen) > 0),
            (self.remove_button, chosen is not None),
        ):
            if not enabled and part.hasFocus():  # Qt would pass the focus on to the next button, Remove in the end
                self.table.setFocus(Qt.FocusReason.OtherFocusReason)
            part.setEnabled(enabled)

    def _shift(self, by: int | None = None) -> None:
        """Move the selected run by so many places, without a number to the first."""
        for origin in self.table.selected_rows():
            place = 0 if by is None else origin + by
            if origin != place and 0 <= place < len(self.model.rows):
                self._queue.change(self._queue.file.move, self.model.rows[origin].run, place)

    def _remove(self) -> None:
        if (chosen := self.table.selected_row) is not None:
            self._queue.remove(chosen.run)
