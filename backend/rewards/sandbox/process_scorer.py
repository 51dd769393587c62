"""The reward functions of one run in a scoring process: loaded once, described by it, called a step at a time.

One message a step has all its completions, and one answer all the scores. A process that was lost is replaced when it is next
needed; the reward files are executed again there, so what a function kept in its module is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from backend.rewards.resolve import FunctionDescription
from backend.rewards.runner import row_mapping
from backend.rewards.runner.inputs import Sample, TrainerState
from backend.rewards.runner.reward_errors import RewardError, reward_error
from backend.rewards.runner.score import ScoreReport, fill_scores, samples_of
from backend.rewards.runner.step_calls import Poll, wait_on
from backend.rewards.runner.user_traceback import LoadError, UserCodeError
from backend.rewards.sandbox.answers import (
    Failure,
    Scored,
    Untrusted,
    read_loaded,
    read_mapped,
    read_scored,
    read_sentences,
)
from backend.rewards.sandbox.process import EXIT_S, ChildFailed, ScoringProcess
from backend.rewards.sandbox.wire import packed
from backend.types import Group
from backend.utils.errors import ConfigProblem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewardSource:
    """The entries of each stage, the file of the setting `reward_functions_file`, the folder that relative paths start from, and every
    file that is executed."""

    stages: Sequence[Sequence[str]]
    file: Path | None
    base: Path
    files: tuple[Path, ...] = ()

    @property
    def file_name(self) -> str:
        """The file in a sentence about loading: which of several is at fault is not known."""
        return self.file.name if self.file else self.files[0].name if self.files else "The process that scores"


class ProcessScorer:
    """`backend.rewards.scorer.Scorer` in a process; `timeout_s` is the limit for executing its files."""

    def __init__(self, source: RewardSource, process: ScoringProcess, timeout_s: float) -> None:
        self.process = process
        process.start()  # while the caller does something else
        self._source, self._timeout_s = source, timeout_s
        self._key = process.new_key()
        self._generation = 0
        """The generation of the process that has loaded the functions; 0 for none."""
        self._stages: list[list[FunctionDescription]] = []
        self._notes: list[str] = []

    def load(self, poll: Poll = wait_on) -> list[list[FunctionDescription]]:
        """The functions of each stage. Raises LoadError."""
        with self.process.lock:
            self.process.start()  # if there is none any more, with another generation
            if self._generation != self.process.generation:
                self._stages = self._loaded(poll)
                self._generation = self.process.generation
            return self._stages

    def score(
        self,
        groups: list[Group],
        stage: int,
        weights: Sequence[float],
        timeout_s: float,
        state: TrainerState,
        poll: Poll = wait_on,
    ) -> ScoreReport:
        samples = samples_of(groups)
        if not samples:
            return ScoreReport({})
        functions = self.load(poll)[stage]
        scored = self.ask(groups, stage, range(len(functions)), timeout_s, state, poll=poll)
        if scored.failure is not None:
            raise failed_on(functions, scored.failure, samples, network=self.process.network)
        names = [function.name for function in functions]
        fill_scores(samples, names, scored.scores, weights)
        return ScoreReport(dict(zip(names, scored.seconds, strict=True)), scored.columns, scored.metrics)

    def ask(
        self,
        groups: Sequence[Group],
        stage: int,
        functions: Sequence[int],
        timeout_s: float,
        state: TrainerState,
        *,
        captures: bool = False,
        poll: Poll = wait_on,
    ) -> Scored:
        """Score all completions with these functions of a stage. A function that fails, hangs or ends its process is the `failure` of the
        result; the process is gone then but for exceptions. `captures`: what they print is part of the result. Raises LoadError
        where the functions have to be loaded anew and cannot be."""
        count = sum(len(group.completions) for group in groups)
        with self.process.lock:
            self.load(poll)
            request = {
                "score": self._key, "stage": stage, "functions": list(functions), "groups": packed(groups), "timeout": timeout_s,
                "state": state, "captures": captures,
            }  # fmt: skip
            try:
                answer = self.process.request(request, timeout_s, len(functions), poll)
                scored = self._checked(lambda: read_scored(answer, len(functions), count))
            except ChildFailed as failed:
                return Scored(failure=Failure(failed.function(len(functions)), failed.what))
            if scored.failure is not None and scored.failure.is_timeout:
                self.process.stop()  # the call goes on in it
            return scored

    def map_rows(
        self, function: str, rows: Sequence[dict[str, Any]], where: Callable[[int], str], poll: Poll = wait_on
    ) -> list[dict[str, Any] | None]:
        """What the map function of the reward functions file makes of each row; `where` names the i-th of them. Raises UserError."""
        with self.process.lock:
            self.load(poll)
            request = {"map": self._key, "function": function, "rows": list(rows), "timeout": self._timeout_s}
            try:
                answer = self.process.request(request, self._timeout_s, 1, poll)
                mapped = self._checked(lambda: read_mapped(answer, len(rows)))
            except ChildFailed as failed:
                raise row_mapping.failure(function, failed.what, f"one of the rows from {where(0)} on") from None
        if mapped.known is not None:
            raise row_mapping.unknown(function, self._source.file, mapped.known)
        if mapped.failed is not None:
            index, what = mapped.failed
            raise row_mapping.failure(function, what, where(index))
        return mapped.rows

    def notes(self) -> list[str]:
        """What the process could not be kept from, where a file of the user's is executed."""
        return self._notes if self._source.files else []

    def close(self) -> None:
        """End the process, unless other scorers use it too."""
        self._generation = 0
        self.process.release(self._key, EXIT_S)

    def _loaded(self, poll: Poll) -> list[list[FunctionDescription]]:
        source = self._source
        self.process.hold(self._key)
        request = {
            "load": self._key, "stages": [list(names) for names in source.stages], "file": str(source.file or ""),
            "base": str(source.base),
        }  # fmt: skip
        files = {*source.files, *([source.file] if source.file else [])}
        try:
            answer = self.process.request(request, self._timeout_s, max(1, len(files)), poll)
            described, self._notes = self._checked(
                lambda: (read_loaded(answer, source.stages, files), read_sentences(answer.get("confined")))
            )
        except ChildFailed as failed:
            sentence = f"{source.file_name} {failed.what} while it was being loaded."
            file = source.file or next(iter(source.files), None)
            setting = "reward_functions_file" if source.file else "reward_functions"
            raise LoadError([ConfigProblem(setting, sentence)], UserCodeError(sentence, str(file or ""))) from None
        return described

    def _checked(self, read: Callable[[], T]) -> T:
        """What `read` makes of an answer. Raises ChildFailed, with the process ended, for an answer that cannot be trusted."""
        try:
            return read()
        except Untrusted:
            self.process.reject()


_NO_NETWORK = re.compile(
    r"gaierror|URLError|Connect\w*Error|ConnectTimeout|Connection\w*Error|name resolution"
    r"|PermissionError: \[Errno 13\] Permission denied(?!:)"  # of a socket: that of a file goes on with its name
)


def failed_on(
    functions: Sequence[FunctionDescription], failure: Failure, samples: Sequence[Sample], *, network: bool
) -> RewardError:
    """The error that stops a run. `network`: whether the functions may use it, which is said where they tried."""
    tried = not network and _NO_NETWORK.search(failure.what)
    what = f"{failure.what} (reward_network is off)" if tried else failure.what
    function, sample = functions[failure.function], samples[failure.completion]
    return reward_error(function, what, sample, failure.has_line, failure.traceback)
