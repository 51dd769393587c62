"""The header of a safetensors file, which mlx trusts, checked against the file: eight bytes of length, little-endian; a
JSON header of that length; the arrays' bytes without gaps. The library `safetensors` would load numpy."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from backend.utils.files import open_regular, reason
from backend.utils.text import quote

LONGEST_HEADER = 100_000_000  # bytes; the limit of the library
UNSOUND = "was cut off, or is not a valid safetensors file"
BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}  # type that mlx reads → bytes of one number


class BrokenFile(Exception):
    """The file cannot be used as safetensors: why, as part of a sentence after the file's name."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, StoredArray]:
    """Name → array, in the order of the file. Raises BrokenFile."""
    return read_header_and_metadata(file)[0]


def read_header_and_metadata(file: Path) -> tuple[dict[str, StoredArray], dict[str, str] | None]:
    """As `read_header`, and the file's metadata; None where it has none. Raises BrokenFile."""
    arrays: dict[str, StoredArray] = {}
    try:
        with open_regular(file) as stream:
            size = stream.seek(0, 2) - 8
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length <= min(size, LONGEST_HEADER) else {}
        metadata = header.pop("__metadata__", None)  # mlx writes null for no metadata
        place = 0
        for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            arrays[name] = StoredArray(about["dtype"], tuple(about["shape"]))
            if about["dtype"] not in BYTES:
                raise BrokenFile(f"stores {quote(name, 60)} as {quote(str(about['dtype']), 20)}, which cannot be read")
            begin, end = about["data_offsets"]
            is_sound = begin == place and end - begin == prod(about["shape"]) * BYTES[about["dtype"]]
            place = end if is_sound else -1
        is_text = metadata is None or all(isinstance(text, str) for text in metadata.values())
    except OSError as error:
        raise BrokenFile(f"cannot be read: {reason(error)}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BrokenFile(UNSOUND) from None
    if place != size - length or not is_text:
        raise BrokenFile(UNSOUND)
    return arrays, metadata
