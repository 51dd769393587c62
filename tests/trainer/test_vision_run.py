"""Runs whose rows have pictures."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from backend.runs.completion_rows import images_of, prompt_key
from backend.runs.run_folder import RunFolder
from backend.trainer.evaluation.evaluation_rows import read_rows
from tests.support import verbs
from tests.support.small_run import QUICK, assert_same_run, low_half, train_here, train_with_stops, write_rows
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

    pictures = {name: str(tmp_path / "pictures" / f"{name}.png") for name in "ab"}
    shown = {prompt_key(row) for row in map(json.loads, whole.completions.read_text().splitlines())}
    paths = [(pictures["a"],), (pictures["b"],), (pictures["b"], pictures["a"]), ()]
    assert shown == {(f"What is in it, {i}?", *those) for i, those in enumerate(paths)}
    other = [{"prompt": f"What is in it, {i}?", "answer": "", "image": f"pictures/{'ba'[i]}.png"} for i in range(2)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    result = verbs.call(
        "evaluate", whole.path, "--data", tmp_path / "other.jsonl", "--greedy", "--base-only", "--allow-code", "--json"
    )
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["data"]["trained_on"] == 0, "the same questions about other pictures"
    assert [images_of(row) for row in read_rows(Path(line["path"]))] == [[pictures["b"]], [pictures["a"]]]


def test_a_text_run_of_a_vision_model_needs_no_mlx_vlm(tmp_path: Path, run: RunFolder, monkeypatch: Any) -> None:
    raw = settings_with_pictures(tmp_path, iters=1, num_iterations=1, beta=0.0)
    write_rows(tmp_path / "rows.jsonl", 2)
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    assert train_here(raw, run).kind == "finished"
