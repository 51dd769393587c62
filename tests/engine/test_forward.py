"""Log-probabilities without the whole vocabulary at once and with each prompt read once: equal to the plain way, in value and
in every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models import cohere, gemma2

from backend.engine import model_probe
from backend.engine.forward import completion_logps, sequence_rows
from backend.engine.gradient_checkpointing import gradient_checkpointing
from backend.engine.lm_head import TokenScores, token_logps
from backend.engine.model_probe import split
from backend.engine.split_model import SplitModel
from backend.models.policy import Policy, load_policy
from backend.spec.config import parse
from backend.spec.memory.chunking import SMALLEST_CHUNK, head_chunk
from tests.support import random_models


@dataclass(frozen=True)
class Layout:
    """Tokens of each prompt; which prompt each row has; tokens of each row's completion."""

    prompts: list[int]
    prompt_of: list[int]
    completions: list[int]


UNEVEN = Layout([3, 7, 1], [0, 0, 1, 2, 2], [6, 2, 9, 1, 4])
EVEN = Layout([5, 5], [0, 0, 1, 1], [6, 2, 9, 1])
LAYOUTS = {
    "uneven": UNEVEN,
    "even": EVEN,
    "alone": Layout([4], [0], [5]),
    "one token": Layout([4, 2], [0, 0, 1], [1] * 3),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model_of(models: Path, arch: str = "qwen3", **how: Any) -> nn.Module:
    """The same model at every call, so that a test may change it."""
    folder = models / "-".join([arch, *(f"{key}={value}" for key, value in how.items())])
    if not folder.exists():
        random_models.tiny_model(folder, arch, **how)
    return load(str(folder))[0]


class Case:
    """A batch padded on the right, as `completion_logps` takes it."""

    def __init__(self, layout: Layout = UNEVEN, pad: int = 0) -> None:
        rng = np.random.default_rng(0)
        self.layout = layout
        shared = [rng.integers(3, 320, n).tolist() for n in layout.prompts]
        self.prompts = [shared[p] for p in layout.prompt_of]
        self.completions = [rng.integers(3, 320, n).tolist() for n in layout.completions]
        both = [p + c for p, c in zip(self.prompts, self.completions, strict=True)]
        L, self.T = max(map(len, both)), max(layout.completions)
        self.tokens_BL = mx.array([row + [pad] * (L - len(row)) for row in both])
        self.completion_BT = mx.array([row + [pad] * (self.T - len(row)) for row in self.completions])
        self.mask_BT = np.array([[t < n for t in range(self.T)] for n in layout.completions])
        lengths, groups = mx.array([len(p) for p in self.prompts]), mx.array(layout.prompt_of) * 3 + 2
        self.rows = sequence_rows(self.tokens_BL, lengths, groups, self.completion_BT, mx.array(self.mask_BT))

    def logps(
        self, split_model: SplitModel, temperature: float = 1.0, chunk: int | None = None, **how: Any
    ) -> TokenScores:
        return completion_logps(split_model, self.rows, temperature, chunk, **how)

    def plain(self, model: nn.Module, temperature: float) -> tuple[mx.array, mx.array]:
        """The same by the definition: each row alone, the full vocabulary, log-softmax, gather; padded with 0."""
        logps, entropies = [], []
        for prompt, completion in zip(self.prompts, self.completions, strict=True):
            logits = model(mx.array([prompt + completion]))[0, len(prompt) - 1 : -1].astype(mx.float32) / temperature
            all_logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            room = [(0, self.T - len(completion))]
            logps.append(mx.pad(all_logps[mx.arange(len(completion)), mx.array(completion)], room))
            entropies.append(mx.pad(-(mx.exp(all_logps) * all_logps).sum(-1), room))
        return mx.stack(logps), mx.stack(entropies)


def gradients(model: nn.Module, logps: Callable[[], mx.array]) -> tuple[float, dict[str, np.ndarray]]:
    """A loss in which every token has its own weight, and its gradient for every weight that learns."""

    def loss() -> mx.array:
        logp_BT = logps()
        return (mx.array(np.random.default_rng(1).normal(size=logp_BT.shape), mx.float32) * logp_BT).sum()

    value, grads = nn.value_and_grad(model, loss)()
    return value.item(), {name: np.array(grad) for name, grad in tree_flatten(grads)}


def assert_same(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray], rtol: float = 1e-5) -> None:
    """Differences are held against the largest slope of each array: single entries may be as good as 0."""
    assert mine.keys() == theirs.keys()
    assert any(np.abs(grad).max() > 1e-2 for grad in theirs.values())
    for name, grad in theirs.items():
        np.testing.assert_allclose(mine[name], grad, atol=rtol * np.abs(grad).max() + 1e-6, rtol=0, err_msg=name)


