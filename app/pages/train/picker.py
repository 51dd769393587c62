"""The picker: a dialog to choose a model or dataset on this machine, or to find one on Hugging Face and download it.

`Picking` connects the model and dataset fields to it, and shows facts about a model below its field.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from PySide6.QtCore import QEvent, QModelIndex, QObject, Qt, QTimer
from PySide6.QtGui import QFont, QKeyEvent
from PySide6.QtWidgets import QDialog, QWidget

from app import theme
from app.state.jobs import Download, Downloads
from app.state.memory import amount, memory_parts_of_shape
from app.state.presets import preset
from app.state.session import Session
from app.widgets.basic.controls import SearchEdit, add_list_arrow
from app.widgets.basic.dialogs import open_file, open_folder
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import button, from_home, label, plain_tip, progress_bar, show_text
from app.widgets.basic.layout import column, configure, holder, on_screen, row, set_style_property, stack
from app.widgets.basic.number_format import DASH, duration, figure, file_size, moment
from app.widgets.basic.tables import BaseTable, Column, Index, RowsModel
from app.widgets.form.fields import FILE_PATTERNS, Field, PathField
from backend.config import config, first_choices
from backend.models.suggested_models import SUGGESTED_MODELS, suggested
from backend.utils.errors import ConfigProblem
from backend.utils.files import exists, is_file

PLACE_LABELS = {
    "cache": "HF cache",
    "lmstudio": "LM Studio",
    "run": "Earlier run",
    "folder": "Folder",
    "hub": "Hugging Face",
    "bundled": "Bundled",
}
NAME, PRECISION, WHERE = 0, 2, 5
_PHASES = {"asking": "Asking the Hub", "checking": "Checking", "linking": "Almost there"}
_EXAMPLES = {"model": "Qwen3 4bit", "reward model": "Skywork Reward", "dataset": "gsm8k"}
SETTLE_MS = 400
QUESTIONS = {"model": "models", "reward model": "reward_models", "dataset": "datasets"}
_MOVES = {Qt.Key.Key_Down: 1, Qt.Key.Key_Up: -1, Qt.Key.Key_PageDown: 10, Qt.Key.Key_PageUp: -10}


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
    remarks: Sequence[str] = ()
    partial: int = 0
    downloads: int | None = None
    gated: bool = False
    fits: str = ""

    @property
    def is_here(self) -> bool:
        return self.where != "hub" and not self.partial

    @property
    def status(self) -> str:
        if self.refusal:
            return "Unfinished" if self.partial else "Cannot be used"
        if not self.fits and self.where == "hub" and self.downloads is not None:
            return f"{figure(self.downloads)} downloads"
        return self.fits or PLACE_LABELS[self.where]

    @property
    def details(self) -> str:
        partial = f"{file_size(self.partial)} downloaded so far." if self.partial else ""
        gate = "Gated: accept its conditions on its page first." if self.gated else ""
        remarks = " ".join(filter(None, [self.refusal, partial, gate, *self.remarks]))
        place = from_home(self.place)
        if place.startswith("~"):
            place = place.partition("/snapshots/")[0]  # the hash of a snapshot in the Hugging Face cache
        return "\n".join(filter(None, [remarks, place or f"{self.id} on Hugging Face"]))

    def matches(self, words: Sequence[str]) -> bool:
        text = f"{self.name} {self.id} {self.kind} {self.precision} {PLACE_LABELS[self.where]}".lower()
        return all(word in text for word in words)


def entry_from(answer: Mapping[str, Any]) -> PickerEntry:
    """An entry from an item of the service's answer; an item without `where` is on the Hub."""
    known = {key: answer[key] for key in PickerEntry.__dataclass_fields__ if key in answer}
    return PickerEntry(**{"name": answer["id"], "where": "hub", **known})


@dataclass(frozen=True, slots=True)
class PickerLine:
    """A row that is not an entry: a heading, an offer that Enter takes, a note or a failure. It spans all columns."""

    text: str
    role: Literal["heading", "offer", "note", "trouble"]


PickerRow = PickerEntry | PickerLine


def size_text(size: object) -> str:
    return file_size(size) if size else DASH


def is_selectable(row: PickerRow) -> bool:
    return isinstance(row, PickerEntry) or row.role == "offer"


