"""Models and datasets on this machine: Hugging Face cache, LM Studio, runs and folders. Opens no weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from backend.config.model_and_data_names import DATA_SUFFIXES
from backend.models import architectures
from backend.models.architectures import model_type
from backend.models.model_folder import read_object
from backend.runs.run_folder import all_runs
from backend.utils.errors import UserError
from backend.utils.files import possible_path, read_bytes
from backend.utils.hub_cache import RepoType, hub_cache, snapshot_of
from backend.utils.places import demo_folder, lm_studio_models

Where = Literal["cache", "lmstudio", "run", "folder", "bundled"]
FileStats = dict[str, tuple[int, float]]
"""File name → (bytes, modification time in unix seconds)."""
DATA_ENDINGS = (*DATA_SUFFIXES, ".jsonl.gz", ".json.gz", ".csv.gz", ".json.zst", ".jsonl.zst", ".arrow", ".tsv", ".txt")
"""Suffixes of dataset files."""


@dataclass(slots=True)
class InventoryItem:
    """A model or dataset. `id` is the setting's value; sizes in bytes, `changed` in unix seconds.

    `refusal`: reason why it is unusable; `remarks`: other messages; `partial`: bytes of an unfinished download.
    """

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def models(folders: Iterable[str] = ()) -> list[InventoryItem]:
    """All local models, newest first. `folders`: models or model folders chosen earlier."""
    items = {item.place: item for item in (*_cached_models(), *_lm_studio_models(), *_run_models())}
    for folder in filter(None, map(possible_path, folders)):
        for item in _plain_models(folder):
            items.setdefault(item.place, item)
    return sorted(items.values(), key=lambda item: -item.changed)


def datasets(paths: Iterable[str] = ()) -> list[InventoryItem]:
    """All cached datasets and the existing `paths`, newest first."""
    items = [_cached_dataset(repo) for repo in _repos("dataset")]
    items += [dataset_at(path) for path in filter(None, map(possible_path, dict.fromkeys(paths)))]
    return sorted((item for item in items if item is not None), key=lambda item: -item.changed)


def bundled(repo_type: RepoType) -> InventoryItem:
    """The bundled model or dataset of the demo."""
    if repo_type == "model":
        item = model_at(demo_folder("model"), "Bundled demo/model", "bundled")
        item.remarks = ["It only adds two numbers: small enough to try everything out in a minute."]
        return item
    data = dataset_at(demo_folder("data"), "Bundled demo/data", "bundled")
    assert data is not None, "the demo's data is missing from this installation"
    return data


def model_at(folder: Path, name: str = "", where: Where = "folder", id_: str = "") -> InventoryItem:
    """The model in a folder, with a `refusal` if unusable."""
    files = _files(folder)
    config = _config(folder)
    default_name = folder.parent.name if folder.name in ("model", "fused") else folder.name
    item = InventoryItem(id_ or str(folder), name or default_name, where, str(folder))
    item.size = sum(size for size, _ in files.values())
    item.changed = max((t for _, t in files.values()), default=0.0)
    item.refusal = architectures.refusal(config, files) or _missing_shards(folder, files)
    if config is not None:
        item.kind, item.precision = model_type(config), architectures.precision_of(config)
    if not item.refusal and not _has_chat_template(folder, files):
        item.remarks.append("It has no chat template: prompts go in as plain text, as to a base model.")
    return item


def is_incomplete(snapshot: Path) -> bool:
    """True if only missing files make a cached model unusable."""
    files, config = _files(snapshot), _config(snapshot)
    if config is None or not (architectures.refusal(config, files) or _missing_shards(snapshot, files)):
        return False
    has_other_weights = any(name.endswith((".gguf", ".bin", ".pth", ".pt")) for name in files)
    return not has_other_weights and not architectures.refusal(config, [*files, "model.safetensors", "tokenizer.json"])


def _cached_models() -> Iterator[InventoryItem]:
    for repo in _repos("model"):
        id_, partial = _repo_id(repo), _partial_bytes(repo)
        snapshot = snapshot_of(repo)
        if snapshot is None and not partial:
            continue
        item = model_at(snapshot, id_, "cache", id_) if snapshot else InventoryItem(id_, id_, "cache", str(repo))
        if snapshot is not None and item.refusal and set(_files(snapshot)) <= {"config.json", "README.md"}:
            continue  # only its description was fetched, by a search or a check
        if partial and (snapshot is None or item.refusal):
            item.partial = partial
            item.changed = item.changed or repo.stat().st_mtime
            item.refusal = "Its download is unfinished: resume it."
        yield item


def _lm_studio_models() -> Iterator[InventoryItem]:
    root = lm_studio_models()
    for publisher in _folders(root):
        for folder in _folders(publisher):
            if _files(folder):
                yield model_at(folder, f"{publisher.name}/{folder.name}", "lmstudio")


def _run_models() -> Iterator[InventoryItem]:
    for run in all_runs():
        for folder in (run.fused, run.model):
            if (folder / "config.json").is_file():
                yield model_at(folder, run.name, "run")


def _plain_models(folder: Path) -> Iterator[InventoryItem]:
    if not folder.is_dir():
        return
    is_model = (folder / "config.json").is_file()
    inside = [] if is_model else [child for child in _folders(folder) if _config(child) is not None]
    yield from (model_at(child) for child in inside or [folder])


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        return read_object(folder / "config.json", "model")
    except UserError:
        return None


def _missing_shards(folder: Path, files: FileStats) -> str:
    try:
        named = read_object(folder / "model.safetensors.index.json", "model")["weight_map"]
        named = {str(name) for name in named.values()}
    except (UserError, KeyError, AttributeError):
        return ""
    missing = named - set(files)
    return f"{len(missing)} of its {len(named)} weight files are missing." if missing else ""


def _has_chat_template(folder: Path, files: FileStats) -> bool:
    if "chat_template.jinja" in files or "chat_template.json" in files:
        return True
    try:
        return b'"chat_template"' in read_bytes(folder / "tokenizer_config.json", "model")
    except UserError:
        return False


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
    item.kind = ", ".join(sorted({_format(name) for name in data}))
    if not data:
        item.refusal = "It holds no rows: no jsonl, json, csv or parquet."
    return item


def _cached_dataset(repo: Path) -> InventoryItem | None:
    id_, partial, snapshot = _repo_id(repo), _partial_bytes(repo), snapshot_of(repo)
    if snapshot is None and not partial:
        return None
    item = dataset_at(snapshot, id_, "cache", id_) if snapshot else InventoryItem(id_, id_, "cache", str(repo))
    if item is not None and partial:
        item.partial, item.refusal = partial, "Its download is unfinished: resume it."
    elif item is not None and item.refusal:
        return None  # only its description was fetched
    return item


def _format(name: str) -> str:
    suffixes = Path(name).suffixes
    is_compressed = len(suffixes) > 1 and suffixes[-1] in (".gz", ".zst")
    return suffixes[-2 if is_compressed else -1].lstrip(".")


def _repos(repo_type: RepoType) -> Iterator[Path]:
    yield from (folder for folder in _folders(hub_cache()) if folder.name.startswith(f"{repo_type}s--"))


def _repo_id(repo: Path) -> str:
    return "/".join(repo.name.split("--")[1:])


def _partial_bytes(repo: Path) -> int:
    try:
        with os.scandir(repo / "blobs") as entries:
            return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".incomplete"))
    except OSError:
        return 0


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return sorted(Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return []


def _files(folder: Path, *, deep: bool = False) -> FileStats:
    stats: FileStats = {}
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return stats
    for entry in entries:
        try:
            if not entry.is_dir():
                stats[entry.name] = (entry.stat().st_size, entry.stat().st_mtime)
            elif deep and not entry.name.startswith("."):
                below = _files(Path(entry.path), deep=True)
                stats |= {f"{entry.name}/{name}": file_stats for name, file_stats in below.items()}
        except OSError:
            continue
    return stats
