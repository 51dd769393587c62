"""Supervised fine-tuning learns what mlx-lm's trainer and TRL's SFTTrainer learn."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, train
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from backend.config.config import Config, parse
from backend.data.labels import labelled_group, tokenized
from backend.data.problems import PromptFormat
from backend.models.policy import Policy, load_policy, load_teacher
from backend.training.algorithms import build_learner
from backend.training.batch import Batch, pack
from backend.types import Completion, Group, Label, Problem
from tests.support.random_models import tiny_model
from tests.support.small_run import check, events, resumed_and_whole, settings_for
from tests.support.small_settings import PLAIN_SGD, SMALL_LORA, UNFILTERED

ROWS, STEPS = 4, 10


def config_of(model: Path, **settings: Any) -> Config:
    plain = {"learning_rate": 1e-3, "weight_decay": 0.01, "batch_size": ROWS, "max_grad_norm": 0.0, "temperature": 0.8}
    return parse({"model": str(model), **SMALL_LORA, **plain, **settings})


def labels(seed: int) -> list[Label]:
    """Rows of unequal lengths; the second has two turns to imitate."""
    rng = np.random.default_rng(seed)
    rows: list[Label] = []
    for prompt, answer in ((5, 9), (2, 4), (7, 3), (1, 12)):
        ids = rng.integers(3, 320, prompt + answer).tolist()
        rows.append(Label(ids, [0] * prompt + [1] * answer))
    first = rows[1]
    rows[1] = Label([*first.tokens, 5, 6, 7, 8], [*first.mask, 0, 0, 1, 1])
    return rows


def groups_of(rows: list[Label]) -> list[Group]:
    return [labelled_group(Problem(i, "", [], [], "", label=label)) for i, label in enumerate(rows)]


def padded(rows: list[Label]) -> tuple[mx.array, mx.array]:
    """Tokens and mask [B, L]."""
    width = max(len(row.tokens) for row in rows)
    tokens, mask = (
        mx.array([[*part, *[0] * (width - len(part))] for part in column])
        for column in ([row.tokens for row in rows], [row.mask for row in rows])
    )
    return tokens, mask


def masked_loss(model: Any, tokens: mx.array, mask: mx.array) -> tuple[mx.array, mx.array]:
    """mlx-lm's `default_loss` with a mask in place of one span."""
    cross_entropy = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) * mask[:, 1:]
    return cross_entropy.astype(mx.float32).sum() / mask.sum(), mask.sum()


def test_loss_is_mlx_lm_s(model: Path) -> None:
    config = config_of(model, train_mode="sft")
    policy = load_policy(config)
    rows = [labels(0)[i] for i in (0, 2, 3)]  # of one span
    tokens, _ = padded(rows)
    # To the last token: mlx-lm counts one token of padding behind each row too.
    spans = mx.array([[row.mask.index(1), len(row.tokens) - 1] for row in rows])
    expected, count = default_loss(policy.model, tokens, spans)
    batch = pack(groups_of(rows), pad_id=policy.pad_id)
    held_out = build_learner(policy, config, 1).held_out_metrics(batch)
    assert int(count) == 9 + 3 + 12
    assert held_out["loss"] == pytest.approx(float(expected), abs=1e-5)
    assert held_out["loss_stderr"] > 0
    assert build_learner(policy, config, 1).learn(batch)["loss"] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("memory", [{}, {"micro_batch_tokens": 16, "chunk": 5, "recompute": True}])
def test_ten_steps_end_with_mlx_lm_s_adapters(model: Path, memory: dict[str, Any], tmp_path: Path) -> None:
    config, data = config_of(model, train_mode="sft"), [labels(seed) for seed in range(STEPS)]
    policy = load_policy(config)
    start = {name: mx.array(x) for name, x in policy.trainable().items()}
    theirs = mlx_lm.load(str(model))[0]
    theirs.freeze()
    linear_to_lora_layers(theirs, config.num_layers, {"rank": config.rank, "scale": config.scale, "dropout": 0.0})
    theirs.load_weights([*start.items()], strict=False)
    learner = build_learner(policy, config, STEPS, **memory)
    for rows in data:
        learner.learn(pack(groups_of(rows), pad_id=policy.pad_id))

    def batches(**_: Any) -> Iterator[tuple[mx.array, mx.array]]:
        yield from map(padded, data)

    file = str(tmp_path / "adapters.safetensors")
    args = TrainingArgs(ROWS, STEPS, steps_per_report=STEPS, steps_per_save=STEPS, adapter_file=file)
    optimizer = optim.AdamW(config.learning_rate, weight_decay=config.weight_decay, bias_correction=True)
    train(theirs, optimizer, [], args=args, loss=masked_loss, iterate_batches=batches)
    learnt: Any = mx.load(file)
    assert set(learnt) == set(start)
    for name, expected in learnt.items():
        assert mx.abs(policy.trainable()[name] - expected).max().item() < 1e-4, name
        assert mx.abs(start[name] - expected).max().item() > 1e-3, name


