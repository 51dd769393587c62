"""The limits of a setting in words."""

from __future__ import annotations

from app.widgets.form import value_text
from backend.spec.setting import Setting


def limits(setting: Setting) -> str:
    """“At least 1, at most 4096 steps.” in the setting's own limits; "" where it has none."""
    low, high = (
        None if limit is None else value_text.number_text(float(limit)) for limit in (setting.low, setting.high)
    )
    parts: list[str] = []
    if low is not None:
        parts.append(f"{'above' if setting.low_open else 'at least'} {low}")
    if high is not None:
        parts.append(f"{'below' if setting.high_open else 'at most'} {high}")
    return f"{', '.join(parts).capitalize()}." if parts else ""
