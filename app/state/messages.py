"""The messages of the status strip."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PySide6.QtCore import QObject, QTimer, Signal

from backend.utils.errors import UserError

NOTICE_S = 15.0
NOTICE = "notice"  # cause of messages about something that has happened


@contextmanager
def problems_to(say: Callable[[str], object]) -> Iterator[None]:
    """A UserError ends the block, and its sentence goes to `say`."""
    try:
        yield
    except UserError as error:
        say(error.faults[0].sentence)


@dataclass(frozen=True, slots=True)
class Offer:
    text: str
    take: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Message:
    """It stays while `holds()`, until it is withdrawn, or for NOTICE_S."""

    sentence: str
    cause: str = NOTICE
    holds: Callable[[], bool] | None = None
    offer: Offer | None = None


class Messages(QObject):
    """The messages that hold, oldest first."""

    changed = Signal()  # `current` is another
    said = Signal(str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._messages: list[Message] = []
        self._review_timer = QTimer(self, singleShot=True, interval=150)
        self._review_timer.timeout.connect(self.review)
        self._notice_timer = QTimer(self, singleShot=True, interval=round(NOTICE_S * 1000))
        self._notice_timer.timeout.connect(lambda: self.withdraw(NOTICE))

    @property
    def current(self) -> Message | None:
        return self._messages[-1] if self._messages else None

    def say(
        self, sentence: str, cause: str = NOTICE, holds: Callable[[], bool] | None = None, offer: Offer | None = None
    ) -> None:
        """Show a message in place of the earlier one of this cause."""
        kept = [message for message in self._messages if message.cause != cause]
        if sentence:
            kept.append(Message(sentence, cause, holds, offer))
            self.said.emit(sentence)
            if cause == NOTICE:
                self._notice_timer.start()
        self._replace(kept)

    def withdraw(self, *causes: str) -> None:
        self._replace([message for message in self._messages if message.cause not in causes])

    def review(self) -> None:
        self._review_timer.stop()
        self._replace([message for message in self._messages if message.holds is None or message.holds()])

    def review_soon(self) -> None:
        if any(message.holds is not None for message in self._messages):
            self._review_timer.start()

    def _replace(self, messages: list[Message]) -> None:
        before = self.current
        self._messages = messages
        if self.current is not before:
            self.changed.emit()
