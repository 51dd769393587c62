"""Every menu entry, once: its word, its shortcut, its icon, and the method of the window that it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction, QActionGroup, QKeySequence

from app import theme
from app.pages import PAGES
from app.widgets.icons import icon

if TYPE_CHECKING:
    from app.window import Window

Keys = str | QKeySequence.StandardKey


@dataclass(frozen=True, slots=True)
class Entry:
    """`slot` is a method of the window; `icon` one of ours, where the toolbar shows the action."""

    name: str
    text: str
    keys: Keys
    slot: str
    icon: str = ""
    tip: str = ""


_STANDARD = QKeySequence.StandardKey
MENUS: dict[str, tuple[Entry | None, ...]] = {
    "File": (
        Entry("new", "New", _STANDARD.New, "new_config"),
        Entry("open", "Open config…", _STANDARD.Open, "open_config"),
        None,
        Entry("save", "Save", _STANDARD.Save, "save_config"),
        Entry("save_as", "Save as…", "Ctrl+Shift+S", "save_config_as"),
        None,
        Entry("quit", "Quit", _STANDARD.Quit, "close"),
    ),
    "Edit": (
        Entry("copy", "Copy", _STANDARD.Copy, "copy"),
        None,
        Entry("find", "Find a setting", _STANDARD.Find, "find_setting"),
    ),
    "Run": (
        Entry("run", "Run", "Ctrl+R", "run", "play", "Train what the form says"),
        Entry("pause", "Pause", "Ctrl+Shift+P", "pause", "pause", "Hold the run, or let it go on"),
        Entry("stop", "Stop", "Ctrl+.", "stop", "stop", "Save and end the run"),
        Entry("save_now", "Save now", "Ctrl+Shift+K", "save_now", "save", "Write a checkpoint now"),
        None,
        Entry("resume", "Resume from the checkpoint", "Ctrl+Shift+R", "resume"),
        Entry("export", "Export…", "Ctrl+E", "export"),
        None,
        Entry("open_folder", "Open the run's folder", "Ctrl+Shift+O", "open_folder"),
        Entry("open_log", "Open the log", "Ctrl+L", "open_log"),
    ),
}
"""None is a line between entries."""
RUN_ACTIONS = ("run", "pause", "stop", "save_now")
THEMES = {"system": ("As the system", "Ctrl+Alt+0"), "light": ("Light", "Ctrl+Alt+1"), "dark": ("Dark", "Ctrl+Alt+2")}


class Actions(QObject):
    """The window's actions by name, its menus and its toolbar's icons."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)  # so that its slots are cut when the window goes
        self.by_name: dict[str, QAction] = {}
        self._window = window
        for title, entries in MENUS.items():
            menu = window.menuBar().addMenu(title)
            for entry in entries:
                menu.addAction(self._action(entry)) if entry else menu.addSeparator()
        self._view_menu()
        self.dress()

    def __getitem__(self, name: str) -> QAction:
        return self.by_name[name]

    def dress(self) -> None:
        """Draw the icons in the theme's colours."""
        for entry in (entry for entries in MENUS.values() for entry in entries if entry and entry.icon):
            self[entry.name].setIcon(icon(entry.icon))

    def follow(self, state: str) -> None:
        """Enable what a run in this state allows; "" is no run."""
        self["run"].setEnabled(state in ("", "finished", "stopped", "failed", "crashed"))
        self["pause"].setEnabled(state in ("running", "paused"))
        self["pause"].setText("Resume" if state == "paused" else "Pause")
        self["stop"].setEnabled(state in ("starting", "running", "paused"))
        self["save_now"].setEnabled(state in ("running", "paused"))
        self["resume"].setEnabled(state in ("stopped", "failed", "crashed"))
        self["export"].setEnabled(state in ("finished", "stopped", "failed", "crashed"))
        for name in ("open_folder", "open_log"):
            self[name].setEnabled(bool(state))

    def _action(self, entry: Entry, call: Callable[[], object] | None = None) -> QAction:
        action = QAction(entry.text, self._window)
        action.setShortcut(QKeySequence(entry.keys))
        keys = action.shortcut().toString(QKeySequence.SequenceFormat.NativeText)
        action.setToolTip(f"{entry.tip or entry.text} ({keys})" if keys else entry.tip or entry.text)
        # Not connected directly: `triggered` says whether the action is checked, which no slot of ours asks.
        done = call or getattr(self._window, entry.slot)
        action.triggered.connect(lambda _checked: done())
        # An icon in a menu would repeat what the toolbar shows.
        action.setIconVisibleInMenu(False)
        self.by_name[entry.name] = action
        return action

    def _view_menu(self) -> None:
        menu, window = self._window.menuBar().addMenu("View"), self._window
        for page in PAGES:
            entry = Entry(page.key, page.title, page.shortcut, "show_page")
            menu.addAction(self._action(entry, partial(window.show_page, page.key)))
        menu.addSeparator()
        for name, text, keys in (
            ("earlier", "Earlier completions", "Ctrl+["),
            ("later", "Later completions", "Ctrl+]"),
        ):
            menu.addAction(self._action(Entry(name, text, keys, f"{name}_completions")))
        menu.addSeparator()
        menu.addAction(self._action(Entry("sidebar", "Collapse sidebar", "Ctrl+B", "toggle_sidebar")))
        menu.addSeparator()
        group = QActionGroup(window)
        for mode, (text, keys) in THEMES.items():
            action = self._action(Entry(f"theme {mode}", text, keys, "set_theme"), partial(window.set_theme, mode))
            action.setCheckable(True)
            action.setChecked(mode == theme.mode())
            menu.addAction(action)
            group.addAction(action)
