"""How a run changes and ends on its way: changes of settings, and conditions. config.yaml and `changes.json`, a list of
every change with the step from which on it holds, determine the run, so a resume repeats it exactly."""

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from backend.config.config import SETTINGS, Config, load, parse, problems
from backend.config.other_programs.translation import translate
from backend.config.setting import AT_RESUME, STAGE_KEYS, STEERABLE
from backend.config.stages import faults_in_course, first_step, scoring_of, stage_at, stage_data, stage_settings
from backend.config.updates import OF_THE_RATE, OWN
from backend.runs.events import RUN_FORMAT, EventLog, check_format, event_ends, is_number
from backend.runs.metric_names import COMPARISONS, EVALUATION, WINDOW, parse_condition
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import TrainingState
from backend.utils.disk import replace_file
from backend.utils.documents import read_json
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import about_path, quote

_ADVICE = "fix or delete it (the run then goes on without its changes)"


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that hold from `step` on: key → (value before, value from then on)."""

    step: int
    settings: dict[str, tuple[Any, Any]]

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "settings": {key: list(pair) for key, pair in self.settings.items()}}

    @property
    def sentence(self) -> str:
        """“From step 13 on: Learning Rate 1e-05 → 5e-06, Beta (KL weight) 0.1 → 0.”"""
        parts = [f"{SETTINGS[key].label} {_shown(old)} → {_shown(new)}" for key, (old, new) in self.settings.items()]
        return f"From step {self.step:,} on: {', '.join(parts)}."


_CHANGES = TypeAdapter(list[Change])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return "empty" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def changed(
    config: Config, asked: Mapping[str, Any], done: int = 0, *, at_resume: bool = False
) -> dict[str, tuple[Any, Any]]:
    """The changes that the raw settings `asked` make in `config`: key → (old, new). None means the default. `done`:
    steps that will have been done when the change begins to hold. `at_resume`: no trainer runs, so `AT_RESUME` may
    change too. Raises UserError with every problem."""
    translation = translate(asked)
    values, found = translation.values, translation.faults
    allowed = (*STEERABLE, *AT_RESUME) if at_resume else STEERABLE
    for key in dict.fromkeys([*values, *asked]):
        if key in SETTINGS and key not in allowed:
            label = SETTINGS[key].label
            fixed = f"{label} is fixed once a run has begun; clone the run to go on with another value."
            if key in AT_RESUME:
                fixed = f"{label} is fixed while a run trains; stop the run, and resume it with another value."
            found = [*found, ConfigProblem(key, fixed)]
        elif key not in SETTINGS and not translate({key: 1}).values.keys() & SETTINGS.keys():
            found = [*found, *problems({key: 1, "model": "-", "data": "-"})]
    if found:
        raise UserError(found)
    emptied = {key: SETTINGS[key].default for key, value in asked.items() if value is None and key in SETTINGS}
    old = config.model_dump()
    raw = old | emptied | values
    if found := problems(raw):
        raise UserError(found)
    new = parse(raw)
    pairs = {key: (old[key], getattr(new, key)) for key in allowed if getattr(new, key) != old[key]}
    if found := list(_problems_in_course(config, new, pairs, done)):
        raise UserError(found)
    return pairs


def _problems_in_course(config: Config, new: Config, changes: Mapping[str, Any], done: int) -> Iterator[ConfigProblem]:
    if "iters" in changes and (config.epochs or config.stages):
        what = "Epochs decides" if config.epochs else "The stages decide"
        yield ConfigProblem("iters", f"{what} how long this run is, so Iterations cannot change it.")
    elif "iters" in changes and new.iters < done:
        least = f"Iterations must be at least {done}, which are done when the change holds, not {new.iters}."
        yield ConfigProblem("iters", least)
    if config.lr_schedule == OWN and (of_rate := next((key for key in OF_THE_RATE if key in changes), None)):
        sentence = "The learning rate of this run is a program's schedule, which no setting changes."
        yield ConfigProblem(of_rate, sentence)
    if "reward_weights" in changes and config.stages:
        sentence = "The stages of this run have their own weights; clone the run to change them."
        yield ConfigProblem("reward_weights", sentence)
    yield from faults_in_course(config.model_dump(), new.model_dump())


def read_changes(run: RunFolder) -> list[Change]:
    """The changes of a run in the order of their steps. Raises UserError for a damaged file."""
    if not os.path.lexists(run.changes):
        return []
    try:
        changes = _CHANGES.validate_python(read_json(run.changes, "run", advice=_ADVICE)["changes"])
    except (ValidationError, TypeError, KeyError):
        raise UserError("run", about_path(run.changes, f" does not hold a list of changes; {_ADVICE}.")) from None
    # A key that no trainer writes could name other weights, rows or reward files than config.yaml does.
    strange = next((key for change in changes for key in change.settings if key not in (*STEERABLE, *AT_RESUME)), None)
    if strange is not None:
        problem = f" has {quote(strange, 30)}, which never changes during a run; {_ADVICE}."
        raise UserError("run", about_path(run.changes, problem))
    return changes


def write_changes(run: RunFolder, changes: Sequence[Change]) -> None:
    """Replace the file of changes: it is on disk when this returns. Raises DiskError."""
    kept = {"v": RUN_FORMAT, "changes": [change.to_dict() for change in changes]}
    replace_file(run.changes, json.dumps(kept, ensure_ascii=False, indent=1) + "\n")


def run_config(run: RunFolder, step: int | None = None) -> Config:
    """The settings of a run at a step, or at its end; config.yaml has those that it began with. Raises UserError."""
    check_format(run)  # before its settings, of which a newer version may have others
    config, changes = load(run.config), read_changes(run)
    if step is None and config.stages:  # a run that ended before its last stage has never had its settings
        step = max((event.get("step") or 0 for event in event_ends(run.events) if event["kind"] == "step"), default=0)
    return config_at(config, changes, step)


def config_at(config: Config, changes: Sequence[Change], step: int | None = None) -> Config:
    """The settings of a step: those of config.yaml, `config`, with every change that holds by then, and of its stage;
    without a step at the end of the run. Raises UserError where they do not fit together."""
    new = changed_values(changes, step)
    if config.stages:
        index = stage_at(config.stages, step)
        replaced = changed_values(changes, step, since=first_step(config.stages, index))
        of_stage = stage_settings(config.model_dump() | new, index)
        # A change in this stage replaces what the stage has planned.
        new |= {key: value for key, value in of_stage.items() if key not in replaced}
    return parse(config.model_dump() | new) if new else config


def own_config(config: Config, changes: Sequence[Change], step: int) -> Config:
    """`config_at` with the stages apart, the present one without changed keys, for a run that continues at `step`."""
    values = config.model_dump() | changed_values(changes, step)
    if config.stages:
        index = stage_at(config.stages, step)
        replaced = changed_values(changes, step, since=first_step(config.stages, index))
        kept = {key: value for key, value in config.stages[index].items() if key not in replaced}
        values["stages"] = [*config.stages[:index], kept, *config.stages[index + 1 :]]
    return parse(values)


def stage_configs(config: Config) -> list[Config]:
    """The settings of each stage of a run, with its training rows and reward functions; [config] without stages."""
    values, configs = config.model_dump(), list[Config]()
    for index in range(len(config.stages)):
        other = {"reward_functions": scoring_of(values, index)["reward_functions"], "stages": [], "reward_weights": []}
        configs.append(parse(values | stage_settings(values, index) | stage_data(values, index) | other))
    return configs or [config]


def changed_values(changes: Sequence[Change], step: int | None = None, since: int = 0) -> dict[str, Any]:
    held = (change for change in changes if since <= change.step and (step is None or change.step <= step))
    return {key: pair[1] for change in held for key, pair in change.settings.items()}


def request_change(run: RunFolder, asked: Mapping[str, Any]) -> None:
    """Ask the trainer of a run to change settings, beside a request that it has not taken yet. Raises UserError."""
    waiting = read_request(run.change_request)
    replace_file(run.change_request, json.dumps({"settings": waiting | dict(asked)}, ensure_ascii=False))


def read_request(path: Path) -> dict[str, Any]:
    try:
        settings = read_json(path, "run")["settings"]
    except (UserError, TypeError, KeyError):
        return {}
    return settings if isinstance(settings, dict) else {}


class Steering:
    """The changes of settings of one run; `config`: those of config.yaml. Raises UserError."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._run, self.config = run, config
        self.changes = read_changes(run)
        self._in_event_log: list[Any] = []  # the changes that the event log holds after its last step

    def note_past(self, event: Mapping[str, Any]) -> None:
        """Take an event of the event log: a resume may apply a change once more that was logged before the kill."""
        if event.get("kind") == "step":
            self._in_event_log.clear()
        elif event.get("kind") == "change":
            self._in_event_log.append({key: event.get(key) for key in ("step", "settings")})

    def log(self, change: Change, event_log: EventLog) -> None:
        if change.to_dict() not in self._in_event_log:
            event_log.write("change", **change.to_dict())

    def config_at(self, step: int) -> Config:
        return config_at(self.config, self.changes, step)

    def beginning_at(self, step: int) -> list[Change]:
        """The changes that hold from `step` on, first that of a stage which begins there."""
        found = [change for change in self.changes if change.step == step]
        stages = self.config.stages
        if not stages or step == 1 or first_step(stages, index := stage_at(stages, step)) != step:
            return found
        earlier = [change for change in self.changes if change.step < step]
        old, new = (config_at(self.config, earlier, at).model_dump() for at in (step - 1, step))
        own = own_config(self.config, earlier, step - 1).model_dump()
        old |= stage_data(own, index - 1) | scoring_of(own, index - 1)
        new |= stage_data(own, index) | scoring_of(own, index)
        pairs = {key: (old[key], new[key]) for key in STAGE_KEYS if key != "iters" and old[key] != new[key]}
        return [Change(step, pairs), *found] if pairs else found

    def take(self, begun: int) -> tuple[str, str]:
        """Record the change that the window has requested. → level and sentence."""
        asked: dict[str, Any] = {}
        taken = self._run.change_request.with_suffix(".taken")
        with suppress(OSError):
            # A rename succeeds for one reader, and what the window writes meanwhile is a new file.
            self._run.change_request.rename(taken)
            asked = read_request(taken)
            taken.unlink()
        if not asked:
            return "warning", "The change was not made: its request cannot be read."
        try:
            change = self.record(asked, begun)
        except UserError as error:
            return "warning", " ".join(["The change was not made.", *(fault.sentence for fault in error.faults)])
        return "info", change.sentence if change else "Nothing was changed: the settings have these values already."

    def record(self, asked: Mapping[str, Any], begun: int, *, at_resume: bool = False) -> Change | None:
        """Record a change that holds after `begun`, the last step that has begun; None where nothing changes."""
        step = max([begun + 1, *(change.step for change in self.changes)])
        pairs = changed(self.config_at(step), asked, done=step - 1, at_resume=at_resume)
        if not pairs:
            return None
        change = Change(step, pairs)
        write_changes(self._run, [*self.changes, change])
        self.changes.append(change)
        return change


