"""The table of charts: which metrics share a plot, in what order, under what title. One entry is one chart on the Monitor page.

A metric that no chart names appears in the last one, Other. Nothing is drawn here: a colour is the name of a palette role, or the
index of a reward function.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from backend.config.config import SETTINGS, needs_reference
from backend.rewards.catalogue import builtin_rewards
from backend.runs.metric_names import EVALUATION, prefixed, trl_name


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart. `colour` is a palette role, or reward:N for the N-th reward function.

    A band is drawn from `low` to `high`, or `spread` to both sides of the line; all three are names of metrics.
    """

    metric: str
    label: str
    colour: str = ""
    spread: str = ""
    low: str = ""
    high: str = ""

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(name for name in (self.metric, self.spread, self.low, self.high) if name)


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot. `pattern` (as in file names) adds a curve for every metric it fits."""

    title: str
    axis: str
    """Label of the y axis, with its unit where it has one."""
    unit: str
    help: str
    curves: tuple[Curve, ...] = ()
    pattern: str = ""
    held_out: bool = False
    """Whether it shows evaluations on held-out prompts instead of training steps."""
    stacked: tuple[str, ...] = ()
    """Metrics whose curves are drawn as areas on top of each other, because they are parts of a whole."""

    def shows(self, metric: str) -> bool:
        """Whether the metric belongs to this chart."""
        return any(metric in curve.metrics for curve in self.curves) or fnmatchcase(metric, self.pattern)


SPARE_COLOURS = ("accent", "clip", "length", "kl", "good", "bad", "muted")
"""Roles for curves that have no colour of their own."""

# fmt: off
CHARTS: tuple[Chart, ...] = (
    Chart("Reward", "reward", "", "What the model is learning to raise: the weighted sum of all reward functions, averaged over the "
          "step's completions. The band is one standard deviation to each side.",
          (Curve("reward", "Mean", "accent", spread="reward_std"),)),
    Chart("Rewards per function", "score", "", "The mean score of each reward function, before its weight.", pattern="rewards/*/mean"),
    Chart("KL from the reference", "nats a token", "nats", "How far the policy has moved from the model it started as. Above 0.5, or "
          "rising fast, it is drifting: lower the learning rate or raise Beta (KL weight).", (Curve("kl", "KL", "kl"),)),
    Chart("Clip ratios", "% of tokens", "share", "Share of tokens whose ratio to the sampling policy was clipped, so that they taught "
          "nothing more. Between 5 and 20 % is healthy: below, updates hardly move the policy; above, they move it too far. With one "
          "update per rollout it is always 0.",
          (Curve("clip_ratio_total", "Total", "clip"), Curve("clip_ratio_low", "Low", "advantage_below"),
           Curve("clip_ratio_high", "High", "advantage_above"))),
    Chart("Completion length", "tokens", "tokens", "Mean length of the completions; the band reaches from the shortest to the longest.",
          (Curve("completions/mean_length", "Mean", "length", low="completions/min_length", high="completions/max_length"),)),
    Chart("Cut off at the limit", "% of completions", "share", "Share of completions that reached the completion length without ending. At 100 % "
          "no answer is ever finished.", (Curve("hit_max_tokens_ratio", "Cut off", "length"),)),
    Chart("Held-out reward", "reward, scores", "", "Reward and its parts on held-out prompts, which are never trained on.",
          (Curve("reward", "Reward", "accent"),), pattern="rewards/*/mean", held_out=True),
    Chart("Entropy", "nats a token", "nats", "How open the policy still is, per token. Near 0 every completion of a group is the same.",
          (Curve("entropy", "Entropy", "accent"),)),
    Chart("Sampler and learner", "nats a token", "nats", "How far the log-probabilities of the sampled tokens differ between sampling and learning, "
          "on average: by rounding alone, which is near 0 in float32 and about 0.01 in 16 bits, and with what top-p, top-k and min-p take "
          "away. Rounding above 0.05 calls for another precision.",
          (Curve("sampling/logp_gap/mean", "Rounding", "accent"), Curve("sampling/sampling_logp_difference/mean", "With filters", "muted"))),
    Chart("Groups without signal", "% of groups", "share", "Share of groups whose completions all got the same reward: they have no "
          "advantage, and teach nothing.", (Curve("frac_groups_without_signal", "No signal", "clip"),
           Curve("frac_reward_zero_std", "As TRL counts", "muted"))),
    Chart("Spread of rewards", "std of the reward", "", "Standard deviation of the rewards within a group, averaged over the groups, and over the "
          "whole step. GRPO learns from the first: near 0 the completions of a group are worth the same, whatever the second says.",
          (Curve("reward_std_within_groups", "Within groups", "accent"), Curve("reward_std", "Over the step", "muted"))),
    Chart("Spread per function", "std of the score", "", "Standard deviation of each reward function's scores. A function that scores all alike "
          "guides nothing.", pattern="rewards/*/std"),
    Chart("Diversity of groups", "% of completions", "share", "Share of the completions of a group that differ from each other, and of their text "
          "that repeats itself. When all of a group are the same, there is nothing to compare, and nothing to learn.",
          (Curve("completions/distinct_fraction", "Different", "accent"), Curve("completions/repetition", "Repeated text", "warning"),
           Curve("completions/identical_fraction", "Identical to another", "clip"))),
    Chart("Distinct words", "% of tokens", "share", "Distinct-1 and distinct-2: how many different tokens, and pairs of neighbours, the completions of "
          "a group have, of all their tokens. Falling at the same length, the completions grow alike in wording before any two are the same.",
          (Curve("completions/distinct_1", "Distinct-1", "length"), Curve("completions/distinct_2", "Distinct-2", "accent"))),
    Chart("Advantage", "advantage", "", "Advantages of the step's completions: how far their rewards lie above or below their group.",
          pattern="advantage*"),
    Chart("Loss", "loss", "", "Near 0 and rising is normal for GRPO: watch the reward, not the loss.", (Curve("loss", "Loss", "muted"),)),
    Chart("Gradient norm", "norm", "", "Size of the gradient before clipping.", (Curve("grad_norm", "Norm", "muted"),)),
    Chart("Gradient clipping", "% of updates", "share", "Share of a step's updates whose gradient was larger than Max gradient norm, and "
          "was shortened to it.", (Curve("grad_clipped", "Shortened", "clip"),)),
    Chart("Learning rate", "rate", "", "Size of each update, as the schedule has it.", (Curve("learning_rate", "Rate", "muted"),)),
    Chart("Speed", "tokens/s", "tokens/s", "Tokens sampled, and tokens learned from, in a second.",
          (Curve("rollout_tokens_per_second", "Sampling", "accent"), Curve("train_tokens_per_second", "Learning", "length"))),
    Chart("Step time", "seconds", "s", "Where the seconds of a step go: sampling, scoring, learning, saving and the rest, on top of each other.",
          (Curve("time/rollout", "Sampling", "accent"), Curve("time/reward", "Rewards", "clip"), Curve("time/train", "Learning", "length"),
           Curve("time/save", "Saving", "kl"), Curve("time/other", "Other", "muted"), Curve("time/step", "Step", "text")), pattern="time/*",
          stacked=("time/rollout", "time/reward", "time/train", "time/save", "time/other")),
    Chart("Memory", "GB", "GB", "The most memory that was in use at once.", (Curve("peak_memory_gb", "Peak", "muted"),),
          pattern="peak_memory_gb/*"),
    Chart("Memory of the processes", "GB", "GB", "Memory of the run's processes, the reward functions' included, at the end of a step, and how much of "
          "the machine's memory is swapped out to disk. When swap grows, steps get slow: lower the memory limit.",
          (Curve("process/memory_gb", "Processes", "accent"), Curve("machine/swap_gb", "Swapped out", "warning"))),
    Chart("CPU", "cores", "", "Cores that the run's processes kept busy, averaged over a step.", (Curve("process/cpu_cores", "Busy", "accent"),)),
    Chart("GPU", "% of the time", "share", "Share of a step in which the Mac's GPU was busy, with whatever program.",
          (Curve("process/gpu_use", "Busy", "accent"),)),
    Chart("Waiting", "% of the step", "share", "Of a run on several machines: the share of a step that they spend waiting for each other, averaged over "
          "them. Below 10 % is good; above 25 % a second machine brings little.", (Curve("waiting_share", "Mean of the ranks", "warning"),)),
    Chart("Waiting of each rank", "seconds", "s", "Seconds of a step that each rank waited for the others. The one that waits least is the one that the "
          "others wait for.", pattern="ranks/*/waiting"),
    Chart("Sampling of each rank", "tokens/s", "tokens/s", "Tokens that each rank samples in a second, by which prompts are shared out.",
          pattern="ranks/*/tokens_per_second"),
    Chart("Learning of each rank", "tokens/s", "tokens/s", "Tokens that each rank learns from in a second.", pattern="ranks/*/learn_tokens_per_second"),
    Chart("Prompts of each rank", "prompts", "", "How many prompts of a step each rank has sampled.", pattern="ranks/*/prompts"),
    Chart("Memory of each rank", "GB", "GB", "The most memory that was in use at once on each rank's machine.", pattern="ranks/*/memory"),
    Chart("Evaluation sets", "reward", "", "Reward on each evaluation set that has a name.", pattern="*/reward", held_out=True),
    Chart("Held-out entropy", "nats a token", "nats", "Entropy of the policy on held-out prompts, over at most 32 of their completions. Beside that of training "
          "it tells whether the policy is sure of all prompts, or of those that it knows.",
          (Curve("entropy", "Entropy", "accent"),), pattern="*/entropy", held_out=True),
    Chart("Held-out KL", "nats a token", "nats", "How far the policy has moved from the reference on held-out prompts, over at most 32 of their "
          "completions.", (Curve("kl", "KL", "kl"),), pattern="*/kl", held_out=True),
    Chart("Held-out lengths", "tokens", "tokens", "Mean length of the completions of held-out prompts, and of those that ended by themselves; the band "
          "reaches from the shortest to the longest.",
          (Curve("completions/mean_length", "Mean", "length", low="completions/min_length", high="completions/max_length"),
           Curve("completions/mean_terminated_length", "Ended by itself", "muted")),
          pattern="*/completions/mean_length", held_out=True),
    Chart("Held-out completions", "%", "share", "Of the completions of held-out prompts: how many were cut off at the limit, how many of a group "
          "differ or are the same, how much of their text repeats itself; and the share of groups that all got the same reward.",
          (Curve("hit_max_tokens_ratio", "Cut off", "length"), Curve("completions/distinct_fraction", "Different", "accent"),
           Curve("completions/identical_fraction", "Identical to another", "clip"), Curve("completions/repetition", "Repeated text", "warning"),
           Curve("frac_groups_without_signal", "Groups without signal", "muted")), held_out=True),
    Chart("Held-out wording", "% of tokens", "share", "Distinct-1 and distinct-2 of the completions of a held-out prompt: different tokens, and pairs of "
          "neighbours, of all their tokens.",
          (Curve("completions/distinct_1", "Distinct-1", "length"), Curve("completions/distinct_2", "Distinct-2", "accent")), held_out=True),
    Chart("Held-out spread", "std", "", "Standard deviation of the rewards of held-out prompts, within a group and over all, and of each reward "
          "function's scores.",
          (Curve("reward_std_within_groups", "Within groups", "accent"), Curve("reward_std", "Over all", "muted")), pattern="rewards/*/std",
          held_out=True),
    Chart("Other of evaluations", "value", "", "Every other metric of evaluations.", pattern="*", held_out=True),
    Chart("Tokens", "tokens", "", "Tokens seen since the run began.", (Curve("num_tokens", "Seen", "muted"),)),
    Chart("Other", "value", "", "Every other metric in the event log.", pattern="*"),
)
"""In the order of the page. `Other` is last, because it takes what is left, as *Other of evaluations* does of theirs."""
PHASE_LABELS = {"rollout": "Sampling", "reward": "Rewards", "train": "Learning", "gradient_sum": "Summing gradients"}
"""Labels of a step's phases in the names of matched metrics."""
# fmt: on


