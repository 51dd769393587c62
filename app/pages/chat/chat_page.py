"""The Chat page: what does it answer now? Base and tuned model side by side, on prompts of one's own or of the dataset.

Composes the choice of a model, the transcript, the prompt and the sampling settings. The conversation, and the process that holds the
model, are `app.state.chat`. While a run trains nothing is loaded: its memory is the run's.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QProgressBar, QStackedLayout, QVBoxLayout, QWidget

from app import theme
from app.pages.chat.answer_view import PromptBox, ShownAnswer, ShownScore, Transcript
from app.pages.chat.chat_controls import ModelBar, SamplingPanel
from app.state import charts
from app.state import chat as chat_choice
from app.state.chat import ChatAnswer, ChatChoice, ChatWithModel, memory_sentence, model_choice, run_choice, sampling_of
from app.state.session import Session
from app.widgets.basic.controls import ElidedLabel, Segments
from app.widgets.basic.dialogs import open_folder
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import set_shown
from app.widgets.basic.number_format import THIN, figure
from app.widgets.completions.completion_model import STOP_LABELS
from backend.runs.run_folder import RunFolder, all_runs

# Prompts of the run's held-out split: the one before, the one after, any; and the answer that is expected.


class RowStrip(QWidget):
    """Attributes:
    expected – the line with the expected answer.

    Signals:
        row_requested(int) – show this row, from 0; −1 is the last.
    """

    row_requested = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._row, self._of = -1, 0
        self.previous = button(
            "Previous", lambda: self.row_requested.emit(max(-1, self._row - 1)), tip="The row before"
        )
        self.next = button("Next", lambda: self.row_requested.emit(self._row + 1), tip="The row after")
        self.random = button("Random", self._request_any, tip="Any row")
        self.about = ElidedLabel()
        self.about.setFont(theme.figures_font())
        self.expected = QLineEdit()
        self.expected.setPlaceholderText("none known")
        self.expected.setAccessibleName("Expected answer")
        self.expected.setToolTip(
            "Given to the reward functions; without it those that compare with an answer are left out."
        )
        self.expected.setFixedWidth(theme.scaled(150))
        caption = label("Expected answer", role="muted")
        caption.setBuddy(self.expected)
        self._rows = QWidget()
        rows = QHBoxLayout(self._rows)
        rows.setContentsMargins(0, 0, 0, 0)
        rows.setSpacing(theme.SPACE)
        for part in (label("Prompts of the dataset", role="muted"), self.previous, self.next, self.random):
            rows.addWidget(part)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(theme.SPACE)
        row.addWidget(self._rows)
        row.addWidget(self.about, 1)
        row.addWidget(caption)
        row.addWidget(self.expected)

    def show_row(self, number: int, of: int, answer: str, source: str) -> None:
        self._row, self._of = number, of
        self.about.setText(f"Row {figure(number + 1)} of {figure(of)}")
        self.about.setToolTip(plain_tip(source))
        self.expected.setText(answer)

    def forget(self, *, has_rows: bool) -> None:
        """Show no row; without `has_rows` there are none to choose from, as with a model that is no run."""
        self._row, self._of = -1, 0
        self.about.setText("")
        self.expected.clear()
        self._rows.setVisible(has_rows)
        self.setEnabled(True)

    def _request_any(self) -> None:
        # Before the first row its number of rows is not known; a large number is taken modulo it.
        self.row_requested.emit(random.randrange(self._of or 1 << 30))


# ── notice ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# What stands in place of a conversation: what is missing or going on, a sentence, and a button for what to do next.

_WIDTH = 520


class Notice(QWidget):
    """Signals:
    button_clicked – the button was pressed.
    """

    button_clicked = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        centre = Qt.AlignmentFlag.AlignCenter
        self.title = label(font=theme.title_font(), align=centre, wrap=True)
        self.sentence = label(role="muted", align=centre, wrap=True, selectable=True)
        self.bar = QProgressBar(textVisible=False, minimum=0, maximum=0)
        self.bar.setFixedWidth(theme.scaled(240))
        self.bar.setAccessibleName("Loading")
        self.button = button("", self.button_clicked.emit, primary=True)
        # A widget of its own and no alignment: an aligned label does not get the height that its wrapped lines need.
        middle = QWidget()
        middle.setFixedWidth(theme.scaled(_WIDTH))
        column = QVBoxLayout(middle)
        column.setSpacing(2 * theme.SPACE)
        column.addStretch(2)
        column.addWidget(self.title)
        column.addWidget(self.sentence)
        for part in (self.bar, self.button):
            column.addWidget(part, 0, Qt.AlignmentFlag.AlignHCenter)
        column.addStretch(3)
        across = QHBoxLayout(self)
        across.addWidget(middle)

    def show_notice(self, title: str, sentence: str, button_text: str = "", *, busy: bool = False) -> None:
        """`busy` shows a bar that moves; without `button_text` there is no button."""
        self.title.setText(title)
        self.sentence.setText(sentence)
        self.button.setText(button_text)
        set_shown(self.bar, busy)
        set_shown(self.button, bool(button_text))


# ── chat page ────────────────────────────────────────────────────────────────────────────────────────────────────────

CHECK_MS = 2000
"""How often the page looks whether a run is training."""
LEFT_MS = 120_000
"""How long after the page was left its model is unloaded."""
WIDE = 980
"""From this page width on the sampling settings are shown without being asked for."""
SIDES = {"base": "Base", "both": "Both", "tuned": "Tuned"}


class ChatPage(QWidget):
    """The page.

    Attributes:
        session – the state shared with the other pages.
        chat – the conversation.

    Signals:
        enabled_actions_changed(dict) – `enabled_actions()` returns this now.
    """

    enabled_actions_changed = Signal(dict)

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.chat = ChatWithModel(session.consent, self)
        self._choice: ChatChoice | None = None
        self._models: list[tuple[str, str]] = []
        self._live: RunFolder | None = None
        self._asked_for_models = False
        self._check_timer = QTimer(self, interval=CHECK_MS)
        self._check_timer.timeout.connect(self._look_for_live_run)
        self._left_timer = QTimer(self, interval=LEFT_MS, singleShot=True)
        self._left_timer.timeout.connect(self.chat.unload)
        self._compose()
        self._lay_out()
        self._connect()
        self._list_models()
        self._look_for_live_run()

    # Building

    def _compose(self) -> None:
        self.bar, self.about = ModelBar(), ElidedLabel()
        self.notice, self.transcript = Notice(), Transcript()
        self.panel, self.rows = SamplingPanel(), RowStrip()
        self.sides = Segments(SIDES, "Answers by")
        self.sides.choose("both")
        self.prompt = PromptBox()
        self.prompt.setPlaceholderText("Prompt. Enter sends, Shift+Enter begins a new line, Escape stops.")
        self.send_button = button("Send", self.send_or_stop, primary=True)

    def _lay_out(self) -> None:
        body = QWidget()
        self._body = QStackedLayout(body)
        self._body.addWidget(self.notice)
        self._body.addWidget(self.transcript)
        self._below = QWidget()
        asking, below = QHBoxLayout(), QVBoxLayout(self._below)
        asking.setSpacing(theme.SPACE)
        asking.addWidget(self.prompt, 1)
        buttons = QVBoxLayout()
        buttons.addWidget(self.sides)
        buttons.addWidget(self.send_button)
        asking.addLayout(buttons)
        below.setContentsMargins(0, 0, 0, 0)
        below.addWidget(self.rows)
        below.addLayout(asking)
        left, middle = QVBoxLayout(), QHBoxLayout()
        left.setSpacing(12)
        left.addWidget(body, 1)
        left.addWidget(self._below)
        middle.setSpacing(12)
        middle.addLayout(left, 1)
        middle.addWidget(self.panel)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(theme.GUTTER,) * 4)
        column.setSpacing(theme.SPACE)
        column.addWidget(self.bar)
        column.addWidget(self.about)
        column.addLayout(middle, 1)

    def _connect(self) -> None:
        chat, bar = self.chat, self.bar
        chat.state_changed.connect(self._show)
        chat.turns_changed.connect(self._show_turns)
        chat.answer_changed.connect(self._show_answer)
        chat.row_changed.connect(self._show_row)
        chat.message.connect(self.session.message)
        bar.model_chosen.connect(self.choose)
        bar.checkpoint_chosen.connect(lambda _: self._show())
        bar.browse_requested.connect(self._browse)
        bar.load_requested.connect(self.load)
        bar.unload_requested.connect(chat.unload)
        bar.reset_requested.connect(self.new_conversation)
        bar.settings_toggled.connect(lambda _: self._show())
        self.notice.button_clicked.connect(self._on_notice)
        self.transcript.keep_requested.connect(chat.keep_case)
        self.rows.row_requested.connect(chat.pick_row)
        self.prompt.sent.connect(self.send)
        self.prompt.stopped.connect(chat.stop)
        self.prompt.textChanged.connect(self._show_enabled)
        for line in (*self.panel.fields.values(), self.panel.system):
            line.textChanged.connect(self._show_enabled)
        self.session.chat_requested.connect(self.choose_run)
        self.session.run_state_changed.connect(lambda _: self._look_for_live_run())
        self.session.run_changed.connect(self._look_for_live_run)

    # Which model

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._left_timer.stop()
        self._check_timer.start()
        self._list_models()
        self._look_for_live_run()
        if not self._asked_for_models:
            self._asked_for_models = True
            self.session.service.ask("models", self._on_models, owner=self, paths=[])

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

    def _on_models(self, answer: dict[str, Any]) -> None:
        self._models = [(item["name"], item["id"]) for item in answer["found"] if not item["refusal"]]
        self._list_models()

    def _list_models(self) -> None:
        """Runs with weights, newest first, and models; what is chosen stays chosen, at first the run that is shown."""
        runs = [(run.name, str(run.path)) for run in all_runs() if _has_weights(run)]
        values = [value for _, value in (*runs, *self._models)]
        if self._choice is not None and self._choice.name not in values:
            self._models = [(self._choice.label, self._choice.name), *self._models]
            values.append(self._choice.name)
        chosen = self._choice.name if self._choice is not None else ""
        if not chosen:
            shown = str(self.session.run.folder.path) if self.session.run is not None else ""
            chosen = shown if shown in values else next(iter(values), "")
        self.bar.show_models(runs, self._models, chosen)
        if chosen:
            self.choose(chosen)

    def choose(self, name: str) -> None:
        """Choose a run (its folder) or a model; it is not loaded yet."""
        is_run = (Path(name) / "config.yaml").is_file()
        self._choice = run_choice(RunFolder(Path(name))) if is_run else model_choice(name)
        entries = [(weights.label, weights.key) for weights in self._choice.checkpoints]
        self.bar.models.setCurrentIndex(max(0, self.bar.models.findData(name)))
        self.bar.show_checkpoints(entries, self.bar.checkpoint)
        self._show()

    def choose_run(self, run: RunFolder) -> None:
        """Choose a run, and load it if nothing prevents that: another page's button has asked for it."""
        self._choice = run_choice(run)
        self._list_models()
        if not self._is_chosen_loaded and self.bar.load.isEnabled():
            self.load()

    def _browse(self) -> None:
        folder = open_folder(self, "model", "A model's folder")
        if folder is not None:
            self._choice = model_choice(str(folder))
        self._list_models()

    def load(self) -> None:
        """Load what is chosen."""
        if self._choice is None or self._live is not None:
            return
        self.panel.show_defaults(sampling_of(self._choice), self._choice.settings.get("system_prompt") or "")
        self.rows.forget(has_rows=self._choice.is_run)
        self.chat.load(self._choice, self.bar.checkpoint)

    def load_or_unload(self) -> None:
        self.bar.load.click()

    @property
    def _is_chosen_loaded(self) -> bool:
        chat, choice = self.chat, self._choice
        return choice is not None and chat.has_loaded(choice, self.bar.checkpoint)

    def _look_for_live_run(self) -> None:
        """Give the memory to a run that trains, and open again when it has ended."""
        self._live = chat_choice.live_run()
        if self._live is not None and self.chat.state != "empty":
            self.chat.unload()
            self.session.message.emit(f"The chat's model was unloaded: {self._live.name} is training.")
        self._show()

    # Showing

    def _show(self) -> None:
        """Show the conversation, or what stands in its place, and what can be done."""
        chat = self.chat
        has_turns = chat.is_loaded and bool(chat.turns)
        self._body.setCurrentWidget(self.transcript if has_turns else self.notice)
        if not has_turns:
            words = notice(chat, self._choice, self.bar.checkpoint, self._live)
            self.notice.show_notice(*words, busy=chat.state == "loading")
        self.about.setText(about(chat, self._choice, self.bar.checkpoint))
        self.sides.setVisible(len(chat.sides) > 1)
        set_shown(self._below, chat.is_loaded)
        set_shown(self.panel, chat.is_loaded and self.bar.settings.isChecked())
        self.bar.settings.setEnabled(chat.is_loaded)
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
        self.bar.show_state(
            loaded=self._is_chosen_loaded, can_load=can_load, can_reset=chat.is_loaded and bool(chat.turns)
        )
        answering = chat.state == "answering"
        self.send_button.setText("Stop" if answering else "Send")
        self.send_button.setToolTip("Escape" if answering else "Enter")
        self.send_button.setEnabled(answering or self._can_send())
        self.enabled_actions_changed.emit(self.enabled_actions())

    def _can_send(self) -> bool:
        return self.chat.state == "ready" and self.panel.is_valid and bool(self.prompt.toPlainText().strip())

    def enabled_actions(self) -> dict[str, bool]:
        """Action of the menu → whether it applies now."""
        chat = self.chat
        has_rows = chat.is_loaded and chat.choice is not None and chat.choice.is_run
        rows = dict.fromkeys(("previous_prompt", "next_prompt", "random_prompt"), has_rows)
        return {
            "load_chat": self.bar.load.isEnabled(),
            "new_conversation": self.bar.reset.isEnabled(),
            "stop_answer": chat.state == "answering",
            **rows,
        }

    def _show_turns(self) -> None:
        """Add the views of turns that have none yet; none are left of a conversation that has ended."""
        turns, transcript = self.chat.turns, self.transcript
        if len(turns) < len(transcript.answers):
            transcript.clear()
        for index in range(len(transcript.answers), len(turns)):
            turn = turns[index]
            transcript.add_turn(turn.prompt, turn.expected, list(turn.answers), is_first=turn.is_first)
            for side in turn.answers:
                self._show_answer(index, side)
        self._show()

    def _show_answer(self, index: int, side: str) -> None:
        answer = self.chat.turns[index].answers[side]
        names = self.chat.reward_names
        scores = [
            ShownScore(charts.label_of(name), score, names.index(name) if name in names else 0)
            for name, score in answer.scores.items()
        ]
        self.transcript.answers[index][side].show_answer(
            ShownAnswer(
                answer.text, answer.state == "writing", status(answer), answer.reward, scores, answer.problem,
                self.chat.can_keep(answer),
            )
        )  # fmt: skip

    def _show_row(self) -> None:
        row = self.chat.row
        if row is not None:
            self.rows.show_row(row.number, row.of, row.answer, row.source)
            self.prompt.setPlainText(row.prompt)
            self.prompt.setFocus()

    # Asking

    def send(self) -> None:
        """Ask the chosen sides."""
        if not self._can_send():
            return
        prompt, sides = self.prompt.toPlainText().strip(), self.sides.key
        chosen = self.chat.sides if sides == "both" or sides not in self.chat.sides else [sides]
        expected, system = self.rows.expected.text().strip(), self.panel.system_message()
        self.chat.send(prompt, chosen, self.panel.values(), expected=expected, system=system)
        self.prompt.clear()
        self.rows.expected.clear()  # it was this prompt's

    def send_or_stop(self) -> None:
        self.chat.stop() if self.chat.state == "answering" else self.send()

    def stop_answer(self) -> None:
        self.chat.stop()

    def new_conversation(self) -> None:
        """Forget the turns; the model stays loaded."""
        self.chat.reset()
        self.prompt.setFocus()

    def previous_prompt(self) -> None:
        self.rows.previous.click()

    def next_prompt(self) -> None:
        self.rows.next.click()

    def random_prompt(self) -> None:
        self.rows.random.click()


