"""The chunked gated delta rule equals the recurrence token by token, in value and gradient."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from backend.engine import gated_delta
from backend.engine.gated_delta import gated_delta_rule

Rule = Callable[..., tuple[mx.array, mx.array]]
NAMES = ("queries", "keys", "values", "log decay", "beta", "state")


@dataclass(frozen=True)
class Case:
    """Sizes: rows, tokens, key heads, value heads, and of a head's keys and values. `by_channel`: a decay for each key
    channel. `strength`: the mean of −log decay; `state`: whether there is one before the first token."""

    rows: int = 2
    tokens: int = 21
    key_heads: int = 2
    heads: int = 4
    keys: int = 8
    values: int = 12
    by_channel: bool = False
    strength: float = 0.1
    state: bool = True

    def arrays(self) -> list[mx.array]:
        """Queries, keys (both of length 1), values, log decays, betas, and the state if there is one."""
        B, T, J, H, d, e = self.rows, self.tokens, self.key_heads, self.heads, self.keys, self.values
        rng = np.random.default_rng(0)
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.normal(size=(2, B, T, J, d)))
        log_decay = -rng.exponential(self.strength, (B, T, H, d) if self.by_channel else (B, T, H))
        others = [rng.uniform(size=(B, T, H)), *([rng.normal(size=(B, H, e, d))] if self.state else [])]
        return [mx.array(x, mx.float32) for x in (q, k, rng.normal(size=(B, T, H, e)), log_decay, *others)]


def recurrence(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The definition, one token at a time, as this module's docstring states it."""
    (B, T, H, e), J, d = v.shape, k.shape[2], k.shape[3]
    state = mx.zeros((B, H, e, d)) if state is None else state
    q, k = (mx.repeat(x, H // J, axis=2) for x in (q, k))
    decay = mx.exp(log_decay).reshape(B, T, H, 1, -1)
    outs = []
    for t in range(T):
        state = state * decay[:, t]
        correction = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, None]).sum(axis=-1))
        state = state + correction[..., None] * k[:, t, :, None]
        outs.append((state * q[:, t, :, None]).sum(axis=-1))
    return mx.stack(outs, axis=1), state


def results(rule: Rule, arrays: list[mx.array], of_state: float = 1.0) -> dict[str, np.ndarray]:
    """Output, last state and all gradients, of a loss that weighs every number of both differently."""
    out, state = rule(*arrays)
    rng = np.random.default_rng(1)
    weights = [
        mx.array(by * rng.normal(size=x.shape), mx.float32).astype(x.dtype) for x, by in ((out, 1), (state, of_state))
    ]
    (out, state), grads = mx.vjp(rule, arrays, weights)
    named = {"out": out, "last state": state} | {f"gradient of {n}": x for n, x in zip(NAMES, grads, strict=False)}
    return {name: np.array(x.astype(mx.float32), np.float64) for name, x in named.items()}


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    """Relative to the largest number of each; absolute where all should be 0."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].shape == x.shape
        error = np.abs(actual[name] - x).max() / (np.abs(x).max() or 1)
        assert error <= tolerance, f"{name}: {error:.1e}"


CASES = {
    "tokens that fill no chunk": Case(),
    "one token": Case(tokens=1),
    "fewer tokens than a chunk": Case(tokens=5),
    "no state": Case(state=False),
    "one head of keys": Case(key_heads=1),
    "strong decay": Case(strength=20.0),
    "weak decay": Case(strength=1e-3),
}


@pytest.mark.parametrize("by_channel", [False, True], ids=["a decay a head", "a decay a channel"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_recurrence(name: str, by_channel: bool) -> None:
    case = Case(**vars(CASES[name]) | {"by_channel": by_channel})
    arrays = case.arrays()
    expected = results(recurrence, arrays)
    for chunk, span in ((16, 16), (8, 24), (gated_delta.CHUNK, None)):
        assert_close(results(lambda *x, C=chunk, s=span: gated_delta_rule(*x, chunk=C, span=s), arrays), expected)


@pytest.mark.parametrize("by_channel", [False, True], ids=["a decay a head", "a decay a channel"])
def test_no_decay_strength_gives_a_nan_or_an_overflow(by_channel: bool) -> None:
    """Nothing, e⁻²⁰ a step, everything (log 0 = −∞) and a mix forgotten: a chunk's decays span more than float32."""
    case = Case(tokens=70, by_channel=by_channel)
    arrays = case.arrays()
    mixed = np.random.default_rng(2).choice([0.0, -1e-3, -20.0, -300.0, -np.inf], size=arrays[3].shape)
    for log_decay in (np.zeros_like(mixed), np.full_like(mixed, -20.0), np.full_like(mixed, -np.inf), mixed):
        arrays[3] = mx.array(log_decay, mx.float32)
        assert_close(results(gated_delta_rule, arrays), results(recurrence, arrays))


