"""The rows of the picker, their model and their table view: entries of this machine and of the Hub under headings, and
lines in between that offer a search or report its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView

from app import theme
from app.widgets.basic import icons
from app.widgets.basic.base_table import BaseTable
from app.widgets.basic.labels_and_buttons import plain_tip
from app.widgets.basic.number_format import DASH, figure, moment

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
