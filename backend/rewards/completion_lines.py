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


def read_groups(path: Path) -> list[Group]:
    """One group per line. Raises UserError on `completions` naming the line."""
    return groups_in(read_text(user_path(str(path), "completions"), "completions", MOST_BYTES), quote(path))


def groups_in(text: str, where: str) -> list[Group]:
    """One group per line of `text`; `where` names it. Raises UserError on `completions`."""
    groups: list[Group] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = documents.parse_loose_json(line)
        except documents.BrokenJson as error:
            sentence = f"Line {number} of {where} is not JSON that can be read: {error.why}."
            raise UserError("completions", sentence) from None
        groups.append(group_of(row, number - 1, f"Line {number} of {where}"))
    if not groups:
        raise UserError("completions", f"{where} holds no completions.")
    return groups


def group_of(row: Any, index: int, where: str) -> Group:
    """Group of one line. Raises UserError on `completions` naming `where`."""
    row = row if isinstance(row, dict) else {}
    listed = row.get("completions")
    if isinstance(row.get("completion"), str):
        listed = [row["completion"]]
    rows = [item if isinstance(item, dict) else {"text": item} for item in listed] if isinstance(listed, list) else []
    if not rows or not all(isinstance(each.get("text"), str) for each in rows):
        raise UserError("completions", f"{where} has neither a text under completion nor a list under completions.")
    completions: list[Completion] = []
    for each in rows:
        stop = each.get("stop")
        stop = stop if stop in ("eos", "length", "string") else "eos"
        completions.append(Completion(token_ids(each.get("tokens")), [], each["text"], stop))
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
    return ScoringRow(
        prompt=problem.prompt,
        answer=problem.answer,
        type=problem.type,
        messages=problem.messages,
        columns=problem.row,
        completions=[SampledRow(text=c.text, tokens=list(c.tokens), stop=c.stop) for c in group.completions],
    )


def merge_consecutive(groups: list[Group]) -> list[Group]:
    """Merge consecutive groups of the same problem."""
    merged: list[Group] = []
    for group in groups:
        a, b = merged[-1].problem if merged else None, group.problem
        if a and (a.prompt, a.answer, a.type, a.row) == (b.prompt, b.answer, b.type, b.row):
            merged[-1].completions.extend(group.completions)
        else:
            merged.append(Group(b, list(group.completions)))
    return merged


def _is_chat(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    items = value if isinstance(value, list) else []
    return bool(items) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
        for item in items
    )