class PickerModel(RowsModel):
    columns = (
        Column("Name"),
        Column("Type", 108, colour="muted"),
        Column("Weights", 68, colour="muted"),
        Column("Size", 76, is_figure=True),
        Column("Changed", 134, is_figure=True, colour="muted"),
        Column("Where", 136, colour="muted"),
    )

    def flags(self, index: Index) -> Qt.ItemFlag:
        return super().flags(index) if is_selectable(self.rows[index.row()]) else Qt.ItemFlag.ItemIsEnabled

    def text(self, row: PickerRow, column: int) -> str:
        if isinstance(row, PickerLine):
            return row.text if column == NAME else ""
        changed = moment(row.changed or None)
        return (row.name, row.kind or DASH, row.precision or DASH, size_text(row.size), changed, row.status)[column]

    def colour(self, row: PickerRow, column: int) -> str:
        if isinstance(row, PickerLine):
            return {"offer": "accent", "trouble": "warning"}.get(row.role, "muted")
        if row.refusal:
            return "warning" if column == WHERE else "muted"
        return super().colour(row, column)

    def font(self, row: PickerRow, column: int) -> QFont | None:
        if isinstance(row, PickerLine):
            return theme.caption_font() if row.role == "heading" else theme.body_font()
        return super().font(row, column)

    def tip(self, row: PickerRow, column: int) -> str | None:
        return plain_tip(row.refusal or row.place or row.id) if isinstance(row, PickerEntry) else None


class DownloadRow(QWidget):
    def __init__(self, download: Download, downloads: Downloads) -> None:
        super().__init__()
        self.status = label(font=theme.figures_font(theme.CAPTION), role="muted", align=Qt.AlignmentFlag.AlignRight)
        self.bar = progress_bar(f"Download of {download.id}")
        self.trouble = label(font=theme.caption_font(), role="problem", wrap=True, selectable=True)
        resume = partial(downloads.start, download.repo_type, download.id)
        self.pause = IconButton(
            "pause", clicked=lambda: downloads.pause(download) if download.state == "running" else resume()
        )
        tip = f"Cancel the download of {download.id} and delete its unfinished files"
        self.cancel = IconButton("stop", tip=tip, clicked=lambda: downloads.discard(download))
        progress = column(row(label(download.id), (self.status, 1)), self.bar, spacing=4)
        column(row((progress, 1), self.pause, self.cancel), self.trouble, into=self, spacing=4)

    def show_progress(self, download: Download) -> None:
        done, total, is_running = download.done, download.total, download.state == "running"
        self.bar.setValue(round(self.bar.maximum() * done / total) if total else 0)
        parts = [f"{file_size(done)} of {file_size(total)}"] if total else []
        if is_running:
            parts += [_PHASES.get(download.phase, ""), f"{file_size(download.speed)}/s" if download.speed else ""]
            parts.append(f"{duration(download.remaining_s)} left" if download.remaining_s is not None else "")
        else:
            parts.append("stopped" if download.state == "failed" else download.state)
        self.status.setText("  ·  ".join(filter(None, parts)))
        show_text(self.trouble, download.sentence)
        self.pause.set_icon("pause" if is_running else "play")
        tip = f"{'Pause' if is_running else 'Resume'} the download of {download.id}"
        configure(self.pause, toolTip=plain_tip(tip), name=tip)


