"""The Train page: a card of the form per section of settings, and the launch column beside it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QHideEvent, QPainter, QPaintEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QSizePolicy, QWidget

from app import theme
from app.pages.train import launch_column, machines
from app.pages.train.form import FieldGrid, Form, SettingsCard
from app.pages.train.launch_column import LaunchColumn
from app.pages.train.machines import MachinesPart
from app.pages.train.picker import Picking, size_text
from app.pages.train.reward_panel import RewardPanel
from app.state.dataset import Dataset
from app.state.draft import Draft, is_equivalent
from app.state.guide import place_of_setting
from app.state.memory import amount
from app.state.session import Session
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels import button, label, plain_tip, show_text
from app.widgets.basic.layout import card, column, configure, connect, holder, row, set_shown, set_style_property
from app.widgets.basic.number_format import counted
from app.widgets.form.fields import AdapterField, PathField
from app.widgets.form.setting_search import SettingSearch
from backend.config import first_choices
from backend.config.config import SECTIONS, SETTINGS, sections
from backend.config.form import documented_part
from backend.config.notes import unusual
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.hub_cache import is_dataset_cached

REWARD_FIELDS = ("reward_functions", "reward_weights", "reward_functions_file")
BASIC_FIELDS = (
    *("train_mode", "model", "data", "train_type", "iters", "batch_size", "learning_rate"),
    *("group_size", "max_completion_length"),
)
SETTLE_MS = 150
"""Pause in typing before problems are shown: a number half typed is not yet wrong."""
ROOMY = 1000
DEMO = (
    "The demo is loaded: a small bundled model learns, from rewards alone, to work sums out instead of guessing them. "
    "It takes about a minute and downloads nothing. To train on your own questions, drop a csv or jsonl file anywhere."
)
WAIT_MS = 400
"""Time that the dataset line is visible before it asks for the dataset: not while the window is still opening."""
FEW = 6


class TrainPage(QWidget):
    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session, self.draft, self.dataset = session, session.draft, session.dataset
        # Widgets are created with their final parent: reparented later, Qt would restyle all of them again.
        content = QWidget(self)
        form, launch = self.form, self.launch = Form(content), LaunchColumn(content)
        self.rewards = RewardPanel(form.page)
        self._rest_timer = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._memory = ""
        self.run_demo = button("Run the demo", session.starter.start, primary=True)
        margins = (2 * theme.SPACE, 12, 12, 12)
        demo = row((label(DEMO, wrap=True), 1), self.run_demo, spacing=2 * theme.SPACE, margins=margins)
        self.banner = card(demo, "banner")
        self.translated_file = banner = TranslatedFileBanner(self.draft)
        form.column.addWidget(self.banner)
        form.column.addWidget(banner)
        tabs = self._build_cards()
        form.column.addStretch()
        form.open_cards(session.prefs.open_cards)
        data, adapter, reward_file = (form.fields[key] for key in ("data", "adapter", "reward_functions_file"))
        assert isinstance(data, PathField) and isinstance(adapter, AdapterField) and isinstance(reward_file, PathField)
        below_data = (DefaultDatasetOffer(session, data), DatasetLine(self.dataset, data))
        self.default_dataset, self.dataset_line = below_data
        place = tabs.index(data.tab_stops[-1]) + 1
        tabs[place:place] = below_data
        for part in below_data:
            data.layout().addWidget(part)  # pyright: ignore[reportOptionalMemberAccess]
        tip = "Show all settings, or only the basic and changed ones"
        self.all_settings = button("All settings", self._show_all_settings, tip=tip, checkable=True)
        self.presets = button("Presets…", session.presets_requested.emit, tip="Ways to train, each with its changes")
        self.search = SettingSearch(list(SETTINGS.values()))
        title = label("Train", theme.title_font())
        head = row(title, None, self.all_settings, self.presets, (self.search, 1), margins=(0, 0, theme.GUTTER, 0))
        left = column(head, form, spacing=12)
        row((left, 1), launch, into=content, spacing=0, margins=(theme.GUTTER, theme.GUTTER, theme.GUTTER, 0))
        row(content, into=self)
        first = (self.all_settings, self.presets, self.search, self.run_demo)
        of_banner = (banner.defaults_button, banner.show_button, banner.close_button)
        for widget, following in pairwise((*first, *of_banner, *tabs, launch.run, launch.more, launch.copy)):
            QWidget.setTabOrder(widget, following)

        session.time_forecast.refresh()
        draft = self.draft
        data.hand_over, reward_file.hand_over = session.use_data, draft.use_reward_file
        adapter.hand_over = draft.use_adapter
        form.edited.connect(draft.set)
        form.opened.connect(session.prefs.set_card_open)
        form.focused.connect(lambda key: launch.show_help(SETTINGS[key]))
        adapter.import_requested.connect(partial(self._import_adapter, adapter))
        self.rewards.picked.connect(
            lambda names, weights: draft.update({"reward_functions": names, "reward_weights": weights})
        )
        self.rewards.add_file.clicked.connect(lambda: reward_file.choose_file())
        self.dataset_line.clicked.connect(lambda: session.page_requested.emit("dataset"))
        starter, queue = session.starter, session.queue
        launch.run.clicked.connect(
            lambda: starter.queue() if session.is_training or queue.edited is not None else starter.start()
        )
        launch.keep.clicked.connect(queue.stop_editing)
        launch.guide_pressed.connect(lambda key: session.guide_requested.emit(place_of_setting(key)))
        draft.changed.connect(self._on_changed)
        self._rest_timer.timeout.connect(self._show_problems)
        connect(self.reveal, self.search.chosen, launch.problem_pressed, session.field_requested)
        connect(self._show_plan, session.time_forecast.changed, draft.saved)
        connect(self._show_rewards, session.reward_bench.changed, theme.signals.changed)
        connect(self._show_run_button, queue.changed, session.run_changed, session.run_state_changed)
        # The longest prompt decides about the memory.
        connect(self._rest_timer.start, self.dataset.changed, self.dataset.counts_changed, draft.problems_changed)
        self.picking = Picking(session, form.fields.values(), self)
        self._show_values()
        self._rest_timer.start(0)  # validating all settings can wait until the page is built

    def _build_cards(self) -> list[QWidget]:
        form, tabs = self.form, list[QWidget]()
        for section, settings in sections().items():
            if section == "preference":
                text = (label("Not applicable to GRPO.", role="muted"), 1)
                margins = (2 * theme.SPACE, 0, 2 * theme.SPACE, 0)
                form.column.addWidget(holder(row(label("QAT", theme.heading_font()), text, margins=margins)))
            listed = [setting for setting in settings if setting.key not in (*REWARD_FIELDS, *machines.FIELDS)]
            # The reward table stands between the documented settings of its section and ours.
            first = documented_part(section, listed) if section == "generation" else listed
            others = [setting for setting in listed if setting not in first]
            settings_card = SettingsCard(section, SECTIONS[section], first, others, BASIC_FIELDS, form.page)
            form.add_card(settings_card)
            middle: list[QWidget] = []
            if section == "generation":
                below = FieldGrid((SETTINGS[key] for key in REWARD_FIELDS), settings_card)
                settings_card.middle.addWidget(self.rewards)
                settings_card.middle.addWidget(below)
                form.adopt(below.fields)
                middle = [*self.rewards.tab_stops, *(stop for field in below.fields for stop in field.tab_stops)]
            tabs += settings_card.tab_order(middle)
            if section == "training":
                self.machines = MachinesPart(self.session, form.page)
                form.add_card(self.machines.card)
                tabs += self.machines.card.tab_order(self.machines.tab_stops)
        return tabs

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        is_narrow = self.width() < theme.scaled(ROOMY)
        self.launch.setFixedWidth(theme.scaled(launch_column.NARROW_WIDTH if is_narrow else launch_column.WIDTH))

    def _on_changed(self, key: str) -> None:
        if not key:  # all settings may have changed
            self._show_values()
            self._show_problems()
            return
        if key in self.form.fields:
            self.form.fields[key].show_value(self.draft.value(key))
        if key in (*REWARD_FIELDS, "model", "data"):
            self._show_rewards()
        self._show_applying()
        is_changed = key in SETTINGS and not is_equivalent(self.draft.value(key), SETTINGS[key].default)
        self.form.show_changed({key} if is_changed else set(), afresh=False)
        self._show_plan()
        self._rest_timer.start(SETTLE_MS)

    def _show_values(self) -> None:
        self.form.show_values(self.draft.values())
        self.translated_file.show_words()
        self._show_applying()
        value = self.draft.value
        changed = {key for key, setting in SETTINGS.items() if not is_equivalent(value(key), setting.default)}
        self.form.show_changed(changed, afresh=True)
        self._show_rewards()
        self._show_plan()

    def _show_applying(self) -> None:
        valid_values = self.draft.valid_values()
        self.form.show_only({key for key, setting in SETTINGS.items() if setting.applies(valid_values)})

    def _show_rewards(self) -> None:
        value = self.draft.value
        self.rewards.show_rewards(self.draft.rewards(), value("reward_functions"), value("reward_weights"))
        self.rewards.table.show_means(self.session.reward_bench.means_of_form)

    def _show_plan(self) -> None:
        seconds = self.session.time_forecast.seconds_per_completion(self.draft.valid_values())
        holds_out = self.dataset.state != "ready" or "valid" in self.dataset.splits
        self.launch.show_plan(self.draft.summary(seconds, self._memory), self.draft.details(holds_out=holds_out))
        self.launch.show_command(self.draft.command_text(), self.draft.short_command())
        self._show_run_button()

    def _show_run_button(self) -> None:
        training, edited = self.session.is_training, self.session.queue.edited
        self.banner.setVisible(self.draft.is_demo and not training)
        self.launch.run.setText("Save to queue" if edited is not None else "Add to queue" if training else "Run")
        set_style_property(self.launch.run, "role", "" if self.draft.is_demo else "primary")
        self.launch.edited.setVisible(edited is not None)
        self.launch.edited_name.setText(f"The settings of {edited.name}, which waits in the queue" if edited else "")

    def _show_problems(self) -> None:
        self._rest_timer.stop()
        problems = self.draft.problems()
        of_names = (problem.sentence for problem in problems if problem.setting == "reward_functions")
        show_text(self.rewards.problem, next(of_names, ""))
        warnings = []
        with suppress(UserError):  # found only while parsing; the problems say it
            warnings = unusual(self.draft.config()) if not problems else []
        # The reward table shows problems with the names, so the field below it need not.
        self.form.show_problems((each for each in problems if each.setting != "reward_functions"), warnings)
        self.launch.show_problems(problems, warnings)
        set_shown(self.dataset_line, all(each.setting != "data" for each in problems))
        memory_parts = self.session.starter.memory_parts()
        self._memory = amount(memory_parts.total) if memory_parts is not None else ""
        self.launch.memory.show_memory(memory_parts)
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

    def _show_all_settings(self) -> None:
        cards, is_open = (*SECTIONS, machines.KEY), self.all_settings.isChecked()
        self.form.open_cards(cards if is_open else ())
        for key in cards:
            self.session.prefs.set_card_open(key, is_open)

    def show_next_group(self) -> None:
        self.form.focus_group(1)

    def show_previous_group(self) -> None:
        self.form.focus_group(-1)

    def reveal(self, key: str) -> None:
        if key == "reward_functions":
            self.form.scroll_to(self.rewards)
            self.rewards.table.setFocus(Qt.FocusReason.ShortcutFocusReason)
            return
        if self.form.reveal(key) or key not in SETTINGS:
            return
        setting = SETTINGS[key]
        if setting.when is not None:
            decides = SETTINGS[setting.when[0]]
            self.form.reveal(decides.key)
            self.session.message.emit(f"{setting.label} applies only with another choice of {decides.label}.")


class DefaultDatasetOffer(LinkButton):
    """A link below an empty Dataset field that chooses the dataset of MLX LoRA Studio's guide and shows its size."""

    def __init__(self, session: Session, field: PathField) -> None:
        text = f"Use {first_choices.DATASET}: {first_choices.DATASET_ABOUT}"
        super().__init__(text, field, on_click=self._take)
        self._session, self._field = session, field
        session.draft.changed.connect(self._on_changed)
        self._on_changed("")

    def _take(self) -> None:
        self._session.use_data(first_choices.DATASET)
        if not is_dataset_cached(first_choices.DATASET):
            self._session.service.ask(
                "hub_files",
                lambda answer: self._show_note(size_text(answer["total"])),
                on_refused=lambda _faults: self._show_note("it"),
                owner=self._field,
                id=first_choices.DATASET,
                repo_type="dataset",
            )

    def _show_note(self, size: str) -> None:
        if self._session.draft.value("data") == first_choices.DATASET:
            self._field.show_note(f"Not on this machine: {size} will be downloaded when the run starts.")

    def _on_changed(self, key: str) -> None:
        if key in ("", "data"):
            data = self._session.draft.value("data")
            self.setVisible(not str(data or "").strip())
            if data != first_choices.DATASET:
                self._field.show_note("")


