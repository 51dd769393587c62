"""`estimate --hosts`: the connection is measured by the check of machines, whose answer is made up here, and the rest
computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backend.__main__ import app
from backend.distributed.machine_report import LinkSpeed, MachineFinding, MachineReport
from backend.utils.places import demo_config

VERBS = app()
REPORT = MachineReport("ring", link=LinkSpeed(latency_s=0.002, bytes_per_second=1e6))


def estimate(monkeypatch: pytest.MonkeyPatch, folder: Path, report: MachineReport, hosts: int = 2, *more: str) -> Any:
    monkeypatch.setattr("backend.distributed.machine_check.check_machines", lambda *about: report)
    file = folder / "hosts.json"
    file.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * hosts))
    return CliRunner().invoke(VERBS, ["estimate", str(demo_config()), "--hosts", str(file), *more])


def test_a_step_s_loss_is_told_and_computed_from_the_measured_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = json.loads(estimate(monkeypatch, tmp_path, REPORT, 2, "--json").stdout)["network"]
    traffic = cost["traffic"]
    assert traffic["ranks"] == 2 and traffic["gradient"] > 1_000_000
    assert cost["sums_s"] == pytest.approx(traffic["updates"] * (0.002 + traffic["gradient"] / 1e6))
    assert cost["total_s"] == pytest.approx(cost["sums_s"] + cost["gathers_s"] + cost["groups_s"])
    text = estimate(monkeypatch, tmp_path, REPORT).stdout
    assert "On 2 machines" in text and f"a step loses {cost['total_s']:.2g} s to the network" in text


def test_machines_that_cannot_train_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = MachineReport("ring", findings=[MachineFinding("refuse", 1, "mac-b has another version of MLX.")])
    result = estimate(monkeypatch, tmp_path, refused)
    assert result.exit_code == 2 and "hosts: mac-b has another version of MLX." in result.stderr
    result = estimate(monkeypatch, tmp_path, REPORT, 1)
    assert result.exit_code == 2 and "lists one machine" in result.stderr
