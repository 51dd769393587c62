"""Models and datasets that are on this machine: in the Hugging Face cache, in LM Studio's folder, in runs and in plain
folders. Names, sizes, dates and config.json are looked at; weights are neither read nor hashed, and nobody is asked over
the network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from backend.models import support
from backend.spec.model_and_data_names import DATA_SUFFIXES
from backend.spec.places import all_runs, lm_studio_models, snapshot_of

Where = Literal["cache", "lmstudio", "run", "folder"]
PREFIX = {"model": "models--", "dataset": "datasets--"}
"""How the Hugging Face cache names the folder of a repository."""
DATA_ENDINGS = (*DATA_SUFFIXES, ".jsonl.gz", ".json.gz", ".csv.gz", ".json.zst", ".jsonl.zst", ".arrow", ".tsv", ".txt")
"""What `datasets` reads from a repository, and what a folder of ours may hold."""


@dataclass(slots=True)
class InventoryItem:
    """One model or dataset. `id` is what the form takes; sizes in bytes, `changed` in unix seconds.

    `refusal` says why it cannot be used; `remarks` are worth knowing and do not hinder; `partial` counts the bytes of a
    download that has not finished.
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
    """Every model there is, newest first. `folders` are places that a person used before; those that are gone are left
    out, and a folder of models gives each of them."""
    found = {one.place: one for one in (*_cached_models(), *_lm_studio_models(), *_run_models())}
    for folder in folders:
        for one in _plain_models(Path(folder).expanduser()):
            found.setdefault(one.place, one)
    return sorted(found.values(), key=lambda one: -one.changed)


def datasets(paths: Iterable[str] = ()) -> list[InventoryItem]:
    """Every dataset in the Hugging Face cache, and those of `paths` (files and folders) that are there; newest first."""
    every = [_cached_dataset(repo) for repo in _repos("dataset")]
    every += [dataset_at(Path(path).expanduser()) for path in dict.fromkeys(paths)]
    return sorted((one for one in every if one is not None), key=lambda one: -one.changed)


def may_be_here(repo_id: str) -> bool:
    """Whether anything of a dataset was fetched before: by a download, or by `datasets`, which keeps owner/MyData as
    owner___my_data."""
    from huggingface_hub import constants

    if (cache_folder() / f"datasets--{repo_id.replace('/', '--')}" / "snapshots").is_dir():
        return True
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    wanted = repo_id.replace("/", "___").replace("_", "").lower()
    return any(one.name.replace("_", "").lower() == wanted for one in _folders(prepared))


def cache_folder() -> Path:
    """Hugging Face's cache, as its own library finds it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def folder_of(name: str, repo_type: Literal["model", "dataset"] = "model") -> Path | None:
    """Where the files of a model or dataset are: its own folder, or the snapshot of an id in the cache; None where it is
    not on this machine."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    return snapshot_of(cache_folder() / (PREFIX[repo_type] + name.replace("/", "--")))


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def model_at(folder: Path, name: str = "", where: Where = "folder", id_: str = "") -> InventoryItem:
    """What a folder with a model in it is."""
    files = _files(folder)
    config = _config(folder)
    called = folder.parent.name if folder.name in ("model", "fused") else folder.name
    found = InventoryItem(id_ or str(folder), name or called, where, str(folder))
    found.size = sum(size for size, _ in files.values())
    found.changed = max((t for _, t in files.values()), default=0.0)
    found.refusal = support.refusal(config, files) or _missing_shards(folder, files)
    if config is not None:
        found.kind, found.precision = support.kind_of(config), support.precision_of(config)
    if not found.refusal and not _has_chat_template(folder, files):
        found.remarks.append("It has no chat template: prompts go in as plain text, as to a base model.")
    return found


def is_begun(snapshot: Path) -> bool:
    """Whether nothing is wrong with a model in the cache but that files of it were not fetched yet: somebody looked at its
    config.json, or a download broke off."""
    files, config = _files(snapshot), _config(snapshot)
    if config is None or not (support.refusal(config, files) or _missing_shards(snapshot, files)):
        return False
    others = any(name.endswith((".gguf", ".bin", ".pth", ".pt")) for name in files)
    return not others and not support.refusal(config, [*files, "model.safetensors", "tokenizer.json"])


def _cached_models() -> Iterator[InventoryItem]:
    for repo in _repos("model"):
        id_, partial = _id(repo), _unfinished(repo)
        snapshot = snapshot_of(repo)
        if snapshot is None and not partial:
            continue
        found = model_at(snapshot, id_, "cache", id_) if snapshot else InventoryItem(id_, id_, "cache", str(repo))
        if snapshot is not None and found.refusal and set(_files(snapshot)) <= {"config.json", "README.md"}:
            continue  # somebody only looked: there is nothing of the model but its description
        if partial and (snapshot is None or found.refusal):
            found.partial = partial
            found.changed = found.changed or repo.stat().st_mtime
            found.refusal = "Its download is unfinished: resume it."
        yield found


