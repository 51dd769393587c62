"""Ourselves as contenders: the engine as the trainer calls it, whole or with one technique switched off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from backend.bench import ablation
from backend.bench.contender import RANK, RATE, SCALE, Contender, prompt_ids, reward
from backend.bench.stopwatch import Stopwatch
from backend.bench.workloads import Case
from backend.generation.rollout import Rollout
from backend.generation.sampler import Sampling
from backend.models.policy import Policy, load_policy
from backend.spec.config import Config, parse
from backend.training.advantages import advantages
from backend.training.batch import pack
from backend.training.grpo import grpo_learner
from backend.training.learner import Learner
from backend.types import Completion, Group, Problem

MANY = 10**6
"""Steps of a run that nobody waits for."""


def contender(name: str) -> Contender:
    """ "ours", or "ours, without " and a technique. Raises KeyError for an unknown one."""
    off = ablation.SWITCHES[name.removeprefix("ours, without ")] if name != "ours" else contextlib.nullcontext
    return partial(_run, off)


def _run(
    off: Callable[[], contextlib.AbstractContextManager[object]], case: Case, folder: Path, stopwatch: Stopwatch
) -> None:
    with off():
        {"step": steps, "rollout": rollouts, "train": trainings, "decode": decodings}[case.work](
            case, folder, stopwatch
        )


def settings(case: Case, folder: Path) -> Config:
    """The settings that every contender's are: LoRA on every projection, Adam, one update a rollout."""
    return parse({
        "model": str(folder), "data": str(folder), "num_layers": -1, "rank": RANK, "scale": SCALE, "optimizer": "adam",
        "learning_rate": RATE, "batch_size": case.prompts, "group_size": case.group_size, "beta": case.beta,
        "max_completion_length": case.completion, "max_seq_length": case.prompt + case.completion,
        "temperature": case.temperature, "top_p": case.top_p, "top_k": 0,
    })  # fmt: skip


def sampling(case: Case) -> Sampling:
    return Sampling(case.temperature, case.top_p)


def problems(case: Case, number: int) -> list[Problem]:
    return [Problem(i, "", [], ids, "") for i, ids in enumerate(prompt_ids(case, number))]


def steps(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """Whole steps."""
    config = settings(case, folder)
    policy = load_policy(config)
    rollout, learner = Rollout(policy, case.completion), grpo_learner(policy, config, MANY)
    for number in stopwatch.steps():
        groups = rollout.sample(problems(case, number), case.group_size, sampling(case), 0, number * case.prompts)
        stopwatch.lap("rollout")
        judge(groups)
        _learn(learner, policy, groups)
        stopwatch.lap("train")
        stopwatch.done(_tokens(groups))


def rollouts(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """Sampling alone."""
    rollout = Rollout(load_policy(settings(case, folder)), case.completion)
    for number in stopwatch.steps():
        groups = rollout.sample(problems(case, number), case.group_size, sampling(case), 0, number * case.prompts)
        stopwatch.lap("rollout")
        stopwatch.done(_tokens(groups))


def trainings(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """Learning alone, from made-up completions of full length."""
    config = settings(case, folder)
    policy = load_policy(config)
    learner = grpo_learner(policy, config, MANY, micro_batch_tokens=case.micro_batch)
    for number in stopwatch.steps():
        groups = made_up(case, number)
        stopwatch.begin_again()
        _learn(learner, policy, groups)
        stopwatch.lap("train")
        stopwatch.done(_tokens(groups))


def decodings(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """Sampling to the first token and sampling to the last: what lies between are decoding steps."""
    policy = load_policy(settings(case, folder))
    short, long = Rollout(policy, 1), Rollout(policy, case.completion)
    for number in stopwatch.steps():
        for phase, rollout in (("first", short), ("rollout", long)):
            rollout.sample(problems(case, number), case.group_size, sampling(case), 0, number * case.prompts)
            stopwatch.lap(phase)
        between = stopwatch.phases["rollout"]["s"] - stopwatch.phases["first"]["s"]
        stopwatch.done(case.rows * case.completion, decode_s=between / (case.completion - 1))


def _learn(learner: Learner, policy: Policy, groups: list[Group]) -> None:
    import mlx.core as mx

    mx.clear_cache()  # as the trainer does between sampling and learning
    learner.learn(pack(groups, pad_id=policy.pad_id))


def judge(groups: list[Group]) -> None:
    """Rewards and advantages."""
    rewards = [[reward(one.text)] for group in groups for one in group.completions]
    values, _ = advantages(rewards, len(groups[0].completions))
    everyone = (one for group in groups for one in group.completions)
    for one, value in zip(everyone, values.tolist(), strict=True):  # pyright: ignore
        one.advantage = value


def made_up(case: Case, number: int) -> list[Group]:
    """Groups of completions that nobody sampled, as long as they may be."""
    import numpy as np

    rng = np.random.default_rng((11, number))
    groups = []
    for problem in problems(case, number):
        ids = rng.integers(2, case.vocab, (case.group_size, case.completion)).tolist()
        flat = [-float(np.log(case.vocab))] * case.completion
        ones = [Completion(row, list(flat), str(i), "length") for i, row in enumerate(ids)]
        groups.append(Group(problem, ones))
    judge(groups)
    return groups


def _tokens(groups: list[Group]) -> int:
    return sum(len(one.tokens) for group in groups for one in group.completions)
