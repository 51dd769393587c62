"""That every rank has the same weights, moments and reference: brought from the leader at the start, and compared before every step.

Every rank makes the same update of the same numbers, but another chip may round it differently. What has drifted apart by a bit is
brought from the leader again, so that ranks stay copies of one model.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.run.step_parts import StepParts
from backend.spec.config import Config
from backend.spec.distributed.rank_info import RankInfo
from backend.spec.faults import Mistake
from backend.spec.user_input.text import shown
from backend.training.collectives import Collectives
from backend.training.optimizers.state import restore

TOLERANCE = 1e-3
"""How far apart, relatively, the magnitudes of weights may be that each machine has quantised itself."""


def follow_leader(parts: StepParts, config: Config, ranks: Collectives) -> None:
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


def keep_together(parts: StepParts, config: Config, ranks: Collectives) -> bool:
    """Before a step: where a rank's weights differ from the leader's in any bit, all follow the leader. → whether they had to."""
    sums = ranks.gather(_bit_sum(parts.policy.trainable()))
    if len(set(sums)) == 1:
        return False
    follow_leader(parts, config, ranks)
    return True


def check_same_base(parts: StepParts, config: Config, ranks: Collectives, machines: list[RankInfo]) -> None:
    """Raise Mistake where a rank has loaded other weights than the leader. `machines`: the ranks' own, on the leader; empty elsewhere."""
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
            name = shown(machines[rank].machine, 40)
            raise Mistake(
                "model",
                f"The model {shown(config.model, 60)} on {name} (rank {rank}) has other weights than here; copy it there, or name a revision.",
            )


def _bit_sum(arrays: dict[str, mx.array]) -> int:
    """The sum of all arrays' bits, read as whole numbers, modulo 2³²: exact, whatever the order of the additions."""
    sums = [x.reshape(-1).view(_WORDS[x.itemsize]).astype(mx.uint32).sum() for x in arrays.values() if x.size]
    return int(mx.stack(sums).sum()) if sums else 0


_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}
