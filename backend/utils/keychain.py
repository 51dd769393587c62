"""Our entries in the system's keychain: the Hugging Face token, and keys of the servers that judges ask."""

from typing import Any

import keyring
import keyring.errors
from keyring.backends import chainer

from backend.utils.errors import UserError

SERVICE = "GRPO Studio"
TRUSTED_PRIORITY = 1.0  # keyring backends below this priority store secrets unprotected


def keychain() -> Any:
    """The keychain, or None where this system has none that protects what it holds."""
    found = keyring.get_keyring()
    backends = found.backends if isinstance(found, chainer.ChainerBackend) else [found]
    return next((backend for backend in backends if backend.priority >= TRUSTED_PRIORITY), None)


def stored(entry: str) -> str:
    """The secret of an entry; "" without one, or where the keychain is locked."""
    if (chain := keychain()) is None:
        return ""
    try:
        return chain.get_password(SERVICE, entry) or ""
    except (keyring.errors.KeyringError, OSError):
        return ""


def store(entry: str, secret: str, setting: str, what: str) -> None:
    """Store `what`, such as a token. Raises UserError."""
    try:
        keychain().set_password(SERVICE, entry, secret)
    except (keyring.errors.KeyringError, OSError):
        raise UserError(setting, f"The keychain did not take the {what}; unlock it, and try again.") from None


def forget(entry: str, setting: str, what: str) -> bool:
    """Delete an entry; False if there was none. Raises UserError."""
    if not stored(entry):
        return False
    try:
        keychain().delete_password(SERVICE, entry)
    except (keyring.errors.KeyringError, OSError):
        raise UserError(setting, f"The keychain did not delete the {what}; unlock it, and try again.") from None
    return True
