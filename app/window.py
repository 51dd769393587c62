"""The frame: sidebar, menus, toolbar, the pages (each built when first shown) and the status strip."""

from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QCloseEvent, QDragEnterEvent, QDragLeaveEvent, QDropEvent, QResizeEvent
from PySide6.QtWidgets import (
    QApplication,
    QCheckBox,
    QLabel,
    QMainWindow,
    QSizePolicy,
    QStackedWidget,
    QToolBar,
    QWidget,
)
from shiboken6 import isValid

from app import theme
from app.desktop import DEEDS, Kind, dropped_file, kind_of, show_percent
from app.menus import RUN_ACTIONS, THEMES, ConfigFiles, HelpMenu, Menus
from app.pages import PAGES
from app.state.memory import MemoryParts
from app.state.messages import NOTICE, problems_to
from app.state.run_files import newest_checkpoint, silence_advice
from app.state.session import RUN, Session
from app.widgets.basic import dialogs, icons
from app.widgets.basic.controls import SearchEdit
from app.widgets.basic.dialogs import QuestionBox, ask, open_path
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import label, show_text
from app.widgets.basic.layout import TabArea, column, configure, holder, on_screen, row, set_style_property
from app.widgets.consent_dialog import consent_dialog, hosts_dialog, servers_dialog
from app.widgets.export_panel import ExportPanel
from app.widgets.form.fields import UndoKeys
from app.widgets.menu_dialogs import NAME, PreferencesDialog
from app.widgets.run_header import Switcher
from app.widgets.window_frame import Sidebar, StatusStrip
from backend.config import config
from backend.runs.run_folder import RunFolder
from backend.runs.run_names import name_of
from backend.utils.errors import UserError

MINIMUM = (880, 600)
LEAST_PAGE = (816, 480)
FIRST_SIZE = (1280, 800)
FORM_PAGES = ("train", "dataset", "rewards")
NARROW = 1000  # below this width the sidebar shows icons alone
SILENCE = "silence"  # cause of the message that the run is silent


