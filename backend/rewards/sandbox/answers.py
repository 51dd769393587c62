"""Check the answers of a scoring process, field by field: a user's code runs in it and may have written anything at all.

What passes is plain data of the right types, counts and sizes. Everything else raises `Untrusted`, and its process is replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from backend.rewards.resolve import FunctionDescription
from backend.rewards.runner.error_text import LONGEST_TRACEBACK
from backend.rewards.runner.extra_logs import check_metric_name, check_name
from backend.rewards.runner.step_calls import LARGEST, Scores
from backend.rewards.runner.user_traceback import LoadError, UserCodeError, UserFrame
from backend.rewards.sandbox.wire import LONGEST_TEXT
from backend.utils.errors import ConfigProblem

_SETTINGS = ("reward_functions", "reward_functions_file")
_MOST_FRAMES = 2000
_MOST_LINES = 10_000_000


class Untrusted(Exception):
    """The answer is not one that our side of the process gives."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One function's failure, as `backend.rewards.runner.step_calls.FunctionFailed` has it; `frames` of the user's file."""

    function: int
    what: str
    completion: int = 0
    has_line: bool = False
    is_timeout: bool = False
    error: UserCodeError | None = None
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """The answer to a request for scores. `scores` and `seconds` have one entry for each function that was asked for."""

    scores: list[Scores] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    printed: str = ""


def read_answer(line: bytes, number: int) -> dict[str, Any]:
    """The answer to the request of this number, still unchecked. Raises Untrusted."""
    try:
        answer = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Untrusted from None
    if not isinstance(answer, dict) or cast("dict[str, Any]", answer).get("id") != number:
        raise Untrusted
    return cast("dict[str, Any]", answer)


def read_scored(answer: Mapping[str, Any], functions: int, completions: int) -> Scored:
    """Raises Untrusted."""
    printed = _text(answer.get("printed", ""))
    if "failure" in answer:
        return Scored(failure=_failure(_mapping(answer["failure"]), functions, completions), printed=printed)
    return Scored(
        scores=[_scores(row, completions) for row in _list(answer.get("scores"), functions)],
        seconds=[_number(value, 0.0) for value in _list(answer.get("seconds"), functions)],
        columns={_name(name): _list(column, completions) for name, column in _mapping(answer.get("columns")).items()},
        metrics={_metric(name): _number(value) for name, value in _mapping(answer.get("metrics")).items()},
        printed=printed,
    )


@dataclass(frozen=True, slots=True)
class MappedRows:
    """The answer to a request to map rows: one row for each, or the index and words of the one that failed, or the map functions there are."""

    rows: list[dict[str, Any] | None] = field(default_factory=list)
    failed: tuple[int, str] | None = None
    known: list[str] | None = None


def read_mapped(answer: Mapping[str, Any], count: int) -> MappedRows:
    """Raises Untrusted."""
    if "unknown" in answer:
        return MappedRows(known=[_line(name) for name in _list(answer["unknown"])])
    if "what" in answer:
        return MappedRows(failed=(_whole(answer.get("row"), count - 1), _line(answer["what"])))
    return MappedRows([None if row is None else _mapping(row) for row in _list(answer.get("rows"), count)])


def read_loaded(
    answer: Mapping[str, Any], stages: Sequence[Sequence[str]], files: Collection[Path]
) -> list[list[FunctionDescription]]:
    """The functions of each stage; `stages` holds the entries that were asked for, `files` those that may be named. Raises
    Untrusted, and LoadError where the answer says that the functions cannot be loaded."""
    if "faults" in answer:
        faults = [_fault(_mapping(fault)) for fault in _list(answer["faults"])]
        if not faults:
            raise Untrusted
        raise LoadError(faults, _user_error(_mapping(answer.get("user_error"))))
    listed = zip(_list(answer.get("stages"), len(stages)), stages, strict=True)
    described = [[_function(_mapping(each), files) for each in _list(stage, len(names))] for stage, names in listed]
    if any(len({function.name for function in stage}) < len(stage) for stage in described):
        raise Untrusted
    return described


def read_sentences(value: Any) -> list[str]:
    """Sentences for the user. Raises Untrusted."""
    return [_line(sentence) for sentence in _list(value)]


def _function(fields: Mapping[str, Any], files: Collection[Path]) -> FunctionDescription:
    file = _text(fields.get("file"))
    if file and Path(file) not in files:
        raise Untrusted
    line = _whole(fields.get("line"), _MOST_LINES)
    name, note = _name(fields.get("name")), _line(fields.get("note"))
    return FunctionDescription(name, Path(file) if file else None, line, note, _bool(fields.get("is_async")))


def _fault(fields: Mapping[str, Any]) -> ConfigProblem:
    if fields.get("setting") not in _SETTINGS:
        raise Untrusted
    return ConfigProblem(fields["setting"], _line(fields.get("sentence")))


def _failure(fields: Mapping[str, Any], functions: int, completions: int) -> Failure:
    error = fields.get("error")
    return Failure(
        function=_whole(fields.get("function"), functions - 1),
        what=_line(fields.get("what")),
        completion=_whole(fields.get("completion"), completions - 1),
        has_line=_bool(fields.get("has_line")),
        is_timeout=_bool(fields.get("is_timeout")),
        error=None if error is None else _user_error(_mapping(error)),
        traceback=_lines(fields.get("traceback", "")),
    )


def _user_error(fields: Mapping[str, Any]) -> UserCodeError:
    frames = [_mapping(frame) for frame in _list(fields.get("frames"))[-_MOST_FRAMES:]]
    return UserCodeError(
        _line(fields.get("sentence")),
        _text(fields.get("file")),
        _whole(fields.get("line"), _MOST_LINES),
        tuple(
            UserFrame(_whole(frame.get("line"), _MOST_LINES), _line(frame.get("function")), _line(frame.get("code")))
            for frame in frames
        ),
    )


def _scores(row: Any, completions: int) -> Scores:
    return [None if score is None else _number(score, -LARGEST, LARGEST) for score in _list(row, completions)]


def _number(value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number) and low <= number <= high:
                return number
    except OverflowError:  # an int beyond float
        pass
    raise Untrusted


def _whole(value: Any, most: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most:
        return value
    raise Untrusted


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise Untrusted


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    raise Untrusted


def _list(value: Any, count: int | None = None) -> list[Any]:
    if isinstance(value, list) and count in (None, len(cast("list[Any]", value))):
        return cast("list[Any]", value)
    raise Untrusted


def _text(value: Any) -> str:
    if isinstance(value, str) and len(value) <= LONGEST_TEXT:
        return value
    raise Untrusted


def _line(value: Any) -> str:
    """A text on one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in _text(value))


def _lines(value: Any) -> str:
    """As `_line`, but of several lines."""
    if isinstance(value, str) and len(value) <= LONGEST_TRACEBACK:
        return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in value)
    raise Untrusted


def _name(value: Any) -> str:
    try:
        check_name("log_extra", _text(value))
    except ValueError:
        raise Untrusted from None
    return value


def _metric(value: Any) -> str:
    try:
        check_metric_name(_text(value))
    except ValueError:
        raise Untrusted from None
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)
