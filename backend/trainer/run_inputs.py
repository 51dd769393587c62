"""What a run reads before its model, once a process: the rows of its dataset, its reward functions, and the prompts
made of the rows. `preflight` hands them to `load_context`: running a user's reward file twice would repeat its
effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.config.config import Config
from backend.config.stages import Stages, fault_of_stage, stage_at, stage_rows
from backend.data.problems import PromptFormat, check_prompts
from backend.data.prompts import PromptStream, TokenizedPrompts, measure_first_rows
from backend.data.rows import SPLITS, Rows, Splits, check_columns, read_splits
from backend.rewards.scorer import Scorer, SharedProcesses, begin_scorer
from backend.runs.checkpoints.checkpoint import check_metric
from backend.types import Problem
from backend.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class StageRows:
    """Training rows and their source. Stages with the same rows share one list of them."""

    rows: Rows
    source: str


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Rows and loaded reward functions of a run."""

    splits: Splits
    scorer: Scorer
    stages: tuple[StageRows, ...] = ()


def read_inputs(config: Config, processes: SharedProcesses | None = None) -> RunInputs:
    """Read the dataset and load the reward functions. `processes` are shared with other runs. Raises UserError."""
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
    """The rows of a run, or of a stage with its own dataset. Raises UserError."""
    return read_splits(config, scorer.map_rows)


def read_stages(config: Config, splits: Splits, scorer: Scorer) -> tuple[StageRows, ...]:
    """The training rows of each stage; `splits` are the run's own. Raises UserError naming the stage."""
    values, read = config.model_dump(), dict[str, StageRows]()
    own = StageRows(splits.train, splits.source.get("train", config.data))
    stages: list[StageRows] = []
    for index in range(len(config.stages)):
        of_stage = stage_rows(values, index)
        key = repr(sorted(of_stage.items()))
        if of_stage and key not in read:
            try:
                found = read_rows(config.model_copy(update=of_stage), scorer)
            except UserError as error:
                raise stage_error(index, error) from None
            read[key] = StageRows(found.train, found.source.get("train", str(of_stage.get("data", config.data))))
        stages.append(read[key] if of_stage else own)
    return tuple(stages)


def stage_error(index: int, error: UserError) -> UserError:
    """The problems of a stage's rows as problems of the setting `stages`."""
    return UserError([fault_of_stage(index + 1, fault.sentence) for fault in error.faults])


MakePrompts = Callable[[Rows, Any, PromptFormat, str], TokenizedPrompts]
"""(rows, tokenizer, format, source) → their prompts."""
Poll = Callable[[float], None]
"""Takes the share that is done; may raise to stop."""


@dataclass(slots=True)
class EvaluationSets:
    """The prompts of the valid split, and of the datasets of `eval_data` by name.

    The metrics of the valid split have their plain names, those of a named set its name before them (`gsm8k/reward`).
    Without a valid split the first named set has the plain names too, which early stopping reads.
    """

    valid: list[Problem]
    named: dict[str, list[Problem]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.valid or self.named)

    def metrics(self, measure: Callable[[list[Problem], Poll], dict[str, float]], poll: Poll) -> dict[str, float]:
        sets = {"": self.valid, **self.named} if self.valid else self.named
        total, before = sum(map(len, sets.values())), 0
        found: dict[str, float] = {}
        for name, problems in sets.items():
            start, share = before / total, len(problems) / total
            measured = measure(problems, lambda done, start=start, share=share: poll(start + share * done))
            if not name or not found:
                found |= measured
            if name:
                found |= {f"{name}/{key}": value for key, value in measured.items()}
            before += len(problems)
        return found


