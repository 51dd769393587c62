"""The Train page: the form in two densities, and the launch column beside it."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QWidget

from app import theme
from app.pages.train import launch_column, machines
from app.pages.train.form import ESSENTIAL, ESSENTIALS, ChangedChips, FieldGrid, Form, SettingsCard
from app.pages.train.launch_column import DEMO, MARGINS, FileProblemsPanel, LaunchColumn, TranslatedFileBanner
from app.pages.train.machines import MachinesCard
from app.pages.train.picker import Picking, size_text
from app.pages.train.reward_panel import RewardPanel
from app.pages.train.tools_field import ToolsField
from app.state.dataset import Dataset
from app.state.draft import is_equivalent
from app.state.guide import place_of
from app.state.memory import amount
from app.state.run_summary import details, summary
from app.state.session import Session
from app.widgets.basic.controls import ElidedLink, Segments
from app.widgets.basic.labels import button, label, plain_tip, show_text
from app.widgets.basic.layout import card, column, configure, connect, holder, row, set_shown, set_tab_order
from app.widgets.form.fields import AdapterField, PathField
from app.widgets.form.setting_search import SettingSearch
from backend.config import first_choices
from backend.config.config import SECTIONS, SETTINGS, sections
from backend.config.notes import unusual
from backend.config.setting import Setting, documented_part
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.hub_cache import is_dataset_cached

DENSITIES = {"essentials": "Essentials", "all": "All settings"}
REWARD_FIELDS = ("reward_functions", "reward_weights", "reward_functions_file")
NO_CHIP = {*ESSENTIAL, "reward_functions", "reward_weights"}  # settings that the essentials show
SETTLE_MS = 150  # pause in typing before problems are shown: a number half typed is not yet wrong
ROOMY = 1000
WAIT_MS = 400  # the dataset line is visible so long before it asks for the dataset: not while the window opens


class TrainPage(QWidget):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.draft, self.dataset = session, session.draft, session.dataset
        # Widgets are created with their final parent: reparented later, Qt would restyle all of them again.
        content = QWidget(self)
        form, launch = self.form, self.launch = Form(content), LaunchColumn(content)
        self.rewards = RewardPanel(session.reward_bench, form.page)
        self.chips = ChangedChips(session.draft, form.essentials)
        self.chips.after = self.rewards.tab_stops[-1]
        form.essentials.foot.addWidget(self.chips)
        self._rest_timer = configure(QTimer(self, singleShot=True, interval=SETTLE_MS), timeout=self._show_problems)
        self._build_timer = configure(QTimer(self, interval=0), timeout=self._build_next)
        self.banner = card(column(label(DEMO, wrap=True), margins=MARGINS), "banner")
        self.file_problems, self.translated_file = FileProblemsPanel(self.draft), TranslatedFileBanner(self.draft)
        for notice in (self.file_problems, self.translated_file, self.banner):
            launch.notices.addWidget(notice)
        for section, settings in sections().items():
            listed = [setting for setting in settings if setting.key not in (*REWARD_FIELDS, *machines.FIELDS)]
            # The reward table stands between the documented settings of its section and ours.
            first = documented_part(section, listed) if section == "generation" else listed
            block = SettingsCard(SECTIONS[section], form.page)
            grids = [FieldGrid(first, block)]
            if section == "generation":
                self._reward_block = block
                grids.append(FieldGrid((SETTINGS[key] for key in REWARD_FIELDS), block))
                grids.append(FieldGrid((each for each in listed if each not in first), block, follows=True))
            if section == "preference":
                text = (label("Not applicable to GRPO.", role="muted"), 1)
                margins = (2 * theme.SPACE, 0, 2 * theme.SPACE, 0)
                form.add_block(holder(row(label("QAT", theme.heading_font()), text, margins=margins)), *grids)
            for each in grids:
                block.parts.addWidget(each)
            form.add_block(block, *grids)
            if section == "training":
                self.machines = MachinesCard(session, form.page)
                form.add_block(self.machines, self.machines.grid)
        form.column.addStretch()
        data, adapter, reward_file = (form.fields[key] for key in ("data", "adapter", "reward_functions_file"))
        assert isinstance(data, PathField) and isinstance(adapter, AdapterField) and isinstance(reward_file, PathField)
        text = f"Use {first_choices.DATASET}: {first_choices.DATASET_ABOUT}"
        self.default_dataset = ElidedLink(text, data, on_click=self._use_default_dataset, tip=text)
        self.default_dataset.colour = "accent"
        self.dataset_line = DatasetLine(self.dataset, data)
        for part in (self.default_dataset, self.dataset_line):
            data.tab_stops.append(part)
            data.layout().addWidget(part)  # pyright: ignore[reportOptionalMemberAccess]
        self.density = Segments(DENSITIES, "Settings to show", chosen=self.show_density)
        self.density.chosen.connect(partial(setattr, session.prefs, "train_density"))
        self.presets = button("Presets…", session.presets_requested.emit, tip="Ways to train, each with its changes")
        self.search = SettingSearch(list(SETTINGS.values()))
        title = label("Train", theme.title_font())
        head = row(title, 12, self.density, None, self.presets, (self.search, 1), margins=(0, 0, theme.GUTTER, 0))
        left = column(head, form, spacing=12)
        row((left, 1), launch, into=content, spacing=0, margins=(theme.GUTTER, theme.GUTTER, 0, 0))
        row(content, into=self)

        session.time_forecast.refresh()
        draft = self.draft
        data.hand_over, reward_file.hand_over = session.use_data, draft.use_reward_file
        adapter.hand_over = draft.use_adapter
        configure(form, edited=draft.set, focused=lambda key: launch.show_help(SETTINGS[key]))
        adapter.import_requested.connect(partial(self._import_adapter, adapter))
        self.rewards.add_file.clicked.connect(lambda: reward_file.choose_file())
        self.rewards.result.clicked.connect(lambda: session.page_requested.emit("rewards"))
        self.dataset_line.clicked.connect(lambda: session.page_requested.emit("dataset"))
        launch.guide_pressed.connect(lambda key: session.guide_requested.emit(place_of("setting", key)))
        draft.changed.connect(self._on_changed)
        jumps = (self.search.chosen, self.chips.pressed, self.file_problems.field_requested, launch.problem_pressed)
        connect(self.reveal, *jumps, session.field_requested)
        connect(self._show_plan, session.time_forecast.changed, draft.saved)
        draft.saved.connect(self.translated_file.show_words)
        connect(self.rewards.show_rewards, session.reward_bench.changed, theme.signals.changed)
        connect(self._show_banner, session.queue.changed, session.run_changed, session.run_state_changed)
        # The longest prompt decides about the memory.
        connect(self._rest_timer.start, self.dataset.changed, self.dataset.counts_changed, draft.problems_changed)
        self.picking = Picking(session, form.fields.values(), self)
        self.rewards.model_wanted.connect(self.picking.pick)
        self.show_next_group, self.show_previous_group = partial(form.focus_group, 1), partial(form.focus_group, -1)
        self._build_timer.start()
        self.show_density(session.prefs.train_density)
        self._show_values()
        self._rest_timer.start(0)  # validating all settings can wait until the page is built

    def _build_next(self) -> None:
        if not self.form.build_next():
            self._build_timer.stop()
            tools = self.form.fields["tools"]
            assert isinstance(tools, ToolsField)
            tools.follow(self.session)
            self._show_values()
            self._rest_timer.start(0)

    def build_all(self) -> None:
        while self._build_timer.isActive():
            self._build_next()

    def when_built(self, act: Callable[[], object]) -> None:
        if self._build_timer.isActive():
            QTimer.singleShot(0, self, partial(self.when_built, act))
        else:
            act()

    def show_density(self, key: str) -> None:
        is_compact = key == "essentials"
        if not is_compact:
            self.build_all()
        self.density.buttons[key].setChecked(True)
        block = self.form.essentials.cards["generation"] if is_compact else self._reward_block
        block.parts.insertWidget(1, self.rewards)
        self.rewards.table.set_compact(is_compact)
        self.form.set_compact(is_compact)
        fields, launch, banner = self.form.fields, self.launch, self.translated_file
        tabs: list[QWidget] = [*self.density.buttons.values(), self.presets, self.search]
        for each in itertools.chain(*ESSENTIALS.values()) if is_compact else fields:
            tabs += [*(self.rewards.tab_stops if each == REWARD_FIELDS[0] else ()), *fields[each].tab_stops]
            tabs += self.machines.tab_stops if each == machines.FIELDS[-1] else ()
        if is_compact:
            tabs += [*self.rewards.tab_stops, *self.chips.tab_stops]
        of_file = (self.file_problems.open_button, self.file_problems.close_button)
        tabs += [*of_file, banner.defaults_button, banner.show_button, banner.close_button]
        set_tab_order(*tabs, launch.memory.more, launch.more, launch.copy)

    def resizeEvent(self, event: QResizeEvent) -> None:
        is_narrow = self.width() < theme.scaled(ROOMY)
        self.launch.setFixedWidth(theme.scaled(launch_column.NARROW_WIDTH if is_narrow else launch_column.WIDTH))

    def _on_changed(self, key: str) -> None:
        if not key:  # all settings may have changed
            self.rewards.forget_rows()
            self._show_values()
            self._show_problems()
            return
        if key in self.form.fields:
            self.form.fields[key].show_value(self.draft.value(key))
        if key in (*REWARD_FIELDS, "train_mode", "model", "data"):
            self.rewards.show_rewards()
        self._show_applying()
        self._show_plan()
        self._rest_timer.start(SETTLE_MS)

    def _show_values(self) -> None:
        for key, field in self.form.fields.items():
            field.show_value(self.draft.value(key))
        self.translated_file.show_words()
        self._show_applying()
        self.rewards.show_rewards()
        self._show_plan()

    def _use_default_dataset(self) -> None:
        name, field = first_choices.DATASET, self.form.fields["data"]

        def show_note(size: str) -> None:
            if self.draft.value("data") == name:
                field.show_note(f"Not on this machine: {size} will be downloaded when the run starts.")

        self.session.use_data(name)
        if not is_dataset_cached(name):
            self.session.service.ask(
                "hub_files",
                lambda answer: show_note(size_text(answer["total"])),
                on_refused=lambda _faults: show_note("it"),
                owner=field,
                id=name,
                repo_type="dataset",
            )

    def _show_applying(self) -> None:
        data = self.draft.value("data")
        set_shown(self.default_dataset, not str(data or "").strip())
        if data != first_choices.DATASET:
            self.form.fields["data"].show_note("")
        applying = self.form.show_applying(self.draft.valid_values())
        now = {key: self.draft.value(key) for key in SETTINGS if key in applying - NO_CHIP}
        changed = [key for key, value in now.items() if not is_equivalent(value, SETTINGS[key].default)]
        self.chips.show_changes({key: now[key] for key in changed})

    def _show_plan(self) -> None:
        seconds = self.session.time_forecast.seconds_per_completion(self.draft.valid_values())
        holds_out = self.dataset.state != "ready" or "valid" in self.dataset.splits
        settings = self.draft.sound_config()
        memory = amount(parts.total) if (parts := self.launch.memory.memory_parts) is not None else ""
        texts = summary(settings, seconds, memory), details(settings, holds_out=holds_out)
        self.launch.show_plan(*texts, self.draft.command_text(), self.draft.short_command())
        self._show_banner()

    def _show_banner(self) -> None:
        self.banner.setVisible(self.draft.is_demo and not self.session.is_training)

    def _show_problems(self) -> None:
        self._rest_timer.stop()
        problems = [*self.draft.problems(), *self.dataset.problems()]
        of_names = (problem.sentence for problem in problems if problem.setting == "reward_functions")
        show_text(self.rewards.problem, next(of_names, ""))
        warnings = []
        with suppress(UserError):  # found only while parsing; the problems say it
            warnings = unusual(self.draft.config()) if not problems else []
        # The reward table shows problems with the names, so the field below it need not.
        self.form.show_problems((each for each in problems if each.setting != "reward_functions"), warnings)
        self.launch.show_problems(self.file_problems.show_problems(problems), warnings)
        set_shown(self.dataset_line, all(each.setting != "data" for each in problems))
        self.launch.memory.show_memory(self.session.starter.memory_parts())
        self._show_plan()

    def _import_adapter(self, field: AdapterField, folder: str) -> None:
        def on_imported(imported: dict[str, Any]) -> None:
            field.show_importing("")
            self.draft.use_adapter(imported["path"])
            field.show_note(" ".join(imported["sentences"]))

        def on_refused(problems: list[ConfigProblem]) -> None:
            field.show_importing("")
            field.show_note(" ".join(problem.sentence for problem in problems), wrong=True)

        field.show_importing("Importing…")
        self.session.service.ask(
            "import_adapter",
            on_imported,
            on_refused=on_refused,
            on_progress=lambda progress: field.show_importing(progress["sentence"]),
            owner=field,
            folder=folder,
            model=str(self.draft.value("model")),
        )

    def reveal(self, key: str) -> None:
        """Go to a setting: in the density on show if it is there, else in all settings."""
        if (setting := SETTINGS.get(key)) is not None and not setting.fits_mode(self.draft.valid_values()):
            self._explain_hidden(setting, "train_mode")
            return
        if key == "reward_functions":
            self.form.scroll_to(self.rewards)
            self.rewards.table.setFocus(Qt.FocusReason.ShortcutFocusReason)
            return
        if self.form.is_compact and setting is not None and key not in ESSENTIAL:
            self.show_density("all")
        decides = "best_metric" if key == "best_is_lowest" else setting.when[0] if setting and setting.when else ""
        if not self.form.reveal(key) and setting is not None and decides:
            self._explain_hidden(setting, decides)

    def _explain_hidden(self, setting: Setting, decides: str) -> None:
        self.form.reveal(decides)
        self.session.message.emit(f"{setting.label} applies only with another choice of {SETTINGS[decides].label}.")


class DatasetLine(ElidedLink):
    def __init__(self, dataset: Dataset, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._dataset = dataset
        watch = partial(dataset.watch, self, count_all=False)
        self._delay = configure(QTimer(self, singleShot=True, interval=WAIT_MS), timeout=watch)
        connect(self.refresh, dataset.changed, dataset.counts_changed, theme.signals.changed)
        self.refresh()

    def refresh(self) -> None:
        summary, is_wrong = self._dataset.summary_line()
        self.colour = "warning" if is_wrong else "muted"
        name, tip = f"Dataset: {summary}", plain_tip(summary)
        configure(self, text=summary, toolTip=tip, accessibleName=name, enabled=bool(summary))
        self.update()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._delay.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._delay.stop()
        self._dataset.unwatch(self)
