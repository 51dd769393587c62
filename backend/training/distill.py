"""On-policy distillation (arXiv:2306.13649): on completions of its own, the policy matches the next-token distributions
of a teacher. With w = `distillation_weight`, over a whole optimizer batch:

    loss = (1 − w) · GRPO's loss + w · Σ mask · divergence / Σ mask
"""

from collections.abc import Collection
from typing import Any

import mlx.core as mx

from backend.config.config import Config
from backend.engine.forward import active_states
from backend.engine.lm_head import Teacher, TokenScores
from backend.models.policy import Policy
from backend.training.batch import Batch
from backend.training.grpo import DIVERGENCE, Grpo
from backend.training.learner import OptimizerBatch
from backend.training.losses import Tally, TokenValues, token_mean
from backend.training.policy_forward import MicroBatch, PolicyForward


class Distill(Grpo):
    def __init__(self, policy: Policy, config: Config) -> None:
        super().__init__(policy, _own(config))

    @property
    def weight(self) -> float:
        return 1.0 if self.config.distillation_weight is None else self.config.distillation_weight

    def micro_batches(self, batch: Batch, forward: PolicyForward) -> OptimizerBatch:
        """Micro-batches with the teacher's hidden states of their tokens, which all updates of the step share."""
        micro_batches, teacher = super().micro_batches(batch, forward), self.policy.teacher
        assert teacher is not None
        states = forward.without_gradient(
            teacher, micro_batches, lambda part, prefilled: active_states(teacher, part.rows, prefilled)
        )
        for micro_batch, hidden_NH in zip(micro_batches, states, strict=True):
            micro_batch.teacher = Teacher(teacher.logits, hidden_NH, self.config.distillation_beta, self.weight == 1)
        return micro_batches

    def batch_totals(self, micro_batches: OptimizerBatch, forward: PolicyForward) -> dict[str, Any]:
        own = sum((part.batch.mask_BT.sum() for part in micro_batches), mx.array(0.0))
        return super().batch_totals(micro_batches, forward) | {"tokens": forward.ranks.sum([own])[0]}

    def _objective(
        self, micro_batch: MicroBatch, scores: TokenScores, totals: dict[str, Any]
    ) -> tuple[mx.array, Tally, TokenValues]:
        mask_BT, divergence_BT, weight = micro_batch.batch.mask_BT, scores.divergence_N, self.weight
        assert divergence_BT is not None
        of_policy = {name: value for name, value in totals.items() if name != "tokens"}
        policy_loss, tally, values = super()._objective(micro_batch, scores, of_policy)
        loss = (divergence_BT * mask_BT).sum() / mx.maximum(totals["tokens"], 1)
        tally["mean"][DIVERGENCE] = token_mean(divergence_BT, mask_BT)
        return loss if weight == 1 else (1 - weight) * policy_loss + weight * loss, tally, values

    def change(self, config: Config, keys: Collection[str]) -> None:
        super().change(_own(config), keys)


def _own(config: Config) -> Config:
    own: dict[str, Any] = {"skip_zero_signal": False}  # a row without a policy gradient still learns from the teacher
    if not config.learns_from_rewards:
        own |= {"beta": 0.0, "ratio_against": "old", "top_entropy_quantile": 1.0}
        own |= {"entropy_coef": 0.0, "entropy_adaptive": False, "sampling_correction": "none"}
    return config.model_copy(update=own)
