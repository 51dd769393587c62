"""Held-out rewards: scoring overlaps with sampling the next batch, with the same calls in the same order as without."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.sampling.sampler import Sampling
from backend.trainer.evaluation.evaluate import FORWARD_ROWS, evaluation_metrics, sample_of, scored_groups
from backend.trainer.scoring import MLX
from backend.types import Completion, Group, Problem
from tests.support import small_run
from tests.support.cases import cases

PROBLEMS = [Problem(n, str(n), [], [n], str(n)) for n in range(7)]
SAMPLING = Sampling(1.0, 1.0, 0, 0.0)


class Sampled:
    """A fake Rollout: groups without a model, and a log of calls in order."""

    tools = None

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def sample(self, problems: Sequence[Problem], group_size: int, *_: Any) -> list[Group]:
        *_, poll, _ = _
        self.log.append(f"sample {problems[0].index}")
        time.sleep(0.02)
        poll(1)
        made = [[Completion([1], [0.0], str(each.index), "eos") for _ in range(group_size)] for each in problems]
        return list(map(Group, problems, made))


def held_out(score: Any, log: list[str], **more: Any) -> dict[str, float]:
    groups = scored_groups(Sampled(log), PROBLEMS, score, sampling=SAMPLING, group_size=2, batch_size=2, **more)
    return evaluation_metrics(groups, ["r"], [1.0])


def scorer(log: list[str], seconds: float = 0.05) -> Any:
    """Scores a completion by its problem's number."""

    def score(groups: list[Group], poll: Any) -> None:
        log.append(f"score {groups[0].problem.index}")
        time.sleep(seconds)
        for completion in (completion for group in groups for completion in group.completions):
            completion.scores = {"r": float(completion.text)}
            completion.reward = float(completion.text)
        log.append(f"scored {groups[0].problem.index}")

    return score


def test_a_stop_waits_for_no_reward_function() -> None:
    """The next batch is sampled while the functions judge this one, and sampling is where an evaluation is stopped."""
    judging = threading.Event()

    class Stop(Exception): ...

    class Stopping(Sampled):
        def sample(self, problems: Sequence[Problem], *more: Any) -> list[Group]:
            if problems[0].index and judging.wait(5.0):
                raise Stop
            return super().sample(problems, *more)

    def score(groups: list[Group], poll: Any) -> None:
        judging.set()
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            poll()
            time.sleep(0.005)

    began = time.monotonic()
    with pytest.raises(Stop):
        scored_groups(Stopping([]), PROBLEMS, score, sampling=SAMPLING, group_size=2, batch_size=2)
    assert time.monotonic() - began < 5.0


def test_scoring_overlaps_with_sampling_the_next_batch_and_changes_no_number() -> None:
    overlapped, sequential = [], []
    fast = held_out(scorer(overlapped), overlapped)
    assert fast == held_out(scorer(sequential), sequential, overlap_scoring=False) and fast["reward"] == 3
    assert sequential == [f"{call} {n}" for n in (0, 2, 4, 6) for call in ("sample", "score", "scored")]
    calls = [line for line in overlapped if line.startswith("sco")]
    assert calls == [line for line in sequential if line.startswith("sco")], "one call after the other, in order"
    at = overlapped.index
    assert at("sample 2") < at("scored 0") and at("sample 6") < at("scored 4")


def test_a_reward_file_that_imports_mlx_is_recognised() -> None:
    for line in ("import mlx.core as mx", "    from mlx_lm import load"):
        assert re.search(MLX, f"import os\n{line}\n")
    for line in ("from mlx_lm_lora.trainer import register_reward_function", "import numpy  # not mlx"):
        assert not re.search(MLX, f"import os\n{line}\n")


def test_an_evaluation_reports_what_a_step_does_but_for_learning(tmp_path: Path) -> None:
    evaluated = {"iters": 2, "steps_per_eval": 1, "beta": 0.1, "data": str(tmp_path / "data"), "val_batches": 2}
    raw = small_run.settings_for(tmp_path, **evaluated | small_run.low_half(tmp_path))
    for split in ("train", "valid"):
        small_run.write_rows(tmp_path / "data" / f"{split}.jsonl")
    run = RunFolder(tmp_path / "run")
    assert small_run.train_here(raw, run).kind == "finished"
    events = list(read_events(run.events))
    step = next(event["metrics"] for event in events if event["kind"] == "step")
    (first, *_) = evaluations = [event["metrics"] for event in events if event["kind"] == "eval"]
    of_learning = {"loss", "learning_rate", "grad_norm", "grad_clipped", "num_tokens", "epoch", "peak_memory_gb"}
    prefixes = ("clip_ratio", "time/", "sampling/", "process/", "machine/", "peak_memory_gb/")
    expected = {name for name in step if not name.startswith(prefixes) and not name.endswith("per_second")}
    assert first.keys() == (expected - of_learning) | {"time/eval", "kl_stderr", "entropy_stderr"}
    assert all(value is not None for metrics in evaluations for value in metrics.values())
    assert evaluations[-1]["kl"] > 0 and first["entropy"] > 1


@cases(("count", "read"), [(1, 1), (4, 4), (5, 3), (16, 4), (32, 8), (33, 7), (128, 32), (132, 27), (200, 29)])
def test_the_model_reads_a_bounded_sample_of_an_evaluation(count: int, read: int) -> None:
    """One completion of a group, an eighth of all within limits, and groups from the beginning to the end."""
    groups = [Group(PROBLEMS[0], [Completion([n], [0.0], str(n), "eos") for n in (i, -1)]) for i in range(count)]
    sample = [int(group.completions[0].text) for group in sample_of(groups)]
    assert len(sample) == read <= FORWARD_ROWS and all(len(group.completions) == 1 for group in sample_of(groups))
    assert sample == sorted(set(sample)) and sample[-1] >= count - 7 and -1 not in sample
