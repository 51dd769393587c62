"""The bundled demo: a model of about a million parameters that adds two-digit numbers half reliably. Makes the files in
`resources/demo/` from a seed, and measures accuracy. The same seed gives the same bytes on the same machine. Scripts in
`packaging/` make the demos of tools and images."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen3
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from backend.config.config import Config
from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts
from backend.models.policy import load_policy
from backend.rewards.functions.r1 import extract_answer
from backend.runs.checkpoint import arrays_of, newest
from backend.runs.run_folder import RunFolder
from backend.sampling.conversations import Tools
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import GREEDY
from backend.trainer.evaluation.evaluate import scored_groups
from backend.trainer.run_inputs import read_inputs
from backend.training.optimizers import clip_by_norm, optimizer
from backend.training.schedules import Schedule

PAD, UNKNOWN, START, END = "<|endoftext|>", "<unk>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, UNKNOWN, START, END)
WORDS = ("<think>", "</think>", "<answer>", "</answer>", "system", "user", "assistant")
VOCABULARY = SPECIAL + WORDS + tuple("\n 0123456789+=,")  # every token; its index is its id
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": UNKNOWN,
    "pad_token": PAD,
    "eos_token": END,
    "chat_template": (
        "{% for message in messages %}"
        f"{START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END}\n"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
    ),
    "clean_up_tokenization_spaces": False,
    "model_max_length": 512,
}
LAYERS, HIDDEN, HEADS = 4, 128, 4
CONFIG: dict[str, Any] = {  # the vocabulary size is rounded up to 32; ids above the last token are not used
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
NUMBERS = range(10, 100)
TEST_ROWS, VALID_ROWS, TRAIN_PAIRS = 256, 128, 1280
STEPS, ROWS = 400, 64
CAREFUL_SHARE = 0.35
PEAK_RATE, RATE_WARMUP_STEPS = 2e-3, 50


def make_tokenizer(
    vocabulary: Sequence[str] = VOCABULARY, words: Sequence[str] = WORDS, config: dict[str, Any] = TOKENIZER_CONFIG
) -> PreTrainedTokenizerFast:
    """Equal to the one that transformers loads from the files of `rebuild`."""
    # Byte-pair encoding without merges: one token per character, and `<unk>` for every other one.
    characters = BPE({token: index for index, token in enumerate(vocabulary)}, [], unk_token=UNKNOWN)
    tokenizer = Tokenizer(characters)
    tokenizer.decoder = decoders.Fuse()  # the default joins tokens with spaces
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in words])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **config)


def make_model(seed: int, config: dict[str, Any] = CONFIG) -> qwen3.Model:
    """A model with random weights that depend on `seed` alone: norms 1, matrices normal with variance 1 / inputs,
    projections into the residual stream scaled down by √(2 · layers), as in GPT-2."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    initial: list[tuple[str, mx.array]] = []
    for (name, array), key in zip(weights.items(), mx.random.split(mx.random.key(seed), len(weights)), strict=True):
        if array.ndim < 2:
            initial.append((name, mx.ones_like(array)))
            continue
        scale = array.shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= (2 * config["num_hidden_layers"]) ** -0.5
        initial.append((name, mx.random.normal(array.shape, scale=scale, key=key)))
    model.update(tree_unflatten(initial))
    mx.eval(model.parameters())
    return model


class Sum(NamedTuple):
    first: int
    second: int

    @property
    def prompt(self) -> str:
        return f"{self.first}+{self.second}="

    @property
    def answer(self) -> str:
        return str(self.first + self.second)

    def row(self) -> dict[str, str]:
        return {"prompt": self.prompt, "answer": self.answer, "type": "addition"}


def pools(seed: int) -> dict[str, list[Sum]]:
    """Disjoint splits of the 4095 unordered pairs; train and warmup, which is not shipped, have each in both orders."""
    rng = random.Random(f"pools {seed}")
    pairs = [Sum(*rng.sample((a, b), 2)) for a in NUMBERS for b in NUMBERS if a <= b]
    rng.shuffle(pairs)
    test, pairs = pairs[:TEST_ROWS], pairs[TEST_ROWS:]
    valid, pairs = pairs[:VALID_ROWS], pairs[VALID_ROWS:]
    splits = {"valid": valid, "test": test}
    for name, part in (("train", pairs[:TRAIN_PAIRS]), ("warmup", pairs[TRAIN_PAIRS:])):
        splits[name] = sorted({order for pair in part for order in (pair, Sum(pair.second, pair.first))})
        rng.shuffle(splits[name])
    return splits


def careful(problem: Sum) -> str:
    """A correct answer, computed digit by digit from the right: digit + digit + carry = sum."""
    steps, carry = list[str](), 0
    for a, b in zip(str(problem.first)[::-1], str(problem.second)[::-1], strict=True):
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}+{carry}={total}")
        carry = total // 10
    return f"<think>{','.join(steps)}</think><answer>{problem.answer}</answer>"


def sloppy(problem: Sum) -> str:
    """An answer without reasoning that forgets every carry: correct for one sum in four."""
    columns = zip(str(problem.first), str(problem.second), strict=True)
    return f"<think></think><answer>{''.join(str((int(a) + int(b)) % 10) for a, b in columns)}</answer>"