PlannedEnd = tuple[str, str]  # why a run finishes before its last step: "stop_when" or "early_stopping", and a sentence


class MetricWatch:
    """The metrics of the last steps and of the newest evaluation, for `stop_when`."""

    def __init__(self) -> None:
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._evaluation: Mapping[str, Any] = {}
        self.seen: set[str] = set()
        self._warned_of: set[str] = set()

    def take(self, event: Mapping[str, Any]) -> None:
        metrics = event.get("metrics")
        if not isinstance(metrics, dict):
            return
        if event.get("kind") == "step":
            self._steps.append(metrics)
            self.seen.update(metrics)
        elif event.get("kind") == "eval" and event.get("split") == "valid":
            self._evaluation = metrics

    def value(self, metric: str) -> float:
        """The mean of the last `WINDOW` steps, NaN until there are as many; of held-out metrics the newest."""
        is_held_out = metric.startswith(EVALUATION)
        rows = [self._evaluation] if is_held_out else list(self._steps)
        found = [row.get(metric.removeprefix(EVALUATION)) for row in rows]
        values = [float(value) for value in found if is_number(value)]
        return sum(values) / len(values) if len(values) == (1 if is_held_out else WINDOW) else math.nan

    def met(self, conditions: Sequence[str]) -> PlannedEnd | None:
        for condition in map(parse_condition, conditions):
            value = self.value(condition.metric)
            if COMPARISONS[condition.sign](value, condition.limit):
                held_out = condition.metric.startswith(EVALUATION)
                over = "in the newest evaluation" if held_out else f"over the last {WINDOW} steps"
                return "stop_when", f"{condition} is met: {value:.4g} {over}"
        return None

    def new_warnings(self, conditions: Sequence[str]) -> list[str]:
        if len(self._steps) < WINDOW:
            return []
        metrics = {condition.metric for condition in map(parse_condition, conditions)}
        unknown = {name for name in metrics if not name.startswith(EVALUATION)} - self.seen - self._warned_of
        self._warned_of |= unknown
        never = "Stop when names {}, which no step of this run has: the condition is never met."
        return [never.format(name) for name in sorted(unknown)]


def early_stop(state: TrainingState, config: Config, metric: str) -> PlannedEnd | None:
    patience = config.early_stopping_patience
    if not patience or state.scores_without_gain < patience or state.best_score is None:
        return None
    kind, times = ("Held-out", "evaluation") if metric.startswith(EVALUATION) else ("Training", "checkpoint")
    what = config.best_metric or f"{kind} {metric.rpartition('/')[2]}"
    verb = "fallen" if config.best_is_lowest else "risen"
    gain = f" by more than {config.early_stopping_min_delta:g}" if config.early_stopping_min_delta else ""
    count = f"{state.scores_without_gain} {times}{'' if state.scores_without_gain == 1 else 's'}"
    best = f"checkpoint {state.best_step}" if state.best_step else "the model before training"
    sentence = f"{what} has not {verb}{gain} in {count}. The best, {state.best_score:.4g}, is that of {best}"
    return "early_stopping", sentence
