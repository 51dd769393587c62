"""Paths that a user supplied, and why the system could not use one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TypeGuard

from backend.spec.faults import Mistake
from backend.spec.user_input.text import shown

LONGEST_NAME = 255
"""Bytes of one part of a path, on every file system in use."""
LONGEST_PATH = 1023 if sys.platform == "darwin" else 4095
"""Bytes of a whole path: PATH_MAX without its final NUL."""


def user_path(text: str, setting: str, base: Path | None = None) -> Path:
    """The path that a user wrote, with ~ expanded and, where it is relative, below `base`. Looks at no file.

    Raises Mistake for a NUL, a lone surrogate (bytes that are no UTF-8 text; no config.yaml could name them), a user that this machine
    does not have, and a name or path that no file system takes.
    """
    if "\0" in text:
        raise Mistake(setting, f"{shown(text)} cannot be a path: it contains a NUL character.")
    if not is_text(text):
        raise Mistake(setting, f"{shown(text)} cannot be a path: it contains characters that are not valid text.")
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # pathlib's answer for an unknown user, and for a user without a home
        user = shown(Path(text).parts[0], 40)
        raise Mistake(setting, f"{shown(text)} cannot be a path: this machine has no home folder {user}.") from None
    path = path if base is None else base / path
    too_long = next((part for part in path.parts if len(os.fsencode(part)) > LONGEST_NAME), None)
    if too_long is not None:
        raise Mistake(
            setting, f"{shown(too_long, 40)} cannot be a file's name: it is longer than {LONGEST_NAME} bytes."
        )
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise Mistake(setting, f"{shown(text)} cannot be a path: it is longer than {LONGEST_PATH} bytes.")
    return path


def possible_path(text: str) -> Path | None:
    """`user_path` for a text that may be something else than a path, such as an id; None where it can be none."""
    try:
        return user_path(text, "")
    except Mistake:
        return None


def resolved(path: Path) -> Path:
    """`path.resolve()`, which before Python 3.13 raises RuntimeError for a link that leads to itself; that one stays as it is."""
    return Path(os.path.realpath(path))


def is_folder_name(value: object) -> TypeGuard[str]:
    """Whether a value names a folder directly inside another, and nothing outside of it."""
    if not isinstance(value, str) or value in ("", ".", "..") or "/" in value or "\0" in value:
        return False
    return is_text(value) and len(value.encode()) <= LONGEST_NAME


def is_text(text: str) -> bool:
    """Whether `text` can be written as UTF-8: it contains no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def reason(error: OSError) -> str:
    """The system's cause in a few words, such as Permission denied, without the path that the sentence names already."""
    return shown(error.strerror or error)
