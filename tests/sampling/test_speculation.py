"""Speculative decoding: the same tokens, good drafts, and off where it does not pay."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.config.config import parse
from backend.sampling.outputs import CompletionBuffer
from backend.sampling.rollout import Sampler
from backend.sampling.row_costs import DRAFTED, ON_CPU
from backend.sampling.sampler import GREEDY, Sampling
from backend.sampling.speculation import PASSES, PROBE, TRIAL, DraftModel, NGrams, Speculation, speculation_of
from backend.types import Completion, Group
from backend.utils.errors import UserError
from tests.sampling.test_rollout import FILTERED, MANY_ENDS, policy_of, problems
from tests.support import random_models

LENGTH, GROUP = 30, 2


def equal(groups: list[Group], others: list[Group]) -> bool:
    pairs = zip(completions_of(groups), completions_of(others), strict=True)
    return all(
        (x.tokens, x.stop) == (y.tokens, y.stop)
        and np.allclose(x.logps, y.logps, atol=2e-5)
        and np.allclose(x.log_kept, y.log_kept, atol=2e-5)
        for x, y in pairs
    )


def completions_of(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


class HalfRight(NGrams):
    """Drafts of known completions, of which half have a wrong token, and one in five is missing."""

    def __init__(self, known: list[Completion]) -> None:
        super().__init__()
        self.known, self.rng = known, np.random.default_rng(0)

    def drafts(self, index: np.ndarray, latest_B: np.ndarray, uniform_BN: np.ndarray) -> np.ndarray | None:
        drafts = np.zeros((len(index), DRAFTED), np.int32)
        for draft, row in zip(drafts, index.tolist(), strict=True):
            follows = self.known[row].tokens[self._outputs.length[row] + 1 :][:DRAFTED]
            draft[: len(follows)] = follows
            if self.rng.random() < 0.5:
                draft[self.rng.integers(DRAFTED)] += 1
        return None if self.rng.random() < 0.2 else drafts


@pytest.mark.parametrize(
    ("arch", "sampling", "eos", "rows"),
    [("qwen3", FILTERED, MANY_ENDS, None), ("qwen3", GREEDY, None, 3), ("qwen3_moe", FILTERED, MANY_ENDS, None)],
    ids=["ends", "few rows", "experts"],
)
def test_tokens_are_those_without_drafts(
    models: Path, arch: str, sampling: Sampling, eos: list[int] | None, rows: int | None
) -> None:
    sampler = Sampler(policy_of(models, arch, eos), LENGTH, rows=rows)
    plain = sampler.sample(problems(), GROUP, sampling, 0, 0)
    sampler.speculation = speculation = Speculation(HalfRight(completions_of(plain)), ON_CPU)
    rng = np.random.default_rng(0)
    speculation.passes = lambda rows, is_ragged: int(rng.choice([0, 3, 8]))  # steps and passes in turn
    assert equal(sampler.sample(problems(), GROUP, sampling, 0, 0), plain)
    metrics = speculation.metrics(np.zeros(4, np.int64))
    assert 0.8 < metrics["speculation/accepted"] < DRAFTED and 0.1 < metrics["speculation/share"] <= 1


def test_a_draft_model_draws_what_the_policy_draws(models: Path) -> None:
    policy = policy_of(models, eos=MANY_ENDS)
    sampler = Sampler(policy, LENGTH)
    plain = sampler.sample(problems(), GROUP, FILTERED, 0, 0)
    sampler.speculation = speculation = Speculation(DraftModel(policy.model, policy.split_model), ON_CPU)
    rng = np.random.default_rng(0)
    speculation.passes = lambda rows, is_ragged: int(rng.choice([0, 3]))
    assert equal(sampler.sample(problems(), GROUP, FILTERED, 0, 0), plain)
    # The policy as its own draft model: every draft is accepted up to the end of its row.
    assert speculation.metrics(np.zeros(4, np.int64))["speculation/accepted"] > 2.9


def test_n_grams_find_what_followed_in_the_prompt_the_group_and_an_earlier_epoch() -> None:
    prompt, known = [1, 2, 3, 4, 5, 6], NGrams()
    for sibling, follows in (([7, 8, 9, 10], [8, 9, 10]), ([7, 20, 21], [20, 21, 0])):
        outputs = CompletionBuffer(2, 9, None, [-1], ())
        for row, tokens in enumerate((sibling, [6])):
            outputs.insert(row, tokens)
        known.begin([prompt], 2, GREEDY, outputs)
        row, uniforms = np.array([1]), np.zeros((1, 4))
        assert known.drafts(row, np.array([9]), uniforms) is None  # after 5 6 6
        outputs.insert(1, [2])
        drafted = known.drafts(row, np.array([3]), uniforms)
        assert drafted is not None and drafted.tolist() == [[4, 5, 6]]  # of the prompt
        outputs.insert(1, [5, 6])
        drafted = known.drafts(row, np.array([7]), uniforms)
        assert drafted is not None and drafted.tolist() == [follows]  # of the other completion
        known.end()
    known.begin([prompt], 2, GREEDY, CompletionBuffer(2, 9, None, [-1], ()))
    drafted = known.drafts(np.array([0]), np.array([20]), uniforms)
    assert drafted is None  # nothing was followed by 5 6 20
    assert known.would_accept(np.array([0]), 3) == (0, 0)


@pytest.mark.parametrize(
    ("verified_s", "accepted", "passes"), [(1.5, 2, PASSES), (1.5, 0, 0), (4.0, 2, 0)], ids=["pays", "guesses", "costs"]
)
def test_drafts_are_verified_while_that_is_faster(verified_s: float, accepted: int, passes: int) -> None:
    class Guesses(NGrams):
        def would_accept(self, index: np.ndarray, count: int) -> tuple[int, int]:
            return len(index) * count, len(index) * count * accepted

    speculation, row = Speculation(Guesses(), ON_CPU), np.array([0])
    speculation.begin([[1]], 1, GREEDY, CompletionBuffer(1, 9, None, [-1], ()))
    assert speculation.passes(1, False) == 0  # until a step has been measured
    for _ in range(2):
        speculation.decoded(row, (1, 64), 8, 1.0)
    assert speculation.passes(99, False) == 0
    assert speculation.passes(1, False) == (TRIAL if accepted else 0)
    for _ in range(TRIAL):
        speculation.verified(np.array([accepted]), (1, 64), DRAFTED, verified_s)
    assert speculation.passes(1, True) == passes
    for _ in range(64):  # nothing is accepted any more
        speculation.verified(np.array([0]), (1, 64), DRAFTED, verified_s)
    assert speculation.passes(1, True) == 0 == speculation.passes(1, False)


def test_a_useless_draft_model_is_tried_seldom() -> None:
    class Useless(NGrams):
        is_free = False

        def would_accept(self, index: np.ndarray, count: int) -> tuple[int, int]:
            return 0, 0

    speculation, passes = Speculation(Useless(), ON_CPU), list[int]()
    for _ in range(32):
        speculation.begin([[1]], 4, GREEDY, CompletionBuffer(4, 9, None, [-1], ()))
        for rows in (4, 2, 1):
            for _ in range(2):
                speculation.decoded(np.arange(rows), (rows, 64), 8, 1.0)
            passes.append(speculation.passes(rows, False))
            for _ in range(passes[-1]):
                speculation.verified(np.zeros(rows, int), (rows, 64), DRAFTED, 1.5)
    assert passes[0] == PROBE and sum(passes) == 6 * PROBE  # in rollouts 1, 2, 4, 8, 16 and 32
    speculation.verified(np.full(64, 3), (1, 64), DRAFTED, 1.5)
    speculation.begin([[1]], 4, GREEDY, CompletionBuffer(4, 9, None, [-1], ()))
    assert speculation.passes(2, False) == TRIAL  # they are good after all


def test_why_a_run_has_no_drafts(models: Path, tmp_path: Path) -> None:
    policy, settings = policy_of(models), {"model": "m", "data": "d", "use_speculative_decoding": True}
    sampler = Sampler(policy, 1)

    def notes(**more: Any) -> list[str]:
        told: list[str] = []
        made = speculation_of(parse(settings | more), policy, sampler, told.append)
        assert (made is None) == bool(told)
        return told

    assert notes() == []
    assert notes(presence_penalty=1.0) == ["Speculative decoding is off: penalties depend on every token before."]
    assert notes(output_regex="a+") == ["Speculative decoding is off: output is constrained."]
    sampler.has_continuous_batching = False
    assert "one group at a time" in notes()[0]
    sampler.has_continuous_batching = True
    random_models.tiny_model(tmp_path / "mamba", "mamba")
    with pytest.raises(UserError, match="cannot take back what it has read"):
        notes(draft_model_path=str(tmp_path / "mamba"))
    tokenizer = policy.tokenizer
    policy.tokenizer = dataclasses.make_dataclass("Other", [])()
    policy.tokenizer.get_vocab = dict
    with pytest.raises(UserError, match="has other tokens than"):
        notes(draft_model_path=str(models / "qwen3"))
    policy.tokenizer = tokenizer
    assert notes(draft_model_path=str(models / "qwen3")) == []
