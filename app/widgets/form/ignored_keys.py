"""A banner that lists the keys of an opened file that were ignored, grouped by reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels_and_buttons import label


class IgnoredKeysBanner(QFrame):
    """The banner; hidden while no key was ignored.

    Attributes:
        sentence, close_button – the label with the keys, and the link that closes it.

    Signals:
        closed – the user clicked Close.
    """

    closed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "banner")
        self.sentence = label(wrap=True, selectable=True)
        self.close_button = LinkButton("Close")
        self.close_button.setAccessibleName("Close the note on keys that were left out")
        self.close_button.clicked.connect(self.closed)
        across = QHBoxLayout(self)
        across.setContentsMargins(2 * theme.SPACE, theme.SPACE, 2 * theme.SPACE, theme.SPACE)
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(self.sentence, 1)
        across.addWidget(self.close_button, 0, Qt.AlignmentFlag.AlignTop)
        self.hide()

    def show_keys(self, file: Path | None, keys: Mapping[str, str]) -> None:
        """List the ignored keys of a file, `keys` → why each is ignored; an empty mapping hides the banner."""
        name = f" of {file.name}" if file is not None else ""
        by_reason: dict[str, list[str]] = {}
        for key, why in keys.items():
            by_reason.setdefault(why, []).append(key)
        listed = "; ".join(f"{', '.join(named)} ({why})" for why, named in by_reason.items())
        self.sentence.setText(f"Left out{name}: {listed}.")
        self.setVisible(bool(keys))
