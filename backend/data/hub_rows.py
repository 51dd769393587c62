"""A dataset of the Hugging Face Hub through the `datasets` library, which retries for minutes where there is no network.

This module notices an unreachable Hub within seconds, and then uses the cache.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from backend.models import inventory
from backend.models.hub_search import check_reachable
from backend.spec.faults import Mistake
from backend.spec.hub_cache import is_dataset_cached, local_folder
from backend.spec.runs.start_progress import tell
from backend.spec.user_input.text import shown


def load(repo_id: str, config_name: str | None) -> Any:
    """The result of `datasets.load_dataset` for an id. Raises Mistake where neither the Hub nor the cache has it, and any
    exception of `datasets` for rows that it cannot read."""
    import datasets

    if not sys.stderr.isatty():  # a log would hold every state of a bar
        datasets.disable_progress_bars()
    try:
        check_reachable(repo_id, "dataset")
    except Mistake:
        if folder := _cached_snapshot(repo_id):
            return datasets.load_dataset(str(folder), config_name)
        if not is_dataset_cached(repo_id):
            raise
    tell(f"{'Opening' if is_dataset_cached(repo_id) else 'Fetching'} the dataset {shown(repo_id, 60)}")
    return datasets.load_dataset(repo_id, config_name)


def _cached_snapshot(repo_id: str) -> Path | None:
    """The snapshot in Hugging Face's cache, if it has files of rows."""
    folder = local_folder(repo_id, "dataset")
    item = inventory.dataset_at(folder) if folder is not None else None
    return folder if item is not None and not item.refusal else None
