"""The dataset of the draft, looked into by the helper process: one for the session, shared by whoever shows it.

It asks while somebody looks, takes questions back when nobody does, and never shows an answer that belongs to settings
that have changed since. It reads no file itself and knows no widget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QObject, QTimer, Signal

from app.model.dataset_counts import Counts, in_a_line
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
    counted = Signal()
    replaced = Signal()

    def __init__(self, draft: Draft, service: Service, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._draft, self._service = draft, service
        self.state, self.said, self.split = "none", dict[str, Any](), "train"
        self.choices: dict[str, list[str]] = {"configs": [], "splits": []}
        self.counts: Counts | None = None
        self.faults: list[Fault] = []
        self._count_faults: list[Fault] = []
        self._watchers: dict[int, bool] = {}
        self._asked_for: dict[str, Any] | None = None
        self._reading = self._counting = self._fetching = 0
        self.fetched: tuple[int, int | None] = (0, None)
        self._choices_for: tuple[Any, ...] = ()
        self._fetch = False
        self._settle = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._settle.timeout.connect(lambda: self.look())
        self._draft.changed.connect(self._on_changed)

    # Who looks

    def watch(self, who: QObject, *, whole: bool = True) -> None:
        """`who` shows this from now on; `whole` wants every prompt counted, otherwise a glance will do."""
        self._watchers[id(who)] = whole
        self.look(again=True)

    def leave(self, who: QObject) -> None:
        """`who` shows it no longer: what nobody waits for is taken back."""
        self._watchers.pop(id(who), None)
        if not self._watchers:
            self._settle.stop()
            if self._reading:
                self._stop("_reading")
                self._asked_for = None
        if not any(self._watchers.values()):
            self._stop("_counting")

    # Asking

    def settings(self) -> dict[str, Any]:
        """The settings that questions go with, each of the right type."""
        sound = self._draft.sound()
        return {key: sound[key] for key in (*DEPENDS, *ROOM)}

    @property
    def room(self) -> int:
        """Tokens that Max Seq leaves for a prompt beside the completion."""
        sound = self._draft.sound()
        return sound["max_seq_length"] - sound["max_completion_length"]

    def fetch(self) -> None:
        """Bring a dataset of Hugging Face onto this machine, and read it. It goes on whoever looks; another dataset
        calls it off, and what has arrived is kept."""
        self._stop("_fetching")
        self.fetched = (0, None)
        self._become("fetching", {})
        self._fetching = self._service.ask(
            "download", lambda _: self._fetch_done(), told=self._take_progress, refused=self._refused, owner=self,
            id=self.settings()["data"].strip(), repo_type="dataset",
        )  # fmt: skip

    def _take_progress(self, told: dict[str, Any]) -> None:
        self.fetched = (told["done"], told["total"])
        self.changed.emit()

    def _fetch_done(self) -> None:
        self._fetching, self._fetch, self.state = 0, True, "reading"
        self.look()

    def read_again(self) -> None:
        self.look(again=True)

    def look(self, again: bool = False) -> None:
        """Ask for what is not known yet, if anybody looks; `again` whether the files are still what they were."""
        self._settle.stop()
        if not self._watchers:
            return
        settings = self.settings()
        if self._asked_for == settings and not self._fetch and not again:
            self._count()
            return
        if self._fetching and self._asked_for and self._asked_for["data"] == settings["data"]:
            return
        for question in ("_reading", "_counting", "_fetching"):
            self._stop(question)
        known = self._asked_for == settings
        self._asked_for = settings
        if not settings["data"].strip():
            self._become("none", {})
            return
        if self.state in ("none", "failed", "absent", "fetching"):
            self._become("reading", {})
        self._reading = self._service.ask(
            "preview",
            lambda said: self._take(said, known),
            refused=self._refused,
            owner=self,
            settings=settings,
            fetch=self._fetch,
        )
        self._fetch = False

    def rows(self, start: int, count: int, answer: Take, owner: QObject) -> int:
        """Ask for a part of the split that is looked at; returns the question's number."""
        return self._ask_rows("preview_rows", answer, None, owner, start=start, count=count)

    def row(self, index: int, answer: Take, owner: QObject) -> int:
        """Ask for one row in full, with its prompt as the model will see it; it is answered twice while that takes long."""
        return self._ask_rows("preview_row", answer, answer, owner, index=index)

    def cancel(self, number: int) -> None:
        self._service.cancel(number)

    def _ask_rows(self, question: str, answer: Take, told: Take | None, owner: QObject, **which: int) -> int:
        """What comes after the settings have changed is None, as is what could not be answered."""
        settings, split = self.settings(), self.split

        def current(take: Take) -> Take:
            return lambda said: take(said if (self.settings(), self.split) == (settings, split) else None)

        return self._service.ask(
            question, current(answer), told=current(told) if told else None, refused=lambda _: answer(None), owner=owner,
            settings=settings, split=split, **which,
        )  # fmt: skip

    def set_split(self, split: str) -> None:
        """Look at another split."""
        if split != self.split and split in self.splits:
            self.split = split
            self._stop("_counting")
            self.counts, self._count_faults = None, []
            self._judge()
            self.changed.emit()
            self.replaced.emit()
            self._count()

    # What is known

    @property
    def splits(self) -> dict[str, dict[str, Any]]:
        """Split → {rows, source, unanswered, repeated}, of those that have rows."""
        return self.said.get("splits", {})

    @property
    def columns(self) -> list[str]:
        return [column["name"] for column in self.said.get("columns", ())]

    @property
    def likely(self) -> dict[str, str]:
        """Setting → the column that it probably is, where the one that is set does not exist."""
        return self.said.get("likely", {})

    def take_likely(self) -> None:
        """Map the columns as they probably are."""
        self._draft.update(self.likely)

    def split_choices(self) -> list[str]:
        """Names of splits that a menu can offer."""
        return self.choices["splits"] or self.said.get("names", [])

    def in_a_line(self) -> tuple[str, bool]:
        """(what is known of it, in a line; whether something is wrong with it)."""
        if self.faults:
            return self.faults[0].sentence, True
        columns, sound = self.columns, self._draft.sound()
        return in_a_line(self.state, self.splits, {sound[key]: use for key, use in USES.items() if sound[key] in columns},
                         self.counts if self.split == "train" else None, self.room), False  # fmt: skip

    # Answers

    def _on_changed(self, key: str) -> None:
        if not key or key in DEPENDS:
            if key in ("", "data"):
                self.split = "train"
            self._settle.start()
        elif key in ROOM:
            if self._asked_for is not None:
                self._asked_for |= {key: self.settings()[key]}
            self.changed.emit()

    def _take(self, said: dict[str, Any], known: bool) -> None:
        """`known` says that the settings are those of the answer before this one: it may be the same."""
        self._reading = 0
        if known and said == {"absent": False, **self.said}:
            self._count()
            return
        if said["absent"]:
            self._become("absent", {})
            return
        self._become("ready" if said["splits"] else "failed", said)
        self._ask_choices(said["form"])
        self._count()

    def _refused(self, faults: list[Fault]) -> None:
        self._reading, self._fetching, self._asked_for = 0, 0, None
        self._become("failed", {"faults": [fault.to_dict() for fault in faults]})

    def _become(self, state: str, said: dict[str, Any]) -> None:
        self.state, self.said, self.counts, self._count_faults = state, said, None, []
        if self.split not in self.splits:
            self.split = next(iter(self.splits), "train")
        self._judge()
        self.changed.emit()
        self.replaced.emit()

    def _judge(self) -> None:
        """All that is wrong, once each."""
        told = [Fault(**fault) for fault in self.said.get("faults", ())]
        self.faults = list(dict.fromkeys([*told, *self._count_faults]))

    def _ask_choices(self, form: str) -> None:
        """A dataset of Hugging Face is asked for its configurations and splits once, beside everything else."""
        settings = self.settings()
        wanted = (settings["data"], settings["dataset_config"]) if form == "hub" else ()
        if wanted != self._choices_for:
            self._choices_for, self.choices = wanted, {"configs": [], "splits": []}
            if wanted:
                self._service.ask("preview_choices", self._take_choices, owner=self, settings=settings)

    def _take_choices(self, choices: dict[str, list[str]]) -> None:
        self.choices = choices
        self.changed.emit()

    # Counting

    def _count(self) -> None:
        """Have the prompts of the split counted, unless they are, or are being counted."""
        if self._counting or not self._watchers or not self.can_count:
            return
        most = None if any(self._watchers.values()) else GLANCE
        rows = self.splits[self.split]["rows"]
        if self.counts is not None and self.counts.done and self.counts.seen >= min(rows, most or rows):
            return
        self._counting = self._service.ask(
            "preview_counts", lambda said: self._take_counts(said, done=True), told=self._take_counts,
            refused=self._counting_refused, owner=self, settings=self.settings(), split=self.split, most=most,
        )  # fmt: skip

    @property
    def can_count(self) -> bool:
        """Whether there are rows, with a column of prompts."""
        return self.split in self.splits and self._draft.sound()["prompt_feature"] in self.columns

    def _take_counts(self, said: dict[str, Any], done: bool = False) -> None:
        lengths = () if said["no_tokens"] else tuple((int(tokens), int(rows)) for tokens, rows in said["lengths"])
        self.counts = Counts(said["rows"], said["seen"], said["refused"], lengths, said["no_tokens"], done)
        self._counting = 0 if done else self._counting
        faults = [Fault(**fault) for fault in said["faults"]]
        if faults != self._count_faults:
            self._count_faults = faults
            self._judge()
            self.changed.emit()
        self.counted.emit()
        if done:
            self._count()  # somebody may have come meanwhile who wants more than a glance

    def _counting_refused(self, faults: list[Fault]) -> None:
        self._counting, self._count_faults = 0, faults
        self._judge()
        self.changed.emit()

    def _stop(self, question: str) -> None:
        """Take a question back, if it is open."""
        if number := getattr(self, question):
            self._service.cancel(number)
            setattr(self, question, 0)
