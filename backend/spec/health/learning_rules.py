"""Rules about the updates: too large, too small, none at all, not a number."""

from __future__ import annotations

from backend.spec.health.recent import LONG, WINDOW, Recent, known
from backend.spec.health.rule import Rule, Sign, Threshold

SUDDEN = 3
"""Steps that all must lie beyond the limit of an explosion: the KL estimate has single outliers."""
SETTLED = 30
"""Steps at the full learning rate before a rate can count as too low."""
MUST_BE_NUMBERS = ("loss", "grad_norm", "kl", "entropy")
LOWEST_RATE = 1e-6
"""A proposal is never below it."""
MUST_WIDEN = 0.1
"""An epsilon below it is widened before the learning rate is blamed for clipping."""


def drifting(recent: Recent, threshold: float) -> Sign | None:
    kl = recent.median("kl")
    if kl is None or kl <= threshold or _has_exploded(recent, KL_EXPLODING.threshold.value):
        return None
    return Sign(
        kl,
        f"“KL from the reference” is {kl:.3g} nats a token, the median of the last {WINDOW} steps (above {threshold:.2g} the policy drifts "
        f"from the model it started as).",
        {"learning_rate": recent.scaled("learning_rate", 0.5)},
    )


def kl_exploding(recent: Recent, threshold: float) -> Sign | None:
    if not _has_exploded(recent, threshold):
        return None
    kl = recent.median("kl", SUDDEN)
    return Sign(
        kl,
        f"“KL from the reference” is {kl:.3g} nats a token, above {threshold:.2g} in each of the last {SUDDEN} steps: the model is hardly "
        f"the one it started as.",
        {"learning_rate": recent.scaled("learning_rate", 0.1)},
    )


def _has_exploded(recent: Recent, limit: float) -> bool:
    values = recent.values("kl", SUDDEN)
    return len(values) == SUDDEN and min(values) > limit


def moving_fast(recent: Recent, threshold: float) -> Sign | None:
    clipped, epsilon = recent.mean("clip_ratio_total"), recent.setting("epsilon")
    if clipped is None or clipped <= threshold:
        return None
    narrow = epsilon < MUST_WIDEN and recent.setting("importance_sampling_level") in ("", "token", None)
    return Sign(
        clipped,
        f"“Clip ratios” total {clipped:.0%} on average over the last {WINDOW} steps (above {threshold:.0%} the policy moves faster than "
        f"its completions allow)" + (f": Epsilon is only {epsilon:g}." if narrow else "."),
        {"epsilon": 0.2} if narrow else {"learning_rate": recent.scaled("learning_rate", 0.5)},
    )  # fmt: skip


def never_clips(recent: Recent, threshold: float) -> Sign | None:
    clipped, updates = recent.values("clip_ratio_total", LONG), recent.updates_per_rollout
    if updates < 2 or len(clipped) < LONG or sum(clipped) >= threshold * LONG or recent.has_improved:
        return None
    share = sum(clipped) / LONG
    return Sign(
        share,
        f"“Clip ratios” total {share:.1%} on average over the last {LONG} steps (below {threshold:.0%} is too seldom), although there are "
        f"{updates} updates per rollout, and the reward does not rise: the updates are too small to matter.",
        {"learning_rate": max(LOWEST_RATE, recent.scaled("learning_rate", 3))},
    )


def too_slow(recent: Recent, threshold: float) -> Sign | None:
    kl, rates = recent.median("kl", SETTLED), recent.values("learning_rate", SETTLED)
    rate = recent.setting("learning_rate")
    if kl is None or kl >= threshold or recent.has_improved or min(rates, default=0) < rate / 2:
        return None
    if recent.setting("kl_estimator") != "k3" and recent.setting("beta") > 0:
        return None  # that estimate is of either sign, and small where the policy has moved far
    return Sign(
        kl,
        f"“KL from the reference” is still {kl:.1g} nats a token after {recent.step} steps (below {threshold:.0g} the policy has not moved), "
        f"and the reward has not risen: at a learning rate of {rate:.2g} nothing is learned.",
        {"learning_rate": max(LOWEST_RATE, recent.scaled("learning_rate", 10))},
    )


def gradient_zero(recent: Recent, threshold: float) -> Sign | None:
    norms, silent = recent.values("grad_norm"), recent.mean("frac_groups_without_signal")
    # Without a reward that differs there is no gradient either; that is another rule's finding.
    if len(norms) < WINDOW or max(norms) > threshold or (silent is not None and silent > 0.5):
        return None
    masked = recent.setting("mask_truncated_completions") and (recent.mean("hit_max_tokens_ratio") or 0) > 0.9
    return Sign(
        max(norms),
        f"“Gradient norm” has been 0 for {WINDOW} steps, although completions of a group get different rewards: nothing is learned.",
        {"max_completion_length": recent.setting("max_completion_length") * 2} if masked else {},
        advice="Every completion is cut off, and Mask truncated completions leaves out those that are: raise Completion."
        if masked
        else "",
    )


