"""Images of a dataset's rows: the columns `image` and `images`, and the image parts of messages, become paths. Those
that are not files are written once, under the hash of their bytes."""

import io
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from backend.config.model_and_data_names import DATA_SUFFIXES
from backend.data.files import Row
from backend.types import IMAGES, image_parts
from backend.utils.disk import writing
from backend.utils.errors import UserError
from backend.utils.files import resolved
from backend.utils.hub_cache import hub_cache
from backend.utils.places import preferences_folder
from backend.utils.text import quote
from backend.vision.pictures import picture_size


def with_paths(row: Row, source: str, where: str) -> Row:
    """Every image as the path of a checked picture. `source`: file or Hub split. Raises UserError naming the place."""
    chats = [name for name, cell in row.items() if isinstance(cell, list) and any(map(_parts_of, cell))]
    columns = [name for name in IMAGES if row.get(name) not in (None, "", [])]
    if not chats and not columns:
        return row

    def path_of(cell: Any, name: str) -> str:
        return _path(cell, source, f"The column {quote(name, 24)} of {where}")

    def converted(value: Any, name: str) -> Any:
        if isinstance(value, list):
            return [converted(each, name) for each in value]
        if parts := _parts_of(value):
            return value | {"content": converted(parts, name)}
        is_image = isinstance(value, dict) and value.get("type") == "image" and value.get("image") is not None
        return value | {"image": path_of(value["image"], name)} if is_image else value

    changed = {name: converted(row[name], name) for name in chats}
    for name in columns:
        cell = row[name]
        changed[name] = [path_of(each, name) for each in cell] if isinstance(cell, list) else path_of(cell, name)
    return row | changed


def placed(messages: list[dict[str, Any]], row: Row, where: str) -> list[dict[str, Any]]:
    """The row's images in the chat's empty image parts, or before the user's first text. Raises UserError."""
    cells, parts = [row[name] for name in IMAGES if row.get(name)], image_parts(messages)
    if not cells and not parts:
        return messages
    if len(cells) == 2:
        raise UserError("data", f"Both columns image and images of {where} have images; leave one of them.")
    paths = [path for cell in cells for path in ([cell] if isinstance(cell, str) else cell)]
    if [part["image"] for part in parts] == paths:
        return messages
    if not parts:
        place = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if place is None:
            raise UserError("data", f"There is no message of the user in {where}, so no place for its images.")
        text = {"type": "text", "text": messages[place]["content"]}
        images = [{"type": "image", "image": path} for path in paths]
        return [*messages[:place], messages[place] | {"content": [*images, text]}, *messages[place + 1 :]]
    waiting = [part for part in parts if part["image"] is None]
    if len(waiting) != len(paths):
        has = f"{len(paths)} in its columns, for {len(waiting)} image parts of its messages"
        raise UserError("data", f"The images of {where} do not match: {has}.")
    for part, path in zip(waiting, paths, strict=True):
        part["image"] = path  # of this chat alone, see `message_list`
    return messages


def _parts_of(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else []


def _path(cell: Any, source: str, place: str) -> str:
    if hasattr(cell, "convert"):  # of PIL
        cell.convert("RGB").save(stream := io.BytesIO(), "PNG")
        cell = stream.getvalue()
    if isinstance(cell, Mapping) and cell.keys() & {"bytes", "path"}:  # an Image of `datasets`
        cell = cell.get("path") if cell.get("bytes") is None else cell["bytes"]
    if not cell or not isinstance(cell, (bytes, str)):
        raise UserError("data", f"{place} holds {quote(cell or 'nothing', 40)}, not the path or bytes of an image.")
    if isinstance(cell, str) and (cell.startswith("data:") or "://" in cell):
        raise UserError("data", f"{place} holds an address, {quote(cell, 40)}; save the image as a file.")
    is_hub = Path(source).suffix.lower() not in DATA_SUFFIXES
    if isinstance(cell, str):
        path = Path("" if is_hub else Path(source).absolute().parent, cell)
    else:
        path = preferences_folder() / "images" / blake2b(cell, digest_size=16).hexdigest()
        if not path.exists():
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                draft.write_bytes(cell)
                draft.replace(path)
    try:
        picture_size(str(path))
    except UserError as error:
        raise UserError("data", f"{place}: {error.faults[0].sentence}") from None
    if is_hub and isinstance(cell, str) and not resolved(path).is_relative_to(resolved(hub_cache().parent)):
        raise UserError("data", f"{place} names a file that is not part of the dataset, {quote(cell, 60)}.")
    return str(path)