def curves_of(
    chart: Chart, names: Iterable[str], rewards: list[str], charts: tuple[Chart, ...] = CHARTS
) -> list[Curve]:
    """The chart's curves in a run with these metrics: those it lists, with or without data, then matches of its pattern.

    `names` are the metrics of the chart's kind (steps, or evaluations where it is `held_out`); `rewards` the run's reward
    functions, whose indices are their colours.
    """
    at = charts.index(chart) if chart in charts else 0
    earlier = [other for other in charts[:at] if other.held_out == chart.held_out]
    own = {name for curve in chart.curves for name in curve.metrics}
    matched = [
        name
        for name in names
        if fnmatchcase(name, chart.pattern) and name not in own and not any(other.shows(name) for other in earlier)
    ]

    def reward_index(name: str) -> int:
        return rewards.index(reward) if (reward := _reward_in(name)) in rewards else len(rewards)

    before, _, after = chart.pattern.partition("*")
    taken = {curve.colour for curve in chart.curves}
    spare = [colour for colour in SPARE_COLOURS if colour not in taken] or SPARE_COLOURS
    curves = [*chart.curves]
    for index, name in enumerate(sorted(matched, key=reward_index)):
        rank = re.match(r"ranks/(\d+)/", name)
        if reward := _reward_in(name):
            curves.append(Curve(name, label_of(reward), f"reward:{reward_index(name)}"))
        elif rank:
            curves.append(Curve(name, f"Rank {rank[1]}", SPARE_COLOURS[int(rank[1]) % len(SPARE_COLOURS)]))
        else:
            short = name.removeprefix(before).removesuffix(after)
            curves.append(Curve(name, PHASE_LABELS.get(short, short), spare[index % len(spare)]))
    return curves


