"""A rank other than 0: has the model, optimizer, sampler and reward functions, and obeys the leader's messages."""

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from backend.config.config import Config
from backend.distributed import collectives
from backend.distributed.channel import GOODBYE, ChannelMessage, WorkerChannel
from backend.distributed.messages import SamplingOrder, check_sendable, with_reward_files, write_reward_code
from backend.distributed.scheduling import learn_together, sample_round, score_round
from backend.engine import device
from backend.engine.device import release_cached_buffers
from backend.models.policy import Policy, load_policy, load_teacher
from backend.models.sharded_policy import load_sharded_policy
from backend.rewards.scorer import Scorer, begin_scorer
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.tools.load import load_tools
from backend.trainer.machine import KeepAwake, StepSize
from backend.trainer.memory.plan import refuse_too_large
from backend.trainer.run_context import StepContext, step_parts
from backend.training.algorithms import build_learner
from backend.training.learner import Learner
from backend.training.not_finite import NotFiniteError
from backend.types import Group, Problem

HERE, GO, GIVE_UP = "here", "go", "give up"  # messages of a meeting


class CallGivenUpError(Exception):
    """Rank 0 has given a call up; `then`: its next message, if known."""

    def __init__(self, then: ChannelMessage | None) -> None:
        super().__init__("rank 0 has given the call up")
        self.then = then


def work(leader: WorkerChannel, ranks: collectives.FlatCollectives) -> None:
    """Obey the leader until it has closed the channel. Raises what goes wrong."""
    worker: Worker | None = None
    with tempfile.TemporaryDirectory(prefix="grpo-studio-rank-") as folder:
        try:
            message = leader.receive()
            while message.kind != GOODBYE:
                if message.kind in ("load", "end") and worker is not None:
                    worker.close()
                    worker = None
                    release_cached_buffers()  # rank 0 may export for long
                if message.kind == "load":
                    of_model = message.body["config"].parallelism == "tensor"
                    worker = (ShardedWorker if of_model else SharingWorker)(leader, ranks, Path(folder))
                message = (worker and worker.obey(message)) or leader.receive()
        finally:
            if worker is not None:
                worker.close()


class Worker:
    """A rank that obeys the leader: its public methods have the names of the messages."""

    config: Config  # the settings of the present step
    policy: Policy
    parts: StepContext

    def __init__(self, leader: WorkerChannel, ranks: Any, folder: Path) -> None:
        self._leader, self._ranks, self._folder = leader, ranks, folder
        self._notes: list[str] = []
        self._keep_awake = KeepAwake()
        self._keep_awake.start()

    def obey(self, message: ChannelMessage) -> ChannelMessage | None:
        """→ the leader's next message, if known."""
        with suppress(NotFiniteError):  # on every rank alike, and the leader ends the run
            getattr(self, message.kind)(**message.body)

    def meet(self) -> None:
        """Wait until all ranks are here, where they compute passes together."""

    def follow(self, updates: int, algorithm: list[float | None]) -> None:
        """Take over the leader's state, from a checkpoint or from the start."""
        self.parts.learner.restore(None, updates, algorithm)
        collectives.follow_leader(self.parts.learner, self.config, self._ranks)

    def learn(self, groups: list[Group], speeds: list[float]) -> None:
        self.parts.learner.forward.speeds = speeds
        learn_together(self.parts, groups, self.config, self.meet, self._ranks)
        mx.reset_peak_memory()  # of the next step

    def measure(self, groups: list[Group], speeds: list[float]) -> None:
        self.parts.learner.forward.speeds = speeds
        self.parts.held_out_metrics(groups, self.config, self.meet)

    def close(self) -> None:
        self._keep_awake.stop()


