"""Call a user's map function on rows of the dataset: `def f(row) -> dict | None`, registered by `@register_map_function("name")`.

A row comes back as a dict of columns, or None to leave it out. What it holds must be what JSON holds, as everything that leaves the process of a
user's code; dates and the like become text.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backend.rewards.catalogue.catalog import nearest
from backend.rewards.runner.error_text import class_name, describe_error
from backend.utils.errors import UserError
from backend.utils.text import quote

SETTING = "map_function"
WORDS = 90
"""Characters for what went wrong with a row."""
MapCall = Callable[[dict[str, Any]], Any]
Mapped = list[dict[str, Any] | None]


class RowFailed(Exception):
    """The function failed on the row of this index; the words go after its name."""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(what)
        self.index, self.what = index, what


def map_each(call: MapCall, rows: Sequence[dict[str, Any]], file: Path | None) -> Mapped:
    """What the function makes of each row. Raises RowFailed."""
    mapped: Mapped = []
    for index, row in enumerate(rows):
        try:
            returned = call(copy.deepcopy(row))
        except Exception as error:
            raise RowFailed(index, f"raised {describe_error(error, file, WORDS)}") from error
        mapped.append(_row(returned, index))
    return mapped


def _row(returned: Any, index: int) -> dict[str, Any] | None:
    if returned is None:
        return None
    if not isinstance(returned, dict):
        raise RowFailed(index, f"returned {class_name(returned)}, not a dict of columns or None")
    if not returned or not all(isinstance(name, str) for name in returned):
        raise RowFailed(index, "returned a dict whose keys are not all names of columns")
    try:
        return json.loads(json.dumps(returned, allow_nan=False, default=str))
    except Exception:  # a number that is none, a circle, or whatever the text of an object raises
        raise RowFailed(index, "returned a row with a value that JSON cannot hold") from None


def failure(function: str, what: str, row: str) -> UserError:
    """Of one row. `row` is what sentences call it."""
    return UserError(SETTING, f"The map function {quote(function, 30)} {quote(what, WORDS + 10)} on {row}.")


def unknown(function: str, file: Path | None, known: Sequence[str]) -> UserError:
    """Of a name that the file does not register."""
    near = nearest(function, list(known))
    hint = (
        f" Did you mean {quote(near, 40)}?"
        if near
        else ' Put @register_map_function("name") above it.'
        if not known
        else ""
    )
    where = quote(file.name, 40) if file is not None else "The reward functions file"
    return UserError(SETTING, f"{where} registers no map function {quote(function, 40)}.{hint}")
