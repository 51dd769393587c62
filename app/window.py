"""The frame: sidebar, menus, toolbar, the pages (each built when first shown) and the status strip.

It knows pages by their list and runs by their state, and not what a page contains. It never loads the engine, and shows no error
dialogs: errors are sentences in the strip or on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QCloseEvent, QDragEnterEvent, QDragLeaveEvent, QDropEvent, QResizeEvent
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
from app.desktop.drop_target import DroppedFile, dropped_file, kind_of
from app.menus import RUN_ACTIONS, Menus
from app.message_boxes import ask
from app.page_stack import PageArea, PageStack
from app.pages import PAGES
from app.run_window import RunWindow
from app.state.memory_parts import MemoryParts
from app.state.session import Session
from app.state.undo import History
from app.widgets.basic import icons
from app.widgets.basic.dialogs import keep_folders_in
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import PlainLabel
from app.widgets.basic.layout import on_screen
from app.widgets.consent_dialog import HostsDialog, ask_consent
from app.widgets.form.field import UndoKeys
from app.widgets.window_frame import DropOverlay, Sidebar, StatusStrip
from backend.distributed.allowed_hosts import HostsToAllow
from backend.rewards.catalogue.allowed_code import CodeToAllow

MINIMUM = (880, 600)
LEAST_PAGE = (816, 480)
"""What a page is laid out for at least: in a window of MINIMUM there is as much. A screen that has less room, as one of 1280×800 pixels at
200 %, scrolls."""
FIRST_SIZE = (1280, 800)
FORM_PAGES = ("train", "dataset", "rewards")
"""Pages that show settings of the form."""
NARROW = 1000
"""Below this width the sidebar shows icons alone, whatever the preference says."""


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
        session.confirm_over_memory = self.ask_about_memory
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