# ---- log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.8])
@pytest.mark.parametrize("chunk", [None, 1, 5, 1000], ids=lambda chunk: f"chunk {chunk}")
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_and_entropies_are_the_plain_ones(
    models: Path, layout: str, tie: bool, chunk: int | None, temperature: float
) -> None:
    model, case = model_of(models, tie=tie), Case(LAYOUTS[layout])
    for mine, plain in zip(case.logps(split(model), temperature, chunk), case.plain(model, temperature), strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(plain), atol=1e-5)
        assert not np.array(mine)[~case.mask_BT].any(), "inactive tokens read 0"


@pytest.mark.parametrize("chunk", [None, 5], ids=["at once", "in chunks"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_gets_the_plain_gradient_the_head_too(
    models: Path, layout: str, tie: bool, chunk: int | None
) -> None:
    """In chunks, the head was once closed over by the checkpointed function: no gradient reached it, and full fine-tuning
    of any model with a real vocabulary never moved its output layer."""
    model, case = model_of(models, tie=tie), Case(LAYOUTS[layout])
    model.unfreeze()
    split_model = split(model)
    loss, mine = gradients(model, lambda: case.logps(split_model, 0.7, chunk)[0])
    plain_loss, plain = gradients(model, lambda: case.plain(model, 0.7)[0])
    assert loss == pytest.approx(plain_loss, abs=1e-4)
    assert_same(mine, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_get_the_plain_gradient(models: Path, layout: str) -> None:
    model_of(models)
    policy, case = lora(models), Case(LAYOUTS[layout])
    _, mine = gradients(policy.model, lambda: case.logps(policy.split_model, 0.7, 5)[0])
    _, plain = gradients(policy.model, lambda: case.plain(policy.model, 0.7)[0])
    assert_same(mine, plain)


@pytest.mark.parametrize("trained", ["adapters", "everything"])
@pytest.mark.parametrize("chunk", [None, 5], ids=["at once", "in chunks"])
def test_the_entropy_has_the_plain_gradient_where_it_is_asked_for(
    models: Path, chunk: int | None, trained: str
) -> None:
    model_of(models)
    model, case = lora(models).model, Case()
    if trained == "everything":
        model.unfreeze()
    split_model = split(model)
    _, mine = gradients(model, lambda: sum(case.logps(split_model, 0.7, chunk, entropy_gradient=True)))
    _, plain = gradients(model, lambda: sum(case.plain(model, 0.7)))
    assert_same(mine, plain)


def test_without_learning_the_numbers_are_the_same(models: Path) -> None:
    policy, case = lora(models), Case()
    for chunk in (None, 5):
        looks = [case.logps(policy.split_model, 0.7, chunk, with_gradient=on) for on in (True, False)]
        for with_gradient, without in zip(*looks, strict=True):
            np.testing.assert_allclose(np.array(with_gradient), np.array(without), atol=1e-6)


@pytest.mark.parametrize(
    ("arch", "layers"), [("qwen3", 2), ("llama", 2), ("qwen3_moe", 2), ("gemma3_text", 0), ("mamba", 0)]
)
def test_a_prompt_is_read_once_where_layers_remember_only_keys_and_values(models: Path, arch: str, layers: int) -> None:
    """A sliding window and a state space are read row by row, and right all the same."""
    model, case = model_of(models, arch), Case()
    split_model = split(model)
    assert split_model.prefix_layers == layers
    read = []
    plain = split_model.hidden
    split_model.hidden = lambda tokens, cache=None: read.append(tokens.shape) or plain(tokens, cache)
    case.logps(split_model)
    assert read == ([(3, 7), (5, 8)] if layers else [(5, 15)])


def test_padding_and_what_it_holds_change_nothing(models: Path) -> None:
    model = model_of(models)
    first, other = (np.array(Case(pad=pad).logps(split(model))[0]) for pad in (0, 200))
    np.testing.assert_allclose(first, other, atol=1e-6)


def test_the_entropy_carries_no_gradient_of_its_own(models: Path) -> None:
    model, case = model_of(models), Case()
    model.unfreeze()
    split_model = split(model)
    _, grads = nn.value_and_grad(model, lambda: case.logps(split_model)[1].sum())()
    assert all(not np.array(grad).any() for _, grad in tree_flatten(grads))


def test_half_precision_logits_are_normalised_in_float32(models: Path) -> None:
    """In bfloat16 the softmax alone would be wrong by 0.02 a token."""
    split_model = split(model_of(models, dtype="bfloat16"))
    hidden_NH = split_model.hidden(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]]))[0]
    target_N = mx.array([1, 4, 1, 5, 9, 2, 6, 5])
    scored = token_logps(split_model.logits, split_model.head, hidden_NH, target_N, temperature=0.7)
    assert hidden_NH.dtype == mx.bfloat16 and scored.logp_N.dtype == scored.entropy_N.dtype == mx.float32
    logits_NV = np.array(split_model.logits(hidden_NH).astype(mx.float32), np.float64) / 0.7
    logp_NV = logits_NV - np.log(np.exp(logits_NV).sum(-1, keepdims=True))
    np.testing.assert_allclose(scored.logp_N, logp_NV[np.arange(8), np.array(target_N)], atol=1e-5)