def _lm_studio_models() -> Iterator[InventoryItem]:
    """LM Studio keeps <publisher>/<model>/files."""
    root = lm_studio_models()
    for publisher in _folders(root):
        for folder in _folders(publisher):
            if _files(folder):
                yield model_at(folder, f"{publisher.name}/{folder.name}", "lmstudio")


def _run_models() -> Iterator[InventoryItem]:
    """What earlier runs made whole: a fused model, or one that was fine-tuned in full."""
    for run in all_runs():
        for folder in (run.fused, run.model):
            if (folder / "config.json").is_file():
                yield model_at(folder, run.name, "run")


def _plain_models(folder: Path) -> Iterator[InventoryItem]:
    if not folder.is_dir():
        return
    inside = [] if (folder / "config.json").is_file() else [one for one in _folders(folder) if _config(one) is not None]
    yield from (model_at(one) for one in inside or [folder])


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _missing_shards(folder: Path, files: dict[str, Any]) -> str:
    """Weights that the index names and the folder lacks: a download that broke off, or a copy that was not finished."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        wanted = {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return ""
    missing = wanted - set(files)
    return f"{len(missing)} of its {len(wanted)} weight files are missing." if missing else ""


def _has_chat_template(folder: Path, files: dict[str, Any]) -> bool:
    if "chat_template.jinja" in files or "chat_template.json" in files:
        return True
    try:
        return b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes()
    except OSError:
        return False


# ── datasets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def dataset_at(path: Path, name: str = "", where: Where = "folder", id_: str = "") -> InventoryItem | None:
    """What a file or a folder with rows in it is; None where there is neither."""
    if path.is_file():
        files = {path.name: (path.stat().st_size, path.stat().st_mtime)}
    elif path.is_dir():
        files = _files(path, deep=True)
    else:
        return None
    data = {name: about for name, about in files.items() if name.endswith(DATA_ENDINGS)}
    found = InventoryItem(id_ or str(path), name or path.name, where, str(path))
    found.size = sum(size for size, _ in (data or files).values())
    found.changed = max((t for _, t in files.values()), default=0.0)
    found.kind = ", ".join(sorted({_ending(name) for name in data}))
    if not data:
        found.refusal = "It holds no rows: no jsonl, json, csv or parquet."
    return found


def _cached_dataset(repo: Path) -> InventoryItem | None:
    id_, partial, snapshot = _id(repo), _unfinished(repo), snapshot_of(repo)
    if snapshot is None and not partial:
        return None
    found = dataset_at(snapshot, id_, "cache", id_) if snapshot else InventoryItem(id_, id_, "cache", str(repo))
    if found is not None and partial:
        found.partial, found.refusal = partial, "Its download is unfinished: resume it."
    elif found is not None and found.refusal:
        return None  # only its description was looked at
    return found


def _ending(name: str) -> str:
    parts = Path(name).suffixes
    return (parts[-2] if len(parts) > 1 and parts[-1] in (".gz", ".zst") else parts[-1]).lstrip(".")


# ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _repos(repo_type: Literal["model", "dataset"]) -> Iterator[Path]:
    yield from (one for one in _folders(cache_folder()) if one.name.startswith(PREFIX[repo_type]))


def _id(repo: Path) -> str:
    return "/".join(repo.name.split("--")[1:])


def _unfinished(repo: Path) -> int:
    """Bytes of downloads that broke off."""
    try:
        with os.scandir(repo / "blobs") as entries:
            return sum(one.stat().st_size for one in entries if one.name.endswith(".incomplete"))
    except OSError:
        return 0


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return sorted(Path(one.path) for one in entries if not one.name.startswith(".") and one.is_dir())
    except OSError:
        return []


def _files(folder: Path, *, deep: bool = False) -> dict[str, tuple[int, float]]:
    """Name → (bytes, unix seconds) of the files in a folder; a link counts as what it leads to, a broken one not at all."""
    found: dict[str, tuple[int, float]] = {}
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return found
    for entry in entries:
        try:
            if not entry.is_dir():
                about = entry.stat()
                found[entry.name] = (about.st_size, about.st_mtime)
            elif deep and not entry.name.startswith("."):
                found |= {f"{entry.name}/{name}": one for name, one in _files(Path(entry.path), deep=True).items()}
        except OSError:
            continue
    return found
