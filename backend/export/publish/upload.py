"""A folder's files as one commit in a repository on Hugging Face.

Nothing about an upload is remembered on this machine. Large files go to the Hub's storage first, one after the other, and are asked for by
their checksums before they are sent; the commit that names them comes last, and is one request. So an upload may be killed at any
moment: a repository has either no commit of ours or a complete one, and the same upload started again sends what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, set_client_factory
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import _http, _xet_progress_reporting, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils._runtime import is_xet_available

from backend.export.publish.hub_token import upload_errors_as_mistakes
from backend.models.hub_errors import host
from backend.utils.errors import UserError

# Bytes on their way to the Hub, counted. huggingface_hub sends them; it tells of them by progress bars only.

Heard = Callable[[int], None]
"""Receives how many bytes of a file have been sent."""


class CountedFile(io.FileIO):
    """A file that tells how far it has been read. A retry seeks back, and the count goes back with it."""

    def __init__(self, path: Path, heard: Heard) -> None:
        super().__init__(path)
        self._heard = heard

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size)
        self._heard(self.tell())
        return data or b""


class CountedAddition(CommitOperationAdd):
    """A file of a commit. `heard` is told of its bytes as they are sent to the LFS storage."""

    def __init__(self, name: str, path: Path, heard: Heard) -> None:
        self._path, self._heard = path, heard
        super().__init__(path_in_repo=name, path_or_fileobj=path)

    @contextlib.contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        # with_tqdm marks the reading that sends; without it the library reads a file for its hash or into the commit.
        with CountedFile(self._path, self._heard) if with_tqdm else open(self._path, "rb") as file:
            yield file  # type: ignore[misc]


@contextlib.contextmanager
def xet_progress(heard: Heard) -> Iterator[None]:
    """Within this context the library's uploads to Xet are told to `heard` instead of to progress bars.

    The library makes its reporter by the name that is replaced here, and only where progress bars are on. Where it does not use Xet
    this does nothing.
    """
    if not is_xet_available():
        yield
        return

    class Reporter:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def update_progress(self, group_report: Any, item_reports: dict[Any, Any]) -> None:
            heard(group_report.total_bytes_completed)

        def close(self, *_: Any) -> None: ...

    library_reporter = _xet_progress_reporting.XetUploadProgressReporter
    enable_progress_bars()
    _xet_progress_reporting.XetUploadProgressReporter = Reporter  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        _xet_progress_reporting.XetUploadProgressReporter = library_reporter
        disable_progress_bars()


# ── upload ───────────────────────────────────────────────────────────────────────────────────────────────────────────

TIMEOUT_S = 60.0
"""Silence after which a connection counts as broken; the library itself would wait for ever."""

HUBS_OWN = (".gitattributes",)
"""What the Hub puts into a new repository."""

STALE = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".py", ".gguf", ".bin")
"""Files of a model: those of an older one that the new one lacks would be read together with it."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What to send, and where."""

    repo_id: str
    folder: Path
    private: bool = True
    overwrite: bool = False
    message: str = "Upload a model trained with GRPO Studio"


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A finished upload: the repository's page, and the commit."""

    url: str
    commit: str


class ByteProgress(Protocol):
    """Receives a sentence for the user at each stage, and bytes (done, total) while files are sent."""

    def __call__(self, sentence: str, done: int | None = None, total: int | None = None) -> None: ...


