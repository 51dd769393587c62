"""Lengths and checksums of a checkpoint's files, recorded in its state.json so that damage is noticed before it is trained on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

PART = 4 * 2**20
"""Bytes that are read at a time."""


def file_sums(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """File name → length and XXH3. Read back after writing: the system still has the bytes in its cache. Raises OSError."""
    return {file.name: {"bytes": file.stat().st_size, "xxh3": _xxh3(file)} for file in sorted(files)}


def _xxh3(path: Path) -> str:
    """64 bits of xxHash, at several GB a second: it finds damage, and proves nothing about intent. A part of the file at a time: a run that
    has just failed for want of memory is saved too."""
    sums, part = xxhash.xxh3_64(), memoryview(bytearray(PART))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(part):
            sums.update(part[:count])
    return sums.hexdigest()
