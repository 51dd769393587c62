"""Rules about what the model writes: alike, repeating, cut off, of very different lengths."""

from __future__ import annotations

from backend.spec.health.recent import WINDOW, Recent, known
from backend.spec.health.rule import Rule, Sign, Threshold


def identical(recent: Recent, threshold: float) -> Sign | None:
    distinct, size = recent.mean("completions/distinct_fraction"), recent.setting("group_size")
    if distinct is None or size < 2 or recent.has_converged:
        return None
    # A group of G has at least one text: of the other G − 1 the share that is a text of its own.
    limit = (1 + threshold * (size - 1)) / size
    if distinct > limit:
        return None
    return Sign(
        distinct,
        f"The {size} completions of a group are on average only {distinct * size:.2g} different texts over the last {WINDOW} steps (up to "
        f"{limit * size:.2g} there is next to nothing to compare).",
        _more_variety(recent),
        limit=limit,
    )


def mode_collapse(recent: Recent, threshold: float) -> Sign | None:
    names = "completions/distinct_2", "completions/mean_length"
    now, length = (recent.mean(name) for name in names)
    shares, lengths = (known(recent.first, name) for name in names)
    if now is None or not length or not shares or len(shares) != len(lengths) or recent.has_converged:
        return None
    before, length_before = sum(shares) / len(shares), sum(lengths) / len(lengths)
    if before <= 0 or length_before <= 0:
        return None
    # Longer texts have a smaller share of different pairs by themselves, and shorter ones fewer pairs: both have to have fallen.
    left = max(now / before, now * length / (before * length_before))
    if left > threshold:
        return None
    return Sign(
        now,
        f"“Distinct-2” has fallen from {before:.2g} to {now:.2g}: of the pairs of words that a group was written with at first, {left:.0%} are left "
        f"(at {threshold:.0%} or less it has collapsed to one way of saying things).",
        _more_variety(recent) or {"learning_rate": recent.scaled("learning_rate", 0.5)},
        limit=threshold * before,
    )


def _more_variety(recent: Recent) -> dict[str, float]:
    return {"temperature": 1.0} if recent.setting("temperature") < 0.8 else {}


def entropy_collapse(recent: Recent, threshold: float) -> Sign | None:
    entropy, at_first = recent.mean("entropy"), known(recent.first, "entropy")
    if entropy is None or not at_first or recent.has_converged:
        return None
    before = sum(at_first) / len(at_first)
    if before <= 0 or entropy > threshold * before:
        return None
    beta = recent.setting("beta")
    return Sign(
        entropy,
        f"“Entropy” has fallen from {before:.2g} to {entropy:.2g} nats a token, {entropy / before:.0%} of what it was at first (below "
        f"{threshold:.0%} is a collapse), and the reward has not risen for all.",
        {"beta": 0.02} if beta == 0 else {"learning_rate": recent.scaled("learning_rate", 0.5)},
        limit=threshold * before,
    )


def repetition(recent: Recent, threshold: float) -> Sign | None:
    share = recent.mean("completions/repetition")
    if share is None or share <= threshold:
        return None
    return Sign(
        share,
        f"{share:.0%} of what a completion says stood in it before, word for word, averaged over the last {WINDOW} steps (above "
        f"{threshold:.0%} the model turns in circles).",
        {"learning_rate": recent.scaled("learning_rate", 0.5)},
    )


