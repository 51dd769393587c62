"""Rank 0 of a run on several ranks: the ordinary trainer, whose context makes the workers obey its messages in order.
They share its prompts, or every pass of a model too large for one machine. Of such a sharded model rank 0's arrays
count: sampled tokens are broadcast, gradients summed once, adapters broadcast when a bit differs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_unflatten

from backend.config.config import Config
from backend.distributed import collectives, scheduling
from backend.distributed.channel import LeaderChannel
from backend.distributed.messages import SampledRound, SamplingOrder, check_sendable, reward_code
from backend.distributed.worker import GIVE_UP, GO, HERE, decisions
from backend.models.policy import Base, Policy
from backend.models.sharded_policy import load_sharded_policy
from backend.runs.steering import stage_configs
from backend.sampling.rollout import Poll, Sampler, decode_costs
from backend.sampling.sampler import Sampling
from backend.trainer.evaluation.evaluate import EVAL_SEED
from backend.trainer.machine import StepSize
from backend.trainer.memory.estimate import GB
from backend.trainer.memory.plan import WHOLE_STEP, dtype_here
from backend.trainer.run_context import Engine, Note, RunContext, SamplingContext, SharedResources, load_context
from backend.trainer.run_inputs import RunInputs
from backend.training.algorithms import build_learner
from backend.training.learner import Learner
from backend.training.not_finite import check_sampled, check_scores
from backend.types import Group, Problem
from backend.utils.errors import UserError
from backend.utils.machine import usable_bytes

T = TypeVar("T")

LEAST_S = 120.0  # seconds that any work may take
TIMES = 10.0  # times the usual seconds that it may take besides
FIRST_S = 3600.0  # seconds that the first step may take
SERVING_S = 0.02  # seconds to wait for a message
_OF_LINK = re.compile(r"\[(ring|mpi|jaccl|nccl|distributed)\]|peer|communicat", re.IGNORECASE)  # of a failed link


class SharedSampling:
    """Samples and scores the prompts of a step, or of an evaluation, on all ranks."""

    def __init__(
        self, context: SharingContext, order: SamplingOrder, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._context, self._order, self._clock = context, order, clock
        self._workers, self._paces = context.workers, context.paces
        self._scheduler = scheduling.PromptScheduler(len(order.problems), order.group_size, self._paces)
        self.rounds: list[SampledRound] = []
        self.took_s = 0.0

    @property
    def groups(self) -> list[Group]:
        return [group for each in sorted(self.rounds, key=lambda each: each.start) for group in each.groups]

    @property
    def logged(self) -> dict[str, float]:
        totals: dict[str, tuple[float, int]] = {}
        for each in self.rounds:
            for name, value in each.logged.items():
                total, count = totals.get(name, (0.0, 0))
                totals[name] = (total + value * each.completions, count + each.completions)
        return {name: total / count for name, (total, count) in totals.items()}

    def run(self, poll: Callable[[float], None]) -> None:
        """`poll` is called with the share that is done, and may raise to stop."""
        began, total, context = self._clock(), len(self._order.problems), self._context

        def serve_and_poll(wait_s: float = 0.0) -> None:
            self._serve(wait_s)
            poll(len(self.groups) / total)

        while len(self.groups) < total:
            self._give()
            if own := self._next_round(0):
                sampled = scheduling.sample_round(context, 0, own, lambda _: serve_and_poll())
                with ThreadPoolExecutor(1, "rewards") as pool:  # leaving it waits for the call that is running
                    scoring = pool.submit(scheduling.score_round, context, own, sampled)
                    while not scoring.done():
                        self._serve(SERVING_S)
                    scoring.result()
                self._take(sampled)
            serve_and_poll(0.0 if own else SERVING_S)
        self.took_s = self._clock() - began

    def _serve(self, wait_s: float) -> None:
        while (message := self._workers.receive(wait_s)) is not None:
            wait_s = 0.0
            machine = self._workers.machines[message.rank]
            self._context.notes.extend(f"{machine}: {note}" for note in message.body["notes"])
            done: SampledRound = message.body["done"]
            for own, group in zip(self._order.problems[done.start :], done.groups, strict=False):
                # With tools it came back, since environments may have added to the prompt.
                group.problem = replace(group.problem, row=own.row) if group.problem.tokens else own
            self._take(done)
            self._give()
        config = self._context.config
        most_s = LEAST_S + config.reward_timeout * len(config.reward_functions)
        for rank, (count, since) in self._scheduler.given.items():
            took_s = self._clock() - since
            usual_s = self._paces.usual_s(rank, count) if rank and took_s > most_s else None
            if usual_s is not None and took_s > most_s + TIMES * usual_s:
                why = f"answers, but has worked on {count:,} completions for {took_s:.0f} s; {usual_s:.1f} s are usual"
                self._workers.give_up(rank, why)

    def _take(self, done: SampledRound) -> None:
        self.rounds.append(done)
        self._paces.observe(done.rank, done.completions, done.seconds)
        del self._scheduler.given[done.rank]

    def _give(self) -> None:
        for rank in range(1, len(self._workers.machines)):
            if rank not in self._scheduler.given and (order := self._next_round(rank)):
                for problem in order.problems:
                    check_sendable(problem.row)
                self._workers.send(rank, "sample", order=order)

    def _next_round(self, rank: int) -> SamplingOrder | None:
        places = self._scheduler.take(rank, self._clock())
        problems = self._order.problems[places.start : places.stop]
        return replace(self._order, problems=problems, start=places.start) if problems else None


@contextmanager
def detect_hangs(workers: LeaderChannel, ranks: collectives.FlatCollectives, longest_s: float) -> Generator[None]:
    """Raise LostRankError for the slowest worker where a collective takes much longer than this work ever has.
    `longest_s`: seconds that it has taken; 0 if it was never done."""

    def look(waited_s: float) -> None:
        if waited_s > (LEAST_S + TIMES * longest_s if longest_s else FIRST_S):
            usual = f"; a step took {longest_s:.1f} s" if longest_s else ""
            why = f"answers, but the others have waited {waited_s:.0f} s for it to compute{usual}"
            workers.give_up(workers.slowest(), why)

    ranks.waiting = look
    try:
        yield
    finally:
        ranks.waiting = collectives.do_nothing


@dataclass
class LeaderContext(RunContext):
    """The context of rank 0. `backend`: for the event log."""

    workers: LeaderChannel
    ranks: collectives.FlatCollectives
    backend: str
    config: Config  # the settings that the workers have
    kept: collectives.StepSnapshot | None = None  # the state before the present step's updates

    def together(self, kind: str, call: Callable[[], T], **body: Any) -> T:
        """The result of `call`, while the workers obey the message."""
        self.workers.send_to_all(kind, **body)
        return call()

    def begin(self) -> None:
        follow = partial(collectives.follow_leader, self.learner, self.config, self.ranks)
        algorithm = [*self.learner.algorithm.state()]
        self.together("follow", follow, updates=self.learner.updates, algorithm=algorithm)

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        self.config = config
        change = partial(super().change, config, keys, step)
        self.together("change", change, config=config, keys=[*keys], step=step)

    def of_ranks(self) -> dict[str, Any]:
        machines = [*map(asdict, self.workers.machines)]
        return {"ranks": len(machines), "machines": machines, "distributed_backend": self.backend}

    def learn_together(
        self, groups: list[Group], config: Config, poll: Callable[[], None]
    ) -> tuple[dict[str, float], list[scheduling.LearningReport]]:
        self.kept = collectives.StepSnapshot.of(self.learner, config)
        call = partial(scheduling.learn_together, self, groups, config, poll, self.ranks)
        learned = self.together("learn", call, **self.to_send(groups))
        self.kept = None
        return learned

    def take_back(self) -> None:
        if self.kept is not None:
            self.kept.restore(self.learner)
            self.kept = None

    def held_out_metrics(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        measure = partial(super().held_out_metrics, groups, config, poll)
        return self.together("measure", measure, **self.to_send(groups))

    def evaluate(self, split: str, step: int, config: Config, poll: Callable[[float], None]) -> dict[str, float]:
        if split == "test":
            self.begin()  # the weights may be those of the best checkpoint now
        return super().evaluate(split, step, config, poll)

    def to_send(self, groups: list[Group]) -> dict[str, Any]:
        """Body of a message: the groups to learn or measure, and the speeds by which rows are split."""
        sent = [
            Group(
                # Pictures are read there too: their files have one path on all machines.
                Problem(number, "", group.problem.messages if group.problem.images else [], group.problem.tokens, ""),
                [replace(completion, text="", scores={}, logged={}, turns=[]) for completion in group.completions],
            )
            for number, group in enumerate(groups)
        ]
        return {"groups": sent, "speeds": [*self.learner.forward.speeds]}

    def close(self) -> None:
        self.workers.send_to_all("end")
        super().close()


@dataclass
class SharingContext(LeaderContext):
    """The context of a run whose prompts are shared."""

    shares: scheduling.StepShares = field(default_factory=scheduling.StepShares)
    paces: scheduling.RankPaces = field(init=False)
    learning_s: float = 0.0  # seconds of the longest learning
    measuring_s: float = 0.0
    notes: list[str] = field(default_factory=list)  # new messages of workers

    def __post_init__(self) -> None:
        self.paces = scheduling.RankPaces(self.ranks.size)

    def order(self, problems: list[Problem], step: int, seed: int, position: int, group_size: int) -> SamplingOrder:
        epoch, scoring = self.prompt_stream.epoch, self.scoring.state()
        return SamplingOrder(problems, step, epoch, seed, position, group_size, scoring)

    def rest(self) -> None:
        self.workers.send_to_all("rest")
        super().rest()

    def new_notes(self) -> list[str]:
        own, self.notes[:] = [*self.notes], []
        return super().new_notes() + own

    def sample_and_score(
        self, problems: list[Problem], position: int, step: int, config: Config, work: SamplingContext
    ) -> dict[str, float]:
        with work.timer.phase("rollout"):
            order = self.order(problems, step, config.seed, position, config.group_size)
            sampling = SharedSampling(self, order, work.timer.elapsed)
            sampling.run(lambda share: work.poll("sampling", share))
            self.shares.add_sampling(sampling.rounds, sampling.took_s, mx.get_peak_memory() / 1e9)
        for rank in set(range(self.ranks.size)) - {each.rank for each in sampling.rounds}:
            self.paces.assume_faster(rank)
        work.timer.count_as("reward", sum(each.scoring_s for each in sampling.rounds if each.rank == 0))
        groups, logged = sampling.groups, sampling.logged
        work.groups.extend(groups)
        check_sampled(groups)
        if self.scoring.on_leader:
            with work.timer.phase("reward"):
                logged = self.scoring.score(groups, step, self.prompt_stream.epoch, lambda: work.report("scoring"))
        check_scores(groups)
        return logged

    def held_out_groups(
        self, problems: list[Problem], step: int, config: Config, poll: Callable[[float], None]
    ) -> list[Group]:
        group_size = config.num_generations_eval or config.group_size
        sampling = SharedSampling(self, self.order(problems, step, EVAL_SEED, 0, group_size))
        sampling.run(poll)
        if self.scoring.on_leader:
            self.scoring.score(sampling.groups, step, self.prompt_stream.epoch)
        return sampling.groups

    def learn(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        paused_s = 0.0
        self.learner.forward.speeds = self.shares.speeds(self.paces.speeds())

        def timed_poll() -> None:
            nonlocal paused_s
            began = time.perf_counter()
            poll()
            paused_s += time.perf_counter() - began

        with detect_hangs(self.workers, self.ranks, self.learning_s):
            metrics, reports = self.learn_together(groups, config, timed_poll)
        own, *others = (report.busy_s for report in reports)
        self.learning_s = max(self.learning_s, own - paused_s, *others)
        return metrics | self.shares.metrics(reports)

    def held_out_metrics(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        began = time.perf_counter()
        with detect_hangs(self.workers, self.ranks, self.measuring_s):
            metrics = super().held_out_metrics(groups, config, poll)
        self.measuring_s = max(self.measuring_s, time.perf_counter() - began)
        return metrics


class ShardedEngine(Engine):
    """Makes the calls of a sharded model once all ranks have begun them. A rank that waits inside a pass waits in a
    sum, and Metal kills GPU work after 5 s of that (mlx#4475). So all ranks meet on the control channel before a call
    begins, and wherever the trainer polls.

    One thread does all of the model's work, since mlx ties graphs to threads; the main thread watches the other ranks.
    The process must end with `os._exit`: a sum with a lost rank never returns."""

    def __init__(self, workers: LeaderChannel, ranks: collectives.MlxCollectives) -> None:
        self.workers, self.ranks = workers, ranks
        self._thread = collectives.CallThread("sharded model")

    def together(self, kind: str, call: Callable[[], T], **body: Any) -> T:
        """As `LeaderContext.together`. Raises what the channel's `check` raises."""

        def met() -> T:
            mx.synchronize()  # nothing of an earlier call may be under way: the ranks' sums have one order
            self.workers.send_to_all(kind, **body)
            self.meet()
            return call()

        result = self._thread.submit(met)
        return collectives.wait_for(result, self.workers.check, lambda error: _OF_LINK.search(str(error)))

    def meet(self, own: Callable[[], None] = collectives.do_nothing) -> None:
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
        load = partial(load_sharded_policy, config, self.ranks.group, self.ranks.sum, note)
        return self.together("load", load, config=config)

    def build(
        self, policy: Policy, config: Config, steps: int, of_learner: dict[str, Any], of_rollout: dict[str, Any]
    ) -> tuple[Learner, Sampler]:
        of_rollout = of_rollout | {"stop": config.stop, "merge": True, "costs": decode_costs(policy.model)}

        def build() -> tuple[Learner, Sampler]:
            learner = build_learner(policy, config, steps, **of_learner)
            rollout = LeadingSampler(self, learner, config, policy, config.max_completion_length, **of_rollout)
            own = decisions(learner, rollout)
            for machine, theirs in zip(self.workers.machines, self.ranks.gather(own), strict=True):
                if different := [name for name in own if theirs.get(name) != own[name]]:
                    other = f"{machine} computes this model in another way than here ({', '.join(different)})"
                    needs = "a sharded model needs the same mlx and the same files on all machines"
                    raise UserError("hosts", f"{other}: {needs}.")
            mx.eval(learner.optimizer.state)  # in this thread, whose graph it is: checkpoints are another's
            return learner, rollout

        return self.together("build", build, steps=steps, of_learner=of_learner, of_rollout=of_rollout)


class LeadingSampler(Sampler):
    """Samples with the other ranks, which draw what this one draws."""

    def __init__(self, engine: ShardedEngine, learner: Learner, config: Config, *own: Any, **limits: Any) -> None:
        super().__init__(*own, **limits)
        self._engine, self._learner, self._config = engine, learner, config

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
            collectives.keep_together(self._learner, self._config, engine.ranks)

            def meet(count: int) -> None:
                engine.meet(lambda: poll(count))

            return super(LeadingSampler, self).sample(problems, *rest, meet, finished)

        prompts = [problem.tokens for problem in problems]  # their texts are rank 0's alone
        return engine.together("sample", sample, prompts=prompts, rest=rest, max_tokens=self.max_tokens)


@dataclass
class ShardedContext(LeaderContext):
    """The context of a run whose model is sharded among the ranks."""

    engine: ShardedEngine = field(kw_only=True)

    def together(self, kind: str, call: Callable[[], T], **body: Any) -> T:
        return self.engine.together(kind, call, **body)

    def begin(self) -> None:
        mx.eval(self.learner.optimizer.state)  # this thread's, from a checkpoint
        super().begin()

    def of_ranks(self) -> dict[str, Any]:
        return super().of_ranks() | {"parallelism": "tensor"}

    def learn(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        return self.learn_together(groups, config, lambda: self.engine.meet(poll))[0]

    def take_back(self) -> None:
        if self.kept is not None:
            # The model itself is the thread's, which may be in a sum that never ends.
            self.policy.masters = tree_unflatten([*self.kept.trained.items()])
            self.learner.restore(self.kept.moments, self.kept.updates, self.kept.algorithm)
            self.learner.is_whole, self.kept = True, None

    def held_out_metrics(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        return super().held_out_metrics(groups, config, lambda: self.engine.meet(poll))


def load_leader_context(
    workers: LeaderChannel,
    ranks: collectives.FlatCollectives,
    backend: str,
    config: Config,
    note: Note,
    inputs: RunInputs | None = None,
    most: StepSize = WHOLE_STEP,
    shared: SharedResources | None = None,
    stages: Sequence[Config] = (),
) -> RunContext:
    """As `load_context`, while the workers load theirs. Raises UserError, and the channel's errors."""
    assert shared is None or shared.base is None, "runs that share a process have no ranks of their own"
    stages = stages or stage_configs(config)
    # The type that all ranks compute in: one that the smallest machine has memory for, and on Macs as it is.
    dtype = stages[0].dtype, ""
    if shared is not None and shared.dtype:
        dtype = shared.dtype
    elif not any(machine.chip.startswith("Apple") for machine in workers.machines):
        smallest_gb = min(machine.memory_gb for machine in workers.machines)
        dtype = dtype_here(stages, usable_bytes(round(smallest_gb * GB)))
    shared = SharedResources(None, dtype)
    own: dict[str, Any] = {"workers": workers, "ranks": ranks, "backend": backend, "config": config}
    if config.parallelism == "tensor":
        assert isinstance(ranks, collectives.MlxCollectives)
        engine = ShardedEngine(workers, ranks)
        make = partial(ShardedContext, engine=engine, **own)
        return load_context(config, note, inputs, most, shared, stages, engine, make)
    chosen = config.model_copy(update={"dtype": dtype[0]})
    workers.send_to_all("load", config=chosen, stages=[*stages], code=reward_code(config))
    context = load_context(config, note, inputs, most, shared, stages, make=partial(SharingContext, **own))
    context.learner.forward.ranks = ranks
    sizes = {"steps": context.steps, "longest_prompts": context.longest_prompts, "images": context.images}
    workers.send_to_all("build", **sizes, most=most)
    collectives.check_same_base(context.policy, config, ranks, workers.machines)
    return context
