"""What a step's updates change, as it was before them: so that a step which loses a machine between its updates can be taken back.

Evaluated arrays are immutable, and an update makes new ones, so references are enough. They keep a second copy of the trained arrays and
the optimizer's state in memory while a step learns: little for adapters, as much as the optimizer itself under full fine-tuning.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from backend.config.config import Config
from backend.trainer.run_context import StepContext


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The trained arrays, moments, moving reference and place in the run of parts between two steps."""

    trained: dict[str, mx.array]
    moments: dict[str, mx.array]
    reference: dict[str, mx.array]
    updates: int
    algorithm: list[float | None]

    @classmethod
    def of(cls, parts: StepContext, config: Config) -> StepSnapshot:
        learner = parts.learner
        reference = parts.policy.reference_arrays() if config.sync_ref_model else {}
        return cls(
            parts.policy.trainable(),
            learner.state_arrays(),
            reference,
            learner.updates,
            list(learner.algorithm.state()),
        )

    def put_back(self, parts: StepContext) -> None:
        """Make the parts those that were kept, bit for bit."""
        parts.policy.assign(self.trained)
        if self.reference:
            parts.policy.restore_reference(self.reference)
        parts.learner.restore(self.moments, self.updates, self.algorithm)
        parts.learner.is_whole = True
        mx.eval(parts.policy.arrays(), parts.learner.optimizer.state)
