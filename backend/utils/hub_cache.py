"""Hugging Face's cache and the Hub's address, by the environment, and files of folders that may be a stranger's.

Asks no Hub. A link or a path in a stranger's folder could lead to any file of this machine, which would be carried
along unseen where the folder is copied or read as rows.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from backend.utils.errors import UserError
from backend.utils.files import is_folder, possible_path, resolved
from backend.utils.text import quote

RepoType = Literal["model", "dataset"]
ENDPOINT_VARIABLE = "HF_ENDPOINT"
_REVISION = re.compile(r"(\w[\w.-]*/[\w.-]+)@(\w(?:[\w./-]*\w)?)", re.ASCII)


def require_hub_address() -> None:
    """Raise UserError for a Hub that is not a web address: huggingface_hub parses it while it is imported."""
    if not (address := os.environ.get(ENDPOINT_VARIABLE)):
        return
    with suppress(ValueError):  # of a port that is no number up to 65535, or half an IPv6 address
        parts = urlsplit(address)
        if re.fullmatch(r"https?://[^\s\x00-\x1f]+", address) and parts.port != 0 and parts.hostname:
            return
    advice = "write one that begins with https://, or unset the variable."
    raise UserError(ENDPOINT_VARIABLE, f"{quote(address, 70)} is no web address; {advice}")


def split_revision(name: str) -> tuple[str, str | None]:
    """(owner/name, its branch, tag or commit) of owner/name@revision; (`name`, None) for any other name."""
    match = _REVISION.fullmatch(name)
    return (match[1], match[2]) if match and ".." not in name else (name, None)


def hub_cache() -> Path:
    """The folder of downloaded repositories, by HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME and XDG_CACHE_HOME."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(named) if named else _hugging_face_home() / "hub"


def repo_cache(repo_id: str, repo_type: RepoType = "model") -> Path:
    """The folder of one repository in the cache, which may not exist."""
    return hub_cache() / f"{repo_type}s--{split_revision(repo_id)[0].replace('/', '--')}"


def local_folder(name: str, repo_type: RepoType = "model") -> Path | None:
    """Files of a model or dataset: the folder `name` itself, or the cached snapshot of an id; None if not here."""
    if (path := possible_path(name)) is None:  # neither a folder nor an id
        return None
    return path if is_folder(path) else snapshot_of(repo_cache(name, repo_type), split_revision(name)[1])


def is_dataset_cached(repo_id: str) -> bool:
    """True if any of a dataset was downloaded, or prepared by `datasets`, which names owner/MyData owner___my_data."""
    if (revision := split_revision(repo_id)[1]) or (repo_cache(repo_id, "dataset") / "snapshots").is_dir():
        return not revision or local_folder(repo_id, "dataset") is not None
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or _hugging_face_home() / "datasets")
    bare_name = repo_id.replace("/", "___").replace("_", "").lower()
    folders = prepared.iterdir() if prepared.is_dir() else ()
    return any(folder.name.replace("_", "").lower() == bare_name for folder in folders if folder.is_dir())


def _hugging_face_home() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return _expanded(os.environ.get("HF_HOME") or os.path.join(caches, "huggingface"))


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(os.path.expandvars(path)))  # as huggingface_hub does: never raises


def snapshot_of(repo: Path, revision: str | None = None) -> Path | None:
    """A revision in a repository's cache folder. None: the one that refs/main names, else the newest folder, unless a
    revision was asked for when it was downloaded."""
    refs = repo / "refs"
    try:
        named = repo / "snapshots" / (refs / (revision or "main")).read_text(encoding="utf-8").strip()
    except OSError:
        named = repo / "snapshots" / revision if revision else None
    if named is not None and named.is_dir():
        return named
    if revision or (any(refs.glob("*")) and not (refs / "main").exists()):
        return None
    folders = [folder for folder in (repo / "snapshots").glob("*") if folder.is_dir()]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def is_own(path: Path, folder: Path) -> bool:
    """True if `path`, its links followed, is in `folder`, or in the blobs of a snapshot of Hugging Face's cache."""
    home, target = resolved(folder), resolved(path)
    blobs = home.parent.parent / "blobs"
    is_snapshot = home.parent.name == "snapshots" and not blobs.is_symlink()
    return target.is_relative_to(home) or (is_snapshot and target.parent == blobs)


def own_file(path: Path, folder: Path, setting: str) -> Path:
    """`path`, below `folder`. Raises UserError for a link that leads out of it and not into Hugging Face's cache."""
    if is_own(path, folder) or resolved(path).is_relative_to(resolved(hub_cache())):
        return path
    advice = "put what it leads to in its place."
    raise UserError(setting, f"{quote(path, 100)} is a link that leads out of its folder; {advice}")


def own_files(folder: Path, setting: str) -> list[Path]:
    """Files of a folder, at any depth and by name, without hidden ones and Python's caches. Raises UserError for a link
    that `own_file` refuses and for any to a folder, OSError for a folder that cannot be read."""

    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        if link := next((path for name in folders if (path := Path(parent, name)).is_symlink()), None):
            raise UserError(setting, f"{quote(link, 100)} is a link to a folder; put the folder in its place.")
        kept = sorted(name for name in names if not name.startswith("."))
        found += (own_file(Path(parent, name), folder, setting) for name in kept)
    return found
