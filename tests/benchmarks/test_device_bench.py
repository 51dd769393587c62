"""`bench device` and `bench report`: the order of tasks, the file after every task, a whole tiny bench, the tables."""

import getpass
import json
from pathlib import Path

import pytest

from backend.bench import device, report
from backend.bench.device import DeviceBench, ModelBench, Scale, Task, tasks
from backend.utils.errors import UserError
from backend.utils.places import project_root
from tests.support.verbs import call, run_ok

MICRO = {"name": "micro", "hidden": 64, "layers": 1, "intermediate": 128, "vocab": 256}
MICRO |= {"heads": 2, "kv_heads": 1, "head_dim": 32}
MICRO_SCALE = Scale("micro", [MICRO], ("float32",), (8,), 6, 20, 8, (2, 8), 1)
RECORDED = next((project_root() / "docs" / "devices").glob("*.json"))
"""A file of an earlier version, with measures that are no longer taken."""


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "machine_bytes", lambda *_: 10_000)
    with pytest.raises(UserError, match=r"GB|MB"):
        ModelBench(tmp_path).measure(Task(MICRO, "float32", "gap", group_size=4, prompt=6, completion=12), 1.0)


def test_a_whole_tiny_bench(tmp_path: Path) -> None:
    bench = DeviceBench(MICRO_SCALE, 5.0, tmp_path)
    for _, outcome in bench.run():
        file = report.read(bench.path)  # whole after every task
        if outcome is not None:
            assert not outcome["error"] and outcome == json.loads(json.dumps(file["outcomes"][-1]))
    assert bench.ended == file["ended"] == "finished" and len(file["outcomes"]) == len(tasks(MICRO_SCALE))
    titles = [table.title for table in report.tables(file)]
    assert titles == ["Sampling, tokens/s", "Learning", "Memory", "Sampler against learner"]
    text = bench.path.read_text()
    assert getpass.getuser() not in text.replace("root", "", text.count("root")) and str(tmp_path) not in text


def test_an_error_costs_one_task_and_names_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, float]:
        raise RuntimeError("no room in /home/somebody/models")

    monkeypatch.setattr(ModelBench, "_gap", fail)
    bench = DeviceBench(MICRO_SCALE, 5.0, tmp_path)
    errors = [outcome["error"] for _, outcome in bench.run() if outcome]
    assert [error for error in errors if error] == ["RuntimeError: no room in …"] and bench.ended == "finished"


def test_the_time_limit_ends_the_bench(tmp_path: Path) -> None:
    bench = DeviceBench(MICRO_SCALE, 0.0, tmp_path)
    assert list(bench.run()) == [] and report.read(bench.path)["ended"] == "out of time"
    assert DeviceBench(MICRO_SCALE, 0.0, tmp_path).path != bench.path  # one of the same day took its place


def test_the_verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "scale_for", lambda gpu, quick: MICRO_SCALE)
    said = run_ok("bench", "device", "--quick", "--out", tmp_path).output
    (written,) = tmp_path.glob("device-*.json")
    assert str(written) in said.replace("\n", "") and "Sampler against learner" in said
    said = run_ok("bench", "report", written, RECORDED).output
    assert said.count("### ") == 2 and "| tiny, bf16 |" in said
    (tmp_path / "other.json").write_text("[]")
    for wrong, message in ((tmp_path / "other.json", "was not written by bench device"), (tmp_path, "cannot be read")):
        done = call("bench", "report", wrong)
        assert done.exit_code == 2 and message in done.output
    assert call("bench", "device", "--out", tmp_path / ("x" * 300)).exit_code == 2
