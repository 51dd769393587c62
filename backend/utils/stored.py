"""What GRPO Studio has stored on this machine: folder by folder, with sizes, and which of it can be deleted without
losing any work."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.utils import file_lock, places
from backend.utils.errors import UserError
from backend.utils.hub_cache import hub_cache
from backend.utils.text import quote

PREFERENCE_FILES = (
    "prefs.ini*",
    "draft*.yaml",
    "draft-*.lock",
    "trusted.json",
    "runs-cache.jsonl",
    "native-crash-*.txt",
)
"""What lies in the folder of preferences, which may hold the runs as well: only these files are ever deleted there."""
REMOVABLE = ("settings", "kernels")


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """One row: `key` names it on the command line. `bytes` and `files` are 0 where there is nothing. `is_shared`: other
    programs use it too. `remedy` says how to be rid of it."""

    key: str
    title: str
    path: Path
    bytes: int
    files: int
    is_shared: bool
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def stored_places() -> list[StoredPlace]:
    """Everything that is stored, ours first. Reads folders, and writes nothing."""
    by_command = "where --remove {} deletes it."
    preferences = places.preferences_folder()
    kernels = kernel_cache()
    of_mac = (
        [
            _place(
                "environments",
                "Python packages of the light app",
                preferences / "environments",
                "Delete the folder by hand.",
            ),
            _place(
                "logs",
                "logs of the light app",
                Path.home() / "Library" / "Logs" / "GRPO Studio",
                "Delete the folder by hand.",
            ),
        ]
        if sys.platform == "darwin"
        else []
    )
    return [
        _place(
            "runs",
            "runs",
            places.runs_folder(),
            "Move runs to the trash on the Runs page, or delete the folder by hand: they hold what was trained.",
        ),
        _measured(
            "settings", "preferences, stored forms", preferences, preference_files(), by_command.format("settings")
        ),
        _place(
            "lm-studio", "models in LM Studio", places.lm_studio_models() / "grpo-studio", "Delete models in LM Studio."
        ),
        _place("kernels", "kernels compiled by mlx", kernels, by_command.format("kernels"), is_shared=True),
        *of_mac,
        _place(
            "hub",
            "Hugging Face cache",
            hub_cache(),
            "Other programs use it too; hf cache deletes from it.",
            is_shared=True,
        ),
    ]


def preference_files() -> list[Path]:
    """Files of the preferences, the stored forms and reports of crashes."""
    folder = places.preferences_folder()
    return sorted(path for pattern in PREFERENCE_FILES for path in folder.glob(pattern) if path.is_file())


def kernel_cache() -> Path:
    """Where mlx keeps what it compiles for a CPU, for itself and every other program that uses it."""
    return Path(tempfile.gettempdir()) / "mlx"


def removable_files(key: str) -> list[Path]:
    """What `remove` would delete. Raises UserError for a key that is none of REMOVABLE, and while a window uses the
    preferences."""
    if key not in REMOVABLE:
        raise UserError("remove", f"{quote(key, 40)} cannot be removed by a command; {' and '.join(REMOVABLE)} can.")
    if key == "kernels":
        return [kernel_cache()] if kernel_cache().is_dir() else []
    files = preference_files()
    if any(file_lock.is_held(file) for file in files if file.suffix == ".lock"):
        raise UserError(
            "remove", "A window of GRPO Studio is open, and would write its preferences again; close it first."
        )
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


def _place(key: str, title: str, path: Path, remedy: str, *, is_shared: bool = False) -> StoredPlace:
    return _measured(key, title, path, _files_in(path), remedy, is_shared=is_shared)


def _measured(
    key: str, title: str, path: Path, files: list[Path], remedy: str, *, is_shared: bool = False
) -> StoredPlace:
    return StoredPlace(key, title, path, sum(map(_size, files)), len(files), is_shared, remedy)


def _files_in(folder: Path) -> list[Path]:
    return list(_walk(folder)) if folder.is_dir() else []


def _walk(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):  # links to folders are not followed
        yield from (Path(parent, name) for name in names)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):  # deleted in the meantime
        return path.lstat().st_size  # of a link its own: what it points to is counted where it lies
    return 0
