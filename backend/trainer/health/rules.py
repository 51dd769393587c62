"""The health rules: one function each. Their titles, thresholds and texts are in resources/health_rules.yaml, in the
order in which findings are shown.

To add one, write a function with `@rule()` and an entry under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

import yaml

from backend.config.first_choices import SYSTEM_PROMPT
from backend.distributed.hosts_file import MOST_HOSTS
from backend.trainer.health.recent import LONG, WINDOW, MeanChange, Recent, known, label_of
from backend.utils.places import resources

SUDDEN = 3
"""Steps that all must lie beyond the limit of an explosion."""
SETTLED = 30
"""Steps at the full learning rate before a rate can count as too low."""
MUST_BE_NUMBERS = ("loss", "grad_norm", "kl", "entropy")
LOWEST_RATE, SHORTEST = 1e-6, 16
"""Proposals of a learning rate and of a completion length are never below."""
MUST_WIDEN = 0.1
"""An epsilon below it is widened before the learning rate is blamed for clipping."""
SAMPLING_SHARE = 0.5
"""Share of the step's time that sampling must take before its longest completion matters."""
EXPLAINED = 1.1
"""Growth of the longest completion beyond which memory may well have grown with it."""
OVER_WINDOW = f"on average over the last {WINDOW} steps"


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` stays the same as long as a rule keeps finding the same, so that it is reported once. `value` and
    `threshold` are in the metric's unit. `settings`: setting → the value that is proposed for it."""

    code: str
    sentence: str
    advice: str
    level: str = "warning"
    metric: str = ""
    value: float | None = None
    threshold: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def fields(self) -> dict[str, Any]:
        """As the fields of a `health` event."""
        always = ("code", "sentence", "advice", "level")
        return {key: value for key, value in asdict(self).items() if key in always or value not in ("", None, {})}


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rule saw. `value` and `limit` (where it is not the threshold) are in the metric's unit. `about`: the
    reward functions it is about. `advice` replaces the rule's."""

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
    """`look(recent, threshold)` returns what it saw, or None. `chart`: the title of the chart that shows `metric`;
    `setting`: the one to look at first; `needs`: steps before it can find anything."""

    code: str
    title: str
    chart: str
    metric: str
    threshold: float
    when: str
    source: str
    advice: str
    look: Look
    setting: str = ""
    level: Literal["error", "warning", "info"] = "warning"
    needs: int = WINDOW


def findings(recent: Recent) -> list[Finding]:
    """What all rules find at the newest step."""
    found: list[Finding] = []
    for rule in RULES.values():
        if (sign := rule.look(recent, rule.threshold)) is None:
            continue
        code, limit = " ".join((rule.code, *sign.about)), rule.threshold if sign.limit is None else sign.limit
        advice, metric = sign.advice or rule.advice, sign.metric or rule.metric
        found.append(Finding(code, sign.sentence, advice, rule.level, metric, sign.value, limit, dict(sign.settings)))
    return found


_LOOKS: dict[str, tuple[Look, int]] = {}


def rule(needs: int = WINDOW) -> Callable[[Look], Look]:
    """Make a function the rule of its name; it runs from `needs` steps on."""

    def register(look: Look) -> Look:
        _LOOKS[look.__name__] = look, needs
        return look

    return register


@rule()
def never_scores(recent: Recent, threshold: float) -> Sign | None:
    if len(recent.steps) < WINDOW:
        return None
    scores = {name: known(recent.steps, f"rewards/{name}/mean") for name in recent.rewards()}
    silent = [name for name, values in scores.items() if values and not any(values)]
    if not silent:
        return None
    *others, last = map(label_of, silent)
    functions = f"functions {', '.join(others)} and {last}" if others else f"function {last}"
    # A model that has once written the tags knows of them; one that is cut off never comes to them.
    tag_names = [name for name in scores if name.startswith("r1_")]
    knows_tags = any(any(known(recent.first, f"rewards/{name}/mean")) for name in tag_names)
    is_told = recent.setting("system_prompt") or (recent.mean("hit_max_tokens_ratio") or 0) > 0.3
    asks_for_tags = bool({*tag_names} & {*silent}) and not (knows_tags or is_told)
    advice = "Tell the model in the system prompt to write the tags that these functions look for."
    return Sign(
        0.0,
        f"The reward {functions} gave {threshold:.0f} to every completion of the last {len(recent.steps)} steps.",
        {"system_prompt": SYSTEM_PROMPT} if asks_for_tags else {},
        about=tuple(silent),
        metric=f"rewards/{silent[0]}/mean",
        advice=advice if asks_for_tags else "",
    )


@rule()
def no_signal(recent: Recent, threshold: float) -> Sign | None:
    share = recent.mean("frac_groups_without_signal")
    if share is None or share < threshold or recent.has_converged:
        return None
    is_cold = recent.setting("temperature") < 0.8
    return Sign(
        share,
        f"“Groups without signal” is {share:.0%} {OVER_WINDOW} (from {threshold:.0%} on nothing is learned): within a "
        "group all completions got the same reward.",
        {"temperature": 1.0} if is_cold else {"group_size": recent.setting("group_size") * 2},
    )


@rule()
def reward_fell(recent: Recent, threshold: float) -> Sign | None:
    weights_vary = recent.setting("stages") or recent.setting("reward_weight_schedule") != "constant"
    if weights_vary or "reward_weights" in recent.changed:  # rewards of other weights cannot be compared
        return None
    falls: list[tuple[str, float, float]] = []
    change = MeanChange.between(known(recent.first, "reward"), recent.values("reward"))
    if recent.step >= 2 * WINDOW and change is not None and change.size < 0 and change.is_clear:
        falls.append((f"“Reward”, the mean of {WINDOW} steps,", change.before, change.after))
    first, newest = recent.first_evaluation, [*recent.evaluations][-2:]  # two, as a single evaluation may be chance
    if first is not None and first.step <= WINDOW and len(newest) == 2 and newest[0] != first:
        now = max(evaluation.reward for evaluation in newest)
        falls.append(("“Held-out reward”", first.reward, now))
    # The largest: a model that collapses within a few steps leaves hardly any spread in the later ones.
    spread = max(known(recent.first, "reward_std"), default=0.0)
    for where, before, after in falls:
        fall = (before - after) / spread if spread else 0.0
        if fall > threshold:
            return Sign(
                fall,
                f"{where} has fallen from {before:.3g} to {after:.3g}: {fall:.2g} times the spread of the "
                f"completions' rewards at the start (above {threshold:g} it answers worse than before training).",
                {"learning_rate": recent.scaled("learning_rate", 0.3)},
            )
    return None


@rule(needs=2 * WINDOW)
def hacking(recent: Recent, threshold: float) -> Sign | None:
    return _against_held_out(recent, threshold) or _against_another_function(recent, threshold)


def _against_held_out(recent: Recent, threshold: float) -> Sign | None:
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
        f"“Held-out reward” has fallen from {best.reward:.3g} after step {best.step} to {now:.3g}, while “Reward” in "
        f"training has risen from {best.training:.3g} to {training:.3g}.",
        about=("held_out",),
        limit=best.reward * (1 - threshold),
        metric="reward",
        advice="The run learns its training prompts and not the task. Go back to the checkpoint of that step; take "
        "more prompts, a lower learning rate or a higher Beta (KL weight).",
    )


def _against_another_function(recent: Recent, threshold: float) -> Sign | None:
    if len(recent.steps) < 2 * WINDOW:
        return None
    for before in (recent.first, [*recent.steps][:WINDOW]):
        clear: dict[str, MeanChange] = {}
        for name in recent.rewards():
            metric = f"rewards/{name}/mean"
            change = MeanChange.between(known(before, metric), recent.values(metric))
            if change is not None and change.is_clear and abs(change.size) > threshold * abs(change.before):
                clear[name] = change
        up = max(clear, key=lambda name: clear[name].size, default="")
        down = min(clear, key=lambda name: clear[name].size, default="")
        if clear and clear[up].size > 0 > clear[down].size:
            rise, fall = clear[up], clear[down]
            since = "the first steps" if before is recent.first else f"{len(recent.steps)} steps"
            return Sign(
                fall.after,
                f"Since {since}, {label_of(up)} has risen from {rise.before:.2g} to {rise.after:.2g}, and "
                f"{label_of(down)} has fallen from {fall.before:.2g} to {fall.after:.2g} (“Rewards per function”).",
                about=(down,),
                limit=fall.before * (1 - threshold),
                metric=f"rewards/{down}/mean",
            )
    return None


@rule(needs=LONG)
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
    where = f"{change.before:.3g} in the older half, {change.after:.3g} in the newer."
    return Sign(change.size, f"“Reward” has not moved in {LONG} steps: {where}", limit=threshold * change.error)


@rule()
def drifting(recent: Recent, threshold: float) -> Sign | None:
    kl = recent.median("kl")
    if kl is None or kl <= threshold or _has_exploded(recent, RULES["kl_exploding"].threshold):
        return None
    return Sign(
        kl,
        f"“KL from the reference” is {kl:.3g} nats a token, the median of the last {WINDOW} steps (above "
        f"{threshold:.2g} the policy drifts from the model it started as).",
        {"learning_rate": recent.scaled("learning_rate", 0.5)},
    )


@rule(needs=SUDDEN)
def kl_exploding(recent: Recent, threshold: float) -> Sign | None:
    if not _has_exploded(recent, threshold):
        return None
    kl = recent.median("kl", SUDDEN)
    return Sign(
        kl,
        f"“KL from the reference” is {kl:.3g} nats a token, above {threshold:.2g} in each of the last {SUDDEN} steps: "
        "the model is hardly the one it started as.",
        {"learning_rate": recent.scaled("learning_rate", 0.1)},
    )


def _has_exploded(recent: Recent, limit: float) -> bool:
    values = recent.values("kl", SUDDEN)
    return len(values) == SUDDEN and min(values) > limit


@rule()
def moving_fast(recent: Recent, threshold: float) -> Sign | None:
    clipped, epsilon = recent.mean("clip_ratio_total"), recent.setting("epsilon")
    if clipped is None or clipped <= threshold:
        return None
    narrow = epsilon < MUST_WIDEN and recent.setting("importance_sampling_level") in ("", "token", None)
    return Sign(
        clipped,
        f"“Clip ratios” total {clipped:.0%} {OVER_WINDOW} (above {threshold:.0%} the policy moves faster than its "
        f"completions allow){f': Epsilon is only {epsilon:g}' if narrow else ''}.",
        {"epsilon": 0.2} if narrow else {"learning_rate": recent.scaled("learning_rate", 0.5)},
    )


@rule(needs=LONG)
def never_clips(recent: Recent, threshold: float) -> Sign | None:
    clipped = recent.values("clip_ratio_total", LONG)
    # With a single update between two rollouts the ratio is 1, and nothing can be clipped.
    updates = recent.setting("num_iterations") * recent.setting("steps_per_generation")
    if updates < 2 or len(clipped) < LONG or sum(clipped) >= threshold * LONG or recent.has_improved:
        return None
    share = sum(clipped) / LONG
    return Sign(
        share,
        f"“Clip ratios” total {share:.1%} on average over the last {LONG} steps (below {threshold:.0%} is too seldom), "
        f"although there are {updates} updates per rollout, and the reward does not rise: the updates are too small "
        "to matter.",
        {"learning_rate": max(LOWEST_RATE, recent.scaled("learning_rate", 3))},
    )


@rule(needs=SETTLED)
def too_slow(recent: Recent, threshold: float) -> Sign | None:
    kl, rates = recent.median("kl", SETTLED), recent.values("learning_rate", SETTLED)
    rate = recent.setting("learning_rate")
    if kl is None or kl >= threshold or recent.has_improved or min(rates, default=0) < rate / 2:
        return None
    if recent.setting("kl_estimator") != "k3" and recent.setting("beta") > 0:
        return None  # that estimate is of either sign, and small where the policy has moved far
    return Sign(
        kl,
        f"“KL from the reference” is still {kl:.1g} nats a token after {recent.step} steps (below {threshold:.0g} the "
        f"policy has not moved), and the reward has not risen: at a learning rate of {rate:.2g} nothing is learned.",
        {"learning_rate": max(LOWEST_RATE, recent.scaled("learning_rate", 10))},
    )


@rule()
def gradient_zero(recent: Recent, threshold: float) -> Sign | None:
    norms, silent = recent.values("grad_norm"), recent.mean("frac_groups_without_signal")
    # Without a reward that differs there is no gradient either; that is another rule's finding.
    if len(norms) < WINDOW or max(norms) > threshold or (silent is not None and silent > 0.5):
        return None
    masked = recent.setting("mask_truncated_completions") and (recent.mean("hit_max_tokens_ratio") or 0) > 0.9
    why = "Every completion is cut off, and Mask truncated completions leaves out those that are: raise Completion."
    return Sign(
        max(norms),
        f"“Gradient norm” has been 0 for {WINDOW} steps, although completions of a group get different rewards: "
        "nothing is learned.",
        {"max_completion_length": recent.setting("max_completion_length") * 2} if masked else {},
        advice=why if masked else "",
    )


@rule(needs=1)
def not_a_number(recent: Recent, threshold: float) -> Sign | None:
    if not recent.steps:
        return None
    # Where no completion had a signal the learner measures nothing: then the entropy is missing with all the others.
    always, measured = MUST_BE_NUMBERS[:2], MUST_BE_NUMBERS[2:] if "entropy" in recent.steps[-1] else ()
    broken = [name for name in always if name in recent.not_numbers]
    broken += [name for name in measured if name in recent.not_numbers and known(recent.first, name)]
    if not broken:
        return None
    are = "is" if len(broken) == 1 else "are"
    return Sign(
        None,
        f"In step {recent.step} {' and '.join(broken)} {are} not a number: a log-probability has overflowed.",
        {"learning_rate": recent.scaled("learning_rate", 0.1)},
        metric=broken[0],
    )


@rule()
def sampler_differs(recent: Recent, threshold: float) -> Sign | None:
    gap = recent.mean("sampling/logp_gap/mean")
    if gap is None or gap <= threshold:
        return None
    return Sign(
        gap,
        f"“Sampler and learner” differ by {gap:.2g} nats a token in the log-probability of the same token, "
        f"{OVER_WINDOW} (above {threshold:.2g} the model's numbers are too coarse).",
        {"dtype": "float32"},
    )


@rule()
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
        f"The {size} completions of a group are only {distinct * size:.2g} different texts {OVER_WINDOW} (up to "
        f"{limit * size:.2g} there is next to nothing to compare).",
        _more_variety(recent),
        limit=limit,
    )


@rule()
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
        f"“Distinct-2” has fallen from {before:.2g} to {now:.2g}: of the pairs of words that a group was written with "
        f"at first, {left:.0%} are left (at {threshold:.0%} or less it has collapsed to one way of saying things).",
        _more_variety(recent) or {"learning_rate": recent.scaled("learning_rate", 0.5)},
        limit=threshold * before,
    )


def _more_variety(recent: Recent) -> dict[str, float]:
    return {"temperature": 1.0} if recent.setting("temperature") < 0.8 else {}


@rule()
def entropy_collapse(recent: Recent, threshold: float) -> Sign | None:
    entropy, at_first = recent.mean("entropy"), known(recent.first, "entropy")
    if entropy is None or not at_first or recent.has_converged:
        return None
    before = sum(at_first) / len(at_first)
    if before <= 0 or entropy > threshold * before:
        return None
    return Sign(
        entropy,
        f"“Entropy” has fallen from {before:.2g} to {entropy:.2g} nats a token, {entropy / before:.0%} of what it was "
        f"at first (below {threshold:.0%} is a collapse), and the reward has not risen for all.",
        {"beta": 0.02} if recent.setting("beta") == 0 else {"learning_rate": recent.scaled("learning_rate", 0.5)},
        limit=threshold * before,
    )


@rule()
def repetition(recent: Recent, threshold: float) -> Sign | None:
    share = recent.mean("completions/repetition")
    if share is None or share <= threshold:
        return None
    return Sign(
        share,
        f"{share:.0%} of what a completion says stood in it before, word for word, {OVER_WINDOW} (above "
        f"{threshold:.0%} the model turns in circles).",
        {"learning_rate": recent.scaled("learning_rate", 0.5)},
    )


@rule()
def cut_off(recent: Recent, threshold: float) -> Sign | None:
    share, length = recent.mean("hit_max_tokens_ratio"), recent.setting("max_completion_length")
    if share is None or share <= threshold:
        return None
    sentence = (
        f"“Cut off at the limit” is {share:.0%} {OVER_WINDOW} (above {threshold:.0%} too many answers are never "
        f"finished): these completions reached {length:,} tokens."
    )
    if (recent.mean("completions/repetition") or 0.0) <= RULES["repetition"].threshold:
        return Sign(share, sentence, {"max_completion_length": length * 2})
    advice = (
        "They say the same again and again, so more room would not end them: lower Completion, and strengthen a "
        "reward for the right form."
    )
    shorter = max(SHORTEST, length // 2)
    return Sign(share, sentence, {"max_completion_length": shorter} if shorter < length else {}, advice=advice)


@rule()
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
        f"{mean:,.0f}, and sampling takes {sampling / step:.0%} of “Step time”: most of it waits for one completion.",
        {"max_completion_length": shorter} if shorter < recent.setting("max_completion_length") else {},
        limit=threshold * mean,
    )


@rule(needs=LONG)
def memory_creeping(recent: Recent, threshold: float) -> Sign | None:
    peaks, at_first = recent.values("peak_memory_gb", LONG), known(recent.first, "peak_memory_gb")
    if len(peaks) < LONG or not at_first:
        return None
    before, now, third = fmean(at_first), fmean(peaks[-WINDOW:]), LONG // 3
    changes = [
        MeanChange.between(peaks[start : start + third], peaks[start + third : start + 2 * third])
        for start in (0, third)
    ]
    rises = all(change is not None and change.is_clear and change.size > 0 for change in changes)
    longest, longest_now = (known(recent.first, "completions/max_length"), recent.values("completions/max_length"))
    is_explained = longest and longest_now and fmean(longest_now) > EXPLAINED * fmean(longest)
    if now <= threshold * before or not rises or is_explained:
        return None
    return Sign(
        now,
        f"“Memory” has grown from {before:.3g} GB in the first steps to {now:.3g} GB, and still grows, though "
        "completions are no longer than they were: something is kept from step to step.",
        limit=threshold * before,
    )


@rule()
def seen_often(recent: Recent, threshold: float) -> Sign | None:
    values = recent.values("epoch")
    if not values or values[-1] < threshold:
        return None
    held_out, tail = [evaluation.reward for evaluation in recent.evaluations], "."
    if len(held_out) > 1:
        if max(held_out[-2:]) >= max(held_out):
            return None  # it still gets better on prompts that it has not seen
        tail = f", and “Held-out reward” no longer rises ({held_out[-1]:.3g}, at best {max(held_out):.3g})."
    return Sign(
        values[-1],
        f"Every prompt has been sampled {values[-1]:.0f} times (from {threshold:.0f} times on a model may learn them "
        f"by heart){tail}",
    )


@rule()
def machines_wait(recent: Recent, threshold: float) -> Sign | None:
    share = recent.mean("waiting_share")
    if share is None or share <= threshold:
        return None
    waits = {rank: recent.mean(f"ranks/{rank}/waiting") for rank in range(MOST_HOSTS)}
    waited = {rank: seconds for rank, seconds in waits.items() if seconds is not None}
    # Who waits least is who the others wait for.
    whom = f", mostly for rank {min(waited, key=lambda rank: waited[rank])}" if len(waited) > 1 else ""
    return Sign(
        share,
        f"In the last {WINDOW} steps the machines have spent {share:.0%} of their time waiting for each other{whom} "
        f"(limit {threshold:.0%}).",
    )


def _read_rules() -> Iterator[Rule]:
    numbers = {"WINDOW": WINDOW, "LONG": LONG, "SUDDEN": SUDDEN, "SETTLED": SETTLED, "SAMPLING_SHARE": SAMPLING_SHARE}
    for code, texts in yaml.safe_load((resources() / "health_rules.yaml").read_text(encoding="utf-8")).items():
        texts |= {name: texts[name].format(**numbers) for name in ("when", "source")}
        look, needs = _LOOKS[code]
        yield Rule(code, look=look, needs=needs, **texts | {"threshold": float(texts["threshold"])})


RULES = {rule.code: rule for rule in _read_rules()}
"""Code → rule, from resources/health_rules.yaml."""
