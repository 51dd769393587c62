"""How the fields of a run look in the table: text, sort key, width, alignment and colour of a cell."""

from __future__ import annotations

from typing import Any

from PySide6.QtGui import QColor

from app import theme
from app.widgets.basic.number_format import DASH, duration, figure, file_size, moment, signed
from app.widgets.run_header import STATE_LABELS, STATE_ROLES
from backend.config.config import SETTINGS
from backend.runs.run_record import RunRecord, value_text
from backend.runs.run_search import RunField, field_of

DEFAULT_COLUMNS = ("favourite", "name", "state", "curve", "reward", "change", "held_out", "steps", "began", "worked", "model", "tags", "disk")  # fmt: skip
NAME, FAVOURITE, CURVE_KEY = "name", "favourite", "curve"
WIDTHS = {
    "text": 120, "number": 84, "steps": 88, "duration": 92, "time": 120, "bytes": 84, "curve": 92, "change": 92, "flag": 34,
}  # fmt: skip
"""Kind of a field → the first width of its column, in pixels."""
_OWN_WIDTHS = {"name": 200, "state": 84, "model": 150, "note": 200}


def columns_of(keys: list[str]) -> list[RunField]:
    """The fields of these keys, without repetitions; the name is always among them."""
    found = [field for key in dict.fromkeys(keys) if (field := field_of(key)) is not None]
    return found if any(field.key == NAME for field in found) else [*(field_of(NAME),), *found]  # type: ignore[list-item]


def width_of(field: RunField) -> int:
    return theme.scaled(_OWN_WIDTHS.get(field.key, WIDTHS[field.kind]))


def is_right_aligned(field: RunField) -> bool:
    return field.kind not in ("text", "curve", "flag")


def cell_text(field: RunField, record: RunRecord) -> str:
    """What the cell says; curves and flags are drawn."""
    value = field.value(record)
    if field.kind in ("curve", "flag"):
        return ""
    if field.key == "state":
        return STATE_LABELS[value]
    if field.kind == "steps":
        total = record.summary.iterations
        return f"{value:,} of {total:,}" if total else f"{value:,}"
    writers = {"change": signed, "duration": duration, "time": moment, "bytes": file_size}
    if field.kind in writers:
        return writers[field.kind](value)
    if field.kind == "number" and field.key not in SETTINGS:
        return figure(value, field.unit)
    return (
        value_text(value) if value not in (None, "") else DASH if field.key in SETTINGS or field.key == "model" else ""
    )


def sort_key(field: RunField, record: RunRecord) -> Any:
    """Values of one kind for every run: a number that is missing sorts below all others."""
    value = field.value(record)
    if field.kind == "curve":
        return value[-1] if value else float("-inf")
    if field.kind == "text":
        return value_text(value).lower() if value not in (None, "") else ""
    return float(value) if isinstance(value, int | float) else float("-inf")


def cell_colour(field: RunField, record: RunRecord) -> QColor:
    colours = theme.palette()
    if field.key == "state":
        return getattr(colours, STATE_ROLES[record.summary.state])
    if field.kind == "change" and (change := field.value(record)):
        return colours.advantage_above if change > 0 else colours.advantage_below
    return colours.text if field.key in (NAME, "reward", "held_out") else colours.muted
