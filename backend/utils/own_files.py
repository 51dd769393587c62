"""Files of a folder that may be a stranger's, where they are copied or read as rows.

A link or a path in it could lead to any file of this machine, which would be carried along unseen.
"""

from __future__ import annotations

import os
from pathlib import Path

from backend.utils.errors import UserError
from backend.utils.files import resolved
from backend.utils.hub_cache import hub_cache
from backend.utils.text import quote


def is_own(path: Path, folder: Path) -> bool:
    """True if `path`, its links followed, is in `folder`, or in the blobs of a snapshot of Hugging Face's cache."""
    home, target = resolved(folder), resolved(path)
    blobs = home.parent.parent / "blobs"
    is_snapshot = home.parent.name == "snapshots" and not blobs.is_symlink()
    return target.is_relative_to(home) or (is_snapshot and target.parent == blobs)


def own_file(path: Path, folder: Path, setting: str) -> Path:
    """`path`, a file below `folder`. Raises UserError on `setting` for a link that leads out of the folder.

    Other programs' folders of models have links into Hugging Face's cache: what lies there was downloaded.
    """
    if is_own(path, folder) or resolved(path).is_relative_to(resolved(hub_cache())):
        return path
    advice = "put what it leads to in its place."
    raise UserError(setting, f"{quote(path, 100)} is a link that leads out of its folder; {advice}")


def own_files(folder: Path, setting: str, *, but: tuple[str, ...] = ()) -> list[Path]:
    """Files of a folder and of the folders in it, by name, without hidden ones and those named in `but`.

    Raises UserError on `setting` for a link that `own_file` refuses and for any to a folder, which may have no end;
    OSError for a folder that cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in but)
        if link := next((path for name in folders if (path := Path(parent, name)).is_symlink()), None):
            raise UserError(setting, f"{quote(link, 100)} is a link to a folder; put the folder in its place.")
        kept = sorted(name for name in names if not name.startswith(".") and name not in but)
        found += (own_file(Path(parent, name), folder, setting) for name in kept)
    return found
