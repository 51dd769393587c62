"""Completions to be scored, as lines: rows {prompt, completion, answer, type?}, a run's completions.jsonl, or what the
bench writes, which keeps the dataset's columns and the sampled token ids as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from backend.spec.completions import SampledRow, ScoringRow, token_ids
from backend.spec.faults import Mistake
from backend.types import Completion, Group, Problem


def read_groups(path: Path) -> list[Group]:
    """One group a line. Raises Mistake on `completions` naming the line that cannot be read."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise Mistake("completions", f"{path} cannot be read: {reason}.") from None
    return groups_in(text, str(path))


def groups_in(text: str, where: str) -> list[Group]:
    """One group a line of `text`, which `where` is called in sentences. Raises Mistake on `completions`."""
    lines = text.split("\n")
    groups = [_group(number, line, where) for number, line in enumerate(lines, 1) if line.strip()]
    if not groups:
        raise Mistake("completions", f"{where} holds no completions.")
    return groups


def _group(number: int, line: str, where: str) -> Group:
    where = f"Line {number} of {where}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise Mistake("completions", f"{where} is not JSON: {error.msg}.") from None
    return group_of(row, number - 1, where)


def group_of(row: Any, index: int, where: str) -> Group:
    """The group of one line. Raises Mistake on `completions`, naming `where`, for what holds no completion."""
    made = _completions(row) if isinstance(row, dict) else []
    if not made:
        raise Mistake("completions", f"{where} has neither a text under completion nor a list under completions.")
    kind, said, chat = row.get("type"), row.get("prompt", ""), row.get("messages")
    messages = next((one for one in (said, chat) if _is_chat(one)), [])
    columns = row.get("columns")
    given = {key: value for key, value in row.items() if key not in ("completion", "completions")}
    problem = Problem(
        index=index,
        prompt=messages[-1]["content"] if _is_chat(said) else str(said),
        messages=messages,
        tokens=[],
        answer=str(row.get("answer", "")),
        type=None if kind is None else str(kind),
        row=columns if isinstance(columns, dict) else given,
    )
    return Group(problem, made)


def line_of(group: Group) -> ScoringRow:
    """A group as `group_of` reads it back: with its columns, its messages and its token ids."""
    problem = group.problem
    rows = [SampledRow(text=one.text, tokens=list(one.tokens), stop=one.stop) for one in group.completions]
    return ScoringRow(
        prompt=problem.prompt, answer=problem.answer, type=problem.type, messages=problem.messages,
        columns=problem.row, completions=rows,
    )  # fmt: skip


def merge_consecutive(groups: list[Group]) -> list[Group]:
    """Merge consecutive groups of the same problem: a file may have one line for each completion."""
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


def _is_chat(said: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(said, list) and bool(said) and all(_is_message(one) for one in said)


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)


def _completions(row: dict[str, Any]) -> list[Completion]:
    if isinstance(row.get("completion"), str):
        return [Completion([], [], row["completion"], "eos")]
    listed = row.get("completions")
    told = [one if isinstance(one, dict) else {"text": one} for one in listed] if isinstance(listed, list) else []
    return [_completion(one) for one in told] if all(isinstance(one.get("text"), str) for one in told) else []


def _completion(told: dict[str, Any]) -> Completion:
    stop = told.get("stop")
    return Completion(
        token_ids(told.get("tokens")), [], told["text"], stop if stop in ("eos", "length", "string") else "eos"
    )
