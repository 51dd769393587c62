"""Between the app and the desktop: what is dropped and opened, notifications, the icon in the Dock or launcher."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PySide6.QtCore import QEvent, QMimeData, QObject, QSocketNotifier, Qt, QTimer, Signal
from PySide6.QtGui import QFileOpenEvent
from PySide6.QtWidgets import QApplication, QSystemTrayIcon

from app import theme
from app.widgets.basic.controls import dropped_path
from backend.config.model_and_data_names import DATA_SUFFIXES
from backend.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from jeepney import Message
    from jeepney.io.blocking import DBusConnection

Kind = Literal["config", "run", "data", "model", "reward_functions_file"]
"""A config to open, a run to show, or the setting to put a path into."""

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


INTERFACE, LAUNCHER_PATH = "com.canonical.Unity.LauncherEntry", "/org/grpostudio/LauncherEntry"


class LauncherIcon:
    """Shows a percentage on the icon. `bus`: the desktop's, on Linux."""

    def __init__(self, bus: SessionBus | None = None) -> None:
        self._bus = bus
        self._shown: int | None = None

    def show_percent(self, percent: int | None) -> None:
        """Show 0 to 100, or None for the bare icon."""
        if percent == self._shown:
            return
        self._shown = percent
        if sys.platform == "darwin":
            theme.application().setBadgeNumber(percent or 0)  # 0 takes the badge away
        elif self._bus is not None:
            from jeepney import DBusAddress, new_signal

            progress = {"progress": ("d", (percent or 0) / 100), "progress-visible": ("b", percent is not None)}
            uri = f"application://{QApplication.desktopFileName()}.desktop"
            address = DBusAddress(LAUNCHER_PATH, interface=INTERFACE)
            self._bus.send(new_signal(address, "Update", "sa{sv}", (uri, progress)))


SERVICE, PATH = "org.freedesktop.Notifications", "/org/freedesktop/Notifications"


class Notifier(QObject):
    """Shows notifications. `clicked`: one of ours was clicked. `bus`: the desktop's, on Linux."""

    clicked = Signal()

    def __init__(self, bus: SessionBus | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._bus = bus
        self._asked: set[int] = set()  # serial numbers of our requests
        self._shown: set[object] = set()  # the desktop's numbers of our notifications
        self._tray: QSystemTrayIcon | None = None
        if bus is not None:
            bus.heard.connect(self._on_heard)

    def show(self, title: str, sentence: str) -> None:
        if sys.platform == "darwin":
            if self._tray is None:
                self._tray = QSystemTrayIcon(QApplication.windowIcon(), self)
                self._tray.messageClicked.connect(self.clicked)
                self._tray.messageClicked.connect(self._tray.hide)
                theme.application().applicationStateChanged.connect(self._on_application_state)
            self._tray.show()
            self._tray.showMessage(title, sentence, QSystemTrayIcon.MessageIcon.NoIcon)
        elif self._bus is not None:
            from jeepney import DBusAddress, MatchRule, message_bus, new_method_call

            if not self._asked:
                self._bus.send(message_bus.AddMatch(MatchRule(type="signal", interface=SERVICE, path=PATH)))
            hints = {"desktop-entry": ("s", QApplication.desktopFileName()), "urgency": ("y", 1)}
            text = html.escape(sentence, quote=False)  # the body may hold markup
            app, icon = QApplication.applicationName(), QApplication.desktopFileName()
            body = (app, 0, icon, title, text, ["default", "Show"], hints, -1)
            call = new_method_call(DBusAddress(PATH, SERVICE, SERVICE), "Notify", "susssasa{sv}i", body)
            self._asked.add(self._bus.send(call))

    def close(self) -> None:
        """Remove the icon in the menu bar, which would outlive the window."""
        if self._tray is not None:
            self._tray.hide()

    def _on_heard(self, message: Message) -> None:
        from jeepney import HeaderFields, MessageType

        fields, first = message.header.fields, next(iter(message.body), None)
        if fields.get(HeaderFields.reply_serial) in self._asked:
            if message.header.message_type == MessageType.method_return:
                self._shown.add(first)
        elif first in self._shown and fields.get(HeaderFields.member) == "ActionInvoked":
            self.clicked.emit()
        elif fields.get(HeaderFields.member) == "NotificationClosed":
            self._shown.discard(first)

    def _on_application_state(self, state: Qt.ApplicationState) -> None:
        if state == Qt.ApplicationState.ApplicationActive:
            # A click brings the app to the front first, and is heard then.
            QTimer.singleShot(1000, self, self.close)


class SessionBus(QObject):
    """A connection, made on first use."""

    heard = Signal(object)  # Message: an answer, or a signal that was subscribed to

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._connection: DBusConnection | None = None
        self._is_missing = False
        self._notifier: QSocketNotifier | None = None

    def close(self) -> None:
        self._is_missing = True
        if self._notifier is not None:
            self._notifier.setEnabled(False)
            self._notifier = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def send(self, message: Message) -> int:
        """Send a message, whose answer is heard later. Returns its serial number, 0 if it was not sent."""
        if self._connection is None and not self._is_missing:
            from jeepney.io.blocking import open_dbus_connection

            try:
                self._connection = open_dbus_connection("SESSION", auth_timeout=0.5)
            except Exception:  # no bus, no permission, an odd address: jeepney raises a different type for each
                self._is_missing = True
                return 0
            self._notifier = QSocketNotifier(self._connection.sock.fileno(), QSocketNotifier.Type.Read, self)
            self._notifier.activated.connect(self._read)
        if self._connection is None:
            return 0
        serial = next(self._connection.outgoing_serial)
        try:
            self._connection.send(message, serial=serial)
        except OSError:
            self.close()
            return 0
        return serial

    def _read(self) -> None:
        while self._connection is not None:
            try:
                message = self._connection.receive(timeout=0)
            except TimeoutError:
                return
            except OSError:
                self.close()
                return
            self.heard.emit(message)
