"""The rows of the picker, their model and their table view: entries of this machine and of the Hub under headings, and
lines in between that offer a search or report its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from PySide6.QtCore import QAbstractTableModel, QEvent, QModelIndex, QObject, QPersistentModelIndex, Qt, Signal
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QDialog,
    QGridLayout,
    QHBoxLayout,
    QHeaderView,
    QLineEdit,
    QProgressBar,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import NestedStack, on_screen
from app.widgets.basic.number_format import DASH, THIN, duration, figure, moment
from app.widgets.basic.tables import BaseTable

Index = QModelIndex | QPersistentModelIndex
RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
PLACE_LABELS = {
    "cache": "HF cache", "lmstudio": "LM Studio", "run": "Earlier run", "folder": "Folder", "hub": "Hugging Face",
    "bundled": "Bundled",
}  # fmt: skip
NAME_LEAST = 200
STAR, NAME, KIND, PRECISION, SIZE, CHANGED, WHERE = range(7)
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size_text(size: object) -> str:
    """A size in bytes with a decimal unit: 4.29 GB."""
    if not isinstance(size, (int, float)) or size <= 0:
        return DASH
    scale, unit = next(((scale, unit) for scale, unit in _SIZES if size >= scale * 0.9995), (1.0, "B"))
    return figure(size / scale, unit)


def display_path(place: str) -> str:
    """A path with ~ for the home folder, and without the snapshot's hash if it is in the Hugging Face cache."""
    home = f"{Path.home()}/"
    return f"~/{place.removeprefix(home)}".partition("/snapshots/")[0] if place.startswith(home) else place


@dataclass(frozen=True, slots=True)
class PickerEntry:
    """One model or dataset. `id` is the value for the form's field; `size` and `partial` (downloaded so far) in bytes,
    `changed` in unix seconds; `refusal` says why it cannot be used; `fits` whether training a suggested model fits in this machine's
    memory, in two words."""

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

    def matches(self, words: Sequence[str]) -> bool:
        """Whether every one of the lower-case words occurs in its name, id, type, precision or location."""
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


@dataclass(slots=True)
class PickerContents:
    """Everything the picker can show; `rows` filters and groups it for the words that were typed."""

    local: list[PickerEntry] = field(default_factory=list)
    hub: list[PickerEntry] = field(default_factory=list)
    suggested: list[PickerEntry] = field(default_factory=list)
    """Entries on the Hub to begin with; one that is on this machine is not shown among them."""
    recent: list[str] = field(default_factory=list)
    hub_words: str = ""
    """The words that `hub` is the result for."""
    hub_line: PickerLine | None = None
    """A line in place of Hub results: a search is under way, failed, or found nothing."""

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
        others.sort(key=lambda entry: bool(entry.refusal))  # unusable ones last; stable, so each half is newest first
        rows: list[PickerRow] = []
        for heading, entries in (("Favourites", favourites), ("Recent", recent), ("On this machine", others)):
            rows += [PickerLine(heading, "heading"), *entries] if entries else []
        local_ids = {entry.id for entry in self.local}
        suggested = [entry for entry in self.suggested if entry.matches(words) and entry.id not in local_ids]
        rows += [PickerLine("Good to begin with, to download", "heading"), *suggested] if suggested else []
        return rows + self._hub_rows(typed.strip())

    def _hub_rows(self, typed: str) -> list[PickerRow]:
        local_ids = {entry.id for entry in self.local}
        if typed and typed == self.hub_words:
            state = [self.hub_line] if self.hub_line else []
            known_ids = local_ids | {entry.id for entry in self.suggested if entry.matches(typed.lower().split())}
            remote = [entry for entry in self.hub if entry.id not in known_ids]
            return [PickerLine("On Hugging Face", "heading"), *state, *remote]
        return [PickerLine(f"Search Hugging Face for “{typed}”", "offer")] if typed else []


@dataclass(frozen=True, slots=True)
class _PickerColumn:
    head: str
    text: Callable[[PickerEntry], str]
    width: int
    right: bool = False


