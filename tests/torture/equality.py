"""Whether two homes hold the same runs, exports and results: every file byte for byte, but for times, process numbers and the log."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from backend.runs.events import read_events
from backend.runs.queue import FILE, QueueFile

LEFT_OUT = re.compile(r"(^|/)(log\.txt|queue\.log|[^/]+\.lock|control)$|^prefs(/|$)")
"""Files that tell what happened on the way, and not what came of it."""

COMPARED_EVENTS = ("step", "eval", "checkpoint", "change", "health", "finished", "stopped", "failed")
"""Kinds of an event log that a resume repeats exactly. Phases, starts and notes tell of processes."""

OF_TIME = re.compile(
    r"^(t|mono|seq|pid|elapsed_s|events_bytes|completions_bytes|began|updated|completions|created|seconds|.*_s"
    r"|time/.*|.*per_second|peak_memory.*|process/.*|machine/.*)$"
)
"""Keys whose values tell of processes: their times, lengths of files that hold times, what was sampled twice."""


def differences(home: Path, other: Path, *, may_have_saved_more: bool = False) -> list[str]:
    """What differs between two homes, a line each; empty where they are equal. `may_have_saved_more`: `home`'s run may tell of checkpoints
    that the other did not write, since a run that fails saves its last step."""
    mine, theirs = _files(home), _files(other)
    lines = [f"only after the kills: {name}" for name in sorted(mine.keys() - theirs.keys())]
    lines += [f"missing after the kills: {name}" for name in sorted(theirs.keys() - mine.keys())]
    for name in sorted(mine.keys() & theirs.keys()):
        one, two = _content(mine[name], home), _content(theirs[name], other)
        if may_have_saved_more and Path(name).name == "events.jsonl":
            one["checkpoint"] = [event for event in one["checkpoint"] if event in two["checkpoint"]]
        if one != two:
            lines.append(f"differs: {name}{_where(one, two)}")
    return lines


def _files(home: Path) -> dict[str, Path]:
    """Every file, and every folder that is empty, by its path below the home."""
    paths = {str(path.relative_to(home)): path for path in home.rglob("*") if path.is_file() or not any(path.iterdir())}
    return {name: path for name, path in paths.items() if not LEFT_OUT.search(name)}


def _content(path: Path, home: Path) -> Any:
    if path.is_dir():
        return "a folder"
    if path.name == "events.jsonl":
        return _event_log(path, home)
    if path.name == FILE:  # what the file of a queue lists may be done already: its readers look at the runs
        return [run.name for run in QueueFile(path.parent).read().waiting]
    if path.suffix == ".json":
        with contextlib.suppress(ValueError):  # half a file is compared as it is
            return _timeless(json.loads(path.read_text(encoding="utf-8")), home)
    content = path.read_bytes()
    return content.replace(bytes(home), b"HOME") if path.suffix not in (".safetensors", ".gguf") else content


def _event_log(path: Path, home: Path) -> Any:
    """The events by kind. `seq` has no gaps, and no line is half."""
    text = path.read_bytes()
    events = list(read_events(path))
    whole = text.endswith(b"\n") and len(events) == text.count(b"\n")
    numbered = [event["seq"] for event in events] == list(range(len(events)))
    by_kind = {
        kind: sorted(
            json.dumps(_timeless(event, home), sort_keys=True) for event in events if event["kind"] == kind
        )
        for kind in COMPARED_EVENTS
    }  # fmt: skip
    return by_kind | {"whole": whole, "numbered": numbered, "last": events[-1]["kind"] if events else None}


def _timeless(value: Any, home: Path) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item, home) for key, item in value.items() if not OF_TIME.match(key)}
    if isinstance(value, list):
        return [_timeless(item, home) for item in value]
    return value.replace(str(home), "HOME") if isinstance(value, str) else value


def _where(one: Any, two: Any) -> str:
    """Where two contents part, shortly."""
    if isinstance(one, bytes) and isinstance(two, bytes):
        at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        return f" at byte {at:,} of {len(one):,} and {len(two):,}"
    if isinstance(one, dict) and isinstance(two, dict):
        keys = [key for key in one.keys() | two.keys() if one.get(key) != two.get(key)]
        return "".join(f"\n  {key}: {_short(one.get(key))}\n  {key}: {_short(two.get(key))}" for key in sorted(keys))
    return f": {_short(one)} and {_short(two)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 600 else f"{text[:600]}…"