class SharingWorker(Worker):
    """Of a run whose prompts are shared. `folder`: for the files with reward functions."""

    _scorer: Scorer | None = None

    def load(self, config: Config, stages: list[Config], code: dict[str, tuple[str, str]]) -> None:
        maybe_set_recommended_wired_limit()
        self._files = write_reward_code(code, self._folder)
        self.config, *self._stages = (with_reward_files(each, self._files) for each in [config, *stages])
        self._scorer = begin_scorer(self.config)
        self._scorer.opens_models = False
        device.use(self.config.device)
        refuse_too_large(self.config, self._stages)
        self.policy = load_policy(self.config, self._notes.append)
        load_teacher(self.policy, self.config)

    def build(self, steps: int, longest_prompts: list[int], images: int, most: StepSize) -> None:
        assert self._scorer is not None
        own = self.policy, self.config, self._scorer, steps, longest_prompts, self._notes.append
        tools = load_tools(self.config, self._scorer)
        self.parts = StepContext(**step_parts(*own, most=most, stages=self._stages, tools=tools, images=images))
        self.parts.learner.forward.ranks = self._ranks
        collectives.check_same_base(self.policy, self.config, self._ranks, [])

    def change(self, config: Config, keys: list[str], step: int) -> None:
        self.config = with_reward_files(config, self._files)
        self.parts.change(self.config, keys, step)

    def sample(self, order: SamplingOrder) -> None:
        self.parts.scoring.restore(order.scoring)
        done = sample_round(self.parts, self._ranks.rank, order, lambda tokens: None)
        score_round(self.parts, order, done)
        notes = [*self._notes, *self.parts.rollout.new_notes()]
        self._notes.clear()
        has_tools, as_sent = self.parts.rollout.tools is not None, Problem(0, "", [], [], "")
        for group in done.groups:
            group.images, group.problem = None, replace(group.problem, row={}) if has_tools else as_sent
            for completion in group.completions:
                check_sendable(completion.logged)
        self._leader.send("sampled", done=done, notes=notes)

    def rest(self) -> None:
        self.parts.rest()

    def close(self) -> None:
        super().close()
        if self._scorer is not None:
            self._scorer.close()


class ShardedWorker(Worker):
    """Of a run whose model is sharded. Prompts and rewards are rank 0's."""

    def obey(self, message: ChannelMessage) -> ChannelMessage | None:
        mx.synchronize()
        try:
            self.meet()
            return super().obey(message)
        except CallGivenUpError as error:
            return error.then

    def meet(self) -> None:
        self._leader.send(HERE)
        message = self._leader.receive()
        if message.kind != GO:  # given up, or rank 0's call has failed between two meetings
            raise CallGivenUpError(None if message.kind == GIVE_UP else message)

    def load(self, config: Config) -> None:
        self.config = config
        self.policy = load_sharded_policy(config, self._ranks.group, self._ranks.sum)

    def build(self, steps: int, of_learner: dict[str, Any], of_rollout: dict[str, Any]) -> None:
        config, policy = self.config, self.policy
        rewards: Any = None  # rank 0's alone
        learner = build_learner(policy, config, steps, **of_learner)
        rollout = Sampler(policy, config.max_completion_length, **of_rollout)
        self.parts = StepContext(policy, learner, rollout, rewards, Sampling.of(config), steps)
        self._ranks.gather(decisions(learner, rollout))

    def change(self, config: Config, keys: list[str], step: int) -> None:
        self.config, parts = config, self.parts
        self.policy.use_reference(config)
        parts.learner.change(config, parts.steps_of(config), keys)

    def sample(self, prompts: list[list[int]], rest: tuple[Any, ...], max_tokens: int) -> None:
        collectives.keep_together(self.parts.learner, self.config, self._ranks)
        self.parts.rollout.max_tokens = max_tokens
        problems = [Problem(0, "", [], tokens, "") for tokens in prompts]
        self.parts.rollout.sample(problems, *rest, poll=lambda tokens: self.meet())


def decisions(learner: Learner, rollout: Sampler) -> dict[str, Any]:
    """The decisions that ranks which compute a model together must share."""
    policy, model = learner.policy, learner.policy.split_model
    return {
        "eos_ids": policy.eos_ids,
        "vocabulary": model.vocab_size,
        "shares prompts": model.prefix_layers,
        "has a reference": policy.reference is not None,
        "decodes together": rollout.has_continuous_batching,
        "fused layers": len(rollout.fused.fused_linears),
        "micro-batch": learner.forward.micro_batch_tokens,
        "adapters": sorted(policy.trainable()),
        "slow paths": [*model.slow_paths, *rollout.slow_paths],
    }
