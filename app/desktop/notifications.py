"""Notifications of the desktop: org.freedesktop.Notifications on Linux, the notification centre on macOS.

On macOS Qt's tray icon delivers them, which needs no entitlement and no other library. Qt hears of a click only while that icon is in
the menu bar, so it stays until the click, or until the user has come back to the app in another way.
"""

from __future__ import annotations

import html
import sys
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Qt, QTimer, Signal
from PySide6.QtWidgets import QApplication, QSystemTrayIcon

if TYPE_CHECKING:
    from app.desktop.session_bus import SessionBus

SERVICE, PATH = "org.freedesktop.Notifications", "/org/freedesktop/Notifications"
DEFAULT_ACTION = "default"
"""The specification's name for a click on the notification itself."""


BACK_MS = 1000
"""How long after the app has come to the front the icon goes: a click brings the app to the front first, and is heard then."""


class Notifier(QObject):
    """Shows notifications.

    Signals:
        clicked – one of ours was clicked.
    """

    clicked = Signal()

    def __init__(self, bus: SessionBus | None = None, parent: QObject | None = None) -> None:
        """`bus`: the desktop's, on Linux."""
        super().__init__(parent)
        self._bus = bus
        self._is_listening = False
        self._shown: set[int] = set()
        self._tray: QSystemTrayIcon | None = None

    def show(self, title: str, sentence: str) -> bool:
        """Show a notification; returns whether the desktop was asked to. It may still keep it from the user."""
        if sys.platform == "darwin":
            return self._show_by_tray(title, sentence)
        return self._bus is not None and self._show_by_bus(self._bus, title, sentence)

    def close(self) -> None:
        """Take the icon in the menu bar away, which would outlive the window."""
        if self._tray is not None:
            self._tray.hide()

    def _show_by_bus(self, bus: SessionBus, title: str, sentence: str) -> bool:
        from jeepney import DBusAddress

        if not self._is_listening:
            self._is_listening = bus.listen(SERVICE, PATH)
            bus.heard.connect(self._on_heard)
        hints = {"desktop-entry": ("s", QApplication.desktopFileName()), "urgency": ("y", 1)}
        body = (
            QApplication.applicationName(), 0, QApplication.desktopFileName(), title,
            html.escape(sentence, quote=False),  # the body may hold markup
            [DEFAULT_ACTION, "Show"], hints, -1,
        )  # fmt: skip
        return bus.call(DBusAddress(PATH, SERVICE, SERVICE), "Notify", "susssasa{sv}i", body, self._on_shown)

    def _on_shown(self, reply: tuple[object, ...]) -> None:
        if reply and isinstance(reply[0], int):
            self._shown.add(reply[0])

    def _on_heard(self, member: str, body: tuple[object, ...]) -> None:
        """A click or the closing of any program's notification."""
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
            app = QApplication.instance()
            assert isinstance(app, QApplication)
            app.applicationStateChanged.connect(self._on_application_state)
        self._tray.show()
        self._tray.showMessage(title, sentence, QSystemTrayIcon.MessageIcon.NoIcon)
        return True

    def _on_application_state(self, state: Qt.ApplicationState) -> None:
        if state == Qt.ApplicationState.ApplicationActive:
            QTimer.singleShot(BACK_MS, self, self.close)
