"""Blocked attention equals plain attention over repeated prompts, in value and gradient, and never holds all scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.attention import PromptKV, blocked_attention, decode_attention
from backend.engine.chunk_sizes import attention_block

Attention = Callable[..., mx.array]


@dataclass(frozen=True)
class Case:
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
    "prompts": Case(),
    "several rows of a prompt": Case(each=3),
    "one prompt": Case(prompts=1, each=4),
    "ragged prompts": Case(each=2, lengths=(5, 2)),
    "ragged prompts, one row each": Case(prompts=3, lengths=(1, 4, 5)),
    "no prompts": Case(prompts=3, prompt=0),
    "one token": Case(each=3, tokens=1),
    "one token, no prompts": Case(prompts=3, tokens=1, prompt=0),
    "as many heads of keys": Case(each=2, key_heads=4),
    "one head of keys": Case(each=2, key_heads=1),
    "wide values": Case(each=2, keys=8, values=24),
    "narrow values": Case(each=2, keys=24, values=8, lengths=(3, 5)),
    "a prompt longer than a block": Case(each=2, tokens=5, prompt=40, lengths=(33, 40)),
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
    case = Case(each=2, lengths=(5, 2))
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


SHORT, LONG = (Case(prompts=1, tokens=tokens, prompt=0) for tokens in (1024, 2048))


def peak(case: Case, attention: Attention) -> float:
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
def test_decode_attention_is_the_plain_attention(key_heads: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(0)
    shapes = [(3, 4, 1, 8), (3, key_heads, 10, 8), (3, key_heads, 10, 12)]
    queries, keys, values = (mx.array(rng.normal(size=shape), mx.float32).astype(dtype) for shape in shapes)
    columns = np.arange(10)
    mask = mx.array(((columns <= 6) & (columns >= np.array([[0], [6], [3]])))[:, None, None])
    out = decode_attention(queries, keys, values, 0.3, mask)
    exact = [x.astype(mx.float32) for x in (queries, keys, values)]
    plain = mx.fast.scaled_dot_product_attention(*exact, scale=0.3, mask=mask)
    assert out.dtype == dtype and out.shape == (3, 4, 1, 12)
    assert error(out, plain) < (1e-6 if dtype == mx.float32 else 1e-2)
    # and of scores whose exponentials overflow float32
    far = decode_attention(100 * queries, keys, values, 3.0, mask)
    plain = mx.fast.scaled_dot_product_attention(100 * exact[0], *exact[1:], scale=3.0, mask=mask)
    assert error(far, plain) < (1e-4 if dtype == mx.float32 else 1e-2)
