"""The part of the main window that is about runs: their actions, state, progress and title, who controls them, what waits, and the
question on closing.

Between `app.help_menu.HelpWindow` and `app.window.Window`, which builds the parts that this one fills.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from PySide6.QtGui import QAction
from PySide6.QtWidgets import QApplication, QLabel, QToolBar

from app.help_menu import HelpWindow
from app.menus import Menus
from app.message_boxes import QuestionBox, ask_and_remember
from app.state.messages import NOTICE, Offer
from app.state.processes import VerbProcess
from app.state.runs.run_clock import silence_advice
from app.state.runs.run_files import CrashOffer
from app.state.session import RUN
from app.widgets.basic.dialogs import open_path
from app.widgets.export_panel import ExportPanel
from app.widgets.menu_dialogs import PreferencesDialog
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError

NAME = "GRPO Studio"
CONTROL, SILENCE = "control", "silence"
"""Causes of messages: another window controls the run; the run is silent."""


class DesktopIcon(Protocol):
    """The app's icon, as `app.desktop.launcher_icon` shows it."""

    def show_percent(self, percent: int | None) -> None: ...


class RunWindow(HelpWindow):
    """The part of the main window about runs. `app.window.Window` sets `menus`, `toolbar` and `document`.

    Attributes:
        icon – the app's icon on the desktop; None shows no progress there.
    """

    menus: Menus
    toolbar: QToolBar
    document: QLabel
    icon: DesktopIcon | None = None
    _was_live: bool | None = None

    def follow_session(self) -> None:
        """Show the session's run and queue, and follow both."""
        session = self.session
        session.run_changed.connect(self._connect_run)
        session.run_state_changed.connect(self._show_state)
        session.queue.changed.connect(self._show_queue)
        self.strip.waiting.clicked.connect(lambda: self.show_page("runs"))
        self._connect_run()
        self._show_queue()

    # Actions

    def run(self) -> None:
        self.session.start_run()

    def queue_run(self) -> None:
        self.session.queue_run()

    def pause(self) -> None:
        self._send("resume" if self._state() == "paused" else "pause")

    def stop(self) -> None:
        self._send("stop")

    def save_now(self) -> None:
        self.session.messages.note("A checkpoint is written as soon as the present step is done.")
        self._send("save")  # a refusal is the newer message

    def take_over(self) -> None:
        """Take the control of the run from the window that has it."""
        self._try(lambda: self.session.run and self.session.run.take_over())

    def resume(self) -> None:
        if self.session.run is not None:
            self.session.resume_run(self.session.run.folder)

    def export(self) -> None:
        if self.session.run is not None:
            self.show_export(self.session.run.folder)

    def show_export(self, run: RunFolder) -> None:
        """Open the panel that puts a run's model into LM Studio, a folder or Hugging Face."""
        ExportPanel(run, VerbProcess, self, self._log_in, self._may_run_code_of).open_beside()

    def _may_run_code_of(self, run: RunFolder) -> bool:
        """Whether the reward files of a run may be run; settings that cannot be read are told by whoever needs them."""
        try:
            return self.session.consent.obtain_for_run(run)
        except UserError:
            return True

    def _log_in(self, token: str, on_account: Callable[[Any], None], on_refused: Callable[[str], None]) -> None:
        """Keep a token for Hugging Face in the keychain: it reaches the warm process through its stdin, and is kept nowhere here."""
        self.session.service.ask(
            "hub_login", on_account, on_refused=lambda faults: on_refused(faults[0].sentence), token=token
        )

    def open_folder(self) -> None:
        if self.session.run is not None:
            open_path(self.session.run.folder.path)

    def open_log(self) -> None:
        if self.session.run is not None:
            open_path(self.session.run.folder.log)

    def show_preferences(self) -> None:
        prefs = self.session.prefs
        dialog = PreferencesDialog(
            notifies=prefs.notifies, shows_progress=prefs.shows_progress, closing=prefs.when_closing, parent=self
        )
        dialog.notifies_changed.connect(lambda on: setattr(prefs, "notifies", on))
        dialog.shows_progress_changed.connect(self._set_shows_progress)
        dialog.closing_changed.connect(lambda answer: setattr(prefs, "when_closing", answer))
        dialog.open()

    def _set_shows_progress(self, shows: bool) -> None:
        self.session.prefs.shows_progress = shows
        self._show_progress()

    def show_run(self) -> None:
        """Bring the window and its run to the front, for a click on a notification."""
        self.show_page("monitor")
        self.showNormal() if self.isMinimized() else self.show()
        self.raise_()
        self.activateWindow()

    def is_in_front(self) -> bool:
        """Whether the user has the window, or a dialog of it, before them."""
        return QApplication.activeWindow() is not None and not self.isMinimized()

    def _send(self, word: str) -> None:
        self._try(lambda: self.session.run and self.session.run.send(word))

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except UserError as mistake:
            self.session.messages.note(mistake.faults[0].sentence)

    # The run that is shown

    def _state(self) -> str:
        return self.session.run.state if self.session.run is not None else ""

    def _connect_run(self) -> None:
        """Connect to the run that is shown now; the previous one was deleted, and its connections with it."""
        if self.session.run is not None:
            self.session.run.changed.connect(self._show_progress)
            self.session.run.control_changed.connect(self._show_state)
        self._was_live = None
        self._show_state()

    def _show_state(self, _state: object = "") -> None:
        run = self.session.run
        is_elsewhere = run is not None and run.control.is_elsewhere
        self.menus.show_state(self._state(), controls=not is_elsewhere)
        self.strip.show_state(self._state())
        self._show_run_action()
        self._show_progress()
        live = run is not None and run.is_live
        if live != self._was_live:  # whatever the strip says about the run is no longer true
            self._was_live = live
            self.session.messages.withdraw(NOTICE)
            self.session.messages.say(run.problem if run is not None else "", RUN)
        self._show_control(is_elsewhere)

    def _show_control(self, is_elsewhere: bool) -> None:
        sentence = "Another window controls this run." if is_elsewhere else ""
        self.session.messages.say(sentence, CONTROL, offer=Offer("Take over", self.take_over))

    def _show_message(self) -> None:
        message = self.session.messages.current
        offer = message.offer if message is not None else None
        self.strip.show_sentence(message.sentence if message else "", offer.text if offer else "", offer and offer.take)

    def _show_progress(self) -> None:
        run = self.session.run
        self.show_title()
        if self.icon is not None:
            self.icon.show_percent(self._percent() if self.session.prefs.shows_progress else None)
        if run is None:
            self.strip.show_progress(0, 0, None, None)
            return
        left = run.eta_s if run.is_live and not run.silence else None
        self.strip.show_progress(run.step or 0, run.iterations or 0, left, run.latest("peak_memory_gb"))
        advice = silence_advice((run.started or {}).get("pid"), run.checkpoint) if run.silence else ""
        self.session.messages.say(f"{run.silence} {advice}".strip(), SILENCE)

    def _percent(self) -> int | None:
        """How much of the run is done; None where none is live or its length is not known."""
        run = self.session.run
        return 100 * run.step // run.iterations if run is not None and run.is_live and run.iterations else None

    def show_title(self, _key: str = "") -> None:
        """“43 % – run – GRPO Studio” while a run is live, otherwise the name of the form's file."""
        draft, percent = self.session.draft, self._percent()
        name = draft.path.name if draft.path else "Demo" if draft.is_demo else "Untitled"
        self.document.setText(f"{name} – edited" if draft.dirty else name)
        if percent is None or self.session.run is None:
            self.setWindowTitle(f"{name}[*] – {NAME}")  # Qt shows [*] as the desktop's mark of an unsaved document
        else:
            self.setWindowTitle(f"{percent} % – {self.session.run.folder.name} – {NAME}[*]")
        self.setWindowModified(draft.dirty and percent is None)

    # The queue

    def _show_queue(self) -> None:
        queue = self.session.queue
        self.strip.show_waiting(len(queue.waiting), is_paused=queue.now.is_paused)
        self.menus["queue_run"].setText("Save to queue" if queue.edited is not None else "Add to queue")
        self._show_run_action()

    def _show_run_action(self) -> None:
        """The first button of the toolbar: Run, or what to do instead while a run trains or the settings of a waiting one are edited."""
        instead = self.session.is_training or self.session.queue.edited is not None
        wanted, other = (self.menus[name] for name in (("queue_run", "run") if instead else ("run", "queue_run")))
        actions: list[QAction] = self.toolbar.actions()
        if wanted not in actions:
            self.toolbar.insertAction(other, wanted)
            self.toolbar.removeAction(other)

    # Questions: one method each, which tests replace by an answer

    def ask_about_training(self) -> str:
        """keep, stop or cancel."""
        count = len(self.session.queue.waiting)
        waits = f" {count} more wait{'s' if count == 1 else ''} for it to end." if count else ""
        answer, is_remembered = ask_and_remember(
            self,
            "A run is still training. What should become of it?",
            f"It can go on without the window, which finds it again when it is next opened.{waits}",
            {"keep": "Keep training", "stop": "Stop and save", "cancel": "Cancel"},
            "Remember my answer",
        )
        if is_remembered and answer != "cancel":
            self.session.prefs.when_closing = answer
        return answer

    def leave_training(self) -> bool:
        """Settle what becomes of a live run when this window closes; returns False where the window should stay."""
        session = self.session
        watched_only = session.run is not None and session.run.control.is_elsewhere
        if not session.is_training or watched_only:
            return True
        answer = session.prefs.when_closing
        if answer == "ask":
            answer = self.ask_about_training()
        if answer == "stop":
            if session.queue.is_active:  # or the next would begin as soon as this one has stopped
                session.queue.set_paused(True)
            self._try(session.stop_training)
        return answer != "cancel"

    def offer_resume(self, offer: CrashOffer) -> None:
        """Ask once whether a run that crashed unseen should go on. It does not block: the window is usable behind it."""
        self.session.prefs.offered_crash = offer.key
        answers = {"resume": offer.action, "show": "Show it", "later": "Not now"}
        box = QuestionBox(self, offer.question, offer.detail, answers)
        box.finished.connect(lambda _: self._take_offer(offer, box.answer))
        box.open()

    def _take_offer(self, offer: CrashOffer, answer: str) -> None:
        if answer == "resume":
            self.session.resume_run(offer.folder)
        elif answer == "show":
            self.show_page("monitor")
        self.session.queue.ensure_runner()
