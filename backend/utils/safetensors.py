"""The header of a safetensors file, checked against the file: which arrays it holds, of which type and shape, and
where.

The format: eight bytes of length, little-endian; a JSON header of that length; the arrays' bytes without gaps. Reads
the header alone, and allocates nothing because a file claims a size. Arrays are read by mlx, which trusts the header:
hence this.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from backend.utils.files import reason
from backend.utils.text import quote

LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""
BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "C64": 8,
}
"""Type → bytes of one number."""


class BrokenFile(Exception):
    """The file cannot be used as safetensors: why, as part of a sentence after the file's name."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a file. `begin` and `end` count bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> dict[str, StoredArray]:
    """Name → array, in the order of the header. Raises BrokenFile."""
    return read_header_and_metadata(file)[0]


def read_header_and_metadata(file: Path) -> tuple[dict[str, StoredArray], dict[str, str] | None]:
    """As `read_header`, and the file's metadata; None where it has none. Raises BrokenFile."""
    try:
        # Not blocking: a pipe would never answer.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise BrokenFile("was cut off, or is no safetensors file")
            if length > LONGEST_HEADER:
                raise BrokenFile(f"has a header of {length:,} bytes, more than any model needs")
            text = stream.read(length)
    except OSError as error:
        raise BrokenFile(f"cannot be read: {reason(error)}") from None
    header, metadata = _parsed(text)
    return _arrays(header, size - 8 - length), metadata


def _parsed(text: bytes) -> tuple[dict[str, Any], dict[str, str] | None]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError):
        raise BrokenFile("has a header that is no JSON") from None
    if not isinstance(header, dict):
        raise BrokenFile("has a header that names no arrays")
    header = cast("dict[str, Any]", header)
    metadata = header.pop("__metadata__", None)  # mlx writes null for no metadata
    if metadata is None:
        return header, None
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in cast("dict[str, Any]", metadata).values()
    ):
        raise BrokenFile("has a header whose __metadata__ is not text")
    return header, cast("dict[str, str]", metadata)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BrokenFile(f"holds {quote(twice, 60)} twice")
    return content


def _arrays(header: Mapping[str, Any], data: int) -> dict[str, StoredArray]:
    """Raises BrokenFile for an array that does not lie in the file as its type and shape say."""
    arrays = {name: _array(name, about) for name, about in header.items()}
    place = 0
    for name, array in sorted(arrays.items(), key=lambda item: (item[1].begin, item[1].end)):
        if array.begin != place:
            what = "overlaps another array" if array.begin < place else "lies behind a gap"
            raise BrokenFile(f"is broken: {quote(name, 60)} {what}")
        place = array.end
    if place > data:
        raise BrokenFile(f"was cut off: {place - data:,} bytes of its arrays are missing")
    if place < data:
        raise BrokenFile(f"has {data - place:,} bytes after its last array")
    return arrays


def _array(name: str, about: Any) -> StoredArray:
    about = cast("dict[str, Any]", about) if isinstance(about, dict) else {}
    dtype, shape, offsets = about.get("dtype"), about.get("shape"), about.get("data_offsets")
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise BrokenFile(f"has a header without the type, shape and place of {quote(name, 60)}")
    if dtype not in BYTES:
        raise BrokenFile(f"stores {quote(name, 60)} as {quote(dtype, 20)}, which cannot be read")
    begin, end = offsets
    if end - begin != prod(shape) * BYTES[dtype]:
        raise BrokenFile(f"is broken: {quote(name, 60)} is not as large as its shape")
    return StoredArray(dtype, tuple(shape), begin, end)


def _are_sizes(value: Any) -> bool:
    """Whether a value is a list of numbers of things: whole, not negative, in 63 bits."""
    return (
        isinstance(value, list)
        and len(cast("list[Any]", value)) <= 32
        and all(type(item) is int and 0 <= item < 2**63 for item in cast("list[Any]", value))
    )
