"""All rules, in the order in which their findings are shown: the worst and the most basic first. To add one, write
it in a module of its kind and it is here, in the event log, on the Monitor page, in `doctor` and, once tested, in
docs/health.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from backend.config.first_choices import SYSTEM_PROMPT
from backend.distributed.hosts_file import MOST_HOSTS
from backend.trainer.health.recent import LONG, WINDOW, MeanChange, Metrics, Recent, known, label_of


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` stays the same as long as a rule keeps finding the same, so that it is reported once.

    `metric` is the name of the metric behind it, `value` what it was and `threshold` the limit that it passed, in
    the metric's unit. `settings`: setting → the value that is proposed for it.
    """

    code: str
    sentence: str
    advice: str
    level: str = "warning"
    metric: str = ""
    value: float | None = None
    threshold: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def rule(self) -> str:
        """The code of the rule that found it."""
        return self.code.partition(" ")[0]

    def fields(self) -> dict[str, Any]:
        """As the fields of a `health` event; those that are not known are left out."""
        always = ("code", "sentence", "advice", "level")
        return {key: value for key, value in asdict(self).items() if key in always or value not in ("", None, {})}


# ── rule ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

# The form of a rule: its threshold with the reason for it, and the function that looks at a run.

Level = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """A limit, in words that follow “when”, and where the number comes from."""

    value: float
    means: str
    source: str


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rule saw. `value` and `limit` (where it is not the threshold itself) are in the metric's unit.

    `about` tells findings of one rule apart: the reward functions it is about. `advice` replaces the rule's.
    """

    value: float | None
    sentence: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    about: tuple[str, ...] = ()
    limit: float | None = None
    metric: str = ""
    advice: str = ""


Look = Callable[[Recent, float], Sign | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """`look(recent, threshold)` returns what it saw, or None. `metric` is the one behind it and `chart` the title of
    the chart that shows it; `setting` the one to look at first."""

    code: str
    title: str
    chart: str
    metric: str
    threshold: Threshold
    advice: str
    look: Look
    setting: str = ""
    level: Level = "warning"
    needs: int = WINDOW
    """Steps before it can find anything."""

    def find(self, recent: Recent) -> Finding | None:
        """What the rule finds at the newest step."""
        sign = self.look(recent, self.threshold.value)
        if sign is None:
            return None
        return Finding(
            " ".join((self.code, *sign.about)),
            sign.sentence,
            sign.advice or self.advice,
            self.level,
            sign.metric or self.metric,
            sign.value,
            self.threshold.value if sign.limit is None else sign.limit,
            dict(sign.settings),
        )


# ── reward rules ─────────────────────────────────────────────────────────────────────────────────────────────────────


def never_scores(recent: Recent, threshold: float) -> Sign | None:
    if len(recent.steps) < WINDOW:
        return None
    silent = [name for name in recent.rewards() if not any(known(recent.steps, f"rewards/{name}/mean"))]
    silent = [name for name in silent if known(recent.steps, f"rewards/{name}/mean")]
    if not silent:
        return None
    labels = [label_of(name) for name in silent]
    functions = (
        f"function{'s' if len(silent) > 1 else ''} {' and '.join(filter(None, [', '.join(labels[:-1]), labels[-1]]))}"
    )
    # A model that has once written the tags knows of them; one that is cut off never comes to them.
    knows_tags = any(
        any(known(recent.first, f"rewards/{name}/mean")) for name in recent.rewards() if name.startswith("r1_")
    )
    is_told = recent.setting("system_prompt") or (recent.mean("hit_max_tokens_ratio") or 0) > 0.3
    asks_for_tags = any(name.startswith("r1_") for name in silent) and not (knows_tags or is_told)
    return Sign(
        0.0,
        f"The reward {functions} gave {threshold:.0f} to every completion of the last {len(recent.steps)} steps.",
        {"system_prompt": SYSTEM_PROMPT} if asks_for_tags else {},
        about=tuple(silent),
        metric=f"rewards/{silent[0]}/mean",
        advice="Tell the model in the system prompt to write the tags that these functions look for."
        if asks_for_tags
        else "",
    )


def no_signal(recent: Recent, threshold: float) -> Sign | None:
    share = recent.mean("frac_groups_without_signal")
    if share is None or share < threshold or recent.has_converged:
        return None
    is_cold = recent.setting("temperature") < 0.8
    return Sign(
        share,
        f"“Groups without signal” is {share:.0%} on average over the last {WINDOW} steps (from {threshold:.0%} "
        "on nothing is learned): "
        f"within a group all completions got the same reward.",
        {"temperature": 1.0} if is_cold else {"group_size": recent.setting("group_size") * 2},
    )


def reward_fell(recent: Recent, threshold: float) -> Sign | None:
    weights_vary = recent.setting("stages") or recent.setting("reward_weight_schedule") != "constant"
    if weights_vary or "reward_weights" in recent.changed:  # rewards of other weights cannot be compared
        return None
    # The largest: a model that collapses within a few steps leaves hardly any spread in the later ones.
    spread = max(known(recent.first, "reward_std"), default=0.0)
    for where, before, after in _falls(recent):
        fall = (before - after) / spread if spread else 0.0
        if fall > threshold:
            return Sign(
                fall,
                f"{where} has fallen from {before:.3g} to {after:.3g}: {fall:.2g} times the spread of the "
                "completions' rewards at the "
                f"start (above {threshold:g} the model answers worse than before training).",
                {"learning_rate": recent.scaled("learning_rate", 0.3)},
            )
    return None


def _falls(recent: Recent) -> Iterator[tuple[str, float, float]]:
    """(which reward, its value at the start, its value now) of the rewards that have clearly fallen."""
    change = MeanChange.between(known(recent.first, "reward"), recent.values("reward"))
    if recent.step >= 2 * WINDOW and change is not None and change.size < 0 and change.is_clear:
        yield f"“Reward”, the mean of {WINDOW} steps,", change.before, change.after
    first, newest = recent.first_evaluation, [*recent.evaluations][-2:]  # two, as a single evaluation may be chance
    if first is not None and first.step <= WINDOW and len(newest) == 2 and newest[0] != first:
        yield "“Held-out reward”", first.reward, max(evaluation.reward for evaluation in newest)


def hacking(recent: Recent, threshold: float) -> Sign | None:
    return _against_held_out(recent, threshold) or _against_another_function(recent, threshold)


def _against_held_out(recent: Recent, threshold: float) -> Sign | None:
    """The training reward has risen since the evaluation at which the held-out reward was best, and that has fallen."""
    if len(recent.evaluations) < 3:
        return None
    *earlier, last, newest = recent.evaluations
    best = max(earlier, key=lambda evaluation: evaluation.reward)
    now = (last.reward + newest.reward) / 2  # of two, because an evaluation of few prompts scatters
    training = recent.mean("reward")
    if training is None or best.training is None or training <= best.training:
        return None
    if best.reward - now <= threshold * abs(best.reward):
        return None
    return Sign(
        now,
        f"“Held-out reward” has fallen from {best.reward:.3g} after step {best.step} to {now:.3g}, while "
        "“Reward” in training has risen "
        f"from {best.training:.3g} to {training:.3g}.",
        about=("held_out",),
        limit=best.reward * (1 - threshold),
        metric="reward",
        advice="The run learns its training prompts and not the task. Go back to the checkpoint of that step; take "
        "more prompts, a lower "
        "learning rate or a higher Beta (KL weight).",
    )


def _against_another_function(recent: Recent, threshold: float) -> Sign | None:
    """One function's mean has clearly risen and another's clearly fallen, since the run's first steps or over the
    last LONG."""
    if len(recent.steps) < 2 * WINDOW:
        return None
    earlier = [recent.steps[index] for index in range(WINDOW)]
    for before in (recent.first, earlier):
        changes = {name: _change(name, before, recent) for name in recent.rewards()}
        clear = {name: change for name, change in changes.items() if change is not None and change.is_clear}
        risen = [name for name, change in clear.items() if change.size > threshold * abs(change.before)]
        fallen = [name for name, change in clear.items() if -change.size > threshold * abs(change.before)]
        if risen and fallen:
            up, down = max(risen, key=lambda name: clear[name].size), min(fallen, key=lambda name: clear[name].size)
            since = "the first steps" if before is recent.first else f"{len(recent.steps)} steps"
            return Sign(
                clear[down].after,
                f"Since {since}, {label_of(up)} has risen from {clear[up].before:.2g} to "
                f"{clear[up].after:.2g}, and {label_of(down)} has "
                f"fallen from {clear[down].before:.2g} to {clear[down].after:.2g} (“Rewards per function”).",
                about=(down,),
                limit=clear[down].before * (1 - threshold),
                metric=f"rewards/{down}/mean",
            )
    return None


def _change(name: str, before: Sequence[Metrics], recent: Recent) -> MeanChange | None:
    metric = f"rewards/{name}/mean"
    return MeanChange.between(known(before, metric), recent.values(metric))


def flat(recent: Recent, threshold: float) -> Sign | None:
    rewards = recent.values("reward", LONG)
    if len(rewards) < LONG:
        return None
    change = MeanChange.between(rewards[: LONG // 2], rewards[LONG // 2 :])
    if change is None or abs(change.size) > threshold * change.error:
        return None
    # Most groups have no signal: another rule's finding. It has converged: nothing is left to learn.
    if (recent.mean("frac_groups_without_signal") or 0) > 0.5 or recent.has_converged:
        return None
    return Sign(
        change.size,
        f"“Reward” has not moved in {LONG} steps: {change.before:.3g} in the older half, {change.after:.3g} in "
        "the newer.",
        limit=threshold * change.error,
    )


REWARD_RULES = (
    Rule(
        "never_scores",
        "A reward function never scores",
        "Rewards per function",
        "rewards/*/mean",
        Threshold(
            0.0,
            f"a function gave exactly this to every completion of the last {WINDOW} to {LONG} steps",
            "SPEC: tags the model never writes",
        ),
        "Read some completions: the model may never write what the function looks for, or a column may be the "
        "wrong one.",
        never_scores,
        "reward_functions",
    ),
    Rule(
        "no_signal",
        "No groups with signal",
        "Groups without signal",
        "frac_groups_without_signal",
        Threshold(
            0.95,
            f"the mean over {WINDOW} steps of the share of groups whose completions all got the same reward is "
            "at least this, "
            "and the reward has not risen to nearly the same for all",
            "ours: of 20 groups one teaches; trl#5640, verl#5228 on groups of no variance",
        ),
        "Take a larger group, a higher Temp, rewards with partial credit, or other prompts; or stop, if the "
        "reward is full.",
        no_signal,
        "group_size",
    ),
    Rule(
        "reward_fell",
        "Worse than at the start",
        "Reward",
        "reward",
        Threshold(
            0.5,
            f"the mean reward of the last {WINDOW} steps is below that of the first {WINDOW}, by four standard "
            "errors and by more "
            "than this many standard deviations of the first completions' rewards; or the last two held-out "
            "rewards are below the "
            "first by as much; not where reward weights vary",
            "ours: half a standard deviation, a medium effect by Cohen's convention",
        ),
        "Stop, and go on from an early checkpoint with a lower learning rate; a Beta (KL weight) above 0 keeps "
        "the policy near its start.",
        reward_fell,
        "learning_rate",
    ),
    Rule(
        "hacking",
        "One reward at the cost of another",
        "Rewards per function",
        "rewards/*/mean",
        Threshold(
            0.2,
            "a function's mean, or the held-out reward, has fallen by more than this part of what it was, "
            "while another "
            f"function, or the training reward, has risen; means of {WINDOW} steps that differ by four standard errors",
            "ours; that proxies rise while the goal falls: arXiv:2210.10760",
        ),
        "The run may have found a way to score that was not meant. Read some completions; lower the weight of "
        "the reward that rises.",
        hacking,
        "reward_weights",
        needs=2 * WINDOW,
    ),
    Rule(
        "flat",
        "Flat reward",
        "Reward",
        "reward",
        Threshold(
            1.0,
            f"the mean rewards of the older and newer half of {LONG} steps differ by at most this many "
            "standard errors, and the "
            "reward has not risen before to nearly the same for all",
            "ours: one standard error, which chance exceeds in a third of the cases",
        ),
        "Score some completions by hand first: rewards may be too harsh or the prompts too hard. Then a higher "
        "learning rate.",
        flat,
        "learning_rate",
        needs=LONG,
    ),
)


# Rules about the updates: too large, too small, none at all, not a number.

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
        f"“KL from the reference” is {kl:.3g} nats a token, the median of the last {WINDOW} steps (above "
        f"{threshold:.2g} the policy drifts "
        f"from the model it started as).",
        {"learning_rate": recent.scaled("learning_rate", 0.5)},
    )


def kl_exploding(recent: Recent, threshold: float) -> Sign | None:
    if not _has_exploded(recent, threshold):
        return None
    kl = recent.median("kl", SUDDEN)
    return Sign(
        kl,
        f"“KL from the reference” is {kl:.3g} nats a token, above {threshold:.2g} in each of the last {SUDDEN} "
        "steps: the model is hardly "
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
        f"“Clip ratios” total {clipped:.0%} on average over the last {WINDOW} steps (above {threshold:.0%} the "
        "policy moves faster than "
        f"its completions allow)" + (f": Epsilon is only {epsilon:g}." if narrow else "."),
        {"epsilon": 0.2} if narrow else {"learning_rate": recent.scaled("learning_rate", 0.5)},
    )


def never_clips(recent: Recent, threshold: float) -> Sign | None:
    clipped, updates = recent.values("clip_ratio_total", LONG), recent.updates_per_rollout
    if updates < 2 or len(clipped) < LONG or sum(clipped) >= threshold * LONG or recent.has_improved:
        return None
    share = sum(clipped) / LONG
    return Sign(
        share,
        f"“Clip ratios” total {share:.1%} on average over the last {LONG} steps (below {threshold:.0%} is too "
        "seldom), although there are "
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
        f"“KL from the reference” is still {kl:.1g} nats a token after {recent.step} steps (below "
        f"{threshold:.0g} the policy has not moved), "
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
        f"“Gradient norm” has been 0 for {WINDOW} steps, although completions of a group get different "
        "rewards: nothing is learned.",
        {"max_completion_length": recent.setting("max_completion_length") * 2} if masked else {},
        advice="Every completion is cut off, and Mask truncated completions leaves out those that are: raise "
        "Completion."
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
        f"In step {recent.step} {' and '.join(broken)} {'is' if len(broken) == 1 else 'are'} not a number: a "
        "log-probability has overflowed.",
        {"learning_rate": recent.scaled("learning_rate", 0.1)},
        metric=broken[0],
    )


def sampler_differs(recent: Recent, threshold: float) -> Sign | None:
    """Measured before top-p, top-k and min-p, so filters do not count: only the rounding of the type that the model
    computes in."""
    gap = recent.mean("sampling/logp_gap/mean")
    if gap is None or gap <= threshold:
        return None
    return Sign(
        gap,
        f"“Sampler and learner” differ by {gap:.2g} nats a token in the log-probability of the same token, on "
        f"average over the last {WINDOW} "
        f"steps (above {threshold:.2g} the model's numbers are too coarse).",
        {"dtype": "float32"},
    )


KL_EXPLODING = Rule(
    "kl_exploding",
    "KL exploding",
    "KL from the reference",
    "kl",
    Threshold(
        5.0,
        f"the KL of each of the last {SUDDEN} steps is above this, in nats a token",
        "ours: ten times the limit of drifting, and more than the entropy of most models' next token",
    ),
    "Stop, and go back to an earlier checkpoint with a tenth of the learning rate.",
    kl_exploding,
    "learning_rate",
    level="error",
    needs=SUDDEN,
)

LEARNING_RULES = (
    Rule(
        "drifting",
        "Drifting from the reference",
        "KL from the reference",
        "kl",
        Threshold(
            0.5,
            f"the median KL of {WINDOW} steps is above this, in nats a token",
            "SPEC, after the guides to GRPO with TRL",
        ),
        "Lower the learning rate, or raise Beta (KL weight).",
        drifting,
        "learning_rate",
    ),
    KL_EXPLODING,
    Rule(
        "moving_fast",
        "Clipped too often",
        "Clip ratios",
        "clip_ratio_total",
        Threshold(
            0.2,
            f"the mean over {WINDOW} steps of the share of clipped tokens is above this",
            "SPEC: 0.05 to 0.2 is healthy",
        ),
        "Lower the learning rate, widen Epsilon, or make fewer updates per rollout.",
        moving_fast,
        "learning_rate",
    ),
    Rule(
        "never_clips",
        "Clipped never or too seldom",
        "Clip ratios",
        "clip_ratio_total",
        Threshold(
            0.05,
            f"with two or more updates per rollout the mean share of clipped tokens over {LONG} steps is below "
            "this, and the "
            "reward has not risen",
            "MLX LoRA Studio's guide: 0.05 to 0.2 is healthy, below it the signal is too weak",
        ),
        "Raise the learning rate, or make rewards that tell the completions of a group apart. Else one update "
        "per rollout saves time.",
        never_clips,
        "learning_rate",
        level="info",
        needs=LONG,
    ),
    Rule(
        "too_slow",
        "Learning rate too low to matter",
        "KL from the reference",
        "kl",
        Threshold(
            1e-5,
            f"after {SETTLED} steps at half the learning rate or more the median KL is below this, in nats a "
            "token, and the "
            "reward has not risen",
            "ours: a change of 0.4 % in a token's probability, less than rounding to 16 bits; trl#2872, X-R1#66",
        ),
        "Raise the learning rate. Adapters want roughly ten times what a full fine-tune wants.",
        too_slow,
        "learning_rate",
        needs=SETTLED,
    ),
    Rule(
        "gradient_zero",
        "Zero gradient",
        "Gradient norm",
        "grad_norm",
        Threshold(
            1e-9,
            f"the gradient norm was not above this in {WINDOW} steps, while most groups have a signal",
            "ours: below what float32 adds to a weight",
        ),
        "Look for completions that are all masked, an adapter whose Scale is 0, or reward weights that cancel out.",
        gradient_zero,
        "mask_truncated_completions",
        level="error",
    ),
    Rule(
        "not_a_number",
        "Not a number",
        "Loss",
        "loss",
        Threshold(
            0.0,
            "the loss, gradient norm, KL or entropy of the newest step is not a number, where it was one before",
            "open-r1#704, Search-R1#88; a gradient that is not a number ends the run before it is applied",
        ),
        "Stop, and go back to an earlier checkpoint with a lower learning rate.",
        not_a_number,
        "learning_rate",
        level="error",
        needs=1,
    ),
    Rule(
        "sampler_differs",
        "Sampler and learner apart",
        "Sampler and learner",
        "sampling/logp_gap/mean",
        Threshold(
            0.05,
            f"the mean gap over {WINDOW} steps between a token's log-probability in sampling and in learning "
            "is above this, in nats",
            "measured: float32 stays below 1e-6, 16 bits about 0.01",
        ),
        "Set Precision to float16 or float32, and leave Sampling correction on Automatic.",
        sampler_differs,
        "dtype",
    ),
)


# ── completion rules ─────────────────────────────────────────────────────────────────────────────────────────────────

# Rules about what the model writes: alike, repeating, cut off, of very different lengths.


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
        f"The {size} completions of a group are on average only {distinct * size:.2g} different texts over the "
        f"last {WINDOW} steps (up to "
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
    # Longer texts have a smaller share of different pairs by themselves, and shorter ones fewer pairs: both have to
    # have fallen.
    left = max(now / before, now * length / (before * length_before))
    if left > threshold:
        return None
    return Sign(
        now,
        f"“Distinct-2” has fallen from {before:.2g} to {now:.2g}: of the pairs of words that a group was "
        f"written with at first, {left:.0%} are left "
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
        f"“Entropy” has fallen from {before:.2g} to {entropy:.2g} nats a token, {entropy / before:.0%} of what "
        "it was at first (below "
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
        f"{share:.0%} of what a completion says stood in it before, word for word, averaged over the last "
        f"{WINDOW} steps (above "
        f"{threshold:.0%} the model turns in circles).",
        {"learning_rate": recent.scaled("learning_rate", 0.5)},
    )


def cut_off(recent: Recent, threshold: float) -> Sign | None:
    share, length = recent.mean("hit_max_tokens_ratio"), recent.setting("max_completion_length")
    if share is None or share <= threshold:
        return None
    sentence = (
        f"“Cut off at the limit” is {share:.0%} on average over the last {WINDOW} steps (above {threshold:.0%} "
        "too many answers are never "
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
ROOM_IS_WASTED = (
    "They say the same again and again, so more room would not end them: lower Completion, and strengthen a reward "
    "for the right form."
)


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
        f"The longest completion of a step has {longest:,.0f} tokens, {longest / mean:.1f} times the mean of "
        f"{mean:,.0f}, and sampling "
        f"takes {sampling / step:.0%} of “Step time”: most of it waits for one completion.",
        {"max_completion_length": shorter} if shorter < recent.setting("max_completion_length") else {},
        limit=threshold * mean,
    )


SAMPLING_SHARE = 0.5
"""Share of the step's time that sampling must take before its longest completion matters."""

