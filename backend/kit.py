"""Everything a run needs before its first step, made from its settings: policy, data, rewards, sampler, learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend.checkpoint import Checkpoint
from backend.data import Deck, Prepared, Splits, prepare, read_splits
from backend.judge import Judge
from backend.learner import Learner
from backend.nouns import Problem
from backend.policy import Policy, load_policy
from backend.rollout import Rollout
from backend.sampler import Sampling
from backend.spec.config import Config
from backend.spec.faults import Mistake

Note = Callable[[str], None]


@dataclass(slots=True)
class Kit:
    """The parts of one run. `steps` is its length, which epochs or stages may decide."""

    policy: Policy
    learner: Learner
    rollout: Rollout
    judge: Judge
    deck: Deck
    valid: list[Problem]
    test: list[Problem]
    sampling: Sampling
    steps: int

    def restore(self, saved: Checkpoint) -> None:
        """Put every part where `saved` left it."""
        state = saved.state
        self.policy.assign(saved.weights())
        self.learner.restore(saved.optimizer(), state.updates, state.bonus)
        self.judge.restore(state.reward_weights)
        self.deck.cursor = state.cursor
        if saved.has_reference:
            self.policy.restore_reference(saved.reference())


def load_kit(config: Config, note: Note) -> Kit:
    """Build a run's parts; `note` is told what a person should know. Raises Mistake for what cannot be used."""
    splits = read_splits(config)
    policy = load_policy(config, note)

    def problems(split: str, wanted: bool) -> list[Problem]:
        rows = getattr(splits, split)
        return _problems(splits, split, policy, config, note) if rows and wanted else []

    train, valid, test = (
        problems("train", True),
        problems("valid", config.steps_per_eval > 0),
        problems("test", config.test),
    )
    if config.test and not test:
        raise Mistake("test", f"Evaluate test split is on, and {config.data} has no split {config.test_split}.")
    each = config.prompts_per_step
    judge = Judge(config, -(-config.epochs * len(train) // each) if config.epochs else config.iters)
    chunk = {"prefill_chunk": config.seq_step_size} if config.efficient_long_context else {}
    return Kit(
        policy=policy,
        learner=Learner(policy, config, judge.steps),
        rollout=Rollout(policy, config.max_completion_length, stop=config.stop, **chunk),
        judge=judge,
        deck=Deck(train, config.seed),
        valid=valid,
        test=test,
        sampling=Sampling(config.temperature, config.top_p, config.top_k, config.min_p),
        steps=judge.steps,
    )


def _problems(splits: Splits, split: str, policy: Policy, config: Config, note: Note) -> list[Problem]:
    source = splits.source.get(split, config.data)
    prepared = prepare(getattr(splits, split), policy.tokenizer, config, source)
    _tell_left_out(prepared, split, config, note)
    return prepared.problems


def _tell_left_out(prepared: Prepared, split: str, config: Config, note: Note) -> None:
    room, there = config.max_seq_length - config.max_completion_length, len(prepared.problems)
    if not there:
        raise Mistake(
            "max_seq_length",
            f"Every prompt of the {split} split is longer than the {room} tokens that Max Seq leaves beside the "
            f"completion; raise Max Seq or lower Completion.",
        )
    if prepared.too_long:
        note(
            f"{prepared.too_long} of {prepared.too_long + there} rows of the {split} split are left out: their prompts "
            f"(up to {prepared.longest} tokens) leave no room for a completion."
        )
