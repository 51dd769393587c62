"""A run whose model is sharded among its ranks: all of them compute every pass together.

Rank 0 is the ordinary trainer, and announces each call of the model to the others. A rank that waits inside a pass
waits in a sum, and Metal kills GPU work after 5 s of that (mlx#4475). So all ranks meet on the control channel before a
call begins, and wherever the trainer polls.

Rank 0's arrays count: sampled tokens are broadcast, gradients summed once, adapters broadcast when a bit differs.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from backend.config.config import Config
from backend.distributed.channel import ChannelMessage, LeaderChannel, WorkerChannel
from backend.distributed.collectives import MlxCollectives, wait_for_reason
from backend.distributed.weights import StepSnapshot, follow_leader, keep_together
from backend.distributed.wire import Arrays
from backend.engine.device import release_cached_buffers
from backend.engine.penalties import Penalties
from backend.models.policy import Base, Policy
from backend.models.sharded_policy import load_sharded_policy
from backend.sampling.grammar import Grammar
from backend.sampling.rollout import Poll, Sampler, decode_costs
from backend.sampling.row_costs import RowCosts
from backend.sampling.sampler import Sampling
from backend.trainer.run_context import LEARNERS, Engine, RunContext
from backend.training.batch import Batch
from backend.training.learner import Learner
from backend.training.not_finite import NotFiniteError
from backend.types import Group, Problem
from backend.utils.errors import UserError

T = TypeVar("T")

CALLS = tuple(f"sharded: {call}" for call in ("load", "build", "begin", "change", "sample", "learn", "held out", "end"))
LOAD, BUILD, BEGIN, CHANGE, SAMPLE, LEARN, HELD_OUT, END = CALLS
HERE, GO, GIVE_UP = "sharded: here", "sharded: go", "sharded: give up"
"""Messages of a meeting."""
POLL_S = 0.1
REASON_WITHIN_S = 20.0
_OF_LINK = re.compile(r"\[(ring|mpi|jaccl|nccl|distributed)\]|peer|communicat", re.IGNORECASE)
"""mlx's words for a link that has failed."""


class CallGivenUpError(Exception):
    """Rank 0 has given a call up; `then`: its next announcement, if known."""

    def __init__(self, then: ChannelMessage | None = None) -> None:
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


def pack_batch(batch: Batch) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {"pad_id": arrays.pop("pad_id")}, {name: np.array(x) for name, x in arrays.items() if x is not None}


