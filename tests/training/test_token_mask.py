"""`Completion.mask`: tokens that the policy did not produce, such as a tool's result, are in the context and never
trained on."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.trainer.telemetry import completion_row
from backend.training.batch import Batch, completion_metrics, pack
from backend.types import Completion, Group, Problem


def test_the_mask_reaches_the_batch_beside_padding_and_truncation() -> None:
    def completion(stop: Any, mask: list[int]) -> Completion:
        return Completion([5, 6, 7], [-1.0] * 3, "", stop, mask=mask)

    rows = [completion("eos", [1, 0, 1]), completion("length", [1, 0, 1]), completion("eos", [0, 0, 0])]
    rows += [Completion([5], [-1.0], "", "eos")]
    groups = [Group(Problem(0, "", [], [1, 2], ""), rows)]
    batch: Batch = pack(groups, pad_id=0)
    assert batch.mask_BT.tolist() == [[1, 0, 1], [1, 0, 1], [0, 0, 0], [1, 0, 0]] and batch.mask_BT.dtype == mx.float32
    assert batch.length_B.tolist() == [3, 3, 3, 1], "masked tokens are read all the same"
    truncated = pack(groups, pad_id=0, mask_truncated_completions=True)
    assert truncated.mask_BT.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert [completion_row(row)["tokens"] for row in rows] == [2, 2, 0, 1], "as completions/mean_length"
    counts = completion_metrics(groups)
    assert counts["num_tokens"] == 4 * 2 + 2 + 2 + 0 + 1
    assert (counts["completions/max_length"], counts["completions/min_length"]) == (2, 0)
