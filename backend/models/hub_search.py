"""Requests to the Hub: search for models and datasets, and list a repository's files. Downloads at most a config.json.

Every request has a timeout and is sent once, because a window waits for it. (huggingface_hub's own listing retries for some twenty
seconds when there is no network, and its requests have no timeout.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from backend.models import supported_architectures
from backend.models.hub_errors import hub_errors_as_mistakes
from backend.models.model_config import model_type
from backend.utils.hub_cache import RepoType

TIMEOUT_S = 6.0
"""Time limit of one request."""
MAX_RESULTS = 20
"""Results of one page of a search."""

DOWNLOADED = {
    "model": ("*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt",
              "*.jsonl", "*.jinja"),
    "dataset": ("*",),
}  # fmt: skip
"""Patterns of the files that are downloaded; for a model those of mlx-lm (mlx_lm.utils.DEFAULT_ALLOW_PATTERNS)."""

_EXPAND = {
    "model": ("downloads", "lastModified", "gated", "tags", "safetensors", "config"),
    "dataset": ("downloads", "lastModified", "gated", "tags", "mainSize"),
}
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
"""Bytes of one number in a safetensors file by type; 1 for every other type."""


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """The content of a download: the revision, and the files with their sizes in bytes."""

    repo_id: str
    repo_type: RepoType
    commit: str
    files: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.files.values())


def search(words: str, repo_type: RepoType) -> list[dict[str, Any]]:
    """Repositories that match, the most downloaded first; models in MLX form come before others.

    Each is {id, size, kind, precision, changed, downloads, gated, refusal}: bytes, unix seconds, None for the unknown.
    Raises UserError.
    """
    filters = ("mlx", "") if repo_type == "model" else ("",)
    with hub_errors_as_mistakes("", repo_type):
        pages = [_page(words, repo_type, filter_) for filter_ in filters]
    result = _model_result if repo_type == "model" else _dataset_result
    return list({repo["id"]: result(repo) for page in pages for repo in page}.values())


def _page(words: str, repo_type: RepoType, filter_: str) -> list[dict[str, Any]]:
    query: dict[str, Any] = {
        "search": words,
        "sort": "downloads",
        "limit": MAX_RESULTS,
        "expand": list(_EXPAND[repo_type]),
    }
    if filter_:
        query["filter"] = filter_
    elif repo_type == "model":
        query["pipeline_tag"] = "text-generation"
    response = get_session().get(
        f"{constants.ENDPOINT}/api/{repo_type}s", params=query, headers=build_hf_headers(), timeout=TIMEOUT_S
    )
    hf_raise_for_status(response)
    return response.json()


def _result(repo: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": repo["id"], "size": None, "kind": "", "precision": "", "changed": _seconds(repo.get("lastModified")),
        "downloads": repo.get("downloads"), "gated": bool(repo.get("gated")), "refusal": "",
    }  # fmt: skip


def _model_result(repo: Mapping[str, Any]) -> dict[str, Any]:
    config, tags = repo.get("config") or {}, repo.get("tags") or []
    counts = (repo.get("safetensors") or {}).get("parameters") or {}
    return _result(repo) | {
        "kind": model_type(config),
        "size": sum(count * _BYTES.get(type_, 1) for type_, count in counts.items()) or None,
        "precision": supported_architectures.precision_of(config) or _precision(counts, tags),
        "refusal": _refusal(config, tags),
    }


def _refusal(config: Mapping[str, Any], tags: list[str]) -> str:
    """Why the model cannot be used, as far as a search result shows: it does not list the files."""
    if "safetensors" not in tags and "mlx" not in tags:
        return (
            supported_architectures.refusal(None, ["model.gguf"])
            if "gguf" in tags
            else supported_architectures.refusal(config or None, [])
        )
    return (
        supported_architectures.refusal(config, ["model.safetensors", "tokenizer.json"])
        if config.get("model_type")
        else ""
    )


def _precision(counts: Mapping[str, int], tags: list[str]) -> str:
    """From a tag such as 4-bit, else the type that most numbers have."""
    tagged = next((tag for tag in tags if fnmatch(tag, "[2-8]-bit")), "")
    most = max(counts, key=lambda name: counts[name], default="")
    return tagged or {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(most, "")


def _dataset_result(repo: Mapping[str, Any]) -> dict[str, Any]:
    rows = next((tag.partition(":")[2] for tag in repo.get("tags") or [] if tag.startswith("size_categories:")), "")
    return _result(repo) | {"size": repo.get("mainSize"), "kind": f"{rows.replace('n', 'rows')}" if rows else ""}


def _seconds(moment: str | None) -> float | None:
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp() if moment else None


# ── one repository ───────────────────────────────────────────────────────────────────────────────────────────────────


def plan(repo_id: str, repo_type: RepoType) -> DownloadPlan:
    """The plan of a download of a repository at its newest revision. Raises UserError."""
    with hub_errors_as_mistakes(repo_id, repo_type):
        info = HfApi().repo_info(repo_id, repo_type=repo_type, files_metadata=True, timeout=TIMEOUT_S)
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
    patterns = DOWNLOADED[repo_type]
    files = {name: size for name, size in sizes.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    files.pop(".gitattributes", None)
    return DownloadPlan(repo_id, repo_type, str(info.sha), files)


def check_reachable(repo_id: str, repo_type: RepoType, setting: str = "") -> None:
    """Raise UserError within seconds where a repository cannot be fetched; the libraries that fetch it try for longer."""
    with hub_errors_as_mistakes(repo_id, repo_type, setting):
        HfApi().repo_info(repo_id, repo_type=repo_type, timeout=TIMEOUT_S)


def config_file(repo_id: str, setting: str = "model") -> Path:
    """A model's config.json: from the cache without a request, else from the Hub. Raises UserError."""
    cached = try_to_load_from_cache(repo_id, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    check_reachable(repo_id, "model", setting)
    with hub_errors_as_mistakes(repo_id, "model", setting):
        return Path(hf_hub_download(repo_id, "config.json", etag_timeout=TIMEOUT_S))
