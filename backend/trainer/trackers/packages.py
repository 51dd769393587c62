"""The trackers csv, tensorboard, trackio and wandb. Each is written again from the event log whenever its process
begins or the event log was cut back; online, wandb drops the steps that it has. trackio stays in its database on this
machine. wandb is offline unless the user says WANDB_MODE=online in the environment, or `track --upload`: a YAML file of
somebody else must not upload anything. Its files lie in our folder of preferences: wandb reads settings from its
folder, which somebody else's run could bring along."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain, islice
from typing import Any

from backend.runs.completion_rows import GroupRow
from backend.runs.events import ENDINGS, Event, Follower, is_number
from backend.runs.metric_names import by_set, prefixed, trl_metrics
from backend.runs.run_folder import RunFolder
from backend.utils.disk import replace_file, writing
from backend.utils.files import make_private_folder
from backend.utils.places import preferences_folder

FIRST_COLUMNS = ("step", "prompt", "completion")
LAST_COLUMNS = ("advantage", "reward", "answer", "stop", "tokens")  # TRL's `advantage`, and what its table lacks


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The event log of one step, without values that are not finite. `training` is empty before the first step;
    `evaluations`: split, or name of an evaluation set → metrics."""

    step: int
    training: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluations: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    groups: tuple[GroupRow, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Every metric under TRL's name, with train/, eval/ or test/ before it."""
        named = prefixed("train", trl_metrics(self.training))
        for split, metrics in self.evaluations.items():
            named |= prefixed(split, trl_metrics(metrics))
        return named

    def logged(self, package: Any) -> dict[str, Any]:
        metrics: dict[str, Any] = self.metrics()
        if self.groups:
            names, lines = table(self.groups, reward_columns(self.groups))
            metrics["completions"] = package.Table(columns=names, data=list(lines))
        return metrics


def reward_columns(groups: Iterable[GroupRow]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for row in group["completions"] for name in row["rewards"]))


def table(groups: Iterable[GroupRow], rewards: Sequence[str]) -> tuple[list[str], Iterator[list[Any]]]:
    """(the columns of TRL's table of completions and ours, a row for each completion); missing values are None."""
    rows = (
        [
            *(group["step"], group["prompt"], completion["text"]),
            *(completion["rewards"].get(name) for name in rewards),
            *(completion.get("advantage"), completion["reward"], group["answer"]),
            *(completion.get("stop"), completion.get("tokens")),  # which a Hugging Face job does not report
        ]
        for group in groups
        for completion in group["completions"]
    )
    return [*FIRST_COLUMNS, *rewards, *LAST_COLUMNS], rows


@dataclass(frozen=True, slots=True)
class AboutRun:
    """`settings`: those the run began with, without this machine's paths; `may_upload`: the user allows the network."""

    folder: RunFolder
    project: str
    name: str
    settings: dict[str, Any]
    may_upload: bool = False


class RecordReader:
    """Reads the records of a run, each once it is complete. `restarted` is called where the event log was cut back:
    earlier records come again. `ending`: of the event log, once it has one."""

    def __init__(self, about: AboutRun, restarted: Callable[[], None] = lambda: None) -> None:
        self._run = about.folder
        self._sets = tuple(about.settings.get("eval_data") or ())
        self._restarted = restarted
        self._event_log = Follower(about.folder.events)
        self._begin()

    def _begin(self) -> None:
        self._completions = Follower(self._run.completions)
        self._lines: list[Event] = []
        self._record: StepRecord | None = None
        self.ending = ""

    def read(self) -> Iterator[StepRecord]:
        """Records completed since the last call."""
        events: list[Event] | None = None
        while events is None or events:
            events = self._event_log.read()
            if self._event_log.restarted:
                self._begin()
                self._restarted()
            yield from [record for event in events for record in self._take(event)]

    def _take(self, event: Event) -> Iterator[StepRecord]:
        kind = event.get("kind")
        self.ending = kind if kind in ENDINGS else ""
        if kind == "step":
            yield from self.rest()
            self._record = StepRecord(event["step"], _numbers(event))
        elif kind == "eval":
            if self._record is None or self._record.step != event["step"]:
                yield from self.rest()
                self._record = StepRecord(event["step"])
            split, numbers = event.get("split", "valid"), _numbers(event)
            found = by_set(numbers, self._sets) if split == "valid" else {split: numbers}
            self._record = replace(self._record, evaluations={**self._record.evaluations, **found})
        elif kind in ENDINGS or (kind == "phase" and event.get("phase") == "sampling"):
            yield from self.rest()

    def rest(self) -> Iterator[StepRecord]:
        record, self._record = self._record, None
        if record is not None:
            yield replace(record, groups=self._groups_of(record.step)) if record.training else record

    def _groups_of(self, step: int) -> tuple[Any, ...]:
        while not (self._lines and self._lines[-1]["step"] > step) and (more := self._completions.read()):
            self._lines = more if self._completions.restarted else [*self._lines, *more]
        own = tuple(line for line in self._lines if line["step"] == step)
        self._lines = [line for line in self._lines if line["step"] > step]
        return own


