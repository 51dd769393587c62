"""Where people keep what no reward function needs to read: keys, tokens, passwords, browsers' data."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path

_IN_HOME = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".netrc", ".git-credentials", ".password-store"),
    *(".pypirc", ".npmrc", ".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials", ".vault-token"),
    *(".config/gh", ".config/gcloud", ".config/git/credentials", ".config/rclone", ".config/op", ".config/1Password"),
    *(".mozilla", ".thunderbird", ".config/google-chrome", ".config/chromium", ".config/BraveSoftware"),
    *(".local/share/keyrings", ".local/share/kwalletd", ".pki"),
)
_IN_A_MAC_HOME = (
    *("Library/Keychains", "Library/Cookies", "Library/Mail", "Library/Messages", "Library/Safari"),
    *("Library/Application Support/Google/Chrome", "Library/Application Support/Firefox"),
    *("Library/Application Support/BraveSoftware", "Library/Application Support/com.apple.TCC"),
)
_HUGGING_FACE_TOKENS = ("token", "stored_tokens")


def secret_places(environment: Mapping[str, str] | None = None) -> list[Path]:
    """Files and folders of secrets, whether they exist or not, in the home folder of the user database and in those that
    `environment` (this process's) names."""
    variables = os.environ if environment is None else environment
    homes = {home for home in (_home_of_user(), variables.get("HOME")) if home}
    in_home = (*_IN_HOME, *_IN_A_MAC_HOME) if sys.platform == "darwin" else _IN_HOME
    caches = {Path(home, ".cache", "huggingface") for home in homes}
    caches |= {Path(variables[name]) for name in ("HF_HOME",) if variables.get(name)}
    caches |= {Path(variables["XDG_CACHE_HOME"], "huggingface")} if variables.get("XDG_CACHE_HOME") else set()
    named = [Path(variables["HF_TOKEN_PATH"])] if variables.get("HF_TOKEN_PATH") else []
    places = [Path(home, part) for home in homes for part in in_home]
    places += [cache / token for cache in caches for token in _HUGGING_FACE_TOKENS]
    return sorted({*places, *named})


def _home_of_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container's user may be in no database
        return ""
