"""Catalogue of reward functions, read from source text: name, label, what each scores, parameters, line.

No user's file is run and no other room is imported, so the window may ask as often as it likes. In return only names that are
literals in the source are seen, not those that a file computes when it runs (`computes_names`).
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from backend.rewards.catalogue.entry import ALIAS, RewardCall, read_call, split_names
from backend.rewards.catalogue.parse import (
    Parameter,
    RewardEntry,
    count_decorator_uses,
    functions,
    locate_reward_file,
    may_define,
    parse_reward_file,
    plain_entry,
    registered_entries,
    takes_completions,
)
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import is_file
from backend.utils.text import quote

__all__ = [
    "BUILT_IN",
    "COMPARING_REWARDS",
    "DEFAULT_REWARDS",
    "Parameter",
    "RewardEntry",
    "argument_sentences",
    "builtin_rewards",
    "canonical_entry",
    "computes_names",
    "find_entry",
    "locate_reward_file",
    "metric_name",
    "nearest",
    "parse_reward_file",
    "plain_function_entry",
    "plain_rewards_in_file",
    "reward_call",
    "reward_faults",
    "rewards_in_file",
    "split_names",
    "with_absolute_file",
]

BUILT_IN = "built in"
DEFAULT_REWARDS = (
    "r1_accuracy_reward_func",
    "r1_int_reward_func",
    "r1_strict_format_reward_func",
    "r1_soft_format_reward_func",
    "r1_count_xml",
)
"""The default of `reward_functions`."""

COMPARING_REWARDS = (
    *("r1_accuracy_reward_func", "accuracy_reward", "math_eval", "multiple_choice", "choice_correctness", "jaccard"),
    "cosine_scaled_reward",
)
"""Shipped functions that compare with the dataset's answer and are useless without one."""

_REWARDS_FOLDER = Path(__file__).parents[2] / "rewards" / "functions"
_REWARD_MODULES = ("r1", "answers", "formats", "texts", "lengths", "code", "groups")
_SETTING = "reward_functions"
_ENDING = re.compile(r"_reward(_func)?$")
_KINDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "None": "none"}


def builtin_rewards() -> list[RewardEntry]:
    """The shipped reward functions, in the order of their source."""
    return list(_builtin_rewards())


@cache
def _builtin_rewards() -> tuple[RewardEntry, ...]:
    sources = (_REWARDS_FOLDER / f"{module}.py" for module in _REWARD_MODULES)
    return tuple(entry for source in sources for entry in registered_entries(ast.parse(source.read_bytes()), BUILT_IN))


def rewards_in_file(path: Path) -> list[RewardEntry]:
    """The functions that a user's file registers under literal names, in the order of their lines.

    Raises UserError on `reward_functions_file` for a file that is missing, unreadable or not Python.
    """
    return registered_entries(parse_reward_file(path), str(path))


def plain_rewards_in_file(path: Path) -> list[RewardEntry]:
    """The functions of a file that could be given to TRL: not registered, and taking `completions` or `**kwargs`. Each is an
    entry `file.py::name`. Raises UserError as `rewards_in_file`."""
    tree = parse_reward_file(path)
    lines = {entry.line for entry in registered_entries(tree, "")}
    candidates = [
        function for function in functions(tree) if function.lineno not in lines and takes_completions(function)
    ]
    return [plain_entry(function, path) for function in candidates if not function.name.startswith("_")]


def computes_names(path: Path) -> bool:
    """Whether the file registers functions in ways that its text does not show (in a loop, under a computed name).

    Then a name that `rewards_in_file` does not list may still exist; only running the file would show it.
    """
    tree = parse_reward_file(path)
    return count_decorator_uses(tree) > len(registered_entries(tree, ""))


def find_entry(text: str, known: Iterable[RewardEntry], base: Path | None = None) -> RewardEntry | None:
    """The function of an entry of `reward_functions`, named by the whole entry, for display; None where there is no such
    function or the text cannot be parsed."""
    by_name = {entry.name: entry for entry in known}
    try:
        call = reward_call(text, by_name)
        entry = plain_function_entry(call, base) if call.file else by_name.get(call.function)
    except UserError:
        return None
    label = call.alias or (entry.label if entry else "")
    return replace(entry, name=text, label=label) if entry else None


def canonical_entry(text: str) -> str:
    """An entry of `reward_functions` in canonical form: the registered name for a short one (`r1_int` →
    `r1_int_reward_func`), arguments in one notation. Text that cannot be parsed stays as it is."""
    try:
        call = read_call(text)
    except UserError:
        return text
    return _registered(call).text


def metric_name(text: str) -> str:
    """The name of an entry's scores, in `rewards/<name>/mean` and in tables."""
    try:
        call = read_call(text)
    except UserError:
        return text
    return _registered(call).name


def _registered(call: RewardCall) -> RewardCall:
    return call if call.file else replace(call, function=_short_names().get(call.function, call.function))


def reward_call(text: str, known: Iterable[str]) -> RewardCall:
    """Parse an entry. Its function is looked up among the `known` names first, then among the short names.

    Raises UserError on `reward_functions` for text that cannot be parsed.
    """
    known = set(known)
    if text in known:
        return RewardCall(text)
    call = read_call(text)
    return call if call.function in known else _registered(call)


