"""Paths: the runs folder, a run's files and lock, our resources, LM Studio, Hugging Face's cache.

Only the functions whose docstrings say so open or create anything.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

from backend.spec import file_lock
from backend.spec.faults import Mistake
from backend.spec.private_files import make_private_folder, restrict_to_user
from backend.spec.user_input.files import is_file, is_folder
from backend.spec.user_input.paths import user_path
from backend.spec.user_input.text import shown
from backend.spec.whole_file import replace_file

RUNS_VARIABLE = "GRPO_STUDIO_RUNS"
"""Environment variable that moves the runs folder."""

PREFS_VARIABLE = "GRPO_STUDIO_PREFS"
"""Environment variable that moves the window's preferences."""


BUNDLED = "Bundled "
"""What a path inside our resources begins with where it is shown, in place of the folder where this copy of the app is installed."""


def project_root() -> Path:
    """The folder that holds `backend/` and `resources/`; in a bundled app, where PyInstaller unpacked them."""
    bundled = getattr(sys, "_MEIPASS", None)
    return Path(bundled) if bundled else Path(__file__).resolve().parents[2]


def resources() -> Path:
    return project_root() / "resources"


def demo_folder(part: str) -> Path:
    """The bundled demo's model or data."""
    return resources() / "demo" / part


def demo_config() -> Path:
    """The preset that the first launch shows."""
    return resources() / "presets" / "demo.yaml"


def path_text(path: str) -> str:
    """A path or an id as it is shown; a path inside our resources begins with BUNDLED."""
    ours = f"{resources()}/"
    return BUNDLED + path.removeprefix(ours) if path.startswith(ours) else path


def runs_folder() -> Path:
    """The default folder of runs: $GRPO_STUDIO_RUNS, else the platform's folder for application data."""
    moved = os.environ.get(RUNS_VARIABLE)
    return Path(moved).expanduser() if moved else _data_folder() / "runs"


def preferences_folder() -> Path:
    """The folder of the window's preferences and stored forms: $GRPO_STUDIO_PREFS, else the platform's folder for application data."""
    moved = os.environ.get(PREFS_VARIABLE)
    return Path(moved).expanduser() if moved else _data_folder()


def _data_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "GRPO Studio"
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "grpo-studio"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run. The trainer appends to them; every other process only reads."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def completions(self) -> Path:
        return self.path / "completions.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def control_taken(self) -> Path:
        return self.path / "control.taken"

    @property
    def change_request(self) -> Path:
        """Settings that a running trainer is asked to change, by `backend.spec.runs.steering.request_change`; transient, as `control` is."""
        return self.path / "change.json"

    @property
    def changes(self) -> Path:
        """Every change of settings that the trainer took, with the step it holds from. With config.yaml it determines the run."""
        return self.path / "changes.json"

    @property
    def parent(self) -> Path:
        """Of a cloned run: the run and step that it began from, and what was changed."""
        return self.path / "parent.json"

    @property
    def about(self) -> Path:
        """What the user has noted about the run: title, note, tags. No trainer reads it."""
        return self.path / "about.json"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def launch_lock(self) -> Path:
        """Held by the process that starts the ranks of a run on several machines, from before the first start until after the last."""
        return self.path / "launch.lock"

    @property
    def window_lock(self) -> Path:
        """Held by the window that controls the run, as long as the run trains and the window lives."""
        return self.path / "window.lock"

    @property
    def window_request(self) -> Path:
        """Asks the window that holds `window_lock` to give it up; transient."""
        return self.path / "window.request"

    @property
    def gpu_errors(self) -> Path:
        return self.path / "gpu_errors.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def fused(self) -> Path:
        return self.path / "fused"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def inspection(self) -> Path:
        """The batches of steps that were not applied, for a number in them was not finite."""
        return self.path / "inspection"

    @property
    def trackers(self) -> Path:
        """What trackers keep: logs, how far they have come, and what is their own. Only their processes write there."""
        return self.path / "trackers"

    @property
    def uploads(self) -> Path:
        return self.path / "uploads"

    @property
    def has_diary(self) -> bool:
        return self.events.exists() and self.events.stat().st_size > 0

    def is_locked(self) -> bool:
        """Whether a trainer is alive in this folder, or one is started again. No pid is trusted: a lock dies with its process."""
        return file_lock.is_held(self.lock) or file_lock.is_held(self.launch_lock)

    def say(self, word: str) -> None:
        """Write a control word (pause, resume, save, stop, finish-step) for the trainer, atomically by rename. Raises DiskFault."""
        replace_file(self.control, word)


def all_runs(folder: Path | None = None) -> Iterator[RunFolder]:
    """Every run in `folder` (the runs folder by default), newest first. A hidden folder is none: a clone is made in one."""
    folder = folder or runs_folder()
    written = {RunFolder(path): _written(path / "config.yaml") for path in folder.glob("[!.]*")}
    yield from sorted((run for run, t in written.items() if t), key=lambda run: written[run], reverse=True)


