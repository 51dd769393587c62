"""Prompts with pictures: log-probabilities, metrics and gradients against mlx-vlm's full forward pass and TRL."""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from backend.config.config import parse
from backend.models.policy import Policy, load_policy
from backend.sampling.cached_sequence import CachedSequence
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.training.advantages import advantages
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.training.policy_forward import PolicyForward
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from tests.support.small_settings import PLAIN_SGD, SMALL_LORA
from tests.support.vision_models import FAMILIES, IMAGE_TOKEN, LAYERS, chat, picture, tiny_vision_model

TRL: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "vision_grpo.json").read_text())
TOKENS, G = 4, 2
CLOSE = 1e-4  # nats
QUICK = [pytest.param(family, marks=() if family == "qwen3_vl" else pytest.mark.proof) for family in FAMILIES]
"""Where equality with mlx-vlm already says as much."""
FREE = Sampling()


class MlxVlm:
    """A model folder as mlx-vlm loads it, with its own processor and full forward pass."""

    def __init__(self, folder: Path) -> None:
        from mlx_vlm.utils import load_model, load_processor  # 2 s

        self.model: Any = load_model(folder)
        self.processor: Any = load_processor(folder, True, eos_token_ids=1)
        if hasattr(self.model.config, "pad_token_id"):
            self.model.config.pad_token_id = -1  # else gemma3 embeds a sampled padding token as 0
        self.prompts: dict[str, tuple[list[int], dict[str, mx.array]]] = {}

    def prompt(self, messages: list[dict[str, Any]]) -> tuple[list[int], dict[str, mx.array]]:
        """Ids with the image tokens expanded, and the model's other inputs, of one chat."""
        from mlx_vlm.utils import prepare_inputs

        if (key := str(messages)) not in self.prompts:
            images = [part["image"] for message in messages for part in message["content"] if "image" in part]
            text = self.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            inputs = dict(prepare_inputs(self.processor, images=images, prompts=text))
            del inputs["attention_mask"]
            self.prompts[key] = inputs.pop("input_ids")[0].tolist(), inputs
        return self.prompts[key]

    def logps(self, messages: list[dict[str, Any]], completion: Sequence[int]) -> np.ndarray:
        """log π of the completion's tokens in one pass over prompt and completion. Without padding: mlx-vlm's Qwen3-VL
        lets tokens see padding on the left, and its own log-probabilities move by 1 nat."""
        return np.take_along_axis(self.all_logps(messages, completion), np.array(completion)[:, None], 1)[:, 0]

    def all_logps(self, messages: list[dict[str, Any]], completion: Sequence[int]) -> np.ndarray:
        """log π [T, V] of every token in place of the completion's."""
        ids, inputs = self.prompt(messages)
        tokens: Any = mx.array([ids + list(completion)])
        found = self.model.get_input_embeddings(tokens, mask=mx.ones_like(tokens), **inputs).to_dict()
        # In gemma3's own mask every token sees every other; without it mlx-vlm's pass is causal, as in decoding.
        found.pop("attention_mask_4d", None)
        logits = self.model.language_model(tokens, **found).logits[0].astype(mx.float32)[len(ids) - 1 : -1]
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@dataclass
class Case:
    """A tiny model as we open it and as mlx-vlm does."""

    policy: Policy
    reference: MlxVlm
    chats: list[list[dict[str, Any]]]
    sampler: Sampler

    def problem(self, which: int, index: int) -> Problem:
        messages = self.chats[which]
        ids = self.policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return Problem(index, "", messages, ids, "")

    def sampled(self, *chats: int) -> list[Group]:
        """Groups of these prompts sampled together; the completions of a prompt depend on its place alone."""
        problems = [self.problem(which, index) for index, which in enumerate(chats)]
        return self.sampler.sample(problems, G, FREE, 7, 0)

    def gap(self, which: int, completion: Completion) -> float:
        """Most nats between the log-probabilities of sampling and mlx-vlm's."""
        return np.abs(self.reference.logps(self.chats[which], completion.tokens) - np.array(completion.logps)).max()


