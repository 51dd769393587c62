"""Catches exceptions that nobody handles, in any thread, and crashes of native code."""

import contextlib
import faulthandler
import functools
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, TextIO

from PySide6.QtCore import QMessageLogContext, QObject, QtMsgType, Signal, qInstallMessageHandler

QT_MESSAGES = 30


def guard_overrides() -> None:
    """Call this before classes of widgets are defined. On Python 3.11 PySide (6.10 to 6.12) crashes when an override of
    a Qt method, such as `showEvent`, raises an error that the interpreter created (TypeError, KeyError …): there it is
    a class and a text, and becomes an exception object only once Python code handles it."""
    if sys.version_info < (3, 12):
        QObject.__init_subclass__ = classmethod(_guard)  # pyright: ignore


def _guard(made: type[QObject], **named: Any) -> None:
    super(QObject, made).__init_subclass__(**named)
    for name, value in list(vars(made).items()):
        of_qt = (vars(base) for base in made.__mro__[1:] if base.__module__.startswith("PySide6."))
        if isinstance(value, FunctionType) and not name.startswith("__") and any(name in each for each in of_qt):
            setattr(made, name, _handled(value))


def _handled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception:
            raise  # an exception object from here on

    return call


class CrashCatcher(QObject):
    """Emits `caught` with a sentence and a traceback. `file`: where native crashes of this window are written."""

    caught = Signal(str, str)

    def __init__(self, file: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.qt_messages: deque[str] = deque(maxlen=QT_MESSAGES)
        self._file = file
        self._stream: TextIO | None = None
        self._seen: set[str] = set()
        self._hooks = sys.excepthook, threading.excepthook

    def install(self) -> str:
        """Begin; returns what the last process left in the file."""
        sys.excepthook, threading.excepthook = self._on_exception, self._on_thread_exception
        qInstallMessageHandler(self._on_qt_message)
        left = ""
        with contextlib.suppress(OSError):  # a full or read-only disk must not keep the window from opening
            if self._file.exists():
                left = self._file.read_text(encoding="utf-8", errors="replace").strip()
            self._stream = self._file.open("w", encoding="utf-8")
            faulthandler.enable(self._stream)
        return left

    def remove(self) -> None:
        """End, before Python and Qt are torn down."""
        sys.excepthook, threading.excepthook = self._hooks
        qInstallMessageHandler(None)
        if self._stream is not None:
            faulthandler.disable()
            self._stream.close()
            self._stream = None
            self._file.unlink(missing_ok=True)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None, where: str = "the window"
    ) -> None:
        self._hooks[0](kind, error, frames)
        if not issubclass(kind, Exception):  # KeyboardInterrupt and SystemExit are no faults
            return
        trace = "".join(traceback.format_exception(kind, error, frames))
        if trace not in self._seen:  # a timer or a paint event may fail sixty times a second
            self._seen.add(trace)
            self.caught.emit(f"Something went wrong in {where}: {kind.__name__}: {error}", trace)

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value or arguments.exc_type()
        name = arguments.thread.name if arguments.thread else "a thread"
        self._on_exception(arguments.exc_type, error, arguments.exc_traceback, f"the window's thread “{name}”")

    def _on_qt_message(self, kind: QtMsgType, context: QMessageLogContext, message: str) -> None:
        if kind not in (QtMsgType.QtDebugMsg, QtMsgType.QtInfoMsg):
            self.qt_messages.append(message)
        with contextlib.suppress(OSError, AttributeError, ValueError):  # without a terminal there may be no stderr
            sys.stderr.write(f"{message}\n")
