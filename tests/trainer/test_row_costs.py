"""Row counts of decoding: proportional to the work on a CPU, in tiles on a GPU."""

from __future__ import annotations

import pytest

from backend.sampling.row_costs import FLOAT, ON_CPU, QUANTIZED, QUANTIZED_M5, row_costs


def test_the_table_is_chosen_by_device_weights_and_chip() -> None:
    assert row_costs(False, True, "Apple M3 Max") is ON_CPU
    assert row_costs(True, True) is row_costs(True, True, "Apple M1") is QUANTIZED
    assert row_costs(True, True, "Apple M5 Pro") is QUANTIZED_M5
    assert row_costs(True, False, "Apple M4") is FLOAT


def test_a_step_costs_what_was_measured_and_a_tile_more_for_each_tile_begun() -> None:
    """Ratios of ml-explore/mlx#3863: 0.129, 0.323, 0.513 and, for two tiles, 1.002 ms."""
    assert QUANTIZED.cost(1) == 1
    assert [QUANTIZED.cost(rows) * 0.129 for rows in (8, 10, 17, 32)] == pytest.approx([0.323, 0.509, 0.513, 0.513])
    assert QUANTIZED.cost(33) * 0.129 == QUANTIZED.cost(64) * 0.129 == pytest.approx(1.002, rel=0.03)
    assert [ON_CPU.cost(rows) for rows in (1, 5, 48)] == [1, 5, 48]


def test_no_plan_of_a_gpu_has_33_to_63_rows_and_a_cpu_takes_them_all() -> None:
    planned = {QUANTIZED.planned(most) for most in range(1, 200)}
    assert planned == {*range(1, 33), 64, 96, 128, 160, 192}
    assert [ON_CPU.planned(most) for most in (1, 33, 63, 100)] == [1, 33, 63, 100]


def test_a_batch_is_compacted_only_where_a_step_then_costs_less() -> None:
    """32 → 24 rows would be a copy for nothing; half of the rows attend to half of the keys and values."""
    sizes = [QUANTIZED.compacted(32, needed) for needed in (31, 24, 17, 16, 9, 8, 3, 1)]
    assert sizes == [32, 32, 32, 16, 16, 8, 4, 1]
    assert [QUANTIZED.compacted(96, needed) for needed in (65, 64, 40, 32)] == [96, 64, 64, 32]
    assert [ON_CPU.compacted(32, needed) for needed in (25, 24, 17, 3)] == [32, 24, 24, 3]
