"""What GRPO Studio has stored on this machine, with sizes, and what can be deleted without losing any work."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.utils import file_lock, places
from backend.utils.errors import UserError
from backend.utils.files import walk
from backend.utils.hub_cache import hub_cache
from backend.utils.text import quote

PREFERENCE_FILES = (
    *("prefs.ini*", "draft*.yaml", "draft-*.lock", "trusted.json", "runs-cache.jsonl", "native-crash-*.txt"),
)  # files in the folder of preferences, which may hold the runs as well: only these are ever deleted there
REMOVABLE = ("settings", "kernels")


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """One row: `key` is its name on the command line; `is_shared` with other programs; `remedy`: how to delete it."""

    key: str
    title: str
    path: Path
    bytes: int
    files: int
    is_shared: bool
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"path": str(self.path)}


def stored_places() -> list[StoredPlace]:
    """Everything that is stored, ours first. Reads folders, and writes nothing."""
    by_hand, preferences = "Delete the folder by hand.", places.preferences_folder()
    logs = Path.home() / "Library" / "Logs" / "GRPO Studio"
    rows: list[tuple[str, str, Path, str]] = [
        (
            "runs",
            "runs",
            places.runs_folder(),
            "Move runs to the trash on the Runs page, or delete the folder by hand: they hold what was trained.",
        ),
        ("settings", "preferences, stored forms", preferences, "where --remove settings deletes it."),
        ("lm-studio", "models in LM Studio", places.lm_studio_models() / "grpo-studio", "Delete models in LM Studio."),
        ("kernels", "kernels compiled by mlx", kernel_cache(), "where --remove kernels deletes it."),
        ("environments", "Python packages of the light app", preferences / "environments", by_hand),
        ("logs", "logs of the light app", logs, by_hand),
        ("hub", "Hugging Face cache", hub_cache(), "Other programs use it too; hf cache deletes from it."),
    ]
    stored: list[StoredPlace] = []
    for key, title, path, remedy in rows:
        if key in ("environments", "logs") and sys.platform != "darwin":
            continue
        files = [entry.path for entry in walk(path) if not entry.is_dir(follow_symlinks=False)]
        sizes: list[int] = []
        for file in preference_files() if key == "settings" else files:
            with suppress(OSError):  # deleted in the meantime
                sizes.append(os.lstat(file).st_size)  # what a link points to counts where it lies
        stored.append(StoredPlace(key, title, path, sum(sizes), len(sizes), key in ("kernels", "hub"), remedy))
    return stored


def preference_files() -> list[Path]:
    """Files of the preferences, the stored forms and reports of crashes."""
    folder = places.preferences_folder()
    return sorted(path for pattern in PREFERENCE_FILES for path in folder.glob(pattern) if path.is_file())


def kernel_cache() -> Path:
    """The folder in which mlx keeps what it compiles for a CPU, for every program that uses it."""
    return Path(tempfile.gettempdir()) / "mlx"


def removable_files(key: str) -> list[Path]:
    """What `remove` would delete. Raises UserError for another key, and while a window uses the preferences."""
    if key not in REMOVABLE:
        raise UserError("remove", f"{quote(key, 40)} cannot be removed by a command; {' and '.join(REMOVABLE)} can.")
    if key == "kernels":
        return [kernel_cache()] if kernel_cache().is_dir() else []
    files = preference_files()
    if any(file_lock.is_held(file) for file in files if file.suffix == ".lock"):
        sentence = "A window of GRPO Studio is open, and would write its preferences again; close it first."
        raise UserError("remove", sentence)
    return files


def remove(key: str) -> list[Path]:
    """Delete what `removable_files` lists, and return it. Raises UserError for a file that cannot be deleted."""
    files = removable_files(key)
    for path in files:
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise UserError("remove", f"{path} cannot be deleted: {error.strerror}.") from None
    return files
