"""A file's settings while they are put into our words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from backend.utils.errors import ConfigProblem
from backend.utils.text import quote

Raw = dict[str, Any]


class Translator:
    """The raw settings of a file, changed in place by one function after the other.

    Attributes:
        values – word → value, in their words or already in ours. None counts as absent and is left out from the start.
        written – the words that the file has, whatever became of them.
        program – the key of the program that the file is written for; empty for ours or where it cannot be told.
        faults – what could not be read.
        remarks – word of theirs → a sentence on what was made of it, where that is more than another name.
    """

    def __init__(self, raw: Mapping[str, Any], program: str = "") -> None:
        self.values: Raw = {str(key): value for key, value in raw.items() if value is not None}
        self.written = frozenset(self.values)
        self.program = program
        self.faults: list[ConfigProblem] = []
        self.remarks: dict[str, str] = {}

    def has(self, *words: str) -> bool:
        return any(word in self.values for word in words)

    def take(self, *words: str) -> Any:
        """The value of the first of these words that has one; all of them are taken out."""
        found = [self.values.pop(word) for word in words if word in self.values]
        return found[0] if found else None

    def number(self, *words: str) -> float | None:
        """As `take`, as a number; a fault and None for what is none."""
        word = next((word for word in words if word in self.values), words[0])
        value = self.take(*words)
        if value is None:
            return None
        number = as_number(value)
        if number is None:
            self.refuse(word, f"{word} must be a number, not {quote(value, 60)}.")
        return number

    def count(self, *words: str) -> int | None:
        """As `number`, a whole number above 0."""
        word = next((word for word in words if word in self.values), words[0])
        number = self.number(*words)
        if number is None:
            return None
        if number != int(number) or number < 1:
            self.refuse(word, f"{word} must be a whole number above 0, not {quote(number, 60)}.")
            return None
        return int(number)

    def flag(self, word: str) -> bool | None:
        """As `take`, as true or false; a fault and None for neither."""
        value = self.take(word)
        if value is None:
            return None
        flag = as_bool(value)
        if flag is None:
            self.refuse(word, f"{word} must be true or false, not {quote(value)}.")
        return flag

    def peek(self, *words: str, default: float) -> float:
        """The number of the first of these words that has one, left where it is."""
        found = next((self.values[word] for word in words if word in self.values), default)
        number = as_number(found)
        return default if number is None else number

    def fill(self, ours: str, value: Any, word: str) -> None:
        """Set one of our settings to what `word` amounts to. A fault where the file says otherwise itself."""
        written = self.values.setdefault(ours, value)
        if written != value and as_number(written) != as_number(value, default=math.nan):
            both = f"{quote(ours, 30)} is {quote(written, 40)}, and {quote(word, 30)} makes it {quote(value, 40)}"
            self.refuse(ours, f"{both}; give one of them.")

    def suggest(self, ours: str, value: Any) -> None:
        """Set one of our settings where the file leaves it open."""
        self.values.setdefault(ours, value)

    def refuse(self, setting: str, sentence: str) -> None:
        self.faults.append(ConfigProblem(setting, sentence))

    def remark(self, word: str, sentence: str) -> None:
        self.remarks[word] = sentence


def as_number(value: Any, default: float | None = None) -> float | None:
    """A finite number, also one that YAML reads as text, such as 1e-6; `default` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return default
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return default
    return number if math.isfinite(number) else default


def as_bool(value: Any) -> bool | None:
    """True, False, or None for neither. None itself is False."""
    text = str(value).strip().lower()
    if text in ("true", "yes", "on", "1"):
        return True
    return False if text in ("false", "no", "off", "0", "none") else None


def plain(number: float) -> float | int:
    """3.0 as 3."""
    return int(number) if number == int(number) else number