@dataclass(slots=True)
class StagePrompts:
    """The training prompts of each stage. Stages with the same rows and format share them."""

    stages: Stages
    rows: Sequence[StageRows]
    prompts: Sequence[TokenizedPrompts]
    present: int = 0

    def begin(self, step: int, stream: PromptStream) -> None:
        """Let the stream take the prompts of the stage of `step`."""
        index = stage_at(self.stages, step)
        if self.prompts[index] is not stream.problems:
            stream.go_on_with(self.prompts[index], are_same_rows=self.rows[index] is self.rows[self.present])
        self.present = index


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """Every prompt that a run may take: of its splits, of the sets of `eval_data`, and of the stages."""

    by_split: dict[str, TokenizedPrompts]
    named: dict[str, TokenizedPrompts]
    of_stages: StagePrompts | None

    @classmethod
    def tokenize(
        cls, config: Config, stages: Sequence[Config], inputs: RunInputs, tokenizer: Any, make: MakePrompts
    ) -> RunPrompts:
        """Tokenise the first rows of every set. Raises UserError."""
        splits, settings = inputs.splits, held_out_settings(config, stages)

        def prompts_of(
            rows: Rows, settings: Config, source: str, name: str, *, all_rows: bool = False
        ) -> TokenizedPrompts:
            if faults := check_columns(rows, settings, source):
                raise UserError(faults)
            prompts = make(rows, tokenizer, PromptFormat.of(settings), source)
            measure_first_rows(prompts, name, all_rows=all_rows)
            prompts.measure(prompts.longest_texts())  # memory is planned for the longest prompt of all rows
            return prompts

        by_split: dict[str, TokenizedPrompts] = {}
        for split in used_splits(config):
            if rows := splits.rows(split):
                # With `epochs` the length of the run is the number of rows that fit, so all are tokenised.
                is_counted = split == "train" and config.epochs > 0
                source = splits.source.get(split, config.data)
                by_split[split] = prompts_of(rows, settings, source, split, all_rows=is_counted)
        of_stages = None
        if config.stages:
            rows_of_stages = inputs.stages or read_stages(config, splits, inputs.scorer)
            of_stage: list[TokenizedPrompts] = []
            for index, (own, rows) in enumerate(zip(stages, rows_of_stages, strict=True)):
                known = (each for each in of_stage if each.are_of(rows.rows, PromptFormat.of(own)))
                try:
                    of_stage.append(next(known, None) or prompts_of(rows.rows, own, rows.source, "train"))
                except UserError as error:
                    raise stage_error(index, error) from None
            of_stages = StagePrompts(config.stages, rows_of_stages, of_stage)
        check_evaluation_sets(splits, settings, None)
        named = {
            name: prompts_of(each.rows, settings.model_copy(update=each.settings), each.source, name)
            for name, each in (splits.evals.items() if config.steps_per_eval else ())
        }
        return cls(by_split, named, of_stages)

    @property
    def training(self) -> TokenizedPrompts:
        return self.by_split["train"] if self.of_stages is None else self.of_stages.prompts[0]

    def all(self) -> dict[str, TokenizedPrompts]:
        """Every set once, by a name for notes."""
        found = self.by_split | self.named
        for number, prompts in enumerate(self.of_stages.prompts if self.of_stages is not None else (), 1):
            if not any(prompts is known for known in found.values()):
                found[f"train (stage {number})"] = prompts
        return found

    def steps(self, config: Config) -> int:
        """`iters`, or the passes of `epochs` over the rows that fit, the last step filled up."""
        if not config.epochs or config.stages:
            return config.iters
        return -(-config.epochs * self.by_split["train"].fitting // config.prompts_per_step)

    def evaluation_sets(self, config: Config) -> EvaluationSets:
        count = config.val_batches * config.prompts_per_evaluation_batch
        valid = self.by_split["valid"].first(count) if "valid" in self.by_split else []
        return EvaluationSets(valid, {name: prompts.first(count) for name, prompts in self.named.items()})

    def test(self, config: Config) -> list[Problem]:
        count = config.test_batches * config.prompts_per_evaluation_batch
        return self.by_split["test"].first(count) if "test" in self.by_split else []


def used_splits(config: Config) -> list[str]:
    """The splits that a run reads for itself."""
    used = {"train": not config.stages, "valid": config.steps_per_eval > 0, "test": config.test}
    return [split for split in SPLITS if used[split]]


def held_out_settings(config: Config, stages: Sequence[Config]) -> Config:
    """The settings by which held-out rows are checked. The rows are the same in every stage: the longest completions
    decide which prompts fit, and the functions of all stages score them."""
    if not config.stages:
        return config
    functions = dict.fromkeys(name for stage in stages for name in stage.reward_functions)
    longest = max(stage.max_completion_length for stage in stages)
    return config.model_copy(update={"max_completion_length": longest, "reward_functions": list(functions)})


def check_held_out(splits: Splits, config: Config) -> None:
    """Raises UserError for held-out rows that the settings name and the dataset lacks."""
    if config.test and not splits.test:
        raise UserError("test", f"Evaluate test split is on, and {config.data} has no split {config.test_split}.")
    check_metric(config, has_held_out=bool(splits.valid or splits.evals))


def check_evaluation_sets(splits: Splits, config: Config, tokenizer: Any) -> None:
    """Raises UserError for a set of `eval_data` without its columns or a prompt that fits."""
    for name, each in splits.evals.items() if config.steps_per_eval else ():
        own = config.model_copy(update=each.settings)
        if faults := check_columns(each.rows, own, each.source):
            raise UserError("eval_data", f"{name}: {faults[0].sentence}"[:200])
        if tokenizer is not None:
            check_prompts(each.rows, tokenizer, PromptFormat.of(own), each.source)
