"""A run whose model is sharded among its ranks: all of them compute every pass together.

Rank 0 is the ordinary trainer, and announces each call of the model to the others. A rank that waits inside a pass
waits in a sum, and Metal kills GPU work after 5 s of that (mlx#4475). So all ranks meet on the control channel before a
call begins, and wherever the trainer polls.

Rank 0's arrays count: sampled tokens are broadcast, gradients summed once, adapters broadcast when a bit differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_unflatten

from backend.config.config import Config
from backend.distributed.channel import ChannelMessage, LeaderChannel, WorkerChannel
from backend.distributed.collectives import (
    CallThread,
    MlxCollectives,
    StepSnapshot,
    do_nothing,
    follow_leader,
    keep_together,
    wait_for,
)
from backend.distributed.ranks import about_ranks
from backend.engine.device import release_cached_buffers
from backend.models.policy import Base, Policy
from backend.models.sharded_policy import load_sharded_policy
from backend.sampling.rollout import Poll, Sampler, decode_costs
from backend.sampling.sampler import Sampling
from backend.trainer.run_context import Engine, RunContext
from backend.training.algorithms import build_learner
from backend.training.batch import Batch
from backend.training.collectives import total
from backend.training.learner import Learner
from backend.training.not_finite import NotFiniteError
from backend.types import Group, Problem
from backend.utils.errors import UserError

T = TypeVar("T")

CALLS = tuple(f"sharded: {call}" for call in ("load", "build", "begin", "change", "sample", "learn", "held out", "end"))
LOAD, BUILD, BEGIN, CHANGE, SAMPLE, LEARN, HELD_OUT, END = CALLS
HERE, GO, GIVE_UP = "sharded: here", "sharded: go", "sharded: give up"  # messages of a meeting
_OF_LINK = re.compile(r"\[(ring|mpi|jaccl|nccl|distributed)\]|peer|communicat", re.IGNORECASE)
"""mlx's words for a link that has failed."""


class CallGivenUpError(Exception):
    """Rank 0 has given a call up; `then`: its next announcement, if known."""

    def __init__(self, then: ChannelMessage | None) -> None:
        super().__init__("rank 0 has given the call up")
        self.then = then


@dataclass(slots=True)
class ModelParts:
    """Everything of a rank that computes with the model."""

    policy: Policy
    learner: Learner
    rollout: Sampler

    def decisions(self) -> dict[str, Any]:
        """The decisions that ranks which compute a model together must share."""
        policy, model = self.policy, self.policy.split_model
        return {
            "eos_ids": policy.eos_ids,
            "vocabulary": model.vocab_size,
            "shares prompts": model.prefix_layers,
            "has a reference": policy.reference is not None,
            "decodes together": self.rollout.has_continuous_batching,
            "fused layers": len(self.rollout.fused.fused_linears),
            "micro-batch": self.learner.forward.micro_batch_tokens,
            "adapters": sorted(policy.trainable()),
            "slow paths": [*model.slow_paths, *self.rollout.slow_paths],
        }


