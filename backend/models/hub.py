"""Search and download Hugging Face repositories, resuming, since huggingface_hub deletes partial files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub import try_to_load_from_cache as find_in_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, get_session, hf_raise_for_status

from backend.models import architectures
from backend.models.hub_client import SETTING, NotTheHubError, host, hub_errors
from backend.utils.disk import gigabytes, require_room
from backend.utils.errors import UserError
from backend.utils.file_lock import take
from backend.utils.hub_cache import RepoType, split_revision
from backend.utils.safetensors import BYTES

if TYPE_CHECKING:
    from backend.runs.start_progress import DownloadListener
    from backend.serve.questions import QuestionCall

TIMEOUT_S = 6.0
MAX_RESULTS = 20
DOWNLOADED = {
    "model": (
        *("*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt"),
        *("*.jsonl", "*.jinja", "README.md"),
    ),
    "dataset": ("*",),
}
"""File patterns to download; for models mlx-lm's (mlx_lm.utils.DEFAULT_ALLOW_PATTERNS) and the card, which names the
original of a converted model."""

_EXPAND = {
    "model": ("downloads", "lastModified", "gated", "tags", "safetensors", "config"),
    "dataset": ("downloads", "lastModified", "gated", "tags", "mainSize"),
}
_FILTERS: dict[str, list[dict[str, str]]] = {
    "model": [{"filter": "mlx"}, {"pipeline_tag": "text-generation"}],
    "dataset": [{}],
    "reward": [{"pipeline_tag": "text-classification"}],
}


def search(words: str, repo_type: RepoType, *, is_reward: bool = False) -> list[dict[str, Any]]:
    """Matching repositories, MLX models first, then by downloads; with `is_reward` models that classify. Each is {id,
    size, kind, precision, changed, downloads, gated, refusal}: bytes, unix seconds, None if unknown. Raises UserError.
    """
    found: dict[str, dict[str, Any]] = {}
    url, query = f"{constants.ENDPOINT}/api/{repo_type}s", {"search": words, "sort": "downloads", "limit": MAX_RESULTS}
    with hub_errors("", repo_type):
        for filter_ in _FILTERS["reward" if is_reward else repo_type]:
            params: Any = {**query, **filter_, "expand": list(_EXPAND[repo_type])}
            response = get_session().get(url, params=params, headers=build_hf_headers(), timeout=TIMEOUT_S)
            hf_raise_for_status(response)
            for repo in response.json():
                if not is_reward:
                    found[repo["id"]] = _search_result(repo, repo_type)
                elif architectures.is_classifier(repo.get("config") or {}):
                    found[repo["id"]] = _search_result(repo, repo_type) | {"refusal": ""}  # that is about training
    return list(found.values())


def _search_result(repo: Mapping[str, Any], repo_type: RepoType) -> dict[str, Any]:
    moment, tags = repo.get("lastModified"), repo.get("tags") or []
    result = {
        "id": str(repo["id"]),
        "size": None,
        "kind": "",
        "precision": "",
        "changed": datetime.fromisoformat(moment).timestamp() if moment else None,
        "downloads": repo.get("downloads") and int(repo["downloads"]),
        "gated": bool(repo.get("gated")),
        "refusal": "",
    }
    if repo_type == "dataset":
        rows = next((tag.partition(":")[2] for tag in tags if tag.startswith("size_categories:")), "")
        return result | {"size": repo.get("mainSize") and int(repo["mainSize"]), "kind": rows.replace("n", "rows")}
    config = repo.get("config") or {}
    counts = (repo.get("safetensors") or {}).get("parameters") or {}
    bits = next((tag for tag in tags if fnmatch(tag, "[2-8]-bit")), "")
    commonest = max(counts, key=lambda name: counts[name], default="")
    usual = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(commonest, "")
    # The files that the tags promise
    is_usable, is_gguf = "safetensors" in tags or "mlx" in tags, "gguf" in tags
    files = ["model.safetensors", "tokenizer.json"] * is_usable or ["model.gguf"] * is_gguf
    known = None if is_gguf and not is_usable else config or None
    return result | {
        "kind": architectures.model_type(config),
        "size": sum(count * BYTES.get(type_, 1) for type_, count in counts.items()) or None,
        "precision": architectures.precision_of(config) or bits or usual,
        "refusal": "" if is_usable and not config.get("model_type") else architectures.refusal(known, files),
    }


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """Revision to download, and its files with bytes and hashes."""

    repo_id: str
    repo_type: RepoType
    commit: str
    files: dict[str, int]
    hashes: dict[str, str]


def plan(repo_id: str, repo_type: RepoType) -> DownloadPlan:
    """Plan the download of the newest or the named revision. Raises UserError."""
    repo, revision = split_revision(repo_id)
    with hub_errors(repo_id, repo_type):
        info = HfApi().repo_info(repo, repo_type=repo_type, revision=revision, timeout=TIMEOUT_S, files_metadata=True)
        patterns = DOWNLOADED[repo_type]
        wanted = [
            file
            for file in info.siblings or ()
            if file.rfilename != ".gitattributes" and any(fnmatch(file.rfilename, pattern) for pattern in patterns)
        ]
        sizes = {file.rfilename: int(file.size or 0) for file in wanted}
        hashes = {file.rfilename: str(file.lfs.sha256 if file.lfs else file.blob_id) for file in wanted}
        return DownloadPlan(repo_id, repo_type, str(info.sha), sizes, hashes)


def is_newest(folder: Path, repo_id: str) -> bool:
    """True if this folder of the cache has all files of a model's newest or named revision, or nobody can say."""
    try:
        newest = plan(repo_id, "model")
    except UserError:
        return True
    return newest.commit == folder.name and all((folder / name).exists() for name in newest.files)


