"""Rank 0 of a run on several ranks: the ordinary trainer, with a context that shares its work with the workers
(`worker`).

It alone has the dataset, the run's folder and the event log. Every decision is made here, between two polls, as in a
run of one process. The workers do what messages say, in their order, so all ranks are at the same step with the same
settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import mlx.core as mx

from backend.config.config import Config
from backend.distributed.channel import LeaderChannel
from backend.distributed.collectives import FlatCollectives, MlxCollectives, do_nothing
from backend.distributed.messages import (
    SampledRound,
    SamplingOrder,
    pack_groups,
    pack_problems,
    reward_code,
    sample_round,
    score_round,
)
from backend.distributed.scheduling import LearningReport, PromptScheduler, RankPaces, StepShares, timed_learning
from backend.distributed.tensor_parallel import LeadingEngine, ShardedContext
from backend.distributed.weights import StepSnapshot, check_same_base, follow_leader, keep_together
from backend.runs.steering import stage_configs
from backend.trainer.evaluation.evaluate import EVAL_SEED
from backend.trainer.machine import StepSize
from backend.trainer.memory.plan import WHOLE_STEP
from backend.trainer.run_context import Note, RunContext, SamplingContext, SharedResources, StepContext, load_context
from backend.trainer.run_inputs import RunInputs
from backend.training.not_finite import check_sampled, check_scores
from backend.types import Group, Problem

LEAST_S = 120.0
"""The least time that a rank which answers may take for any work, such as kernels that are compiled first, before it
counts as hung."""
TIMES = 10.0
"""How many times as long as usual work may take besides."""
UNSEEN_TIMES = 30.0
"""The same of a rank that has done none yet: what is usual is then that of the others."""
SERVING_S = 0.02
"""Seconds that the leader waits for a message before it looks at its own work again."""
WAIT_S = 1.0
"""Seconds between two checks of how long the others have been waiting for a rank."""


class HangDetector:
    """Time limit for the updates of a step, or for a measurement without them. Before the first there is no limit."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    def observe(self, seconds: float) -> None:
        self._longest_s = max(self._longest_s, seconds)

    def overdue(self, waited_s: float) -> str:
        """Why a rank that the others have waited for so long counts as hung, to follow its name; "" as long as it does
        not."""
        if not self._longest_s or waited_s <= LEAST_S + TIMES * self._longest_s:
            return ""
        usual = f"a step took {self._longest_s:.1f} s"
        return f"answers, but the others have waited {waited_s:.0f} s for it to compute; {usual}"


