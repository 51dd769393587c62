"""How the failures of a person's reward code are put into a sentence: short excerpts, and the line to look at."""

from __future__ import annotations

import traceback
from pathlib import Path

_EXCERPT = 80
_MESSAGE = 200


def excerpt(text: str, limit: int = _EXCERPT) -> str:
    """At most `limit` characters of a text of any size, on one line; an ellipsis says that there is more."""
    # Cutting first keeps this cheap for a text of many megabytes; the factor leaves room for white space to collapse.
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit and len(text) <= 4 * limit else f"{line[:limit]}…"


def describe(error: BaseException, file: Path | None) -> str:
    """`ValueError: what it says (my_rewards.py, line 12)`: the deepest line in `file`, else the deepest of all."""
    message = excerpt(str(error), _MESSAGE).rstrip(".")
    where = _deepest_line(error, file)
    return f"{type(error).__name__}{': ' if message else ''}{message}{f' ({where})' if where else ''}"


def _deepest_line(error: BaseException, file: Path | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(file)]
    if not own and file:
        return file.name
    frame = (own or frames)[-1] if frames else None
    return f"{Path(frame.filename).name}, line {frame.lineno}" if frame else ""
