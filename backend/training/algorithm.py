"""What a training step needs of an algorithm. GRPO's family is `grpo.py`; a supervised warm-up or DPO is one file beside it.

The learner owns everything else: forward passes, gradient accumulation, clipping, optimizer, schedule. An algorithm defines what
is fixed before the first update (`prepare`), the loss of one micro-batch (`objective`), and the metrics. Losses and
tallies of micro-batches add up to those of the optimizer batch, so every average must be divided by totals of the whole batch
(`losses.token_weights`), never of the micro-batch. Where several ranks learn (`PolicyForward.ranks`), the batch is that of all of them,
and each has micro-batches of its own rows: what an algorithm sums up or compares, it sums up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import mlx.core as mx

from backend.engine.lm_head import TokenScores
from backend.spec.config import Config
from backend.training.additive_metrics import Tally
from backend.training.batch import Batch
from backend.training.policy_forward import MicroBatch, PolicyForward, do_nothing
from backend.training.token_records import TokenRecord

OptimizerBatch = list[MicroBatch]
"""The micro-batches of one optimizer update; empty where no token has a gradient."""


class Algorithm(Protocol):
    """Subclass it and implement `prepare` and `objective`; the other methods do nothing unless overridden."""

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether `objective` differentiates the entropies too."""
        return False

    def prepare(self, batch: Batch, forward: PolicyForward) -> list[OptimizerBatch]:
        """The updates of one step, in order: an optimizer batch for each, split into micro-batches that carry all that
        stays fixed over the updates (token weights, reference log-probabilities, …). The same batch may occur several times."""
        ...

    def batch_totals(self, micro_batches: OptimizerBatch, forward: PolicyForward) -> Any:
        """Before each update: totals of the optimizer batch that a micro-batch cannot know. Passed to `objective`."""
        return None

    def objective(self, micro_batch: MicroBatch, scores: TokenScores, totals: Any) -> tuple[mx.array, Tally]:
        """This micro-batch's share of the loss, a scalar differentiable in `scores`, and of the metrics."""
        ...

    def after_backward(self, micro_batch: MicroBatch, scores: TokenScores, totals: Any) -> None:
        """After a micro-batch's backward pass, with what `objective` was given: log-probabilities and entropies [B, T]."""

    def after_update(self, update: int, metrics: dict[str, float]) -> None:
        """After update number `update` (from 1 over the run), with its merged metrics."""

    def change(self, config: Config, keys: Collection[str]) -> None:
        """Go on with the settings of `config`, between two steps; `keys` names those that differ from before."""

    def notes(self) -> list[str]:
        """Sentences for the user about what was chosen where a setting leaves the choice open."""
        return []

    def metric_names(self) -> list[str]:
        """Metrics that every step reports: NaN where nothing was measured."""
        return []

    def take_token_records(self) -> dict[int, TokenRecord]:
        """Row of the step's batch → what its last update saw of its tokens, of the last step; empty unless recorded."""
        return {}

    def held_out_metrics(
        self, batch: Batch, forward: PolicyForward, poll: Callable[[], None] = do_nothing
    ) -> dict[str, float]:
        """Metrics of completions that are not learned from, by forward passes alone. `poll` is called after each micro-batch."""
        return {}

    def step_metrics(self, optimizer_batches: list[OptimizerBatch], forward: PolicyForward) -> dict[str, float]:
        """Metrics of the step as a whole, after its last update. Every rank calls it: what each has of its own rows can be exchanged."""
        return {}

    def state(self) -> list[float | None]:
        """The algorithm's part of a checkpoint."""
        return []

    def restore(self, state: list[float | None]) -> None:
        """Put `state` back; an empty list, from older checkpoints, changes nothing."""