def not_a_number(recent: Recent, threshold: float) -> Sign | None:
    if not recent.steps:
        return None
    # Where no completion had a signal the learner measures nothing: then the entropy is missing with all the others.
    always, measured = MUST_BE_NUMBERS[:2], MUST_BE_NUMBERS[2:] if "entropy" in recent.steps[-1] else ()
    broken = [name for name in always if name in recent.not_numbers]
    broken += [name for name in measured if name in recent.not_numbers and known(recent.first, name)]
    if not broken:
        return None
    return Sign(
        None,
        f"In step {recent.step} {' and '.join(broken)} {'is' if len(broken) == 1 else 'are'} not a number: a log-probability has overflowed.",
        {"learning_rate": recent.scaled("learning_rate", 0.1)},
        metric=broken[0],
    )


def sampler_differs(recent: Recent, threshold: float) -> Sign | None:
    """Measured before top-p, top-k and min-p, so filters do not count: only the rounding of the type that the model computes in."""
    gap = recent.mean("sampling/logp_gap/mean")
    if gap is None or gap <= threshold:
        return None
    return Sign(
        gap,
        f"“Sampler and learner” differ by {gap:.2g} nats a token in the log-probability of the same token, on average over the last {WINDOW} "
        f"steps (above {threshold:.2g} the model's numbers are too coarse).",
        {"dtype": "float32"},
    )


KL_EXPLODING = Rule(
    "kl_exploding", "KL exploding", "KL from the reference", "kl",
    Threshold(5.0, f"the KL of each of the last {SUDDEN} steps is above this, in nats a token",
              "ours: ten times the limit of drifting, and more than the entropy of most models' next token"),
    "Stop, and go back to an earlier checkpoint with a tenth of the learning rate.",
    kl_exploding, "learning_rate", level="error", needs=SUDDEN,
)  # fmt: skip

LEARNING_RULES = (
    Rule(
        "drifting", "Drifting from the reference", "KL from the reference", "kl",
        Threshold(0.5, f"the median KL of {WINDOW} steps is above this, in nats a token", "SPEC, after the guides to GRPO with TRL"),
        "Lower the learning rate, or raise Beta (KL weight).",
        drifting, "learning_rate",
    ),
    KL_EXPLODING,
    Rule(
        "moving_fast", "Clipped too often", "Clip ratios", "clip_ratio_total",
        Threshold(0.2, f"the mean over {WINDOW} steps of the share of clipped tokens is above this", "SPEC: 0.05 to 0.2 is healthy"),
        "Lower the learning rate, widen Epsilon, or make fewer updates per rollout.",
        moving_fast, "learning_rate",
    ),
    Rule(
        "never_clips", "Clipped never or too seldom", "Clip ratios", "clip_ratio_total",
        Threshold(0.05, f"with two or more updates per rollout the mean share of clipped tokens over {LONG} steps is below this, and the "
                  "reward has not risen", "MLX LoRA Studio's guide: 0.05 to 0.2 is healthy, below it the signal is too weak"),
        "Raise the learning rate, or make rewards that tell the completions of a group apart. Else one update per rollout saves time.",
        never_clips, "learning_rate", level="info", needs=LONG,
    ),
    Rule(
        "too_slow", "Learning rate too low to matter", "KL from the reference", "kl",
        Threshold(1e-5, f"after {SETTLED} steps at half the learning rate or more the median KL is below this, in nats a token, and the "
                  "reward has not risen",
                  "ours: a change of 0.4 % in a token's probability, less than rounding to 16 bits; trl#2872, X-R1#66"),
        "Raise the learning rate. Adapters want roughly ten times what a full fine-tune wants.",
        too_slow, "learning_rate", needs=SETTLED,
    ),
    Rule(
        "gradient_zero", "Zero gradient", "Gradient norm", "grad_norm",
        Threshold(1e-9, f"the gradient norm was not above this in {WINDOW} steps, while most groups have a signal",
                  "ours: below what float32 adds to a weight"),
        "Look for completions that are all masked, an adapter whose Scale is 0, or reward weights that cancel out.",
        gradient_zero, "mask_truncated_completions", level="error",
    ),
    Rule(
        "not_a_number", "Not a number", "Loss", "loss",
        Threshold(0.0, "the loss, gradient norm, KL or entropy of the newest step is not a number, where it was one before",
                  "open-r1#704, Search-R1#88; a gradient that is not a number ends the run before it is applied"),
        "Stop, and go back to an earlier checkpoint with a lower learning rate.",
        not_a_number, "learning_rate", level="error", needs=1,
    ),
    Rule(
        "sampler_differs", "Sampler and learner apart", "Sampler and learner", "sampling/logp_gap/mean",
        Threshold(0.05, f"the mean gap over {WINDOW} steps between a token's log-probability in sampling and in learning is above this, in nats",
                  "measured: float32 stays below 1e-6, 16 bits about 0.01"),
        "Set Precision to float16 or float32, and leave Sampling correction on Automatic.",
        sampler_differs, "dtype",
    ),
)  # fmt: skip
