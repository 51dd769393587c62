"""The Train page: what will it do?

Composes the form (one card per section of settings, with the reward table, the dataset line and the pickers among its fields) and
the launch column beside it: the plan in words, memory, problems, help, the command and Run. The fields come from SETTINGS.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from PySide6.QtCore import QEvent, QObject, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QEnterEvent, QHideEvent, QPainter, QPaintEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QSizePolicy, QVBoxLayout, QWidget

from app import theme
from app.pages.train import launch_column, machines
from app.pages.train.form import FieldGrid, Form, SettingsCard
from app.pages.train.launch_column import LaunchColumn
from app.pages.train.machines import MachinesPart
from app.pages.train.picker import size_text
from app.pages.train.reward_panel import RewardPanel
from app.pages.train.source_picking import Picking
from app.state.dataset import Dataset
from app.state.draft import is_equivalent
from app.state.guide import place_of_setting
from app.state.memory import amount
from app.state.session import Session
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels import PlainLabel, button, label, plain_tip
from app.widgets.basic.layout import set_shown
from app.widgets.form.fields import AdapterField, PathField
from app.widgets.form.setting_search import SettingSearch
from backend.config import first_choices
from backend.config.config import SECTIONS, SETTINGS, sections
from backend.config.form import documented_part
from backend.config.notes import unusual
from backend.config.other_programs.translation import TranslatedKey
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.hub_cache import is_dataset_cached

# The offer below an empty Dataset field: the dataset that MLX LoRA Studio's guide begins with, in one click, with its
# size.


class DefaultDatasetOffer(LinkButton):
    """A link that chooses the dataset, and then says in the field's note what a run will download; hidden while one is chosen."""

    def __init__(self, session: Session, field: PathField, parent: QWidget | None = None) -> None:
        super().__init__(f"Use {first_choices.DATASET}: {first_choices.DATASET_ABOUT}", parent)
        self._session, self._field = session, field
        self.clicked.connect(self._take)
        session.draft.changed.connect(self._on_changed)
        self._on_changed("")

    def _take(self) -> None:
        self._session.use_data(first_choices.DATASET)
        if not is_dataset_cached(first_choices.DATASET):
            self._session.service.ask(
                "hub_files",
                self._show_size,
                on_refused=lambda _faults: self._show_note("it will be downloaded when the run starts."),
                owner=self._field,
                id=first_choices.DATASET,
                repo_type="dataset",
            )

    def _show_size(self, answer: dict[str, Any]) -> None:
        self._show_note(f"{size_text(answer['total'])} will be downloaded when the run starts.")

    def _show_note(self, what: str) -> None:
        if self._is_chosen():
            self._field.show_note(f"Not on this machine: {what}")

    def _is_chosen(self) -> bool:
        return self._session.draft.value("data") == first_choices.DATASET

    def _on_changed(self, key: str) -> None:
        if key in ("", "data"):
            self.setVisible(not str(self._session.draft.value("data") or "").strip())
            if not self._is_chosen():
                self._field.show_note("")


# ── adapter import ───────────────────────────────────────────────────────────────────────────────────────────────────

# The import of an adapter of peft from the form: asked of the service, told below the field, and chosen once it is
# there.


class AdapterImport(QObject):
    """Connects the field for adapters with the question `import_adapter`."""

    def __init__(self, session: Session, field: AdapterField) -> None:
        super().__init__(field)
        self._session, self._field = session, field
        field.import_requested.connect(self._start)

    def _start(self, folder: str) -> None:
        self._field.show_importing("Importing it.")
        self._session.service.ask(
            "import_adapter",
            self._on_imported,
            on_refused=self._on_refused,
            on_progress=lambda progress: self._field.show_importing(progress["sentence"]),
            owner=self._field,
            folder=folder,
            model=str(self._session.draft.value("model")),
        )

    def _on_imported(self, imported: dict[str, Any]) -> None:
        self._field.show_importing("")
        self._session.draft.use_adapter(imported["path"])
        self._field.show_note(" ".join(imported["sentences"]))

    def _on_refused(self, faults: list[ConfigProblem]) -> None:
        self._field.show_importing("")
        self._field.show_note(" ".join(fault.sentence for fault in faults), wrong=True)


