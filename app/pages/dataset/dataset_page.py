"""The Dataset page: path, use of columns and splits, counts, the table of rows, and the exact prompt of one row."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from PySide6.QtCore import QEvent, QRectF, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QGuiApplication,
    QHelpEvent,
    QHideEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QPen,
    QShortcut,
    QShowEvent,
)
from PySide6.QtWidgets import QFrame, QLabel, QSizePolicy, QSplitter, QToolTip, QWidget

from app import theme
from app.pages.dataset.rows import CHUNK, MAX_CHUNKS, DataColumn, RowDetail, RowModel, RowTable
from app.state.dataset import SPLITS, USES, Dataset
from app.state.draft import Draft
from app.state.reward_bench import MAX_ROWS
from app.state.session import Session
from app.widgets.basic.controls import ComboBox, ElidedLabel, LinkButton
from app.widgets.basic.dialogs import show_details
from app.widgets.basic.labels import EmptyState, button, label, plain_tip, progress_bar, show_text, with_key_names
from app.widgets.basic.layout import (
    card,
    clear_layout,
    column,
    configure,
    grid,
    holder,
    row,
    set_shown,
    set_style_property,
    set_tab_order,
    stack,
)
from app.widgets.basic.number_format import DASH, counted, file_size
from app.widgets.basic.tables import LEFT, RIGHT
from app.widgets.form.fields import Field, PathField
from backend.config.config import SETTINGS
from backend.config.setting import step_parts
from backend.utils.errors import UserError

UNCOUNTED = "Choose the column with the prompts to count their tokens."
SHARES = (3, 2)
MOVED_MS = 60  # rest of the cursor on a row before that row is requested: a held arrow key requests none on its way
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
NONE = "None"
COLUMNS = 4
BAR_PITCH = 7
FIGURES = {
    "rows": ("Rows", "Rows of this split. Of a large file only the first are shown and counted, and ~ is an estimate."),
    "too_long": (
        "Too long",
        "Prompts above Max prompt, or without room for a completion. Training skips or cuts them.",
    ),
    "unanswered": ("No answer", "Rows whose answer is missing or empty: rewards that compare give them nothing."),
    "repeated": ("Repeated", "Rows whose prompt is the same as that of an earlier row."),
    "refused": ("Unusable", "Rows without a usable prompt. Training refuses the dataset until they are fixed."),
}
LENGTHS, VARIETY = "Lengths", "Variety"


class DatasetPage(QWidget):
    enabled_actions_changed = Signal(dict)  # dict

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.draft = session, session.draft
        dataset = self.dataset = session.dataset
        self._row_request = 0
        self._had_tokens = False
        self._by_difficulty: dict[str, list[int]] = {}
        self._rest_timer = configure(QTimer(self, singleShot=True, interval=MOVED_MS), timeout=self._request_row)
        # Widgets are created with their final parent: reparented later, Qt would restyle all of them again.
        self.path = PathField(SETTINGS["data"], self)
        self.path.label.hide()
        body = self._body = QWidget(self)
        self.mapping, self.counts = ColumnMapping(self.draft, body), DatasetFigures(body)
        for part in (self.mapping, self.counts):  # SHARES decide the widths, not the texts
            part.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.which = ComboBox(name="Split that is shown", length=14)
        self.which.activated.connect(lambda: dataset.set_split(self.which.currentData()))
        self.difficulty = ComboBox(name="Rows by difficulty", length=16, shown=False)
        self.difficulty.activated.connect(self._show_chosen_rows)
        self.shown = label(font=theme.heading_font(), buddy=self.which, minimumHeight=28)
        self.model = configure(RowModel(self), chunk_requested=self._request_chunk)
        self.table = configure(RowTable(self.model), copy_requested=self._copy_rows)
        self.try_button = button("Try rewards", self.try_rewards)
        tip = "The traceback of the map function"
        self.details = button("Details", lambda: show_details(UserError(dataset.faults).traceback, self), tip=tip)
        self.allow_button = button(
            "Allow the map function…",
            lambda: session.consent.obtain(self._map_settings()) and dataset.refresh(again=True),
            tip=ALLOW,
        )
        parts = self.parts = QSplitter(Qt.Orientation.Horizontal, body, childrenCollapsible=False, handleWidth=12)
        self.detail = RowDetail(dataset, parts)
        buttons = (self.details, self.allow_button, self.try_button)
        head = row(self.shown, self.which, self.difficulty, None, *buttons, spacing=6, margins=(8, 4, 4, 0))
        self.instead, area = label(role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter), QWidget()
        self._rows = stack(self.table, self.instead, into=area)
        parts.insertWidget(0, card(column(head, (area, 1), spacing=4, margins=4)))
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
        set_tab_order(*tab_stops)

        self.path.edited.connect(self.draft.set)
        self.mapping.use.clicked.connect(lambda: self.draft.update(dataset.suggested_columns))
        self.draft.changed.connect(self._on_changed)
        configure(dataset, changed=self._show_all, counts_changed=self._show_counts, variety_changed=self._show_variety)
        configure(dataset, rows_replaced=self._show_rows)
        self.counts.other.clicked.connect(self._show_about)
        rows = self.table.selectionModel()
        configure(rows, currentRowChanged=lambda: self._rest_timer.start(), selectionChanged=self._show_enabled)
        QShortcut(QKeySequence.StandardKey.Refresh, self, partial(dataset.refresh, again=True))
        self._show_all()
        self._show_rows()  # for the line on Train they may have been read before this page was built

    def showEvent(self, event: QShowEvent) -> None:
        self.dataset.watch(self)

    def hideEvent(self, event: QHideEvent) -> None:
        self.dataset.unwatch(self)

    def _on_changed(self, key: str) -> None:
        if not key or key == "data" or key in self.mapping.fields:
            self._show_values()
        if not key or key in ROW_STEPS:
            self._show_problems()

    def _show_values(self) -> None:
        for key, field in {"data": self.path, **self.mapping.fields}.items():
            field.show_value(self.draft.value(key))

    def _show_all(self) -> None:
        dataset, preview = self.dataset, self.dataset.preview
        unread = self.failed if dataset.state == "failed" and "form" not in preview else self._body
        self._stack.setCurrentWidget({"none": self.nothing, "absent": self.absent}.get(dataset.state, unread))
        self._show_values()
        self.mapping.show_dataset(dataset)
        self._show_values()
        self._show_problems()
        splits = dataset.splits
        is_alone = list(splits) == ["train"] and splits["train"]["rows"] >= FEWEST_ROWS
        self.nothing_held_out.setVisible(is_alone and not self.draft.value("validation_split"))
        self.which.fill({split: f"{SPLITS[split]} · {each['rows']:,}" for split, each in splits.items()}, dataset.split)
        self.which.setVisible(len(splits) > 1)
        self.shown.setText("Rows of" if len(splits) > 1 else "Rows")
        self._show_counts()
        self._show_variety()
        self._show_instead()
        missing = self.session.consent.code.missing(self._map_settings())
        self.allow_button.setVisible(bool(self.draft.value("map_function") and missing))
        self._show_enabled()
        self.model.prompt_limit = dataset.prompt_limit
        self.model.repaint()
        self.detail.show_facts()

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
        seen, rows = (counts.seen, counts.rows) if counts and not counts.done else (0, 0)
        configure(shown.progress, visible=0 < seen < rows, range=(0, max(1, rows)), value=seen)
        if has_tokens and not self._had_tokens:
            self.model.forget()  # the tokenizer is loaded now: rows requested again have lengths
            if not self._row_request:
                self._request_row()
        self._had_tokens = has_tokens

    def _show_variety(self) -> None:
        variety = self.dataset.variety
        show_text(self.mapping.verdict, variety.get("verdict", ""))
        set_style_property(self.mapping.verdict, "role", "problem" if variety.get("level") == "poor" else "muted")
        awaited = "Comparing the prompts…" if self.dataset.can_count else UNCOUNTED if self.dataset.splits else ""
        self.counts.variety.show_figures(variety.get("figures", ()), "" if variety else awaited)
        self._show_about()

    def _show_about(self) -> None:
        """“median 46 · 95% up to 90 · longest 203 · 1,536 fit”, or the rows compared; and notes on the rows read."""
        dataset, counts, variety = self.dataset, self.dataset.counts, self.dataset.variety
        about, parts = dataset.splits.get(dataset.split, {}), list[str]()
        if self.counts.shows_variety and variety:
            rows, total = variety["rows"], variety["total"]
            parts = [f"of {rows:,} rows" if rows == total else f"of {rows:,} rows, drawn from {total:,}"]
        elif counts is None:
            parts = ["Counting tokens…"] if dataset.can_count else []
        elif counts.lengths:
            parts = [f"median {counts.percentile(50):,}", f"95% up to {counts.percentile(95):,}"]
            parts += [f"longest {counts.longest:,}", f"{max(0, dataset.prompt_limit):,} fit"]
        parts += [f"first {about['rows']:,} rows"] if about.get("about") else []
        text = " · ".join([*parts, *dataset.preview.get("notes", ())])
        configure(self.counts.about, text=text, toolTip=plain_tip(text))

    def enabled_actions(self) -> dict[str, bool]:
        selected = sum(map(len, self.table.selected_ranges()))
        return {"try_rows": self.dataset.split == "train" and 0 < selected <= MAX_ROWS}

    def try_rewards(self) -> None:
        self.session.page_requested.emit("rewards")
        rows = [self.model.numbers[place] + 1 for part in self.table.selected_ranges() for place in part]
        self.session.reward_rows_requested.emit(rows)

    def _map_settings(self) -> dict[str, Any]:
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

        def offer(answer: dict[str, Any] | None) -> None:
            if not answer or not answer["rows"] or self._by_difficulty:
                return
            found = self._by_difficulty = {"all": [entry[0] for entry in answer["rows"]]}
            for index, _, _, kind in answer["rows"]:
                found.setdefault(kind, []).append(index)
            self.model.solved = {index: f"{solved} of {sampled}" for index, solved, sampled, _ in answer["rows"]}
            kinds = {kind: f"{text} · {len(found[kind]):,}" for kind, text in KINDS.items() if kind in found}
            self.difficulty.fill({"": "File order"} | kinds, "")
            configure(self.difficulty, visible=True, toolTip=plain_tip(SOLVED_BY.format(run=answer["run"])))
            self._show_chosen_rows()

        if self.model.numbers:
            self.dataset.request("preview_difficulty", offer, self)

    def _show_chosen_rows(self) -> None:
        dataset, kind = self.dataset, self.difficulty.currentData()
        rows = range(dataset.splits.get(dataset.split, {}).get("rows", 0))
        numbers = self._by_difficulty[kind] if kind else rows
        valid_values = self.draft.valid_values()
        uses = {valid_values[key]: use for key, use in reversed(dataset.uses.items())}
        wide = dataset.suggested_columns.get("prompt_feature", valid_values["prompt_feature"])
        columns, order = [], [*USES.values(), ""]
        for each in dataset.preview["columns"] if numbers else ():
            name, is_number = each["name"], each["kind"] == "number"
            use = uses.get(name, "")
            title = name if use in ("", name) else f"{name} → {use}"
            columns.append(DataColumn(title, is_figure=is_number, name=name, use=use, wide=name == wide))
        columns.sort(key=lambda column: (not column.wide, order.index(column.use)))
        self.model.show_rows(numbers, columns)
        self.table.reset_view()
        self._show_instead()
        if not numbers:
            self.detail.show_row(0, None)
        self._show_enabled()  # a model reset drops the selection without a signal

    def _show_instead(self) -> None:
        data, text = self.draft.value("data"), "No rows could be read; the error is shown above."
        if self.dataset.state == "fetching":
            done, total = self.dataset.download_progress
            of = f" of {file_size(total)}" if total else ""
            text = f"Fetching {data} from Hugging Face: {file_size(done)}{of}"
        elif self.dataset.state == "reading":
            text = f"Reading {Path(data).name}…"
        self.instead.setText(text)
        self._rows.setCurrentIndex(0 if self.model.rows else 1)

    def _request_chunk(self, start: int) -> None:
        numbers = self.model.numbers

        def add(rows: list[dict[str, Any]] | None) -> None:
            if numbers is self.model.numbers:  # else they are of a dataset or split that is no longer shown
                self.model.add_chunk(start, rows)

        self.dataset.request("preview_rows", add, self, numbers=list(numbers[start : start + CHUNK]))

    def _copy_rows(self) -> None:
        places = [place for part in self.table.selected_ranges() for place in part]
        starts, numbers = sorted({place - place % CHUNK for place in places}), self.model.numbers
        if len(starts) > MAX_CHUNKS:
            self.session.message.emit(f"At most {MAX_CHUNKS * CHUNK:,} rows can be copied at once.")
            return

        def copy(rows: Sequence[dict[str, Any]] | None) -> None:
            if rows is not None and numbers is self.model.numbers:
                for i, start in enumerate(starts if rows else ()):
                    self.model.add_chunk(start, rows[i * CHUNK : (i + 1) * CHUNK])
                QGuiApplication.clipboard().setText(self.table.as_text(places))

        if all(map(self.model.held, starts)):
            copy(())
        else:
            wanted = [number for start in starts for number in numbers[start : start + CHUNK]]
            self.dataset.request("preview_rows", copy, self, numbers=wanted)

    def _request_row(self) -> None:
        place = self.table.currentIndex().row()
        if place < 0:
            return
        numbers = self.model.numbers
        index = numbers[place]
        if self._row_request:
            self.session.service.cancel(self._row_request)

        def show(answer: dict[str, Any] | None) -> None:
            # A first answer comes while the tokenizer is loading; the request then stays pending for the second.
            self._row_request = self._row_request if answer and answer.get("loading") else 0
            if answer is not None and numbers is self.model.numbers:
                self.detail.show_row(index, answer)

        self._row_request = self.dataset.request("preview_row", show, self, in_parts=True, index=index)


class NameMenuField(Field):
    control: ComboBox

    def build(self) -> QWidget:
        self.control = ComboBox(length=3, activated=self.emit_edited)  # four fit side by side in a small window
        self.hint.hide()
        return self.control

    def value(self) -> Any:
        return self.control.currentData()

    def set_control_value(self, raw: Any) -> None:
        if self.control.findData(raw) < 0:  # the dataset has no such name: a sentence below the menus says it
            self.control.addItem(str(raw) if raw else NONE, raw)
        self.control.setCurrentIndex(self.control.findData(raw))

    def offer(self, names: Sequence[str], default: str | None, tips: Mapping[str, str] | None = None) -> None:
        """`default` labels the setting's default value where that is not a name itself; None leaves it out."""
        current, default_value = self.value(), self.setting.default
        items = {} if default is None or default_value in names else {default_value: default}
        items |= {name: name for name in names}
        self.control.fill(items)
        for i, value in enumerate(items):
            self.control.setItemData(i, (tips or {}).get(value, ""), Qt.ItemDataRole.ToolTipRole)
        self.set_control_value(default_value if current is None else current)


