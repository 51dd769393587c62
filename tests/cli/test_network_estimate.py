"""`estimate --hosts`: the connection is measured by the check of machines, whose answer is made up here, and the rest
computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.cli.estimate import network_cost
from backend.config.config import parse
from backend.distributed.machine_report import LinkSpeed, MachineFinding, MachineReport
from backend.trainer.memory.model_shape import shape_from
from backend.utils.places import demo_config
from tests.support.verbs import call, refused

REPORT = MachineReport("ring", link=LinkSpeed(latency_s=0.002, bytes_per_second=1e6))


def arguments(monkeypatch: pytest.MonkeyPatch, folder: Path, report: MachineReport, hosts: int = 2) -> list[object]:
    monkeypatch.setattr("backend.distributed.machine_check.check_machines", lambda *about: report)
    file = folder / "hosts.json"
    file.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * hosts))
    return ["estimate", demo_config(), "--hosts", file]


def test_a_step_s_loss_follows_from_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = json.loads(call(*arguments(monkeypatch, tmp_path, REPORT), "--json").stdout)["network"]
    traffic = cost["traffic"]
    assert traffic["ranks"] == 2 and traffic["gradient"] > 1_000_000
    assert cost["sums_s"] == pytest.approx(traffic["updates"] * (0.002 + traffic["gradient"] / 1e6))
    assert cost["total_s"] == pytest.approx(cost["sums_s"] + cost["gathers_s"] + cost["groups_s"])
    text = call(*arguments(monkeypatch, tmp_path, REPORT)).stdout
    assert "On 2 machines" in text and f"a step loses {cost['total_s']:.2g} s to the network" in text


def test_the_cost_of_a_step_by_hand() -> None:
    about = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072}
    about |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    shape = shape_from(about | {"vocab_size": 151_936, "tie_word_embeddings": True})
    assert shape is not None
    raw = {"model": "any", "data": "any.jsonl", "batch_size": 2, "group_size": 4, "max_completion_length": 100}
    config = parse(raw | {"num_layers": -1, "rank": 8, "num_iterations": 3})
    cost = network_cost(config, shape, LinkSpeed(latency_s=0.006, bytes_per_second=50e6, ranks=4))
    # 28 layers of 8 (in + out): q 1024 + 2048, k and v 1024 + 1024, o, and 1024 + 3072 three times; 4 bytes each.
    gradient = 4 * 28 * 8 * (3072 + 2 * 2048 + 3072 + 3 * 4096)
    groups = {"groups_in": 8 * 100 * 21 * 3 // 4, "groups_out": 8 * 100 * 16}
    assert cost["traffic"] == {"ranks": 4, "updates": 3, "gradient": gradient, **groups}
    assert cost["sums_s"] == pytest.approx(3 * (0.006 + gradient / 50e6)), "as measured: one sum of all ranks"
    assert cost["gathers_s"] == pytest.approx((3 * 2 + 4) * 3 * 0.001)
    assert cost["groups_s"] == pytest.approx((12_600 + 3 * 12_800) / (50e6 * 6 / 4) + 0.002)
    assert cost["total_s"] == pytest.approx(cost["sums_s"] + cost["gathers_s"] + cost["groups_s"])


def test_machines_that_cannot_train_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = MachineReport("ring", findings=[MachineFinding("refuse", 1, "mac-b has another version of MLX.")])
    said = refused(*arguments(monkeypatch, tmp_path, other))
    assert "hosts: mac-b has another version of MLX." in said
    assert "lists one machine" in refused(*arguments(monkeypatch, tmp_path, REPORT, 1))