A, B, BOTH, TEXT = range(4)


@pytest.fixture(scope="module")
def opened(models: Path) -> Callable[..., Case]:
    """Opens a family, once."""
    cases: dict[str, Case] = {}
    large, small = picture(models / "large.png", 64, 48, 1), picture(models / "small.png", 32, 64, 2)
    # Prompts and pictures of unequal sizes.
    chats = [chat("What is it?", large), chat("How many boxes are in it?", small)]
    chats += [chat("Add them.", small, large), chat("What is 3 and 4?")]

    def opened(family: str, **made: Any) -> Case:
        key = json.dumps([family, made])
        if key not in cases:
            folder = tiny_vision_model(models / f"{len(cases)}", family, **made)
            policy = load_policy(parse(SMALL_LORA | {"model": str(folder), "data": "none", "beta": 0.05}))
            policy.eos_ids = [-1]
            cases[key] = Case(policy, MlxVlm(folder), chats, Sampler(policy, TOKENS))
        return cases[key]

    return opened


def learned_logps(case: Case, groups: list[Group], mode: str) -> list[np.ndarray]:
    """log π of each completion by the passes of training; a prompt is read once in all, in each micro-batch or row."""
    forward = PolicyForward(1.0, 64, 100, whole_rows=mode == "whole rows", has_dropout=mode == "each micro-batch")
    case.policy.model.eval()
    split_model = case.policy.split_model
    parts = forward.micro_batches(split_model, pack(groups, pad_id=case.policy.pad_id))
    rows: dict[int, np.ndarray] = {}
    for part, logp_BT in zip(parts, forward.logps_without_gradient(split_model, parts), strict=True):
        index: Any = part.batch.row_B.tolist()
        rows |= dict(zip(index, np.array(logp_BT), strict=True))
    return [rows[row] for row in sorted(rows)]


