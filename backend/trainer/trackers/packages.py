"""The trackers tensorboard, trackio and wandb, by their packages.

tensorboard and trackio are written again from the event log whenever a process of theirs begins or the event log was
cut back, so they hold each step once. trackio stays in its database on this machine, never on a Space.

wandb is offline unless the user says WANDB_MODE=online in the environment, or `track --upload`: a YAML file of
somebody else must not upload anything. Its files lie in our folder of preferences and not in the run's: wandb makes
a link among them, and reads settings from there, which somebody else's run folder could bring along. Offline, what
was not synced yet is written again by every process. What has left the machine cannot be: `WandbProgress` says how
far that is, and where a resume has changed settings of steps that were sent, a second run begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from backend.runs.run_folder import RunFolder
from backend.runs.steering import read_changes
from backend.trainer.trackers import records
from backend.trainer.trackers.records import AboutRun, Sent, StepRecord
from backend.utils.disk_faults import writing
from backend.utils.documents import read_json
from backend.utils.errors import UserError
from backend.utils.files import make_private_folder
from backend.utils.places import preferences_folder
from backend.utils.whole_file import replace_file

FOLDER = "tensorboard"
ROWS = 16
"""Completions of a step in its table, which is text here and is read whole by the browser."""
LONGEST_CELL = 2_000
"""Characters of a text in it."""


class TensorBoardFiles:
    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, about: AboutRun) -> Sent:
        if self._writer is not None:
            self._writer.close()
        folder = about.folder.trackers / FOLDER
        with writing(folder):
            if folder.exists():
                shutil.rmtree(folder)
            make_private_folder(folder)
            # purge_step: a reader that has seen later steps of an older file forgets them.
            self._writer = import_module("tensorboardX").SummaryWriter(logdir=str(folder), purge_step=0)
        settings = "\n".join(f"    {key}: {value}" for key, value in about.settings.items())
        self._writer.add_text("settings", settings, 0)
        return Sent()

    def send(self, record: StepRecord) -> None:
        for name, value in record.metrics().items():
            self._writer.add_scalar(name, value, record.step)
        if record.groups:
            self._writer.add_text("completions", _markdown(record), record.step)

    def flush(self, sent: Sent) -> None:
        self._writer.flush()

    def close(self, ending: str) -> None:
        self._writer.close()


def _markdown(record: StepRecord) -> str:
    header, rows = records.table(record.groups)
    return "\n".join(["|".join(map(_cell, line)) for line in (header, ["---"] * len(header), *rows[:ROWS])])


def _cell(value: Any) -> str:
    """Text on one line, in which nothing is a column's border, a line of a table or HTML."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)[:LONGEST_CELL]
    for character, escaped in zip("&<>|\r\n", ("&amp;", "&lt;", "&gt;", "&#124;", "", "<br>"), strict=True):
        text = text.replace(character, escaped)
    return text


MARK = "grpo_studio_run"
"""The key of the mark: a sum of the folder's path, which does not tell the path."""
KEPT_VARIABLE = "TRACKIO_DIR"
"""Where the database is. trackio's other variables could name a server, a Space or a webhook to which everything
would go."""


