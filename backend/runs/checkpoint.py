"""Checkpoints of a run: weights, optimizer and training state, written completely or not at all, rotated and verified.

`checkpoints/000100/` is written as `.000100`, synced and renamed, and loses its name before its files when it is
deleted, so a folder with a number for a name is complete. Random numbers are functions of the seed and of their
position in the run, so there is no state of them to save.

After a kill, events.jsonl and completions.jsonl are ahead of the newest checkpoint; a resume truncates them to the byte
lengths in its state.json.

A thread writes while the next step samples. An evaluated mlx array is immutable, so a snapshot is a set of references.
The trainer waits for the thread before the next update: after it the snapshot alone would keep a second copy of the
model alive.
"""

import contextlib
import filecmp
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import xxhash

from backend.config.checks import default_score
from backend.config.config import Config
from backend.config.setting import STAGE_DATA
from backend.export.writer import Arrays, HostArrays, adapter_config, on_host, save_arrays
from backend.models.policy import Policy
from backend.runs.events import RUN_FORMAT, EventLog, JsonLines, end_of_step, event_ends, is_number, read_events
from backend.runs.metric_names import EVALUATION
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.saved_weights import (
    WEIGHT_FILES,
    Checkpoint,
    DamagedCheckpoint,
    Part,
    TrainingState,
    all_checkpoints,
    find_checkpoint,
    read_checkpoint,
    spare_checkpoints,
)
from backend.trainer.machine import gpu_error
from backend.trainer.not_finite import weights_error
from backend.training.learner import Learner
from backend.training.not_finite import not_finite_arrays
from backend.utils.disk import clear_drafts, remove_folder, replace_file, restore_folder, whole_folder, writing
from backend.utils.errors import UserError
from backend.utils.files import remove_tree
from backend.utils.text import quote


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state and arrays of a run between two steps, every array evaluated."""

    state: TrainingState
    weights: Arrays | HostArrays
    optimizer: Arrays | HostArrays | None = None  # None with `save_only_model`
    reference: Arrays | HostArrays | None = None
    adapter_config: dict[str, Any] | None = None  # None under full fine-tuning
    pass_rates: HostArrays | None = None


def save(run: RunFolder, taken: Snapshot, keep: int) -> Path:
    """Write a checkpoint, and delete those that are neither among the newest `keep` nor the best. Raises DiskError."""
    final = run.checkpoints / f"{taken.state.step:06d}"
    with writing(final):
        run.path.stat()  # a run folder that is gone must not come back half
    with whole_folder(final) as draft:
        save_arrays(draft / WEIGHT_FILES[taken.adapter_config is None], taken.weights)
        for part in ("optimizer", "reference", "pass_rates"):
            if (arrays := getattr(taken, part)) is not None:
                save_arrays(draft / f"{part}.safetensors", arrays)
        write_state(draft, taken.state)
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
        raise DamagedCheckpoint(saved.path, f"{file.name} is damaged") from error
    assert isinstance(arrays, dict)
    return arrays


def write_state(folder: Path, state: TrainingState) -> None:
    arrays = (file for file in folder.iterdir() if file.name != "state.json")
    content = {"v": RUN_FORMAT} | asdict(state) | {"files": file_sums(arrays)}
    (folder / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def lengths_at(run: RunFolder, saved: Checkpoint) -> tuple[int, int]:
    """Bytes of the event log and of the completions that belong to a checkpoint: as it recorded them, or up to the last
    line of its step where it recorded none, or where somebody has edited the file since."""

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
    for saved in spare_checkpoints(run, keep):
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
    for path in sorted(files):
        with path.open("rb", buffering=0) as file:
            sums: Any = hashlib.file_digest(file, xxhash.xxh3_64)
        found[path.name] = {"bytes": path.stat().st_size, "xxh3": sums.hexdigest()}
    return found


def newest_whole(run: RunFolder) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
    """The newest whole checkpoint, and the damaged newer ones. Raises UserError where steps were saved and none is."""
    damaged: list[DamagedCheckpoint] = []
    for old in run.checkpoints.glob(".[0-9]*.old"):
        with writing(old):
            restore_folder(old.with_name(old.name[1:-4]))
    folders = [path for path in run.checkpoints.glob("[0-9]*") if path.name.isascii() and path.name.isdigit()]
    for folder in sorted(folders, key=lambda path: -int(path.name)):
        why = examine(run, folder)
        if not why:
            return read_checkpoint(folder), damaged
        damaged.append(DamagedCheckpoint(folder, why))
    begin_again = f"They are left as they are; to begin again, train {run.config} as a new run."
    if damaged:
        which = "; ".join(f"{each.path.name}: {each.why}" for each in damaged[:2])
        raise UserError("run", f"No checkpoint of the run {run.name} is whole ({which}). {begin_again}")
    if any(event.get("kind") == "checkpoint" and event.get("step") for event in read_events(run.events)):
        raise UserError("run", f"The run {run.name} had saved checkpoints, and they are gone. {begin_again}")
    return None, []


def set_aside(damaged: DamagedCheckpoint) -> str:
    """Rename a damaged checkpoint's folder, so that nobody reads it; returns a message. Raises UserError."""
    name = f"damaged-{damaged.path.name}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    aside = next(path for path in map(damaged.path.with_name, names) if not path.exists())
    try:
        damaged.path.rename(aside)
    except OSError as error:
        raise UserError("run", f"{damaged.path} is damaged and cannot be renamed: {error.strerror}.") from None
    kept = f"the folder is kept as checkpoints/{aside.name}"
    return f"{damaged.faults[0].sentence} The run continues from the one before; {kept}."


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
    steps = [event.get("step") or 0 for event in event_ends(run.events) if event["kind"] == "step"]
    return max([0, *steps, *(saved.step for saved in all_checkpoints(run))])


