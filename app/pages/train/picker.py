"""The picker: a dialog to choose a model or dataset on this machine, or to find one on Hugging Face and download it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from PySide6.QtCore import QEvent, QModelIndex, QObject, Qt, Signal
from PySide6.QtGui import QFont, QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QDialog, QGridLayout, QHeaderView, QProgressBar, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.controls import SearchEdit
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import NestedStack, column, holder, on_screen, row, set_style_property
from app.widgets.basic.number_format import DASH, duration, figure, file_size, moment
from app.widgets.basic.tables import BaseTable, Column, Index, RowsModel

PLACE_LABELS = {
    "cache": "HF cache",
    "lmstudio": "LM Studio",
    "run": "Earlier run",
    "folder": "Folder",
    "hub": "Hugging Face",
    "bundled": "Bundled",
}
STAR, NAME, KIND, PRECISION, SIZE, CHANGED, WHERE = range(7)
BAR_STEPS = 1000
"""Resolution of the progress bar, which cannot count bytes in 32 bits."""
_PHASES = {"asking": "Asking the Hub", "checking": "Checking", "linking": "Almost there"}
_EXAMPLES = {"model": "Qwen3 4bit", "dataset": "gsm8k"}
_MOVES = {Qt.Key.Key_Down: 1, Qt.Key.Key_Up: -1, Qt.Key.Key_PageDown: 10, Qt.Key.Key_PageUp: -10}
_ENTER = (Qt.Key.Key_Return, Qt.Key.Key_Enter)


@dataclass(frozen=True, slots=True)
class PickerEntry:
    """One model or dataset.

    `id` is the value for the form's field; `size` and `partial` (downloaded so far) are in bytes, `changed` in unix
    seconds; `refusal` says why it cannot be used; `fits` says in two words if training it fits in memory.
    """

    id: str
    name: str
    where: str
    place: str = ""
    size: int | None = None
    changed: float | None = None
    kind: str = ""
    precision: str = ""
    refusal: str = ""
    remarks: tuple[str, ...] = ()
    partial: int = 0
    downloads: int | None = None
    gated: bool = False
    starred: bool = False
    fits: str = ""

    @property
    def is_here(self) -> bool:
        return self.where != "hub" and not self.partial

    @property
    def status(self) -> str:
        """Where it is."""
        if self.refusal:
            return "Unfinished" if self.partial else "Cannot be used"
        if not self.fits and self.where == "hub" and self.downloads is not None:
            return f"{figure(self.downloads)} downloads"
        return self.fits or PLACE_LABELS[self.where]

    @property
    def details(self) -> str:
        """The text below the table: problems and remarks, then the path or id."""
        partial = f"{file_size(self.partial)} downloaded so far." if self.partial else ""
        gate = "Gated: accept its conditions on its page first." if self.gated else ""
        remarks = " ".join(filter(None, [self.refusal, partial, gate, *self.remarks]))
        return "\n".join(filter(None, [remarks, display_path(self.place) or f"{self.id} on Hugging Face"]))

    def matches(self, words: Sequence[str]) -> bool:
        """True if every lower-case word occurs in its name, id, type, precision or location."""
        text = f"{self.name} {self.id} {self.kind} {self.precision} {PLACE_LABELS[self.where]}".lower()
        return all(word in text for word in words)


def entry_from(answer: Mapping[str, Any], *, starred: bool = False) -> PickerEntry:
    """An entry from an item of the service's answer; an item without `where` is on the Hub."""
    known = {key: answer[key] for key in PickerEntry.__dataclass_fields__ if key in answer}
    known |= {"remarks": tuple(answer.get("remarks", ())), "where": answer.get("where", "hub"), "starred": starred}
    return PickerEntry(**{"name": answer["id"], **known})


@dataclass(frozen=True, slots=True)
class PickerLine:
    """A row that is not an entry: a heading, an offer that Enter takes, a note or a failure. It spans all columns."""

    text: str
    role: Literal["heading", "offer", "note", "trouble"]


PickerRow = PickerEntry | PickerLine


def size_text(size: object) -> str:
    """A size in bytes, a dash where it is unknown or 0."""
    return file_size(size) if size else DASH


def display_path(place: str) -> str:
    """A path with ~ for the home folder, and without the snapshot's hash if it is in the Hugging Face cache."""
    home = f"{Path.home()}/"
    return f"~/{place.removeprefix(home)}".partition("/snapshots/")[0] if place.startswith(home) else place