class TrackioRun:
    def __init__(self) -> None:
        self._trackio: Any = None

    def open(self, about: AboutRun) -> Sent:
        for variable in [name for name in os.environ if name.startswith("TRACKIO_") and name != KEPT_VARIABLE]:
            del os.environ[variable]
        if self._trackio is not None:
            self._trackio.finish()
        self._trackio = import_module("trackio")
        mark = hashlib.sha256(str(about.folder.path).encode()).hexdigest()[:16]
        with contextlib.suppress(ValueError):  # there is no such project yet
            for run in list(self._trackio.Api().runs(about.project)):
                if (run.config or {}).get(MARK) == mark:
                    run.delete()
        self._trackio.init(
            project=about.project,
            name=about.name,
            config=about.settings | {MARK: mark},
            resume="never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return Sent()

    def send(self, record: StepRecord) -> None:
        self._trackio.log(record.logged(self._trackio), step=record.step)

    def flush(self, sent: Sent) -> None:
        """trackio writes from a thread of its own."""

    def close(self, ending: str) -> None:
        self._trackio.finish()


FILE = "wandb.json"
_ID = re.compile(r"[0-9a-f]{16}")
_ONLINE = re.compile(r"run-\d{8}_\d{6}-")
"""How the folder of a run that wandb wrote online begins; the others begin with offline-run-."""
FAILED = 1
"""Exit code of a run that failed or was cut off, which wandb shows as such."""


@dataclass(slots=True)
class WandbProgress:
    """How far the run `id` of wandb has come. `changes`: the changes of settings that hold for what was sent."""

    id: str
    part: int = 1
    sent: Sent = field(default_factory=Sent)
    changes: list[Any] = field(default_factory=list[Any])

    @classmethod
    def begin(cls, part: int = 1) -> WandbProgress:
        return cls(secrets.token_hex(8), part)

    @classmethod
    def read(cls, run: RunFolder) -> WandbProgress:
        """What an earlier process of this machine has left; a new one where there is nothing of use."""
        path = run.trackers / FILE
        try:
            kept = read_json(path, "run") if path.exists() else {}
            sent = Sent(int(kept["step"]), {str(split): int(step) for split, step in kept["evaluations"].items()})
            progress = cls(str(kept["id"]), int(kept["part"]), sent, list(kept["changes"]))
        except (UserError, KeyError, TypeError, ValueError, AttributeError):
            return cls.begin()
        # The id of a run folder that came from elsewhere could be that of any run of the user's.
        is_ours = bool(_ID.fullmatch(progress.id)) and files_of(progress.id).is_dir()
        return progress if is_ours else cls.begin()

    def write(self, run: RunFolder) -> None:
        """Raises DiskError."""
        kept = {"v": 1, "id": self.id, "part": self.part, **asdict(self.sent), "changes": self.changes}
        replace_file(run.trackers / FILE, json.dumps(kept))


def files_of(id: str) -> Path:
    """The folder of wandb's files of one run."""
    return preferences_folder() / "wandb" / id


class WandbRun:
    def __init__(self) -> None:
        self._wandb: Any = None
        self._run: Any = None

    def open(self, about: AboutRun) -> Sent:
        if self._run is not None:
            self._run.finish()
        self._about = about
        is_online = about.may_upload or os.environ.get("WANDB_MODE") == "online"
        progress = self._progress = WandbProgress.read(about.folder)
        changes = [asdict(change) for change in read_changes(about.folder)]
        kept = json.loads(json.dumps([change for change in changes if change["step"] <= progress.sent.step]))
        files = files_of(progress.id)
        if not is_online and not _was_synced(files):
            shutil.rmtree(files, ignore_errors=True)
            progress = self._progress = WandbProgress(progress.id, progress.part)
        elif kept != progress.changes:
            progress = self._progress = WandbProgress.begin(progress.part + 1)
            files = files_of(progress.id)
        make_private_folder(files)
        self._begin(about, files, is_online=is_online)
        return progress.sent

    def _begin(self, about: AboutRun, files: Path, *, is_online: bool) -> None:
        # Before the import: its settings are read from the folder, and the rest of the user's own environment stays.
        os.environ |= {"WANDB_DIR": str(files), "WANDB_DATA_DIR": str(files), "WANDB_CACHE_DIR": str(files / "cache")}
        os.environ["WANDB_MODE"] = mode = "online" if is_online else "offline"
        self._wandb = wandb = import_module("wandb")
        part = self._progress.part
        self._run = wandb.init(
            project=about.project,
            name=about.name if part == 1 else f"{about.name}, part {part}",
            id=self._progress.id,
            dir=str(files),
            config=about.settings,
            mode=mode,
            resume="allow" if is_online else None,
            # Nothing of the machine but what is in the event log: no code, no git, no packages, no output, no
            # statistics.
            settings=wandb.Settings(
                console="off",
                save_code=False,
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                symlink=False,
                silent=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )

    def send(self, record: StepRecord) -> None:
        # A step that wandb has already takes the same values once more, or is dropped.
        self._run.log(record.logged(self._wandb), step=record.step)

    def flush(self, sent: Sent) -> None:
        changes = [asdict(change) for change in read_changes(self._about.folder) if change.step <= sent.step]
        if (sent, changes) != (self._progress.sent, self._progress.changes) or not self._file.exists():
            self._progress.sent = Sent(sent.step, dict(sent.evaluations))
            self._progress.changes = json.loads(json.dumps(changes))
            self._progress.write(self._about.folder)

    @property
    def _file(self) -> Path:
        return self._about.folder.trackers / FILE

    def close(self, ending: str) -> None:
        self._run.finish(exit_code=0 if ending in ("finished", "stopped") else FAILED)


def _was_synced(files: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(path.suffix == ".synced" or _ONLINE.match(path.name) for path in files.rglob("*"))
    return False
