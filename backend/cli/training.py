"""Shared by the verbs that train: checked run folders, log.txt, displays, restarts, and multiple machines."""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from backend.cli.common import (
    FINISHED,
    IS_LOG_VARIABLE,
    STOPPED,
    logging_to,
    stdout_is_log,
    tell,
    tell_error,
    tell_json,
)
from backend.config.config import SETTINGS, TEXTS, Config, dump, parse, problems, read, resolve_paths
from backend.config.other_programs.translation import account, read_file, summary
from backend.config.setting import AT_RESUME
from backend.distributed.hosts_file import allow_hosts, require_hosts
from backend.distributed.launcher import launch_command
from backend.distributed.ranks import RESTART_RANKS, Orders
from backend.rewards.allowed_code import allow_named, require_allowed
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder, default_run_name, held_for_launch, hold_lock, make_run_folder
from backend.runs.saved_weights import with_adapter
from backend.runs.steering import run_config
from backend.trainer.control import StopPending, do_nothing, handlers_restored, look_for_stop_word, on_stop_signals
from backend.trainer.machine import relax_gpu_timeout
from backend.utils.command import backend_command, backend_environment
from backend.utils.disk import replace_file
from backend.utils.documents import parse_yaml
from backend.utils.errors import UserError, log_traceback
from backend.utils.files import resolved, user_path
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.trainer.run_inputs import RunInputs


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run folder with config.yaml, its settings, and the rows and rewards loaded to check them. `lock`: the run's
    lock, if this process already has it. `changes`: settings of a resumed run to change from its next step on.
    `warnings`: messages for the event log. `origin`: a message for it that the terminal has had."""

    folder: RunFolder
    settings: Config
    inputs: RunInputs | None = None
    lock: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    origin: str = ""


def check_settings(
    raw: Mapping[str, Any], runs_dir: Path | None = None, look: Callable[[], None] = do_nothing
) -> tuple[Config, RunInputs]:
    """The settings and their loaded inputs. Calls `look` regularly. Raises UserError with all problems."""
    settings = parse(raw)
    relax_gpu_timeout(settings)  # before the import below, which imports mlx
    from backend.runs.start_progress import progress_listener, with_stop_check
    from backend.trainer.preflight import preflight

    with progress_listener(tell_error), with_stop_check(look):
        return settings, preflight(settings, runs_dir=runs_dir)


def new_run(raw: dict[str, Any], runs_dir: Path | None, name: str | None, origin: str = "") -> PreparedRun:
    """Check the settings and create a run folder for them; `origin` as in `dump`. Raises UserError."""
    # Paths in `raw` are relative to the working directory; config.yaml will be read again in the run's folder.
    raw = with_adapter(resolve_paths(Path.cwd(), raw), runs_dir) | ({} if name is None else {"run_name": name})
    settings, inputs = check_settings(raw, runs_dir)
    allow_named(raw)
    allow_hosts(settings.hosts)
    return PreparedRun(write_new_run(settings, runs_dir, origin), settings, inputs, origin=origin)


def write_new_run(settings: Config, runs_dir: Path | None, origin: str = "") -> RunFolder:
    """Create a run folder with these settings. Raises UserError."""
    folder_name = settings.run_name or default_run_name(settings.model, settings.train_type, settings.train_mode)
    folder = make_run_folder(folder_name, runs_dir, reuse=bool(settings.run_name))
    replace_file(folder.config, dump(settings, origin))
    return folder


def prepared_run(path: Path, *, allow_code: bool = False) -> PreparedRun:
    """Prepare a folder that the window created, with config.yaml and no event log; errors and stops are logged there.
    Raises UserError, also for a reward file without permission, and exits with STOPPED on a stop request."""
    folder = RunFolder(resolved(user_path(str(path), "run")))
    if not folder.config.is_file():
        raise UserError("run", f"The folder {path} holds no config.yaml.")
    if folder.has_event_log:
        raise UserError("run", f"The run {folder.name} has an event log already; resume it, or start another.")
    # From now on, so that nobody takes a process that goes through a large dataset for one that has ended.
    lock = hold_lock(folder)
    folder.control.unlink(missing_ok=True)  # of a process that is no more
    try:
        raw = with_adapter(read(folder.config), folder.path.parent)
        require_allowed(raw, allow=allow_code)
        return PreparedRun(folder, *check_settings(raw, folder.path, partial(look_for_stop_word, folder)), lock=lock)
    except UserError as error:
        with logging_to(folder):  # of a reward file that cannot be loaded
            end_before_start(folder, lock, "failed", f"{error}{log_traceback(error.traceback)}")
        raise
    except StopPending:
        sentence = "Stopped before its first step, while its settings and data were checked."
        end_before_start(folder, lock, "stopped", sentence)
        tell_error(sentence)
        raise typer.Exit(STOPPED) from None


def end_before_start(folder: RunFolder, lock: int, kind: str, sentence: str) -> None:
    folder.control.unlink(missing_ok=True)
    event_log = EventLog(folder.events)
    event_log.write(kind, step=0, reason=kind, sentence=sentence)
    event_log.close()
    os.close(lock)


def read_settings(
    path: str | Path, changes: Sequence[str] | None = None, *, explain: bool = False
) -> tuple[dict[str, Any], str]:
    """(the settings of a YAML file in our keys with `--set` changes, what was made of a file for another program). Says
    the latter on stderr, with `explain` each key. Raises UserError with every problem if a key cannot be translated."""
    raw, changed = read(path), parse_changes(changes or [])
    translation = read_file(raw, changed)
    origin = summary(translation, Path(path).name)
    for line in account(translation) if explain else [origin] if origin and not translation.faults else []:
        tell_error(line)
    if translation.faults:
        raise UserError(problems(raw | changed) or translation.faults)
    return translation.values, origin


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """`--set key=value …` as YAML, text settings as text (`run_name=007`; not `lr_schedule={…}`). Raises UserError."""
    parsed: dict[str, Any] = {}
    for text in changes:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise UserError("set", f"--set {quote(text)} must be written as key=value.")
        kind = SETTINGS[key].kind if key in SETTINGS else ""
        is_text = kind in TEXTS and not (kind == "choice" and value.startswith("{"))
        parsed[key] = value if is_text else parse_yaml(value, f"--set {quote(text)}", key)
    return parsed


def restart(verb: str, *arguments: str) -> NoReturn:
    command = backend_command(verb, *arguments)
    # exec skips exit handlers, such as a reward file's that stops its judge.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]: multiprocessing ends its children with it too
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(command[0], command, backend_environment())


def display_options(stream: bool, progress: bool | None) -> Sequence[str]:
    """The `Stream` and `Live` options as arguments."""
    live = () if progress is None else ("--progress" if progress else "--no-progress",)
    return [*(("--stream",) if stream else ()), *live]


def hosts_setting(text: str | None) -> dict[str, Any]:
    """Parse --hosts into settings; "none" is this machine alone. Raises UserError for an invalid path."""
    if text is None:
        return {}
    return {"hosts": "" if text == "none" else str(user_path(text, "hosts").absolute())}


def machine_settings(run: PreparedRun) -> Config:
    """The settings of a run, with pending changes, that decide where it trains. Raises UserError."""
    config = run_config(run.folder) if run.folder.has_event_log else run.settings
    asked = {key: value for key, value in run.changes.items() if key in AT_RESUME}
    asked |= {key: SETTINGS[key].default for key, value in asked.items() if value is None}
    return parse(config.model_dump() | asked) if asked else config


def train_and_exit(run: PreparedRun, stream: bool, progress: bool | None) -> NoReturn:
    """Train here or on the machines of the run's settings, then exit with the run's code. Raises UserError, also in the
    event log, if another process trains the run, and if the machines or their file cannot be used."""
    config = machine_settings(run)
    if not config.hosts:
        train_or_exit(run, stream, progress)
        raise typer.Exit(FINISHED)
    from backend.distributed.launcher import run_ranks, write_late_ending
    from backend.distributed.machine_check import plan_machines, require_machines
    from backend.trainer.run_process import record_changes

    if run.inputs is not None:
        run.inputs.scorer.close()  # rank 0 reads them again
    if run.lock is not None:
        os.close(run.lock)  # it is rank 0's
    # mpirun gives rank 0 a terminal of its own, whatever there is here.
    options = display_options(stream, sys.stdout.isatty() if progress is None else progress)
    if stdout_is_log(run.folder):
        os.environ[IS_LOG_VARIABLE] = "1"
    with held_for_launch(run.folder):
        try:
            if run.changes.get("hosts"):  # named on the command line; the run folder's own may be somebody else's
                allow_hosts(config.hosts)
            require_hosts(config.hosts)
            hosts, choice = plan_machines(config)
            wanted = {"model": config.model, "reward_file": config.reward_functions_file}
            warnings = require_machines(hosts, Path(config.hosts).name, backend=choice.backend, **wanted)
            record_changes(run.settings, run.folder, run.changes)
        except UserError as error:
            write_late_ending(run.folder, "failed", str(error))
            raise
        by_hand = launch_command(hosts, Path(config.hosts), choice.backend, run.folder.path)
        tell_error(f"{choice.why} By hand it would be: {shlex.join(by_hand)}")
        orders = Orders(
            shlex.join(sys.argv),
            is_checked=True,
            goes_on=config.on_lost_rank == "go_on",
            notes=[choice.why] if len(hosts.hosts) > 1 else [],
            warnings=[*run.warnings, *warnings],
        )
        end = run_ranks(run.folder, hosts, choice.backend, orders, options)
    if end.sentence:
        tell_error(end.sentence)
    raise typer.Exit(end.exit_code if end.exit_code else FINISHED)


@contextmanager
def _stopped_before_start(run: PreparedRun) -> Iterator[None]:
    """End a new run as stopped, not crashed, at a stop signal that comes before the trainer listens to them."""
    on_stop_signals(signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        if run.lock is not None or run.folder.has_event_log:
            raise
        sentence = "Stopped before its first step."
        end_before_start(run.folder, hold_lock(run.folder), "stopped", sentence)
        tell_error(sentence)
        raise typer.Exit(STOPPED) from None


def train_or_exit(
    run: PreparedRun,
    stream: bool,
    progress: bool | None,
    *,
    quiet: bool = False,
    shared: Mapping[str, Any] | None = None,
    command: str = "",
) -> None:
    """Train; exit unless finished. A GPU error may replace this process by `resume`, except on rank 0 of several
    machines (`shared`: more trainer arguments). `quiet`: stdout is the caller's. `command`: for the event log."""

    def show(event: Any) -> None:
        if event.get("phase") == "loading":  # not before: until this process has the lock, log.txt may be another's
            tell(cpu_setup.load_openblas(), file=sys.stderr, flush=True)
        if stream or not run.origin or event.get("sentence") != run.origin:
            echo(event)

    says_on_stdout = not (stream or quiet)
    if says_on_stdout:
        tell(run.folder.path, flush=True)
    with handlers_restored() as afterwards, _stopped_before_start(run):
        from backend.engine import cpu_setup
        from backend.runs.start_progress import progress_listener
        from backend.trainer.run_process import train
        from backend.trainer.trainer import RESTART

        with (
            logging_to(run.folder),
            display(stream, progress, quiet, run.settings.steps_per_report) as echo,
            progress_listener(tell_error),
        ):
            ending = train(
                run.settings,
                run.folder,
                command=command or shlex.join(sys.argv),
                echo=show,
                inputs=run.inputs,
                may_restart=True,
                changes=run.changes,
                warnings=run.warnings,
                lock=run.lock,
                **(shared or {}),
            )
        afterwards.process_ends = ending.exit_code != 0 and ending.kind != RESTART
        if ending.kind == RESTART and shared is not None:
            raise typer.Exit(RESTART_RANKS)
        if ending.kind == RESTART:  # with the handlers that the trainer has left
            restart("resume", str(run.folder.path), *display_options(stream, progress))
    if ending.exit_code:
        tell_error(ending.sentence)
        raise typer.Exit(ending.exit_code)
    if says_on_stdout:
        tell(ending.sentence, flush=True)


@contextmanager
def display(stream: bool, progress: bool | None, quiet: bool, steps_per_line: int) -> Iterator[Callable[[Any], None]]:
    """Yield a callback for events: a live display, lines of text, or JSON on stdout."""
    from backend.cli.display import LiveDisplay, new_console, show_line

    console = new_console(stderr=quiet)
    if stream:
        yield tell_json
    elif console.is_terminal if progress is None else progress:
        with LiveDisplay(console) as live:
            yield live.show
    else:
        yield partial(show_line, console, steps_per_line)