COLUMNS = (
    _PickerColumn("", lambda entry: "", 28),
    _PickerColumn("Name", lambda entry: entry.name, 0),
    _PickerColumn("Type", lambda entry: entry.kind or DASH, 108),
    _PickerColumn("Weights", lambda entry: entry.precision or DASH, 68),
    _PickerColumn("Size", lambda entry: size_text(entry.size), 76, True),
    _PickerColumn("Changed", lambda entry: moment(entry.changed or None), 134, True),
    _PickerColumn("Where", lambda entry: _where(entry), 136),
)


class PickerModel(QAbstractTableModel):
    """A table model of entries and lines.

    Attributes:
        rows – in the order shown.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[PickerRow] = []

    def show_rows(self, rows: Iterable[PickerRow]) -> None:
        self.beginResetModel()
        self.rows = list(rows)
        self.endResetModel()

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(COLUMNS)

    def flags(self, index: Index) -> Qt.ItemFlag:
        row = self.rows[index.row()]
        is_text = isinstance(row, PickerLine) and row.role != "offer"
        return Qt.ItemFlag.ItemIsEnabled if is_text else Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return RIGHT if COLUMNS[section].right else LEFT
        return COLUMNS[section].head if role == Qt.ItemDataRole.DisplayRole else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, place = self.rows[index.row()], index.column()
        if isinstance(row, PickerLine):
            return _line_data(row, role) if place == STAR else None
        if role == Qt.ItemDataRole.DisplayRole:
            return COLUMNS[place].text(row)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return RIGHT if COLUMNS[place].right else LEFT
        if role == Qt.ItemDataRole.FontRole:
            return theme.figures_font()
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(row.refusal or row.place or row.id)
        if role == Qt.ItemDataRole.DecorationRole and place == STAR:
            colours = theme.palette()
            return icons.icon(
                "star-filled" if row.starred else "star", colours.clip if row.starred else colours.placeholder, 16
            )
        if role == Qt.ItemDataRole.AccessibleTextRole and place == STAR:
            return "favourite" if row.starred else "no favourite"
        return _colour(row, place) if role == Qt.ItemDataRole.ForegroundRole else None


class PickerTable(BaseTable):
    """The table view; a PickerLine spans its row.

    Signals:
        star_pressed(row) – the star of an entry was clicked.
    """

    star_pressed = Signal(int)

    def __init__(self, model: PickerModel, *, precision: bool) -> None:
        super().__init__()
        self.setModel(model)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setTextElideMode(Qt.TextElideMode.ElideMiddle)  # names of models differ at the end
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        for place, column in enumerate(COLUMNS):
            self.setColumnWidth(place, theme.scaled(column.width))
        self.setColumnHidden(PRECISION, not precision)
        self.clicked.connect(lambda index: index.column() == STAR and self.star_pressed.emit(index.row()))

    def span_lines(self, rows: Sequence[PickerEntry | PickerLine]) -> None:
        """Span the lines over all columns; spans belong to the view and are lost when the model is reset."""
        self.clearSpans()
        for place, row in enumerate(rows):
            if isinstance(row, PickerLine):
                self.setSpan(place, 0, 1, len(COLUMNS))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        places = [place for place in range(len(COLUMNS)) if place != NAME and not self.isColumnHidden(place)]
        taken = sum(self.columnWidth(place) for place in places)
        self.setColumnWidth(NAME, max(theme.scaled(NAME_LEAST), self.viewport().width() - taken))


def _where(entry: PickerEntry) -> str:
    """Where an entry is; instead, that it cannot be used, or on the Hub whether it fits, else its number of downloads."""
    if entry.refusal:
        return "Unfinished" if entry.partial else "Cannot be used"
    if entry.fits:
        return entry.fits
    if entry.where == "hub" and entry.downloads is not None:
        return f"{_short(entry.downloads)} downloads"
    return PLACE_LABELS[entry.where]


def _short(count: int) -> str:
    """41,230 as 41.2k."""
    scale, letter = next(((scale, letter) for scale, letter in ((1e6, "M"), (1e3, "k")) if count >= scale), (1, ""))
    return f"{figure(count / scale)}{letter}"


def _line_data(line: PickerLine, role: int) -> Any:
    colours = theme.palette()
    if role == Qt.ItemDataRole.DisplayRole:
        return line.text
    if role == Qt.ItemDataRole.FontRole:
        return theme.caption_font() if line.role == "heading" else theme.body_font()
    if role == Qt.ItemDataRole.ForegroundRole:
        return {"offer": colours.accent, "trouble": colours.warning}.get(line.role, colours.muted)
    return None


def _colour(row: PickerEntry, place: int) -> Any:
    colours = theme.palette()
    if row.refusal:
        return colours.warning if place == WHERE else colours.muted
    return colours.text if place in (NAME, SIZE) else colours.muted


# A row for one download: name, progress, and buttons to pause, resume and cancel.

BAR_STEPS = 1000
"""Resolution of the progress bar. Its range cannot be in bytes: QProgressBar counts in 32-bit integers."""
_PHASES = {"asking": "Asking the Hub", "checking": "Checking", "linking": "Almost there"}


class DownloadRow(QWidget):
    """A download.

    Attributes:
        name, status, bar, trouble – labels and progress bar; `trouble` says why it failed.
        pause, cancel – the buttons; `pause` resumes a download that is not running.

    Signals:
        paused, resumed, given_up – the button was clicked.
    """

    paused = Signal()
    resumed = Signal()
    given_up = Signal()

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._running = False
        self.name = label(name)
        self.status = label(font=theme.figures_font(theme.CAPTION), role="muted", align=Qt.AlignmentFlag.AlignRight)
        self.bar = QProgressBar(textVisible=False, maximum=BAR_STEPS)
        self.bar.setAccessibleName(f"Download of {name}")
        self.trouble = label(font=theme.caption_font(), role="problem", wrap=True, selectable=True)
        self.pause = IconButton("pause", tip=f"Pause the download of {name}")
        self.cancel = IconButton("stop", tip=f"Cancel the download of {name} and throw away what is unfinished")
        self.pause.clicked.connect(lambda: (self.paused if self._running else self.resumed).emit())
        self.cancel.clicked.connect(self.given_up)
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(theme.SPACE)
        grid.setVerticalSpacing(4)
        grid.addWidget(self.name, 0, 0)
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
        """`state` is running, paused or failed; sizes in bytes, speed in bytes per second; `sentence` says what failed."""
        self._running = state == "running"
        self.bar.setValue(round(BAR_STEPS * done / total) if total else 0)
        self.status.setText(_status(state, phase, done, total, speed, remaining_s))
        self.trouble.setText(sentence)
        self.trouble.setVisible(bool(sentence))
        self.pause.set_icon("pause" if self._running else "play")
        tip = f"{'Pause' if self._running else 'Resume'} the download of {self.name.text()}"
        self.pause.setToolTip(plain_tip(tip))
        self.pause.setAccessibleName(tip)


def _status(
    state: str, phase: str, done: int, total: int | None, speed: float | None, remaining_s: float | None
) -> str:
    """“1.24 GB of 4.29 GB · 48.1 MB/s · 1 min 04 s left”, as far as it is known."""
    parts = [f"{size_text(done) if done else f'0{THIN}B'} of {size_text(total)}"] if total else []
    if state == "running":
        parts += [_PHASES[phase]] if phase in _PHASES else []
        parts += [f"{size_text(speed)}/s"] if speed else []
        parts += [f"{duration(remaining_s)} left"] if remaining_s is not None else []
    else:
        parts.append({"paused": "paused", "failed": "stopped"}.get(state, state))
    return "  ·  ".join(parts)


# ── picker ───────────────────────────────────────────────────────────────────────────────────────────────────────────

WIDTH, HEIGHT = 940, 580
_WORDS = {
    "model": ("model", "models", "Qwen3 4bit"),
    "dataset": ("dataset", "datasets", "gsm8k"),
}
_MOVES = {Qt.Key.Key_Down: 1, Qt.Key.Key_Up: -1, Qt.Key.Key_PageDown: 10, Qt.Key.Key_PageUp: -10}


class Picker(QDialog):
    """The dialog for one `repo_type`, "model" or "dataset".

    Attributes:
        contents – entries on this machine and on the Hub; the table model shows those that match the search words.

    Signals:
        chosen(id) – the user chose it; the value for the form's field.
        search_requested(words) – search the Hub; answer with `show_hub` or `show_trouble`.
        star_changed(id, whether it is a favourite now).
        download_requested(id).
        folder_requested, file_requested – open the desktop's own file dialog.
    """

    chosen = Signal(str)
    search_requested = Signal(str)
    star_changed = Signal(str, bool)
    download_requested = Signal(str)
    folder_requested = Signal()
    file_requested = Signal()

    def __init__(self, repo_type: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.repo_type = repo_type
        self.contents, self.model = PickerContents(), PickerModel(self)
        self._one, self._many, self._example = _WORDS[repo_type]
        self._loading = True
        self._rows: dict[str, DownloadRow] = {}
        self.setWindowTitle(f"Choose a {self._one}")
        self.resize(on_screen(self, WIDTH, HEIGHT))
        self._create_widgets()
        self._lay_out()
        self._connect()
        self._show()

    # Composition

    def _create_widgets(self) -> None:
        self.search = QLineEdit(placeholderText=f"Find a {self._one} here or on Hugging Face")
        self.search.setAccessibleName(f"Find a {self._one}")
        self.search.setClearButtonEnabled(True)
        self.search.setProperty("role", "search")
        self._icon_action = self.search.addAction(icons.icon("search"), QLineEdit.ActionPosition.LeadingPosition)
        self.table = PickerTable(self.model, precision=self.repo_type == "model")
        self.table.setAccessibleName(self._many.capitalize())
        middle = Qt.AlignmentFlag.AlignCenter
        self.message = label(role="muted", wrap=True, align=middle)
        self.detail = label(font=theme.caption_font(), role="muted", wrap=True, selectable=True)
        self.detail.setMinimumHeight(2 * self.detail.fontMetrics().lineSpacing())
        self.detail.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop)
        self.folder = button("Folder…", self.folder_requested.emit, tip=f"Choose a folder that holds a {self._one}")
        self.file = button("File…", self.file_requested.emit, tip="Choose a jsonl, json, csv or parquet file")
        self.file.setVisible(self.repo_type == "dataset")
        self.star = button("Star", self._toggle_star, tip="Keep this one on top (Ctrl+D)")
        self.leave = button("Close", self.reject)
        self.take = button("Use", self._take, primary=True)
        for secondary in (self.folder, self.file, self.star, self.leave):
            secondary.setAutoDefault(False)  # a focused button with autoDefault would take Enter from Use
        self.take.setDefault(True)

    def _lay_out(self) -> None:
        card = self.table.in_card()
        empty = QWidget()
        QVBoxLayout(empty).addWidget(self.message)
        self._stack = NestedStack(self)
        self._stack.addWidget(card)
        self._stack.addWidget(empty)
        self.downloads = QVBoxLayout()
        self.downloads.setSpacing(12)
        buttons = QHBoxLayout()
        buttons.setSpacing(theme.SPACE)
        for widget in (self.folder, self.file, self.star):
            buttons.addWidget(widget)
        buttons.addStretch(1)
        buttons.addWidget(self.leave)
        buttons.addWidget(self.take)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(theme.GUTTER,) * 4)
        column.setSpacing(12)
        column.addWidget(self.search)
        column.addLayout(self._stack, 1)
        column.addWidget(self.detail)
        column.addLayout(self.downloads)
        column.addLayout(buttons)

    def _connect(self) -> None:
        self.search.textChanged.connect(lambda _: self._show())
        self.search.installEventFilter(self)
        self.table.installEventFilter(self)
        self.table.activated.connect(lambda _: self._take())
        self.table.star_pressed.connect(lambda _: self._toggle_star())
        self.table.selectionModel().currentRowChanged.connect(self._show_detail)
        theme.signals.changed.connect(self._update_icon)
        self._update_icon()

    # Showing

    def open_with_recent(self, recent: Sequence[str], suggested: Sequence[PickerEntry] = ()) -> None:
        """Open the dialog in its loading state; `show_local` ends it. `recent` are ids, the newest first; `suggested` are entries of
        the Hub that are good to begin with."""
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
        missing = sorted(id_ for id_ in favourites if id_ not in local_ids and _is_hub_id(id_))
        self.contents.local += [PickerEntry(id_, id_, "hub", starred=True) for id_ in missing]
        self._loading = False
        self._show()

    def show_hub(self, words: str, items: Sequence[Mapping[str, Any]], favourites: set[str]) -> None:
        """Show the Hub's entries for these words; an answer to an earlier search is ignored."""
        if words == self.contents.hub_words:
            self.contents.hub = [entry_from(item, starred=item["id"] in favourites) for item in items]
            nothing = PickerLine(f"Hugging Face has no {self._one} for “{words}”.", "note")
            self.contents.hub_line = None if items else nothing
            self._show()

    def show_trouble(self, words: str, sentence: str) -> None:
        """Show why the search for `words` failed, or, with no words, why this machine could not be searched."""
        if not words:
            self._loading = False
            self.detail.setText(sentence)
        elif words == self.contents.hub_words:
            self.contents.hub, self.contents.hub_line = [], PickerLine(sentence, "trouble")
        self._show()

    def download_row(self, id_: str) -> DownloadRow:
        """The row of a download, created on the first call."""
        if id_ not in self._rows:
            self._rows[id_] = DownloadRow(id_)
            self.downloads.addWidget(self._rows[id_])
        return self._rows[id_]

    def has_download(self, id_: str) -> bool:
        return id_ in self._rows

    def drop_download(self, id_: str) -> None:
        if row := self._rows.pop(id_, None):
            self.downloads.removeWidget(row)
            row.hide()
            row.deleteLater()

    def current(self) -> PickerEntry | PickerLine | None:
        """The selected row, if any."""
        row = self.table.currentIndex().row()
        return self.model.rows[row] if 0 <= row < len(self.model.rows) and self.table.selected_rows() else None

    def choose_id(self, id_: str) -> None:
        """Select this entry, if it is shown."""
        for number, row in enumerate(self.model.rows):
            if isinstance(row, PickerEntry) and row.id == id_:
                self.table.selectRow(number)

    def _show(self) -> None:
        selected = self.current()
        rows = [] if self._loading else self.contents.rows(self.search.text())
        self.model.show_rows(rows)
        self.table.span_lines(rows)
        self._stack.setCurrentIndex(0 if rows else 1)
        self.message.setText(self._empty_text())
        self._restore_selection(selected.id if isinstance(selected, PickerEntry) else "")
        self._show_detail()

    def _restore_selection(self, id_: str) -> None:
        """Select the entry with this id, else the first row that can be selected."""
        rows = self._selectable_rows()
        same = [i for i in rows if isinstance(row := self.model.rows[i], PickerEntry) and row.id == id_]
        for i in (same or rows)[:1]:
            self.table.selectRow(i)

    def _empty_text(self) -> str:
        if self._loading:
            return "Looking at what is on this machine…"
        return f"Type a name such as {self._example} to search Hugging Face, or choose a folder."

    def _show_detail(self, *_: object) -> None:
        row = self.current()
        entry = row if isinstance(row, PickerEntry) else None
        is_unusable = bool(entry and entry.refusal and not entry.partial)
        self.detail.setText(_detail_text(entry) if entry else "")
        self.detail.setProperty("role", "problem" if entry and entry.refusal else "muted")
        self.detail.style().polish(self.detail)
        self.star.setEnabled(entry is not None)
        self.star.setText("Remove star" if entry and entry.starred else "Star")
        self.take.setText(_button_text(row))
        self.take.setEnabled(
            row is not None and not is_unusable and not (isinstance(row, PickerLine) and row.role != "offer")
        )

    def _update_icon(self) -> None:
        self._icon_action.setIcon(icons.icon("search", theme.palette().muted, 16))
        self.table.viewport().update()

    # Actions

    def _take(self) -> None:
        """Do what the primary button says: take the selected entry, download it, or search the Hub."""
        row = self.current()
        if not self.take.isEnabled() or row is None:
            return
        if isinstance(row, PickerLine):
            self._search_hub()
        elif row.is_here:
            self.chosen.emit(row.id)
            self.accept()
        else:
            self.download_requested.emit(row.id)

    def _search_hub(self) -> None:
        words = self.search.text().strip()
        if words:
            self.contents.hub, self.contents.hub_words = [], words
            self.contents.hub_line = PickerLine("Searching…", "note")
            self.search_requested.emit(words)
            self._show()

    def _toggle_star(self) -> None:
        row = self.current()
        if isinstance(row, PickerEntry):
            self.contents.set_starred(row.id, starred=not row.starred)
            self.star_changed.emit(row.id, not row.starred)
            self._show()
            self.choose_id(row.id)

    # The keyboard

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Let the arrow keys move in the table while the line edit has the focus, and letters typed in the table go to
        the line edit."""
        if event.type() != QEvent.Type.KeyPress or not isinstance(event, QKeyEvent):
            return super().eventFilter(watched, event)
        command = event.modifiers() & Qt.KeyboardModifier.ControlModifier
        if command and event.key() == Qt.Key.Key_D:
            self._toggle_star()
        elif command and event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._search_hub()
        elif event.key() in _MOVES:
            self._step(_MOVES[Qt.Key(event.key())])
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._take()
        elif watched is self.table and event.text().isprintable() and event.text() and not command:
            self.search.setFocus(Qt.FocusReason.OtherFocusReason)
            self.search.insert(event.text())
        else:
            return super().eventFilter(watched, event)
        return True

    def _selectable_rows(self) -> list[int]:
        return [i for i, row in enumerate(self.model.rows) if isinstance(row, PickerEntry) or row.role == "offer"]

    def _step(self, by: int) -> None:
        """Move the selection by `by` selectable rows; headings and notes are skipped."""
        rows = self._selectable_rows()
        if rows:
            current = self.table.currentIndex().row()
            position = rows.index(current) if current in rows else -1
            target = rows[max(0, min(len(rows) - 1, position + by))]
            self.table.selectRow(target)
            above = max(0, target - 1)  # upwards, the heading above becomes visible too
            self.table.scrollTo(self.model.index(above if by < 0 else target, NAME))

    def done(self, result: int) -> None:
        self.table.setCurrentIndex(
            QModelIndex()
        )  # the dialog is kept: the next opening must not start with this selection
        super().done(result)


def _is_hub_id(id_: str) -> bool:
    """Whether an id names a repository, and not a path on this machine."""
    return "/" in id_ and not id_.startswith(("/", "~", "."))


def _detail_text(entry: PickerEntry) -> str:
    """The text below the table: problems and remarks, then where the entry is."""
    partial = f"{size_text(entry.partial)} of it have arrived." if entry.partial else ""
    gate = "It is gated: its conditions must be accepted on its page." if entry.gated else ""
    remarks = " ".join(filter(None, [entry.refusal, partial, gate, *entry.remarks]))
    path = display_path(entry.place) or f"{entry.id} on Hugging Face"
    return f"{remarks}\n{path}" if remarks else path


def _button_text(row: PickerEntry | PickerLine | None) -> str:
    if isinstance(row, PickerLine):
        return "Search" if row.role == "offer" else "Use"
    if row is None or row.is_here:
        return "Use"
    return "Resume" if row.partial else f"Download {size_text(row.size)}" if row.size else "Download"
