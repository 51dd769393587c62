"""Health rules: each fires once in a run with its symptom, and none in a healthy run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.run.telemetry import HealthReporter
from backend.spec.events import Diary, read_events
from backend.spec.health import LONG, WINDOW, findings

HEALTHY: dict[str, Any] = {
    "reward": 1.0, "hit_max_tokens_ratio": 0.1, "frac_reward_zero_std": 0.3, "kl": 0.05, "clip_ratio_total": 0.1,
    "rewards/accuracy/mean": 0.5, "rewards/form/mean": 0.2,
}  # fmt: skip


def run(count: int, **changes: Any) -> list[dict[str, Any]]:
    """Metrics of `count` steps whose reward rises by 0.1 each, overridden by `changes`."""
    return [HEALTHY | {"reward": step / 10} | changes for step in range(count)]


def codes(steps: list[dict[str, Any]]) -> list[str]:
    return [finding.code for finding in findings(steps)]


def test_a_healthy_run_has_no_findings() -> None:
    assert codes(run(LONG)) == []


@pytest.mark.parametrize(
    ("code", "sick", "well"),
    [
        ("cut_off", {"hit_max_tokens_ratio": 0.31}, {"hit_max_tokens_ratio": 0.3}),
        ("no_signal", {"frac_reward_zero_std": 0.95}, {"frac_reward_zero_std": 0.94}),
        ("drifting", {"kl": 0.51}, {"kl": 0.5}),
        ("moving_fast", {"clip_ratio_total": 0.21}, {"clip_ratio_total": 0.2}),
        ("sampler_differs", {"sampling/logp_gap/mean": 0.051}, {"sampling/logp_gap/mean": 0.05}),
        ("never_scores accuracy", {"rewards/accuracy/mean": 0.0}, {"rewards/accuracy/mean": 0.01}),
    ],
)
def test_a_rule_needs_a_full_window_and_fires_past_its_limit(
    code: str, sick: dict[str, Any], well: dict[str, Any]
) -> None:
    assert codes(run(WINDOW, **sick)) == [code]
    assert codes(run(WINDOW - 1, **sick)) == []
    assert codes(run(WINDOW, **well)) == []


def test_a_reward_is_flat_only_if_it_scatters_around_one_level() -> None:
    flat = [HEALTHY | {"reward": 1.0 + (-1) ** step * 0.2} for step in range(LONG)]
    assert codes(flat) == ["flat"] and codes(flat[1:]) == []
    assert codes([step | {"reward": step["reward"] + i * 0.01} for i, step in enumerate(flat)]) == []
    assert codes([step | {"frac_reward_zero_std": 0.8} for step in flat]) == []


def test_a_metric_that_was_not_measured_gives_no_finding() -> None:
    """With KL off and nothing to clip, the diary holds null."""
    assert codes(run(LONG, kl=None, clip_ratio_total=None)) == []
    assert codes([{"reward": None} for _ in range(LONG)]) == []


def test_findings_are_full_sentences() -> None:
    sick = run(WINDOW, hit_max_tokens_ratio=1.0, frac_reward_zero_std=1.0, kl=2.0, clip_ratio_total=0.5)
    for finding in findings(sick):
        for text in (finding.sentence, finding.advice):
            assert text[0].isupper() or text[0].isdigit()
            assert text.endswith(".") and "!" not in text


def test_a_finding_is_reported_once_and_again_when_it_returns(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "events.jsonl")
    health = HealthReporter(diary)
    for step in run(WINDOW + 5, kl=1.0) + run(WINDOW) + run(WINDOW, kl=1.0):
        health.report(step)
    assert [event["code"] for event in read_events(diary.path)] == ["drifting", "drifting"]


def test_a_resumed_run_does_not_repeat_its_findings(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "events.jsonl")
    health = HealthReporter(diary, run(WINDOW, kl=1.0))
    health.report(HEALTHY | {"kl": 1.0})
    assert list(read_events(diary.path)) == []
