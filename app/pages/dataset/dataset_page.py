"""The Dataset page: what will it learn from?

Composes the path field, the mapping of columns and splits, the counts with their histogram, the table of rows, and the detail of one
row with the exact prompt that the model will see. Choices are written into the draft; the data comes from `app.state.dataset`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QKeySequence, QShortcut, QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QSizePolicy, QSplitter, QVBoxLayout, QWidget

from app import theme
from app.pages.dataset.column_mapping import ColumnMapping
from app.pages.dataset.dataset_figures import DatasetFigures
from app.pages.dataset.rows import CHUNK, ColumnHeading, RowDetail, RowModel, RowTable
from app.state.dataset import SPLITS, USES, Dataset
from app.state.session import Session
from app.widgets.basic.controls import ComboBox
from app.widgets.basic.labels import EmptyState, PlainLabel, button, label, plain_tip, with_key_names
from app.widgets.basic.layout import NestedStack
from app.widgets.basic.number_format import figure
from app.widgets.completion_source import MAX_ROWS
from app.widgets.form.fields import PathField
from backend.config.config import SETTINGS

# The captions below the figures of the Dataset page: how long its prompts are, and how many of them were compared.


def lengths_caption(dataset: Dataset) -> str:
    """“median 46 · 95% up to 90 · longest 203 · 1,536 fit”, and what else there is to know of the rows that were read."""
    counts, notes = dataset.counts, _notes(dataset)
    if counts is None:
        return " · ".join(["Counting tokens…" if dataset.can_count else "", *notes]).strip(" ·")
    if not counts.has_tokens:
        return " · ".join(notes)
    lengths = (
        f"median {counts.median:,}",
        f"95% up to {counts.percentile(95):,}",
        f"longest {counts.longest:,}",
        f"{max(0, dataset.prompt_limit):,} fit",
    )
    return " · ".join([*lengths, *notes])


def variety_caption(dataset: Dataset) -> str:
    """“of 10,000 rows, drawn from 97,870”. The dataset's variety must be known."""
    rows, total = dataset.variety["rows"], dataset.variety["total"]
    compared = f"of {rows:,} rows" if rows == total else f"of {rows:,} rows, drawn from {total:,}"
    return " · ".join([compared, *_notes(dataset)])


def _notes(dataset: Dataset) -> list[str]:
    about = dataset.splits.get(dataset.split, {})
    first = [f"first {about['rows']:,} rows"] if about.get("about") else []
    return [*first, *dataset.preview.get("notes", ())]


# ── dataset page ─────────────────────────────────────────────────────────────────────────────────────────────────────

COMPARING = "Comparing the prompts…"
UNCOUNTED = "Choose the column with the prompts, and their tokens are counted."
SHARES = (3, 2)
"""Relative widths of the left and right cards."""
MOVED_MS = 60
"""How long the cursor must rest on a row before that row is requested: a held arrow key requests none on its way."""
TRY = "Sample the model on the selected rows, and see what your rewards make of it (Ctrl+Shift+D)"
ROW_STEPS = ("map_function", "prompt_template", "answer_pattern")
ALLOW = "Asks whether the Python file may run, and then shows the rows as its function makes them"
TRY_NOT = f"The model is sampled on rows of the training split, {MAX_ROWS:,} at most."
EMPTY = ("No dataset is chosen yet", "A csv, json, jsonl or parquet file with a question and an answer in each row is enough; "
         "a folder or a dataset of Hugging Face will do as well. Drop it anywhere on the window, or choose it.", "Choose a file…")  # fmt: skip
ABSENT = ("This dataset is not on this machine yet", "It is fetched from Hugging Face once, and kept in its cache.",
          "Fetch it")  # fmt: skip
FAILED = ("The dataset could not be read", "What is wrong stands above. It may be over by now: the network is back, or the file is "
          "mended.", "Try again")  # fmt: skip