# Of TRL 1.16's SFTTrainer in PyTorch, full fine-tuning in float32 with AdamW, two batches of two rows an update
TRL_LOSSES = {
    True: [6.424528121948242, 5.880071640014648, 5.3642659187316895],  # completion_only_loss
    False: [6.390563011169434, 6.031292915344238, 5.694152355194092],
}


@pytest.mark.parametrize("mask_prompt", [True, False])
def test_losses_are_trl_s(tmp_path: Path, mask_prompt: bool) -> None:
    folder, settings = tiny_model(tmp_path / "model"), {"train_mode": "sft", "mask_prompt": mask_prompt}
    full = {"train_type": "full", "batch_size": 2, "gradient_accumulation_steps": 2, "dtype": "float32"}
    config = config_of(folder, **settings, **full)
    policy = load_policy(config)
    rows = [{"prompt": f"What is {n} plus {n}?", "completion": f"It is {2 * n}." + " Yes." * n} for n in range(4)]
    problems = tokenized(rows, policy.tokenizer, PromptFormat.of(config, labelled=True), "rows").first(-1)
    learner = build_learner(policy, config, 3)
    batch = pack([*map(labelled_group, problems)], pad_id=policy.pad_id)
    losses = [learner.learn(batch)["loss"] for _ in range(3)]
    assert losses[0] == pytest.approx(TRL_LOSSES[mask_prompt][0], abs=1e-5)
    assert losses == pytest.approx(TRL_LOSSES[mask_prompt], abs=1e-4)


TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider and deeper than the student, of the same vocabulary, with more rows of padding and an output layer."""
    folder = tmp_path_factory.mktemp("teachers") / "teacher"
    return tiny_model(folder, layers=2, hidden=64, tie=False, seed=5, own={"vocab_size": 328})


def distill_config_of(model: Path, teacher: Path, **settings: Any) -> Config:
    raw = SMALL_LORA | PLAIN_SGD | UNFILTERED | {"model": str(model), "temperature": TEMPERATURE, "learning_rate": 0.5}
    raw |= {"train_mode": "distill", "teacher_model": str(teacher), "group_size": 3, "batch_size": 2}
    return parse(raw | settings)


def policy_of(config: Config) -> Policy:
    policy = load_policy(config)
    load_teacher(policy, config)
    mx.random.seed(3)  # a fresh B is 0, which hides errors in the gradient of A
    policy.assign({name: 0.1 * mx.random.normal(x.shape) for name, x in policy.trainable().items()})
    return policy


def batch_of(policy: Policy) -> Batch:
    rng = np.random.default_rng(0)
    lengths = [[6, 2, 9], [4, 11, 1]]
    groups = [
        Group(
            Problem(i, "", [], rng.integers(3, 320, 4 + 3 * i).tolist(), ""),
            [Completion(rng.integers(3, 320, n).tolist(), [-5.0] * n, "", "eos", advantage=n - 5.5) for n in row],
        )
        for i, row in enumerate(lengths)
    ]
    groups[0].completions[2].mask = [1, 1, 1, 0, 0, 0, 1, 1, 1]  # as a tool's result
    return pack(groups, pad_id=policy.pad_id)


def plain_loss(model: nn.Module, teacher: nn.Module, batch: Batch, beta: float) -> mx.array:
    """Whole rows with all logits, as in TRL's `generalized_jsd_loss`."""
    T = batch.completion_BT.shape[1]
    place_BT = mx.minimum(batch.prompt_length_B[:, None] - 1 + mx.arange(T)[None], batch.tokens_BL.shape[1] - 1)

    def log_softmax(of: nn.Module) -> mx.array:
        logits = mx.take_along_axis(of(batch.tokens_BL), place_BT[..., None], axis=1)[..., :320] / TEMPERATURE
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    p, q = log_softmax(model), log_softmax(teacher)
    if beta == 0:
        divergence = mx.exp(q) * (q - p)
    elif beta == 1:
        divergence = mx.exp(p) * (p - q)
    else:
        m = mx.logaddexp(p + np.log(1 - beta), q + np.log(beta))
        divergence = beta * mx.exp(q) * (q - m) + (1 - beta) * mx.exp(p) * (p - m)
    return (divergence.sum(axis=-1) * batch.mask_BT).sum() / batch.mask_BT.sum()


