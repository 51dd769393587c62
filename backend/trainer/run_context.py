"""What a step's groups are made under: the clock of the step, what the trainer does meanwhile, and where the groups are laid down."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx
import numpy as np

from backend.config.config import Config
from backend.config.notes import config_notes
from backend.config.stages import Stages, stage_at
from backend.data.problems import PromptFormat
from backend.data.prompt_stream import PromptStream
from backend.data.prompts import BackgroundTokenizer, TokenizedPrompts, measure_first_rows
from backend.data.rows import SPLITS, Rows, Splits, check_columns, data_seed
from backend.engine import device
from backend.engine.memory import release_cached_buffers
from backend.models.policy import Base, Policy, load_policy
from backend.rewards.scorer import Scorer
from backend.runs.checkpoints.checkpoint import Checkpoint
from backend.runs.checkpoints.checkpoint_integrity import DamagedCheckpoint
from backend.runs.completion_rows import TokenData
from backend.runs.steering import stage_configs
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.sampling.text_stream import TextStream
from backend.trainer.evaluation.evaluate import evaluation_metrics, first_of, sample_of, scored_groups
from backend.trainer.machine import StepSize
from backend.trainer.memory.plan import WHOLE_STEP, learner_limits, plan_memory, refuse_too_large, rollout_limits
from backend.trainer.run_inputs import (
    EvaluationSets,
    MakePrompts,
    RunInputs,
    StageRows,
    check_held_out,
    held_out_settings,
    named_prompts,
    read_inputs,
    read_stages,
    stage_mistake,
)
from backend.trainer.scoring import ScoringStages
from backend.trainer.telemetry import StepTimer
from backend.training.batch import Batch, pack, token_mask
from backend.training.grpo import grpo_learner
from backend.training.learner import Learner, TokenRecord
from backend.training.not_finite import check_sampled, check_scores
from backend.training.optimizers import SETTINGS_DECIDE, OwnUpdates
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError

Poll = Callable[[str, float | None], None]
"""Takes the phase, and the share of it that is done where that is known. May raise, to give the step up."""


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """`groups` are filled as they are sampled: of a step that is given up half-way, they are what there is."""

    timer: StepTimer
    poll: Poll
    report: Callable[[str], None]
    """Takes the phase while it is waited for, obeying nothing."""
    groups: list[Group]


LEARNERS = {"grpo": grpo_learner}
"""`train_mode` → what builds its learner: the algorithm, and the optimizer around it."""


@dataclass(slots=True)
class StepContext:
    """`steps` is the length of the run: `iters`, or the steps that `epochs` or `stages` amount to."""

    policy: Policy
    learner: Learner
    rollout: Sampler
    scoring: ScoringStages
    sampling: Sampling
    steps: int

    def steps_of(self, config: Config) -> int:
        """How long the run is with these settings. `iters` does not count where epochs or stages decide it."""
        return self.steps if config.epochs or config.stages else config.iters

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        """Go on with the settings of `config` from `step` on, between two steps; `keys` names those that differ from before. Raises UserError
        for a reference model that cannot be loaded."""
        self.policy.use_reference(config)
        self.scoring.change(config, self.steps_of(config))
        self.steps = self.scoring.steps
        self.sampling = Sampling.of(config)
        self.rollout.max_tokens = config.max_completion_length
        self.learner.change(config, self.steps, keys)

    def learn(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        """The updates of one step, from its scored groups."""
        metrics = self.learner.learn(self.packed(groups, config), poll)
        mx.synchronize()  # raises what has failed of this step on the GPU, before the step counts (`gpu_errors`)
        release_cached_buffers()
        return metrics

    def held_out_metrics(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        """What the learner measures of completions that are not learned from."""
        return self.learner.held_out_metrics(self.packed(groups, config), poll)

    def packed(self, groups: list[Group], config: Config) -> Batch:
        return pack(groups, pad_id=self.policy.pad_id, mask_truncated_completions=config.mask_truncated_completions)

    def step_size(self, config: Config) -> StepSize:
        """How much of a step has been computed at once."""
        forward, rows = self.learner.forward, self.rollout.rows
        every_row = config.prompts_per_step * config.group_size
        # The largest that there was, where the budget was never used up: half of the budget would change nothing then.
        tokens = min(forward.micro_batch_tokens, forward.largest_micro_batch or forward.micro_batch_tokens)
        return StepSize(tokens, min(rows or every_row, every_row))

    def rest(self) -> None:
        """Before a pause: give MLX's cached buffers back to the system."""
        mx.clear_cache()

    def close(self) -> None:
        """End the reward functions' process."""
        self.scoring.close()


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the memory plan leaves of a step, as keywords of the learner's builder and of `Rollout`."""

    learner: dict[str, Any]
    rollout: dict[str, Any]