def test_without_a_gradient_one_chunk_is_held_at_a_time() -> None:
    """mlx lays out what it works on ahead of the device: left to itself it held 27 arrays of the vocabulary's size here."""
    V, N, chunk = 32_768, 512, 32
    head = nn.Linear(16, V, bias=False)
    hidden_NH, target_N = mx.random.normal((N, 16)), mx.zeros(N, mx.int32)
    mx.eval(head.parameters(), hidden_NH, target_N)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(token_logps(head, head, hidden_NH, target_N, temperature=1.0, chunk=chunk, with_gradient=False))
    assert mx.get_peak_memory() - before < 8 * chunk * V * 4


def test_the_chunk_follows_the_vocabulary() -> None:
    assert head_chunk(4096, gpu=False) == 128 and head_chunk(4096, gpu=True) == 4096
    assert head_chunk(10**8, gpu=True) == SMALLEST_CHUNK


# ---- halves ----------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
}  # fmt: skip


def capped(cap: float) -> nn.Module:
    return gemma2.Model(gemma2.ModelArgs.from_dict(SMALL | {"model_type": "gemma2", "final_logit_softcapping": cap}))


def scaled() -> nn.Module:
    return cohere.Model(cohere.ModelArgs.from_dict(SMALL | {"model_type": "cohere", "logit_scale": 0.0625}))


@pytest.mark.parametrize(
    "build", [lambda: capped(30.0), lambda: capped(1000.0), scaled], ids=["cap", "mild cap", "scale"]
)
def test_a_model_that_bends_its_logits_after_the_head_is_kept_whole(build: Callable[[], nn.Module]) -> None:
    """A soft cap of 1000 bends logits of this size by a millionth; it is the model's word all the same."""
    mx.random.seed(0)
    model, case = build(), Case()
    model.eval()
    split_model = split(model)
    assert split_model.head is None
    assert split_model.hidden(case.tokens_BL).shape[-1] == 320
    np.testing.assert_allclose(np.array(case.logps(split_model)[0]), np.array(case.plain(model, 1.0)[0]), atol=1e-5)
    _, mine = gradients(model, lambda: case.logps(split_model, 0.7, 5)[0])
    _, plain = gradients(model, lambda: case.plain(model, 0.7)[0])
    assert_same(mine, plain)


@pytest.mark.parametrize("arch", ["qwen3", "llama", "gemma3_text", "mixtral", "qwen3_moe"])
def test_a_model_with_a_plain_head_is_split(models: Path, arch: str) -> None:
    model, case = model_of(models, arch), Case()
    split_model = split(model)
    assert split_model.head is not None and split_model.hidden(case.tokens_BL).shape[-1] == 32
    np.testing.assert_allclose(np.array(case.logps(split_model)[0]), np.array(case.plain(model, 1.0)[0]), atol=1e-5)


