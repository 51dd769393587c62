"""Downloading a repository into Hugging Face's cache so that it can be paused and goes on where it was.

huggingface_hub 2 throws away what has arrived of a file when a download ends early. So the large part, the bytes, is
ours: each file grows in blobs/<etag>.incomplete, over plain HTTP with ranges, and takes its place as blobs/<etag> when it
is whole and its checksum is right. The library then links it into a snapshot, from blobs it finds there: names, links,
references and what else belongs to a sound cache are its business alone.
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
from backend.models.hub_errors import SETTING, host, in_words
from backend.spec.faults import Mistake

AT_ONCE = 4
"""Files that are fetched at the same time."""
SPARE = 64 << 20
"""Bytes that a disk must keep free beside the download."""
RETRIES_S = (0.5, 2.0, 4.0)
"""Waits before a broken connection is tried again; bytes that arrive start the count anew."""
READ_S = 20.0
"""How long a connection may be silent."""
LOCK_S = 3.0
"""How long another download of the same file may hold it."""
TELL_S = 0.2
"""Progress is told no oftener."""


class Hearer(Protocol):
    """Who is told of the progress, and may call the download off (`backend.serve.call.QuestionCall` is one)."""

    report: Callable[[dict[str, Any]], None]

    def check(self) -> None: ...
    def sleep(self, seconds: float) -> None: ...


def download(repo_id: str, repo_type: hub_search.RepoType, hearer: Hearer) -> Path:
    """Bring a model or dataset into the cache, and return its folder. Progress: {done, total, phase}, in bytes.

    Calling it off keeps what has arrived; the next download goes on from there. Raises Mistake with one sentence for the
    network, the Hub, the token and the disk; whatever is raised, nothing half-written stands in the cache as whole.
    """
    disable_progress_bars()
    hearer.report({"done": 0, "total": None, "phase": "asking"})
    plan = hub_search.plan(repo_id, repo_type)
    with in_words(repo_id, repo_type):
        return _Download(plan, hearer).run()


def discard(repo_id: str, repo_type: hub_search.RepoType) -> int:
    """Throw away the files that are not whole, and the repository's folder where nothing else is in it; returns the bytes.
    A file that is being written by another process is left alone."""
    blobs, freed = _blobs(repo_id, repo_type), 0
    for partial in blobs.glob("*.incomplete"):
        with contextlib.suppress(Mistake), _held(partial, repo_id, repo_type):
            freed += _size(partial)
            partial.unlink()
    if not any(path.is_file() for path in blobs.parent.rglob("*")):
        shutil.rmtree(blobs.parent, ignore_errors=True)
    return freed


class _Download:
    def __init__(self, plan: hub_search.DownloadPlan, hearer: Hearer) -> None:
        self.plan, self.hearer = plan, hearer
        self.blobs = Path(
            constants.HF_HUB_CACHE, repo_folder_name(repo_id=plan.repo_id, repo_type=plan.repo_type), "blobs"
        )
        self._counting, self._failed = threading.Lock(), threading.Event()
        self._arrived, self._told, self._total = dict[str, int](), 0.0, plan.total

    def run(self) -> Path:
        self.blobs.mkdir(parents=True, exist_ok=True)
        smallest_first = sorted(self.plan.files, key=self.plan.files.__getitem__)
        etags = self._each(self._etag, smallest_first)
        once = {etag: name for name, etag in etags.items()}  # files of one content are one blob
        self._total = sum(self.plan.files[name] for name in once.values())
        self._refuse_full_disk()
        self._each(lambda etag: self._fetch(once[etag], etag), once)
        self._tell("linking", now=True)
        return self._linked()

    def _linked(self) -> Path:
        """The snapshot, made by the library of the blobs that are there now."""
        wanted = list(self.plan.files)
        return Path(
            snapshot_download(
                self.plan.repo_id,
                repo_type=self.plan.repo_type,
                allow_patterns=wanted,
                etag_timeout=hub_search.PATIENCE_S,
            )
        )

    def _each(self, do: Callable[[str], Any], names: Iterable[str]) -> dict[str, Any]:
        """Do something for several files at once; the first that fails ends the others."""

        def guarded(name: str) -> Any:
            try:
                self._check()
                return do(name)
            except BaseException:
                self._failed.set()
                raise

        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="download") as pool:
            waiting = {name: pool.submit(guarded, name) for name in names}
        # A thread that only stopped because another one failed has nothing to say.
        errors = [error for one in waiting.values() if (error := one.exception()) is not None]
        told = [error for error in errors if not isinstance(error, _Stopped)]
        if errors:
            raise (told or errors)[0]
        return {name: one.result() for name, one in waiting.items()}

    def _check(self) -> None:
        self.hearer.check()
        if self._failed.is_set():
            raise _Stopped

    # One file

    def _url(self, name: str) -> str:
        return hf_hub_url(self.plan.repo_id, name, repo_type=self.plan.repo_type, revision=self.plan.commit)

    def _etag(self, name: str) -> str:
        """What the Hub calls the content of this file, which is also its name among the blobs."""
        etag = get_hf_file_metadata(self._url(name), timeout=hub_search.PATIENCE_S).etag
        if not etag or "/" in etag:
            raise Mistake(
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
        with _held(_partial(blob), self.plan.repo_id, self.plan.repo_type) as file:
            if blob.exists():  # another process has just finished it
                return
            self._fill(name, etag, file)
            self._refuse_damage(name, etag, file)
            os.fsync(file.fileno())
            _partial(blob).replace(blob)

    def _fill(self, name: str, etag: str, file: BinaryIO) -> None:
        """Have the file grow to its size; a connection that breaks is tried again, from where it broke."""
        size, tries = self.plan.files[name], 0
        if file.tell() > size:  # not what we began
            _empty(file)
        while (begun := file.tell()) < size:
            broke = self._stream(name, etag, file)
            tries = 0 if file.tell() > begun else tries
            if tries == len(RETRIES_S):
                done, total = sum(self._arrived.values()), self._total
                raise Mistake(
                    SETTING[self.plan.repo_type],
                    f"The connection to {host()} broke off at {_gigabytes(done)} of {_gigabytes(total)}; what has arrived "
                    f"is kept, so resume when it is back.",
                ) from broke
            if file.tell() < size:
                self.hearer.sleep(RETRIES_S[tries])
                tries += 1

    def _stream(self, name: str, etag: str, file: BinaryIO) -> Exception | None:
        """Append what comes from where the file ends; returns why it broke off, if it did and may be tried again."""
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={file.tell()}-"}
        try:
            with get_session().stream("GET", self._url(name), headers=headers, timeout=READ_S) as response:
                hf_raise_for_status(response)
                if response.status_code != 206:  # the server knows no ranges
                    _empty(file)
                for chunk in response.iter_bytes():
                    self._check()
                    file.write(chunk)
                    self._count(etag, file.tell())
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
                raise
            return error
        return None

    def _refuse_damage(self, name: str, etag: str, file: BinaryIO) -> None:
        """Large files are named by their SHA-256: what does not fit it is thrown away."""
        if len(etag) != 64:
            return
        self._tell("checking", now=True)
        file.flush()
        with open(file.name, "rb") as again:
            right = hashlib.file_digest(again, "sha256").hexdigest() == etag
        if not right:
            os.unlink(file.name)
            raise Mistake(
                SETTING[self.plan.repo_type],
                f"{name} of {self.plan.repo_id} arrived damaged and was thrown away; download it again.",
            )

    # What is told

    def _count(self, etag: str, size: int) -> None:
        with self._counting:
            self._arrived[etag] = size
        self._tell("downloading")

    def _tell(self, phase: str, *, now: bool = False) -> None:
        with self._counting:
            moment = time.monotonic()
            if not now and moment - self._told < TELL_S:
                return
            self._told = moment
            done = sum(self._arrived.values())
        self.hearer.report({"done": done, "total": self._total, "phase": phase})

    def _refuse_full_disk(self) -> None:
        """Raises Mistake where the disk has no room for what is still to come."""
        self._tell("downloading", now=True)
        missing = self._total - sum(self._arrived.values())
        free = shutil.disk_usage(self.blobs).free
        if missing and missing + SPARE > free:
            raise Mistake(
                SETTING[self.plan.repo_type],
                f"{self.plan.repo_id} needs {_gigabytes(missing)} more, and the disk that holds "
                f"{constants.HF_HUB_CACHE} has {_gigabytes(free)} free.",
            )


class _Stopped(Exception):
    """Another file failed, so this one need not go on."""


@contextlib.contextmanager
def _held(path: Path, repo_id: str, repo_type: str) -> Iterator[BinaryIO]:
    """The partial file, to be written by us alone. Raises Mistake while somebody else writes it; a download that was
    paused a moment ago may need that moment."""
    with path.open("ab") as file:
        until = time.monotonic() + LOCK_S
        while not _locked(file):
            if time.monotonic() > until:
                raise Mistake(
                    SETTING[repo_type], f"{repo_id} is being downloaded already, by another process or window."
                )
            time.sleep(0.05)
        file.seek(0, os.SEEK_END)
        yield file


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _blobs(repo_id: str, repo_type: str) -> Path:
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
