"""The header of a safetensors file, which mlx trusts, as the library `safetensors` checks it against the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from backend.utils.files import open_regular, reason
from backend.utils.text import quote

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
    try:
        open_regular(file).close()  # a pipe is not waited for
        with safe_open(file, framework="numpy") as stored:
            slices = {name: stored.get_slice(name) for name in stored.offset_keys()}
            arrays = {name: StoredArray(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
            metadata = stored.metadata()
    except OSError as error:
        raise BrokenFile(f"cannot be read: {reason(error)}") from None
    except SafetensorError as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise BrokenFile(f"was cut off, or is no sound safetensors file: {quote(why, 60)}") from None
    for name, array in arrays.items():
        if array.dtype not in BYTES:
            raise BrokenFile(f"stores {quote(name, 60)} as {array.dtype}, which cannot be read")
    return arrays, metadata
