"""Entropy and KL of completions that are not learned from: means over their tokens, with a standard error, since few are read.

Numbers are kept a completion each, as Python floats: their exact sum (`math.fsum`) does not depend on how rows were put into micro-batches, or
divided among ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from backend.training.batch import Batch
from backend.training.losses import Settings, policy_terms

STANDARD_ERROR = "_stderr"
"""After the name of a mean, that of its standard error."""

RowSums = dict[str, tuple[float, float]]
"""Name → (sum over a completion's tokens, number of them), of one completion."""


def row_sums(
    batch: Batch, logp_BT: mx.array, entropy_BT: mx.array, ref_logp_BT: mx.array | None, loss: Settings
) -> list[RowSums]:
    """The sums of each row, log-probabilities and entropies [B, T] in nats; `kl` with a reference only."""
    tallies: list[dict[str, mx.array]] = []
    for row in range(len(batch)):
        at = slice(row, row + 1)
        mask_1T, ref_logp_1T = batch.mask_BT[at], None if ref_logp_BT is None else ref_logp_BT[at]
        arrays = (logp_BT[at], None, ref_logp_1T, batch.advantage_B[at], mask_1T, loss)
        _, tally = policy_terms(*arrays, weights=mask_1T, entropies=entropy_BT[at])
        tallies.append({name: tally["mean"][name] for name in ("entropy", "kl") if name in tally["mean"]})
    mx.eval(tallies)
    return [{name: (float(pair[0]), float(pair[1])) for name, pair in tally.items()} for tally in tallies]


def means(rows: Sequence[RowSums]) -> dict[str, float]:
    """The mean over all tokens of each name, and its standard error from two completions up.

    A completion is drawn as a whole, so the error is that of a ratio of sums over n completions: with s and t a completion's sum and tokens
    and m the mean, √(n / (n − 1) · Σ (s − m t)²) / Σ t (Cochran, Sampling Techniques, 1977, section 2.11, of a small part of all).
    """
    found: dict[str, float] = {}
    for name in rows[0] if rows else ():
        pairs = [row[name] for row in rows]
        tokens = math.fsum(count for _, count in pairs)
        if not tokens:
            continue
        mean = found[name] = math.fsum(total for total, _ in pairs) / tokens
        if len(pairs) > 1:
            squares = math.fsum((total - mean * count) ** 2 for total, count in pairs)
            found[name + STANDARD_ERROR] = math.sqrt(squares * len(pairs) / (len(pairs) - 1)) / tokens
    return found