class DatasetLine(LinkButton):
    """The dataset's summary in one line below the Dataset field: rows, mapped columns, prompts that are too long."""

    def __init__(self, dataset: Dataset, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._dataset = dataset
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)
        self._delay = QTimer(self, singleShot=True, interval=WAIT_MS)
        self._delay.timeout.connect(lambda: dataset.watch(self, count_all=False))
        connect(self.refresh, dataset.changed, dataset.counts_changed, theme.signals.changed)
        self.refresh()

    def refresh(self) -> None:
        summary, self._is_wrong = self._dataset.summary_line()
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

    def sizeHint(self) -> QSize:
        return QSize(120, self.fontMetrics().lineSpacing() + 4)

    minimumSizeHint = sizeHint

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, colours = QPainter(self), theme.palette()
        is_active = self.underMouse() or self.hasFocus()
        font = theme.caption_font()
        font.setUnderline(is_active)
        painter.setFont(font)
        painter.setPen(colours.warning if self._is_wrong else colours.accent if is_active else colours.muted)
        text = painter.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, self.width())
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, text)


class TranslatedFileBanner(QFrame):
    """Tells which settings of another program's file were converted, which were ignored and why, and whose defaults
    the others have."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft, self._closed = draft, None
        self.setProperty("role", "banner")
        self.sentence, self.translated = label(wrap=True, selectable=True), label(wrap=True, selectable=True)
        show_name = "Show how each setting of the file was converted"
        self.defaults_button = LinkButton("", on_click=self._change_defaults)
        self.show_button = LinkButton("Show them", on_click=self._toggle_list, name=show_name)
        self.close_button = LinkButton("Close", on_click=self._close, name="Close the note on the settings of the file")
        top = Qt.AlignmentFlag.AlignTop
        texts = column(self.sentence, self.translated, spacing=6)
        margins = (2 * theme.SPACE, theme.SPACE, 2 * theme.SPACE, theme.SPACE)
        links = ((link, 0, top) for link in (self.defaults_button, self.show_button, self.close_button))
        row((texts, 1), *links, into=self, spacing=2 * theme.SPACE, margins=margins)
        self.hide()

    def show_words(self) -> None:
        """Describe the settings of the draft's file; none hide the banner."""
        file, translation = self._draft.path, self._draft.translation
        if translation is None or translation is self._closed:
            self.hide()
            return
        program = translation.program.name if translation.program else ""
        by_reason: dict[str, list[str]] = {}
        for word in translation.words:
            if word.fate == "without effect":
                by_reason.setdefault(word.sentence, []).append(word.word)
        ignored = [f"{', '.join(named)} ({why})" for why, named in by_reason.items()]
        listed = [f"{word.word} → {word.sentence}" for word in translation.words if word.fate == "translated"]
        count, name = sum(map(len, by_reason.values())), file.name if file is not None else "The file"
        sentences = [f"{name} is a file for {program}."] if program else []
        if converted := sum(word.fate == "translated" and word.word in translation.file for word in translation.words):
            sentences.append(f"{counted(converted, 'setting')} converted.")
        if count > FEW:
            sentences.append(f"{count} ignored.")
            listed += ["", "Ignored:", *ignored]
        elif count:
            sentences.append(f"Ignored{'' if program else f' in {name}'}: {'; '.join(ignored)}.")
        if translation.defaults:
            sentences.append(f"{counted(len(translation.defaults), 'setting')} left out: {program}'s defaults.")
            listed += ["", f"{program}'s defaults:", translation.listed_defaults()]
        elif program:
            sentences.append("Settings that it leaves out have GRPO Studio's defaults.")
        self.defaults_button.setText(f"Use {'GRPO Studio' if translation.defaults else program}'s defaults")
        self.defaults_button.setVisible(bool(program))
        self.sentence.setText(" ".join(sentences))
        self.translated.setText("\n".join(listed))
        self.translated.show()
        self._toggle_list()
        self.show_button.setVisible(bool(listed))
        self.setVisible(bool(program) or any(word.fate != "as here" for word in translation.words))

    def _change_defaults(self) -> None:
        translation = self._draft.translation
        self._draft.use_defaults("ours" if translation is not None and translation.defaults else "theirs")

    def _close(self) -> None:
        self._closed = self._draft.translation
        self.hide()

    def _toggle_list(self) -> None:
        is_shown = self.translated.isHidden()
        self.translated.setVisible(is_shown)
        self.show_button.setText("Hide them" if is_shown else "Show them")
