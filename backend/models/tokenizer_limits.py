"""How much longer a tokenizer.json makes a text before it is cut into tokens, and after it is put together again: found in the file, before the
library that obeys it opens it.

Its normalizer and its decoder are lists of replacements. Forty that write two letters for one make a trillion of a letter, in a process that
nothing interrupts then, and some of it happens while the file is loaded. No tokenizer in use makes a text more than a few times as long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from backend.utils import documents
from backend.utils.errors import UserError
from backend.utils.files import read_bytes
from backend.utils.text import quote

GROWTH = 1000.0
"""Times as long as it was that a text may become."""
LARGEST = 2**29
"""Bytes of a tokenizer.json. The largest in use have 35 MB."""
_MAY_GROW = re.compile(rb"Replace|Prepend|\\u00[4-7]")
"""What a file must hold that makes texts longer: one of these words, or an escape in which it hides. Most files hold none, and are not parsed."""

_MAY_BE_EMPTY = re.compile(r"[?*|^$]|\{0|\{,|\\[bBAzZG]")
"""Of a regular expression without any of these, every match has a letter."""


def check_growth(folder: Path, setting: str) -> None:
    """Raises UserError where the tokenizer.json of a folder makes texts more than GROWTH times as long. A file that is broken is left to
    whoever loads it."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    content = read_bytes(path, setting, LARGEST)
    if not _MAY_GROW.search(content):
        return
    try:
        parts = documents.parse_loose_json(content.decode("utf-8-sig"))
    except (documents.BrokenJson, UnicodeDecodeError):
        return
    for name in ("normalizer", "decoder") if isinstance(parts, dict) else ():
        growth = math.prod(map(_growth, _steps(cast("dict[str, Any]", parts).get(name))))
        if growth > GROWTH:
            raise UserError(
                setting,
                f"The tokenizer in {quote(folder, 70)} makes texts {quote(f'{growth:,.0f}', 20)} times as long; no more than "
                f"{GROWTH:g} are allowed.",
            )


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or decoder, those of sequences within it too; they are no deeper than `loose_json` reads."""
    if isinstance(part, dict):
        step = cast("dict[str, Any]", part)
        yield step
        for inner in step.values():
            yield from _steps(inner)
    elif isinstance(part, list):
        for inner in cast("list[Any]", part):
            yield from _steps(inner)


def _growth(step: Mapping[str, Any]) -> float:
    """How many times as long one step makes a text, at most. A text of one letter is the worst for what is put before it."""
    if step.get("type") == "Prepend":
        return 1.0 if len(str(step.get("prepend", ""))) <= 1 else 1.0 + len(str(step.get("prepend")))
    if step.get("type") != "Replace":
        return 1.0
    content = str(step.get("content", ""))
    pattern = cast("dict[str, Any]", step["pattern"]) if isinstance(step.get("pattern"), dict) else {}
    plain, expression = str(pattern.get("String", "")), str(pattern.get("Regex", ""))
    if plain:
        return max(1.0, len(content) / len(plain))
    # What may match between two letters is put there once more for each.
    return 1.0 + len(content) if not expression or _MAY_BE_EMPTY.search(expression) else max(1.0, len(content))
