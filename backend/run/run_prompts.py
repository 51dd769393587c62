"""The prompts of a run: those it trains on, by stage where it has stages, and those it is evaluated on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts, measure_first_rows
from backend.data.rows import SPLITS, Splits, check_columns
from backend.run.evaluation.evaluation_sets import EvaluationSets, MakePrompts, held_out_settings, named_prompts
from backend.run.run_inputs import RunInputs, read_stages
from backend.run.stage_prompts import StagePrompts, tokenized_stages
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.types import Problem


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
    """The prompts of a run, their first rows tokenised. `stages`: the settings of each stage. Raises Mistake for rows that cannot be used."""
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
            raise Mistake(faults)
        by_split[split] = prompts = make(rows, tokenizer, PromptFormat.of(config), source)
        measure_first_rows(prompts, split, all_rows=split == "train" and config.epochs > 0)
        prompts.measure(prompts.longest_texts())  # memory is planned for the longest prompt of all rows
    return by_split
