"""`train` and `resume`: a run in this process, of objects of the program."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from backend.config.config import Config, dump, load, parse, read, resolve_paths
from backend.config.other_programs.translation import read_file, summary
from backend.data.images import with_paths
from backend.data.rows import row_name
from backend.rewards.allowed_code import allow_named
from backend.rewards.calls import class_name
from backend.runs.events import check_format, has_finished, read_events
from backend.runs.run_folder import RunFolder, default_run_name, find_run, make_run_folder
from backend.trainer.control import Stopped, handlers_restored
from backend.trainer.library.own_functions import OwnObjects, mark_rollout, program_error, require_rollout
from backend.trainer.machine import relax_gpu_timeout
from backend.utils.disk import replace_file
from backend.utils.errors import UserError
from backend.utils.hub_cache import require_hub_address
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.trainer.library.own_engine import GivenOptimizer, RolloutFunction
    from backend.trainer.run_inputs import RunInputs
    from backend.training.optimizers import OwnUpdates

FOLDER = "data"  # of a run: the rows of each split, as JSON lines
_SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}
_METHODS = ("on_step", "on_evaluation", "on_save", "on_end")

Settings = Config | Mapping[str, Any] | str | os.PathLike[str]
RewardFunctions = Sequence[str | Callable[..., Any]]
Tools = Sequence[Callable[..., Any]]
Environments = Callable[..., Any] | Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """`ending` and the last finished `step`, with the event log's last `sentence`. Every verb takes `folder`."""

    folder: Path
    ending: Literal["finished", "stopped", "failed"]
    step: int
    sentence: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of every step, each with its `step`, from the first; read from the event log at every call."""
        events = read_events(RunFolder(self.folder).events)
        return [{"step": event["step"], **event["metrics"]} for event in events if event["kind"] == "step"]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        events = (event for event in read_events(RunFolder(self.folder).events) if event["kind"] == "eval")
        return [{"step": event["step"], "split": event["split"], **event["metrics"]} for event in events]


class RunFailed(UserError):
    """A run that began and failed for a reason that its user can fix. It is saved in `run.folder`."""

    def __init__(self, run: TrainedRun) -> None:
        setting, _, sentence = run.sentence.partition(": ")
        super().__init__(*((setting, sentence) if setting.isidentifier() and sentence else ("run", run.sentence)))
        self.run = run


class StopTraining(Exception):
    """Stops the run, saved, after the step. Its text completes “Stopped at step 20 because …”."""


class Callback:
    """Follows a run. Each method may raise StopTraining; other exceptions end the run as failed, saved."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is finished; `metrics` are those of the event log."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float], split: str) -> None:
        """Held-out prompts were answered after `step`; `split` is "valid" or "test"."""

    def on_save(self, step: int, checkpoint: Path) -> None:
        """A checkpoint is complete on disk."""

    def on_end(self, run: TrainedRun) -> None:
        """The run has ended, in whatever way; its files are closed. StopTraining has no effect here."""


