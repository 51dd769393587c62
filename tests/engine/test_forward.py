"""Log-probabilities and entropies with shared prompts and chunked logits equal the definition."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model

from backend.engine.attention import PromptKV, blocked_attention, cached_attention
from backend.engine.chunk_sizes import attention_block
from backend.engine.gradient_checkpointing import gradient_checkpointing
from backend.engine.lm_head import token_logps
from backend.engine.model_probe import split
from tests.support import random_models
from tests.support.architectures.tiny_configs import tiny_config
from tests.support.forward_cases import LAYOUTS, Case, assert_same_gradients, gradients, lora_policy, model_of

# Every layout meets a tied and an untied head; chunks of one token, of some, of more than there are, and none.
VALUES = [
    *[(layout, True, 5, 0.6) for layout in LAYOUTS],
    *[(layout, False, None, 1.8) for layout in LAYOUTS],
    ("uneven", True, None, 1.0),
    ("uneven", False, 1, 1.0),
    ("even", True, 1000, 1.0),
]


@pytest.mark.parametrize(("layout", "tie", "chunk", "temperature"), VALUES)
def test_logps_and_entropies(models: Path, layout: str, tie: bool, chunk: int | None, temperature: float) -> None:
    model, case = model_of(models, tie=tie), Case(LAYOUTS[layout])
    scores, expected = case.logps(split(model), temperature, chunk), case.plain(model, temperature)
    for actual, plain in zip(scores, expected, strict=True):
        np.testing.assert_allclose(np.array(actual), np.array(plain), atol=1e-5)
        assert not np.array(actual)[~case.mask_BT].any(), "masked tokens are 0"


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize(("layout", "tie"), [("uneven", True), ("uneven", False), ("one token", False)])
def test_every_weight_gets_its_gradient_the_head_too(models: Path, layout: str, tie: bool, chunk: int | None) -> None:
    """The checkpointed function of a chunk once closed over the head: no gradient reached it, and full fine-tuning of
    any model with a real vocabulary never changed its output layer."""
    model, case = model_of(models, tie=tie), Case(LAYOUTS[layout])
    model.unfreeze()
    split_model = split(model)
    loss, actual = gradients(model, lambda: case.logps(split_model, 0.7, chunk)[0])
    plain_loss, plain = gradients(model, lambda: case.plain(model, 0.7)[0])
    assert loss == pytest.approx(plain_loss, abs=1e-4)
    assert_same_gradients(actual, plain)


@pytest.mark.parametrize("trained", ["adapters", "everything"])
@pytest.mark.parametrize("chunk", [None, 5], ids=["at once", "in chunks"])
def test_the_entropy_carries_a_gradient_where_it_is_asked_for(models: Path, chunk: int | None, trained: str) -> None:
    model, case = lora_policy(models).model, Case()
    if trained == "everything":
        model.unfreeze()
    split_model = split(model)
    _, actual = gradients(model, lambda: sum(case.logps(split_model, 0.7, chunk, entropy_gradient=True)))
    _, plain = gradients(model, lambda: sum(case.plain(model, 0.7)))
    assert_same_gradients(actual, plain)


@pytest.mark.parametrize(("arch", "layers"), [("qwen3", 2), ("qwen3_moe", 2), ("gemma3_text", 2), ("mamba", 0)])
def test_a_prompt_is_prefilled_once_where_layers_only_cache_keys(models: Path, arch: str, layers: int) -> None:
    model, case = model_of(models, arch), Case()
    split_model = split(model)
    assert split_model.prefix_layers == layers
    shapes = []
    hidden = split_model.hidden
    split_model.hidden = lambda tokens, cache=None: shapes.append(tokens.shape) or hidden(tokens, cache)
    logps = case.logps(split_model)[0]
    assert shapes == ([(3, 6), (5, 9)] if layers else [(5, 15)])
    np.testing.assert_allclose(np.array(logps), np.array(case.plain(model, 1.0)[0]), atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_prompts_keep_sliding_windows(tmp_path: Path, layout: str) -> None:
    model, case = model_of(tmp_path, "gemma3_text", own={"sliding_window": 4}), Case(LAYOUTS[layout])
    model.unfreeze()
    split_model = split(model)
    assert split_model.prefix_layers == 2
    _, actual = gradients(model, lambda: case.logps(split_model, 0.7, 5)[0])
    _, plain = gradients(model, lambda: case.plain(model, 0.7)[0])
    assert_same_gradients(actual, plain)
    np.testing.assert_allclose(np.array(case.logps(split_model)[0]), np.array(case.plain(model, 1.0)[0]), atol=1e-5)


def test_a_batch_whose_tokens_are_all_masked_gives_zeros(models: Path) -> None:
    case = Case()
    rows = case.rows
    blank = type(rows)(**{name: getattr(rows, name) for name in rows.__slots__} | {"active_N": mx.array([], mx.int32)})
    case.rows = blank
    for scores in case.logps(split(model_of(models))):
        assert scores.shape == case.completion_BT.shape and not np.array(scores).any()


def test_half_precision_logits_are_normalised_in_float32(tmp_path: Path) -> None:
    """In bfloat16 the softmax alone would be wrong by 0.02 a token."""
    split_model = split(model_of(tmp_path, dtype="bfloat16"))
    hidden_NH = split_model.hidden(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]]))[0]
    target_N = mx.array([1, 4, 1, 5, 9, 2, 6, 5])
    scores = token_logps(split_model.logits, split_model.head, hidden_NH, target_N, temperature=0.7)
    assert hidden_NH.dtype == mx.bfloat16 and scores.logp_N.dtype == scores.entropy_N.dtype == mx.float32
    logits_NV = np.array(split_model.logits(hidden_NH).astype(mx.float32), np.float64) / 0.7
    logp_NV = logits_NV - np.log(np.exp(logits_NV).sum(-1, keepdims=True))
    np.testing.assert_allclose(scores.logp_N, logp_NV[np.arange(8), np.array(target_N)], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logits_whose_exponentials_overflow_float32_are_scored(temperature: float) -> None:
    rng = np.random.default_rng(0)
    logits_NV, target = 200 * rng.normal(size=(6, 50)), np.arange(6)
    logits_NV[target, target] = logits_NV.max(axis=-1) - [0, 1, 2, 3, 300, 600]
    scaled_NV = logits_NV / temperature
    logp_NV = scaled_NV - np.logaddexp.reduce(scaled_NV, axis=-1, keepdims=True)
    entropy_N = -(np.exp(logp_NV) * logp_NV).sum(-1)
    hidden_NV = mx.array(logits_NV, mx.float32)
    for with_gradient in (True, False):
        scores = token_logps(
            lambda x: x, None, hidden_NV, mx.array(target), temperature=temperature, with_gradient=with_gradient
        )
        np.testing.assert_allclose(scores.logp_N, logp_NV[target, target], rtol=1e-5, atol=2e-4)
        np.testing.assert_allclose(scores.entropy_N, entropy_N, atol=2e-4)


@pytest.mark.parametrize("chunk", [None, 3, 1])
@pytest.mark.parametrize("size", [1.0, 300.0], ids=["usual logits", "exponentials overflow"])
def test_logits_of_a_product_are_scored_by_slices_of_the_vocabulary(size: float, chunk: int | None) -> None:
    rng = np.random.default_rng(0)
    head, target, cotangent = nn.Linear(8, 50, bias=False), rng.integers(0, 50, 6), rng.normal(size=6)
    head.freeze()
    weight, hidden = np.array(head.weight, np.float64), size * rng.normal(size=(6, 8)).astype(np.float32)
    scaled_NV = hidden @ weight.T / 0.7
    logp_NV = scaled_NV - np.logaddexp.reduce(scaled_NV, axis=-1, keepdims=True)
    p_NV = np.exp(logp_NV)

    def scores(hidden_NH: mx.array, **options: Any) -> list[mx.array]:
        options |= {"temperature": 0.7, "chunk": chunk, "is_product": True}
        return list(token_logps(head, head, hidden_NH, mx.array(target), **options)[:2])

    actual, gradient = mx.vjp(scores, [mx.array(hidden)], [mx.array(cotangent, mx.float32), mx.zeros(6)])
    for logp_N, entropy_N in (actual, scores(mx.array(hidden), with_gradient=False)):
        np.testing.assert_allclose(logp_N, logp_NV[np.arange(6), target], rtol=1e-6, atol=1e-6 * size)
        np.testing.assert_allclose(entropy_N, -(p_NV * logp_NV).sum(-1), atol=2e-6 * size)
    expected = cotangent[:, None] * (weight[target] - p_NV @ weight) / 0.7
    np.testing.assert_allclose(gradient[0], expected, atol=1e-5)


@pytest.mark.parametrize("trained", ["adapters", "everything"])
def test_gradient_checkpointing_changes_no_gradient(models: Path, trained: str) -> None:
    case = Case()
    model = lora_policy(models).model if trained == "adapters" else model_of(models)
    if trained == "everything":
        model.unfreeze()
    split_model = split(model)
    results = []
    for on in (False, True):
        with gradient_checkpointing(model, on):
            results.append(gradients(model, lambda: case.logps(split_model, 0.7, 5)[0]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert_same_gradients(results[1][1], results[0][1], rtol=1e-6)


def test_the_second_pass_samples_the_same_dropout_mask(models: Path) -> None:
    """With another mask the gradient would be another function's: compared with its loss's finite difference."""
    policy, case = lora_policy(models, dropout=0.5), Case()
    policy.model.train()

    def loss_and_gradient() -> tuple[float, dict[str, np.ndarray]]:
        mx.random.seed(11)
        with gradient_checkpointing(policy.model, True):
            return gradients(policy.model, lambda: case.logps(policy.split_model)[0])

    def loss_at(distance: float, direction: dict[str, np.ndarray]) -> float:
        start = policy.trainable()
        policy.assign({name: x + distance * mx.array(direction[name]) for name, x in start.items()})
        loss = loss_and_gradient()[0]
        policy.assign(start)
        return loss

    loss, grads = loss_and_gradient()
    assert loss == loss_and_gradient()[0]
    norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    direction = {name: grad / norm for name, grad in grads.items()}
    difference = (loss_at(1e-3, direction) - loss_at(-1e-3, direction)) / 2e-3
    assert difference == pytest.approx(norm, rel=2e-2)


@pytest.mark.parametrize("arch", ["gemma4_text", "gemma3n"])
def test_layers_that_read_an_earlier_layers_keys_send_their_gradient_there(models: Path, arch: str) -> None:
    """Gemma 4 hands them on as an argument, Gemma 3n in a cache; both have an embedding per layer."""
    folder = random_models.tiny_model(models / arch, arch, own=tiny_config(arch), noise=0.05)
    model, case = load_model(folder)[0], Case()
    split_model, results = split(model), []
    for on in (False, True):
        with gradient_checkpointing(model, on):
            results.append(gradients(model, lambda: case.logps(split_model, 0.7, 5)[0])[1])
    assert_same_gradients(results[1], results[0], rtol=1e-4, floor=1e-5)
    assert np.abs(next(grad for name, grad in results[1].items() if "layers.0.self_attn.k_proj" in name)).max() > 1e-3


Attention = Callable[..., mx.array]


@dataclass(frozen=True)
class AttentionCase:
    """Sizes: prompts, rows of each prompt (`each`), query and key heads, tokens of a row and of a prompt, key and value
    dimensions of a head, and the length of each prompt where they differ."""

    prompts: int = 2
    each: int = 1
    heads: int = 4
    key_heads: int = 2
    tokens: int = 7
    prompt: int = 5
    keys: int = 16
    values: int = 16
    lengths: tuple[int, ...] | None = None

    @property
    def scale(self) -> float:
        return self.keys**-0.5

    def arrays(self, dtype: mx.Dtype = mx.float32, size: float = 1.0) -> list[mx.array]:
        """Queries, keys, values, and the prompts' keys and values where there are prompts."""
        P, B, J, N, K = self.prompts, self.prompts * self.each, self.key_heads, self.tokens, self.prompt
        own = [(B, self.heads, N, self.keys), (B, J, N, self.keys), (B, J, N, self.values)]
        before = [(P, J, K, self.keys), (P, J, K, self.values)] if K else []
        rng = np.random.default_rng(0)
        sizes = [size, size, 1.0, size, 1.0]
        shapes = zip([*own, *before], sizes, strict=False)
        return [mx.array(by * rng.normal(size=shape), mx.float32).astype(dtype) for shape, by in shapes]

    def ours(self, block: int | None = None) -> Attention:
        length_P = mx.array(self.lengths) if self.lengths else None

        def attention(queries: mx.array, keys: mx.array, values: mx.array, *before: mx.array) -> mx.array:
            prompts = PromptKV(*before, length_P) if before else None
            return blocked_attention(queries, keys, values, self.scale, prompts, block)

        return attention

    def plain(self) -> Attention:
        """mlx's attention over the keys and values of each row, with its prompt's repeated in front."""
        B, N, K = self.prompts * self.each, self.tokens, self.prompt
        length_B = np.repeat(self.lengths or (K,) * self.prompts, self.each)
        in_prompt = np.broadcast_to((np.arange(K) < length_B[:, None])[:, None], (B, N, K))
        causal = np.broadcast_to(np.tril(np.ones((N, N), bool)), (B, N, N))
        mask = mx.array(np.concatenate([in_prompt, causal], axis=-1)[:, None])

        def attention(queries: mx.array, *arrays: mx.array) -> mx.array:
            own, before = arrays[:2], [mx.repeat(x, self.each, axis=0) for x in arrays[2:]]
            keys, values = [mx.concatenate(x, axis=2) for x in zip(before, own, strict=True)] if before else own
            return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)

        return attention


