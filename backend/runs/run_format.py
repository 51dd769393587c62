"""The version of a run folder's format, and what to do with the folders of other versions.

Every line of the event log, changes.json and state.json of each checkpoint carry it as `v`; files from before they did are version 1. Within
a version files may gain keys, which older programs leave out and newer ones fill in with their defaults. The number goes up when an
older program would misread a run; a program touches no run of a version newer than its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from backend.runs.events import VERSION, first_and_last_events
from backend.runs.run_folder import RunFolder
from backend.utils.documents import read_json
from backend.utils.errors import UserError

RUN_FORMAT = VERSION
"""That of the event log's lines."""


def check_format(run: RunFolder) -> None:
    """Raise UserError for a run that a newer version of the program has written. Reads only."""
    newest = max(_versions(run), default=RUN_FORMAT)
    if newest > RUN_FORMAT:
        sentence = (
            f"The run {run.name} has format {newest} and this version of GRPO Studio knows formats up to {RUN_FORMAT}; "
            f"update it to go on with the run. Nothing was changed."
        )
        raise UserError("run", sentence)


def _versions(run: RunFolder) -> Iterator[int]:
    for part in first_and_last_events(run.events):
        yield from (v for event in part if (v := _version(event)) is not None)
    for path in [run.changes, *run.checkpoints.glob("[0-9]*/state.json")]:
        if (v := _version(_json(path))) is not None:
            yield v


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none: what is damaged is told where it is needed."""
    try:
        content = read_json(path, "run")
    except UserError:
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _version(content: dict[str, Any]) -> int | None:
    value = content.get("v")
    return value if isinstance(value, int) and not isinstance(value, bool) else None