class Picker(QDialog):
    def __init__(self, kind: str, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.kind, self._session, self._repo_type = kind, session, "dataset" if kind == "dataset" else "model"
        self.model = PickerModel(self)
        self._on_taken: Callable[[str], object] = lambda name: None
        self._near: Path | None = None
        self._typed: Sequence[str] = ()
        self._local: list[PickerEntry] | None = None  # while they are looked for
        self._hub: Sequence[PickerRow] = ()  # a line while a search is under way, failed, or found nothing
        self._hub_words = ""
        self._suggested: list[PickerEntry] = []
        self.downloads: dict[str, DownloadRow] = {}
        self.setWindowTitle(f"Choose a {kind}")
        self.resize(on_screen(self, 940, 580))
        self.search = SearchEdit(f"Find a {kind} here or on Hugging Face", f"Find a {kind}")
        middle = Qt.TextElideMode.ElideMiddle  # names of models differ at the end
        self.table = BaseTable(model=self.model, name=f"{kind.capitalize()}s", single=True, textElideMode=middle)
        self.table.setColumnHidden(PRECISION, kind == "dataset")
        self.message = label(role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        top_left = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop
        self.detail = label(font=theme.caption_font(), role="muted", wrap=True, selectable=True, align=top_left)
        self.detail.setMinimumHeight(2 * self.detail.fontMetrics().lineSpacing())
        # A focused button with autoDefault would take Enter from Use.
        tips = f"Choose a folder that holds a {kind}", "Choose a jsonl, json, csv or parquet file"
        self.folder = button("Folder…", lambda: self._browse(open_folder), tip=tips[0], autoDefault=False)
        is_file = kind == "dataset"
        self.file = button("File…", lambda: self._browse(open_file), tip=tips[1], autoDefault=False, shown=is_file)
        self.take = button("Use", self._take, primary=True)
        hint = holder(column(self.message, margins=theme.SPACE))
        self._stack = stack(self.table.in_card(), hint, into=self, nested=True)
        self._download_rows = column(spacing=12)
        buttons = row(self.folder, self.file, None, button("Close", self.reject, autoDefault=False), self.take)
        parts = (self.search, (self._stack, 1), self.detail, self._download_rows, buttons)
        column(*parts, into=self, spacing=12, margins=theme.GUTTER)
        self.setTabOrder(self.search, self.table)
        self.search.textChanged.connect(self._show)
        for watched in (self.search, self.table):
            watched.installEventFilter(self)
        self.table.activated.connect(self._take)
        self.table.selectionModel().currentRowChanged.connect(self._show_detail)
        configure(session.downloads, changed=self._show_download, finished=self._on_finished)
        self._show()

    def choose(self, take: Callable[[str], object], near: Path | None = None, typed: Sequence[str] = ()) -> None:
        """Open the dialog: `take` gets the chosen id or path; `typed` are those in the form."""
        self._on_taken, self._near, self._typed, self._local = take, near, typed, None
        self.table.setCurrentIndex(QModelIndex())  # the dialog is kept: each opening starts without a selection
        self._suggested = suggested_models() if self.kind == "model" else []
        if self.kind == "dataset":
            name, about = first_choices.DATASET, f"{first_choices.DATASET_ABOUT.capitalize()}."
            self._suggested = [PickerEntry(id=name, name=name, where="hub", kind="2,000 rows", remarks=(about,))]
        self.search.clear()
        self._show()
        self.search.setFocus(Qt.FocusReason.PopupFocusReason)
        self.open()
        for download in self._session.downloads.of(self._repo_type):
            self._show_download(download)
        self._refresh()

    def _refresh(self) -> None:
        names = [*self._session.prefs.used(self.kind), *self._typed]

        def show(answer: dict[str, Any]) -> None:
            self._local = [entry_from(item) for item in answer["found"]]
            self._show()

        def explain(faults: Sequence[ConfigProblem]) -> None:
            self._local = self._local or []
            self._show()
            self.detail.setText(faults[0].sentence)

        paths = [name for name in dict.fromkeys(names) if name.startswith(("/", "~", ".")) or exists(Path(name))]
        self._session.service.ask(QUESTIONS[self.kind], show, on_refused=explain, owner=self, paths=paths)

    def _show_download(self, download: Download) -> None:
        if download.repo_type != self._repo_type:
            return
        shown = self.downloads.get(download.id)
        if download.state != "done":
            if shown is None:
                shown = self.downloads[download.id] = DownloadRow(download, self._session.downloads)
                self._download_rows.addWidget(shown)
            shown.show_progress(download)
        elif shown is not None:
            del self.downloads[download.id]
            shown.hide()
            shown.deleteLater()

    def _on_finished(self, download: Download) -> None:
        if self.isVisible() and download.repo_type == self._repo_type:
            self._refresh()

    def choose_id(self, id_: str) -> None:
        for place, each in enumerate(self.model.rows):
            if isinstance(each, PickerEntry) and each.id == id_:
                self.table.selectRow(place)

    def _show(self) -> None:
        selected, typed = self.table.selected_row, self.search.text().strip()
        words, local = typed.lower().split(), self._local or []
        matching = [entry for entry in local if entry.matches(words)]
        recent = [entry for id_ in self._session.prefs.used(self.kind) for entry in matching if entry.id == id_]
        others = [entry for entry in matching if entry not in recent]
        others.sort(key=lambda entry: bool(entry.refusal))  # unusable ones last, each half newest first
        known_ids = {entry.id for entry in local}
        suggested = [entry for entry in self._suggested if entry.matches(words) and entry.id not in known_ids]
        rows: list[PickerRow] = []
        for heading, entries in (("Recent", recent), ("On this machine", others), ("Suggested downloads", suggested)):
            rows += [PickerLine(heading, "heading"), *entries] if entries else []
        if typed and typed == self._hub_words:
            known_ids |= {entry.id for entry in suggested}
            rows.append(PickerLine("On Hugging Face", "heading"))
            rows += [row for row in self._hub if isinstance(row, PickerLine) or row.id not in known_ids]
        elif typed:
            rows.append(PickerLine(f"Search Hugging Face for “{typed}”", "offer"))
        is_loading = self._local is None
        rows = [] if is_loading else rows
        self.model.set_rows(rows)
        self.table.clearSpans()
        for place, each in enumerate(rows):
            if isinstance(each, PickerLine):
                self.table.setSpan(place, 0, 1, len(self.model.columns))
        self._stack.setCurrentIndex(0 if rows else 1)
        hint = f"Type a name such as {_EXAMPLES[self.kind]} to search Hugging Face, or choose a folder."
        self.message.setText("Searching this machine…" if is_loading else hint)
        first = next((place for place, each in enumerate(rows) if is_selectable(each)), None)
        if first is not None:
            self.table.selectRow(first)
        if isinstance(selected, PickerEntry):
            self.choose_id(selected.id)
        self._show_detail()

    def _show_detail(self) -> None:
        current: PickerRow | None = self.table.selected_row
        entry = current if isinstance(current, PickerEntry) else None
        self.detail.setText(entry.details if entry else "")
        set_style_property(self.detail, "role", "problem" if entry and entry.refusal else "muted")
        if entry is None:
            configure(self.take, text="Search" if current else "Use", enabled=current is not None)
            return
        download = f"Download {file_size(entry.size)}" if entry.size else "Download"
        text = "Use" if entry.is_here else "Resume" if entry.partial else download
        configure(self.take, text=text, enabled=not entry.refusal or bool(entry.partial))

    def _take(self) -> None:
        current: PickerRow | None = self.table.selected_row
        if not self.take.isEnabled() or current is None:
            return
        if isinstance(current, PickerLine):
            self._search_hub()
            return
        self._take_name(current.id)
        if current.is_here:
            self.accept()
        else:
            self._session.downloads.start(self._repo_type, current.id)

    def _take_name(self, name: str) -> None:
        self._on_taken(name)
        self._session.prefs.remember_used(self.kind, name)

    def _browse(self, ask: Callable[..., Path | None]) -> None:
        pattern = () if ask is open_folder else (FILE_PATTERNS[self.kind],)
        if (chosen := ask(self, self.kind, self.kind.capitalize(), *pattern, near=self._near)) is not None:
            self._take_name(str(chosen))
            self.accept()

    def _search_hub(self) -> None:
        if not (words := self.search.text().strip()):
            return

        def show(rows: Sequence[PickerRow]) -> None:
            if words == self._hub_words:
                self._hub = rows
                self._show()

        self._hub_words, nothing = words, f"Hugging Face has no {self.kind} for “{words}”."
        show([PickerLine("Searching…", "note")])
        self._session.service.ask(
            "hub_search",
            lambda answer: show([entry_from(item) for item in answer["found"]] or [PickerLine(nothing, "note")]),
            on_refused=lambda faults: show([PickerLine(faults[0].sentence, "trouble")]),
            owner=self,
            words=words,
            repo_type=self._repo_type,
            is_reward=self.kind == "reward model",
        )

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() != QEvent.Type.KeyPress or not isinstance(event, QKeyEvent):
            return super().eventFilter(watched, event)
        command = event.modifiers() & Qt.KeyboardModifier.ControlModifier
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._search_hub() if command else self._take()
        elif event.key() in _MOVES:
            by, current = _MOVES[Qt.Key(event.key())], self.table.currentIndex().row()
            rows = [place for place, each in enumerate(self.model.rows) if is_selectable(each)]
            if rows:
                position = rows.index(current) if current in rows else -1
                target = rows[max(0, min(len(rows) - 1, position + by))]
                self.table.selectRow(target)
                above = max(0, target - 1)  # upwards, the heading above becomes visible too
                self.table.scrollTo(self.model.index(above if by < 0 else target, NAME))
        elif watched is self.table and event.text().isprintable() and event.text() and not command:
            self.search.setFocus(Qt.FocusReason.OtherFocusReason)
            self.search.insert(event.text())
        else:
            return super().eventFilter(watched, event)
        return True


def suggested_models() -> list[PickerEntry]:
    quick = preset("fast_try")
    base = config.parse({**quick.values, "model": SUGGESTED_MODELS[0].id, "data": "-"})
    entries = []
    for model in SUGGESTED_MODELS:
        memory = memory_parts_of_shape(base.model_copy(update={"model": model.id}), model.shape)
        need = f"Training with the preset {quick.title} needs about {amount(memory.total)} of {amount(memory.limit)}."
        entries.append(
            PickerEntry(
                id=model.id,
                name=model.id,
                where="hub",
                size=round(model.download_bytes),
                kind=model.shape.kind,
                precision="4-bit",
                remarks=(model.good_for, need),
                fits="Fits" if memory.fits else "Too large",
            )
        )
    return entries


class Picking(QObject):
    """The pickers of a page, one dialog each for models and datasets. Fields of other kinds are ignored."""

    def __init__(self, session: Session, fields: Iterable[Field], page: QWidget) -> None:
        super().__init__(page)
        self.session, self._page = session, page
        self._pickers: dict[str, Picker] = {}
        self._fields: dict[str, PathField] = {}
        self._rest_timers: dict[str, QTimer] = {}
        for field in fields:
            if not isinstance(field, PathField) or field.setting.kind not in QUESTIONS:
                continue
            self._fields[field.setting.key] = field
            add_list_arrow(field.control, field.pick_requested.emit)
            field.pick_requested.connect(
                lambda field=field: self.pick(field.setting.kind, field.take, near=field.near())
            )
            if field.setting.kind == "model":
                timer = QTimer(self, singleShot=True, interval=SETTLE_MS)
                self._rest_timers[field.setting.key] = configure(timer, timeout=partial(self._look_up, field))
        session.draft.changed.connect(self._on_changed)
        session.field_requested.connect(self._on_changed)  # Run was refused: the problem may have been fixed on disk
        session.run_changed.connect(self._remember_run)
        session.downloads.finished.connect(self._on_finished)
        self._on_changed("")

    def pick(self, kind: str, take: Callable[[str], object], near: Path | None = None) -> None:
        if kind not in self._pickers:
            self._pickers[kind] = Picker(kind, self.session, self._page.window())
        of_kind = [field.value() for field in self._fields.values() if field.setting.kind == kind]
        self._pickers[kind].choose(take, near, [str(value) for value in of_kind if value])

    def _on_finished(self, download: Download) -> None:
        is_data = download.repo_type == "dataset"
        if any((kind == "dataset") == is_data for kind in self._pickers):
            self.session.message.emit(f"{download.id} is on this machine now.")
        for key, timer in self._rest_timers.items():
            if self._fields[key].value() == download.id:
                timer.start()

    def _on_changed(self, key: str) -> None:
        for changed in self._rest_timers if key == "" else {key} & self._rest_timers.keys():
            self._fields[changed].show_note("")
            self._rest_timers[changed].start()

    def _look_up(self, field: PathField) -> None:
        if name := str(self.session.draft.value(field.setting.key) or "").strip():
            self.session.service.ask(
                "model_facts",
                partial(self._show_facts, field, name),
                on_refused=lambda faults: field.show_note(faults[0].sentence, wrong=True),
                owner=field,
                name=name,
            )

    def _show_facts(self, field: PathField, name: str, facts: dict[str, Any] | None) -> None:
        is_base, now = field.setting.key == "model", str(self.session.draft.value(field.setting.key) or "").strip()
        may_be_on_hub = name.count("/") == 1 and not name.startswith(("/", "~", "."))
        if now != name or (facts is None and not may_be_on_hub):
            return
        if is_base:
            self.session.draft.refuse_model(name, facts["refusal"] if facts else "")
        if facts is None:
            known = suggested(name)
            what = f"about {size_text(known.download_bytes)}" if known is not None else "it"
            field.show_note(f"Not on this machine: {what} will be downloaded when the run starts.")
        elif facts["refusal"] and not is_base and is_file(Path(name).expanduser() / "adapter_config.json"):
            field.show_note("An adapter of the base model.")
        elif facts["refusal"]:  # the base model's refusal is among the form's problems already
            field.show_note("" if is_base else facts["refusal"], wrong=True)
        else:
            parts = [facts["kind"], facts["precision"], size_text(facts["size"]), PLACE_LABELS[facts["where"]]]
            field.show_note("  ·  ".join(filter(None, [*parts, *facts["remarks"]])))

    def _remember_run(self) -> None:
        if self.session.is_training:
            for field in self._fields.values():
                if field.value():
                    self.session.prefs.remember_used(field.setting.kind, str(field.value()))
