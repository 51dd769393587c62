"""Health rules: each finds its sickness in recorded runs and none in a healthy one; what a resumed run reports."""

from functools import cache
from pathlib import Path
from typing import Any

from backend.config.config import SETTINGS
from backend.runs.events import Event, EventLog, read_events
from backend.trainer.health.recent import LONG, WINDOW, Recent
from backend.trainer.health.rules import RULES, SOLVED
from backend.trainer.health.watch import QUIET, Episode, Watch, examined, reported
from backend.trainer.telemetry import report_health
from tests.support import diaries, health_page
from tests.support.cases import cases
from tests.support.diaries import recording

HEALTHY: dict[str, Any] = (
    {"reward": 1.0, "reward_std": 0.8, "hit_max_tokens_ratio": 0.1, "frac_groups_without_signal": 0.3, "kl": 0.05}
    | {"clip_ratio_total": 0.1, "rewards/accuracy/mean": 0.5, "rewards/form/mean": 0.2, "grad_norm": 0.4}
    | {"loss": 0.01, "entropy": 0.3, "learning_rate": 1e-5, "completions/distinct_fraction": 0.9}
    | {"completions/repetition": 0.01, "completions/max_length": 200.0, "completions/mean_length": 100.0}
    | {"time/rollout": 3.0, "time/step": 5.0, "peak_memory_gb": 2.0, "epoch": 0.1}
)
MEANS = ("rewards/accuracy/mean", "rewards/form/mean")


def run(count: int, start: int = 0, **changes: Any) -> list[Event]:
    """`count` step events whose reward rises by 0.1 each, overridden by `changes`."""
    return [
        {"kind": "step", "step": step + 1, "metrics": HEALTHY | {"reward": step / 10} | changes}
        for step in range(start, start + count)
    ]


def evaluation(step: int, reward: float) -> Event:
    return {"kind": "eval", "step": step, "split": "valid", "metrics": {"reward": reward}}


def found(events: list[Event], **settings: Any) -> list[str]:
    """Codes of what is found at the last of these events."""
    recent = Recent(settings)
    for event in events:
        recent.take(event)
    return [finding.code for rule in RULES.values() if (finding := rule.look(recent, rule))]


@cache
def episodes_of(name: str) -> list[Episode]:
    return examined(recording(name).settings, recording(name).events)


@cases("name", [name for name in diaries.names() if not recording(name).signs])
def test_no_rule_finds_anything_in_a_healthy_run(name: str) -> None:
    """At any of its steps; a run that crashed was healthy until then."""
    assert [episode.sentence for episode in episodes_of(name)] == []


@cases("name", [name for name in diaries.names() if recording(name).signs])
def test_each_sickness_is_found_by_its_rule(name: str) -> None:
    assert {episode.code.partition(" ")[0] for episode in episodes_of(name)} >= set(recording(name).signs)


def test_every_rule_has_a_recorded_sickness() -> None:
    assert {sign for name in diaries.names() for sign in recording(name).signs} == set(RULES)