def _reward_in(name: str) -> str:
    """The function's name in rewards/<function>/mean; empty for other metrics."""
    head, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if head == "rewards" else ""


def label_of(reward: str) -> str:
    """The label of a shipped reward function; the user's functions keep their names."""
    return next((entry.label for entry in builtin_rewards() if entry.name == reward), reward)


def has_place(chart: Chart, curves: Iterable[Curve], metrics: Iterable[str], *, has_steps: bool) -> bool:
    """True if a run with these metrics has numbers for this chart, or a reason worth telling why there are none.

    Before its first step a run has a place for every chart of steps.
    """
    recorded = set(metrics)
    explains = any(curve.metric == ("reward" if chart.held_out else "kl") for curve in chart.curves)
    is_expected = not has_steps and not chart.held_out
    return explains or is_expected or any(curve.metric in recorded for curve in curves)


def placeholder(chart: Chart, config: Mapping[str, Any], *, is_live: bool = True, steps: int = 0) -> str:
    """The text in an empty chart of a run with these settings, that is live or has ended, after so many steps."""
    if any(curve.metric == "kl" for curve in chart.curves) and kl_is_off(config):
        return "KL is off: its weight is 0, so no reference is computed."
    if chart.held_out:
        every = _setting(config, "steps_per_eval")
        if not every:
            return "Evaluation is off for this run."
        waits = f"Waits for the first evaluation, every {every} steps."
        return waits if is_live else "The run ended before its first evaluation."
    if steps:
        return "This run records none of this." if is_live else "This run recorded none of this."
    return "Waits for the first step." if is_live else "The run ended before its first step was done."


