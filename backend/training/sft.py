"""Supervised fine-tuning: the mean negative log-probability of the labelled tokens of a whole optimizer batch,

    loss = −Σ mask · log π(token) / Σ mask

which is mlx-lm's `default_loss` and the loss of TRL's SFTTrainer.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from backend.config.config import Config
from backend.engine.lm_head import TokenScores
from backend.models.policy import Policy
from backend.training.batch import Batch
from backend.training.grpo import means
from backend.training.learner import Algorithm, Learner
from backend.training.losses import Tally, token_mean
from backend.training.policy_forward import MicroBatch, PolicyForward, do_nothing


class Sft(Algorithm):
    """Imitates the tokens whose mask is 1, of every completion; of the policy's own those with an advantage."""

    of_sampler = False

    def __init__(self, policy: Policy, config: Config) -> None:
        self.policy, self.most_rows = policy, config.batch_size
        self.has_advantages = config.sft_targets == "best_of_n"

    def learn(self, batch: Batch, learner: Learner) -> dict[str, float]:
        if self.has_advantages:
            batch = replace(batch, weight_BT=batch.mask_BT).with_signal()
        # Of the whole batch: every micro-batch and rank divides by the same number.
        tokens = batch.mask_BT.sum()
        # Where no group has a best, momentum still applies, as in GRPO.
        forward, model = learner.forward, self.policy.split_model
        micro_batches = forward.micro_batches(model, batch, self.most_rows) if len(batch) else []
        return learner.update(micro_batches, partial(_objective, tokens))

    def held_out_metrics(
        self, batch: Batch, forward: PolicyForward, poll: Callable[[], None] = do_nothing
    ) -> dict[str, float]:
        """`loss` and `entropy` over the labelled tokens of `batch`, with standard errors."""
        split_model = self.policy.split_model
        self.policy.model.eval()
        rows: list[dict[str, tuple[float, float]]] = []
        for part in forward.micro_batches(split_model, batch, self.most_rows):
            scores = forward.scores(split_model, part, with_gradient=False)
            sums = [-scores.logp_N.sum(axis=1), scores.entropy_N.sum(axis=1), part.batch.mask_BT.sum(axis=1)]
            for loss, entropy, count in np.array(mx.stack(sums, axis=1)).tolist():
                of_labels = {} if self.has_advantages else {"loss": (loss, count)}
                rows.append({**of_labels, "entropy": (entropy, count)})
            poll()
        return means([row for of_rank in forward.ranks.gather(rows) for row in of_rank])


def _objective(tokens: mx.array, micro_batch: MicroBatch, scores: TokenScores, totals: Any) -> tuple[mx.array, Tally]:
    entropy = token_mean(scores.entropy_N, micro_batch.batch.mask_BT)
    return -scores.logp_N.sum() / tokens, {"mean": {"entropy": entropy}}  # masked tokens have log-probability 0