class CallbackCalls:
    """Calls the callbacks of one run after the event log has the event; `look` raises what they raised."""

    def __init__(self, callbacks: Sequence[Any], folder: Path) -> None:
        for callback in callbacks:
            if not any(callable(getattr(callback, method, None)) for method in _METHODS):
                sentence = f"{class_name(callback)} has none of {', '.join(_METHODS)}; derive it from backend.Callback."
                raise UserError("callbacks", sentence)
        self._callbacks, self._folder = callbacks, folder
        self._resumed_from: int | None = None
        self._raised: Stopped | UserError | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Call the method for an event of the event log. Never raises: `look` does."""
        kind, step = event["kind"], event.get("step", 0)
        if kind == "started":
            self._resumed_from = event.get("resumed_from")
        elif kind == "step":
            self._call("on_step", step, event["metrics"])
        elif kind == "eval":
            self._call("on_evaluation", step, event["metrics"], event["split"])
        elif kind == "checkpoint" and step != self._resumed_from:  # a resumed run repeats its first checkpoint's event
            self._call("on_save", step, self._folder / event["path"])

    def look(self) -> None:
        """Raises Stopped or UserError where a callback has raised."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def end(self, run: TrainedRun) -> None:
        self._call("on_end", run)
        if isinstance(self._raised, UserError):
            self.look()

    def _call(self, method: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            try:
                getattr(callback, method, lambda *_: None)(*arguments)
            except StopTraining as stop:
                why = str(stop) or f"{method} of {class_name(callback)} asked for it"
                self._raised = self._raised or Stopped(why)
            except BaseException as error:  # SystemExit too: the run is to be saved first
                self._raised = self._raised or program_error("callbacks", f"{method} of {class_name(callback)}", error)


def write_dataset(dataset: Any, folder: Path) -> None:
    """Write rows (an iterable of mappings), or splits of such rows by name, below `folder`. Raises UserError."""
    splits = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    for name, rows in splits.items():
        if name not in _SPLITS:
            raise UserError("dataset", f"A dataset has the splits train, valid and test, not {quote(name, 40)}.")
        if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
            what = f"Rows are an iterable of mappings, not {type(rows).__name__}; a path or an id goes under data."
            raise UserError("dataset", what)
        folder.mkdir(exist_ok=True)
        replace_file(folder / f"{_SPLITS[name]}.jsonl", _lines(rows, name))


def _lines(rows: Iterable[Any], split: str) -> Iterator[bytes]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UserError("dataset", f"Row {number:,} of {split} is {type(row).__name__}, not a mapping of columns.")
        cells: list[str] = []
        for name, value in with_paths(dict(row), f"{split}.jsonl", row_name(number - 1, split)).items():
            try:
                cells.append(json.dumps({name: value}, ensure_ascii=False)[1:-1])
            except (TypeError, ValueError, RecursionError):
                what = f"The column {quote(name, 40)} in row {number:,} of {split} holds what JSON cannot"
                raise UserError("dataset", f"{what}: a run keeps its rows as text.") from None
        yield f"{{{', '.join(cells)}}}\n".encode(errors="replace")


def train(
    config: Settings,
    *,
    reward_functions: RewardFunctions | None = None,
    reward_funcs: RewardFunctions | None = None,
    tools: Tools = (),
    environment_factory: Environments | None = None,
    rollout_func: RolloutFunction | None = None,
    dataset: Any = None,
    callbacks: Sequence[Any] = (),
    optimizer: GivenOptimizer | None = None,
    schedule: Callable[[int], Any] | None = None,
    name: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
) -> TrainedRun:
    """Train in this process and return the run once it has ended, finished or stopped.

    `config`: a `Config`, a mapping of settings, or the path of a YAML file. `reward_functions`, or `reward_funcs` as
    in TRL: names as in the settings, and callables. `tools`, `environment_factory`, `rollout_func`: as for TRL.
    `dataset`: rows, or splits of rows by name. `callbacks`: see `backend.Callback`. `optimizer`: an
    mlx.optimizers.Optimizer, or a callable that makes one of a learning rate; `schedule`: the number of an update, from
    0, → its learning rate. `name` and `runs_dir` are as on the command line.

    In the main thread Ctrl-C and SIGTERM mean "save and stop". Raises UserError for anything that the user can fix:
    before the first step, with nothing left behind; as RunFailed after it, with everything saved. Raises RuntimeError
    for a bug of ours, whose traceback is on stderr and in the run's event log.
    """
    require_hub_address()
    if isinstance(config, Config):
        raw = config.model_dump(exclude_unset=True)
        if raw.get("epochs"):  # they decide; `iters` is set as well where the settings came from a file
            raw.pop("iters", None)
        raw = resolve_paths(Path.cwd(), raw)
    elif isinstance(config, Mapping):
        raw = resolve_paths(Path.cwd(), cast("Mapping[str, Any]", config))
    else:
        raw = read(os.fspath(config))
    origin = summary(read_file(raw), Path(config).name if isinstance(config, str | os.PathLike) else "the settings")
    raw |= {} if name is None else {"run_name": name}
    given_functions = _given(reward_functions, reward_funcs)
    own = OwnObjects(given_functions or [], tools, environment_factory)
    with _new_folder(raw, runs_dir) as folder:
        raw |= ({} if given_functions is None else {"reward_functions": []}) | own.settings(folder.path)
        if dataset is not None:
            write_dataset(dataset, folder.path / FOLDER)
            raw |= {"data": str(folder.path / FOLDER)}
        calls = CallbackCalls(callbacks, folder.path)
        settings = parse(raw)
        mark_rollout(folder.path, rollout_func, settings)
        _prepare_engine(settings)
        from backend.distributed.machine_check import require_one_machine
        from backend.trainer.library.own_engine import given_updates
        from backend.trainer.preflight import preflight

        updates, described = given_updates(optimizer, schedule, settings)
        raw |= described
        settings = parse(raw)
        require_one_machine(settings, "A run of a program's train()")
        inputs = preflight(settings, runs_dir=folder.path.parent, begin=own.scorer, of_program=True)
        allow_named(raw)
        replace_file(folder.config, dump(settings, origin))
    return _train(settings, folder, inputs, calls, "backend.train", {}, updates, rollout_func)


def resume(
    run: str | os.PathLike[str],
    *,
    reward_functions: RewardFunctions | None = None,
    reward_funcs: RewardFunctions | None = None,
    tools: Tools = (),
    environment_factory: Environments | None = None,
    rollout_func: RolloutFunction | None = None,
    callbacks: Sequence[Any] = (),
    optimizer: GivenOptimizer | None = None,
    schedule: Callable[[int], Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> TrainedRun:
    """Continue a run, its folder or its name, from its newest whole checkpoint; `changes` are settings from its next
    step on. Whatever was an object of the program is needed again, callables by the same names. Raises as `train`."""
    require_hub_address()
    folder = find_run(os.fspath(run))
    check_format(folder)
    settings = load(folder.config)
    if has_finished(folder) and not changes:
        what = f"The run {folder.name} has finished; give it more steps, as in changes={{'iters': 200}}."
        raise UserError("run", what)
    require_rollout(folder.path, rollout_func)
    own = OwnObjects(_given(reward_functions, reward_funcs) or [], tools, environment_factory)
    calls = CallbackCalls(callbacks, folder.path)
    _prepare_engine(settings)
    from backend.trainer.library.own_engine import given_updates, require_same_updates
    from backend.trainer.run_inputs import read_inputs

    updates, described = given_updates(optimizer, schedule, settings)
    require_same_updates(settings, described)
    inputs = read_inputs(settings, scorer=own.scorer(settings))
    return _train(settings, folder, inputs, calls, "backend.resume", changes, updates, rollout_func)


def _given(functions: RewardFunctions | None, trl_name: RewardFunctions | None) -> RewardFunctions | None:
    if functions is not None and trl_name is not None:
        raise UserError("reward_funcs", "reward_funcs is TRL's name for reward_functions; give one of the two.")
    return trl_name if functions is None else functions


@contextlib.contextmanager
def _new_folder(raw: Mapping[str, Any], runs_dir: str | os.PathLike[str] | None) -> Iterator[RunFolder]:
    named = raw.get("run_name")
    model, kind, mode = (str(raw.get(key) or "") for key in ("model", "train_type", "train_mode"))
    name = str(named or default_run_name(model or "run", kind or "lora", mode or "grpo"))
    folder = make_run_folder(name, Path(runs_dir) if runs_dir else None, reuse=bool(named))
    before = set(folder.path.iterdir())
    try:
        yield folder
    except BaseException:
        for made in set(folder.path.iterdir()) - before:
            shutil.rmtree(made) if made.is_dir() else made.unlink()
        if not before:
            with contextlib.suppress(OSError):
                folder.path.rmdir()
        raise


def _prepare_engine(settings: Config) -> None:
    relax_gpu_timeout(settings)
    from backend.engine import cpu_setup

    cpu_setup.load_openblas()


def _train(
    settings: Config,
    folder: RunFolder,
    inputs: RunInputs,
    calls: CallbackCalls,
    command: str,
    changes: Mapping[str, Any] | None,
    updates: OwnUpdates,
    rollout: RolloutFunction | None,
) -> TrainedRun:
    from backend.sampling.rollout import Sampler
    from backend.trainer import run_process
    from backend.trainer.library.own_engine import OwnSampler
    from backend.trainer.run_context import Engine, load_context

    engine = Engine(updates, Sampler if rollout is None else functools.partial(OwnSampler, rollout, settings))
    is_main = threading.current_thread() is threading.main_thread()
    with handlers_restored() if is_main else contextlib.nullcontext():
        told = {"command": command, "echo": calls.take, "look": calls.look}
        load = functools.partial(load_context, engine=engine)
        ending = run_process.train(settings, folder, **told, inputs=inputs, changes=changes, load=load)
    run = TrainedRun(folder.path, cast("Any", ending.kind), ending.step, ending.sentence)
    calls.end(run)
    if ending.exit_code == 1:
        raise RuntimeError(f"{ending.sentence} The run is {folder.path}; its event log has the traceback.")
    if run.ending == "failed":
        raise RunFailed(run)
    return run
