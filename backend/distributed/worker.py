"""A rank other than 0: has the model, optimizer, sampler and reward functions, and obeys the leader's messages."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from backend.config.config import Config
from backend.distributed import tensor_parallel
from backend.distributed.channel import WorkerChannel
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
from backend.distributed.wire import GOODBYE, Arrays
from backend.engine import device
from backend.models.policy import load_policy
from backend.rewards.scorer import Scorer, begin_scorer
from backend.trainer.machine import KeepAwake, StepSize
from backend.trainer.memory.plan import refuse_too_large
from backend.trainer.run_context import StepContext, step_parts
from backend.training.not_finite import NotFiniteError
from backend.types import Problem


def work(leader: WorkerChannel, ranks: FlatCollectives) -> None:
    """Obey the leader until it has closed the channel. Raises what goes wrong."""
    with tempfile.TemporaryDirectory(prefix="grpo-studio-rank-") as folder:
        worker = Worker(leader, ranks, Path(folder))
        try:
            worker.run()
        finally:
            worker.close()


class Worker:
    """The state of one worker. `folder`: for the files with reward functions."""

    config: Config
    """The settings of the present step."""
    stages: list[Config]
    parts: StepContext

    def __init__(self, leader: WorkerChannel, ranks: FlatCollectives, folder: Path) -> None:
        self._leader, self._ranks, self._folder = leader, ranks, folder
        self._notes: list[str] = []
        self._keep_awake = KeepAwake(self._notes.append)
        self._files: dict[str, Path] = {}
        self._scorer: Scorer | None = None

    def run(self) -> None:
        while True:
            message = self._leader.receive()
            if message.kind == tensor_parallel.LOAD:
                assert isinstance(self._ranks, MlxCollectives)
                self._keep_awake.start()
                message = tensor_parallel.follow(self._leader, self._ranks, message)
            if message.kind == GOODBYE:
                return
            self._obey(message.kind, message.body, message.arrays)

    def close(self) -> None:
        self._keep_awake.stop()
        if self._scorer is not None:
            self._scorer.close()

    def _obey(self, kind: str, body: dict[str, Any], arrays: Arrays) -> None:
        if kind == "load":
            self._load(body)
        elif kind == "build":
            assert self._scorer is not None
            parts = step_parts(
                self.policy,
                self.config,
                self._scorer,
                body["steps"],
                body["longest_prompts"],
                self._notes.append,
                most=StepSize(**body["most"]),
                stages=self.stages,
            )
            self.parts = StepContext(**parts)
            self.parts.learner.forward.ranks = self._ranks
            check_same_base(self.parts, self.config, self._ranks, [])
        elif kind == "follow":  # the leader's state: that of a checkpoint, or of the start
            self.parts.learner.restore(None, body["updates"], body["algorithm"])
            self.parts.scoring.restore(body["scoring"])
            follow_leader(self.parts, self.config, self._ranks)
        elif kind == "change":
            self.config = self._read(body["config"])
            self.parts.change(self.config, body["keys"], body["step"])
        elif kind == "sample":
            self._sample(body)
        elif kind == "learn":
            self._learn(body, arrays)
        elif kind == "measure":
            self.parts.learner.forward.speeds = body["speeds"]
            self.parts.held_out_metrics(unpack_groups(body, arrays), self.config, lambda: None)
        else:
            self.parts.rest()

    def _load(self, body: dict[str, Any]) -> None:
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

    def _sample(self, body: dict[str, Any]) -> None:
        order, problems = SamplingOrder(**body["order"]), [Problem(**each) for each in body["problems"]]
        self.parts.scoring.restore(order.scoring)
        sampled = sample_round(self.parts, order, self._ranks.rank, body["start"], problems, lambda tokens: None)
        score_round(self.parts, order, sampled)
        notes = [*self._notes, *self.parts.rollout.new_notes()]
        self._notes.clear()
        answer, arrays = sampled.packed()
        self._leader.send("sampled", answer | {"notes": notes}, arrays)

    def _learn(self, body: dict[str, Any], arrays: Arrays) -> None:
        self.parts.learner.forward.speeds = body["speeds"]
        groups = unpack_groups(body, arrays)

        def learn() -> dict[str, float]:
            keep_together(self.parts, self.config, self._ranks)
            return self.parts.learn(groups, self.config, lambda: None)

        try:
            _, report = timed_learning(self.parts, self._ranks, learn)
        except NotFiniteError:
            return  # on every rank alike, and the leader ends the run
        self._ranks.gather(asdict(report))
        mx.reset_peak_memory()  # of the next step
