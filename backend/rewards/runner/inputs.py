"""Keyword arguments for reward functions, from the completions of one step: our inputs and the dataset's columns.

Two dialects. "ours" (registered functions, mlx-lm-lora's signature) gives texts: prompts, completions, the answer as
the settings map it; a column cannot replace one of these. "trl" (an entry `file.py::function`) gives what `GRPOTrainer`
gives: columns as they are, a column named `answer` or `types` included, and prompts and completions as lists of
messages where the dataset's prompts are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.rewards.catalogue.parse import INPUTS
from backend.types import Completion, Problem

Sample = tuple[Problem, Completion]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The argument `trainer_state`: how far the run is, for rewards that change over time (curricula).

    `step` is the number of steps finished before this one (0 in the first), of `max_steps` in all; `epoch` the passes
    over the dataset. `max_completion_length` is the run's limit in tokens, None where texts are scored without a run.
    `reward_timeout` are the seconds that a call may take.
    """

    step: int = 0
    max_steps: int = 1
    epoch: float = 0.0
    max_completion_length: int | None = None
    reward_timeout: float | None = None

    @property
    def global_step(self) -> int:
        """TRL's name for `step`."""
        return self.step


def inputs_for(samples: list[Sample], state: TrainerState, dialect: str) -> dict[str, Any]:
    """Every input by name, in fresh lists of one entry for each sample: a function may sort them in place."""
    types = [problem.type for problem, _ in samples]
    inputs: dict[str, Any] = {
        "prompts": [problem.prompt for problem, _ in samples],
        "completions": [completion.text for _, completion in samples],
        "answer": [problem.answer for problem, _ in samples],
        "types": types if any(kind is not None for kind in types) else None,
        "completion_ids": [list(completion.tokens) for _, completion in samples],
        "completions_ids": [list(completion.tokens) for _, completion in samples],
        "trainer_state": state,
    }
    if dialect == "trl":
        inputs |= _as_messages(samples)
        return {**inputs, **_columns(samples, ("prompts", "completions", "completion_ids", "trainer_state"))}
    return {**inputs, **_columns(samples, INPUTS)}


def _columns(samples: list[Sample], excluded: tuple[str, ...]) -> dict[str, list[Any]]:
    """The dataset's columns by name; None where a row lacks a column that others have."""
    names = dict.fromkeys(name for problem, _ in samples for name in problem.row if name not in excluded)
    return {name: [problem.row.get(name) for problem, _ in samples] for name in names}


def _as_messages(samples: list[Sample]) -> dict[str, list[Any]]:
    """Prompts and completions as TRL passes them: messages for every sample whose row holds its prompt as messages."""
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
    """Whether the dataset holds this prompt as messages: in `prompt`, or in the column from which the messages came."""
    if "prompt" in problem.row:
        return isinstance(problem.row["prompt"], list)
    return any(_ends_in(value, problem.messages) for value in problem.row.values())


def _ends_in(column: Any, messages: list[Message]) -> bool:
    """Whether the column holds the last of `messages`: the first may be a system prompt that the settings added."""
    if not isinstance(column, list) or not column or not all(isinstance(message, Mapping) for message in column):
        return False
    in_column = [(message.get("role"), message.get("content")) for message in column]
    return in_column == [(message["role"], message["content"]) for message in messages[-len(column) :]]