@pytest.mark.parametrize("beta", [1.0, 1.9])
def test_repeated_keys_keep_their_precision(beta: float) -> None:
    """A row of equal tokens has equal keys. The powers of A, which a Neumann series of (I + A)⁻¹ would add up, then
    reach 10¹⁷ and more, though the inverse has no number above β. β up to 2 is Olmo Hybrid's `allow_neg_eigval`. How
    far rounding errors grow depends on the processor's BLAS kernels: 1e-5 with AVX-512's, 2.4e-5 with AVX2's."""
    case = Case(tokens=64, strength=1e-3)
    q, k, v, log_decay, _, state = case.arrays()
    k = mx.broadcast_to(k[:, :1], k.shape)
    arrays = [q, k, v, log_decay, mx.full(v.shape[:3], beta), state]
    assert_close(results(gated_delta_rule, arrays), results(recurrence, arrays), 1e-4)


def test_a_token_sees_nothing_after_it_and_padding_gets_no_gradient() -> None:
    """Rows are padded on the right: with what lies there changed, no output before it moves by a bit."""
    case, real = Case(tokens=70), 50
    arrays = case.arrays()
    other = [mx.concatenate([x[:, :real], 3 * x[:, real:]], axis=1) for x in arrays[:5]] + arrays[5:]
    outs = [np.array(gated_delta_rule(*x)[0])[:, :real] for x in (arrays, other)]
    np.testing.assert_array_equal(*outs)
    grads = mx.grad(lambda *x: gated_delta_rule(*x)[0][:, :real].sum(), list(range(5)))(*arrays)
    assert all(not np.array(x[:, real:]).any() and np.array(x[:, :real]).any() for x in grads)


@pytest.mark.parametrize("by_channel", [False, True], ids=["a decay a head", "a decay a channel"])
def test_a_masked_token_is_as_if_it_were_not_there(by_channel: bool) -> None:
    """mlx-lm's batches pad prompts on the left."""
    case = Case(tokens=20, by_channel=by_channel)
    arrays = case.arrays()
    mask = mx.arange(20) >= mx.array([[0], [7]])
    out, state = gated_delta_rule(*arrays, mask_BT=mask, chunk=8)
    for row, padding in ((0, 0), (1, 7)):
        alone = [x[row : row + 1, padding:] for x in arrays[:5]] + [arrays[5][row : row + 1]]
        expected_out, expected_state = recurrence(*alone)
        np.testing.assert_allclose(np.array(out[row, padding:]), np.array(expected_out[0]), atol=1e-5)
        np.testing.assert_allclose(np.array(state[row]), np.array(expected_state[0]), atol=1e-5)
    grads = mx.grad(lambda *x: (mask[..., None, None] * gated_delta_rule(*x, mask_BT=mask)[0]).sum(), list(range(5)))(
        *arrays
    )
    assert all(not np.array(x[1, :7]).any() and np.isfinite(np.array(x)).all() for x in grads)
