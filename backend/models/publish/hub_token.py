"""The access token for Hugging Face: where it is found, and how it is kept in the system's keychain.

In this order: HF_TOKEN in the environment, our entry in the keychain, what `hf auth login` has stored. We write it to the keychain only;
it is in no file, log, argument or message of ours.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import keyring
import keyring.errors
from huggingface_hub import HfApi, get_token
from keyring.backends import chainer

from backend.models.publish.upload_errors import TOKENS_PAGE, upload_errors_as_mistakes
from backend.spec.faults import Mistake

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
    """Raises Mistake where there is none, with what to do."""
    found = find_token()
    if found is None:
        raise Mistake(
            "token",
            f"You are not logged in to Hugging Face; log in with a token with write access, from {TOKENS_PAGE}.",
        )
    return found


def whose(token: HubToken) -> Account:
    """Ask the Hub whose token it is. Raises Mistake for one that it does not accept, or where it cannot be asked."""
    with upload_errors_as_mistakes("", token.value):
        about = HfApi(token=token.value).whoami()
    organisations = tuple(str(row.get("name")) for row in about.get("orgs") or [])
    role = ((about.get("auth") or {}).get("accessToken") or {}).get("role")
    # A fine-grained token's rights depend on the repository; it may write until the Hub says that it may not.
    return Account(str(about.get("name")), organisations, role != "read", token.source)


def log_in(value: str) -> Account:
    """Check a token with the Hub, and keep it in the keychain. Raises Mistake; nothing is kept then."""
    value = value.strip()
    if not value:
        raise Mistake("token", "No token was given.")
    chain = _keychain()
    if chain is None:
        raise Mistake(
            "token",
            "This system has no keychain that could keep the token (on Linux: GNOME Keyring or KWallet); log in with "
            "`hf auth login`, or set HF_TOKEN.",
        )
    account = whose(HubToken(value, "keychain"))
    try:
        chain.set_password(SERVICE, ENTRY, value)
    except (keyring.errors.KeyringError, OSError):
        raise Mistake("token", "The keychain did not take the token; unlock it, and log in again.") from None
    return account


def log_out() -> bool:
    """Delete our entry; → whether there was one. What `hf auth login` has stored stays."""
    chain = _keychain()
    if chain is None or not _read(chain):
        return False
    try:
        chain.delete_password(SERVICE, ENTRY)
    except (keyring.errors.KeyringError, OSError):
        raise Mistake("token", "The keychain did not delete the token; unlock it, and log out again.") from None
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
