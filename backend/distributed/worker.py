"""A rank other than 0: has the model, the optimizer, a sampler and the reward functions, and does what the leader's messages say.

It has no dataset and no run folder, and writes nothing but the files with reward functions, into a temporary folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import maybe_set_recommended_wired_limit

from backend.config.config import Config
from backend.distributed import group_wire, reward_code
from backend.distributed.channel import GOODBYE, ChannelMessage
from backend.distributed.collectives import FlatCollectives, MlxCollectives
from backend.distributed.rank_info import RankInfo
from backend.distributed.sharded.announcements import LOAD
from backend.distributed.sharded.following import follow
from backend.distributed.step_shares import SamplingOrder, sample_round, score_round, timed_learning
from backend.distributed.workers import LeaderLink
from backend.engine import device
from backend.models.policy import Policy, load_policy
from backend.rewards.scorer import Scorer, begin_scorer
from backend.trainer.machine import KeepAwake, StepSize
from backend.trainer.memory.plan import refuse_too_large
from backend.trainer.run_context import StepContext, build_step_context
from backend.training.collectives import Collectives
from backend.training.not_finite import NotFiniteError
from backend.training.optimizers import restore
from backend.types import Group
from backend.utils.errors import UserError
from backend.utils.text import quote

# That every rank has the same weights, moments and reference: brought from the leader at the start, and compared
# before every step.

TOLERANCE = 1e-3
"""How far apart, relatively, the magnitudes of weights may be that each machine has quantised itself."""


def follow_leader(parts: StepContext, config: Config, ranks: Collectives) -> None:
    """Take over rank 0's trained arrays, optimizer state and moving reference, bit for bit."""
    policy, learner = parts.policy, parts.learner
    trained = policy.trainable()
    state = learner.state_arrays()
    reference = policy.reference_arrays() if config.sync_ref_model else {}
    arrays = iter(ranks.broadcast([*trained.values(), *state.values(), *reference.values()]))
    sent = [{name: next(arrays) for name in own} for own in (trained, state, reference)]
    if ranks.rank == 0:
        return
    policy.assign(sent[0])
    restore(learner.optimizer, sent[1])
    if reference:
        policy.restore_reference(sent[2])
    mx.eval(policy.arrays(), learner.optimizer.state)


def keep_together(parts: StepContext, config: Config, ranks: Collectives) -> bool:
    """Before a step: where a rank's weights differ from the leader's in any bit, all follow the leader. → whether they had to."""
    sums = ranks.gather(_bit_sum(parts.policy.trainable()))
    if len(set(sums)) == 1:
        return False
    follow_leader(parts, config, ranks)
    return True


def check_same_base(parts: StepContext, config: Config, ranks: Collectives, machines: list[RankInfo]) -> None:
    """Raise UserError where a rank has loaded other weights than the leader. `machines`: the ranks' own, on the leader; empty elsewhere."""
    trained = parts.policy.trainable()
    everything: list[tuple[str, mx.array]] = tree_flatten(parts.policy.model.parameters())  # pyright: ignore[reportAssignmentType]: of arrays alone
    frozen = {name: x for name, x in everything if name not in trained}
    own = {"arrays": sorted(f"{name} {x.shape} {x.dtype}" for name, x in frozen.items()), "bits": 0, "sizes": [0.0]}
    if config.quantization == "none":
        own["bits"] = _bit_sum(frozen)
    else:  # made here from the model's own weights, which another chip may round to other codes
        own["sizes"] = [float(mx.abs(frozen[name]).astype(mx.float32).sum()) for name in sorted(frozen)]
    gathered = ranks.gather(own)
    if ranks.rank != 0:
        return
    for rank, other in enumerate(gathered):
        close = len(other["sizes"]) == len(own["sizes"]) and all(
            abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1.0)
            for a, b in zip(own["sizes"], other["sizes"], strict=True)
        )
        if other["arrays"] != own["arrays"] or other["bits"] != own["bits"] or not close:
            name = quote(machines[rank].machine, 40)
            raise UserError(
                "model",
                f"The model {quote(config.model, 60)} on {name} (rank {rank}) has other weights than here; copy it there, or name a revision.",
            )


def _bit_sum(arrays: dict[str, mx.array]) -> int:
    """The sum of all arrays' bits, read as whole numbers, modulo 2³²: exact, whatever the order of the additions."""
    sums = [x.reshape(-1).view(_WORDS[x.itemsize]).astype(mx.uint32).sum() for x in arrays.values() if x.size]
    return int(mx.stack(sums).sum()) if sums else 0


