"""The rows of a run for its export: a dataset of Hugging Face by its name, the rows of local files as JSON lines in `source/`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from backend.data.files import kind_of_path
from backend.data.rows import (
    found_evaluation_set,
    names_by_split,
    names_elsewhere,
    names_of_evaluation_set,
    own_splits,
    split_elsewhere,
    splits_elsewhere,
)
from backend.data.sources import Found, Reading
from backend.spec.config import Config
from backend.spec.row_settings import evaluation_sets
from backend.spec.user_input.paths import user_path

SOURCE = "source"
Told = Callable[[str], None]


def write_rows(config: Config, folder: Path, tell: Told) -> tuple[dict[str, Any], dict[str, Any]]:
    """(where dataset.py finds the rows of each split, and those of each evaluation set with its settings). Local rows are written below
    `folder`. Raises Mistake for rows that cannot be read."""
    return _splits(config, folder, tell), {
        name: {"settings": _portable(about), "rows": _set(name, about, folder, tell)}
        for name, about in evaluation_sets(config.eval_data).items()
    }


def _portable(about: dict[str, Any]) -> dict[str, Any]:
    """The settings of an evaluation set without its path on this machine."""
    return {key: value for key, value in about.items() if key != "data"}


def _splits(config: Config, folder: Path, tell: Told) -> dict[str, Any]:
    reading, elsewhere = Reading(streamed=config.streaming), splits_elsewhere(config)
    if is_local(config.data):
        rows = {split: _copied(found, split, folder, tell) for split, found in own_splits(config, reading).items()}
    else:
        rows = {
            split: _on_hub(
                config.data, config.dataset_config, names, split == "train" or names == (_name_of(config, split),)
            )
            for split, names in names_by_split(config).items()
        }
    for split, name in elsewhere.items():
        if is_local(name):
            rows[split] = _copied(split_elsewhere(config, split, reading), split, folder, tell)
        else:
            of_same = config.dataset_config if name == config.data else ""
            rows[split] = _on_hub(name, of_same, names_elsewhere(config, split), True)
    return rows


def _name_of(config: Config, split: str) -> str:
    return getattr(config, f"{split}_split")


def _set(name: str, about: dict[str, Any], folder: Path, tell: Told) -> dict[str, Any]:
    if is_local(str(about["data"])):
        return _copied(found_evaluation_set(about, Reading()), f"set_{name}", folder, tell)
    return _on_hub(about["data"], about.get("dataset_config", ""), names_of_evaluation_set(about), True)


def is_local(name: str) -> bool:
    """Whether a dataset is a file or a folder here, and no id."""
    return kind_of_path(user_path(name, "data")) != ""


def _on_hub(repo: str, configuration: str, names: Iterable[str], is_needed: bool) -> dict[str, Any]:
    return {"repo": repo, "config": configuration, "names": list(names), "is_needed": is_needed, "source": repo}


def _copied(found: Found, name: str, folder: Path, tell: Told) -> dict[str, Any]:
    """Write the rows as JSON lines. What JSON has not becomes text, as in everything that leaves the process of a user's code."""
    file = folder / SOURCE / f"{name}.jsonl"
    tell(f"Copying the rows of {Path(found.source).name}.")
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        for row in found.rows:
            out.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return {"file": f"{SOURCE}/{name}.jsonl", "source": Path(found.source).name}
