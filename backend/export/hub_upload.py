"""Hugging Face tokens, and uploads of a folder as one commit.

The token comes from HF_TOKEN, the system keychain or `hf auth login`; we write it only to the keychain.

An upload can be killed at any time: large files go to the Hub's storage first, which skips those it has, and one commit
ends it. Uploading again sends what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import keyring
import keyring.errors
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token, set_client_factory
from huggingface_hub.constants import HUGGINGFACE_CO_URL_HOME
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import _http, _xet_progress_reporting, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils._runtime import is_xet_available
from keyring.backends import chainer

from backend.models.hub import host
from backend.utils.errors import UserError

TOKENS_PAGE = f"{HUGGINGFACE_CO_URL_HOME}settings/tokens"
KEPT = "what has arrived there is kept, so start the upload again to go on"
SERVICE, ENTRY = "GRPO Studio", "Hugging Face token"
"""Service and account of our keychain entry."""
TRUSTED_PRIORITY = 1.0
"""keyring backends below this priority store secrets unprotected."""
TIMEOUT_S = 60.0
"""Seconds of silence after which a connection counts as broken."""
HUBS_OWN = (".gitattributes",)
"""Files that the Hub adds to a new repository."""
STALE = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".py", ".gguf", ".bin")
"""Files of an older model that would be loaded with the new one's."""