class ColumnMapping(QFrame):
    def __init__(self, draft: Draft, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.config = NameMenuField(SETTINGS["dataset_config"])
        self.splits = {key: NameMenuField(SETTINGS[key]) for key in ("train_split", "valid_split", "test_split")}
        self.columns = {key: NameMenuField(SETTINGS[key]) for key in USES}
        self.fields: dict[str, NameMenuField] = {**self.splits, "dataset_config": self.config, **self.columns}
        caption = theme.caption_font()
        self.problem = label(font=caption, role="problem", wrap=True, selectable=True)
        self.verdict = label(font=caption, wrap=True, selectable=True)
        self.offered = label(wrap=True)
        self.use = button("Use them", primary=True)
        self.offer = card(row((self.offered, 1), self.use, margins=(12, 6, 6, 6)), "banner")
        cells = self._cells = grid((), spacing=(theme.SPACE, theme.SPACE))
        for i, field in enumerate(self.fields.values()):
            field.edited.connect(draft.set)
            cells.addWidget(field, i // COLUMNS, i % COLUMNS, Qt.AlignmentFlag.AlignTop)
            cells.setColumnStretch(i % COLUMNS, 1)
        column(cells, self.problem, self.offer, self.verdict, None, into=self, margins=(12, 8, 12, 12))
        self.tab_stops = [*(stop for field in self.fields.values() for stop in field.tab_stops), self.use]

    def show_dataset(self, dataset: Dataset) -> None:
        """Offer its names, with the values shown before as present ones, and show the columns that are in use."""
        preview, choices = dataset.preview, dataset.choices
        form, columns = preview.get("form", "file"), preview.get("columns", ())
        self.config.offer(choices["configs"], "Default" if form == "hub" else NONE)
        splits = choices["splits"] or preview.get("names", [])
        for key, field in self.splits.items():
            used, raw = dataset.splits.get(key.removesuffix("_split")), field.value()
            source = used["source"] if used else ""  # of what was read for this use
            name = source.rpartition(", ")[2] if form == "hub" else PurePath(source).stem
            default = name or ("Held out of train" if used else NONE)
            if raw not in (None, field.setting.default):
                default = "Default"
            elif form == "file" and source:
                default = "Whole file"
            field.offer([split for split in splits if split != name or raw == split], default)
        for field in (self.config, *self.splits.values()):
            set_shown(field, field.control.count() > 1)
        names = [each["name"] for each in columns]
        tips = {each["name"]: f"{each['kind']}: {each['example']}" for each in columns}
        for key, field in self.columns.items():
            field.offer(names, None if key == "prompt_feature" else NONE, tips)
            field.control.setEnabled(bool(columns))
            self._cells.removeWidget(field)
            set_shown(field, key in dataset.uses)
        for i, key in enumerate(dataset.uses):
            self._cells.addWidget(self.columns[key], 1 + i // COLUMNS, i % COLUMNS, Qt.AlignmentFlag.AlignTop)
        own = [fault for fault in dataset.faults if fault.setting in self.fields]
        show_text(self.problem, "\n".join(f"{SETTINGS[each.setting].label}: {each.sentence}" for each in own))
        for key, field in self.fields.items():
            set_style_property(field.control, "problem", any(each.setting == key for each in own))
        likely = dataset.suggested_columns
        clauses = [
            f"{name} {'' if i else 'looks '}like the {USES[key]}" for i, (key, name) in enumerate(likely.items())
        ]
        self.offered.setText(f"{', '.join(clauses)}.")
        self.offer.setVisible(bool(likely))
        self.use.setText("Use them" if len(likely) > 1 else "Use it")


class DatasetFigures(QFrame):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        tip = "Repetitions, wording and balance of the answers; or the lengths of the prompts."
        self.other = LinkButton(VARIETY, on_click=lambda: self.show_variety(not self.shows_variety), tip=tip)
        self.histogram, self.variety = Histogram(), VarietyFigures()
        self._shown = stack(self.histogram, self.variety, into=self, nested=True)
        self.about = ElidedLabel(font=theme.figures_font(theme.CAPTION))
        self.progress = progress_bar("Prompts counted", fixedWidth=64)
        self.numbers = {key: label(DASH, theme.figures_font(15)) for key in FIGURES}
        self._figures: dict[str, QWidget] = {}
        for key, (word, tip) in FIGURES.items():
            title = label(word, theme.caption_font(), "caption")
            self._figures[key] = holder(column(title, self.numbers[key], spacing=0), toolTip=plain_tip(tip))
        figures = row(*self._figures.values(), None, spacing=12)
        foot = row((self.about, 1), (self.progress, 0, Qt.AlignmentFlag.AlignVCenter), self.other, spacing=6)
        column(figures, (self._shown, 1), foot, into=self, spacing=4, margins=(12, 8, 12, 8))

    @property
    def shows_variety(self) -> bool:
        return self._shown.currentWidget() is self.variety

    def show_variety(self, shown: bool) -> None:
        self._shown.setCurrentWidget(self.variety if shown else self.histogram)
        self.other.setText(LENGTHS if shown else VARIETY)

    def show_figure(self, key: str, number: int | None, *, sample: bool = False) -> None:
        text = DASH if number is None else f"{'~' if sample and number else ''}{number:,}"
        self.numbers[key].setText(text)
        self._figures[key].setAccessibleName(f"{FIGURES[key][0]}: {text}")
        is_bad = key not in ("rows", "repeated") and bool(number)
        set_style_property(self.numbers[key], "role", "problem" if is_bad else "")
        if key == "refused":  # rare, and more important than duplicates, which it replaces
            self._figures["refused"].setVisible(bool(number))
            self._figures["repeated"].setVisible(not number)


class Histogram(QWidget):
    """Prompt lengths in tokens as bars, with a line at the longest prompt that leaves space for a completion."""

    def __init__(self) -> None:
        super().__init__()
        self._lengths: Sequence[tuple[int, int]] = ()
        self._prompt_limit, self._placeholder = 0, ""
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        configure(self, minimumSize=theme.scaled_size(QSize(120, 64)), accessibleName="Lengths of the prompts")

    def sizeHint(self) -> QSize:
        return theme.scaled_size(QSize(200, 88))

    def show_lengths(self, lengths: Sequence[tuple[int, int]], prompt_limit: int, placeholder: str = "") -> None:
        """Show (tokens, rows), ascending; `prompt_limit` is the most tokens of a prompt."""
        self._lengths, self._prompt_limit, self._placeholder = lengths, prompt_limit, placeholder
        described = f"From {lengths[0][0]} to {lengths[-1][0]} tokens; {prompt_limit} fit." if lengths else placeholder
        self.setAccessibleDescription(described)
        self.update()

    def bins(self) -> tuple[int, list[int]]:
        """(tokens per bar, rows of each bar), up to the longest prompt or a limit not far beyond it."""
        longest = self._lengths[-1][0] if self._lengths else 1
        reach = max(longest, self._prompt_limit if self._prompt_limit < 2 * longest else 0) + 1
        step = max(1, math.ceil(reach / max(8, self.width() // BAR_PITCH)))
        rows = [0] * math.ceil(reach / step)
        for tokens, number in self._lengths:
            rows[min(len(rows) - 1, tokens // step)] += number
        return step, rows

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, colours, line = QPainter(self), theme.palette(), theme.scaled(16)
        painter.setPen(colours.muted)
        if not self._lengths:
            flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
            painter.drawText(self.rect().adjusted(8, 0, -8, 0), flags, self._placeholder)
            return
        full, floor = self.width(), self.height() - line
        painter.fillRect(QRectF(0, floor, full, 1), colours.hairline)
        step, bins = self.bins()
        width, reach = full / len(bins), step * len(bins)
        for i, rows in enumerate(bins):
            if rows:  # at least two pixels: a single long prompt among thousands must be visible
                height = max(2.0, (floor - line) * rows / max(bins))
                colour = colours.warning if i * step > self._prompt_limit else colours.length
                painter.fillRect(QRectF(i * width, floor - height, max(1.0, width - 1), height), colour)
        painter.setFont(theme.figures_font(theme.CAPTION))
        below = QRectF(0, floor + 1, full, line)
        painter.drawText(below, LEFT, "0")
        painter.drawText(below, RIGHT, f"{reach:,} tokens")
        if 0 < self._prompt_limit < reach:
            x = full * self._prompt_limit / reach
            painter.setPen(QPen(colours.text, 1, Qt.PenStyle.DashLine))
            painter.drawLine(int(x), 0, int(x), floor)
            beside = QRectF(0, 0, x - 5, line) if x > full / 2 else QRectF(x + 5, 0, full - x - 5, line)
            painter.drawText(beside, RIGHT if x > full / 2 else LEFT, f"{self._prompt_limit:,} fit")

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and self._lengths and isinstance(event, QHelpEvent):
            step, bins = self.bins()
            place = max(0, min(len(bins) - 1, event.pos().x() * len(bins) // max(1, self.width())))
            span = f"{place:,}" if step == 1 else f"{place * step:,} to {place * step + step - 1:,}"
            QToolTip.showText(event.globalPos(), f"{span} tokens: {counted(bins[place], 'row')}", self)
            return True
        return super().event(event)


class VarietyFigures(QWidget):
    COLUMNS = 2

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Variety of the prompts")
        self._grid = grid((), self, spacing=(theme.SPACE, 0))
        self.cells: list[tuple[QLabel, ElidedLabel]] = []
        for i in range(self.COLUMNS):
            self._grid.setColumnStretch(2 * i + 1, 1)

    def show_figures(self, figures: Sequence[tuple[str, str, str]], placeholder: str = "") -> None:
        clear_layout(self._grid)
        self.cells = []
        font = theme.caption_font()
        if not figures:
            instead = label(placeholder, font, "muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
            self._grid.addWidget(instead, 0, 0, 1, 2 * self.COLUMNS)
        for i, (name, value, about) in enumerate(figures):
            tip, (line, place) = plain_tip(f"{value}\n{about}"), divmod(i, self.COLUMNS)
            named, shown = label(name, font, "caption", tip=tip), ElidedLabel(font=theme.figures_font(theme.CAPTION))
            self._grid.addWidget(named, line, 2 * place)
            self._grid.addWidget(configure(shown, text=value, tip=tip, name=f"{name}: {value}"), line, 2 * place + 1)
            self.cells.append((named, shown))
