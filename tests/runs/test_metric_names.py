"""TRL's names of metrics: taken wherever a user names one, used wherever metrics leave, over the whole table."""

from __future__ import annotations

from backend.config.config import parse, problems
from backend.config.other_programs.into_trl import into_trl
from backend.runs.events import METRICS
from backend.runs.metric_names import (
    OCCASIONAL_METRICS,
    TRL_NAMES,
    by_set,
    known_metrics,
    our_name,
    parse_condition,
    prefixed,
    transformers_name,
    trl_metrics,
    with_our_name,
)
from backend.runs.run_search import search
from backend.runs.sweep import parse_sweep
from tests.support import diaries
from tests.support.cases import cases
from tests.support.diaries import recording

RAW = {"model": "m", "data": "d", "steps_per_eval": 5, "eval_data": {"hard": "h", "very_hard": "v"}}
NAMED_ALIKE = """
num_tokens completions/mean_length completions/min_length completions/max_length completions/mean_terminated_length
completions/min_terminated_length completions/max_terminated_length rewards/r1_int_reward_func/mean reward reward_std
frac_reward_zero_std entropy kl clip_ratio/low_min clip_ratio/high_max cispo_clip_ratio vespo/phi_seq_mean
sampling/sampling_logp_difference/mean sampling/importance_sampling_ratio/max loss grad_norm learning_rate epoch
"""
LOGGED_BY_TRL = dict.fromkeys(NAMED_ALIKE.split()) | {
    "step_time": "time/step",
    "completions/clipped_ratio": "hit_max_tokens_ratio",
    "reward/r1_int_reward_func/mean": "rewards/r1_int_reward_func/mean",
    "reward/r1_int_reward_func/std": "rewards/r1_int_reward_func/std",
    "rewards/r1_int_reward_func": "rewards/r1_int_reward_func/mean",
    "reward_std_over_step": "reward_std",
    "clip_ratio": "clip_ratio_total",
    "clip_ratio/region_mean": "clip_ratio_total",
    "clip_ratio/low_mean": "clip_ratio_low",
    "clip_ratio/high_mean": "clip_ratio_high",
    "completion_length": "completions/mean_length",
}
"""What `GRPOTrainer` logs or documents, in this version or an earlier one → what it is here, None for the same."""
FUNCTION = {"reward_functions": ["r1_int_reward_func"]}


@cases(("name", "ours"), LOGGED_BY_TRL.items())
def test_whatever_a_user_names_may_have_trls_name(name: str, ours: str | None) -> None:
    """Conditions, the best metric, a sweep's metric, the search for runs; with the prefixes of trackers and of
    transformers."""
    ours = ours or name
    stop = [f"{name} > 0.5", f"train/{name} > 0.5", f"eval_{name} > 0.5", f"eval/hard_{name} > 0.5"]
    config = parse(RAW | FUNCTION | {"stop_when": stop, "best_metric": f"eval_very_hard_{name}"})
    metrics = [parse_condition(text).metric for text in config.stop_when]
    assert metrics == [ours, ours, f"eval/{ours}", f"eval/hard/{ours}"]
    assert config.best_metric == f"eval/very_hard/{ours}"
    plan = {"base": RAW | FUNCTION, "over": {"learning_rate": [1e-5, 1e-4]}}
    for metric in (name, f"eval/{name}", f"eval_{name}"):
        assert parse_sweep(plan | {"metric": metric}).metric == ours
    for condition in (f"{name}>0.5", f"eval/{name}>0.5"):
        search(condition, known_metrics(["r1_int_reward_func"]))


def test_our_names_are_none_of_trls_for_something_else() -> None:
    known = known_metrics(["r1_int_reward_func"])
    assert {name: our_name(name) for name in known if our_name(name) != name} == {
        "completions/clipped_ratio": "hit_max_tokens_ratio"  # the event log has both, and they are the same number
    }
    assert {ours: our_name(theirs) for ours, theirs in TRL_NAMES.items()} == {ours: ours for ours in TRL_NAMES}
    assert set(TRL_NAMES) <= set(known) and len(set(TRL_NAMES.values())) == len(TRL_NAMES)


def test_a_name_that_is_none_of_trls_is_left_as_it_is() -> None:
    """A reward function may log any metric."""
    for name in ("eval_accuracy", "train/mine", "mine/own", "eval/mine", "", "eval_", "rewards/", "eval/"):
        assert our_name(name) == name
    assert with_our_name("  kl  > 0.50") == "  kl  > 0.50" and with_our_name("nonsense") == "nonsense"
    (fault,) = problems(RAW | FUNCTION | {"stop_when": ["step_tim > 5"]})
    assert fault.sentence == "There is no metric step_tim." or "Did you mean" in fault.sentence


@cases("name", diaries.names())
def test_every_metric_of_a_recorded_run_can_be_named(name: str) -> None:
    functions = recording(name).settings["reward_functions"]
    steps = [event["metrics"] for event in recording(name).events if event["kind"] == "step"]
    of_ranks = ("ranks/",)
    recorded = {metric for metrics in steps for metric in metrics if not metric.startswith(of_ranks)}
    assert recorded - set(known_metrics(functions)) == set()


def test_what_leaves_has_trls_names_and_comes_back_as_ours() -> None:
    """`reward_std` alone does not: here it is over the step, in TRL within groups."""
    ours = {*METRICS, *OCCASIONAL_METRICS}
    left = trl_metrics(dict.fromkeys(ours), "group")
    assert {"step_time", "completions/clipped_ratio", "reward_std_over_step"} <= set(left)
    back = {our_name(name) for name in prefixed("train", left)}
    assert back == ours - {"completions/clipped_ratio", "reward_std_within_groups"}
    back = {our_name(name) for name in prefixed("hard", trl_metrics({"time/step": 1, "kl": 1}, "group"))}
    assert back == {"eval/hard/time/step", "eval/hard/kl"}


def test_evaluation_sets_are_told_apart() -> None:
    metrics = {"kl": 1, "completions/clipped_ratio": 2, "hard/kl": 3, "very_hard/rewards/a/mean": 4}
    others = {"hard": {"kl": 3}, "very_hard": {"rewards/a/mean": 4}}
    assert by_set(metrics, list(others)) == others | {"valid": {"kl": 1, "completions/clipped_ratio": 2}}
    cut_off = transformers_name("eval/hard/hit_max_tokens_ratio", ["hard"], "group")
    assert cut_off == "eval_hard_completions/clipped_ratio"
    assert transformers_name("eval/reward", ["hard"], "group") == "eval_reward"
    words = into_trl(parse(RAW | FUNCTION | {"best_metric": "eval/hard/time/step"})).words
    assert words["metric_for_best_model"] == "eval_hard_step_time"
