"""What a cell about a completion shows: texts on one line, labels, colours and dots."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPixmap

from app import theme
from app.widgets.basic.number_format import DASH, figure, finite
from backend.spec.user_input.text import visible

RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
STOP_LABELS = {"eos": "ended", "string": "stop text", "length": "cut off"}
"""Stop reason of a completion → its label."""
_PREVIEW_CHARS = 400
"""Leading characters of a completion that its line is made from."""


def one_line(text: Any) -> str:
    """The beginning of a text on one line, line breaks replaced by spaces and other control characters escaped."""
    return visible(" ".join(text[:_PREVIEW_CHARS].split())) if isinstance(text, str) else DASH


def logged_text(value: Any) -> str:
    """A value that a reward function logged, on one line."""
    if isinstance(value, str):
        return one_line(value)
    if finite(value) is not None:
        return figure(value)
    return DASH if value is None else one_line(str(value))


def prompt_line(row: Mapping[str, Any]) -> str:
    """A row's prompt on one line, with its answer where it has one."""
    answer = row.get("answer")
    suffix = f"   answer {one_line(str(answer))}" if answer not in (None, "") else ""
    return f"{one_line(row.get('prompt'))}{suffix}"


def advantage_colour(value: Any) -> Any:
    """The palette's colour of an advantage: blue above zero, orange below, muted for zero or none."""
    number, colours = finite(value), theme.palette()
    if not number:
        return colours.muted
    return colours.advantage_above if number > 0 else colours.advantage_below


def reward_dot(index: int) -> QPixmap:
    """A dot in the colour of reward function `index`."""
    return _dot(theme.reward_colour(index).name())


@cache
def _dot(colour: str) -> QPixmap:
    pixmap = QPixmap(16, 16)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(QColor(colour))
    painter.drawEllipse(QRectF(2, 2, 12, 12))
    painter.end()
    pixmap.setDevicePixelRatio(2)  # 8 logical pixels, sharp on a high-DPI screen too
    return pixmap
