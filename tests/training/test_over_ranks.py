"""Ranks that share the rows of a step make the update that one process makes of all of them.

The ranks are threads that compute in turns (`tests.support.rank_threads`): what they exchange goes through the same
code as between processes, but for the transport.
"""

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.config.config import Config, parse
from backend.models.policy import load_policy, load_teacher
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.training.collectives import ALONE, Collectives
from backend.training.losses import LOSSES
from backend.training.microbatch import RowLengths
from backend.training.not_finite import NotFiniteError
from backend.training.policy_forward import rows_of_ranks
from backend.types import Completion, Group, Problem
from tests.support import random_models
from tests.support.rank_threads import ThreadCollectives, on_ranks
from tests.support.small_settings import PLAIN_SGD, SMALL_LORA

P, G, LONGEST = 4, 3, 9
SIZES = {"batch_size": P, "group_size": G, "max_completion_length": LONGEST}
BASE = SMALL_LORA | PLAIN_SGD | SIZES | {"learning_rate": 0.05, "max_grad_norm": 1.0}
FAST_LEADER = [3.0, 1.0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    random_models.tiny_model(folder / "teacher", seed=1)
    return random_models.tiny_model(folder / "qwen3")


def config_of(model: Path, **settings: Any) -> Config:
    """Losses that the form does not offer are set after the checks."""
    loss = settings.pop("grpo_loss_type", "grpo")
    files = {"model": str(model), "teacher_model": str(model.with_name("teacher"))}
    return parse(files | BASE | settings).model_copy(update={"grpo_loss_type": loss})


def random_groups(seed: int, *, taught: bool = False) -> list[Group]:
    """A step's groups, of unequal lengths; the second has no signal, and one completion of the third ran into the
    limit. `taught`: all but the first completions of each group have a teacher."""
    rng = np.random.default_rng(seed)
    groups: list[Group] = []
    for index in range(P):
        completions = [rng.integers(3, 320, rng.integers(1, LONGEST + 1)).tolist() for _ in range(G)]
        advantages = np.zeros(G) if index == 1 else rng.normal(size=G)
        group = Group(Problem(index, "", [], rng.integers(3, 320, rng.integers(1, 8)).tolist(), ""), [])
        for i, (tokens, advantage) in enumerate(zip(completions, advantages, strict=True)):
            logps, kept = rng.normal(-5.8, 0.2, len(tokens)).tolist(), [-0.1] * len(tokens)
            end = "length" if index == 2 and i == 0 else "eos"
            group.completions.append(Completion(tokens, logps, "", end, log_kept=kept, advantage=float(advantage)))
            group.completions[-1].teacher_prompt = [*group.problem.tokens, 3, *tokens] if taught and i else []
        groups.append(group)
    return groups


Learned = tuple[dict[str, np.ndarray], list[dict[str, float]], list[float | None], dict[int, Any]]


def learned(config: Config, ranks: Collectives = ALONE, speeds: list[float] | None = None) -> Learned:
    """Weights and the reference's, metrics of each step, the entropy bonus, and the records of tokens."""
    policy = load_policy(config)
    load_teacher(policy, config)
    learner = build_learner(policy, config, 2)
    learner.forward.ranks, learner.forward.speeds = ranks, speeds or []
    metrics = [
        learner.learn(pack(groups, pad_id=policy.pad_id, mask_truncated_completions=True))
        for groups in (random_groups(seed, taught=bool(config.distillation_weight)) for seed in range(2))
    ]
    metrics.append(learner.held_out_metrics(pack(random_groups(9), pad_id=policy.pad_id)))
    arrays = policy.trainable()
    if config.sync_ref_model:
        arrays |= {f"reference {name}": x for name, x in policy.reference_arrays().items()}
    weights = {name: np.array(x) for name, x in arrays.items()}
    return weights, metrics, learner.algorithm.state(), learner.algorithm.token_records


def assert_equal(one: Learned, other: Learned) -> None:
    weights, metrics, bonus, records = one
    for name, x in weights.items():
        assert np.abs(x - other[0][name]).max() < 1e-6, name
    for expected, found in zip(metrics, other[1], strict=True):
        assert expected.keys() == found.keys()
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x, rtol=2e-5, atol=2e-6, err_msg=name)
    np.testing.assert_allclose([x or 0.0 for x in other[2]], [x or 0.0 for x in bonus], atol=1e-5)
    assert other[3].keys() == records.keys()
    for row, record in records.items():
        np.testing.assert_allclose(other[3][row].learned_logp, record.learned_logp, atol=1e-4)
        assert other[3][row].clipped == record.clipped


def assert_ranks_equal_one(config: Config, size: int, speeds: list[float] | None = None) -> None:
    one = learned(config)
    ranks = on_ranks(size, lambda ranks: learned(config, ranks, speeds))
    for rank in ranks:
        assert_equal(one, rank)
        for name, x in rank[0].items():  # in lockstep: no rank is off by as much as a bit
            assert (x == ranks[0][0][name]).all(), name
    start = {name: np.array(x) for name, x in load_policy(config).trainable().items()}
    assert max(np.abs(x - start[name]).max() for name, x in one[0].items() if name in start) > 2e-5, "nothing learned"


