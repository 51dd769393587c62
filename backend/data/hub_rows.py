"""A dataset of the Hugging Face Hub through the `datasets` library, which retries for minutes where there is no network.

This module notices an unreachable Hub within seconds, and then uses the cache. A dataset is somebody else's: its README may name files for
its splits by any path of this disk and any address, and its rows may name pictures and sounds so, which `datasets` opens when it decodes
them. Here files come from the dataset's own repository, or from its own folder in the cache; nothing is decoded.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import fsspec
from fsspec.registry import known_implementations, register_implementation

from backend.models import inventory
from backend.models.hub_search import check_reachable
from backend.runs.start_progress import tell
from backend.utils.errors import UserError
from backend.utils.hub_cache import is_dataset_cached, local_folder
from backend.utils.own_files import is_own
from backend.utils.text import quote

# Which addresses the `datasets` library may open: those of the Hub, and of this disk.

OPENED = {"hf", "file", "local", "zip", "tar", "dir"}
"""Kinds of address that may be opened; archives lie on the Hub or on this disk themselves."""
REFUSED = "its README names a file outside its own repository"
_NO_CLASS = f"{__name__}.none.Place"
"""A class that cannot be imported: what fsspec cannot import, it does not put among what is loaded, so nothing of this stays."""


class RefusedPlace(fsspec.AbstractFileSystem):
    """In the place of a file system that would contact a machine."""

    cachable = False

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise PermissionError(REFUSED)


class _Registry:
    """fsspec's two tables, of which there is one in a process: classes that are loaded, and names of those that are not yet."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._loaded: dict[str, Any] = {}
        self._known: dict[str, Any] = {}

    def restrict(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._loaded = {kind: cls for kind, cls in fsspec.registry.items() if kind not in OPENED}
            self._known = {kind: about for kind, about in known_implementations.items() if kind not in OPENED}
            for kind in self._loaded:
                register_implementation(kind, RefusedPlace, clobber=True)
            known_implementations.update({kind: {"class": _NO_CLASS, "err": REFUSED} for kind in self._known})

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            known_implementations.update(self._known)
            for kind, cls in self._loaded.items():
                register_implementation(kind, cls, clobber=True)


_registry = _Registry()


@contextmanager
def own_addresses_only() -> Iterator[None]:
    """Inside, whatever fsspec is asked to open at an address not of OPENED is refused with REFUSED, in all threads of this process."""
    _registry.restrict()
    try:
        yield
    finally:
        _registry.release()


# ── hub rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(repo_id: str, config_name: str | None, setting: str) -> Any:
    """The splits of a dataset by its id: `datasets.DatasetDict`. Raises UserError where neither the Hub nor the cache has it and where its files
    are not its own, and any exception of `datasets` for rows that it cannot read."""
    import datasets

    if not sys.stderr.isatty():  # a log would hold every state of a bar
        datasets.disable_progress_bars()
    with own_addresses_only():
        return _undecoded(_loaded(repo_id, config_name, setting))


def _loaded(repo_id: str, config_name: str | None, setting: str) -> Any:
    import datasets

    try:
        check_reachable(repo_id, "dataset")
    except UserError:
        if folder := _cached_snapshot(repo_id):
            return _of_snapshot(folder, config_name, repo_id, setting)
        if not is_dataset_cached(repo_id):
            raise
    tell(f"{'Opening' if is_dataset_cached(repo_id) else 'Fetching'} the dataset {quote(repo_id, 60)}")
    return datasets.load_dataset(repo_id, config_name)


def _of_snapshot(folder: Path, config_name: str | None, repo_id: str, setting: str) -> Any:
    """As `datasets.load_dataset` of a folder, after a look at the files that its README names: of the Hub's, `datasets` looks itself."""
    import datasets

    builder = datasets.load_dataset_builder(str(folder), config_name)
    by_split = cast("Mapping[str, list[str]]", builder.config.data_files or {})
    for name in (name for names in by_split.values() for name in names):
        if not is_own(Path(name), folder):
            raise UserError(
                setting,
                f"The dataset {quote(repo_id, 50)} names {quote(Path(name), 60)} as a file of its own, and it is none.",
            )
    builder.download_and_prepare()
    return builder.as_dataset()


def _cached_snapshot(repo_id: str) -> Path | None:
    """The snapshot in Hugging Face's cache, if it has files of rows."""
    folder = local_folder(repo_id, "dataset")
    item = inventory.dataset_at(folder) if folder is not None else None
    return folder if item is not None and not item.refusal else None


# ── what `datasets` would decode ─────────────────────────────────────────────────────────────────────────────────────


def _undecoded(splits: Any) -> Any:
    """The same rows with pictures, sounds and the like as they are stored, {"bytes", "path"}: to decode one, `datasets` opens its path."""
    for split in splits.values():
        split.info.features = _plain(split.features)
    return splits


def _plain(feature: Any) -> Any:
    """The type of a column of `datasets`, or of a part of one, with what is stored as its value."""
    if isinstance(feature, Mapping):
        kinds = cast("Mapping[str, Any]", feature)
        return type(feature)({name: _plain(kind) for name, kind in kinds.items()})  # pyright: ignore
    if isinstance(feature, (list, tuple)):
        return [_plain(kind) for kind in cast("list[Any]", feature)]
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=_plain(feature.feature))
    # JSON is text that opens nothing.
    if hasattr(feature, "decode") and type(feature).__name__ != "Json":
        return dataclasses.replace(feature, decode=False)
    return feature
