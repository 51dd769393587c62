"""The table of menu entries: text, shortcut, icon, and the slot that each calls; and the QActions made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction, QActionGroup, QKeySequence, QUndoStack
from PySide6.QtWidgets import QMenu

from app import theme
from app.file_menu import FileWindow
from app.pages import PAGES
from app.widgets.basic.icons import icon
from app.widgets.basic.labels import key_name

Keys = str | QKeySequence.StandardKey


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """A menu entry. `slot` is a method of the window or, where `page` is set, of that page, which is then shown. `starts_disabled`:
    until that page enables it. `icon`: the name of our icon, for actions in the toolbar."""

    name: str
    text: str
    keys: Keys
    slot: str
    icon: str = ""
    tip: str = ""
    page: str = ""
    starts_disabled: bool = False


_STANDARD = QKeySequence.StandardKey
MENUS: dict[str, tuple[MenuEntry | None, ...]] = {
    "File": (
        MenuEntry("new", "New", _STANDARD.New, "new_config"),
        MenuEntry("open", "Open config…", _STANDARD.Open, "open_config"),
        MenuEntry("presets", "Presets…", "Ctrl+Shift+T", "show_presets"),
        None,
        MenuEntry("save", "Save", _STANDARD.Save, "save_config"),
        MenuEntry("save_as", "Save as…", "Ctrl+Shift+S", "save_config_as"),
        MenuEntry("export_config", "Export for mlx-lm-lora…", "Ctrl+Shift+E", "export_config"),
        MenuEntry("export_for_trl", "Export for TRL…", "Ctrl+Alt+Shift+E", "export_for_trl"),
        None,
        MenuEntry("quit", "Quit", _STANDARD.Quit, "close"),
    ),
    "Edit": (
        MenuEntry("undo", "Undo", _STANDARD.Undo, "undo"),
        MenuEntry("redo", "Redo", "Ctrl+Shift+Z", "redo"),
        None,
        MenuEntry("copy", "Copy", _STANDARD.Copy, "copy"),
        MenuEntry("copy_command", "Copy the command", "Ctrl+Shift+C", "copy_command"),
        None,
        MenuEntry("find", "Find", _STANDARD.Find, "find_text", tip="Text in completions, or a setting"),
        None,
        MenuEntry("preferences", "Preferences…", "Ctrl+,", "show_preferences"),
    ),
    "Run": (
        MenuEntry("run", "Run", "Ctrl+R", "run", "play", "Train what the form says"),
        MenuEntry(
            "queue_run",
            "Add to queue",
            "Ctrl+Shift+A",
            "queue_run",
            "queue",
            "Train what the form says when its turn comes",
        ),
        MenuEntry("pause", "Pause", "Ctrl+Shift+P", "pause", "pause", "Hold the run, or let it go on"),
        MenuEntry("stop", "Stop", "Ctrl+.", "stop", "stop", "Save and end the run"),
        MenuEntry("save_now", "Save now", "Ctrl+Shift+K", "save_now", "save", "Write a checkpoint now"),
        MenuEntry("change_settings", "Change settings…", "Ctrl+Shift+J", "change_settings", page="monitor"),
        MenuEntry("finish_step", "Stop after this step", "Ctrl+Alt+Shift+.", "finish_step", page="monitor"),
        MenuEntry("stop_when", "Stop when…", "Ctrl+Alt+J", "stop_when", page="monitor"),
        None,
        MenuEntry("take_over", "Take over from another window", "Ctrl+Alt+T", "take_over"),
        MenuEntry("resume", "Resume from the checkpoint", "Ctrl+Shift+R", "resume"),
        MenuEntry("export", "Export…", "Ctrl+E", "export"),
        MenuEntry("evaluate_run", "Evaluate the run", "Ctrl+Alt+E", "start", page="evaluate"),
        None,
        MenuEntry("open_folder", "Open the run's folder", "Ctrl+Shift+O", "open_folder"),
        MenuEntry("open_log", "Open the log", "Ctrl+L", "open_log"),
    ),
    "Rewards": (
        MenuEntry("sample", "Sample completions", "Ctrl+D", "sample", page="rewards"),
        MenuEntry(
            "try_rows",
            "Try rewards on the chosen rows",
            "Ctrl+Shift+D",
            "try_rewards",
            page="dataset",
            starts_disabled=True,
        ),
        MenuEntry("read_completions", "Open completions…", "Ctrl+Alt+O", "read_completions", page="rewards"),
        MenuEntry("paste_completions", "Paste completions", "Ctrl+Shift+V", "paste_completions", page="rewards"),
        None,
        MenuEntry("score", "Score again", "Ctrl+Return", "score", page="rewards", starts_disabled=True),
        MenuEntry("cancel", "Cancel", "Ctrl+Alt+.", "cancel", page="rewards", starts_disabled=True),
        None,
        MenuEntry("keep_case", "Keep as case", "Ctrl+K", "keep_case", page="rewards", starts_disabled=True),
        MenuEntry("drop_case", "Remove the case", "Ctrl+Backspace", "drop_case", page="rewards", starts_disabled=True),
        None,
        MenuEntry("new_file", "New reward file…", "Ctrl+Alt+N", "new_file", page="rewards"),
        MenuEntry("open_file", "Open reward file…", "Ctrl+Alt+R", "open_file", page="rewards"),
        MenuEntry(
            "save_file", "Save reward file and score", "Ctrl+Alt+S", "save_file", page="rewards", starts_disabled=True
        ),
    ),
    "Chat": (
        MenuEntry(
            "load_chat", "Load or unload the model", "Ctrl+Alt+L", "load_or_unload", page="chat", starts_disabled=True
        ),
        None,
        MenuEntry(
            "new_conversation", "New conversation", "Ctrl+Alt+C", "new_conversation", page="chat", starts_disabled=True
        ),
        MenuEntry("stop_answer", "Stop the answer", "Ctrl+Shift+.", "stop_answer", page="chat", starts_disabled=True),
        None,
        MenuEntry(
            "previous_prompt", "Previous prompt", "Ctrl+Alt+Up", "previous_prompt", page="chat", starts_disabled=True
        ),
        MenuEntry("next_prompt", "Next prompt", "Ctrl+Alt+Down", "next_prompt", page="chat", starts_disabled=True),
        MenuEntry(
            "random_prompt", "Random prompt", "Ctrl+Alt+Right", "random_prompt", page="chat", starts_disabled=True
        ),
    ),
}
"""None is a separator."""
VIEW: tuple[MenuEntry | None, ...] = (
    MenuEntry("earlier", "Earlier completions", "Ctrl+[", "show_earlier", page="completions"),
    MenuEntry("later", "Later completions", "Ctrl+]", "show_later", page="completions"),
    MenuEntry("next_kind", "Next completion of the filter", "Ctrl+G", "show_next", page="completions"),
    MenuEntry(
        "previous_kind", "Previous completion of the filter", "Ctrl+Shift+G", "show_previous", page="completions"
    ),
    None,
    MenuEntry("next_group", "Next group of settings", "Ctrl+PgDown", "show_next_group", page="train"),
    MenuEntry("previous_group", "Previous group of settings", "Ctrl+PgUp", "show_previous_group", page="train"),
    None,
    MenuEntry("back", "Back in the guide", "Ctrl+Alt+Left", "go_back", page="guide"),
    None,
    MenuEntry("sidebar", "Collapse sidebar", "Ctrl+B", "toggle_sidebar"),
    None,
)
"""Of the View menu, between the pages and the themes."""
HELP: tuple[MenuEntry | None, ...] = (
    MenuEntry("help_here", "Help on this field", "F1", "show_help_here"),
    None,
    MenuEntry("read_guide", "Guide", "Ctrl+?", "show_guide"),
    MenuEntry("glossary", "Glossary", "Ctrl+Alt+G", "show_glossary"),
    MenuEntry("shortcuts", "Keyboard shortcuts", "Ctrl+/", "show_shortcuts"),
    MenuEntry("files", "What is stored where", "Ctrl+Alt+W", "show_files"),
    None,
    MenuEntry("updates", "Check for updates", "Ctrl+Alt+U", "check_for_updates"),
    MenuEntry("update_checks", "Check for updates at start", "Ctrl+Alt+Shift+U", "set_update_checks"),
    None,
    MenuEntry("report", "Report a problem…", "Ctrl+Alt+P", "report_problem"),
    None,
    MenuEntry("about", "About GRPO Studio", "Ctrl+Alt+I", "show_about"),
)
"""The last menu, after View. macOS moves About into the app's own menu."""
RUN_ACTIONS = ("run", "pause", "stop", "save_now")
THEMES = {"system": ("As the system", "Ctrl+Alt+0"), "light": ("Light", "Ctrl+Alt+1"), "dark": ("Dark", "Ctrl+Alt+2")}


