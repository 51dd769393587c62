"""Errors of user code: a short message, its place in the file, and the traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from backend.rewards.registry import FunctionDescription
from backend.types import Completion, Problem
from backend.utils.command import is_bundled
from backend.utils.errors import LONGEST_TRACEBACK, ConfigProblem, UserError, user_traceback
from backend.utils.text import SENTENCE, cut_in_the_middle, one_line, quote

LONGEST_ERROR = 150
_MOST_FRAMES = 100
_NAME, _FILE, _TEXT = 40, 24, 40  # characters of a name, a file's name, and a prompt or completion in a message
_BUNDLED_MODULES = "; not in the app: use grpo-studio from pip"


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of user code, as the reward worker reports it. `what`: words after the function's name, with a line if it
    `raised`; `function`, `completion`: indices in the call, the latter None if no single completion is to blame;
    `line`: innermost line of `file`, or 0; `frames`: {"line", "function", "code"} of its lines on the stack, outermost
    first."""

    what: str
    function: int = 0
    completion: int | None = None
    raised: bool = False
    file: str = ""
    line: int = 0
    frames: tuple[dict[str, Any], ...] = ()
    traceback: str = ""

    @classmethod
    def of(cls, what: str, error: BaseException | None, file: Path | None, line: int = 0, **fields: Any) -> Failure:
        """`line` is the fallback without a traceback line in `file`."""
        frames: list[dict[str, Any]] = []
        for frame in traceback.extract_tb(error.__traceback__) if error and file else ():
            # Skips a comprehension on the same line.
            is_repeated = bool(frames) and frame.name[:1] == "<" and frame.lineno == frames[-1]["line"]
            if frame.filename == str(file) and not is_repeated:
                code = (frame.line or "").strip()[:500]
                frames.append({"line": frame.lineno or 0, "function": frame.name, "code": code})
        if isinstance(error, SyntaxError) and file:
            line = error.lineno or line
        if error:
            fields["traceback"] = user_traceback(error, file)
        line = frames[-1]["line"] if frames else line
        return cls(what, file=str(file or ""), line=line, frames=tuple(frames[-_MOST_FRAMES:]), **fields)


class RewardError(UserError):
    """User code failed while it was loaded or called; `place` is where in its file."""

    def __init__(self, problems: Iterable[ConfigProblem], failure: Failure) -> None:
        super().__init__(replace(problem, traceback=failure.traceback) for problem in problems)
        place = {key: asdict(failure)[key] for key in ("file", "line", "frames", "traceback")}
        self.place: dict[str, Any] = {"sentence": self.faults[0].sentence, **place}

    @classmethod
    def of_call(
        cls, function: FunctionDescription, failure: Failure, sample: tuple[Problem, Completion] | None
    ) -> RewardError:
        """The failure of a call, on `sample` if it is to blame."""
        file = f" of {cut_in_the_middle(one_line(function.file.name), _NAME)}" if function.file else ""
        line = f", line {function.line}," if function.line and not failure.raised else ""
        before = f"The reward function {quote(function.name, _NAME)}{file}{line} "
        after = "."
        if sample:
            prompt, text = quote(sample[0].prompt, _TEXT), quote(sample[1].text, _TEXT)
            after = f", on the prompt “{prompt}” and the completion “{text}”."
        room = max(SENTENCE - len(before) - len(after), 2 * _TEXT)
        what = cut_in_the_middle(one_line(failure.what), room)
        return cls([ConfigProblem("reward_functions", f"{before}{what}{after}")], failure)


def text_of(value: object, text: Callable[[object], str] = str) -> str:
    """`str(value)`, or `repr`, even if the object's method raises."""
    try:
        return text(value)
    except BaseException:
        return "(its text cannot be read)"


def class_name(value: object, limit: int = _NAME) -> str:
    return quote(type(value).__name__, limit)


def describe_error(error: BaseException, file: Path | None, limit: int = LONGEST_ERROR) -> str:
    """`ValueError: message (my_rewards.py, line 12)` in about `limit` characters. Adds advice on missing modules in a
    bundled app."""
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if frame.filename == str(file)]
    location = ""
    if file and not in_file:
        location = f" ({cut_in_the_middle(one_line(file.name), _FILE)})"
    elif frames:
        frame = (in_file or frames)[-1]
        location = f" ({cut_in_the_middle(one_line(Path(frame.filename).name), _FILE)}, line {frame.lineno})"
    name = class_name(error, max(min(_NAME, limit - len(location)), 8))
    missing = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(missing, str) and missing and not Path(missing).is_absolute():
        message = f"no {quote(missing, 40)} in its working folder; see Path(__file__).parent"
    else:
        message = text_of(error)
    room = limit - len(name) - len(": ") - len(location)
    message = quote(message, room).rstrip(".") if room > 0 else ""
    advice = _BUNDLED_MODULES if isinstance(error, ModuleNotFoundError) and is_bundled() else ""
    return f"{name}{': ' if message else ''}{message}{location}{advice}"


def printable(text: str) -> str:
    """Text for a log: the end of it, without control characters."""
    return "".join(char if char.isprintable() or char in "\n\t" else " " for char in text[-LONGEST_TRACEBACK:])
