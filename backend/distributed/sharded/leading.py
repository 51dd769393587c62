"""Rank 0 of a run whose model is divided: the parts of an ordinary run, whose work with the model is announced to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_unflatten

from backend.config.config import Config
from backend.distributed.collectives import MlxCollectives
from backend.distributed.kept_state import StepSnapshot
from backend.distributed.sharded import announcements, meeting
from backend.distributed.sharded.announcements import Arrays, SampleCall, packed_batch
from backend.distributed.sharded.compute_thread import ComputeThread
from backend.distributed.sharded.following import ComputingParts, check_alike, follow_leader, keep_together, outline_of
from backend.distributed.workers import Workers
from backend.engine.memory import release_cached_buffers
from backend.models.policy import Base, Policy
from backend.models.sharded_policy import load_sharded_policy
from backend.sampling.rollout import Poll, Sampler, decode_costs
from backend.sampling.sampler import Sampling
from backend.trainer.machine import StepSize
from backend.trainer.run_context import LEARNERS, Engine, RunContext, StepLimits, load_context
from backend.trainer.run_inputs import RunInputs
from backend.training.learner import Learner
from backend.types import Group, Problem

T = TypeVar("T")


class LeadingEngine(Engine):
    """Computes with the other ranks. Its methods announce a call, and make it once all ranks have begun it."""

    def __init__(self, workers: Workers, ranks: MlxCollectives, backend: str) -> None:
        """`backend`: over what the ranks add up, for the event log."""
        self.workers, self.ranks, self.backend = workers, ranks, backend
        self.thread = ComputeThread(workers.check)
        self.computing: ComputingParts

    def together(self, kind: str, body: Mapping[str, Any], call: Callable[[], T], arrays: Arrays | None = None) -> T:
        """What `call` returns or raises, made in the thread that computes while the other ranks make the same call."""

        def met() -> T:
            mx.synchronize()  # nothing of an earlier call may be under way: the ranks' sums have one order
            self.workers.send_to_all(kind, body, arrays)
            self.meet()
            return call()

        return self.thread.run(met)

    def meet(self, own: Callable[[], None] = lambda: None) -> None:
        """Within a call, do what the trainer does when it looks up, while the other ranks wait."""
        meeting.lead(self.workers, own)

    def load(self, config: Config, note: Callable[[str], None], base: Base | None = None) -> Policy:
        assert base is None, "a sweep's runs share a model that is whole"
        body = {"config": config.model_dump(mode="json")}
        return self.together(
            announcements.LOAD, body, lambda: load_sharded_policy(config, self.ranks.group, note, self.add_up)
        )

    def build(self, policy: Policy, config: Config, steps: int, limits: StepLimits) -> tuple[Learner, Sampler]:
        costs = decode_costs(policy.model)
        limits = StepLimits(limits.learner, limits.rollout | {"stop": config.stop, "merge": True})
        body = {"steps": steps, "limits": asdict(limits), "costs": asdict(costs)}

        def build() -> tuple[Learner, Sampler]:
            learner = LEARNERS[config.train_mode](policy, config, steps, **limits.learner)
            rollout = LeadingRollout(self, policy, config.max_completion_length, **limits.rollout, costs=costs)
            check_alike(self.ranks.gather(outline_of(policy, learner, rollout)), self.workers.machines)
            mx.eval(learner.optimizer.state)  # in this thread, whose graph it is: checkpoints are another's
            self.computing = ComputingParts(policy, learner, rollout)
            return learner, rollout

        return self.together(announcements.BUILD, body, build)

    def keep_together(self) -> None:
        """Within a call, bring the others this rank's adapters where theirs differ in a bit."""
        keep_together(self.computing, self.ranks)

    def add_up(self, vector: mx.array) -> mx.array:
        """The sum of a vector of float32 over the ranks."""
        return self.ranks.sum([vector])[0]