@contextlib.contextmanager
def upload_errors(repo_id: str, token: str) -> Iterator[None]:
    """Raise network, Hub and library errors as a UserError without the token."""
    try:
        yield
    # The library wraps errors of one file in a RuntimeError, and a refusal of the storage in a ValueError.
    except (
        HTTPError,
        HFValidationError,
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        cause: BaseException = error
        while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
            cause = cause.__cause__
        sentence = explain_upload(cause, repo_id)
        if sentence is None:
            raise
        raise UserError("repo", sentence.replace(token, "…") if token else sentence) from None


def explain_upload(error: BaseException, repo_id: str) -> str | None:
    """Message for a network or Hub error; None for others."""
    last_line = (str(error).strip().splitlines() or [""])[-1].lstrip("- ").strip("`").rstrip(".")
    match error:
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, so nothing is sent to Hugging Face."
        case HFValidationError():
            return f"{repo_id} {NOT_A_NAME}."
        case HfHubHTTPError():
            return _explain_status(
                error.response.status_code, (error.server_message or "").strip().rstrip("."), repo_id
            )
        case HTTPError() if "Timeout" in type(error).__name__:
            return f"{host()} does not answer; {KEPT}."
        case HTTPError():
            return f"The connection to {host()} broke off; {KEPT}."
        case ValueError() if "metadata in README.md" in str(error):
            return f"{host()} does not accept the settings at the top of the card: {last_line}."
        case ValueError() if "LFS batch API" in str(error):
            return f"{host()} does not take a file: {last_line}."
        case OSError():
            return f"{error.filename or 'A file'} cannot be read: {error.strerror or error}."
        case ValueError() | TypeError() | KeyError() | AttributeError():
            return f"The answer is not {host()}'s; if this network has a login page, log in there first."
    return None


NOT_A_NAME = "cannot be the name of a repository: write owner/name, of letters, digits, -, _ and full stops"


def _explain_status(status: int, message: str, repo_id: str) -> str:
    why = f" ({message})" if message else ""
    match status:
        case 401:
            return f"{host()} does not accept the token; log in again with a token of {TOKENS_PAGE}."
        case 403:
            return f"The token may not write to {repo_id}{why}; use one with write access, or another owner."
        case 404:
            return f"{host()} has no repository {repo_id} that this token may see."
        case 409 | 412:
            return f"Someone else has changed {repo_id} meanwhile; look at it, and start the upload again."
        case 413:
            return f"{host()} says that this is too large{why}; free storage there, or choose fewer bits."
        case 429:
            return f"{host()} has been asked too often; wait some minutes: {KEPT}."
        case _ if status >= 500:
            return f"{host()} has trouble of its own ({status}); try again later: {KEPT}."
    return f"{host()} answers with an error ({status}){f': {message}' if message else ''}."


# The token

Source = Literal["HF_TOKEN", "keychain", "hf auth login"]


@dataclass(frozen=True, slots=True, repr=False)  # without a repr: a traceback may print it
class HubToken:
    """A token and its source."""

    value: str
    source: Source


@dataclass(frozen=True, slots=True)
class Account:
    """The account of a token."""

    name: str
    organisations: tuple[str, ...]
    can_write: bool
    source: Source


def find_token() -> HubToken | None:
    if value := (os.environ.get("HF_TOKEN") or "").strip():
        return HubToken(value, "HF_TOKEN")
    if (chain := _keychain()) is not None and (value := _read(chain)):
        return HubToken(value, "keychain")
    stored = get_token()
    return HubToken(stored, "hf auth login") if stored else None


def need_token() -> HubToken:
    """The token for uploads. Raises UserError without one."""
    if (found := find_token()) is not None:
        return found
    advice = f"log in with a token with write access, from {TOKENS_PAGE}"
    raise UserError("token", f"You are not logged in to Hugging Face; {advice}.")


def whose(token: HubToken) -> Account:
    """Look up the token's account. Raises UserError if that fails."""
    with upload_errors("", token.value):
        about = HfApi(token=token.value).whoami()
        organisations = tuple(str(row.get("name")) for row in about.get("orgs") or [])
        role = ((about.get("auth") or {}).get("accessToken") or {}).get("role")
        # A fine-grained token's rights depend on the repository; it counts as writing until the Hub refuses.
        return Account(str(about.get("name")), organisations, role != "read", token.source)


def log_in(value: str) -> Account:
    """Verify a token and store it in the keychain. Raises UserError."""
    value = value.strip()
    if not value:
        raise UserError("token", "No token was given.")
    chain = _keychain()
    if chain is None:
        missing = "This system has no keychain that could keep the token (on Linux: GNOME Keyring or KWallet)"
        raise UserError("token", f"{missing}; log in with `hf auth login`, or set HF_TOKEN.")
    account = whose(HubToken(value, "keychain"))
    try:
        chain.set_password(SERVICE, ENTRY, value)
    except (keyring.errors.KeyringError, OSError):
        raise UserError("token", "The keychain did not take the token; unlock it, and log in again.") from None
    return account


def log_out() -> bool:
    """Delete our keychain entry; False if there was none."""
    chain = _keychain()
    if chain is None or not _read(chain):
        return False
    try:
        chain.delete_password(SERVICE, ENTRY)
    except (keyring.errors.KeyringError, OSError):
        raise UserError("token", "The keychain did not delete the token; unlock it, and log out again.") from None
    return True


def _keychain() -> Any:
    found = keyring.get_keyring()
    backends = found.backends if isinstance(found, chainer.ChainerBackend) else [found]
    return next((backend for backend in backends if backend.priority >= TRUSTED_PRIORITY), None)


def _read(chain: Any) -> str:
    try:
        return chain.get_password(SERVICE, ENTRY) or ""
    except (keyring.errors.KeyringError, OSError):  # locked, or its service is gone: the other places are tried
        return ""


# Bytes on their way to the Hub. huggingface_hub reports them by progress bars only.

Heard = Callable[[int], None]
"""Receives the number of bytes sent."""


class _CountedFile(io.FileIO):
    """A file that reports its read position, also when a retry seeks back."""

    def __init__(self, path: Path, heard: Heard) -> None:
        super().__init__(path)
        self._heard = heard

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size)
        self._heard(self.tell())
        return data or b""


class _CountedAddition(CommitOperationAdd):
    """A file of a commit that reports bytes sent to LFS storage."""

    def __init__(self, name: str, path: Path, heard: Heard) -> None:
        self._path, self._heard = path, heard
        super().__init__(path_in_repo=name, path_or_fileobj=path)

    @contextlib.contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        # with_tqdm marks the reading that sends; without it the library reads a file for its hash or into the commit.
        with _CountedFile(self._path, self._heard) if with_tqdm else open(self._path, "rb") as file:
            yield file  # type: ignore[misc]


@contextlib.contextmanager
def xet_progress(heard: Heard) -> Iterator[None]:
    """Report Xet uploads to `heard` instead of progress bars."""
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


@contextlib.contextmanager
def _limited_silence() -> Iterator[None]:
    """Break connections after TIMEOUT_S of silence."""

    def client() -> Any:
        made = _http.default_client_factory()
        made.timeout = TIMEOUT_S
        return made

    set_client_factory(client)
    try:
        yield
    finally:
        set_client_factory(_http.default_client_factory)


# Uploads


