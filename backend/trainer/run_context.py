"""The parts of a run, built from its settings: model, learner, sampler, reward functions and prompts. In a supervised
warm-up a second learner imitates answers first, since GRPO learns nothing while no completion of a group earns a reward
(marin#8876: start it by pass@G, not by loss)."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from backend.config.config import Config
from backend.config.stages import stage_at
from backend.config.updates import OWN
from backend.data.labels import labelled_group, tokenized, with_label
from backend.data.pass_rates import PassRates
from backend.data.problems import PromptFormat
from backend.data.prompts import BackgroundTokenizer, PromptStream, TokenizedPrompts
from backend.data.rows import Rows, data_seed
from backend.engine import device
from backend.engine.device import release_cached_buffers
from backend.models.policy import Base, Policy, QuantizedRollouts, load_policy, load_teacher
from backend.rewards.scorer import Scorer
from backend.runs.checkpoint import arrays_of
from backend.runs.saved_weights import Checkpoint, DamagedCheckpoint
from backend.runs.steering import stage_configs
from backend.sampling.conversations import Tools
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.sampling.speculation import speculation_of
from backend.tools.host import NO_TOOLS, ToolHost
from backend.trainer import run_inputs
from backend.trainer.evaluation.evaluate import evaluation_metrics, sample_of, scored_groups
from backend.trainer.machine import StepSize
from backend.trainer.memory.plan import WHOLE_STEP, dtype_here, image_tokens, plan_limits, plan_memory, refuse_too_large
from backend.trainer.run_inputs import RunInputs
from backend.trainer.scoring import ScoringStages
from backend.trainer.telemetry import StepTimer
from backend.training.algorithms import build_learner
from backend.training.batch import Batch, pack
from backend.training.learner import Learner
from backend.training.not_finite import check_sampled, check_scores
from backend.training.optimizers import SETTINGS_DECIDE, OwnUpdates
from backend.training.self_distillation import add_teacher_prompts
from backend.types import Group, Problem

Note = Callable[[str], None]  # takes a sentence for the user
CollectMetrics = tuple[dict[str, float], dict[str, float]]  # of a step's groups, and those that functions logged

MEASURED_EVERY = 10  # steps between two measurements of the pass rate that need a rollout; the first is at step 1
PASS_RATE = "warmup/pass_rate"
WARMUP_METRICS = {name: f"warmup/{name}" for name in ("loss", "entropy", "learning_rate")}
"""Metric of a learner → its name in the steps of a warm-up."""


def warmup_settings(config: Config) -> Config:
    """The settings of the warm-up's learner: a constant rate, and AdamW in place of a program's optimizer."""
    rate = config.warmup_learning_rate or config.learning_rate
    own = {"optimizer": "adamw"} if config.optimizer == OWN else {}
    schedule = {"learning_rate": rate, "lr_schedule": "constant", "lr_warmup_ratio": None}
    return config.model_copy(update={"train_mode": "sft", **schedule, **own})


def pass_rate(groups: Sequence[Group], config: Config) -> float:
    """pass@G: the share of groups with a solved completion."""
    least = config.success_reward_threshold
    solved = [any(c.reward is not None and c.reward >= least for c in group.completions) for group in groups]
    return sum(solved) / len(solved)


def keep_best(groups: Sequence[Group]) -> None:
    """Rejection sampling: a group's best completion, if above its mean, has the advantage 1, all others 0."""
    for group in groups:
        rewards = [-math.inf if completion.reward is None else completion.reward for completion in group.completions]
        known = [reward for reward in rewards if reward > -math.inf]
        is_above, best = max(known, default=0.0) > min(known, default=0.0), rewards.index(max(rewards))
        for place, completion in enumerate(group.completions):
            completion.advantage = float(is_above and place == best)


