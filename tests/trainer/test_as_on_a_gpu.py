"""Runs of a CPU that makes a GPU's choices: its budgets, its row counts, steps queued ahead, gradients without atomic
sums.

The whole suite runs so with `make test-as-gpu`; these few stand for it every time.
"""

from pathlib import Path
from typing import Any

import pytest

from backend.engine import patches
from backend.runs.run_folder import RunFolder
from backend.sampling.row_costs import FLOAT, ON_CPU, QUANTIZED, QUANTIZED_M5, row_costs
from backend.sampling.scheduler import Scheduler
from backend.utils.machine import TREAT_CPU_AS
from tests.support import small_run

USUAL: dict[str, Any] = {"iters": 3, "group_size": 4, "num_iterations": 2, "beta": 0.05, "learning_rate": 1e-3}
USUAL |= {"save_every": 2, "max_completion_length": 6, "top_p": 0.9, "top_k": 0}
CASES: dict[str, dict[str, Any]] = {
    "every weight": {"train_type": "full", "batch_size": 2},
    "adapters on 4 bits, more completions than a tile": {"quantization": "4", "batch_size": 5, "group_size": 8},
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")
    yield
    patches.uninstall()


@pytest.mark.parametrize("name", [pytest.param("every weight", marks=pytest.mark.proof), *list(CASES)[1:]])
def test_a_resume_is_the_same(name: str, tmp_path: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    decode = Scheduler._decode
    monkeypatch.setattr(Scheduler, "_decode", lambda self, n: rows.append(len(self.rows)) or decode(self, n))
    raw = small_run.settings_for(tmp_path, **USUAL | CASES[name] | small_run.low_half(tmp_path))
    small_run.resumed_and_whole(raw, tmp_path, 2)
    assert max(rows) == min(32, raw["batch_size"] * raw["group_size"])


def test_it_samples_and_learns_what_a_cpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes of everything, and the same numbers up to rounding."""
    raw = small_run.settings_for(tmp_path, **USUAL | CASES["every weight"] | small_run.low_half(tmp_path))
    texts: list[list[str]] = []
    norms: list[list[float]] = []
    for device in ("", "gpu"):
        monkeypatch.setenv(TREAT_CPU_AS, device)
        run = RunFolder(tmp_path / f"run-{device}")
        assert small_run.train_here(raw | {"iters": 1}, run).kind == "finished"
        texts.append([completion["text"] for row in small_run.rows(run) for completion in row["completions"]])
        norms.append([metrics["grad_norm"] for metrics in small_run.metrics(run)])
    patches.uninstall()
    assert texts[0] == texts[1] and len(texts[0]) == 8
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and norms[0][0] > 0


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
