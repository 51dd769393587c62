"""Packing, splitting into micro-batches, length metrics and the importance correction."""

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.runs.completion_rows import Stop
from backend.trainer.telemetry import completion_row
from backend.training.batch import Batch, completion_metrics, pack
from backend.training.importance_sampling import importance_ratio, logp_difference
from backend.training.microbatch import PASS_OVERHEAD, MicroBatchRows, PromptMode, RowLengths, plan_micro_batches
from backend.training.variety import NGRAM, distinct_ngrams, repetition, variety_metrics
from backend.types import Completion, Group, Problem
from tests.support.cases import cases

GOLDEN = Path(__file__).parents[1] / "golden"
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
PAD = 99


def completion(tokens: list[int], stop: Stop = "eos", advantage: float = 1.0) -> Completion:
    return Completion(tokens, [-t / 10 for t in tokens], "", stop, advantage=advantage)


def group(prompt: list[int], *completions: Completion) -> Group:
    return Group(Problem(0, "", [], prompt, ""), list(completions))


TWO_GROUPS = [
    group([1, 2, 3], completion([4, 5], advantage=0.5), completion([6], advantage=-0.5)),
    group([7], completion([8, 9, 10, 11], stop="length", advantage=0.0), completion([], advantage=2.0)),
]


def test_pack_pads_on_the_right() -> None:
    batch = pack(TWO_GROUPS, pad_id=PAD)
    assert batch.tokens_BL.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 6, PAD], [7, 8, 9, 10, 11], [7, PAD, PAD, PAD, PAD]]
    assert batch.completion_BT.tolist() == [[4, 5, PAD, PAD], [6, PAD, PAD, PAD], [8, 9, 10, 11], [PAD] * 4]
    assert batch.mask_BT.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    np.testing.assert_allclose(np.array(batch.sampling_logp_BT)[0], [-0.4, -0.5, 0, 0])
    assert batch.log_kept_BT.tolist() == [[0.0] * 4] * 4, "nothing was cut, and padding weighs nothing"
    assert batch.prompt_length_B.tolist() == [3, 3, 1, 1]
    assert batch.length_B.tolist() == [2, 1, 4, 0]
    assert batch.advantage_B.tolist() == [0.5, -0.5, 0, 2]
    assert (batch.group_B.tolist(), batch.row_B.tolist()) == ([0, 0, 1, 1], [0, 1, 2, 3])
    assert batch.mask_BT.dtype == mx.float32
    assert batch.weight_BT is batch.old_logp_BT is batch.ref_logp_BT is batch.log_held_BT is None


GENERATIONS = [c for c in json.loads((GOLDEN / "generation_metrics.json").read_text()) if "completion_ids" in c]


def golden_groups(case: dict[str, Any]) -> list[Group]:
    ended = (case["eos"], case["pad"])
    return [
        group([5] * length, completion(ids, "eos" if ids[-1] in ended else "length"))
        for ids, length in zip(case["completion_ids"], case["prompt_lengths"], strict=True)
    ]


@cases("case", GENERATIONS)
def test_length_metrics_equal_trls(case: dict[str, Any]) -> None:
    groups = golden_groups(case)
    if "env_mask" in case:  # tokens that an environment wrote are not the model's: they do not count
        for g, mask in zip(groups, case["env_mask"], strict=True):
            g.completions[0].mask = mask
    actual = completion_metrics(groups)
    assert actual.pop("hit_max_tokens_ratio") == actual["completions/clipped_ratio"]
    assert set(actual) == set(case["out"]["metrics"])
    for name, value in case["out"]["metrics"].items():
        np.testing.assert_allclose(actual[name], value, err_msg=name, **CLOSE)
    batch = pack(groups, pad_id=case["pad"], mask_truncated_completions=case["mask_truncated_completions"])
    mask = np.array(case["out"]["completion_mask"]) * np.array(case["out"].get("tool_mask", 1))
    assert batch.mask_BT.tolist() == mask.tolist() and mask.sum() == case["out"]["num_items_in_batch"]


CORRECTIONS = json.loads((GOLDEN / "is_correction.json").read_text())


def correction_arrays(case: dict[str, Any]) -> tuple[mx.array, mx.array, mx.array]:
    old, ragged = case["old_logps"], case["sampling_logps"]
    sampling = [row + [-7.0] * (len(old[0]) - len(row)) for row in ragged]  # padding must not be read
    mask = [[1.0] * len(row) + [0.0] * (len(old[0]) - len(row)) for row in ragged]
    return mx.array(old), mx.array(sampling), mx.array(mask)


@cases("case", CORRECTIONS)
def test_the_importance_correction_equals_trls(case: dict[str, Any]) -> None:
    ratio, metrics = importance_ratio(*correction_arrays(case), case["mode"], case["clip_min"], case["clip_max"])
    np.testing.assert_allclose(np.array(ratio), case["out"]["importance_sampling_ratio"], **CLOSE)
    assert set(metrics) == set(case["out"]["metrics"])
    for name, value in case["out"]["metrics"].items():
        np.testing.assert_allclose(float(metrics[name]), value, err_msg=name, **CLOSE)