def test_a_prompt_that_ends_with_a_picture_is_refused(opened: Callable[..., Case]) -> None:
    case = opened("qwen3_vl")
    problem = case.problem(A, 4)
    last = problem.tokens.index(IMAGE_TOKEN) + problem.tokens.count(IMAGE_TOKEN)
    with pytest.raises(UserError, match=r"row 5 ends with a picture: text must follow it"):
        case.sampler.sample([replace(problem, tokens=problem.tokens[:last])], G, FREE, 7, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_mlx_vlms(opened: Callable[..., Case], family: str) -> None:
    """Of prompts padded on the left in sampling and on the right in learning, a picture's prompt twice, and text."""
    case, order = opened(family), (A, BOTH, A, TEXT)
    groups = case.sampled(*order)
    rows = [(which, each) for which, group in zip(order, groups, strict=True) for each in group.completions]
    expected = [case.reference.logps(case.chats[which], each.tokens) for which, each in rows]
    np.testing.assert_allclose([each.logps for _, each in rows], expected, atol=CLOSE)
    for mode in ("once", "each micro-batch", "whole rows"):
        np.testing.assert_allclose(learned_logps(case, groups, mode), expected, atol=CLOSE, err_msg=mode)
    assert case.gap(B, rows[0][1]) > 100 * CLOSE, "another picture, another answer"


@pytest.mark.parametrize("family", QUICK)
def test_prompts_in_turns_are_sampled_as_alone(opened: Callable[..., Case], family: str) -> None:
    """No state of a prompt is left on the model: B between A and A changes neither."""
    case = opened(family)
    together = case.sampled(A, B, A)
    for place, which in enumerate((A, B, A)):
        (alone,) = case.sampler.sample([case.problem(which, place)], G, FREE, 7, place)
        for one, other in zip(alone.completions, together[place].completions, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logps, other.logps, atol=CLOSE)


@pytest.mark.parametrize("family", QUICK)
def test_the_first_update_has_ratio_1_and_no_divergence(opened: Callable[..., Case], family: str) -> None:
    case = opened(family)
    groups = case.sampled(A, B, TEXT)
    for group in groups:
        for sign, completion in zip((1.0, -1.0), group.completions, strict=True):
            completion.advantage = sign
    before = dict(tree_flatten(case.policy.model.trainable_parameters()))
    settings = SMALL_LORA | {"model": "none", "data": "none", "beta": 0.05, "batch_size": 3, "group_size": G}
    settings |= {"temperature": 1.0, "epsilon": 1e-4}
    learner = build_learner(case.policy, parse(settings), 1)
    metrics = learner.learn(pack(groups, pad_id=case.policy.pad_id))
    assert abs(metrics["kl"]) < 1e-6
    assert metrics["clip_ratio_total"] == 0
    assert metrics["sampling/logp_gap/mean"] < CLOSE
    assert abs(metrics["loss"]) < 1e-5 and metrics["grad_norm"] > 1e-3
    case.policy.model.update(tree_unflatten(list(before.items())))


def test_a_quantised_model_reads_a_long_prompt_in_pieces(opened: Callable[..., Case]) -> None:
    """A piece may end within a picture."""
    case = opened("qwen3_vl", bits=4)
    case.sampler.prefill_chunk = 7
    for which, group in zip((A, BOTH), case.sampled(A, BOTH), strict=True):
        assert all(case.gap(which, each) < CLOSE for each in group.completions)


def test_rows_that_end_leave_the_others_their_positions(opened: Callable[..., Case]) -> None:
    """Two rows are decoded at a time, and ended ones make room, so rows with other shifts come together."""
    case = opened("qwen3_vl")
    ends = copy.copy(case.policy)
    ends.eos_ids = list(range(1, 100))
    order = (A, TEXT, BOTH)
    problems = [case.problem(which, index) for index, which in enumerate(order)]
    groups = Sampler(ends, 8, rows=2).sample(problems, 3, FREE, 3, 0)
    assert len({len(each.tokens) for group in groups for each in group.completions}) > 3
    gaps = [case.gap(which, each) for which, group in zip(order, groups, strict=True) for each in group.completions]
    assert max(gaps) < CLOSE


@pytest.mark.parametrize("family", QUICK)
def test_a_chat_sees_pictures_too(opened: Callable[..., Case], family: str) -> None:
    """One sequence after another in a cache; a token that stands for a picture is not sampled where it would be."""
    case = opened(family)
    sequence, next_token = CachedSequence(case.policy.model, case.policy.split_model), {}
    for which in (A, BOTH, TEXT, A):
        problem = case.problem(which, 0)
        mass = np.exp(case.reference.all_logps(case.chats[which], [5])[0])
        uniform_T = np.full(4, mass[:IMAGE_TOKEN].sum() + mass[IMAGE_TOKEN] / 2, np.float32)
        images = case.policy.images_of([problem])[0]
        found = list(sequence.generate(problem.tokens, FREE, uniform_T, images=images))
        tokens = [each.token for each in found]
        assert (tokens[0] == IMAGE_TOKEN) == (which == TEXT)
        logps = case.reference.logps(case.chats[which], tokens) if which != TEXT else [each.logp for each in found]
        np.testing.assert_allclose([each.logp for each in found], logps, atol=CLOSE)
        assert next_token.setdefault(which, tokens) == tokens


RANK, SCALE, BETA, TEMPERATURE = 2, 4.0, 0.04, 0.9
"""Of the batch whose numbers TRL 1.16's own trainer made (tests/support/trl_vision.py of commit 35de9688)."""
SHAPES = {
    "q": (32, 32),
    "k": (32, 16),
    "v": (32, 16),
    "o": (32, 32),
    "gate": (32, 64),
    "up": (32, 64),
    "down": (64, 32),
}


REWARDS = [[1.0, 0.25, 0.0], [0.5, 0.75, 0.125]]


def adapters() -> dict[str, np.ndarray]:
    """Random values of the adapters, B too, by the names that LoRA has here: `model.layers.0.….lora_a` [in, r]."""
    draw, found = np.random.default_rng(4), {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in SHAPES.items():
            part = "mlp" if name in ("gate", "up", "down") else "self_attn"
            path = f"model.layers.{layer}.{part}.{name}_proj"
            found[f"{path}.lora_a"] = 0.1 * draw.normal(size=(inputs, RANK)).astype(np.float32)
            found[f"{path}.lora_b"] = 0.1 * draw.normal(size=(RANK, outputs)).astype(np.float32)
    return found


def name_in_peft(name: str) -> str:
    """Ours → PEFT's, whose arrays are transposed."""
    path = name.removeprefix("model.").replace("lora_a", "lora_A.weight").replace("lora_b", "lora_B.weight")
    return f"base_model.model.model.language_model.{path}"


def groups_of(policy: Policy, folder: Path) -> list[Group]:
    """The batch of TRL's numbers: prompts and pictures of unequal sizes; some completions end, some are cut."""
    first, second = picture(folder / "a.png", 64, 48, 1), picture(folder / "b.png", 32, 64, 2)
    chats = [chat("What is it?", first), chat("How many boxes are in it? Add the digits.", second)]
    draw = np.random.default_rng(3)
    rows = [[draw.integers(3, 288, draw.integers(2, 9)).tolist() for _ in of_prompt] for of_prompt in REWARDS]
    for row in (rows[0][0], rows[1][2]):
        row.append(1)
    values, _ = advantages(np.array(REWARDS).reshape(-1, 1), len(REWARDS[0]), scale_rewards="group")
    each = iter(values.tolist())  # pyright: ignore[reportArgumentType]
    groups = []
    for i, (messages, of_prompt) in enumerate(zip(chats, rows, strict=True)):
        ids = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        problem = Problem(i, "", messages, ids, "")
        completions = [Completion(row, [0.0] * len(row), "", "eos", advantage=next(each)) for row in of_prompt]
        groups.append(Group(problem, completions, policy.images_of([problem])[0]))
    return groups


@pytest.mark.parametrize("budget", [30, 4096], ids=["many micro-batches", "one"])
def test_a_batch_learns_as_in_trl(tmp_path: Path, budget: int) -> None:
    """Advantages, log-probabilities, loss and gradient of TRL 1.16 on the same Qwen3-VL in transformers."""
    folder = tiny_vision_model(tmp_path / "model")
    loss = {"beta": BETA, "temperature": TEMPERATURE, "epsilon": 0.2, "num_layers": -1}
    sizes = {"batch_size": 2, "group_size": len(REWARDS[0]), "max_completion_length": 10, "dropout": 0.0}
    lora = {"rank": RANK, "scale": SCALE, "sampling_correction": "none"}
    config = parse({"model": str(folder), "data": "none", "learning_rate": 1.0} | loss | sizes | lora | PLAIN_SGD)
    policy = load_policy(config)
    names = {
        name.removeprefix("language_model."): name for name, _ in tree_flatten(policy.model.trainable_parameters())
    }
    before = {names[name]: mx.array(x) for name, x in adapters().items()}
    policy.model.update(tree_unflatten(list(before.items())))
    groups = groups_of(policy, tmp_path)
    completions = [completion for group in groups for completion in group.completions]
    np.testing.assert_allclose([completion.advantage for completion in completions], TRL["advantages"], atol=2e-4)

    learner = build_learner(policy, config, 1, micro_batch_tokens=budget)
    metrics = learner.learn(pack(groups, pad_id=policy.pad_id))
    np.testing.assert_allclose(metrics["loss"], TRL["loss"], atol=2e-4)
    after = dict(tree_flatten(policy.model.trainable_parameters()))
    for name, expected in TRL["gradient"].items():
        ours = next(names[own] for own in adapters() if name_in_peft(own) == name)
        np.testing.assert_allclose(np.array(before[ours] - after[ours]).T, expected, atol=2e-4, err_msg=name)
