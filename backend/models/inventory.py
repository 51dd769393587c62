"""Models and datasets on this machine: Hugging Face cache, LM Studio, runs and folders. Opens no weights."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backend.config.model_and_data_names import DATA_SUFFIXES
from backend.models import architectures
from backend.models.architectures import model_type
from backend.models.model_folder import object_or_empty
from backend.runs.run_folder import all_runs
from backend.utils.files import possible_path, walk
from backend.utils.hub_cache import RepoType, hub_cache, snapshot_of
from backend.utils.places import demo_folder, lm_studio_models

Where = Literal["cache", "lmstudio", "run", "folder", "bundled"]
FileStats = dict[str, tuple[int, float]]  # file name → (bytes, modification time in unix seconds)
DATA_ENDINGS = (*DATA_SUFFIXES, ".jsonl.gz", ".json.gz", ".csv.gz", ".json.zst", ".jsonl.zst", ".arrow", ".tsv", ".txt")
"""Suffixes of dataset files."""


@dataclass(slots=True)
class InventoryItem:
    """A model or dataset. `id` is the setting's value; sizes in bytes, `changed` in unix seconds. `refusal`: reason why
    it is unusable; `remarks`: other messages; `partial`: bytes of an unfinished download."""

    id: str
    name: str
    where: Where
    place: str
    size: int = 0
    changed: float = 0.0
    kind: str = ""
    precision: str = ""
    refusal: str = ""
    remarks: list[str] = field(default_factory=list)
    partial: int = 0


def models(folders: Iterable[str] = ()) -> list[InventoryItem]:
    """All local models, newest first. `folders`: models or model folders chosen earlier."""
    found = _cached("model")
    for publisher in _folders(lm_studio_models()):
        in_folder = [folder for folder in _folders(publisher) if _files(folder)]
        found += [model_at(folder, f"{publisher.name}/{folder.name}", "lmstudio") for folder in in_folder]
    for run in all_runs():
        written = [folder for folder in (run.fused, run.model) if (folder / "config.json").is_file()]
        found += [model_at(folder, run.name, "run") for folder in written]
    items = {item.place: item for item in found}
    for folder in filter(Path.is_dir, filter(None, map(possible_path, folders))):
        is_model = (folder / "config.json").is_file()
        inside = [] if is_model else [child for child in _folders(folder) if _config(child) is not None]
        for child in inside or [folder]:
            items.setdefault(str(child), model_at(child))
    return sorted(items.values(), key=lambda item: -item.changed)


def reward_models(folders: Iterable[str] = ()) -> list[InventoryItem]:
    """The local models that classify sequences, as `models`."""
    found: list[InventoryItem] = []
    for item in models(folders):
        folder = Path(item.place)
        if architectures.is_classifier(_config(folder) or {}):
            item.refusal, item.remarks = _missing_shards(folder, _files(folder)), []  # the others are about training
            found.append(item)
    return found


def datasets(paths: Iterable[str] = ()) -> list[InventoryItem]:
    """All cached datasets and the existing `paths`, newest first."""
    named = map(dataset_at, filter(None, map(possible_path, dict.fromkeys(paths))))
    return sorted([*_cached("dataset"), *filter(None, named)], key=lambda item: -item.changed)


def bundled(repo_type: RepoType) -> InventoryItem:
    if repo_type == "model":
        item = model_at(demo_folder("model"), "Bundled demo/model", "bundled")
        item.remarks = ["It only adds two numbers: small enough to try everything out in a minute."]
        return item
    data = dataset_at(demo_folder("data"), "Bundled demo/data", "bundled")
    assert data is not None, "the demo's data is missing from this installation"
    return data


def model_at(folder: Path, name: str = "", where: Where = "folder", id_: str = "") -> InventoryItem:
    """The model in a folder, with a `refusal` if unusable."""
    files, config = _files(folder), _config(folder)
    default_name = folder.parent.name if folder.name in ("model", "fused") else folder.name
    item = InventoryItem(id_ or str(folder), name or default_name, where, str(folder))
    item.size = sum(size for size, _ in files.values())
    item.changed = max((t for _, t in files.values()), default=0.0)
    item.refusal = architectures.refusal(config, files) or _missing_shards(folder, files)
    item.kind, item.precision = model_type(config or {}), architectures.precision_of(config or {})
    if config is None or item.refusal:
        return item
    if config.get("vision_config"):
        item.remarks.append("It reads images.")
    is_beside = "chat_template.jinja" in files or "chat_template.json" in files
    if not is_beside and not object_or_empty(folder / "tokenizer_config.json").get("chat_template"):
        item.remarks.append("It has no chat template: prompts go in as plain text, as to a base model.")
    return item


def is_incomplete(snapshot: Path) -> bool:
    """True if only missing files make a cached model unusable."""
    files, config = _files(snapshot), _config(snapshot)
    if config is None or not (architectures.refusal(config, files) or _missing_shards(snapshot, files)):
        return False
    has_other_weights = any(name.endswith((".gguf", ".bin", ".pth", ".pt")) for name in files)
    return not has_other_weights and not architectures.refusal(config, [*files, "model.safetensors", "tokenizer.json"])


def _cached(repo_type: RepoType) -> list[InventoryItem]:
    """The repositories of the cache, but those of which only a description was fetched, by a search or a check."""
    found: list[InventoryItem] = []
    for repo in _folders(hub_cache()):
        if not repo.name.startswith(f"{repo_type}s--"):
            continue
        id_, snapshot = "/".join(repo.name.split("--")[1:]), snapshot_of(repo)
        partial = sum(size for name, (size, _) in _files(repo / "blobs").items() if name.endswith(".incomplete"))
        item = InventoryItem(id_, id_, "cache", str(repo), refusal="It is not here.")
        is_described = True
        if snapshot is not None:
            item = (model_at if repo_type == "model" else dataset_at)(snapshot, id_, "cache", id_) or item
            is_described = repo_type == "dataset" or set(_files(snapshot)) <= {"config.json", "README.md"}
        if partial and (repo_type == "dataset" or item.refusal):
            item.partial, item.refusal = partial, "Its download is unfinished: resume it."
            item.changed = item.changed or repo.stat().st_mtime
        if partial or not item.refusal or not is_described:
            found.append(item)
    return found


def _config(folder: Path) -> dict[str, Any] | None:
    return object_or_empty(folder / "config.json") or None


def _missing_shards(folder: Path, files: FileStats) -> str:
    weight_map = object_or_empty(folder / "model.safetensors.index.json").get("weight_map")
    named = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set[str]()
    missing = named - set(files)
    return f"{len(missing)} of its {len(named)} weight files are missing." if missing else ""


def dataset_at(path: Path, name: str = "", where: Where = "folder", id_: str = "") -> InventoryItem | None:
    """The dataset at a path, with a `refusal` if unusable; None if the path does not exist."""
    if path.is_file():
        files = {path.name: (path.stat().st_size, path.stat().st_mtime)}
    elif path.is_dir():
        files = _files(path, deep=True)
    else:
        return None
    data = {name: stats for name, stats in files.items() if name.endswith(DATA_ENDINGS)}
    item = InventoryItem(id_ or str(path), name or path.name, where, str(path))
    item.size = sum(size for size, _ in (data or files).values())
    item.changed = max((t for _, t in files.values()), default=0.0)
    bare = (name.removesuffix(".gz").removesuffix(".zst") for name in data)
    item.kind = ", ".join(sorted({name.rpartition(".")[2] for name in bare}))
    if not data:
        item.refusal = "It holds no rows: no jsonl, json, csv or parquet."
    return item


def _folders(parent: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in parent.iterdir() if not path.name.startswith(".") and path.is_dir())
    return []


def _files(folder: Path, *, deep: bool = False) -> FileStats:
    stats: FileStats = {}
    with suppress(OSError):
        for entry in walk(folder) if deep else os.scandir(folder):
            with suppress(OSError):  # a link to nothing, or deleted meanwhile
                if not entry.is_dir():
                    stats[os.path.relpath(entry.path, folder)] = (entry.stat().st_size, entry.stat().st_mtime)
    return stats
