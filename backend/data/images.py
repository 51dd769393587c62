"""Images of a dataset's rows: the columns `image` and `images`, and the image parts of messages, become paths.

Pictures that are not files are written once, under the hash of their bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from backend.config.model_and_data_names import DATA_SUFFIXES
from backend.data.files import Row
from backend.types import image_paths
from backend.utils.errors import UserError
from backend.utils.files import possible_path
from backend.utils.hub_cache import is_downloaded
from backend.utils.places import pictures_folder
from backend.utils.text import quote
from backend.vision.pictures import picture_size

IMAGES = ("image", "images")
"""Columns with images, as TRL names them."""


def with_paths(row: Row, source: str, where: str) -> Row:
    """The row with every image as the path of a checked picture. `source`: the file of the rows, or a Hub split's name.
    Raises UserError naming row and column."""
    changed: Row = {}
    for name in [*IMAGES, *(name for name, cell in row.items() if isinstance(cell, list) and any(_parts(cell)))]:
        cell, place = row.get(name), f"The column {quote(name, 24)} of {where}"
        if name not in IMAGES:
            changed[name] = [_message_with_paths(message, source, place) for message in row[name]]
        elif isinstance(cell, list):
            changed[name] = [_path(each, source, place) for each in cell]
        elif cell is not None and not (isinstance(cell, str) and not cell):
            changed[name] = _path(cell, source, place)
    return {**row, **changed} if changed else row


def placed(messages: list[dict[str, Any]], row: Row, where: str) -> list[dict[str, Any]]:
    """The chat with the images of the row's columns in its empty image parts, or else before the user's first text.
    Raises UserError."""
    columns = {name: row[name] for name in IMAGES if row.get(name)}
    empty = [part for part in _parts(messages) if _is_empty(part)]
    if not columns and not empty:
        return messages
    if len(columns) == 2:
        raise UserError("data", f"There are images in both columns image and images of {where}; leave one of them.")
    name, cell = next(iter(columns.items()), ("image", []))
    paths = [cell] if isinstance(cell, str) else list(cell)
    if empty or (own := image_paths(messages)):
        if not empty and own == paths:
            return messages
        if len(empty) != len(paths):
            has = f"{len(paths)} images in the column {name}, and {len(empty)} image parts in its messages wait for one"
            raise UserError("data", f"{where[0].upper()}{where[1:]} has {has}.")
        rest = iter(paths)
        return [{**message, "content": _filled(message["content"], rest)} for message in messages]
    place = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if place is None:
        raise UserError("data", f"There is no message of the user in {where}, so no place for its images.")
    content = messages[place]["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [*({"type": "image", "image": path} for path in paths), *text]
    return [*messages[:place], {**messages[place], "content": parts}, *messages[place + 1 :]]


def _parts(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        yield from content if isinstance(content, list) else ()


def _is_empty(part: Any) -> bool:
    return part["type"] == "image" and part.get("image") is None


def _filled(content: Any, paths: Iterator[str]) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "image", "image": next(paths)} if _is_empty(part) else part for part in content]


def _message_with_paths(message: Any, source: str, place: str) -> Any:
    if not any(_parts([message])):
        return message
    parts = [
        part | {"image": _path(part["image"], source, place)}
        if isinstance(part, dict) and part.get("type") == "image" and part.get("image") is not None
        else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _path(cell: Any, source: str, place: str) -> str:
    """The path of one image, which is checked."""
    if isinstance(cell, Mapping) and cell.keys() & {"bytes", "path"}:  # an Image of `datasets`
        cell = cell.get("bytes") if cell.get("bytes") is not None else cell.get("path")
    if hasattr(cell, "convert"):  # of PIL
        stream = io.BytesIO()
        cell.convert("RGB").save(stream, "PNG")
        cell = stream.getvalue()
    if isinstance(cell, bytes):
        path = _written(cell)
    elif not isinstance(cell, str):
        raise UserError("data", f"{place} holds {quote(cell, 40)}, which is no image: neither a path nor its bytes.")
    elif cell.startswith("data:") or "://" in cell:
        raise UserError("data", f"{place} holds an address, {quote(cell, 40)}; save the image as a file.")
    else:
        named = possible_path(cell) if cell else None
        if named is None:
            raise UserError("data", f"{place} holds {quote(cell, 40) or 'nothing'}, which is no path.")
        folder = _folder_of(source)
        path = str(folder / named) if folder else cell
        if folder is None and not is_downloaded(named):
            raise UserError("data", f"{place} names a file that is not part of the dataset, {quote(cell, 60)}.")
    try:
        picture_size(path)
    except UserError as error:
        raise UserError("data", f"{place}: {error.faults[0].sentence}") from None
    return path


@cache
def _folder_of(source: str) -> Path | None:
    return Path(source).absolute().parent if Path(source).suffix.lower() in DATA_SUFFIXES else None


def _written(content: bytes) -> str:
    path = pictures_folder() / blake2b(content, digest_size=16).hexdigest()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_bytes(content)
        draft.replace(path)
    return str(path)
