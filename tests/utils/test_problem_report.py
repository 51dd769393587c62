"""The report of a problem holds what helps, and nothing private."""

from __future__ import annotations

from pathlib import Path

from backend import __version__
from backend.config.config import SETTINGS
from backend.utils.about import LOG_LINES, ProblemFacts, report


def test_a_report_holds_versions_traceback_log_and_changed_settings() -> None:
    log = [f"line {number}" for number in range(LOG_LINES + 5)]
    settings = {"temperature": 0.7, "iters": SETTINGS["iters"].default}
    text = report(ProblemFacts("It broke.", "Traceback (most recent call last):\nValueError: x", log, settings))
    assert "It broke." in text and f"grpo-studio: {__version__}" in text and "ValueError: x" in text
    assert "temperature: 0.7" in text and "iters" not in text, "only what differs from its default"
    assert "line 5\n" in text and "line 4\n" not in text


def test_paths_prompts_and_tokens_are_left_out() -> None:
    settings = {
        "model": "/data/secret-project/model", "data": "owner/set", "system_prompt": "Our secret prompt",
        "reward_functions_file": str(Path.home() / "mine" / "rewards.py"),
    }  # fmt: skip
    trace = f'File "{Path.home()}/mine/x.py"\nRuntimeError: HF_TOKEN=hf_abcdefghijklmnop'
    text = report(ProblemFacts("Broken.", trace, [f"reading {Path.home()}/a"], settings))
    assert "secret" not in text and str(Path.home()) + "/" not in text and "hf_abc" not in text
    assert "model: …/model" in text and "data: owner/set" in text and "rewards.py" in text and "(17 characters)" in text