class LeadingEngine(Engine):
    """Announces a call, and makes it once all ranks have begun it. One thread does all of the model's work, since mlx
    ties graphs to threads; the main thread watches the other ranks. The process must end with `os._exit`: a sum with a
    lost rank never returns."""

    parts: ModelParts

    def __init__(self, workers: LeaderChannel, ranks: MlxCollectives, backend: str) -> None:
        self.workers, self.ranks, self.backend = workers, ranks, backend
        self._thread = CallThread("sharded model")

    def run(self, call: Callable[[], T]) -> T:
        """The result of `call`, made in the thread. Raises what the channel's `check` raises."""
        return wait_for(self._thread.submit(call), self.workers.check, lambda error: _OF_LINK.search(str(error)))

    def together(self, kind: str, call: Callable[[], T], **body: Any) -> T:
        """The result of `call`, while the other ranks make the same call."""

        def met() -> T:
            mx.synchronize()  # nothing of an earlier call may be under way: the ranks' sums have one order
            self.workers.send_to_all(kind, **body)
            self.meet()
            return call()

        return self.run(met)

    def meet(self, own: Callable[[], None] = do_nothing) -> None:
        """Within a call, poll and wait for the others. An error of `own` gives the call up."""
        try:
            own()
        except BaseException:
            self.workers.send_to_all(GIVE_UP)
            raise
        absent = len(self.workers.machines) - 1
        while absent:
            message = self.workers.receive()
            absent -= message is not None and message.kind == HERE
        self.workers.send_to_all(GO)

    def load(self, config: Config, note: Callable[[str], None], base: Base | None = None) -> Policy:
        assert base is None, "a sweep's runs share a model that is whole"
        add_up = partial(total, self.ranks)
        load = partial(load_sharded_policy, config, self.ranks.group, note, add_up)
        return self.together(LOAD, load, config=config)

    def build(
        self, policy: Policy, config: Config, steps: int, of_learner: dict[str, Any], of_rollout: dict[str, Any]
    ) -> tuple[Learner, Sampler]:
        costs = decode_costs(policy.model)
        of_rollout = of_rollout | {"stop": config.stop, "merge": True}

        def build() -> tuple[Learner, Sampler]:
            learner = build_learner(policy, config, steps, **of_learner)
            rollout = LeadingSampler(self, config, policy, config.max_completion_length, **of_rollout, costs=costs)
            self.parts = ModelParts(policy, learner, rollout)
            own = self.parts.decisions()
            for machine, theirs in zip(self.workers.machines, self.ranks.gather(own), strict=True):
                if different := [name for name in own if theirs.get(name) != own[name]]:
                    other = f"{machine} computes this model in another way than here ({', '.join(different)})"
                    needs = "a sharded model needs the same mlx and the same files on all machines"
                    raise UserError("hosts", f"{other}: {needs}.")
            mx.eval(learner.optimizer.state)  # in this thread, whose graph it is: checkpoints are another's
            return learner, rollout

        return self.together(BUILD, build, steps=steps, learner=of_learner, rollout=of_rollout, costs=costs)


class LeadingSampler(Sampler):
    """Samples with the other ranks, which draw what this one draws."""

    def __init__(self, engine: LeadingEngine, config: Config, policy: Policy, max_tokens: int, **limits: Any) -> None:
        super().__init__(policy, max_tokens, **limits)
        self._engine, self._config = engine, config

    def sample(
        self,
        problems: Sequence[Problem],
        group_size: int,
        sampling: Sampling,
        seed: int,
        first_number: int,
        poll: Poll = lambda token_count: None,
        finished: Callable[[Group], None] | None = None,
    ) -> list[Group]:
        engine, rest = self._engine, (group_size, sampling, seed, first_number)

        def sample() -> list[Group]:
            keep_together(engine.parts, self._config, engine.ranks)
            meet: Poll = lambda count: engine.meet(lambda: poll(count))  # noqa: E731
            return super(LeadingSampler, self).sample(problems, *rest, meet, finished)

        prompts = [problem.tokens for problem in problems]  # their texts are rank 0's alone
        return engine.together(SAMPLE, sample, prompts=prompts, rest=rest, max_tokens=self.max_tokens)


