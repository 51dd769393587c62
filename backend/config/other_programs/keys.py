"""Tables of the keys of another program, and the file whose keys are being translated."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from backend.utils.documents import parse_yaml, read_resource
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import quote

ASKS_FOR_NOTHING = ("", "none", "no", "false", "off", "null")  # lower-case values with which a refused key is accepted
TABLES: dict[str, Any] = read_resource("other_programs.yaml")  # the tables; the head of the file explains them
OPTIMIZER_ARGS = {"weight_decay": "weight_decay", "eps": "adam_epsilon", "beta1": "adam_beta1", "beta2": "adam_beta2"}
"""An argument of an optimizer → our setting."""
CHOICE_ALIASES: dict[str, dict[str, str]] = {  # setting → other spellings of its menu's values, lower case → ours
    key: {other: ours for ours, others in menu.items() for other in others} for key, menu in TABLES["choices"].items()
}


@dataclass(frozen=True, slots=True)
class Translated:
    """A key that becomes our settings. `is_converted`: its value or unit differs too. `is_switch`: only true counts."""

    settings: tuple[str, ...]
    is_converted: bool = False
    is_switch: bool = False
    value: Any = None


@dataclass(frozen=True, slots=True)
class IgnoredKey:
    """A key that is accepted and changes nothing. `reason`: a clause without a full stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A key for what does not exist here. `nearest`: a sentence on what does. `off`: accepted values."""

    nearest: str
    off: tuple[Any, ...] = ()

    def asks(self, value: Any) -> bool:
        if value is None or value in ([], {}):
            return False
        text = str(value).strip().lower()
        if any(off is True for off in self.off):  # always on here: false asks for something else
            return text in ASKS_FOR_NOTHING
        return text not in ASKS_FOR_NOTHING and text not in [str(off).strip().lower() for off in self.off]


Word = Translated | IgnoredKey | Refused
Words = Mapping[str, Word]


def tables_of(program: str) -> dict[str, dict[str, Word]]:
    tables: dict[str, dict[str, Word]] = {}
    for title, rows in TABLES[program].items():
        table = tables[title] = {key: Translated((key,)) for key in rows.get("same", "").split()}
        table |= {key: Translated((ours,)) for key, ours in rows.get("renamed", {}).items()}
        for key, ours in rows.get("converted", {}).items():
            table[key] = Translated(tuple(ours.split()), is_converted=True)
        for keys, setting, *value in rows.get("switches", ()):
            switch = Translated((setting,), is_switch=True, value=value[0] if value else None)
            table |= dict.fromkeys(keys.split(), switch)
        for reason, keys in rows.get("ignored", {}).items():
            table |= dict.fromkeys(keys.split(), IgnoredKey(reason))
        for keys, nearest, *off in rows.get("refused", ()):
            table |= dict.fromkeys(keys.split(), Refused(nearest, tuple(off)))
    return tables


class Translator:
    """The settings of a file, `values`, changed in place by one function after the other: key → value, theirs or
    already ours; None counts as absent. `written`: the same as the file has them. `program`: key of the program that
    the file is for; empty for ours, or if unknown. `remarks`: their key → a sentence on its translation."""

    def __init__(self, raw: Mapping[str, Any], program: str = "") -> None:
        self.values: dict[str, Any] = {str(key): value for key, value in raw.items() if value is not None}
        self.written = dict(self.values)
        self.program = program
        self.faults: list[ConfigProblem] = []
        self.remarks: dict[str, str] = {}

    def has(self, *words: str) -> bool:
        return any(word in self.values for word in words)

    def first(self, *words: str) -> str:
        return next((word for word in words if word in self.values), words[0])

    def take(self, *words: str) -> Any:
        """Remove these keys and return the first one's value."""
        found = [self.values.pop(word) for word in words if word in self.values]
        return found[0] if found else None

    def number(self, *words: str, whole: bool = False) -> float | None:
        """As `take`, as a number (with `whole`, a count above 0); otherwise a problem and None."""
        word, value = self.first(*words), self.take(*words)
        number = as_number(value)
        if value is None or (number is not None and not (whole and (number != int(number) or number < 1))):
            return number
        kind = "a number" if number is None else "a whole number above 0"
        self.refuse(word, f"{word} must be {kind}, not {quote(value, 60)}.")
        return None

    def flag(self, word: str) -> bool | None:
        """As `take`, as true or false; otherwise a problem and None."""
        if (value := self.take(word)) is None:
            return None
        if (flag := as_bool(value)) is None:
            self.refuse(word, f"{word} must be true or false, not {quote(value)}.")
        return flag

    def options(self, word: str) -> dict[str, Any]:
        """As `take`, as a mapping of options; text is read as YAML, as a command line has it."""
        value = self.take(word)
        if isinstance(value, str) and value.strip():
            try:
                value = parse_yaml(value, word, word)
            except UserError as error:
                self.faults += error.faults
                return {}
        if not isinstance(value, Mapping):
            if value not in (None, ""):
                self.refuse(word, f"{word} must be a mapping of options, not {quote(value, 60)}.")
            return {}
        return {str(key): option for key, option in value.items() if option is not None}

    def peek(self, *words: str, default: float) -> float:
        return as_number(next((self.values[word] for word in words if word in self.values), None), default)

    def fill(self, ours: str, value: Any, word: str) -> None:
        """Set one of our settings to what `word` amounts to, unless None; a problem if the file contradicts it."""
        written = value if value is None else self.values.setdefault(ours, value)
        if written != value and as_number(written) != as_number(value, math.nan):
            both = f"{quote(ours, 30)} is {quote(written, 40)}, and {quote(word, 30)} makes it {quote(value, 40)}"
            self.refuse(ours, f"{both}; give one of them.")

    def refuse(self, setting: str, sentence: str) -> None:
        self.faults.append(ConfigProblem(setting, sentence))

    def spread(
        self, word: str, options: Mapping[str, Any], names: Mapping[str, str], ignored: Iterable[str] = ()
    ) -> None:
        """Set our settings to a key's options. `names`: its option → our setting; others but `ignored` are refused."""
        for name, value in options.items():
            if value is not None and name in names:
                self.fill(names[name], value, word)
            elif value is not None and name not in ignored:
                self.refuse(word, f"{word} has {quote(name, 40)}, which has no place here; take it out.")


@dataclass(frozen=True)
class OtherProgram:
    """A program whose files are read. `source`: the release of the tables. `sections`: title → table. `regroups`:
    functions that read several keys together and set ours instead. `defaults`: of a file, those that differ."""

    key: str
    name: str
    source: str
    sections: Mapping[str, Words]
    regroups: tuple[Callable[[Translator], None], ...]
    defaults: Callable[[Mapping[str, Any]], dict[str, Any]]

    @cached_property
    def words(self) -> dict[str, Word]:
        return {word: fate for section in self.sections.values() for word, fate in section.items()}


def as_number(value: Any, default: Any = None) -> Any:
    """A finite number, also as text such as 1e-6, which YAML reads as text; else `default`."""
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


def choice(value: Any, aliases: Mapping[str, str]) -> Any:
    if value is None and "" not in aliases:
        return None
    if isinstance(value, (list, Mapping)):
        return value  # no menu has it: validation reports it
    text = "" if value is None else str(value).strip().lower()
    return aliases.get(text, text)


def plain(number: float) -> float | int:
    """3.0 as 3."""
    return int(number) if number == int(number) else number
