"""The D-Bus session bus of a Linux desktop, by jeepney: Qt for Python's own D-Bus cannot send the unsigned numbers that its services ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jeepney import DBusAddress, HeaderFields, MatchRule, Message, MessageType, message_bus, new_method_call, new_signal
from jeepney.io.blocking import DBusConnection, open_dbus_connection
from PySide6.QtCore import QObject, QSocketNotifier, Signal

AUTH_S = 0.5
"""How long the bus may take to answer when the connection is made; a local bus takes a millisecond."""


class SessionBus(QObject):
    """A connection, made on first use. Without a bus every call does nothing and returns False.

    Signals:
        heard(member, body) – a signal that `listen` asked for.
    """

    heard = Signal(str, tuple)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._connection: DBusConnection | None = None
        self._is_missing = False
        self._notifier: QSocketNotifier | None = None
        self._replies: dict[int, Callable[[tuple[Any, ...]], None]] = {}

    def call(
        self,
        address: DBusAddress,
        method: str,
        signature: str,
        body: tuple[Any, ...],
        on_reply: Callable[[tuple[Any, ...]], None] | None = None,
    ) -> bool:
        """Send a call; the answer comes later from the event loop. Returns whether it was sent."""
        return self._send(new_method_call(address, method, signature, body), on_reply)

    def emit_signal(self, address: DBusAddress, member: str, signature: str, body: tuple[Any, ...]) -> bool:
        return self._send(new_signal(address, member, signature, body))

    def listen(self, interface: str, path: str) -> bool:
        """Have the signals of an object come as `heard`."""
        return self._send(message_bus.AddMatch(MatchRule(type="signal", interface=interface, path=path)))

    def close(self) -> None:
        if self._notifier is not None:
            self._notifier.setEnabled(False)
            self._notifier = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, message: Message, on_reply: Callable[[tuple[Any, ...]], None] | None = None) -> bool:
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
        fields = message.header.fields
        if message.header.message_type == MessageType.signal:
            self.heard.emit(str(fields.get(HeaderFields.member, "")), tuple(message.body))
            return
        on_reply = self._replies.pop(int(fields.get(HeaderFields.reply_serial, 0)), None)
        if on_reply is not None and message.header.message_type == MessageType.method_return:
            on_reply(tuple(message.body))

    def _lose(self) -> None:
        """The bus has gone, as it does at the end of a desktop session."""
        self.close()
        self._is_missing = True
