"""Supervised fine-tuning learns what mlx-lm's trainer and TRL's SFTTrainer learn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
import pytest
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from backend.config.config import Config, parse
from backend.data.labels import labelled_group, tokenized
from backend.data.problems import PromptFormat
from backend.models.policy import load_policy
from backend.training.batch import pack
from backend.training.sft import sft_learner
from backend.types import Group, Label, Problem
from tests.support.random_models import tiny_model
from tests.support.small_settings import SMALL_LORA

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
    config = config_of(model)
    policy = load_policy(config)
    rows = [labels(0)[i] for i in (0, 2, 3)]  # of one span
    tokens, _ = padded(rows)
    # To the last token: mlx-lm counts one token of padding behind each row too.
    spans = mx.array([[row.mask.index(1), len(row.tokens) - 1] for row in rows])
    expected, count = default_loss(policy.model, tokens, spans)
    batch = pack(groups_of(rows), pad_id=policy.pad_id)
    held_out = sft_learner(policy, config, 1).held_out_metrics(batch)
    assert int(count) == 9 + 3 + 12
    assert held_out["loss"] == pytest.approx(float(expected), abs=1e-5)
    assert held_out["loss_stderr"] > 0
    assert sft_learner(policy, config, 1).learn(batch)["loss"] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("memory", [{}, {"micro_batch_tokens": 16, "chunk": 5, "recompute": True}])
def test_ten_steps_end_with_mlx_lm_s_adapters(model: Path, memory: dict[str, Any], tmp_path: Path) -> None:
    config, data = config_of(model), [labels(seed) for seed in range(STEPS)]
    policy = load_policy(config)
    start = {name: mx.array(x) for name, x in policy.trainable().items()}
    theirs = mlx_lm.load(str(model))[0]
    theirs.freeze()
    linear_to_lora_layers(theirs, config.num_layers, {"rank": config.rank, "scale": config.scale, "dropout": 0.0})
    theirs.load_weights([*start.items()], strict=False)
    learner = sft_learner(policy, config, STEPS, **memory)
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
    learner = sft_learner(policy, config, 3)
    batch = pack([*map(labelled_group, problems)], pad_id=policy.pad_id)
    losses = [learner.learn(batch)["loss"] for _ in range(3)]
    assert losses[0] == pytest.approx(TRL_LOSSES[mask_prompt][0], abs=1e-5)
    assert losses == pytest.approx(TRL_LOSSES[mask_prompt], abs=1e-4)