def out_and_gradients(attention: Attention, arrays: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
    """The output, and the gradients of a loss that weighs every element of it differently."""
    out = attention(*arrays)
    weight = mx.array(np.random.default_rng(1).normal(size=out.shape), mx.float32).astype(out.dtype)
    return out, mx.vjp(attention, arrays, [weight])[1]


def error(actual: mx.array, expected: mx.array) -> float:
    """The largest difference, relative to the largest number; absolute where all should be 0."""
    a, b = (np.array(x.astype(mx.float32), np.float64) for x in (actual, expected))
    assert a.shape == b.shape
    return np.abs(a - b).max() / (np.abs(b).max() or 1)


CASES = {
    "prompts": AttentionCase(),
    "several rows of a prompt": AttentionCase(each=3),
    "one prompt": AttentionCase(prompts=1, each=4),
    "ragged prompts": AttentionCase(each=2, lengths=(5, 2)),
    "ragged prompts, one row each": AttentionCase(prompts=3, lengths=(1, 4, 5)),
    "no prompts": AttentionCase(prompts=3, prompt=0),
    "one token": AttentionCase(each=3, tokens=1),
    "one token, no prompts": AttentionCase(prompts=3, tokens=1, prompt=0),
    "as many heads of keys": AttentionCase(each=2, key_heads=4),
    "one head of keys": AttentionCase(each=2, key_heads=1),
    "wide values": AttentionCase(each=2, keys=8, values=24),
    "narrow values": AttentionCase(each=2, keys=24, values=8, lengths=(3, 5)),
    "a prompt longer than a block": AttentionCase(each=2, tokens=5, prompt=40, lengths=(33, 40)),
}


@pytest.mark.parametrize("block", [1, 3, None], ids=lambda block: f"block {block}")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_plain_ones(name: str, block: int | None) -> None:
    case = CASES[name]
    arrays = case.arrays()
    (out, grads), (plain, plain_grads) = (
        out_and_gradients(case.ours(block), arrays),
        out_and_gradients(case.plain(), arrays),
    )
    assert out.dtype == mx.float32
    np.testing.assert_allclose(np.array(out), np.array(plain), atol=1e-5)
    assert len(grads) == len(plain_grads) == (5 if case.prompt else 3)
    for gradient, plain_grad, array in zip(grads, plain_grads, arrays, strict=True):
        assert gradient.shape == array.shape and error(gradient, plain_grad) < 1e-5


@pytest.mark.parametrize("name", ["several rows of a prompt", "ragged prompts", "no prompts", "wide values"])
def test_sixteen_bits_stay_within_their_own_rounding(name: str) -> None:
    """Compared with float32, the error is no larger than that of mlx's attention in 16 bits."""
    case = CASES[name]
    arrays = case.arrays(mx.bfloat16)
    exact, exact_grads = out_and_gradients(case.plain(), [x.astype(mx.float32) for x in arrays])
    plain, plain_grads = out_and_gradients(case.plain(), arrays)

    def noise(actual: mx.array, truth: mx.array) -> float:
        return float(mx.linalg.norm(actual.astype(mx.float32) - truth) / mx.linalg.norm(truth))

    for block in (3, None):
        out, grads = out_and_gradients(case.ours(block), arrays)
        assert out.dtype == mx.bfloat16 and all(x.dtype == mx.bfloat16 for x in grads)
        for ours, mlx_own, truth in zip([out, *grads], [plain, *plain_grads], [exact, *exact_grads], strict=True):
            assert noise(ours, truth) < 1.5 * noise(mlx_own, truth)


@pytest.mark.parametrize("block", [3, None])
def test_extreme_scores_give_no_nan(block: int | None) -> None:
    """Scores of ±10,000, whose exponentials overflow float32: all weight is on one key, or none on a segment."""
    case = AttentionCase(each=2, lengths=(5, 2))
    arrays = case.arrays(size=100.0)
    scores = case.scale * arrays[0] @ mx.repeat(arrays[1], 2, axis=1).swapaxes(-1, -2)
    assert scores.max().item() > 1e4 and scores.min().item() < -1e4
    (out, grads), (plain, _) = out_and_gradients(case.ours(block), arrays), out_and_gradients(case.plain(), arrays)
    np.testing.assert_allclose(np.array(out), np.array(plain), atol=1e-4)
    assert all(np.isfinite(np.array(x)).all() for x in grads)
    far = [mx.full(arrays[0].shape, 100.0), *arrays[1:]]
    far[1], far[3] = mx.full(far[1].shape, -100.0), mx.full(far[3].shape, 100.0)  # all weight on the prompt
    out, grads = out_and_gradients(case.ours(block), far)
    np.testing.assert_allclose(np.array(out), np.array(case.plain()(*far)), atol=1e-5)
    assert all(np.isfinite(np.array(x)).all() for x in grads)
    assert not np.array(grads[2]).any(), "nothing attends to the rows' own values"


SHORT, LONG = (AttentionCase(prompts=1, tokens=tokens, prompt=0) for tokens in (1024, 2048))


def peak(case: AttentionCase, attention: Attention) -> float:
    """Bytes of forward and backward pass, above what was there before, in those of all scores."""
    arrays = case.arrays()
    weight = mx.ones((1, case.heads, case.tokens, case.values))
    mx.eval(arrays, weight)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.vjp(attention, arrays, [weight]))
    return (mx.get_peak_memory() - before) / (4 * case.heads * case.tokens**2)


