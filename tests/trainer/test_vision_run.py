"""Runs whose rows have pictures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from backend.runs.run_folder import RunFolder
from tests.support.small_run import QUICK, assert_same_run, low_half, train_here, train_with_stops
from tests.support.vision_models import picture, tiny_vision_model


def settings_with_pictures(folder: Path, **changes: Any) -> dict[str, Any]:
    """A quick run on rows with one picture, two, and none."""
    tiny_vision_model(folder / "model")
    picture(folder / "pictures" / "a.png", 64, 48, 1)
    picture(folder / "pictures" / "b.png", 32, 64, 2)
    own: list[dict[str, Any]] = [{"image": "pictures/a.png"}, {"image": "pictures/b.png"}]
    own += [{"images": ["pictures/b.png", "pictures/a.png"]}, {}]
    rows = [{"prompt": f"What is in it, {i}?", "answer": str(i)} | more for i, more in enumerate(own)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = {"model": str(folder / "model"), "data": str(folder / "rows.jsonl")}
    # Two updates against a reference: every prompt is read five times.
    many = {"batch_size": 2, "beta": 0.05, "num_iterations": 2, "learning_rate": 1e-2, "iters": 2}
    return QUICK | where | many | low_half(folder) | changes


def test_the_tower_sees_each_picture_once_a_step_and_a_run_resumes(tmp_path: Path, monkeypatch: Any) -> None:
    from mlx_vlm.models.qwen3_vl import VisionModel

    seen: list[int] = []
    look = VisionModel.__call__

    def counted(self: Any, pixels: Any, grid_thw: Any, *more: Any, **named: Any) -> Any:
        seen.append(len(grid_thw))
        return look(self, pixels, grid_thw, *more, **named)

    monkeypatch.setattr(VisionModel, "__call__", counted)
    raw = settings_with_pictures(tmp_path, save_every=1)
    whole, stopped = RunFolder(tmp_path / "runs" / "whole"), RunFolder(tmp_path / "runs" / "stopped")
    assert train_here(raw, whole).kind == "finished"
    assert Counter(seen) == {1: 2, 2: 1}  # of four prompts one has two pictures and one none
    train_with_stops(raw, stopped, 1)
    assert_same_run(whole, stopped)
