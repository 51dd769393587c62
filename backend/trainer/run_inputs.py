"""Inputs of a run that are read before its model, once a process: rows, reward functions, and the rows' prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from backend.config.config import Config
from backend.config.stages import fault_of_stage, stage_rows
from backend.data.images import with_paths
from backend.data.labels import check_prompts
from backend.data.problems import PromptFormat, messages_of, no_prompt_fits, problem_of
from backend.data.prompts import TokenizedPrompts, measure_first_rows
from backend.data.rows import SPLITS, Rows, Splits, check_columns, read_splits, row_name
from backend.rewards.scorer import Scorer, SharedProcesses, begin_scorer
from backend.runs.checkpoint import check_metric
from backend.sampling.conversations import common_prefix
from backend.tools.host import NO_TOOLS, ToolHost, ToolSchemas
from backend.tools.load import load_tools
from backend.types import Completion, Group, Problem, image_parts
from backend.utils.errors import UserError

COLUMN = "recorded"  # of rows with recorded completions (`backend.endpoint.sessions`), which are trained on


@dataclass(frozen=True, slots=True)
class RunInputs:
    """`stages`: (training rows, their source) of each stage; the same object for the same rows."""

    splits: Splits
    scorer: Scorer
    stages: tuple[tuple[Rows, str], ...] = ()
    tools: ToolHost | None = None

    @property
    def schemas(self) -> ToolSchemas:
        return self.tools.schemas if self.tools else NO_TOOLS


def read_inputs(config: Config, processes: SharedProcesses | None = None, *, scorer: Scorer | None = None) -> RunInputs:
    """Read the dataset and load the tools and reward functions. `scorer` has begun already. Raises UserError."""
    scorer = scorer or begin_scorer(config, processes)
    try:
        inputs = read_rows(config, scorer)
        scorer.load()
        return inputs
    except BaseException:
        scorer.close()
        raise


def read_rows(config: Config, scorer: Scorer) -> RunInputs:
    """The rows of a run and of its stages, and its tools. Raises UserError, naming the stage."""
    tools = load_tools(config, scorer)
    splits = read_splits(config, scorer.map_rows)
    values, stages = config.model_dump(), list[tuple[Rows, str]]()
    known = {"": (splits.train, splits.source["train"])}
    for index in range(len(config.stages)):
        of_stage = stage_rows(values, index)
        key = repr(sorted(of_stage.items())) if of_stage else ""
        if key not in known:
            try:
                found = read_splits(config.model_copy(update=of_stage), scorer.map_rows)
            except UserError as error:
                raise stage_error(index + 1, error) from None
            known[key] = found.train, found.source["train"]
        stages.append(known[key])
    return RunInputs(splits, scorer, tuple(stages), tools)


def stage_error(number: int, error: UserError) -> UserError:
    stage = (replace(fault_of_stage(number, fault.sentence), traceback=fault.traceback) for fault in error.faults)
    return UserError(stage)


def check_recorded(rows: Rows, config: Config, source: str) -> None:
    if config.hosts:
        raise UserError("hosts", "Recorded sessions are trained on by one machine; leave hosts out.")
    for index, row in enumerate(rows):
        if not row.get(COLUMN):
            raise UserError("data", f"{row_name(index, source)} has no recorded completions, and others have.")
        _check_row(row[COLUMN], row_name(index, source), config)
    prompts = (common_prefix([each["before"] for each in row[COLUMN]]) for row in rows)
    if all(len(prompt) > config.prompt_limit for prompt in prompts):
        raise no_prompt_fits(PromptFormat.of(config), "Every prompt")


def _check_row(recorded: Sequence[Mapping[str, Any]], where: str, config: Config) -> None:
    if len(recorded) != config.group_size:
        raise UserError("group_size", f"There are {len(recorded)} recorded completions in {where}; set it to that.")
    for each in recorded:
        if each["temperature"] != config.temperature:
            what = f"A completion in {where} was recorded at the temperature {each['temperature']:g}; set it to that."
            raise UserError("temperature", what)
    shared = common_prefix([each["before"] for each in recorded])
    longest = max(len(each["before"]) + len(each["tokens"]) for each in recorded) - len(shared)
    if longest > config.max_completion_length:
        what = f"A recorded completion in {where} has {longest:,} tokens; set it to that or more."
        raise UserError("max_completion_length", what)


class RecordedRows(TokenizedPrompts):
    """Rows of recorded completions as problems, whose ids are what the prompts of their completions begin with."""

    def longest_texts(self) -> list[int]:
        return list(range(len(self)))

    def __getitem__(self, index: int) -> Problem | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        row = {**self._row(index)}
        recorded = row.pop(COLUMN)  # reward functions get the row, but not what other completions are
        tokens = common_prefix([each["before"] for each in recorded])
        self._lengths[index] = len(tokens)
        chat = self.read(row, self.format, row_name(index, self._source))
        problem = problem_of(index, row, chat, tokens, self.format)
        return replace(problem, recorded=recorded) if self.fits(index) else None


def recorded_group(problem: Problem, config: Config, vocabulary: int) -> Group:
    """Raises UserError for ids that a model with `vocabulary` tokens does not have, or settings changed since."""
    where, shared = f"row {problem.index + 1}", len(problem.tokens)
    _check_row(problem.recorded, where, config)
    completions: list[Completion] = []
    for each in problem.recorded:
        opening = each["before"][shared:]
        highest, nothing = max(problem.tokens + opening + each["tokens"]), [0.0] * len(opening)
        if highest >= vocabulary:
            what = f"The token {highest:,} in {where} is not one of the model's {vocabulary:,}; record this model."
            raise UserError("data", what)
        made = Completion(opening + each["tokens"], nothing + each["logps"], each["text"], each["stop"])
        made.log_kept, made.mask = nothing + each["log_kept"], [0] * len(opening) + each["mask"]
        made.columns = {"session_reward": each["reward"]}
        completions.append(made)
    return Group(problem, completions)


def off_policy(config: Config, passes: float) -> tuple[Config, str]:
    """(settings that weigh what another policy has sampled, a note). `passes`: over the recorded groups."""
    sentence = f"Passes over the recorded groups: {passes:.3g}. After the first step the policy is another one"
    if config.sampling_correction == "auto" and config.ratio_against != "reference":
        config = config.model_copy(update={"sampling_correction": "token_truncate"})
        sentence += ", so each token is weighted by the ratio of both (Sampling correction: token_truncate)"
    return config, f"{sentence}."


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Rows of which a run makes prompts. `stage`: that trains on them, from 1; `is_named`: of `eval_data`."""

    name: str
    rows: Rows
    source: str
    config: Config
    stage: int = 0
    is_named: bool = False
    tools: ToolSchemas = NO_TOOLS

    @property
    def format(self) -> PromptFormat:
        return PromptFormat.of(self.config, self.tools, labelled=self.config.learns_labels)

    @property
    def is_trained(self) -> bool:
        return self.name == "train" or self.stage > 0

    @property
    def is_recorded(self) -> bool:
        return self.is_trained and not self.format.labelled and bool(self.rows) and COLUMN in self.rows[0]

    def check(self, tokenizer: Any = None) -> None:
        """Raises UserError for missing columns and, with a tokenizer, where no prompt fits or a label is missing."""
        config = self.config
        if config.warms_up and not self.is_trained:  # a warm-up imitates no held-out rows
            config = config.model_copy(update={"warmup_steps": 0})
        with self._naming_errors():
            if faults := check_columns(self.rows, config, self.source):
                raise UserError(faults)
            if self.is_trained and (config.train_mode == "distill" or config.self_distillation_weight):
                is_distill = config.train_mode == "distill"
                setting = "train_mode" if is_distill else "distillation_weight"
                for index, row in enumerate(self.rows):
                    where = row_name(index, self.source)
                    if image_parts(messages_of(with_paths(row, self.source, where), self.format, where)):
                        what = f"The teacher reads prompts as text, and {where} has pictures"
                        raise UserError(setting, f"{what}; {'choose GRPO' if is_distill else 'set it to 0'}.")
            if self.is_recorded:
                check_recorded(self.rows, config, self.source)
            elif tokenizer is not None and not self.format.labelled:
                check_prompts(self.rows, tokenizer, self.format, self.source)
            if tokenizer is not None and config.reads_labels:
                check_prompts(self.rows, tokenizer, PromptFormat.of(config, self.tools, labelled=True), self.source)

    def tokenize(self, tokenizer: Any, make: Callable[..., TokenizedPrompts], *, all_rows: bool) -> TokenizedPrompts:
        """The prompts, by `make(rows, tokenizer, format, source)`; the first rows are tokenised. Raises UserError."""
        with self._naming_errors():
            make = RecordedRows if self.is_recorded else make
            prompts = make(self.rows, tokenizer, self.format, self.source)
            measure_first_rows(prompts, "train" if self.stage else self.name, all_rows=all_rows)
            prompts.measure(prompts.longest_texts())  # memory is planned for the longest prompt of all rows
        return prompts

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            if self.stage:
                raise stage_error(self.stage, error) from None
            if self.is_named:
                raise UserError("eval_data", f"{self.name}: {error.faults[0].sentence}"[:200]) from None
            raise


