"""A rank other than 0: has the model, the optimizer, a sampler and the reward functions, and does what the leader's
messages say.

It has no dataset and no run folder, and writes nothing but the files with reward functions, into a temporary folder.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from backend.config.config import Config
from backend.distributed import tensor_parallel
from backend.distributed.channel import ChannelMessage, WorkerChannel
from backend.distributed.collectives import FlatCollectives, MlxCollectives
from backend.distributed.messages import (
    SamplingOrder,
    sample_round,
    score_round,
    unpack_groups,
    with_reward_files,
    write_reward_code,
)
from backend.distributed.scheduling import timed_learning
from backend.distributed.weights import check_same_base, follow_leader, keep_together
from backend.distributed.wire import GOODBYE
from backend.engine import device
from backend.models.policy import Policy, load_policy
from backend.rewards.scorer import Scorer, begin_scorer
from backend.trainer.machine import KeepAwake, StepSize
from backend.trainer.memory.plan import refuse_too_large
from backend.trainer.run_context import StepContext, build_step_context
from backend.training.not_finite import NotFiniteError
from backend.types import Group, Problem


def work(leader: WorkerChannel, ranks: FlatCollectives) -> None:
    """Do what the leader's messages say until it has closed the channel. Raises what goes wrong; the caller tells the
    leader."""
    with tempfile.TemporaryDirectory(prefix="grpo-studio-rank-") as folder:
        worker = Worker(leader, ranks, Path(folder))
        try:
            worker.run()
        finally:
            worker.close()


class Worker:
    """The state of one worker. Every message of the leader has a method of its kind."""

    config: Config
    """The settings of the present step."""
    stages: list[Config]
    policy: Policy
    parts: StepContext

    def __init__(self, leader: WorkerChannel, ranks: FlatCollectives, folder: Path) -> None:
        """`folder`: for the files with reward functions."""
        self._leader, self._ranks, self._folder = leader, ranks, folder
        self._notes: list[str] = []
        self._keep_awake = KeepAwake(self._notes.append)
        self._files: dict[str, Path] = {}
        self._scorer: Scorer | None = None
        self._answers = {
            "load": self._load,
            "build": self._build,
            "follow": self._follow,
            "change": self._change,
            "sample": self._sample,
            "learn": self._learn,
            "measure": self._measure,
            "rest": lambda message: self.parts.rest(),
        }

    def run(self) -> None:
        while True:
            message = self._leader.receive()
            if message.kind == tensor_parallel.LOAD:
                assert isinstance(self._ranks, MlxCollectives)
                self._keep_awake.start()
                message = tensor_parallel.follow(self._leader, self._ranks, message)
            if message.kind == GOODBYE:
                return
            self._answers[message.kind](message)

    def close(self) -> None:
        self._keep_awake.stop()
        if self._scorer is not None:
            self._scorer.close()

    def _load(self, message: ChannelMessage) -> None:
        """The model; the process of the reward functions begins to start meanwhile. Comes again where the leader had to
        begin again."""
        body = message.body
        self._keep_awake.start()
        maybe_set_recommended_wired_limit()
        self._files = write_reward_code(body["code"], self._folder)
        self.config = self._read(body["config"])
        self.stages = [self._read(each) for each in body["stages"]]
        if self._scorer is not None:
            self._scorer.close()
        self._scorer = begin_scorer(self.config)
        device.use(self.config.device)
        refuse_too_large(self.config, self.stages)
        self.policy = load_policy(self.config, self._notes.append)

    def _read(self, values: dict[str, Any]) -> Config:
        return with_reward_files(Config.model_validate(values), self._files)

    def _build(self, message: ChannelMessage) -> None:
        assert self._scorer is not None
        body, most = message.body, StepSize(**message.body["most"])
        self.parts = build_step_context(
            self.policy,
            self.config,
            self._scorer,
            body["steps"],
            body["longest_prompts"],
            self._notes.append,
            most=most,
            stages=self.stages,
        )
        self.parts.learner.forward.ranks = self._ranks
        check_same_base(self.parts, self.config, self._ranks, [])

    def _follow(self, message: ChannelMessage) -> None:
        """Take over the leader's state: that of a checkpoint, or of the start."""
        self.parts.learner.restore(None, message.body["updates"], message.body["algorithm"])
        self.parts.scoring.restore(message.body["scoring"])
        follow_leader(self.parts, self.config, self._ranks)

    def _change(self, message: ChannelMessage) -> None:
        self.config = self._read(message.body["config"])
        self.parts.change(self.config, message.body["keys"], message.body["step"])

    def _sample(self, message: ChannelMessage) -> None:
        order, start = SamplingOrder(**message.body["order"]), message.body["start"]
        problems = [Problem(**each) for each in message.body["problems"]]
        self.parts.scoring.restore(order.scoring)
        sampled = sample_round(self.parts, order, self._ranks.rank, start, problems, lambda tokens: None)
        score_round(self.parts, order, sampled)
        notes = [*self._notes, *self.parts.rollout.new_notes()]
        self._notes.clear()
        body, arrays = sampled.packed()
        self._leader.send("sampled", body | {"notes": notes}, arrays)

    def _learn(self, message: ChannelMessage) -> None:
        groups = self._groups(message)

        def learn() -> dict[str, float]:
            keep_together(self.parts, self.config, self._ranks)
            return self.parts.learn(groups, self.config, lambda: None)

        try:
            _, report = timed_learning(self.parts, self._ranks, learn)
        except NotFiniteError:
            return  # on every rank alike, and the leader ends the run
        self._leader.send("learned", asdict(report))
        mx.reset_peak_memory()  # of the next step

    def _measure(self, message: ChannelMessage) -> None:
        self.parts.held_out_metrics(self._groups(message), self.config, lambda: None)

    def _groups(self, message: ChannelMessage) -> list[Group]:
        self.parts.learner.forward.speeds = message.body["speeds"]
        return unpack_groups(message.body, message.arrays)
