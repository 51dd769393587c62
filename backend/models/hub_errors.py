"""What went wrong between here and Hugging Face, in one sentence each."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from urllib.parse import urlsplit

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # httpx's, of whichever httpx the library stands on
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from backend.spec.faults import Mistake

SETTING = {"model": "model", "dataset": "data"}
"""The setting that a repository of this type stands in."""

LOG_IN = "log in with `hf auth login`"


@contextlib.contextmanager
def in_words(repo_id: str, repo_type: str, setting: str = "") -> Iterator[None]:
    """Raises Mistake, naming the repository, for what may go wrong with the network, the Hub, the token or the disk.
    `setting` is where the name stands, if not in the usual one."""
    try:
        yield
    except (HTTPError, OSError, HFValidationError) as error:
        raise Mistake(setting or SETTING[repo_type], sentence(error, repo_id, repo_type)) from error


def sentence(error: Exception, repo_id: str, repo_type: str) -> str:
    """What a person should know of this error, and do about it."""
    called = f"the {repo_type} {repo_id}" if repo_id else "it"
    match error:
        case LocalEntryNotFoundError() if isinstance(error.__cause__, Exception):
            return sentence(error.__cause__, repo_id, repo_type)
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, so Hugging Face is not asked for anything."
        case GatedRepoError():
            page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"
            return f"The {repo_type} {repo_id} is gated: accept its conditions at {page}, and {LOG_IN}."
        case HFValidationError():
            return f"{repo_id} is not an owner/name id on Hugging Face."
        case HfHubHTTPError():
            return _answered(error, called)
        case HTTPError():
            return f"{host()} cannot be reached ({_plain(error)}); check the connection, or choose what is on this machine."
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"The disk that holds {constants.HF_HUB_CACHE} is full; what has arrived is kept, so make room and resume."
    return f"{error.filename or constants.HF_HUB_CACHE} cannot be written: {error.strerror or error}."  # type: ignore[attr-defined]


def _answered(error: HfHubHTTPError, called: str) -> str:
    """The Hub answered, and it was not what was asked for."""
    status = error.response.status_code
    if isinstance(error, RepositoryNotFoundError):
        may = "the token of this machine may not see it" if get_token() else f"it is private: then {LOG_IN}"
        return f"{host()} has no {called.removeprefix('the ')}, or {may}."
    if status == 401:
        return f"{host()} does not accept the token of this machine; {LOG_IN} again, or mend HF_TOKEN."
    if status == 403:
        return f"{host()} does not let the token of this machine read {called}."
    if status == 404:
        return f"{host()} has no such file or revision of {called}."
    if status == 429:
        return f"{host()} has been asked too often; try again in a few minutes."
    if status >= 500:
        return f"{host()} has trouble of its own ({status}); try again later."
    return f"{host()} answers with an error ({status}) for {called}."


def host() -> str:
    """The Hub as people call it, or the host that HF_ENDPOINT names in its place."""
    named = urlsplit(constants.ENDPOINT).netloc
    return "Hugging Face" if named == "huggingface.co" else f"The Hub at {named}"


def _plain(error: Exception) -> str:
    if "Timeout" in type(error).__name__:
        return "it does not answer"
    return str(error).strip().rstrip(".") or type(error).__name__