@cases("name", ["lr-high", "not-a-number", "healthy-long"])
def test_a_resumed_run_reports_what_one_that_was_never_stopped_reports(name: str) -> None:
    settings, events = recording(name).settings, recording(name).events
    whole = Watch(settings)
    written = [(event, whole.take(event)) for event in events]
    for cut in range(0, len(events), max(7, len(events) // 12)):
        event_log = [line for event, new in written[:cut] for line in (event, *({"kind": "health", **h} for h in new))]
        resumed = Watch.resumed(settings, event_log)
        assert [resumed.take(event) for event, _ in written[cut:]] == [health for _, health in written[cut:]], cut


@cases(
    ("code", "sick", "well"),
    [
        ("cut_off", {"hit_max_tokens_ratio": 0.31}, {"hit_max_tokens_ratio": 0.3}),
        ("no_signal", {"frac_groups_without_signal": 0.95}, {"frac_groups_without_signal": 0.94}),
        ("drifting", {"kl": 0.51}, {"kl": 0.5}),
        ("moving_fast", {"clip_ratio_total": 0.21}, {"clip_ratio_total": 0.2}),
        ("sampler_differs", {"sampling/logp_gap/mean": 0.051}, {"sampling/logp_gap/mean": 0.05}),
        ("never_scores accuracy", {"rewards/accuracy/mean": 0.0}, {"rewards/accuracy/mean": 0.01}),
        ("never_scores accuracy form", dict.fromkeys(MEANS), dict.fromkeys(MEANS[:1])),
        ("repetition", {"completions/repetition": 0.31}, {"completions/repetition": 0.3}),
        ("identical", {"completions/distinct_fraction": 0.28}, {"completions/distinct_fraction": 0.29}),
        ("straggler", {"completions/max_length": 400.0}, {"completions/max_length": 399.0}),
        ("gradient_zero", {"grad_norm": 0.0}, {"grad_norm": 1e-8}),
        ("seen_often", {"epoch": 10.0}, {"epoch": 9.9}),
        ("machines_wait", {"waiting_share": 0.26}, {"waiting_share": 0.25}),
        ("self_distillation_idle", *({"self_distillation/reprompted": 0.0}, {"self_distillation/reprompted": 0.01})),
        ("tools_fail", {"tools/failure_frequency": 0.91}, {"tools/failure_frequency": 0.89}),
        ("judge_saturates j", {"judge/j/saturated": 0.9}, {"judge/j/saturated": 0.89}),
        ("results_dropped", {"tools/dropped_frequency": 0.21}, {"tools/dropped_frequency": 0.2}),
    ],
)
def test_a_rule_needs_a_full_window_and_fires_past_its_limit(code: str, sick: Any, well: Any) -> None:
    """With a group of 4 the limit of identical completions is (1 + 0.05 · 3)/4 = 0.2875."""
    assert found(run(WINDOW, **sick)) == [code]
    assert found(run(WINDOW - 1, **sick)) == []
    assert found(run(WINDOW, **well)) == []


def test_tools_that_no_completion_calls_are_found_after_thirty_steps() -> None:
    assert found(run(30, **{"tools/call_frequency": 0.0})) == ["tools_unused"]
    assert found(run(29, **{"tools/call_frequency": 0.0})) == []
    assert found([*run(29, **{"tools/call_frequency": 0.0}), *run(1, 29, **{"tools/call_frequency": 0.1})]) == []


def test_judges_that_fail_or_come_to_reward_length_are_found() -> None:
    assert found(run(5, **{"judge/j/failed": 0.1, "judge/k/failed": 0.2})) == ["judge_fails j k"]
    assert found(run(4, **{"judge/j/failed": 1.0})) == found(run(5, **{"judge/j/failed": 0.09})) == []

    def drift(*correlations: float) -> list[str]:
        steps = [run(1, step, **{"judge/j/length_correlation": value}) for step, value in enumerate(correlations)]
        return found([event for (event,) in steps])

    assert drift(*[0.6, 0.7] * 5, *[0.8, 0.9] * 5) == ["judge_drifts j"]
    assert drift(*[0.8, 0.9] * 10) == drift(*[0.4, 0.5] * 5, *[0.6, 0.7] * 5) == []


def test_supervised_steps_are_judged_without_rewards() -> None:
    """Learning to imitate lowers the entropy; a held-out loss that rises tells of rows that are known by heart."""

    def sft(losses: list[float], **changes: float) -> list[str]:
        steps = [{"loss": 1.0, "entropy": 2.0, "grad_norm": 0.3, "epoch": 0.1}] * WINDOW
        steps += [{"loss": 0.1, "entropy": 0.1, "grad_norm": 0.3, "epoch": 2.5} | changes] * WINDOW
        events = [{"kind": "step", "step": step, "metrics": metrics} for step, metrics in enumerate(steps, 1)]
        events += [{"kind": "eval", "step": len(steps), "metrics": {"loss": loss}} for loss in losses]
        return found(events, train_mode="sft")

    assert sft([]) == sft([2.0, 1.5, 1.2]) == []
    assert sft([2.0, 1.2, 1.5, 1.6]) == ["seen_often"]
    assert sft([2.0, 1.2, 1.5, 1.6], epoch=1.9) == []
    assert sft([], grad_norm=0.0) == ["gradient_zero"]


def test_equal_completions_are_no_sickness_once_the_reward_has_risen_for_all() -> None:
    alike = {"completions/distinct_fraction": 0.25, "frac_groups_without_signal": 1.0, "entropy": 0.01}
    solved = run(WINDOW, WINDOW, **alike, reward_std=0.1)
    assert found([*run(WINDOW), *solved]) == []
    split = run(WINDOW, WINDOW, **alike, reward_std=1.0)  # alike within a group, but half of the groups fail
    assert found([*run(WINDOW), *split]) == ["no_signal", "identical", "entropy_collapse"]
    assert found([*run(WINDOW), *run(SOLVED, WINDOW, **alike, reward_std=0.1)]) == ["solved"]
    assert "solved" not in found([*run(WINDOW), *run(SOLVED, WINDOW, **alike, reward_std=1.0)])
    assert "solved" not in found(run(WINDOW + SOLVED, **alike, reward=1.0, reward_std=0.05)), "it never rose"


def test_a_reward_that_falls_is_compared_with_the_scatter_of_the_first_completions() -> None:
    before = run(WINDOW, reward=1.0, reward_std=0.8)
    assert found([*before, *run(WINDOW, WINDOW, reward=0.55)]) == ["reward_fell"]
    assert found([*before, *run(WINDOW, WINDOW, reward=0.65)]) == []
    assert found([*before, *run(WINDOW - 1, WINDOW, reward=0.1)]) == []
    # A model that collapses at once has a low reward from its first steps on: held-out prompts were answered before.
    evaluations = [evaluation(0, 1.3), *run(8, reward=0.1, reward_std=0.8), evaluation(8, 0.1)]
    assert found(evaluations) == []
    assert found([*evaluations, *run(8, 8, reward=0.1), evaluation(16, 0.1)]) == ["reward_fell"]
    assert found([*evaluations, *run(8, 8, reward=0.1), evaluation(16, 1.2)]) == []
    # With other weights the reward is another quantity.
    change = {"kind": "change", "step": WINDOW + 1, "settings": {"reward_weights": [[1.0], [0.1]]}}
    assert found([*before, change, *run(WINDOW, WINDOW, reward=0.1)]) == []
    assert found([*before, *run(WINDOW, WINDOW, reward=0.1)], reward_weight_schedule="linear") == []


def test_a_metric_that_is_no_number_is_found_at_once_and_one_that_was_not_measured_is_not() -> None:
    assert found([*run(2), *run(1, 2, kl=None)]) == ["not_a_number"]
    assert found([*run(2), *run(1, 2, kl=None, entropy=None)]) == []  # no group had a signal
    assert found(run(LONG, kl=None, clip_ratio_total=None)) == []  # with KL off and nothing to clip
    assert found([{"kind": "step", "step": 1, "metrics": {"reward": None}}]) == []


def test_findings_propose_values_that_the_settings_take() -> None:
    from backend.config.config import problems

    episodes = [episode for name in diaries.names() for episode in episodes_of(name)]
    for episode in episodes:
        assert episode.setting in SETTINGS
        wrong = [fault for fault in problems(dict(episode.settings)) if fault.setting in episode.settings]
        assert not wrong, (episode.code, wrong)
    assert any(episode.settings for episode in episodes)


def test_a_finding_is_reported_when_it_begins_and_when_it_is_over(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path / "events.jsonl")
    report_health(event_log, {}, read_events(event_log.path))
    for event in [*run(WINDOW + 5, kl=1.0), *run(3, 15), *run(7, 18, kl=1.0), *run(20, 25)]:
        event_log.write("step", step=event["step"], metrics=event["metrics"])
    begun, over = (event for event in read_events(event_log.path) if event["kind"] == "health")
    # Three good steps in between are one finding, not two.
    assert (begun["code"], begun["step"], begun["metric"], begun["threshold"]) == ("drifting", WINDOW, "kl", 0.5)
    assert over["code"] == "drifting" and over["until"] == over["step"] - QUIET
    (episode,) = reported([begun, over])
    assert (episode.since, episode.until, episode.title) == (WINDOW, over["until"], "Drifting from the reference")


def test_the_page_on_health_has_the_rules_as_they_are() -> None:
    """`python -m tests.support.health_page` writes them."""
    text = health_page.PAGE.read_text("utf-8")
    assert text == health_page.page(text)
