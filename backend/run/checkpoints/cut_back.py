"""Cutting diary and completions back to a checkpoint, by the lengths that it recorded, or by their content where those no longer fit.

The lengths are exact as long as nobody but the trainer has written. Where an editor or a damaged disk has moved the lines, a length would
cut through one: then the lines themselves say where the checkpoint's step ends.
"""

from __future__ import annotations

from pathlib import Path

from backend.run.checkpoints.checkpoint import TrainingState
from backend.spec.completion_rows import parse_group_row
from backend.spec.diary_ends import last_events
from backend.spec.events import parse_line, truncate_file
from backend.spec.run_folder import RunFolder

OF_THE_STEP = ("eval", "health", "note", "phase")
"""Kinds that follow the line of a step and belong to it."""


def cut_back(run: RunFolder, state: TrainingState) -> str:
    """Cut both files back to a checkpoint; → a sentence where that went by their content, "" as a rule."""
    fits = _fits(run.events, state.events_bytes, state.step) and _fits(run.completions, state.completions_bytes, None)
    if fits or not state.step:
        truncate_file(run.events, state.events_bytes)
        truncate_file(run.completions, state.completions_bytes)
        return ""
    truncate_file(run.events, _end_of_step(run.events, state.step))
    truncate_file(run.completions, _end_of_rows(run.completions, state.step))
    return (
        f"events.jsonl or completions.jsonl was changed since step {state.step} was saved, so both were cut back to that step by their "
        f"lines, not by their lengths."
    )


def _fits(path: Path, length: int, step: int | None) -> bool:
    """Whether a file's first `length` bytes end with a line, and for the diary no other step's is the newest there."""
    try:
        with path.open("rb") as file:
            if length <= 0 or path.stat().st_size < length:
                return True  # missing or shorter, as a copy without it: there is nothing to cut
            file.seek(length - 1)
            if file.read(1) != b"\n":
                return False
            events = last_events(file, length) if step else []
    except OSError:
        return True
    newest = next((event.get("step") for event in reversed(events) if event["kind"] == "step"), step)
    return newest == step


def _end_of_step(path: Path, step: int) -> int:
    """The length of a diary up to the end of a step; of all of it where it has no line of that step."""
    end = offset = 0
    is_behind = False
    with path.open("rb") as file:
        for line in file:
            offset += len(line)
            event = parse_line(line) or {}
            kind = event.get("kind")
            if kind == "step":
                is_behind = (event.get("step") or 0) <= step
            if is_behind and kind in ("step", *OF_THE_STEP):
                end = offset
                is_behind = event.get("phase") != "saving"
    return end or offset


def _end_of_rows(path: Path, step: int) -> int:
    """The length of completions.jsonl up to the last row of a step or one before it."""
    end = offset = 0
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                offset += len(line)
                row = parse_group_row(line)
                end = offset if row is not None and row["step"] <= step else end
    return end