EVERYTHING = (
    {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "batch_size": P // 2}
    | {"beta": 0.05, "epsilon": 5e-3, "sampling_correction": "token_truncate", "sampling_correction_max": 1.5}
    | {"top_entropy_quantile": 0.5, "entropy_adaptive": True, "entropy_coef": 0.01, "entropy_target": 10.0}
    | {"record_tokens": True, "distillation_weight": 0.5}
)


@pytest.mark.parametrize(
    ("size", "speeds", "settings"),
    [
        (2, FAST_LEADER, EVERYTHING),
        # One has nothing to do.
        (2, [1e6, 1.0], {"grpo_loss_type": "dapo", "beta": 0.0}),
        (2, FAST_LEADER, {"train_mode": "distill", "num_iterations": 2}),
        *(
            pytest.param(*case, marks=pytest.mark.proof)
            for case in (
                *(
                    (
                        size,
                        None,
                        {"grpo_loss_type": loss, "num_iterations": 2, "epsilon": 5e-3, "beta": beta}
                        | ({"importance_sampling_level": "sequence"} if loss == "luspo" else {}),
                    )
                    for loss in LOSSES
                    for size in (2, 4)
                    for beta in (0.0, 0.05)
                ),
                *(
                    (4, [4.0, 1.0, 2.0, 1.0], {"sampling_correction": mode, "sampling_correction_max": 2.0})
                    for mode in ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
                ),
                (4, None, EVERYTHING),
                (10, None, {"grpo_loss_type": "dapo", "beta": 0.0}),  # for nine rows with a signal
                (4, None, {"importance_sampling_level": "sequence", "num_iterations": 2}),
                (4, None, {"importance_sampling_level": "sequence_token", "num_iterations": 2}),
                (4, None, {"top_entropy_quantile": 0.2}),
                (4, None, {"entropy_coef": 0.05}),
                (4, None, {"entropy_adaptive": True, "entropy_target": 1.0}),
                (
                    4,
                    None,
                    {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
                ),
                (4, None, {"beta": 0.1, "ratio_against": "reference", "num_iterations": 2}),
                (4, None, {"off_policy_mask_threshold": 0.1}),
                (4, None, {"neftune_noise_alpha": 5.0}),
                (4, None, {"train_type": "full", "num_iterations": 2, "learning_rate": 1e-2}),
                (4, None, {"optimizer": "adamw", "learning_rate": 1e-5, "num_iterations": 2}),
                (2, [1e6, 1.0], {"num_iterations": 2}),
                (2, [1.0, 1e6], {"num_iterations": 2}),
            )
        ),
    ],
    ids=str,
)
def test_ranks_make_the_update_of_one(model: Path, size: int, speeds: list[float] | None, settings: dict[str, Any]):
    assert_ranks_equal_one(config_of(model, **settings), size, speeds)


def test_a_gradient_that_is_not_finite_on_one_rank_is_found_by_all(model: Path) -> None:
    """Nobody applies it, and every rank names the numbers of all rows."""
    groups = random_groups(0)
    groups[3].completions[2] = replace(groups[3].completions[2], advantage=math.inf)

    def learn(ranks: ThreadCollectives) -> tuple[NotFiniteError, bool]:
        policy = load_policy(config := config_of(model))
        learner = build_learner(policy, config, 1)
        learner.forward.ranks = ranks
        before = {name: np.array(x) for name, x in policy.trainable().items()}
        with pytest.raises(NotFiniteError) as found:
            learner.learn(pack(groups, pad_id=policy.pad_id))
        return found.value, all((np.array(x) == before[name]).all() for name, x in policy.trainable().items())

    for found, is_unchanged in on_ranks(2, learn):
        assert is_unchanged
        assert found.quantity == "loss" and found.update == 1
        assert sorted(found.tokens) == list(range(P * G))


def rows_like(lengths: list[list[int]], prompt: int = 10) -> list[RowLengths]:
    numbered = [(group, length) for group, of_group in enumerate(lengths) for length in of_group]
    return [RowLengths(index, group, prompt, length) for index, (group, length) in enumerate(numbered)]


def test_every_row_has_one_rank_whatever_the_lengths() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = [rng.integers(0, 200, rng.integers(1, 9)).tolist() for _ in range(rng.integers(1, 9))]
        speeds = rng.uniform(0.1, 5, rng.integers(1, 6)).tolist()
        rows = rows_like(lengths, prompt=int(rng.integers(1, 100)))
        parts = rows_of_ranks(rows, speeds)
        assert len(parts) == len(speeds) and sorted(chain.from_iterable(parts)) == [row.index for row in rows]
    with pytest.raises(ValueError):
        rows_of_ranks([], [1.0, 0.0])
