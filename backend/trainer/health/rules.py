"""The health rules: each is a function with `@rule()`, or a row of MEANS or JUDGES. Titles, thresholds and texts are in
resources/health_rules.yaml under their names, in the order in which findings are shown."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, Literal

from backend.config.first_choices import SYSTEM_PROMPT
from backend.distributed.hosts_file import MOST_HOSTS
from backend.trainer.health.recent import LIKELY, LONG, WINDOW, MeanChange, Recent, known, label_of
from backend.utils.documents import read_resource
from backend.utils.text import quote

SUDDEN = 3  # steps that all must lie beyond the limit of an explosion
SETTLED = 30  # steps at the full learning rate before a rate can count as too low
JUDGED = 5  # steps of a judge that fails: soon, since each costs a time-out
SOLVED, ALIKE = 50, 0.1  # steps without signal after which all is learned, if rewards spread by this part of the mean
MUST_BE_NUMBERS = ("loss", "grad_norm", "kl", "entropy")
SHORTEST = 16  # a proposed completion length is never below
MUST_WIDEN = 0.1  # an epsilon below it is widened before the learning rate is blamed for clipping
SAMPLING_SHARE = 0.5  # share of the step's time that sampling must take before its longest completion matters
SECOND_PASS = 2.0  # passes after which imitated answers may be known by heart
EXPLAINED = 1.1  # growth of the longest completion beyond which memory may well have grown with it
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
        always = ("code", "sentence", "advice", "level")
        return {key: value for key, value in asdict(self).items() if key in always or value not in ("", None, {})}


Look = Callable[[Recent, "Rule"], Finding | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """`look(recent, rule)` returns what it found, or None. `chart`: the title of the chart that shows `metric`;
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

    def mean_above(self, recent: Recent) -> float | None:
        """The mean of the rule's metric where it exceeds the threshold."""
        value = recent.mean(self.metric)
        return value if value is not None and value > self.threshold else None

    def finding(
        self,
        value: float | None,
        sentence: str,
        settings: Mapping[str, Any] | None = None,
        *,
        about: Sequence[str] = (),
        limit: float | None = None,
        metric: str = "",
        advice: str = "",
    ) -> Finding:
        """`about`: the reward functions that it is about. `limit`, `metric` and `advice` replace the rule's own."""
        code = " ".join((self.code, *about))
        advice, metric = advice or self.advice, metric or self.metric
        limit = self.threshold if limit is None else limit
        return Finding(code, sentence, advice, self.level, metric, value, limit, settings or {})


_LOOKS: dict[str, tuple[Look, int]] = {}


def rule(needs: int = WINDOW) -> Callable[[Look], Look]:
    """Make a function the rule of its name; it runs from `needs` steps on."""

    def register(look: Look) -> Look:
        _LOOKS[look.__name__] = look, needs
        return look

    return register


@rule()
def never_scores(recent: Recent, rule: Rule) -> Finding | None:
    if len(recent.steps) < WINDOW:
        return None
    scores = {name: known(recent.steps, f"rewards/{name}/mean") for name in recent.rewards()}
    unscored = not any(scores.values())  # None for every completion, by every function
    silent = [name for name, values in scores.items() if unscored or (values and not any(values))]
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
    return rule.finding(
        0.0,
        f"The reward {functions} gave {'no number' if unscored else '0'} to every completion of the last "
        f"{len(recent.steps)} steps.",
        {"system_prompt": SYSTEM_PROMPT} if asks_for_tags else {},
        about=silent,
        metric=f"rewards/{silent[0]}/mean",
        advice=advice if asks_for_tags else "",
    )


@rule()
def no_signal(recent: Recent, rule: Rule) -> Finding | None:
    share = recent.mean(rule.metric)
    if share is None or share < rule.threshold or recent.has_converged:
        return None
    is_cold = recent.setting("temperature") < 0.8
    return rule.finding(
        share,
        f"“Groups without signal” is {share:.0%} {OVER_WINDOW} (from {rule.threshold:.0%} on nothing is learned): "
        "within a group all completions got the same reward.",
        {"temperature": 1.0} if is_cold else {"group_size": recent.setting("group_size") * 2},
    )


