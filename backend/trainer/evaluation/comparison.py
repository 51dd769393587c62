"""Evaluate a model on a split: sample, score, and compare the run's model before training with the one at a checkpoint.

One model is loaded. Fresh adapters change nothing, and a full fine-tuning starts from the base's weights, so the base comes first and
then the checkpoint's arrays are put in place: there is never a second model in memory. Both sides get the same prompts and the same
random numbers, so a difference comes from the weights. Every completion is scored once, by the run's own functions and weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.config.config import Config
from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts
from backend.data.row_views import Rows
from backend.data.rows import SPLITS, Splits, check_columns
from backend.models.policy import Policy, load_policy
from backend.runs.completion_rows import CompletionRow
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.evaluation.evaluate import EVAL_SEED, scored_groups
from backend.trainer.evaluation.evaluated_model import EvaluatedModel
from backend.trainer.evaluation.evaluation_figures import (
    Completions,
    Results,
    decoding_figures,
    powers_of_two,
    row_results,
)
from backend.trainer.evaluation.evaluation_rows import (
    Data,
    Decoding,
    DecodingName,
    EvaluatedRow,
    Evaluation,
    PassRule,
    RewardFunctionUsed,
    SideName,
    default_pass_rule,
    read_pass_rule,
)
from backend.trainer.machine.memory_plan import plan_memory, rollout_limits
from backend.trainer.run_inputs import read_inputs
from backend.trainer.scoring_stages import ScoringStages
from backend.trainer.telemetry import completion_row, versions
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from backend.utils.text import quote

PROMPTS_AT_ONCE = 32
"""Prompts that are sampled together. More keep decoding full for longer; the memory plan is made for as many."""


@dataclass(frozen=True, slots=True)
class EvaluationChoices:
    """What the user may choose about an evaluation."""

    split: str = "test"
    decodings: tuple[DecodingName, ...] = ("greedy", "sampled")
    completions: int = 4
    """Completions of each prompt where they are sampled."""
    ks: tuple[int, ...] = ()
    """The k of pass@k; () for 1, 2, 4 … up to `completions`."""
    limit: int = -1
    """Prompts; −1 for all."""
    base_only: bool = False
    seed: int = EVAL_SEED
    passing: str = ""
    """What passes, as `read_pass_rule` reads it; "" for the default."""

    def count(self, decoding: DecodingName) -> int:
        return 1 if decoding == "greedy" else self.completions

    def ks_of(self, decoding: DecodingName) -> list[int]:
        count = self.count(decoding)
        return sorted({k for k in self.ks or powers_of_two(count) if k <= count} | {1})


@dataclass(frozen=True, slots=True)
class EvaluationProgress:
    """Where an evaluation is. `done` is the share of all completions, `left_s` the seconds that the rest will take; None while
    nothing is known of it."""

    phase: str
    done: float | None = None
    left_s: float | None = None


Report = Callable[[EvaluationProgress], None]


def evaluate_model(
    evaluated: EvaluatedModel,
    choices: EvaluationChoices,
    name: str,
    report: Report = lambda progress: None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Evaluation, list[EvaluatedRow]]:
    """Run an evaluation; nothing is written. `check` is called often and may raise to stop. Raises UserError."""
    began, created, notes = time.perf_counter(), time.time(), list[str]()
    config = evaluated.config
    report(EvaluationProgress("Reading the dataset"))
    inputs = read_inputs(config)
    notes += inputs.splits.notes
    rows, source, of_rows = _rows(inputs.splits, choices.split, config)
    scoring = _scoring(evaluated, ScoringStages(config, inputs.scorer, evaluated.steps))
    rule = _pass_rule(evaluated, choices, scoring, notes)
    check()
    report(EvaluationProgress("Loading the model"))
    policy = load_policy(config, notes.append)
    check()
    prompts = TokenizedPrompts(rows, policy.tokenizer, PromptFormat.of(of_rows), source)
    problems = prompts.first(choices.limit)
    if not problems:
        raise UserError("max_seq_length", f"Every prompt of {source} leaves no room for a completion within Max Seq.")
    rollout = _rollout(config, choices, policy, problems, notes)
    results = _Sampler(evaluated, choices, rollout, scoring, problems, report, check).sample_sides(policy)
    scoring.close()
    stage = scoring.stage(evaluated.step)
    weights = dict(zip(stage.names, stage.weights.at(evaluated.step), strict=True))
    row_list = row_results(problems, results)
    evaluation = Evaluation(
        name=name,
        created=created,
        seconds=time.perf_counter() - began,
        device=str(mx.default_device()),
        versions=versions(),
        subject=evaluated.subject(),
        data=Data(
            dataset=of_rows.data, split=choices.split, source=source, rows=len(problems), rows_in_split=len(rows),
            too_long=prompts.too_long,
        ),
        functions=[RewardFunctionUsed(name=name, weight=weight) for name, weight in weights.items()],
        pass_rule=rule,
        max_completion_length=config.max_completion_length,
        seed=choices.seed,
        decodings=[_decoding(decoding, results, row_list, rule, evaluated, choices) for decoding in choices.decodings],
        notes=list(dict.fromkeys([*notes, *scoring.notes(), *rollout.new_notes(), *rollout.slow_paths])),
    )  # fmt: skip
    return evaluation, row_list


def _decoding(
    name: DecodingName,
    results: Results,
    rows: list[EvaluatedRow],
    rule: PassRule | None,
    evaluated: EvaluatedModel,
    choices: EvaluationChoices,
) -> Decoding:
    sampling = _sampling(name, evaluated.config)
    return Decoding(
        name=name,
        completions=choices.count(name),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        **decoding_figures(name, results[name], rows, rule, choices.ks_of(name)),
    )


def sides_of(evaluated: EvaluatedModel, choices: EvaluationChoices) -> list[SideName]:
    if evaluated.run is None:
        return ["model"]
    return ["base"] if choices.base_only else ["base", "tuned"]


# ── before sampling ──────────────────────────────────────────────────────────────────────────────────────────────────


def _rows(splits: Splits, split: str, config: Config) -> tuple[Rows, str, Config]:
    """(rows of the split or of a named evaluation set, their source, the settings that they are read with). Raises UserError for a split
    without rows or columns."""
    if split in splits.evals:
        named = splits.evals[split]
        rows, source, config = named.rows, named.source, config.model_copy(update=named.settings)
    elif split in SPLITS:
        rows, source = splits.rows(split), splits.source.get(split, config.data)
    else:
        known = ", ".join([*SPLITS, *splits.evals])
        raise UserError("split", f"There is no split {quote(split, 40)}; there are {quote(known, 100)}.")
    if not rows:
        ways = {
            "test": "put a test file into the dataset's folder, or name the split that is to serve in Test split",
            "valid": "put a valid file into the dataset's folder, name a split in Valid split, or hold rows of the training "
            "split out with Validation share",
        }
        others = [f"--split {name}" for name in SPLITS if splits.rows(name) and name != "train"]
        instead = f", or evaluate {' or '.join(others)}" if others else ""
        raise UserError(f"{split}_split", f"{config.data} has no {split} split: {ways[split]}{instead}.")
    if faults := check_columns(rows, config, source):
        raise UserError(faults)
    return rows, source, config


def _scoring(evaluated: EvaluatedModel, scoring: ScoringStages) -> ScoringStages:
    # Another config may have other stages than the run.
    if evaluated.checkpoint is not None and len(evaluated.checkpoint.state.reward_weights) == len(scoring.stages):
        scoring.restore(evaluated.checkpoint.state.reward_weights)  # of adaptive weights, those of the checkpoint
    return scoring


def _pass_rule(
    evaluated: EvaluatedModel, choices: EvaluationChoices, scoring: ScoringStages, notes: list[str]
) -> PassRule | None:
    """What passes: the user's choice, else the default with its sentence in `notes`. Raises UserError."""
    config, number = evaluated.config, scoring.stages.index(scoring.stage(evaluated.step))
    of_stage = config.stages[number].get("reward_functions") if config.stages else None
    entries = of_stage or config.reward_functions
    if choices.passing:
        return read_pass_rule(choices.passing, entries)
    rule = default_pass_rule(entries)
    if rule is None:
        notes.append(
            "No reward function here is known to say what is right, so there is no pass@k; choose one with --pass."
        )
    return rule


