"""The draft's dataset as the helper process reads it: one object per session, shared by all widgets that show it.

It asks while a widget watches, cancels its requests when none does, and drops answers to settings that have changed since. It
reads no file itself and knows no widget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from PySide6.QtCore import QObject, QTimer, Signal

from app.state.draft import Draft
from app.state.processes import Service
from backend.config.config import keys_used_by
from backend.config.row_settings import prompt_limit
from backend.utils.errors import ConfigProblem

# Token counts of a dataset's prompts, and its summary in one line of text.

_LINES = {
    "none": "",
    "reading": "Reading the dataset…",
    "absent": "This dataset is not on this machine yet",
    "fetching": "Fetching the dataset…",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """Prompt lengths in tokens, counted over `seen` of `rows` rows, of which training would refuse `refused`.

    `lengths` is a histogram of (tokens, rows), ascending; where it is empty, `no_tokens` says why. `done`: counting has ended.
    """

    rows: int
    seen: int = 0
    refused: int = 0
    lengths: tuple[tuple[int, int], ...] = ()
    no_tokens: str = ""
    done: bool = False

    @property
    def has_tokens(self) -> bool:
        return bool(self.lengths) and not self.no_tokens

    @property
    def longest(self) -> int:
        return self.lengths[-1][0] if self.lengths else 0

    @property
    def median(self) -> int:
        """The median length."""
        return self.percentile(50)

    def percentile(self, percent: float) -> int:
        """The least length that so many percent of the prompts do not exceed; 0 where none is known."""
        wanted = sum(rows for _, rows in self.lengths) * percent / 100
        passed = 0
        for tokens, rows in self.lengths:
            passed += rows
            if passed >= wanted:
                return tokens
        return 0

    def too_long(self, limit: int) -> tuple[int, bool]:
        """(rows whose prompt has more than `limit` tokens, whether that is exact: from a sample it is extrapolated)."""
        counted = sum(rows for tokens, rows in self.lengths if tokens > limit)
        is_exact = self.seen >= self.rows
        return (counted if is_exact else round(counted * self.rows / max(1, self.seen))), is_exact


def summary_line(
    state: str, splits: Mapping[str, Mapping[str, Any]], uses: Mapping[str, str], counts: Counts | None, limit: int
) -> str:
    """“2,048 rows · question → prompt, answer → answer · 3 too long”. `uses` maps a column to its
    role, `counts` are those of the training split, `limit` is how many tokens a prompt may have."""
    if state in _LINES or "train" not in splits:
        return _LINES.get(state, "")
    held = "".join(f" + {about['rows']:,} {split}" for split, about in splits.items() if split != "train")
    mapped = ", ".join(f"{column} → {use}" for column, use in uses.items())
    missing = splits["train"]["unanswered"]
    parts = [f"{splits['train']['rows']:,} rows{held}", mapped, _too_long(counts, limit)]
    return " · ".join(part for part in [*parts, f"{missing:,} without an answer" if missing else ""] if part)


def _too_long(counts: Counts | None, limit: int) -> str:
    if counts is None or not counts.has_tokens:
        return ""
    rows, is_exact = counts.too_long(limit)
    return f"{'' if is_exact else 'about '}{rows:,} too long" if rows else ""


# ── dataset ──────────────────────────────────────────────────────────────────────────────────────────────────────────

ANSWER_SETTINGS = keys_used_by("rows", "row_view")
"""Settings that every answer of the helper process depends on."""
LIMIT_SETTINGS = keys_used_by("prompt_limit")
"""Settings that decide which prompts are too long; a change of theirs needs no new count."""
CODE_SETTINGS = ("reward_functions_file", "reward_network", "reward_timeout")
"""Settings that answers depend on where a map function makes the rows."""
SETTLE_MS = 250
"""How long typing must rest before a request is sent."""
OnAnswer = Callable[[dict[str, Any] | None], None]
USES = {"prompt_feature": "prompt", "answer_feature": "answer", "system_feature": "system", "type_feature": "type"}
"""Setting of a column → the role of that column."""
SPLITS = {"train": "Train", "valid": "Valid", "test": "Test"}
SAMPLE_SIZE = 2000
"""Prompts counted for the line on Train, spread over the dataset; for the Dataset page all are counted."""


class Dataset(QObject):
    """The draft's dataset, as far as the helper process has read it.

    Attributes:
        state – none (no dataset is chosen), reading, absent (on the Hub, not on this machine), fetching, ready, or failed.
        preview – the answer to the question `preview`.
        choices – {configs, splits} that the Hub offers.
        split – the split that is shown.
        counts – token counts of that split's prompts, or None.
        variety – the answer to the question `preview_variety` about that split, or {}.
        faults – all problems of the dataset and its mapping.
        download_progress – (bytes so far, bytes in all or None).

    Signals:
        changed – any attribute but `counts`.
        counts_changed – `counts`.
        variety_changed – `variety`.
        rows_replaced – the split has other rows now.
    """

    changed = Signal()
    counts_changed = Signal()
    variety_changed = Signal()
    rows_replaced = Signal()

    def __init__(self, draft: Draft, service: Service, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._draft, self._service = draft, service
        self.state, self.preview, self.split = "none", dict[str, Any](), "train"
        self.choices: dict[str, list[str]] = {"configs": [], "splits": []}
        self.counts: Counts | None = None
        self.variety: dict[str, Any] = {}
        self.faults: list[ConfigProblem] = []
        self._count_faults: list[ConfigProblem] = []
        self._watchers: dict[int, bool] = {}
        self._requested_for: dict[str, Any] | None = None
        self._reading = self._counting = self._comparing = self._fetching = 0
        self._fetch_failed = False
        self.download_progress: tuple[int, int | None] = (0, None)
        self._choices_for: tuple[Any, ...] = ()
        self._fetch = False
        # Restarted at every change, so one request is sent for a path that is typed, and none for its beginnings.
        self._rest_timer = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._rest_timer.timeout.connect(lambda: self.refresh())
        self._draft.changed.connect(self._on_changed)

    # Watching

    def watch(self, watcher: QObject, *, count_all: bool = True) -> None:
        """Keep the data up to date for a widget that shows it. `count_all`: count every prompt, not only SAMPLE_SIZE of them."""
        self._watchers[id(watcher)] = count_all
        self.refresh(again=True)

    def unwatch(self, watcher: QObject) -> None:
        """End a widget's `watch`; requests that no other watcher needs are cancelled."""
        self._watchers.pop(id(watcher), None)
        if not self._watchers:
            self._rest_timer.stop()
            if self._reading:
                self._cancel("_reading")
                self._requested_for = None
        if not any(self._watchers.values()):
            self._cancel("_counting")
            self._cancel("_comparing")

    # Requests

    def settings(self) -> dict[str, Any]:
        """The settings that every request carries, each of the right type."""
        valid_values = self._draft.valid_values()
        code = CODE_SETTINGS if valid_values["map_function"] else ()
        return {key: valid_values[key] for key in (*ANSWER_SETTINGS, *LIMIT_SETTINGS, *code)}

    @property
    def prompt_limit(self) -> int:
        """Tokens that a prompt may have: Max Seq less the completion length, or its own limit."""
        valid_values = self._draft.valid_values()
        return prompt_limit(
            *(valid_values[key] for key in ("max_seq_length", "max_completion_length", "max_prompt_length"))
        )

    def download(self) -> None:
        """Download a dataset from the Hub, then read it. It continues without watchers. Choosing another dataset cancels it, and
        the bytes so far are kept."""
        self._cancel("_fetching")
        self.download_progress = (0, None)
        self._set_state("fetching", {})
        self._fetching = self._service.ask(
            "download", lambda _: self._on_downloaded(), on_progress=self._on_download_progress, on_refused=self._on_refused, owner=self,
            id=self.settings()["data"].strip(), repo_type="dataset",
        )  # fmt: skip

    def _on_download_progress(self, progress: dict[str, Any]) -> None:
        self.download_progress = (progress["done"], progress["total"])
        self.changed.emit()

    def _on_downloaded(self) -> None:
        self._fetching, self._fetch, self.state = 0, True, "reading"
        self.refresh()

    def try_again(self) -> None:
        """Do again what failed: the download, or reading."""
        (self.download if self._fetch_failed else self.reload)()

    def reload(self) -> None:
        self.refresh(again=True)

    def refresh(self, again: bool = False) -> None:
        """Request missing data, if there are watchers. `again`: even if no setting has changed, as files may have."""
        self._rest_timer.stop()
        if not self._watchers:
            return
        settings = self.settings()
        if self._requested_for == settings and not self._fetch and not again:
            self._request_counts()
            return
        if self._fetching and self._requested_for and self._requested_for["data"] == settings["data"]:
            return
        for question in ("_reading", "_counting", "_comparing", "_fetching"):
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
            lambda answer: self._on_preview(answer, known),
            on_refused=self._on_refused,
            owner=self,
            settings=settings,
            fetch=self._fetch,
        )
        self._fetch = False

    def request_rows(self, start: int, count: int, on_answer: OnAnswer, owner: QObject) -> int:
        """Request a range of rows of the split; returns the request's number. None is answered where there is nothing to show."""
        return self._request("preview_rows", on_answer, None, owner, start=start, count=count)

    def request_row(self, index: int, on_answer: OnAnswer, owner: QObject) -> int:
        """Request one row in full with its rendered prompt. It is answered twice where rendering must load the tokenizer first."""
        return self._request("preview_row", on_answer, on_answer, owner, index=index)

    def cancel(self, number: int) -> None:
        self._service.cancel(number)

    def _request(
        self, question: str, on_answer: OnAnswer, on_progress: OnAnswer | None, owner: QObject, **which: int
    ) -> int:
        """Send a question about the split; `on_answer` gets None for a refusal, or if the settings have changed meanwhile."""
        settings, split = self.settings(), self.split

        def current(callback: OnAnswer) -> OnAnswer:
            return lambda answer: callback(answer if (self.settings(), self.split) == (settings, split) else None)

        return self._service.ask(
            question, current(on_answer), on_progress=current(on_progress) if on_progress else None,
            on_refused=lambda _: on_answer(None), owner=owner,
            settings=settings, split=split, **which,
        )  # fmt: skip

    def set_split(self, split: str) -> None:
        """Show another split."""
        if split != self.split and split in self.splits:
            self.split = split
            self._cancel("_counting")
            self._cancel("_comparing")
            self.counts, self._count_faults = None, []
            self._set_variety({})
            self._collect_faults()
            self.changed.emit()
            self.rows_replaced.emit()
            self._request_counts()

    # Data

    @property
    def splits(self) -> dict[str, dict[str, Any]]:
        """Split → {rows, source, unanswered, repeated}, of the splits that have rows."""
        return self.preview.get("splits", {})

    @property
    def columns(self) -> list[str]:
        return [column["name"] for column in self.preview.get("columns", ())]

    @property
    def suggested_columns(self) -> dict[str, str]:
        """Setting → the column that it probably is, where the column that is set does not exist."""
        return self.preview.get("likely", {})

    def accept_suggestions(self) -> None:
        """Map the columns as suggested."""
        self._draft.update(self.suggested_columns)

    def split_choices(self) -> list[str]:
        """Names of splits for a menu."""
        return self.choices["splits"] or self.preview.get("names", [])

    def summary_line(self) -> tuple[str, bool]:
        """(a summary in one line, whether it states a problem)."""
        if self.faults:
            return self.faults[0].sentence, True
        columns, valid_values = self.columns, self._draft.valid_values()
        return summary_line(self.state, self.splits, {valid_values[key]: use for key, use in USES.items() if valid_values[key] in columns},
                         self.counts if self.split == "train" else None, self.prompt_limit), False  # fmt: skip

    # Answers

    def _on_changed(self, key: str) -> None:
        if not key or key in ANSWER_SETTINGS:
            if key in ("", "data"):
                self.split = "train"
            self._rest_timer.start()
        elif key in LIMIT_SETTINGS:
            if self._requested_for is not None:
                self._requested_for |= {key: self.settings()[key]}
            self.changed.emit()

    def _on_preview(self, answer: dict[str, Any], known: bool) -> None:
        """`known`: the settings are those of the previous answer, so this one may be equal to it."""
        self._reading = 0
        if known and answer == {"absent": False, **self.preview}:
            if self.counts is not None and self.counts.no_tokens:
                self.counts = replace(self.counts, done=False)  # the model may be on this machine by now
            self._request_counts()
            return
        if answer["absent"]:
            self._set_state("absent", {})
            return
        self._set_state("ready" if answer["splits"] else "failed", answer)
        self._request_choices(answer["form"])
        self._request_counts()

    def _on_refused(self, faults: list[ConfigProblem]) -> None:
        self._fetch_failed = bool(self._fetching)
        self._reading, self._fetching, self._requested_for = 0, 0, None
        self._set_state("failed", {"faults": [fault.to_dict() for fault in faults]})

    def _set_state(self, state: str, preview: dict[str, Any]) -> None:
        self.state, self.preview, self.counts, self._count_faults = state, preview, None, []
        self._set_variety({})
        if self.split not in self.splits:
            self.split = next(iter(self.splits), "train")
        self._collect_faults()
        self.changed.emit()
        self.rows_replaced.emit()

    def _collect_faults(self) -> None:
        """All faults, without repetitions."""
        of_preview = [ConfigProblem(**fault) for fault in self.preview.get("faults", ())]
        self.faults = list(dict.fromkeys([*of_preview, *self._count_faults]))

    def _request_choices(self, form: str) -> None:
        """Request the configurations and splits of a dataset on the Hub, once per dataset."""
        settings = self.settings()
        dataset = (settings["data"], settings["dataset_config"]) if form == "hub" else ()
        if dataset != self._choices_for:
            self._choices_for, self.choices = dataset, {"configs": [], "splits": []}
            if dataset:
                self._service.ask("preview_choices", self._on_choices, owner=self, settings=settings)

    def _on_choices(self, choices: dict[str, list[str]]) -> None:
        self.choices = choices
        self.changed.emit()

    # Counting

    def _request_counts(self) -> None:
        """Request the token counts of the split's prompts and their variety, unless they are known or requested."""
        self._request_variety()
        if self._counting or not self._watchers or not self.can_count:
            return
        most = None if any(self._watchers.values()) else SAMPLE_SIZE
        rows = self.splits[self.split]["rows"]
        if self.counts is not None and self.counts.done and self.counts.seen >= min(rows, most or rows):
            return
        self._counting = self._service.ask(
            "preview_counts", lambda answer: self._on_counts(answer, done=True), on_progress=self._on_counts,
            on_refused=self._on_counts_refused, owner=self, settings=self.settings(), split=self.split, most=most,
        )  # fmt: skip

    @property
    def can_count(self) -> bool:
        """Whether there are rows and a column of prompts."""
        return self.split in self.splits and self._draft.valid_values()["prompt_feature"] in self.columns

    def _on_counts(self, answer: dict[str, Any], done: bool = False) -> None:
        lengths = () if answer["no_tokens"] else tuple((int(tokens), int(rows)) for tokens, rows in answer["lengths"])
        self.counts = Counts(answer["rows"], answer["seen"], answer["refused"], lengths, answer["no_tokens"], done)
        self._counting = 0 if done else self._counting
        faults = [ConfigProblem(**fault) for fault in answer["faults"]]
        if faults != self._count_faults:
            self._count_faults = faults
            self._collect_faults()
            self.changed.emit()
        self.counts_changed.emit()
        if done:
            self._request_counts()  # a watcher that needs every prompt counted may have been added meanwhile

    def _on_counts_refused(self, faults: list[ConfigProblem]) -> None:
        self._counting, self._count_faults = 0, faults
        self._collect_faults()
        self.changed.emit()

    # Variety

    def _request_variety(self) -> None:
        """Request it for a page that shows all there is; a line in passing does without."""
        if self._comparing or self.variety or not any(self._watchers.values()) or not self.can_count:
            return
        self._comparing = self._service.ask(
            "preview_variety", self._on_variety, on_refused=lambda _: self._on_variety({}), owner=self,
            settings=self.settings(), split=self.split,
        )  # fmt: skip

    def _on_variety(self, answer: dict[str, Any]) -> None:
        self._comparing = 0
        self._set_variety(answer)

    def _set_variety(self, variety: dict[str, Any]) -> None:
        self.variety = variety
        self.variety_changed.emit()

    def _cancel(self, question: str) -> None:
        """Cancel a request, if it is pending."""
        if number := getattr(self, question):
            self._service.cancel(number)
            setattr(self, question, 0)
