"""Between the app and the desktop: what is dropped and opened, notifications, the icon in the Dock."""

import html
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from PySide6.QtCore import QEvent, QMimeData, QObject, QProcess, Qt, QTimer, Signal
from PySide6.QtGui import QFileOpenEvent
from PySide6.QtWidgets import QApplication, QSystemTrayIcon

from app import theme
from app.widgets.basic.controls import dropped_path
from backend.config.model_and_data_names import DATA_SUFFIXES
from backend.runs.run_folder import RunFolder

Kind = Literal["config", "run", "data", "model", "reward_functions_file"]  # config to open, run to show, or a setting

DEEDS: dict[Kind, str] = {
    "config": "Drop to open {}",
    "run": "Drop to show the run {}",
    "data": "Drop to train on the questions of {}",
    "model": "Drop to train the model {}",
    "reward_functions_file": "Drop to score with the functions of {}",
}


def dropped_file(mime: QMimeData) -> tuple[Kind, Path] | None:
    """The single file or folder of a known kind being dropped, or None."""
    path = dropped_path(mime)
    kind = kind_of(path) if path is not None else None
    return (kind, path) if path is not None and kind else None


def kind_of(path: Path) -> Kind | None:
    """A folder with an event log is a run, one with a config.json a model, any other a dataset."""
    suffix = path.suffix.lower()
    if path.is_dir():
        if RunFolder(path).has_event_log:
            return "run"
        return "model" if (path / "config.json").is_file() else "data"
    if suffix in (".yaml", ".yml"):
        return "config"
    if suffix in DATA_SUFFIXES:
        return "data"
    return "reward_functions_file" if suffix in (".py", ".txt") else None


class FileOpener(QObject):
    """Event filter of the application: calls `open_path` with files that the desktop asks to open."""

    def __init__(self, open_path: Callable[[Path], None], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._open_path = open_path

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.FileOpen and isinstance(event, QFileOpenEvent) and event.file():
            self._open_path(Path(event.file()))
            return True
        return super().eventFilter(watched, event)


def show_percent(percent: int | None) -> None:
    """Show 0 to 100 on the icon in the Dock, or None for the bare icon."""
    if sys.platform == "darwin":
        theme.application().setBadgeNumber(percent or 0)  # 0 takes the badge away


class Notifier(QObject):
    """Shows notifications: with notify-send where that is installed, else with an icon in the menu bar or tray.
    `clicked`: one of the icon's was clicked."""

    clicked = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._tray: QSystemTrayIcon | None = None

    def show(self, title: str, sentence: str) -> None:
        if sys.platform.startswith("linux") and (program := shutil.which("notify-send")):
            name, icon = QApplication.applicationName(), QApplication.desktopFileName()
            text = html.escape(sentence, quote=False)  # the body may hold markup
            QProcess.startDetached(program, ["--app-name", name, "--icon", icon, "--", title, text])
            return
        if self._tray is None:
            self._tray = QSystemTrayIcon(QApplication.windowIcon(), self)
            self._tray.messageClicked.connect(self.clicked)
            self._tray.messageClicked.connect(self._tray.hide)
            theme.application().applicationStateChanged.connect(self._on_application_state)
        self._tray.show()
        self._tray.showMessage(title, sentence, QSystemTrayIcon.MessageIcon.NoIcon)

    def close(self) -> None:
        """Remove the icon in the menu bar, which would outlive the window."""
        if self._tray is not None:
            self._tray.hide()

    def _on_application_state(self, state: Qt.ApplicationState) -> None:
        if state == Qt.ApplicationState.ApplicationActive:
            # A click brings the app to the front first, and is heard then.
            QTimer.singleShot(1000, self, self.close)
