"""Resumable downloads of a repository into Hugging Face's cache.

huggingface_hub 2 discards a partial file when a download ends early. So the bytes are fetched here: each file grows in
blobs/<etag>.incomplete by HTTP range requests and is renamed to blobs/<etag> once it is complete and its checksum is right. The
library then links the blobs that it finds there into a snapshot: file names, links and references are left to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, get_session, hf_raise_for_status

from backend.models import hub_search
from backend.models.hub_errors import SETTING, host, hub_errors_as_mistakes
from backend.utils.errors import UserError
from backend.utils.hub_cache import RepoType

PARALLEL = 4
"""Files that are fetched at the same time."""
SPARE = 64 << 20
"""Bytes that a disk must keep free beside the download."""
RETRIES_S = (0.5, 2.0, 4.0)
"""Waits before a broken connection is tried again; the count restarts when bytes arrive."""
READ_TIMEOUT_S = 20.0
"""Time without a byte after which a connection counts as broken."""
LOCK_TIMEOUT_S = 3.0
"""How long another download of the same file may hold it."""
PROGRESS_S = 0.2
"""Least time between two progress reports."""


class DownloadListener(Protocol):
    """Receives progress, and may cancel by raising in `check` or `sleep` (`backend.serve.question_call.QuestionCall` is one)."""

    report: Callable[[dict[str, Any]], None]

    def check(self) -> None: ...
    def sleep(self, seconds: float) -> None: ...


def download(repo_id: str, repo_type: RepoType, listener: DownloadListener) -> Path:
    """Download a model or dataset into the cache and return its snapshot folder. Progress: {done, total, phase}, in bytes.

    A cancelled download keeps its partial files, and the next one resumes them. Raises UserError with one sentence for errors of the
    network, the Hub, the token and the disk; whatever is raised, no incomplete file has a complete one's name.
    """
    disable_progress_bars()
    listener.report({"done": 0, "total": None, "phase": "asking"})
    plan = hub_search.plan(repo_id, repo_type)
    with hub_errors_as_mistakes(repo_id, repo_type):
        return _Download(plan, listener).run()


def discard(repo_id: str, repo_type: RepoType) -> int:
    """Delete partial files, and the repository's folder if it is empty then; returns the bytes. A file that another process is
    writing stays."""
    blobs, freed = _blobs(repo_id, repo_type), 0
    for partial in blobs.glob("*.incomplete"):
        with contextlib.suppress(UserError), _locked(partial, repo_id, repo_type):
            freed += _size(partial)
            partial.unlink()
    if not any(path.is_file() for path in blobs.parent.rglob("*")):
        shutil.rmtree(blobs.parent, ignore_errors=True)
    return freed


class _Download:
    def __init__(self, plan: hub_search.DownloadPlan, listener: DownloadListener) -> None:
        self.plan, self.listener = plan, listener
        self.blobs = _blobs(plan.repo_id, plan.repo_type)
        self._counting, self._failed = threading.Lock(), threading.Event()
        self._arrived = dict[str, int]()
        """Bytes of each blob so far, by etag."""
        self._reported, self._total = 0.0, plan.total

    def run(self) -> Path:
        self.blobs.mkdir(parents=True, exist_ok=True)
        smallest_first = sorted(self.plan.files, key=self.plan.files.__getitem__)
        etags = self._in_parallel(self._etag, smallest_first)
        name_of = {etag: name for name, etag in etags.items()}  # files with equal content are one blob
        self._total = sum(self.plan.files[name] for name in name_of.values())
        self._refuse_full_disk()
        self._in_parallel(lambda etag: self._fetch(name_of[etag], etag), name_of)
        self._report("linking", now=True)
        return self._linked()

    def _linked(self) -> Path:
        """The snapshot folder, which huggingface_hub links from the blobs that are there now."""
        return Path(
            snapshot_download(
                self.plan.repo_id,
                repo_type=self.plan.repo_type,
                allow_patterns=list(self.plan.files),
                etag_timeout=hub_search.TIMEOUT_S,
            )
        )

    def _in_parallel(self, do: Callable[[str], Any], names: Iterable[str]) -> dict[str, Any]:
        """Call `do` for several names at the same time; the first failure stops the others."""

        def guarded(name: str) -> Any:
            try:
                self._check()
                return do(name)
            except BaseException:
                self._failed.set()
                raise

        # Leaving the `with` waits for every thread; after a failure the others end at their next `_check`.
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="download") as pool:
            futures = {name: pool.submit(guarded, name) for name in names}
        errors = [error for future in futures.values() if (error := future.exception()) is not None]
        # The others' _Stopped only follows from the failure that the user should see.
        causes = [error for error in errors if not isinstance(error, _Stopped)]
        if errors:
            raise (causes or errors)[0]
        return {name: future.result() for name, future in futures.items()}

    def _check(self) -> None:
        self.listener.check()
        if self._failed.is_set():
            raise _Stopped

    # One file

    def _url(self, name: str) -> str:
        return hf_hub_url(self.plan.repo_id, name, repo_type=self.plan.repo_type, revision=self.plan.commit)

    def _etag(self, name: str) -> str:
        """The Hub's ETag of this file, by which its blob is named."""
        etag = get_hf_file_metadata(self._url(name), timeout=hub_search.TIMEOUT_S).etag
        if not etag or "/" in etag:
            raise UserError(
                SETTING[self.plan.repo_type], f"{host()} gives no checksum for {name}, so it is not downloaded."
            )
        blob = self.blobs / etag
        with self._counting:
            self._arrived[etag] = _size(blob) if blob.exists() else _size(_partial(blob))
        return etag

    def _fetch(self, name: str, etag: str) -> None:
        blob = self.blobs / etag
        if blob.exists():
            return
        with _locked(_partial(blob), self.plan.repo_id, self.plan.repo_type) as file:
            if blob.exists():  # another process has just finished it
                return
            self._fill(name, etag, file)
            self._refuse_damage(name, etag, file)
            file.flush()  # else fsync would sync a file that still lacks what Python holds in its buffer
            os.fsync(file.fileno())
            _partial(blob).replace(blob)

    def _fill(self, name: str, etag: str, file: BinaryIO) -> None:
        """Append until the file has its size. After a broken connection it continues at the same byte."""
        size, tries = self.plan.files[name], 0
        if file.tell() > size:  # cannot be the beginning of this file
            _empty(file)
        while (offset := file.tell()) < size:
            broke = self._stream(name, etag, file)
            tries = 0 if file.tell() > offset else tries
            if tries == len(RETRIES_S):
                done, total = sum(self._arrived.values()), self._total
                raise UserError(
                    SETTING[self.plan.repo_type],
                    f"The connection to {host()} broke off at {_gigabytes(done)} of {_gigabytes(total)}; what has arrived "
                    f"is kept, so resume when it is back.",
                ) from broke
            if file.tell() < size:
                self.listener.sleep(RETRIES_S[tries])
                tries += 1

    def _stream(self, name: str, etag: str, file: BinaryIO) -> Exception | None:
        """One range request that starts at the end of the file. Returns the error that interrupted it, if a retry may help."""
        # identity: a range counts bytes as they are sent, so a compressed answer could not be appended.
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={file.tell()}-"}
        try:
            with get_session().stream("GET", self._url(name), headers=headers, timeout=READ_TIMEOUT_S) as response:
                hf_raise_for_status(response)
                if response.status_code != 206:  # the server ignores ranges
                    _empty(file)
                for chunk in response.iter_bytes():
                    self._check()
                    file.write(chunk)
                    self._count(etag, file.tell())
        except HTTPError as error:
            # 4xx (gated, deleted, bad token) stays the same on a retry.
            if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
                raise
            return error
        return None

    def _refuse_damage(self, name: str, etag: str, file: BinaryIO) -> None:
        """Delete a large file whose content does not match its SHA-256, which is its ETag, and raise UserError."""
        if len(etag) != 64:  # the etag of a small file, kept in git, is a git hash
            return
        self._report("checking", now=True)
        file.flush()
        with open(file.name, "rb") as again:
            is_intact = hashlib.file_digest(again, "sha256").hexdigest() == etag
        if not is_intact:
            os.unlink(file.name)
            raise UserError(
                SETTING[self.plan.repo_type],
                f"{name} of {self.plan.repo_id} arrived damaged and was thrown away; download it again.",
            )

    # Progress

    def _count(self, etag: str, size: int) -> None:
        with self._counting:
            self._arrived[etag] = size
        self._report("downloading")

    def _report(self, phase: str, *, now: bool = False) -> None:
        with self._counting:
            moment = time.monotonic()
            if not now and moment - self._reported < PROGRESS_S:
                return
            self._reported = moment
            done = sum(self._arrived.values())
        self.listener.report({"done": done, "total": self._total, "phase": phase})

    def _refuse_full_disk(self) -> None:
        """Raise UserError where the disk has too little space for the rest of the download."""
        self._report("downloading", now=True)
        missing = self._total - sum(self._arrived.values())
        free = shutil.disk_usage(self.blobs).free
        if missing and missing + SPARE > free:
            raise UserError(
                SETTING[self.plan.repo_type],
                f"{self.plan.repo_id} needs {_gigabytes(missing)} more, and the disk that holds "
                f"{constants.HF_HUB_CACHE} has {_gigabytes(free)} free.",
            )


class _Stopped(Exception):
    """Raised in a thread because another file failed."""


@contextlib.contextmanager
def _locked(path: Path, repo_id: str, repo_type: str) -> Iterator[BinaryIO]:
    """The partial file, locked. Raises UserError if another process holds it for longer than LOCK_TIMEOUT_S: a download that was just
    cancelled needs a moment to end."""
    # flock rather than a lock file: the kernel releases it with the process. "ab" creates the file but never truncates it, for
    # until the lock is held it may be another's. Its end is sought once the lock is held, because the other may have appended.
    with path.open("ab") as file:
        until = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(file):
            if time.monotonic() > until:
                raise UserError(
                    SETTING[repo_type], f"{repo_id} is being downloaded already, by another process or window."
                )
            time.sleep(0.05)
        file.seek(0, os.SEEK_END)
        yield file


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _blobs(repo_id: str, repo_type: str) -> Path:
    # By the library's own constant, not `backend.utils.hub_cache`: it must be where `snapshot_download` looks for blobs.
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo_id, repo_type=repo_type), "blobs")


def _empty(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
