"""Checkpoints of a run: weights, optimizer and training state, written completely or not at all, rotated and verified.

A checkpoint is a folder `checkpoints/000100/`. It is written as `.000100`, synced to disk and renamed, and loses its
name before its files when it is deleted, so a folder with a number for a name is complete. There is no random state to
save: each random number is a function of the seed and of its position in the run.

After a kill, events.jsonl and completions.jsonl are ahead of the newest checkpoint. Its state.json holds their byte
lengths at that moment, to which a resume truncates them; both are synced before the checkpoint gets its name. The
`checkpoint` event is written after the folder exists, beyond the recorded length, and again after a resume.

A checkpoint that is not as it was written is set aside under another name, and the run continues from the one before.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import xxhash
from pydantic import TypeAdapter, ValidationError

from backend.models.saving import Arrays, HostArrays, save_arrays
from backend.runs.events import RUN_FORMAT, first_and_last_events, read_events
from backend.runs.run_folder import RunFolder
from backend.runs.run_lock import hold_lock
from backend.runs.saved_weights import OPTIMIZER_FILE, best_of, find_checkpoint, has_optimizer, saved_weights
from backend.trainer.machine import gpu_error
from backend.utils.disk_faults import writing
from backend.utils.errors import UserError
from backend.utils.files import read_regular, remove_tree
from backend.utils.whole_file import clear_drafts, remove_folder, whole_folder


@dataclass(slots=True)
class TrainingState:
    """The state of a run between two steps besides its arrays. Saved as state.json, with these names as keys."""

    step: int = 0
    """Steps done."""
    updates: int = 0
    """Optimizer updates done."""
    cursor: int = 0
    """Rows of the prompt stream consumed, including skipped ones."""
    stream_first: int = 0
    """The cursor at which the present stage's rows began, where earlier stages had others."""
    num_tokens: int = 0
    """Prompt and completion tokens so far."""
    began: float | None = None
    """Unix seconds of the run's first start, by its event log: a checkpoint of another run has another."""
    elapsed_s: float = 0.0
    """Seconds of training, without loading and pauses."""
    score: float | None = None
    """Held-out reward at the last evaluation, else mean training reward since the last checkpoint, or `best_metric`."""
    score_metric: str = ""
    """Which metric the score is; "" for the reward."""
    best_is_lowest: bool = False
    score_series: int = 0
    """Only scores of one series are comparable; another begins where a stage has other rewards."""
    evaluated: int = -1
    """The step of the last evaluation."""
    best_score: float | None = None
    best_step: int = 0
    gain: float | None = None
    """The last score that counted as a gain for early stopping."""
    scores_without_gain: int = 0
    bonus: list[float | None] = field(default_factory=list)
    """State of the entropy bonus."""
    reward_weights: list[dict[str, Any]] = field(default_factory=list)
    """State of adaptive reward weights, one entry per stage."""
    gpu_errors_told: int = 0
    """How many lines of gpu_errors.jsonl have their note in the event log, up to `events_bytes`."""
    events_bytes: int = 0
    completions_bytes: int = 0
    """Lengths of events.jsonl and completions.jsonl when this was saved: a resume truncates them to these."""


_STATE = TypeAdapter(TrainingState)
NEUTRAL = ("began", "score_metric", "best_is_lowest", "score_series", "stream_first")
"""Fields that a state of an earlier version lacks, and whose defaults are what it had."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: TrainingState
    filled_in: tuple[str, ...] = ()
    """Fields of the state that an earlier version has not written; they have their defaults."""

    @property
    def weights_file(self) -> Path:
        return next(file for file in _weight_files(self.path) if file.exists())

    def weights(self) -> Arrays:
        return _load(self.weights_file)

    @property
    def has_reference(self) -> bool:
        return (self.path / "reference.safetensors").exists()

    def reference(self) -> Arrays:
        """The reference policy's arrays, of a run whose reference moves (`sync_ref_model`)."""
        return _load(self.path / "reference.safetensors")

    @property
    def has_optimizer(self) -> bool:
        """Whether it has the optimizer's state (not so with `save_only_model`)."""
        return (self.path / OPTIMIZER_FILE).exists()

    def optimizer(self) -> Arrays:
        return _load(self.path / OPTIMIZER_FILE)


def _weight_files(folder: Path) -> tuple[Path, Path]:
    return folder / "adapters.safetensors", folder / "model.safetensors"


def _load(path: Path) -> Arrays:
    try:
        arrays = mx.load(str(path))
    except RuntimeError as error:
        if gpu_error(error) is not None:
            raise
        raise UserError("checkpoint", f"{path} is damaged: {error}.") from error
    assert isinstance(arrays, dict)
    return arrays


