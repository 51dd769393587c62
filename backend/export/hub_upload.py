"""Hugging Face tokens, and uploads of a folder as one commit.

The token comes from HF_TOKEN, the system keychain or `hf auth login`; we write it only to the keychain.

An upload can be killed at any time: large files go to the Hub's storage first, which skips those it has, and one commit
ends it. Uploading again sends what is missing.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import _xet_progress_reporting, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils._runtime import is_xet_available

from backend.export.exports import Progress
from backend.models.hub import hash_of
from backend.models.hub_client import TOKENS_PAGE, host, hub_errors
from backend.utils import keychain
from backend.utils.errors import UserError

ENTRY = "Hugging Face token"  # account of our keychain entry
HUBS_OWN = (".gitattributes",)  # files that the Hub adds to a new repository
STALE = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".py", ".gguf", ".bin")
"""Files of an older model that would be loaded with the new one's."""


Source = Literal["HF_TOKEN", "keychain", "hf auth login"]


@dataclass(frozen=True, slots=True, repr=False)  # without a repr: a traceback may print it
class HubToken:
    value: str
    source: Source


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    organisations: tuple[str, ...]
    can_write: bool
    source: Source


def find_token() -> HubToken | None:
    if value := (os.environ.get("HF_TOKEN") or "").strip():
        return HubToken(value, "HF_TOKEN")
    if value := keychain.stored(ENTRY):
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
    with hub_errors("", setting="repo", token=token.value):
        about = HfApi(token=token.value).whoami()
        organisations = tuple(str(row.get("name")) for row in about.get("orgs") or [])
        role = ((about.get("auth") or {}).get("accessToken") or {}).get("role")
        # A fine-grained token's rights depend on the repository; it counts as writing until the Hub refuses.
        return Account(str(about["name"]), organisations, role != "read", token.source)


def log_in(value: str) -> Account:
    """Verify a token and store it in the keychain. Raises UserError."""
    value = value.strip()
    if not value:
        raise UserError("token", "No token was given.")
    if keychain.keychain() is None:
        missing = "This system has no keychain that could keep the token (on Linux: GNOME Keyring or KWallet)"
        raise UserError("token", f"{missing}; log in with `hf auth login`, or set HF_TOKEN.")
    account = whose(HubToken(value, "keychain"))
    keychain.store(ENTRY, value, "token", "token")
    return account


def log_out() -> bool:
    """Delete our keychain entry; False if there was none. Raises UserError."""
    return keychain.forget(ENTRY, "token", "token")


@contextlib.contextmanager
def xet_progress(heard: Callable[[int], None]) -> Iterator[None]:
    """Report the bytes of an upload to `heard`: huggingface_hub has progress bars only."""
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


@dataclass(frozen=True, slots=True)
class Uploaded:
    url: str
    commit: str


def files_of(folder: Path) -> list[Path]:
    """Files to upload, smallest first."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return sorted(files, key=lambda path: (path.stat().st_size, path.name))


def upload(
    repo: str, folder: Path, token: str, progress: Progress, *, private: bool = True, overwrite: bool = False
) -> Uploaded:
    """Upload a folder in one commit. `progress`: also bytes (done, total). Raises UserError, also for other content."""
    disable_progress_bars()
    api = HfApi(token=token)
    info = partial(api.model_info, repo, files_metadata=True)
    ours = {path.relative_to(folder).as_posix(): path for path in files_of(folder)}

    with hub_errors(repo, setting="repo", token=token):
        progress(f"Asking {host()}.")
        try:
            before = info()
        except RepositoryNotFoundError:
            api.create_repo(repo, private=private, exist_ok=True)
            before = info()
        if before.private is not None and before.private != private:
            is_, wish = ("private", "public") if before.private else ("public", "private")
            other = f"{repo} is there and {is_}, and this upload should be {wish}"
            raise UserError("repo", f"{other}; change that on its page, or choose another name.")
        # Content that equals ours is no obstacle: the answer to the commit of an earlier try may have been lost.
        theirs = [file for file in before.siblings or [] if file.rfilename not in HUBS_OWN]
        others = [file.rfilename for file in theirs if not _is_equal(file, ours.get(file.rfilename))]
        if others and not overwrite:
            some = ", ".join(others[:2]) + (f" and {len(others) - 2} more" if len(others) > 2 else "")
            there = f"{repo} has other content already ({some})"
            raise UserError("overwrite", f"{there}; choose another name, or overwrite it.")
        # Large files go to the Hub's storage first, one after the other.
        sizes = {name: path.stat().st_size for name, path in ours.items()}
        total, sent, additions = sum(sizes.values()), 0, list[CommitOperationAdd]()
        for name, path in ours.items():
            addition = CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
            with xet_progress(lambda size, sent=sent: progress("Uploading.", min(sent + size, total), total)):
                api.preupload_lfs_files(repo, [addition], num_threads=1, free_memory=False)
            sent += sizes[name]
            progress("Uploading.", sent, total)
            additions.append(addition)
        stale = [name for name in others if name not in ours and name.endswith(STALE)]
        progress("Committing.")
        done = api.create_commit(
            repo,
            operations=[*additions, *(CommitOperationDelete(path_in_repo=name) for name in stale)],
            commit_message="Upload a model trained with GRPO Studio",
            parent_commit=before.sha,
        )
        progress(f"Checking what {host()} has.")
        arrived = {file.rfilename: file for file in info().siblings or []}
        for name, path in ours.items():
            if name not in arrived or not _is_equal(arrived[name], path):
                raise UserError("repo", f"{name} did not arrive as it is here; start the upload again.")
        return Uploaded(f"{api.endpoint}/{repo}", done.oid)


def _is_equal(file: RepoSibling, path: Path | None) -> bool:
    expected = file.lfs.sha256 if file.lfs is not None else file.blob_id or ""
    return path is not None and file.size == path.stat().st_size and hash_of(path, expected) == expected
