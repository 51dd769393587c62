"""Checkpoints of a run: weights, optimizer and training state, written completely or not at all, rotated and verified.

A checkpoint is a folder `checkpoints/000100/`. It is written as `.000100`, synced and renamed, and loses its name
before its files when it is deleted, so a folder with a number for a name is complete. There is no random state to save:
each random number is a function of the seed and of its position in the run.

After a kill, events.jsonl and completions.jsonl are ahead of the newest checkpoint; a resume truncates them to the byte
lengths in its state.json.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import xxhash

from backend.config.changeable import STAGE_DATA
from backend.config.checks import default_score
from backend.config.config import Config
from backend.models.saving import Arrays, HostArrays, save_arrays
from backend.runs.events import RUN_FORMAT, end_of_step, first_and_last_events, is_number, read_events
from backend.runs.metric_names import EVALUATION
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.saved_weights import (
    WEIGHT_FILES,
    Checkpoint,
    Damaged,
    DamagedCheckpoint,
    Part,
    TrainingState,
    all_checkpoints,
    best_of,
    find_checkpoint,
    read_checkpoint,
)
from backend.trainer.machine import gpu_error
from backend.utils.disk import clear_drafts, remove_folder, restore_folder, whole_folder, writing
from backend.utils.errors import UserError
from backend.utils.files import remove_tree
from backend.utils.text import quote


def save(
    run: RunFolder,
    state: TrainingState,
    weights: Arrays | HostArrays,
    optimizer: Arrays | HostArrays | None,
    reference: Arrays | HostArrays | None = None,
    pass_rates: HostArrays | None = None,
    *,
    is_full_model: bool,
    keep: int,
) -> Path:
    """Write a checkpoint, and delete those that are neither among the newest `keep` nor the best. Raises DiskError."""
    final = run.checkpoints / f"{state.step:06d}"
    with writing(final):
        run.path.stat()  # a run folder that is gone must not come back half
    with whole_folder(final) as draft:
        save_arrays(draft / WEIGHT_FILES[is_full_model], weights)
        for part, arrays in (("optimizer", optimizer), ("reference", reference), ("pass_rates", pass_rates)):
            if arrays is not None:
                save_arrays(draft / f"{part}.safetensors", arrays)
        write_state(draft, state)
    rotate(run, keep)  # only now: until the new one is on disk the run can only be resumed from an older one
    return final


def arrays_of(saved: Checkpoint, part: Part | Literal["weights"]) -> Arrays:
    """The arrays of a checkpoint. Raises DamagedCheckpoint."""
    file = saved.weights_file if part == "weights" else saved.path / f"{part}.safetensors"
    try:
        arrays = mx.load(str(file))
    except RuntimeError as error:
        if gpu_error(error) is not None:
            raise
        raise DamagedCheckpoint(saved, f"{file.name} is damaged") from error
    assert isinstance(arrays, dict)
    return arrays


def write_state(folder: Path, state: TrainingState) -> None:
    """Write state.json beside a checkpoint's arrays, with their checksums."""
    arrays = (file for file in folder.iterdir() if file.name != "state.json")
    content = {"v": RUN_FORMAT} | asdict(state) | {"files": file_sums(arrays)}
    (folder / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def lengths_at(run: RunFolder, saved: Checkpoint) -> tuple[int, int]:
    """Bytes of the event log and of the completions that belong to a checkpoint: as it recorded them, or up to the last
    line of its step where an earlier version recorded none, or where somebody has edited the file since."""

    def length(path: Path, recorded: int) -> int:
        with contextlib.suppress(OSError), path.open("rb") as file:
            if recorded and file.seek(0, os.SEEK_END) >= recorded:
                file.seek(recorded - 1)
                return recorded if file.read(1) == b"\n" else end_of_step(path, saved.step)
        return end_of_step(path, saved.step)

    return length(run.events, saved.state.events_bytes), length(run.completions, saved.state.completions_bytes)


def first_start(run: RunFolder) -> float | None:
    """Unix seconds of the run's first start, by its event log; None before."""
    return next((event.get("t") for event in read_events(run.events) if event.get("kind") == "started"), None)


def newest(run: RunFolder) -> Checkpoint | None:
    return next(reversed(all_checkpoints(run)), None)


def rotate(run: RunFolder, keep: int) -> None:
    """Delete all but the newest `keep` and the best."""
    checkpoints = all_checkpoints(run)
    best = best_of(checkpoints)
    for saved in checkpoints[:-keep]:
        if saved != best:
            remove_folder(saved.path)
    # What a process left that was killed while it saved or deleted a checkpoint
    for folder in (run.path, run.adapters):
        with contextlib.suppress(OSError):
            clear_drafts(folder)
    for leftover in run.checkpoints.glob(".[0-9]*"):
        remove_tree(leftover)


def file_sums(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """File name → length and XXH3 (64 bits), which finds damage. Raises OSError."""
    found: dict[str, dict[str, Any]] = {}
    part = memoryview(bytearray(4 << 20))  # a run that has just run out of memory is saved too
    for path in sorted(files):
        sums = xxhash.xxh3_64()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(part):
                sums.update(part[:count])
        found[path.name] = {"bytes": path.stat().st_size, "xxh3": sums.hexdigest()}
    return found


def newest_whole(run: RunFolder) -> tuple[Checkpoint | None, list[Damaged]]:
    """The newest checkpoint that is as it was written, and the damaged ones that are newer. Raises UserError where
    steps were saved and no checkpoint is whole."""
    damaged: list[Damaged] = []
    for old in run.checkpoints.glob(".[0-9]*.old"):
        with writing(old):
            restore_folder(old.with_name(old.name[1:-4]))
    folders = [path for path in run.checkpoints.glob("[0-9]*") if path.name.isascii() and path.name.isdigit()]
    for folder in sorted(folders, key=lambda path: -int(path.name)):
        why = examine(run, folder)
        if not why:
            return read_checkpoint(folder), damaged
        damaged.append(Damaged(folder, why))
    begin_again = f"They are left as they are; to begin again, train {run.config} as a new run."
    if damaged:
        which = "; ".join(f"{each.path.name}: {each.why}" for each in damaged[:2])
        raise UserError("run", f"No checkpoint of the run {run.name} is whole ({which}). {begin_again}")
    if any(event.get("kind") == "checkpoint" and event.get("step") for event in read_events(run.events)):
        raise UserError("run", f"The run {run.name} had saved checkpoints, and they are gone. {begin_again}")
    return None, []


def set_aside(damaged: Damaged) -> str:
    """Rename a damaged checkpoint's folder, so that nobody reads it; returns a message. Raises UserError."""
    names = (f"damaged-{damaged.path.name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
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
    saved = read_checkpoint(folder)
    if saved is None:
        return "its state.json or one of its files of arrays is missing or not valid"
    try:
        if isinstance(saved.sums, Mapping):
            for name, sums in file_sums(folder / name for name in saved.sums).items():
                if sums != saved.sums[name]:
                    return f"{name} is not as it was written"
    except OSError as error:
        return f"its files cannot be read ({error})"
    began = first_start(run)
    if saved.state.began is not None and began is not None and began != saved.state.began:
        return "it was saved by another run than the one in events.jsonl"
    return ""


def last_step(run: RunFolder) -> int:
    """The newest step that the event log or a checkpoint has; 0 before the first."""
    _, last = first_and_last_events(run.events)
    steps = [event.get("step") or 0 for event in last if event["kind"] == "step"]
    return max([0, *steps, *(saved.step for saved in all_checkpoints(run))])


def go_back(run: RunFolder, which: str) -> str:
    """Delete the checkpoints after `which` ("best", "last" or a step), so that the next resume begins there; returns a
    message for the event log. Raises UserError."""
    lock = hold_lock(run)
    try:
        chosen, last = find_checkpoint(run, which), last_step(run)
        if why := examine(run, chosen.path):
            raise UserError("step", f"The checkpoint of step {chosen.step} cannot be used: {why}.")
        for saved in reversed(all_checkpoints(run)):
            if saved.step > chosen.step:
                remove_folder(saved.path)
    finally:
        os.close(lock)
    return f"The run was taken back from step {last} to its checkpoint of step {chosen.step}, and continues from there."


def metric_of(config: Config, *, has_evaluations: bool) -> str:
    """`best_metric`; where that is empty the reward, of supervised fine-tuning the loss, of distillation without
    rewards the divergence, held-out if the run evaluates."""
    score = default_score(vars(config))
    return config.best_metric or (f"{EVALUATION}{score}" if has_evaluations else score)


def check_metric(config: Config, *, has_held_out: bool) -> None:
    """Raises UserError where scores are of held-out prompts, and there are none."""
    if config.best_metric.startswith(EVALUATION) and not has_held_out:
        needs = f"{quote(config.best_metric, 50)} is of held-out prompts, and {quote(Path(config.data), 50)} has none."
        raise UserError("best_metric", f"{needs} Name a Valid split, or set Validation share.")


class CheckpointScore:
    """Follows the metric of a run's scores, which are in the TrainingState."""

    def __init__(self) -> None:
        self._since_save: list[Any] = []

    def take_step(self, metrics: Mapping[str, Any], config: Config, *, has_evaluations: bool) -> None:
        self._since_save.append(metrics.get(metric_of(config, has_evaluations=has_evaluations)))

    def take_evaluation(self, state: TrainingState, metrics: Mapping[str, Any], config: Config) -> None:
        state.evaluated = state.step
        metric = metric_of(config, has_evaluations=True)
        if metric.startswith(EVALUATION):
            state.score = mean_score([metrics.get(metric.removeprefix(EVALUATION))])
            observe_score(state, state.score, state.step, config)

    def begin_stage(
        self, state: TrainingState, changed: Collection[str], config: Config, *, has_evaluations: bool
    ) -> None:
        """Begin another series of scores where a stage has other rewards, or other rows for scores of the steps."""
        of_steps = not metric_of(config, has_evaluations=has_evaluations).startswith(EVALUATION)
        others = ("reward_functions", "reward_weights", *(STAGE_DATA if of_steps else ()))
        if config.stages and set(changed) & set(others):
            state.score, state.best_score, state.best_step = None, None, 0
            state.gain, state.scores_without_gain = None, 0
            state.score_series += 1
            self._since_save = []

    def observe_save(self, state: TrainingState, config: Config, *, has_evaluations: bool) -> None:
        """Count the score of the steps at a checkpoint that is due."""
        if not metric_of(config, has_evaluations=has_evaluations).startswith(EVALUATION):
            observe_score(state, mean_score(self._since_save), state.step, config)

    def close_interval(self, state: TrainingState, config: Config, *, has_evaluations: bool) -> None:
        """Put the score of a checkpoint, due or not, into the state."""
        # None of them after a save that failed and is tried again: the score stands.
        if self._since_save and not metric_of(config, has_evaluations=has_evaluations).startswith(EVALUATION):
            state.score = mean_score(self._since_save)
        self._since_save = []
        state.score_metric, state.best_is_lowest = config.best_metric, config.best_is_lowest
        if default_score(vars(config)) != "reward":
            state.score_metric = metric_of(config, has_evaluations=has_evaluations)


def mean_score(values: Sequence[Any]) -> float | None:
    known = [float(value) for value in values if is_number(value)]
    return sum(known) / len(known) if known else None


def observe_score(state: TrainingState, score: float | None, step: int, config: Config) -> None:
    """Count a score of `step` in the state. A gain is better than the last gain by more than
    `early_stopping_min_delta`."""
    if score is None:
        return
    sign = -1.0 if config.best_is_lowest else 1.0
    if state.gain is None or sign * (score - state.gain) > config.early_stopping_min_delta:
        state.gain, state.scores_without_gain = score, 0
    else:
        state.scores_without_gain += 1
    if state.best_score is None or sign * score > sign * state.best_score:
        state.best_score, state.best_step = score, step
