"""The questions there are, one line each; a handler's module is imported when its question is first asked.

A handler is `def name(asked: dict[str, Any], call: Call) -> Any`: what it gives can be said in JSON, what a person can
mend it raises as a Mistake. It may keep what was costly to make, by what that depends on (a path and when it was written).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend.serve.call import QuestionCall

Handler = Callable[[dict[str, Any], QuestionCall], Any]


@dataclass(frozen=True, slots=True)
class Question:
    """Where a handler is (`module:function`), and on which thread it runs: one of the small pool as a rule."""

    where: str
    on_model_thread: bool = False
    """One at a time on one thread that stays: arrays and random state of mlx belong to the thread that made them."""
    lasting: bool = False
    """On a thread of its own: it may take minutes, and the pool must stay free for what takes moments."""

    def handler(self) -> Handler:
        module, _, name = self.where.partition(":")
        return getattr(importlib.import_module(module), name)


QUESTIONS: dict[str, Question] = {
    "models": Question("backend.serve.inventory_questions:models"),
    "datasets": Question("backend.serve.inventory_questions:datasets"),
    "model_facts": Question("backend.serve.inventory_questions:model_facts"),
    "hub_search": Question("backend.serve.hub_questions:hub_search"),
    "hub_files": Question("backend.serve.hub_questions:hub_files"),
    "download": Question("backend.serve.hub_questions:download", lasting=True),
    "discard": Question("backend.serve.hub_questions:discard"),
    "score": Question("backend.serve.reward_questions:score"),
    "sample": Question("backend.serve.reward_questions:sample", on_model_thread=True),
    "run_completions": Question("backend.serve.reward_questions:run_completions"),
    "read_completions": Question("backend.serve.reward_questions:read_completions"),
    "reward_cases": Question("backend.serve.reward_questions:reward_cases"),
    "preview": Question("backend.serve.dataset_questions:preview", lasting=True),
    "preview_choices": Question("backend.serve.dataset_questions:preview_choices", lasting=True),
    "preview_rows": Question("backend.serve.dataset_questions:preview_rows"),
    "preview_row": Question("backend.serve.dataset_questions:preview_row"),
    "preview_counts": Question("backend.serve.dataset_questions:preview_counts", lasting=True),
}