COMPLETION_RULES = (
    Rule(
        "identical",
        "Identical completions",
        "Diversity of groups",
        "completions/distinct_fraction",
        Threshold(
            0.05,
            f"the mean over {WINDOW} steps of the distinct completions of a group, beyond the first, is at "
            "most this share "
            "of the group, and the reward has not risen to nearly the same for all",
            "ours: with 20 other completions in a group, one that differs; the demo starts at 0.2, and ends at "
            "0 once it has learned",
        ),
        "Raise Temp towards 1, and let Top P and Top K through more tokens.",
        identical,
        "temperature",
    ),
    Rule(
        "mode_collapse",
        "Mode collapse",
        "Distinct words",
        "completions/distinct_2",
        Threshold(
            0.5,
            f"over {WINDOW} steps the different pairs of tokens of a group, as a share of its tokens and as a "
            "number, are at most this part of "
            f"what they were in the run's first {WINDOW} steps, and the reward has not risen to nearly the "
            "same for all",
            "ours; distinct-n: arXiv:1510.03055. A healthy run of the demo keeps 0.6 and more, one that "
            "collapses comes to 0.4",
        ),
        "Go on from an earlier checkpoint with a lower learning rate, a KL weight or an entropy bonus; raise "
        "Temp towards 1.",
        mode_collapse,
        "learning_rate",
    ),
    Rule(
        "entropy_collapse",
        "Entropy collapse",
        "Entropy",
        "entropy",
        Threshold(
            0.2,
            f"the mean entropy of {WINDOW} steps is at most this part of that of the run's first {WINDOW} "
            "steps, and the reward "
            "has not risen to nearly the same for all",
            "ours; that reward is bought with entropy and stalls once it is spent: arXiv:2505.22617",
        ),
        "Lower the learning rate, raise Epsilon high above Epsilon, or give Beta (KL weight) or the entropy "
        "bonus a value.",
        entropy_collapse,
        "learning_rate",
    ),
    Rule(
        "repetition",
        "Repetition",
        "Diversity of groups",
        "completions/repetition",
        Threshold(
            REPEATING,
            f"the mean over {WINDOW} steps of the share of 8-grams of tokens that stood in the completion "
            "before is above this",
            "ours: a text whose second half repeats the first has 0.5, the healthy recordings stay below 0.02",
        ),
        "Read some completions. Lower the learning rate or raise Beta (KL weight); take back a reward that "
        "pays for repeating.",
        repetition,
        "reward_functions",
    ),
    Rule(
        "cut_off",
        "Cut off at the limit",
        "Cut off at the limit",
        "hit_max_tokens_ratio",
        Threshold(
            0.3,
            f"the mean over {WINDOW} steps of the share of completions that reached the limit is above this",
            "users' reports: at 0.97 nothing was learned (trl#5697), below 0.3 runs did well",
        ),
        "Read some. Answers that are on their way to an end need more room: raise Completion. Where they go on "
        "without ever giving an answer, "
        "lower it, and strengthen a reward for the right form.",
        cut_off,
        "max_completion_length",
    ),
    Rule(
        "straggler",
        "One long completion holds the step",
        "Completion length",
        "completions/max_length",
        Threshold(
            4.0,
            f"over {WINDOW} steps the longest completion has on average this many times the mean length, and "
            "sampling takes at "
            f"least {SAMPLING_SHARE:.0%} of the step",
            "ours: from here on three quarters of the sampling steps serve fewer than all completions",
        ),
        "Lower Completion to a few times the mean length, or reward shorter answers.",
        straggler,
        "max_completion_length",
        level="info",
    ),
)


