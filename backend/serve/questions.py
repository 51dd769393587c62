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


class Cancelled(BaseException):
    """The question was cancelled. A handler leaves everything on disk sound.

    A BaseException, so that it does not pass for an error of the user's data.
    """


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


POOLS = {"quick": 4, "model": 1, "long": 16}
"""Pool → how many threads it has. Most of the quick ones wait for a disk or the network. To the one of `model` belong
mlx's arrays and random state. What may take minutes is `long`, so that quick questions never wait for it."""


@dataclass(frozen=True, slots=True)
class Question:
    """A handler as `module:function`, and the pool of threads that it runs on."""

    path: str
    pool: str = "quick"

    def handler(self) -> Callable[[dict[str, Any], QuestionCall], Any]:
        """The function."""
        if self.pool == "model":
            import_mlx_lm()  # a thread of another pool may be loading a tokenizer with it
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)


_NAMES = {
    ("hub_questions", "quick"): "models reward_models datasets model_facts hub_search hub_files discard hub_login",
    ("hub_questions", "model"): "import_adapter",
    ("hub_questions", "long"): "download check_machines newer_release hub_account hub_hardware",
    ("reward_questions", "quick"): "score run_completions read_completions reward_cases tools",
    ("reward_questions", "model"): "sample judge_agreement",
    ("dataset_questions", "quick"): "preview_rows preview_row",
    ("dataset_questions", "long"): "preview preview_choices preview_counts preview_variety preview_difficulty",
    ("judge_questions", "quick"): "judge_servers judge_key",
    ("chat_questions", "quick"): "chat_row",
    ("chat_questions", "model"): "chat_load chat_reply",
}
"""(module of this package, pool) → its questions."""
QUESTIONS: dict[str, Question] = {
    name: Question(f"backend.serve.{module}:{name}", pool)
    for (module, pool), names in _NAMES.items()
    for name in names.split()
}