def is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", "~", "."))


@dataclass(slots=True)
class PickerContents:
    """Everything the picker can show; `rows` filters and groups it.

    `suggested` are entries on the Hub for a first run; `hub` is the result for `hub_words`, and `hub_line` stands in
    its place while a search is under way, failed, or found nothing.
    """

    local: list[PickerEntry] = field(default_factory=list)
    hub: list[PickerEntry] = field(default_factory=list)
    suggested: list[PickerEntry] = field(default_factory=list)
    recent: list[str] = field(default_factory=list)
    hub_words: str = ""
    hub_line: PickerLine | None = None

    def set_starred(self, id_: str, *, starred: bool) -> None:
        for entries in (self.local, self.hub, self.suggested):
            entries[:] = [replace(entry, starred=starred) if entry.id == id_ else entry for entry in entries]

    def rows(self, typed: str) -> list[PickerRow]:
        """The rows for the text in the search line: favourites, recent, other local entries, then the Hub's."""
        words = typed.lower().split()
        matching = [entry for entry in self.local if entry.matches(words)]
        favourites = [entry for entry in matching if entry.starred]
        recent = [entry for id_ in self.recent for entry in matching if entry.id == id_ and not entry.starred]
        others = [entry for entry in matching if entry not in favourites and entry not in recent]
        others.sort(key=lambda entry: bool(entry.refusal))  # unusable ones last, each half newest first
        local_ids = {entry.id for entry in self.local}
        suggested = [entry for entry in self.suggested if entry.matches(words) and entry.id not in local_ids]
        groups = {
            "Favourites": favourites,
            "Recent": recent,
            "On this machine": others,
            "Suggested downloads": suggested,
        }
        rows: list[PickerRow] = []
        for heading, entries in groups.items():
            rows += [PickerLine(heading, "heading"), *entries] if entries else []
        typed = typed.strip()
        if typed and typed == self.hub_words:
            known_ids = local_ids | {entry.id for entry in suggested}
            state = [self.hub_line] if self.hub_line else []
            remote = [entry for entry in self.hub if entry.id not in known_ids]
            rows += [PickerLine("On Hugging Face", "heading"), *state, *remote]
        elif typed:
            rows.append(PickerLine(f"Search Hugging Face for “{typed}”", "offer"))
        return rows


class PickerModel(RowsModel):
    columns = (
        Column("", 28),
        Column("Name"),
        Column("Type", 108),
        Column("Weights", 68),
        Column("Size", 76, is_figure=True),
        Column("Changed", 134, is_figure=True),
        Column("Where", 136),
    )

    def flags(self, index: Index) -> Qt.ItemFlag:
        row = self.rows[index.row()]
        is_text = isinstance(row, PickerLine) and row.role != "offer"
        return Qt.ItemFlag.ItemIsEnabled if is_text else Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable

    def text(self, row: PickerRow, column: int) -> str:
        if isinstance(row, PickerLine):
            return row.text if column == STAR else ""
        changed = moment(row.changed or None)
        texts = ("", row.name, row.kind or DASH, row.precision or DASH, size_text(row.size), changed, row.status)
        return texts[column]

    def colour(self, row: PickerRow, column: int) -> Any:
        colours = theme.palette()
        if isinstance(row, PickerLine):
            return {"offer": colours.accent, "trouble": colours.warning}.get(row.role, colours.muted)
        if row.refusal:
            return colours.warning if column == WHERE else colours.muted
        return colours.text if column in (NAME, SIZE) else colours.muted

    def font(self, row: PickerRow, column: int) -> QFont:
        if isinstance(row, PickerLine):
            return theme.caption_font() if row.role == "heading" else theme.body_font()
        return theme.figures_font()

    def tip(self, row: PickerRow, column: int) -> str | None:
        return plain_tip(row.refusal or row.place or row.id) if isinstance(row, PickerEntry) else None

    def extra(self, row: PickerRow, index: Index, role: int) -> Any:
        if isinstance(row, PickerLine) or index.column() != STAR:
            return None
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return "favourite" if row.starred else "not a favourite"
        if role == Qt.ItemDataRole.DecorationRole:
            colours = theme.palette()
            name, colour = ("star-filled", colours.clip) if row.starred else ("star", colours.placeholder)
            return icons.icon(name, colour, 16)
        return None


