"""The Chat page: base and tuned model side by side, on one's own prompts or those of the dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PySide6.QtCore import QTimer, Signal
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QWidget

from app import theme
from app.pages.chat.answer_view import PromptBox, Transcript
from app.pages.chat.chat_controls import BROWSE, ModelBar, RowStrip, SamplingPanel, ServePanel
from app.pages.chat.pictures import SUFFIXES, PromptPictures, picture_files
from app.state import chat as chat_state
from app.state.chat import ChatChoice, ChatWithModel, Endpoint, memory_sentence, model_choice, run_choice, sampling_of
from app.state.session import Session
from app.widgets.basic.controls import CheckBox, ElidedLabel, LinkButton, Segments
from app.widgets.basic.dialogs import open_file, open_folder
from app.widgets.basic.labels import EmptyState, button
from app.widgets.basic.layout import column, configure, connect, holder, row, set_shown, stack
from app.widgets.basic.number_format import figure
from app.widgets.run_switcher import run_choices
from backend.runs.run_folder import RunFolder
from backend.utils.files import is_file

CHECK_MS = 2000
LEFT_MS = 120_000
WIDE = 980
TURNS_AT_ONCE = 4
"""Turns of a kept conversation that are laid out in one turn of the event loop."""


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
        self.bar, self.about = ModelBar(), ElidedLabel()
        self.notice, self.transcript = EmptyState(), Transcript()
        self.panel, self.rows = SamplingPanel(), RowStrip()
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
        sending = row(self.sides, (self.send_button, 1))
        beside = column(self.continues, self.use_tools, sending, None, spacing=6)
        asking = row((column(self.pictures, self.prompt, row(self.add_pictures, None), spacing=0), 1), beside)
        self._below = holder(column(self.rows, asking, spacing=6))
        middle = row((column((body, 1), self._below, spacing=12), 1), self.panel, spacing=12)
        column(self.bar, self.serving, self.about, (middle, 1), into=self, margins=theme.GUTTER)

        chat, bar, lines = self.chat, self.bar, (*self.panel.fields.values(), self.panel.system)
        chat.turns_changed.connect(self._show_turns)
        chat.answer_changed.connect(self._show_answer)
        chat.row_changed.connect(self._show_row)
        chat.message.connect(session.message)
        bar.models.chosen.connect(self._on_model)
        bar.load.clicked.connect(lambda: chat.unload() if self._is_chosen_loaded else self.load())
        bar.reset.clicked.connect(self.new_conversation)
        self.endpoint.changed.connect(lambda: bar.serve.setText("Serve" if self.endpoint.state == "off" else "Serving"))
        self.notice.button_clicked.connect(self._on_notice)
        self.transcript.keep_requested.connect(chat.keep_case)
        self.rows.row_requested.connect(chat.pick_row)
        self.prompt.sent.connect(self.send)
        self.prompt.stopped.connect(chat.stop)
        self.prompt.pictures_given.connect(self.give_pictures)
        session.chat_requested.connect(self.choose_run)
        chat.state_changed.connect(self._on_state)
        connect(self._show, bar.checkpoints.activated, bar.settings.toggled, bar.serve.toggled)
        connect(self._show_enabled, self.prompt.textChanged, *(line.textChanged for line in lines))
        connect(self._check_live_run, session.run_state_changed, session.run_changed)
        self._list_models()
        self._check_live_run()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
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
        super().hideEvent(event)
        if self.chat.state != "empty":
            self._left_timer.start()
        else:
            self._check_timer.stop()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        is_wide, was_wide = (width >= theme.scaled(WIDE) for width in (self.width(), event.oldSize().width()))
        if is_wide != was_wide or event.oldSize().width() < 0:  # on a change only: the user may have chosen otherwise
            self.bar.settings.setChecked(is_wide)

    def _list_models(self) -> None:
        runs = run_choices(trained=True)
        values = [*(run.value for run in runs), *self._models]
        if self._choice is not None and self._choice.name not in values:
            self._models = {self._choice.name: self._choice.label, **self._models}
        shown = str(self.session.run.folder.path) if self.session.run is not None else ""
        usual = shown if shown in values else next(iter(values), "")
        chosen = self._choice.name if self._choice is not None else usual
        self.bar.show_models(runs, self._models, chosen)
        if chosen:
            self.choose(chosen)

    def choose(self, name: str) -> None:
        """Choose a run (its folder) or a model."""
        is_run, is_other = is_file(Path(name) / "config.yaml"), self._choice is None or self._choice.name != name
        choice = self._choice = run_choice(RunFolder(Path(name))) if is_run else model_choice(name)
        saved = {weights.key: weights.label for weights in choice.checkpoints}
        self.bar.checkpoints.fill(saved, self.bar.checkpoint)
        self.bar.checkpoints.setVisible(bool(saved))
        if is_other:
            self.panel.show_defaults(sampling_of(choice), choice.settings.get("system_prompt") or "")
            self.rows.forget()
            self.pictures.fill(self.pictures.paths if choice.reads_images else [])
            self.transcript.clear()
        self.chat.choose(choice)
        self._show()

    def choose_run(self, run: RunFolder) -> None:
        self.choose(str(run.path))
        self._list_models()
        if not self._is_chosen_loaded and self.bar.load.isEnabled():
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
        self.rows.forget()
        self.prompt.setFocus()
        self.chat.load(self._choice, self.bar.checkpoint)

    def serve(self, port: int) -> None:
        if self._choice is not None:
            self.session.prefs.endpoint_port = port
            self.endpoint.start(self._choice, self.bar.checkpoint, port)

    def _on_state(self) -> None:
        waits, self._sends_when_loaded = self._sends_when_loaded, self._sends_when_loaded and not self.chat.is_loaded
        if self.chat.state == "failed":
            self._sends_when_loaded = False
        self._show()
        if waits and self.chat.state == "ready":
            self.send()

    @property
    def _is_chosen_loaded(self) -> bool:
        loaded, choice = self.chat.choice if self.chat.is_loaded else None, self._choice
        is_same = loaded is not None and choice is not None and loaded.name == choice.name
        return is_same and self.chat.checkpoint == self.bar.checkpoint

    def _check_live_run(self) -> None:
        self._live = chat_state.live_run()
        if self._live is not None and self.chat.state != "empty":
            self.chat.unload()
            self.session.message.emit(f"The chat's model was unloaded: {self._live.name} is training.")
        self._show()

    def _show(self) -> None:
        chat, checkpoint, choice = self.chat, self.bar.checkpoint, self._choice
        words = notice_words(chat, choice, checkpoint, self._live)
        self._body.setCurrentWidget(self.transcript if chat.turns else self.notice)
        self.notice.show_notice(*words, busy=chat.state == "loading")
        # The notice is covered by the turns: what keeps a prompt from its answer is told above them.
        is_told = bool(chat.turns) and (self._live is not None or chat.state in ("loading", "failed"))
        self.about.setText(f"{words[0]}. {words[1]}" if is_told else about_loaded(chat))
        can_serve = choice is not None and not choice.problem
        can_ask = can_serve and self._live is None
        self.sides.setVisible(len(chat.sides) > 1)
        set_shown(self.use_tools, chat.has_tools)
        set_shown(self.add_pictures, choice is not None and choice.reads_images)
        self.rows.offer_rows(has_rows=choice is not None and choice.is_run, loaded=chat.is_loaded)
        set_shown(self._below, can_ask)
        set_shown(self.panel, can_ask and self.bar.settings.isChecked())
        self.bar.settings.setEnabled(can_ask)
        set_shown(self.serving, self.bar.serve.isChecked())
        if self.bar.serve.isChecked():
            needs = memory_sentence(choice, checkpoint) if choice is not None else ""
            self.serving.offer(f"An OpenAI-compatible API on this machine. {needs}", can_start=can_serve)
        self._show_enabled()

    def _on_notice(self) -> None:
        if self.chat.state == "loading":
            self.chat.unload()
        elif self._choice is None:
            self.session.page_requested.emit("train")
        else:
            self.load()

    def _show_enabled(self) -> None:
        chat, choice = self.chat, self._choice
        can_load = choice is not None and not choice.problem and self._live is None and chat.state != "loading"
        can_reset = bool(chat.turns)
        self.bar.show_state(loaded=self._is_chosen_loaded, can_load=can_load, can_reset=can_reset)
        if chat.state == "answering":
            configure(self.send_button, text="Stop", tip="Escape", enabled=True)
        else:
            configure(self.send_button, text="Send", tip="Enter", enabled=self._can_send())
        self.enabled_actions_changed.emit(self.enabled_actions())

    def _can_send(self) -> bool:
        can_ask = self._choice is not None and not self._choice.problem and self._live is None
        is_free = self.chat.state != "answering" and not self._sends_when_loaded
        return can_ask and is_free and self.panel.is_valid and bool(self.prompt.toPlainText().strip())

    def enabled_actions(self) -> dict[str, bool]:
        """Action of the menu → applies now."""
        chat = self.chat
        has_rows = chat.is_loaded and chat.choice is not None and chat.choice.is_run
        return {
            "load_chat": self.bar.load.isEnabled(),
            "new_conversation": self.bar.reset.isEnabled(),
            "stop_answer": chat.state == "answering",
            **dict.fromkeys(("previous_prompt", "next_prompt", "random_prompt"), has_rows),
        }

    def _show_turns(self) -> None:
        turns, transcript = self.chat.turns, self.transcript
        if len(turns) < len(transcript.answers):
            transcript.clear()
        shown = len(transcript.answers)
        for index in range(shown, min(len(turns), shown + TURNS_AT_ONCE)):
            turn = turns[index]
            transcript.add_turn(turn)
            for side in turn.answers:
                self._show_answer(index, side)
        if len(transcript.answers) < len(turns):
            QTimer.singleShot(0, self, self._show_turns)
        self._show()

    def _show_answer(self, index: int, side: str) -> None:
        if index >= len(self.transcript.answers):
            return
        answer = self.chat.turns[index].answers[side]
        view = self.transcript.answers[index][side]
        view.show_answer(answer, self.chat.can_keep(answer))

    def _show_row(self) -> None:
        if (chosen := self.chat.row) is not None:
            self.rows.show_row(chosen.row, chosen.of, chosen.answer, chosen.source)
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
        expected, system = self.rows.expected.text().strip(), self.panel.system_message()
        how = self.panel.values() | {"tools": self.use_tools.isChecked()}
        continues = self.continues.isChecked()
        images = self.pictures.paths
        self.chat.send(prompt, chosen, how, images=images, expected=expected, system=system, continues=continues)
        self.prompt.clear()
        self.pictures.fill([])
        self.rows.expected.clear()

    def _choose_picture(self) -> None:
        types = f"Pictures ({' '.join(f'*{suffix}' for suffix in SUFFIXES)})"
        if (file := open_file(self, "image", "Add a picture to the prompt", types)) is not None:
            self.give_pictures([str(file)])

    def give_pictures(self, files: list[str]) -> None:
        """Add them to the prompt, if the chosen model reads pictures."""
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
        return "A run is training", f"{live.name} needs this machine's memory. The chat is back when it has ended.", ""
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


def about_loaded(chat: ChatWithModel) -> str:
    if not chat.is_loaded:
        return ""
    sides = "Base and tuned are" if len(chat.sides) > 1 else "It is"
    return " ".join([f"{sides} loaded, {figure(chat.bytes / 1e9, 'GB')} of weights.", *chat.notes])
