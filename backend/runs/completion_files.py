"""completions.jsonl: an index by step, and export."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from backend.runs.completion_rows import (
    GroupRow,
    conversation_text,
    listed_completions,
    logged_of,
    scores_of,
    without_token_data,
)
from backend.runs.events import Follower, is_step, parse_line, placed_lines
from backend.utils.disk import cause
from backend.utils.errors import UserError
from backend.utils.files import open_regular
from backend.utils.text import fenced, quote

SLICE = 1 << 20  # bytes that the index reads at a time
_STEP = re.compile(rb'^\s*\{\s*"step":\s*(\d+)\b')  # the step comes first in a row as the trainer writes it


def parse_group_row(line: bytes) -> GroupRow | None:
    """The row of one line of completions.jsonl; None for anything but a JSON object with a step."""
    row: Any = parse_line(line)
    return row if row is not None and is_step(row.get("step")) else None


def read_line(path: Path, offset: int) -> bytes:
    try:
        with open_regular(path) as file:
            file.seek(offset)
            return file.readline()
    except OSError:
        return b""


class CompletionIndex:
    """Step → byte range in the file. A row is parsed when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self._lines = Follower(self.path, limit=SLICE)
        self._ranges: dict[int, tuple[int, int]] = {}

    def steps(self) -> list[int]:
        return list(self._ranges)

    def advance(self) -> bool:
        """Index the next slice of the file; True if there may be more."""
        placed = self._lines.lines()
        if self._lines.restarted:
            self._ranges.clear()
        for start, line in placed:
            match = _STEP.match(line)
            row = None if match else parse_group_row(line)
            step = int(match[1]) if match else row["step"] if row else None
            if step is not None:
                self._ranges[step] = (self._ranges.get(step, (start, 0))[0], start + len(line))
        return bool(placed)

    def rows(self, step: int | None = None) -> list[GroupRow]:
        """The rows of a step, by default the newest, without token data."""
        return [row for _, row in self.placed_rows(step)]

    def placed_rows(self, step: int | None = None) -> list[tuple[int, GroupRow]]:
        """As `rows`, each with its offset in the file."""
        wanted = next(reversed(self._ranges), -1) if step is None else step
        start, end = self._ranges.get(wanted, (0, 0))
        try:
            with open_regular(self.path) as file:
                file.seek(start)
                text = file.read(end - start)
        except OSError:
            return []
        lines = placed_lines(text, start)
        rows = ((offset, parse_group_row(without_token_data(line))) for offset, line in lines)
        return [(offset, row) for offset, row in rows if row is not None and row["step"] == wanted]


Place = tuple[int, int]  # offset of a row in completions.jsonl, and the completion's place in it

SUFFIXES = {".jsonl": "JSON lines", ".md": "Markdown"}


def export_completions(source: Path, places: Sequence[Place], target: Path) -> Generator[int, None, None]:
    """Write completions of `source` to `target`, a file of SUFFIXES, and yield the number written so far.

    The file is renamed into place at the end; closing the iterator before leaves nothing. Raises UserError.
    """
    if target.suffix not in SUFFIXES:
        raise UserError("export", f"{target.name} must end in .jsonl or .md.")
    written, partial = 0, target.with_name(f".{target.name}.part")
    try:
        with open_regular(source) as file, partial.open("w", encoding="utf-8", errors="replace") as out:
            for offset, group in groupby(places, key=lambda place: place[0]):  # a row's line is parsed once
                file.seek(offset)
                row = parse_group_row(file.readline()) or {}
                completions = listed_completions(row)
                for _, place in group:
                    if place < len(completions):
                        about = {key: row.get(key) for key in ("step", "prompt", "answer", "type")}
                        line = json.dumps(about | dict(completions[place]), ensure_ascii=False) + "\n"
                        out.write(line if target.suffix == ".jsonl" else _markdown(row, completions[place]))
                        written += 1
                        yield written
            out.flush()
            os.fsync(out.fileno())  # before the rename, as `replace_file`
        os.replace(partial, target)
    except OSError as error:
        raise UserError("export", f"{quote(target)} cannot be written: {cause(error)}.") from None
    finally:
        partial.unlink(missing_ok=True)


def _markdown(row: Mapping[str, Any], completion: Mapping[str, Any]) -> str:
    figures = {"reward": completion.get("reward"), "advantage": completion.get("advantage"), **scores_of(completion)}
    logged = "".join(f"{name}: {_rounded(value)}\n\n" for name, value in logged_of(completion).items())
    head = ", ".join(f"{name} {_rounded(value)}" for name, value in figures.items() if value is not None)
    prompt, answer = row.get("prompt"), row.get("answer")
    expected = f"\n\nAnswer: {answer}" if answer not in (None, "") else ""
    return (
        f"## Step {row.get('step')}\n\n{head}; {completion.get('tokens')} tokens, {completion.get('stop')}\n\n{logged}"
        f"### Prompt\n\n{fenced(prompt if isinstance(prompt, str) else '')}{expected}\n\n"
        f"### Completion\n\n{fenced(conversation_text(completion))}\n\n"
    )


def _rounded(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