class PickerTable(BaseTable):
    """The table view."""

    star_pressed = Signal(int)  # row

    def __init__(self, model: PickerModel, *, precision: bool) -> None:
        super().__init__()
        self._model = model
        self.setModel(model)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setTextElideMode(Qt.TextElideMode.ElideMiddle)  # names of models differ at the end
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        for place, each in enumerate(model.columns):
            self.setColumnWidth(place, theme.scaled(each.width))  # pyright: ignore[reportAttributeAccessIssue]
        self.setColumnHidden(PRECISION, not precision)
        self.clicked.connect(lambda index: index.column() == STAR and self.star_pressed.emit(index.row()))
        model.modelReset.connect(self._span_lines)

    def _span_lines(self) -> None:
        self.clearSpans()
        for place, each in enumerate(self._model.rows):
            if isinstance(each, PickerLine):
                self.setSpan(place, 0, 1, len(self._model.columns))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        others = [i for i in range(len(self._model.columns)) if i != NAME and not self.isColumnHidden(i)]
        taken = sum(self.columnWidth(place) for place in others)
        self.setColumnWidth(NAME, max(theme.scaled(200), self.viewport().width() - taken))


class DownloadRow(QWidget):
    """A download: name, progress, and buttons to pause, resume and cancel."""

    paused = Signal()
    resumed = Signal()
    discarded = Signal()

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._name, self._running = name, False
        self.status = label(font=theme.figures_font(theme.CAPTION), role="muted", align=Qt.AlignmentFlag.AlignRight)
        self.bar = QProgressBar(textVisible=False, maximum=BAR_STEPS)
        self.bar.setAccessibleName(f"Download of {name}")
        self.trouble = label(font=theme.caption_font(), role="problem", wrap=True, selectable=True)
        self.pause = IconButton("pause", tip=f"Pause the download of {name}")
        self.cancel = IconButton("stop", tip=f"Cancel the download of {name} and delete its unfinished files")
        self.pause.clicked.connect(lambda: (self.paused if self._running else self.resumed).emit())
        self.cancel.clicked.connect(self.discarded)
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(theme.SPACE)
        grid.setVerticalSpacing(4)
        grid.addWidget(label(name), 0, 0)
        grid.addWidget(self.status, 0, 1)
        grid.addWidget(self.bar, 1, 0, 1, 2)
        grid.addWidget(self.trouble, 2, 0, 1, 2)
        grid.addWidget(self.pause, 0, 2, 2, 1)
        grid.addWidget(self.cancel, 0, 3, 2, 1)
        grid.setColumnStretch(1, 1)
        self.trouble.hide()

    def show_progress(
        self,
        state: str,
        phase: str,
        done: int,
        total: int | None,
        speed: float | None,
        remaining_s: float | None,
        sentence: str,
    ) -> None:
        """`state` is running, paused or failed; `sentence` is the error."""
        self._running = state == "running"
        self.bar.setValue(round(BAR_STEPS * done / total) if total else 0)
        parts = [f"{file_size(done)} of {file_size(total)}"] if total else []
        if self._running:
            parts += [_PHASES[phase]] if phase in _PHASES else []
            parts += [f"{file_size(speed)}/s"] if speed else []
            parts += [f"{duration(remaining_s)} left"] if remaining_s is not None else []
        else:
            parts.append({"failed": "stopped"}.get(state, state))
        self.status.setText("  ·  ".join(parts))
        self.trouble.setText(sentence)
        self.trouble.setVisible(bool(sentence))
        self.pause.set_icon("pause" if self._running else "play")
        tip = f"{'Pause' if self._running else 'Resume'} the download of {self._name}"
        self.pause.setToolTip(plain_tip(tip))
        self.pause.setAccessibleName(tip)