def prompt_sets(config: Config, inputs: RunInputs, stages: Sequence[Config]) -> list[PromptSet]:
    """Every set of rows that a run makes prompts of. `stages`: the settings of each."""
    splits, held_out = inputs.splits, config
    if config.stages:
        # Held-out rows are the same in every stage: the longest completions decide which prompts fit, and the functions
        # of all stages score them.
        functions = dict.fromkeys(name for stage in stages for name in stage.reward_functions)
        longest = max(stage.max_completion_length for stage in stages)
        held_out = config.model_copy(update={"max_completion_length": longest, "reward_functions": list(functions)})
    used = {"train": not config.stages, "valid": config.steps_per_eval != 0, "test": config.test}
    sets = [
        PromptSet(split, splits.rows(split), splits.source_of(split), held_out)
        for split in SPLITS
        if used[split] and splits.rows(split)
    ]
    for name, each in splits.evals.items() if config.steps_per_eval else ():
        sets.append(PromptSet(name, each.rows, each.source, held_out.model_copy(update=each.settings), is_named=True))
    for number, (rows, own) in enumerate(zip(inputs.stages, stages if config.stages else (), strict=True), 1):
        sets.append(PromptSet(f"train (stage {number})", *rows, own, stage=number))
    return [replace(each, tools=inputs.schemas) for each in sets]


def check_held_out(splits: Splits, config: Config) -> None:
    """Raises UserError for held-out rows that the settings name and the dataset lacks."""
    if config.test and not splits.test:
        raise UserError("test", f"Evaluate test split is on, and {config.data} has no split {config.test_split}.")
    check_metric(config, has_held_out=bool(splits.valid or splits.evals))
