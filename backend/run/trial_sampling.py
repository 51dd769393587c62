"""Completions of a few rows of the dataset, by the model as a run begins with it: what rewards can be tried on.

The model stays in memory from one tryout to the next. Nothing is trained and nothing is scored.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from backend.data.preview import Opened, open_dataset
from backend.data.rows import Row, check_columns, messages_of, problem_of, rendered
from backend.generation.rollout import Rollout
from backend.generation.sampler import Sampling
from backend.models.policy import Policy, load_policy
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.types import Group, Problem

Tell = Callable[[dict[str, Any]], None]

BARE = {
    "beta": 0.0, "log_kl": False, "sync_ref_model": False, "reference_model_path": "", "train_type": "lora",
    "num_layers": 1, "rank": 1, "lora_keys": [], "grad_checkpoint": False,
}  # fmt: skip
"""Settings under which the least is loaded: a fresh adapter changes nothing, and no reference is asked."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Which rows of the training split: `count` of them from the first on or at random, or these `numbers`, from 1."""

    how: Literal["first", "random", "numbers"] = "random"
    count: int = 8
    numbers: tuple[int, ...] = ()

    def order(self, rows: int, seed: int) -> list[int]:
        """Rows to try, in order: more than `count` where some may turn out to be too long. Raises Mistake."""
        if self.how == "numbers":
            beyond = next((number for number in self.numbers if not 1 <= number <= rows), None)
            if beyond is not None or not self.numbers:
                what = f"There is no row {beyond}" if beyond is not None else "No row is named"
                raise Mistake("rows", f"{what}; the dataset's rows are 1 to {rows}.")
            return [number - 1 for number in self.numbers]
        if self.how == "first":
            return list(range(rows))
        return random.Random(f"tryout {seed}").sample(range(rows), rows)


class TrialSampler:
    """Samples, and keeps what was costly to load, by what it depends on."""

    def __init__(self) -> None:
        self._policy: tuple[Any, Policy] | None = None
        self._rollout: tuple[Any, Rollout] | None = None

    def sample(
        self, config: Config, pick: Pick, group_size: int, seed: int, tell: Tell = lambda told: None,
        check: Callable[[], None] = lambda: None,
    ) -> list[Group]:  # fmt: skip
        """`group_size` completions of each picked row. `tell` hears {"phase", "done"?, "of"?}; `check` is called often
        and may raise to stop. Raises Mistake for what cannot be loaded."""
        tell({"phase": "reading the dataset"})
        opened = open_dataset(config)
        check()
        tell({"phase": "loading the model"})
        policy = self._loaded(config)
        check()
        problems = _problems(opened, policy, config, pick, seed)
        most = len(problems) * group_size * config.max_completion_length

        def poll(drawn: int) -> None:
            check()
            tell({"phase": "sampling", "done": drawn, "of": most})

        poll(0)
        sampling = Sampling(config.temperature, config.top_p, config.top_k, config.min_p)
        return self._sampler(config, policy).sample(problems, group_size, sampling, seed, 0, poll)

    def _loaded(self, config: Config) -> Policy:
        wanted = (config.model, _stamp(config.model), config.quantization)
        if self._policy is None or self._policy[0] != wanted:
            self._policy = self._rollout = None  # the old one's memory first
            self._policy = (wanted, load_policy(config.model_copy(update=BARE)))
        return self._policy[1]

    def _sampler(self, config: Config, policy: Policy) -> Rollout:
        wanted = (config.max_completion_length, tuple(config.stop))
        if self._rollout is None or self._rollout[0] != wanted:
            self._rollout = (wanted, Rollout(policy, config.max_completion_length, stop=config.stop))
        return self._rollout[1]


def _problems(opened: Opened, policy: Policy, config: Config, pick: Pick, seed: int) -> list[Problem]:
    """The picked rows that leave room for a completion. Raises Mistake where none does."""
    rows, source = opened.rows("train"), opened.source("train", config)
    if faults := check_columns(rows, config, source):
        raise Mistake(faults)
    order = pick.order(len(rows), seed)
    wanted = len(order) if pick.how == "numbers" else pick.count
    made = (_problem(rows[index], index, policy.tokenizer, config, source) for index in order)
    room = config.max_seq_length - config.max_completion_length
    found = list(islice((problem for problem in made if len(problem.tokens) <= room), wanted))
    if not found:
        sentence = "Every picked prompt is longer than what Max Seq leaves beside the completion."
        raise Mistake("max_seq_length", sentence)
    return found


def _problem(row: Row, index: int, tokenizer: Any, config: Config, source: str) -> Problem:
    where = f"row {index + 1} of {source}"
    messages = messages_of(row, config, where)
    return problem_of(index, row, messages, rendered(messages, tokenizer, config, where), config)


def _stamp(name: str) -> float:
    """When a local model or dataset was last written; 0 for what is on the Hub."""
    path = Path(name).expanduser()
    places = [path, *path.glob("*")] if path.is_dir() else [path]
    return max((place.stat().st_mtime for place in places if place.exists()), default=0.0)
