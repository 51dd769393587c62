"""The work of a task on a policy: rollouts and learning steps, built as the trainer builds them, memory plan included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backend.bench.schema import Task
from backend.config.config import Config, parse
from backend.engine.memory import release_cached_buffers
from backend.models.policy import Policy
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.memory.estimate import MemoryPlan
from backend.trainer.memory.plan import learner_limits, rollout_limits
from backend.training.batch import Batch, pack
from backend.training.grpo import grpo_learner
from backend.training.learner import Learner
from backend.types import Completion, Group, Problem

RANK, SCALE, RATE, BETA = 8, 20.0, 1e-6, 0.04
MANY = 10**6
"""Updates that the learning rate schedule expects: more than any bench takes."""
FIRST_WORD = 2
"""Token ids below are the padding and the end."""


def settings(task: Task, folder: Path) -> Config:
    """The default settings but for the task's own, with adapters on every projection."""
    filters = {} if task.filters else {"top_p": 1.0, "top_k": 0}
    return parse({
        "model": str(folder), "data": str(folder), "num_layers": -1, "rank": RANK, "scale": SCALE, "learning_rate": RATE,
        "batch_size": task.prompts, "group_size": max(2, task.group_size), "beta": BETA if task.kl else 0.0,
        "max_completion_length": task.completion, "max_seq_length": task.prompt + task.completion,
    } | filters)  # fmt: skip


@dataclass(slots=True)
class Workload:
    """A task's rollouts and learning steps on one policy."""

    task: Task
    config: Config
    plan: MemoryPlan
    policy: Policy
    """With a reference; a learner without KL gets a copy without."""
    number: int = 0
    """Rollouts so far: each draws other random numbers."""

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def rollout_limits(self) -> dict[str, Any]:
        """The plan's limits; rows only where it allows fewer than the task has, so that tasks can share a rollout."""
        limits = rollout_limits(self.plan)
        return limits | {"rows": limits["rows"] if limits["rows"] < self.task.rows else None}

    def rollout(self) -> Sampler:
        return Sampler(self.policy, self.task.completion, **self.rollout_limits)

    @property
    def sampling(self) -> Sampling:
        config = self.config
        return Sampling.of(config)

    def sample(self, rollout: Sampler, poll: Callable[[int], None] = lambda tokens: None) -> list[Group]:
        """One group for each prompt, every completion of full length."""
        self.number += 1
        rollout.max_tokens = self.task.completion
        # An id beyond the vocabulary, so that no completion ends early. Not in the tokenizer: a rollout's trial feeds the end
        # token to the model when it is built.
        ends, self.policy.eos_ids = self.policy.eos_ids, [self.task.shape.vocab]
        try:
            first = self.number * self.task.prompts
            return rollout.sample(self.problems(), self.task.group_size, self.sampling, 0, first, poll)
        finally:
            self.policy.eos_ids = ends

    def problems(self) -> list[Problem]:
        """Random prompts, the same for every rollout."""
        ids_PK = self._random().integers(FIRST_WORD, self.task.shape.vocab, (self.task.prompts, self.task.prompt))
        return [Problem(i, "", [], ids, "") for i, ids in enumerate(ids_PK.tolist())]

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def learner(self) -> Learner:
        policy = self.policy
        if not self.task.kl:
            policy = copy.copy(policy)
            policy.reference = policy.reference_model = None
        return grpo_learner(policy, self.config, MANY, **learner_limits(self.plan))

    def learn(self, learner: Learner, batch: Batch) -> None:
        release_cached_buffers()  # as the trainer does between sampling and learning
        learner.learn(batch)

    def random_batch(self) -> Batch:
        """Random completions of full length, advantages too: the input of learning, without a rollout."""
        task, draw = self.task, self._random()
        groups = []
        for problem in self.problems():
            ids_GT = draw.integers(FIRST_WORD, task.shape.vocab, (task.group_size, task.completion)).tolist()
            logps = [-float(np.log(task.shape.vocab))] * task.completion
            completions = [Completion(ids, list(logps), "", "length") for ids in ids_GT]
            for completion, advantage in zip(completions, draw.standard_normal(task.group_size), strict=True):
                completion.advantage = float(advantage)
            groups.append(Group(problem, completions))
        return pack(groups, pad_id=self.policy.pad_id)

    # ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def gaps(self, rollout: Sampler, learner: Learner) -> np.ndarray:
        """|log p of the sampler − log p of the learner| of every token of one rollout, in nats."""
        batch = pack(self.sample(rollout), pad_id=self.policy.pad_id)
        micro_batches = learner.forward.micro_batches(self.policy.split_model, batch)
        logps = list(learner.forward.logps_without_gradient(self.policy.split_model, micro_batches))
        return np.concatenate([
            np.abs(np.array(logp_BT) - np.array(part.batch.sampling_logp_BT))[np.array(part.batch.mask_BT) > 0]
            for logp_BT, part in zip(logps, micro_batches, strict=True)
        ])  # fmt: skip

    def _random(self) -> np.random.Generator:
        return np.random.default_rng(7)
