"""Supervised warm-up on a mixture of careful and sloppy answers, so that GRPO has something to prefer.

The model learns both ways of answering and mostly answers sloppily. Which of the two is better it learns from the rewards
of the demo's run.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3
from transformers import PreTrainedTokenizerFast

from backend.demo.char_tokenizer import END
from backend.demo.sums import Sum, careful, sloppy
from backend.training.optimizers import clip_by_norm, optimizer
from backend.training.schedules import schedule

STEPS, ROWS = 400, 64
CAREFUL_SHARE = 0.35
PEAK_RATE, RATE_WARMUP_STEPS = 2e-3, 50


def train(
    model: qwen3.Model,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Sum],
    seed: int,
    steps: int = STEPS,
    progress: Callable[[str], None] = lambda sentence: None,
) -> None:
    """Train `model` in place on `steps` random batches of `problems`; the same arguments give the same weights.

    The learning rate decays to 0: without that, accuracy varies widely from one step to the next.
    """
    rng = random.Random(f"warm-up {seed}")
    decay = max(0.0, 1 - RATE_WARMUP_STEPS / steps)
    rate = schedule(
        "cosine", PEAK_RATE, steps, warmup_updates=RATE_WARMUP_STEPS, warmup_init=PEAK_RATE / RATE_WARMUP_STEPS,
        decay_fraction=decay,
    )  # fmt: skip
    adamw = optimizer("adamw", learning_rate=PEAK_RATE, betas=(0.9, 0.95))
    gradient = nn.value_and_grad(model, loss)
    for step in range(1, steps + 1):
        value, grads = gradient(model, *batch(tokenizer, problems, rng))
        grads, _ = clip_by_norm(grads, 1.0)
        adamw.learning_rate = rate(step - 1)
        adamw.update(model, grads)
        mx.eval(value, model.parameters(), adamw.state)
        if step % 50 == 0 or step == steps:
            progress(f"Warm-up step {step} of {steps}, loss {value.item():.3f}.")


def batch(tokenizer: PreTrainedTokenizerFast, problems: list[Sum], rng: random.Random) -> tuple[mx.array, mx.array]:
    """(tokens_BL, mask_BL): `ROWS` answered problems, padded on the right; the mask is 1 on the answer's tokens."""
    pairs = [encode(tokenizer, problem, _solution(problem, rng)) for problem in rng.choices(problems, k=ROWS)]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens_BL = np.full((ROWS, longest), tokenizer.pad_token_id, np.int32)
    mask_BL = np.zeros((ROWS, longest), np.float32)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens_BL[row, :end] = prompt + answer
        mask_BL[row, len(prompt) : end] = 1
    return mx.array(tokens_BL), mx.array(mask_BL)


def encode(tokenizer: PreTrainedTokenizerFast, problem: Sum, solution: str) -> tuple[list[int], list[int]]:
    """(ids of the prompt with the chat template applied, ids of the solution with the end-of-turn token)."""
    messages = [{"role": "user", "content": problem.prompt}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(str(prompt)), tokenizer.encode(solution + END)


def loss(model: qwen3.Model, tokens_BL: mx.array, mask_BL: mx.array) -> mx.array:
    """Mean cross-entropy of the masked tokens, in nats."""
    nats_BL = nn.losses.cross_entropy(model(tokens_BL[:, :-1]), tokens_BL[:, 1:])
    return (nats_BL * mask_BL[:, 1:]).sum() / mask_BL[:, 1:].sum()


def _solution(problem: Sum, rng: random.Random) -> str:
    return careful(problem) if rng.random() < CAREFUL_SHARE else sloppy(problem)
