"""Parses an entry of `reward_functions`, which has one of three forms:

    r1_accuracy                               a function with its defaults
    keyword(word=therefore, name=concludes)   with arguments, here under a name of its own
    rewards.py::brevity(limit=200)            a plain function of a Python file, called as TRL calls it

The text is parsed and never evaluated: arguments are literals, and a bare word is text. Which functions exist and which
arguments they take is the business of `backend.rewards.catalogue.catalog`.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from backend.utils.errors import UserError
from backend.utils.text import quote

ALIAS = "name"
"""The argument that is not passed to the function: the name of the entry in metrics and tables."""

_SETTING = "reward_functions"
_FILE = re.compile(r"""([^"'=]*?)::(.*)""", re.DOTALL)
_METRIC = re.compile(r"[A-Za-z0-9_.-]+")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_PAIRS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A parsed entry of `reward_functions`. `file` is the path before `::`, empty for a registered function."""

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    alias: str = ""
    file: str = ""

    @property
    def name(self) -> str:
        """The name of its scores: the alias, else the function's name."""
        return self.alias or self.function

    @property
    def text(self) -> str:
        """The entry in canonical notation; parsing it gives an equal call."""
        arguments = {**self.arguments, **({ALIAS: self.alias} if self.alias else {})}
        inside = ", ".join(f"{key}={_written(value)}" for key, value in arguments.items())
        return f"{self.file}{'::' if self.file else ''}{self.function}{f'({inside})' if inside else ''}"


def read_call(text: str) -> RewardCall:
    """Parse one entry. Raises UserError on `reward_functions` with what cannot be parsed."""
    if not text.strip():
        raise UserError(_SETTING, "An entry of the reward functions is empty; take it out, or write a name.")
    divided = _FILE.fullmatch(text)
    file, rest = (divided[1].strip(), divided[2]) if divided else ("", text)
    function, bracket, inside = (part.strip() for part in rest.strip().partition("("))
    if not function or (divided and not file):
        raise _unreadable(text, "it names no function")
    arguments = _arguments(text, inside) if bracket else {}
    alias = arguments.pop(ALIAS, None)
    if alias is not None and not (isinstance(alias, str) and _METRIC.fullmatch(alias)):
        raise _unreadable(text, f"its {ALIAS} must be made of letters, digits, dots, dashes and underscores")
    return RewardCall(function, arguments, alias or "", file)


def split_names(entries: str | Iterable[Any]) -> list[str]:
    """The entries of `reward_functions`, from text or from a list.

    Text is split at commas outside brackets and quotes; brackets around the whole and quotes around an entry are removed.
    In a list, entries that YAML split at a comma inside brackets (`[keyword(word=so, case=true)]`) are joined again.
    """
    if not isinstance(entries, str):
        return _rejoined([str(part) for part in entries])
    text = entries.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return [name for name in map(_bare, _pieces(text)[0]) if name]


def _pieces(text: str) -> tuple[list[str], int]:
    """(`text` split at the commas between entries, number of brackets still open at its end)."""
    pieces, depth, quote, escaped = [""], 0, "", False
    for char in text:
        if quote:
            quote = quote if escaped or char != quote else ""
            escaped = char == "\\" and not escaped
        elif char in "'\"" and (depth or not pieces[-1].strip()):
            quote = char  # one in the middle of a name is an apostrophe: it's.py::brief
        else:
            depth = max(0, depth + _PAIRS.get(char, 0))
        if char == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += char
    return pieces, depth


def _bare(piece: str) -> str:
    piece = piece.strip()
    if "(" not in piece:
        return piece.strip("'\"")
    quoted = piece[0] in "'\"" and piece[-1] == piece[0]
    return piece[1:-1].strip() if quoted else piece


def _rejoined(parts: list[str]) -> list[str]:
    names: list[str] = []
    open_brackets = 0
    for part in parts:
        if open_brackets:
            names[-1] += f", {part}"
        else:
            names.append(part)
        open_brackets = _pieces(names[-1])[1]
    return names


def _arguments(text: str, inside: str) -> dict[str, Any]:
    """Arguments by name, from the text after the opening bracket."""
    try:
        with warnings.catch_warnings():
            # "\d" in quotes is meant literally; Python parses it so, with a SyntaxWarning.
            warnings.simplefilter("ignore")
            parsed = ast.parse(f"f({inside}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parsed = None
    if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name):
        raise _unreadable(text, "what stands in its brackets is not a list of arguments, as in keyword(word=therefore)")
    if parsed.args or any(keyword.arg is None for keyword in parsed.keywords):
        raise _unreadable(text, "each of its arguments needs a name, as in keyword(word=therefore)")
    arguments = [(str(keyword.arg), keyword.value) for keyword in parsed.keywords]
    if len(dict(arguments)) < len(arguments):
        raise _unreadable(text, "an argument is given twice")
    return {name: _value(text, name, node) for name, node in arguments}


def _value(text: str, name: str, node: ast.expr) -> Any:
    """A literal: text, a number, true, false, none, or a list of these."""
    if isinstance(node, ast.Name):
        return _WORDS.get(node.id.lower(), node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(text, name, item) for item in node.elts]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        value = ...
    if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        raise _unreadable(
            text, f"{quote(name, 30)} is neither a number nor text; text with signs or spaces needs quotes"
        )
    return value


def _written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_written, cast('list[Any]', value)))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _unreadable(text: str, why: str) -> UserError:
    return UserError(_SETTING, f"The reward function {quote(text, 60)} cannot be read: {why}.")


# ── code tests ───────────────────────────────────────────────────────────────────────────────────────────────────────

# Where the reward function `code_tests` finds its tests, so that a dataset without any is refused before a run.

CODE_TESTS = "code_tests"
TEST_COLUMNS = (
    *("tests", "test_list", "test_cases", "verification_info", "input_output", "official_tests", "test", "unit_tests"),
)
"""Columns that are taken for tests, the first that there is, where the entry names none."""


def tests_column(named: str, columns: Collection[str]) -> str:
    """The column with the tests: the one that is named, else the first known one; "" where there is none."""
    if named:
        return named if named in columns else ""
    return next((name for name in TEST_COLUMNS if name in columns), "")


def without_tests(entries: Iterable[str], columns: Collection[str]) -> list[str]:
    """The column that each entry of `code_tests` lacks among `columns`; a known one where the entry names none."""
    lacking: list[str] = []
    for entry in entries:
        try:
            call = read_call(entry)
        except UserError:  # the check of entries says so
            continue
        named = str(call.arguments.get("column", ""))
        if call.function == CODE_TESTS and not call.file and not tests_column(named, columns):
            lacking.append(named or TEST_COLUMNS[0])
    return lacking