# ── resource rules ───────────────────────────────────────────────────────────────────────────────────────────────────

# Rules about what a run uses up: memory, and its data.

EXPLAINED = 1.1
"""Growth of the longest completion beyond which memory may well have grown with it."""


def memory_creeping(recent: Recent, threshold: float) -> Sign | None:
    peaks, at_first = recent.values("peak_memory_gb", LONG), known(recent.first, "peak_memory_gb")
    if len(peaks) < LONG or not at_first:
        return None
    before, now = fmean(at_first), fmean(peaks[-WINDOW:])
    if now <= threshold * before or not _rises_throughout(peaks) or _grew_with_completions(recent):
        return None
    return Sign(
        now,
        f"“Memory” has grown from {before:.3g} GB in the first steps to {now:.3g} GB, and still grows, though "
        "completions are no longer than "
        f"they were: something is kept from step to step.",
        limit=threshold * before,
    )


def _rises_throughout(values: list[float]) -> bool:
    third = len(values) // 3
    parts = [values[start : start + third] for start in (0, third, 2 * third)]
    changes = [MeanChange.between(early, late) for early, late in pairwise(parts)]
    return all(change is not None and change.is_clear and change.size > 0 for change in changes)


def _grew_with_completions(recent: Recent) -> bool:
    before, now = known(recent.first, "completions/max_length"), recent.values("completions/max_length")
    return bool(before and now) and fmean(now) > EXPLAINED * fmean(before)


