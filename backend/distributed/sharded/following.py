"""A rank other than 0 of a run whose model is divided: makes the calls that rank 0 announces, and keeps nothing of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from backend.config.config import Config
from backend.distributed.channel import ChannelMessage
from backend.distributed.collectives import MlxCollectives
from backend.distributed.rank_info import RankInfo
from backend.distributed.sharded import announcements, meeting
from backend.distributed.sharded.announcements import SampleCall, unpacked_batch
from backend.distributed.sharded.meeting import PeerLostError
from backend.distributed.workers import LeaderLink
from backend.engine.memory import release_cached_buffers
from backend.models.policy import Policy
from backend.models.sharded_policy import load_sharded_policy
from backend.sampling.rollout import Sampler
from backend.sampling.row_costs import RowCosts
from backend.trainer.run_context import LEARNERS
from backend.training.collectives import Collectives
from backend.training.learner import Learner
from backend.training.not_finite import NotFiniteError
from backend.training.optimizers import restore
from backend.utils.errors import UserError
from backend.utils.text import quote

# What ranks that compute a model together must have decided alike: which paths its passes take.

Outline = dict[str, Any]


def outline_of(policy: Policy, learner: Learner, rollout: Sampler) -> Outline:
    """The decisions of this rank, as plain JSON."""
    return {
        "eos_ids": policy.eos_ids,
        "vocabulary": policy.split_model.vocab_size,
        "shares prompts": policy.split_model.prefix_layers,
        "has a reference": policy.reference is not None,
        "decodes together": rollout.has_continuous_batching,
        "fused layers": len(rollout.fused.fused_linears),
        "micro-batch": learner.forward.micro_batch_tokens,
        "adapters": sorted(policy.trainable()),
        "slow paths": [*policy.split_model.slow_paths, *rollout.slow_paths],
    }


def check_alike(outlines: Sequence[Outline], machines: Sequence[RankInfo]) -> None:
    """Raise UserError where a rank has decided otherwise than the first."""
    for rank, other in enumerate(outlines):
        different = [name for name in outlines[0] if other.get(name) != outlines[0][name]]
        if different:
            raise UserError(
                "hosts",
                f"{quote(machines[rank].machine, 40)} (rank {rank}) computes this model in another way than here ({', '.join(different)}): "
                f"a sharded model needs the same mlx and the same files on all machines.",
            )


# ── computing ────────────────────────────────────────────────────────────────────────────────────────────────────────

# What every rank of a sharded model computes with, and that its adapters and moments are rank 0's to the last bit.


@dataclass(frozen=True, slots=True)
class ComputingParts:
    policy: Policy
    learner: Learner
    rollout: Sampler


def follow_leader(parts: ComputingParts, ranks: Collectives) -> None:
    """Take over rank 0's adapters and optimizer state, bit for bit."""
    trained, state = parts.policy.trainable(), parts.learner.state_arrays()
    arrays = ranks.broadcast([*trained.values(), *state.values()])
    if ranks.rank == 0:
        return
    parts.policy.assign(dict(zip(trained, arrays, strict=False)))
    restore(parts.learner.optimizer, dict(zip(state, arrays[len(trained) :], strict=True)))
    mx.eval(parts.learner.optimizer.state)


def keep_together(parts: ComputingParts, ranks: Collectives) -> None:
    """Where a rank's adapters differ from rank 0's in any bit, all take over rank 0's."""
    words = [x.reshape(-1).view(mx.uint32) for x in parts.policy.trainable().values()]
    # Modulo 2³²: exact, whatever the order of the additions.
    if len(set(ranks.gather(int(mx.stack([each.sum() for each in words]).sum())))) > 1:
        follow_leader(parts, ranks)


# ── following ────────────────────────────────────────────────────────────────────────────────────────────────────────

Arrays = Mapping[str, np.ndarray]


def follow(leader: LeaderLink, ranks: MlxCollectives, first: ChannelMessage) -> ChannelMessage:
    """Make rank 0's calls; `first` is its first announcement. → the first message that is none of them, such as a goodbye. Raises what
    goes wrong on this machine alone."""
    rank: FollowingRank | None = FollowingRank(leader, ranks)
    message = first
    while message is not None and message.kind in announcements.CALLS:
        if message.kind == announcements.END:
            rank = None  # the memory is given back: rank 0 may export for long
            release_cached_buffers()
        elif rank is None:
            rank = FollowingRank(leader, ranks)
        message = (rank.take(message) if rank else None) or leader.receive()
    assert message is not None
    return message


class FollowingRank:
    def __init__(self, leader: LeaderLink, ranks: MlxCollectives) -> None:
        self.leader, self.ranks = leader, ranks
        self.config: Config
        self.policy: Policy
        self.parts: ComputingParts
        self._calls = {
            announcements.LOAD: self._load,
            announcements.BUILD: self._build,
            announcements.BEGIN: self._begin,
            announcements.CHANGE: self._change,
            announcements.SAMPLE: self._sample,
            announcements.LEARN: self._learn,
            announcements.HELD_OUT: self._held_out,
        }

    def take(self, message: ChannelMessage) -> ChannelMessage | None:
        """Make one call. → what rank 0 announced instead of ending it, where it gave the call up."""
        mx.synchronize()
        try:
            self._meet()
            self._calls[message.kind](message.body, message.arrays)
        except PeerLostError as found:
            return found.then
        except NotFiniteError:  # rank 0 has found the same, and tells it
            return None
        return None

    def _meet(self) -> None:
        meeting.follow(self.leader)

    def _load(self, body: Mapping[str, Any], _arrays: Arrays) -> None:
        self.config = Config.model_validate(body["config"])
        self.policy = load_sharded_policy(self.config, self.ranks.group, add_up=lambda x: self.ranks.sum([x])[0])

    def _build(self, body: Mapping[str, Any], _arrays: Arrays) -> None:
        config, limits = self.config, body["limits"]
        learner = LEARNERS[config.train_mode](self.policy, config, body["steps"], **limits["learner"])
        costs = RowCosts(tuple((int(rows), time) for rows, time in body["costs"]["measured"]))
        rollout = Sampler(self.policy, config.max_completion_length, **limits["rollout"], costs=costs)
        self.parts = ComputingParts(self.policy, learner, rollout)
        self.ranks.gather(outline_of(self.policy, learner, rollout))

    def _begin(self, body: Mapping[str, Any], _arrays: Arrays) -> None:
        follow_leader(self.parts, self.ranks)
        self.parts.learner.restore(None, body["updates"], body["algorithm"])

    def _change(self, body: Mapping[str, Any], _arrays: Arrays) -> None:
        self.config = Config.model_validate(body["config"])
        self.policy.use_reference(self.config)
        self.parts.learner.change(self.config, body["steps"], body["keys"])

    def _sample(self, body: Mapping[str, Any], _arrays: Arrays) -> None:
        call, rollout = SampleCall.of_body(body), self.parts.rollout
        keep_together(self.parts, self.ranks)
        rollout.max_tokens = call.max_tokens
        rollout.sample(
            call.problems, call.group_size, call.sampling, call.seed, call.first_number, lambda tokens: self._meet()
        )

    def _learn(self, body: Mapping[str, Any], arrays: Arrays) -> None:
        keep_together(self.parts, self.ranks)
        self.parts.learner.learn(unpacked_batch(body, arrays), self._meet)
        mx.synchronize()
        release_cached_buffers()

    def _held_out(self, body: Mapping[str, Any], arrays: Arrays) -> None:
        self.parts.learner.held_out_metrics(unpacked_batch(body, arrays), self._meet)
