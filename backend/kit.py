"""Everything a run needs before its first step, made from its settings: policy, data, rewards, sampler, learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend.checkpoint import Checkpoint
from backend.data import Deck, Splits, read_splits
from backend.judge import Judge
from backend.learning.learner import Learner
from backend.nouns import Problem
from backend.policy import Policy, load_policy
from backend.prompts import Prompts, Survey, first_look
from backend.rollout import Rollout
from backend.room import make_room, refuse_too_large
from backend.sampling.sampler import Sampling
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
    survey: Survey
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
    refuse_too_large(config)
    policy = load_policy(config, note)
    prompts = _prompts(splits, policy, config)
    if config.test and "test" not in prompts:
        raise Mistake("test", f"Evaluate test split is on, and {config.data} has no split {config.test_split}.")
    each = config.prompts_per_step
    held_out = {"valid": config.val_batches * each, "test": config.test_batches * each}
    valid, test = (prompts[split].first(count) if split in prompts else [] for split, count in held_out.items())
    judge = Judge(config, -(-config.epochs * prompts["train"].fitting // each) if config.epochs else config.iters)
    survey = Survey(prompts)
    for sentence in survey.said():
        note(sentence)
    room = make_room(config, policy, [one.longest for one in prompts.values()], note)
    return Kit(
        policy=policy,
        learner=Learner(policy, config, judge.steps, **room.learner),
        rollout=Rollout(policy, config.max_completion_length, stop=config.stop, **room.rollout),
        judge=judge,
        deck=Deck(prompts["train"], config.seed),
        survey=survey,
        valid=valid,
        test=test,
        sampling=Sampling(config.temperature, config.top_p, config.top_k, config.min_p),
        steps=judge.steps,
    )


def _prompts(splits: Splits, policy: Policy, config: Config) -> dict[str, Prompts]:
    """The prompts of every split that the run uses. Epochs count the rows that fit, so these are all tokenised now."""
    wanted = {"train": True, "valid": config.steps_per_eval > 0, "test": config.test}
    found: dict[str, Prompts] = {}
    for split, rows in (("train", splits.train), ("valid", splits.valid), ("test", splits.test)):
        if rows and wanted[split]:
            found[split] = Prompts(rows, policy.tokenizer, config, splits.source.get(split, config.data))
            first_look(found[split], split, everything=split == "train" and config.epochs > 0)
            found[split].look(found[split].widest())  # memory is planned for the longest prompt, wherever it stands
    return found
