"""Completions to be scored, from a file: rows {prompt, completion, answer, type?}, or a run's completions.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backend.nouns import Completion, Group, Problem
from backend.spec.faults import Mistake


def read_groups(path: Path) -> list[Group]:
    """One group a line. Raises Mistake on `completions` naming the line that cannot be read."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise Mistake("completions", f"{path} cannot be read: {reason}.") from None
    groups = [_group(number, line, path) for number, line in enumerate(lines, 1) if line.strip()]
    if not groups:
        raise Mistake("completions", f"{path} holds no completions.")
    return groups


def _group(number: int, line: str, path: Path) -> Group:
    where = f"Line {number} of {path}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise Mistake("completions", f"{where} is not JSON: {error.msg}.") from None
    texts = _texts(row) if isinstance(row, dict) else []
    if not texts:
        raise Mistake("completions", f"{where} has neither a text under completion nor a list under completions.")
    kind, said = row.get("type"), row.get("prompt", "")
    messages = said if isinstance(said, list) and said and all(_is_message(one) for one in said) else []
    problem = Problem(
        index=number - 1,
        prompt=messages[-1]["content"] if messages else str(said),
        messages=messages,
        tokens=[],
        answer=str(row.get("answer", "")),
        type=None if kind is None else str(kind),
        row={key: value for key, value in row.items() if key not in ("completion", "completions")},
    )
    return Group(problem, [Completion([], [], text, "eos") for text in texts])


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)


def _texts(row: dict[str, Any]) -> list[str]:
    if isinstance(row.get("completion"), str):
        return [row["completion"]]
    listed = row.get("completions")
    if not isinstance(listed, list):
        return []
    texts = [one.get("text") if isinstance(one, dict) else one for one in listed]
    return [text for text in texts if isinstance(text, str)] if all(isinstance(text, str) for text in texts) else []