class Window(QMainWindow):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self._was_live: bool | None = None
        dialogs.memory[:] = [session.prefs]
        theme.reward_number = session.prefs.reward_number
        self.setMinimumSize(on_screen(self, *MINIMUM))
        self.setAcceptDrops(True)
        self.setUnifiedTitleAndToolBarOnMac(True)
        self.files, self.help = ConfigFiles(self), HelpMenu(self)
        self.menus = Menus(self)
        self.sidebar, self.page_stack, self.strip = Sidebar(PAGES), PageStack(session), StatusStrip()
        self.pages: dict[str, Any] = self.page_stack.pages  # those built so far
        self._build_toolbar()
        area = TabArea()  # scrolls the pages where the window has less room
        area.setWidget(configure(self.page_stack, minimumSize=theme.scaled_size(QSize(*LEAST_PAGE))))
        content = row(self.sidebar, (area, 1), spacing=0)
        self.setCentralWidget(holder(column((content, 1), self.strip, spacing=0)))
        UndoKeys(self)
        self._connect()
        self.show_title()
        self._connect_run()
        self._show_queue()
        if not self.restoreGeometry(session.prefs.geometry):  # False also for the empty bytes of a first launch
            self.resize(on_screen(self, *FIRST_SIZE))

    def _build_toolbar(self) -> None:
        self.toolbar = QToolBar(
            "Run",
            movable=False,
            iconSize=theme.scaled_size(QSize(icons.SIZE, icons.SIZE)),
            toolButtonStyle=Qt.ToolButtonStyle.ToolButtonTextBesideIcon,
        )
        # Qt lists toolbars in the context menu of every main window, from where this one could be hidden for good.
        self.toolbar.toggleViewAction().setEnabled(False)
        focus, tip = Qt.FocusPolicy.TabFocus, "Collapse or widen the sidebar"
        collapse = IconButton("sidebar", tip=tip, focusPolicy=focus, clicked=self.toggle_sidebar)
        self.document = label(role="muted", contentsMargins=(theme.SPACE, 0, 0, 0))  # the name of the config file
        wide = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        gap = QWidget(sizePolicy=wide)  # pushes the actions to the right: a toolbar has no stretch
        for part in (collapse, self.document, gap):
            self.toolbar.addWidget(part)
        for name in RUN_ACTIONS:
            self.toolbar.addAction(self.menus[name])
            self.toolbar.widgetForAction(self.menus[name]).setFocusPolicy(focus)
        self.addToolBar(self.toolbar)

    def _connect(self) -> None:
        session = self.session
        self.sidebar.chosen.connect(self.show_page)
        self.strip.waiting.clicked.connect(lambda: self.show_page("runs"))
        session.page_requested.connect(self.show_page)
        session.guide_requested.connect(self.help.show_guide)
        session.completions_requested.connect(partial(self.do_on_page, "completions", "show_requested"))
        session.comparison_requested.connect(partial(self.do_on_page, "runs", "compare_folders"))
        session.prompt_requested.connect(partial(self.do_on_page, "evaluate", "show_prompt"))
        session.undo_requested.connect(self.undo)
        session.presets_requested.connect(self.files.show_presets)
        session.settings_requested.connect(session.load_settings)
        session.export_requested.connect(self.show_export)
        session.problem_found.connect(self.help.report_run)
        session.messages.changed.connect(self._show_message)
        session.draft.changed.connect(self.show_title)
        session.draft.saved.connect(self.show_title)
        session.draft.save_failed.connect(session.messages.say)
        session.run_changed.connect(self._connect_run)
        session.run_state_changed.connect(self._show_state)
        session.queue.changed.connect(self._show_queue)
        session.consent.ask = lambda requests: consent_dialog(requests, self).is_allowed()
        session.consent.ask_hosts = lambda request: hosts_dialog(request, self).is_allowed()
        session.consent.ask_servers = lambda servers: servers_dialog(servers, self).is_allowed()
        session.starter.confirm_over_memory = self._ask_about_memory
        theme.signals.changed.connect(self.menus.update_icons)

    def show_page(self, key: str) -> None:
        """Raises KeyError for an unknown key."""
        is_new = key not in self.pages
        page: Any = self.page_stack.show_page(key)
        if is_new and hasattr(page, "enabled_actions_changed"):
            page.enabled_actions_changed.connect(self.menus.set_enabled)
            self.menus.set_enabled(page.enabled_actions())
        self.sidebar.buttons[key].setChecked(True)
        # Hiding the page that had the focus moves it along the tab order; the sidebar is predictable.
        self.sidebar.buttons[key].setFocus()
        if hasattr(page, "first_focus") and page.first_focus.isVisible():
            page.first_focus.setFocus()

    def find_text(self) -> None:
        """Find something on the page that is shown, if it can, else a setting."""
        search = getattr(self.pages.get(self.current_page), "search", None)
        if isinstance(search, SearchEdit):
            search.take_focus()
        else:
            self.do_on_page("train", "search.take_focus")

    @property
    def current_page(self) -> str:
        return self.page_stack.current_key

    def do_on_page(self, key: str, slot: str, *arguments: Any) -> None:
        if self.current_page != key:  # showing it moves the focus, from which some slots go on
            self.show_page(key)
        attrgetter(slot)(self.pages[key])(*arguments)

    def copy(self) -> None:
        # A text edit takes Ctrl+C itself; this serves the menu entry, labels, and our tables and plots.
        widget: Any = QApplication.focusWidget()
        if isinstance(widget, QLabel):
            QApplication.clipboard().setText(widget.selectedText())
        elif hasattr(widget, "copy"):
            widget.copy()

    def undo(self) -> None:
        if self.current_page not in FORM_PAGES:
            self.show_page("train")
        self.session.draft.history.undo()

    def redo(self) -> None:
        if self.current_page not in FORM_PAGES:
            self.show_page("train")
        self.session.draft.history.redo()

    def switch_run(self) -> None:
        """Open the menu of runs on this page, else on Monitor."""
        shown = [each for each in self.page_stack.findChildren(Switcher) if each.isVisible()]
        if shown:
            shown[0].open()
        else:
            self.do_on_page("monitor", "header.switcher.open")

    def toggle_sidebar(self) -> None:
        self.session.prefs.sidebar_collapsed = not self.session.prefs.sidebar_collapsed
        self._fit_sidebar()

    def _fit_sidebar(self) -> None:
        collapsed = self.session.prefs.sidebar_collapsed
        self.sidebar.set_collapsed(collapsed or self.width() < theme.scaled(NARROW))
        self.menus["sidebar"].setText("Widen sidebar" if collapsed else "Collapse sidebar")

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_sidebar()

    def set_theme(self, mode: str) -> None:
        self.session.prefs.theme = mode
        theme.apply(theme.application(), mode)

    def show_preferences(self) -> None:
        themes = {mode: (text, self.menus[f"theme {mode}"]) for mode, (text, _) in THEMES.items()}
        dialog = PreferencesDialog(self.session.prefs, themes, self.session.service, self)
        dialog.shows_progress.clicked.connect(self._show_progress)
        dialog.open()

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if file := dropped_file(event.mimeData()):
            event.acceptProposedAction()
            show_text(self.strip.drop, DEEDS[file[0]].format(file[1].name))

    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self.strip.drop.hide()

    def dropEvent(self, event: QDropEvent) -> None:
        file = dropped_file(event.mimeData())
        self.strip.drop.hide()
        if file is not None:
            event.acceptProposedAction()
            # After the drop has ended: a modal question would block the program that the file comes from.
            QTimer.singleShot(0, self, lambda: self.open_dropped(*file))

    def open_dropped(self, kind: Kind, path: Path) -> None:
        if kind == "config":
            self.files.open_path(path)
        elif kind == "run":
            self.session.open_run(path)
            self.show_page("monitor")
        elif kind == "data":
            self.session.use_data(str(path))
        else:
            self.session.use_path(kind, path)

    def open_from_desktop(self, path: Path) -> None:
        kind = kind_of(path)
        if kind is None:
            self.session.messages.say(f"{path.name} is not a config, run, model, dataset or reward file.")
        else:
            self.open_dropped(kind, path)

    def pause(self) -> None:
        self.session.send("resume" if self._state() == "paused" else "pause")

    def stop(self) -> None:
        self.session.send("stop")

    def save_now(self) -> None:
        self.session.messages.say("A checkpoint is written as soon as the present step is done.")
        self.session.send("save")  # a refusal is the newer message

    def resume(self) -> None:
        if self.session.run is not None:
            self.session.starter.resume(self.session.run.folder)

    def open_folder(self) -> None:
        if self.session.run is not None:
            open_path(self.session.run.folder.path)

    def open_log(self) -> None:
        if self.session.run is not None:
            open_path(self.session.run.folder.log)

    def export(self) -> None:
        if self.session.run is not None:
            self.show_export(self.session.run.folder)

    def show_export(self, run: RunFolder) -> None:
        session = self.session

        def may_run_code_of(run: RunFolder) -> bool:
            try:
                return session.consent.obtain(config.read(run.config), base=run.path)
            except UserError:  # whoever needs the settings says that they cannot be read
                return True

        panel = ExportPanel(run, session.service, self, may_run_code_of)
        panel.job_requested.connect(self.files.train_on_hugging_face)
        panel.open_beside()

    def show_run(self) -> None:
        self.show_page("monitor")
        self.showNormal() if self.isMinimized() else self.show()
        self.raise_()
        self.activateWindow()

    def is_in_front(self) -> bool:
        return QApplication.activeWindow() is not None and not self.isMinimized()

    def _state(self) -> str:
        return self.session.run.state if self.session.run is not None else ""

    def _connect_run(self) -> None:
        if self.session.run is not None:
            self.session.run.changed.connect(self._show_progress)
        self._was_live = None
        self._show_state()

    def _show_state(self, _state: str = "") -> None:
        run, messages = self.session.run, self.session.messages
        self._is_remote = run is not None and run.folder.is_remote
        self.menus.show_state(self._state(), is_remote=self._is_remote)
        self.strip.state.show_state(self._state())
        self._show_run_action()
        self._show_progress()
        live = run is not None and run.is_live
        if live != self._was_live:  # what the strip says about the run is no longer true
            self._was_live = live
            messages.withdraw(NOTICE)
            messages.say(run.problem if run is not None else "", RUN)

    def _show_message(self) -> None:
        message = self.session.messages.current
        offer = message.offer if message is not None else None
        self.strip.show_sentence(message.sentence if message else "", offer.text if offer else "", offer and offer.take)

    def _show_progress(self) -> None:
        run = self.session.run
        self.show_title()
        show_percent(self._percent() if self.session.prefs.shows_progress else None)
        if run is None:
            self.strip.show_progress(0, 0, None, None)
            return
        if run.folder.is_remote != self._is_remote:  # its job was just submitted
            self._show_state()
        left = run.eta_s if run.is_live and not run.silence else None
        self.strip.show_progress(run.step or 0, run.iterations or 0, left, run.data.steps.latest("peak_memory_gb"))
        said = run.silence
        if said:
            said += f" {silence_advice((run.data.started or {}).get('pid'), newest_checkpoint(run.folder))}"
        self.session.messages.say(said, SILENCE)

    def _percent(self) -> int | None:
        run = self.session.run
        if run is None or not run.is_live or run.state == "reading" or not run.iterations:
            return None
        return 100 * run.step // run.iterations

    def show_title(self, _key: str = "") -> None:
        """“43 % – run – GRPO Studio” while a run is live, else the name of the form's file."""
        draft, percent = self.session.draft, self._percent()
        name = draft.path.name if draft.path else "Demo" if draft.is_demo else "Untitled"
        self.document.setText(f"{name} – edited" if draft.dirty else name)
        if percent is None or self.session.run is None:
            self.setWindowTitle(f"{name}[*] – {NAME}")  # Qt shows [*] as the desktop's mark of an unsaved document
        else:
            self.setWindowTitle(f"{percent} % – {name_of(self.session.run.folder)} – {NAME}[*]")
        self.setWindowModified(draft.dirty and percent is None)

    def _show_queue(self) -> None:
        queue = self.session.queue
        self.strip.show_waiting(len(queue.waiting), is_paused=queue.now.is_paused)
        self._show_run_action()

    def _show_run_action(self) -> None:
        is_queued = self.session.is_training
        names = ("queue_run", "run") if is_queued else ("run", "queue_run")
        wanted, other = (self.menus[name] for name in names)
        if wanted not in self.toolbar.actions():
            self.toolbar.insertAction(other, wanted)
            self.toolbar.removeAction(other)
        set_style_property(self.toolbar.widgetForAction(wanted), "role", "" if is_queued else "primary")

    def ask_about_training(self) -> str:
        count = len(self.session.queue.waiting)
        waits = f" {count} more wait{'s' if count == 1 else ''} for it to end." if count else ""
        box = QuestionBox(
            self,
            "A run is still training. Keep it running?",
            f"It can go on without the window, which finds it again when it is next opened.{waits}",
            {"keep": "Keep training", "stop": "Stop and save", "cancel": "Cancel"},
        )
        remember = QCheckBox("Remember my answer")
        box.setCheckBox(remember)
        box.exec()
        if remember.isChecked() and box.answer != "cancel":
            self.session.prefs.when_closing = box.answer
        return box.answer

    def _ask_about_memory(self, memory_parts: MemoryParts) -> bool:
        advice = memory_parts.advice or "The run would end as soon as memory runs out."
        answers = {"no": "Change the settings", "yes": "Run all the same", "cancel": "Cancel"}
        return ask(self, memory_parts.sentence, advice, answers) == "yes"

    def leave_training(self) -> bool:
        """Settle what becomes of a live run; False if the window should stay."""
        session = self.session
        if not session.is_training:
            return True
        answer = session.prefs.when_closing
        if answer == "ask":
            answer = self.ask_about_training()
        if answer == "stop":
            if session.queue.is_active:  # or the next would begin as soon as this one has stopped
                session.queue.set_paused(True)
            with problems_to(session.messages.say):
                session.stop_training()
        return answer != "cancel"

    def closeEvent(self, event: QCloseEvent) -> None:
        rewards = self.pages.get("rewards")
        if not (rewards is None or rewards.panel.may_leave()) or not self.leave_training():
            event.ignore()
            return
        self.session.draft.flush()  # the timer of the autosave would not fire any more
        self.session.prefs.geometry = self.saveGeometry()
        self.session.prefs.settings.sync()
        event.accept()