@cache
def _short_names() -> dict[str, str]:
    return {short: entry.name for entry in _builtin_rewards() if (short := _ENDING.sub("", entry.name)) != entry.name}


def reward_faults(
    texts: Iterable[str], entries: Iterable[RewardEntry], base: Path | None = None
) -> list[ConfigProblem]:
    """Faults of the entries of `reward_functions` that show without running anything.

    `entries` are the functions that exist; files before `::` are relative to the folder `base` (default: the working
    directory) and are read. Each fault is on `reward_functions`.
    """
    known = {entry.name: entry for entry in entries}
    sentences: list[str] = []
    names: list[str] = []
    for text in texts:
        try:
            call = reward_call(text, known)
            entry = plain_function_entry(call, base) if call.file else known.get(call.function)
        except UserError as mistake:
            sentences += [fault.sentence for fault in mistake.faults]
            continue
        names.append(call.name)
        if entry:
            sentences += argument_sentences(call, entry.parameters, entry.source == BUILT_IN)
        elif not call.file:
            sentences.append(unknown_sentence(call.function, known))
    return [ConfigProblem(_SETTING, sentence) for sentence in [*sentences, *duplicate_sentences(names)]]


def unknown_sentence(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known)
    hint = f"the nearest is {quote(close, 40)}, and " if close else ""
    return f"There is no reward function {quote(name, 40)}; {hint}the known ones are {quote(', '.join(known), 60)}."


def duplicate_sentences(names: Iterable[str]) -> list[str]:
    """Faults for names used twice: scores are stored by name."""
    hint = f"give each a name of its own, as in keyword(word=so, {ALIAS}=says_so)"
    return [f"{name} is listed {times} times; {hint}." for name, times in Counter(names).items() if times > 1]


def argument_sentences(call: RewardCall, parameters: Sequence[Parameter], shipped: bool) -> list[str]:
    """Faults of a call's arguments: unknown, of the wrong type, or missing.

    Missing arguments are reported for shipped functions only: a parameter of a user's function may be a column of the dataset.
    """
    known = {parameter.name: parameter for parameter in parameters}
    sentences = [_no_parameter(call, name, known) for name in call.arguments if name not in known]
    for name, value in call.arguments.items():
        if name in known and not _fits(value, known[name].kind):
            types = " or ".join(_KINDS[kind] for kind in _kinds(known[name].kind))
            sentences.append(f"{name} of {call.function} must be {types}, not {value!r}.")
    lacking = [
        parameter.name
        for parameter in parameters
        if shipped and parameter.default is None and parameter.name not in call.arguments
    ]
    return sentences + [f"{call.function} needs {name}, as in {call.function}({name}=…)." for name in lacking]


def _no_parameter(call: RewardCall, name: str, known: Mapping[str, Parameter]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"the nearest is {close[0]}, and " if close else ""
    available = f"{hint}its parameters are {', '.join(known)}" if known else "it has none"
    return f"{call.function} has no parameter {name}; {available}."


def _kinds(annotation: str) -> list[str]:
    """The types of an annotation such as `int | None`; empty where it contains any other type."""
    kinds = [kind.strip() for kind in annotation.split("|")]
    return kinds if all(kind in _KINDS for kind in kinds) else []


def _fits(value: Any, annotation: str) -> bool:
    kinds = _kinds(annotation)
    kind = type(value).__name__ if value is not None else "None"
    return not kinds or kind in kinds or (kind == "int" and "float" in kinds)


_LONGEST_NAME = 100
"""Characters of a misspelt name that are compared: more would take long and be like nothing."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when nothing is close.

    Short names of known built-in functions are candidates too; the full name is returned for them.
    """
    names = {candidate.lower(): candidate for candidate in known}
    names |= {short: full for short, full in _short_names().items() if full in names}
    close = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), names, n=1)
    return names[close[0]] if close else None


def with_absolute_file(text: str, folder: Path) -> str:
    """An entry with the path before its `::` made absolute, if that file exists in `folder`."""
    try:
        call = read_call(text)
    except UserError:
        return text
    if not call.file:
        return text
    try:
        path = locate_reward_file(call.file, folder)
    except UserError:
        return text  # what cannot be a path is told where the entry is checked
    return replace(call, file=os.path.realpath(path)).text if is_file(path) else text


def plain_function_entry(call: RewardCall, base: Path | None = None) -> RewardEntry | None:
    """The function that `file.py::function` names; None where the file binds the name otherwise than by its own `def`.

    Raises UserError on `reward_functions` when the file cannot be read or has no such name.
    """
    path = locate_reward_file(call.file, base)
    tree = parse_reward_file(path, _SETTING)
    defined = {function.name: function for function in functions(tree)}
    if call.function in defined:
        return plain_entry(defined[call.function], path)
    if not may_define(tree, call.function):
        raise UserError(_SETTING, not_in_file(call.function, path, defined))
    return None


def not_in_file(name: str, path: Path, functions: Iterable[str]) -> str:
    known = [function for function in functions if not function.startswith("_")]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"the nearest is {close[0]}, and it" if close else "it"
    return f"{path.name} has no function {name}; {hint} has {', '.join(known) or 'none'}."