# ── train page ───────────────────────────────────────────────────────────────────────────────────────────────────────

REWARD_FIELDS = ("reward_functions", "reward_weights", "reward_functions_file")
"""Shown below the reward table, in this order, and not among the other fields of their section."""
BASIC_FIELDS = (
    *("train_mode", "model", "data", "train_type", "iters", "batch_size", "learning_rate"),
    *("group_size", "max_completion_length"),
)
"""Always shown; of the others only those that differ from their default, until their card is opened."""
SETTLE_MS = 150
"""How long typing must rest before problems are shown: a number half typed is not yet wrong."""
ROOMY = 1000
"""From this page width on the launch column has its full width."""
DEMO = (
    "The demo is loaded: a small bundled model learns, from rewards alone, to work sums out instead of guessing them. "
    "It takes about a minute and downloads nothing. To train on questions of your own, drop a csv or jsonl file anywhere."
)


class TrainPage(QWidget):
    """The page.

    Attributes:
        session, draft – the state shared with the other pages.
        form, launch, rewards, search – its widgets.
        picking – the pickers of the model and dataset fields.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.draft = session, session.draft
        # Widgets are created with their final parent: reparented later, Qt would restyle all of them again.
        content = self._content = QWidget(self)
        self.form, self.launch = Form(content), LaunchColumn(content)
        self.rewards = RewardPanel(self.form.page)
        self.search = SettingSearch(list(SETTINGS.values()))
        self._rest_timer = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._tabs: list[QWidget] = []
        self._memory = ""
        self._compose()
        self._lay_out()
        self._order_tabs()
        session.time_forecast.refresh()
        self._connect()
        self.picking = Picking(session, self.form.fields.values(), self)
        self._show_values()
        self._rest_timer.start(0)  # validating all settings can wait until the page is built

    # Building

    def _compose(self) -> None:
        self.banner = self._banner()
        self.translated_file = TranslatedFileBanner()
        self.form.add(self.banner)
        self.form.add(self.translated_file)
        for section, settings in sections().items():
            if section == "preference":
                self.form.add(_not_applicable("QAT", "Not applicable to GRPO."))
            listed = [about for about in settings if about.key not in (*REWARD_FIELDS, *machines.FIELDS)]
            # The reward table stands between the documented settings of its section and ours.
            first = documented_part(section, listed) if section == "generation" else listed
            others = [about for about in listed if about not in first]
            card = SettingsCard(section, SECTIONS[section], first, others, BASIC_FIELDS, self.form.page)
            self.form.add_card(card)
            self._tabs += card.tab_order(self._add_rewards(card) if section == "generation" else ())
            if section == "training":
                self.machines = MachinesPart(self.session, self.form.page)
                self.form.add_card(self.machines.card)
                self._tabs += self.machines.card.tab_order(self.machines.panel.tab_stops())
        self.form.column.addStretch()
        self.form.open_cards(self.session.prefs.open_cards)
        self.dataset = self.session.dataset
        data = self.form.fields["data"]
        assert isinstance(data, PathField)
        self.dataset_line = DatasetLine(self.dataset, data)
        self.default_dataset = DefaultDatasetOffer(self.session, data, data)
        below = self._tabs.index(data.tab_stops()[-1]) + 1
        self._tabs[below:below] = [self.default_dataset, self.dataset_line]
        for part in (self.default_dataset, self.dataset_line):
            data.layout().addWidget(part)  # pyright: ignore

    def _add_rewards(self, card: SettingsCard) -> list[QWidget]:
        """Add the reward table and its fields to the card; returns their widgets in tab order."""
        below = FieldGrid((SETTINGS[key] for key in REWARD_FIELDS), card)
        card.middle.addWidget(self.rewards)
        card.middle.addWidget(below)
        self.form.adopt(below.fields)
        return [*self.rewards.tab_stops(), *(stop for field in below.fields for stop in field.tab_stops())]

    def _order_tabs(self) -> None:
        first = (
            self.all_settings,
            self.presets,
            self.search,
            self.run_demo,
            self.translated_file.show_button,
            self.translated_file.close_button,
        )
        chain = [*first, *self._tabs, self.launch.run, self.launch.more, self.launch.copy]
        for widget, following in pairwise(chain):
            QWidget.setTabOrder(widget, following)

    def _banner(self) -> QFrame:
        banner = QFrame()
        banner.setProperty("role", "banner")
        across = QHBoxLayout(banner)
        across.setContentsMargins(2 * theme.SPACE, 12, 12, 12)
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(PlainLabel(DEMO, wordWrap=True), 1)
        self.run_demo = QPushButton("Run the demo")
        self.run_demo.setProperty("role", "primary")
        self.run_demo.clicked.connect(self.session.starter.start)
        across.addWidget(self.run_demo)
        return banner

    def _lay_out(self) -> None:
        title = PlainLabel("Train")
        title.setFont(theme.title_font())
        across = QHBoxLayout()
        across.setContentsMargins(0, 0, theme.GUTTER, 0)
        self.presets = QPushButton("Presets…")
        self.presets.setToolTip("Ways to train, each with what it would change")
        self.presets.clicked.connect(self.session.presets_requested)
        across.addWidget(title)
        across.addStretch()
        self.all_settings = button("All settings", self._show_all_settings)
        self.all_settings.setCheckable(True)
        self.all_settings.setToolTip(
            "Show every setting, or only the basic ones and those that differ from their default"
        )
        across.addWidget(self.all_settings)
        across.addSpacing(theme.SPACE)
        across.addWidget(self.presets)
        across.addSpacing(theme.SPACE)
        across.addWidget(self.search, 1)
        left = QVBoxLayout()
        left.setSpacing(12)
        left.addLayout(across)
        left.addWidget(self.form)
        content = self._content
        row = QHBoxLayout(content)
        row.setContentsMargins(theme.GUTTER, theme.GUTTER, theme.GUTTER, 0)
        row.setSpacing(0)
        row.addLayout(left, 1)
        row.addWidget(self.launch)
        middle = QHBoxLayout(self)
        middle.setContentsMargins(0, 0, 0, 0)
        middle.addWidget(content)

    def _connect(self) -> None:
        self.form.edited.connect(self.draft.set)
        self.form.opened.connect(self.session.prefs.set_card_open)
        data = self.form.fields["data"]
        assert isinstance(data, PathField)
        data.hand_over = self.session.use_data
        adapter = self.form.fields["adapter"]
        assert isinstance(adapter, AdapterField)
        adapter.hand_over = self.draft.use_adapter
        AdapterImport(self.session, adapter)
        file = self.form.fields["reward_functions_file"]
        assert isinstance(file, PathField)
        file.hand_over = self.draft.use_reward_file
        self.translated_file.closed.connect(self._close_translated_file)
        self.session.time_forecast.changed.connect(self._show_plan)
        self.form.focused.connect(lambda key: self.launch.show_help(SETTINGS[key]))
        self.rewards.picked.connect(self._on_rewards_picked)
        self.session.reward_bench.changed.connect(self._show_rewards)
        self.rewards.file_requested.connect(lambda: self.form.fields["reward_functions_file"].choose_file())
        self.search.chosen.connect(self.reveal)
        self.launch.run_pressed.connect(self._run_or_queue)
        self.session.queue.changed.connect(self._show_run_button)
        self.launch.editing_given_up.connect(self.session.queue.stop_editing)
        self.launch.problem_pressed.connect(self.reveal)
        self.launch.guide_pressed.connect(lambda key: self.session.guide_requested.emit(place_of_setting(key)))
        self.session.field_requested.connect(self.reveal)
        self.session.run_changed.connect(self._show_run_button)
        self.session.run_state_changed.connect(self._show_run_button)
        self.draft.changed.connect(self._on_changed)
        self.dataset_line.page_requested.connect(lambda: self.session.page_requested.emit("dataset"))
        self.dataset.counts_changed.connect(self._rest_timer.start)  # the longest prompt decides about the memory
        self.draft.saved.connect(self._show_plan)
        self.draft.problems_changed.connect(self._rest_timer.start)
        self._rest_timer.timeout.connect(self._show_problems)
        theme.signals.changed.connect(self._show_rewards)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.launch.setFixedWidth(
            theme.scaled(launch_column.NARROW_WIDTH if self.width() < theme.scaled(ROOMY) else launch_column.WIDTH)
        )

    # Showing the draft

    def _on_changed(self, key: str) -> None:
        if not key:  # all settings may have changed
            self._show_values()
            self._show_problems()
            return
        if key in self.form.fields:
            self.form.fields[key].show_value(self.draft.value(key))
        if key in (*REWARD_FIELDS, "model", "data"):
            self._show_rewards()
        self._show_dataset_line()
        self._show_applying()
        self.form.show_changed(self._off_default() & {key}, afresh=False)
        self._show_plan()
        self._rest_timer.start(SETTLE_MS)

    def _show_values(self) -> None:
        self.form.show_values(self.draft.values())
        self._show_translated_file()
        self._show_applying()
        self._show_dataset_line()
        self.form.show_changed(self._off_default(), afresh=True)
        self._show_rewards()
        self._show_plan()

    def _off_default(self) -> set[str]:
        value = self.draft.value
        return {key for key, about in SETTINGS.items() if not is_equivalent(value(key), about.default)}

    def _show_applying(self) -> None:
        valid_values = self.draft.valid_values()
        self.form.show_only({key for key, about in SETTINGS.items() if about.applies(valid_values)})

    def _show_dataset_line(self) -> None:
        """An empty field has the offer of a dataset in its place."""
        set_shown(self.dataset_line, bool(str(self.draft.value("data") or "").strip()))

    def _show_rewards(self) -> None:
        value = self.draft.value
        self.rewards.show_rewards(self.draft.rewards(), value("reward_functions"), value("reward_weights"))
        self.rewards.show_means(self.session.reward_bench.means_of_form)

    def _show_plan(self) -> None:
        seconds = self.session.time_forecast.seconds_per_completion(self.draft.valid_values())
        self.launch.show_plan(self.draft.summary(seconds, self._memory), self.draft.details())
        self.launch.show_command(self.draft.command_text(), self.draft.short_command())
        self._show_run_button()

    def _show_translated_file(self) -> None:
        translation = self.draft.translation
        if translation is None:
            return self.translated_file.show_words(None, "", [])
        program = translation.program.name if translation.program else ""
        return self.translated_file.show_words(self.draft.path, program, translation.words)

    def _close_translated_file(self) -> None:
        self.draft.translation = None
        self._show_translated_file()

    def _show_run_button(self, _state: str = "") -> None:
        """Exactly one button is primary: the demo's while its banner is visible, else Run."""
        training = self.session.is_training
        self.banner.setVisible(self.draft.is_demo and not training)
        edited = self.session.queue.edited
        text = "Save to queue" if edited is not None else "Add to queue" if training else "Run"
        self.launch.set_run(text, primary=not self.draft.is_demo, enabled=True)
        self.launch.show_edited(edited.name if edited is not None else "")

    def _run_or_queue(self) -> None:
        """Run; while a run trains, or the settings of a waiting one are edited, put the form into the queue instead."""
        queue = self.session.is_training or self.session.queue.edited is not None
        self.session.starter.queue() if queue else self.session.starter.start()

    def _show_problems(self) -> None:
        self._rest_timer.stop()
        faults = self.draft.problems()
        # The reward table shows problems with the names, so the field below it need not.
        self.form.show_problems(fault for fault in faults if fault.setting != "reward_functions")
        of_names = (fault.sentence for fault in faults if fault.setting == "reward_functions")
        self.rewards.show_problem(next(of_names, ""))
        warnings = self._warnings() if not faults else []
        self.form.show_warnings(warnings)
        self.launch.show_problems(faults)
        self.launch.show_warnings(warnings)
        self._show_memory()

    def _warnings(self) -> list[ConfigProblem]:
        """What is unusual about settings without problems."""
        try:
            return unusual(self.draft.config())
        except UserError:  # found only while parsing; the problems say it
            return []

    def _show_memory(self) -> None:
        """Estimate and show the memory. Called only once typing rests, as it reads the model's files."""
        memory_parts = self.session.starter.memory_parts()
        self._memory = amount(memory_parts.total) if memory_parts is not None else ""
        self.launch.show_memory(memory_parts)
        self._show_plan()

    def _on_rewards_picked(self, names: list[str], weights: list[float]) -> None:
        self.draft.update({"reward_functions": names, "reward_weights": weights})

    def _show_all_settings(self) -> None:
        """Open every card, or close them all."""
        cards = (*SECTIONS, machines.KEY)
        self.form.open_cards(cards if self.all_settings.isChecked() else ())
        for key in cards:
            self.session.prefs.set_card_open(key, self.all_settings.isChecked())

    # Finding a setting

    def find_setting(self) -> None:
        """Focus the search over settings."""
        self.search.take_focus()

    def show_next_group(self) -> None:
        """Focus the first setting below the next heading."""
        self.form.focus_group(1)

    def show_previous_group(self) -> None:
        """Focus the first setting below this heading, or the one before."""
        self.form.focus_group(-1)

    def reveal(self, key: str) -> None:
        """Show and focus a setting; where it does not apply, the setting that it depends on, with a message."""
        if key == "reward_functions":
            self.form.scroll_to(self.rewards)
            self.rewards.table.setFocus(Qt.FocusReason.ShortcutFocusReason)
            return
        if self.form.reveal(key) or key not in SETTINGS:
            return
        about = SETTINGS[key]
        if about.when is not None:
            decides = SETTINGS[about.when[0]]
            self.form.reveal(decides.key)
            self.session.message.emit(f"{about.label} applies only with another choice of {decides.label}.")


