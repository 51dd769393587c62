"""The Train page: what will it do?

Composes the form (one card per section of settings, with the reward table, the dataset line and the pickers among its fields) and
the launch column beside it: the plan in words, memory, problems, help, the command and Run. The fields come from SETTINGS.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from PySide6.QtCore import QObject, Qt, QTimer
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.pages.train import launch_column, machines_part
from app.pages.train.dataset_line import DatasetLine
from app.pages.train.form import Form
from app.pages.train.launch_column import LaunchColumn
from app.pages.train.machines_part import MachinesPart
from app.pages.train.reward_panel import RewardPanel
from app.pages.train.source_picking import Picking
from app.pages.train.translated_file import TranslatedFileBanner
from app.state.form_values import is_equivalent
from app.state.guide import place_of_setting
from app.state.memory_parts import amount
from app.state.session import Session
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels_and_buttons import PlainLabel, button
from app.widgets.basic.layout import set_shown
from app.widgets.form.path_field import AdapterField, PathField
from app.widgets.form.setting_search import SettingSearch
from app.widgets.form.settings_card import FieldGrid, SettingsCard
from app.widgets.picker.picker_rows import size_text
from backend.config import first_choices
from backend.config.config import SECTIONS, SETTINGS, sections
from backend.config.documented_form import documented_part
from backend.config.unusual import unusual
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
            listed = [about for about in settings if about.key not in (*REWARD_FIELDS, *machines_part.FIELDS)]
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
        self.run_demo.clicked.connect(self.session.start_run)
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
        self.session.queue_run() if queue else self.session.start_run()

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
        memory_parts = self.session.memory_parts()
        self._memory = amount(memory_parts.total) if memory_parts is not None else ""
        self.launch.show_memory(memory_parts)
        self._show_plan()

    def _on_rewards_picked(self, names: list[str], weights: list[float]) -> None:
        self.draft.update({"reward_functions": names, "reward_weights": weights})

    def _show_all_settings(self) -> None:
        """Open every card, or close them all."""
        cards = (*SECTIONS, machines_part.KEY)
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