def go_back(run: RunFolder, which: str) -> str:
    """Delete the checkpoints after `which` ("best", "last" or a step). → a note for the event log. Raises UserError."""
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


def take_step_score(state: TrainingState, metrics: Mapping[str, Any], metric: str) -> None:
    """Count the `metric` (`metric_of`) of a step for the next checkpoint that is due."""
    if is_number(value := metrics.get(metric)):
        state.score_sum, state.scored_steps = state.score_sum + value, state.scored_steps + 1


def take_evaluation_score(state: TrainingState, metrics: Mapping[str, Any], config: Config, metric: str) -> None:
    state.evaluated = state.step
    if metric.startswith(EVALUATION):
        value = metrics.get(metric.removeprefix(EVALUATION))
        state.score = float(value) if is_number(value) else None
        _observe_score(state, config)


def begin_score_series(state: TrainingState, changed: Collection[str], config: Config, metric: str) -> None:
    """Begin another series of scores where a stage has other rewards, or other rows for scores of the steps."""
    others = ("reward_functions", "reward_weights", *(() if metric.startswith(EVALUATION) else STAGE_DATA))
    if config.stages and set(changed) & set(others):
        state.forget_scores()
        state.score_series += 1


def close_interval(state: TrainingState, config: Config, metric: str) -> None:
    """Count the score of the steps since the last checkpoint that was due. One at a stop or on command closes none, so
    that a resumed run has the scores of one that was not stopped."""
    if not metric.startswith(EVALUATION):
        state.score = state.score_sum / state.scored_steps if state.scored_steps else None
        _observe_score(state, config)
        state.score_sum, state.scored_steps = 0.0, 0


def score_checkpoint(state: TrainingState, config: Config, metric: str) -> None:
    """Put the score of a checkpoint, due or not, into the state."""
    if state.scored_steps:
        state.score = state.score_sum / state.scored_steps
    state.best_is_lowest = config.best_is_lowest
    state.score_metric = config.best_metric if default_score(vars(config)) == "reward" else metric


def _observe_score(state: TrainingState, config: Config) -> None:
    """Count `score`. A gain is better than the last gain by more than `early_stopping_min_delta`."""
    if (score := state.score) is None:
        return
    sign = -1.0 if config.best_is_lowest else 1.0
    if state.gain is None or sign * (score - state.gain) > config.early_stopping_min_delta:
        state.gain, state.scores_without_gain = score, 0
    else:
        state.scores_without_gain += 1
    if state.best_score is None or sign * score > sign * state.best_score:
        state.best_score, state.best_step = score, state.step


