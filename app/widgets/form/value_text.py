"""Raw values of settings as text for a line edit, and back."""

import csv
import math
import re
from typing import Any

import yaml

from backend.config.setting import Setting
from backend.utils import places
from backend.utils.documents import parse_yaml
from backend.utils.errors import UserError

_SEPARATORS = ",_ \u00a0\u2009\u202f'’"
_GROUPED = re.compile(rf"[-+]?[1-9]\d{{0,2}}(?P<mark>[{_SEPARATORS}])\d{{3}}((?P=mark)\d{{3}})*(\.\d*)?")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\t": "\\t"}
MAX_CHARS = 60  # of a value in one line
_PLAIN = {shown: plain for plain, shown in _ESCAPES.items()}


def number_text(value: Any) -> str:
    """A number as a user would type it: 20, 0.95, 1e-5."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    mantissa, _, exponent = repr(value).partition("e")
    return f"{mantissa.removesuffix('.0')}{f'e{int(exponent)}' if exponent else ''}"


def number_value(text: str, is_integer: bool) -> float | str:
    """Parse a number, an integer if `is_integer`; thousands may be grouped, as in 1,000 or 1_000 or 1 000."""
    text = text.strip().replace("−", "-")
    if _GROUPED.fullmatch(text):
        text = re.sub(f"[{_SEPARATORS}]", "", text)
    if "e" in text.lower():
        return text
    for kind in (int,) if is_integer else (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def limits_text(setting: Setting) -> str:
    """A setting's limits in words, “At least 1, at most 4096.”; "" if it has none."""
    low, high = "above" if setting.low_open else "at least", "below" if setting.high_open else "at most"
    parts: list[str] = []
    for word, limit in ((low, setting.low), (high, setting.high)):
        if limit is not None:
            is_grouped = 1000 <= abs(limit) < 1e15 and float(limit).is_integer()
            text = f"{limit:,.0f}" if is_grouped else number_text(float(limit))
            parts.append(f"{word} {text}")
    return f"{', '.join(parts).capitalize()}." if parts else ""


def list_text(value: Any) -> str:
    """Items joined by commas, quoted if they contain a comma or begin or end with a space."""
    if not isinstance(value, list):
        return str(value or "")
    return ", ".join(_quoted("".join(_ESCAPES.get(char, char) for char in str(item))) for item in value)


def _quoted(text: str) -> str:
    if text == text.strip() and not set(text) & {",", '"'}:
        return text
    return '"' + text.replace('"', '""') + '"'


def list_value(text: str) -> list[str]:
    items = next(csv.reader([text], skipinitialspace=True), [])
    if '"' not in text:
        items = [item.strip() for item in items]
    return [re.sub(r"\\[\\nt]", lambda found: _PLAIN[found[0]], item) for item in items if item]


def float_value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def mapping_text(value: Any) -> str:
    """A mapping as YAML; any other value as text."""
    if not value or not isinstance(value, dict):
        return str(value or "")
    options: Any = {"sort_keys": False, "allow_unicode": True, "width": 1000}
    lines = (  # one by one, since PyYAML would write a mapping of texts in braces
        yaml.safe_dump({key: item}, default_flow_style=None if isinstance(item, dict | list) else False, **options)
        for key, item in value.items()
    )
    return "".join(lines).rstrip("\n")


def mapping_value(text: str) -> dict[str, Any] | str:
    """The mapping, or the text itself if it is none."""
    try:
        value = parse_yaml(text, "", "")
    except UserError:
        return text
    return value if isinstance(value, dict) else {} if value is None else text


def value_label(setting: Setting, value: Any) -> str:
    """A value as the form shows it, on one line of at most MAX_CHARS characters."""
    if setting.kind == "choice":
        text = next((choice.label for choice in setting.choices if choice.value == value), str(value))
    elif setting.kind == "bool":
        text = "On" if value is True else "Off"
    elif isinstance(value, list):
        text = list_text([str(item) for item in value])
    elif setting.kind in ("int", "float"):
        text = number_text(value)
    else:
        text = places.path_text(str(value or ""))
    line = " ".join(text.split())
    return (line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…") or "empty"
