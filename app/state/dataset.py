"""The form's dataset as the helper process reads it."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from PySide6.QtCore import QObject, QTimer, Signal

from app.state.draft import Draft
from app.state.processes import Service
from app.state.run_summary import count_text
from backend.config.config import SETTINGS, keys_used_by
from backend.config.row_settings import prompt_limit
from backend.utils.errors import ConfigProblem

ANSWER_SETTINGS = keys_used_by("rows", "row_view")  # settings that every answer depends on
LIMIT_SETTINGS = keys_used_by("prompt_limit")
CODE_SETTINGS = ("reward_functions_file", "reward_network", "reward_timeout")
"""Settings that answers depend on if a map function makes the rows."""
SETTLE_MS = 250
USES = {f"{use}_feature": use for use in ("prompt", "completion", "messages", "answer", "system", "type")}
SPLITS = {"train": "Train", "valid": "Valid", "test": "Test"}
SAMPLE_SIZE = 2000  # prompts counted for the line on Train
STATE_LINES = {
    "none": "",
    "reading": "Reading the dataset…",
    "absent": "This dataset is not on this machine yet",
    "fetching": "Fetching the dataset…",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """Prompt lengths in tokens, over `seen` of `rows` rows."""

    rows: int
    seen: int = 0
    refused: int = 0  # by training
    lengths: tuple[tuple[int, int], ...] = ()  # a histogram of (tokens, rows)
    no_tokens: str = ""  # why that is empty
    done: bool = False

    @property
    def longest(self) -> int:
        return self.lengths[-1][0] if self.lengths else 0

    def percentile(self, percent: float) -> int:
        """The least length that so many percent of the prompts do not exceed."""
        passed = list(accumulate(rows for _, rows in self.lengths))
        if not passed:
            return 0
        return self.lengths[bisect_left(passed, passed[-1] * percent / 100)][0]

    def too_long(self, limit: int) -> tuple[int, bool]:
        """(rows with a prompt of more than `limit` tokens, True if all rows were counted)."""
        counted = sum(rows for tokens, rows in self.lengths if tokens > limit)
        is_exact = self.seen >= self.rows
        return (counted if is_exact else round(counted * self.rows / max(1, self.seen))), is_exact


class Dataset(QObject):
    """The draft's dataset, as far as the helper process has read it."""

    changed = Signal()  # any attribute without a signal of its own
    counts_changed = Signal()
    variety_changed = Signal()
    rows_replaced = Signal()  # the split has other rows now

    def __init__(self, draft: Draft, service: Service, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._draft, self._service = draft, service
        self.state = "none"  # not chosen; reading, absent (on the Hub only), fetching, ready, or failed
        self.preview, self.split = dict[str, Any](), "train"
        self.choices: dict[str, list[str]] = {"configs": [], "splits": []}  # that the Hub offers
        self.counts: Counts | None = None  # of the prompts of `split`
        self.variety: dict[str, Any] = {}
        self.download_progress: tuple[int, int | None] = (0, None)  # bytes, of which in all
        self._count_faults: list[ConfigProblem] = []
        self._watchers: dict[int, bool] = {}
        self._requested_for: dict[str, Any] | None = None
        self._pending: dict[str, int] = {}
        self._fetch_failed = False
        self._choices_for: tuple[Any, ...] = ()
        self._fetch = False
        # Restarted at every change, so one request is sent for a path that is typed, and none for its beginnings.
        self._rest_timer = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._rest_timer.timeout.connect(lambda: self.refresh())
        self._draft.changed.connect(self._on_changed)

    def watch(self, watcher: QObject, *, count_all: bool = True) -> None:
        """Keep the data current for a widget. `count_all`: count every prompt, not only a sample."""
        self._watchers[id(watcher)] = count_all
        self.refresh(again=True)

    def unwatch(self, watcher: QObject) -> None:
        self._watchers.pop(id(watcher), None)
        if not self._watchers:
            self._rest_timer.stop()
            if "preview" in self._pending:
                self._cancel("preview")
                self._requested_for = None
        if not any(self._watchers.values()):
            self._cancel("preview_counts", "preview_variety")

    def settings(self) -> dict[str, Any]:
        valid_values = self._draft.valid_values()
        code = CODE_SETTINGS if valid_values["map_function"] else ()
        return {key: valid_values[key] for key in (*ANSWER_SETTINGS, *LIMIT_SETTINGS, *code)}

    @property
    def prompt_limit(self) -> int:
        """Tokens that a prompt may have; in SFT a whole row."""
        values = self._draft.valid_values()
        if values["train_mode"] == "sft":
            return values["max_seq_length"]
        return prompt_limit(values["max_seq_length"], values["max_completion_length"], values["max_prompt_length"])

    @property
    def splits(self) -> dict[str, dict[str, Any]]:
        """Split → {rows, source, unanswered, repeated}."""
        return self.preview.get("splits", {})

    @property
    def faults(self) -> list[ConfigProblem]:
        # Those of single rows follow from those of the columns.
        return [ConfigProblem(**fault) for fault in self.preview.get("faults", ())] or self._count_faults

    @property
    def columns(self) -> list[str]:
        return [column["name"] for column in self.preview.get("columns", ())]

    @property
    def suggested_columns(self) -> dict[str, str]:
        return self.preview.get("likely", {})

    @property
    def uses(self) -> dict[str, str]:
        """The settings that name a column in the chosen mode → the use of that column."""
        values = self._draft.valid_values()
        return {key: use for key, use in USES.items() if SETTINGS[key].fits_mode(values)}

    def summary_line(self) -> tuple[str, bool]:
        """(“2,048 rows · question → prompt · 3 too long” or a problem, True for a problem)."""
        if faults := self.faults:
            return faults[0].sentence, True
        if self.state in STATE_LINES or "train" not in self.splits:
            return STATE_LINES.get(self.state, ""), False
        values, train = self._draft.valid_values(), self.splits["train"]
        others = "".join(f" + {about['rows']:,} {name}" for name, about in self.splits.items() if name != "train")
        columns = {values[key]: use for key, use in self.uses.items() if values[key] in self.columns}
        uses = [use if column == use else f"{column} → {use}" for column, use in columns.items()]
        parts = [f"{count_text(train['rows'], 'row')}{others}", ", ".join(uses)]
        if self.split == "train" and self.counts is not None and self.counts.lengths:
            rows, is_exact = self.counts.too_long(self.prompt_limit)
            parts.append(f"{'' if is_exact else 'about '}{rows:,} too long" if rows else "")
        if train["unanswered"] and "answer_feature" in self.uses:
            parts.append(f"{train['unanswered']:,} without an answer")
        return " · ".join(part for part in parts if part), False

    def problems(self) -> list[ConfigProblem]:
        """The faults that a run of the form would end with; none while the form's dataset is still being read."""
        is_known = self._requested_for in (None, self.settings()) and self.state in ("ready", "failed")
        is_waiting = self._rest_timer.isActive() or "preview" in self._pending or self._fetch_failed
        return self.faults if is_known and not is_waiting else []

    def set_split(self, split: str) -> None:
        if split != self.split and split in self.splits:
            self.split = split
            self._cancel("preview_counts", "preview_variety")
            self._reset_figures()
            self._request_counts()

    def refresh(self, again: bool = False) -> None:
        """Request missing data, if there are watchers. `again`: even if no setting has changed."""
        self._rest_timer.stop()
        if not self._watchers:
            return
        settings = self.settings()
        if self._requested_for == settings and not self._fetch and not again:
            self._request_counts()
            return
        if "download" in self._pending and self._requested_for and self._requested_for["data"] == settings["data"]:
            return
        self._cancel(*self._pending)
        known = self._requested_for == settings
        is_other = (self._requested_for or {}).get("data") != settings["data"]
        self._requested_for = settings
        if not settings["data"].strip():
            self._set_state("none", {})
            return
        if is_other or self.state in ("none", "failed", "absent", "fetching"):
            self._set_state("reading", {})

        def on_preview(answer: dict[str, Any]) -> None:
            if answer["absent"]:
                self._set_state("absent", {})
                return
            if not known or answer != {"absent": False, **self.preview}:
                self._set_state("ready" if answer["splits"] else "failed", answer)
                self._request_choices(answer["form"])
            elif self.counts is not None and self.counts.no_tokens:
                self.counts = replace(self.counts, done=False)  # the model may be on this machine by now
            self._request_counts()

        self._ask("preview", on_preview, self._on_refused, settings=settings, fetch=self._fetch)
        self._fetch = False

    def _ask(
        self,
        question: str,
        on_answer: Callable[[Any], None],
        on_refused: Callable[[list[ConfigProblem]], None],
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        **arguments: Any,
    ) -> None:
        def ended(callback: Callable[[Any], None], content: Any) -> None:
            self._pending.pop(question, None)
            callback(content)

        self._pending[question] = self._service.ask(
            question,
            partial(ended, on_answer),
            on_refused=partial(ended, on_refused),
            on_progress=on_progress,
            owner=self,
            **arguments,
        )

    def request(
        self, question: str, on_answer: Callable[[Any], None], owner: QObject, *, in_parts: bool = False, **which: Any
    ) -> int:
        """Ask about rows of the split; returns the number of the request. `in_parts`: progress is an answer too."""
        settings, split = self.settings(), self.split

        def current(answer: Any) -> None:
            on_answer(answer if (self.settings(), self.split) == (settings, split) else None)

        return self._service.ask(
            question,
            current,
            on_progress=current if in_parts else None,
            on_refused=lambda _: on_answer(None),
            owner=owner,
            settings=settings,
            split=split,
            **which,
        )

    def _cancel(self, *questions: str) -> None:
        for question in questions:
            self._service.cancel(self._pending.pop(question, None))

    def _on_changed(self, key: str) -> None:
        if not key or key in ANSWER_SETTINGS:
            if key in ("", "data"):
                self.split = "train"
            self._rest_timer.start()
        elif key in LIMIT_SETTINGS:
            if self._requested_for is not None:
                self._requested_for |= {key: self.settings()[key]}
            self.changed.emit()

    def _on_refused(self, faults: list[ConfigProblem], *, of_download: bool = False) -> None:
        self._fetch_failed = of_download
        self._requested_for = None
        self._set_state("failed", {"faults": [fault.to_dict() for fault in faults]})

    def _set_state(self, state: str, preview: dict[str, Any]) -> None:
        self.state, self.preview = state, preview
        if self.split not in self.splits:
            self.split = next(iter(self.splits), "train")
        self._reset_figures()

    def _reset_figures(self) -> None:
        self.counts, self._count_faults = None, []
        self._set_variety({})
        self.changed.emit()
        self.rows_replaced.emit()

    def _request_choices(self, form: str) -> None:
        settings = self.settings()
        dataset = (settings["data"], settings["dataset_config"]) if form == "hub" else ()
        if dataset == self._choices_for:
            return
        self._choices_for, self.choices = dataset, {"configs": [], "splits": []}

        def on_choices(choices: dict[str, list[str]]) -> None:
            self.choices = choices
            self.changed.emit()

        if dataset:
            self._service.ask("preview_choices", on_choices, owner=self, settings=settings)

    def download(self) -> None:
        self._cancel("download")

        def on_progress(progress: dict[str, Any]) -> None:
            self.download_progress = (progress["done"], progress["total"])
            self.changed.emit()

        def on_downloaded(_: Any) -> None:
            self._fetch, self.state = True, "reading"
            self.refresh()

        self.download_progress = (0, None)
        self._set_state("fetching", {})
        name = self.settings()["data"].strip()
        refused = partial(self._on_refused, of_download=True)
        self._ask("download", on_downloaded, refused, on_progress, id=name, repo_type="dataset")

    def try_again(self) -> None:
        self.download() if self._fetch_failed else self.refresh(again=True)

    @property
    def can_count(self) -> bool:
        values, features = self._draft.valid_values(), {"prompt_feature", "messages_feature"} & self.uses.keys()
        return self.split in self.splits and any(values[key] in self.columns for key in features)

    def _request_counts(self) -> None:
        if not self._watchers or not self.can_count:
            return
        counts_all = any(self._watchers.values())
        which = {"settings": self.settings(), "split": self.split}
        if counts_all and not self.variety and "preview_variety" not in self._pending:
            self._ask("preview_variety", self._set_variety, lambda _: self._set_variety({}), **which)
        most = None if counts_all else SAMPLE_SIZE
        rows = self.splits[self.split]["rows"]
        is_known = self.counts is not None and self.counts.done and self.counts.seen >= min(rows, most or rows)
        if not is_known and "preview_counts" not in self._pending:
            done = partial(self._on_counts, done=True)
            self._ask("preview_counts", done, self._show_count_faults, self._on_counts, most=most, **which)

    def _on_counts(self, answer: dict[str, Any], done: bool = False) -> None:
        lengths = () if answer["no_tokens"] else tuple((int(tokens), int(rows)) for tokens, rows in answer["lengths"])
        self.counts = Counts(answer["rows"], answer["seen"], answer["refused"], lengths, answer["no_tokens"], done)
        faults = [ConfigProblem(**fault) for fault in answer["faults"]]
        if faults != self._count_faults:
            self._show_count_faults(faults)
        self.counts_changed.emit()
        if done:
            self._request_counts()  # a watcher that needs every prompt counted may have been added meanwhile

    def _show_count_faults(self, faults: list[ConfigProblem]) -> None:
        self._count_faults = faults
        self.changed.emit()

    def _set_variety(self, variety: dict[str, Any]) -> None:
        self.variety = variety
        self.variety_changed.emit()
