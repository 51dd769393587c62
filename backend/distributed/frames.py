"""A message between two ranks as bytes: a prefix with two lengths, a JSON header, the arrays' values.

No pickle, and no length is trusted: a header or a value that is announced takes memory only as it arrives, and arrays of an unknown type
or a wrong size are refused. Byte order is little-endian, as on every machine that MLX runs on.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

PREFIX = struct.Struct("<4sIQ")
"""MAGIC, bytes of the header, bytes of the arrays."""
MAGIC = b"GRS1"
LONGEST_HEADER = 256 << 20
"""Bytes. Problems are sent whole, with their prompts and rows."""
LONGEST_ARRAYS = 16 << 30
"""Bytes. The tokens and log-probabilities of a step are some MB."""
MOST_ARRAYS = 1 << 20
MOST_AXES = 8
PIECE = 1 << 20
"""Bytes read at once."""
ALIGNED = 16
"""Each array begins at a multiple of this many bytes."""
DTYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)

Arrays = Mapping[str, np.ndarray]


class BadFrame(Exception):
    """Bytes that are no message; says what is wrong with them."""


def encode(kind: str, body: Mapping[str, Any], arrays: Arrays) -> list[bytes | memoryview]:
    """The parts of a frame, to be sent one after the other. Raises TypeError or ValueError for what JSON or `DTYPES` do not have."""
    values: list[bytes | memoryview] = []
    about: list[tuple[str, str, list[int]]] = []
    size = 0
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise TypeError(f"{name} is an array of {array.dtype}")
        about.append((name, array.dtype.name, list(array.shape)))
        packed = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        padding = bytes(-packed.nbytes % ALIGNED)
        values += [packed, padding]
        size += packed.nbytes + len(padding)
    header = json.dumps({"kind": kind, "body": dict(body), "arrays": about}, ensure_ascii=False).encode(
        errors="surrogatepass"
    )
    if len(header) > LONGEST_HEADER or size > LONGEST_ARRAYS or len(about) > MOST_ARRAYS:
        raise ValueError(f"a message of {len(header):,} and {size:,} bytes is too long")
    return [PREFIX.pack(MAGIC, len(header), size) + header, *values]


def decode(read: Callable[[int], bytearray]) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """Kind, body and arrays of the next frame. `read` returns exactly as many bytes as it is asked for, and takes memory only as they
    arrive. Raises BadFrame."""
    magic, header_bytes, array_bytes = PREFIX.unpack(read(PREFIX.size))
    if magic != MAGIC:
        raise BadFrame("it does not begin as a message does")
    if header_bytes > LONGEST_HEADER or array_bytes > LONGEST_ARRAYS:
        raise BadFrame(f"it announces {header_bytes:,} and {array_bytes:,} bytes")
    header = _header(read(header_bytes))
    kind, body, about = header.get("kind"), header.get("body"), header.get("arrays")
    if not isinstance(kind, str) or not isinstance(body, dict) or not isinstance(about, list):
        raise BadFrame("its header lacks the kind, the body or the arrays")
    entries = cast("list[Any]", about)
    if len(entries) > MOST_ARRAYS:
        raise BadFrame(f"it announces {len(entries):,} arrays")
    layout = [_layout(entry) for entry in entries]
    if sum(_padded(dtype.itemsize * math.prod(shape)) for _, dtype, shape in layout) != array_bytes:
        raise BadFrame("its arrays are not as long as it says")
    return kind, cast("dict[str, Any]", body), _arrays(layout, read(array_bytes))


def _header(raw: bytearray) -> dict[str, Any]:
    try:
        header: Any = json.loads(raw.decode(errors="surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise BadFrame("its header is no JSON") from error
    if not isinstance(header, dict):
        raise BadFrame("its header is no mapping")
    return cast("dict[str, Any]", header)


def _layout(entry: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    """Name, type and shape of one array."""
    try:
        name, dtype, shape = entry
        axes = tuple(shape)
        sound = isinstance(name, str) and dtype in DTYPES and len(axes) <= MOST_AXES
        sound = sound and all(type(axis) is int and 0 <= axis <= LONGEST_ARRAYS for axis in axes)
    except (TypeError, ValueError) as error:
        raise BadFrame("it describes an array in another way") from error
    if not sound:
        raise BadFrame("it describes an array that cannot be")
    return name, np.dtype(dtype), axes


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _arrays(layout: list[tuple[str, np.dtype[Any], tuple[int, ...]]], values: bytearray) -> dict[str, np.ndarray]:
    """Arrays that share the memory of `values`, and may be written to."""
    arrays: dict[str, np.ndarray] = {}
    offset = 0
    for name, dtype, shape in layout:
        count = math.prod(shape)
        arrays[name] = np.frombuffer(values, dtype, count, offset).reshape(shape) if count else np.empty(shape, dtype)
        offset += _padded(count * dtype.itemsize)
    return arrays
