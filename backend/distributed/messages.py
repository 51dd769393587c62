"""Groups, rounds of sampling and reward code as JSON and arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from backend.config.config import Config
from backend.distributed.wire import Arrays, to_json
from backend.rewards.catalogue import locate_reward_file, read_call
from backend.trainer.run_context import StepContext
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from backend.utils.files import read_bytes
from backend.utils.text import quote

Packed = tuple[dict[str, Any], dict[str, np.ndarray]]
"""Body and arrays of a message."""

COLUMNS: dict[str, Any] = {
    "tokens": np.int32,
    "logps": np.float32,
    "log_kept": np.float32,
    "log_held": np.float32,
    "mask": np.uint8,
}


def pack_groups(groups: Sequence[Group], *, is_scored: bool = False) -> Packed:
    """The prompts, and what learning needs of every completion; with `is_scored` the rest of a completion instead of
    prompts. Raises UserError."""
    completions = [completion for group in groups for completion in group.completions]
    lists = {name: [getattr(completion, name) for completion in completions] for name in COLUMNS}
    body: dict[str, Any] = {
        "sizes": [len(group.completions) for group in groups],
        "stops": [completion.stop for completion in completions],
    }
    if is_scored:
        body["scored"] = [[c.text, c.scores, c.reward, c.logged] for c in completions]
        for completion in completions:
            check_row(completion.logged)
    else:
        lists["prompts"] = [group.problem.tokens for group in groups]
    body["lengths"] = {name: [len(each) for each in of_name] for name, of_name in lists.items()}
    arrays = {name: _joined(of_name, COLUMNS.get(name, np.int32)) for name, of_name in lists.items()}
    arrays["advantages"] = np.array([completion.advantage for completion in completions], np.float64)
    return body, arrays


def unpack_groups(body: dict[str, Any], arrays: Arrays, problems: Sequence[Problem] | None = None) -> list[Group]:
    """The groups of `problems`, or of problems that have nothing but their sent prompts."""
    lists = {name: _split(arrays[name], lengths) for name, lengths in body["lengths"].items()}
    if problems is None:
        problems = [Problem(i, "", [], prompt, "") for i, prompt in enumerate(lists.pop("prompts"))]
    completions: list[Completion] = []
    for i, (stop, advantage) in enumerate(zip(body["stops"], arrays["advantages"].tolist(), strict=True)):
        columns: dict[str, Any] = {name: of_name[i] for name, of_name in lists.items()}
        completions.append(Completion(text="", stop=stop, advantage=advantage, **columns))
    for completion, scored in zip(completions, body.get("scored", ()), strict=False):
        completion.text, completion.scores, completion.reward, completion.logged = scored
    each = iter(completions)
    return [
        Group(problem, [next(each) for _ in range(size)]) for problem, size in zip(problems, body["sizes"], strict=True)
    ]


def check_row(row: dict[str, Any]) -> None:
    """Raise UserError for a dataset's row, or logged values, that cannot be sent."""
    for column, value in row.items():
        try:
            to_json(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                "data", f"The column {quote(column, 40)} holds {error}, which cannot be sent to other machines."
            ) from None


def _joined(lists: Sequence[Sequence[Any]], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.array(each, dtype) for each in lists)])


def _split(x: np.ndarray, lengths: Sequence[int]) -> list[list[Any]]:
    values = x.tolist()
    return [values[start:end] for start, end in pairwise([0, *accumulate(lengths)])]


@dataclass(frozen=True, slots=True)
class SamplingOrder:
    """The common part of all rounds of one step, or of one evaluation."""

    step: int
    epoch: float
    seed: int
    position: int
    """The first problem's number in the run."""
    group_size: int
    scoring: list[dict[str, Any]]
    """State of adaptive reward weights."""


@dataclass(slots=True)
class SampledRound:
    """Some of a step's problems, sampled and scored on one rank. `start`: place of the first."""

    rank: int
    start: int
    groups: list[Group]
    sampling_s: float = 0.0
    scoring_s: float = 0.0
    logged: dict[str, float] | None = None
    """The metrics that reward functions logged."""

    @property
    def completions(self) -> int:
        return sum(len(group.completions) for group in self.groups)

    @property
    def tokens(self) -> int:
        return sum(completion.trained_tokens for group in self.groups for completion in group.completions)

    @property
    def seconds(self) -> float:
        return self.sampling_s + self.scoring_s

    def packed(self) -> Packed:
        body, arrays = pack_groups(self.groups, is_scored=True)
        about = {"start": self.start, "sampling_s": self.sampling_s, "scoring_s": self.scoring_s, "logged": self.logged}
        return body | {"round": about}, arrays

    @classmethod
    def unpacked(
        cls, rank: int, body: dict[str, Any], arrays: dict[str, np.ndarray], problems: Sequence[Problem]
    ) -> SampledRound:
        """`problems`: all of the order."""
        about = body["round"]
        own = problems[about["start"] : about["start"] + len(body["sizes"])]
        return cls(rank, groups=unpack_groups(body, arrays, own), **about)


def sample_round(
    parts: StepContext,
    order: SamplingOrder,
    rank: int,
    start: int,
    problems: Sequence[Problem],
    poll: Callable[[int], None],
) -> SampledRound:
    """Sample a group of every problem; not scored yet. `poll` as in `Sampler.sample`."""
    began = time.perf_counter()
    groups = parts.rollout.sample(problems, order.group_size, parts.sampling, order.seed, order.position + start, poll)
    return SampledRound(rank, start, groups, sampling_s=time.perf_counter() - began)


def score_round(parts: StepContext, order: SamplingOrder, sampled: SampledRound) -> None:
    began = time.perf_counter()
    sampled.logged = parts.scoring.score(sampled.groups, order.step, order.epoch)
    sampled.scoring_s = time.perf_counter() - began


def pack_problems(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Raises UserError for a row that cannot be sent."""
    for problem in problems:
        check_row(problem.row)
    return [asdict(problem) for problem in problems]


def reward_code(config: Config) -> dict[str, tuple[str, str]]:
    """Name of each reward file in the settings → (path, text). Raises UserError."""
    entries = [*config.reward_functions]
    for stage in config.stages:
        entries += stage.get("reward_functions") or []
    names = {read_call(entry).file for entry in entries} | {config.reward_functions_file}
    files = {name: locate_reward_file(name).resolve() for name in names if name}
    return {
        name: (str(path), read_bytes(path, "reward_functions_file").decode(errors="surrogateescape"))
        for name, path in files.items()
    }


def write_reward_code(code: dict[str, tuple[str, str]], folder: Path) -> dict[str, Path]:
    """Write each file to a separate folder. → path by its name in the settings."""
    written: dict[str, Path] = {}
    for name, (path, text) in code.items():
        file = folder / sha256(path.encode(errors="surrogateescape")).hexdigest()[:16] / Path(path).name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
        written[name] = file
    return written


def with_reward_files(config: Config, files: dict[str, Path]) -> Config:
    """The settings with other paths for the files that they name."""

    def moved(entry: str) -> str:
        name = read_call(entry).file
        return f"{files[name]}{entry[entry.index('::') :]}" if name else entry

    stages = [dict(stage) for stage in config.stages]
    for stage in stages:
        if stage.get("reward_functions"):
            stage["reward_functions"] = [moved(entry) for entry in stage["reward_functions"]]
    file = config.reward_functions_file
    moved_file = {"reward_functions_file": str(files[file])} if file else {}
    entries = [moved(entry) for entry in config.reward_functions]
    return config.model_copy(update={"reward_functions": entries, "stages": stages} | moved_file)