class Engine:
    """What loads the model of a run and builds what computes with it: here for a process that has all of the model."""

    own: OwnUpdates = SETTINGS_DECIDE
    """The optimizer and the schedule of the program that trains, if it has any."""

    def load(self, config: Config, note: Callable[[str], None], base: Base | None = None) -> Policy:
        return load_policy(config, note, base)

    def build(self, policy: Policy, config: Config, steps: int, limits: StepLimits) -> tuple[Learner, Sampler]:
        learner = LEARNERS[config.train_mode](policy, config, steps, own=self.own, **limits.learner)
        return learner, Sampler(policy, config.max_completion_length, stop=config.stop, **limits.rollout)


OWN_ENGINE = Engine()


def build_step_context(
    policy: Policy,
    config: Config,
    scorer: Scorer,
    steps: int,
    longest_prompts: Iterable[int],
    note: Callable[[str], None],
    *,
    most: StepSize = WHOLE_STEP,
    stages: Sequence[Config] = (),
    engine: Engine = OWN_ENGINE,
) -> StepContext:
    """The parts around a loaded policy, for a run of `steps` steps (with stages, as many as they have) and prompts of these lengths in
    tokens. `most`, `stages`, `engine` and `note` as in `backend.trainer.run_context.load_context`. Raises UserError."""
    scoring = ScoringStages(config, scorer, steps)
    plan = plan_memory(config, policy, longest_prompts, note, stages)
    limits = StepLimits(learner_limits(plan, most), rollout_limits(plan, most))
    learner, rollout = engine.build(policy, config, scoring.steps, limits)
    return StepContext(
        policy=policy,
        learner=learner,
        rollout=rollout,
        scoring=scoring,
        sampling=Sampling.of(config),
        steps=scoring.steps,
    )


# The training prompts of each stage of a run, and which of them its steps take.


@dataclass(slots=True)
class StagePrompts:
    """`prompts` and `rows` have one entry a stage. Stages with the same rows and format share their prompts."""

    stages: Stages
    rows: Sequence[StageRows]
    prompts: Sequence[TokenizedPrompts]
    present: int = 0
    """The stage whose prompts are taken."""

    def named(self) -> dict[str, TokenizedPrompts]:
        """The prompts by a name for notes, each once."""
        found: dict[str, TokenizedPrompts] = {}
        for number, prompts in enumerate(self.prompts, 1):
            if not any(prompts is known for known in found.values()):
                found[f"train (stage {number})"] = prompts
        return found

    def begin(self, step: int, stream: PromptStream) -> None:
        """Let the stream take the prompts of the stage of `step`."""
        index = stage_at(self.stages, step)
        if self.prompts[index] is not stream.problems:
            stream.go_on_with(self.prompts[index], are_same_rows=self.rows[index] is self.rows[self.present])
        self.present = index


