"""Texts that a person may send to others, without what is private in them: home folder, user name, access tokens."""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable
from pathlib import Path

HIDDEN = "…"
"""What stands for a secret."""
_SECRETS = (
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"),  # Hugging Face
    re.compile(r"\b(?:ghp|gho|ghs|github_pat)_\w{16,}"),  # GitHub
    re.compile(r"\bsk-[\w-]{16,}"),  # OpenAI and others
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # user:password of an address
    re.compile(r"(?i)(?<=bearer )\S+"),
    re.compile(r"(?i)((?<=token[=:])|(?<=token[=:] )|(?<=password[=:])|(?<=password[=:] ))[^\s,;'\"]+"),
)
_OTHER_HOMES = re.compile(r"(?<![\w/])/(?:home|Users)/[^/\s'\":]+")
SHORTEST_NAME = 3
"""Shorter user names are left in place outside paths: they would be found in the middle of ordinary words."""
_ORDINARY = {"root", "user", "admin", "runner", "ubuntu"}
"""User names that tell nobody who somebody is, and that ordinary sentences contain."""


def without_private(text: str, folders: Iterable[str] = ()) -> str:
    """`text` with the home folder as ~, each of `folders` (such as a temporary one) as its last part, homes of others as /home/…, and
    without the user's name, access tokens and passwords."""
    for folder in sorted(filter(None, folders), key=len, reverse=True):
        text = text.replace(folder, Path(folder).name)
    home = str(Path.home())
    if len(home) > 1:  # "/" is the home folder of some services
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = _OTHER_HOMES.sub(f"/home/{HIDDEN}", text)
    for secret in _SECRETS:
        text = secret.sub(HIDDEN, text)
    name = user_name()
    if len(name) >= SHORTEST_NAME and name.lower() not in _ORDINARY:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, text)
    return text


def user_name() -> str:
    """The name of the user's account; "" where the system has none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number without a name
        return ""