@dataclass
class StepContext:
    """The parts that compute a run's steps; `RunContext` adds the leader's. `steps`: the length of the run.
    `waiting_learner`: the learner of the run's mode during a warm-up; `warmup_end`: the last step of a finished one.
    `exact_rollout`: samples evaluations where `rollout` is quantised."""

    policy: Policy
    learner: Learner
    rollout: Sampler
    scoring: ScoringStages
    sampling: Sampling
    steps: int
    waiting_learner: Learner | None = field(default=None, kw_only=True)
    warmup_end: int = field(default=0, kw_only=True)
    exact_rollout: Sampler | None = field(default=None, kw_only=True)

    @property
    def samplers(self) -> list[Sampler]:
        return [self.rollout, *([self.exact_rollout] if self.exact_rollout else [])]

    def steps_of(self, config: Config) -> int:
        return self.steps if config.epochs or config.stages else config.iters

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        """Apply the settings of `config` from `step` on; `keys` names those that differ from before."""
        self.policy.use_reference(config)
        self.scoring.change(config, self.steps_of(config))
        self.steps = self.scoring.steps
        self.sampling = Sampling.of(config)
        for sampler in self.samplers:
            sampler.max_tokens = config.max_completion_length
        self.change_learners(config, keys)

    def change_learners(self, config: Config, keys: Collection[str] = ()) -> None:
        own = self.waiting_learner
        (own or self.learner).change(config, self.steps - self.warmup_end, keys)
        if own is not None:
            self.learner.change(warmup_settings(config), self.steps, keys)

    def learn(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        metrics = self.learner.learn(self._packed(groups, config, self.learner), poll)
        mx.synchronize()  # raises what has failed of this step on the GPU, before the step counts
        release_cached_buffers()
        names = {} if self.waiting_learner is None else WARMUP_METRICS
        return {names.get(name, name): value for name, value in metrics.items()}

    def held_out_metrics(self, groups: list[Group], config: Config, poll: Callable[[], None]) -> dict[str, float]:
        learner = self.waiting_learner or self.learner
        return learner.held_out_metrics(self._packed(groups, config, learner), poll)

    def _packed(self, groups: list[Group], config: Config, learner: Learner) -> Batch:
        for group in groups:  # labels, and what other ranks have sampled
            if group.images is None:
                (group.images,) = self.policy.images_of([group.problem])
        # A cut label is imitated all the same.
        samples = learner.algorithm.of_sampler or config.sft_targets == "best_of_n"
        is_masked = config.mask_truncated_completions and samples
        return pack(groups, pad_id=self.policy.pad_id, mask_truncated_completions=is_masked)

    def step_size(self, config: Config) -> StepSize:
        forward, every_row = self.learner.forward, config.prompts_per_step * config.group_size
        # The largest that there was, where the budget was never used up: half of the budget would change nothing then.
        tokens = min(forward.micro_batch_tokens, forward.largest_micro_batch or forward.micro_batch_tokens)
        return StepSize(tokens, min(self.rollout.rows or every_row, every_row))

    def rest(self) -> None:
        mx.clear_cache()

    def close(self) -> None:
        if self.rollout.tools is not None:
            self.rollout.tools.host.close()
        self.scoring.scorer.close()


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """The trainer's side of sampling and scoring a step. `poll` takes the phase and the share of it that is done, if
    known, and may raise to stop. `report` takes the phase during a wait. `groups`: sampled so far."""

    timer: StepTimer
    poll: Callable[[str, float | None], None]
    report: Callable[[str], None]
    groups: list[Group] = field(default_factory=list[Group])


@dataclass
class RunContext(StepContext):
    """All parts of one run. `evaluation_sets`: the prompts of the valid split under "", and of `eval_data` by name.
    `longest_prompts`: tokens of the longest prompt of each set, up to `images` of them of images. `slow_paths`: a
    sentence for each part that does not take its fastest path. `dtype`: the type that `dtype: auto` chose. `stages`:
    (settings, training rows, prompts) of each stage; stages with the same rows and format share prompts."""

    prompt_stream: PromptStream
    background_tokenizer: BackgroundTokenizer
    evaluation_sets: dict[str, list[Problem]]
    test: list[Problem]
    stages: list[tuple[Mapping[str, Any], Rows, TokenizedPrompts]]
    longest_prompts: list[int]
    images: int
    slow_paths: list[str]
    dtype: str

    def begin(self) -> None:
        """Called before the first step, once the initial state is in place."""

    def take_back(self) -> None:
        """Restore the weights before the updates of the step in flight, where they were kept."""

    def of_ranks(self) -> dict[str, Any]:
        return {"ranks": 1}

    def new_notes(self) -> list[str]:
        of_samplers = [note for sampler in self.samplers for note in sampler.new_notes()]
        return [*self.background_tokenizer.new_notes(), *of_samplers, *self.scoring.new_notes()]

    def change(self, config: Config, keys: Collection[str], step: int) -> None:
        super().change(config, keys, step)
        self.begin_stage(step)
        if self.prompt_stream.pass_rates is not None:
            self.prompt_stream.pass_rates.group_size = config.group_size

    def begin_stage(self, step: int) -> None:
        if self.stages:
            present = self.prompt_stream.problems
            _, rows, prompts = self.stages[stage_at([settings for settings, *_ in self.stages], step)]
            if prompts is not present:
                before = next(own for _, own, each in self.stages if each is present)
                self.prompt_stream.go_on_with(prompts, are_same_rows=rows is before)

    def reads_labels(self, step: int, config: Config) -> bool:
        """True if the step imitates the labels of its rows. In all others the policy writes the completions."""
        return config.sft_targets == "dataset" and (config.imitates or self.warms_up(step))

    def warms_up(self, step: int) -> bool:
        """True if the step is one of the supervised warm-up: the next one, or one that is done."""
        return self.waiting_learner is not None or step <= self.warmup_end

    def end_warmup(self, step: int, config: Config) -> None:
        assert self.waiting_learner is not None
        self.learner, self.waiting_learner, self.warmup_end = self.waiting_learner, None, step
        self.change_learners(config)
        release_cached_buffers()

    def collect_groups(self, step: int, config: Config, work: SamplingContext) -> CollectMetrics:
        """Fill `work.groups` with the step's groups, advantages included."""
        if not self.reads_labels(step, config):
            metrics, logged = self.sampled_groups(step, config, work)
            if config.imitates or self.warms_up(step):  # the policy's own best completions
                keep_best(work.groups)
                metrics[PASS_RATE] = pass_rate(work.groups, config)
            return metrics, logged
        position, metrics = self.prompt_stream.cursor, dict[str, float]()
        problems = self.prompt_stream.take(config.prompts_per_step)
        if not config.imitates:
            if config.warmup_pass_rate > 0 and step % MEASURED_EVERY == 1:
                sampled = replace(work, groups=[])
                self.sample_and_score(problems, position, step, config, sampled)
                metrics[PASS_RATE] = pass_rate(sampled.groups, config)
            limits = self.policy.tokenizer, self.prompt_format(config, labelled=True), config.max_completion_length
            problems = [with_label(problem, *limits) for problem in problems]
        work.groups.extend(map(labelled_group, problems))
        return metrics, {}

    def sampled_groups(self, step: int, config: Config, work: SamplingContext) -> CollectMetrics:
        """Sample and score the groups of the step's prompts. Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11) replaces
        groups whose completions all have the same reward by groups of new prompts, in at most `dynamic_sampling_rounds`
        rounds; those still missing are filled from those set aside, so that the step's size never varies."""
        count, dynamic = config.prompts_per_step, config.dynamic_sampling and config.learns_from_rewards
        kept, without_gradient, logged = list[Group](), list[Group](), dict[str, float]()
        speculation = self.rollout.speculation
        counts = speculation.counts.copy() if speculation is not None else None
        for _ in range(config.dynamic_sampling_rounds if dynamic else 1):
            position = self.prompt_stream.cursor  # with the seed, it fixes the random numbers of these completions
            problems, already = self.prompt_stream.take(count - len(kept)), len(work.groups)
            logged = self.sample_and_score(problems, position, step, config, work)
            for group in work.groups[already:]:
                if dynamic:
                    self.scoring.fill_advantages([group], step)
                has_gradient = not dynamic or any(completion.advantage for completion in group.completions)
                (kept if has_gradient else without_gradient).append(group)
            if len(kept) == count:
                break
        sampled = kept + without_gradient
        tokens = sum(completion.trained_tokens for group in sampled for completion in group.completions)
        metrics = {"rollout_tokens_per_second": work.timer.rate(tokens, "rollout")}
        if dynamic:
            metrics["dynamic_sampling/prompts"] = len(sampled)
        if speculation is not None and counts is not None:
            metrics |= speculation.metrics(counts)
        if self.prompt_stream.pass_rates is not None:
            metrics |= self.prompt_stream.pass_rates.observe(sampled)
        work.groups[:] = sampled[:count]
        if config.self_distillation_weight:
            metrics |= add_teacher_prompts(work.groups, config, self.policy.tokenizer, self.prompt_format(config))
        return metrics | self.scoring.fill_advantages(work.groups, step), logged

    def prompt_format(self, config: Config, *, labelled: bool = False) -> PromptFormat:
        tools = self.rollout.tools
        return PromptFormat.of(config, tools.host.schemas if tools else NO_TOOLS, labelled=labelled)

    def sample_and_score(
        self, problems: list[Problem], position: int, step: int, config: Config, work: SamplingContext
    ) -> dict[str, float]:
        """Append scored groups to `work.groups`; `position`: the first one's number. → metrics that were logged."""
        most_tokens = len(problems) * config.group_size * config.max_completion_length
        with work.timer.phase("rollout"):
            vocabulary = self.policy.split_model.vocab_size
            groups = [
                run_inputs.recorded_group(problem, config, vocabulary) for problem in problems if problem.recorded
            ]
            groups = groups or self.rollout.sample(
                problems,
                config.group_size,
                self.sampling,
                config.seed,
                position,
                lambda tokens: work.poll("sampling", tokens / most_tokens),
                self.scoring.finished(step),
            )
        work.groups.extend(groups)
        check_sampled(groups)
        with work.timer.phase("reward"):
            work.poll("scoring", None)
            logged = self.scoring.score(groups, step, self.prompt_stream.epoch, lambda: work.report("scoring"))
            check_scores(groups)
            work.poll("scoring", None)  # a command that came while the functions ran
        return logged

    def evaluate(self, split: str, step: int, config: Config, poll: Callable[[float], None]) -> dict[str, float]:
        """Metrics of the split "test"; or of the valid split and, under names such as `gsm8k/reward`, of the sets of
        `eval_data`. Without a valid split the first of these has the plain names too, which early stopping reads."""
        if split == "test":
            return self.held_out(self.test, config.test_batches, step, config, poll)
        total, before = sum(map(len, self.evaluation_sets.values())), 0
        found: dict[str, float] = {}
        for name, problems in self.evaluation_sets.items():

            def report(done: float, before: int = before, count: int = len(problems)) -> None:
                poll((before + done * count) / total)

            measured = self.held_out(problems, config.val_batches, step, config, report)
            if not name or not found:
                found |= measured
            if name:
                found |= {f"{name}/{key}": value for key, value in measured.items()}
            before += len(problems)
        return found

    def held_out(
        self, problems: list[Problem], count: int, step: int, config: Config, poll: Callable[[float], None]
    ) -> dict[str, float]:
        """Held-out rewards over the first `count` batches (−1: all) of `problems`, with entropy and KL of some
        completions; under supervised fine-tuning the loss of their labels."""
        stage = self.scoring.stage(step)
        chosen = problems if count < 0 else problems[: count * config.prompts_per_evaluation_batch]
        loss = dict[str, float]()
        if config.learns_labels:
            loss = self.held_out_metrics([*map(labelled_group, chosen)], config, lambda: poll(0.0))
            chosen = [problem for problem in chosen if len(problem.tokens) <= config.prompt_limit]
            if not (stage.names and chosen):
                return loss
        groups = self.held_out_groups(chosen, step, config, poll)
        measured = loss or self.held_out_metrics(sample_of(groups), config, lambda: poll(1.0))
        return evaluation_metrics(groups, stage.names, stage.weights.at(step)) | measured

    def held_out_groups(
        self, problems: list[Problem], step: int, config: Config, poll: Callable[[float], None]
    ) -> list[Group]:
        finished = self.scoring.finished(step)
        return scored_groups(
            self.exact_rollout or self.rollout,
            problems,
            lambda groups, poll: self.scoring.score(groups, step, self.prompt_stream.epoch, poll),
            sampling=self.sampling,
            group_size=config.num_generations_eval or config.group_size,
            batch_size=config.prompts_per_evaluation_batch,
            poll=poll,
            # Reward functions that use mlx would share the device and its memory with sampling. A judge may pause the
            # run, and has begun by itself.
            overlap_scoring=not self.scoring.uses_mlx and finished is None,
            finished=finished,
        )

    def close(self) -> None:
        self.background_tokenizer.close()
        super().close()

    def restore(self, saved: Checkpoint, config: Config, note: Note) -> None:
        """Bring everything to the state of a checkpoint. Raises DamagedCheckpoint for another model's arrays."""
        state = saved.state
        if self.waiting_learner is not None and state.warmup_end is not None:
            self.end_warmup(state.warmup_end, config)
        try:
            self.policy.assign(arrays_of(saved, "weights"))
            optimizer = arrays_of(saved, "optimizer") if saved.has("optimizer") else None
            self.learner.restore(optimizer, state.updates, state.bonus)
        except ValueError as error:
            raise DamagedCheckpoint(saved.path, str(error).rstrip(".")) from error
        self.scoring.restore(state.reward_weights)
        self.begin_stage(state.step)
        self.prompt_stream.cursor, self.prompt_stream.first = state.cursor, state.stream_first
        if self.prompt_stream.pass_rates is not None:
            try:
                self.prompt_stream.pass_rates.restore(arrays_of(saved, "pass_rates") if saved.has("pass_rates") else {})
            except (KeyError, ValueError):  # a checkpoint of an earlier version, or with other data
                note(f"The checkpoint of step {saved.step} has no pass rates of these rows, so they are learned again.")
        if not saved.has("optimizer") and state.updates:
            note(
                f"The checkpoint of step {state.step} has no optimizer state (Save weights only), so the optimizer "
                "starts again: the run continues a little differently than it would have without the break."
            )
        if saved.has("reference"):
            self.policy.restore_reference(arrays_of(saved, "reference"))


class Engine:
    """Loads the model of a run and builds what computes with it. `own`: optimizer and schedule of the program."""

    def __init__(self, own: OwnUpdates = SETTINGS_DECIDE, sampler: Callable[..., Sampler] = Sampler) -> None:
        self.own, self.sampler = own, sampler

    def load(self, config: Config, note: Note, base: Base | None = None) -> Policy:
        policy = load_policy(config, note, base)
        load_teacher(policy, config, base)
        return policy

    def build(
        self, policy: Policy, config: Config, steps: int, of_learner: dict[str, Any], of_rollout: dict[str, Any]
    ) -> tuple[Learner, Sampler]:
        """Learner and sampler with the memory plan's limits as keywords."""
        learner = build_learner(policy, config, steps, own=self.own, **of_learner)
        return learner, self.sampler(policy, config.max_completion_length, stop=config.stop, **of_rollout)


def step_parts(
    policy: Policy,
    config: Config,
    scorer: Scorer,
    steps: int,
    longest_prompts: Iterable[int],
    note: Note,
    *,
    most: StepSize = WHOLE_STEP,
    stages: Sequence[Config] = (),
    engine: Engine | None = None,
    tools: ToolHost | None = None,
    images: int = 0,
) -> dict[str, Any]:
    """The fields of `StepContext` around a loaded policy, for a run of `steps` steps and prompts of these lengths in
    tokens, up to `images` of them of images. The rest is as in `load_context`. Raises UserError."""
    scoring = ScoringStages(config, scorer, steps)
    limits = plan_limits(plan_memory(config, policy, longest_prompts, note, stages, images), most)
    learner, rollout = (engine or Engine()).build(policy, config, scoring.steps, *limits)
    rollout.tools = Tools.of(config, tools, policy.tokenizer)
    exact_rollout = None
    if config.rollout_quantization != "none" and not config.learns_labels:  # which samples for evaluations alone
        exact_rollout, sampled = rollout, QuantizedRollouts(policy, config)
        rollout = Sampler(sampled, config.max_completion_length, stop=config.stop, tools=rollout.tools, **limits[1])
    rollout.speculation = speculation_of(config, policy, rollout, note)
    waiting = None
    if config.warms_up:  # an optimizer's state takes no memory before its first update
        waiting, learner = learner, build_learner(policy, warmup_settings(config), scoring.steps, **limits[0])
    return {
        "policy": policy,
        "learner": learner,
        "waiting_learner": waiting,
        "rollout": rollout,
        "exact_rollout": exact_rollout,
        "scoring": scoring,
        "sampling": Sampling.of(config),
        "steps": scoring.steps,
    }


@dataclass(slots=True)
class SharedResources:
    """Shared by the runs of a sweep: the base model, its type, and prompts of the same rows."""

    base: Base | None
    dtype: tuple[str, str] | None = None  # as `dtype_here`; None where a run may choose
    prompts: list[TokenizedPrompts] = field(default_factory=list)

    def tokenized(self, rows: Rows, tokenizer: Any, prompt_format: PromptFormat, source: str) -> TokenizedPrompts:
        for prompts in self.prompts:
            if prompts.are_of(rows, prompt_format):
                return prompts
        self.prompts.append(tokenized(rows, tokenizer, prompt_format, source))
        return self.prompts[-1]


def load_context(
    config: Config,
    note: Note,
    inputs: RunInputs | None = None,
    most: StepSize = WHOLE_STEP,
    shared: SharedResources | None = None,
    stages: Sequence[Config] = (),
    engine: Engine | None = None,
    make: Callable[..., RunContext] = RunContext,
) -> RunContext:
    """Build what a run computes with. Raises UserError for settings or files that cannot be used. `inputs`: the result
    of `preflight`, else they are read now. `most`: the step size that GPU errors have left. `stages`: the settings of
    each stage. `make`: the class of the result, which takes the fields of `RunContext`."""
    inputs, stages = inputs or run_inputs.read_inputs(config), stages or stage_configs(config)
    sets = run_inputs.prompt_sets(config, inputs, stages)
    for each in sets:
        each.check()  # a resumed run's dataset may have changed, and the model takes long to load
    run_inputs.check_held_out(inputs.splits, config)
    engine = engine or Engine()
    device.use(config.device)
    refuse_too_large(config, stages)
    dtype, sentence = (shared and shared.dtype) or dtype_here(stages)
    if sentence:
        note(sentence)
    policy = engine.load(config.model_copy(update={"dtype": dtype}), note, shared.base if shared else None)
    prompts, of_stages = dict[str, TokenizedPrompts](), list[TokenizedPrompts]()
    counts_rows = config.epochs > 0 and not config.stages  # the length of the run is the number of rows that fit
    for each in sets:
        found = (known for known in of_stages if known.are_of(each.rows, each.format))
        if (made := next(found, None) if each.stage else None) is None:
            make_prompts = shared.tokenized if shared else tokenized
            made = each.tokenize(policy.tokenizer, make_prompts, all_rows=counts_rows and each.name == "train")
            prompts[each.name] = made
        if each.stage:
            of_stages.append(made)
    training = of_stages[0] if config.stages else prompts["train"]
    steps = -(-config.epochs * training.fitting // config.prompts_per_step) if counts_rows else config.iters
    if isinstance(training, run_inputs.RecordedRows):
        config, sentence = run_inputs.off_policy(config, steps * config.prompts_per_step / len(training))
        note(sentence)
    count = config.val_batches * config.prompts_per_evaluation_batch
    named = ["valid", *inputs.splits.evals] if count else []
    evaluation_sets = {"" if name == "valid" else name: prompts[name].first(count) for name in named if name in prompts}
    count = config.test_batches * config.prompts_per_evaluation_batch
    test = prompts["test"].first(count) if "test" in prompts else []
    background_tokenizer = BackgroundTokenizer(prompts)
    for sentence in [*inputs.splits.notes, *background_tokenizer.new_notes()]:
        note(sentence)
    longest = [each.longest for each in prompts.values()]
    images = image_tokens(policy.tokenizer, training.first(8), max(longest))
    limits = {"most": most, "stages": stages, "engine": engine, "tools": inputs.tools, "images": images}
    parts = step_parts(policy, config, inputs.scorer, steps, longest, note, **limits)
    pass_rates = None
    if config.prompt_selection != "shuffled" and not config.imitates:
        share, solved_from = config.selection_uniform_share, config.success_reward_threshold
        pass_rates = PassRates(training.characters, data_seed(config), config.group_size, share, solved_from)
    return make(
        **parts,
        prompt_stream=PromptStream(training, data_seed(config), pass_rates=pass_rates),
        background_tokenizer=background_tokenizer,
        evaluation_sets=evaluation_sets,
        test=test,
        stages=list(zip(config.stages, [rows for rows, _ in inputs.stages], of_stages, strict=True)),
        longest_prompts=longest,
        images=images,
        slow_paths=list(dict.fromkeys([*policy.split_model.slow_paths, *parts["rollout"].slow_paths])),
        dtype=dtype,
    )


LoadContext = Callable[[Config, Note, RunInputs | None, StepSize, SharedResources | None, Sequence[Config]], RunContext]
