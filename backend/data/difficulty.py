"""How often the newest run on a dataset solved each of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from backend.config.config import read
from backend.config.setting import DatasetSettings, PromptSettings
from backend.data.files import Row
from backend.data.preview import preview_problem
from backend.data.problems import PromptFormat
from backend.runs.completion_files import parse_group_row
from backend.runs.run_folder import RunFolder, all_runs
from backend.utils.errors import UserError
from backend.utils.files import open_regular

RUNS = 200  # newest runs searched for one on the dataset
FORGOTTEN = 0.5  # loss of pass rate, between a prompt's best group and its last, from which it counts as noisy


def newest_run(config: DatasetSettings) -> tuple[RunFolder, float] | None:
    """The newest run with completions on the dataset, and the reward from which it counts a completion as solved."""
    for run in islice(all_runs(), RUNS):
        try:
            values = read(run.config)
        except UserError:
            continue
        if str(values.get("data")) == config.data and run.completions.exists():
            return run, float(values.get("success_reward_threshold", 1.0))
    return None


def solved_prompts(
    rows: Sequence[Row], config: PromptSettings, source: str, run: RunFolder, solved_from: float
) -> list[tuple[int, int, int, str]]:
    """(row, completions solved, completions, kind) of each row whose prompt the run has sampled, hardest first. `kind`:
    never, always, sometimes, or noisy: solved less often in the end than before."""
    groups: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    with open_regular(run.completions) as file:
        for line in file:
            if (group := parse_group_row(line)) is not None:
                rewards = [each.get("reward") for each in group["completions"]]
                known = [reward >= solved_from for reward in rewards if reward is not None]
                groups.setdefault((group["prompt"], *group.get("images", ())), []).append((sum(known), len(known)))
    found, prompt_format = list[tuple[int, int, int, str]](), PromptFormat.of(config)
    for index, row in enumerate(rows):
        try:
            problem, _ = preview_problem(index, row, None, prompt_format, source)
        except UserError:
            continue
        if counts := groups.get((problem.prompt, *problem.images)):
            solved, sampled = (sum(column) for column in zip(*counts, strict=True))
            rates = [of_group / max(1, size) for of_group, size in counts]
            kind = "never" if not solved else "always" if solved == sampled else "sometimes"
            found.append((index, solved, sampled, "noisy" if max(rates) - rates[-1] >= FORGOTTEN else kind))
    return sorted(found, key=lambda entry: entry[1] / max(1, entry[2]))