def tokenized_stages(
    config: Config, configs: Sequence[Config], rows: Sequence[StageRows], make: Callable[..., TokenizedPrompts]
) -> StagePrompts:
    """The prompts of every stage, their first rows tokenised. `configs`: the settings of each; `make(rows, format, source)` makes prompts.
    Raises UserError, naming the stage."""
    prompts: list[TokenizedPrompts] = []
    for index, (of_stage, own) in enumerate(zip(configs, rows, strict=True)):
        prompt_format = PromptFormat.of(of_stage)
        known = (each for each in prompts if each.are_of(own.rows, prompt_format))
        try:
            prompts.append(next(known, None) or _tokenized(of_stage, own, prompt_format, make))
        except UserError as mistake:
            raise stage_mistake(index, mistake) from None
    return StagePrompts(config.stages, rows, prompts)


def _tokenized(
    config: Config, own: StageRows, prompt_format: PromptFormat, make: Callable[..., TokenizedPrompts]
) -> TokenizedPrompts:
    if faults := check_columns(own.rows, config, own.source):
        raise UserError(faults)
    prompts = make(own.rows, prompt_format, own.source)
    measure_first_rows(prompts, "train")
    prompts.measure(prompts.longest_texts())  # memory is planned for the longest prompt of all rows
    return prompts


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

