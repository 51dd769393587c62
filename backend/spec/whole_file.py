"""Small files that are never seen half written: replaced by rename, their content on disk before their name is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, content: str | Iterable[bytes]) -> None:
    """Write a file anew. A reader finds the old content or the new one, also after a power cut. Raises OSError; nothing else is left behind
    then, and the old content stays."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.writelines([content.encode()] if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # before the rename: a power cut must not leave an empty file of the new name
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # a rename is data of the folder
    finally:
        os.close(folder)
