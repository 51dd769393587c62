"""Load a Hugging Face dataset from its own repository only, without decoding media; offline from the cache."""

import dataclasses
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import datasets
import fsspec
from fsspec.registry import known_implementations, register_implementation
from huggingface_hub import snapshot_download
from huggingface_hub.utils import disable_progress_bars

from backend.models import inventory
from backend.models.hub import TIMEOUT_S, check_reachable
from backend.models.hub_client import hub_errors
from backend.runs.start_progress import tell
from backend.utils.errors import UserError
from backend.utils.hub_cache import is_dataset_cached, is_own, local_folder, split_revision
from backend.utils.text import quote

OPENED = {"hf", "file", "local", "zip", "tar", "dir", "gzip", "bz2", "xz", "lz4", "zstd"}
"""Protocols that fsspec may open: the Hub, the local disk, and files packed there."""
REFUSED = "its README names a file outside its own repository"
_lock = threading.RLock()


class _RefusedPlace(fsspec.AbstractFileSystem):
    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise PermissionError(REFUSED)


@contextmanager
def own_addresses_only() -> Iterator[None]:
    """Block fsspec from opening protocols outside OPENED; one thread at a time."""
    with _lock:
        loaded = {kind: cls for kind, cls in fsspec.registry.items() if kind not in OPENED}
        known = {kind: about for kind, about in known_implementations.items() if kind not in OPENED}
        try:
            for kind in loaded:
                register_implementation(kind, _RefusedPlace, clobber=True)
            # A class that cannot be imported: fsspec then registers nothing.
            known_implementations.update({kind: {"class": f"{__name__}.none.Place", "err": REFUSED} for kind in known})
            yield
        finally:
            known_implementations.update(known)
            for kind, cls in loaded.items():
                register_implementation(kind, cls, clobber=True)


def load(repo_id: str, config_name: str | None, setting: str) -> Any:
    """A `datasets.DatasetDict`, undecoded. Raises UserError for foreign files, and any error of `datasets`."""
    if not sys.stderr.isatty():  # a log would hold every state of a bar
        datasets.disable_progress_bars()
        disable_progress_bars()
    with own_addresses_only():
        splits = _loaded(repo_id, config_name, setting)
    for split in splits.values():
        split.info.features = _undecoded(split.features)
    return splits


def _loaded(repo_id: str, config_name: str | None, setting: str) -> Any:
    try:
        check_reachable(repo_id, "dataset")
    except UserError:
        folder = local_folder(repo_id, "dataset")
        item = inventory.dataset_at(folder) if folder is not None else None
        if folder is not None and item is not None and not item.refusal:
            return _of_snapshot(folder, config_name, repo_id, setting)
        if not is_dataset_cached(repo_id):
            raise
    tell(f"{'Opening' if is_dataset_cached(repo_id) else 'Fetching'} the dataset {quote(repo_id, 60)}")
    repo, revision = split_revision(repo_id)
    if revision is None:
        return datasets.load_dataset(repo, config_name)
    with hub_errors(repo_id, "dataset", setting):  # what `datasets` keeps remembers no branch or tag
        about = {"repo_type": "dataset", "revision": revision, "etag_timeout": TIMEOUT_S}
        folder = Path(snapshot_download(repo, **about))
    return _of_snapshot(folder, config_name, repo_id, setting)


def _of_snapshot(folder: Path, config_name: str | None, repo_id: str, setting: str) -> Any:
    builder = datasets.load_dataset_builder(str(folder), config_name)
    by_split: Mapping[str, list[str]] = builder.config.data_files or {}
    for name in (name for names in by_split.values() for name in names):
        if not is_own(Path(name), folder):
            other = f"names {quote(Path(name), 60)} as a file of its own, and it is none"
            raise UserError(setting, f"The dataset {quote(repo_id, 50)} {other}.")
    builder.download_and_prepare()
    return builder.as_dataset()


def _undecoded(feature: Any) -> Any:
    """Column type without decoding, since decoding a picture or sound opens its path."""
    if isinstance(feature, Mapping):
        return type(feature)({name: _undecoded(kind) for name, kind in feature.items()})  # pyright: ignore
    if isinstance(feature, (list, tuple)):
        return [_undecoded(kind) for kind in feature]  # pyright: ignore
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=_undecoded(feature.feature))
    if hasattr(feature, "decode") and type(feature).__name__ != "Json":  # JSON is text that opens nothing
        return dataclasses.replace(feature, decode=False)
    return feature