@rule(needs=SOLVED)
def solved(recent: Recent, rule: Rule) -> Finding | None:
    share, reward, spread = (recent.mean(name, SOLVED) for name in (rule.metric, "reward", "reward_std"))
    if share is None or share < rule.threshold or reward is None or not recent.has_improved:
        return None
    if spread is None or spread > ALIKE * abs(reward):
        return None
    return rule.finding(
        share,
        f"In the last {SOLVED} steps {share:.0%} of the groups got one reward for all their completions, {reward:.3g} "
        f"on average, after {recent.mean_at_first('reward'):.3g} at the start.",
    )


@rule()
def reward_fell(recent: Recent, rule: Rule) -> Finding | None:
    weights_vary = recent.setting("stages") or recent.setting("reward_weight_schedule") != "constant"
    if weights_vary or "reward_weights" in recent.changed:  # rewards of other weights cannot be compared
        return None
    falls: list[tuple[str, float, float]] = []
    change = MeanChange.between(known(recent.first, "reward"), recent.values("reward"))
    if recent.step >= 2 * WINDOW and change is not None and change.size < 0 and change.is_clear:
        falls.append((f"“Reward”, the mean of {WINDOW} steps,", change.before, change.after))
    first, newest = recent.first_evaluation, [*recent.evaluations][-2:]  # two, as a single evaluation may be chance
    if first is not None and first.step <= WINDOW and len(newest) == 2 and newest[0] != first:
        falls.append(("“Held-out reward”", first.reward, max(evaluation.reward for evaluation in newest)))
    # The largest: a model that collapses within a few steps leaves hardly any spread in the later ones.
    spread = max(known(recent.first, "reward_std"), default=0.0)
    for where, before, after in falls if spread else ():
        fall = (before - after) / spread
        if fall > rule.threshold:
            return rule.finding(
                fall,
                f"{where} has fallen from {before:.3g} to {after:.3g}: {fall:.2g} times the spread of the completions' "
                f"rewards at the start (above {rule.threshold:g} it answers worse than before training).",
                recent.slower(0.3),
            )
    return None


@rule(needs=2 * WINDOW)
def hacking(recent: Recent, rule: Rule) -> Finding | None:
    training = recent.mean("reward")
    if len(recent.evaluations) >= 3 and training is not None:
        *earlier, last, newest = recent.evaluations
        best = max(earlier, key=lambda evaluation: evaluation.reward)
        now = (last.reward + newest.reward) / 2  # of two, because an evaluation of few prompts scatters
        has_fallen = best.reward - now > rule.threshold * abs(best.reward)
        if best.training is not None and training > best.training and has_fallen:
            return rule.finding(
                now,
                f"“Held-out reward” has fallen from {best.reward:.3g} after step {best.step} to {now:.3g}, while "
                f"“Reward” in training has risen from {best.training:.3g} to {training:.3g}.",
                about=["held_out"],
                limit=best.reward * (1 - rule.threshold),
                metric="reward",
                advice="The run learns its training prompts and not the task. Go back to the checkpoint of that step; "
                "take more prompts, a lower learning rate or a higher Beta (KL weight).",
            )
    for before in (recent.first, [*recent.steps][:WINDOW]) if len(recent.steps) >= 2 * WINDOW else ():
        clear: dict[str, MeanChange] = {}
        for name in recent.rewards():
            metric = f"rewards/{name}/mean"
            change = MeanChange.between(known(before, metric), recent.values(metric))
            if change is not None and change.is_clear and abs(change.size) > rule.threshold * abs(change.before):
                clear[name] = change
        up = max(clear, key=lambda name: clear[name].size, default="")
        down = min(clear, key=lambda name: clear[name].size, default="")
        if clear and clear[up].size > 0 > clear[down].size:
            rise, fall = clear[up], clear[down]
            since = "the first steps" if before is recent.first else f"{len(recent.steps)} steps"
            return rule.finding(
                fall.after,
                f"Since {since}, {label_of(up)} has risen from {rise.before:.2g} to {rise.after:.2g}, and "
                f"{label_of(down)} has fallen from {fall.before:.2g} to {fall.after:.2g} (“Rewards per function”).",
                about=[down],
                limit=fall.before * (1 - rule.threshold),
                metric=f"rewards/{down}/mean",
            )
    return None


