"""Training on recorded completions: rows with the column `recorded` (`backend.endpoint.sessions`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from backend.config.config import Config
from backend.data.problems import problem_of
from backend.data.prompts import TokenizedPrompts
from backend.data.rows import Rows, row_name
from backend.sampling.conversations import common_prefix
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError

COLUMN = "recorded"


def check_recorded(rows: Rows, config: Config, source: str) -> None:
    """Raise UserError for settings that do not fit the recorded completions."""
    if config.hosts:
        raise UserError("hosts", "Recorded sessions are trained on by one machine; leave hosts out.")
    for index, row in enumerate(rows):
        if not row.get(COLUMN):
            raise UserError("data", f"{row_name(index, source)} has no recorded completions, and others have.")
        _check_row(row[COLUMN], row_name(index, source), config)


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
        problem = problem_of(index, row, self._chat(index, row), tokens, self.format)
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
