"""The inputs that a run reads before its model: the dataset's rows and the reward functions.

Read once a process: `preflight` checks them and passes them on to `load_context`. A reward file is a user's program;
running it a second time would repeat its side effects (a judge model loaded twice, a log file begun twice).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.config.config import Config
from backend.config.stages import fault_of_stage, stage_rows
from backend.data.problems import PromptFormat, check_prompts
from backend.data.prompts import TokenizedPrompts, measure_first_rows
from backend.data.rows import EvaluationRows, Rows, Splits, check_columns, read_splits
from backend.rewards.scorer import Scorer, SharedProcesses, begin_scorer
from backend.runs.checkpoints.checkpoint_score import check_metric
from backend.types import Problem
from backend.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class StageRows:
    """Training rows, and the file or split that they came from. Stages with the same rows have the same list of them."""

    rows: Rows
    source: str


@dataclass(frozen=True, slots=True)
class RunInputs:
    splits: Splits
    scorer: Scorer
    """The reward functions, loaded."""
    stages: tuple[StageRows, ...] = ()
    """The training rows of each stage; none where the run has no stages."""


def read_inputs(config: Config, processes: SharedProcesses | None = None) -> RunInputs:
    """Read the dataset while the reward functions' process starts, and load them. `processes`: those that are shared with other runs.
    Raises UserError for either."""
    scorer = begin_scorer(config, processes)
    try:
        splits = read_rows(config, scorer)
        stages = read_stages(config, splits, scorer)
        scorer.load()
    except BaseException:
        scorer.close()
        raise
    return RunInputs(splits, scorer, stages)


def read_rows(config: Config, scorer: Scorer) -> Splits:
    """The rows of a run, or of a stage with a dataset of its own; their map function is called where the reward functions are. Raises
    UserError."""
    return read_splits(config, scorer.map_rows)


def read_stages(config: Config, splits: Splits, scorer: Scorer) -> tuple[StageRows, ...]:
    """The training rows of each stage; `splits`: the run's own. Raises UserError, naming the stage."""
    values, read = config.model_dump(), dict[str, StageRows]()
    own = StageRows(splits.train, splits.source.get("train", config.data))
    stages: list[StageRows] = []
    for index in range(len(config.stages)):
        of_stage = stage_rows(values, index)
        key = repr(sorted(of_stage.items()))
        if of_stage and key not in read:
            try:
                found = read_rows(config.model_copy(update=of_stage), scorer)
            except UserError as mistake:
                raise stage_mistake(index, mistake) from None
            read[key] = StageRows(found.train, found.source.get("train", str(of_stage.get("data", config.data))))
        stages.append(read[key] if of_stage else own)
    return tuple(stages)


def stage_mistake(index: int, mistake: UserError) -> UserError:
    """The faults of a stage's rows, as faults of the stages."""
    return UserError([fault_of_stage(index + 1, fault.sentence) for fault in mistake.faults])


MakePrompts = Callable[[Rows, Any, PromptFormat, str], TokenizedPrompts]
Measure = Callable[[list[Problem], Callable[[float], None]], dict[str, float]]
"""(prompts, called with the share that is done) → metrics."""


@dataclass(slots=True)
class EvaluationSets:
    """The prompts of each."""

    valid: list[Problem]
    named: dict[str, list[Problem]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.valid or self.named)

    def metrics(self, measure: Measure, poll: Callable[[float], None]) -> dict[str, float]:
        """The metrics of one evaluation. `poll` is called with the share of all prompts that is done."""
        sets = {"": self.valid, **self.named} if self.valid else self.named
        total, before = sum(map(len, sets.values())), 0
        found: dict[str, float] = {}
        for name, problems in sets.items():
            start, share = before / total, len(problems) / total

            def part(done: float, start: float = start, share: float = share) -> None:
                poll(start + share * done)

            measured = measure(problems, part)
            if not name or not found:
                found |= measured
            if name:
                found |= {f"{name}/{key}": value for key, value in measured.items()}
            before += len(problems)
        return found


def held_out_settings(config: Config, stages: Sequence[Config]) -> Config:
    """The settings by which held-out rows are checked and their prompts chosen. `stages`: the settings of each.

    The rows are the same in every stage: the longest completions decide which prompts fit, and the functions of all stages score them.
    """
    if not config.stages:
        return config
    functions = dict.fromkeys(name for stage in stages for name in stage.reward_functions)
    longest = max(stage.max_completion_length for stage in stages)
    return config.model_copy(update={"max_completion_length": longest, "reward_functions": list(functions)})


def named_prompts(splits: Splits, tokenizer: Any, config: Config, make: MakePrompts) -> dict[str, TokenizedPrompts]:
    """The prompts of each named set, the first rows tokenised. Raises UserError for a set without the columns, or without a prompt that
    fits."""
    if not config.steps_per_eval:
        return {}
    prompts: dict[str, TokenizedPrompts] = {}
    for name, each in splits.evals.items():
        own = _checked(name, each, config)
        prompts[name] = make(each.rows, tokenizer, PromptFormat.of(own), each.source)
        measure_first_rows(prompts[name], name)
        prompts[name].measure(prompts[name].longest_texts())
    return prompts


def check_held_out(splits: Splits, config: Config) -> None:
    """Raises UserError for a test split, or a metric of held-out rows, that the settings ask for and the rows have not."""
    if config.test and not splits.test:
        raise UserError("test", f"Evaluate test split is on, and {config.data} has no split {config.test_split}.")
    check_metric(config, has_held_out=bool(splits.valid or splits.evals))


def check_evaluation_sets(splits: Splits, config: Config, tokenizer: Any) -> None:
    """Raises the UserError of `named_prompts`; without a tokenizer as far as it shows."""
    if not config.steps_per_eval:
        return
    for name, each in splits.evals.items():
        own = _checked(name, each, config)
        if tokenizer is not None:
            check_prompts(each.rows, tokenizer, PromptFormat.of(own), each.source)


def _checked(name: str, rows: EvaluationRows, config: Config) -> Config:
    """The settings of a set. Raises UserError for columns that it lacks."""
    own = config.model_copy(update=rows.settings)
    if faults := check_columns(rows.rows, own, rows.source):
        raise UserError("eval_data", f"{name}: {faults[0].sentence}"[:200])
    return own
