"""The preferences: theme, notices, what closing the window does, folders, and the account at Hugging Face."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from PySide6.QtWidgets import QPushButton, QWidget

from app import theme
from app.state.prefs import FOLDERS, Prefs
from app.state.processes import Service
from app.widgets.basic.controls import CheckBox, ComboBox, ElidedLabel
from app.widgets.basic.dialogs import Dialog, open_folder, open_path
from app.widgets.basic.labels import button, from_home, label, plain_tip
from app.widgets.basic.layout import column, configure, grid, row
from app.widgets.upload_dialog import HubAccount
from backend.utils.hub_cache import hub_cache
from backend.utils.places import runs_folder

CLOSING = {"ask": "Ask", "keep": "Keep training", "stop": "Stop and save"}
"""Preference for closing the window while a run trains → its words."""
FOLDER_HINT = "A folder that you choose is used from the next start of the window, by all that it starts."
ANONYMOUS = "Not logged in. Uploads and gated models need an account."


class FolderLine:
    """A folder by its kind, one of FOLDERS: where it is, and buttons that open and change it."""

    def __init__(self, prefs: Prefs, kind: str, words: str, folder: Path) -> None:
        self._prefs, self._kind, self._words, self.folder = prefs, kind, words, folder
        self.place = ElidedLabel(colour="text")
        self.show_button = button("Show", lambda: open_path(self.folder), name=f"Show the folder of {words}")
        self.choose = button("Choose…", self._choose, name=f"Choose the folder of {words}")
        variable = FOLDERS[kind]
        is_given = bool(os.environ.get(variable)) and os.environ[variable] != prefs.folder_for(kind)
        configure(self.choose, enabled=not is_given, toolTip=f"Set by {variable}" if is_given else "")
        self._show_place()

    def _choose(self) -> None:
        chosen = open_folder(self.choose, self._kind, f"Folder of {self._words}")
        if chosen is not None:
            self._prefs.set_folder_for(self._kind, chosen)
            self.folder = chosen
            self._show_place()

    def _show_place(self) -> None:
        configure(self.place, text=from_home(str(self.folder)), toolTip=plain_tip(str(self.folder)))


class PreferencesDialog(Dialog):
    def __init__(
        self,
        prefs: Prefs,
        themes: Mapping[str, str],
        set_theme: Callable[[str], None],
        service: Service,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__("Preferences", parent)
        self.setMinimumWidth(theme.scaled(560))
        self.theme = ComboBox(name="Theme", items=themes)
        self.theme.choose(prefs.theme)
        self.theme.activated.connect(lambda: set_theme(self.theme.currentData()))
        self.closing = ComboBox(name="When the window is closed while a run trains", items=CLOSING)
        self.closing.choose(prefs.when_closing)
        self.closing.activated.connect(lambda: setattr(prefs, "when_closing", self.closing.currentData()))
        self.notifies = CheckBox(
            "Notify me when a run ends or is in trouble",
            tip="Only while the window is not in front",
            checked=prefs.notifies,
            clicked=lambda on: setattr(prefs, "notifies", on),
        )
        self.shows_progress = CheckBox(
            "Show the percent of the run on the app's icon",
            checked=prefs.shows_progress,
            clicked=lambda on: setattr(prefs, "shows_progress", on),
        )
        muted = partial(label, role="muted")
        window = grid(((muted("Theme"), self.theme), (muted("Closed while a run trains"), self.closing)), stretch=1)
        self.folders = {
            "runs": FolderLine(prefs, "runs", "runs", runs_folder()),
            "models": FolderLine(prefs, "models", "models and datasets", hub_cache()),
        }
        lines = [
            (muted(words), each.place, row(each.show_button, each.choose))
            for words, each in zip(("Runs", "Models and datasets"), self.folders.values(), strict=True)
        ]
        self.account = HubAccount(service, is_always_open=True)
        self.account.label.setMinimumHeight(2 * self.fontMetrics().lineSpacing())  # a problem may need both lines
        self.account.ask(ANONYMOUS, "A token is stored ({source}). {problem}")
        heading = partial(label, font=theme.heading_font())
        parts = (
            *(heading("Window"), window, self.notifies, self.shows_progress, theme.SPACE),
            *(heading("Folders"), grid(lines, stretch=1), muted(FOLDER_HINT, wrap=True), theme.SPACE),
            *(heading("Hugging Face"), self.account, None, self.close_box()),
        )
        column(*parts, into=self, spacing=12, margins=3 * theme.SPACE)
        for each in self.findChildren(QPushButton):
            configure(each, autoDefault=False, default=False)  # Return in the token only logs in
