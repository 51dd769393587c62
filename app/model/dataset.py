"""The dataset of the draft, looked into by the helper process: one for the session, shared by whoever shows it.

It asks while somebody looks, takes questions back when nobody does, and never shows an answer that belongs to settings
that have changed since. It reads no file itself and knows no widget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QObject, QTimer, Signal

from app.model.dataset_counts import Counts, summary_line
from app.model.draft import Draft
from app.model.service import Service
from backend.spec.faults import Fault

DEPENDS = (
    "data", "dataset_config", "train_split", "valid_split", "test_split", "validation_split", "seed",
    "prompt_feature", "answer_feature", "type_feature", "system_feature", "system_prompt", "chat_template_kwargs",
    "model", "reward_functions",
)  # fmt: skip
"""Settings that an answer depends on."""
ROOM = ("max_seq_length", "max_completion_length")
"""Settings that decide which prompts are too long; their lengths are known whatever these are."""
SETTLE_MS = 250
"""How long typing must rest before anything is asked."""
Take = Callable[[dict[str, Any] | None], None]
USES = {"prompt_feature": "prompt", "answer_feature": "answer", "system_feature": "system", "type_feature": "type"}
"""Setting of a column → what the column is for."""
SPLITS = {"train": "Train", "valid": "Valid", "test": "Test"}
GLANCE = 2000
"""Prompts that are counted for a glance, spread over the dataset; a look at the page counts them all."""


class Dataset(QObject):
    """What is known of the draft's dataset.

    Attributes: state – none (no dataset is chosen), reading, absent (on Hugging Face, not here), fetching, ready, or
    failed; said – the answer to `preview`; choices – {configs, splits}; split – the one that is looked at; counts; faults;
    fetched – (bytes so far, bytes in all or None).
    Signals: changed – any of these; counted – `counts`; replaced – rows that were shown are others now.
    """

    changed = Signal()
    counts_changed = Signal()
    rows_replaced = Signal()

    def __init__(self, draft: Draft, service: Service, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._draft, self._service = draft, service
        self.state, self.preview, self.split = "none", dict[str, Any](), "train"
        self.choices: dict[str, list[str]] = {"configs": [], "splits": []}
        self.counts: Counts | None = None
        self.faults: list[Fault] = []
        self._count_faults: list[Fault] = []
        self._watchers: dict[int, bool] = {}
        self._requested_for: dict[str, Any] | None = None
        self._reading = self._counting = self._fetching = 0
        self.download_progress: tuple[int, int | None] = (0, None)
        self._choices_for: tuple[Any, ...] = ()
        self._fetch = False
        self._rest_timer = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._rest_timer.timeout.connect(lambda: self.refresh())
        self._draft.changed.connect(self._on_changed)

    # Who looks

    def watch(self, who: QObject, *, whole: bool = True) -> None:
        """`who` shows this from now on; `whole` wants every prompt counted, otherwise a glance will do."""
        self._watchers[id(who)] = whole
        self.refresh(again=True)

    def unwatch(self, who: QObject) -> None:
        """`who` shows it no longer: what nobody waits for is taken back."""
        self._watchers.pop(id(who), None)
        if not self._watchers:
            self._rest_timer.stop()
            if self._reading:
                self._cancel("_reading")
                self._requested_for = None
        if not any(self._watchers.values()):
            self._cancel("_counting")

    # Asking

    def settings(self) -> dict[str, Any]:
        """The settings that questions go with, each of the right type."""
        valid_values = self._draft.valid_values()
        return {key: valid_values[key] for key in (*DEPENDS, *ROOM)}

    @property
    def room(self) -> int:
        """Tokens that Max Seq leaves for a prompt beside the completion."""
        valid_values = self._draft.valid_values()
        return valid_values["max_seq_length"] - valid_values["max_completion_length"]

    def download(self) -> None:
        """Bring a dataset of Hugging Face onto this machine, and read it. It goes on whoever looks; another dataset
        calls it off, and what has arrived is kept."""
        self._cancel("_fetching")
        self.download_progress = (0, None)
        self._set_state("fetching", {})
        self._fetching = self._service.ask(
            "download", lambda _: self._on_downloaded(), on_progress=self._on_download_progress, on_refused=self._on_refused, owner=self,
            id=self.settings()["data"].strip(), repo_type="dataset",
        )  # fmt: skip

    def _on_download_progress(self, told: dict[str, Any]) -> None:
        self.download_progress = (told["done"], told["total"])
        self.changed.emit()

    def _on_downloaded(self) -> None:
        self._fetching, self._fetch, self.state = 0, True, "reading"
        self.refresh()

    def reload(self) -> None:
        self.refresh(again=True)

    def refresh(self, again: bool = False) -> None:
        """Ask for what is not known yet, if anybody looks; `again` whether the files are still what they were."""
        self._rest_timer.stop()
        if not self._watchers:
            return
        settings = self.settings()
        if self._requested_for == settings and not self._fetch and not again:
            self._request_counts()
            return
        if self._fetching and self._requested_for and self._requested_for["data"] == settings["data"]:
            return
        for question in ("_reading", "_counting", "_fetching"):
            self._cancel(question)
        known = self._requested_for == settings
        self._requested_for = settings
        if not settings["data"].strip():
            self._set_state("none", {})
            return
        if self.state in ("none", "failed", "absent", "fetching"):
            self._set_state("reading", {})
        self._reading = self._service.ask(
            "preview",
            lambda preview: self._on_preview(preview, known),
            on_refused=self._on_refused,
            owner=self,
            settings=settings,
            fetch=self._fetch,
        )
        self._fetch = False

    def rows(self, start: int, count: int, answer: Take, owner: QObject) -> int:
        """Ask for a part of the split that is looked at; returns the question's number."""
        return self._request_rows("preview_rows", answer, None, owner, start=start, count=count)

    def row(self, index: int, answer: Take, owner: QObject) -> int:
        """Ask for one row in full, with its prompt as the model will see it; it is answered twice while that takes long."""
        return self._request_rows("preview_row", answer, answer, owner, index=index)

    def cancel(self, number: int) -> None:
        self._service.cancel(number)

    def _request_rows(self, question: str, answer: Take, told: Take | None, owner: QObject, **which: int) -> int:
        """What comes after the settings have changed is None, as is what could not be answered."""
        settings, split = self.settings(), self.split

        def current(take: Take) -> Take:
            return lambda preview: take(preview if (self.settings(), self.split) == (settings, split) else None)

        return self._service.ask(
            question, current(answer), on_progress=current(told) if told else None, on_refused=lambda _: answer(None), owner=owner,
            settings=settings, split=split, **which,
        )  # fmt: skip

    def set_split(self, split: str) -> None:
        """Look at another split."""
        if split != self.split and split in self.splits:
            self.split = split
            self._cancel("_counting")
            self.counts, self._count_faults = None, []
            self._collect_faults()
            self.changed.emit()
            self.rows_replaced.emit()
            self._request_counts()

    # What is known

    @property
    def splits(self) -> dict[str, dict[str, Any]]:
        """Split → {rows, source, unanswered, repeated}, of those that have rows."""
        return self.preview.get("splits", {})

    @property
    def columns(self) -> list[str]:
        return [column["name"] for column in self.preview.get("columns", ())]

    @property
    def likely(self) -> dict[str, str]:
        """Setting → the column that it probably is, where the one that is set does not exist."""
        return self.preview.get("likely", {})

    def accept_suggestions(self) -> None:
        """Map the columns as they probably are."""
        self._draft.update(self.likely)

    def split_choices(self) -> list[str]:
        """Names of splits that a menu can offer."""
        return self.choices["splits"] or self.preview.get("names", [])

    def summary_line(self) -> tuple[str, bool]:
        """(what is known of it, in a line; whether something is wrong with it)."""
        if self.faults:
            return self.faults[0].sentence, True
        columns, valid_values = self.columns, self._draft.valid_values()
        return summary_line(self.state, self.splits, {valid_values[key]: use for key, use in USES.items() if valid_values[key] in columns},
                         self.counts if self.split == "train" else None, self.room), False  # fmt: skip

    # Answers

    def _on_changed(self, key: str) -> None:
        if not key or key in DEPENDS:
            if key in ("", "data"):
                self.split = "train"
            self._rest_timer.start()
        elif key in ROOM:
            if self._requested_for is not None:
                self._requested_for |= {key: self.settings()[key]}
            self.changed.emit()

    def _on_preview(self, preview: dict[str, Any], known: bool) -> None:
        """`known` says that the settings are those of the answer before this one: it may be the same."""
        self._reading = 0
        if known and preview == {"absent": False, **self.preview}:
            self._request_counts()
            return
        if preview["absent"]:
            self._set_state("absent", {})
            return
        self._set_state("ready" if preview["splits"] else "failed", preview)
        self._request_choices(preview["form"])
        self._request_counts()

    def _on_refused(self, faults: list[Fault]) -> None:
        self._reading, self._fetching, self._requested_for = 0, 0, None
        self._set_state("failed", {"faults": [fault.to_dict() for fault in faults]})

    def _set_state(self, state: str, preview: dict[str, Any]) -> None:
        self.state, self.preview, self.counts, self._count_faults = state, preview, None, []
        if self.split not in self.splits:
            self.split = next(iter(self.splits), "train")
        self._collect_faults()
        self.changed.emit()
        self.rows_replaced.emit()

    def _collect_faults(self) -> None:
        """All that is wrong, once each."""
        told = [Fault(**fault) for fault in self.preview.get("faults", ())]
        self.faults = list(dict.fromkeys([*told, *self._count_faults]))

    def _request_choices(self, form: str) -> None:
        """A dataset of Hugging Face is asked for its configurations and splits once, beside everything else."""
        settings = self.settings()
        wanted = (settings["data"], settings["dataset_config"]) if form == "hub" else ()
        if wanted != self._choices_for:
            self._choices_for, self.choices = wanted, {"configs": [], "splits": []}
            if wanted:
                self._service.ask("preview_choices", self._on_choices, owner=self, settings=settings)

    def _on_choices(self, choices: dict[str, list[str]]) -> None:
        self.choices = choices
        self.changed.emit()

    # Counting

    def _request_counts(self) -> None:
        """Have the prompts of the split counted, unless they are, or are being counted."""
        if self._counting or not self._watchers or not self.can_count:
            return
        most = None if any(self._watchers.values()) else GLANCE
        rows = self.splits[self.split]["rows"]
        if self.counts is not None and self.counts.done and self.counts.seen >= min(rows, most or rows):
            return
        self._counting = self._service.ask(
            "preview_counts", lambda preview: self._on_counts(preview, done=True), on_progress=self._on_counts,
            on_refused=self._on_counts_refused, owner=self, settings=self.settings(), split=self.split, most=most,
        )  # fmt: skip

    @property
    def can_count(self) -> bool:
        """Whether there are rows, with a column of prompts."""
        return self.split in self.splits and self._draft.valid_values()["prompt_feature"] in self.columns

    def _on_counts(self, preview: dict[str, Any], done: bool = False) -> None:
        lengths = () if preview["no_tokens"] else tuple((int(tokens), int(rows)) for tokens, rows in preview["lengths"])
        self.counts = Counts(preview["rows"], preview["seen"], preview["refused"], lengths, preview["no_tokens"], done)
        self._counting = 0 if done else self._counting
        faults = [Fault(**fault) for fault in preview["faults"]]
        if faults != self._count_faults:
            self._count_faults = faults
            self._collect_faults()
            self.changed.emit()
        self.counts_changed.emit()
        if done:
            self._request_counts()  # somebody may have come meanwhile who wants more than a glance

    def _on_counts_refused(self, faults: list[Fault]) -> None:
        self._counting, self._count_faults = 0, faults
        self._collect_faults()
        self.changed.emit()

    def _cancel(self, question: str) -> None:
        """Take a question back, if it is open."""
        if number := getattr(self, question):
            self._service.cancel(number)
            setattr(self, question, 0)
