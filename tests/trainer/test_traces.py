"""A long run of random lengths keeps few traces and no memory: what mx.compile never evicts ends a run on Metal at 499,000 buffers
(ml-explore/mlx#4464)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

from backend.config.config import Config, parse
from backend.engine import compiled
from backend.models.policy import Policy, load_policy
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.training.batch import pack
from backend.training.grpo import grpo_learner
from backend.training.learner import Learner
from backend.types import Problem
from backend.utils.machine import TREAT_CPU_AS
from tests.support.random_models import tiny_model

LONGEST = 300


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")


class Traces:
    """What `mx.compile` has traced: how often each compiled function that is still alive, and how often in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_function: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.made = 0
        compile_ = mx.compile

        def counting(function: Callable[..., Any], *rest: Any, **options: Any) -> Callable[..., Any]:
            def traced(*arguments: Any) -> Any:  # called once for each trace
                self.of_function[traced] += 1
                self.made += 1
                return function(*arguments)

            self.of_function[traced] = 0
            return compile_(traced, *rest, **options)

        monkeypatch.setattr(mx, "compile", counting)

    @property
    def kept(self) -> int:
        gc.collect()
        return sum(self.of_function.values())


class Steps:
    """Steps of sampling and learning with a tiny model, of prompts and completions of random lengths."""

    def __init__(self, folder: Path) -> None:
        self.policy, self.config = _policy(folder)
        self.learner: Learner = grpo_learner(self.policy, self.config, 1000)
        self.rollout = Sampler(self.policy, self.config.max_completion_length)
        self.rng = np.random.default_rng(0)

    def run(self, count: int) -> None:
        for step in range(count):
            lengths = self.rng.integers(1, LONGEST, self.config.batch_size)
            problems = [Problem(i, "", [], self.rng.integers(60, 320, n).tolist(), "") for i, n in enumerate(lengths)]
            self.rollout.max_tokens = int(self.rng.integers(2, 24))
            groups = self.rollout.sample(problems, self.config.group_size, Sampling(), step, 0)
            for group in groups:
                for g, completion in enumerate(group.completions):
                    completion.advantage = 1.0 - 2 * (g % 2)
            self.learner.learn(pack(groups, pad_id=0))


def _policy(folder: Path) -> tuple[Policy, Config]:
    config = parse({"model": str(tiny_model(folder, layers=1)), "data": "none", "beta": 0.1, "num_layers": -1, "batch_size": 2,
                    "group_size": 4, "max_completion_length": 24, "temperature": 1.0, "top_p": 1.0, "top_k": 0})  # fmt: skip
    policy = load_policy(config)
    policy.eos_ids = list(range(40))
    return policy, config


def test_no_more_traces_are_kept_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of few steps needs several traces of the decoding step, and the limit is three."""
    monkeypatch.setattr(compiled, "MOST_TRACES", 3)
    traces = Traces(monkeypatch)
    steps = Steps(tmp_path)
    steps.run(10)
    assert traces.made > 2 * traces.kept, "the limit was not reached"
    # Three of the decoding step at this sampling, the trial's greedy one, and the optimizer's update.
    assert traces.kept <= 3 + 1 + 1
    assert set(traces.of_function.values()) == {1}, "a function of several traces keeps all of them"


@pytest.mark.proof
def test_two_hundred_steps_of_random_lengths_keep_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, process = Traces(monkeypatch), psutil.Process()
    steps = Steps(tmp_path)
    figures: list[tuple[int, int, int]] = []
    for _ in range(5):
        steps.run(40)
        figures.append((traces.kept, mx.get_active_memory(), process.memory_info().rss))
        print(f"traces kept {figures[-1][0]}, active {figures[-1][1] / 1e6:.2f} MB, RSS {figures[-1][2] / 1e6:.0f} MB")
    assert max(kept for kept, *_ in figures) <= compiled.MOST_TRACES + 2
    assert figures[-1][1] < 1.05 * figures[0][1]
    assert figures[-1][2] < figures[1][2] + 50e6
