"""The text of a problem report: what a person reads, changes, and sends by hand. Nothing here sends anything.

It holds versions, the traceback, the last lines of a log and the settings, without the home folder, user name, tokens, paths and prompts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.config.config import SETTINGS
from backend.utils.private_text import without_private

LOG_LINES = 60
"""Last lines of a log that are in a report."""
TITLE = "GRPO Studio problem report"
EMPTY = "Write here what you did, what happened, and what you expected."


@dataclass(frozen=True, slots=True)
class ProblemFacts:
    """What went wrong: a sentence, the traceback ("" where there is none), the end of the log and the settings that were in use."""

    sentence: str = EMPTY
    traceback: str = ""
    log: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def report(problem: ProblemFacts) -> str:
    """The report as plain text."""
    from backend.utils import components  # reads packages' metadata, which no start of a program waits for

    versions = "\n".join(f"{name}: {value}" for name, value in components.versions().items())
    parts = {
        "Versions": versions,
        "Traceback": problem.traceback.strip(),
        "Last lines of the log": "\n".join(problem.log[-LOG_LINES:]).strip(),
        "Settings": "\n".join(f"{key}: {value}" for key, value in _public(problem.settings).items()),
    }
    sections = [f"{title}\n{'-' * len(title)}\n{text}" for title, text in parts.items() if text]
    return without_private("\n\n".join([TITLE, problem.sentence, *sections])) + "\n"


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from their defaults; of paths the last name, of texts and lists of texts their length."""
    shown: dict[str, Any] = {}
    for key, value in settings.items():
        setting = SETTINGS.get(key)
        if setting is None or value == setting.default:
            continue
        if setting.kind in ("file", "hosts", "model", "adapter", "dataset") or (
            isinstance(value, str) and os.sep in value and "~" in value[:1]
        ):
            shown[key] = _name(str(value))
        elif setting.kind == "stages":  # with paths and texts inside
            shown[key] = f"({len(value)} stages)"
        elif setting.kind in ("prose", "mapping") or (setting.kind == "list" and value):
            shown[key] = f"({len(str(value))} characters)"
        else:
            shown[key] = value
    return shown


def _name(value: str) -> str:
    """A Hub id as it is, of a path the last name."""
    is_path = value.startswith((os.sep, "~", ".")) or value.count("/") > 1
    return f"…/{Path(value).name}" if is_path else value