def _numbers(event: Event) -> dict[str, float]:
    return {name: value for name, value in event["metrics"].items() if is_number(value)}


class Tracker:
    """One run in one tracker. Its methods may raise anything and take any time: the run does not wait for them."""

    def __init__(self, about: AboutRun) -> None:
        self.about = about

    def open(self) -> None:
        """All records follow, from the first: in a new process, or because the event log was cut back."""

    def send(self, record: StepRecord) -> None:
        """Take the next record."""

    def flush(self) -> None:
        """After all present records. Raises DiskError, and is called again then."""

    def close(self, ending: str) -> None:
        """The run is over: finished, stopped, failed, or "" where it was cut off."""


METRICS, COMPLETIONS = "metrics.csv", "completions.csv"
REST, LEAST_REST_S = 20.0, 5.0  # between two writings, as a multiple of what one takes, and at least: 5 % of a core
COMMANDS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet may run text that begins so as a formula


class CsvTables(Tracker):
    """metrics.csv and completions.csv in the run's folder, written whole when they are due, and at the end."""

    _due = 0.0

    def open(self) -> None:
        self._is_behind = True

    def send(self, record: StepRecord) -> None:
        self._is_behind = True

    def flush(self) -> None:
        if not self._is_behind or time.monotonic() < self._due:
            return
        began = time.monotonic()
        try:
            write_tables(self.about)
            self._is_behind = False
        finally:  # a full disk is tried again, no sooner than a table that was written
            now = time.monotonic()
            self._due = now + max(LEAST_REST_S, REST * (now - began))

    def close(self, ending: str) -> None:
        self._due = 0.0
        self.flush()


def write_tables(about: AboutRun) -> None:
    def all_records() -> Iterator[StepRecord]:
        reader = RecordReader(about)
        yield from reader.read()
        yield from reader.rest()

    names, rewards = dict[str, None](), dict[str, None]()
    for record in all_records():  # the columns first: a function of a later stage has one too
        names |= dict.fromkeys(record.metrics())
        rewards |= dict.fromkeys(reward_columns(record.groups))
    metrics = ([record.step, *map(record.metrics().get, names)] for record in all_records())
    replace_file(about.folder.path / METRICS, _csv_lines(["step", *names], metrics))
    groups = (group for record in all_records() for group in record.groups)
    replace_file(about.folder.path / COMPLETIONS, _csv_lines(*table(groups, list(rewards))))


def _csv_lines(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in chain([header], rows):
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(COMMANDS) else cell for cell in row])
        yield text.getvalue().encode(errors="replace")
        text.seek(0)
        text.truncate()


ROWS, LONGEST_CELL = 16, 2_000  # of a step in tensorboard's table, and characters of a text: the browser reads it whole


