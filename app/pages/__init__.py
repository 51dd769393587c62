"""The list of pages: what the sidebar shows, in its order. A page's module is imported when the page is first shown.

To add a page: one file in this folder and one line here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PySide6.QtWidgets import QWidget

    from app.studio import Studio


@dataclass(frozen=True, slots=True)
class PageEntry:
    """One page. `where` is "module:class" of a QWidget built as `Class(studio, parent)`; `icon` a file of resources/icons."""

    key: str
    title: str
    icon: str
    where: str
    shortcut: str

    def build(self, studio: Studio, parent: QWidget | None = None) -> QWidget:
        module, name = self.where.split(":")
        return getattr(importlib.import_module(module), name)(studio, parent)


PAGES: tuple[PageEntry, ...] = (
    PageEntry("train", "Train", "sliders", "app.pages.train:TrainPage", "Ctrl+1"),
    PageEntry("monitor", "Monitor", "pulse", "app.pages.monitor:MonitorPage", "Ctrl+2"),
    PageEntry("completions", "Completions", "lines", "app.pages.completions:CompletionsPage", "Ctrl+3"),
    PageEntry("runs", "Runs", "stack", "app.pages.runs:RunsPage", "Ctrl+4"),
)
