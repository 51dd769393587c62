"""Rules about the rewards: functions that never score, groups without signal, one reward bought with another, no trend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from backend.config.first_choices import SYSTEM_PROMPT
from backend.trainer.health.recent import LONG, WINDOW, MeanChange, Metrics, Recent, known, label_of

# What a rule has found: a sentence with the figures, advice, and where known the settings that would help.


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` stays the same as long as a rule keeps finding the same, so that it is reported once.

    `metric` is the name of the metric behind it, `value` what it was and `threshold` the limit that it passed, in the metric's unit.
    `settings`: setting → the value that is proposed for it.
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
    """`look(recent, threshold)` returns what it saw, or None. `metric` is the one behind it and `chart` the title of the chart that
    shows it; `setting` the one to look at first."""

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
        advice="Tell the model in the system prompt to write the tags that these functions look for." if asks_for_tags else "",
    )  # fmt: skip


def no_signal(recent: Recent, threshold: float) -> Sign | None:
    share = recent.mean("frac_groups_without_signal")
    if share is None or share < threshold or recent.has_converged:
        return None
    is_cold = recent.setting("temperature") < 0.8
    return Sign(
        share,
        f"“Groups without signal” is {share:.0%} on average over the last {WINDOW} steps (from {threshold:.0%} on nothing is learned): "
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
                f"{where} has fallen from {before:.3g} to {after:.3g}: {fall:.2g} times the spread of the completions' rewards at the "
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
        f"“Held-out reward” has fallen from {best.reward:.3g} after step {best.step} to {now:.3g}, while “Reward” in training has risen "
        f"from {best.training:.3g} to {training:.3g}.",
        about=("held_out",),
        limit=best.reward * (1 - threshold),
        metric="reward",
        advice="The run learns its training prompts and not the task. Go back to the checkpoint of that step; take more prompts, a lower "
        "learning rate or a higher Beta (KL weight).",
    )


def _against_another_function(recent: Recent, threshold: float) -> Sign | None:
    """One function's mean has clearly risen and another's clearly fallen, since the run's first steps or over the last LONG."""
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
                f"Since {since}, {label_of(up)} has risen from {clear[up].before:.2g} to {clear[up].after:.2g}, and {label_of(down)} has "
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
        f"“Reward” has not moved in {LONG} steps: {change.before:.3g} in the older half, {change.after:.3g} in the newer.",
        limit=threshold * change.error,
    )


REWARD_RULES = (
    Rule(
        "never_scores", "A reward function never scores", "Rewards per function", "rewards/*/mean",
        Threshold(0.0, f"a function gave exactly this to every completion of the last {WINDOW} to {LONG} steps", "SPEC: tags the model never writes"),
        "Read some completions: the model may never write what the function looks for, or a column may be the wrong one.",
        never_scores, "reward_functions",
    ),
    Rule(
        "no_signal", "No groups with signal", "Groups without signal", "frac_groups_without_signal",
        Threshold(0.95, f"the mean over {WINDOW} steps of the share of groups whose completions all got the same reward is at least this, "
                  "and the reward has not risen to nearly the same for all",
                  "ours: of 20 groups one teaches; trl#5640, verl#5228 on groups of no variance"),
        "Take a larger group, a higher Temp, rewards with partial credit, or other prompts; or stop, if the reward is full.",
        no_signal, "group_size",
    ),
    Rule(
        "reward_fell", "Worse than at the start", "Reward", "reward",
        Threshold(0.5, f"the mean reward of the last {WINDOW} steps is below that of the first {WINDOW}, by four standard errors and by more "
                  "than this many standard deviations of the first completions' rewards; or the last two held-out rewards are below the "
                  "first by as much; not where reward weights vary",
                  "ours: half a standard deviation, a medium effect by Cohen's convention"),
        "Stop, and go on from an early checkpoint with a lower learning rate; a Beta (KL weight) above 0 keeps the policy near its start.",
        reward_fell, "learning_rate",
    ),
    Rule(
        "hacking", "One reward at the cost of another", "Rewards per function", "rewards/*/mean",
        Threshold(0.2, f"a function's mean, or the held-out reward, has fallen by more than this part of what it was, while another "
                  f"function, or the training reward, has risen; means of {WINDOW} steps that differ by four standard errors",
                  "ours; that proxies rise while the goal falls: arXiv:2210.10760"),
        "The run may have found a way to score that was not meant. Read some completions; lower the weight of the reward that rises.",
         hacking, "reward_weights", needs=2 * WINDOW,
    ),
    Rule(
        "flat", "Flat reward", "Reward", "reward",
        Threshold(1.0, f"the mean rewards of the older and newer half of {LONG} steps differ by at most this many standard errors, and the "
                  "reward has not risen before to nearly the same for all", "ours: one standard error, which chance exceeds in a third of the cases"),
        "Score some completions by hand first: rewards may be too harsh or the prompts too hard. Then a higher learning rate.",
         flat, "learning_rate", needs=LONG,
    ),
)  # fmt: skip