class LeadingRollout(Sampler):
    """Samples with the other ranks, which draw what this one draws."""

    def __init__(self, engine: LeadingEngine, policy: Policy, max_tokens: int, **limits: Any) -> None:
        super().__init__(policy, max_tokens, **limits)
        self._engine = engine

    def sample(
        self,
        problems: Sequence[Problem],
        group_size: int,
        sampling: Sampling,
        seed: int,
        first_number: int,
        poll: Poll = lambda token_count: None,
    ) -> list[Group]:
        prompts = [problem.tokens for problem in problems]
        call = SampleCall(prompts, group_size, sampling, seed, first_number, self.max_tokens)

        def meet(token_count: int) -> None:
            self._engine.meet(lambda: poll(token_count))

        def sample() -> list[Group]:
            self._engine.keep_together()
            return super(LeadingRollout, self).sample(problems, group_size, sampling, seed, first_number, meet)

        return self._engine.together(announcements.SAMPLE, call.to_body(), sample)


@dataclass(slots=True)
class ShardedParts(RunContext):
    """The parts of a run whose model is divided among the ranks of `engine`."""

    engine: LeadingEngine
    config: Config
    """The settings of the present step."""
    kept: StepSnapshot | None = None
    """What the step that is being learned from began with."""

    def begin(self) -> None:
        """The other ranks take over the adapters and the optimizer's state, from a checkpoint or another adapter."""
        mx.eval(self.learner.optimizer.state)  # this thread's, from a checkpoint
        self.engine.together(
            announcements.BEGIN, {"updates": self.learner.updates, "algorithm": self.learner.algorithm.state()},
            lambda: follow_leader(self.engine.computing, self.engine.ranks),
        )  # fmt: skip

    def of_ranks(self) -> dict[str, Any]:
        engine = self.engine
        machines = [asdict(machine) for machine in engine.workers.machines]
        about = {"ranks": engine.ranks.size, "machines": machines, "distributed_backend": engine.backend}
        return about | {"parallelism": "tensor"}

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        self.config = config
        body = {"config": config.model_dump(mode="json"), "keys": sorted(keys), "steps": self.steps_of(config)}
        self.engine.together(announcements.CHANGE, body, lambda: super(ShardedParts, self).change(config, keys, step))

    def learn(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        def learn() -> dict[str, float]:
            self.engine.keep_together()
            metrics = self.learner.learn(batch, lambda: self.engine.meet(poll))
            mx.synchronize()
            release_cached_buffers()
            return metrics

        self.kept = StepSnapshot.of(self, config)
        batch = self.engine.thread.run(lambda: self.packed(groups, config))
        metrics = self.engine.together(announcements.LEARN, *self._with_arrays(learn, batch))
        self.kept = None
        return metrics

    def take_back(self) -> None:
        """As it was kept, without asking mlx for anything: a pass may be hanging. Good for saving; the model's own layers stay as they are."""
        if self.kept is not None:
            self.policy.masters = tree_unflatten([*self.kept.trained.items()])
            self.learner.restore(self.kept.moments, self.kept.updates, self.kept.algorithm)
            self.learner.is_whole = True
            self.kept = None

    def held_out_metrics(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        batch = self.engine.thread.run(lambda: self.packed(groups, config))
        return self.engine.together(
            announcements.HELD_OUT,
            *self._with_arrays(lambda: self.learner.held_out_metrics(batch, lambda: self.engine.meet(poll)), batch),
        )

    def _with_arrays(self, call: Callable[[], T], batch: Any) -> tuple[Mapping[str, Any], Callable[[], T], Arrays]:
        body, arrays = self.engine.thread.run(lambda: packed_batch(batch))
        return body, call, arrays

    def close(self) -> None:
        self.engine.workers.send_to_all(announcements.END)
        super(ShardedParts, self).close()


def load_sharded_parts(
    config: Config,
    note: Callable[[str], None],
    inputs: RunInputs | None,
    most: StepSize,
    stages: Sequence[Config],
    engine: LeadingEngine,
) -> ShardedParts:
    """As `load_context`, with a model that is divided among the ranks. Raises UserError, and what the channel raises."""
    parts = load_context(config, note, inputs, most, None, stages, engine)
    own = {each.name: getattr(parts, each.name) for each in fields(RunContext)}
    return ShardedParts(**own, engine=engine, config=config)
