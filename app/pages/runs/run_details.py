"""Details of the selected run beside the table: note and tags to edit, its family, settings and disk use."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path

from PySide6.QtCore import QEvent, QObject, QSignalBlocker, Qt, QTimer, Signal
from PySide6.QtWidgets import QGridLayout, QLineEdit, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton, ProseEdit
from app.widgets.basic.labels import label, plain_tip, show_text
from app.widgets.basic.layout import TabArea, clear_layout, column, configure, grid, holder, row, show_all
from app.widgets.basic.number_format import file_size, moment
from app.widgets.run_header import StateChip
from backend.config.config import SETTINGS
from backend.jobs.job_file import read_job
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import PARTS, RunRecord, tags_in, value_text
from backend.utils.errors import UserError

SAVE_AFTER_MS = 600
LONGEST_BESIDE = 9  # characters of a word that fits beside its title
FAINT_PARTS = 0.005  # parts of the disk use below this share are not listed


class RunDetails(TabArea):
    notes_changed = Signal(object, dict)  # the run's path, and the changed fields of its notes
    run_chosen = Signal(str)
    free_requested = Signal()

    def __init__(self) -> None:
        no_bar = Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        super().__init__(accessibleName="Details of the run", horizontalScrollBarPolicy=no_bar)
        self._record: RunRecord | None = None
        self._save_timer = configure(QTimer(self, singleShot=True, interval=SAVE_AFTER_MS), timeout=self.save)
        self.title = label(font=theme.heading_font(), wrap=True)
        self.tags = configure(QLineEdit(placeholderText="math, first-try"), accessibleName="Tags")
        hint = "What was tried, and what came of it"
        self.note = ProseEdit(3, accessibleName="Note", placeholderText=hint, textChanged=self._save_timer.start)
        self.note.installEventFilter(self)
        configure(self.tags, textEdited=lambda _text: self._save_timer.start(), editingFinished=self.save)
        self.folder = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self.chip, self.when = StateChip(), label(role="muted")
        self.problem = label(role="problem", wrap=True)
        links = Qt.TextInteractionFlag.LinksAccessibleByMouse | Qt.TextInteractionFlag.LinksAccessibleByKeyboard
        rich = {"textFormat": Qt.TextFormat.RichText, "textInteractionFlags": links}
        self.family = label(wrap=True, name="Parent and clones of the run", **rich)
        self.family.linkActivated.connect(self.run_chosen)
        self.machines = label(wrap=True)
        self.settings, self.disk = (grid((), stretch=1, spacing=(theme.SPACE, 2)) for _ in range(2))
        self.free = LinkButton("Free space…", clicked=self.free_requested)
        self.several = label(role="muted", wrap=True, align=Qt.AlignmentFlag.AlignTop)
        heading = partial(label, font=theme.caption_font(), role="muted", contentsMargins=(0, 6, 0, 0))
        self._machines_title = heading("Machines")
        self._one = QWidget()
        column(
            *(self.title, self.folder, row(self.chip, None, self.when), self.problem),
            *(heading("Tags"), self.tags, heading("Note"), self.note),
            *(self.family, self._machines_title, self.machines),
            *(heading("Settings that differ from the defaults"), self.settings),
            *(heading("Disk"), self.disk, (self.free, 0, Qt.AlignmentFlag.AlignLeft)),
            into=self._one,
            spacing=6,
        )
        self.setWidget(holder(column(self.several, self._one, None, margins=12), objectName="page"))
        self.show_runs([])

    def show_runs(self, records: Sequence[RunRecord], others: Sequence[RunRecord] = ()) -> None:
        """Show one run, with its parent and clones among the others, or the number of runs."""
        record = records[0] if len(records) == 1 else None
        family = family_line(record, others) if record is not None else ""
        is_same = self._record is not None and record is not None and self._record.summary.path == record.summary.path
        if not is_same:
            self.save()
        show_all(record, self._one)
        show_all(record is None, self.several)
        total = file_size(sum(one.bytes for one in records))
        self.several.setText(f"{len(records)} runs selected, {total} on disk." if records else "No run is selected.")
        if record is None or (record == self._record and family == self.family.text()):
            self._record = record
            return
        self._record = record
        about, notes = record.summary, record.notes
        if not (is_same and self._save_timer.isActive()):  # else the user is typing, ahead of what was saved
            if self.tags.text() != (tags := ", ".join(notes.tags)):
                self.tags.setText(tags)
            if self.note.toPlainText() != notes.note:
                with QSignalBlocker(self.note):
                    self.note.setPlainText(notes.note)
        self.title.setText(record.title)
        configure(self.folder, text=about.name, toolTip=plain_tip(about.path))
        show_all(record.title != about.name, self.folder)  # else its name is in its place
        self.chip.show_state(about.state)
        self.when.setText(moment(about.began) if about.began else "")
        show_text(self.problem, record.notes_problem)
        for widget in (self.tags, self.note):
            widget.setEnabled(not record.notes_problem)
        show_text(self.family, family)
        counts = Counter(about.machines).items() if (about.ranks or 1) > 1 else ()
        named = [f"{name} ({count} ranks)" if count > 1 else name for name, count in counts]
        machines = ", ".join(named) or (f"{about.ranks} ranks" if (about.ranks or 1) > 1 else "")
        with suppress(UserError):
            job = read_job(RunFolder(Path(about.path)))
            machines = f"Hugging Face, {job.flavor}" if job is not None else machines
        self.machines.setText(machines)
        show_all(machines, self._machines_title, self.machines)
        settings = [(SETTINGS[key].label, value_text(value)) for key, value in record.settings.items()]
        _fill(self.settings, settings or [("All are the defaults.", "")])
        parts = [(PARTS[part], size) for part, size in record.disk.items() if size > record.bytes * FAINT_PARTS]
        _fill(self.disk, [(name, file_size(size)) for name, size in [("Together", record.bytes), *parts]])

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self.note and event.type() == QEvent.Type.FocusOut:
            self.save()
        return super().eventFilter(watched, event)

    def save(self) -> None:
        self._save_timer.stop()
        if self._record is None or self._record.notes_problem:
            return
        now = {"tags": tags_in(self.tags.text()), "note": self.note.toPlainText().rstrip()}
        changes = {key: value for key, value in now.items() if value != getattr(self._record.notes, key)}
        if changes:
            self.notes_changed.emit(Path(self._record.summary.path), changes)


def family_line(record: RunRecord, runs: Sequence[RunRecord]) -> str:
    """“Cloned from A. Clones: B, C.”, with links to the runs that are here."""
    links = {run.summary.name: f'<a href="{escape(run.summary.name)}">{escape(run.title)}</a>' for run in runs}
    clones = [links[run.summary.name] for run in runs if run.parent == record.summary.name]
    parts = [f"Cloned from {links.get(record.parent, f'{escape(record.parent)} (not here)')}."] if record.parent else []
    return " ".join([*parts, f"Clones: {', '.join(clones)}."] if clones else parts)


def _fill(cells: QGridLayout, rows: Sequence[tuple[str, str]]) -> None:
    clear_layout(cells)
    top = Qt.AlignmentFlag.AlignTop
    for place, (name, value) in enumerate(rows):
        # A long word, such as the name of a function, is below its title.
        below = any(len(word) > LONGEST_BESIDE for word in re.split(r"[\s/-]+", value))
        cells.addWidget(label(name, role="muted", wrap=True), 2 * place, 0, 1, 1 + below, top)
        # The least width of a label is its longest word, which the page must not have.
        text = label(value, theme.figures_font(), wrap=True, selectable=True, minimumWidth=1, toolTip=plain_tip(value))
        cells.addWidget(text, 2 * place + below, int(not below), 1, 1 + below, top)
