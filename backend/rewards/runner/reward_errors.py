"""The error that a reward function's failure is to the rest of the program, and its sentence of at most 200 characters.

The failure has the most room. The function's name and file are cut first, then the prompt and the completion, by as much as it needs.
"""

from __future__ import annotations

from backend.rewards.resolve import FunctionDescription
from backend.rewards.runner.inputs import Sample
from backend.utils.errors import UserError
from backend.utils.text import cut_in_the_middle, one_line, quote

LONGEST_SENTENCE = 200
LEAST_TEXT, MOST_TEXT = 16, 80
"""Characters of a prompt or a completion in a sentence, by the room that the failure leaves."""
_NAME = 32
"""Longest name of a function, and of its file, that is written out."""


class RewardError(UserError):
    """A reward function failed on real completions; the sentence on `reward_functions` says which, how and on what."""


def reward_error(
    function: FunctionDescription, what: str, sample: Sample, has_line: bool = False, traceback: str = ""
) -> RewardError:
    """`what`: the words after the function, such as "raised ValueError: no". `has_line`: they name a line of its file."""
    before = _before(function, has_line) + cut_in_the_middle(one_line(what), failure_room(function, sample, has_line))
    texts = _texts(sample, LONGEST_SENTENCE - len(before) - len(_after("", "")))
    error = RewardError("reward_functions", before + _after(*texts))
    error.traceback = traceback
    return error


def failure_room(function: FunctionDescription, sample: Sample, has_line: bool = False) -> int:
    """Characters that a failure's words may have."""
    return LONGEST_SENTENCE - len(_before(function, has_line)) - len(_after(*_texts(sample, 2 * LEAST_TEXT)))


def _before(function: FunctionDescription, has_line: bool) -> str:
    file = f" of {cut_in_the_middle(one_line(function.file.name), _NAME)}" if function.file else ""
    line = f", line {function.line}," if function.line and not has_line else ""
    return f"The reward function {quote(function.name, _NAME)}{file}{line} "


def _after(prompt: str, completion: str) -> str:
    return f", on the prompt “{prompt}” and the completion “{completion}”."


def _texts(sample: Sample, room: int) -> tuple[str, str]:
    """Prompt and completion, of at most `room` characters together. What one does not need is the other's."""
    problem, completion = sample
    prompt, text = quote(problem.prompt, MOST_TEXT), quote(completion.text, MOST_TEXT)
    half = room // 2
    return quote(prompt, max(half, room - len(text))), quote(text, max(half, room - len(prompt)))
