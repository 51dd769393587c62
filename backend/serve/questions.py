"""The questions that the window may ask; a handler's module is imported when it is first asked.

A handler is `def name(request: dict[str, Any], call: QuestionCall) -> Any`. It returns JSON values or raises
UserError. It may cache costly results, keyed by everything that they depend on (a path and its modification time).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend.models.tokenizers import import_mlx_lm


class Cancelled(Exception):
    """The question was cancelled. A handler lets it pass, and leaves everything on disk sound."""


class QuestionCall:
    """Handed to every handler. `report` sends progress."""

    def __init__(self, report: Callable[[dict[str, Any]], None] = lambda progress: None) -> None:
        self.report = report
        self._cancelled = threading.Event()

    def check(self) -> None:
        """Raise Cancelled once the question was cancelled. Call it between two pieces of work."""
        if self._cancelled.is_set():
            raise Cancelled

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until the question is cancelled. Raises Cancelled."""
        if self._cancelled.wait(seconds):
            raise Cancelled

    def cancel(self) -> None:
        """Called by the server, from another thread than the handler's."""
        self._cancelled.set()


Handler = Callable[[dict[str, Any], QuestionCall], Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A handler as `module:function`, and the thread it runs on: one of a small pool by default.

    `on_model_thread`: one at a time, always on the same thread, to which mlx's arrays and random state belong.
    `own_thread`: it may take minutes, and the pool must stay free for quick questions.
    """

    path: str
    on_model_thread: bool = False
    own_thread: bool = False

    def handler(self) -> Handler:
        """The function."""
        if self.on_model_thread:
            import_mlx_lm()  # a thread of the pool may be loading a tokenizer with it
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)


_HANDLERS = {
    "hub_questions": "models datasets model_facts hub_search hub_files download discard hub_login check_machines "
    "import_adapter newer_release",
    "reward_questions": "score sample run_completions read_completions reward_cases",
    "dataset_questions": "preview preview_choices preview_rows preview_row preview_counts preview_variety",
    "chat_questions": "chat_load chat_reply chat_row",
}
_ON_MODEL_THREAD = ("sample", "chat_load", "chat_reply", "import_adapter")
_OWN_THREAD = (
    *("download", "check_machines", "newer_release", "preview", "preview_choices", "preview_counts", "preview_variety"),
)
QUESTIONS: dict[str, Question] = {
    name: Question(f"backend.serve.{module}:{name}", name in _ON_MODEL_THREAD, name in _OWN_THREAD)
    for module, names in _HANDLERS.items()
    for name in names.split()
}
