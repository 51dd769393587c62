"""Errors of the network, the Hub, the token and the disk, each as one sentence for the user."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the HTTP library that huggingface_hub uses
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from backend.utils.errors import UserError
from backend.utils.hub_cache import ENDPOINT_VARIABLE

SETTING = {"model": "model", "dataset": "data"}
"""The setting that names a repository of this type."""

_ERROR_NUMBER = re.compile(r"\[Errno -?\d+\]\s*")
_NO_ADDRESS = (
    "Name or service not known",
    "nodename nor servname",
    "Temporary failure in name resolution",
    "No address",
)
"""What Linux and macOS say when a name has no address: the usual sign that there is no network."""

LOG_IN = "log in with `hf auth login`"


@contextlib.contextmanager
def hub_errors_as_mistakes(repo_id: str, repo_type: str, setting: str = "") -> Iterator[None]:
    """Turn errors of the network, the Hub, the token and the disk into UserErrors that name the repository. `setting` is the
    setting that the repository's name comes from, if not the usual one."""
    try:
        yield
    except (HTTPError, OSError, HFValidationError) as error:
        raise UserError(setting or SETTING[repo_type], explain(error, repo_id, repo_type)) from error


def explain(error: Exception, repo_id: str, repo_type: str) -> str:
    """What the user should know of this error, and can do about it."""
    name = f"the {repo_type} {repo_id}" if repo_id else "it"
    match error:
        case LocalEntryNotFoundError() if isinstance(error.__cause__, Exception):
            return explain(error.__cause__, repo_id, repo_type)
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, so Hugging Face is not asked for anything."
        case GatedRepoError():
            page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"
            return f"The {repo_type} {repo_id} is gated: accept its conditions at {page}, and {LOG_IN}."
        case HFValidationError():
            return f"{repo_id} is not an owner/name id on Hugging Face."
        case HfHubHTTPError():
            return _explain_answer(error, name)
        case HTTPError():
            return _explain_silence(error, repo_id, repo_type)
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"The disk that holds {constants.HF_HUB_CACHE} is full; what has arrived is kept, so make room and resume."
    return f"{error.filename or constants.HF_HUB_CACHE} cannot be written: {error.strerror or error}."  # type: ignore[attr-defined]


def _explain_answer(error: HfHubHTTPError, name: str) -> str:
    """The Hub answered with an HTTP error."""
    status = error.response.status_code
    if isinstance(error, RepositoryNotFoundError):
        may = "the token of this machine may not see it" if get_token() else f"it is private: then {LOG_IN}"
        return f"{host()} has no {name.removeprefix('the ')}, or {may}."
    if status == 401:
        return f"{host()} does not accept the token of this machine; {LOG_IN} again, or mend HF_TOKEN."
    if status == 403:
        return f"{host()} does not let the token of this machine read {name}."
    if status == 404:
        return f"{host()} has no such file or revision of {name}."
    if status == 429:
        return f"{host()} has been asked too often; try again in a few minutes."
    if status >= 500:
        return f"{host()} has trouble of its own ({status}); try again later."
    return f"{host()} answers with an error ({status}) for {name}."


def host() -> str:
    """Hugging Face, or the host that HF_ENDPOINT names instead, at any place of a sentence."""
    netloc = urlsplit(constants.ENDPOINT).netloc
    return "Hugging Face" if netloc == "huggingface.co" else f"{netloc} ({ENDPOINT_VARIABLE})"


def _explain_silence(error: Exception, repo_id: str, repo_type: str) -> str:
    """The Hub was not reached at all."""
    unreached = f"{host()} cannot be reached: {_reason(error)}"
    if not repo_id:
        return f"{unreached}; check the connection, or choose what is on this machine."
    return f"The {repo_type} {repo_id} is not on this machine, and {unreached}; connect, or choose a {repo_type} that is here."


def _reason(error: Exception) -> str:
    """Why no answer came, in words; of the system's own message without its number."""
    if "Timeout" in type(error).__name__:
        return "it does not answer"
    said = _ERROR_NUMBER.sub("", str(error)).strip().rstrip(".")
    if any(words in said for words in _NO_ADDRESS):
        return "this machine seems to be offline"
    return said or type(error).__name__
