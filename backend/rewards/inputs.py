"""Keyword arguments for reward functions. Dialect "ours" (mlx-lm-lora's signature) passes texts; "trl" passes what
`GRPOTrainer` does: messages where the row's prompt has them. A function that indexes messages gets messages in both."""

from __future__ import annotations

import copy
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from backend.rewards.catalogue import INPUTS
from backend.types import IMAGES, Completion, Problem, content_text
from backend.vision.pictures import open_picture

Sample = tuple[Problem, Completion]

MOST_LOGGED = 4 << 20  # characters of all columns that functions log in a step
MOST_METRICS = 200


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Argument `trainer_state`: progress of the run. `step`: finished steps, of `max_steps`. `epoch`: dataset passes.
    `max_completion_length`: tokens, or None. `reward_timeout`: seconds."""

    step: int = 0
    max_steps: int = 1
    epoch: float = 0.0
    max_completion_length: int | None = None
    reward_timeout: float | None = None

    @property
    def global_step(self) -> int:
        """TRL's name for `step`."""
        return self.step


def inputs_for(samples: list[Sample], state: TrainerState, dialect: str, as_messages: bool = False) -> dict[str, Any]:
    """Every input by name, in fresh lists with one entry per sample; dataset columns have None for missing cells.
    `as_messages`: prompts and completions are messages, whatever the rows hold."""
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
    is_trl = dialect == "trl"
    ours = ("prompts", "completions", "completion_ids", "trainer_state") if is_trl else INPUTS
    for index, (problem, completion) in enumerate(samples):
        if as_messages or (is_trl and (_is_chat(problem) or completion.turns)):
            chat = problem.messages or [{"role": "user", "content": problem.prompt}]
            inputs["prompts"][index] = copy.deepcopy(chat)
            written = [message for turn in completion.turns for message in turn.messages()]
            inputs["completions"][index] = written or [{"role": "assistant", "content": completion.text}]
    rows = [{**problem.row, **completion.columns} for problem, completion in samples]
    columns = dict.fromkeys(name for row in rows for name in row if name not in ours)
    return inputs | {name: [row.get(name) for row in rows] for name in columns}


def with_pictures(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with images of PIL, not yet decoded, in columns of paths, as in TRL. Raises UserError."""
    opened = cache(open_picture)

    def converted(value: Any) -> Any:
        return [converted(each) for each in value] if isinstance(value, list) else value and opened(value)

    return inputs | {name: converted(inputs[name]) for name in IMAGES if name in inputs}


def _is_chat(problem: Problem) -> bool:
    if "prompt" in problem.row:
        return isinstance(problem.row["prompt"], list)
    ends = [column[-1] for column in problem.row.values() if isinstance(column, list) and column]
    last = [content_text(message["content"]) for message in problem.messages[-1:]]
    return any(
        isinstance(message, Mapping) and [content_text(message.get("content") or "")] == last for message in ends
    )


TRAINER_METRICS = (
    *("loss", "reward", "reward_std", "frac_reward_zero_std", "frac_groups_without_signal", "kl", "entropy"),
    *("learning_rate", "grad_norm", "epoch", "clip_ratio_low", "clip_ratio_high", "clip_ratio_total"),
    *("hit_max_tokens_ratio", "peak_memory_gb", "num_tokens", "reward_std_within_groups", "waiting_share"),
    *("rollout_tokens_per_second", "train_tokens_per_second", "grad_clipped"),
)
_TRAINER_PREFIXES = (
    *("rewards/", "judge/", "completions/", "time/", "sampling/", "peak_memory_gb/", "process/", "machine/"),
    *("ranks/", "eval_"),
)


class ExtraLogs:
    """TRL's `log_extra` and `log_metric`. Bad arguments raise in user code, at the right line."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self._owners: dict[str, str] = {}  # column → the function that logged it
        self._metrics: dict[str, list[float]] = {}
        self._logged = 0

    def loggers_for(self, function: str) -> dict[str, Callable[..., None]]:
        """`log_extra(column, values)` and `log_metric(name, value)` for one function."""

        def log_extra(column: str, values: Sequence[Any]) -> None:
            _check_name("log_extra", column)
            if (owner := self._owners.setdefault(column, function)) != function:
                raise ValueError(f"the column {column} was logged by {owner} already")
            if isinstance(values, str | bytes | Mapping):
                raise TypeError(f"log_extra takes a list of values, one a completion, not {type(values).__name__}")
            added = [_as_json(value) for value in getattr(values, "tolist", lambda: values)()]
            self._logged += len(json.dumps(added))
            if self._logged > MOST_LOGGED:
                raise ValueError(
                    f"log_extra takes {MOST_LOGGED >> 20} MB in a step, and the column {column} is over it"
                )
            self.columns.setdefault(column, []).extend(added)

        def log_metric(name: str, value: float) -> None:
            _check_name("log_metric", name)
            if name in TRAINER_METRICS or name.startswith(_TRAINER_PREFIXES):
                raise ValueError(f"{name} is a metric of the trainer; log yours under another name")
            if len(self._metrics.keys() | {name}) > MOST_METRICS:
                raise ValueError(f"log_metric takes {MOST_METRICS} names in a step, and {name} is one more")
            number = float(value)
            if not math.isfinite(number):
                raise ValueError(f"log_metric takes a finite number, and {name} is {number}")
            self._metrics.setdefault(name, []).append(number)

        return {"log_extra": log_extra, "log_metric": log_metric}

    @property
    def metrics(self) -> dict[str, float]:
        """Metric → mean of its values in this step."""
        return {name: statistics.fmean(values) for name, values in self._metrics.items()}

    def length_error(self, function: str, count: int) -> str:
        """Problem with a function's columns, which need `count` values, or ""."""
        for column, values in self.columns.items():
            if self._owners[column] == function and len(values) != count:
                return f"logged {len(values)} values in the column {column} for {count} completions"
        return ""


def _check_name(function: str, name: Any) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError(f"{function} takes a name on one line first, not {name!r}")


def _as_json(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