def test_the_probe_asks_the_head_itself(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a product round in their own way, and must not be taken for a soft cap: the model would be kept whole."""
    monkeypatch.setattr(model_probe, "matmul_transposed", lambda x, weight: x @ weight.T + 1e-3)
    assert split(model_of(models)).head is not None


def test_a_model_of_another_build_is_kept_whole_and_right(models: Path) -> None:
    model, case = model_of(models, "mamba"), Case()
    split_model = split(model)
    assert split_model.head is None
    np.testing.assert_allclose(np.array(case.logps(split_model)[0]), np.array(case.plain(model, 1.0)[0]), atol=1e-5)


# ---- recomputed layers -----------------------------------------------------------------------------------------


def lora(models: Path, dropout: float = 0.0) -> Policy:
    model_of(models)
    settings = {"model": str(models / "qwen3"), "data": "none", "beta": 0, "num_layers": -1, "dropout": dropout}
    policy = load_policy(parse(settings))
    mx.random.seed(5)
    for layer in policy.model.layers:
        for name, module in layer.named_modules():
            if name.endswith("_proj"):
                module.lora_b = 0.05 * mx.random.normal(module.lora_b.shape)
    return policy


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_recomputing_layers_changes_no_gradient(models: Path, kind: str) -> None:
    case = Case()
    model = lora(models).model if kind == "lora" else model_of(models)
    if kind == "full":
        model.unfreeze()
    split_model = split(model)
    results = []
    for on in (False, True):
        with gradient_checkpointing(model, on):
            results.append(gradients(model, lambda: case.logps(split_model, 0.7, 5)[0]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert_same(results[1][1], results[0][1], rtol=1e-6)


def test_recomputing_layers_leaves_the_class_as_it_was(models: Path) -> None:
    model, other = model_of(models), model_of(models)
    kind = type(model.layers[0])
    before = kind.__call__
    with gradient_checkpointing(model, True):
        assert kind.__call__ is not before
    assert kind.__call__ is before
    with pytest.raises(ZeroDivisionError), gradient_checkpointing(model, True):
        raise ZeroDivisionError
    assert kind.__call__ is before
    with gradient_checkpointing(model, False):
        assert kind.__call__ is before
    assert mx.array_equal(model(mx.array([[5, 6]])), other(mx.array([[5, 6]])))


def test_recomputing_really_happens_and_really_saves(models: Path) -> None:
    model, case, calls = model_of(models), Case(), []
    model.unfreeze()
    norm = model.layers[0].input_layernorm
    plain = type(norm).__call__
    split_model = split(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(norm), "__call__", lambda self, x: calls.append(self is norm) or plain(self, x))
        for on in (False, True):
            calls.clear()
            with gradient_checkpointing(model, on):
                gradients(model, lambda: case.logps(split_model)[0])
            assert sum(calls) == (4 if on else 2)  # prompts and completions


def test_recomputed_layers_drop_the_same_inputs_twice(models: Path) -> None:
    """With dropout, the second pass must redraw the first one's mask, or the gradient belongs to another function: it is
    checked against the slope of the very loss it came with."""
    policy, case = lora(models, dropout=0.5), Case()
    policy.model.train()

    def loss_and_gradient() -> tuple[float, dict[str, np.ndarray]]:
        mx.random.seed(11)
        with gradient_checkpointing(policy.model, True):
            return gradients(policy.model, lambda: case.logps(policy.split_model)[0])

    def moved(by: float, way: dict[str, np.ndarray]) -> float:
        start = policy.trainable()
        policy.assign({name: x + by * mx.array(way[name]) for name, x in start.items()})
        loss = loss_and_gradient()[0]
        policy.assign(start)
        return loss

    loss, grads = loss_and_gradient()
    assert loss == loss_and_gradient()[0]
    length = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    way = {name: grad / length for name, grad in grads.items()}
    slope = (moved(1e-3, way) - moved(-1e-3, way)) / 2e-3
    assert slope == pytest.approx(length, rel=2e-2)