def snapshot(
    state: TrainingState, policy: Policy, learner: Learner, config: Config, pass_rates: HostArrays | None = None
) -> Snapshot:
    """References to everything that a checkpoint holds. Raises UserError for an array that is not finite."""
    weights, optimizer = policy.trainable(), None if config.save_only_model else learner.state_arrays()
    reference = policy.reference_arrays() if config.moves_reference else None
    mx.eval(weights, optimizer, reference)  # a lazy array can be evaluated only in the thread that made its graph
    if policy.is_sharded:
        # A pass that a lost rank left hanging may hold all the work that mlx takes on at once: more would hang too.
        weights = on_host(weights)
        optimizer, reference = optimizer and on_host(optimizer), reference and on_host(reference)
    named = (pair for arrays in (weights, optimizer or {}, reference or {}) for pair in arrays.items())
    if odd := not_finite_arrays(named):
        raise weights_error(config, state.step, odd)
    about = None if config.train_type == "full" else adapter_config(policy, config)
    # `replace` makes a copy: the trainer sets fields of its own state while this one is written.
    return Snapshot(replace(state), weights, optimizer, reference, about, pass_rates)


class CheckpointWriter:
    """Writes one checkpoint of a run at a time, and its event once it is complete: `begin`, then `wait`."""

    def __init__(
        self,
        run: RunFolder,
        event_log: EventLog,
        completions: JsonLines,
        keep: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.saved_step: int | None = None
        self._event_log, self._completions, self._keep, self._clock = event_log, completions, keep, clock
        # One thread for all of them: mlx gives every thread that touches an array a stream, and keeps it.
        self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._pending: Future[tuple[int, Path]] | None = None
        self._seconds = 0.0

    def begin(self, take: Callable[[], Snapshot]) -> None:
        """Take a snapshot and begin to write it. Raises as `wait` and `take`."""
        self.wait()
        began = self._clock()
        self._pending = self._writer.submit(self._write, [take()])
        self._seconds += self._clock() - began

    @property
    def is_done(self) -> bool:
        """True if `wait` has an event to write at once."""
        return self._pending is not None and self._pending.done()

    def wait(self) -> None:
        """Wait for the checkpoint that was begun, and write its event. Raises DiskError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            began = self._clock()
            self.tell(*pending.result())
            self._seconds += self._clock() - began

    def write_here(self, taken: Snapshot) -> None:
        """In the calling thread and on its stream."""
        assert self._pending is None
        self.tell(*self._write([taken]))

    def tell(self, step: int, path: Path) -> None:
        self.saved_step = step
        self._event_log.write("checkpoint", step=step, path=str(path.relative_to(self.run.path)))

    def take_seconds(self) -> float:
        """Seconds that saving has held the run up since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        self._writer.shutdown()

    def _write(self, only: list[Snapshot]) -> tuple[int, Path]:
        # Popped from a list, because the executor keeps its arguments until after `wait`: the arrays would live on.
        taken = only.pop()
        # Before the checkpoint exists: a resume truncates these files to the lengths in state.json, and after a power
        # cut, bytes that were never synced could be missing below them.
        self._event_log.sync()
        self._completions.sync()
        path = save(self.run, taken, self._keep)
        if taken.adapter_config is not None:
            publish_adapters(self.run, path / "adapters.safetensors", taken.adapter_config)
        return taken.state.step, path


def publish_adapters(run: RunFolder, arrays: Path, about: Mapping[str, Any]) -> None:
    """Put the adapters of a checkpoint into `adapters/`, where mlx-lm loads them. Raises DiskError."""
    folder = run.adapters
    with writing(folder):
        folder.mkdir(exist_ok=True)  # without parents: a run's folder that is gone must not come back half
    # Weights before config: readers need both files.
    published = folder / "adapters.safetensors"
    with writing(published), arrays.open("rb") as file:
        replace_file(published, iter(partial(file.read, 1 << 20), b""))
    replace_file(folder / "adapter_config.json", json.dumps(about, indent=2) + "\n")


def refresh_adapters(run: RunFolder, saved: Checkpoint, policy: Policy, config: Config) -> None:
    """Publish the newest checkpoint's adapters, where a process was killed before it did. Raises DiskError."""
    if config.train_type == "full":
        return
    published = run.adapters / "adapters.safetensors"
    is_whole = published.exists() and (run.adapters / "adapter_config.json").exists()
    if not is_whole or not filecmp.cmp(saved.weights_file, published, shallow=False):
        publish_adapters(run, saved.weights_file, adapter_config(policy, config))