def test_the_gap_is_between_two_policies_before_any_filter() -> None:
    # The sampler's policy gave the tokens −0.5 − 0.25 and −1 − 1.5. A third it could not score, a fourth is padding.
    policy, sampling = mx.array([[-1.0, -2.0, -9.0, -9.0]]), mx.array([[-0.5, -1.0, float("nan"), -7.0]])
    before, mask = sampling + mx.array([[-0.25, -1.5, 0.0, 0.0]]), mx.array([[1.0, 1.0, 1.0, 0.0]])
    gap = {name: float(x) for name, x in logp_difference(policy, before, mask, "logp_gap").items()}
    assert gap == {"sampling/logp_gap/mean": 0.375, "sampling/logp_gap/max": 0.5}
    assert {float(x) for x in logp_difference(policy, before, 0 * mask, "logp_gap").values()} == {0}


def rows(prompt: int, *lengths: int, groups: int = 1) -> list[RowLengths]:
    return [RowLengths(i, i * groups // len(lengths), prompt, length) for i, length in enumerate(lengths)]


def costs(parts: list[list[int]], of: list[RowLengths]) -> list[int]:
    return [MicroBatchRows([of[index] for index in part]).tokens for part in parts]


def whole(rows: list[RowLengths]) -> list[RowLengths]:
    return [RowLengths(row.index, row.group, 0, row.prompt + row.length) for row in rows]


MODES: list[PromptMode] = ["prefilled", "per_micro_batch", "per_row"]


@pytest.mark.parametrize("prompts", MODES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=12),
    budget=st.integers(1, 1500),
    most_rows=st.none() | st.integers(1, 5),
)
def test_no_row_is_lost_and_limits_are_kept(
    prompts: PromptMode, sizes: list[tuple[int, int]], budget: int, most_rows: int | None
) -> None:
    many = [RowLengths(i, group, 100 * group + 1, length) for i, (group, length) in enumerate(sizes)]
    parts = plan_micro_batches(many, most_rows=most_rows, token_budget=budget, prompts=prompts)
    assert sorted(index for part in parts for index in part) == list(range(len(many)))
    counted = [RowLengths(row.index, row.group, 0, row.length) for row in many] if prompts == "prefilled" else many
    tokens = costs(parts, whole(many) if prompts == "per_row" else counted)
    assert all(size <= budget or len(part) == 1 for size, part in zip(tokens, parts, strict=True))
    assert all(most_rows is None or len(part) <= most_rows for part in parts)
    assert tokens == sorted(tokens, reverse=True), "the one that needs most memory first"


@pytest.mark.parametrize("shared", [True, False])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=7),
    prompt=st.sampled_from([1, 60, 900]),
    groups=st.integers(1, 3),
)
def test_the_plan_is_the_cheapest_split_by_length(lengths: list[int], prompt: int, groups: int, shared: bool) -> None:
    """Compared with every split of the rows sorted by length."""
    many = rows(prompt, *lengths, groups=groups)
    plan = plan_micro_batches(many, prompts="per_micro_batch" if shared else "per_row")
    counted = many if shared else whole(many)
    planned = sum(cost + PASS_OVERHEAD for cost in costs(plan, counted))
    falling = sorted(counted, key=lambda row: -row.length)
    for count in range(len(many)):
        for chosen in combinations(range(1, len(many)), count):
            borders = [0, *chosen, len(many)]
            split = [falling[a:b] for a, b in pairwise(borders)]
            assert planned <= sum(MicroBatchRows(part).tokens + PASS_OVERHEAD for part in split)


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


def variety_group(*completions: list[int], masks: tuple[list[int], ...] = ()) -> Group:
    problem = Problem(0, "", [], [1], "")
    made = [Completion(tokens, [0.0] * len(tokens), "", "eos") for tokens in completions]
    for completion, mask in zip(made, masks, strict=False):
        completion.mask = mask
    return Group(problem, made)


def test_distinct_completions_are_counted_within_each_group() -> None:
    same, different = variety_group([1, 2], [1, 2], [1, 2], [1, 2]), variety_group([1, 2], [1], [2], [1, 2])
    assert variety_metrics([same])["completions/distinct_fraction"] == 0.25
    assert variety_metrics([same, different])["completions/distinct_fraction"] == pytest.approx((0.25 + 0.75) / 2)
    assert variety_metrics([variety_group([1]), variety_group([1])])["completions/distinct_fraction"] == 1.0


def test_distinct_n_counts_the_different_ngrams_of_a_group_over_its_tokens() -> None:
    """By hand: (1 2 3) and (1 2 4) have 4 different tokens and the bigrams 12, 23, 24; 6 tokens in all."""
    metrics = variety_metrics([variety_group([1, 2, 3], [1, 2, 4])])
    assert metrics["completions/distinct_1"] == pytest.approx(4 / 6)
    assert metrics["completions/distinct_2"] == pytest.approx(3 / 6)
    assert distinct_ngrams([[1], [2]], 2) == distinct_ngrams([[], []], 1) == 0  # no bigram reaches into the next one


def test_repetition_is_the_share_of_ngrams_that_stood_before() -> None:
    once = list(range(20))
    assert repetition(once) == 0.0
    assert repetition(once + once) == pytest.approx((20 - NGRAM + 1) / (40 - NGRAM + 1))
    assert repetition([7] * 40) == pytest.approx(1 - 1 / (40 - NGRAM + 1))
    assert repetition([7] * NGRAM) == repetition([]) == 0.0


def test_tokens_that_the_policy_did_not_produce_do_not_count() -> None:
    other = variety_group([1, 9, 2], [1, 8, 2], masks=([1, 0, 1], [1, 0, 1]))
    assert variety_metrics([other])["completions/distinct_fraction"] == 0.5
