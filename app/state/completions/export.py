"""Completions into a file of their own, as JSON lines or Markdown: read, written and forgotten one row at a time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from app.state.completions.facts import listed_completions, logged_of
from backend.runs.completion_rows import parse_group_row
from backend.utils.disk_faults import cause
from backend.utils.errors import UserError
from backend.utils.regular_file import open_regular
from backend.utils.text import quote

Place = tuple[int, int]
"""Offset of a row in completions.jsonl, and the completion's place in it."""

SUFFIXES = {".jsonl": "JSON lines", ".md": "Markdown"}


class CompletionExport:
    """Writes some completions of `source` to `target`, whose suffix decides the format. The target is complete or absent: it is written
    under another name, and renamed at the end.

    Attributes:
        target – the file.
        written – completions written so far.
        total – completions that there are to write.
    """

    def __init__(self, source: Path, places: Sequence[Place], target: Path) -> None:
        """Raises UserError for a suffix that is not in SUFFIXES, and for a target that cannot be written."""
        if target.suffix not in SUFFIXES:
            raise UserError("export", f"{target.name} must end in .jsonl or .md.")
        self.target, self.total, self.written = target, len(places), 0
        self._format = _jsonl if target.suffix == ".jsonl" else _markdown
        self._partial = target.with_name(f".{target.name}.part")
        try:
            self._source, self._file = open_regular(source), self._partial.open("w", encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError("export", f"{quote(error.filename or target)} cannot be opened: {cause(error)}.") from None
        self._chunks = self._texts(_by_row(places))

    def advance(self, seconds: float) -> bool:
        """Write for about so long; returns whether there is more. Raises UserError where writing fails; the target is then absent."""
        deadline = time.perf_counter() + seconds
        try:
            for text in self._chunks:
                self._file.write(text)
                self.written += 1
                if time.perf_counter() > deadline:
                    return True
            self._file.flush()
            os.fsync(self._file.fileno())  # before the rename, as `replace_file`
            self._file.close()
            os.replace(self._partial, self.target)
        except OSError as error:
            self.cancel()
            raise UserError("export", f"{quote(self.target)} cannot be written: {cause(error)}.") from None
        self._source.close()
        return False

    def cancel(self) -> None:
        """Stop, and leave nothing behind."""
        self._source.close()
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _texts(self, rows: Iterable[tuple[int, list[int]]]) -> Iterator[str]:
        for offset, places in rows:
            row = _row_at(self._source, offset)
            completions = listed_completions(row)
            for place in places:
                if place < len(completions):
                    yield self._format(row, completions[place])


def _by_row(places: Sequence[Place]) -> Iterator[tuple[int, list[int]]]:
    """Neighbours of one row together, so that its line is parsed once; the order stays."""
    group: list[int] = []
    current = -1
    for offset, place in places:
        if offset != current and group:
            yield current, group
            group = []
        current = offset
        group.append(place)
    if group:
        yield current, group


def _row_at(file: IO[bytes], offset: int) -> Mapping[str, Any]:
    file.seek(offset)
    return parse_group_row(file.readline()) or {}


def _jsonl(row: Mapping[str, Any], completion: Mapping[str, Any]) -> str:
    about = {key: row.get(key) for key in ("step", "prompt", "answer", "type")}
    return json.dumps(about | dict(completion), ensure_ascii=False) + "\n"


def _markdown(row: Mapping[str, Any], completion: Mapping[str, Any]) -> str:
    scores = completion.get("rewards")
    figures = {"reward": completion.get("reward"), "advantage": completion.get("advantage")}
    figures |= dict(scores) if isinstance(scores, Mapping) else {}
    logged = "".join(f"{name}: {_rounded(value)}\n\n" for name, value in logged_of(completion).items())
    head = ", ".join(f"{name} {_rounded(value)}" for name, value in figures.items() if value is not None)
    answer = row.get("answer")
    expected = f"\n\nAnswer: {answer}" if answer not in (None, "") else ""
    return (
        f"## Step {row.get('step')}\n\n{head}; {completion.get('tokens')} tokens, {completion.get('stop')}\n\n{logged}"
        f"### Prompt\n\n{_fenced(row.get('prompt'))}{expected}\n\n### Completion\n\n{_fenced(completion.get('text'))}\n\n"
    )


def _fenced(text: Any) -> str:
    """The text in a code block whose fence is longer than any in the text."""
    content = text if isinstance(text, str) else ""
    fence = "```"
    while fence in content:
        fence += "`"
    return f"{fence}\n{content}\n{fence}"


def _rounded(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
