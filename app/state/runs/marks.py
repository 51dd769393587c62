"""Marks on the charts of a run: what happened at a step that a curve may bend for. Plain data, drawn by `app.widgets.charts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MarkKind = Literal["eval", "checkpoint", "change", "health", "resume"]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step, as one sentence."""

    step: int
    kind: MarkKind
    sentence: str


def change_sentence(settings: Mapping[str, Any]) -> str:
    """The sentence of a `change` event's settings, each old → new: “learning_rate 0.0001 → 5e-05.”"""
    parts = [
        f"{key} {_shown(pair[0])} → {_shown(pair[1])}"
        for key, pair in settings.items()
        if isinstance(pair, list | tuple) and len(pair) == 2
    ]
    return f"Changed: {', '.join(parts)}." if parts else "Settings were changed."


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
