"""Errors of user code: a short message, its place in the file, and the traceback."""

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
LONGEST_MESSAGE = 200
LONGEST_TRACEBACK = 20_000
_MOST_FRAMES = 100
_LONGEST_NAME, _LONGEST_FILE = 40, 24
_LEAST_TEXT, _MOST_TEXT = 16, 80  # characters of a prompt or completion in a message
_FUNCTION_NAME = 32
_AFTER = ", on the prompt “{}” and the completion “{}”."
_BUNDLED_MODULES = "; not in the app: use grpo-studio from pip"


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of the user's file on the stack."""

    line: int
    function: str
    code: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of user code, as the reward worker reports it.

    `what`: words after the function's name; `function`, `completion`: indices in the call; `has_line`: `what` names a
    line; `line`: innermost line of `file` or 0; `frames`: outermost first.
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
        frames: list[Frame] = []
        for frame in traceback.extract_tb(error.__traceback__) if error and file else ():
            # Skips a comprehension on the same line.
            if frame.filename == str(file) and not (
                frames and frame.name[:1] == "<" and frame.lineno == frames[-1].line
            ):
                frames.append(Frame(frame.lineno or 0, frame.name, (frame.line or "").strip()[:500]))
        if isinstance(error, SyntaxError) and file:
            line = error.lineno or line
        line = frames[-1].line if frames else line
        fields["traceback"] = traceback_text(error, file) if error else ""
        return cls(what, file=str(file or ""), line=line, frames=tuple(frames[-_MOST_FRAMES:]), **fields)

    def place(self, message: str) -> dict[str, Any]:
        """The message and its place in the user's file."""
        frames = [asdict(frame) for frame in self.frames]
        return {"sentence": message, "file": self.file, "line": self.line, "frames": frames}


class LoadError(UserError):
    """Reward functions failed to load."""

    def __init__(self, problems: Iterable[ConfigProblem], failure: Failure) -> None:
        super().__init__(problems)
        self.place, self.traceback = failure.place(failure.what), failure.traceback


class RewardError(UserError):
    """A reward function failed on completions; message on `reward_functions`."""

    def __init__(self, function: FunctionDescription, failure: Failure, sample: tuple[Problem, Completion]) -> None:
        problem, completion = sample
        before, room = _beginning_and_room(function, sample, failure.has_line)
        what = cut_in_the_middle(one_line(failure.what), room)
        room = LONGEST_MESSAGE - len(before) - len(what) - len(_AFTER) + 4
        prompt, text = quote(problem.prompt, _MOST_TEXT), quote(completion.text, _MOST_TEXT)
        prompt, text = quote(prompt, max(room // 2, room - len(text))), quote(text, max(room // 2, room - len(prompt)))
        super().__init__("reward_functions", before + what + _AFTER.format(prompt, text))
        self.traceback = failure.traceback


def failure_room(function: FunctionDescription, sample: tuple[Problem, Completion]) -> int:
    """Characters for the words of a failure that names its line."""
    return _beginning_and_room(function, sample, True)[1]


def _beginning_and_room(
    function: FunctionDescription, sample: tuple[Problem, Completion], has_line: bool
) -> tuple[str, int]:
    file = f" of {cut_in_the_middle(one_line(function.file.name), _FUNCTION_NAME)}" if function.file else ""
    line = f", line {function.line}," if function.line and not has_line else ""
    before = f"The reward function {quote(function.name, _FUNCTION_NAME)}{file}{line} "
    least = sum(min(len(quote(text, _MOST_TEXT)), _LEAST_TEXT) for text in (sample[0].prompt, sample[1].text))
    return before, LONGEST_MESSAGE - len(before) - len(_AFTER) + 4 - least


def text_of(value: object, text: Callable[[object], str] = str) -> str:
    """`str(value)`, or `repr`, even if the object's method raises."""
    try:
        return text(value)
    except BaseException:
        return "(its text cannot be read)"


def class_name(value: object, limit: int = _LONGEST_NAME) -> str:
    """Name of the value's class, shortened."""
    return quote(type(value).__name__, limit)


def describe_error(error: BaseException, file: Path | None, limit: int = LONGEST_ERROR) -> str:
    """`ValueError: message (my_rewards.py, line 12)` in about `limit` characters.

    Adds advice on missing modules in a bundled app.
    """
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if frame.filename == str(file)]
    location = ""
    if file and not in_file:
        location = f" ({cut_in_the_middle(one_line(file.name), _LONGEST_FILE)})"
    elif frames:
        frame = (in_file or frames)[-1]
        name = cut_in_the_middle(one_line(Path(frame.filename).name), _LONGEST_FILE)
        location = f" ({name}, line {frame.lineno})"
    name = class_name(error, max(min(_LONGEST_NAME, limit - len(location)), 8))
    missing = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(missing, str) and missing and not Path(missing).is_absolute():
        message = f"no {quote(missing, 40)} in its working folder; see Path(__file__).parent"
    else:
        message = text_of(error)
    room = limit - len(name) - len(": ") - len(location)
    message = quote(message, room).rstrip(".") if room > 0 else ""
    advice = _BUNDLED_MODULES if isinstance(error, ModuleNotFoundError) and is_bundled() else ""
    return f"{name}{': ' if message else ''}{message}{location}{advice}"


def traceback_text(error: BaseException, file: Path | None) -> str:
    """Traceback with causes, from the first frame in `file`, without control characters."""
    first = error.__traceback__
    while first is not None and file is not None and first.tb_frame.f_code.co_filename != str(file):
        first = first.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, first or error.__traceback__))
    except Exception:  # an exception's own __str__ may raise anything
        return ""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text[-LONGEST_TRACEBACK:])
