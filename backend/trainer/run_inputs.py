"""The inputs that a run reads before its model: the dataset's rows and the reward functions.

Read once a process: `preflight` checks them and passes them on to `load_parts`. A reward file is a user's program;
running it a second time would repeat its side effects (a judge model loaded twice, a log file begun twice).
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.config.config import Config
from backend.config.stages import fault_of_stage, stage_rows
from backend.data.rows import Rows, Splits, read_splits
from backend.rewards.scorer import Scorer, SharedProcesses, begin_scorer
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
