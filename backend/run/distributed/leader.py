"""Rank 0 of a run on several ranks: the ordinary trainer, with parts that share their work with the workers (`worker`).

It alone has the dataset, the run's folder and the diary. Every decision is made here, between two polls, as in a run of one process. The
workers do what messages say, in their order, so all ranks are at the same step with the same settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import mlx.core as mx

from backend.run.distributed import group_wire, reward_code
from backend.run.distributed.collectives import FlatCollectives, MlxCollectives, do_nothing
from backend.run.distributed.hand_out import RankPaces
from backend.run.distributed.kept_state import KeptState
from backend.run.distributed.lockstep import check_same_base, follow_leader, keep_together
from backend.run.distributed.patience import LearningPatience
from backend.run.distributed.sampled_round import SamplingOrder
from backend.run.distributed.sharded.leading import LeadingEngine, ShardedParts, load_sharded_parts
from backend.run.distributed.shared_sampling import SharedSampling
from backend.run.distributed.step_shares import LearningReport, StepShares, timed_learning
from backend.run.distributed.workers import Workers
from backend.run.evaluation.evaluate import EVAL_SEED
from backend.run.machine.gpu_retries import StepSize
from backend.run.machine.memory_plan import WHOLE_STEP
from backend.run.parts import Note, RunParts, SharedParts, load_parts
from backend.run.run_inputs import RunInputs
from backend.run.step_work import StepWork
from backend.spec.config import Config
from backend.spec.runs.steering import stage_configs
from backend.training.not_finite import check_sampled, check_scores
from backend.types import Group, Problem

WAIT_S = 1.0
"""Seconds between two looks at how long the others have been waiting for a rank."""


@dataclass(slots=True)
class Leader:
    """What rank 0 has beside the parts of a run. `backend`: over what the ranks add up, for the diary."""

    workers: Workers
    ranks: FlatCollectives
    backend: str
    paces: RankPaces = field(init=False)
    shares: StepShares = field(init=False)
    patience: LearningPatience = field(default_factory=LearningPatience)

    def __post_init__(self) -> None:
        self.paces, self.shares = RankPaces(self.ranks.size), StepShares(self.ranks.size)

    def load_parts(
        self,
        config: Config,
        note: Note,
        inputs: RunInputs | None = None,
        most: StepSize = WHOLE_STEP,
        shared: SharedParts | None = None,
        stages: Sequence[Config] = (),
    ) -> LeaderParts | ShardedParts:
        """As `backend.run.parts.load_parts`, while the workers load theirs. Raises Mistake, and what the channel raises."""
        assert shared is None, "runs that share a process have no ranks of their own"
        stages = stages or stage_configs(config)
        if config.parallelism == "tensor":
            assert isinstance(self.ranks, MlxCollectives)
            engine = LeadingEngine(self.workers, self.ranks, self.backend)
            return load_sharded_parts(config, note, inputs, most, stages, engine)
        self.workers.send_to_all("load", {
            "config": config.model_dump(mode="json"), "stages": [each.model_dump(mode="json") for each in stages],
            "code": reward_code.code_of(config), "names": reward_code.named_files(config),
        })  # fmt: skip
        parts = load_parts(config, note, inputs, most, None, stages)
        parts.learner.forward.ranks = self.ranks
        built = {"steps": parts.steps, "longest_prompts": parts.longest_prompts, "most": asdict(most)}
        self.workers.send_to_all("build", built)
        check_same_base(parts, config, self.ranks, self.workers.machines)
        return LeaderParts(
            **{each.name: getattr(parts, each.name) for each in fields(parts)}, leader=self, config=config
        )

    @contextmanager
    def hung_are_given_up(self) -> Generator[None]:
        """While a step is learned: raise LostRank for a worker that answers, and that the others wait for many times as long as a step took."""

        def look(waited_s: float) -> None:
            if (why := self.patience.overdue(waited_s)) and (behind := self.workers.behind()):
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
                assert message.kind == "learned", message
                reports.append(LearningReport(**message.body))
                self.shares.add_learning(message.rank, reports[-1])
                missing.remove(message.rank)
            elif why := self.patience.overdue(time.monotonic() - since):
                self.workers.give_up(min(missing), why)
        return reports


@dataclass(slots=True)
class LeaderParts(RunParts):
    """The leader's parts: what they compute, they compute together with the workers."""

    leader: Leader
    config: Config
    """The settings that the workers have."""
    notes: list[str] = field(default_factory=list)
    """Sentences of workers for the user, not told yet."""
    kept: KeptState | None = None
    """What the step that is being learned from began with."""

    def begin(self) -> None:
        learner = self.learner
        self.leader.workers.send_to_all("follow", {
            "updates": learner.updates, "algorithm": learner.algorithm.state(), "scoring": self.scoring.state(),
        })  # fmt: skip
        follow_leader(self, self.config, self.leader.ranks)

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        about = {"config": config.model_dump(mode="json"), "keys": [*keys], "step": step}
        self.leader.workers.send_to_all("change", about)
        super(LeaderParts, self).change(config, keys, step)
        self.config = config

    def rest(self) -> None:
        self.leader.workers.send_to_all("rest")
        super(LeaderParts, self).rest()

    def of_ranks(self) -> dict[str, Any]:
        machines = [asdict(machine) for machine in self.leader.workers.machines]
        return {"ranks": self.leader.ranks.size, "machines": machines, "distributed_backend": self.leader.backend}

    def new_notes(self) -> list[str]:
        told, self.notes[:] = [*self.notes], []
        return super(LeaderParts, self).new_notes() + told

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def sample_and_score(
        self, problems: list[Problem], position: int, step: int, config: Config, work: StepWork
    ) -> dict[str, float]:
        order = self._order(step, config.seed, position, config.group_size)
        with work.timer.phase("rollout"):
            sampling = self._sampling(problems, order, work.timer.elapsed)
            sampling.run(lambda share: work.poll("sampling", share))
            self.leader.shares.add_sampling(sampling.rounds, sampling.took_s, mx.get_peak_memory() / 1e9)
        for rank in set(range(self.leader.ranks.size)) - {each.rank for each in sampling.rounds}:
            self.leader.paces.assume_faster(rank)
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
        scoring_limit_s = self.config.reward_timeout * len(self.config.reward_functions)
        return SharedSampling(
            self, self.leader.workers, self.leader.paces, problems, order, self.notes, scoring_limit_s, *clock
        )

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        leader, forward = self.leader, self.learner.forward
        self.kept = KeptState.of(self, config)
        forward.speeds = leader.shares.speeds(leader.paces.speeds())
        self._send_groups("learn", groups, {"speeds": forward.speeds})

        paused_s = 0.0

        def timed_poll() -> None:
            nonlocal paused_s
            began = time.perf_counter()
            poll()
            paused_s += time.perf_counter() - began

        def learn() -> dict[str, float]:
            keep_together(self, config, leader.ranks)
            return super(LeaderParts, self).learn(groups, config, timed_poll)

        with leader.hung_are_given_up():
            metrics, own = timed_learning(self, leader.ranks, learn)
            leader.shares.add_learning(0, own)
            reports = leader.learned_by_workers()
        leader.patience.observe(max(own.busy_s - paused_s, *(report.busy_s for report in reports)))
        self.kept = None
        return metrics | leader.shares.metrics()

    def take_back(self) -> None:
        if self.kept is not None:
            self.kept.put_back(self)
            self.kept = None

    def held_out_metrics(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        self._send_groups("measure", groups, {"speeds": self.learner.forward.speeds})
        return super(LeaderParts, self).held_out_metrics(groups, config, poll)

    def test_metrics(self, step: int, config: Config, poll: Callable[[float], None]) -> dict[str, float]:
        self.begin()  # the weights may be those of the best checkpoint now
        return super(LeaderParts, self).test_metrics(step, config, poll)

    def _send_groups(self, kind: str, groups: list[Group], about: dict[str, Any]) -> None:
        """What learning needs of every group; no text."""
        body, arrays = group_wire.packed_completions(groups)
        lengths, arrays["prompts"] = group_wire.packed_prompts(groups)
        self.leader.workers.send_to_all(kind, body | about | {"prompt_lengths": lengths}, arrays)
