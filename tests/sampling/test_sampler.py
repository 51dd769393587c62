"""One sampled token: its distribution is the filtered one, its log-probability the unfiltered policy's."""

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.device import on_gpu
from backend.sampling import sampler
from backend.sampling.sampler import GREEDY, Sampling, sample_tokens
from backend.utils.machine import TREAT_CPU_AS
from tests.support.cases import cases

GRID = 40_000  # evenly spaced uniforms: shares are then exact to 1 / GRID at each end of a token's interval
FILTERS = [
    Sampling(),
    Sampling(temperature=2.0),
    Sampling(top_k=3),
    Sampling(top_k=1),
    Sampling(top_p=0.7),
    Sampling(min_p=0.2),
    Sampling(temperature=0.8, top_p=0.95, top_k=20),
    Sampling(temperature=1.3, top_k=12, min_p=0.1),
    Sampling(temperature=1.5, top_p=0.9, top_k=8, min_p=0.15),
    Sampling(temperature=0.9, top_p=0.95, top_k=12, without=(0, 2, 5, 11, 17)),
]


def logits(size: int = 24, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1.5, size)


def exact(values: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The filtered distribution, in float64, token by token: top-k, then top-p over what is left, then min-p."""
    values = np.where(np.isin(np.arange(len(values)), sampling.without), -np.inf, values)
    mass = np.exp(values / sampling.temperature - np.max(values / sampling.temperature))
    kept = np.ones(len(mass), bool)
    if 0 < sampling.top_k < len(mass):
        kept &= mass >= np.sort(mass)[-sampling.top_k]
    if sampling.top_p < 1:
        missing, nucleus = sampling.top_p * mass[kept].sum(), np.zeros_like(kept)
        for token in np.argsort(-mass, kind="stable"):
            if kept[token] and missing > 0:
                nucleus[token] = True
                missing -= mass[token]
        kept = nucleus
    kept &= mass >= sampling.min_p
    return np.where(kept, mass, 0) / mass[kept].sum()


def sampled(values: np.ndarray, sampling: Sampling, count: int = 20_000, seed=1) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities of `count` independent samples."""
    uniform_B = mx.array(np.random.default_rng(seed).random(count, np.float32))
    token_B, logp_B, _ = sample_tokens(
        mx.broadcast_to(mx.array(values, mx.float32), (count, len(values))), uniform_B, sampling
    )
    return np.array(token_B), np.array(logp_B)


@cases("sampling", FILTERS)
def test_a_grid_of_uniforms_gives_the_exact_filtered_distribution(sampling: Sampling) -> None:
    """The inverse CDF is a function of the uniform, so a grid has no sampling noise that could hide a small error."""
    values = logits(seed=5)
    grid_B = mx.array((np.arange(GRID) + 0.5) / GRID, mx.float32)
    token_B, _, _ = sample_tokens(mx.broadcast_to(mx.array(values, mx.float32), (GRID, len(values))), grid_B, sampling)
    shares = np.bincount(np.array(token_B), minlength=len(values)) / GRID
    expected = exact(values, sampling)
    assert np.abs(shares - expected).max() < 1e-4
    assert shares[expected == 0].sum() == 0, "a filtered token was sampled"


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("choices", ["cpu", "gpu"])
def test_extreme_uniforms_stay_in_the_filter(sampling: Sampling, choices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TREAT_CPU_AS, choices)
    rows = np.stack([logits(size=1000, seed=seed) for seed in range(25)])
    kept_BV = np.stack([exact(row, sampling) > 0 for row in rows])
    for uniform in (0.0, 2.0**-24, 0.5, 1 - 2.0**-24):
        token_B, _, _ = sample_tokens(mx.array(rows, mx.float32), mx.full(25, uniform), sampling)
        tokens = np.array(token_B).astype(int)
        assert kept_BV[np.arange(25), tokens].all()


def in_blocks(x: mx.array, axis: int = -1, *, inclusive: bool = True) -> mx.array:
    """A running sum as on a GPU: blocks of four, each added to a total that was summed in another order."""
    if not inclusive:
        return mx.pad(in_blocks(x)[..., :-1], [(0, 0)] * (x.ndim - 1) + [(1, 0)])
    rows = np.array(x, np.float32)
    starts = range(0, rows.shape[-1], 4)
    before = [rows[..., :start].sum(axis=-1, dtype=np.float32) for start in starts]  # pairwise
    inside = [np.cumsum(rows[..., start : start + 4], axis=-1, dtype=np.float32) for start in starts]
    return mx.array(np.concatenate([b[..., None] + x for b, x in zip(before, inside, strict=True)], axis=-1))


def test_a_running_sum_in_blocks_never_samples_a_filtered_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the running sum varies by a rounding where no token was kept. Counting the edges below the target then
    gave tokens that top-k had removed, for a few samples in a million."""
    values = np.random.default_rng(2).normal(0, 0.5, 4096)
    sampling = Sampling(top_k=2000)
    kept = exact(values, sampling) > 0
    mass = np.where(kept, np.exp(values - values.max()), 0).reshape(64, 64)
    wavers = [np.diff(np.array(in_blocks(mx.array(row[None], mx.float32)))[0]) for row in (*mass, mass.sum(axis=1))]
    assert any((rise < 0).any() for rise in wavers), "these rows show nothing: their running sums never fall"
    monkeypatch.setattr(mx, "cumsum", in_blocks)
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")
    edges = np.concatenate([np.cumsum(exact(values, sampling)), np.cumsum(mass.sum(axis=1)) / mass.sum()]).astype(
        np.float32
    )
    aims = np.concatenate([edges, *(np.nextafter(edges, np.float32(side)) for side in (0, 2))]).clip(0, 1 - 2.0**-24)
    for part in np.array_split(aims[:: len(aims) // 1500], 4):
        token_B, _, _ = sample_tokens(mx.array(np.tile(values, (len(part), 1)), mx.float32), mx.array(part), sampling)
        assert kept[np.array(token_B)].all()


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("choices", ["cpu", "gpu"])
def test_log_kept_is_the_share_that_was_kept(sampling: Sampling, choices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """logp − log_kept is the log-probability that the token was sampled with. Read at the last token's edge, it was NaN
    wherever the last token of the vocabulary was filtered, and the importance correction did nothing."""
    monkeypatch.setenv(TREAT_CPU_AS, choices)
    for seed in range(5):
        values = logits(seed=seed)
        policy = np.exp(values / sampling.temperature) / np.exp(values / sampling.temperature).sum()
        sampled_from = exact(values, sampling)
        token, logp, kept = (x.item() for x in sample_tokens(mx.array([values.tolist()]), mx.array([0.4]), sampling))
        assert kept == pytest.approx(np.log(policy[sampled_from > 0].sum()), abs=1e-6)
        assert logp - kept == pytest.approx(np.log(sampled_from[token]), abs=1e-5)
        assert sampling.has_filters or kept == 0


def test_huge_and_infinite_logits_do_not_overflow() -> None:
    values = np.array([1e4, 1e4, -1e4, -np.inf])
    tokens, logps = sampled(values, Sampling(), 1000)
    assert set(tokens.tolist()) == {0, 1}
    np.testing.assert_allclose(logps, np.log(0.5), atol=1e-6)


@pytest.mark.parametrize("choices", ["cpu", "gpu"])
def test_greedy_takes_the_likeliest_and_reports_temperature_one(choices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TREAT_CPU_AS, choices)
    values = logits()
    tokens, logps = sampled(values, GREEDY, 10)
    assert set(tokens.tolist()) == {int(values.argmax())}
    np.testing.assert_allclose(logps, values.max() - np.log(np.exp(values).sum()), atol=1e-6)


SAMPLINGS = [  # usual ones, extremes of p, and a k above some vocabularies and without blocks in others
    Sampling(top_k=20, top_p=0.95),
    Sampling(0.7, top_k=1),
    Sampling(1.3, top_k=20, top_p=0.8, min_p=0.02),
    Sampling(top_p=0.95),
    Sampling(1.5, top_p=0.999, min_p=0.001),
    Sampling(top_p=1e-6),
    Sampling(top_p=1 - 1e-6),
    Sampling(0.9, min_p=0.05),
    Sampling(top_k=3000, top_p=0.9),
]

ROW_KINDS = 10


def rows_of_every_kind(V: int, seed: int) -> np.ndarray:
    """[10, V] float32 logits: peaked, flat, rounded to few values, equal, masked, dominated by one token."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 1, (ROW_KINDS, V)) * np.array([[0.05], [1], [3], [8], [2], [2], [0], [2], [2], [1]])
    rows[4] = np.round(rows[4] * 4) / 4  # ties everywhere, at every threshold
    rows[5] = np.round(rows[5])
    rows[7, rng.random(V) < 0.9] = -np.inf
    rows[8, : V // 2] = rows[8, 0]  # a tie of half the row, in one run of ids
    rows[9, rng.integers(V)] = 1e4
    rows[7, rng.integers(V)] = 3.0  # so that no row is all −inf
    return rows.astype(np.float32)


@cache
def draw(sampling: Sampling, as_gpu: bool) -> Callable[[mx.array, mx.array], mx.array]:
    """Compiled, as in a rollout; a trace for the choices of either device."""
    return mx.compile(lambda logits_BV, uniform_B: sample_tokens(logits_BV, uniform_B, sampling).token_B)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("choices", ["cpu", "gpu"])
@pytest.mark.parametrize("V", [1, 2, 150, 2049, 2304, 4099, pytest.param(20_000, marks=pytest.mark.proof)])
def test_filters_against_a_sort(V: int, choices: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of every kind of row, by either device's kernels, on the CPU, whose sums are exact."""
    if choices == "gpu" and V > 5000:
        pytest.skip("its sums in float32 may give another token")
    monkeypatch.setenv(TREAT_CPU_AS, choices)
    with mx.stream(mx.cpu):
        for dtype in (mx.float32, mx.bfloat16):
            logits_BV = mx.array(rows_of_every_kind(V, seed=V)).astype(dtype)
            uniform_BU = np.random.default_rng(V).random((ROW_KINDS, 6), np.float32)
            ours = draw(sampling, on_gpu())(mx.repeat(logits_BV, 6, axis=0), mx.array(uniform_BU).flatten())
            by_sort = sample_by_sort(logits_BV, uniform_BU, sampling)
            np.testing.assert_array_equal(np.array(ours), by_sort, err_msg=f"V {V}, {sampling}, {dtype}")


def kept_by_sort(logits_BV: np.ndarray, mass_BV: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[B, V] bool: the tokens that the filters keep."""
    order_BV = np.argsort(-logits_BV, axis=1, kind="stable")
    falling_BV = np.take_along_axis(mass_BV.astype(np.float64), order_BV, axis=1)
    rank_V = np.arange(logits_BV.shape[1])
    inside_BV = np.broadcast_to(rank_V < (sampling.top_k or len(rank_V)), falling_BV.shape)
    if sampling.top_p < 1:
        running_BV = np.cumsum(np.where(inside_BV, falling_BV, 0), axis=1)
        before_BV = np.concatenate([np.zeros((len(running_BV), 1)), running_BV[:, :-1]], axis=1)
        inside_BV = inside_BV & (before_BV < sampling.top_p * running_BV[:, -1:])
    last_B1 = inside_BV.sum(axis=1, keepdims=True) - 1
    # Ties at the threshold stay: of logits where top-k compares logits, of masses where top-p alone compares masses.
    compared_BV = logits_BV if sampling.top_k else mass_BV
    floor_B1 = np.take_along_axis(np.take_along_axis(compared_BV, order_BV, axis=1), last_B1, axis=1)
    return (compared_BV >= floor_B1) & (mass_BV >= np.float32(sampling.min_p))


def sample_by_sort(logits_BV: mx.array, uniform_BU: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[B · U] tokens: U samples of each row by the sampler's masses and inverse CDF, filtered by a sort."""
    mass_BV = sampler._mass(logits_BV, logits_BV.max(axis=-1, keepdims=True), sampling.temperature)
    kept_BV = kept_by_sort(np.array(logits_BV.astype(mx.float32)), np.array(mass_BV), sampling)
    filtered_BV = mx.where(mx.array(kept_BV), mass_BV, 0)
    repeated_BV = mx.repeat(filtered_BV, uniform_BU.shape[1], axis=0)
    return np.array(sampler._inverse_cdf(repeated_BV, mx.array(uniform_BU).reshape(-1, 1))[0])[:, 0]
