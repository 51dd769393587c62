"""Makes the files in `resources/demo/` from a seed: tokenizer, warmed-up model and dataset.

The same seed gives the same bytes on the same machine. Another BLAS rounds differently: the weights differ then,
tokenizer and dataset do not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen3
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from backend.training.optimizers import clip_by_norm, optimizer
from backend.training.schedules import schedule

PAD, UNKNOWN, START, END = "<|endoftext|>", "<unk>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, UNKNOWN, START, END)
WORDS = ("<think>", "</think>", "<answer>", "</answer>", "system", "user", "assistant")
CHARACTERS = tuple("\n 0123456789+=,")
VOCABULARY = SPECIAL + WORDS + CHARACTERS
"""Every token; its index is its id."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)


SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": UNKNOWN,
    "pad_token": PAD,
    "eos_token": END,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 512,
}
"""tokenizer_config.json."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, equal to what transformers loads from the files that `save` writes."""
    # Byte-pair encoding without merges: one token per character, and `<unk>` for every other one.
    characters = BPE({token: index for index, token in enumerate(VOCABULARY)}, [], unk_token=UNKNOWN)
    tokenizer = Tokenizer(characters)
    tokenizer.decoder = decoders.Fuse()  # the default joins tokens with spaces
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in WORDS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SETTINGS)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Not with `save_pretrained`: which files it writes, and what is in
    them, changes with the version of transformers."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS, indent=2) + "\n", encoding="utf-8")


LAYERS, HIDDEN, HEADS = 4, 128, 4

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 416,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": VOCABULARY.index(END),
    "pad_token_id": VOCABULARY.index(PAD),
}
"""config.json. The vocabulary size is rounded up to 32; ids above the last token are not used."""


def make_model(seed: int) -> qwen3.Model:
    """A model with random weights that depend on `seed` alone, not on mlx's global random state."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    weights = parameters(model)
    keys = mx.random.split(mx.random.key(seed), len(weights))
    initial = [(name, _initial(name, array, key)) for (name, array), key in zip(weights.items(), keys, strict=True)]
    model.update(tree_unflatten(initial))
    mx.eval(model.parameters())
    return model


def save_model(model: qwen3.Model, folder: Path) -> None:
    """Write config.json and model.safetensors into `folder`."""
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), parameters(model), metadata={"format": "mlx"})


def parameters(model: qwen3.Model) -> dict[str, mx.array]:
    """Every weight by its dotted name."""
    return dict(tree_flatten(model.parameters()))  # pyright: ignore[reportArgumentType]


def _initial(name: str, array: mx.array, key: mx.array) -> mx.array:
    """Norms start at 1, matrices normal with variance 1 / inputs; projections into the residual stream are scaled down
    by √(2 · layers), as in GPT-2."""
    if array.ndim < 2:
        return mx.ones_like(array)
    scale = array.shape[-1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        scale *= (2 * LAYERS) ** -0.5
    return mx.random.normal(array.shape, scale=scale, key=key)


NUMBERS = range(10, 100)
TEST_ROWS, VALID_ROWS, TRAIN_PAIRS = 256, 128, 1280


@dataclass(frozen=True, slots=True)
class Sum:
    first: int
    second: int

    @property
    def prompt(self) -> str:
        return f"{self.first}+{self.second}="

    @property
    def answer(self) -> str:
        return str(self.first + self.second)

    @property
    def mirrored(self) -> Sum:
        return Sum(self.second, self.first)

    def row(self) -> dict[str, str]:
        """The problem as a row of a dataset."""
        return {"prompt": self.prompt, "answer": self.answer, "type": "addition"}


@dataclass(frozen=True, slots=True)
class Pools:
    """Disjoint splits of the sums of two numbers from 10 to 99. `warmup` is not part of the dataset."""

    warmup: list[Sum]
    train: list[Sum]
    valid: list[Sum]
    test: list[Sum]


def pools(seed: int) -> Pools:
    """Split the 4095 unordered pairs at random; valid and test have each pair in one order, train and warmup in
    both."""
    rng = random.Random(f"pools {seed}")
    pairs = [Sum(*rng.sample((a, b), 2)) for a in NUMBERS for b in NUMBERS if a <= b]
    rng.shuffle(pairs)
    test, pairs = pairs[:TEST_ROWS], pairs[TEST_ROWS:]
    valid, pairs = pairs[:VALID_ROWS], pairs[VALID_ROWS:]
    train, warmup = (_both_orders(part, rng) for part in (pairs[:TRAIN_PAIRS], pairs[TRAIN_PAIRS:]))
    return Pools(warmup, train, valid, test)


def careful(problem: Sum) -> str:
    """A correct answer, computed digit by digit from the right: digit + digit + carry = sum."""
    first, second = (str(number)[::-1] for number in (problem.first, problem.second))
    steps, carry = [], 0
    for a, b in zip(first, second, strict=True):
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}+{carry}={total}")
        carry = total // 10
    return _tagged(",".join(steps), problem.answer)


def sloppy(problem: Sum) -> str:
    """An answer without reasoning that forgets every carry: correct for one sum in four."""
    columns = zip(str(problem.first), str(problem.second), strict=True)
    return _tagged("", "".join(str((int(a) + int(b)) % 10) for a, b in columns))


def _tagged(reasoning: str, answer: str) -> str:
    return f"<think>{reasoning}</think><answer>{answer}</answer>"


def _both_orders(pairs: list[Sum], rng: random.Random) -> list[Sum]:
    rows = sorted(
        {order for pair in pairs for order in (pair, pair.mirrored)},
        key=lambda problem: (problem.first, problem.second),
    )
    rng.shuffle(rows)
    return rows


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
        "cosine",
        PEAK_RATE,
        steps,
        warmup_updates=RATE_WARMUP_STEPS,
        warmup_init=PEAK_RATE / RATE_WARMUP_STEPS,
        decay_fraction=decay,
    )
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


def rebuild(
    folder: Path,
    seed: int = 0,
    progress: Callable[[str], None] = lambda sentence: None,
    steps: int = STEPS,
) -> None:
    """Make `folder`/model and `folder`/data again, over files of the same names.

    `progress` is called with a sentence every 50 steps. Files are written only once the warm-up is complete.
    """
    dataset = pools(seed)
    tokenizer = make_tokenizer()
    model = make_model(seed)
    train(model, tokenizer, dataset.warmup, seed, steps, progress)
    for name in ("model", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder / "model")
    save_model(model, folder / "model")
    for split in ("train", "valid", "test"):
        _write_rows(folder / "data" / f"{split}.jsonl", getattr(dataset, split))
    progress(f"The demo's model and data are in {folder}.")


def _write_rows(path: Path, problems: list[Sum]) -> None:
    path.write_text("".join(json.dumps(problem.row()) + "\n" for problem in problems), encoding="utf-8")