def _has_weights(run: RunFolder) -> bool:
    return any(folder.is_dir() for folder in (run.checkpoints, run.adapters, run.model))


class NoticeWords(NamedTuple):
    """Title, sentence and button; "" is no button."""

    title: str
    sentence: str
    button: str = ""


def notice(chat: ChatWithModel, choice: ChatChoice | None, checkpoint: str, live: RunFolder | None) -> NoticeWords:
    """What stands in place of a conversation. `choice` is what the page offers to load, `live` a run that is training."""
    if live is not None:
        sentence = f"{live.name} needs this machine's memory. The chat is back when it has ended."
        return NoticeWords("A run is training", sentence)
    if chat.state == "loading" and chat.choice is not None:
        return NoticeWords(f"Loading {chat.choice.label}", "Reading its weights into memory.", "Cancel")
    if chat.state == "failed":
        return NoticeWords("That did not work", chat.problem, "Try again")
    if chat.is_loaded:
        has_rows = chat.choice is not None and chat.choice.is_run
        sentence = f"Type a prompt below{', or take one of the dataset' if has_rows else ''}."
        return NoticeWords("Ask it something", sentence)
    if choice is None:
        sentence = "Train a run, and ask it and its base the same things here."
        return NoticeWords("Nothing to talk to yet", sentence, "Go to Train")
    if choice.problem:
        return NoticeWords(choice.label, choice.problem)
    what = "Base and tuned answer side by side, with the same random numbers. " if choice.is_run else ""
    return NoticeWords(choice.label, what + memory_sentence(choice, checkpoint), "Load")