_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}


# ── worker ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def work(leader: LeaderLink, ranks: FlatCollectives) -> None:
    """Do what the leader's messages say until it has closed the channel. Raises what goes wrong; the caller tells the leader."""
    with tempfile.TemporaryDirectory(prefix="grpo-studio-rank-") as folder:
        worker = WorkerRank(leader, ranks, Path(folder))
        try:
            worker.run()
        finally:
            worker.close()


class WorkerRank:
    """The state of one worker. Every message of the leader has a method of its kind."""

    config: Config
    """The settings of the present step."""
    stages: list[Config]
    policy: Policy
    scorer: Scorer | None = None
    parts: StepContext

    def __init__(self, leader: LeaderLink, ranks: FlatCollectives, folder: Path) -> None:
        """`folder`: for the files with reward functions."""
        self._leader, self._ranks, self._folder = leader, ranks, folder
        self._notes: list[str] = []
        self._keep_awake = KeepAwake(self._notes.append)
        self._files: dict[str, Path] = {}
        self._answers: dict[str, Callable[[ChannelMessage], None]] = {
            "load": self._load, "build": self._build, "follow": self._follow, "change": self._change, "sample": self._sample,
            "learn": self._learn, "measure": self._measure, "rest": self._rest,
        }  # fmt: skip

    def run(self) -> None:
        while True:
            message = self._leader.receive()
            if message is not None and message.kind == LOAD:  # of a model that is divided among the ranks
                assert isinstance(self._ranks, MlxCollectives)
                self._keep_awake.start()
                message = follow(self._leader, self._ranks, message)
            if message is not None and message.kind == GOODBYE:
                return
            if message is not None:
                self._answers[message.kind](message)

    def close(self) -> None:
        self._keep_awake.stop()
        if self.scorer is not None:
            self.scorer.close()

    # ── before the first step ────────────────────────────────────────────────────────────────────────────────────────

    def _load(self, message: ChannelMessage) -> None:
        """The model; the process of the reward functions begins to start meanwhile. Comes again where the leader had to begin anew."""
        body = message.body
        self._keep_awake.start()
        maybe_set_recommended_wired_limit()
        written = reward_code.write_code(body["code"], self._folder)
        self._files = {name: written[path] for name, path in body["names"].items()}
        self.config = self._read(body["config"])
        self.stages = [self._read(each) for each in body["stages"]]
        if self.scorer is not None:
            self.scorer.close()
        self.scorer = begin_scorer(self.config)
        device.use(self.config.device)
        refuse_too_large(self.config, self.stages)
        self.policy = load_policy(self.config, self._notes.append)

    def _read(self, values: dict[str, Any]) -> Config:
        return reward_code.with_code(Config.model_validate(values), self._files)

    def _build(self, message: ChannelMessage) -> None:
        assert self.scorer is not None
        self.parts = build_step_context(
            self.policy, self.config, self.scorer, message.body["steps"], message.body["longest_prompts"], self._notes.append,
            most=StepSize(**message.body["most"]), stages=self.stages,
        )  # fmt: skip
        self.parts.learner.forward.ranks = self._ranks
        check_same_base(self.parts, self.config, self._ranks, [])

    def _follow(self, message: ChannelMessage) -> None:
        """Take over the leader's state: that of a checkpoint, or of the start."""
        body = message.body
        self.parts.learner.restore(None, body["updates"], body["algorithm"])
        self.parts.scoring.restore(body["scoring"])
        follow_leader(self.parts, self.config, self._ranks)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _change(self, message: ChannelMessage) -> None:
        self.config = self._read(message.body["config"])
        self.parts.change(self.config, message.body["keys"], message.body["step"])

    def _sample(self, message: ChannelMessage) -> None:
        order = SamplingOrder(**message.body["order"])
        problems = group_wire.unpacked_problems(message.body["problems"])
        self.parts.scoring.restore(order.scoring)
        sampled = sample_round(
            self.parts, order, self._ranks.rank, message.body["start"], problems, lambda tokens: None
        )
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
        body, arrays = message.body, message.arrays
        self.parts.learner.forward.speeds = body["speeds"]
        problems = group_wire.unpacked_prompts(body["prompt_lengths"], arrays["prompts"])
        return group_wire.unpacked_completions(body, arrays, problems)

    def _rest(self, message: ChannelMessage) -> None:
        self.parts.rest()
