"""Recorded tokens: their numbers are those of the loss, and recording changes nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.runs import checkpoint
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.telemetry import token_texts
from tests.support import small_run

CLIPPING: dict[str, Any] = {
    "iters": 2, "batch_size": 2, "group_size": 4, "num_iterations": 2, "learning_rate": 2e-3, "epsilon": 1e-3,
    "max_completion_length": 10, "skip_zero_signal": False, "temperature": 0.9,
}  # fmt: skip
"""Two updates a step: in the second the ratios have left 1, and so tight a range clips many of them."""


def trained(folder: Path, name: str, **changes: Any) -> RunFolder:
    run = RunFolder(folder / "runs" / name)
    small_run.train_here(small_run.settings_for(folder, **CLIPPING | small_run.low_half(folder) | changes), run)
    return run


def completions(run: RunFolder, step: int) -> list[dict[str, Any]]:
    rows = map(json.loads, run.completions.read_text().splitlines())
    return [completion for row in rows if row["step"] == step for completion in row["completions"]]


def metric(run: RunFolder, step: int, name: str) -> float:
    lines = [event for event in read_events(run.events) if event["kind"] == "step" and event["step"] == step]
    return lines[0]["metrics"][name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunFolder]:
    """The same run twice: not recorded, and recorded."""
    folder = tmp_path_factory.mktemp("tokens")
    return trained(folder, "off"), trained(folder, "on", record_tokens=True)


def test_recording_changes_no_weight_and_no_other_part_of_a_row(runs: tuple[RunFolder, RunFolder]) -> None:
    off, on = (checkpoint.newest(run) for run in runs)
    assert off is not None and on is not None
    first, second = off.weights(), on.weights()
    assert all(np.array_equal(np.array(first[name]), np.array(second[name])) for name in first | second)
    plain, recorded = (completions(run, 2) for run in runs)
    assert not any("token_data" in row for row in plain)
    assert plain == [{key: x for key, x in row.items() if key != "token_data"} for row in recorded]


def test_the_numbers_are_those_of_the_loss(runs: tuple[RunFolder, RunFolder]) -> None:
    run = runs[1]
    data = [row["token_data"] for row in completions(run, 2)]
    clipped = [x for tokens in data for x in tokens["clipped"]]
    # A step's metric is the mean over its two updates, and in the first nothing is clipped: the ratio is exactly 1.
    assert 0 < sum(clipped) / len(clipped) == pytest.approx(2 * metric(run, 2, "clip_ratio_total"), rel=1e-6)
    # The sampler's policy is that of the first update, so π_θ / π_old is the ratio of the two log-probabilities.
    for tokens in data:
        ratios = np.exp(np.array(tokens["learned_logp"]) - np.array(tokens["logp"]))
        np.testing.assert_allclose(tokens["ratio"], ratios, rtol=1e-4)
    assert max(abs(math.log(x)) for tokens in data for x in tokens["ratio"]) > 1e-3, (
        "the second update's, not the first's"
    )


def test_token_texts_make_up_the_completion(runs: tuple[RunFolder, RunFolder]) -> None:
    for row in completions(runs[1], 1):
        assert "".join(row["token_data"]["text"]).startswith(row["text"])
        assert {len(values) for values in row["token_data"].values()} == {row["tokens"]}


class Bytes:
    """A tokenizer of single bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    assert token_texts(list("aé€".encode()), Bytes()) == ["a", "", "é", "", "", "€"]
    assert token_texts(list("a€".encode())[:-1], Bytes()) == ["a", "", "�"]
    assert token_texts([], Bytes()) == []
