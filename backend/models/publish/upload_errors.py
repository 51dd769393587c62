"""What can go wrong while a model is uploaded, each as one sentence that says what to do. No sentence contains the token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from huggingface_hub.constants import HUGGINGFACE_CO_URL_HOME
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

from backend.models.hub_errors import host
from backend.spec.faults import Mistake

KEPT = "what has arrived there is kept, so start the upload again to go on"

TOKENS_PAGE = f"{HUGGINGFACE_CO_URL_HOME}settings/tokens"


@contextlib.contextmanager
def upload_errors_as_mistakes(repo_id: str, token: str) -> Iterator[None]:
    """Turn errors of the network, the Hub and the library into Mistakes about the repository."""
    try:
        yield
    # The library wraps what happened to one file in a RuntimeError, and what a storage refuses in a ValueError.
    except (HTTPError, HFValidationError, OSError, RuntimeError, ValueError) as error:
        sentence = explain_upload(_cause(error), repo_id)
        if sentence is None:
            raise
        raise Mistake("repo", sentence.replace(token, "…") if token else sentence) from None


def explain_upload(error: BaseException, repo_id: str) -> str | None:
    """What the user should know of this error, and can do about it; None for one that is not the network's or the Hub's."""
    match error:
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, so nothing is sent to Hugging Face."
        case HFValidationError():
            return f"{repo_id} cannot be the name of a repository: write owner/name, of letters, digits, -, _ and full stops."
        case HfHubHTTPError():
            return _explain_answer(error, repo_id)
        case HTTPError():
            return _explain_connection(error)
        case ValueError() if "metadata in README.md" in str(error):
            return f"{host()} does not accept the settings at the top of the card: {_last_line(error)}."
        case ValueError() if "LFS batch API" in str(error):
            return f"{host()} does not take a file: {_last_line(error)}."
        case OSError():
            return f"{error.filename or 'A file'} cannot be read: {error.strerror or error}."
    return None


def _explain_answer(error: HfHubHTTPError, repo_id: str) -> str:
    status = error.response.status_code
    said = (error.server_message or "").strip().rstrip(".")
    match status:
        case 401:
            return f"{host()} does not accept the token; log in again with a token of {TOKENS_PAGE}."
        case 403:
            why = f" ({said})" if said else ""
            return f"The token may not write to {repo_id}{why}; use one with write access, or another owner."
        case 404:
            return f"{host()} has no repository {repo_id} that this token may see."
        case 409 | 412:
            return f"Someone else has changed {repo_id} meanwhile; look at it, and start the upload again."
        case 413:
            return f"{host()} says that this is too large{f' ({said})' if said else ''}; free storage there, or choose fewer bits."
        case 429:
            return f"{host()} has been asked too often; wait some minutes: {KEPT}."
        case _ if status >= 500:
            return f"{host()} has trouble of its own ({status}); try again later: {KEPT}."
    return f"{host()} answers with an error ({status}){f': {said}' if said else ''}."


def _explain_connection(error: HTTPError) -> str:
    if "Timeout" in type(error).__name__:
        return f"{host()} does not answer; {KEPT}."
    return f"The connection to {host()} broke off; {KEPT}."


def _cause(error: BaseException) -> BaseException:
    """The error that the library has wrapped."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].lstrip("- ").strip("`").rstrip(".")
