"""Names of metrics. What leaves this program has TRL's; a user may name a metric either way (`our_name`)."""

import difflib
import operator
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.config.other_programs.keys import as_number
from backend.rewards.catalogue import JUDGE, find_call, metric_name
from backend.runs.events import METRICS
from backend.utils.text import quote

EVALUATION, TRAINING = "eval/", "train/"

OCCASIONAL_METRICS = (  # metrics that only some steps have, besides `METRICS`
    *("epoch", "grad_clipped", "time/save", "dynamic_sampling/prompts", "waiting_share", "policy_loss", "entropy_coef"),
    *("warmup/loss", "warmup/entropy", "warmup/learning_rate", "warmup/pass_rate", "distillation/divergence"),
    *("process/gpu_use", "time/gradient_sum", "time/eval"),
    *("completions/clipped_ratio", *(f"completions/{kind}_terminated_length" for kind in ("mean", "min", "max"))),
    *("clip_ratio/low_min", "clip_ratio/high_max", "cispo_clip_ratio", "vespo/phi_seq_mean"),
    *("sampling/logp_gap/mean", "sampling/logp_gap/max"),
    *("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
    *(f"sampling/importance_sampling_ratio/{kind}" for kind in ("min", "mean", "max")),
    *(f"self_distillation/{name}" for name in ("loss", "reprompted", "solved_groups", "too_long")),
    *("speculation/accepted", "speculation/share"),
    *("curriculum/pass_rate", "curriculum/expected_signal", "curriculum/signal"),
    *("tools/call_frequency", "tools/failure_frequency", "tools/turns", "tools/dropped_frequency"),
)
OF_JUDGES = "failed", "calls", "cached", "seconds", "saturated", "length_correlation"
"""Metrics of a judge NAME are judge/NAME/ and one of these; a reward model has the last."""

TRL_NAMES = {  # our name → TRL's, as `GRPOTrainer` logs it
    "time/step": "step_time",
    "clip_ratio_total": "clip_ratio/region_mean",
    "clip_ratio_low": "clip_ratio/low_mean",
    "clip_ratio_high": "clip_ratio/high_mean",
    "hit_max_tokens_ratio": "completions/clipped_ratio",
    "self_distillation/loss": "self_distillation/distillation_loss",
    "self_distillation/reprompted": "self_distillation/reprompt_sample_fraction",
    "self_distillation/solved_groups": "self_distillation/success_group_fraction",
}

MEASURES = {"reward": "reward", "distillation/divergence": "divergence", "loss": "loss"}
"""What a run improves: the first of these that its steps have. Metric → the word for it."""


def measure_of(names: Container[str]) -> str:
    return next((metric for metric in MEASURES if metric in names), "reward")


_OUR_NAMES = {name: ours for ours, name in TRL_NAMES.items()} | {
    "completion_length": "completions/mean_length",  # in earlier versions of TRL and in our exports
    "clip_ratio": "clip_ratio_total",
    "reward_std_over_step": "reward_std",
}
_OF_REWARD = re.compile(r"rewards?/(.+)/(mean|std)")
_ONE_OF_REWARD = re.compile(r"rewards?/([^/]+)")  # the mean, in earlier versions of TRL


def known_metrics(rewards: Iterable[str]) -> list[str]:
    """The metrics of a run with these reward functions, without those that they log."""
    known = [*METRICS, *OCCASIONAL_METRICS]
    for name in rewards:
        known += [f"rewards/{metric_name(name)}/{kind}" for kind in ("mean", "std")]
        if (call := find_call(name)) and (call.is_model or call.function == JUDGE):
            known += [f"judge/{call.name}/{kind}" for kind in OF_JUDGES]
    return known


def our_name(name: str) -> str:
    """Our name of a metric that may have TRL's: `step_time` is time/step, `eval_hard_kl` is eval/hard/kl, of the
    evaluation set hard. Any other name is returned as it is."""
    if name.startswith(TRAINING):
        rest = _plain(name.removeprefix(TRAINING))
        return rest if _is_known(rest) else name
    for prefix in (EVALUATION, "eval_"):
        if name.startswith(prefix):
            written = name.removeprefix(prefix)
            rest = _of_evaluation(written)
            # A metric that a reward function logs may begin with eval_ too.
            return name if prefix == "eval_" and rest == written and not _is_known(rest) else EVALUATION + rest
    return _plain(name)


def _plain(name: str) -> str:
    if match := _OF_REWARD.fullmatch(name):
        return f"rewards/{match[1]}/{match[2]}"
    if match := _ONE_OF_REWARD.fullmatch(name):
        return f"rewards/{match[1]}/mean"
    return _OUR_NAMES.get(name, name)


def _of_evaluation(name: str) -> str:
    if _is_known(_plain(name)):
        return _plain(name)
    of_set, _, metric = name.partition("/")
    if _is_known(_plain(metric)):
        return f"{of_set}/{_plain(metric)}"
    words = name.split("_")
    for count in range(1, len(words)):
        metric = _plain("_".join(words[count:]))
        if _is_known(metric):
            return f"{'_'.join(words[:count])}/{metric}"
    return name


def _is_known(name: str) -> bool:
    return name in METRICS or name in OCCASIONAL_METRICS or bool(_OF_REWARD.fullmatch(name))


def trl_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {TRL_NAMES.get(name, name): value for name, value in metrics.items()}


def by_set(metrics: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The metrics of one evaluation by split: "valid", or one of the evaluation sets `names`, without its prefix."""
    found: dict[str, dict[str, Any]] = {}
    sets = set(names)
    for metric, value in metrics.items():
        of_set, _, rest = metric.partition("/")
        split, name = (of_set, rest) if of_set in sets else ("valid", metric)
        found.setdefault(split, {})[name] = value
    return found


def prefixed(split: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with transformers' prefix: train/, eval/ for "valid", test/, and eval/NAME_ for an evaluation set."""
    prefix = {"train": TRAINING, "valid": EVALUATION, "test": "test/"}.get(split, f"{EVALUATION}{split}_")
    return {prefix + name: value for name, value in metrics.items()}


def transformers_name(metric: str, sets: Iterable[str]) -> str:
    """The name of an evaluation's metric in TRL's configuration: eval/hard/kl is eval_hard_kl."""
    ((split, metrics),) = by_set({metric.removeprefix(EVALUATION): None}, sets).items()
    (name,) = prefixed(split, trl_metrics(metrics))
    return f"eval_{name.removeprefix(EVALUATION)}"


WINDOW = 5  # steps whose mean is compared
COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_CONDITION = re.compile(r"^\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*(\S+)\s*$")


@dataclass(frozen=True, slots=True)
class StopCondition:
    """`metric` `sign` `limit`, such as kl > 0.8."""

    metric: str
    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.limit:g}"


def parse_condition(text: str) -> StopCondition:
    """Raises ValueError with a message for text that is no condition."""
    match = _CONDITION.match(text)
    if match is None or (limit := as_number(match[3])) is None:
        raise ValueError(f"“{quote(text)}” is not a condition; write a metric, a sign and a number, such as kl > 0.8.")
    return StopCondition(match[1], match[2], limit)


def with_our_name(text: str) -> str:
    match = _CONDITION.match(text)
    if match is None or our_name(match[1]) == match[1]:
        return text
    return f"{our_name(match[1])} {match[2]} {match[3]}"


def condition_fault(text: str, rewards: Sequence[str], may_log_metrics: bool, sets: Sequence[str] = ()) -> str:
    """The problem of a condition, or "". `may_log_metrics`: of any name; only what is nearly a known one is refused."""
    try:
        condition = parse_condition(text)
    except ValueError as error:
        return str(error)
    return metric_fault(condition.metric, rewards, may_log_metrics, sets)


def metric_fault(metric: str, rewards: Sequence[str], may_log_metrics: bool, sets: Sequence[str] = ()) -> str:
    known, bare = known_metrics(rewards), metric.removeprefix(EVALUATION)
    of_set, _, rest = bare.partition("/")
    near = difflib.get_close_matches(bare, known, n=1, cutoff=0.6)
    if bare in known or (bare != metric and of_set in sets and rest in known) or (may_log_metrics and not near):
        return ""
    prefix = EVALUATION if metric != bare else ""
    return f"There is no metric {quote(metric, 60)}." + (f" Did you mean {prefix}{near[0]}?" if near else "")
