"""The table of losses. A loss is a ratio, a term and a weight, one row of `LOSSES`:

    loss = Σ_it weight_it · (term(ratio_it, A_i) + β · KL_it), i: completion (row), t: token

The ratio compares the policy with the one that sampled, per token or completion (`LEVELS`). Weights are computed once
per optimizer batch (`token_weights`), so micro-batches add up. Axes: B rows, T completion tokens.

To add a loss: write its term and its weight here, add a row to `LOSSES`. The menu and the command line list it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, NamedTuple

import mlx.core as mx

Scalar = float | mx.array

# {"mean": {name: [numerator, denominator]}, "sum" | "min" | "max": {name: scalar}}; sums over micro-batches
Tally = dict[str, dict[str, mx.array]]


def token_mean(x_BT: mx.array, mask_BT: mx.array) -> mx.array:
    """[numerator, denominator] of the mean over unmasked tokens, without gradient."""
    return mx.stop_gradient(mx.stack([(x_BT * mask_BT).sum(), mask_BT.sum()]))


def combine(tallies: Iterable[Tally]) -> Tally:
    """Combine the tallies of several micro-batches or ranks."""
    operations = {"mean": mx.add, "sum": mx.add, "min": mx.minimum, "max": mx.maximum}

    def both(a: Tally, b: Tally) -> Tally:
        return {kind: {name: operations[kind](x, b[kind][name]) for name, x in a[kind].items()} for kind in a}

    return reduce(both, tallies)


def merge(tallies: Iterable[Tally]) -> dict[str, mx.array]:
    """Metrics of all micro-batches. NaN for a minimum or maximum over nothing."""
    whole = combine(tallies)
    metrics = {name: ratio[0] / mx.maximum(ratio[1], 1) for name, ratio in whole.get("mean", {}).items()}
    extremes = {
        name: mx.where(mx.isinf(x), mx.nan, x) for kind in ("min", "max") for name, x in whole.get(kind, {}).items()
    }
    return metrics | whole.get("sum", {}) | extremes


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Loss settings under TRL's names. Without defaults: a run sets each from its `Config`."""

    loss_type: str  # a key of `LOSSES`
    importance_sampling_level: str  # a key of `LEVELS`
    epsilon: float  # clip range below 1
    epsilon_high: float | None  # clip range above 1; None: `epsilon`. For cispo the largest ratio
    delta: float | None  # largest unclipped ratio (INTELLECT-2, arXiv:2505.07291)
    beta: float  # weight of the KL term
    kl_estimator: str  # a key of `KL_ESTIMATORS`
    use_bias_correction_kl: bool  # k3 times the ratio (DeepSeek-V3.2, arXiv:2512.02556)
    max_completion_length: int | None  # tokens; divisor of dr_grpo
    sapo_temperature_pos: float  # τ of sapo's gate where A > 0; `_neg`: A ≤ 0
    sapo_temperature_neg: float
    vespo_k_pos: float  # k and λ of vespo's φ where A ≥ 0; `_neg`: A < 0
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    top_entropy_quantile: float  # share of the most uncertain tokens that carries the term (arXiv:2506.01939)
    entropy_coef: float  # weight of the entropy bonus (arXiv:1602.01783)
    off_policy_mask_threshold: float | None  # nats per token; drops completions with A < 0 beyond it (arXiv:2512.02556)

    def __post_init__(self) -> None:
        tables = {"loss_type": LOSSES, "importance_sampling_level": LEVELS, "kl_estimator": KL_ESTIMATORS}
        for name, table in tables.items():
            if getattr(self, name) not in table:
                raise ValueError(f"{name} is one of {', '.join(table)}, not {getattr(self, name)!r}.")

    @property
    def upper(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a term. Masked positions have log-probability and log-ratio 0."""

    settings: LossConfig
    logp_BT: mx.array
    log_ratio_BT: mx.array  # log π_θ − log π_old, in nats
    ratio: mx.array  # [B, T], or [B, 1] at sequence level
    advantage: mx.array  # [B, 1] or [B, T]
    mask_BT: mx.array
    importance_weight: mx.array | None  # π_old / π_sampler, [B, T] or [B, 1]


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Counts over the whole optimizer batch, each at least 1."""

    rows: Scalar
    tokens: Scalar  # active
    items: Scalar  # `num_items` of `policy_loss`
    max_length: int | None


Term = Callable[[LossInputs], tuple[mx.array, dict[str, mx.array]]]
# inputs → (term [B, T] or [B, 1], metric → values to average)
Weight = Callable[[mx.array, BatchTotals], mx.array]  # (mask [B, T], totals) → weight of every token [B, T]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table below; the menu shows `name` and `sentence`."""

    name: str
    sentence: str
    paper: str


@dataclass(frozen=True, slots=True)
class Loss(Row):
    term: Term
    weight: Weight


@dataclass(frozen=True, slots=True)
class ImportanceLevel(Row):
    ratio: Callable[[mx.array, mx.array], mx.array]  # (log-ratio [B, T], mask [B, T]) → ratio [B, T] or [B, 1]


@dataclass(frozen=True, slots=True)
class KlEstimator(Row):
    term: Callable[[mx.array, mx.array, bool], mx.array]
    # (log π_ref − log π_θ [B, T], ratio, correct for the ratio) → KL per token [B, T]


def lengths(mask_BT: mx.array) -> mx.array:
    """Active tokens per row, [B, 1], at least 1."""
    return mx.maximum(mask_BT.sum(axis=1, keepdims=True), 1.0)


def sequence_ratio(log_ratio_BT: mx.array, mask_BT: mx.array) -> mx.array:
    """Geometric mean over the completion's tokens, [B, 1]: GSPO's s_i."""
    # The mean of the logarithms, not their sum: the variance of a sum grows with the length, so no clipping range would
    # fit completions of all lengths (arXiv:2507.18071).
    return mx.exp((log_ratio_BT * mask_BT).sum(axis=1, keepdims=True) / lengths(mask_BT))


def sequence_token_ratio(log_ratio_BT: mx.array, mask_BT: mx.array) -> mx.array:
    """The sequence ratio's value with the token ratio's gradient: GSPO-token."""
    ratio_B1 = mx.stop_gradient(sequence_ratio(log_ratio_BT, mask_BT))
    # exp(x − sg(x)) is 1 and has x's gradient.
    return ratio_B1 * mx.exp(log_ratio_BT - mx.stop_gradient(log_ratio_BT))


def clipped(t: LossInputs) -> tuple[mx.array, dict[str, mx.array]]:
    """−min(ρA, clip(ρ, 1−ε, 1+ε_high)·A): PPO's surrogate. Clip metrics see the ratio after `delta`, as in TRL."""
    low, high = 1 - t.settings.epsilon, 1 + t.settings.upper
    ratio = t.ratio if t.settings.delta is None else mx.minimum(t.ratio, t.settings.delta)
    # The minimum is pessimistic (PPO, arXiv:1707.06347): a ratio that already favours the objective gets no more
    # gradient, one that has gone the wrong way keeps its own, without bound where A < 0 unless `delta` gives one.
    term = -mx.minimum(ratio * t.advantage, mx.clip(t.ratio, low, high) * t.advantage)
    below = (ratio < low) & (t.advantage < 0)
    above = (ratio > high) & (t.advantage > 0)
    return term, {"clip_ratio_low": below, "clip_ratio_high": above, "clip_ratio_total": below | above}


def cispo_term(t: LossInputs) -> tuple[mx.array, dict[str, mx.array]]:
    """−sg(min(ρ, ε_high))·A·log π: every token keeps a gradient."""
    # stop_gradient: the ratio is a weight of ∇ log π here, not a function to be differentiated.
    scale = mx.stop_gradient(mx.minimum(t.ratio, t.settings.upper))
    return -scale * t.advantage * t.logp_BT, {"cispo_clip_ratio": (t.ratio > t.settings.upper) & (t.advantage > 0)}


def sapo_term(t: LossInputs) -> tuple[mx.array, dict[str, mx.array]]:
    """−σ(τ(ρ−1))·(4/τ)·A: a soft gate with derivative 1 at ρ = 1; τ depends on the sign of A."""
    s = t.settings
    # 4/τ makes up for σ'(0) = 1/4 and the inner τ: on-policy the gradient is that of ρA for every τ (arXiv:2511.20347).
    tau = mx.where(t.advantage > 0, s.sapo_temperature_pos, s.sapo_temperature_neg)
    return -mx.sigmoid(tau * (t.ratio - 1)) * (4 / tau) * t.advantage, {}


def vespo_term(t: LossInputs) -> tuple[mx.array, dict[str, mx.array]]:
    """−sg(φ(w))·A·log π with φ(w) = e^λ·w^k·e^(−λw), w the ratio of whole completions; k, λ by the sign of A."""
    s = t.settings
    # log w: a sum, not GSPO's mean, since φ itself damps long completions; TRL's bounds keep it finite in float32.
    least = math.log(1e-8)
    log_w_B1 = (mx.clip(t.log_ratio_BT, -20.0, 20.0) * t.mask_BT).sum(axis=1, keepdims=True)
    if t.importance_weight is not None:
        log_weight = mx.clip(mx.log(t.importance_weight), least, 20.0)
        by_row = t.importance_weight.shape[1] == 1
        log_w_B1 = log_w_B1 + (log_weight if by_row else (log_weight * t.mask_BT).sum(axis=1, keepdims=True))
    log_w_B1 = mx.clip(log_w_B1, least, 20.0)
    k = mx.where(t.advantage >= 0, s.vespo_k_pos, s.vespo_k_neg)
    lam = mx.where(t.advantage >= 0, s.vespo_lambda_pos, s.vespo_lambda_neg)
    # In one exponent: as separate factors w^k may overflow (w goes up to e^20) where e^(−λw) underflows, and inf · 0 is
    # NaN. φ(1) = 1, so on-policy this is REINFORCE.
    phi = mx.stop_gradient(mx.exp(lam + k * log_w_B1 - lam * mx.exp(log_w_B1)))
    return -phi * t.advantage * t.logp_BT, {"vespo/phi_seq_mean": phi}


def k3(distance_BT: mx.array, ratio: mx.array, corrected: bool) -> mx.array:
    """exp(d) − d − 1 ≥ 0, an unbiased estimate of KL(π_θ ‖ π_ref) for samples of π_θ."""
    # expm1: near the reference exp(d) − 1 − d would cancel to noise in float32.
    kl_BT = mx.expm1(distance_BT) - distance_BT
    # Ours are samples of π_old, and the ratio corrects value and gradient for that.
    return kl_BT * ratio if corrected else kl_BT


def sum_over_max_length(mask_BT: mx.array, totals: BatchTotals) -> mx.array:
    if totals.max_length is None:
        raise ValueError("max_completion_length is needed for dr_grpo, which divides by it.")
    return mask_BT / (totals.rows * totals.max_length)


def mean_of_row_means(mask_BT: mx.array, totals: BatchTotals) -> mx.array:
    return mask_BT / lengths(mask_BT) / totals.rows


def mean_of_items(mask_BT: mx.array, totals: BatchTotals) -> mx.array:
    return mask_BT / totals.items


LEVELS: dict[str, ImportanceLevel] = {
    "token": ImportanceLevel(
        name="Token",
        sentence="One ratio for each token.",
        paper="arXiv:2402.03300",
        ratio=lambda log_ratio_BT, mask_BT: mx.exp(log_ratio_BT),
    ),
    "sequence": ImportanceLevel(
        name="Sequence",
        sentence="One ratio for the whole completion (GSPO): steadier with long completions.",
        paper="arXiv:2507.18071",
        ratio=sequence_ratio,
    ),
    "sequence_token": ImportanceLevel(
        name="Sequence, token gradient",
        sentence="Clips by the completion's ratio, but each token keeps a gradient of its own (GSPO-token).",
        paper="arXiv:2507.18071",
        ratio=sequence_token_ratio,
    ),
}

KL_ESTIMATORS: dict[str, KlEstimator] = {
    "k3": KlEstimator(
        name="Schulman's k3",
        sentence="With d = log π_ref − log π_θ it is exp(d) − d − 1: never negative, and right on average, as in the "
        "papers and TRL.",
        paper="Schulman 2020, http://joschu.net/blog/kl-approx.html",
        term=k3,
    ),
    "documented": KlEstimator(
        name="As documented",
        sentence="It is ratio · exp(d) − d − 1, as the guide of MLX LoRA Studio writes it. Over the policy's own "
        "completions its gradient is 0 on average, so it hardly holds the model.",
        paper="MLX LoRA Studio's guide to GRPO",
        term=lambda distance_BT, ratio, _corrected: ratio * mx.exp(distance_BT) - distance_BT - 1,
    ),
}

LOSSES: dict[str, Loss] = {
    "grpo": Loss(
        name="GRPO",
        sentence="Mean over completions of each completion's mean over its tokens.",
        paper="arXiv:2402.03300",
        term=clipped,
        weight=mean_of_row_means,
    ),
    "bnpo": Loss(
        name="BNPO",
        sentence="Mean over all tokens of the update, so a long completion counts for more. Equal to DAPO here: TRL's "
        "BNPO averages each micro-batch alone.",
        paper="TRL's GRPOTrainer",
        term=clipped,
        weight=lambda mask_BT, totals: mask_BT / totals.tokens,
    ),
    "dr_grpo": Loss(
        name="Dr. GRPO",
        sentence="Sum divided by the number of completions times the longest length: no length bias.",
        paper="arXiv:2503.20783",
        term=clipped,
        weight=sum_over_max_length,
    ),
    "dapo": Loss(
        name="DAPO",
        sentence="Mean over all tokens of the update, equal to BNPO here. Meant with a larger epsilon high.",
        paper="arXiv:2503.14476",
        term=clipped,
        weight=mean_of_items,
    ),
    "luspo": Loss(
        name="LUSPO",
        sentence="Each completion's loss times its length, with one ratio for the whole completion.",
        paper="arXiv:2602.05261",
        term=clipped,
        weight=lambda mask_BT, totals: mask_BT / totals.rows,
    ),
    "cispo": Loss(
        name="CISPO",
        sentence="The ratio is cut off at epsilon high (try 5) and only scales the gradient: no token loses it.",
        paper="arXiv:2506.13585",
        term=cispo_term,
        weight=mean_of_items,
    ),
    "sapo": Loss(
        name="SAPO",
        sentence="A soft gate in place of the hard clip, gentler on better answers than on worse ones.",
        paper="arXiv:2511.20347",
        term=sapo_term,
        weight=mean_of_row_means,
    ),
    "vespo": Loss(
        name="VESPO",
        sentence="Weighs each completion by a smooth curve over its ratio, in place of the hard clip.",
        paper="arXiv:2602.10693",
        term=vespo_term,
        weight=mean_of_items,
    ),
}

# The settings that a call of `policy_loss` leaves out. A run never uses them.
TRL_DEFAULTS = LossConfig(
    loss_type="grpo",
    importance_sampling_level="token",
    epsilon=0.2,
    epsilon_high=None,
    delta=None,
    beta=0.0,
    kl_estimator="k3",
    use_bias_correction_kl=True,
    max_completion_length=None,
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
    top_entropy_quantile=1.0,
    entropy_coef=0.0,
    off_policy_mask_threshold=None,
)


def token_weights(
    mask_BT: mx.array,
    *,
    loss_type: str = "grpo",
    max_completion_length: int | None = None,
    num_items: Scalar | None = None,
) -> mx.array:
    """Weight of every token, [B, T] float32, from the whole optimizer batch's mask. `num_items` (dapo, cispo, vespo):
    the step's active tokens. Raises ValueError for dr_grpo without `max_completion_length`."""
    # float32, because bfloat16 has no exact counts above 256. A batch without active tokens has weights 0, not 0/0.
    mask_BT = mask_BT.astype(mx.float32)
    tokens = mask_BT.sum()
    totals = BatchTotals(
        rows=mx.maximum(mask_BT.shape[0], 1),
        tokens=mx.maximum(tokens, 1),
        items=mx.maximum(tokens if num_items is None else num_items, 1),
        max_length=max_completion_length,
    )
    return LOSSES[loss_type].weight(mask_BT, totals)


def policy_loss(
    logps: mx.array,
    old_logps: mx.array | None,
    ref_logps: mx.array | None,
    advantages: mx.array,
    mask: mx.array,
    *,
    num_items: Scalar | None = None,
    is_ratio: mx.array | None = None,
    **settings: Any,
) -> tuple[mx.array, dict[str, mx.array]]:
    """Loss of a batch, differentiable in `logps` (and `entropies`), and its metrics by name. Takes the arrays of
    `policy_terms` and the fields of `LossConfig` (default: TRL's) by name; `is_ratio` is its `importance_weight`.
    `num_items`: active tokens of the whole step, the divisor of dapo, cispo and vespo."""
    names = {field.name for field in fields(LossConfig)}
    own = replace(TRL_DEFAULTS, **{name: value for name, value in settings.items() if name in names})
    arrays = {name: value for name, value in settings.items() if name not in names}
    if num_items is not None and arrays.get("weights") is None:
        arrays["weights"] = token_weights(
            mask, loss_type=own.loss_type, max_completion_length=own.max_completion_length, num_items=num_items
        )
    loss, tally, _ = policy_terms(
        logps, old_logps, ref_logps, advantages, mask, own, importance_weight=is_ratio, **arrays
    )
    return loss, merge([tally])


class TokenValues(NamedTuple):
    """Per-token values of a loss, [B, T], for display; undefined where masked."""

    ratio_BT: mx.array  # π_θ / π_old
    clipped_BT: mx.array
    advantage_BT: mx.array  # times importance correction; 0 without a policy term


def policy_terms(
    logps: mx.array,
    old_logps: mx.array | None,
    ref_logps: mx.array | None,
    advantages: mx.array,
    mask: mx.array,
    settings: LossConfig,
    *,
    weights: mx.array | None = None,
    entropies: mx.array | None = None,
    uncertain: mx.array | None = None,
    entropy_tokens: Scalar | None = None,
    sampling_logps: mx.array | None = None,
    importance_weight: mx.array | None = None,
) -> tuple[mx.array, Tally, TokenValues]:
    """One micro-batch's share of the loss, its tally, and values of its tokens.

    `logps`, `old_logps`, `ref_logps`, `sampling_logps`, `entropies`: [B, T] in nats at the sampling temperature;
    `advantages`: [B] or [B, T]; `mask`: [B, T]. `old_logps` defaults to the current policy, `sampling_logps` to the old
    one. `importance_weight`, [B, T] or [B, 1], multiplies the term. From the optimizer batch, by default from these
    arrays: `weights`, `uncertain` (1 for the tokens of `top_entropy_quantile`), `entropy_tokens` (divisor of the
    bonus). Raises ValueError for a setting whose arrays are missing.
    """
    s = settings
    if s.beta != 0 and ref_logps is None:
        raise ValueError("beta is above 0, so the loss needs the reference policy's log-probabilities (ref_logps).")
    if entropies is None and (s.entropy_coef != 0 or s.top_entropy_quantile < 1):
        raise ValueError("entropy_coef and top_entropy_quantile need each token's entropy (entropies).")
    mask_BT = mask.astype(mx.float32)
    if weights is None:
        weights = token_weights(mask_BT, loss_type=s.loss_type, max_completion_length=s.max_completion_length)

    def masked(x_BT: mx.array) -> mx.array:
        return mx.where(mask_BT > 0, x_BT.astype(mx.float32), 0.0)  # because NaN · 0 is NaN

    def per_row_or_token(x: mx.array) -> mx.array:
        return x.astype(mx.float32) if x.shape[1] == 1 else masked(x)

    logp_BT = masked(logps)
    # Without old log-probabilities the ratio is 1 in value and ∇ log π in gradient: exactly on-policy, no second pass.
    log_ratio_BT = logp_BT - (mx.stop_gradient(logp_BT) if old_logps is None else masked(old_logps))
    t = LossInputs(
        settings=s,
        logp_BT=logp_BT,
        log_ratio_BT=log_ratio_BT,
        ratio=LEVELS[s.importance_sampling_level].ratio(log_ratio_BT, mask_BT),
        advantage=per_row_or_token(advantages[:, None] if advantages.ndim == 1 else advantages),
        mask_BT=mask_BT,
        importance_weight=None if importance_weight is None else per_row_or_token(importance_weight),
    )
    term, marks = LOSSES[s.loss_type].term(t)

    # Constant factors of the term: rows on policy, uncertain tokens, importance correction (vespo has it inside φ).
    entropy_BT = None if entropies is None else masked(entropies)
    uncertain_BT: Scalar = 1.0
    if s.top_entropy_quantile < 1 and entropy_BT is not None:
        threshold = entropy_quantile(entropy_BT, mask_BT, s.top_entropy_quantile)
        uncertain_BT = (entropy_BT >= threshold) * mask_BT if uncertain is None else uncertain
    factor = _on_policy_rows(t, sampling_logps) * uncertain_BT
    if t.importance_weight is not None and s.loss_type != "vespo":
        factor = factor * t.importance_weight
    term = term * factor

    kl_BT = None
    if ref_logps is not None:
        distance_BT = masked(ref_logps) - logp_BT
        if s.kl_estimator == "documented" and s.beta == 0:  # logged alone: Schulman's
            kl_BT = k3(distance_BT, t.ratio, False)
        else:
            kl_BT = KL_ESTIMATORS[s.kl_estimator].term(distance_BT, t.ratio, s.use_bias_correction_kl)
        # A token without policy term still has its KL (as in TRL). Not 0 · KL where beta is 0: it may overflow.
        term = term + s.beta * kl_BT if s.beta != 0 else term
    loss = (term * weights).sum()  # weights are 0 where the mask is

    tally = _tally(t, marks, kl_BT, entropy_BT)
    clipped_BT = marks.get("clip_ratio_total", marks.get("cispo_clip_ratio", mx.array(False)))
    values = (mx.stop_gradient(mx.broadcast_to(x, mask_BT.shape)) for x in (t.ratio, clipped_BT, t.advantage * factor))
    if s.entropy_coef != 0 and entropy_BT is not None:
        tally["sum"]["policy_loss"] = loss
        tally["mean"]["entropy_coef"] = mx.array([s.entropy_coef, 1.0])
        counted_BT = mask_BT * uncertain_BT
        tokens = counted_BT.sum() if entropy_tokens is None else entropy_tokens
        loss = loss - s.entropy_coef * ((entropy_BT * counted_BT).sum() / mx.maximum(tokens, 1))
    return loss, tally, TokenValues(*values)


def _on_policy_rows(t: LossInputs, sampling_logps: mx.array | None) -> Scalar:
    """0 for rows with A < 0 whose mean log(π_sampler / π_θ) exceeds the threshold, else 1; [B, 1] or [B, T]."""
    if t.settings.off_policy_mask_threshold is None:
        return 1.0
    # Only A < 0: the push away from a text grows without bound (`clipped`); here the policy no longer writes it.
    drift_BT = -t.log_ratio_BT
    if sampling_logps is not None:
        drift_BT = mx.where(t.mask_BT > 0, sampling_logps.astype(mx.float32), 0.0) - t.logp_BT
        # NaN: a token that the sampler could not score counts as on-policy.
        drift_BT = mx.where(mx.isnan(drift_BT), 0.0, drift_BT)
    drift_B1 = (drift_BT * t.mask_BT).sum(axis=1, keepdims=True) / lengths(t.mask_BT)
    # A comparison: no gradient flows back through the drift.
    return ((t.advantage >= 0) | (drift_B1 <= t.settings.off_policy_mask_threshold)).astype(mx.float32)


def _tally(t: LossInputs, marks: dict[str, mx.array], kl_BT: mx.array | None, entropy_BT: mx.array | None) -> Tally:
    by_row = t.settings.loss_type == "vespo" or t.settings.importance_sampling_level == "sequence"
    by_row = by_row and t.advantage.shape[1] == 1
    means: dict[str, mx.array] = {}
    # A sequence ratio and vespo's φ are one number a row, so their means are over rows, as TRL's are.
    for name, mark in marks.items():
        row_mean = [mark.sum().astype(mx.float32), mx.array(float(mark.shape[0]))]
        means[name] = mx.stop_gradient(mx.stack(row_mean)) if by_row else token_mean(mark, t.mask_BT)
    for name, x_BT in (("kl", kl_BT), ("entropy", entropy_BT)):
        if x_BT is not None:
            means[name] = token_mean(x_BT, t.mask_BT)
    tally: Tally = {"mean": means, "sum": {}, "min": {}, "max": {}}
    if "clip_ratio_low" in marks:
        # The share of each row [B], NaN without active tokens; `merge` makes infinity NaN where no row has any.
        low, high = (
            mark[:, 0].astype(mx.float32) if by_row else (mark * t.mask_BT).sum(axis=1) / t.mask_BT.sum(axis=1)
            for mark in (marks["clip_ratio_low"], marks["clip_ratio_high"])
        )
        tally["min"]["clip_ratio/low_min"] = mx.where(mx.isnan(low), mx.inf, low).min()
        tally["max"]["clip_ratio/high_max"] = mx.where(mx.isnan(high), -mx.inf, high).max()
    return tally


def entropy_quantile(entropies_BT: mx.array, mask_BT: mx.array, top: float) -> mx.array:
    """Entropy in nats exceeded by a share `top` of active tokens, as `numpy.quantile(…, 1 − top)`; infinite if none."""
    mask_BT = mask_BT.astype(mx.float32)
    # Masked tokens sort to the end, beyond every position that the active ones have.
    ordered = mx.sort(mx.where(mask_BT > 0, entropies_BT.astype(mx.float32), mx.inf).reshape(-1))
    position = mx.array(1 - top, mx.float32) * mx.maximum(mask_BT.sum() - 1, 0)
    # Arithmetic on the device instead of numpy's quantile, so that nothing waits for the entropies.
    below, above = mx.floor(position), mx.ceil(position)
    low, high = (mx.take(ordered, x.astype(mx.int32)) for x in (below, above))
    # Without active tokens both neighbours are infinite, and interpolating would give inf − inf = NaN.
    return mx.where(below == above, low, low + (position - below) * (high - low))