class TensorBoardFiles(Tracker):
    _writer: Any = None

    def open(self) -> None:
        if self._writer is not None:
            self._writer.close()
        folder = self.about.folder.trackers / "tensorboard"
        with writing(folder):
            if folder.exists():
                shutil.rmtree(folder)
            make_private_folder(folder)
            # purge_step: a reader that has seen later steps of an older file forgets them.
            self._writer = import_module("tensorboardX").SummaryWriter(logdir=str(folder), purge_step=0)
        settings = "\n".join(f"    {key}: {value}" for key, value in self.about.settings.items())
        self._writer.add_text("settings", settings, 0)

    def send(self, record: StepRecord) -> None:
        for name, value in record.metrics().items():
            self._writer.add_scalar(name, value, record.step)
        if record.groups:
            header, rows = table(record.groups, reward_columns(record.groups))
            lines = ["|".join(map(_cell, line)) for line in (header, ["---"] * len(header), *islice(rows, ROWS))]
            self._writer.add_text("completions", "\n".join(lines), record.step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, ending: str) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)[:LONGEST_CELL]
    for character, escaped in zip("&<>|\r\n", ("&amp;", "&lt;", "&gt;", "&#124;", "", "<br>"), strict=True):
        text = text.replace(character, escaped)
    return text


MARK = "grpo_studio_run"  # a key of the run's config in trackio: a hash of the folder's path


class TrackioRun(Tracker):
    _trackio: Any = None

    def open(self) -> None:
        # TRACKIO_DIR says where the database is. The others could name a server, a Space or a webhook.
        for variable in [name for name in os.environ if name.startswith("TRACKIO_") and name != "TRACKIO_DIR"]:
            del os.environ[variable]
        if self._trackio is not None:
            self._trackio.finish()
        self._trackio, about = import_module("trackio"), self.about
        mark = hashlib.sha256(str(about.folder.path).encode()).hexdigest()[:16]
        with contextlib.suppress(ValueError):  # there is no such project yet
            for run in list(self._trackio.Api().runs(about.project)):
                if (run.config or {}).get(MARK) == mark:
                    run.delete()
        off: Any = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
        config = about.settings | {MARK: mark}
        self._trackio.init(project=about.project, name=about.name, config=config, resume="never", **off)

    def send(self, record: StepRecord) -> None:
        self._trackio.log(record.logged(self._trackio), step=record.step)

    def close(self, ending: str) -> None:
        self._trackio.finish()


class WandbRun(Tracker):
    _wandb: Any = None
    _run: Any = None

    def open(self) -> None:
        if self._run is not None:
            self._run.finish()
        about = self.about
        is_online = about.may_upload or os.environ.get("WANDB_MODE") == "online"
        # Not kept in the folder: one that came from elsewhere could name any run of the user's. A new run at the same
        # place is another one.
        place = f"{about.folder.path.resolve()} {about.folder.config.stat().st_mtime_ns}"
        id = hashlib.sha256(place.encode()).hexdigest()[:16]
        files = preferences_folder() / "wandb" / id
        if not is_online:
            shutil.rmtree(files, ignore_errors=True)
        make_private_folder(files)
        # Before the import: its settings are read from the folder, and the rest of the user's own environment stays.
        os.environ |= {"WANDB_DIR": str(files), "WANDB_DATA_DIR": str(files), "WANDB_CACHE_DIR": str(files / "cache")}
        os.environ["WANDB_MODE"] = mode = "online" if is_online else "offline"
        self._wandb = wandb = import_module("wandb")
        self._run = wandb.init(
            project=about.project,
            name=about.name,
            id=id,
            dir=str(files),
            config=about.settings,
            mode=mode,
            resume="allow" if is_online else None,
            # Nothing of the machine but what is in the event log: no code, git, packages, output or statistics.
            settings=wandb.Settings(
                console="off",
                silent=True,
                **dict.fromkeys(("save_code", "symlink", "x_save_requirements"), False),
                **dict.fromkeys(("disable_code", "disable_git", "disable_job_creation"), True),
                **dict.fromkeys(("x_disable_stats", "x_disable_meta", "x_disable_machine_info"), True),
            ),
        )

    def send(self, record: StepRecord) -> None:
        self._run.log(record.logged(self._wandb), step=record.step)

    def close(self, ending: str) -> None:
        self._run.finish(exit_code=0 if ending in ("finished", "stopped") else 1)


MAKERS: dict[str, Callable[[AboutRun], Tracker]] = {
    "csv": CsvTables,
    "tensorboard": TensorBoardFiles,
    "trackio": TrackioRun,
    "wandb": WandbRun,
}
