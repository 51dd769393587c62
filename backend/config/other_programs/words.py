"""What becomes of a word of another program: read as settings of ours, without effect here, or refused.

A program is one table, word → fate, and the functions that read several of its words together (`Regroup`). The tables are the
only place that knows these words: translation, `check`, `import`, the window's notes, the search and docs/other-programs.md are
read from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.config.other_programs.rewriting import Translator

Regroup = Callable[[Translator], None]
"""Reads words of a file together, such as a batch size and what it is divided by, and puts settings of ours in their place."""

ASKS_FOR_NOTHING = ("", "none", "no", "false", "off", "null")
"""Values, as text in lower case, with which a refused word is as good as absent."""


@dataclass(frozen=True, slots=True)
class Translated:
    """A word that is read as one of our settings, or as several. `how`: one sentence where more than the name differs.
    `is_switch`: it says something only where it is true."""

    settings: tuple[str, ...]
    how: str = ""
    is_switch: bool = False


@dataclass(frozen=True, slots=True)
class IgnoredKey:
    """A word that is accepted and changes nothing here, and why not: a clause without a full stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A word for what does not exist here. `nearest`: a sentence with what does. `off`: values, beside `ASKS_FOR_NOTHING`, with
    which it asks for nothing and is accepted, such as its program's default."""

    nearest: str
    off: tuple[Any, ...] = ()

    def asks(self, value: Any) -> bool:
        """Whether a value asks for what does not exist here."""
        if value is None or value in ([], {}):
            return False
        text = str(value).strip().lower()
        if any(off is True for off in self.off):  # what is on here always: false is what asks
            return text in ASKS_FOR_NOTHING
        return text not in ASKS_FOR_NOTHING and text not in [str(off).lower() for off in self.off]


Word = Translated | IgnoredKey | Refused
Words = Mapping[str, Word]


@dataclass(frozen=True, slots=True)
class OtherProgram:
    """A program whose files are read. `defaults`: what it takes for words that a file leaves out, in its words, where that is
    not our default; `import` writes them out."""

    key: str
    name: str
    source: str
    """Which release the table was made from."""
    words: Words
    regroups: tuple[Regroup, ...]
    defaults: Callable[[Mapping[str, Any]], dict[str, Any]]
    sections: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Title → words, for the page of documentation."""

    def shares_meaning(self, word: str) -> bool:
        """Whether a word is one of our keys and means there what it means here."""
        fate = self.words.get(word)
        return isinstance(fate, Translated) and fate.settings == (word,) and not fate.how


def same(*names: str) -> dict[str, Word]:
    """Words that are our keys too, and mean the same."""
    return {name: Translated((name,)) for name in names}


def renamed(**ours: str) -> dict[str, Word]:
    """their word = our key, where only the name differs."""
    return {theirs: Translated((key,)) for theirs, key in ours.items()}


def without_effect(reason: str, *names: str) -> dict[str, Word]:
    """Words that are without effect here for one reason."""
    return dict.fromkeys(names, IgnoredKey(reason))


def refused(nearest: str, *names: str, off: Iterable[Any] = ()) -> dict[str, Word]:
    """Words that are refused with one sentence."""
    return dict.fromkeys(names, Refused(nearest, tuple(off)))