class DatasetPage(QWidget):
    """The page.

    Attributes:
        session, draft, dataset – the state shared with the other pages.

    Signals:
        enabled_actions_changed(dict) – `enabled_actions()` returns this now.
    """

    enabled_actions_changed = Signal(dict)

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.draft = session, session.draft
        self.dataset: Dataset = session.dataset
        self._row_request = 0
        self._generation = 0
        self._had_tokens = False
        self._rest_timer = QTimer(self, singleShot=True, interval=MOVED_MS)
        self._rest_timer.timeout.connect(self._request_row)
        self._compose()
        self._lay_out()
        self._order_tabs()
        self._connect()
        self._show_all()
        self._show_rows()  # for the line on Train they may have been read before this page was built

    # Building

    def _compose(self) -> None:
        # Widgets are created with their final parent: reparented later, Qt would restyle all of them again.
        self.path = PathField(SETTINGS["data"], self)
        self.path.label.hide()
        body = self._body = QWidget(self)
        self.mapping, self.counts = ColumnMapping(USES, body), DatasetFigures(body)
        self.parts = QSplitter(Qt.Orientation.Horizontal, body, childrenCollapsible=False, handleWidth=12)
        self.which = ComboBox()
        self.which.setAccessibleName("Split that is shown")
        self.which.setMinimumContentsLength(14)
        self.model = RowModel(self)
        self.table = RowTable(self.model)
        self.detail = RowDetail(self.parts)
        self.try_button = button("Try rewards", self.try_rewards)
        self.allow_button = button("Allow the map function…", self.allow_map_function, tip=ALLOW)
        self.nothing, self.absent, self.failed = EmptyState(*EMPTY), EmptyState(*ABSENT), EmptyState(*FAILED)

    def _lay_out(self) -> None:
        title = PlainLabel("Dataset")
        title.setFont(theme.title_font())
        head = QHBoxLayout()
        head.setSpacing(3 * theme.SPACE)
        head.addWidget(title, 0, Qt.AlignmentFlag.AlignTop)
        head.addWidget(self.path, 1)
        band = QHBoxLayout()
        band.setSpacing(12)
        for card, share in zip((self.mapping, self.counts), SHARES, strict=True):
            card.setSizePolicy(
                QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred
            )  # SHARES decide the widths, not the texts
            band.addWidget(card, share)
        body, parts = self._body, self.parts
        parts.addWidget(self._rows_card())
        parts.addWidget(self.detail)
        for index, share in enumerate(SHARES):
            parts.setStretchFactor(index, share)
        parts.setSizes([1000 * share for share in SHARES])
        below = QVBoxLayout(body)
        below.setContentsMargins(0, 0, 0, 0)
        below.setSpacing(12)
        below.addLayout(band)
        below.addWidget(parts, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(theme.GUTTER,) * 4)
        column.setSpacing(12)
        column.addLayout(head)
        self._stack = NestedStack(self)
        for view in (self.nothing, self.absent, self.failed, body):
            self._stack.addWidget(view)
        column.addLayout(self._stack, 1)

    def _rows_card(self) -> QFrame:
        card = QFrame(self.parts)
        card.setProperty("role", "card")
        head = QHBoxLayout()
        head.setContentsMargins(8, 4, 4, 0)
        self.shown = label(font=theme.heading_font())
        self.shown.setBuddy(self.which)
        self.shown.setMinimumHeight(28)
        head.addWidget(self.shown)
        head.addWidget(self.which)
        head.addStretch(1)
        head.addWidget(self.allow_button)
        head.addWidget(self.try_button)
        column = QVBoxLayout(card)
        column.setContentsMargins(4, 4, 4, 4)
        column.setSpacing(4)
        column.addLayout(head)
        column.addWidget(self.table, 1)
        return card

    def _order_tabs(self) -> None:
        views = self.detail.views.buttons.values()
        tab_stops = [
            *self.path.tab_stops(),
            *self.mapping.tab_stops(),
            self.counts.other,
            self.which,
            self.table,
            self.allow_button,
            self.try_button,
            *views,
            self.detail.pane,
        ]
        for widget, following in pairwise(tab_stops):
            QWidget.setTabOrder(widget, following)

    def _connect(self) -> None:
        for source in (self.path, self.mapping):
            source.edited.connect(self.draft.set)
        self.mapping.accepted.connect(self.dataset.accept_suggestions)
        self.draft.changed.connect(self._on_changed)
        self.dataset.changed.connect(self._show_all)
        self.dataset.counts_changed.connect(self._show_counts)
        self.dataset.variety_changed.connect(self._show_variety)
        self.counts.turned.connect(self._show_about)
        self.dataset.rows_replaced.connect(self._show_rows)
        self.which.activated.connect(lambda _: self.dataset.set_split(self.which.currentData()))
        self.model.chunk_requested.connect(self._request_chunk)
        self.table.chosen.connect(lambda _: self._rest_timer.start())
        self.table.selected.connect(self._show_enabled)
        self.nothing.button_clicked.connect(lambda: self.path.choose_file())
        self.absent.button_clicked.connect(self.dataset.download)
        self.failed.button_clicked.connect(self.dataset.try_again)
        QShortcut(QKeySequence.StandardKey.Refresh, self, self.dataset.reload)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.dataset.watch(self)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self.dataset.unwatch(self)

    # Showing the draft and the dataset

    def _on_changed(self, key: str) -> None:
        if not key or key == "data" or key in self.mapping.fields:
            self._show_values()
        if not key or key in ROW_STEPS:
            self._show_problems()

    def _show_values(self) -> None:
        self.path.show_value(self.draft.value("data"))
        self.mapping.show_values({key: self.draft.value(key) for key in self.mapping.fields})

    def _show_all(self) -> None:
        dataset = self.dataset
        views = {"none": self.nothing, "absent": self.absent}
        unread = self.failed if dataset.state == "failed" and "form" not in dataset.preview else self._body
        self._stack.setCurrentWidget(views.get(dataset.state, unread))
        self._offer_names()
        self._show_values()
        self.mapping.show_faults(dataset.faults)
        self._show_problems()
        self.mapping.show_likely(dataset.suggested_columns)
        self._show_which()
        self._show_counts()
        self._show_variety()
        self.table.set_placeholder(self._placeholder())
        self.allow_button.setVisible(bool(self.draft.value("map_function") and self._unconfirmed()))
        self._show_enabled()
        self.model.set_prompt_limit(dataset.prompt_limit)
        self.detail.set_prompt_limit(dataset.prompt_limit)

    def _show_problems(self) -> None:
        """What is wrong with the dataset or its rows, but for the columns, which have fields of their own."""
        elsewhere = [fault for fault in self.dataset.faults if fault.setting not in self.mapping.fields]
        # Rows are previewed without a value that is no pattern or template.
        elsewhere += [fault for fault in self.draft.problems() if fault.setting in ROW_STEPS]
        self.path.show_problem(" ".join(dict.fromkeys(fault.sentence for fault in elsewhere)))

    def _offer_names(self) -> None:
        dataset = self.dataset
        form, configs = dataset.preview.get("form", "file"), dataset.choices["configs"]
        self.mapping.offer_splits(form, dataset.split_choices(), configs, dataset.splits, self.draft.values())
        self.mapping.offer_columns(dataset.preview.get("columns", ()))

    def _show_which(self) -> None:
        splits = self.dataset.splits
        self.which.clear()
        for split, about in splits.items():
            self.which.addItem(f"{SPLITS[split]} · {about['rows']:,}", split)
        self.which.setCurrentIndex(self.which.findData(self.dataset.split))
        self.which.setVisible(len(splits) > 1)
        self.shown.setText("Rows of" if len(splits) > 1 else "Rows")

    def _show_counts(self) -> None:
        dataset, counts, shown = self.dataset, self.dataset.counts, self.counts
        about = dataset.splits.get(dataset.split, {})
        shown.show_figure("rows", about.get("about") or about.get("rows"), sample=bool(about.get("about")))
        shown.show_figure("unanswered", about.get("unanswered"))
        shown.show_figure("repeated", about.get("repeated"))
        shown.show_figure("refused", counts.refused if counts else None, sample=counts is not None and not counts.done)
        has_tokens = counts is not None and counts.has_tokens
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
        self.mapping.show_verdict(variety.get("verdict", ""), is_poor=variety.get("level") == "poor")
        awaited = COMPARING if self.dataset.can_count else UNCOUNTED if self.dataset.splits else ""
        self.counts.variety.show_figures(variety.get("figures", ()), "" if variety else awaited)
        self._show_about()

    def _show_about(self) -> None:
        """The caption below the histogram, or below the figures on variety."""
        about, variety = self.counts.about, self.dataset.variety
        shows_variety = self.counts.shows_variety and variety
        about.setText(variety_caption(self.dataset) if shows_variety else lengths_caption(self.dataset))
        about.setToolTip(plain_tip(about.text()))

    # Rows to try rewards on

    def enabled_actions(self) -> dict[str, bool]:
        """Action of the Rewards menu → whether it is enabled."""
        return {
            "try_rows": self.dataset.split == "train" and 0 < sum(map(len, self.table.selected_ranges())) <= MAX_ROWS
        }

    def try_rewards(self) -> None:
        """Have the reward bench sample the model on the selected rows."""
        self.session.try_rewards([row + 1 for part in self.table.selected_ranges() for row in part])

    def allow_map_function(self) -> None:
        """Ask for consent to the file of the map function, and read the rows again with it."""
        if self.session.consent.obtain(self._mapping_settings()):
            self.dataset.reload()

    def _unconfirmed(self) -> bool:
        return bool(self.session.consent.unconfirmed(self._mapping_settings()))

    def _mapping_settings(self) -> dict[str, Any]:
        """The file that the preview runs; it does so in a confined process, whatever a run does."""
        keys = ("reward_functions_file", "reward_network")
        return {key: self.draft.value(key) for key in keys}

    def _show_enabled(self) -> None:
        enabled_actions = self.enabled_actions()
        rows = self.table.selected_ranges()
        count = sum(map(len, rows))
        self.try_button.setText(
            f"Try rewards on row {rows[0].start + 1:,}" if count == 1 else f"Try rewards on {count:,} rows"
        )
        self.try_button.setVisible(bool(count))
        self.try_button.setEnabled(enabled_actions["try_rows"])
        self.try_button.setToolTip(with_key_names(TRY) if enabled_actions["try_rows"] else TRY_NOT)
        self.enabled_actions_changed.emit(enabled_actions)

    # Rows

    def _show_rows(self) -> None:
        dataset = self.dataset
        self._generation += 1
        self._had_tokens = False
        rows = dataset.splits.get(dataset.split, {}).get("rows", 0)
        self.model.show_rows(rows, self._headings() if rows else [], dataset.prompt_limit)
        self.table.reset_view(self._placeholder())
        if not rows:
            self.detail.show_nothing()
        self._show_enabled()  # a model reset drops the selection without a signal

    def _headings(self) -> list[ColumnHeading]:
        """Mapped columns first, in the order of their menus; the prompt column before all others."""
        valid_values = self.draft.valid_values()
        uses = {valid_values[key]: use for key, use in reversed(USES.items())}
        wide = self.dataset.suggested_columns.get("prompt_feature", valid_values["prompt_feature"])
        headings = [
            ColumnHeading(
                column["name"], uses.get(column["name"], ""), column["kind"] == "number", column["name"] == wide
            )
            for column in self.dataset.preview["columns"]
        ]
        order = [*USES.values(), ""]
        return sorted(headings, key=lambda heading: (not heading.wide, order.index(heading.use)))

    def _placeholder(self) -> str:
        """The text in place of the rows."""
        data, state = self.draft.value("data"), self.dataset.state
        if state == "fetching":
            done, total = self.dataset.download_progress
            of = f" of {figure(total / 1e6, 'MB')}" if total else ""
            return f"Fetching {data} from Hugging Face: {figure(done / 1e6, 'MB')}{of}"
        if state == "reading":
            return f"Reading {Path(data).name}…"
        return "No rows could be read; what is wrong stands above."

    def _request_chunk(self, start: int) -> None:
        generation = self._generation

        def add(answer: dict[str, Any] | None) -> None:
            if generation != self._generation:  # rows of a dataset or split that is no longer shown
                return
            if answer is None:
                self.model.release(start)
            else:
                self.model.add_chunk(start, answer["rows"], answer["tokens"])

        self.dataset.request_rows(start, CHUNK, add, owner=self)

    def _request_row(self) -> None:
        """Request the current row, and cancel the request for the previous one."""
        index = self.table.currentIndex().row()
        if index < 0:
            return
        if self._row_request:
            self.dataset.cancel(self._row_request)
        generation = self._generation

        def show(answer: dict[str, Any] | None) -> None:
            # A first answer comes while the tokenizer is loading; the request then stays pending for the second.
            self._row_request = self._row_request if answer and answer.get("loading") else 0
            if answer is not None and generation == self._generation:
                self.detail.show_row(index, answer, self.dataset.prompt_limit)

        self._row_request = self.dataset.request_row(index, show, owner=self)