@dataclass
class ShardedContext(RunContext):
    """The context of a run whose model is sharded among the ranks of `engine`."""

    engine: LeadingEngine
    config: Config  # the settings of the present step
    kept: StepSnapshot | None = None

    def begin(self) -> None:
        mx.eval(self.learner.optimizer.state)  # this thread's, from a checkpoint
        follow = partial(follow_leader, self.engine.parts, self.config, self.engine.ranks)
        state = [*self.learner.algorithm.state()]
        self.engine.together(BEGIN, follow, updates=self.learner.updates, algorithm=state)

    def of_ranks(self) -> dict[str, Any]:
        return about_ranks(self.engine.workers.machines, self.engine.backend) | {"parallelism": "tensor"}

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        self.config = config
        change = partial(super().change, config, keys, step)
        self.engine.together(CHANGE, change, config=config, keys=sorted(keys), steps=self.steps_of(config))

    def learn(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        def learn(batch: Batch) -> dict[str, float]:
            keep_together(self.engine.parts, config, self.engine.ranks)
            metrics = self.learner.learn(batch, lambda: self.engine.meet(poll))
            mx.synchronize()
            release_cached_buffers()
            return metrics

        self.kept = StepSnapshot.of(self, config)
        metrics = self._with_batch(LEARN, groups, config, learn)
        self.kept = None
        return metrics

    def take_back(self) -> None:
        if self.kept is not None:
            self.policy.masters = tree_unflatten([*self.kept.trained.items()])
            self.learner.restore(self.kept.moments, self.kept.updates, self.kept.algorithm)
            self.learner.is_whole = True
            self.kept = None

    def held_out_metrics(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        measure = self.learner.held_out_metrics
        return self._with_batch(HELD_OUT, groups, config, lambda batch: measure(batch, lambda: self.engine.meet(poll)))

    def _with_batch(self, kind: str, groups: list[Group], config: Config, call: Callable[[Batch], T]) -> T:
        batch = self.engine.run(lambda: self.packed(groups, config))
        return self.engine.together(kind, lambda: call(batch), batch=batch)

    def close(self) -> None:
        self.engine.workers.send_to_all(END)
        super().close()


def follow(leader: WorkerChannel, ranks: MlxCollectives, message: ChannelMessage) -> ChannelMessage:
    """On a worker: make rank 0's calls, beginning with `message`. Returns the first message that is not a call."""
    follower: _Follower | None = None
    while message.kind in CALLS:
        then = None
        if message.kind == END:
            follower = None  # the memory is given back: rank 0 may export for long
            release_cached_buffers()
        else:
            follower = follower or _Follower(leader, ranks)
            mx.synchronize()
            try:
                follower.meet()
                follower.call(message.kind, message.body)
            except CallGivenUpError as error:
                then = error.then
            except NotFiniteError:  # rank 0 has found the same, and ends the run
                pass
        message = then or leader.receive()
    return message


class _Follower:
    config: Config
    policy: Policy
    parts: ModelParts

    def __init__(self, leader: WorkerChannel, ranks: MlxCollectives) -> None:
        self.leader, self.ranks = leader, ranks

    def meet(self) -> None:
        self.leader.send(HERE)
        message = self.leader.receive()
        if message.kind != GO:  # given up, or rank 0's call has failed between two meetings
            raise CallGivenUpError(None if message.kind == GIVE_UP else message)

    def call(self, kind: str, body: dict[str, Any]) -> None:
        if kind == LOAD:
            self.config = body["config"]
            self.policy = load_sharded_policy(self.config, self.ranks.group, add_up=partial(total, self.ranks))
        elif kind == BUILD:
            learner = build_learner(self.policy, self.config, body["steps"], **body["learner"])
            most = self.config.max_completion_length
            rollout = Sampler(self.policy, most, **body["rollout"], costs=body["costs"])
            self.parts = ModelParts(self.policy, learner, rollout)
            self.ranks.gather(self.parts.decisions())
        elif kind == BEGIN:
            follow_leader(self.parts, self.config, self.ranks)
            self.parts.learner.restore(None, body["updates"], body["algorithm"])
        elif kind == CHANGE:
            self.config = body["config"]
            self.policy.use_reference(self.config)
            self.parts.learner.change(self.config, body["steps"], body["keys"])
        elif kind == SAMPLE:
            keep_together(self.parts, self.config, self.ranks)
            problems = [Problem(0, "", [], tokens, "") for tokens in body["prompts"]]
            self.parts.rollout.max_tokens = body["max_tokens"]
            group_size, sampling, seed, first = body["rest"]
            self.parts.rollout.sample(problems, group_size, sampling, seed, first, lambda tokens: self.meet())
        elif kind == LEARN:
            keep_together(self.parts, self.config, self.ranks)
            self.parts.learner.learn(body["batch"], self.meet)
            mx.synchronize()
            release_cached_buffers()
        else:
            self.parts.learner.held_out_metrics(body["batch"], self.meet)
