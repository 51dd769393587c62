"""The groups of a step: prompts taken, completions sampled and scored; with dynamic sampling, groups without a gradient replaced.

Updates nothing and writes nothing: what the trainer has to do meanwhile comes in as `poll` and `report`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backend.run.parts import RunParts
from backend.run.step_timer import StepTimer
from backend.run.step_work import Poll, StepWork
from backend.spec.config import Config
from backend.types import Group


@dataclass(slots=True)
class GroupCollection:
    """Collects the groups of one step. `logged` holds the metrics that reward functions logged in the last round."""

    parts: RunParts
    config: Config
    timer: StepTimer
    poll: Poll
    report: Callable[[str], None]
    logged: dict[str, float] = field(default_factory=dict)
    batch: list[Group] = field(default_factory=list)
    """The groups of the step: all that were sampled so far, and once they are chosen, those alone."""

    def collect(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The step's scored groups, and the metrics of their rollout.

        Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): a group whose completions all have the same reward has advantage
        0 and no gradient. Such groups are set aside and replaced by groups of new prompts, in at most
        `dynamic_sampling_rounds` rounds; groups that are still missing then are filled from those set aside, so that the
        step's size never varies. Prompts are taken from the stream in order, so the choice depends neither on chance nor on
        timing.
        """
        count, dynamic = self.config.prompts_per_step, self.config.dynamic_sampling
        kept: list[Group] = []
        without_gradient: list[Group] = []
        for _ in range(self.config.dynamic_sampling_rounds if dynamic else 1):
            for group in self._sample_and_score(count - len(kept), step):
                has_gradient = not dynamic or self.parts.scoring.has_nonzero_advantage(group, step)
                (kept if has_gradient else without_gradient).append(group)
            if len(kept) == count:
                break
        sampled = kept + without_gradient
        tokens = sum(completion.trained_tokens for group in sampled for completion in group.completions)
        metrics = {"rollout_tokens_per_second": self.timer.rate(tokens, "rollout")}
        if dynamic:
            metrics["dynamic_sampling/prompts"] = len(sampled)
        self.batch[:] = sampled[:count]
        return self.batch, metrics

    def _sample_and_score(self, count: int, step: int) -> list[Group]:
        """Take the next `count` prompts, sample a group of completions for each, and score them."""
        stream, already = self.parts.prompt_stream, len(self.batch)
        position = stream.cursor  # with the seed, it fixes the random numbers of these completions
        work = StepWork(self.timer, self.poll, self.report, self.batch)
        self.logged = self.parts.sample_and_score(stream.take(count), position, step, self.config, work)
        return self.batch[already:]
