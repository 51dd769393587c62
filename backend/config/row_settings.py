"""What `prompt_template`, `answer_pattern` and `eval_data` mean, and what is wrong with them before any row is read."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any, cast

from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.text import excess, quote

DATASET_KEYS = (
    *("data", "dataset_config", "train_split", "valid_split", "test_split", "prompt_feature", "answer_feature", "type_feature"),
    *("system_feature", "system_prompt", "prompt_template", "answer_pattern", "map_function"),
)  # fmt: skip
"""Settings that say which rows one dataset has and how they become prompts: what another dataset of the same run may have of its own."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", re.ASCII)
TAKEN_NAMES = ("train", "valid", "test", "rewards", "completions", "time", "sampling")
"""No evaluation set has one of these names: splits, and what names of metrics begin with."""


def template_columns(template: str) -> list[str]:
    """The columns that a prompt template names, in order. Raises UserError for a text that is no template."""
    columns: list[str] = []
    try:
        for _, column, form, conversion in string.Formatter().parse(template):
            if column is None:
                continue
            if form or conversion:
                raise ValueError("a place has nothing but the name of a column")
            if not column.strip():
                raise ValueError("a place is empty; write the name of a column in it")
            columns.append(column)
    except ValueError as error:
        raise UserError(
            "prompt_template",
            f"The prompt template cannot be read: {quote(error, 90)}. Write {{{{ and }}}} for braces.",
        ) from None
    return list(dict.fromkeys(columns))


def template_faults(template: str) -> Iterator[ConfigProblem]:
    if not template:
        return
    try:
        if not template_columns(template):
            yield ConfigProblem(
                "prompt_template",
                "The prompt template names no column, so every prompt would be the same; write {column}.",
            )
    except UserError as mistake:
        yield from mistake.faults


def pattern_faults(pattern: str) -> Iterator[ConfigProblem]:
    if not pattern:
        return
    if sentence := excess(pattern):
        yield ConfigProblem("answer_pattern", sentence)
        return
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        yield ConfigProblem("answer_pattern", f"{quote(pattern, 60)} is no regular expression: {quote(error, 80)}.")
        return
    if groups != 1:
        has = "no group" if not groups else f"{groups} groups"
        yield ConfigProblem(
            "answer_pattern",
            f"{quote(pattern, 60)} has {has}; put the answer, and nothing else, in round brackets: (…), with (?:…) for others.",
        )


def map_function_faults(function: str, file: str) -> Iterator[ConfigProblem]:
    if function and not file:
        name = quote(function, 40)
        yield ConfigProblem(
            "map_function", f"{name} is to map the rows, but no reward functions file is given that has it."
        )


def evaluation_sets(eval_data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name → the settings in which that dataset differs from the run's, `data` among them. What is wrong stays as it is: see
    `evaluation_set_faults`."""
    return {
        str(name): dict(cast("Mapping[str, Any]", about)) if isinstance(about, Mapping) else {"data": about}
        for name, about in eval_data.items()
    }


def evaluation_set_faults(eval_data: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    for name, about in evaluation_sets(eval_data).items():
        if sentence := _set_fault(name, about):
            yield ConfigProblem("eval_data", sentence)
        else:
            for fault in (
                *template_faults(about.get("prompt_template", "")),
                *pattern_faults(about.get("answer_pattern", "")),
            ):
                yield ConfigProblem("eval_data", fault.sentence)


def _set_fault(name: str, about: Mapping[str, Any]) -> str:
    """What is wrong with one evaluation set; "" for nothing."""
    if not _NAME.fullmatch(name):
        return f"{quote(name, 40)} cannot name an evaluation set: take letters, digits, dots, - and _, at most 40."
    if name in TAKEN_NAMES:
        return f"{name} cannot name an evaluation set: it has a meaning already; take another name."
    strange = [key for key in about if key not in DATASET_KEYS]
    if strange:
        return f"The evaluation set {name} has {quote(strange[0], 40)}; it may have data and {', '.join(DATASET_KEYS[1:3])}, … of a dataset."
    wrong = next((key for key, value in about.items() if not isinstance(value, str)), None)
    if wrong is not None:
        return f"{quote(wrong, 40)} of the evaluation set {name} must be text, not {quote(about[wrong], 40)}."
    if not about.get("data", "").strip():
        return f"The evaluation set {name} names no data: give a file, a folder or an id on Hugging Face."
    try:
        user_path(about["data"], "eval_data")
    except UserError as mistake:
        return mistake.faults[0].sentence
    return ""


def prompt_limit(max_seq_length: int, max_completion_length: int, max_prompt_length: int | None) -> int:
    """Tokens of the longest prompt that is taken: what leaves room for a completion, and no more than the prompts' own limit."""
    room = max_seq_length - max_completion_length
    return room if max_prompt_length is None else min(room, max_prompt_length)
