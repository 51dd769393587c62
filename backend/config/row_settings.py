"""What `prompt_template`, `answer_pattern` and `eval_data` mean, and their problems before any row is read."""

import re
import string
from collections.abc import Mapping
from typing import Any

from backend.config.setting import DATASET_KEYS
from backend.utils.errors import UserError
from backend.utils.files import user_path
from backend.utils.text import excess, quote

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", re.ASCII)
TAKEN_NAMES = ("train", "valid", "test", "rewards", "completions", "time", "sampling")
"""Names that no evaluation set may have: splits, and prefixes of metrics."""


def template_columns(template: str) -> list[str]:
    """The columns that a prompt template names, in order. Raises ValueError for an invalid template."""
    columns: list[str] = []
    for _, column, form, conversion in string.Formatter().parse(template):
        if column is None:
            continue
        if form or conversion:
            raise ValueError("a place holds only the name of a column")
        if not column.strip():
            raise ValueError("a place is empty; write the name of a column in it")
        columns.append(column)
    return list(dict.fromkeys(columns))


def template_fault(template: str) -> str:
    try:
        if not template or template_columns(template):
            return ""
    except ValueError as error:
        return f"The prompt template cannot be read: {quote(error, 90)}. Write {{{{ and }}}} for braces."
    return "The prompt template names no column, so every prompt would be the same; write {column}."


def pattern_fault(pattern: str) -> str:
    if not pattern or excess(pattern):
        return excess(pattern)
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        return f"{quote(pattern, 60)} is not a regular expression: {quote(error, 80)}."
    if groups == 1:
        return ""
    has = "no group" if not groups else f"{groups} groups"
    advice = "put the answer, and nothing else, in round brackets: (…), with (?:…) for others"
    return f"{quote(pattern, 60)} has {has}; {advice}."


def evaluation_sets(eval_data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name → the settings in which that dataset differs from the run's, `data` among them; not validated."""
    return {str(name): dict(each) if isinstance(each, Mapping) else {"data": each} for name, each in eval_data.items()}


def evaluation_set_fault(name: str, about: Mapping[str, Any]) -> str:
    if not _NAME.fullmatch(name):
        return f"{quote(name, 40)} cannot name an evaluation set: use letters, digits, dots, - and _, at most 40."
    if name in TAKEN_NAMES:
        return f"{name} cannot name an evaluation set: it has a meaning already; take another name."
    if strange := [key for key in about if key not in DATASET_KEYS]:
        allowed = f"{DATASET_KEYS[1]}, {DATASET_KEYS[2]}, … of a dataset"
        return f"The evaluation set {name} has {quote(strange[0], 40)}; it may have data and {allowed}."
    if wrong := [key for key, value in about.items() if not isinstance(value, str)]:
        value = quote(about[wrong[0]], 40)
        return f"{quote(wrong[0], 40)} of the evaluation set {name} must be text, not {value}."
    if not about.get("data", "").strip():
        return f"The evaluation set {name} names no data: give a file, a folder or an id on Hugging Face."
    try:
        user_path(about["data"], "eval_data")
    except UserError as error:
        return error.faults[0].sentence
    return template_fault(about.get("prompt_template", "")) or pattern_fault(about.get("answer_pattern", ""))


def prompt_limit(max_seq_length: int, max_completion_length: int, max_prompt_length: int | None) -> int:
    room = max_seq_length - max_completion_length
    return room if max_prompt_length is None else min(room, max_prompt_length)
