"""What becomes of a run's settings in an export for TRL: those that are not carried over, and those that the folder's own files carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QScrollArea, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import label
from backend.spec.config import SETTINGS
from backend.spec.other_programs.into_trl.writing import LeftOut

_HEIGHT = 190
_WITHOUT = "Nothing is left out: every setting of this run has its counterpart."


class SettingsAccount(QScrollArea):
    """A list of settings with a clause each, of a fixed height.

    Attributes:
        text – the label that holds it.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, widgetResizable=True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFixedHeight(theme.scaled(_HEIGHT))
        self.setAccessibleName("Settings that are not carried over")
        self.text = label(wrap=True, align=Qt.AlignmentFlag.AlignTop, selectable=True)
        self.text.setTextFormat(Qt.TextFormat.RichText)  # `_section` escapes what it shows
        self.setWidget(self.text)

    def show_account(self, left_out: Sequence[LeftOut], by_files: Mapping[str, str]) -> None:
        """`by_files`: setting → how a file of the folder carries it."""
        muted = theme.palette().muted.name()
        rows = [(f"{_called(left.setting)}: {left.shown}", left.instead) for left in left_out]
        parts = [_section("Not carried over, and what stands in", rows, muted) if rows else f"<p>{_WITHOUT}</p>"]
        if by_files:
            parts.append(
                _section(
                    "Carried by the folder's own files", [(_called(key), how) for key, how in by_files.items()], muted
                )
            )
        self.text.setText("".join(parts))


def _called(setting: str) -> str:
    return SETTINGS[setting].label


def _section(title: str, rows: Sequence[tuple[str, str]], muted: str) -> str:
    lines = [f"{escape(setting)}<br><span style='color: {muted}'>{escape(clause)}</span>" for setting, clause in rows]
    return f"<p><b>{escape(title)}</b></p><p>{'</p><p>'.join(lines)}</p>"
