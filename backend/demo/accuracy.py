"""Accuracy on the demo's test split: greedy completions, exact answers, every row."""

from __future__ import annotations

from backend.config.config import Config
from backend.data.problems import prepare
from backend.data.rows import read_splits
from backend.models.policy import load_policy
from backend.rewards.functions.r1 import extract_answer
from backend.runs.checkpoints.checkpoint import newest
from backend.runs.run_folder import RunFolder
from backend.sampling.rollout import Sampler
from backend.trainer.evaluation.evaluate import greedy_accuracy
from backend.types import Group


def test_accuracy(config: Config, run: RunFolder | None) -> float:
    """Fraction, 0 … 1, before training (`run` None) or with the newest checkpoint of `run`."""
    policy = load_policy(config)
    saved = newest(run) if run is not None else None
    if saved is not None:
        policy.assign(saved.weights())
    splits = read_splits(config)
    problems = prepare(splits.test, policy.tokenizer, config, splits.source["test"]).problems
    return greedy_accuracy(Sampler(policy, config.max_completion_length), problems, is_correct)


def is_correct(groups: list[Group]) -> list[bool]:
    """Whether each group's first completion answers with exactly the dataset's answer."""
    return [extract_answer(group.completions[0].text) == group.problem.answer.strip() for group in groups]