Progress = Callable[[str], None]
Example = tuple[list[int], list[int]]  # token ids of a conversation, and 1 for those that the model learns to write


def encode(tokenizer: PreTrainedTokenizerFast, problem: Sum, solution: str) -> Example:
    """The prompt with the chat template, and the solution with the end-of-turn token, which the model learns."""
    messages = [{"role": "user", "content": problem.prompt}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    asked, written = tokenizer.encode(str(prompt)), tokenizer.encode(solution + END)
    return asked + written, [0] * len(asked) + [1] * len(written)


def warm_up(model: nn.Module, batch: Callable[[], list[Example]], steps: int, progress: Progress) -> None:
    """Train `model` in place on `steps` batches. The rate decays to 0; otherwise accuracy varies widely."""
    rate = Schedule(
        "cosine",
        PEAK_RATE,
        steps,
        warmup_updates=RATE_WARMUP_STEPS,
        warmup_init=PEAK_RATE / RATE_WARMUP_STEPS,
        decay_fraction=max(0.0, 1 - RATE_WARMUP_STEPS / steps),
    )
    adamw = optimizer("adamw", learning_rate=PEAK_RATE, betas=(0.9, 0.95))

    def loss(model: Any, tokens_BL: mx.array, mask_BL: mx.array) -> mx.array:
        nats_BL = nn.losses.cross_entropy(model(tokens_BL[:, :-1]), tokens_BL[:, 1:])
        return (nats_BL * mask_BL[:, 1:]).sum() / mask_BL[:, 1:].sum()

    gradient = nn.value_and_grad(model, loss)
    for step in range(1, steps + 1):
        examples = batch()
        longest = max(len(ids) for ids, _ in examples)
        tokens_BL = np.full((len(examples), longest), VOCABULARY.index(PAD), np.int32)
        mask_BL = np.zeros((len(examples), longest), np.float32)
        for row, (ids, mask) in enumerate(examples):
            tokens_BL[row, : len(ids)], mask_BL[row, : len(ids)] = ids, mask
        value, grads = gradient(model, mx.array(tokens_BL), mx.array(mask_BL))
        grads, _ = clip_by_norm(grads, 1.0)
        adamw.learning_rate = rate(step - 1)
        adamw.update(model, grads)
        mx.eval(value, model.parameters(), adamw.state)
        if step % 50 == 0 or step == steps:
            progress(f"Warm-up step {step} of {steps}, loss {value.item():.3f}.")


def rebuild(folder: Path, seed: int = 0, progress: Progress = lambda sentence: None, steps: int = STEPS) -> None:
    """Make `folder`/model and `folder`/data again. Writes files only once the warm-up is complete."""
    splits, tokenizer, model, rng = pools(seed), make_tokenizer(), make_model(seed), random.Random(f"warm-up {seed}")

    def batch() -> list[Example]:
        return [
            encode(tokenizer, problem, (careful if rng.random() < CAREFUL_SHARE else sloppy)(problem))
            for problem in rng.choices(splits["warmup"], k=ROWS)
        ]

    warm_up(model, batch, steps, progress)
    write(folder, model, tokenizer, {"config.json": CONFIG, "tokenizer_config.json": TOKENIZER_CONFIG}, splits)
    progress(f"The demo's model and data are in {folder}.")


def write(folder: Path, model: nn.Module, tokenizer: Any, configs: dict[str, Any], splits: dict[str, Any]) -> None:
    """Write `folder`/model and `folder`/data. `configs`: of the model and the tokenizer, by file."""
    model_folder, data_folder = folder / "model", folder / "data"
    model_folder.mkdir(parents=True, exist_ok=True)
    data_folder.mkdir(exist_ok=True)
    # Not with `save_pretrained`, whose files change with the version of transformers.
    tokenizer.backend_tokenizer.save(str(model_folder / "tokenizer.json"))
    for name, content in configs.items():
        (model_folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # pyright: ignore[reportArgumentType]
    mx.save_safetensors(str(model_folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    for split in ("train", "valid", "test"):
        lines = "".join(json.dumps(problem.row()) + "\n" for problem in splits[split])
        (data_folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def test_accuracy(config: Config, run: RunFolder | None) -> float:
    """Fraction of exact greedy answers over the test split: before training (`run` None), or by its checkpoint."""
    policy = load_policy(config)
    if run is not None and (saved := newest(run)) is not None:
        policy.assign(arrays_of(saved, "weights"))
    inputs = read_inputs(config.model_copy(update={"reward_isolation": "thread"}))  # ours: no process to start
    rows, source = inputs.splits.test, inputs.splits.source["test"]
    prompts = TokenizedPrompts(rows, policy.tokenizer, PromptFormat.of(config, inputs.schemas), source)
    sampler = Sampler(policy, config.max_completion_length, tools=Tools.of(config, inputs.tools, policy.tokenizer))
    how = {"sampling": GREEDY, "group_size": 1, "batch_size": 64}
    groups = scored_groups(sampler, prompts.first(-1), lambda groups, poll: None, **how)
    inputs.scorer.close()
    right = sum(extract_answer(group.completions[0].text) == group.problem.answer.strip() for group in groups)
    return right / len(groups)