def seen_often(recent: Recent, threshold: float) -> Sign | None:
    values = recent.values("epoch")
    if not values or values[-1] < threshold:
        return None
    held_out = [evaluation.reward for evaluation in recent.evaluations]
    if len(held_out) > 1 and max(held_out[-2:]) >= max(held_out):
        return None  # it still gets better on prompts that it has not seen
    tail = (
        f", and “Held-out reward” no longer rises ({held_out[-1]:.3g}, at best {max(held_out):.3g})."
        if len(held_out) > 1
        else "."
    )
    return Sign(
        values[-1],
        f"Every prompt has been sampled {values[-1]:.0f} times (from {threshold:.0f} times on a model may "
        f"learn them by heart){tail}",
    )


def machines_wait(recent: Recent, threshold: float) -> Sign | None:
    share = recent.mean("waiting_share")
    if share is None or share <= threshold:
        return None
    waited = {
        rank: seconds for rank in range(MOST_HOSTS) if (seconds := recent.mean(f"ranks/{rank}/waiting")) is not None
    }
    # Who waits least is who the others wait for.
    slowest = min(waited, key=lambda rank: waited[rank]) if len(waited) > 1 else None
    whom = "" if slowest is None else f", mostly for rank {slowest}"
    return Sign(
        share,
        f"In the last {WINDOW} steps the machines have spent {share:.0%} of their time waiting for each "
        f"other{whom} (limit {threshold:.0%}).",
    )


