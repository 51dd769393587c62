"""What the user has noted about a run: title, note, tags, favourite, archived. Kept in the run folder's about.json.

A title is shown in place of the folder's name and never renames the folder: exports, clones, the queue and a trainer that is alive
know the run by its folder. No trainer reads or writes this file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

from backend.spec.faults import Mistake
from backend.spec.run_folder import RunFolder
from backend.spec.user_input.documents import read_json
from backend.spec.user_input.text import about_path, visible
from backend.spec.whole_file import replace_file


@dataclass(frozen=True, slots=True)
class RunNotes:
    """`archived` hides a run from the list, and moves nothing."""

    title: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()
    favourite: bool = False
    archived: bool = False


def read_notes(run: RunFolder) -> RunNotes:
    """The notes of a run; empty ones where there are none. Raises Mistake for a file that holds something else."""
    return _notes(_content(run), run)


def change_notes(run: RunFolder, **changes: Any) -> RunNotes:
    """Change some fields and keep the others, those of a later version included; returns the notes as saved.

    The file is read again first, so two windows that change different fields lose nothing, and replaced by a rename.
    Raises Mistake for a file that cannot be read, which then stays as it is, or cannot be written.
    """
    content = _content(run)
    notes = replace(_notes(content, run), **changes)
    text = json.dumps({**content, **asdict(notes)}, ensure_ascii=False, indent=1) + "\n"
    replace_file(run.about, text)
    return notes


def tags_in(text: str) -> tuple[str, ...]:
    """The tags in a line that a user typed: words between commas or spaces, each once, in the order typed."""
    return tuple(dict.fromkeys(word for word in re.split(r"[\s,]+", text) if word))


def _content(run: RunFolder) -> dict[str, Any]:
    if not os.path.lexists(run.about):
        return {}
    content = read_json(run.about, "about", advice="mend or delete it")
    if not isinstance(content, dict):
        raise Mistake("about", about_path(run.about, " does not hold the notes of a run; mend or delete it."))
    return cast("dict[str, Any]", content)


def _notes(content: dict[str, Any], run: RunFolder) -> RunNotes:
    known: dict[str, Any] = {field.name: content[field.name] for field in fields(RunNotes) if field.name in content}
    if "tags" in known and _is_list_of_text(known["tags"]):
        known["tags"] = tuple(known["tags"])
    wrong = [name for name, value in known.items() if type(value) is not type(getattr(RunNotes(), name))]
    if wrong:
        raise Mistake("about", about_path(run.about, f" has a value for {wrong[0]} that is none; mend or delete it."))
    return RunNotes(**{name: _visible(value) for name, value in known.items()})


def _visible(value: Any) -> Any:
    """A value with what cannot be seen in it escaped: a title must not turn the letters of the row that it stands in."""
    if isinstance(value, tuple):
        return tuple(visible(tag) for tag in cast("tuple[str, ...]", value))
    return visible(value) if isinstance(value, str) else value


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("Iterable[Any]", value))
