"""Looking on the Hub: searching for models and datasets, and what a repository holds. Nothing is downloaded here.

Every question has a time limit and is asked once: a window waits for it. (The library's own listing retries for some
twenty seconds when there is no network, and its requests have no limit.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from backend.models import support
from backend.models.hub_errors import in_words

RepoType = Literal["model", "dataset"]
PATIENCE_S = 6.0
"""How long the Hub may take to answer a question."""
MOST = 20
"""Results of one search, of each sort."""

WANTED = {
    "model": ("*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt",
              "*.jsonl", "*.jinja"),
    "dataset": ("*",),
}  # fmt: skip
"""What is downloaded of a repository; of a model what mlx-lm asks for (mlx_lm.utils.DEFAULT_ALLOW_PATTERNS)."""

_EXPAND = {
    "model": ("downloads", "lastModified", "gated", "tags", "safetensors", "config"),
    "dataset": ("downloads", "lastModified", "gated", "tags", "mainSize"),
}
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
"""Of one number in a safetensors file; every other type takes one byte."""


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """What downloading a repository means: the revision, and the files with their sizes in bytes."""

    repo_id: str
    repo_type: RepoType
    commit: str
    files: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.files.values())


def search(words: str, repo_type: RepoType) -> list[dict[str, Any]]:
    """What the Hub has for these words, the most downloaded first; among models those in MLX form come first.

    Each is {id, size, kind, precision, changed, downloads, gated, refusal}: bytes, unix seconds, None for the unknown.
    Raises Mistake.
    """
    filters = ("mlx", "") if repo_type == "model" else ("",)
    with in_words("", repo_type):
        pages = [_page(words, repo_type, filter_) for filter_ in filters]
    told = _told_model if repo_type == "model" else _told_dataset
    found = {one["id"]: told(one) for page in pages for one in page}
    return list(found.values())


def _page(words: str, repo_type: RepoType, filter_: str) -> list[dict[str, Any]]:
    asked: dict[str, Any] = {"search": words, "sort": "downloads", "limit": MOST, "expand": list(_EXPAND[repo_type])}
    if filter_:
        asked["filter"] = filter_
    elif repo_type == "model":
        asked["pipeline_tag"] = "text-generation"
    response = get_session().get(
        f"{constants.ENDPOINT}/api/{repo_type}s", params=asked, headers=build_hf_headers(), timeout=PATIENCE_S
    )
    hf_raise_for_status(response)
    return response.json()


def _told(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": one["id"], "size": None, "kind": "", "precision": "", "changed": _seconds(one.get("lastModified")),
        "downloads": one.get("downloads"), "gated": bool(one.get("gated")), "refusal": "",
    }  # fmt: skip


def _told_model(one: Mapping[str, Any]) -> dict[str, Any]:
    config, tags = one.get("config") or {}, one.get("tags") or []
    numbers = (one.get("safetensors") or {}).get("parameters") or {}
    told = _told(one) | {"kind": support.kind_of(config)}
    told["size"] = sum(count * _BYTES.get(type_, 1) for type_, count in numbers.items()) or None
    told["precision"] = support.precision_of(config) or _precision(numbers, tags)
    told["refusal"] = _refusal(config, tags)
    return told


def _refusal(config: Mapping[str, Any], tags: list[str]) -> str:
    """As far as a search tells: the names of the files are not in it."""
    if "safetensors" not in tags and "mlx" not in tags:
        return support.refusal(None, ["model.gguf"]) if "gguf" in tags else support.refusal(config or None, [])
    return support.refusal(config, ["model.safetensors", "tokenizer.json"]) if config.get("model_type") else ""


def _precision(numbers: Mapping[str, int], tags: list[str]) -> str:
    """By a tag such as 4-bit, else by the type that most numbers have."""
    tagged = next((tag for tag in tags if fnmatch(tag, "[2-8]-bit")), "")
    most = max(numbers, key=lambda name: numbers[name], default="")
    return tagged or {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(most, "")


def _told_dataset(one: Mapping[str, Any]) -> dict[str, Any]:
    rows = next((tag.partition(":")[2] for tag in one.get("tags") or [] if tag.startswith("size_categories:")), "")
    return _told(one) | {"size": one.get("mainSize"), "kind": f"{rows.replace('n', 'rows')}" if rows else ""}


def _seconds(moment: str | None) -> float | None:
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp() if moment else None


# ── one repository ───────────────────────────────────────────────────────────────────────────────────────────────────


def plan(repo_id: str, repo_type: RepoType) -> DownloadPlan:
    """What there is to download of a repository, at its newest revision. Raises Mistake."""
    with in_words(repo_id, repo_type):
        about = HfApi().repo_info(repo_id, repo_type=repo_type, files_metadata=True, timeout=PATIENCE_S)
    files = {one.rfilename: int(one.size or 0) for one in about.siblings or ()}
    wanted = {name: size for name, size in files.items() if any(fnmatch(name, like) for like in WANTED[repo_type])}
    wanted.pop(".gitattributes", None)
    return DownloadPlan(repo_id, repo_type, str(about.sha), wanted)


def reach(repo_id: str, repo_type: RepoType, setting: str = "") -> None:
    """Make sure within seconds that a repository can be had; a library that is asked for it would try for longer.
    Raises Mistake."""
    with in_words(repo_id, repo_type, setting):
        HfApi().repo_info(repo_id, repo_type=repo_type, timeout=PATIENCE_S)


def config_file(repo_id: str, setting: str = "model") -> Path:
    """A model's config.json: from the cache without asking anybody, else from the Hub. Raises Mistake."""
    cached = try_to_load_from_cache(repo_id, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    reach(repo_id, "model", setting)
    with in_words(repo_id, "model", setting):
        return Path(hf_hub_download(repo_id, "config.json", etag_timeout=PATIENCE_S))