def _rollout(
    config: Config, choices: EvaluationChoices, policy: Policy, problems: Sequence[Problem], notes: list[str]
) -> Sampler:
    """A rollout within the memory estimate of a step of this evaluation's size."""
    most = max(map(choices.count, choices.decodings))
    step = {"batch_size": min(PROMPTS_AT_ONCE, len(problems)), "gradient_accumulation_steps": 1}
    settings = config.model_copy(update=step | {"steps_per_generation": 1, "group_size": most})
    plan = plan_memory(settings, policy, [len(problem.tokens) for problem in problems], notes.append)
    return Sampler(policy, config.max_completion_length, stop=config.stop, **rollout_limits(plan))


# ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Sampler:
    """Samples and scores every side under every decoding, and reports how far it is."""

    def __init__(
        self,
        evaluated: EvaluatedModel,
        choices: EvaluationChoices,
        rollout: Sampler,
        scoring: ScoringStages,
        problems: list[Problem],
        report: Report,
        check: Callable[[], None],
    ) -> None:
        self.evaluated, self.choices, self.rollout, self.scoring = evaluated, choices, rollout, scoring
        self.problems, self.report, self.check = problems, report, check
        scoring.poll = check  # no reward function keeps an evaluation from stopping
        self.sides = sides_of(evaluated, choices)
        self._began = time.perf_counter()
        self._done = 0.0
        """Share of all completions that earlier passes have sampled."""

    def sample_sides(self, policy: Policy) -> Results:
        """The completions of every side under every decoding. The policy is the base at first."""
        results: Results = {name: {} for name in self.choices.decodings}
        for side in self.sides:
            if side == "tuned":
                _restore(policy, self.evaluated)
            for decoding in self.choices.decodings:
                began = time.perf_counter()
                groups = self._sample(decoding, side)
                rows = [[_row(item) for item in group.completions] for group in groups]
                results[decoding][side] = Completions(rows, time.perf_counter() - began)
        return results

    def _sample(self, decoding: DecodingName, side: SideName) -> list[Group]:
        count = self.choices.count(decoding)
        share = count / (len(self.sides) * sum(map(self.choices.count, self.choices.decodings)))
        phase = f"Sampling the {side if side == 'model' else f'{side} model'}, {decoding}"

        def poll(done: float) -> None:
            self.check()
            whole = self._done + share * done
            elapsed = time.perf_counter() - self._began
            self.report(EvaluationProgress(phase, whole, elapsed / whole * (1 - whole) if whole else None))

        poll(0.0)
        groups = scored_groups(
            self.rollout,
            self.problems,
            lambda groups, poll: self.scoring.score(groups, self.evaluated.step, poll=poll),
            sampling=_sampling(decoding, self.evaluated.config),
            group_size=count,
            batch_size=PROMPTS_AT_ONCE,
            seed=self.choices.seed,
            poll=poll,
            overlap_scoring=not self.scoring.uses_mlx,
        )
        mx.synchronize()  # raises what has failed on the GPU, before the figures count
        self._done += share
        return groups


def _row(completion: Completion) -> CompletionRow:
    row = completion_row(completion)
    row.pop("advantage", None)  # nothing was compared with its group
    return row


def _sampling(decoding: DecodingName, config: Config) -> Sampling:
    if decoding == "greedy":
        return Sampling.greedy(config)
    return Sampling.of(config)


def _restore(policy: Policy, evaluated: EvaluatedModel) -> None:
    """Put the checkpoint's arrays into the policy, in place of those before training. Raises UserError where they are not its own."""
    assert evaluated.checkpoint is not None and evaluated.run is not None
    try:
        policy.assign(evaluated.checkpoint.weights())
    except ValueError:
        raise UserError(
            "checkpoint",
            f"The weights in {evaluated.checkpoint.path} do not fit the model {evaluated.config.model}: it is not the one that the "
            f"run {evaluated.run.name} trained.",
        ) from None
    mx.eval(policy.arrays())
