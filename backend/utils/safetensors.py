"""The header of a safetensors file, which mlx trusts, checked against the file. The format: eight bytes of length,
little-endian; a JSON header of that length; the arrays' bytes without gaps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from backend.utils.files import open_regular, reason
from backend.utils.text import quote

LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself
BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}  # type → bytes of one number


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
        with open_regular(file) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise BrokenFile("was cut off, or is no safetensors file")
            if length > LONGEST_HEADER:
                raise BrokenFile(f"has a header of {length:,} bytes, more than any model needs")
            text = stream.read(length)
    except OSError as error:
        raise BrokenFile(f"cannot be read: {reason(error)}") from None
    try:
        header = json.loads(text.decode())  # of a name given twice, one leaves a gap
    except (ValueError, RecursionError):
        raise BrokenFile("has a header that is no JSON") from None
    if not isinstance(header, dict):
        raise BrokenFile("has a header that names no arrays")
    metadata = header.pop("__metadata__", None)  # mlx writes null for no metadata
    is_text = isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    if metadata is not None and not is_text:
        raise BrokenFile("has a header whose __metadata__ is not text")
    arrays = {name: _array(name, about) for name, about in header.items()}
    place, data = 0, size - 8 - length
    for name, array in sorted(arrays.items(), key=lambda item: (item[1].begin, item[1].end)):
        if array.begin != place:
            what = "overlaps another array" if array.begin < place else "lies behind a gap"
            raise BrokenFile(f"is broken: {quote(name, 60)} {what}")
        place = array.end
    if place > data:
        raise BrokenFile(f"was cut off: {place - data:,} bytes of its arrays are missing")
    if place < data:
        raise BrokenFile(f"has {data - place:,} bytes after its last array")
    return arrays, metadata


def _array(name: str, about: Any) -> StoredArray:
    about = about if isinstance(about, dict) else {}
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
    return isinstance(value, list) and len(value) <= 32 and all(type(n) is int and 0 <= n < 2**63 for n in value)
