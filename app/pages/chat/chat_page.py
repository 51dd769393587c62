"""The Chat page: base and tuned model side by side, on one's own prompts or those of the dataset."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QCheckBox, QFrame, QLineEdit, QToolButton, QWidget

from app import theme
from app.pages.chat.answer_view import SUFFIXES, PromptBox, PromptPictures, Transcript, picture_files
from app.state.chat import ChatChoice, ChatWithModel, Endpoint, memory_sentence, model_choice, run_choice, sampling_of
from app.state.run_files import live_run
from app.state.session import Session
from app.widgets.basic.controls import (
    CheckBox,
    ComboBox,
    CopyLink,
    Dot,
    ElidedLabel,
    LinkButton,
    NumberEdit,
    ProseEdit,
    Segments,
)
from app.widgets.basic.dialogs import open_file, open_folder
from app.widgets.basic.labels import EmptyState, button, label, plain_tip, show_text, with_key_names
from app.widgets.basic.layout import column, configure, connect, grid, holder, row, set_shown, set_style_property, stack
from app.widgets.basic.number_format import figure
from app.widgets.form.value_text import number_text
from app.widgets.run_header import Choice, Switcher, run_choices
from backend.runs.run_folder import RunFolder
from backend.runs.run_names import name_of
from backend.utils.files import is_file

CHECK_MS = 2000
LEFT_MS = 120_000
WIDE = 980
BROWSE = "browse"


class ChatPage(QWidget):
    enabled_actions_changed = Signal(dict)  # dict

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.chat = ChatWithModel(session.consent, session.prefs.folder / "chats", self)
        self.endpoint = Endpoint(self)
        self._choice: ChatChoice | None = None
        self._models: dict[str, str] = {}
        self._live: RunFolder | None = None
        self._asked_for_models = False
        self._sends_when_loaded = False
        self._followed: RunFolder | None = None
        self._check_timer = configure(QTimer(self, interval=CHECK_MS), timeout=self._check_live_run)
        self._left_timer = configure(QTimer(self, interval=LEFT_MS, singleShot=True), timeout=self.chat.unload)
        self.choices: list[Choice] = []
        self.models = Switcher("Run or model", lambda: self.choices, chosen=self._on_model)
        self.checkpoints = ComboBox(name="Checkpoint", length=12)
        self.load_button = button("Load", lambda: self.chat.unload() if self._is_chosen_loaded else self.load())
        tip = "Forget what was asked of this run or model (Ctrl+Alt+C)"
        self.reset_button = button("Clear", self.new_conversation, tip=tip)
        tip, focus = "Temperature, seed, system message, …", Qt.FocusPolicy.StrongFocus
        self.settings = configure(QToolButton(), text="Settings", checkable=True, focusPolicy=focus, tip=tip)
        tip = with_key_names("Let other programs use this model by OpenAI's API (Ctrl+Alt+V)")
        self.serve_button = configure(QToolButton(), text="Serve", checkable=True, focusPolicy=focus, tip=tip)
        title, buttons = label("Chat", theme.title_font()), (self.reset_button, self.serve_button, self.settings)
        head = row(title, self.models, self.checkpoints, self.load_button, None, *buttons)
        self.about = ElidedLabel()
        self.notice, self.transcript = EmptyState(), Transcript()
        self.panel, self.rows = SamplingPanel(), RowStrip(self.chat)
        self.serving = configure(ServePanel(self.endpoint, session.prefs.endpoint_port), started=self.serve)
        self.sides = Segments({"base": "Base", "both": "Both", "tuned": "Tuned"}, "Answers by")
        self.sides.choose("both")
        self.prompt = self.first_focus = PromptBox()
        tip = "Off: each prompt is asked alone. On: it is asked after those before it"
        self.continues = CheckBox("Continue the conversation", tip=tip)
        tip = "Answers call the run's tools; an environment begins anew with each prompt"
        self.use_tools = CheckBox("Use its tools", tip=tip, checked=True)
        self.pictures = PromptPictures()
        self.add_pictures = LinkButton("Add picture…", on_click=self._choose_picture)
        self.setAcceptDrops(True)
        self.send_button = button(
            "Send", lambda: self.chat.stop() if self.chat.state == "answering" else self.send(), primary=True
        )
        body = QWidget()
        self._body = stack(self.notice, self.transcript, into=body)
        beside = column(self.continues, self.use_tools, row(self.sides, (self.send_button, 1)), None, spacing=6)
        asking = row((column(self.pictures, self.prompt, row(self.add_pictures, None), spacing=0), 1), beside)
        self._below = holder(column(self.rows, asking, spacing=6))
        middle = row((column((body, 1), self._below, spacing=12), 1), self.panel, spacing=12)
        column(head, self.serving, self.about, (middle, 1), into=self, margins=theme.GUTTER)

        chat, lines = self.chat, (*self.panel.fields.values(), self.panel.system)
        configure(chat, turns_changed=self._show_turns, answer_changed=self._show_answer, row_changed=self._show_row)
        configure(chat, message=session.message)
        self.endpoint.changed.connect(
            lambda: self.serve_button.setText("Serve" if self.endpoint.state == "off" else "Serving")
        )

        def on_notice() -> None:
            if chat.state == "loading":
                chat.unload()
            elif self._choice is None:
                session.page_requested.emit("train")
            else:
                self.load()

        self.notice.button_clicked.connect(on_notice)
        configure(self.prompt, sent=self.send, stopped=chat.stop, pictures_given=self.give_pictures)
        session.chat_requested.connect(self.choose_run)
        chat.state_changed.connect(self._on_state)
        connect(self._show, self.checkpoints.activated, self.settings.toggled, self.serve_button.toggled)
        connect(self._show_enabled, self.prompt.textChanged, *(line.textChanged for line in lines))
        connect(self._check_live_run, session.run_state_changed, session.run_changed)
        self._list_models()
        self._check_live_run()

    def showEvent(self, event: QShowEvent) -> None:
        self._left_timer.stop()
        self._check_timer.start()
        run = self.session.run
        if run is not None and run.folder != self._followed and self.chat.state != "answering":
            self._followed, self._choice = run.folder, None  # another run was opened: this page shows it too
        self._list_models()
        self._check_live_run()
        if not self._asked_for_models:

            def list_found(answer: dict[str, Any]) -> None:
                self._models = {item["id"]: item["name"] for item in answer["found"] if not item["refusal"]}
                self._list_models()

            self._asked_for_models = True
            self.session.service.ask("models", list_found, owner=self, paths=[])

    def hideEvent(self, event: QHideEvent) -> None:
        if self.chat.state != "empty":
            self._left_timer.start()
        else:
            self._check_timer.stop()

    def resizeEvent(self, event: QResizeEvent) -> None:
        is_wide, was_wide = (width >= theme.scaled(WIDE) for width in (self.width(), event.oldSize().width()))
        if is_wide != was_wide or event.oldSize().width() < 0:  # on a change only: the user may have chosen otherwise
            self.settings.setChecked(is_wide)

    def _list_models(self) -> None:
        runs = run_choices(trained=True)
        values = [*(run.value for run in runs), *self._models]
        if self._choice is not None and self._choice.name not in values:
            self._models = {self._choice.name: self._choice.label, **self._models}
        shown = str(self.session.run.folder.path) if self.session.run is not None else ""
        usual = shown if shown in values else next(iter(values), "")
        chosen = self._choice.name if self._choice is not None else usual
        self.choices = [*runs, *(Choice(value, text, "model") for value, text in self._models.items())]
        self.choices.append(Choice(BROWSE, "Another model…"))
        text = next((choice.text for choice in self.choices if choice.value == chosen), "Choose a model")
        self.models.show_choice(chosen, text)
        if chosen:
            self.choose(chosen)

    def choose(self, name: str) -> None:
        is_run, is_other = is_file(Path(name) / "config.yaml"), self._choice is None or self._choice.name != name
        choice = self._choice = run_choice(RunFolder(Path(name))) if is_run else model_choice(name)
        saved = {weights.key: weights.label for weights in choice.checkpoints}
        self.checkpoints.fill(saved, self.checkpoint)
        self.checkpoints.setVisible(bool(saved))
        if is_other:
            self.panel.show_defaults(sampling_of(choice), choice.settings.get("system_prompt") or "")
            self.pictures.fill(self.pictures.paths if choice.reads_images else [])
            self.transcript.clear()
        self.chat.choose(choice)
        if is_other:
            self.rows.show_row()
        self._show()

    def choose_run(self, run: RunFolder) -> None:
        self.choose(str(run.path))
        self._list_models()
        if not self._is_chosen_loaded and self.load_button.isEnabled():
            self.load()

    def _on_model(self, name: str) -> None:
        if name == BROWSE:
            folder = open_folder(self, "model", "A model's folder")
            name = str(folder) if folder is not None else ""
        if name:
            self.choose(name)
            self._list_models()
        self.prompt.setFocus()

    def load(self) -> None:
        if self._choice is None or self._choice.problem or self._live is not None:
            return
        self.prompt.setFocus()
        self.chat.load(self._choice, self.checkpoint)
        self.rows.show_row()

    def serve(self, port: int) -> None:
        if self._choice is not None:
            self.session.prefs.endpoint_port = port
            self.endpoint.start(self._choice, self.checkpoint, port)

    def _on_state(self) -> None:
        waits, self._sends_when_loaded = self._sends_when_loaded, self._sends_when_loaded and not self.chat.is_loaded
        if self.chat.state == "failed":
            self._sends_when_loaded = False
        self._show()
        if waits and self.chat.state == "ready":
            self.send()

    @property
    def checkpoint(self) -> str:
        return self.checkpoints.currentData() or ""

    @property
    def _is_chosen_loaded(self) -> bool:
        loaded, choice = self.chat.choice if self.chat.is_loaded else None, self._choice
        is_same = loaded is not None and choice is not None and loaded.name == choice.name
        return is_same and self.chat.checkpoint == self.checkpoint

    def _check_live_run(self) -> None:
        self._live = live_run()
        if self._live is not None and self.chat.state != "empty":
            self.chat.unload()
            self.session.message.emit(f"The chat's model was unloaded: {name_of(self._live)} is training.")
        self._show()

    def _show(self) -> None:
        chat, checkpoint, choice = self.chat, self.checkpoint, self._choice
        words = notice_words(chat, choice, checkpoint, self._live)
        self._body.setCurrentWidget(self.transcript if chat.turns else self.notice)
        self.notice.show_notice(*words, busy=chat.state == "loading")
        # The notice is covered by the turns: what keeps a prompt from its answer is told above them.
        is_told = bool(chat.turns) and (self._live is not None or chat.state in ("loading", "failed"))
        sides = "Base and tuned are" if len(chat.sides) > 1 else "It is"
        loaded = " ".join([f"{sides} loaded, {figure(chat.bytes / 1e9, 'GB')} of weights.", *chat.notes])
        self.about.setText(f"{words[0]}. {words[1]}" if is_told else loaded if chat.is_loaded else "")
        can_serve = choice is not None and not choice.problem
        can_ask = can_serve and self._live is None
        self.sides.setVisible(len(chat.sides) > 1)
        set_shown(self.use_tools, chat.has_tools)
        set_shown(self.add_pictures, choice is not None and choice.reads_images)
        # A model that is not a run has no rows, and they are read with the model.
        configure(self.rows.buttons, visible=choice is not None and choice.is_run, enabled=chat.is_loaded)
        set_shown(self._below, can_ask)
        set_shown(self.panel, can_ask and self.settings.isChecked())
        self.settings.setEnabled(can_ask)
        set_shown(self.serving, self.serve_button.isChecked())
        if self.serve_button.isChecked():
            needs = memory_sentence(choice, checkpoint) if choice is not None else ""
            self.serving.offer(f"An OpenAI-compatible API on this machine. {needs}", can_start=can_serve)
        self._show_enabled()

    def _show_enabled(self) -> None:
        chat, choice = self.chat, self._choice
        can_load = choice is not None and not choice.problem and self._live is None and chat.state != "loading"
        loaded = self._is_chosen_loaded  # then the button unloads it
        tip = with_key_names(f"{'Free its memory' if loaded else 'Load it now; a prompt does so too'} (Ctrl+Alt+L)")
        configure(self.load_button, text="Unload" if loaded else "Load", tip=tip, enabled=loaded or can_load)
        self.reset_button.setEnabled(bool(chat.turns))
        if chat.state == "answering":
            configure(self.send_button, text="Stop", tip="Escape", enabled=True)
        else:
            configure(self.send_button, text="Send", tip="Enter", enabled=self._can_send())
        self.enabled_actions_changed.emit(self.enabled_actions())

    def _can_send(self) -> bool:
        can_ask = self._choice is not None and not self._choice.problem and self._live is None
        is_free = self.chat.state != "answering" and not self._sends_when_loaded
        return can_ask and is_free and not self.panel.problem.text() and bool(self.prompt.toPlainText().strip())

    def enabled_actions(self) -> dict[str, bool]:
        chat = self.chat
        has_rows = chat.is_loaded and chat.choice is not None and chat.choice.is_run
        return {
            "load_chat": self.load_button.isEnabled(),
            "new_conversation": self.reset_button.isEnabled(),
            "stop_answer": chat.state == "answering",
            **dict.fromkeys(("previous_prompt", "next_prompt", "random_prompt"), has_rows),
        }

    def _show_turns(self) -> None:
        turns, transcript = self.chat.turns, self.transcript
        if len(turns) < len(transcript.answers):
            transcript.clear()
        for index in range(len(transcript.answers), len(turns)):
            transcript.add_turn(turns[index])
            for side in turns[index].answers:
                self._show_answer(index, side)
        self._show()

    def _show_answer(self, index: int, side: str) -> None:
        if index < len(self.transcript.answers):
            self.transcript.answers[index][side].show_answer(self.chat.turns[index].answers[side])

    def _show_row(self) -> None:
        if (chosen := self.chat.row) is not None:
            self.rows.show_row()
            self.prompt.setPlainText(chosen.prompt)
            self.pictures.fill(chosen.images)
            self.prompt.setFocus()

    def send(self) -> None:
        if not self._can_send():
            return
        if not self._is_chosen_loaded:
            self._sends_when_loaded = True
            if self.chat.state == "loading":
                self._show_enabled()
            else:
                self.load()
            return
        prompt, sides = self.prompt.toPlainText().strip(), self.sides.key
        chosen = self.chat.sides if sides == "both" or sides not in self.chat.sides else [sides]
        self.chat.send(
            prompt,
            chosen,
            self.panel.values() | {"tools": self.use_tools.isChecked()},
            images=self.pictures.paths,
            expected=self.rows.expected.text().strip(),
            system=self.panel.system_message(),
            continues=self.continues.isChecked(),
        )
        self.prompt.clear()
        self.pictures.fill([])
        self.rows.expected.clear()

    def _choose_picture(self) -> None:
        types = f"Pictures ({' '.join(f'*{suffix}' for suffix in SUFFIXES)})"
        if (file := open_file(self, "image", "Add a picture to the prompt", types)) is not None:
            self.give_pictures([str(file)])

    def give_pictures(self, files: list[str]) -> None:
        if self._choice is None:
            return
        if self._choice.reads_images:
            self.pictures.fill([*self.pictures.paths, *files])
            self.prompt.setFocus()
        else:
            self.session.message.emit(f"{self._choice.label} reads text only, so it cannot be shown a picture.")

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if picture_files(event.mimeData()):
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:
        event.acceptProposedAction()
        self.give_pictures(picture_files(event.mimeData()))

    def new_conversation(self) -> None:
        self.chat.reset()
        self.prompt.setFocus()


def notice_words(
    chat: ChatWithModel, choice: ChatChoice | None, checkpoint: str, live: RunFolder | None
) -> tuple[str, str, str]:
    """(title, sentence, button) in place of a conversation; `live` is a run that is training."""
    if live is not None:
        needs = f"{name_of(live)} needs this machine's memory. The chat is back when it has ended."
        return "A run is training", needs, ""
    if chat.state == "loading" and chat.choice is not None:
        return f"Loading {chat.choice.label}", "Reading its weights into memory.", "Cancel"
    if chat.state == "failed":
        return "That did not work", chat.problem, "Try again"
    if chat.is_loaded:
        has_rows = chat.choice is not None and chat.choice.is_run
        return "Ask it something", f"Type a prompt below{', or take one of the dataset' if has_rows else ''}.", ""
    if choice is None:
        return "Nothing to talk to yet", "Train a run, and ask it and its base the same things here.", "Go to Train"
    if choice.problem:
        return choice.label, choice.problem, ""
    sides = "Base and tuned answer side by side, with the same random numbers. " if choice.is_run else ""
    return choice.label, f"{sides}It loads when you send a prompt. {memory_sentence(choice, checkpoint)}", ""


class ServePanel(QFrame):
    started = Signal(int)  # port

    def __init__(self, endpoint: Endpoint, port: int) -> None:
        super().__init__()
        self.setProperty("role", "card")
        self._endpoint, self._can_start = endpoint, False
        self._dot, self.status = Dot("placeholder"), ElidedLabel(colour="text")
        self.port = NumberEdit(text=str(port), width=72, integers=(1, 65535), name="Port", textChanged=self._show)
        self.port.returnPressed.connect(self._press)
        self.start = button("", self._press)
        self.url, self.copy = label(font=theme.mono_font(), selectable=True), CopyLink("Copy the address")
        self.models = label(role="muted", wrap=True, selectable=True)
        self._address = holder(row(self.url, self.copy, theme.SPACE, (self.models, 1)))
        self.problem = label(role="problem", wrap=True, selectable=True)
        self._port_name = label("Port", role="muted", buddy=self.port)
        head = row(self._dot, (self.status, 1), self._port_name, self.port, self.start)
        below = column(self._address, self.problem, spacing=6, margins=(self._dot.width() + theme.SPACE, 0, 0, 0))
        column(head, below, into=self, spacing=6, margins=(12, theme.SPACE, 12, theme.SPACE))
        endpoint.changed.connect(self._show)
        self.offer("", can_start=False)

    def offer(self, sentence: str, *, can_start: bool) -> None:
        self._sentence, self._can_start = sentence, can_start
        self._show()

    def _press(self) -> None:
        if self._endpoint.state in ("starting", "serving"):
            self._endpoint.stop()
        elif self.start.isEnabled():
            self.started.emit(int(self.port.text()))

    def _show(self) -> None:
        endpoint, state = self._endpoint, self._endpoint.state
        role, text = {
            "off": ("placeholder", self._sentence),
            "starting": ("warning", f"Loading {endpoint.title}…"),
            "serving": ("good", f"Serving {endpoint.title}"),
            "stopping": ("warning", "Stopping…"),
        }[state]
        self._dot.show_colour(role)
        configure(self.status, text=text, toolTip=plain_tip(text))
        self.url.setText(endpoint.url)
        self.copy.content = endpoint.url
        key = "; the key is that of GRPO_STUDIO_KEY" if endpoint.needs_key else ""
        self.models.setText(f"{'Models' if len(endpoint.models) > 1 else 'Model'}: {', '.join(endpoint.models)}{key}")
        set_shown(self._address, state == "serving")
        show_text(self.problem, endpoint.problem)
        for part in (self._port_name, self.port):
            part.setEnabled(state == "off")
        is_ready = self._can_start and self.port.hasAcceptableInput()
        may_press = is_ready if state == "off" else state != "stopping"
        configure(self.start, text="Start" if state == "off" else "Stop", enabled=may_press)


class RowStrip(QWidget):
    def __init__(self, chat: ChatWithModel) -> None:
        super().__init__()
        self._chat = chat
        self.previous = button("Previous", lambda: self._pick(-1), tip="The row before")
        self.next = button("Next", lambda: self._pick(1), tip="The row after")
        # Before the first row the number of rows is unknown; the service takes a large number modulo it.
        self.random = button(
            "Random", lambda: chat.pick_row(random.randrange(chat.row.of if chat.row else 1 << 30)), tip="Any row"
        )
        self.about = ElidedLabel(font=theme.figures_font())
        tip = "Given to the reward functions; without it those that need an answer are skipped."
        self.expected = configure(QLineEdit(placeholderText="unknown"), name="Expected answer", tip=tip, width=150)
        caption = label("Expected answer", role="muted", buddy=self.expected)
        title = label("Prompts of the dataset", role="muted")
        self.buttons = holder(row(title, self.previous, self.next, self.random))
        row(self.buttons, (self.about, 1), caption, self.expected, into=self)

    def _pick(self, by: int) -> None:
        self._chat.pick_row(max(-1, (self._chat.row.row if self._chat.row is not None else -1) + by))

    def show_row(self) -> None:
        chosen = self._chat.row
        text = f"Row {figure(chosen.row + 1)} of {figure(chosen.of)}" if chosen is not None else ""
        configure(self.about, text=text, toolTip=plain_tip(chosen.source if chosen is not None else ""))
        self.expected.setText(chosen.answer if chosen is not None else "")


@dataclass(frozen=True, slots=True)
class SamplingField:
    key: str
    title: str
    whole: bool
    low: float
    high: float
    tip: str

    def number(self, text: str) -> float | int | None:
        """The number in a text; None if it is not one, or out of range."""
        try:
            number = int(text) if self.whole else float(text.replace(",", "."))
        except ValueError:
            return None
        is_inside = self.low <= number <= self.high and not (self.key == "top_p" and number == 0)
        return number if is_inside else None


FIELDS = (
    SamplingField("temperature", "Temperature", False, 0, 100, "0 always takes the likeliest token."),
    SamplingField("top_p", "Top-p", False, 0, 1, "Keeps the likeliest tokens that make up this share; 1 keeps all."),
    SamplingField("top_k", "Top-k", True, 0, 1e6, "Keeps that many of the likeliest tokens; 0 keeps all."),
    SamplingField("min_p", "Min-p", False, 0, 1, "Drops tokens below this share of the likeliest; 0 keeps all."),
    SamplingField("max_tokens", "Max tokens", True, 1, 1e6, "A longer answer is cut off."),
    SamplingField("seed", "Seed", True, 0, 2**63 - 1, "The same seed gives the same answers; both sides share it."),
)


class SamplingPanel(QFrame):
    def __init__(self) -> None:
        super().__init__()
        configure(self, role="card", fixedWidth=theme.scaled(200))
        self.fields: dict[str, NumberEdit] = {}
        self._defaults: dict[str, Any] = {}
        self._system_default = ""
        self.system = ProseEdit(6, accessibleName="System message", placeholderText="None", textChanged=self._check)
        tip = "Ignores the run's regular expression or JSON schema."
        self.free_output = configure(QCheckBox("Free output"), toolTip=tip, toggled=self._check)
        self.restore = LinkButton("Reset", on_click=lambda: self.show_defaults(self._defaults, self._system_default))
        self.problem = label(role="problem", wrap=True)
        numbers = []
        for entry in FIELDS:
            line = NumberEdit(name=entry.title, width=76, toolTip=entry.tip, textChanged=self._check)
            self.fields[entry.key] = line
            numbers.append((label(entry.title, role="muted", buddy=line, toolTip=entry.tip), line))
        heading, lines = theme.heading_font(), grid(numbers, stretch=0, spacing=(theme.SPACE, 6))
        sampling = (label("Sampling", heading), lines, self.free_output, self.problem)
        system = (label("System message", heading), self.system, self.restore)
        column(*sampling, theme.SPACE, *system, None, into=self, margins=(12, 10, 12, 12))
        self._check()

    def show_defaults(self, values: Mapping[str, Any], system: str) -> None:
        self._defaults, self._system_default = dict(values), system
        for key, line in self.fields.items():
            line.setText(number_text(values.get(key)))
        self.free_output.setChecked(bool(values.get("free_output")))
        set_shown(self.free_output, values.get("free_output") is not None)
        self.system.setPlainText(system)

    def values(self) -> dict[str, Any]:
        numbers = {entry.key: entry.number(self.fields[entry.key].text()) for entry in FIELDS}
        return {**numbers, "free_output": self.free_output.isChecked()}

    def system_message(self) -> str | None:
        """The text that replaces the run's system message; None where it is unchanged."""
        text = self.system.toPlainText()
        return None if text == self._system_default else text

    def _check(self) -> None:
        wrong = [entry for entry in FIELDS if entry.number(self.fields[entry.key].text()) is None and self._defaults]
        for entry in FIELDS:
            set_style_property(self.fields[entry.key], "problem", entry in wrong)
        sentences = (
            f"{each.title} is {'a whole number' if each.whole else 'a number'} from {each.low:g} to {each.high:,.9g}."
            for each in wrong
        )
        show_text(self.problem, next(sentences, ""))
        is_changed = any(line.text() != number_text(self._defaults.get(key)) for key, line in self.fields.items())
        is_free = bool(self._defaults.get("free_output")) != self.free_output.isChecked()
        self.restore.setEnabled(is_changed or is_free or self.system_message() is not None)