class PageStack(QStackedWidget):
    """`pages`: those built so far, by key."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._entries = {entry.key: entry for entry in PAGES}
        self.pages: dict[str, QWidget] = {}
        self._focused: QWidget | None = None
        theme.application().focusChanged.connect(self._keep_focus_here)

    def show_page(self, key: str) -> QWidget:
        """Build it the first time. Raises KeyError."""
        if key not in self.pages:
            self.pages[key] = self._entries[key].load()(self._session, self)
            self.addWidget(self.pages[key])
        self.setCurrentWidget(self.pages[key])
        self._fit()
        return self.pages[key]

    @property
    def current_key(self) -> str:
        return next((key for key, page in self.pages.items() if page is self.currentWidget()), "")

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _keep_focus_here(self, old: QWidget | None, widget: QWidget | None) -> None:
        """Away from pages that are not shown; and from the window's first widget, where Qt puts the focus of a button
        that its own click disables or hides."""
        shown = self.currentWidget()
        if widget is None or shown is None:
            return
        has_left = widget.window() is self.window() and not shown.isAncestorOf(widget)
        if has_left and old is not None and shown.isAncestorOf(old) and not (old.isEnabled() and old.isVisible()):
            # Nothing between the two takes it. PySide makes the owner of a widget of what previousInFocusChain returns.
            self.window().focusPreviousChild()
            return
        page = next((page for page in self.pages.values() if page.isAncestorOf(widget)), None)
        if page is None or page is self.currentWidget():
            self._focused = widget
        elif self._focused is not None and isValid(self._focused) and self._focused.isVisible():
            self._focused.setFocus(Qt.FocusReason.OtherFocusReason)
        else:
            widget.clearFocus()

    def _fit(self) -> None:
        if self.current_key:
            side = max(0, self.width() - theme.scaled(self._entries[self.current_key].widest)) // 2
            self.setContentsMargins(side, 0, side, 0)
