"""Put a failure of a user's reward code into words: its kind, its message, and the line of code to look at."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from backend.utils.command import is_bundled
from backend.utils.text import cut_in_the_middle, one_line, quote

LONGEST_ERROR = 150
"""Characters of the words for an error, where no sentence around it leaves fewer."""
LONGEST_TRACEBACK = 20_000
"""Characters of a traceback; a longer one keeps its end."""
_LONGEST_NAME = 40
_LONGEST_FILE = 24
_LEAST_MESSAGE = 40
"""Characters of a message that are worth more than advice."""
_BUNDLED_MODULES = "; not in the app: use grpo-studio from pip"
"""Short enough to stay beside the name of a module and a line."""


def text_of(value: object, text: Callable[[object], str] = str) -> str:
    """`str(value)`, or `repr`; of an object whose own method fails, that it has none."""
    try:
        return text(value)
    except BaseException:  # the user's own method; it may raise whatever it likes
        return "(its text cannot be read)"


def class_name(value: object, limit: int = _LONGEST_NAME) -> str:
    """The name of a value's class, whatever its metaclass says."""
    return quote(type.__dict__["__name__"].__get__(type(value)), limit)


def describe_error(error: BaseException, file: Path | None, limit: int = LONGEST_ERROR) -> str:
    """`ValueError: message (my_rewards.py, line 12)`, with the innermost line in `file` if it has one in the traceback; in a bundled
    app, whose Python the user cannot install anything into, a missing module with what can be done. About `limit` characters: the
    message is cut, then the advice left out, then the name cut. The message is the user's code: it may take any time."""
    location = _innermost_line(error, file)
    location = f" ({location})" if location else ""
    name = class_name(error, max(min(_LONGEST_NAME, limit - len(location)), 8))
    message = _message(error)
    room = limit - len(name) - len(": ") - len(location)
    advice = _BUNDLED_MODULES if isinstance(error, ModuleNotFoundError) and is_bundled() else ""
    if room - len(advice) < min(len(message), _LEAST_MESSAGE):
        advice = ""
    message = quote(message, room - len(advice)).rstrip(".") if room > 0 else ""
    return f"{name}{': ' if message else ''}{message}{location}{advice}"


def traceback_text(error: BaseException, file: Path | None) -> str:
    """The traceback of an exception of user code, from the first frame in `file` on: our frames above it are left out."""
    first = error.__traceback__
    while first is not None and file is not None and first.tb_frame.f_code.co_filename != str(file):
        first = first.tb_next
    text = "".join(traceback.format_exception(type(error), error, first or error.__traceback__))
    printable = (letter if letter.isprintable() or letter == "\n" else " " for letter in text[-LONGEST_TRACEBACK:])
    return "".join(printable)  # no terminal obeys what an exception's text holds


def _message(error: BaseException) -> str:
    name = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(name, str) and name and not Path(name).is_absolute():
        return f"no {quote(name, 40)} in its working folder; see Path(__file__).parent"
    return text_of(error)


def _innermost_line(error: BaseException, file: Path | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if frame.filename == str(file)]
    if not in_file and file:
        return _file_name(file)
    frame = (in_file or frames)[-1] if frames else None
    return f"{_file_name(Path(frame.filename))}, line {frame.lineno}" if frame else ""


def _file_name(file: Path) -> str:
    return cut_in_the_middle(one_line(file.name), _LONGEST_FILE)
