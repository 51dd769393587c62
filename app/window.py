"""The frame: sidebar, menus, toolbar, the pages (each built when first shown) and the status strip.

It knows pages by their list and runs by their state, and not what a page contains. It never loads the engine, and shows no error
dialogs: errors are sentences in the strip or on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QAction, QCloseEvent, QDragEnterEvent, QDragLeaveEvent, QDropEvent, QResizeEvent
from PySide6.QtWidgets import (
    QApplication,
    QHBoxLayout,
    QLabel,
    QSizePolicy,
    QToolBar,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.desktop import DroppedFile, dropped_file, kind_of
from app.help_menu import HelpWindow
from app.menus import RUN_ACTIONS, Menus
from app.message_boxes import QuestionBox, ask, ask_and_remember
from app.page_stack import PageArea, PageStack
from app.pages import PAGES
from app.state.draft import History
from app.state.memory import MemoryParts
from app.state.messages import NOTICE, Offer
from app.state.processes import VerbProcess
from app.state.run_files import CrashOffer, silence_advice
from app.state.session import RUN, Session
from app.widgets.basic import icons
from app.widgets.basic.dialogs import keep_folders_in, open_path
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import PlainLabel
from app.widgets.basic.layout import on_screen
from app.widgets.consent_dialog import HostsDialog, ask_consent
from app.widgets.export_panel import ExportPanel
from app.widgets.form.field import UndoKeys
from app.widgets.menu_dialogs import PreferencesDialog
from app.widgets.window_frame import DropOverlay, Sidebar, StatusStrip
from backend.distributed.hosts_file import HostsToAllow
from backend.rewards.allowed_code import CodeToAllow
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError

MINIMUM = (880, 600)
LEAST_PAGE = (816, 480)
"""What a page is laid out for at least: in a window of MINIMUM there is as much. A screen that has less room, as one of 1280×800 pixels at
200 %, scrolls."""
FIRST_SIZE = (1280, 800)
FORM_PAGES = ("train", "dataset", "rewards")
"""Pages that show settings of the form."""
NARROW = 1000
"""Below this width the sidebar shows icons alone, whatever the preference says."""


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
        self.session.starter.start()

    def queue_run(self) -> None:
        self.session.starter.queue()

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
            self.session.starter.resume(self.session.run.folder)

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
            self.session.starter.resume(offer.folder)
        elif answer == "show":
            self.show_page("monitor")
        self.session.queue.ensure_runner()


NAME = "GRPO Studio"
CONTROL, SILENCE = "control", "silence"
"""Causes of messages: another window controls the run; the run is silent."""


class DesktopIcon(Protocol):
    """The app's icon, as `app.desktop` shows it."""

    def show_percent(self, percent: int | None) -> None: ...


