"""The inputs that a run reads before its model: the dataset's rows and the reward functions.

Read once a process: `preflight` checks them and passes them on to `load_parts`. A reward file is a user's program;
running it a second time would repeat its side effects (a judge model loaded twice, a log file begun twice).
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.data.rows import Splits, read_splits
from backend.rewards.scorer import Scorer, SharedProcesses, begin_scorer
from backend.spec.config import Config


@dataclass(frozen=True, slots=True)
class RunInputs:
    splits: Splits
    scorer: Scorer
    """The reward functions, loaded."""


def read_inputs(config: Config, processes: SharedProcesses | None = None) -> RunInputs:
    """Read the dataset while the reward functions' process starts, and load them. `processes`: those that are shared with other runs.
    Raises Mistake for either."""
    scorer = begin_scorer(config, processes)
    try:
        splits = read_rows(config, scorer)
        scorer.load()
    except BaseException:
        scorer.close()
        raise
    return RunInputs(splits, scorer)


def read_rows(config: Config, scorer: Scorer) -> Splits:
    """The rows of a run, or of a stage with a dataset of its own; their map function is called where the reward functions are. Raises
    Mistake."""
    return read_splits(config, scorer.map_rows)
