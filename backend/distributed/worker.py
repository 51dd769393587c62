"""A rank other than 0: has the model, optimizer, sampler and reward functions, and obeys the leader's messages."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from backend.config.config import Config
from backend.distributed import collectives, tensor_parallel
from backend.distributed.channel import GOODBYE, WorkerChannel
from backend.distributed.messages import SamplingOrder, check_sendable, with_reward_files, write_reward_code
from backend.distributed.scheduling import sample_round, score_round, timed_learning
from backend.engine import device
from backend.models.policy import Policy, load_policy, load_teacher
from backend.rewards.scorer import Scorer, begin_scorer
from backend.tools.load import load_tools
from backend.trainer.machine import KeepAwake
from backend.trainer.memory.plan import refuse_too_large
from backend.trainer.run_context import StepContext, step_parts
from backend.training.not_finite import NotFiniteError


def work(leader: WorkerChannel, ranks: collectives.FlatCollectives) -> None:
    """Obey the leader until it has closed the channel. Raises what goes wrong."""
    with tempfile.TemporaryDirectory(prefix="grpo-studio-rank-") as folder:
        worker = Worker(leader, ranks, Path(folder))
        try:
            worker.run()
        finally:
            worker.keep_awake.stop()
            if worker.scorer is not None:
                worker.scorer.close()


class Worker:
    """The state of one worker. `folder`: for the files with reward functions."""

    config: Config  # the settings of the present step
    policy: Policy
    parts: StepContext

    def __init__(self, leader: WorkerChannel, ranks: collectives.FlatCollectives, folder: Path) -> None:
        self._leader, self._ranks, self._folder = leader, ranks, folder
        self._notes: list[str] = []
        self._files: dict[str, Path] = {}
        self._stages: list[Config] = []
        self.keep_awake = KeepAwake(self._notes.append)
        self.scorer: Scorer | None = None

    def run(self) -> None:
        while (message := self._leader.receive()).kind != GOODBYE:
            if message.kind == tensor_parallel.LOAD:
                assert isinstance(self._ranks, collectives.MlxCollectives)
                self.keep_awake.start()
                message = tensor_parallel.follow(self._leader, self._ranks, message)
                if message.kind == GOODBYE:
                    return
            self._obey(message.kind, message.body)

    def _obey(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "load":
            self.keep_awake.start()
            maybe_set_recommended_wired_limit()
            self._files = write_reward_code(body["code"], self._folder)
            self.config, *self._stages = map(self._read, [body["config"], *body["stages"]])
            if self.scorer is not None:
                self.scorer.close()
            self.scorer = begin_scorer(self.config)
            self.scorer.opens_models = False
            device.use(self.config.device)
            refuse_too_large(self.config, self._stages)
            self.policy = load_policy(self.config, self._notes.append)
            load_teacher(self.policy, self.config)
        elif kind == "build":
            assert self.scorer is not None
            own = self.policy, self.config, self.scorer
            tools = load_tools(self.config, self.scorer)
            parts = step_parts(*own, **body, note=self._notes.append, stages=self._stages, tools=tools)
            self.parts = StepContext(**parts)
            self.parts.learner.forward.ranks = self._ranks
            collectives.check_same_base(self.parts, self.config, self._ranks, [])
        elif kind == "follow":  # the leader's state: that of a checkpoint, or of the start
            self.parts.learner.restore(None, body["updates"], body["algorithm"])
            self.parts.scoring.restore(body["scoring"])
            collectives.follow_leader(self.parts, self.config, self._ranks)
        elif kind == "change":
            self.config = self._read(body["config"])
            self.parts.change(self.config, body["keys"], body["step"])
        elif kind == "sample":
            order: SamplingOrder = body["order"]
            self.parts.scoring.restore(order.scoring)
            done = sample_round(self.parts, self._ranks.rank, **body, poll=lambda tokens: None)
            score_round(self.parts, order, done)
            notes = [*self._notes, *self.parts.rollout.new_notes()]
            self._notes.clear()
            completions = [group.completions for group in done.groups]
            for completion in chain(*completions):
                check_sendable(completion.logged)
            problems = [replace(group.problem, row={}) for group in done.groups] if self.parts.rollout.tools else []
            sampled = {"completions": completions, "problems": problems, "notes": notes}
            self._leader.send("sampled", done=replace(done, groups=[]), **sampled)
        elif kind == "learn":
            self.parts.learner.forward.speeds = body["speeds"]

            def learn() -> dict[str, float]:
                collectives.keep_together(self.parts, self.config, self._ranks)
                return self.parts.learn(body["groups"], self.config, lambda: None)

            with suppress(NotFiniteError):  # on every rank alike, and the leader ends the run
                _, report = timed_learning(self.parts, self._ranks, learn)
                self._ranks.gather(asdict(report))
                mx.reset_peak_memory()  # of the next step
        elif kind == "measure":
            self.parts.learner.forward.speeds = body["speeds"]
            self.parts.held_out_metrics(body["groups"], self.config, lambda: None)
        else:
            self.parts.rest()

    def _read(self, config: Config) -> Config:
        return with_reward_files(config, self._files)