def cut_off(recent: Recent, threshold: float) -> Sign | None:
    share, length = recent.mean("hit_max_tokens_ratio"), recent.setting("max_completion_length")
    if share is None or share <= threshold:
        return None
    sentence = (
        f"“Cut off at the limit” is {share:.0%} on average over the last {WINDOW} steps (above {threshold:.0%} too many answers are never "
        f"finished): these completions reached {length:,} tokens."
    )
    if (recent.mean("completions/repetition") or 0.0) > REPEATING:
        shorter = max(SHORTEST, length // 2)
        return Sign(
            share, sentence, {"max_completion_length": shorter} if shorter < length else {}, advice=ROOM_IS_WASTED
        )
    return Sign(share, sentence, {"max_completion_length": length * 2})


REPEATING = 0.3
"""Share of repeated 8-grams above which more room would be filled with more of the same."""
SHORTEST = 16
"""Tokens: no shorter completions are proposed."""
ROOM_IS_WASTED = "They say the same again and again, so more room would not end them: lower Completion, and strengthen a reward for the right form."


def straggler(recent: Recent, threshold: float) -> Sign | None:
    longest, mean = recent.mean("completions/max_length"), recent.mean("completions/mean_length")
    sampling, step = recent.mean("time/rollout"), recent.mean("time/step")
    if not longest or not mean or not sampling or not step:
        return None
    if longest < threshold * mean or sampling < SAMPLING_SHARE * step:
        return None
    shorter = -int(-3 * mean // 16) * 16
    return Sign(
        longest,
        f"The longest completion of a step has {longest:,.0f} tokens, {longest / mean:.1f} times the mean of {mean:,.0f}, and sampling "
        f"takes {sampling / step:.0%} of “Step time”: most of it waits for one completion.",
        {"max_completion_length": shorter} if shorter < recent.setting("max_completion_length") else {},
        limit=threshold * mean,
    )


SAMPLING_SHARE = 0.5
"""Share of the step's time that sampling must take before its longest completion matters."""

COMPLETION_RULES = (
    Rule(
        "identical", "Identical completions", "Diversity of groups", "completions/distinct_fraction",
        Threshold(0.05, f"the mean over {WINDOW} steps of the distinct completions of a group, beyond the first, is at most this share "
                  "of the group, and the reward has not risen to nearly the same for all",
                  "ours: with 20 other completions in a group, one that differs; the demo starts at 0.2, and ends at 0 once it has learned"),
        "Raise Temp towards 1, and let Top P and Top K through more tokens.",
        identical, "temperature",
    ),
    Rule(
        "mode_collapse", "Mode collapse", "Distinct words", "completions/distinct_2",
        Threshold(0.5, f"over {WINDOW} steps the different pairs of tokens of a group, as a share of its tokens and as a number, are at most this part of "
                  f"what they were in the run's first {WINDOW} steps, and the reward has not risen to nearly the same for all",
                  "ours; distinct-n: arXiv:1510.03055. A healthy run of the demo keeps 0.6 and more, one that collapses comes to 0.4"),
        "Go on from an earlier checkpoint with a lower learning rate, a KL weight or an entropy bonus; raise Temp towards 1.",
        mode_collapse, "learning_rate",
    ),
    Rule(
        "entropy_collapse", "Entropy collapse", "Entropy", "entropy",
        Threshold(0.2, f"the mean entropy of {WINDOW} steps is at most this part of that of the run's first {WINDOW} steps, and the reward "
                  "has not risen to nearly the same for all",
                  "ours; that reward is bought with entropy and stalls once it is spent: arXiv:2505.22617"),
        "Lower the learning rate, raise Epsilon high above Epsilon, or give Beta (KL weight) or the entropy bonus a value.",
        entropy_collapse, "learning_rate",
    ),
    Rule(
        "repetition", "Repetition", "Diversity of groups", "completions/repetition",
        Threshold(REPEATING, f"the mean over {WINDOW} steps of the share of 8-grams of tokens that stood in the completion before is above this",
                  "ours: a text whose second half repeats the first has 0.5, the healthy recordings stay below 0.02"),
        "Read some completions. Lower the learning rate or raise Beta (KL weight); take back a reward that pays for repeating.",
        repetition, "reward_functions",
    ),
    Rule(
        "cut_off", "Cut off at the limit", "Cut off at the limit", "hit_max_tokens_ratio",
        Threshold(0.3, f"the mean over {WINDOW} steps of the share of completions that reached the limit is above this",
                  "users' reports: at 0.97 nothing was learned (trl#5697), below 0.3 runs did well"),
        "Read some. Answers that are on their way to an end need more room: raise Completion. Where they go on without ever giving an answer, "
        "lower it, and strengthen a reward for the right form.",
        cut_off, "max_completion_length",
    ),
    Rule(
        "straggler", "One long completion holds the step", "Completion length", "completions/max_length",
        Threshold(4.0, f"over {WINDOW} steps the longest completion has on average this many times the mean length, and sampling takes at "
                  f"least {SAMPLING_SHARE:.0%} of the step",
                  "ours: from here on three quarters of the sampling steps serve fewer than all completions"),
        "Lower Completion to a few times the mean length, or reward shorter answers.",
        straggler, "max_completion_length", level="info",
    ),
)  # fmt: skip
