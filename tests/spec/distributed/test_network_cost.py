"""What the network costs a step: the formulas, held against numbers worked out by hand, and the tables of docs/scale.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend.bench.network import fit, page, waiting
from backend.spec.config import parse
from backend.spec.distributed.machine_report import LinkSpeed
from backend.spec.distributed.network_cost import NetworkLink, StepTraffic, network_cost, step_traffic
from backend.spec.memory.model_shape import shape_from

SETTINGS = {"model": "any", "data": "any.jsonl", "batch_size": 2, "group_size": 4, "max_completion_length": 100}


def test_a_sum_is_a_ring_of_messages() -> None:
    link = NetworkLink(latency_s=0.001, bytes_per_second=1e6)
    assert link.sum_s(4_000_000, 2) == pytest.approx(2 * (0.001 + 2.0))
    assert link.sum_s(4_000_000, 4) == pytest.approx(6 * (0.001 + 1.0))
    assert link.gather_s(4) == pytest.approx(0.003)


def test_a_link_from_measured_sums_gives_them_back() -> None:
    speed = LinkSpeed(latency_s=0.006, bytes_per_second=50e6)
    link = NetworkLink.of(speed, 4)
    assert link.sum_s(0, 4) == pytest.approx(0.006)
    assert link.sum_s(100_000_000, 4) == pytest.approx(0.006 + 2.0)


def test_what_a_step_sends() -> None:
    shape = shape_from(page.MODELS["Qwen3-0.6B"])
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


def test_the_fit_finds_the_numbers_that_made_its_points() -> None:
    made = fit.FittedSums(message_s=40e-6, work_s=3e-9)
    points = [
        {"backend": "ring", "ranks": ranks, "bits_per_second": bits, "latency_s": late, "bytes": size}
        for ranks, late in ((2, 0.0), (2, 0.001), (4, 0.0))
        for bits in (1e8, 1e9, 1e10)
        for size in (4, 64_000, 1_000_000, 20_185_088)
    ]
    points = [point | {"low": made.seconds(point)} for point in points]
    used, others = fit.split(points)
    assert len(used) == 4 and len(others) == 32
    found = fit.fitted(used)
    assert max(fit.errors(found, others)) < 1e-3
    assert (found.message_s, found.work_s) == pytest.approx((40e-6, 3e-9), rel=1e-3)


def test_the_tables_of_the_page_are_those_of_the_model() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_tables(text) == text, "python -m backend.bench network"


def test_the_simulated_hand_out_waits_less_than_equal_shares_where_machines_differ() -> None:
    """Not held to the page's numbers, which are of the hand-out as it was when they were made."""
    assert waiting.equal_shares((1, 1 / 3), 16, 0.5) == pytest.approx(1 / 3, abs=0.03)
    assert waiting.handed_out((1, 1 / 3), 16, 0.5) < 0.15
    assert waiting.equal_shares((1, 1), 16, 0.0) == pytest.approx(0)