def _not_applicable(title: str, sentence: str) -> QWidget:
    row = QWidget()
    across = QHBoxLayout(row)
    across.setContentsMargins(2 * theme.SPACE, 0, 2 * theme.SPACE, 0)
    across.setSpacing(theme.SPACE)
    heading, text = PlainLabel(title), PlainLabel(sentence)
    heading.setFont(theme.heading_font())
    text.setProperty("role", "muted")
    across.addWidget(heading)
    across.addWidget(text, 1)
    return row


WAIT_MS = 400
"""How long it must be visible before it asks for the dataset, so that it does not while the window is still opening."""


class DatasetLine(QPushButton):
    """Shows the dataset's summary in one line, and watches the dataset while it is visible.

    Signals:
        page_requested – it was clicked: show the Dataset page.
    """

    page_requested = Signal()

    def __init__(self, dataset: Dataset, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._dataset = dataset
        self.setFlat(True)
        self.setProperty("role", "link")
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self._delay = QTimer(self, singleShot=True, interval=WAIT_MS)
        self._delay.timeout.connect(lambda: dataset.watch(self, count_all=False))
        self.clicked.connect(lambda _checked=False: self.page_requested.emit())
        for signal in (dataset.changed, dataset.counts_changed):
            signal.connect(self.refresh)
        theme.signals.changed.connect(self.update)
        self.refresh()

    def refresh(self) -> None:
        """Show the present summary; it is empty while no dataset is chosen."""
        summary, self._is_wrong = self._dataset.summary_line()
        self.setText(summary)
        self.setToolTip(plain_tip(summary))
        self.setAccessibleName(f"Dataset: {summary}")
        self.setEnabled(bool(summary))
        self.update()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._delay.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._delay.stop()
        self._dataset.unwatch(self)

    def enterEvent(self, event: QEnterEvent) -> None:
        super().enterEvent(event)
        self.update()

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(120, self.fontMetrics().lineSpacing() + 4)

    minimumSizeHint = sizeHint

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint the text elided at its end, grey until hovered or focused: QPushButton does not elide."""
        painter, colours = QPainter(self), theme.palette()
        is_active = self.underMouse() or self.hasFocus()
        font = theme.caption_font()
        font.setUnderline(is_active)
        painter.setFont(font)
        painter.setPen(colours.warning if self._is_wrong else colours.accent if is_active else colours.muted)
        text = painter.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, self.width())
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, text)


FEW = 6
"""Words without effect that the summary lists; more are counted there, and listed on request."""


class TranslatedFileBanner(QFrame):
    """The banner; hidden for a file that has no word of another program.

    Attributes:
        sentence, translated – the label with the summary, and the one with what became of each word, shown on request.
        show_button, close_button – the links that show those words, and close the banner.

    Signals:
        closed – the user clicked Close.
    """

    closed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "banner")
        self.sentence = label(wrap=True, selectable=True)
        self.translated = label(wrap=True, selectable=True)
        self.show_button, self.close_button = LinkButton("Show them"), LinkButton("Close")
        self.show_button.setAccessibleName("Show what each word of the file was read as")
        self.close_button.setAccessibleName("Close the note on the words of the file")
        self.show_button.clicked.connect(lambda: self._show_each(not self.translated.isVisibleTo(self)))
        self.close_button.clicked.connect(self.closed)
        across = QHBoxLayout(self)
        across.setContentsMargins(2 * theme.SPACE, theme.SPACE, 2 * theme.SPACE, theme.SPACE)
        across.setSpacing(2 * theme.SPACE)
        texts = QVBoxLayout()
        texts.addWidget(self.sentence)
        texts.addWidget(self.translated)
        across.addLayout(texts, 1)
        for link in (self.show_button, self.close_button):
            across.addWidget(link, 0, Qt.AlignmentFlag.AlignTop)
        self.hide()

    def show_words(self, file: Path | None, program: str, words: Sequence[TranslatedKey]) -> None:
        """Say what was made of a file's words; none hide the banner. `program`: whose file it is, empty where that is open."""
        self.sentence.setText(summary(file, program, words))
        self.translated.setText("\n".join(_details(words)))
        self.show_button.setVisible(bool(self.translated.text()))
        self._show_each(False)
        self.setVisible(any(word.fate != "as here" for word in words))

    def _show_each(self, is_shown: bool) -> None:
        self.translated.setVisible(is_shown)
        self.show_button.setText("Hide them" if is_shown else "Show them")


def summary(file: Path | None, program: str, words: Sequence[TranslatedKey]) -> str:
    """Whose file it is, how many words were translated, and which were left out, with their reasons where they are few."""
    name = file.name if file is not None else "The file"
    translated, left_out = (sum(word.fate == fate for word in words) for fate in ("translated", "without effect"))
    sentences = [f"{name} is a file for {program}; what it leaves out has GRPO Studio's defaults."] if program else []
    if translated:
        sentences.append(f"{translated} {'word of it was' if translated == 1 else 'words of it were'} translated.")
    if left_out > FEW:
        sentences.append(f"{left_out} are without effect here.")
    elif left_out:
        sentences.append(f"Left out{'' if program else f' of {name}'}: {'; '.join(_left_out(words))}.")
    return " ".join(sentences)


def _left_out(words: Sequence[TranslatedKey]) -> list[str]:
    """The words without effect, by reason."""
    by_reason: dict[str, list[str]] = {}
    for word in words:
        if word.fate == "without effect":
            by_reason.setdefault(word.sentence, []).append(word.word)
    return [f"{', '.join(named)} ({why})" for why, named in by_reason.items()]


def _details(words: Sequence[TranslatedKey]) -> list[str]:
    """A line for each word that was translated, and for each reason of those without effect, where the summary counts them."""
    translated = [f"{word.word} → {word.sentence}" for word in words if word.fate == "translated"]
    left_out = sum(word.fate == "without effect" for word in words)
    return [*translated, *(["", "Without effect here:", *_left_out(words)] if left_out > FEW else [])]