def check_reachable(repo_id: str, repo_type: RepoType, setting: str = "") -> None:
    """Raise UserError within seconds if a repository is unreachable."""
    with hub_errors(repo_id, repo_type, setting):
        repo, revision = split_revision(repo_id)
        HfApi().repo_info(repo, repo_type=repo_type, revision=revision, timeout=TIMEOUT_S)


def config_file(repo_id: str, setting: str = "model") -> Path:
    """A model's config.json, from the cache or the Hub. Raises UserError."""
    repo, revision = split_revision(repo_id)
    cached = find_in_cache(repo, "config.json", revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    check_reachable(repo_id, "model", setting)
    with hub_errors(repo_id, "model", setting):
        return Path(hf_hub_download(repo, "config.json", revision=revision, etag_timeout=TIMEOUT_S))


PARALLEL = 4  # files at a time
SPARE = 64 << 20  # bytes to leave free on the disk
RETRIES, RETRY_S = 3, 0.5  # without a new byte, and seconds before the first; each waits twice as long
READ_TIMEOUT_S = 20.0  # without data, after which a connection counts as broken
LOCK_TIMEOUT_S = 3.0  # to wait for another download of the same file
PROGRESS_S = 0.2  # least seconds between progress reports


def download(
    repo_id: str,
    repo_type: RepoType,
    listener: QuestionCall | DownloadListener,
    *,
    setting: str = "",
    waits: bool = False,
) -> Path:
    """Download a repository into the cache; returns its snapshot folder. Progress: {done, total, phase}, in bytes. A
    download that `listener` cancels resumes later; only complete files get their final names. `waits` for another
    download of the same files. Raises UserError."""
    disable_progress_bars()
    listener.report({"done": 0, "total": None, "phase": "asking"})
    with hub_errors(repo_id, repo_type, setting):
        return _Download(plan(repo_id, repo_type), listener, setting, waits).run()


def discard(repo_id: str, repo_type: RepoType) -> int:
    """Delete partial files and a then empty repository folder; returns the bytes freed."""
    blobs, freed = _blobs(repo_id, repo_type), 0
    for partial in blobs.glob("*.incomplete"):
        with contextlib.suppress(UserError), _locked(partial, repo_id, repo_type):  # another process writes it
            freed += _size(partial)
            partial.unlink()
    if not any(path.is_file() for path in blobs.parent.rglob("*")):
        shutil.rmtree(blobs.parent, ignore_errors=True)
    return freed


class _StoppedError(BaseException):  # as Cancelled
    """Another file's download failed."""


class _Download:
    def __init__(
        self, plan: DownloadPlan, listener: QuestionCall | DownloadListener, setting: str, waits: bool
    ) -> None:
        self.plan, self.listener, self.waits = plan, listener, waits
        self.setting = setting or SETTING[plan.repo_type]
        self.blobs = _blobs(plan.repo_id, plan.repo_type)
        self._failed, self._reported = threading.Event(), 0.0
        # Smallest first. Files of equal content are one blob.
        self._names = {plan.hashes[name]: name for name in sorted(plan.files, key=plan.files.__getitem__)}
        self._total = sum(plan.files[name] for name in self._names.values())
        self._arrived = {
            hash_: _size(self.blobs / hash_) or _size(_partial(self.blobs / hash_)) for hash_ in self._names
        }

    def run(self) -> Path:
        self.blobs.mkdir(parents=True, exist_ok=True)
        self._report("downloading", now=True)
        if missing := self._total - sum(self._arrived.values()):
            require_room(self.blobs, missing + SPARE, self.plan.repo_id)
        # Leaving the `with` waits for every thread; after a failure the others end at their next `_check`.
        try:
            with ThreadPoolExecutor(PARALLEL, thread_name_prefix="download") as pool:
                futures = [pool.submit(self._fetch, name, hash_) for hash_, name in self._names.items()]
        except BaseException:  # a signal's, in this thread alone
            self._failed.set()
            raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, _StoppedError)), errors[0])
        self._report("linking", now=True)
        repo, revision = split_revision(self.plan.repo_id)
        about = {"repo_type": self.plan.repo_type, "revision": revision, "allow_patterns": list(self.plan.files)}
        return Path(snapshot_download(repo, etag_timeout=TIMEOUT_S, **about))

    def _fetch(self, name: str, hash_: str) -> None:
        """Download one file into its partial file, from its end on, and give it its name once its hash is right."""
        blob, size = self.blobs / hash_, self.plan.files[name]
        try:
            self._check()
            if blob.exists():
                return
            sleep = self.listener.sleep if self.waits else None
            with _locked(_partial(blob), self.plan.repo_id, self.plan.repo_type, sleep) as file:
                if blob.exists():  # another process has downloaded it meanwhile
                    return
                tries = 0
                while (offset := file.tell()) < size:
                    broken: HTTPError | None = None
                    try:
                        self._stream(name, hash_, file)
                    except HTTPError as error:
                        # 4xx (gated, deleted, bad token) stays the same on a retry.
                        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
                            raise
                        broken = error
                    tries = 0 if file.tell() > offset else tries + 1
                    if tries > RETRIES:
                        done = f"{gigabytes(sum(self._arrived.values()))} of {gigabytes(self._total)}"
                        broke = f"The connection to {host()} broke off at {done}"
                        kept = "what has arrived is kept, so resume when it is back"
                        raise UserError(self.setting, f"{broke}; {kept}.") from broken
                    if file.tell() < size:
                        self.listener.sleep(RETRY_S * 2**tries)
                file.flush()
                self._report("checking", now=True)
                if hash_of(Path(file.name), hash_) != hash_:
                    _partial(blob).unlink()
                    damaged = f"{name} of {self.plan.repo_id} arrived damaged and was thrown away"
                    raise UserError(self.setting, f"{damaged}; download it again.")
                os.fsync(file.fileno())
                _partial(blob).replace(blob)
        except BaseException:
            self._failed.set()
            raise

    def _check(self) -> None:
        self.listener.check()
        if self._failed.is_set():
            raise _StoppedError

    def _stream(self, name: str, hash_: str, file: BinaryIO) -> None:
        plan = self.plan
        url = hf_hub_url(split_revision(plan.repo_id)[0], name, repo_type=plan.repo_type, revision=plan.commit)
        # identity: a range counts bytes as they are sent, so a compressed answer could not be appended.
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={file.tell()}-"}
        with get_session().stream("GET", url, headers=headers, timeout=READ_TIMEOUT_S) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:  # the server ignores ranges
                file.seek(0)
                file.truncate()
            for chunk in response.iter_raw():
                self._check()
                if file.tell() + len(chunk) > plan.files[name]:
                    file.seek(0)
                    file.truncate()
                    raise NotTheHubError(f"{name} does not end")
                file.write(chunk)
                self._arrived[hash_] = file.tell()
                self._report("downloading")

    def _report(self, phase: str, *, now: bool = False) -> None:
        moment = time.monotonic()
        if not now and moment - self._reported < PROGRESS_S:
            return
        self._reported = moment
        self.listener.report({"done": sum(self._arrived.values()), "total": self._total, "phase": phase})


def hash_of(file: Path, like: str) -> str:
    """The SHA-256 of a file's content, or git's hash of it, whichever is as long as `like`."""
    prefix = b"blob %d\0" % file.stat().st_size
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256" if len(like) == 64 else lambda: hashlib.sha1(prefix)).hexdigest()


@contextlib.contextmanager
def _locked(
    path: Path, repo_id: str, repo_type: str, wait: Callable[[float], None] | None = None
) -> Iterator[BinaryIO]:
    # flock, not a lock file: the kernel releases it with the process. "ab" never truncates another process's file.
    with path.open("ab") as file:
        until = time.monotonic() + LOCK_TIMEOUT_S
        while not take(file.fileno()):
            if wait is None and time.monotonic() > until:
                busy = f"{repo_id} is being downloaded already, by another process or window."
                raise UserError(SETTING[repo_type], busy)
            (wait or time.sleep)(0.05)
        file.seek(0, os.SEEK_END)
        yield file


def _blobs(repo_id: str, repo_type: str) -> Path:
    # By the library's own constant: it must be where `snapshot_download` looks for blobs.
    repo = split_revision(repo_id)[0]
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type=repo_type), "blobs")


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