def save(
    run: RunFolder,
    state: TrainingState,
    weights: Arrays | HostArrays,
    optimizer: Arrays | HostArrays | None,
    reference: Arrays | HostArrays | None = None,
    *,
    is_full_model: bool,
    keep: int,
) -> Path:
    """Write a checkpoint of `state`, and delete those that are neither among the newest `keep` nor the best.

    Raises DiskError when it cannot be written; the run's other checkpoints are untouched then.
    """
    final = run.checkpoints / f"{state.step:06d}"
    with writing(final):
        run.path.stat()  # a run folder that is gone must not come back half
    with whole_folder(final) as draft:
        adapters, model = _weight_files(draft)
        save_arrays(model if is_full_model else adapters, weights)
        if optimizer is not None:
            save_arrays(draft / OPTIMIZER_FILE, optimizer)
        if reference is not None:
            save_arrays(draft / "reference.safetensors", reference)
        write_state(draft, state)
    rotate(run, keep)  # only now: until the new one is on disk the run can only be resumed from an older one
    return final


def write_state(folder: Path, state: TrainingState) -> None:
    """Write state.json beside a checkpoint's arrays, with the checksums by which damage is noticed."""
    arrays = (file for file in folder.iterdir() if file.name != "state.json")
    content = {"v": RUN_FORMAT} | asdict(state) | {"files": file_sums(arrays)}
    (folder / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def first_start(run: RunFolder) -> float | None:
    """Unix seconds of the run's first start, by its event log; None before."""
    return next((event.get("t") for event in read_events(run.events) if event.get("kind") == "started"), None)


def all_checkpoints(run: RunFolder) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first."""
    checkpoints = [saved for saved in map(read_checkpoint, run.checkpoints.glob("[0-9]*")) if saved is not None]
    return sorted(checkpoints, key=lambda saved: saved.state.step)


def newest(run: RunFolder) -> Checkpoint | None:
    """The newest complete one; its checksums are not compared (see `newest_whole`)."""
    checkpoints = all_checkpoints(run)
    return checkpoints[-1] if checkpoints else None


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None where a file is missing or state.json is not a state."""
    try:
        saved = json.loads(read_regular(folder / "state.json"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(saved, dict) or (has_optimizer(saved) and not (folder / OPTIMIZER_FILE).exists()):
        return None
    if not any(file.exists() for file in _weight_files(folder)):
        return None
    state, filled_in = state_of(saved)
    return None if state is None else Checkpoint(folder, state, filled_in)


def state_of(saved: dict[str, Any]) -> tuple[TrainingState | None, tuple[str, ...]]:
    """(the state in a state.json, the fields that an earlier version did not record); None for an invalid one."""
    names = [field.name for field in fields(TrainingState)]
    missing = tuple(name for name in names if name not in saved and name not in NEUTRAL)
    try:
        known = {name: saved[name] for name in names if name in saved}
        return (None if "step" in missing else _STATE.validate_json(json.dumps(known), strict=True)), missing
    except ValidationError:
        return None, missing


def rotate(run: RunFolder, keep: int) -> None:
    """Delete all but the newest `keep` and the best."""
    checkpoints = saved_weights(run)
    best = best_of(checkpoints)
    for saved in checkpoints[:-keep]:
        if saved != best:
            remove_folder(saved.path)
    clear_leftovers(run)


def clear_leftovers(run: RunFolder) -> None:
    """Delete what a process left that was killed while it saved or deleted a checkpoint."""
    for folder in (run.path, run.adapters):
        with contextlib.suppress(OSError):
            clear_drafts(folder)
    for leftover in run.checkpoints.glob(".[0-9]*"):
        remove_tree(leftover)


PART = 4 * 2**20
"""Bytes that are read at a time: a run that has just run out of memory is saved too."""


def file_sums(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """File name → length and XXH3 (64 bits), which finds damage. Raises OSError."""
    found: dict[str, dict[str, Any]] = {}
    part = memoryview(bytearray(PART))
    for path in sorted(files):
        sums = xxhash.xxh3_64()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(part):
                sums.update(part[:count])
        found[path.name] = {"bytes": path.stat().st_size, "xxh3": sums.hexdigest()}
    return found


ASIDE = "damaged-"
"""Prefix of the folder of a checkpoint that is set aside."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A folder that is no valid checkpoint any more, and why, in words that follow its name."""

    path: Path
    why: str


class DamagedCheckpoint(UserError):
    """A checkpoint whose arrays are not those of the run's model, which shows once that is loaded."""

    def __init__(self, saved: Checkpoint, why: str) -> None:
        super().__init__("run", f"The checkpoint of step {saved.state.step} cannot be used: {why}.")
        self.damaged = Damaged(saved.path, why)


def newest_whole(run: RunFolder) -> tuple[Checkpoint | None, list[Damaged]]:
    """The newest checkpoint that is as it was written, and the damaged ones that are newer; changes nothing.

    Raises UserError where steps were saved and no checkpoint is whole: a run never starts over by itself then.
    """
    damaged: list[Damaged] = []
    folders = [path for path in run.checkpoints.glob("[0-9]*") if path.name.isascii() and path.name.isdigit()]
    for folder in sorted(folders, key=lambda path: -int(path.name)):
        why = examine(run, folder)
        if not why:
            return read_checkpoint(folder), damaged
        damaged.append(Damaged(folder, why))
    begin_again = f"They are left as they are; to begin again, train {run.config} as a new run."
    if damaged:
        said = "; ".join(f"{each.path.name}: {each.why}" for each in damaged[:2])
        raise UserError("run", f"No checkpoint of the run {run.name} is whole ({said}). {begin_again}")
    if any(event.get("kind") == "checkpoint" and event.get("step") for event in read_events(run.events)):
        raise UserError("run", f"The run {run.name} had saved checkpoints, and they are gone. {begin_again}")
    return None, []


def set_aside(damaged: Damaged) -> str:
    """Rename a damaged checkpoint's folder, so that nobody reads it; returns a message. Raises UserError."""
    names = (f"{ASIDE}{damaged.path.name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    aside = next(path for path in map(damaged.path.with_name, names) if not path.exists())
    try:
        damaged.path.rename(aside)
    except OSError as error:
        raise UserError("run", f"{damaged.path} is damaged and cannot be renamed: {error.strerror}.") from None
    return (
        f"The checkpoint of step {int(damaged.path.name)} cannot be used: {damaged.why}. The run continues from the "
        f"one before; the folder is kept as checkpoints/{aside.name}."
    )


def examine(run: RunFolder, folder: Path) -> str:
    """Why the checkpoint in a folder cannot be used, in words that follow its name; "" for a valid one."""
    try:
        content = json.loads(read_regular(folder / "state.json"))
    except OSError as error:
        return f"state.json cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return "state.json is not readable JSON"
    saved = read_checkpoint(folder)
    if saved is None or not isinstance(content, dict):
        if not (folder / OPTIMIZER_FILE).exists() and not (isinstance(content, dict) and not has_optimizer(content)):
            return "optimizer.safetensors is missing"
        if isinstance(content, dict) and not any(file.exists() for file in _weight_files(folder)):
            return "its weights are missing"
        return "state.json does not hold the state of a run"
    if why := _changed_file(folder, content.get("files")):
        return why
    began = first_start(run)
    if saved.state.began is not None and began is not None and began != saved.state.began:
        return "it was saved by another run than the one in events.jsonl"
    return ""


def _changed_file(folder: Path, recorded: Any) -> str:
    """What is wrong with a checkpoint's arrays, or ""."""
    try:
        if not isinstance(recorded, Mapping):  # before checksums were recorded
            return next((why for file in sorted(folder.glob("*.safetensors")) if (why := _broken_header(file))), "")
        for name, sums in file_sums(folder / name for name in recorded).items():
            if sums != recorded[name]:
                what = "bytes" if sums["bytes"] == recorded[name].get("bytes") else "length"
                return f"{name} has not the {what} that it was written with"
    except (OSError, AttributeError) as error:
        return f"its files cannot be read ({error})"
    return ""


def _broken_header(path: Path) -> str:
    """What is wrong with the header of a safetensors file: 8 bytes with its length, JSON, then the arrays."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, size)))
        ends = [int(about["data_offsets"][1]) for name, about in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return f"the header of {path.name} is damaged"
    return "" if size == 8 + length + max(ends, default=0) else f"{path.name} is cut off"


def last_step(run: RunFolder) -> int:
    """The newest step that the event log or a checkpoint has; 0 before the first."""
    _, last = first_and_last_events(run.events)
    steps = [event.get("step") or 0 for event in last if event["kind"] == "step"]
    return max([0, *steps, *(saved.step for saved in saved_weights(run))])


def go_back(run: RunFolder, which: str) -> str:
    """Delete the checkpoints after `which` ("best", "last" or a step), so that the next resume begins there.

    Returns a message for the event log. Raises UserError where there is no such checkpoint, it is damaged, or another
    process trains the run.
    """
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
    return f"The run was taken back from step {last} to its checkpoint of step {chosen.step}, and continues from there."
