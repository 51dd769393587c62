"""Runs on streamed rows, on rows that a map function makes, with several evaluation sets, a tokenizer of their own and
cut prompts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer import preflight
from tests.support import small_run
from tests.support.random_models import tiny_model
from tests.support.small_run import notes

MAP = '''
from backend.rewards import register_map_function, register_reward_function
@register_map_function("short")
def short(row):
    """Without the last two rows."""
    return None if row["answer"] in ("12", "14") else row | {"prompt": row["prompt"].replace("What is", "Say")}
@register_map_function
def odd(row):
    return [row] if row["answer"] == "4" else row
@register_map_function
def deep(row):
    nested = []
    for _ in range(400):
        nested = [nested]
    return row | {"nested": nested}
@register_reward_function("low_half")
def low_half(prompts, completions, answer, types=None, completion_ids=None):
    return [sum(token < 160 for token in ids) / len(ids) for ids in completion_ids]
'''


@pytest.fixture
def mapped(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "mine.py"
    file.write_text(MAP)
    rewards = {"reward_functions": ["low_half"], "reward_weights": [], "reward_functions_file": str(file)}
    return rewards | {"map_function": "short"}


def trained(folder: Path, name: str, **raw: Any) -> tuple[RunFolder, dict[str, Any]]:
    run, raw = RunFolder(folder / name), small_run.settings_for(folder, **raw)
    ending = small_run.train_here(raw, run)
    assert ending.kind == "finished", ending
    return run, raw


def fingerprint(run: RunFolder) -> tuple[str, list[Any]]:
    """The trained weights, and all that was sampled."""
    weights = hashlib.sha256((run.adapters / "adapters.safetensors").read_bytes()).hexdigest()
    return weights, [json.loads(line) for line in run.completions.read_text().splitlines()]


def test_a_streamed_run_is_the_run_in_memory_also_when_resumed(tmp_path: Path, mapped: dict[str, Any]) -> None:
    """Rows held out, cut by a map function to five: three steps of two prompts cross the end of an epoch."""
    raw = mapped | {"iters": 3, "batch_size": 2, "validation_split": 0.2, "steps_per_eval": 3, "save_every": 2}
    here, _ = trained(tmp_path, "here", **raw)
    there, streamed = trained(tmp_path, "there", **raw, streaming=True)
    assert fingerprint(here) == fingerprint(there)
    assert {row["prompt"].split()[0] for row in fingerprint(here)[1]} == {"Say"}
    again = RunFolder(tmp_path / "again")
    small_run.train_with_stops(streamed, again, 2)
    assert fingerprint(again) == fingerprint(here)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_map_function_names_the_row_it_fails_on(tmp_path: Path, mapped: dict[str, Any], isolation: str) -> None:
    raw = small_run.settings_for(tmp_path, **mapped, reward_isolation=isolation)
    assert preflight.check(raw) == []
    (fault,) = preflight.check(raw | {"map_function": "odd"})
    assert fault.setting == "map_function"
    assert fault.sentence.startswith("The map function odd returned list, not a dict of columns or None on row 3 of ")
    (fault,) = preflight.check(raw | {"map_function": "deep"})
    assert fault.sentence.startswith("The map function deep returned a row that is nested more than 50 levels deep on ")


def test_evaluation_sets_stand_under_their_names_in_one_event(tmp_path: Path) -> None:
    other = small_run.write_rows(tmp_path / "other.jsonl", 3)
    sets, stop_when = {"more": str(other), "same": str(tmp_path / "rows.jsonl")}, ["eval/more/reward > 100"]
    run, _ = trained(tmp_path, "run", iters=2, steps_per_eval=2, eval_data=sets, stop_when=stop_when)
    events = [event for event in read_events(run.events) if event["kind"] == "eval"]
    assert [event["step"] for event in events] == [0, 2] or [event["step"] for event in events] == [2]
    metrics = events[-1]["metrics"]
    assert metrics["reward"] == metrics["more/reward"], "without a valid split the first set counts"
    assert {"same/reward", "more/rewards/r1_int_reward_func/mean", "same/completions/mean_length"} <= metrics.keys()


def test_long_prompts_are_left_out_or_cut_on_the_left(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": f"{'word ' * 80 * (n % 2)}the end {n}", "answer": "1"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"data": str(path), "iters": 3, "max_prompt_length": 60}
    tiny_model(tmp_path / "model", layers=1, own={"vision_config": {"depth": 1}})
    left_out, _ = trained(tmp_path, "left out", **shared)
    cut, _ = trained(tmp_path, "cut", **shared, long_prompts="cut_left")
    assert any("3 of 6 rows of the train split are left out" in sentence for sentence in notes(left_out))
    assert any("3 of 6 prompts of the train split are longer than 60 tokens, and cut" in note for note in notes(cut))
    prompts = [row["prompt"] for row in fingerprint(cut)[1]]
    assert all("the end" in prompt for prompt in prompts) and any(prompt.count("word") > 1 for prompt in prompts)
    assert not any("word" in row["prompt"] for row in fingerprint(left_out)[1])
