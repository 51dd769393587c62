"""The charts of the Monitor page, read from resources/charts.toml."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from app.state.run_summary import every_text
from backend.config.config import SETTINGS, needs_reference
from backend.config.setting import has_default_rewards, step_parts
from backend.rewards.catalogue import builtin_rewards
from backend.utils import places


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart. `colour`: a palette role, or reward:NAME for a reward function."""

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
    title: str
    section: str  # the heading that it stands under on Monitor and Compare
    axis: str  # label of the y axis
    help: str
    unit: str = ""
    needs: str = ""  # the part of a step or the mode that a run must have for it to be shown without numbers
    curves: tuple[Curve, ...] = ()
    pattern: str = ""  # as in file names; it adds a curve for every metric that it fits
    held_out: bool = False  # it shows evaluations
    stacked: Sequence[str] = ()  # metrics drawn as areas on top of each other

    def shows(self, metric: str) -> bool:
        return any(metric in curve.metrics for curve in self.curves) or fnmatchcase(metric, self.pattern)


SPARE_COLOURS = ("accent", "clip", "length", "kl", "good", "bad", "muted")

PHASE_LABELS = {"rollout": "Sampling", "reward": "Rewards", "train": "Learning", "gradient_sum": "Summing gradients"}


CHARTS: tuple[Chart, ...] = tuple(  # in the order of the page. `Other` is last: it takes what is left
    Chart(**about | {"curves": tuple(Curve(**curve) for curve in about.get("curves", ()))})
    for about in tomllib.loads((places.resources() / "charts.toml").read_text(encoding="utf-8"))["chart"]
)


def curves_of(chart: Chart, names: Iterable[str], rewards: list[str]) -> list[Curve]:
    earlier = [other for other in CHARTS[: CHARTS.index(chart)] if other.held_out == chart.held_out]
    own = {name for curve in chart.curves for name in curve.metrics}
    matched = [
        name
        for name in names
        if fnmatchcase(name, chart.pattern) and name not in own and not any(other.shows(name) for other in earlier)
    ]

    def place(name: str) -> tuple[int, int]:
        """Of its reward function, and its rank."""
        reward, rank = _reward_in(name), re.match(r"ranks/(\d+)/", name)
        return rewards.index(reward) if reward in rewards else len(rewards), int(rank[1]) if rank else -1

    before, _, after = chart.pattern.partition("*")
    taken = {curve.colour for curve in chart.curves}
    spare = [colour for colour in SPARE_COLOURS if colour not in taken] or SPARE_COLOURS
    curves = [*chart.curves]
    for index, name in enumerate(sorted(matched, key=place)):
        if reward := _reward_in(name):
            curves.append(Curve(name, label_of(reward), f"reward:{reward}"))
        elif (rank := place(name)[1]) >= 0:
            curves.append(Curve(name, f"Rank {rank}", SPARE_COLOURS[rank % len(SPARE_COLOURS)]))
        else:
            short = name.removeprefix(before).removesuffix(after)
            curves.append(Curve(name, PHASE_LABELS.get(short, short), spare[index % len(spare)]))
    return curves


def _reward_in(name: str) -> str:
    head, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if head == "rewards" else ""


def label_of(reward: str) -> str:
    own = reward.replace("_", " ").capitalize() if reward.isidentifier() else reward
    return next((entry.label for entry in builtin_rewards() if entry.name == reward), own)


def has_place(
    chart: Chart, curves: Iterable[Curve], metrics: Iterable[str], config: Mapping[str, Any], *, has_steps: bool
) -> bool:
    """The run has numbers for this chart, or should say why not."""
    recorded, parts = set(metrics), step_parts(config)
    if chart.needs == "policy" and "policy" not in parts:  # what is recorded of it is 0
        return False
    if any(curve.metric in recorded for curve in curves):
        return True
    if not (config.get("reward_functions") or config.get("environment") or has_default_rewards(config)):
        parts -= {"scoring"}
    fits = not chart.needs or chart.needs in {*parts, config.get("train_mode")}
    explains = any(curve.metric in (("reward", "loss") if chart.held_out else ("kl",)) for curve in chart.curves)
    return fits and (explains or (not has_steps and not chart.held_out))


def placeholder(chart: Chart, config: Mapping[str, Any], *, is_live: bool = True, steps: int = 0) -> str:
    if any(curve.metric == "kl" for curve in chart.curves) and not needs_reference(config):
        return "KL is off: its weight is 0, so no reference is computed."
    if chart.held_out:
        every = _setting(config, "steps_per_eval")
        if not every:
            return "Evaluation is off for this run."
        waits = f"Waits for the first evaluation, {every_text(every)}."
        return waits if is_live else "The run ended before its first evaluation."
    if steps:
        return "This run records none of this." if is_live else "This run recorded none of this."
    return "Waits for the first step." if is_live else "The run ended before its first step was done."


def ratio_is_always_1(config: Mapping[str, Any]) -> bool:
    """Every update meets the policy that sampled, so nothing can be clipped."""
    updates = [_setting(config, key) for key in ("num_iterations", "steps_per_generation")]
    return updates == [1, 1] and _setting(config, "ratio_against") == "old"


def flat_reason(chart: Chart, config: Mapping[str, Any]) -> str:
    """Why a chart can only show 0, or ""."""
    if not any(curve.metric == "clip_ratio_total" for curve in chart.curves) or not ratio_is_always_1(config):
        return ""
    return (
        "With one update per rollout the ratio of the policy to the one that sampled is always 1, "
        "so Epsilon clips nothing. With two, the second can clip."
    )


def _setting(config: Mapping[str, Any], key: str) -> Any:
    return config[key] if key in config else SETTINGS[key].default
