"""What the reward functions' own process costs: a step of 64 completions under all shipped functions, against calls in this one."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from backend.rewards.calls import ThreadCaller
from backend.rewards.catalogue import builtin_rewards
from backend.rewards.inputs import TrainerState
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import FunctionHost, RewardSource
from backend.rewards.worker_process import RewardWorker
from backend.types import Completion, Group, Problem

ARGUMENTS = {"keyword": "(word=so)", "regex_match": "(pattern='a')"}
ENTRIES = [entry.name + ARGUMENTS.get(entry.name, "") for entry in builtin_rewards()]
WORDS = ["so", "we", "add", "7", "numbers", "and", "get"]
ROUNDS, WARM_UP = 12, 3


@contextmanager
def before_other_programs() -> Iterator[None]:
    """This process, and those that it starts, get a processor whenever they ask for one, where we may decide that: on a busy machine
    two processes wait twice for their turns, and that is not what is measured."""
    policy = getattr(os, "SCHED_RR", None)
    with suppress(OSError):
        if policy is not None:
            os.sched_setscheduler(0, policy, os.sched_param(1))
    is_first = policy is not None and os.sched_getscheduler(0) == policy
    if not is_first and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        pytest.skip("other programs are running, and only root may go before them")
    try:
        yield
    finally:
        if is_first:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def step(chance: random.Random, words: int) -> list[Group]:
    """8 prompts with 8 completions of so many words each."""
    groups: list[Group] = []
    for number in range(8):
        problem = Problem(number, f"What is {number} + 7?", [], [], str(number + 7), None, {"prompt": "x", "level": 3})
        texts = [
            f"<think>\n{' '.join(chance.choices(WORDS, k=words))}\n</think>\n<answer>\n{chance.choice([number, number + 7])}\n</answer>\n"
            for _ in range(8)
        ]
        tokens = [chance.choices(range(30_000), k=2 * words) for _ in texts]
        groups.append(
            Group(problem, [Completion(ids, [], text, "eos") for text, ids in zip(texts, tokens, strict=True)])
        )
    return groups


def seconds_of(scorer: Scorer, groups: list[Group]) -> float:
    began = time.perf_counter()
    scorer.score(groups, 0, [1.0] * len(ENTRIES), 60.0, TrainerState(max_completion_length=512))
    return time.perf_counter() - began


def scores(groups: list[Group]) -> list[dict[str, float | None]]:
    return [completion.scores for group in groups for completion in group.completions]


@pytest.mark.alone
def test_a_step_costs_at_most_a_tenth_more_than_in_this_process() -> None:
    """Measured on 2 processors: 0.81 for 60 words, 0.96 for 400. Calls need no threads there, but texts have to be sent."""
    with before_other_programs():
        source = RewardSource([ENTRIES], None, Path.cwd())
        here, there = Scorer(source, FunctionHost(ThreadCaller()), 60.0), Scorer(source, RewardWorker(), 60.0)
        try:
            for words in (60, 400):
                ratios: list[float] = []
                for number in range(ROUNDS):
                    mine, its = step(random.Random(number), words), step(random.Random(number), words)
                    if number % 2:
                        took, its_took = seconds_of(here, mine), seconds_of(there, its)
                    else:
                        its_took, took = seconds_of(there, its), seconds_of(here, mine)
                    assert scores(mine) == scores(its)
                    ratios.append(its_took / took)
                ratio = statistics.median(ratios[WARM_UP:])
                print(f"{words} words: {ratio:.2f}")
                assert ratio <= 1.1
        finally:
            there.close()
