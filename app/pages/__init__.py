"""The table of pages, in the order of the sidebar."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PySide6.QtWidgets import QWidget

    from app.state.session import Session


@dataclass(frozen=True, slots=True)
class PageEntry:
    """One page. `where` is "module:class" of a widget built as `Class(session, parent)`, `icon` a file of icons."""

    key: str
    title: str
    icon: str
    where: str
    shortcut: str
    widest: int

    def load(self) -> Callable[[Session, QWidget | None], QWidget]:
        module, name = self.where.split(":")
        return getattr(importlib.import_module(module), name)


PAGES: tuple[PageEntry, ...] = (
    PageEntry("train", "Train", "sliders", "app.pages.train.train_page:TrainPage", "Ctrl+1", 1440),
    PageEntry("dataset", "Dataset", "table", "app.pages.dataset.dataset_page:DatasetPage", "Ctrl+2", 1680),
    PageEntry("rewards", "Rewards", "target", "app.pages.rewards.rewards_page:RewardsPage", "Ctrl+3", 1920),
    PageEntry("monitor", "Monitor", "pulse", "app.pages.monitor.monitor_page:MonitorPage", "Ctrl+4", 2560),
    PageEntry(
        "completions", "Completions", "lines", "app.pages.completions.completions_page:CompletionsPage", "Ctrl+5", 1920
    ),
    PageEntry("evaluate", "Evaluate", "intervals", "app.pages.evaluate.evaluate_page:EvaluatePage", "Ctrl+6", 1920),
    PageEntry("chat", "Chat", "chat", "app.pages.chat.chat_page:ChatPage", "Ctrl+7", 1920),
    PageEntry("runs", "Runs", "stack", "app.pages.runs.runs_page:RunsPage", "Ctrl+8", 2560),
    PageEntry("sweeps", "Sweeps", "sweep", "app.pages.sweeps.sweeps_page:SweepsPage", "Ctrl+9", 1440),
    PageEntry("guide", "Guide", "book", "app.pages.help.guide_page:GuidePage", "Ctrl+0", 1120),
)


def read_ahead() -> threading.Thread:
    """Import every page in a thread, so that the first click on one does not wait half a second for pyqtgraph."""

    def read() -> None:
        gc.disable()  # a collection in this thread would destroy QObjects of the GUI thread, which crashes
        try:
            for page in PAGES:
                page.load()
        finally:
            gc.enable()

    thread = threading.Thread(target=read, name="read ahead", daemon=True)
    thread.start()
    return thread