class Window(RunWindow):
    """The main window.

    Attributes:
        session, history – the state and its undo stack.
        menus – the actions by name.
        sidebar, toolbar, page_stack, strip – its parts; drop_overlay – what is shown while a file is dragged over them.
        document – the label in the toolbar with the name of the config file.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        keep_folders_in(session.prefs)
        self.setMinimumSize(on_screen(self, *MINIMUM))
        self.setAcceptDrops(True)
        self.setUnifiedTitleAndToolBarOnMac(True)
        self._build()
        self.history = History(session.draft, self)
        self.menus.follow_history(self.history)
        self._undo_keys = UndoKeys(self)
        self._connect()
        self.show_title()
        self.follow_session()
        if not self.restoreGeometry(self.session.prefs.geometry):  # False also for the empty bytes of a first launch
            self.resize(on_screen(self, *FIRST_SIZE))

    # Building

    def _build(self) -> None:
        self.menus = Menus(self)
        self.sidebar, self.page_stack, self.strip = Sidebar(PAGES), PageStack(self.session), StatusStrip()
        self._build_toolbar()
        content = QWidget()
        across = QHBoxLayout(content)
        across.setContentsMargins(0, 0, 0, 0)
        across.setSpacing(0)
        across.addWidget(self.sidebar)
        across.addWidget(PageArea(self.page_stack, theme.scaled_size(QSize(*LEAST_PAGE))), 1)
        central = QWidget()
        column = QVBoxLayout(central)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(content, 1)
        column.addWidget(self.strip)
        self.setCentralWidget(central)
        self.drop_overlay = DropOverlay(central)

    def _build_toolbar(self) -> None:
        self.toolbar = QToolBar("Run")
        self.toolbar.setMovable(False)
        # Qt lists toolbars in the context menu of every main window, from where this one could be hidden for good.
        self.toolbar.toggleViewAction().setEnabled(False)
        collapse = IconButton("sidebar", tip="Collapse or widen the sidebar")
        collapse.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        collapse.clicked.connect(self.toggle_sidebar)
        self.document = PlainLabel()
        self.document.setProperty("role", "muted")
        self.document.setContentsMargins(theme.SPACE, 0, 0, 0)
        gap = QWidget()  # pushes the actions to the right: a toolbar has no stretch
        gap.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        for part in (collapse, self.document, gap):
            self.toolbar.addWidget(part)
        self.toolbar.setIconSize(theme.scaled_size(QSize(icons.SIZE, icons.SIZE)))
        self.toolbar.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        for name in RUN_ACTIONS:
            self.toolbar.addAction(self.menus[name])
        self.addToolBar(self.toolbar)

    def _connect(self) -> None:
        session = self.session
        self.sidebar.chosen.connect(self.show_page)
        session.page_requested.connect(self.show_page)
        session.messages.changed.connect(self._show_message)
        session.guide_requested.connect(self.show_guide)
        session.undo_requested.connect(self.undo)
        session.problem_found.connect(self.report_run)
        session.consent.ask = self.ask_about_code
        session.consent.ask_hosts = self.ask_about_hosts
        session.export_requested.connect(self.show_export)
        session.settings_requested.connect(self.open_settings)
        session.waiting_settings_requested.connect(self.edit_waiting)
        session.draft.changed.connect(self.show_title)
        session.draft.saved.connect(self.show_title)
        session.draft.save_failed.connect(session.messages.note)
        session.presets_requested.connect(self.show_presets)
        session.completions_requested.connect(self.show_completions)
        session.starter.confirm_over_memory = self.ask_about_memory
        theme.signals.changed.connect(self.menus.update_icons)

    # Pages

    def show_page(self, key: str) -> None:
        """Show a page. Raises KeyError for an unknown key."""
        is_new = key not in self.pages
        page: Any = self.page_stack.show_page(key)
        if is_new and hasattr(page, "enabled_actions_changed"):
            page.enabled_actions_changed.connect(self.menus.set_enabled)
            self.menus.set_enabled(page.enabled_actions())
        self.sidebar.show_page(key)
        # Hiding the page that had the focus moves it to whatever comes next in the tab order; the sidebar is predictable.
        self.sidebar.buttons[key].setFocus()

    def show_completions(self, step: int, filter_name: str | None) -> None:
        """Show a step's completions that a filter leaves; None: all."""
        self.show_page("completions")
        self.pages["completions"].show_requested(step, filter_name)

    def find_text(self) -> None:
        """Find something on the page that is shown, if it can; else a setting."""
        page = self.pages.get(self.current_page)
        if page is not None and hasattr(page, "find_text"):
            page.find_text()
        else:
            self.do_on_page("train", "find_setting")

    @property
    def pages(self) -> dict[str, Any]:
        """The pages built so far, by key."""
        return self.page_stack.pages

    @property
    def current_page(self) -> str:
        """The key of the current page; "" before the first."""
        return self.page_stack.current_key

    def do_on_page(self, key: str, slot: str) -> None:
        """Show a page, and call one of its slots for a menu."""
        if self.current_page != key:  # showing it moves the focus, from which some slots go on
            self.show_page(key)
        getattr(self.pages[key], slot)()

    def copy(self) -> None:
        """Copy the selection of the widget with the focus: text, rows of a table, the values of a chart."""
        # A text edit takes Ctrl+C itself before the menu does; this serves the menu entry, labels, and our tables and plots.
        widget: Any = QApplication.focusWidget()
        if isinstance(widget, QLabel):
            QApplication.clipboard().setText(widget.selectedText())
        elif hasattr(widget, "copy"):
            widget.copy()

    def toggle_sidebar(self) -> None:
        prefs = self.session.prefs
        prefs.sidebar_collapsed = not prefs.sidebar_collapsed
        self._fit_sidebar()

    def _fit_sidebar(self) -> None:
        collapsed = self.session.prefs.sidebar_collapsed
        self.sidebar.set_collapsed(collapsed or self.width() < theme.scaled(NARROW))
        self.menus["sidebar"].setText("Widen sidebar" if collapsed else "Collapse sidebar")

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_sidebar()

    def set_theme(self, mode: str) -> None:
        """Apply a theme, now and at the next launch."""
        self.session.prefs.theme = mode
        app = QApplication.instance()
        assert isinstance(app, QApplication)
        theme.apply(app, mode)

    # The form

    def undo(self) -> None:
        self._step_history(self.history.undo)

    def redo(self) -> None:
        self._step_history(self.history.redo)

    def _step_history(self, step: Callable[[], None]) -> None:
        """Undo changes the form, so show a page of the form first."""
        if self.current_page not in FORM_PAGES:
            self.show_page("train")
        step()

    # Drops

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        file = dropped_file(event.mimeData())
        if file is not None:
            event.acceptProposedAction()
            self.drop_overlay.show_sentence(file.sentence)

    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self.drop_overlay.show_sentence("")

    def dropEvent(self, event: QDropEvent) -> None:
        file = dropped_file(event.mimeData())
        self.drop_overlay.show_sentence("")
        if file is not None:
            event.acceptProposedAction()
            # After the drop has ended: a modal question would block the program that the file comes from.
            QTimer.singleShot(0, self, lambda: self.open_dropped(file))

    def open_dropped(self, file: DroppedFile) -> None:
        """Open a config, show a run, or put any other file into its setting, wherever on the window it was dropped."""
        if file.kind == "config":
            self.open_path(file.path)
        elif file.kind == "run":
            self.session.open_run(file.path)
            self.show_page("monitor")
        elif file.kind == "data":
            self.session.use_data(str(file.path))
        else:
            self.session.use_path(file.kind, file.path)

    def open_from_desktop(self, path: Path) -> None:
        """Do with a file or folder that the desktop asks to open what a drop of it does."""
        kind = kind_of(path)
        if kind is None:
            self.session.messages.note(f"{path.name} is no config, run, model, dataset or file of reward functions.")
        else:
            self.open_dropped(DroppedFile(kind, path))

    # Questions: one method each, which tests replace by an answer

    def ask_about_memory(self, memory_parts: MemoryParts) -> bool:
        """Whether to train although memory surely does not suffice."""
        answer = ask(
            self,
            memory_parts.sentence,
            memory_parts.advice or "The run would end as soon as memory runs out.",
            {"no": "Change the settings", "yes": "Run all the same", "cancel": "Cancel"},
        )
        return answer == "yes"

    def ask_about_code(self, requests: Sequence[CodeToAllow]) -> bool:
        """Whether the user's own reward code may run."""
        return ask_consent(requests, self)

    def ask_about_hosts(self, request: HostsToAllow) -> bool:
        """Whether the machines of a hosts file may be contacted."""
        return HostsDialog(request, self).is_allowed()

    def closeEvent(self, event: QCloseEvent) -> None:
        if not self.leave_training():
            event.ignore()
            return
        self.session.draft.flush()  # the timer of the autosave would not fire any more
        self.session.prefs.geometry = self.saveGeometry()
        self.session.prefs.sync()
        event.accept()
