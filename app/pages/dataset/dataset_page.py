"""The Dataset page: path, use of columns and splits, counts, the table of rows, and the exact prompt of one row."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QKeySequence, QShortcut, QShowEvent
from PySide6.QtWidgets import QSizePolicy, QSplitter, QWidget

from app import theme
from app.pages.dataset.cards import ColumnMapping, DatasetFigures
from app.pages.dataset.rows import CHUNK, DataColumn, RowDetail, RowModel, RowTable
from app.state.dataset import SPLITS, USES, Dataset
from app.state.reward_bench import MAX_ROWS
from app.state.session import Session
from app.widgets.basic.controls import ComboBox
from app.widgets.basic.dialogs import show_details
from app.widgets.basic.labels import EmptyState, button, label, plain_tip, show_text, with_key_names
from app.widgets.basic.layout import card, column, configure, connect, row, set_shown, set_style_property, stack
from app.widgets.basic.number_format import file_size
from app.widgets.form.fields import PathField
from backend.config.config import SETTINGS
from backend.config.setting import step_parts
from backend.utils.errors import UserError

COMPARING = "Comparing the prompts…"
UNCOUNTED = "Choose the column with the prompts to count their tokens."
SHARES = (3, 2)
MOVED_MS = 60
"""Rest of the cursor on a row before that row is requested: a held arrow key requests none on its way."""
TRY = "Sample the model on the selected rows and score the completions (Ctrl+Shift+D)"
TRY_NOT = f"The model is sampled on rows of the training split, {MAX_ROWS:,} at most."
ALLOW = "Asks if the Python file may run, and then shows the rows as its function makes them"
ROW_STEPS = ("map_function", "prompt_template", "answer_pattern")
NOTHING_HELD_OUT = "No rows are held out, so nothing will show how the model does on prompts it has not trained on."
FEWEST_ROWS = 10
KINDS = {
    "all": "Hardest first",
    "never": "Never solved",
    "sometimes": "Sometimes",
    "always": "Always",
    "noisy": "Noisy",
}
SOLVED_BY = "As {run}, the newest run on this dataset, solved them. Noisy: less often in the end than before."
EMPTY = (
    "No dataset is chosen yet",
    "A csv, json, jsonl or parquet file with a question and an answer in each row is enough; a folder or a dataset of "
    "Hugging Face will do as well. Drop it anywhere on the window, or choose it.",
    "Choose a file…",
)
ABSENT = (
    "This dataset is not on this machine yet",
    "It is downloaded from Hugging Face once and kept in its cache.",
    "Fetch it",
)
FAILED = (
    "The dataset could not be read",
    "The error is shown above. Try again once the network is back or the file is fixed.",
    "Try again",
)


class DatasetPage(QWidget):
    enabled_actions_changed = Signal(dict)  # dict

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.draft = session, session.draft
        dataset = self.dataset = session.dataset
        self._row_request = 0
        self._generation = 0
        self._had_tokens = False
        self._by_difficulty: dict[str, list[int]] = {}
        self._rest_timer = configure(QTimer(self, singleShot=True, interval=MOVED_MS), timeout=self._request_row)
        # Widgets are created with their final parent: reparented later, Qt would restyle all of them again.
        self.path = PathField(SETTINGS["data"], self)
        self.path.label.hide()
        body = self._body = QWidget(self)
        self.mapping, self.counts = ColumnMapping(USES, body), DatasetFigures(body)
        for part in (self.mapping, self.counts):  # SHARES decide the widths, not the texts
            part.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.which = ComboBox(name="Split that is shown", length=14)
        self.difficulty = ComboBox(name="Rows by difficulty", length=16, shown=False)
        self.shown = label(font=theme.heading_font(), buddy=self.which, minimumHeight=28)
        self.model = RowModel(self)
        self.table = RowTable(self.model)
        self.try_button = button("Try rewards", self.try_rewards)
        tip = "The traceback of the map function"
        self.details = button("Details", lambda: show_details(UserError(dataset.faults).traceback, self), tip=tip)
        self.allow_button = button("Allow the map function…", self.allow_map_function, tip=ALLOW)
        parts = self.parts = QSplitter(Qt.Orientation.Horizontal, body, childrenCollapsible=False, handleWidth=12)
        self.detail = RowDetail(parts)
        buttons = (self.details, self.allow_button, self.try_button)
        head = row(self.shown, self.which, self.difficulty, None, *buttons, spacing=6, margins=(8, 4, 4, 0))
        parts.insertWidget(0, card(column(head, (self.table, 1), spacing=4, margins=4)))
        for index, share in enumerate(SHARES):
            parts.setStretchFactor(index, share)
        parts.setSizes([1000 * share for share in SHARES])
        self.hold_out = button("Hold out 10 %", self.draft.hold_out, primary=True)
        sentence = label(NOTHING_HELD_OUT, wrap=True)
        self.nothing_held_out = card(row((sentence, 1), self.hold_out, margins=(12, 6, 6, 6)), "banner", visible=False)
        band = row((self.mapping, SHARES[0]), (self.counts, SHARES[1]), spacing=12)
        column(self.nothing_held_out, band, (parts, 1), into=body, spacing=12)
        self.nothing = EmptyState(*EMPTY, button_clicked=lambda: self.path.choose_file())
        self.absent = EmptyState(*ABSENT, button_clicked=dataset.download)
        self.failed = EmptyState(*FAILED, button_clicked=dataset.try_again)
        self._stack = stack(self.nothing, self.absent, self.failed, body, into=self, nested=True)
        title = (label("Dataset", theme.title_font(), minimumHeight=theme.scaled(28)), 0, Qt.AlignmentFlag.AlignTop)
        top = row(title, (self.path, 1), spacing=3 * theme.SPACE)
        column(top, (self._stack, 1), into=self, spacing=12, margins=theme.GUTTER)
        tab_stops = [
            *(*self.path.tab_stops, self.hold_out, *self.mapping.tab_stops, self.counts.other, self.which),
            *(self.difficulty, *buttons, self.table, *self.detail.views.buttons.values(), self.detail.pane),
        ]
        for widget, following in pairwise(tab_stops):
            QWidget.setTabOrder(widget, following)

        connect(self.draft.set, self.path.edited, self.mapping.edited)
        self.mapping.use.clicked.connect(lambda: self.draft.update(dataset.suggested_columns))
        self.draft.changed.connect(self._on_changed)
        dataset.changed.connect(self._show_all)
        dataset.counts_changed.connect(self._show_counts)
        dataset.variety_changed.connect(self._show_variety)
        dataset.rows_replaced.connect(self._show_rows)
        self.counts.other.clicked.connect(self._show_about)
        self.which.activated.connect(lambda: dataset.set_split(self.which.currentData()))
        self.difficulty.activated.connect(self._show_chosen_rows)
        self.model.chunk_requested.connect(self._request_chunk)
        self.table.chosen.connect(lambda: self._rest_timer.start())
        self.table.selected.connect(self._show_enabled)
        QShortcut(QKeySequence.StandardKey.Refresh, self, lambda: dataset.refresh(again=True))
        self._show_all()
        self._show_rows()  # for the line on Train they may have been read before this page was built

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.dataset.watch(self)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self.dataset.unwatch(self)

    def _on_changed(self, key: str) -> None:
        if not key or key == "data" or key in self.mapping.fields:
            self._show_values()
        if not key or key in ROW_STEPS:
            self._show_problems()

    def _show_values(self) -> None:
        self.path.show_value(self.draft.value("data"))
        self.mapping.show_values({key: self.draft.value(key) for key in self.mapping.fields})

    def _show_all(self) -> None:
        dataset, preview = self.dataset, self.dataset.preview
        unread = self.failed if dataset.state == "failed" and "form" not in preview else self._body
        self._stack.setCurrentWidget({"none": self.nothing, "absent": self.absent}.get(dataset.state, unread))
        self._show_values()
        self.mapping.offer_names(dataset)
        self.mapping.show_columns(dataset.uses)
        self._show_values()
        self.mapping.show_problems(dataset.faults)
        self.mapping.show_likely(dataset.suggested_columns)
        self._show_problems()
        splits = dataset.splits
        is_alone = list(splits) == ["train"] and splits["train"]["rows"] >= FEWEST_ROWS
        set_shown(self.nothing_held_out, is_alone and not self.draft.value("validation_split"))
        self.which.fill({split: f"{SPLITS[split]} · {each['rows']:,}" for split, each in splits.items()}, dataset.split)
        self.which.setVisible(len(splits) > 1)
        self.shown.setText("Rows of" if len(splits) > 1 else "Rows")
        self._show_counts()
        self._show_variety()
        self.table.set_placeholder(self._placeholder())
        missing = self.session.consent.code.missing(self._mapping_settings())
        self.allow_button.setVisible(bool(self.draft.value("map_function") and missing))
        self._show_enabled()
        self.model.set_prompt_limit(dataset.prompt_limit)
        self.detail.set_prompt_limit(dataset.prompt_limit)

    def _show_problems(self) -> None:
        self.details.setVisible(bool(UserError(self.dataset.faults).traceback))
        elsewhere = [problem for problem in self.dataset.faults if problem.setting not in self.mapping.fields]
        # The preview ignores an invalid pattern or template.
        elsewhere += [problem for problem in self.draft.problems() if problem.setting in ROW_STEPS]
        self.path.show_problem(" ".join(dict.fromkeys(problem.sentence for problem in elsewhere)))

    def _show_counts(self) -> None:
        dataset, counts, shown = self.dataset, self.dataset.counts, self.counts
        about = dataset.splits.get(dataset.split, {})
        shown.show_figure("rows", about.get("about") or about.get("rows"), sample=bool(about.get("about")))
        shown.show_figure("unanswered", about.get("unanswered") if "answer_feature" in dataset.uses else None)
        shown.show_figure("repeated", about.get("repeated"))
        shown.show_figure("refused", counts.refused if counts else None, sample=counts is not None and not counts.done)
        has_tokens = counts is not None and bool(counts.lengths)
        too_long, is_exact = counts.too_long(dataset.prompt_limit) if counts and has_tokens else (None, True)
        shown.show_figure("too_long", too_long, sample=not is_exact)
        instead = counts.no_tokens if counts else UNCOUNTED if dataset.splits and not dataset.can_count else ""
        shown.histogram.show_lengths(counts.lengths if counts and has_tokens else (), dataset.prompt_limit, instead)
        self._show_about()
        shown.show_progress(*((counts.seen, counts.rows) if counts and not counts.done else (0, 0)))
        if has_tokens and not self._had_tokens:
            self.model.forget()  # the tokenizer is loaded now: rows requested again have lengths
            if not self._row_request:
                self._request_row()
        self._had_tokens = has_tokens

    def _show_variety(self) -> None:
        variety = self.dataset.variety
        show_text(self.mapping.verdict, variety.get("verdict", ""))
        set_style_property(self.mapping.verdict, "role", "problem" if variety.get("level") == "poor" else "muted")
        awaited = COMPARING if self.dataset.can_count else UNCOUNTED if self.dataset.splits else ""
        self.counts.variety.show_figures(variety.get("figures", ()), "" if variety else awaited)
        self._show_about()

    def _show_about(self) -> None:
        text = caption(self.dataset, of_variety=self.counts.shows_variety and bool(self.dataset.variety))
        configure(self.counts.about, text=text, toolTip=plain_tip(text))

    def enabled_actions(self) -> dict[str, bool]:
        """Action of the Rewards menu → is enabled."""
        selected = sum(map(len, self.table.selected_ranges()))
        return {"try_rows": self.dataset.split == "train" and 0 < selected <= MAX_ROWS}

    def try_rewards(self) -> None:
        self.session.page_requested.emit("rewards")
        rows = [self.model.numbers[place] + 1 for part in self.table.selected_ranges() for place in part]
        self.session.reward_rows_requested.emit(rows)

    def allow_map_function(self) -> None:
        if self.session.consent.obtain(self._mapping_settings()):
            self.dataset.refresh(again=True)

    def _mapping_settings(self) -> dict[str, Any]:
        # The preview runs the file in a confined process whatever the run's settings are.
        return {key: self.draft.value(key) for key in ("reward_functions_file", "reward_network")}

    def _show_enabled(self) -> None:
        actions, ranges = self.enabled_actions(), self.table.selected_ranges()
        count = sum(map(len, ranges))
        what = f"row {self.model.numbers[ranges[0].start] + 1:,}" if count == 1 else f"{count:,} rows"
        is_enabled = actions["try_rows"]
        tip = with_key_names(TRY) if is_enabled else TRY_NOT
        is_shown = count > 0 and "scoring" in step_parts(self.draft.valid_values())
        configure(self.try_button, text=f"Try rewards on {what}", visible=is_shown, enabled=is_enabled, toolTip=tip)
        self.enabled_actions_changed.emit(actions)

    def _show_rows(self) -> None:
        self._had_tokens = False
        self._by_difficulty, self.model.solved = {}, {}
        self.difficulty.clear()
        self.difficulty.hide()
        self._show_chosen_rows()
        if self.model.numbers:
            self.dataset.request("preview_difficulty", self._offer_difficulty, self)

    def _offer_difficulty(self, answer: dict[str, Any] | None) -> None:
        """Offer the kinds of prompts, as the newest run on the dataset solved them."""
        if not answer or not answer["rows"] or self._by_difficulty:
            return
        self._by_difficulty = {"all": [entry[0] for entry in answer["rows"]]}
        for index, _, _, kind in answer["rows"]:
            self._by_difficulty.setdefault(kind, []).append(index)
        self.model.solved = {index: f"{solved} of {sampled}" for index, solved, sampled, _ in answer["rows"]}
        counts = {kind: len(self._by_difficulty[kind]) for kind in KINDS if kind in self._by_difficulty}
        self.difficulty.fill({"": "File order"} | {kind: f"{KINDS[kind]} · {n:,}" for kind, n in counts.items()}, "")
        configure(self.difficulty, visible=True, toolTip=plain_tip(SOLVED_BY.format(run=answer["run"])))
        self._show_chosen_rows()

    def _show_chosen_rows(self) -> None:
        dataset, kind = self.dataset, self.difficulty.currentData()
        self._generation += 1
        rows = range(dataset.splits.get(dataset.split, {}).get("rows", 0))
        numbers = self._by_difficulty[kind] if kind else rows
        self.model.show_rows(numbers, self._columns() if numbers else [], dataset.prompt_limit)
        self.table.reset_view(self._placeholder())
        if not numbers:
            self.detail.show_row(0, None, dataset.prompt_limit)
        self._show_enabled()  # a model reset drops the selection without a signal

    def _columns(self) -> list[DataColumn]:
        valid_values = self.draft.valid_values()
        uses = {valid_values[key]: use for key, use in reversed(self.dataset.uses.items())}
        wide = self.dataset.suggested_columns.get("prompt_feature", valid_values["prompt_feature"])
        columns, order = [], [*USES.values(), ""]
        for each in self.dataset.preview["columns"]:
            name, is_number = each["name"], each["kind"] == "number"
            use = uses.get(name, "")
            title = name if use in ("", name) else f"{name} → {use}"
            columns.append(DataColumn(title, is_figure=is_number, name=name, use=use, wide=name == wide))
        return sorted(columns, key=lambda column: (not column.wide, order.index(column.use)))

    def _placeholder(self) -> str:
        data, state = self.draft.value("data"), self.dataset.state
        if state == "fetching":
            done, total = self.dataset.download_progress
            of = f" of {file_size(total)}" if total else ""
            return f"Fetching {data} from Hugging Face: {file_size(done)}{of}"
        if state == "reading":
            return f"Reading {Path(data).name}…"
        return "No rows could be read; the error is shown above."

    def _request_chunk(self, start: int) -> None:
        generation = self._generation

        def add(answer: dict[str, Any] | None) -> None:
            if generation != self._generation:  # rows of a dataset or split that is no longer shown
                return
            if answer is None:
                self.model.release(start)
            else:
                self.model.add_chunk(start, answer["rows"], answer["tokens"], answer["images"])

        which: dict[str, Any] = {"start": start, "count": CHUNK}
        if self.difficulty.currentData():
            which["numbers"] = list(self.model.numbers[start : start + CHUNK])
        self.dataset.request("preview_rows", add, self, **which)

    def _request_row(self) -> None:
        place = self.table.currentIndex().row()
        if place < 0:
            return
        index = self.model.numbers[place]
        if self._row_request:
            self.session.service.cancel(self._row_request)
        generation = self._generation

        def show(answer: dict[str, Any] | None) -> None:
            # A first answer comes while the tokenizer is loading; the request then stays pending for the second.
            self._row_request = self._row_request if answer and answer.get("loading") else 0
            if answer is not None and generation == self._generation:
                self.detail.show_row(index, answer, self.dataset.prompt_limit)

        self._row_request = self.dataset.request("preview_row", show, self, in_parts=True, index=index)


def caption(dataset: Dataset, *, of_variety: bool) -> str:
    """“median 46 · 95% up to 90 · longest 203 · 1,536 fit”, or the rows compared; and notes on the rows read."""
    counts, about = dataset.counts, dataset.splits.get(dataset.split, {})
    parts: list[str] = []
    if of_variety:
        rows, total = dataset.variety["rows"], dataset.variety["total"]
        parts = [f"of {rows:,} rows" if rows == total else f"of {rows:,} rows, drawn from {total:,}"]
    elif counts is None:
        parts = ["Counting tokens…"] if dataset.can_count else []
    elif counts.lengths:
        parts = [
            f"median {counts.percentile(50):,}",
            f"95% up to {counts.percentile(95):,}",
            f"longest {counts.longest:,}",
            f"{max(0, dataset.prompt_limit):,} fit",
        ]
    first = [f"first {about['rows']:,} rows"] if about.get("about") else []
    return " · ".join([*parts, *first, *dataset.preview.get("notes", ())])