def about(chat: ChatWithModel, choice: ChatChoice | None, checkpoint: str) -> str:
    """What is loaded and its memory; where something else has been chosen since, what that would take."""
    if not chat.is_loaded or chat.choice is None:
        return ""
    weights = f"{figure(chat.bytes / 1e9, 'GB')} of weights."
    if choice is None or chat.has_loaded(choice, checkpoint):
        what = "Base and tuned are" if len(chat.sides) > 1 else "It is"
        return " ".join([f"{what} loaded, {weights}", *chat.notes])
    saved = next((saved.label for saved in chat.choice.checkpoints if saved.key == chat.checkpoint), "")
    loaded = f"{chat.choice.label}, {saved.lower()}" if saved else chat.choice.label
    return f"Loaded: {loaded}, {weights} {choice.label}: {memory_sentence(choice, checkpoint)}"


def status(answer: ChatAnswer) -> str:
    """“23 tokens, ended, the first after 50 ms, then 190 a second”."""
    if answer.state != "done":
        return {"waiting": "Reading the prompt…", "writing": "Writing…", "stopped": "Stopped"}.get(answer.state, "")
    figures, kept = answer.figures, ", kept as a case" if answer.kept else ""
    later, seconds = figures["tokens"] - 1, figures["seconds"] - figures["first_token_s"]
    rate = f", then {figure(later / seconds)} a second" if later and seconds > 0 else ""
    first = f"{1000 * figures['first_token_s']:.0f}{THIN}ms"
    return f"{figure(figures['tokens'])} tokens, {STOP_LABELS[figures['stop']]}, the first after {first}{rate}{kept}"