class Picker(QDialog):
    """The dialog for one `repo_type`, "model" or "dataset"."""

    chosen = Signal(str)  # id
    search_requested = Signal(str)  # words
    star_changed = Signal(str, bool)  # id, is a favourite now
    download_requested = Signal(str)  # id
    folder_requested = Signal()
    file_requested = Signal()

    def __init__(self, repo_type: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.repo_type = repo_type
        self.contents, self.model = PickerContents(), PickerModel(self)
        self._loading = True
        self._rows: dict[str, DownloadRow] = {}
        self.setWindowTitle(f"Choose a {repo_type}")
        self.resize(on_screen(self, 940, 580))
        self.search = SearchEdit(f"Find a {repo_type} here or on Hugging Face", f"Find a {repo_type}")
        self.table = PickerTable(self.model, precision=repo_type == "model")
        self.table.setAccessibleName(f"{repo_type.capitalize()}s")
        self.message = label(role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        top_left = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop
        self.detail = label(font=theme.caption_font(), role="muted", wrap=True, selectable=True, align=top_left)
        self.detail.setMinimumHeight(2 * self.detail.fontMetrics().lineSpacing())
        self.folder = button("Folder…", self.folder_requested.emit, tip=f"Choose a folder that holds a {repo_type}")
        self.file = button("File…", self.file_requested.emit, tip="Choose a jsonl, json, csv or parquet file")
        self.file.setVisible(repo_type == "dataset")
        self.star = button("Star", self._toggle_star, tip="Keep this one on top (Ctrl+D)")
        self.leave = button("Close", self.reject)
        self.take = button("Use", self._take, primary=True)
        for secondary in (self.folder, self.file, self.star, self.leave):
            secondary.setAutoDefault(False)  # a focused button with autoDefault would take Enter from Use
        self.take.setDefault(True)
        self._stack = NestedStack(self)
        self._stack.addWidget(self.table.in_card())
        self._stack.addWidget(holder(column(self.message, margins=theme.SPACE)))
        self.downloads = QVBoxLayout()
        self.downloads.setSpacing(12)
        buttons = row(self.folder, self.file, self.star, None, self.leave, self.take)
        parts = (self.search, (self._stack, 1), self.detail, self.downloads, buttons)
        column(*parts, into=self, spacing=12, margins=theme.GUTTER)
        self.search.textChanged.connect(lambda _: self._show())
        self.search.installEventFilter(self)
        self.table.installEventFilter(self)
        self.table.activated.connect(lambda _: self._take())
        self.table.star_pressed.connect(lambda _: self._toggle_star())
        self.table.selectionModel().currentRowChanged.connect(self._show_detail)
        self._show()

    def open_with_recent(self, recent: Sequence[str], suggested: Sequence[PickerEntry] = ()) -> None:
        """Open the dialog in its loading state, which `show_local` ends. `recent` are ids, the newest first."""
        self.contents.recent, self._loading = list(recent), True
        self.contents.suggested = list(suggested)
        self.search.clear()
        self._show()
        self.search.setFocus(Qt.FocusReason.PopupFocusReason)
        self.open()

    def show_local(self, items: Sequence[Mapping[str, Any]], favourites: set[str]) -> None:
        """Show the entries on this machine, and favourites that are not here any more, to be downloaded again."""
        local_ids = {item["id"] for item in items}
        self.contents.local = [entry_from(item, starred=item["id"] in favourites) for item in items]
        missing = sorted(id_ for id_ in favourites if id_ not in local_ids and is_hub_id(id_))
        self.contents.local += [PickerEntry(id_, id_, "hub", starred=True) for id_ in missing]
        self._loading = False
        self._show()

    def show_hub(self, words: str, items: Sequence[Mapping[str, Any]], favourites: set[str]) -> None:
        """Show the Hub's entries for these words."""
        if words == self.contents.hub_words:
            self.contents.hub = [entry_from(item, starred=item["id"] in favourites) for item in items]
            nothing = PickerLine(f"Hugging Face has no {self.repo_type} for “{words}”.", "note")
            self.contents.hub_line = None if items else nothing
            self._show()

    def show_trouble(self, words: str, sentence: str) -> None:
        """Show why the search for `words` failed or, without words, why this machine could not be searched."""
        if not words:
            self._loading = False
        elif words == self.contents.hub_words:
            self.contents.hub, self.contents.hub_line = [], PickerLine(sentence, "trouble")
        self._show()
        if not words:
            self.detail.setText(sentence)

    def download_row(self, id_: str) -> DownloadRow:
        """The row of a download, created on the first call."""
        if id_ not in self._rows:
            self._rows[id_] = DownloadRow(id_)
            self.downloads.addWidget(self._rows[id_])
        return self._rows[id_]

    def has_download(self, id_: str) -> bool:
        return id_ in self._rows

    def drop_download(self, id_: str) -> None:
        if download := self._rows.pop(id_, None):
            self.downloads.removeWidget(download)
            download.hide()
            download.deleteLater()

    def current(self) -> PickerRow | None:
        place = self.table.currentIndex().row()
        return self.model.rows[place] if 0 <= place < len(self.model.rows) and self.table.selected_rows() else None

    def choose_id(self, id_: str) -> None:
        for place, each in enumerate(self.model.rows):
            if isinstance(each, PickerEntry) and each.id == id_:
                self.table.selectRow(place)

    def _show(self) -> None:
        selected = self.current()
        rows = [] if self._loading else self.contents.rows(self.search.text())
        self.model.set_rows(rows)
        self._stack.setCurrentIndex(0 if rows else 1)
        example = _EXAMPLES[self.repo_type]
        self.message.setText(
            "Searching this machine…"
            if self._loading
            else f"Type a name such as {example} to search Hugging Face, or choose a folder."
        )
        if selectable := self._selectable_rows():
            self.table.selectRow(selectable[0])
        if isinstance(selected, PickerEntry):
            self.choose_id(selected.id)
        self._show_detail()

    def _show_detail(self, *_: object) -> None:
        current = self.current()
        entry = current if isinstance(current, PickerEntry) else None
        self.detail.setText(entry.details if entry else "")
        set_style_property(self.detail, "role", "problem" if entry and entry.refusal else "muted")
        self.star.setEnabled(entry is not None)
        self.star.setText("Remove star" if entry and entry.starred else "Star")
        can_search = isinstance(current, PickerLine) and current.role == "offer"
        if can_search:
            text = "Search"
        elif entry is None or entry.is_here:
            text = "Use"
        else:
            size = f" {file_size(entry.size)}" if entry.size else ""
            text = "Resume" if entry.partial else f"Download{size}"
        self.take.setText(text)
        self.take.setEnabled(can_search or (entry is not None and (not entry.refusal or bool(entry.partial))))

    def _take(self) -> None:
        current = self.current()
        if not self.take.isEnabled() or current is None:
            return
        if isinstance(current, PickerLine):
            self._search_hub()
        elif current.is_here:
            self.chosen.emit(current.id)
            self.accept()
        else:
            self.download_requested.emit(current.id)

    def _search_hub(self) -> None:
        if words := self.search.text().strip():
            self.contents.hub, self.contents.hub_words = [], words
            self.contents.hub_line = PickerLine("Searching…", "note")
            self.search_requested.emit(words)
            self._show()

    def _toggle_star(self) -> None:
        current = self.current()
        if isinstance(current, PickerEntry):
            self.contents.set_starred(current.id, starred=not current.starred)
            self.star_changed.emit(current.id, not current.starred)
            self._show()
            self.choose_id(current.id)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Arrow keys in the line edit move in the table, and letters typed in the table go to the line edit."""
        if event.type() != QEvent.Type.KeyPress or not isinstance(event, QKeyEvent):
            return super().eventFilter(watched, event)
        command = event.modifiers() & Qt.KeyboardModifier.ControlModifier
        if command and event.key() == Qt.Key.Key_D:
            self._toggle_star()
        elif event.key() in _ENTER:
            self._search_hub() if command else self._take()
        elif event.key() in _MOVES:
            self._step(_MOVES[Qt.Key(event.key())])
        elif watched is self.table and event.text().isprintable() and event.text() and not command:
            self.search.setFocus(Qt.FocusReason.OtherFocusReason)
            self.search.insert(event.text())
        else:
            return super().eventFilter(watched, event)
        return True

    def _selectable_rows(self) -> list[int]:
        return [i for i, row in enumerate(self.model.rows) if isinstance(row, PickerEntry) or row.role == "offer"]

    def _step(self, by: int) -> None:
        if rows := self._selectable_rows():
            current = self.table.currentIndex().row()
            position = rows.index(current) if current in rows else -1
            target = rows[max(0, min(len(rows) - 1, position + by))]
            self.table.selectRow(target)
            above = max(0, target - 1)  # upwards, the heading above becomes visible too
            self.table.scrollTo(self.model.index(above if by < 0 else target, NAME))

    def done(self, result: int) -> None:
        self.table.setCurrentIndex(QModelIndex())  # the dialog is kept: the next opening starts without a selection
        super().done(result)
