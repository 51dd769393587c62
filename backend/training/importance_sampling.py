"""Importance correction by π_old / π_sampler, as TRL's `vllm_importance_sampling_correction`: truncated (Yao et al.
2025) or masked (Liu et al. 2025)."""

from dataclasses import dataclass

import mlx.core as mx

from backend.training.batch import Batch


@dataclass(frozen=True, slots=True)
class ImportanceCorrection:
    mode: str = "token_truncate"
    clip_min: float | None = None
    clip_max: float | None = None
    ignores_filters: bool = False  # correct for grammar and rounding, not for top-p, top-k and min-p

    def measure(self, batch: Batch, old_logp_BT: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        """Importance weights of a micro-batch, [B, T] or [B, 1], and metrics."""
        limits = batch.mask_BT, self.mode, self.clip_min, self.clip_max
        if not self.ignores_filters:
            return importance_ratio(old_logp_BT, batch.sampling_logp_BT, *limits)
        log_held_BT = 0.0 if batch.log_held_BT is None else batch.log_held_BT
        unfiltered_logp_BT = batch.sampling_logp_BT + batch.log_kept_BT - log_held_BT
        weights, metrics = importance_ratio(old_logp_BT, unfiltered_logp_BT, *limits)
        return weights, metrics | logp_difference(old_logp_BT, batch.sampling_logp_BT, batch.mask_BT)


UNCLIPPED = ImportanceCorrection()  # measures every token's ratio


def importance_ratio(
    old_logp_BT: mx.array,
    sampling_logp_BT: mx.array,
    mask_BT: mx.array,
    mode: str,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> tuple[mx.array, dict[str, mx.array]]:
    """Return π_old / π_sampler and metrics. `mode`: `token_` ([B, T]) or `sequence_` ([B, 1], a product per row), then
    `truncate` (to the bounds) or `mask` (0 outside). Masked and unscored (NaN) tokens count as 1. Raises ValueError."""
    if mode not in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        raise ValueError(f"mode is token_ or sequence_, then truncate or mask, not {mode!r}.")
    # The logarithm is set to 0 before exp, so NaN and padding never enter a sum or a product.
    scored_BT = (mask_BT > 0) & ~mx.isnan(sampling_logp_BT)
    difference_BT = mx.where(scored_BT, old_logp_BT - sampling_logp_BT, 0.0)
    by_row = mode.startswith("sequence")
    # A sequence's ratio is a product over its tokens, so it may be 0 or infinite in float32; the bounds catch both.
    ratio = mx.exp(difference_BT.sum(axis=1, keepdims=True) if by_row else difference_BT)
    low = -mx.inf if clip_min is None else clip_min
    high = mx.inf if clip_max is None else clip_max
    clipped = mx.clip(ratio, low, high)
    # ratio == clipped: within bounds. Truncation (TIS) is biased but keeps every token; masking (MIS) drops outliers.
    ratio = clipped if mode.endswith("truncate") else mx.where(ratio == clipped, ratio, 0.0)
    counted = mx.ones_like(ratio) > 0 if by_row else mask_BT > 0
    # A sequence ratio is averaged over rows, a token ratio over active tokens.
    metrics = logp_difference(old_logp_BT, sampling_logp_BT, mask_BT)
    return ratio, metrics | _min_mean_max("sampling/importance_sampling_ratio", ratio, counted)


def logp_difference(
    old_logp_BT: mx.array, sampling_logp_BT: mx.array, mask_BT: mx.array, name: str = "sampling_logp_difference"
) -> dict[str, mx.array]:
    """Mean and maximum of |log π_old − log π_sampler| in nats, over the scored tokens."""
    scored_BT = (mask_BT > 0) & ~mx.isnan(sampling_logp_BT)
    metrics = _min_mean_max(f"sampling/{name}", mx.abs(old_logp_BT - sampling_logp_BT), scored_BT)
    metrics.pop(f"sampling/{name}/min")
    return metrics


def _min_mean_max(name: str, x: mx.array, counted: mx.array) -> dict[str, mx.array]:
    count = counted.sum()
    low = mx.where(counted, x, mx.inf).min()
    high = mx.where(counted, x, -mx.inf).max()
    mean = mx.where(counted, x, 0.0).sum() / mx.maximum(count, 1)
    three = {"min": low, "mean": mean, "max": high}
    return {f"{name}/{key}": mx.where(count > 0, value, 0.0) for key, value in three.items()}