@rule(needs=LONG)
def flat(recent: Recent, rule: Rule) -> Finding | None:
    rewards = recent.values("reward", LONG)
    if len(rewards) < LONG:
        return None
    change = MeanChange.between(rewards[: LONG // 2], rewards[LONG // 2 :])
    if change is None or abs(change.size) > rule.threshold * change.error:
        return None
    # Most groups have no signal: another rule's finding. It has converged: nothing is left to learn.
    if (recent.mean("frac_groups_without_signal") or 0) > 0.5 or recent.has_converged:
        return None
    where = f"{change.before:.3g} in the older half, {change.after:.3g} in the newer."
    limit = rule.threshold * change.error
    return rule.finding(change.size, f"“Reward” has not moved in {LONG} steps: {where}", limit=limit)


@rule()
def drifting(recent: Recent, rule: Rule) -> Finding | None:
    kl = recent.median("kl")
    if kl is None or kl <= rule.threshold or RULES["kl_exploding"].look(recent, RULES["kl_exploding"]):
        return None
    return rule.finding(
        kl,
        f"“KL from the reference” is {kl:.3g} nats a token, the median of the last {WINDOW} steps (above "
        f"{rule.threshold:.2g} the policy drifts from the model it started as).",
        recent.slower(0.5),
    )


@rule(needs=SUDDEN)
def kl_exploding(recent: Recent, rule: Rule) -> Finding | None:
    values = recent.values("kl", SUDDEN)
    if len(values) < SUDDEN or min(values) <= rule.threshold:
        return None
    kl = median(values)
    return rule.finding(
        kl,
        f"“KL from the reference” is {kl:.3g} nats a token, above {rule.threshold:.2g} in each of the last {SUDDEN} "
        "steps: the model is hardly the one it started as.",
        recent.slower(0.1),
    )


@rule()
def self_distillation_idle(recent: Recent, rule: Rule) -> Finding | None:
    shares = recent.values(rule.metric)
    if len(shares) < WINDOW or max(shares) > rule.threshold:
        return None
    return rule.finding(
        0.0,
        f"No completion of the last {WINDOW} steps had a teacher: none reached a reward of "
        f"{recent.setting('success_reward_threshold'):g}, or what it was shown did not fit Max Seq.",
    )


@rule()
def moving_fast(recent: Recent, rule: Rule) -> Finding | None:
    if (clipped := rule.mean_above(recent)) is None:
        return None
    epsilon = recent.setting("epsilon")
    narrow = epsilon < MUST_WIDEN and recent.setting("importance_sampling_level") in ("", "token", None)
    return rule.finding(
        clipped,
        f"“Clip ratios” total {clipped:.0%} {OVER_WINDOW} (above {rule.threshold:.0%} the policy moves faster than its "
        f"completions allow){f': Epsilon is only {epsilon:g}' if narrow else ''}.",
        {"epsilon": 0.2} if narrow else recent.slower(0.5),
    )


@rule(needs=LONG)
def never_clips(recent: Recent, rule: Rule) -> Finding | None:
    clipped = recent.values("clip_ratio_total", LONG)
    # With a single update between two rollouts the ratio is 1, and nothing can be clipped.
    updates = recent.setting("num_iterations") * recent.setting("steps_per_generation")
    share = sum(clipped) / LONG
    if updates < 2 or len(clipped) < LONG or share >= rule.threshold or recent.has_improved:
        return None
    return rule.finding(
        share,
        f"“Clip ratios” total {share:.1%} on average over the last {LONG} steps (below {rule.threshold:.0%} is too "
        f"seldom), although there are {updates} updates per rollout, and the reward does not rise: the updates are too "
        "small to matter.",
        recent.faster(3),
    )


@rule(needs=SETTLED)
def too_slow(recent: Recent, rule: Rule) -> Finding | None:
    kl, rates = recent.median("kl", SETTLED), recent.values("learning_rate", SETTLED)
    rate = recent.setting("learning_rate")
    if kl is None or kl >= rule.threshold or recent.has_improved or min(rates, default=0) < rate / 2:
        return None
    if recent.setting("kl_estimator") != "k3" and recent.setting("beta") > 0:
        return None  # that estimate is of either sign, and small where the policy has moved far
    return rule.finding(
        kl,
        f"“KL from the reference” is still {kl:.1g} nats a token after {recent.step} steps (below "
        f"{rule.threshold:.0g} the policy has not moved), and the reward has not risen: at a learning rate of "
        f"{rate:.2g} nothing is learned.",
        recent.faster(10),
    )


@rule()
def gradient_zero(recent: Recent, rule: Rule) -> Finding | None:
    norms, silent = recent.values("grad_norm"), recent.mean("frac_groups_without_signal")
    # Without a reward that differs there is no gradient either; that is another rule's finding. SFT has no groups.
    if len(norms) < WINDOW or max(norms) > rule.threshold or (silent is not None and silent > 0.5):
        return None
    masked = recent.setting("mask_truncated_completions") and (recent.mean("hit_max_tokens_ratio") or 0) > 0.9
    why = "Every completion is cut off, and Mask truncated completions leaves out those that are: raise Completion."
    return rule.finding(
        max(norms),
        f"“Gradient norm” has been 0 for {WINDOW} steps"
        f"{'' if silent is None else ', although completions of a group get different rewards'}: nothing is learned.",
        {"max_completion_length": recent.setting("max_completion_length") * 2} if masked else {},
        advice=why if masked else "",
    )


@rule(needs=1)
def not_a_number(recent: Recent, rule: Rule) -> Finding | None:
    if not recent.steps:
        return None
    # Where no completion had a signal the learner measures nothing: then the entropy is missing with all the others.
    always, measured = MUST_BE_NUMBERS[:2], MUST_BE_NUMBERS[2:] if "entropy" in recent.steps[-1] else ()
    broken = [name for name in always if name in recent.not_numbers]
    broken += [name for name in measured if name in recent.not_numbers and known(recent.first, name)]
    if not broken:
        return None
    are = "is" if len(broken) == 1 else "are"
    return rule.finding(
        None,
        f"In step {recent.step} {' and '.join(broken)} {are} not a number: a log-probability has overflowed.",
        recent.slower(0.1),
        metric=broken[0],
    )


@rule()
def identical(recent: Recent, rule: Rule) -> Finding | None:
    distinct, size = recent.mean("completions/distinct_fraction"), recent.setting("group_size")
    # A group of G has at least one text: of the other G − 1 the share that is a text of its own.
    limit = (1 + rule.threshold * (size - 1)) / size
    if distinct is None or distinct > limit or size < 2 or recent.has_converged:
        return None
    return rule.finding(
        distinct,
        f"The {size} completions of a group are only {distinct * size:.2g} different texts {OVER_WINDOW} (up to "
        f"{limit * size:.2g} there is next to nothing to compare).",
        _more_variety(recent),
        limit=limit,
    )


@rule()
def mode_collapse(recent: Recent, rule: Rule) -> Finding | None:
    names = "completions/distinct_2", "completions/mean_length"
    (now, length), (before, length_before) = map(recent.mean, names), map(recent.mean_at_first, names)
    if now is None or not length or not before or not length_before or recent.has_converged:
        return None
    # Longer texts by themselves have a smaller share of different pairs, shorter ones fewer pairs: both must fall.
    left = max(now / before, now * length / (before * length_before))
    if left > rule.threshold:
        return None
    return rule.finding(
        now,
        f"“Distinct-2” has fallen from {before:.2g} to {now:.2g}: of the pairs of words that a group was written with "
        f"at first, {left:.0%} are left (at {rule.threshold:.0%} or less it has collapsed to one way of saying "
        "things).",
        _more_variety(recent) or recent.slower(0.5),
        limit=rule.threshold * before,
    )


def _more_variety(recent: Recent) -> dict[str, float]:
    return {"temperature": 1.0} if recent.setting("temperature") < 0.8 else {}


@rule()
def entropy_collapse(recent: Recent, rule: Rule) -> Finding | None:
    entropy, before = recent.mean("entropy"), recent.mean_at_first("entropy") or 0.0
    if entropy is None or before <= 0 or entropy > rule.threshold * before or recent.has_converged:
        return None
    if recent.mean("reward") is None:  # who imitates is meant to become as sure as what it imitates
        return None
    return rule.finding(
        entropy,
        f"“Entropy” has fallen from {before:.2g} to {entropy:.2g} nats a token, {entropy / before:.0%} of what it was "
        f"at first (below {rule.threshold:.0%} is a collapse), and the reward has not risen for all.",
        {"beta": 0.02} if recent.setting("beta") == 0 else recent.slower(0.5),
        limit=rule.threshold * before,
    )


@rule()
def cut_off(recent: Recent, rule: Rule) -> Finding | None:
    if (share := rule.mean_above(recent)) is None:
        return None
    length = recent.setting("max_completion_length")
    sentence = (
        f"“Cut off at the limit” is {share:.0%} {OVER_WINDOW} (above {rule.threshold:.0%} too many answers are never "
        f"finished): these completions reached {length:,} tokens."
    )
    if RULES["repetition"].mean_above(recent) is None:
        return rule.finding(share, sentence, {"max_completion_length": length * 2})
    advice = (
        "They say the same again and again, so more room would not end them: lower Completion, and strengthen a "
        "reward for the right form."
    )
    shorter = max(SHORTEST, length // 2)
    return rule.finding(share, sentence, {"max_completion_length": shorter} if shorter < length else {}, advice=advice)


@rule()
def straggler(recent: Recent, rule: Rule) -> Finding | None:
    names = ("completions/max_length", "completions/mean_length", "time/rollout", "time/step")
    longest, mean, sampling, step = (recent.mean(name) or 0.0 for name in names)
    if not mean or not step or longest < rule.threshold * mean or sampling < SAMPLING_SHARE * step:
        return None
    shorter = -int(-3 * mean // 16) * 16
    return rule.finding(
        longest,
        f"The longest completion of a step has {longest:,.0f} tokens, {longest / mean:.1f} times the mean of "
        f"{mean:,.0f}, and sampling takes {sampling / step:.0%} of “Step time”: most of it waits for one completion.",
        {"max_completion_length": shorter} if shorter < recent.setting("max_completion_length") else {},
        limit=rule.threshold * mean,
    )


@rule(needs=SETTLED)
def tools_unused(recent: Recent, rule: Rule) -> Finding | None:
    calls = recent.values(rule.metric, SETTLED)
    if not calls or max(calls) > rule.threshold:
        return None
    return rule.finding(0.0, f"No completion of the last {SETTLED} steps has called a tool.")


MEANS: dict[str, tuple[str, Callable[[Recent], Mapping[str, Any]]]] = {
    "sampler_differs": (
        "“Sampler and learner” differ by {mean:.2g} nats a token in the log-probability of the same token, {over} "
        "(above {limit:.2g} the model's numbers are too coarse).",
        lambda recent: FINER.get(recent.setting("rollout_quantization"), {"dtype": "float32"}),
    ),
    "repetition": (
        "{mean:.0%} of what a completion says stood in it before, word for word, {over} (above {limit:.0%} the model "
        "turns in circles).",
        lambda recent: recent.slower(0.5),
    ),
    "tools_fail": (
        "{mean:.0%} of tool calls fail {over} (above {limit:.0%} a model learns not to call): they raise an error, "
        "take too long, or name no tool.",
        lambda recent: {},
    ),
    "results_dropped": (
        "{mean:.0%} of completions ended {over} because the results of a tool call did not fit within {length:,} "
        "tokens (above {limit:.0%} too many answers are never written).",
        lambda recent: {"max_completion_length": recent.setting("max_completion_length") * 2},
    ),
}
"""Rules for a mean above the threshold → the sentence, and the settings that are proposed."""
FINER = {"4": {"rollout_quantization": "8"}, "8": {"rollout_quantization": "none"}}


def _of_mean(recent: Recent, rule: Rule) -> Finding | None:
    if (mean := rule.mean_above(recent)) is None:
        return None
    sentence, settings = MEANS[rule.code]
    about = {"over": OVER_WINDOW, "limit": rule.threshold, "length": recent.setting("max_completion_length")}
    return rule.finding(mean, sentence.format(mean=mean, **about), settings(recent))


JUDGES = {  # rules for the judges whose mean reaches the threshold → steps of the mean, and the sentence on the largest
    "judge_fails": (JUDGED, f"The judge {{judge}} gave no score to {{mean:.0%}} of completions over {JUDGED} steps."),
    "judge_saturates": (
        WINDOW,
        f"The judge {{judge}} gave {{mean:.0%}} of completions its highest score, or its lowest, {OVER_WINDOW}.",
    ),
    "judge_drifts": (
        2 * WINDOW,
        "The scores of {judge} follow length more than at the start: their correlation is {mean:.2f}.",
    ),
}


def _of_judges(recent: Recent, rule: Rule) -> Finding | None:
    before, after = rule.metric.split("*")
    means: dict[str, float] = {}
    for metric in fnmatch.filter(recent.steps[-1] if recent.steps else (), rule.metric):
        mean = recent.mean(metric, rule.needs)
        change = MeanChange.between(known(recent.first, metric), recent.values(metric))
        has_risen = change is not None and change.size > LIKELY * change.error
        if mean is not None and mean >= rule.threshold and (has_risen or rule.code != "judge_drifts"):
            means[metric.removeprefix(before).removesuffix(after)] = mean
    if not means:
        return None
    worst = max(means, key=lambda name: means[name])
    text = JUDGES[rule.code][1].format(judge=quote(worst, 40), mean=means[worst])
    return rule.finding(means[worst], text, about=[*means], metric=f"{before}{worst}{after}")


_LOOKS |= dict.fromkeys(MEANS, (_of_mean, WINDOW)) | {code: (_of_judges, needs) for code, (needs, _) in JUDGES.items()}


@rule(needs=LONG)
def memory_creeping(recent: Recent, rule: Rule) -> Finding | None:
    peaks, before = recent.values("peak_memory_gb", LONG), recent.mean_at_first("peak_memory_gb")
    if len(peaks) < LONG or before is None:
        return None
    now, third = fmean(peaks[-WINDOW:]), LONG // 3
    for start in (0, third):
        change = MeanChange.between(peaks[start : start + third], peaks[start + third : start + 2 * third])
        if change is None or not change.is_clear or change.size <= 0:
            return None
    longest, at_first = (mean("completions/max_length") for mean in (recent.mean, recent.mean_at_first))
    if now <= rule.threshold * before or (longest and at_first and longest > EXPLAINED * at_first):
        return None
    return rule.finding(
        now,
        f"“Memory” has grown from {before:.3g} GB in the first steps to {now:.3g} GB, and still grows, though "
        "completions are no longer than they were: something is kept from step to step.",
        limit=rule.threshold * before,
    )


@rule()
def seen_often(recent: Recent, rule: Rule) -> Finding | None:
    values, held_out, tail = recent.values("epoch"), [each.reward for each in recent.evaluations], "."
    imitates = recent.setting("train_mode") == "sft"
    limit = SECOND_PASS if imitates and len(held_out) > 1 else rule.threshold
    if not values or values[-1] < limit:
        return None
    if len(held_out) > 1:
        if max(held_out[-2:]) >= max(held_out):
            return None  # it still gets better on prompts that it has not seen
        course = "loss” no longer falls" if imitates else "reward” no longer rises"
        tail = f", and “Held-out {course} ({abs(held_out[-1]):.3g}, at best {abs(max(held_out)):.3g})."
    seen = "row has been learned from" if imitates else "prompt has been sampled"
    return rule.finding(
        values[-1],
        f"Every {seen} {values[-1]:.0f} times (from {limit:.0f} times on a model may learn them by heart){tail}",
        limit=limit,
    )


@rule()
def machines_wait(recent: Recent, rule: Rule) -> Finding | None:
    if (share := rule.mean_above(recent)) is None:
        return None
    waits = {rank: recent.mean(f"ranks/{rank}/waiting") for rank in range(MOST_HOSTS)}
    waited = {rank: seconds for rank, seconds in waits.items() if seconds is not None}
    # Who waits least is who the others wait for.
    whom = f", mostly for rank {min(waited, key=lambda rank: waited[rank])}" if len(waited) > 1 else ""
    return rule.finding(
        share,
        f"In the last {WINDOW} steps the machines have spent {share:.0%} of their time waiting for each other{whom} "
        f"(limit {rule.threshold:.0%}).",
    )


RULES: dict[str, Rule] = {}
for _code, _texts in read_resource("health_rules.yaml").items():
    _texts |= {name: _texts[name].format_map(globals()) for name in ("when", "source")}
    _texts["threshold"] = float(_texts["threshold"])
    RULES[_code] = Rule(_code, look=_LOOKS[_code][0], needs=_LOOKS[_code][1], **_texts)
