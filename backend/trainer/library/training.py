"""`train` and `resume`: a run in this process, of settings, functions, rows and callbacks that are objects of the program."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from backend.config.config import Config, dump, load, parse, read, resolve_paths
from backend.rewards.catalogue.allowed_code import allow_named
from backend.runs.events import has_finished
from backend.runs.run_folder import RunFolder, default_run_name, find_run, make_run_folder
from backend.runs.run_format import check_format
from backend.trainer.library.callbacks import CallbackCalls
from backend.trainer.library.own_functions import OwnCalls, OwnFunctions, begin_own_scorer
from backend.trainer.library.trained_run import RunFailed, TrainedRun
from backend.trainer.machine.gpu_timeout import relax_gpu_timeout
from backend.trainer.stop_signals import handlers_restored
from backend.utils.environment import require_environment
from backend.utils.errors import UserError
from backend.utils.text import quote
from backend.utils.whole_file import replace_file

if TYPE_CHECKING:
    from backend.trainer.ending import Ending
    from backend.trainer.library.own_optimizer import GivenOptimizer
    from backend.trainer.run_inputs import RunInputs
    from backend.trainer.step_parts import Engine


# A dataset that is an object of the program, written into the run's folder: the run can then be resumed, cloned and
# evaluated as any other.

FOLDER = "data"
"""Of a run: the rows of each split, as JSON lines."""
MOST_BYTES = 1 << 30
"""Of a split as text. What is larger has a file of its own already, or should."""
_SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


def write_dataset(dataset: Any, folder: Path) -> None:
    """Write rows (an iterable of mappings, as a list or a `datasets.Dataset`), or splits of such rows by name, below `folder`. Raises UserError
    on `dataset`, and DiskError."""
    splits = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    for name, rows in splits.items():
        if name not in _SPLITS:
            raise UserError("dataset", f"A dataset has the splits train, valid and test, not {quote(name, 40)}.")
        if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
            raise UserError(
                "dataset",
                f"Rows are an iterable of mappings, not {type(rows).__name__}; a path or an id goes under data.",
            )
        folder.mkdir(exist_ok=True)
        replace_file(folder / f"{_SPLITS[name]}.jsonl", _lines(rows, name))


def _lines(rows: Iterable[Any], split: str) -> Iterator[bytes]:
    size = 0
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UserError("dataset", f"Row {number:,} of {split} is {type(row).__name__}, not a mapping of columns.")
        line = _line(row, f"row {number:,} of {split}")
        size += len(line)
        if size > MOST_BYTES:
            raise UserError(
                "dataset",
                f"The rows of {split} take more than {MOST_BYTES >> 30} GB; write them to a file, and name it under data.",
            )
        yield line


def _line(row: Mapping[Any, Any], where: str) -> bytes:
    try:
        return json.dumps(dict(row), ensure_ascii=False).encode(errors="replace") + b"\n"
    except (TypeError, ValueError, RecursionError):
        raise UserError(
            "dataset",
            f"The column {quote(_odd_column(row), 40)} in {where} holds what JSON cannot: a run keeps its rows as text.",
        ) from None


def _odd_column(row: Mapping[Any, Any]) -> Any:
    for name, value in row.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError, RecursionError):
            return name
    return ""


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Settings = Config | Mapping[str, Any] | str | os.PathLike[str]
RewardFunctions = Sequence[str | Callable[..., Any]]


def train(
    config: Settings,
    *,
    reward_functions: RewardFunctions | None = None,
    dataset: Any = None,
    callbacks: Sequence[Any] = (),
    optimizer: GivenOptimizer | None = None,
    schedule: Callable[[int], Any] | None = None,
    name: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
) -> TrainedRun:
    """Train in this process and return the run once it has ended, finished or stopped.

    `config`: a `Config`, a mapping of settings, or the path of a YAML file. `reward_functions`: names as in the settings, and callables, which run
    in this process. `dataset`: rows, or splits of rows by name; they are copied into the run's folder. `callbacks`: see `backend.Callback`.
    `optimizer`: an mlx.optimizers.Optimizer, or a callable that makes one of a learning rate; `schedule`: the number of an update, from 0, → its
    learning rate. They take the place of the settings of these names. `name` and `runs_dir` of the run's folder are as on the command line.

    In the main thread Ctrl-C and SIGTERM mean "save and stop", and have their old meaning again afterwards; in any other thread they stay the
    program's. Raises UserError for anything that can be mended: before the first step, with nothing left behind; as RunFailed after it, with everything
    saved. Raises RuntimeError for a bug of ours, whose traceback is on stderr and in the run's event log.
    """
    require_environment()
    raw = _raw(config) | ({} if name is None else {"run_name": name})
    own = OwnFunctions.of(reward_functions or [])
    with _new_folder(raw, runs_dir) as folder:
        if reward_functions is not None:
            raw |= {"reward_functions": own.write(folder.path)} | ({"reward_isolation": "thread"} if own.calls else {})
        if dataset is not None:
            write_dataset(dataset, folder.path / FOLDER)
            raw |= {"data": str(folder.path / FOLDER)}
        CallbackCalls(callbacks, folder.path)
        _prepare_engine(parse(raw))
        from backend.trainer.library.own_updates import GivenUpdates

        given = GivenUpdates(optimizer, schedule, parse(raw))
        raw |= given.settings(parse(raw))
        settings, inputs = _checked(raw, folder, own.calls)
        allow_named(raw)
        replace_file(folder.config, dump(settings))
    return _train(settings, folder, inputs, callbacks, "backend.train", engine=given.engine())


def resume(
    run: str | os.PathLike[str],
    *,
    reward_functions: RewardFunctions | None = None,
    callbacks: Sequence[Any] = (),
    optimizer: GivenOptimizer | None = None,
    schedule: Callable[[int], Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> TrainedRun:
    """Go on with a run from its newest whole checkpoint, as `train` would have; `changes` are settings from its next step on.

    `run`: its folder or its name. A run that was trained with callables needs those of the same names again, in `reward_functions`, and one
    with an optimizer or a schedule of the program the same again. Raises as `train`.
    """
    require_environment()
    folder = find_run(os.fspath(run))
    check_format(folder)
    settings = load(folder.config)
    if has_finished(folder) and not changes:
        raise UserError(
            "run", f"The run {folder.name} has finished; give it more steps, as in changes={{'iters': 200}}."
        )
    own = OwnFunctions.of(reward_functions or [])
    _prepare_engine(settings)
    from backend.trainer.library.own_updates import GivenUpdates

    given = GivenUpdates(optimizer, schedule, settings)
    given.require_those_of(settings)
    scorer = begin_own_scorer(settings, own.calls)
    try:
        from backend.trainer.run_inputs import RunInputs, read_rows

        scorer.load()
        inputs = RunInputs(read_rows(settings, scorer), scorer)
    except BaseException:
        scorer.close()
        raise
    return _train(settings, folder, inputs, callbacks, "backend.resume", changes, engine=given.engine())


def _raw(config: Settings) -> dict[str, Any]:
    if isinstance(config, Config):
        raw = config.model_dump(exclude_unset=True)
        if raw.get("epochs"):  # they decide; `iters` is set as well where the settings came from a file
            raw.pop("iters", None)
        return resolve_paths(Path.cwd(), raw)
    if isinstance(config, Mapping):
        return resolve_paths(Path.cwd(), cast("Mapping[str, Any]", config))
    return read(os.fspath(config))


@contextlib.contextmanager
def _new_folder(raw: Mapping[str, Any], runs_dir: str | os.PathLike[str] | None) -> Iterator[RunFolder]:
    """The run's folder while it is filled; where that fails, what was put into it goes, and the folder too if it is new."""
    named = raw.get("run_name")
    model, train_type, train_mode = (
        str(raw.get(key) or default)
        for key, default in (("model", "run"), ("train_type", "lora"), ("train_mode", "grpo"))
    )
    name = str(named or default_run_name(model, train_type, train_mode))
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


