"""What the network costs a step: the formulas against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend.cli.estimate import NetworkLink, StepTraffic, network_cost, step_traffic
from backend.config.config import parse
from backend.distributed.machine_report import LinkSpeed
from backend.trainer.memory.model_shape import shape_from

QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
SETTINGS = {"model": "any", "data": "any.jsonl", "batch_size": 2, "group_size": 4, "max_completion_length": 100}


def test_a_sum_is_a_ring_of_messages() -> None:
    link = NetworkLink(latency_s=0.001, bytes_per_second=1e6)
    assert link.sum_s(4_000_000, 2) == pytest.approx(2 * (0.001 + 2.0))
    assert link.sum_s(4_000_000, 4) == pytest.approx(6 * (0.001 + 1.0))
    assert link.gather_s(4) == pytest.approx(0.003)


def test_a_link_from_measured_sums_gives_them_back() -> None:
    speed = LinkSpeed(latency_s=0.006, bytes_per_second=50e6, ranks=4)
    link = NetworkLink.of(speed)
    assert link.sum_s(0, 4) == pytest.approx(0.006)
    assert link.sum_s(100_000_000, 4) == pytest.approx(0.006 + 2.0)


def test_what_a_step_sends() -> None:
    shape = shape_from(QWEN3_06B)
    assert shape is not None
    settings = SETTINGS | {"num_layers": -1, "rank": 8, "num_iterations": 3}
    traffic = step_traffic(parse(settings), shape, 2)
    # 28 layers of 8 (in + out): q 1024 + 2048, k and v 1024 + 1024, o, and 1024 + 3072 three times; 4 bytes each.
    numbers = 28 * 8 * (3072 + 2 * 2048 + 3072 + 3 * 4096)
    assert (traffic.gradient, traffic.updates) == (4 * numbers, 3)
    assert traffic.sent_by_rank == 3 * 4 * numbers
    assert traffic.groups_out == 8 * 100 * 16 and traffic.groups_in == 8 * 100 * 21 // 2
    unfiltered = step_traffic(parse(settings | {"top_k": 0, "top_p": 1.0}), shape, 2, completion=50)
    assert unfiltered.groups_out == 8 * 50 * 8
    assert step_traffic(parse(settings | {"train_type": "full"}), shape, 2).gradient == pytest.approx(
        4 * 596e6, rel=0.01
    )


def test_the_cost_of_a_step_adds_up() -> None:
    traffic = StepTraffic(ranks=4, updates=2, gradient=1_000_000, groups_in=300_000, groups_out=100_000)
    cost = network_cost(traffic, NetworkLink(latency_s=0.01, bytes_per_second=1e6))
    assert cost.sums_s == pytest.approx(2 * 6 * (0.01 + 0.25))
    assert cost.gathers_s == pytest.approx((2 * 2 + 4) * 0.03)
    assert cost.groups_s == pytest.approx(0.6 + 0.02)
    assert cost.total_s == pytest.approx(cost.sums_s + cost.gathers_s + cost.groups_s)
    assert traffic.sent_by_rank == 2 * 1_500_000
    halved = network_cost(replace(traffic, gradient=500_000), NetworkLink(0.01, 1e6))
    assert cost.sums_s - halved.sums_s == pytest.approx(2 * 6 * 0.125)
