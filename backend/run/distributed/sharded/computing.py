"""What every rank of a sharded model computes with, and that its adapters and moments are rank 0's to the last bit.

All ranks make the same update of the same gradient, but another chip may round it differently; and what rank 0 takes from a checkpoint, or
from its best one at the end, the others have to be brought.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from backend.generation.rollout import Rollout
from backend.models.policy import Policy
from backend.training.collectives import Collectives
from backend.training.learner import Learner
from backend.training.optimizers.state import restore


@dataclass(frozen=True, slots=True)
class ComputingParts:
    policy: Policy
    learner: Learner
    rollout: Rollout


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
