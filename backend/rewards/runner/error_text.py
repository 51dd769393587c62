"""Put a failure of a user's reward code into a sentence: shortened values, and the line of code to look at."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from backend.spec.command import is_bundled

_MAX_VALUE = 80
_MAX_MESSAGE = 100
_MAX_NAME = 40
_BUNDLED_MODULES = (
    "the app brings Python's standard library, numpy, sympy, regex and what else the trainer uses; for other packages install "
    "grpo-studio with pip beside them"
)
_WORKING_FOLDER = "relative names are in its working folder, so write Path(__file__).parent / name"


def shorten(text: str, limit: int = _MAX_VALUE) -> str:
    """At most `limit` characters of a text of any size, on one line, with an ellipsis where something was cut off."""
    # Cut before splitting: a text may have many megabytes. The factor of 4 allows for white space that collapses.
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit and len(text) <= 4 * limit else f"{line[:limit]}…"


def text_of(value: object, text: Callable[[object], str] = str) -> str:
    """`str(value)`, or `repr`; of an object whose own method fails, that it has none."""
    try:
        return text(value)
    except BaseException:  # the user's own method; it may raise whatever it likes
        return "(its text cannot be read)"


def describe_error(error: BaseException, file: Path | None) -> str:
    """`ValueError: message (my_rewards.py, line 12)`, with the innermost line in `file` if it has one in the traceback; in a bundled
    app, whose Python the user cannot install anything into, a missing module with what can be done."""
    message = shorten(text_of(error), _MAX_MESSAGE).rstrip(".")
    location = _innermost_line(error, file)
    advice = f"; {_WORKING_FOLDER}" if _is_relative(error) else ""
    advice += f"; {_BUNDLED_MODULES}" if isinstance(error, ModuleNotFoundError) and is_bundled() else ""
    return f"{shorten(type(error).__name__, _MAX_NAME)}{': ' if message else ''}{message}{f' ({location})' if location else ''}{advice}"


def _is_relative(error: BaseException) -> bool:
    """Whether a file was missing under a relative name."""
    name = error.filename if isinstance(error, FileNotFoundError) else None
    return isinstance(name, str) and bool(name) and not Path(name).is_absolute()


def _innermost_line(error: BaseException, file: Path | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if frame.filename == str(file)]
    if not in_file and file:
        return file.name
    frame = (in_file or frames)[-1] if frames else None
    return f"{Path(frame.filename).name}, line {frame.lineno}" if frame else ""