class Menus(QObject):
    """The window's actions by name, its menus and its toolbar's icons.

    Attributes:
        by_name – action name → QAction.
        recent – the submenu of recent files.
    """

    def __init__(self, window: FileWindow) -> None:
        super().__init__(window)  # so that its slots are disconnected when the window is deleted
        self._is_paused = False
        self.by_name: dict[str, QAction] = {}
        self._window = window
        for title, entries in MENUS.items():
            menu = window.menuBar().addMenu(title)
            for entry in entries:
                menu.addAction(self._action(entry)) if entry else menu.addSeparator()
        self.recent = self._recent_menu()
        self._view_menu()
        self._help_menu()
        self.update_icons()

    def __getitem__(self, name: str) -> QAction:
        return self.by_name[name]

    def update_icons(self) -> None:
        """Redraw the icons in the theme's colours."""
        for entry in (entry for entries in MENUS.values() for entry in entries if entry and entry.icon):
            self[entry.name].setIcon(icon(entry.icon))
        self._show_pause()

    def show_state(self, state: str, *, controls: bool = True) -> None:
        """Enable the actions that a run in this state allows; "" is no run. `controls`: no other window controls it."""
        self["run"].setEnabled(state in ("", "queued", "finished", "stopped", "failed", "crashed"))
        self["pause"].setEnabled(controls and state in ("running", "paused"))
        self._is_paused = state == "paused"
        self._show_pause()
        self["stop"].setEnabled(controls and state in ("starting", "running", "paused"))
        self["save_now"].setEnabled(controls and state in ("running", "paused"))
        self["take_over"].setEnabled(not controls)
        for name in ("change_settings", "finish_step", "stop_when"):
            self[name].setEnabled(controls and state in ("running", "paused"))
        self["resume"].setEnabled(state in ("stopped", "failed", "crashed"))
        self["export"].setEnabled(state in ("finished", "stopped", "failed", "crashed"))
        for name in ("open_folder", "open_log"):
            self[name].setEnabled(bool(state))

    def _show_pause(self) -> None:
        """Text and icon of the action that holds the run, or lets it go on."""
        self["pause"].setText("Resume" if self._is_paused else "Pause")
        self["pause"].setIcon(icon("play" if self._is_paused else "pause"))

    def set_enabled(self, enabled: Mapping[str, bool]) -> None:
        """Action → whether it is enabled, as a page reports it."""
        for name, is_enabled in enabled.items():
            self[name].setEnabled(is_enabled)

    def follow_history(self, history: QUndoStack) -> None:
        """Enable and name Undo and Redo after the next step: “Undo Temperature”."""
        for name in ("undo", "redo"):
            self[name].setEnabled(False)
        history.canUndoChanged.connect(self["undo"].setEnabled)
        history.canRedoChanged.connect(self["redo"].setEnabled)
        # Bound methods, no lambdas: they are disconnected when the window is deleted, and the history still emits after that.
        history.undoTextChanged.connect(self._name_undo)
        history.redoTextChanged.connect(self._name_redo)

    def _name_undo(self, what: str) -> None:
        self["undo"].setText(f"Undo {what}".strip())

    def _name_redo(self, what: str) -> None:
        self["redo"].setText(f"Redo {what}".strip())

    def _recent_menu(self) -> QMenu:
        """Filled whenever it opens, as another window may have opened a file meanwhile."""
        menu = QMenu("Open recent", self._window)
        menu.aboutToShow.connect(lambda: self._fill_recent(menu))
        shown_in = self["presets"].associatedObjects()
        file_menu = next(menu for menu in shown_in if isinstance(menu, QMenu))
        file_menu.insertMenu(self["presets"], menu)
        return menu

    def _fill_recent(self, menu: QMenu) -> None:
        menu.clear()
        prefs = self._window.session.prefs
        existing = [path for path in prefs.recent_files if path.exists()]
        for path in existing:
            action = menu.addAction(f"{path.name}  –  {path.parent}")
            action.triggered.connect(lambda _checked, path=path: self._window.open_path(path))
        if existing:
            menu.addSeparator()
        menu.addAction("Clear the list", prefs.forget_recent).setEnabled(bool(existing))

    def _action(self, entry: MenuEntry, call: Callable[[], object] | None = None) -> QAction:
        action = QAction(entry.text, self._window)
        action.setShortcut(QKeySequence(entry.keys))
        keys = key_name(action.shortcut())
        action.setToolTip(f"{entry.tip or entry.text} ({keys})" if keys else entry.tip or entry.text)
        # Not connected directly: `triggered` passes whether the action is checked, which our slots do not take.
        on_page = partial(self._window.do_on_page, entry.page, entry.slot) if entry.page else None
        run = call or on_page or getattr(self._window, entry.slot)
        action.triggered.connect(lambda _checked: run())
        # An icon in a menu would repeat what the toolbar shows.
        action.setIconVisibleInMenu(False)
        action.setEnabled(not entry.starts_disabled)
        self.by_name[entry.name] = action
        return action

    def _view_menu(self) -> None:
        menu, window = self._window.menuBar().addMenu("View"), self._window
        for page in PAGES:
            entry = MenuEntry(page.key, page.title, page.shortcut, "show_page")
            menu.addAction(self._action(entry, partial(window.show_page, page.key)))
        menu.addSeparator()
        for entry in VIEW:
            menu.addAction(self._action(entry)) if entry else menu.addSeparator()
        group = QActionGroup(window)
        for mode, (text, keys) in THEMES.items():
            action = self._action(MenuEntry(f"theme {mode}", text, keys, "set_theme"), partial(window.set_theme, mode))
            action.setCheckable(True)
            action.setChecked(mode == theme.mode())
            menu.addAction(action)
            group.addAction(action)

    def _help_menu(self) -> None:
        menu = self._window.menuBar().addMenu("Help")
        for entry in HELP:
            menu.addAction(self._action(entry)) if entry else menu.addSeparator()
        self["update_checks"].setCheckable(True)
        self["update_checks"].setChecked(self._window.session.prefs.check_updates)
        self["preferences"].setMenuRole(QAction.MenuRole.PreferencesRole)
        self["about"].setMenuRole(QAction.MenuRole.AboutRole)
