"""Raw values of settings as text for a line edit, and back.

Nothing is checked here: text that cannot be parsed stays text, and the draft reports the problem.
"""

from __future__ import annotations

import csv
import json
import math
import re
from typing import Any

from backend.config.setting import Setting
from backend.utils import places

_BETWEEN = ",_ \u00a0\u2009\u202f'’"
"""What people and programs put between thousands."""
_GROUPED = re.compile(rf"[-+]?[1-9]\d{{0,2}}(?P<mark>[{_BETWEEN}])\d{{3}}((?P=mark)\d{{3}})*(\.\d*)?")
_ESCAPES = (("\\", "\\\\"), ("\n", "\\n"), ("\t", "\\t"))


def number_text(value: Any) -> str:
    """A number as a user would type it: 20, 0.95, 1e-5; text stays as it was typed."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    mantissa, _, exponent = repr(value).partition("e")
    return f"{mantissa.removesuffix('.0')}{f'e{int(exponent)}' if exponent else ''}"


def number_value(text: str, is_integer: bool) -> float | str:
    """Parse a number, an integer if `is_integer`; its thousands may be apart, as in 1,000 or 1_000 or 1 000. Scientific notation stays
    text, so that 1e-5 is kept as typed; so does anything that is not such a number."""
    text = _without_groups(text.strip().replace("−", "-"))
    if "e" in text.lower():
        return text
    for kind in (int,) if is_integer else (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def _without_groups(text: str) -> str:
    """The number without what stands between its thousands. 0,001 is none: it is a decimal fraction elsewhere, and no thousand here."""
    return re.sub(f"[{_BETWEEN}]", "", text) if _GROUPED.fullmatch(text) else text


def limits_text(setting: Setting) -> str:
    """A setting's limits in words, “At least 1, at most 4096.”; "" if it has none."""
    low, high = (None if limit is None else _limit_text(float(limit)) for limit in (setting.low, setting.high))
    parts: list[str] = []
    if low is not None:
        parts.append(f"{'above' if setting.low_open else 'at least'} {low}")
    if high is not None:
        parts.append(f"{'below' if setting.high_open else 'at most'} {high}")
    return f"{', '.join(parts).capitalize()}." if parts else ""


def _limit_text(limit: float) -> str:
    return f"{limit:,.0f}" if 1000 <= abs(limit) < 1e15 and limit.is_integer() else number_text(limit)


def path_text(value: Any) -> str:
    """A path or an id; a path inside our resources starts with BUNDLED."""
    return places.path_text(str(value or ""))


def path_value(text: str) -> str:
    return f"{places.resources()}/{text.removeprefix(places.BUNDLED)}" if text.startswith(places.BUNDLED) else text


def list_text(value: Any) -> str:
    """Items joined by commas, quoted if they contain a comma or begin or end with a space; line breaks as \\n."""
    if not isinstance(value, list):
        return str(value or "")
    return ", ".join(_quoted(_escaped(str(item))) for item in value)


def list_value(text: str) -> list[str]:
    items = next(csv.reader([text], skipinitialspace=True), [])
    if '"' not in text:
        items = [item.strip() for item in items]
    return [_unescaped(item) for item in items if item]


def numbers_text(value: Any) -> str:
    if not isinstance(value, list):
        return str(value or "")
    return ", ".join(number_text(item) for item in value)


def numbers_value(text: str) -> list[Any]:
    """Floats; parts that are not numbers stay text."""
    parts = [part.strip().replace("−", "-") for part in text.strip().strip("[]").split(",")]
    return [_float(part) for part in parts if part]


def mapping_text(value: Any) -> str:
    """One `key: value` a line."""
    if not isinstance(value, dict):
        return str(value or "")
    return "\n".join(f"{key}: {item if _bare(item) else json.dumps(item)}" for key, item in value.items())


def mapping_value(text: str) -> dict[str, Any] | str:
    """The mapping, or the text itself if a line has no colon."""
    lines = [line for line in text.splitlines() if line.strip()]
    if any(":" not in line for line in lines):
        return text
    pairs = (line.split(":", 1) for line in lines)
    return {key.strip(): _scalar(item.strip()) for key, item in pairs}


def stages_text(value: Any) -> str:
    """One stage a line, as a JSON object."""
    return (
        "\n".join(json.dumps(stage, ensure_ascii=False) for stage in value) if isinstance(value, list) else str(value)
    )


def stages_value(text: str) -> list[Any] | str:
    """The stages, or the text itself if a line is not JSON."""
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return text


def _bare(item: Any) -> bool:
    """Whether an item is a text that is read back as the same text without quotes."""
    return isinstance(item, str) and _scalar(item.strip()) == item


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _float(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _quoted(text: str) -> str:
    if text == text.strip() and not set(text) & {",", '"'}:
        return text
    return '"' + text.replace('"', '""') + '"'


def _escaped(text: str) -> str:
    for plain, shown in _ESCAPES:
        text = text.replace(plain, shown)
    return text


def _unescaped(text: str) -> str:
    out, rest = "", text
    while rest:
        known = next((plain for plain, shown in _ESCAPES if rest.startswith(shown)), None)
        out += known or rest[0]
        rest = rest[2:] if known else rest[1:]
    return out
