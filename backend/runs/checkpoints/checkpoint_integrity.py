"""Whether a checkpoint is as it was written: recorded sums of its files, and what else can be known of one without loading a model.

A checkpoint that is not is set aside under another name, never deleted, and the run goes on from the one before. Where none is whole, the
run does not go on: it never starts over unasked once steps were saved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.runs.checkpoints.checkpoint import Checkpoint, TrainingState, first_start, read_checkpoint
from backend.runs.checkpoints.file_sums import file_sums
from backend.runs.events import first_and_last_events, read_events
from backend.runs.run_folder import RunFolder
from backend.runs.run_lock import hold_lock
from backend.runs.saved_weights import OPTIMIZER_FILE, find_checkpoint, has_optimizer, saved_weights
from backend.utils.errors import UserError
from backend.utils.files import read_regular
from backend.utils.whole_file import remove_folder

ASIDE = "damaged-"
"""What the name of a checkpoint's folder begins with once it is set aside."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A checkpoint's folder that is no checkpoint any more, and why, in words that follow its name."""

    path: Path
    why: str


class DamagedCheckpoint(UserError):
    """A checkpoint whose arrays are not those of the run's model, which shows once that is loaded."""

    def __init__(self, saved: Checkpoint, why: str) -> None:
        super().__init__("run", f"The checkpoint of step {saved.state.step} cannot be used: {why}.")
        self.damaged = Damaged(saved.path, why)


# ── which one to go on from ──────────────────────────────────────────────────────────────────────────────────────────


def newest_whole(run: RunFolder) -> tuple[Checkpoint | None, list[Damaged]]:
    """The newest checkpoint that is as it was written, and the damaged ones that are newer; nothing is changed.

    Raises UserError where steps were saved and no checkpoint of them is whole.
    """
    damaged: list[Damaged] = []
    for folder in sorted(_folders(run), key=lambda path: -int(path.name)):
        saved, why = _examined(run, folder)
        if saved is not None:
            return saved, damaged
        damaged.append(Damaged(folder, why))
    if damaged:
        said = "; ".join(f"{each.path.name}: {each.why}" for each in damaged[:2])
        raise UserError("run", f"No checkpoint of the run {run.name} is whole ({said}). {_begin_again(run)}")
    if any(event.get("kind") == "checkpoint" and event.get("step") for event in read_events(run.events)):
        raise UserError("run", f"The run {run.name} had saved checkpoints, and they are gone. {_begin_again(run)}")
    return None, []


def _begin_again(run: RunFolder) -> str:
    return f"They are left as they are; to begin again, train {run.config} as a new run."


def _folders(run: RunFolder) -> list[Path]:
    return [path for path in run.checkpoints.glob("[0-9]*") if path.name.isascii() and path.name.isdigit()]


def set_aside(damaged: Damaged) -> str:
    """Rename its folder, so that no reader takes it for a checkpoint; → a sentence for the user. Raises UserError where that cannot be done."""
    names = (f"{ASIDE}{damaged.path.name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    aside = next(path for path in map(damaged.path.with_name, names) if not path.exists())
    try:
        damaged.path.rename(aside)
    except OSError as error:
        raise UserError("run", f"{damaged.path} is damaged and cannot be renamed: {error.strerror}.") from None
    return (
        f"The checkpoint of step {int(damaged.path.name)} cannot be used: {damaged.why}. The run goes on from the one before; the folder "
        f"is kept as checkpoints/{aside.name}."
    )


def examine(run: RunFolder, folder: Path) -> str:
    """Why the checkpoint in a folder cannot be used, in words that follow its name; "" for one that is as it was written."""
    return _examined(run, folder)[1]


def _examined(run: RunFolder, folder: Path) -> tuple[Checkpoint | None, str]:
    """The checkpoint in a folder, or (None, why it is none)."""
    try:
        content = json.loads(read_regular(folder / "state.json"))
    except OSError as error:
        return None, f"state.json cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return None, "state.json is not readable JSON"
    saved = read_checkpoint(folder)
    if saved is None or not isinstance(content, dict):
        return None, _what_is_missing(folder, content)
    why = _changed_file(folder, content.get("files")) or _of_another_run(run, saved.state)
    return (None, why) if why else (saved, "")


def _what_is_missing(folder: Path, content: Any) -> str:
    if not (folder / OPTIMIZER_FILE).exists() and not (isinstance(content, dict) and not has_optimizer(content)):
        return "optimizer.safetensors is missing"
    if isinstance(content, dict) and not any(
        (folder / f"{name}.safetensors").exists() for name in ("adapters", "model")
    ):
        return "its weights are missing"
    return "state.json does not hold the state of a run"


def _changed_file(folder: Path, recorded: Any) -> str:
    """What is wrong with a checkpoint's arrays; "" where nothing is."""
    try:
        if not isinstance(
            recorded, Mapping
        ):  # before sums were recorded: at least the files can hold what their headers say
            return next((why for file in sorted(folder.glob("*.safetensors")) if (why := _broken_header(file))), "")
        for name, sums in file_sums(folder / name for name in recorded).items():
            if sums != recorded[name]:
                what = "bytes" if sums["bytes"] == recorded[name].get("bytes") else "length"
                return f"{name} has not the {what} that it was written with"
    except (OSError, AttributeError) as error:
        return f"its files cannot be read ({error})"
    return ""


def _broken_header(path: Path) -> str:
    """What is wrong with a safetensors file, as far as its header tells: 8 bytes with its length, JSON, then the arrays."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, size)))
        ends = [int(about["data_offsets"][1]) for name, about in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return f"the header of {path.name} is damaged"
    return "" if size == 8 + length + max(ends, default=0) else f"{path.name} is cut off"


def _of_another_run(run: RunFolder, state: TrainingState) -> str:
    """Whether the event log is of another run than the one that was saved."""
    began = first_start(run)
    if state.began is None or began is None or began == state.began:
        return ""
    return "it was saved by another run than the one in events.jsonl"


# ── go back ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# Going back within a run to one of its checkpoints: what came after it is taken back, so that the next resume begins
# there.


def last_step(run: RunFolder) -> int:
    """The newest step that the event log or a checkpoint has; 0 before the first."""
    _, last = first_and_last_events(run.events)
    steps = [event.get("step") or 0 for event in last if event["kind"] == "step"]
    return max([0, *steps, *(saved.step for saved in saved_weights(run))])


def go_back(run: RunFolder, which: str) -> str:
    """Take back every step after the checkpoint `which` ("best", "last" or a step). → a sentence for the event log. Raises UserError where there
    is no such checkpoint, it is damaged, or another process trains the run."""
    lock = hold_lock(run)
    try:
        chosen, last = find_checkpoint(run, which), last_step(run)
        if why := examine(run, chosen.path):
            raise UserError("step", f"The checkpoint of step {chosen.step} cannot be used: {why}.")
        for saved in reversed(saved_weights(run)):
            if saved.step > chosen.step:
                remove_folder(saved.path)
    finally:
        os.close(lock)
    return f"The run was taken back from step {last} to its checkpoint of step {chosen.step}, and goes on from there."