def unpack_batch(body: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Batch:
    return Batch(pad_id=int(body["pad_id"]), **{name: mx.array(x) for name, x in arrays.items()})


class ComputeThread:
    """Rank 0's thread for all of the model's work, since mlx ties graphs to threads; the main thread watches the other
    ranks. The process must end with `os._exit`: a sum with a lost rank never returns."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="sharded model", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> T:
        """The result of `call`, made in the thread. Raises what `check` raises."""
        if threading.current_thread() is self._thread:
            return call()
        result: Future[T] = Future()
        self._calls.put((call, result))
        while True:
            try:
                error = result.exception(POLL_S)
                break
            except TimeoutError:
                self._check()
        if isinstance(error, RuntimeError) and _OF_LINK.search(str(error)):
            wait_for_reason(self._check, REASON_WITHIN_S)
        return result.result()

    def _work(self) -> None:
        while True:
            call, result = self._calls.get()
            try:
                value = call()
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)
                del value
            del call, result  # they hold arrays


class LeadingEngine(Engine):
    """Announces a call, and makes it once all ranks have begun it."""

    def __init__(self, workers: LeaderChannel, ranks: MlxCollectives, backend: str) -> None:
        self.workers, self.ranks, self.backend = workers, ranks, backend
        self.thread = ComputeThread(workers.check)
        self.parts: ModelParts

    def together(self, kind: str, body: Mapping[str, Any], call: Callable[[], T], arrays: Arrays | None = None) -> T:
        """The result of `call`, while the other ranks make the same call."""

        def met() -> T:
            mx.synchronize()  # nothing of an earlier call may be under way: the ranks' sums have one order
            self.workers.send_to_all(kind, body, arrays)
            self.meet()
            return call()

        return self.thread.run(met)

    def meet(self, own: Callable[[], None] = lambda: None) -> None:
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
        body = {"config": config.model_dump(mode="json")}
        add_up = lambda x: self.ranks.sum([x])[0]  # noqa: E731
        return self.together(LOAD, body, lambda: load_sharded_policy(config, self.ranks.group, note, add_up))

    def build(
        self, policy: Policy, config: Config, steps: int, of_learner: dict[str, Any], of_rollout: dict[str, Any]
    ) -> tuple[Learner, Sampler]:
        costs = decode_costs(policy.model)
        of_rollout = of_rollout | {"stop": config.stop, "merge": True}
        body = {"steps": steps, "learner": of_learner, "rollout": of_rollout, "costs": asdict(costs)}

        def build() -> tuple[Learner, Sampler]:
            learner = LEARNERS[config.train_mode](policy, config, steps, **of_learner)
            rollout = LeadingSampler(self, config, policy, config.max_completion_length, **of_rollout, costs=costs)
            self.parts = ModelParts(policy, learner, rollout)
            self._check_alike(self.ranks.gather(self.parts.decisions()))
            mx.eval(learner.optimizer.state)  # in this thread, whose graph it is: checkpoints are another's
            return learner, rollout

        return self.together(BUILD, body, build)

    def _check_alike(self, decisions: Sequence[dict[str, Any]]) -> None:
        for machine, other in zip(self.workers.machines, decisions, strict=True):
            different = [name for name in decisions[0] if other.get(name) != decisions[0][name]]
            if different:
                raise UserError(
                    "hosts",
                    f"{machine} computes this model in another way than here ({', '.join(different)}): a sharded model "
                    "needs the same mlx and the same files on all machines.",
                )


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
    ) -> list[Group]:
        engine = self._engine
        body = {
            "prompts": [problem.tokens for problem in problems],
            "group_size": group_size,
            "sampling": asdict(sampling),
            "seed": seed,
            "first_number": first_number,
            "max_tokens": self.max_tokens,
        }

        def sample() -> list[Group]:
            keep_together(engine.parts, self._config, engine.ranks)
            return super(LeadingSampler, self).sample(
                problems, group_size, sampling, seed, first_number, lambda count: engine.meet(lambda: poll(count))
            )

        return engine.together(SAMPLE, body, sample)


@dataclass
class ShardedContext(RunContext):
    """The context of a run whose model is sharded among the ranks of `engine`."""

    engine: LeadingEngine
    config: Config
    """The settings of the present step."""
    kept: StepSnapshot | None = None

    def begin(self) -> None:
        mx.eval(self.learner.optimizer.state)  # this thread's, from a checkpoint
        body = {"updates": self.learner.updates, "algorithm": self.learner.algorithm.state()}
        self.engine.together(BEGIN, body, lambda: follow_leader(self.engine.parts, self.config, self.engine.ranks))

    def of_ranks(self) -> dict[str, Any]:
        engine = self.engine
        machines = [asdict(machine) for machine in engine.workers.machines]
        about = {"ranks": engine.ranks.size, "machines": machines, "distributed_backend": engine.backend}
        return about | {"parallelism": "tensor"}

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        self.config = config
        body = {"config": config.model_dump(mode="json"), "keys": sorted(keys), "steps": self.steps_of(config)}
        self.engine.together(CHANGE, body, lambda: super(ShardedContext, self).change(config, keys, step))

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
        batch = self.engine.thread.run(lambda: self.packed(groups, config))
        body, arrays = self.engine.thread.run(lambda: pack_batch(batch))
        return self.engine.together(kind, body, lambda: call(batch), arrays)

    def close(self) -> None:
        self.engine.workers.send_to_all(END)
        super().close()


def follow(leader: WorkerChannel, ranks: MlxCollectives, first: ChannelMessage) -> ChannelMessage:
    """A worker's side: make rank 0's calls from `first` on. → the first message that is none."""
    follower: _Follower | None = None
    message = first
    while message.kind in CALLS:
        then = None
        if message.kind == END:
            follower = None  # the memory is given back: rank 0 may export for long
            release_cached_buffers()
        else:
            follower = follower or _Follower(leader, ranks)
            then = follower.take(message)
        message = then or leader.receive()
    return message


class _Follower:
    config: Config
    policy: Policy
    parts: ModelParts

    def __init__(self, leader: WorkerChannel, ranks: MlxCollectives) -> None:
        self.leader, self.ranks = leader, ranks

    def take(self, message: ChannelMessage) -> ChannelMessage | None:
        mx.synchronize()
        try:
            self._meet()
            self._call(message.kind, message.body, message.arrays)
        except CallGivenUpError as error:
            return error.then
        except NotFiniteError:  # rank 0 has found the same, and ends the run
            pass
        return None

    def _meet(self) -> None:
        self.leader.send(HERE)
        message = self.leader.receive()
        if message.kind == GIVE_UP:
            raise CallGivenUpError
        if message.kind != GO:  # rank 0's call has failed between two meetings
            raise CallGivenUpError(message)

    def _call(self, kind: str, body: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        if kind == LOAD:
            self.config = Config.model_validate(body["config"])
            add_up = lambda x: self.ranks.sum([x])[0]  # noqa: E731
            self.policy = load_sharded_policy(self.config, self.ranks.group, add_up=add_up)
        elif kind == BUILD:
            learner = LEARNERS[self.config.train_mode](self.policy, self.config, body["steps"], **body["learner"])
            costs = RowCosts(tuple((int(rows), time) for rows, time in body["costs"]["measured"]))
            rollout = Sampler(self.policy, self.config.max_completion_length, **body["rollout"], costs=costs)
            self.parts = ModelParts(self.policy, learner, rollout)
            self.ranks.gather(self.parts.decisions())
        elif kind == BEGIN:
            follow_leader(self.parts, self.config, self.ranks)
            self.parts.learner.restore(None, body["updates"], body["algorithm"])
        elif kind == CHANGE:
            self.config = Config.model_validate(body["config"])
            self.policy.use_reference(self.config)
            self.parts.learner.change(self.config, body["steps"], body["keys"])
        elif kind == SAMPLE:
            self._sample(body)
        elif kind == LEARN:
            keep_together(self.parts, self.config, self.ranks)
            self.parts.learner.learn(unpack_batch(body, arrays), self._meet)
            mx.synchronize()
            release_cached_buffers()
        else:
            self.parts.learner.held_out_metrics(unpack_batch(body, arrays), self._meet)

    def _sample(self, body: dict[str, Any]) -> None:
        keep_together(self.parts, self.config, self.ranks)
        values = dict(body["sampling"])
        penalties, grammar = Penalties(**values.pop("penalties")), values.pop("grammar")
        sampling = Sampling(**values, penalties=penalties, grammar=Grammar(**grammar) if grammar else None)
        problems = [Problem(0, "", [], tokens, "") for tokens in body["prompts"]]  # their texts are rank 0's alone
        rollout = self.parts.rollout
        rollout.max_tokens = body["max_tokens"]
        rollout.sample(
            problems, body["group_size"], sampling, body["seed"], body["first_number"], lambda tokens: self._meet()
        )
