"""Errors of user code: short message, place in the file, and traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.rewards.registry import FunctionDescription
from backend.types import Completion, Problem
from backend.utils.command import is_bundled
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import cut_in_the_middle, one_line, quote

LONGEST_ERROR = 150
"""Characters for an exception."""
LONGEST_MESSAGE = 200
LONGEST_TRACEBACK = 20_000
"""Characters of a traceback; keeps its end."""
_MOST_FRAMES = 100
_LONGEST_NAME = 40
_LONGEST_FILE = 24
_LEAST_MESSAGE = 40
"""Characters of an exception that take priority over advice."""
_LEAST_TEXT, _MOST_TEXT = 16, 80
"""Characters of a prompt or completion in a message."""
_FUNCTION_NAME = 32
_BUNDLED_MODULES = "; not in the app: use grpo-studio from pip"


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of the user's file on the stack: number, function, text."""

    line: int
    function: str
    code: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a function. `what`: words after its name; `function`, `completion`: indices in the call.

    `has_line`: `what` names a line. `line`: innermost user line or 0; `frames`: outermost first.
    """

    what: str
    function: int = 0
    completion: int = 0
    has_line: bool = False
    is_timeout: bool = False
    file: str = ""
    line: int = 0
    frames: tuple[Frame, ...] = ()
    traceback: str = ""

    @classmethod
    def of(cls, what: str, error: BaseException | None, file: Path | None, line: int = 0, **fields: Any) -> Failure:
        """`line` is the fallback without a traceback line in `file`."""
        frames = _frames_in(file, error)
        if isinstance(error, SyntaxError) and file:
            line = error.lineno or line
        text = traceback_text(error, file) if error else ""
        line = frames[-1].line if frames else line
        return cls(what, file=str(file or ""), line=line, frames=frames, traceback=text, **fields)

    def place(self, message: str) -> dict[str, Any]:
        """The message and its place in the user's file."""
        return {
            "sentence": message,
            "file": self.file,
            "line": self.line,
            "frames": [asdict(frame) for frame in self.frames],
        }


class LoadError(UserError):
    """Reward functions failed to load; `failure` has the place."""

    def __init__(self, problems: Iterable[ConfigProblem], failure: Failure) -> None:
        super().__init__(problems)
        self.failure = failure
        self.traceback = failure.traceback

    @property
    def place(self) -> dict[str, Any]:
        return self.failure.place(self.failure.what)


class RewardError(UserError):
    """A reward function failed on completions; message on `reward_functions`."""


def reward_error(function: FunctionDescription, failure: Failure, sample: tuple[Problem, Completion]) -> RewardError:
    """Message that shortens the name and file first, then prompt and completion."""
    room = failure_room(function, sample, failure.has_line)
    before = _before(function, failure.has_line) + cut_in_the_middle(one_line(failure.what), room)
    texts = _texts(sample, LONGEST_MESSAGE - len(before) - len(_after("", "")))
    error = RewardError("reward_functions", before + _after(*texts))
    error.traceback = failure.traceback
    return error


def failure_room(function: FunctionDescription, sample: tuple[Problem, Completion], has_line: bool = False) -> int:
    """Characters for the words of a failure."""
    return LONGEST_MESSAGE - len(_before(function, has_line)) - len(_after(*_texts(sample, 2 * _LEAST_TEXT)))


def _before(function: FunctionDescription, has_line: bool) -> str:
    file = f" of {cut_in_the_middle(one_line(function.file.name), _FUNCTION_NAME)}" if function.file else ""
    line = f", line {function.line}," if function.line and not has_line else ""
    return f"The reward function {quote(function.name, _FUNCTION_NAME)}{file}{line} "


def _after(prompt: str, completion: str) -> str:
    return f", on the prompt “{prompt}” and the completion “{completion}”."


def _texts(sample: tuple[Problem, Completion], room: int) -> tuple[str, str]:
    """Prompt and completion within `room` characters together."""
    problem, completion = sample
    prompt, text = quote(problem.prompt, _MOST_TEXT), quote(completion.text, _MOST_TEXT)
    half = room // 2
    return quote(prompt, max(half, room - len(text))), quote(text, max(half, room - len(prompt)))


def text_of(value: object, text: Callable[[object], str] = str) -> str:
    """`str(value)`, or `repr`, even if the object's method raises."""
    try:
        return text(value)
    except BaseException:
        return "(its text cannot be read)"


def class_name(value: object, limit: int = _LONGEST_NAME) -> str:
    return quote(type(value).__name__, limit)


def describe_error(error: BaseException, file: Path | None, limit: int = LONGEST_ERROR) -> str:
    """`ValueError: message (my_rewards.py, line 12)` in about `limit` characters.

    Adds advice on missing modules in a bundled app.
    """
    location = _innermost_line(error, file)
    location = f" ({location})" if location else ""
    name = class_name(error, max(min(_LONGEST_NAME, limit - len(location)), 8))
    missing = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(missing, str) and missing and not Path(missing).is_absolute():
        message = f"no {quote(missing, 40)} in its working folder; see Path(__file__).parent"
    else:
        message = text_of(error)
    room = limit - len(name) - len(": ") - len(location)
    advice = _BUNDLED_MODULES if isinstance(error, ModuleNotFoundError) and is_bundled() else ""
    if room - len(advice) < min(len(message), _LEAST_MESSAGE):
        advice = ""
    message = quote(message, room - len(advice)).rstrip(".") if room > 0 else ""
    return f"{name}{': ' if message else ''}{message}{location}{advice}"


def traceback_text(error: BaseException, file: Path | None) -> str:
    """Traceback with causes, from the first frame in `file`."""
    first = error.__traceback__
    while first is not None and file is not None and first.tb_frame.f_code.co_filename != str(file):
        first = first.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, first or error.__traceback__))
    except Exception:  # an exception's own __str__ may raise anything
        return ""
    text = text[-LONGEST_TRACEBACK:]  # without what a terminal would obey
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def _frames_in(file: Path | None, error: BaseException | None) -> tuple[Frame, ...]:
    if error is None or file is None:
        return ()
    # The file's text is compiled under its path, so linecache finds the lines.
    found = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    frames: list[Frame] = []
    for frame in found[-_MOST_FRAMES:]:
        if frames and frame.name.startswith("<") and frame.lineno == frames[-1].line:
            continue  # a comprehension on the same line
        frames.append(Frame(frame.lineno or 0, frame.name, (frame.line or "").strip()[:500]))
    return tuple(frames)


def _innermost_line(error: BaseException, file: Path | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if frame.filename == str(file)]
    if not in_file and file:
        return cut_in_the_middle(one_line(file.name), _LONGEST_FILE)
    if not frames:
        return ""
    frame = (in_file or frames)[-1]
    return f"{cut_in_the_middle(one_line(Path(frame.filename).name), _LONGEST_FILE)}, line {frame.lineno}"
