"""The window over runs that the real trainer made: every page, and the comparison of all of them.

Made-up runs lack what a newer trainer records, so a page may fail on every real run while their tests are green.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app import theme
from app.pages.runs.compare_view import CompareView
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import read_record
from tests.support import small_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of several kinds: LoRA with evaluations, full, stages, and one that failed."""
    folder = tmp_path_factory.mktemp("real")
    kinds: dict[str, dict[str, Any]] = {
        "lora": {"steps_per_eval": 1, "validation_split": 0.25, "val_batches": 1, "beta": 0.1, "save_every": 2},
        "full": {"train_type": "full", "learning_rate": 1e-4, "log_kl": True},
        "stages": {
            "stages": [{"iters": 1, "reward_functions": ["r1_int"]}, {"iters": 2, "reward_functions": ["r1_count_xml"]}]
        },
    }
    for name, changes in kinds.items():
        raw = small_run.settings_for(folder / "inputs", **changes)
        if "stages" in changes:
            raw |= {"reward_functions": ["r1_int"], "reward_weights": []}
        assert small_run.train_here(raw, RunFolder(folder / "runs" / name)).kind == "finished"
    return folder / "runs"


def test_comparison_of_real_runs(qtbot: QtBot, qapp: QApplication, runs: Path) -> None:
    """Every metric gets a chart, those of the chart Other too."""
    theme.apply(qapp, "light")
    view = CompareView()
    qtbot.addWidget(view)
    view.resize(1100, 760)
    view.show()
    view.compare([read_record(RunFolder(path)) for path in sorted(runs.iterdir())])
    qtbot.waitUntil(lambda: view.comparison is not None and not view.comparison.is_reading, timeout=60_000)
    view.refresh()
    assert view.grid is not None
    titles = [plot.title for plot in view.grid.plots]
    assert "Reward" in titles and any("terminated" in title.lower() for title in titles)
    view.close_runs()
