"""The Train page: what will it do? The form in SPEC's reading order, and beside it the plan, its problems and Run.

The fields come from the list of settings; which cards there are, and what stands between them, is composed here.
"""

from __future__ import annotations

from itertools import pairwise

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.model.dataset import dataset_of
from app.model.memory_parts import amount
from app.model.session import Session
from app.pages.parts.source_picking import Picking
from app.widgets.dataset.dataset_line import DatasetLine
from app.widgets.form import launch_column
from app.widgets.form.form import FieldGrid, Form, SettingsCard
from app.widgets.form.ignored_keys import IgnoredKeysBanner
from app.widgets.form.launch_column import LaunchColumn
from app.widgets.form.path_field import PathField
from app.widgets.form.setting_search import SettingSearch
from app.widgets.rewards.reward_panel import RewardPanel
from backend.spec.config import SECTIONS, SETTINGS, sections
from backend.spec.faults import Fault

REWARD_FIELDS = ("reward_functions_file", "reward_functions", "reward_weights")
"""Shown below the reward table, in this order, and not among the other fields of their block."""
SETTLE_MS = 150
"""How long typing must rest before problems are shown: nobody is told off in the middle of a number."""
ROOMY = 1000
"""From this width on the column beside the form takes its full width."""
DEMO = (
    "The demo is loaded: a small bundled model learns, from rewards alone, to work sums out instead of guessing them. "
    "It takes about a minute and downloads nothing."
)


