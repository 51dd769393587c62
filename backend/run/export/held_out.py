"""The held-out reward of an exported model beside that of base and adapters: same prompts, same random numbers.

Loads one model after the other, as a run does. Tells nothing of whether the reward is worth having.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import mlx.core as mx

from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts
from backend.data.row_views import Rows
from backend.data.rows import Splits, check_columns
from backend.generation.rollout import Rollout
from backend.generation.sampler import Sampling
from backend.models.export.trained_weights import TrainedWeights
from backend.models.policy import Policy, load_policy
from backend.run.evaluation.evaluate import held_out_rewards
from backend.run.run_inputs import RunInputs
from backend.run.scoring_stages import ScoringStages
from backend.run.trial_sampling import SMALLEST_MODEL, WITHOUT_REFERENCE
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.types import Group, Problem

BATCH = 16
"""Prompts sampled together."""

Poll = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class HeldOutDifference:
    """Mean rewards of base and adapters, and of the exported model, on `prompts` prompts with one completion each. `error` is the
    standard error of the mean difference by prompt; None for a single prompt."""

    split: str
    prompts: int
    trained: float
    exported: float
    error: float | None

    @property
    def difference(self) -> float:
        return self.exported - self.trained

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"difference": self.difference}


class HeldOutComparison:
    """Prompts and reward functions of a run, read before an export begins. Call `compare` once the model is written."""

    def __init__(self, config: Config, inputs: RunInputs, count: int) -> None:
        """Raises Mistake without a split that the run did not train on, or for `count` below 1."""
        if count < 1:
            raise Mistake("held_out", f"The number of held-out prompts must be at least 1, not {count}.")
        self.config, self.count = config, count
        self.split = held_out_split(inputs.splits)
        if not self.split:
            raise Mistake("held_out", f"{config.data} has no valid or test split, so there are no held-out prompts.")
        self._rows, self._source = inputs.splits.rows(self.split), inputs.splits.source.get(self.split, config.data)
        if faults := check_columns(self._rows, config, self._source):
            raise Mistake(faults)
        self._scoring = ScoringStages(config, inputs.scorer, config.iters)

    def compare(self, trained: TrainedWeights, exported: Path, poll: Poll = lambda done: None) -> HeldOutDifference:
        before = self._rewards(lambda: _trained_policy(self.config, trained), lambda done: poll(done / 2))
        after = self._rewards(lambda: _exported_policy(self.config, exported), lambda done: poll((1 + done) / 2))
        pairs = [pair for pair in zip(before, after, strict=True) if not any(map(math.isnan, pair))]
        if not pairs:
            raise Mistake("held_out", "No reward function had an opinion on any held-out completion.")
        differences = [b - a for a, b in pairs]
        error = stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
        mean_before, mean_after = (fmean(rewards) for rewards in zip(*pairs, strict=True))
        return HeldOutDifference(self.split, len(pairs), mean_before, mean_after, error)

    def _rewards(self, load: Callable[[], Policy], poll: Poll) -> list[float]:
        """The reward of one completion for each prompt, in the order of the file; NaN where no function had an opinion."""
        policy, config = load(), self.config
        problems = _problems(self._rows, policy, config, self._source, self.count)
        stage, step = self._scoring.stage(config.iters), config.iters
        rewards: list[float] = []

        def score(groups: list[Group], wait: Callable[[], None]) -> None:
            self._scoring.score(groups, step, poll=wait)
            rewards.extend(
                math.nan if (r := completion.reward) is None else r
                for group in groups
                for completion in group.completions
            )

        held_out_rewards(
            Rollout(policy, config.max_completion_length, stop=config.stop), problems, score, stage.names,
            stage.weights.at(step), sampling=Sampling.of(config),
            group_size=1, batch_size=BATCH, count=-1, poll=poll, overlap_scoring=False,
        )  # fmt: skip
        del policy, load
        gc.collect()  # mlx modules are in reference cycles, and the next model is loaded now
        mx.clear_cache()
        return rewards


def held_out_split(splits: Splits) -> str:
    """The split that an export is compared on: test, else valid; "" where there is neither."""
    return next((split for split in ("test", "valid") if splits.rows(split)), "")


def _problems(rows: Rows, policy: Policy, config: Config, source: str, count: int) -> list[Problem]:
    problems = TokenizedPrompts(rows, policy.tokenizer, PromptFormat.of(config), source).first(count)
    if not problems:
        raise Mistake("max_seq_length", f"No prompt of {source} leaves room for a completion.")
    return problems


def _trained_policy(config: Config, trained: TrainedWeights) -> Policy:
    """Base and adapters as the run trained them; under full fine-tuning the trained model."""
    policy = load_policy(config.model_copy(update=WITHOUT_REFERENCE | {"model": str(trained.base)}))
    arrays: Any = trained.adapters.arrays if trained.adapters else trained.arrays
    if arrays is not None:
        policy.assign(mx.load(str(arrays)))  # pyright: ignore
    return policy


def _exported_policy(config: Config, folder: Path) -> Policy:
    """The exported model with one fresh adapter, which changes no output: a policy has something to train."""
    as_it_is = SMALLEST_MODEL | {"model": str(folder), "quantization": "none", "dtype": "auto"}
    return load_policy(config.model_copy(update=as_it_is))
