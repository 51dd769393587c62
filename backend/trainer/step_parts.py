"""The parts that compute a run's steps: the model, and what samples, scores and learns with it. Every rank of a run has them.

Where the prompts come from and what is written of a step is not theirs: those parts are the leader's alone (`backend.trainer.parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from backend.config.config import Config
from backend.engine.memory import release_cached_buffers
from backend.models.policy import Base, Policy, load_policy
from backend.rewards.scorer import Scorer
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.machine.gpu_retries import StepSize
from backend.trainer.machine.memory_plan import WHOLE_STEP, learner_limits, plan_memory, rollout_limits
from backend.trainer.scoring_stages import ScoringStages
from backend.training.batch import Batch, pack
from backend.training.grpo import grpo_learner
from backend.training.learner import Learner
from backend.training.optimizers.own import SETTINGS_DECIDE, OwnUpdates
from backend.types import Group

LEARNERS = {"grpo": grpo_learner}
"""`train_mode` → what builds its learner: the algorithm, and the optimizer around it."""


@dataclass(slots=True)
class StepParts:
    """`steps` is the length of the run: `iters`, or the steps that `epochs` or `stages` amount to."""

    policy: Policy
    learner: Learner
    rollout: Sampler
    scoring: ScoringStages
    sampling: Sampling
    steps: int

    def steps_of(self, config: Config) -> int:
        """How long the run is with these settings. `iters` does not count where epochs or stages decide it."""
        return self.steps if config.epochs or config.stages else config.iters

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        """Go on with the settings of `config` from `step` on, between two steps; `keys` names those that differ from before. Raises UserError
        for a reference model that cannot be loaded."""
        self.policy.use_reference(config)
        self.scoring.change(config, self.steps_of(config))
        self.steps = self.scoring.steps
        self.sampling = Sampling.of(config)
        self.rollout.max_tokens = config.max_completion_length
        self.learner.change(config, self.steps, keys)

    def learn(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        """The updates of one step, from its scored groups."""
        metrics = self.learner.learn(self.packed(groups, config), poll)
        mx.synchronize()  # raises what has failed of this step on the GPU, before the step counts (`gpu_errors`)
        release_cached_buffers()
        return metrics

    def held_out_metrics(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        """What the learner measures of completions that are not learned from."""
        return self.learner.held_out_metrics(self.packed(groups, config), poll)

    def packed(self, groups: list[Group], config: Config) -> Batch:
        return pack(groups, pad_id=self.policy.pad_id, mask_truncated_completions=config.mask_truncated_completions)

    def step_size(self, config: Config) -> StepSize:
        """How much of a step has been computed at once."""
        forward, rows = self.learner.forward, self.rollout.rows
        every_row = config.prompts_per_step * config.group_size
        # The largest that there was, where the budget was never used up: half of the budget would change nothing then.
        tokens = min(forward.micro_batch_tokens, forward.largest_micro_batch or forward.micro_batch_tokens)
        return StepSize(tokens, min(rows or every_row, every_row))

    def rest(self) -> None:
        """Before a pause: give MLX's cached buffers back to the system."""
        mx.clear_cache()

    def close(self) -> None:
        """End the reward functions' process."""
        self.scoring.close()


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the memory plan leaves of a step, as keywords of the learner's builder and of `Rollout`."""

    learner: dict[str, Any]
    rollout: dict[str, Any]


class Engine:
    """What loads the model of a run and builds what computes with it: here for a process that has all of the model."""

    own: OwnUpdates = SETTINGS_DECIDE
    """The optimizer and the schedule of the program that trains, if it has any."""

    def load(self, config: Config, note: Callable[[str], None], base: Base | None = None) -> Policy:
        return load_policy(config, note, base)

    def build(self, policy: Policy, config: Config, steps: int, limits: StepLimits) -> tuple[Learner, Sampler]:
        learner = LEARNERS[config.train_mode](policy, config, steps, own=self.own, **limits.learner)
        return learner, Sampler(policy, config.max_completion_length, stop=config.stop, **limits.rollout)


OWN_ENGINE = Engine()


def build_step_parts(
    policy: Policy,
    config: Config,
    scorer: Scorer,
    steps: int,
    longest_prompts: Iterable[int],
    note: Callable[[str], None],
    *,
    most: StepSize = WHOLE_STEP,
    stages: Sequence[Config] = (),
    engine: Engine = OWN_ENGINE,
) -> StepParts:
    """The parts around a loaded policy, for a run of `steps` steps (with stages, as many as they have) and prompts of these lengths in
    tokens. `most`, `stages`, `engine` and `note` as in `backend.trainer.parts.load_parts`. Raises UserError."""
    scoring = ScoringStages(config, scorer, steps)
    plan = plan_memory(config, policy, longest_prompts, note, stages)
    limits = StepLimits(learner_limits(plan, most), rollout_limits(plan, most))
    learner, rollout = engine.build(policy, config, scoring.steps, limits)
    return StepParts(
        policy=policy,
        learner=learner,
        rollout=rollout,
        scoring=scoring,
        sampling=Sampling.of(config),
        steps=scoring.steps,
    )