class SharedSampling:
    """The prompts of a step, or of an evaluation, sampled and scored by all ranks. After `run`: every round, and
    `took_s`."""

    def __init__(
        self,
        parts: StepContext,
        workers: LeaderChannel,
        paces: RankPaces,
        problems: Sequence[Problem],
        order: SamplingOrder,
        notes: list[str],
        scoring_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notes` takes the workers' messages for the user. `scoring_limit_s`: how long the reward functions of a round
        may take."""
        self._parts, self._workers, self._paces, self._problems, self._order = parts, workers, paces, problems, order
        self._notes, self._scoring_limit_s, self._clock = notes, scoring_limit_s, clock
        size = len(workers.machines)
        self._scheduler = PromptScheduler(len(problems), order.group_size, paces, size)
        self._idle = set(range(1, size))
        self._given: dict[int, tuple[int, float]] = {}
        """Rank → (completions of the round that it works on, when it got them)."""
        self.rounds: list[SampledRound] = []
        self.took_s = 0.0

    @property
    def groups(self) -> list[Group]:
        """In the order of the problems."""
        return [group for each in sorted(self.rounds, key=lambda each: each.start) for group in each.groups]

    @property
    def logged(self) -> dict[str, float]:
        """The metrics that reward functions logged: means over the rounds by their completions."""
        totals: dict[str, tuple[float, int]] = {}
        for each in self.rounds:
            for name, value in (each.logged or {}).items():
                total, count = totals.get(name, (0.0, 0))
                totals[name] = (total + value * each.completions, count + each.completions)
        return {name: total / count for name, (total, count) in totals.items()}

    def run(self, poll: Callable[[float], None]) -> None:
        """`poll` is called with the share that is done, and may raise to stop."""
        began = self._clock()
        done = 0

        def serve_and_poll(wait_s: float = 0.0) -> None:
            nonlocal done
            self._serve(wait_s)
            done = sum(len(each.groups) for each in self.rounds)
            poll(done / len(self._problems))

        self._give()
        while done < len(self._problems):
            if own := self._scheduler.take(0, self._clock()):
                self._sample_here(own, serve_and_poll)
                done = sum(len(each.groups) for each in self.rounds)
            else:
                serve_and_poll(SERVING_S)
        self.took_s = self._clock() - began

    def _sample_here(self, places: range, serve_and_poll: Callable[[], None]) -> None:
        problems = self._problems[places.start : places.stop]
        own = sample_round(self._parts, self._order, 0, places.start, problems, lambda tokens: serve_and_poll())
        with ThreadPoolExecutor(1, "rewards") as pool:  # leaving it waits for the call that is running
            scoring = pool.submit(score_round, self._parts, self._order, own)
            while not scoring.done():
                self._serve(SERVING_S)
            scoring.result()
        self._take(own)

    def _serve(self, wait_s: float) -> None:
        """Take what workers have done, and give them more. Waits up to `wait_s` for a first message. Raises
        LostRankError for a worker that answers, and whose round takes many times as long as its rounds do."""
        while (message := self._workers.receive(wait_s)) is not None:
            wait_s = 0.0
            machine = self._workers.machines[message.rank]
            self._notes += [f"{machine}: {note}" for note in message.body["notes"]]
            self._idle.add(message.rank)
            del self._given[message.rank]
            self._take(SampledRound.unpacked(message.rank, message.body, message.arrays, self._problems))
            self._give()
        for rank, (count, since) in self._given.items():
            took_s, usual_s = self._clock() - since, self._paces.usual_s(rank, count)
            times = TIMES if self._paces.is_known(rank) else UNSEEN_TIMES
            if usual_s is not None and took_s > LEAST_S + times * usual_s + self._scoring_limit_s:
                why = f"answers, but has worked on {count:,} completions for {took_s:.0f} s; {usual_s:.1f} s are usual"
                self._workers.give_up(rank, why)

    def _take(self, done: SampledRound) -> None:
        self.rounds.append(done)
        self._paces.observe(done.rank, done.completions, done.seconds)
        self._scheduler.is_free(done.rank, self._clock())

    def _give(self) -> None:
        """A round to every worker that should have one now."""
        for rank in sorted(self._idle):
            if places := self._scheduler.take(rank, self._clock()):
                self._idle.remove(rank)
                problems = pack_problems(self._problems[places.start : places.stop])
                order = {"order": asdict(self._order), "start": places.start, "problems": problems}
                self._workers.send(rank, "sample", order)
                self._given[rank] = (len(places) * self._order.group_size, self._clock())


@dataclass(slots=True)
class Leader:
    """Rank 0's end of the run. `backend`: over what the ranks add up, for the event log."""

    workers: LeaderChannel
    ranks: FlatCollectives
    backend: str
    paces: RankPaces = field(init=False)
    shares: StepShares = field(init=False)
    learning: HangDetector = field(default_factory=HangDetector)
    measuring: HangDetector = field(default_factory=HangDetector)

    def __post_init__(self) -> None:
        self.paces, self.shares = RankPaces(self.ranks.size), StepShares(self.ranks.size)

    def load_context(
        self,
        config: Config,
        note: Note,
        inputs: RunInputs | None = None,
        most: StepSize = WHOLE_STEP,
        shared: SharedResources | None = None,
        stages: Sequence[Config] = (),
    ) -> RunContext:
        """As `backend.trainer.run_context.load_context`, while the workers load theirs. Raises UserError, and the
        channel's errors."""
        assert shared is None, "runs that share a process have no ranks of their own"
        stages = stages or stage_configs(config)
        if config.parallelism == "tensor":
            assert isinstance(self.ranks, MlxCollectives)
            engine = LeadingEngine(self.workers, self.ranks, self.backend)
            own = load_context(config, note, inputs, most, None, stages, engine)
            return ShardedContext(**_fields(own), engine=engine, config=config)
        configs = {
            "config": config.model_dump(mode="json"),
            "stages": [each.model_dump(mode="json") for each in stages],
        }
        self.workers.send_to_all("load", configs | {"code": reward_code(config)})
        own = load_context(config, note, inputs, most, None, stages)
        own.learner.forward.ranks = self.ranks
        built = {"steps": own.steps, "longest_prompts": own.longest_prompts, "most": asdict(most)}
        self.workers.send_to_all("build", built)
        check_same_base(own, config, self.ranks, self.workers.machines)
        return LeaderContext(**_fields(own), leader=self, config=config)

    @contextmanager
    def detect_hangs(self, limit: HangDetector) -> Generator[None]:
        """Raise LostRankError for a worker that answers, and that the others wait for in a collective many times as
        long as usual."""

        def look(waited_s: float) -> None:
            if (why := limit.overdue(waited_s)) and (behind := self.workers.behind()):
                self.workers.give_up(behind[0], why)

        self.ranks.waiting = look
        try:
            yield
        finally:
            self.ranks.waiting = do_nothing

    def learned_by_workers(self) -> list[LearningReport]:
        """Every worker's report on the step, which comes after its last update."""
        since, missing, reports = time.monotonic(), set(range(1, self.ranks.size)), list[LearningReport]()
        while missing:
            message = self.workers.receive(WAIT_S)
            if message is not None:
                reports.append(LearningReport(**message.body))
                self.shares.add_learning(message.rank, reports[-1])
                missing.remove(message.rank)
            elif why := self.learning.overdue(time.monotonic() - since):
                self.workers.give_up(min(missing), why)
        return reports


def _fields(context: RunContext) -> dict[str, Any]:
    return {each.name: getattr(context, each.name) for each in fields(context)}


@dataclass(slots=True)
class LeaderContext(RunContext):
    """The context of a run whose work the workers share."""

    leader: Leader
    config: Config
    """The settings that the workers have."""
    notes: list[str] = field(default_factory=list)
    """New messages of workers for the user."""
    kept: StepSnapshot | None = None
    """The state that the present step's updates began with."""

    def begin(self) -> None:
        learner = self.learner
        state = {"updates": learner.updates, "algorithm": learner.algorithm.state(), "scoring": self.scoring.state()}
        self.leader.workers.send_to_all("follow", state)
        follow_leader(self, self.config, self.leader.ranks)

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        about = {"config": config.model_dump(mode="json"), "keys": [*keys], "step": step}
        self.leader.workers.send_to_all("change", about)
        super(LeaderContext, self).change(config, keys, step)
        self.config = config

    def rest(self) -> None:
        self.leader.workers.send_to_all("rest")
        super(LeaderContext, self).rest()

    def of_ranks(self) -> dict[str, Any]:
        machines = [machine.to_dict() for machine in self.leader.workers.machines]
        return {"ranks": self.leader.ranks.size, "machines": machines, "distributed_backend": self.leader.backend}

    def new_notes(self) -> list[str]:
        own, self.notes[:] = [*self.notes], []
        return super(LeaderContext, self).new_notes() + own

    def sample_and_score(
        self, problems: list[Problem], position: int, step: int, config: Config, work: SamplingContext
    ) -> dict[str, float]:
        leader, order = self.leader, self._order(step, config.seed, position, config.group_size)
        with work.timer.phase("rollout"):
            sampling = self._sampling(problems, order, work.timer.elapsed)
            sampling.run(lambda share: work.poll("sampling", share))
            leader.shares.add_sampling(sampling.rounds, sampling.took_s, mx.get_peak_memory() / 1e9)
        for rank in set(range(leader.ranks.size)) - {each.rank for each in sampling.rounds}:
            leader.paces.assume_faster(rank)
        work.timer.count_as("reward", sum(each.scoring_s for each in sampling.rounds if each.rank == 0))
        work.groups.extend(sampling.groups)
        check_sampled(sampling.groups)
        check_scores(sampling.groups)
        return sampling.logged

    def held_out_groups(
        self, problems: list[Problem], step: int, config: Config, poll: Callable[[float], None]
    ) -> list[Group]:
        size = config.num_generations_eval or config.group_size
        sampling = self._sampling(problems, self._order(step, EVAL_SEED, 0, size))
        sampling.run(poll)
        return sampling.groups

    def _order(self, step: int, seed: int, position: int, group_size: int) -> SamplingOrder:
        return SamplingOrder(step, self.prompt_stream.epoch, seed, position, group_size, self.scoring.state())

    def _sampling(self, problems: list[Problem], order: SamplingOrder, *clock: Callable[[], float]) -> SharedSampling:
        limit_s = self.config.reward_timeout * len(self.config.reward_functions)
        workers, paces = self.leader.workers, self.leader.paces
        return SharedSampling(self, workers, paces, problems, order, self.notes, limit_s, *clock)

    def learn(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        leader, forward = self.leader, self.learner.forward
        self.kept = StepSnapshot.of(self, config)
        forward.speeds = leader.shares.speeds(leader.paces.speeds())
        self._send_groups("learn", groups)
        paused_s = 0.0

        def timed_poll() -> None:
            nonlocal paused_s
            began = time.perf_counter()
            poll()
            paused_s += time.perf_counter() - began

        def learn() -> dict[str, float]:
            keep_together(self, config, leader.ranks)
            return super(LeaderContext, self).learn(groups, config, timed_poll)

        with leader.detect_hangs(leader.learning):
            metrics, own = timed_learning(self, leader.ranks, learn)
            leader.shares.add_learning(0, own)
            reports = leader.learned_by_workers()
        leader.learning.observe(max(own.busy_s - paused_s, *(report.busy_s for report in reports)))
        self.kept = None
        return metrics | leader.shares.metrics()

    def take_back(self) -> None:
        if self.kept is not None:
            self.kept.restore(self)
            self.kept = None

    def held_out_metrics(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        self._send_groups("measure", groups)
        began = time.perf_counter()
        with self.leader.detect_hangs(self.leader.measuring):
            metrics = super(LeaderContext, self).held_out_metrics(groups, config, poll)
        self.leader.measuring.observe(time.perf_counter() - began)
        return metrics

    def test_metrics(self, step: int, config: Config, poll: Callable[[float], None]) -> dict[str, float]:
        self.begin()  # the weights may be those of the best checkpoint now
        return super(LeaderContext, self).test_metrics(step, config, poll)

    def _send_groups(self, kind: str, groups: list[Group]) -> None:
        """To learn from, without texts."""
        body, arrays = pack_groups(groups)
        self.leader.workers.send_to_all(kind, body | {"speeds": self.learner.forward.speeds}, arrays)
