"""What reward functions may ask for by name, for the completions of one step: our inputs and the dataset's columns.

Two dialects. Ours gives texts: prompts, completions, the answer as the settings map it. TRL's gives columns as they
are, and where the dataset's prompts are messages, prompts and completions are messages too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.spec.rewards.parse import INPUTS
from backend.types import Completion, Problem

Sample = tuple[Problem, Completion]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """How far the run is, for rewards that change as it goes on; `trainer_state` in a function's arguments.

    `step` counts the steps finished before this one (0 in the first), of `max_steps` in all; `epoch` the passes over
    the dataset. `max_completion_length` is the run's limit in tokens, None where texts are scored without a run.
    """

    step: int = 0
    max_steps: int = 1
    epoch: float = 0.0
    max_completion_length: int | None = None

    @property
    def global_step(self) -> int:
        """TRL's name for `step`."""
        return self.step


def inputs_for(samples: list[Sample], state: TrainerState, dialect: str) -> dict[str, Any]:
    """Everything by name, in lists of one entry a sample that belong to the caller: who sorts one disturbs nobody."""
    types = [problem.type for problem, _ in samples]
    inputs: dict[str, Any] = {
        "prompts": [problem.prompt for problem, _ in samples],
        "completions": [completion.text for _, completion in samples],
        "answer": [problem.answer for problem, _ in samples],
        "types": types if any(each is not None for each in types) else None,
        "completion_ids": [list(completion.tokens) for _, completion in samples],
        "completions_ids": [list(completion.tokens) for _, completion in samples],
        "trainer_state": state,
    }
    if dialect == "trl":
        inputs |= _as_messages(samples)
        return {**inputs, **_columns(samples, ("prompts", "completions", "completion_ids", "trainer_state"))}
    return {**inputs, **_columns(samples, INPUTS)}


def _columns(samples: list[Sample], without: tuple[str, ...]) -> dict[str, list[Any]]:
    """The dataset's columns, None where a row lacks one."""
    names = dict.fromkeys(name for problem, _ in samples for name in problem.row if name not in without)
    return {name: [problem.row.get(name) for problem, _ in samples] for name in names}


def _as_messages(samples: list[Sample]) -> dict[str, list[Any]]:
    """Prompts and completions as TRL has them: messages for each sample whose row holds its prompt as messages."""
    chats = [_is_chat(problem) for problem, _ in samples]
    return {
        "prompts": [
            copy.deepcopy(problem.messages) if chat else problem.prompt
            for (problem, _), chat in zip(samples, chats, strict=True)
        ],
        "completions": [
            [{"role": "assistant", "content": completion.text}] if chat else completion.text
            for (_, completion), chat in zip(samples, chats, strict=True)
        ],
    }


def _is_chat(problem: Problem) -> bool:
    """Whether the dataset holds this prompt as messages: in `prompt`, or in whichever column the messages came from."""
    if "prompt" in problem.row:
        return isinstance(problem.row["prompt"], list)
    return any(_holds(value, problem.messages) for value in problem.row.values())


def _holds(value: Any, messages: list[Message]) -> bool:
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
        return False
    said = [(one.get("role"), one.get("content")) for one in value]
    return said == [(one["role"], one["content"]) for one in messages[-len(value) :]]
