"""The Dataset page: what will it learn from? Splits and columns as they really are, what is missing or too long, and for
every row the exact prompt that the model will see.

Columns and splits chosen here are written into the draft; what is shown comes from `app.model.dataset`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QKeySequence, QShortcut, QShowEvent
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QSizePolicy,
    QSplitter,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.model.dataset import SPLITS, USES, Dataset, dataset_of
from app.model.session import Session
from app.widgets.basic.controls import ComboBox
from app.widgets.basic.empty_state import EmptyState
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.number_format import figure
from app.widgets.dataset.column_mapping import ColumnMapping
from app.widgets.dataset.dataset_figures import DatasetFigures
from app.widgets.dataset.dataset_table import CHUNK, ColumnHeading, RowModel, RowTable
from app.widgets.dataset.row_detail import RowDetail
from app.widgets.form.path_field import PathField
from app.widgets.rewards.completion_source import MAX_ROWS
from backend.spec.config import SETTINGS

UNCOUNTED = "Choose the column with the prompts, and their tokens are counted."
SHARES = (3, 2)
"""Width of the left cards against the right ones."""
MOVED_MS = 60
"""How long the cursor must rest on a row before it is shown in full: holding an arrow key asks for no row in passing."""
TRY = "Sample the model on the selected rows, and see what your rewards make of it (Ctrl+Shift+D)"
TRY_NOT = f"The model is sampled on rows of the training split, {MAX_ROWS:,} at most."
EMPTY = ("No dataset is chosen yet", "A csv, json, jsonl or parquet file with a question and an answer in each row is enough; "
         "a folder or a dataset of Hugging Face will do as well.", "Choose a file…")  # fmt: skip
ABSENT = ("This dataset is not on this machine yet", "It is fetched from Hugging Face once, and kept in its cache.",
          "Fetch it")  # fmt: skip


class DatasetPage(QWidget):
    """Signals: able_changed(what of the Rewards menu can be done here now, as `able` tells it)."""

    able_changed = Signal(dict)

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.draft = session, session.draft
        self.dataset: Dataset = dataset_of(session)
        self._asked_row = 0
        self._generation = 0
        self._had_tokens = False
        self._moved = QTimer(self, singleShot=True, interval=MOVED_MS)
        self._moved.timeout.connect(self._ask_row)
        self._compose()
        self._lay_out()
        self._order_tabs()
        self._connect()
        self._show_all()
        self._show_rows()  # Train's line may have had them read before this page was first looked at

    # Composition

    def _compose(self) -> None:
        # Whatever stands in the page is made in its place: moved there afterwards, all of it would be dressed again.
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
        self.tried = button("Try rewards", self.try_rewards)
        self.nothing, self.absent = EmptyState(*EMPTY), EmptyState(*ABSENT)

    def _lay_out(self) -> None:
        title = QLabel("Dataset")
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
            )  # the shares decide, not the words
            band.addWidget(card, share)
        body, parts = self._body, self.parts
        parts.addWidget(self._rows_card())
        parts.addWidget(self.detail)
        for place, share in enumerate(SHARES):
            parts.setStretchFactor(place, share)
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
        self._stack = QStackedLayout()
        for one in (self.nothing, self.absent, body):
            self._stack.addWidget(one)
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
        head.addWidget(self.tried)
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
            self.which,
            self.table,
            self.tried,
            *views,
            self.detail.pane,
        ]
        for one, following in pairwise(tab_stops):
            QWidget.setTabOrder(one, following)

    def _connect(self) -> None:
        for one in (self.path, self.mapping):
            one.edited.connect(self.draft.set)
        self.mapping.accepted.connect(self.dataset.take_likely)
        self.draft.changed.connect(self._on_changed)
        self.dataset.changed.connect(self._show_all)
        self.dataset.counted.connect(self._show_counts)
        self.dataset.replaced.connect(self._show_rows)
        self.which.activated.connect(lambda _: self.dataset.set_split(self.which.currentData()))
        self.model.chunk_requested.connect(self._ask_part)
        self.table.chosen.connect(lambda _: self._moved.start())
        self.table.selected.connect(self._show_able)
        self.nothing.button_clicked.connect(lambda: self.path.choose_file())
        self.absent.button_clicked.connect(self.dataset.fetch)
        QShortcut(QKeySequence.StandardKey.Refresh, self, self.dataset.read_again)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.dataset.watch(self)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self.dataset.leave(self)

    # What the draft and the dataset say

    def _on_changed(self, key: str) -> None:
        if not key or key == "data" or key in self.mapping.fields:
            self._show_values()

    def _show_values(self) -> None:
        self.path.show_value(self.draft.value("data"))
        self.mapping.show_values({key: self.draft.value(key) for key in self.mapping.fields})

    def _show_all(self) -> None:
        dataset = self.dataset
        self._stack.setCurrentIndex({"none": 0, "absent": 1}.get(dataset.state, 2))
        self._offer_names()
        self._show_values()
        self.mapping.show_faults(dataset.faults)
        elsewhere = (fault.sentence for fault in dataset.faults if fault.setting not in self.mapping.fields)
        self.path.show_problem(" ".join(elsewhere))
        self.mapping.show_likely(dataset.likely)
        self._show_which()
        self._show_counts()
        self.table.set_placeholder(self._instead())
        self._show_able()
        self.model.set_prompt_limit(dataset.room)
        self.detail.set_prompt_limit(dataset.room)

    def _offer_names(self) -> None:
        dataset = self.dataset
        form, configs = dataset.said.get("form", "file"), dataset.choices["configs"]
        self.mapping.offer_splits(form, dataset.split_choices(), configs, dataset.splits, self.draft.values())
        self.mapping.offer_columns(dataset.said.get("columns", ()))

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
        shown.show_figure("rows", about.get("rows"))
        shown.show_figure("unanswered", about.get("unanswered"))
        shown.show_figure("repeated", about.get("repeated"))
        shown.show_figure("refused", counts.refused if counts else None, sample=counts is not None and not counts.done)
        has_tokens = counts is not None and counts.has_tokens
        too_long, whole = counts.too_long(dataset.room) if counts and has_tokens else (None, True)
        shown.show_figure("too_long", too_long, sample=not whole)
        instead = counts.no_tokens if counts else UNCOUNTED if dataset.splits and not dataset.can_count else ""
        shown.histogram.show_lengths(counts.lengths if counts and has_tokens else (), dataset.room, instead)
        shown.about.setText(self._about_lengths())
        shown.about.setToolTip(shown.about.text())
        shown.show_progress(*((counts.seen, counts.rows) if counts and not counts.done else (0, 0)))
        if has_tokens and not self._had_tokens:
            self.model.forget()  # the tokenizer is warm now, and can tell the lengths of the rows in view
        self._had_tokens = has_tokens

    def _about_lengths(self) -> str:
        dataset, counts = self.dataset, self.dataset.counts
        if counts is None:
            return "Counting tokens…" if dataset.can_count else ""
        if not counts.has_tokens:
            return ""
        return f"median {counts.middle:,} · longest {counts.longest:,} · {max(0, dataset.room):,} fit"

    # Rows to try rewards on

    def able(self) -> dict[str, bool]:
        """Entry of the Rewards menu → whether it can be done now."""
        return {
            "try_rows": self.dataset.split == "train" and 0 < sum(map(len, self.table.selected_ranges())) <= MAX_ROWS
        }

    def try_rewards(self) -> None:
        """Have the bench sample the model on the selected rows."""
        self.session.try_rewards([row + 1 for part in self.table.selected_ranges() for row in part])

    def _show_able(self) -> None:
        able = self.able()
        rows = self.table.selected_ranges()
        count = sum(map(len, rows))
        self.tried.setText(
            f"Try rewards on row {rows[0].start + 1:,}" if count == 1 else f"Try rewards on {count:,} rows"
        )
        self.tried.setVisible(bool(count))
        self.tried.setEnabled(able["try_rows"])
        self.tried.setToolTip(TRY if able["try_rows"] else TRY_NOT)
        self.able_changed.emit(able)

    # Rows

    def _show_rows(self) -> None:
        dataset = self.dataset
        self._generation += 1
        self._had_tokens = False
        rows = dataset.splits.get(dataset.split, {}).get("rows", 0)
        self.model.show_rows(rows, self._headings() if rows else [], dataset.room)
        self.table.reset_view(self._instead())
        if not rows:
            self.detail.show_nothing()
        self._show_able()  # rows that are gone were selected without a word

    def _headings(self) -> list[ColumnHeading]:
        """The columns in use first, in the order of their menus; before all others the one that holds the prompts."""
        sound = self.draft.sound()
        uses = {sound[key]: use for key, use in reversed(USES.items())}
        wide = self.dataset.likely.get("prompt_feature", sound["prompt_feature"])
        found = [
            ColumnHeading(one["name"], uses.get(one["name"], ""), one["kind"] == "number", one["name"] == wide)
            for one in self.dataset.said["columns"]
        ]
        order = [*USES.values(), ""]
        return sorted(found, key=lambda heading: (not heading.wide, order.index(heading.use)))

    def _instead(self) -> str:
        """What stands where the rows would."""
        data, state = self.draft.value("data"), self.dataset.state
        if state == "fetching":
            done, total = self.dataset.fetched
            of = f" of {figure(total / 1e6, 'MB')}" if total else ""
            return f"Fetching {data} from Hugging Face: {figure(done / 1e6, 'MB')}{of}"
        if state == "reading":
            return f"Reading {Path(data).name}…"
        return "No rows could be read; what is wrong stands above."

    def _ask_part(self, start: int) -> None:
        generation = self._generation

        def put(said: dict[str, Any] | None) -> None:
            if generation != self._generation:
                return
            if said is None:
                self.model.release(start)
            else:
                self.model.add_chunk(start, said["rows"], said["tokens"])

        self.dataset.rows(start, CHUNK, put, owner=self)

    def _ask_row(self) -> None:
        """Show the row that the cursor has come to rest on; the one asked for before is wanted no longer."""
        index = self.table.currentIndex().row()
        if index < 0:
            return
        if self._asked_row:
            self.dataset.cancel(self._asked_row)
        generation = self._generation

        def show(said: dict[str, Any] | None) -> None:
            self._asked_row = self._asked_row if said and said.get("loading") else 0
            if said is not None and generation == self._generation:
                self.detail.show_row(index, said, self.dataset.room)

        self._asked_row = self.dataset.row(index, show, owner=self)
