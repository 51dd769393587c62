"""The app's icon in the Dock or launcher: the percent of the run that trains.

macOS badges the icon with a number. Linux launchers that follow Unity's interface (GNOME's dock, KDE's task bar) draw a bar.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from PySide6.QtWidgets import QApplication

if TYPE_CHECKING:
    from app.desktop.session_bus import SessionBus

INTERFACE, LAUNCHER_PATH = "com.canonical.Unity.LauncherEntry", "/org/grpostudio/LauncherEntry"


class LauncherIcon:
    """Shows a percentage on the icon. The same one twice costs nothing."""

    def __init__(self, bus: SessionBus | None = None) -> None:
        """`bus`: the desktop's, on Linux."""
        self._bus = bus
        self._shown: int | None = None

    def show_percent(self, percent: int | None) -> None:
        """Show how much is done, 0 to 100; None shows the bare icon."""
        if percent == self._shown:
            return
        self._shown = percent
        if sys.platform == "darwin":
            app = QApplication.instance()
            assert isinstance(app, QApplication)
            app.setBadgeNumber(percent or 0)  # 0 takes the badge away
        elif self._bus is not None:
            self._emit(self._bus, percent)

    def _emit(self, bus: SessionBus, percent: int | None) -> None:
        from jeepney import DBusAddress

        progress = {"progress": ("d", (percent or 0) / 100), "progress-visible": ("b", percent is not None)}
        uri = f"application://{QApplication.desktopFileName()}.desktop"
        bus.emit_signal(DBusAddress(LAUNCHER_PATH, interface=INTERFACE), "Update", "sa{sv}", (uri, progress))
