"""What ranks that compute a model together must have decided alike: which paths its passes take.

Each rank finds out by trial passes what its machine's mlx and its model's code allow. Where two came to different answers, their sums would
not meet, and the run would stand still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backend.generation.rollout import Rollout
from backend.models.policy import Policy
from backend.spec.distributed.rank_info import RankInfo
from backend.spec.faults import Mistake
from backend.spec.user_input.text import shown
from backend.training.learner import Learner

Outline = dict[str, Any]


def outline_of(policy: Policy, learner: Learner, rollout: Rollout) -> Outline:
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
    """Raise Mistake where a rank has decided otherwise than the first."""
    for rank, other in enumerate(outlines):
        different = [name for name in outlines[0] if other.get(name) != outlines[0][name]]
        if different:
            raise Mistake(
                "hosts",
                f"{shown(machines[rank].machine, 40)} (rank {rank}) computes this model in another way than here ({', '.join(different)}): "
                f"a sharded model needs the same mlx and the same files on all machines.",
            )
