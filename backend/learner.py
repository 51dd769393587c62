"""The update: a batch of scored completions in, new weights out, by the clipped objective of the chosen loss.

Weights of tokens are worked out once for the whole step, so gradients of parts simply add: cutting the batch
differently changes nothing. Knows no files, no rewards and no sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from backend import ranks
from backend.batch import Batch
from backend.forward import Halves, completion_logps, head_chunk, recomputed_layers
from backend.losses import merge, policy_terms, token_weights
from backend.optimize import clip_by_norm, optimizer, restore, schedule, state_arrays
from backend.policy import Policy
from backend.spec.config import Config
from backend.spec.faults import Mistake

MICRO_BATCH_TOKENS = 16384
"""Most tokens (padding counted) in one forward and backward pass."""


class Learner:
    """Policy, optimizer and schedule; `updates` counts optimizer updates and is all the schedule knows of time."""

    def __init__(self, policy: Policy, config: Config, steps: int) -> None:
        self.policy = policy
        self.config = config
        self.updates = 0
        betas = (config.adam_beta1, config.adam_beta2)
        self.optimizer = optimizer(
            config.optimizer, learning_rate=config.learning_rate, weight_decay=config.weight_decay, betas=betas
        )
        self.optimizer.init(policy.model.trainable_parameters())
        self.rate = schedule(
            config.lr_schedule,
            config.learning_rate,
            steps * config.num_iterations,
            warmup_steps=config.lr_warmup_steps,
            warmup_init=config.lr_warmup_init,
            decay_fraction=config.lr_decay_fraction,
            final=config.lr_final,
        )
        asked = config.seq_step_size if config.efficient_long_context else None
        self.chunk = head_chunk(policy.model_config, asked)
        self._loss_and_grad = nn.value_and_grad(policy.model, self._loss)

    def state_arrays(self) -> dict[str, mx.array]:
        return state_arrays(self.optimizer)

    def restore(self, arrays: dict[str, mx.array], updates: int) -> None:
        restore(self.optimizer, arrays)
        self.updates = updates

    # ── one rollout's worth of updates ───────────────────────────────────────────────────────────────────────────────

    def learn(self, batch: Batch, poll: Callable[[], None] = lambda: None) -> dict[str, float]:
        """μ = `num_iterations` updates on one batch. → loss, kl, entropy, clip ratios, grad_norm, learning_rate: means
        over the updates, the rate of the last one. Raises Mistake, before the weights change, for a broken gradient."""
        batch = self._weighted(batch)
        parts = list(batch.parts(rows=self._rows(), token_budget=MICRO_BATCH_TOKENS))
        if self.policy.reference is not None:
            parts = [self._with_reference(part, poll) for part in parts]
        measured: list[dict[str, float]] = []
        for _ in range(self.config.num_iterations):
            parts, metrics = self._update(parts, poll)
            measured.append(metrics)
        means = {key: float(np.mean([one[key] for one in measured])) for key in measured[0]}
        return means | {"learning_rate": measured[-1]["learning_rate"]}

    def _rows(self) -> int:
        return self.config.batch_size * self.config.group_size

    def _weighted(self, batch: Batch) -> Batch:
        weight_BT = token_weights(
            batch.mask_BT,
            loss_type=self.config.grpo_loss_type,
            max_completion_length=self.config.max_completion_length,
            num_items=ranks.total(batch.mask_BT.sum()),
            rows=ranks.total(mx.array(len(batch))),
            tokens=ranks.total(batch.mask_BT.sum()),
        )
        return replace(batch, weight_BT=weight_BT)

    def _with_reference(self, part: Batch, poll: Callable[[], None]) -> Batch:
        """The part with the reference's log-probabilities (and, where the ratio is against it, as the old ones)."""
        assert self.policy.reference is not None
        logp_BT, _ = self._logps(self.policy.reference, part)
        mx.eval(logp_BT)
        poll()
        against = self.config.ratio_against == "reference"
        return replace(part, ref_logp_BT=logp_BT, old_logp_BT=logp_BT if against else None)

    def _update(self, parts: list[Batch], poll: Callable[[], None]) -> tuple[list[Batch], dict[str, float]]:
        """One optimizer update from all parts. The first one also records the old policy's log-probabilities: it *is*
        the policy that sampled, so no pass of its own is needed."""
        self.policy.model.train()
        mx.random.seed(self.config.seed * 1_000_003 + self.updates)  # dropout follows from the place in the run
        total, tallies, loss = None, [], mx.array(0.0)
        for i, part in enumerate(parts):
            (part_loss, logp_BT, tally), grads = self._part_gradient(part)
            total = grads if total is None else tree_map(mx.add, total, grads)
            loss = loss + part_loss
            tallies.append(tally)
            mx.eval(total, loss, logp_BT, tally)
            if part.old_logp_BT is None:
                parts[i] = replace(part, old_logp_BT=logp_BT)
            poll()
        metrics = {name: value.item() for name, value in merge(tallies).items()}
        return parts, metrics | self._apply(ranks.total(total), ranks.total(loss))

    def _part_gradient(self, part: Batch) -> tuple[Any, Any]:
        with recomputed_layers(self.policy.model, self.config.grad_checkpoint):
            return self._loss_and_grad(part)

    def _loss(self, part: Batch) -> tuple[mx.array, mx.array, Any]:
        """(this part's share of the loss, log-probabilities, tally)."""
        logp_BT, entropy_BT = self._logps(self.policy.halves, part)
        config = self.config
        loss, tally = policy_terms(
            logp_BT,
            part.old_logp_BT,
            part.ref_logp_BT,
            part.advantage_B,
            part.mask_BT,
            weights=part.weight_BT,
            entropies=entropy_BT,
            loss_type=config.grpo_loss_type,
            importance_sampling_level=config.importance_sampling_level,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            beta=config.beta,
            use_bias_correction_kl=config.use_bias_correction_kl,
            max_completion_length=config.max_completion_length,
        )
        return loss, mx.stop_gradient(logp_BT), tally

    def _logps(self, halves: Halves, part: Batch) -> tuple[mx.array, mx.array]:
        active_N = mx.array(np.flatnonzero(np.array(part.mask_BT).reshape(-1)))
        return completion_logps(
            halves,
            part.tokens_BL,
            part.prompt_length_B,
            part.completion_BT,
            active_N,
            self.config.temperature,
            self.chunk,
        )

    def _apply(self, grads: Any, loss: mx.array) -> dict[str, float]:
        grads, norm = clip_by_norm(grads, self.config.max_grad_norm)
        if not math.isfinite(norm.item()):
            raise Mistake(
                "learning_rate",
                f"The gradient of update {self.updates + 1} is not a number, so it was not applied; lower the learning "
                f"rate, or look for a broken weight in the model.",
            )
        rate = self.rate(self.updates)
        self.optimizer.learning_rate = rate
        self.optimizer.update(self.policy.model, grads)
        mx.eval(self.policy.model.trainable_parameters(), self.optimizer.state)
        self.updates += 1
        return {"loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate}
