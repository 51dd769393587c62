"""The parts of a completion between tags, and the text with some of them folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable

FOLDABLE = {"think": "Thinking", "answer": "Answer"}
"""Tag → the name of what is between its opening and its closing one."""


def fold(text: str, tags: Iterable[str]) -> str:
    """`text` with what is between these tags replaced by the number of its words. A tag that is never closed goes on to the end."""
    for tag in tags:
        text = re.sub(rf"(<{tag}>)(.*?)(</{tag}>|\Z)", _folded, text, flags=re.DOTALL)
    return text


def has_tag(text: str, tag: str) -> bool:
    return f"<{tag}>" in text


def _folded(match: re.Match[str]) -> str:
    words = len(match[2].split())
    return f"{match[1]} … {words:,} {'word' if words == 1 else 'words'} … {match[3]}"