# The prompts of a run: those it trains on, by stage where it has stages, and those it is evaluated on.


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """Every prompt that a run may take."""

    by_split: dict[str, TokenizedPrompts]
    """Of the splits that the run uses; without `train` where stages have the rows."""
    named: dict[str, TokenizedPrompts]
    """The sets of `eval_data`."""
    of_stages: StagePrompts | None
    """Those of each stage, of a run that has stages."""

    @property
    def training(self) -> TokenizedPrompts:
        """Those that the first step takes."""
        return self.by_split["train"] if self.of_stages is None else self.of_stages.prompts[0]

    def all(self) -> dict[str, TokenizedPrompts]:
        """Every set by a name for notes."""
        return self.by_split | self.named | (self.of_stages.named() if self.of_stages is not None else {})

    def longest(self) -> list[int]:
        """Tokens of the longest prompt of each set."""
        return [prompts.longest for prompts in self.all().values()]

    def slow_paths(self) -> list[str]:
        """A sentence for each way in which some are tokenised slowly."""
        return [sentence for prompts in self.all().values() for sentence in prompts.slow_paths]

    def steps(self, config: Config) -> int:
        """How many steps a run has: `iters`, or the passes of `epochs` over the rows that fit, the last step filled up."""
        if not config.epochs or config.stages:
            return config.iters
        return -(-config.epochs * self.by_split["train"].fitting // config.prompts_per_step)

    def evaluation_sets(self, config: Config) -> EvaluationSets:
        """As many prompts of each set as an evaluation during training asks."""
        count = config.val_batches * config.prompts_per_evaluation_batch
        named = {name: prompts.first(count) for name, prompts in self.named.items()}
        return EvaluationSets(self._first("valid", count), named)

    def test(self, config: Config) -> list[Problem]:
        """As many prompts of the test split as are evaluated at the end."""
        return self._first("test", config.test_batches * config.prompts_per_evaluation_batch)

    def _first(self, split: str, count: int) -> list[Problem]:
        return self.by_split[split].first(count) if split in self.by_split else []


def tokenized_prompts(
    config: Config, stages: Sequence[Config], inputs: RunInputs, tokenizer: Any, make: MakePrompts
) -> RunPrompts:
    """The prompts of a run, their first rows tokenised. `stages`: the settings of each stage. Raises UserError for rows that cannot be used."""
    of_held_out = held_out_settings(config, stages)
    by_split = _by_split(inputs.splits, tokenizer, of_held_out, make)
    of_stages = None
    if config.stages:
        rows = inputs.stages or read_stages(config, inputs.splits, inputs.scorer)
        of_stages = tokenized_stages(config, stages, rows, lambda rows, *about: make(rows, tokenizer, *about))
    return RunPrompts(by_split, named_prompts(inputs.splits, tokenizer, of_held_out, make), of_stages)


def _by_split(splits: Splits, tokenizer: Any, config: Config, make: MakePrompts) -> dict[str, TokenizedPrompts]:
    """The prompts of every split that the run uses; with `epochs` all training rows are tokenised, because the length of the run is then
    the number of rows that fit."""
    used = {"train": not config.stages, "valid": config.steps_per_eval > 0, "test": config.test}
    by_split: dict[str, TokenizedPrompts] = {}
    for split in SPLITS:
        rows, source = splits.rows(split), splits.source.get(split, config.data)
        if not (rows and used[split]):
            continue
        if faults := check_columns(rows, config, source):
            raise UserError(faults)
        by_split[split] = prompts = make(rows, tokenizer, PromptFormat.of(config), source)
        measure_first_rows(prompts, split, all_rows=split == "train" and config.epochs > 0)
        prompts.measure(prompts.longest_texts())  # memory is planned for the longest prompt of all rows
    return by_split


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

Note = Callable[[str], None]


@dataclass(slots=True)
class RunContext(StepContext):
    """The parts of one run."""

    prompt_stream: PromptStream
    background_tokenizer: BackgroundTokenizer
    evaluation_sets: EvaluationSets
    test: list[Problem]
    stage_prompts: StagePrompts | None
    """The training prompts of each stage, of a run that has stages."""
    longest_prompts: list[int]
    """Tokens of the longest prompt of each set, for which memory is planned."""
    slow_paths: list[str]
    """A sentence for each part that does not take its fastest path, with the reason."""

    def begin(self) -> None:
        """Called once the state to begin with is in place, before the first step."""

    def take_back(self) -> None:
        """Go back to the weights before the updates of the step in flight, where they were kept."""

    def of_ranks(self) -> dict[str, Any]:
        """What the event log's `started` says of the processes that the run is spread over."""
        return {"ranks": 1}

    def first_notes(self, config: Config) -> list[str]:
        """Sentences for the user about what was built."""
        return [*self.learner.algorithm.notes, *self.scoring.notes(), *config_notes(config), *self.slow_paths]

    def new_notes(self) -> list[str]:
        """Sentences for the user that came up since the last call."""
        return [*self.background_tokenizer.new_notes(), *self.rollout.new_notes()]

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        """As in `StepContext`; and the prompts of the stage that begins."""
        super(RunContext, self).change(config, keys, step)
        if self.stage_prompts is not None:
            self.stage_prompts.begin(step, self.prompt_stream)

    def sample_and_score(
        self, problems: list[Problem], position: int, step: int, config: Config, work: SamplingContext
    ) -> dict[str, float]:
        """A scored group of every problem, in order, appended to `work.groups`; `position` is the first one's number in the run. Returns
        the metrics that reward functions logged. Raises NotFiniteError."""
        most_tokens = len(problems) * config.group_size * config.max_completion_length
        with work.timer.phase("rollout"):
            groups = self.rollout.sample(
                problems, config.group_size, self.sampling, config.seed, position,
                lambda tokens: work.poll("sampling", tokens / most_tokens),
            )  # fmt: skip
        work.groups.extend(groups)
        check_sampled(groups)
        with work.timer.phase("reward"):
            work.poll("scoring", None)
            logged = self.scoring.score(groups, step, self.prompt_stream.epoch, lambda: work.report("scoring"))
            check_scores(groups)
            work.poll("scoring", None)  # a command that came while the functions ran
        return logged

    def evaluate(self, step: int, config: Config, poll: Callable[[float], None]) -> dict[str, float]:
        """Held-out rewards after `step`, of every set to evaluate on."""
        return self.evaluation_sets.metrics(
            lambda problems, poll: self.held_out(problems, config.val_batches, step, config, poll), poll
        )

    def test_metrics(self, step: int, config: Config, poll: Callable[[float], None]) -> dict[str, float]:
        """Held-out rewards after the last `step`, of the test split."""
        return self.held_out(self.test, config.test_batches, step, config, poll)

    def held_out(
        self, problems: list[Problem], count: int, step: int, config: Config, poll: Callable[[float], None]
    ) -> dict[str, float]:
        """Held-out rewards after `step`, over the first `count` batches of `problems`, with the entropy and the KL of some of the
        completions, which have a standard error."""
        stage = self.scoring.stage(step)
        chosen = first_of(problems, config.prompts_per_evaluation_batch, count)
        groups = self.held_out_groups(chosen, step, config, poll)
        measured = self.held_out_metrics(sample_of(groups), config, lambda: poll(1.0))
        return evaluation_metrics(groups, stage.names, stage.weights.at(step)) | measured

    def held_out_groups(
        self, problems: list[Problem], step: int, config: Config, poll: Callable[[float], None]
    ) -> list[Group]:
        """Scored groups of problems that are not learned from."""
        return scored_groups(
            self.rollout,
            problems,
            lambda groups, poll: self.scoring.score(groups, step, self.prompt_stream.epoch, poll),
            sampling=self.sampling,
            group_size=config.num_generations_eval or config.group_size,
            batch_size=config.prompts_per_evaluation_batch,
            poll=poll,
            # Reward functions that use mlx would share the device and its memory with sampling.
            overlap_scoring=not self.scoring.uses_mlx,
        )

    def close(self) -> None:
        """End the tokenizer's thread and the reward functions' process."""
        self.background_tokenizer.close()
        super(RunContext, self).close()

    def checkpoint_bytes(self, config: Config) -> int:
        """What the arrays of a checkpoint take on disk, and the adapters that are published with it."""
        arrays = [self.policy.trainable()] + ([] if config.save_only_model else [self.learner.state_arrays()])
        if config.sync_ref_model:
            arrays.append(self.policy.reference_arrays())
        if config.train_type != "full":
            arrays.append(self.policy.trainable())
        return sum(array.nbytes for group in arrays for array in group.values())

    def restore(self, saved: Checkpoint, note: Note) -> None:
        """Bring every part to the state of a checkpoint. Raises DamagedCheckpoint for arrays that are not this model's; the parts are of no
        use then."""
        state = saved.state
        try:
            self.policy.assign(saved.weights())
            self.learner.restore(saved.optimizer() if saved.has_optimizer else None, state.updates, state.bonus)
        except ValueError as error:
            raise DamagedCheckpoint(saved, str(error).rstrip(".")) from error
        self.scoring.restore(state.reward_weights)
        if self.stage_prompts is not None:
            self.stage_prompts.begin(state.step, self.prompt_stream)
        self.prompt_stream.cursor, self.prompt_stream.first = state.cursor, state.stream_first
        if not saved.has_optimizer and state.updates:
            note(
                f"The checkpoint of step {state.step} has no optimizer state (Save weights only), so the optimizer begins anew: the run "
                f"goes on a little differently than it would have without the break."
            )
        if saved.has_reference:
            self.policy.restore_reference(saved.reference())


@dataclass(slots=True)
class SharedResources:
    """What several runs of one process have in common: the base model, which full fine-tuning cannot share, and prompts of the same
    rows in the same format."""

    base: Base | None
    prompts: list[TokenizedPrompts] = field(default_factory=list)

    def tokenized(self, rows: Rows, tokenizer: Any, prompt_format: PromptFormat, source: str) -> TokenizedPrompts:
        """Those that another run has made of these very rows, or new ones."""
        for prompts in self.prompts:
            if prompts.are_of(rows, prompt_format):
                return prompts
        self.prompts.append(TokenizedPrompts(rows, tokenizer, prompt_format, source))
        return self.prompts[-1]


def load_context(
    config: Config,
    note: Note,
    inputs: RunInputs | None = None,
    most: StepSize = WHOLE_STEP,
    shared: SharedResources | None = None,
    stages: Sequence[Config] = (),
    engine: Engine = OWN_ENGINE,
) -> RunContext:
    """Build a run's parts. `inputs` is the result of `preflight`; without it they are read now. `most`: what GPU errors have
    left of a step. `shared`: what this run has in common with others of the process. `stages`: the settings of each stage, where `config`
    has those of one. `engine`: what loads the model and computes with it.

    `note` is called with each sentence for the user. Raises UserError for settings or files that cannot be used.
    """
    inputs = inputs or read_inputs(config)
    device.use(config.device)
    stages = stages or stage_configs(config)
    refuse_too_large(config, stages)
    policy = engine.load(config, note, shared.base if shared else None)
    make_prompts = shared.tokenized if shared else TokenizedPrompts
    prompts = tokenized_prompts(config, stages, inputs, policy.tokenizer, make_prompts)
    for sentence in inputs.splits.notes:
        note(sentence)
    check_held_out(inputs.splits, config)
    evaluation_sets, test = prompts.evaluation_sets(config), prompts.test(config)
    background_tokenizer = BackgroundTokenizer(prompts.all())
    for sentence in background_tokenizer.new_notes():
        note(sentence)
    longest, steps = prompts.longest(), prompts.steps(config)
    own = build_step_context(
        policy, config, inputs.scorer, steps, longest, note, most=most, stages=stages, engine=engine
    )
    return RunContext(
        **{each.name: getattr(own, each.name) for each in fields(own)},
        prompt_stream=PromptStream(prompts.training, data_seed(config)),
        background_tokenizer=background_tokenizer,
        evaluation_sets=evaluation_sets,
        test=test,
        stage_prompts=prompts.of_stages,
        longest_prompts=longest,
        slow_paths=list(
            dict.fromkeys([*policy.split_model.slow_paths, *own.rollout.slow_paths, *prompts.slow_paths()])
        ),
    )


LoadContext = Callable[[Config, Note, RunInputs | None, StepSize, SharedResources | None, Sequence[Config]], RunContext]
"""`load_context`, or what takes its place."""


# ── token data ───────────────────────────────────────────────────────────────────────────────────────────────────────

# The tokens of a step's completions as completions.jsonl keeps them, where a run records them (`record_tokens`).


def recorded_tokens(config: Config, parts: RunContext, groups: Sequence[Group]) -> list[list[TokenData]]:
    """The token data of a step that was just learned, group by group; nothing of any group unless the run records tokens."""
    if not config.record_tokens:
        return [[] for _ in groups]
    records = parts.learner.algorithm.token_records
    return token_data_of(groups, records, parts.policy.tokenizer, mask_truncated=config.mask_truncated_completions)


def token_data_of(
    groups: Sequence[Group], records: Mapping[int, TokenRecord], tokenizer: Any, *, mask_truncated: bool
) -> list[list[TokenData]]:
    """The token data of every completion, group by group. `records` are by row: the completions of all groups counted through,
    as `backend.training.batch.pack` orders them. `mask_truncated`: as the run's `mask_truncated_completions`."""
    rows = iter(range(sum(len(group.completions) for group in groups)))
    return [
        [
            _token_data(completion, records.get(next(rows)), tokenizer, mask_truncated)
            for completion in group.completions
        ]
        for group in groups
    ]


def _token_data(completion: Completion, record: TokenRecord | None, tokenizer: Any, mask_truncated: bool) -> TokenData:
    data = TokenData(text=token_texts(completion.tokens, tokenizer), logp=_figures(completion.logps))
    mask = [int(x) for x in token_mask(completion, mask_truncated)]
    if not all(mask):
        data["mask"] = mask
    if record is None:
        return data
    data["learned_logp"], data["ratio"] = _figures(record.learned_logp), _figures(record.ratio)
    data["clipped"] = [int(is_clipped) for is_clipped in record.clipped]
    own = np.float32(completion.advantage)  # the batch holds it in that type
    if any(x != own for x, is_trained in zip(record.advantage, mask, strict=True) if is_trained):
        data["advantage"] = _figures(record.advantage)
    return data


def token_texts(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds. Of a character spread over several tokens, the last one has it and the others nothing."""
    stream = TextStream(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
    texts = [stream.push(token) for token in tokens]
    return [*texts[:-1], texts[-1] + stream.rest()] if texts else []


def _figures(values: Sequence[float]) -> list[float | None]:
    """Nine significant digits, which name a float32 exactly; None for what is not finite."""
    return [float(f"{x:.9g}") if math.isfinite(x) else None for x in values]
