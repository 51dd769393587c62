"""A dataset of the Hugging Face Hub through the `datasets` library, which retries for minutes where there is no network.

This module notices an unreachable Hub within seconds, and then uses the cache. A dataset is somebody else's: its README may name files for
its splits by any path of this disk and any address, and its rows may name pictures and sounds so, which `datasets` opens when it decodes
them. Here files come from the dataset's own repository, or from its own folder in the cache; nothing is decoded.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from backend.data.hub_addresses import own_addresses_only
from backend.models import inventory
from backend.models.hub_search import check_reachable
from backend.spec.faults import Mistake
from backend.spec.hub_cache import is_dataset_cached, local_folder
from backend.spec.runs.start_progress import tell
from backend.spec.user_input.own_files import is_own
from backend.spec.user_input.text import shown


def load(repo_id: str, config_name: str | None, setting: str) -> Any:
    """The splits of a dataset by its id: `datasets.DatasetDict`. Raises Mistake where neither the Hub nor the cache has it and where its files
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
    except Mistake:
        if folder := _cached_snapshot(repo_id):
            return _of_snapshot(folder, config_name, repo_id, setting)
        if not is_dataset_cached(repo_id):
            raise
    tell(f"{'Opening' if is_dataset_cached(repo_id) else 'Fetching'} the dataset {shown(repo_id, 60)}")
    return datasets.load_dataset(repo_id, config_name)


def _of_snapshot(folder: Path, config_name: str | None, repo_id: str, setting: str) -> Any:
    """As `datasets.load_dataset` of a folder, after a look at the files that its README names: of the Hub's, `datasets` looks itself."""
    import datasets

    builder = datasets.load_dataset_builder(str(folder), config_name)
    by_split = cast("Mapping[str, list[str]]", builder.config.data_files or {})
    for name in (name for names in by_split.values() for name in names):
        if not is_own(Path(name), folder):
            raise Mistake(
                setting,
                f"The dataset {shown(repo_id, 50)} names {shown(Path(name), 60)} as a file of its own, and it is none.",
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
