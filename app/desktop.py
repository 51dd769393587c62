"""Between the app and the desktop: what is dropped and opened, notifications, the icon in the Dock or launcher."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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

_DEEDS: dict[Kind, str] = {
    "config": "Drop to open {}",
    "run": "Drop to show the run {}",
    "data": "Drop to train on the questions of {}",
    "model": "Drop to train the model {}",
    "reward_functions_file": "Drop to score with the functions of {}",
}


@dataclass(frozen=True, slots=True)
class DroppedFile:
    """`kind`: a config to open, a run to show, or the setting to put its path into."""

    kind: Kind
    path: Path

    @property
    def sentence(self) -> str:
        return _DEEDS[self.kind].format(self.path.name)


def dropped_file(mime: QMimeData) -> DroppedFile | None:
    """The single file or folder of a known kind being dropped, or None."""
    path = dropped_path(mime)
    kind = kind_of(path) if path is not None else None
    return DroppedFile(kind, path) if path is not None and kind else None


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
DEFAULT_ACTION = "default"


class Notifier(QObject):
    """Shows notifications. `clicked`: one of ours was clicked. `bus`: the desktop's, on Linux."""

    clicked = Signal()

    def __init__(self, bus: SessionBus | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._bus = bus
        self._is_listening = False
        self._shown: set[int] = set()
        self._tray: QSystemTrayIcon | None = None

    def show(self, title: str, sentence: str) -> bool:
        """True if the desktop was asked to show it."""
        if sys.platform == "darwin":
            return self._show_by_tray(title, sentence)
        return self._bus is not None and self._show_by_bus(self._bus, title, sentence)

    def close(self) -> None:
        """Remove the icon in the menu bar, which would outlive the window."""
        if self._tray is not None:
            self._tray.hide()

    def _show_by_bus(self, bus: SessionBus, title: str, sentence: str) -> bool:
        from jeepney import DBusAddress, MatchRule, message_bus, new_method_call

        if not self._is_listening:
            rule = MatchRule(type="signal", interface=SERVICE, path=PATH)
            self._is_listening = bus.send(message_bus.AddMatch(rule))
            bus.heard.connect(self._on_heard)
        hints = {"desktop-entry": ("s", QApplication.desktopFileName()), "urgency": ("y", 1)}
        body = (
            QApplication.applicationName(),
            0,
            QApplication.desktopFileName(),
            title,
            html.escape(sentence, quote=False),  # the body may hold markup
            [DEFAULT_ACTION, "Show"],
            hints,
            -1,
        )
        address = DBusAddress(PATH, SERVICE, SERVICE)
        return bus.send(new_method_call(address, "Notify", "susssasa{sv}i", body), self._on_shown)

    def _on_shown(self, reply: tuple[object, ...]) -> None:
        if reply and isinstance(reply[0], int):
            self._shown.add(reply[0])

    def _on_heard(self, member: str, body: tuple[object, ...]) -> None:
        if not body or body[0] not in self._shown:
            return
        if member == "ActionInvoked":
            self.clicked.emit()
        elif member == "NotificationClosed":
            self._shown.discard(int(str(body[0])))

    def _show_by_tray(self, title: str, sentence: str) -> bool:
        if self._tray is None:
            self._tray = QSystemTrayIcon(QApplication.windowIcon(), self)
            self._tray.messageClicked.connect(self.clicked)
            self._tray.messageClicked.connect(self._tray.hide)
            theme.application().applicationStateChanged.connect(self._on_application_state)
        self._tray.show()
        self._tray.showMessage(title, sentence, QSystemTrayIcon.MessageIcon.NoIcon)
        return True

    def _on_application_state(self, state: Qt.ApplicationState) -> None:
        if state == Qt.ApplicationState.ApplicationActive:
            # A click brings the app to the front first, and is heard then.
            QTimer.singleShot(1000, self, self.close)


AUTH_S = 0.5
"""Time limit of the connection."""


class SessionBus(QObject):
    """A connection, made on first use. `heard(member, body)`: a signal that was subscribed to."""

    heard = Signal(str, tuple)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._connection: DBusConnection | None = None
        self._is_missing = False
        self._notifier: QSocketNotifier | None = None
        self._replies: dict[int, Callable[[tuple[Any, ...]], None]] = {}

    def close(self) -> None:
        if self._notifier is not None:
            self._notifier.setEnabled(False)
            self._notifier = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def send(self, message: Message, on_reply: Callable[[tuple[Any, ...]], None] | None = None) -> bool:
        """Send a message; its answer comes later from the event loop. False if it was not sent."""
        if not self._is_connected():
            return False
        assert self._connection is not None
        serial = next(self._connection.outgoing_serial)
        if on_reply is not None:
            self._replies[serial] = on_reply
        try:
            self._connection.send(message, serial=serial)
        except OSError:
            self._lose()
            return False
        return True

    def _is_connected(self) -> bool:
        if self._connection is None and not self._is_missing:
            from jeepney.io.blocking import open_dbus_connection

            try:
                self._connection = open_dbus_connection("SESSION", auth_timeout=AUTH_S)
            except Exception:  # no bus, no permission, an odd address: jeepney raises a different type for each
                self._is_missing = True
                return False
            self._notifier = QSocketNotifier(self._connection.sock.fileno(), QSocketNotifier.Type.Read, self)
            self._notifier.activated.connect(self._read)
        return self._connection is not None

    def _read(self) -> None:
        while self._connection is not None:
            try:
                message = self._connection.receive(timeout=0)
            except TimeoutError:
                return
            except OSError:
                self._lose()
                return
            self._take(message)

    def _take(self, message: Message) -> None:
        from jeepney import HeaderFields, MessageType

        fields = message.header.fields
        if message.header.message_type == MessageType.signal:
            self.heard.emit(str(fields.get(HeaderFields.member, "")), tuple(message.body))
            return
        on_reply = self._replies.pop(int(fields.get(HeaderFields.reply_serial, 0)), None)
        if on_reply is not None and message.header.message_type == MessageType.method_return:
            on_reply(tuple(message.body))

    def _lose(self) -> None:
        self.close()
        self._is_missing = True
