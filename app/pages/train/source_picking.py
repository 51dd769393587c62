"""Connects the model and dataset fields to the picker, the service and the downloads, and shows facts about a model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, QTimer
from PySide6.QtWidgets import QWidget

from app.pages.train.picker import PLACE_LABELS, Picker, PickerEntry, is_hub_id, size_text
from app.state.jobs import Download
from app.state.memory import amount, memory_parts_of_shape
from app.state.presets import preset
from app.state.session import Session
from app.widgets.form.field import Field
from app.widgets.form.fields import PathField
from backend.config import config, first_choices
from backend.models.suggested_models import SUGGESTED_MODELS, suggested
from backend.utils import places
from backend.utils.files import exists, is_file

FITS = {"fits": "Fits", "tight": "May not fit", "over": "Too large"}
"""Verdict on the memory → words for the column “Where”."""
SETTLE_MS = 400
QUESTIONS = {"model": "models", "dataset": "datasets"}


def suggested_models() -> list[PickerEntry]:
    """An entry for each suggested model, the smallest first, with its memory under the preset for a quick try."""
    quick = preset(places.resources() / "presets" / "fast_try.yaml")
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
                fits=FITS[memory.verdict],
            )
        )
    return entries


def is_path(name: str) -> bool:
    return name.startswith(("/", "~", ".")) or exists(Path(name))


class Picking(QObject):
    """The pickers of a page, one dialog each for models and datasets. Fields of other kinds are ignored."""

    def __init__(self, session: Session, fields: Iterable[Field], page: QWidget) -> None:
        super().__init__(page)
        self.session, self.prefs, self._page = session, session.prefs, page
        self._pickers: dict[str, Picker] = {}
        self._field: PathField | None = None
        self._fields: dict[str, PathField] = {}
        self._rest_timers: dict[str, QTimer] = {}
        for field in fields:
            if not isinstance(field, PathField) or field.setting.kind not in QUESTIONS:
                continue
            self._fields[field.setting.key] = field
            field.offer_list()
            field.pick_requested.connect(partial(self.open, field))
            if field.setting.kind == "model":
                timer = self._rest_timers[field.setting.key] = QTimer(self, singleShot=True, interval=SETTLE_MS)
                timer.timeout.connect(partial(self._look_up, field))
        session.draft.changed.connect(self._on_changed)
        session.field_requested.connect(self._on_changed)  # Run was refused: the problem may have been fixed on disk
        session.run_changed.connect(self._remember_run)
        session.downloads.changed.connect(self._show_download)
        session.downloads.finished.connect(self._on_finished)
        self._on_changed("")

    def open(self, field: PathField) -> None:
        self._field = field
        kind = field.setting.kind
        if kind not in self._pickers:
            picker = self._pickers[kind] = Picker(kind, self._page.window())
            picker.chosen.connect(self._take)
            picker.search_requested.connect(partial(self._search, picker))
            picker.star_changed.connect(partial(self.prefs.set_favourite, kind))
            picker.download_requested.connect(partial(self._download, kind))
            picker.folder.clicked.connect(lambda: self._browse(picker, folder=True))
            picker.file.clicked.connect(lambda: self._browse(picker, folder=False))
        if kind == "model":
            suggestions = suggested_models()
        else:
            name, about = first_choices.DATASET, f"{first_choices.DATASET_ABOUT.capitalize()}."
            suggestions = [PickerEntry(id=name, name=name, where="hub", kind="2,000 rows", remarks=(about,))]
        self._pickers[kind].open_with_recent(self.prefs.used(kind), suggestions)
        for download in self.session.downloads.of(kind):
            self._show_download(download)
        self._refresh(kind)

    def _refresh(self, kind: str) -> None:
        picker = self._pickers[kind]
        fields = (field for field in self._fields.values() if field.setting.kind == kind)
        names = [*self.prefs.used(kind), *self.prefs.favourites(kind), *(str(field.value() or "") for field in fields)]
        self.session.service.ask(
            QUESTIONS[kind],
            lambda answer: picker.show_local(answer["found"], self.prefs.favourites(kind)),
            on_refused=lambda faults: picker.show_trouble("", faults[0].sentence),
            owner=picker,
            paths=[name for name in dict.fromkeys(names) if name and is_path(name)],
        )

    def _search(self, picker: Picker, words: str) -> None:
        kind = picker.repo_type
        self.session.service.ask(
            "hub_search",
            lambda answer: picker.show_hub(words, answer["found"], self.prefs.favourites(kind)),
            on_refused=lambda faults: picker.show_trouble(words, faults[0].sentence),
            owner=picker,
            words=words,
            repo_type=kind,
        )

    def _take(self, name: str) -> None:
        if self._field is not None:
            self._field.take(name)
            self.prefs.remember_used(self._field.setting.kind, name)

    def _browse(self, picker: Picker, *, folder: bool) -> None:
        if self._field is None:
            return
        before = self._field.value()
        (self._field.choose_folder if folder else self._field.choose_file)()
        if self._field.value() != before:
            self.prefs.remember_used(self._field.setting.kind, str(self._field.value()))
            picker.accept()

    def _download(self, kind: str, id_: str) -> None:
        self._take(id_)
        self.session.downloads.start(kind, id_)

    def _show_download(self, download: Download) -> None:
        if download.repo_type in self._pickers:
            self._pickers[download.repo_type].show_download(download, self.session.downloads)

    def _on_finished(self, download: Download) -> None:
        picker = self._pickers.get(download.repo_type)
        if picker is not None:
            self.session.message.emit(f"{download.id} is on this machine now.")
            if picker.isVisible():
                self._refresh(download.repo_type)
        for key, timer in self._rest_timers.items():
            if self._fields[key].value() == download.id:
                timer.start()

    def _on_changed(self, key: str) -> None:
        for changed in self._rest_timers if key == "" else {key} & self._rest_timers.keys():
            self._fields[changed].show_note("")
            self._rest_timers[changed].start()

    def _name_in(self, field: PathField) -> str:
        return str(self.session.draft.value(field.setting.key) or "").strip()

    def _look_up(self, field: PathField) -> None:
        if name := self._name_in(field):
            self.session.service.ask(
                "model_facts",
                partial(self._show_facts, field, name),
                on_refused=lambda faults: field.show_note(faults[0].sentence, wrong=True),
                owner=field,
                name=name,
            )

    def _show_facts(self, field: PathField, name: str, facts: dict[str, Any] | None) -> None:
        is_base = field.setting.key == "model"
        if self._name_in(field) != name or (facts is None and not is_hub_id(name)):
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
                    self.prefs.remember_used(field.setting.kind, str(field.value()))
