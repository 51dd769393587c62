"""The table of questions that the window may ask, one line each; a handler's module is imported when it is first asked.

A handler is `def name(request: dict[str, Any], call: QuestionCall) -> Any`. It returns JSON values, and raises
UserError for an error that the user can mend. It may cache costly results, keyed by everything that they depend on (a
path and its modification time).
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
    """Handed to every handler. `report` sends progress; `check` raises Cancelled once the question was cancelled."""

    def __init__(self, report: Callable[[dict[str, Any]], None] = lambda progress: None) -> None:
        self.report = report
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raises Cancelled once the question was cancelled. To be called between two pieces of work."""
        if self.is_cancelled:
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
    """A handler as `module:function`, and the thread it runs on: one of a small pool by default."""

    path: str
    on_model_thread: bool = False
    """One at a time, always on the same thread: mlx's arrays and random state belong to the thread that made them."""
    own_thread: bool = False
    """On a thread of its own: it may take minutes, and the pool must stay free for quick questions."""

    def handler(self) -> Handler:
        if self.on_model_thread:
            import_mlx_lm()  # a thread of the pool may be loading a tokenizer with it
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)


QUESTIONS: dict[str, Question] = {
    "models": Question("backend.serve.hub_questions:models"),
    "datasets": Question("backend.serve.hub_questions:datasets"),
    "model_facts": Question("backend.serve.hub_questions:model_facts"),
    "hub_search": Question("backend.serve.hub_questions:hub_search"),
    "hub_files": Question("backend.serve.hub_questions:hub_files"),
    "download": Question("backend.serve.hub_questions:download", own_thread=True),
    "discard": Question("backend.serve.hub_questions:discard"),
    "hub_login": Question("backend.serve.hub_questions:hub_login"),
    "score": Question("backend.serve.reward_questions:score"),
    "sample": Question("backend.serve.reward_questions:sample", on_model_thread=True),
    "run_completions": Question("backend.serve.reward_questions:run_completions"),
    "read_completions": Question("backend.serve.reward_questions:read_completions"),
    "reward_cases": Question("backend.serve.reward_questions:reward_cases"),
    "preview": Question("backend.serve.dataset_questions:preview", own_thread=True),
    "preview_choices": Question("backend.serve.dataset_questions:preview_choices", own_thread=True),
    "preview_rows": Question("backend.serve.dataset_questions:preview_rows"),
    "preview_row": Question("backend.serve.dataset_questions:preview_row"),
    "preview_counts": Question("backend.serve.dataset_questions:preview_counts", own_thread=True),
    "preview_variety": Question("backend.serve.dataset_questions:preview_variety", own_thread=True),
    "chat_load": Question("backend.serve.chat_questions:chat_load", on_model_thread=True),
    "chat_reply": Question("backend.serve.chat_questions:chat_reply", on_model_thread=True),
    "chat_row": Question("backend.serve.chat_questions:chat_row"),
    "check_machines": Question("backend.serve.hub_questions:check_machines", own_thread=True),
    "import_adapter": Question("backend.serve.hub_questions:import_adapter", on_model_thread=True),
    "newer_release": Question("backend.serve.hub_questions:newer_release", own_thread=True),
}
