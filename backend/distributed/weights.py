"""Keeps all ranks' weights equal to rank 0's, and takes an interrupted step back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.config.config import Config
from backend.distributed.ranks import RankInfo
from backend.models.policy import Policy
from backend.training.collectives import Collectives
from backend.training.learner import Learner
from backend.training.optimizers import restore
from backend.utils.errors import UserError
from backend.utils.text import quote

TOLERANCE = 1e-3
"""Relative tolerance for weights that each machine has quantised."""
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}


class Trained(Protocol):
    """A run's context, or the parts of a sharded model."""

    policy: Policy
    learner: Learner


def follow_leader(parts: Trained, config: Config, ranks: Collectives) -> None:
    """Take over rank 0's trained arrays, optimizer state and moving reference, bit for bit."""
    policy, learner = parts.policy, parts.learner
    reference = policy.reference_arrays() if config.sync_ref_model else {}
    own = (policy.trainable(), learner.state_arrays(), reference)
    arrays = iter(ranks.broadcast([x for named in own for x in named.values()]))
    if ranks.rank == 0:
        return
    trained, state, reference = ({name: next(arrays) for name in named} for named in own)
    policy.assign(trained)
    restore(learner.optimizer, state)
    if reference:
        policy.restore_reference(reference)
    mx.eval(policy.arrays(), learner.optimizer.state)


def keep_together(parts: Trained, config: Config, ranks: Collectives) -> None:
    """Follow the leader where any trained bit differs between ranks."""
    if len(set(ranks.gather(_bit_sum(parts.policy.trainable())))) > 1:
        follow_leader(parts, config, ranks)


def check_same_base(parts: Trained, config: Config, ranks: Collectives, machines: Sequence[RankInfo]) -> None:
    """Raise UserError on the leader where a rank has loaded other weights."""
    trained = parts.policy.trainable()
    everything: Any = tree_flatten(parts.policy.model.parameters())
    frozen: dict[str, mx.array] = {name: x for name, x in everything if name not in trained}
    own: dict[str, Any] = {"arrays": sorted(f"{name} {x.shape} {x.dtype}" for name, x in frozen.items())}
    if config.quantization == "none":
        own |= {"bits": _bit_sum(frozen), "sizes": []}
    else:  # made here from the model's own weights, which another chip may round to other codes
        sizes = [float(mx.abs(frozen[name]).astype(mx.float32).sum()) for name in sorted(frozen)]
        own |= {"bits": 0, "sizes": sizes}
    gathered = ranks.gather(own)
    if ranks.rank != 0:
        return
    for rank, other in enumerate(gathered):
        is_same = (other["arrays"], other["bits"]) == (own["arrays"], own["bits"]) and all(
            abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1.0)
            for a, b in zip(own["sizes"], other["sizes"], strict=True)
        )
        if not is_same:
            raise UserError(
                "model",
                f"The model {quote(config.model, 60)} on {machines[rank]} has other weights than here; "
                "copy it there, or name a revision.",
            )


def _bit_sum(arrays: dict[str, mx.array]) -> int:
    sums = [x.reshape(-1).view(_WORDS[x.itemsize]).astype(mx.uint32).sum() for x in arrays.values() if x.size]
    return int(mx.stack(sums).sum()) if sums else 0


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The state before a step's updates, to take the step back when a machine is lost.

    Evaluated arrays are immutable, so references are enough; they keep a second copy of trained arrays and optimizer
    state while a step learns.
    """

    trained: dict[str, mx.array]
    moments: dict[str, mx.array]
    reference: dict[str, mx.array]
    updates: int
    algorithm: list[float | None]

    @classmethod
    def of(cls, parts: Trained, config: Config) -> StepSnapshot:
        learner = parts.learner
        reference = parts.policy.reference_arrays() if config.sync_ref_model else {}
        state = list(learner.algorithm.state())
        return cls(parts.policy.trainable(), learner.state_arrays(), reference, learner.updates, state)

    def restore(self, parts: Trained) -> None:
        """Bit for bit."""
        parts.policy.assign(self.trained)
        if self.reference:
            parts.policy.restore_reference(self.reference)
        parts.learner.restore(self.moments, self.updates, self.algorithm)
        parts.learner.is_whole = True
        mx.eval(parts.policy.arrays(), parts.learner.optimizer.state)