def ratio_is_always_1(config: Mapping[str, Any]) -> bool:
    """Every update of a run with these settings meets the policy that sampled, so that nothing can be clipped."""
    updates = [_setting(config, key) for key in ("num_iterations", "steps_per_generation")]
    return updates == [1, 1] and _setting(config, "ratio_against") == "old"


def flat_reason(chart: Chart, config: Mapping[str, Any]) -> str:
    """Why a chart of a run with these settings can only show 0; "" where it can move."""
    if not any(curve.metric == "clip_ratio_total" for curve in chart.curves) or not ratio_is_always_1(config):
        return ""
    return (
        "With one update per rollout the ratio of the policy to the one that sampled is always 1, "
        "so Epsilon clips nothing. With two, the second can clip."
    )


def kl_is_off(config: Mapping[str, Any]) -> bool:
    """A run with these settings computes no KL at all: it has no reference policy."""
    return not needs_reference(config)


def _setting(config: Mapping[str, Any], key: str) -> Any:
    return config[key] if key in config else SETTINGS[key].default


Naming = Literal["labels", "diary", "trl"]
NAMINGS: dict[Naming, str] = {
    "labels": "Labels of the chart",
    "diary": "Names in the event log",
    "trl": "Names in TRL",
}
"""Names of the columns of a chart's CSV table, each with its words in a menu."""


def column_names(chart: Chart, curve: Curve, naming: Naming, scale_rewards: str = "group") -> tuple[str, ...]:
    """Columns of the curve and of the edges of its band; () for the labels of the chart.

    TRL's name of reward_std depends on the run's `scale_rewards`.
    """
    if naming == "labels":
        return ()

    def named(metric: str) -> str:
        if naming == "diary":
            return EVALUATION + metric if chart.held_out else metric
        split = "valid" if chart.held_out else "train"
        return next(iter(prefixed(split, {trl_name(metric, scale_rewards): None})))

    name = named(curve.metric)
    if curve.spread:
        return name, f"{name} - {named(curve.spread)}", f"{name} + {named(curve.spread)}"
    return (name, named(curve.low), named(curve.high)) if curve.low else (name,)
