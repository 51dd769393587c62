"""Where a user's reward code failed: the sentence, the line, and the user's own part of the traceback.

Frames of ours, of Python and of libraries are left out: the user can mend their own file and nothing else.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.utils.errors import ConfigProblem, UserError


@dataclass(frozen=True, slots=True)
class UserFrame:
    """A line of the user's file that was running: its number from 1, the function it is in, its text."""

    line: int
    function: str
    code: str


@dataclass(frozen=True, slots=True)
class UserCodeError:
    """One failure of a user's code: its innermost line, 0 where none is known, and `frames`, outermost first."""

    sentence: str
    file: str = ""
    line: int = 0
    frames: tuple[UserFrame, ...] = ()

    @classmethod
    def of(cls, sentence: str, error: BaseException | None, file: Path | None, line: int = 0) -> UserCodeError:
        """`error` is the exception of the user's code, if any; `line` counts where the traceback has no line of `file`."""
        frames = _frames_in(file, error)
        if isinstance(error, SyntaxError) and file:
            line = error.lineno or line
        return cls(sentence, str(file or ""), frames[-1].line if frames else line, frames)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> UserCodeError:
        """The inverse of `to_dict`, also after a trip through JSON."""
        frames = tuple(UserFrame(**frame) for frame in fields["frames"])
        return cls(fields["sentence"], fields["file"], fields["line"], frames)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class LoadError(UserError):
    """The reward functions cannot be loaded; `user_error` says where the user's file went wrong."""

    def __init__(self, faults: Iterable[ConfigProblem], user_error: UserCodeError) -> None:
        super().__init__(faults)
        self.user_error = user_error


def _frames_in(file: Path | None, error: BaseException | None) -> tuple[UserFrame, ...]:
    if error is None or file is None:
        return ()
    # We compile the file's text under its path, so linecache finds the text of its lines there.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    kept = [
        frame
        for index, frame in enumerate(frames)
        if not index or not _is_comprehension_on_same_line(frame, frames[index - 1])
    ]
    return tuple(UserFrame(frame.lineno or 0, frame.name, (frame.line or "").strip()) for frame in kept)


def _is_comprehension_on_same_line(frame: traceback.FrameSummary, outer: traceback.FrameSummary) -> bool:
    return frame.name.startswith("<") and frame.lineno == outer.lineno