RESOURCE_RULES = (
    Rule(
        "memory_creeping",
        "Memory creeping up",
        "Memory",
        "peak_memory_gb",
        Threshold(
            1.25,
            f"the mean peak of {WINDOW} steps is more than this many times that of the run's first {WINDOW}, "
            "it rose from each third "
            f"of the last {LONG} steps to the next, and the longest completion did not grow by more than 10 %",
            "ours: peaks of a sound run vary with the longest completion, by a few per cent",
        ),
        "Look for a reward function that keeps what it was given. Save, stop and resume: a new process starts "
        "with none of it.",
        memory_creeping,
        "reward_functions_file",
        needs=LONG,
    ),
    Rule(
        "seen_often",
        "Data seen too often",
        "Other",
        "epoch",
        Threshold(
            10.0,
            "the passes over the dataset are at least this many, and the newest two evaluations are not the "
            "best of the last eight",
            "ours; few prompts do teach for many passes as long as held-out reward rises: arXiv:2504.20571",
        ),
        "Take more prompts, or stop at the best checkpoint.",
        seen_often,
        "data",
        level="info",
    ),
    Rule(
        "machines_wait",
        "Machines waiting for each other",
        "Waiting",
        "waiting_share",
        Threshold(
            0.25,
            f"the mean over {WINDOW} steps of the share of a step that the ranks spend waiting for each other "
            "is above this",
            "ours: a rank with half the speed and as much work would cost as much; work that is shared out in "
            "small rounds costs below 0.1",
        ),
        "Take more prompts a step, so that there is work to share out. If one machine is many times slower, "
        "leave it out; if the sums take "
        "the time, use a cable.",
        machines_wait,
        "hosts",
    ),
)


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────

RULES = {rule.code: rule for rule in (*REWARD_RULES, *COMPLETION_RULES, *LEARNING_RULES, *RESOURCE_RULES)}
"""Code → rule."""


def findings(recent: Recent) -> list[Finding]:
    """What all rules find at the newest step."""
    return [finding for rule in RULES.values() if (finding := rule.find(recent)) is not None]


# What a rule has found: a sentence with the figures, advice, and where known the settings that would help.
