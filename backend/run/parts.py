"""Everything a run needs before its first step, made from its settings: policy, data, rewards, sampler, learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend.data.prompts import BackgroundTokenizer, TokenizedPrompts, first_look
from backend.data.rows import PromptStream, Splits, read_splits
from backend.generation.rollout import Rollout
from backend.generation.sampler import Sampling
from backend.models.policy import Policy, load_policy
from backend.run.checkpoint import Checkpoint
from backend.run.memory_plan import plan_memory, refuse_too_large
from backend.run.scoring_stages import ScoringStages
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.training.grpo import grpo_learner
from backend.training.learner import Learner
from backend.types import Problem

Note = Callable[[str], None]


@dataclass(slots=True)
class RunParts:
    """The parts of one run. `steps` is its length, which epochs or stages may decide."""

    policy: Policy
    learner: Learner
    rollout: Rollout
    scoring: ScoringStages
    prompt_stream: PromptStream
    background_tokenizer: BackgroundTokenizer
    valid: list[Problem]
    test: list[Problem]
    sampling: Sampling
    steps: int

    def restore(self, saved: Checkpoint) -> None:
        """Put every part where `saved` left it."""
        state = saved.state
        self.policy.assign(saved.weights())
        self.learner.restore(saved.optimizer(), state.updates, state.bonus)
        self.scoring.restore(state.reward_weights)
        self.prompt_stream.cursor = state.cursor
        if saved.has_reference:
            self.policy.restore_reference(saved.reference())


def load_parts(config: Config, note: Note) -> RunParts:
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
    scoring = ScoringStages(
        config, -(-config.epochs * prompts["train"].fitting // each) if config.epochs else config.iters
    )
    background_tokenizer = BackgroundTokenizer(prompts)
    for sentence in background_tokenizer.said():
        note(sentence)
    room = plan_memory(config, policy, [one.longest for one in prompts.values()], note)
    return RunParts(
        policy=policy,
        learner=grpo_learner(policy, config, scoring.steps, **room.learner),
        rollout=Rollout(policy, config.max_completion_length, stop=config.stop, **room.rollout),
        scoring=scoring,
        prompt_stream=PromptStream(prompts["train"], config.seed),
        background_tokenizer=background_tokenizer,
        valid=valid,
        test=test,
        sampling=Sampling(config.temperature, config.top_p, config.top_k, config.min_p),
        steps=scoring.steps,
    )


def _prompts(splits: Splits, policy: Policy, config: Config) -> dict[str, TokenizedPrompts]:
    """The prompts of every split that the run uses. Epochs count the rows that fit, so these are all tokenised now."""
    wanted = {"train": True, "valid": config.steps_per_eval > 0, "test": config.test}
    found: dict[str, TokenizedPrompts] = {}
    for split, rows in (("train", splits.train), ("valid", splits.valid), ("test", splits.test)):
        if rows and wanted[split]:
            found[split] = TokenizedPrompts(rows, policy.tokenizer, config, splits.source.get(split, config.data))
            first_look(found[split], split, everything=split == "train" and config.epochs > 0)
            found[split].look(found[split].widest())  # memory is planned for the longest prompt, wherever it stands
    return found