@dataclass(frozen=True, slots=True)
class Upload:
    repo_id: str
    folder: Path
    private: bool = True
    overwrite: bool = False
    message: str = "Upload a model trained with GRPO Studio"


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Page and commit of a finished upload."""

    url: str
    commit: str


class ByteProgress(Protocol):
    """Receives a message per stage, and bytes (done, total)."""

    def __call__(self, sentence: str, done: int | None = None, total: int | None = None) -> None: ...


def files_of(folder: Path) -> list[Path]:
    """Files to upload, smallest first."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return sorted(files, key=lambda path: (path.stat().st_size, path.name))


def upload(upload: Upload, token: str, progress: ByteProgress) -> Uploaded:
    """Upload a folder in one commit.

    Raises UserError for network, Hub and account errors, another visibility, or other content without `overwrite`.
    """
    disable_progress_bars()
    api, repo = HfApi(token=token), upload.repo_id
    ours = {path.relative_to(upload.folder).as_posix(): path for path in files_of(upload.folder)}
    with upload_errors(repo, token), _limited_silence():
        progress(f"Asking {host()}.")
        before = _repository(api, upload)
        # Content that equals ours is no obstacle: the answer to the commit of an earlier try may have been lost.
        theirs = [file for file in before.siblings or [] if file.rfilename not in HUBS_OWN]
        others = [file.rfilename for file in theirs if not _is_equal(file, ours.get(file.rfilename))]
        if others and not upload.overwrite:
            some = ", ".join(others[:2]) + (f" and {len(others) - 2} more" if len(others) > 2 else "")
            there = f"{repo} has other content already ({some})"
            raise UserError("overwrite", f"{there}; choose another name, or overwrite it.")
        additions = _send_files(api, repo, ours, progress)
        stale = [name for name in others if name not in ours and name.endswith(STALE)]
        progress("Committing.")
        done = api.create_commit(
            repo,
            operations=[*additions, *(CommitOperationDelete(path_in_repo=name) for name in stale)],
            commit_message=upload.message,
            parent_commit=before.sha,
        )
        progress(f"Checking what {host()} has.")
        arrived = {file.rfilename: file for file in _info(api, repo).siblings or []}
        for name, path in ours.items():
            if name not in arrived or not _is_equal(arrived[name], path):
                raise UserError("repo", f"{name} did not arrive as it is here; start the upload again.")
        return Uploaded(f"{api.endpoint}/{repo}", done.oid)


def _info(api: HfApi, repo_id: str) -> ModelInfo:
    return api.model_info(repo_id, files_metadata=True, timeout=TIMEOUT_S)


def _repository(api: HfApi, upload: Upload) -> ModelInfo:
    """Create the repository if missing. Raises UserError for another visibility."""
    try:
        found = _info(api, upload.repo_id)
    except RepositoryNotFoundError:
        api.create_repo(upload.repo_id, private=upload.private, exist_ok=True)
        found = _info(api, upload.repo_id)
    if found.private is not None and found.private != upload.private:
        is_, wish = ("private", "public") if found.private else ("public", "private")
        other = f"{upload.repo_id} is there and {is_}, and this upload should be {wish}"
        raise UserError("repo", f"{other}; change that on its page, or choose another name.")
    return found


def _send_files(api: HfApi, repo_id: str, files: dict[str, Path], progress: ByteProgress) -> list[CommitOperationAdd]:
    """Send large files to the Hub's storage, one after the other; returns all files, ready to commit."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total, before, additions = sum(sizes.values()), 0, list[CommitOperationAdd]()
    for name, path in files.items():

        def heard(size: int, before: int = before) -> None:
            progress("Uploading.", min(before + size, total), total)

        addition = _CountedAddition(name, path, heard)
        heard(0)
        with xet_progress(heard):
            api.preupload_lfs_files(repo_id, [addition], num_threads=1, free_memory=False)
        heard(sizes[name])
        before += sizes[name]
        additions.append(addition)
    return additions


def _is_equal(file: RepoSibling, path: Path | None) -> bool:
    """Compare checksums with the Hub's file."""
    if path is None or file.size != path.stat().st_size:
        return False
    with path.open("rb") as stream:
        if file.lfs is not None:
            return hashlib.file_digest(stream, "sha256").hexdigest() == file.lfs.sha256
        prefix = b"blob %d\0" % path.stat().st_size
        return hashlib.file_digest(stream, lambda: hashlib.sha1(prefix)).hexdigest() == file.blob_id