def files_of(folder: Path) -> list[Path]:
    """The files that an upload of this folder sends, smallest first."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return sorted(files, key=lambda path: (path.stat().st_size, path.name))


def upload(upload: Upload, token: str, progress: ByteProgress) -> Uploaded:
    """Send a folder; returns once the Hub has it all, in one commit.

    Raises UserError for everything that the network, the Hub or the account puts in the way, among it a repository that has other content
    (unless it may be overwritten) or the other visibility.
    """
    disable_progress_bars()
    with upload_errors_as_mistakes(upload.repo_id, token), _limited_patience():
        return _Uploading(upload, HfApi(token=token), progress).run()


@dataclass(slots=True)
class _Uploading:
    upload: Upload
    api: HfApi
    progress: ByteProgress

    def run(self) -> Uploaded:
        self.progress(f"Asking {host()}.")
        before = self._repository()
        extra = self._refuse_other_content(before)
        additions = self._send_files()
        self.progress("Committing.")
        done = self.api.create_commit(
            self.upload.repo_id,
            operations=[*additions, *(CommitOperationDelete(path_in_repo=name) for name in extra)],
            commit_message=self.upload.message,
            parent_commit=before.sha,
        )
        self._check_arrived()
        return Uploaded(f"{self.api.endpoint}/{self.upload.repo_id}", done.oid)

    # ── the repository ──────────────────────────────────────────────────────────────────────────

    def _repository(self) -> ModelInfo:
        """The repository as it is, made where there is none. Raises UserError for one of the other visibility."""
        try:
            found = self._info()
        except RepositoryNotFoundError:
            self.api.create_repo(self.upload.repo_id, private=self.upload.private, exist_ok=True)
            found = self._info()
        if found.private is not None and found.private != self.upload.private:
            is_, wish = ("private", "public") if found.private else ("public", "private")
            raise UserError(
                "repo",
                f"{self.upload.repo_id} is there and {is_}, and this upload should be {wish}; change that on its page, or "
                f"choose another name.",
            )
        return found

    def _info(self) -> ModelInfo:
        return self.api.model_info(self.upload.repo_id, files_metadata=True, timeout=TIMEOUT_S)

    def _refuse_other_content(self, found: ModelInfo) -> list[str]:
        """Names of files to delete. Raises UserError where the repository has what this upload would replace unasked.

        Content that equals ours is no obstacle: the answer to the commit of an earlier try may have been lost.
        """
        ours = {_name(self.upload.folder, path): path for path in files_of(self.upload.folder)}
        theirs = [file for file in found.siblings or [] if file.rfilename not in HUBS_OWN]
        others = [file.rfilename for file in theirs if not _is_equal(file, ours.get(file.rfilename))]
        if others and not self.upload.overwrite:
            raise UserError(
                "overwrite",
                f"{self.upload.repo_id} has other content already ({_some(others)}); choose another name, or overwrite it.",
            )
        return [name for name in others if name not in ours and name.endswith(STALE)]

    # ── the files ───────────────────────────────────────────────────────────────────────────────

    def _send_files(self) -> list[CommitOperationAdd]:
        """Send large files to the Hub's storage; → all files, ready to be committed.

        One after the other: what an interruption loses is a part of one file, and Xet splits a file into parallel chunks itself.
        """
        paths = files_of(self.upload.folder)
        total, before, additions = sum(path.stat().st_size for path in paths), 0, list[CommitOperationAdd]()
        for path in paths:
            heard = self._reporter(before, total)
            addition = CountedAddition(_name(self.upload.folder, path), path, heard)
            heard(0)
            with xet_progress(heard):
                self.api.preupload_lfs_files(self.upload.repo_id, [addition], num_threads=1, free_memory=False)
            before += path.stat().st_size
            heard(path.stat().st_size)
            additions.append(addition)
        return additions

    def _reporter(self, before: int, total: int) -> Callable[[int], None]:
        """Tells progress of a file that begins at `before` of `total` bytes."""

        def heard(size: int) -> None:
            self.progress("Uploading.", min(before + size, total), total)

        return heard

    def _check_arrived(self) -> None:
        """Raise UserError where the Hub lists another content than was sent."""
        self.progress(f"Checking what {host()} has.")
        theirs = {file.rfilename: file for file in self._info().siblings or []}
        for path in files_of(self.upload.folder):
            name = _name(self.upload.folder, path)
            if name not in theirs or not _is_equal(theirs[name], path):
                raise UserError("repo", f"{name} did not arrive as it is here; start the upload again.")


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _is_equal(file: RepoSibling, path: Path | None) -> bool:
    """Whether the Hub's file has the content of ours, by checksums."""
    if path is None or file.size != path.stat().st_size:
        return False
    if file.lfs is not None:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == file.lfs.sha256
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == file.blob_id


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


@contextlib.contextmanager
def _limited_patience() -> Iterator[None]:
    """Within this context the library's connections break after TIMEOUT_S of silence."""

    def client() -> Any:
        made = _http.default_client_factory()
        made.timeout = TIMEOUT_S
        return made

    set_client_factory(client)
    try:
        yield
    finally:
        set_client_factory(_http.default_client_factory)