@pytest.mark.parametrize(
    ("train_type", "beta", "memory"),
    [("lora", 0.5, {"micro_batch_tokens": 16, "chunk": 5}), ("dora", 0.0, {}), ("full", 1.0, {}), ("lora", 0.0, {})],
)
def test_an_update_is_the_gradient_of_trls_loss(
    model: Path, teacher: Path, train_type: str, beta: float, memory: dict[str, int]
) -> None:
    policy = policy_of(config := distill_config_of(model, teacher, train_type=train_type, distillation_beta=beta))
    before, batch, other = policy.trainable(), batch_of(policy), load_model(teacher)[0]
    policy.model.train()
    loss, gradient = nn.value_and_grad(policy.model, lambda: plain_loss(policy.model, other, batch, beta))()
    learner = build_learner(policy, config, 1, **memory)
    held_out, metrics = learner.held_out_metrics(batch), learner.learn(batch)
    for value in (metrics["loss"], metrics["distillation/divergence"], held_out["distillation/divergence"]):
        assert value == pytest.approx(loss.item(), rel=2e-5)
    expected: Any = dict(tree_flatten(gradient))
    for name, x in policy.trainable().items():
        step = (before[name] - x) / config.learning_rate
        np.testing.assert_allclose(step, expected[name], atol=2e-5 * mx.abs(expected[name]).max().item() + 2e-6, rtol=0)


def test_a_weight_mixes_it_with_the_loss_of_grpo(model: Path, teacher: Path) -> None:
    shared = {"reward_functions": "r1_int", "beta": 0.0, "skip_zero_signal": False}
    losses: list[float] = []
    for mode in ({}, {"distillation_weight": 0.25}, {"train_mode": "grpo"}):
        policy = policy_of(config := distill_config_of(model, teacher, **shared | mode))
        losses.append(build_learner(policy, config, 1).learn(batch_of(policy))["loss"])
    alone, mixed, of_rewards = losses
    assert mixed == pytest.approx(0.25 * alone + 0.75 * of_rewards, rel=1e-5)


def test_the_teacher_s_logits_never_exist_at_once(tmp_path: Path) -> None:
    wide = {"layers": 1, "hidden": 32, "own": {"vocab_size": 20_000}}
    config = distill_config_of(
        tiny_model(tmp_path / "student", **wide), tiny_model(tmp_path / "teacher", seed=2, **wide)
    )
    policy = policy_of(config)
    completions = [Completion([5] * 90, [-5.0] * 90, "", "eos") for _ in range(9)]
    batch = pack([Group(Problem(0, "", [], [1, 2], ""), completions)], pad_id=policy.pad_id)
    learner = build_learner(policy, config, 1, chunk=16)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    learner.learn(batch)
    whole = 9 * 90 * 20_000 * 4
    assert mx.get_peak_memory() - before < 0.5 * whole


def test_without_rewards_there_is_no_term_to_correct(model: Path, teacher: Path) -> None:
    """A note says of each correction that it multiplies the policy term."""
    for settings, count in (({}, 0), ({"distillation_weight": 0.5, "reward_functions": ["r1_int"]}, 1)):
        config = distill_config_of(model, teacher, rollout_quantization="8", **settings)
        assert len(build_learner(policy_of(config), config, 1).algorithm.notes) == count


def run_settings(folder: Path, teacher: Path, **changes: Any) -> dict[str, Any]:
    raw = settings_for(folder, train_mode="distill", teacher_model=str(teacher), group_size=1, batch_size=2, **changes)
    raw |= {"validation_split": 0.25, "steps_per_eval": 2, "iters": 4, "learning_rate": 1e-2}
    return {key: value for key, value in raw.items() if not key.startswith("reward_")}


def test_a_run_without_rewards_comes_nearer_and_resumes_bit_by_bit(teacher: Path, tmp_path: Path) -> None:
    without_effect = {"sync_ref_model": True, "ref_model_sync_steps": 1}  # there is no reference
    raw = run_settings(tmp_path, teacher, teacher_quantization="4", **without_effect)
    whole = resumed_and_whole(raw, tmp_path, 2)
    metrics = [event["metrics"] for event in events(whole, "step", "eval")]
    assert not [name for each in metrics for name in each if name.startswith(("reward", "frac_", "kl"))]
    evaluations = [event["metrics"]["distillation/divergence"] for event in events(whole, "eval")]
    assert evaluations[-1] < evaluations[0]


def test_a_teacher_that_cannot_teach_is_named(teacher: Path, tmp_path: Path) -> None:
    raw = run_settings(tmp_path, teacher)
    other = tiny_model(tmp_path / "other", vocab=330)
    packed = tiny_model(tmp_path / "packed", hidden=64, bits=4)
    for changes, setting, sentence in (
        ({"teacher_model": ""}, "teacher_model", "needs a teacher"),
        ({"teacher_model": str(other)}, "teacher_model", "has other tokens than"),
        ({"teacher_model": str(packed), "teacher_quantization": "8"}, "teacher_quantization", "is quantised already"),
        ({"distillation_weight": 0.5, "group_size": 2}, "reward_functions", "learns from rewards"),
        ({"distillation_weight": 0.0}, "distillation_weight", "leaves the teacher out"),
        ({"train_mode": "grpo"}, "group_size", "at least 2"),
    ):
        assert any(p.setting == setting and sentence in p.sentence for p in check(raw | changes)), changes
