"""The access token for Hugging Face: where it is found, and how it is kept in the system's keychain.

In this order: HF_TOKEN in the environment, our entry in the keychain, what `hf auth login` has stored. We write it to the keychain only;
it is in no file, log, argument or message of ours.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import keyring
import keyring.errors
from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import HUGGINGFACE_CO_URL_HOME
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from keyring.backends import chainer

from backend.models.hub_errors import host
from backend.utils.errors import UserError

# What can go wrong while a model is uploaded, each as one sentence that says what to do. No sentence contains the
# token.

KEPT = "what has arrived there is kept, so start the upload again to go on"

TOKENS_PAGE = f"{HUGGINGFACE_CO_URL_HOME}settings/tokens"


@contextlib.contextmanager
def upload_errors_as_mistakes(repo_id: str, token: str) -> Iterator[None]:
    """Turn errors of the network, the Hub and the library into UserErrors about the repository."""
    try:
        yield
    # The library wraps what happened to one file in a RuntimeError, and what a storage refuses in a ValueError.
    except (HTTPError, HFValidationError, OSError, RuntimeError, ValueError) as error:
        sentence = explain_upload(_cause(error), repo_id)
        if sentence is None:
            raise
        raise UserError("repo", sentence.replace(token, "…") if token else sentence) from None


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


# ── hub token ────────────────────────────────────────────────────────────────────────────────────────────────────────

SERVICE, ENTRY = "GRPO Studio", "Hugging Face token"
"""Name and account of our entry in the keychain."""

TRUSTED_PRIORITY = 1.0
"""From this on keyring's backends are keychains; those below keep secrets in plain files, or nowhere."""

Source = Literal["HF_TOKEN", "keychain", "hf auth login"]


@dataclass(frozen=True, slots=True, repr=False)  # without a repr: a traceback may print it
class HubToken:
    """A token, and where it was found."""

    value: str
    source: Source


@dataclass(frozen=True, slots=True)
class Account:
    """Whose token it is."""

    name: str
    organisations: tuple[str, ...]
    can_write: bool
    source: Source


def find_token() -> HubToken | None:
    """The token that an upload uses; None where there is none."""
    if value := (os.environ.get("HF_TOKEN") or "").strip():
        return HubToken(value, "HF_TOKEN")
    if (chain := _keychain()) is not None and (value := _read(chain)):
        return HubToken(value, "keychain")
    stored = get_token()
    return HubToken(stored, "hf auth login") if stored else None


def need_token() -> HubToken:
    """Raises UserError where there is none, with what to do."""
    found = find_token()
    if found is None:
        raise UserError(
            "token",
            f"You are not logged in to Hugging Face; log in with a token with write access, from {TOKENS_PAGE}.",
        )
    return found


def whose(token: HubToken) -> Account:
    """Ask the Hub whose token it is. Raises UserError for one that it does not accept, or where it cannot be asked."""
    with upload_errors_as_mistakes("", token.value):
        about = HfApi(token=token.value).whoami()
    organisations = tuple(str(row.get("name")) for row in about.get("orgs") or [])
    role = ((about.get("auth") or {}).get("accessToken") or {}).get("role")
    # A fine-grained token's rights depend on the repository; it may write until the Hub says that it may not.
    return Account(str(about.get("name")), organisations, role != "read", token.source)


def log_in(value: str) -> Account:
    """Check a token with the Hub, and keep it in the keychain. Raises UserError; nothing is kept then."""
    value = value.strip()
    if not value:
        raise UserError("token", "No token was given.")
    chain = _keychain()
    if chain is None:
        raise UserError(
            "token",
            "This system has no keychain that could keep the token (on Linux: GNOME Keyring or KWallet); log in with "
            "`hf auth login`, or set HF_TOKEN.",
        )
    account = whose(HubToken(value, "keychain"))
    try:
        chain.set_password(SERVICE, ENTRY, value)
    except (keyring.errors.KeyringError, OSError):
        raise UserError("token", "The keychain did not take the token; unlock it, and log in again.") from None
    return account


def log_out() -> bool:
    """Delete our entry; → whether there was one. What `hf auth login` has stored stays."""
    chain = _keychain()
    if chain is None or not _read(chain):
        return False
    try:
        chain.delete_password(SERVICE, ENTRY)
    except (keyring.errors.KeyringError, OSError):
        raise UserError("token", "The keychain did not delete the token; unlock it, and log out again.") from None
    return True


def _keychain() -> Any:
    """The system's keychain; None where keyring finds none that keeps secrets from other users."""
    found = keyring.get_keyring()
    backends = found.backends if isinstance(found, chainer.ChainerBackend) else [found]
    return next((backend for backend in backends if backend.priority >= TRUSTED_PRIORITY), None)


def _read(chain: Any) -> str:
    try:
        return chain.get_password(SERVICE, ENTRY) or ""
    except (keyring.errors.KeyringError, OSError):  # locked, or its service is gone: the other places are tried
        return ""
