"""A run's event log and completions as records, one a step, for trackers. Reads the two files as they grow; where a
resume cut them back it begins again and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backend.runs.completion_rows import GroupRow
from backend.runs.events import ENDINGS, Event, Follower, is_step
from backend.runs.metric_names import by_set, prefixed, trl_metrics
from backend.runs.run_folder import RunFolder
from backend.trainer.health.recent import is_number

FIRST_COLUMNS = ("step", "prompt", "completion")
LAST_COLUMNS = ("advantage", "reward", "answer", "stop", "tokens")
"""TRL's `advantage`, and what its table does not have."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The event log of one step, without values that are not finite. `training` is empty before the first step;
    `evaluations`: split, or name of an evaluation set → metrics. `scale_rewards`: the setting in this step."""

    step: int
    training: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluations: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    groups: tuple[GroupRow, ...] = ()
    scale_rewards: str = "group"

    def metrics(self) -> dict[str, float]:
        """Every metric under TRL's name, with train/, eval/ or test/ before it."""
        named = prefixed("train", trl_metrics(self.training, self.scale_rewards))
        for split, metrics in self.evaluations.items():
            named |= prefixed(split, trl_metrics(metrics, self.scale_rewards))
        return named

    def logged(self, package: Any) -> dict[str, Any]:
        metrics: dict[str, Any] = self.metrics()
        if self.groups:
            names, lines = table(self.groups, reward_columns(self.groups))
            metrics["completions"] = package.Table(columns=names, data=list(lines))
        return metrics


def reward_columns(groups: Iterable[GroupRow]) -> list[str]:
    """Names of the reward functions that scored these groups, in order."""
    names: dict[str, None] = {}
    for group in groups:
        for completion in group.get("completions") or ():
            names |= dict.fromkeys(map(str, _mapping(completion.get("rewards"))))
    return list(names)


def table(groups: Iterable[GroupRow], rewards: Sequence[str]) -> tuple[list[str], Iterator[list[Any]]]:
    """(the columns of TRL's table of completions and ours, a row for each completion); missing values are None."""
    rows = (
        [
            *(group.get("step"), group.get("prompt"), completion.get("text")),
            *(_mapping(completion.get("rewards")).get(name) for name in rewards),
            *(completion.get("advantage"), completion.get("reward"), group.get("answer")),
            *(completion.get("stop"), completion.get("tokens")),
        ]
        for group in groups
        for completion in group.get("completions") or ()
    )
    return [*FIRST_COLUMNS, *rewards, *LAST_COLUMNS], rows


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class Sent:
    """Up to which step of training, and which evaluation of each split, a tracker has come."""

    step: int = 0
    evaluations: dict[str, int] = field(default_factory=dict[str, int])

    def news_in(self, record: StepRecord) -> StepRecord | None:
        """The part of a record that was not sent; None where all was."""
        is_new = bool(record.training) and record.step > self.step
        evaluations = {s: m for s, m in record.evaluations.items() if record.step > self.evaluations.get(s, -1)}
        if is_new:
            return replace(record, evaluations=evaluations)
        return replace(record, training={}, groups=(), evaluations=evaluations) if evaluations else None

    def add(self, record: StepRecord) -> None:
        if record.training:
            self.step = max(self.step, record.step)
        for split in record.evaluations:
            self.evaluations[split] = max(self.evaluations.get(split, -1), record.step)


class RecordReader:
    """Reads the records of a run, each once it is complete: when the next step samples, or the run has ended.
    `settings`: those with which the run began. `restarted` is called where the event log was cut back: earlier records
    come again. `ending`: the kind of the event log's last line where that is an ending."""

    def __init__(
        self, run: RunFolder, settings: Mapping[str, Any], restarted: Callable[[], None] = lambda: None
    ) -> None:
        self._run, self._scale_at_first = run, str(settings.get("scale_rewards", "group"))
        self._sets = tuple(settings.get("eval_data") or ())
        self._restarted = restarted
        self._event_log = Follower(run.events)
        self._begin()

    def _begin(self) -> None:
        self._completions = Follower(self._run.completions)
        self._lines: list[Event] = []
        self._record: StepRecord | None = None
        self._scale = self._scale_at_first
        self.ending = ""

    def read(self) -> Iterator[StepRecord]:
        """Records completed since the last call."""
        events: list[Event] | None = None
        while events is None or events:
            events = self._event_log.read()
            if self._event_log.restarted:
                self._begin()
                self._restarted()
            yield from [record for event in events for record in self._take(event)]

    def _take(self, event: Event) -> Iterator[StepRecord]:
        kind, step = event.get("kind"), event.get("step")
        self.ending = kind if kind in ENDINGS else ""
        if kind == "change":
            scale = _mapping(event.get("settings")).get("scale_rewards")
            self._scale = scale[-1] if isinstance(scale, list) and scale else self._scale
        elif kind == "step" and is_step(step):
            yield from self.rest()
            self._record = StepRecord(step, training=_numbers(event), scale_rewards=self._scale)
        elif kind == "eval" and is_step(step):
            if self._record is None or self._record.step != step:
                yield from self.rest()
                self._record = StepRecord(step, scale_rewards=self._scale)
            split, numbers = str(event.get("split") or "valid"), _numbers(event)
            found = by_set(numbers, self._sets) if split == "valid" else {split: numbers}
            self._record = replace(self._record, evaluations={**self._record.evaluations, **found})
        elif kind in ENDINGS or (kind == "phase" and event.get("phase") == "sampling"):
            yield from self.rest()

    def rest(self) -> Iterator[StepRecord]:
        """The last record, of a run that has ended."""
        record, self._record = self._record, None
        if record is not None:
            yield replace(record, groups=tuple(self._groups_of(record.step))) if record.training else record

    def _groups_of(self, step: int) -> Iterator[GroupRow]:
        while not (self._lines and _step_of(self._lines[-1]) > step) and (more := self._completions.read()):
            self._lines = more if self._completions.restarted else [*self._lines, *more]
        own = [line for line in self._lines if _step_of(line) == step]
        self._lines = [line for line in self._lines if _step_of(line) > step]
        yield from own  # pyright: ignore[reportReturnType]: a row as far as its step; its users expect missing keys


def _step_of(line: Event) -> int:
    step = line.get("step")
    return step if is_step(step) else 0


def _numbers(event: Event) -> dict[str, float]:
    return {str(name): value for name, value in _mapping(event.get("metrics")).items() if is_number(value)}


@dataclass(frozen=True, slots=True)
class AboutRun:
    """`settings` are those of the run without paths of this machine; `may_upload`: the user has allowed the network."""

    folder: RunFolder
    project: str
    name: str
    settings: dict[str, Any]
    may_upload: bool = False


class Tracker:
    """One run in one tracker. Its methods may raise anything and take any time: the run does not wait for them."""

    def open(self, about: AboutRun) -> Sent:
        """Begin, or continue after an earlier process, also where the event log was cut back. → how far that was;
        `Sent()` where everything is written again. Raises UserError."""
        raise NotImplementedError

    def send(self, record: StepRecord) -> None:
        """Take one record, of which nothing was sent yet."""
        raise NotImplementedError

    def flush(self, sent: Sent) -> None:
        """After all present records. Raises DiskError, and is called again then."""

    def close(self, ending: str) -> None:
        """The run is over: finished, stopped, failed, or "" where it was cut off."""
        raise NotImplementedError
