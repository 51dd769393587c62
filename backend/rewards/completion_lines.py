"""Completions to score, as JSON lines: dataset-like rows, a run's completions.jsonl, or bench output."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

from backend.runs.completion_rows import SampledRow, ScoringRow, token_ids
from backend.types import Completion, Group, Problem
from backend.utils import documents
from backend.utils.errors import UserError
from backend.utils.files import read_text, user_path
from backend.utils.text import quote

MOST_BYTES = 2**31
"""Maximum bytes of a completions file."""


def read_groups(path: Path) -> list[Group]:
    """One group per line. Raises UserError on `completions` naming the line."""
    text = read_text(user_path(str(path), "completions"), "completions", MOST_BYTES)
    return groups_in(text, quote(path))


def groups_in(text: str, where: str) -> list[Group]:
    """One group per line of `text`; `where` names it. Raises UserError on `completions`."""
    lines = text.split("\n")
    groups = [_group(number, line, where) for number, line in enumerate(lines, 1) if line.strip()]
    if not groups:
        raise UserError("completions", f"{where} holds no completions.")
    return groups


def _group(number: int, line: str, where: str) -> Group:
    where = f"Line {number} of {where}"
    try:
        row = documents.parse_loose_json(line)
    except documents.BrokenJson as error:
        raise UserError("completions", f"{where} is not JSON that can be read: {error.why}.") from None
    return group_of(row, number - 1, where)


def group_of(row: Any, index: int, where: str) -> Group:
    """Group of one line. Raises UserError on `completions` naming `where`."""
    completions = _completions(row) if isinstance(row, dict) else []
    if not completions:
        raise UserError("completions", f"{where} has neither a text under completion nor a list under completions.")
    kind, prompt, columns = row.get("type"), row.get("prompt", ""), row.get("columns")
    messages = next((chat for chat in (prompt, row.get("messages")) if _is_chat(chat)), [])
    other_keys = {key: value for key, value in row.items() if key not in ("completion", "completions")}
    problem = Problem(
        index=index,
        prompt=messages[-1]["content"] if _is_chat(prompt) else str(prompt),
        messages=messages,
        tokens=[],
        answer=str(row.get("answer", "")),
        type=None if kind is None else str(kind),
        row=columns if isinstance(columns, dict) else other_keys,
    )
    return Group(problem, completions)


def line_of(group: Group) -> ScoringRow:
    """A group as a line for `group_of`."""
    problem = group.problem
    rows = [
        SampledRow(text=completion.text, tokens=list(completion.tokens), stop=completion.stop)
        for completion in group.completions
    ]
    return ScoringRow(
        prompt=problem.prompt,
        answer=problem.answer,
        type=problem.type,
        messages=problem.messages,
        columns=problem.row,
        completions=rows,
    )


def merge_consecutive(groups: list[Group]) -> list[Group]:
    """Merge consecutive groups of the same problem."""
    merged: list[Group] = []
    for group in groups:
        last = merged[-1] if merged else None
        if last and _is_same_problem(last.problem, group.problem):
            last.completions.extend(group.completions)
        else:
            merged.append(Group(group.problem, list(group.completions)))
    return merged


def _is_same_problem(a: Problem, b: Problem) -> bool:
    return (a.prompt, a.answer, a.type, a.row) == (b.prompt, b.answer, b.type, b.row)


def _is_chat(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(_is_message(item) for item in value)


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _completions(row: dict[str, Any]) -> list[Completion]:
    if isinstance(row.get("completion"), str):
        return [Completion([], [], row["completion"], "eos")]
    listed = row.get("completions")
    rows = [item if isinstance(item, dict) else {"text": item} for item in listed] if isinstance(listed, list) else []
    return [_completion(row) for row in rows] if all(isinstance(row.get("text"), str) for row in rows) else []


def _completion(row: dict[str, Any]) -> Completion:
    stop = row.get("stop")
    return Completion(
        token_ids(row.get("tokens")), [], row["text"], stop if stop in ("eos", "length", "string") else "eos"
    )
