"""Where a person's reward code went wrong: the sentence, the line, and their own part of the traceback.

Frames of ours, of Python and of libraries are left out: the person can mend their file and nothing else.
"""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of the person's file that was being run: its number from 1, the function it is in, its text."""

    line: int
    function: str
    code: str


@dataclass(frozen=True, slots=True)
class Blame:
    """One failure. `line` is the deepest of the person's own (0: none is known); `frames` from the outside in."""

    sentence: str
    file: str = ""
    line: int = 0
    frames: tuple[Frame, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def blame(sentence: str, error: BaseException | None, file: Path | None, line: int = 0) -> Blame:
    """`error` is what the person's code raised, if it raised; `line` is where to look where no frame says."""
    frames = _own_frames(error, file)
    if isinstance(error, SyntaxError) and file:
        line = error.lineno or line
    return Blame(sentence, str(file or ""), frames[-1].line if frames else line, frames)


def _own_frames(error: BaseException | None, file: Path | None) -> tuple[Frame, ...]:
    if error is None or file is None:
        return ()
    # The file is read by us and compiled under its path, so linecache finds its lines there.
    found = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in found if frame.filename == str(file)]
    kept = [frame for place, frame in enumerate(own) if not place or not _is_inside(frame, own[place - 1])]
    return tuple(Frame(frame.lineno or 0, frame.name, (frame.line or "").strip()) for frame in kept)


def _is_inside(frame: traceback.FrameSummary, outer: traceback.FrameSummary) -> bool:
    """Whether it is a comprehension on the line that stands there already."""
    return frame.name.startswith("<") and frame.lineno == outer.lineno