class TrainPage(QWidget):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.draft = session, session.draft
        # Whatever stands in the page is made in its place: moved there afterwards, all of it would be dressed again.
        content = self._content = QWidget(self)
        self.form, self.launch = Form(content), LaunchColumn(content)
        self.rewards = RewardPanel(self.form.page)
        self.search = SettingSearch(list(SETTINGS.values()))
        self._settle = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._tabs: list[QWidget] = []
        self._memory = ""
        self._compose()
        self._lay_out()
        self._order_tabs()
        session.time_forecast.look_again()
        self._connect()
        self.picking = Picking(session, self.form.fields.values(), self)
        self._show_values()
        self._settle.start(0)  # judging all settings may wait until the page is there

    # Composition

    def _compose(self) -> None:
        self.banner = self._banner()
        self.left_out = IgnoredKeysBanner()
        self.form.add(self.banner)
        self.form.add(self.left_out)
        for section, settings in sections().items():
            if section == "preference":
                self.form.add(_not_applicable("QAT", "Not applicable to GRPO."))
            card = SettingsCard(
                section,
                SECTIONS[section],
                [about for about in settings if about.key not in REWARD_FIELDS],
                self.form.page,
            )
            self.form.add_card(card)
            self._tabs += card.tab_order(self._add_rewards(card) if section == "generation" else ())
        self.form.column.addStretch()
        self.form.open_cards(self.session.prefs.open_cards)
        self.dataset = dataset_of(self.session)
        self.dataset_line = DatasetLine(self.dataset, self.form.fields["data"])
        self.form.fields["data"].layout().addWidget(self.dataset_line)  # pyright: ignore
        self._tabs.insert(self._tabs.index(self.form.fields["data"].tab_stops()[-1]) + 1, self.dataset_line)

    def _add_rewards(self, card: SettingsCard) -> list[QWidget]:
        """The table and the fields that belong to it; returns where Tab halts in them."""
        below = FieldGrid((SETTINGS[key] for key in REWARD_FIELDS), card)
        card.middle.addWidget(self.rewards)
        card.middle.addWidget(below)
        self.form.adopt(below.fields)
        return [*self.rewards.tab_stops(), *(stop for one in below.fields for stop in one.tab_stops())]

    def _order_tabs(self) -> None:
        first = (self.presets, self.search, self.run_demo, self.left_out.close_button)
        chain = [*first, *self._tabs, self.launch.run, self.launch.copy]
        for one, following in pairwise(chain):
            QWidget.setTabOrder(one, following)

    def _banner(self) -> QFrame:
        banner = QFrame()
        banner.setProperty("role", "banner")
        across = QHBoxLayout(banner)
        across.setContentsMargins(2 * theme.SPACE, 12, 12, 12)
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(QLabel(DEMO, wordWrap=True), 1)
        self.run_demo = QPushButton("Run the demo")
        self.run_demo.setProperty("role", "primary")
        self.run_demo.clicked.connect(self.session.start_run)
        across.addWidget(self.run_demo)
        return banner

    def _lay_out(self) -> None:
        title = QLabel("Train")
        title.setFont(theme.title_font())
        across = QHBoxLayout()
        across.setContentsMargins(0, 0, theme.GUTTER, 0)
        self.presets = QPushButton("Presets…")
        self.presets.setToolTip("Ways to train, each with what it would change")
        self.presets.clicked.connect(self.session.presets_wanted)
        across.addWidget(title)
        across.addStretch()
        across.addWidget(self.presets)
        across.addSpacing(theme.SPACE)
        across.addWidget(self.search)
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
        data.hand_over = self.session.take_data
        self.left_out.closed.connect(self._forget_left_out)
        self.session.time_forecast.changed.connect(self._show_plan)
        self.form.focused.connect(lambda key: self.launch.show_help(SETTINGS[key]))
        self.rewards.picked.connect(self._take_rewards)
        self.session.bench.changed.connect(self._show_rewards)
        self.rewards.file_requested.connect(lambda: self.form.fields["reward_functions_file"].choose_file())
        self.search.chosen.connect(self.reveal)
        self.launch.run_pressed.connect(self.session.start_run)
        self.launch.problem_pressed.connect(self.reveal)
        self.session.field_wanted.connect(self.reveal)
        self.session.run_changed.connect(self._show_run_button)
        self.session.run_state_changed.connect(self._show_run_button)
        self.draft.changed.connect(self._on_changed)
        self.dataset_line.page_requested.connect(lambda: self.session.page_wanted.emit("dataset"))
        self.dataset.counted.connect(self._settle.start)  # the longest prompt decides about the memory
        self.draft.saved.connect(self._show_plan)
        self.draft.judged.connect(self._settle.start)
        self._settle.timeout.connect(self._show_problems)
        theme.signals.changed.connect(self._show_rewards)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.launch.setFixedWidth(
            theme.scaled(launch_column.NARROW_WIDTH if self.width() < theme.scaled(ROOMY) else launch_column.WIDTH)
        )

    # What the draft says

    def _on_changed(self, key: str) -> None:
        if not key:
            self._show_all()
            return
        if key in self.form.fields:
            self.form.fields[key].show_value(self.draft.value(key))
        if key in REWARD_FIELDS:
            self._show_rewards()
        self._show_applying()
        self._show_plan()
        self._settle.start(SETTLE_MS)

    def _show_all(self) -> None:
        self._show_values()
        self._show_problems()

    def _show_values(self) -> None:
        self.form.show_values(self.draft.values())
        self.left_out.show_keys(self.draft.path, self.draft.left_out)
        self._show_applying()
        self._show_rewards()
        self._show_plan()

    def _show_applying(self) -> None:
        sound = self.draft.sound()
        self.form.show_only({key for key, about in SETTINGS.items() if about.applies(sound)})

    def _show_rewards(self) -> None:
        value = self.draft.value
        self.rewards.show_rewards(self.draft.rewards(), value("reward_functions"), value("reward_weights"))
        self.rewards.show_means(self.session.bench.means)

    def _show_plan(self) -> None:
        seconds = self.session.time_forecast.seconds_per_completion(self.draft.sound())
        self.launch.show_plan(self.draft.summary(seconds, self._memory), self.draft.details())
        self.launch.show_command(self.draft.shown_command(), self.draft.short_command())
        self._show_run_button()

    def _forget_left_out(self) -> None:
        self.draft.left_out = {}
        self.left_out.show_keys(None, {})

    def _show_run_button(self, _state: str = "") -> None:
        """One button stands out: the demo's while its banner is there, else Run."""
        training = self.session.is_training
        self.banner.setVisible(self.draft.is_demo and not training)
        self.launch.set_run("Run", primary=not self.draft.is_demo, enabled=not training)

    def _show_problems(self) -> None:
        self._settle.stop()
        faults = self.draft.problems()
        # The table shows what is wrong with the names: the line with the same names below it need not repeat it.
        self.form.show_problems(fault for fault in faults if fault.setting != "reward_functions")
        self.rewards.show_problem(_first(faults, "reward_functions"))
        self.launch.show_problems(faults)
        self._show_memory()

    def _show_memory(self) -> None:
        """What the run will need, once typing rests: an estimate reads the model's files."""
        memory_parts = self.session.memory_parts()
        self._memory = amount(memory_parts.total) if memory_parts is not None else ""
        self.launch.show_memory(memory_parts)
        self._show_plan()

    def _take_rewards(self, names: list[str], weights: list[float]) -> None:
        self.draft.update({"reward_functions": names, "reward_weights": weights})

    # Finding a setting

    def find_setting(self) -> None:
        """Put the cursor into the search over settings."""
        self.search.take_focus()

    def reveal(self, key: str) -> None:
        """Go to a setting; where it does not apply now, go to the one that decides, and say so."""
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


def _first(faults: list[Fault], key: str) -> str:
    return next((fault.sentence for fault in faults if fault.setting == key), "")


def _not_applicable(title: str, sentence: str) -> QWidget:
    row = QWidget()
    across = QHBoxLayout(row)
    across.setContentsMargins(2 * theme.SPACE, 0, 2 * theme.SPACE, 0)
    across.setSpacing(theme.SPACE)
    name, said = QLabel(title), QLabel(sentence)
    name.setFont(theme.heading_font())
    said.setProperty("role", "muted")
    across.addWidget(name)
    across.addWidget(said, 1)
    return row