def _written(path: Path) -> float:
    """When a file was last written, in unix seconds; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:  # never written, or deleted in the meantime
        return 0.0


def find_run(name: str | Path, folder: Path | None = None) -> RunFolder:
    """A run by path, or by name inside the runs folder. Raises Mistake when there is none."""
    path = user_path(str(name), "run")
    for candidate in (path, (folder or runs_folder()) / name):
        if is_file(candidate / "config.yaml"):
            return RunFolder(candidate.resolve())
    raise Mistake(
        "run",
        f"There is no run {shown(str(name), 40)}: neither a run folder at that path nor one in {shown(folder or runs_folder(), 80)}.",
    )


def default_run_name(model: str, train_type: str, train_mode: str, now: datetime | None = None) -> str:
    """model-traintype-mode-date, in characters that are safe in a path, and not too many of them. A folder that is
    called no more than `model` goes by its parent's name."""
    path = Path(model)
    called = path.parent.name if path.name in ("model", "fused") and path.parent.name else path.name
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", called)[:80].strip("-.") or "run"
    return f"{stem}-{train_type}-{train_mode}-{(now or datetime.now()):%Y-%m-%d-%H%M%S}"


def make_run_folder(name: str, folder: Path | None = None, *, reuse: bool = False) -> RunFolder:
    """Make a fresh folder for a run. Without `reuse`, a number is added where the name is taken; with it, an existing
    folder is used unless it holds a diary. Raises Mistake when that is so or nothing can be written there."""
    parent = folder or runs_folder()
    for number in range(1, 1000):
        run = RunFolder(parent / (name if number == 1 else f"{name}-{number}"))
        try:
            make_private_folder(run.path, exist_ok=reuse)
        except FileExistsError:
            if reuse:
                raise Mistake("run_name", f"{run.path} exists and is not a folder.") from None
            continue
        except OSError as error:
            raise Mistake("runs_dir", f"The runs folder {parent} cannot be written: {error.strerror}.") from None
        if not os.access(run.path, os.W_OK):
            raise Mistake("runs_dir", f"The runs folder {parent} cannot be written: Permission denied.")
        if run.has_diary or run.is_locked():
            raise Mistake("run_name", f"The run {name} exists already; choose another name, or resume it.")
        restrict_to_user(run.path)  # with `reuse` it may be a folder that was there
        return run
    raise Mistake("run_name", f"There are a thousand runs called {name}; choose another name.")


def lm_studio_home() -> Path:
    """LM Studio's home: the path in its pointer file, else its old cache folder if present, else ~/.lmstudio."""
    try:
        pointer = (Path.home() / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        pointer = ""
    if pointer:
        return Path(pointer).expanduser()
    old = Path.home() / ".cache" / "lm-studio"
    return old if old.is_dir() else Path.home() / ".lmstudio"


def lm_studio_models() -> Path:
    """Where LM Studio looks for models; the layout below it is <publisher>/<model>/files."""
    home = lm_studio_home()
    try:
        settings = json.loads((home / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        settings = {}
    folder = cast("dict[str, Any]", settings).get("downloadsFolder") if isinstance(settings, dict) else None
    return Path(folder).expanduser() if isinstance(folder, str) and folder else home / "models"


# Hugging Face's caches

RepoType = Literal["model", "dataset"]


def hub_cache() -> Path:
    """The folder in which huggingface_hub keeps downloaded repositories, by the variables that it reads: HF_HUB_CACHE (or its older
    name HUGGINGFACE_HUB_CACHE), HF_HOME, XDG_CACHE_HOME."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(named) if named else _hugging_face_home() / "hub"


def repo_cache(repo_id: str, repo_type: RepoType = "model") -> Path:
    """The folder of one repository in the cache, whether it exists or not."""
    return hub_cache() / f"{repo_type}s--{repo_id.replace('/', '--')}"


def local_folder(name: str, repo_type: RepoType = "model") -> Path | None:
    """The files of a model or dataset: the folder `name` itself, or the cached snapshot of an id; None if it is not on this
    machine."""
    try:
        path = user_path(name, "model")
    except Mistake:  # neither a folder nor an id
        return None
    return path if is_folder(path) else snapshot_of(repo_cache(name, repo_type))


def is_dataset_cached(repo_id: str) -> bool:
    """Whether any of a dataset was fetched before: by a download, or by `datasets`, which keeps owner/MyData as
    owner___my_data."""
    if (repo_cache(repo_id, "dataset") / "snapshots").is_dir():
        return True
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or _hugging_face_home() / "datasets")
    bare_name = repo_id.replace("/", "___").replace("_", "").lower()
    folders = prepared.iterdir() if prepared.is_dir() else ()
    return any(folder.name.replace("_", "").lower() == bare_name for folder in folders if folder.is_dir())


def _hugging_face_home() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return _expanded(os.environ.get("HF_HOME") or os.path.join(caches, "huggingface"))


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


def snapshot_of(repo: Path) -> Path | None:
    """The newest revision in a repository's cache folder: the one that refs/main names, else the newest folder."""
    try:
        named = repo / "snapshots" / (repo / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        named = None
    if named is not None and named.is_dir():
        return named
    snapshots = (repo / "snapshots").glob("*") if (repo / "snapshots").is_dir() else ()
    return max(
        (folder for folder in snapshots if folder.is_dir()), key=lambda folder: folder.stat().st_mtime, default=None
    )