def _checked(raw: Mapping[str, Any], folder: RunFolder, calls: OwnCalls) -> tuple[Config, RunInputs]:
    settings = parse(raw)
    from backend.distributed.check.machine_check import require_one_machine
    from backend.trainer.preflight import preflight

    require_one_machine(settings, "A run of a program's train()")

    return settings, preflight(
        raw, runs_dir=folder.path.parent, begin=lambda config: begin_own_scorer(config, calls), of_program=True
    )


def _prepare_engine(settings: Config) -> None:
    """What has to be done before mlx is imported, if that is still to come."""
    relax_gpu_timeout(settings)
    from backend.engine.cpu import blas
    from backend.models import transformers_scan

    blas.prepare()
    transformers_scan.prepare()


def _train(
    settings: Config,
    folder: RunFolder,
    inputs: RunInputs,
    callbacks: Sequence[Any],
    command: str,
    changes: Mapping[str, Any] | None = None,
    *,
    engine: Engine,
) -> TrainedRun:
    from backend.trainer import run_process
    from backend.trainer.parts import load_parts

    calls = CallbackCalls(callbacks, folder.path)
    is_main = threading.current_thread() is threading.main_thread()
    with handlers_restored() if is_main else contextlib.nullcontext():
        ending = run_process.train(
            settings, folder, command=command, echo=calls.take, inputs=inputs, changes=changes, look=calls.look,
            load=functools.partial(load_parts, engine=engine),
        )  # fmt: skip
    run = _trained(folder, ending)
    calls.end(run)
    if ending.exit_code == 1:
        raise RuntimeError(f"{ending.sentence} The run is {folder.path}; its event log has the traceback.")
    if run.ending == "failed":
        raise RunFailed(run)
    return run


def _trained(folder: RunFolder, ending: Ending) -> TrainedRun:
    return TrainedRun(folder.path, cast("Any", ending.kind), ending.step, ending.sentence)