def test_all_scores_are_never_in_memory_at_once() -> None:
    peaks = [peak(SHORT, SHORT.ours(block)) for block in (256, 64, 16)]
    assert all(larger > 2 * smaller for larger, smaller in pairwise(peaks)), peaks
    chosen = attention_block(LONG.heads, LONG.tokens, LONG.tokens, gpu=False)
    assert peaks[-1] < 1 / 4 and peak(LONG, LONG.ours(chosen)) < 1 / 2
    assert peak(SHORT, SHORT.plain()) > 1, "else this shows nothing"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_cached_attention_is_the_plain_attention(key_heads: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(0)
    shapes = [(3, 4, 1, 8), (3, key_heads, 10, 8), (3, key_heads, 10, 12)]
    queries, keys, values = (mx.array(rng.normal(size=shape), mx.float32).astype(dtype) for shape in shapes)
    columns = np.arange(10)
    mask = mx.array(((columns <= 6) & (columns >= np.array([[0], [6], [3]])))[:, None, None])
    out = cached_attention(queries, keys, values, 0.3, mask)
    exact = [x.astype(mx.float32) for x in (queries, keys, values)]
    plain = mx.fast.scaled_dot_product_attention(*exact, scale=0.3, mask=mask)
    assert out.dtype == dtype and out.shape == (3, 4, 1, 12)
    assert error(out, plain) < (1e-6 if dtype == mx.float32 else 1e-2)
    # and of scores whose exponentials overflow float32
    far = cached_attention(100 * queries, keys, values, 3.0, mask)
    plain = mx.fast.scaled_dot_product_attention(100 * exact[0], *exact[1:], scale=3.0, mask=mask)
    assert error(far, plain) < (1e-4 if dtype == mx.float32 else 1e-2)


@pytest.mark.parametrize("kind", ["causal", "all", "padded", "numbers"])
def test_cached_attention_of_many_queries_is_the_plain_attention(kind: str) -> None:
    """In blocks of queries, the last of 900 columns; a query in the padding, which has no column, stays finite."""
    rng = np.random.default_rng(0)
    shapes = [(2, 4, 700, 16), (2, 2, 900, 16), (2, 2, 900, 16)]
    queries, keys, values = (mx.array(rng.normal(size=shape), mx.float32) for shape in shapes)
    is_seen = mx.arange(200, 900)[:, None] >= mx.arange(900)
    padded = is_seen & (mx.arange(900) >= mx.array([[[0]], [[300]]]))
    numbers = mx.where(is_seen, mx.arange(900) / 900, -1e9)
    mask = {"causal": "causal", "all": None, "padded": padded[:, None], "numbers": numbers}[kind]
    assert attention_block(2 * 4, 700, 900, gpu=False) < 700
    out = cached_attention(queries, keys, values, 0.3, mask)
    plain = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    real = 100 if kind == "padded" else 0
    assert error(out[:, :, real:], plain[:, :, real:]) < 2e-6  # sums of 900 terms in another order
    assert bool(mx.isfinite(out).all())
