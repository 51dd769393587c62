"""What the verbs that train share: a checked run folder, log.txt, the display, restarts, and several machines."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from backend.cli.common import FINISHED, STOPPED, tell, tell_json
from backend.config.changeable import AT_RESUME
from backend.config.config import SETTINGS, TEXTS, Config, dump, parse, read, resolve_paths
from backend.config.other_programs.translation import with_changes
from backend.distributed.commands import launch_command
from backend.distributed.hosts_file import allow_hosts, require_hosts
from backend.distributed.rank_process import RESTART_RANKS, Orders
from backend.rewards.allowed_code import allow_named, require_allowed
from backend.runs.events import EventLog, write_all
from backend.runs.run_folder import RunFolder, default_run_name, make_run_folder
from backend.runs.run_lock import held_for_launch, hold_lock
from backend.runs.saved_weights import with_adapter
from backend.runs.steering import run_config
from backend.trainer.control import StopPending, do_nothing, handlers_restored, look_for_stop_word, remove_word
from backend.trainer.machine import relax_gpu_timeout
from backend.utils.command import backend_command, backend_environment, shell_line
from backend.utils.disk_faults import DiskError, writing
from backend.utils.documents import parse_yaml
from backend.utils.errors import UserError
from backend.utils.files import append_regular, require_plain_files, user_path
from backend.utils.text import quote
from backend.utils.whole_file import replace_file

if TYPE_CHECKING:
    from backend.distributed.launcher import Launch
    from backend.trainer.run_context import LoadContext
    from backend.trainer.run_inputs import RunInputs


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run folder with a config.yaml inside, its settings, and the rows and reward functions that were read to check them."""

    folder: RunFolder
    settings: Config
    inputs: RunInputs | None = None
    lock: int | None = None
    """The handle of the run's lock, where this process holds it already: checking may take minutes."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a resumed run to change from its next step on."""
    warnings: tuple[str, ...] = ()
    """Sentences for its event log."""


def check_settings(
    raw: Mapping[str, Any], runs_dir: Path | None = None, look: Callable[[], None] = do_nothing
) -> tuple[Config, RunInputs]:
    """The settings, and what was read to check them. `look` is called now and then where that takes long. Raises UserError with all faults of the
    settings and of what they point to."""
    settings = parse(raw)
    relax_gpu_timeout(settings)  # before the import below, which imports mlx
    from backend.runs.start_progress import progress_listener, with_stop_check
    from backend.trainer.preflight import preflight

    with progress_listener(lambda line: say(line, sys.stderr)), with_stop_check(look):
        return settings, preflight(settings, runs_dir=runs_dir)


def new_run(raw: dict[str, Any], runs_dir: Path | None, name: str | None) -> PreparedRun:
    """Check the settings, then make a run folder and write them into it. Raises UserError."""
    # Paths in `raw` are relative to the working directory; config.yaml will be read again in the run's folder.
    raw = with_adapter(resolve_paths(Path.cwd(), raw), runs_dir) | ({} if name is None else {"run_name": name})
    settings, inputs = check_settings(raw, runs_dir)
    allow_named(raw)
    allow_hosts(settings.hosts)
    folder_name = settings.run_name or default_run_name(settings.model, settings.train_type, settings.train_mode)
    folder = make_run_folder(folder_name, runs_dir, reuse=bool(settings.run_name))
    try:
        replace_file(folder.config, dump(settings))
    except DiskError:
        with contextlib.suppress(OSError):  # a folder that held something before stays
            folder.path.rmdir()
        raise
    return PreparedRun(folder, settings, inputs)


def prepared_run(path: Path, *, allow_code: bool = False) -> PreparedRun:
    """A folder that the window has made, with config.yaml inside and no event log yet. Raises UserError, also for reward files that were never
    allowed here, unless `allow_code`. Exits with STOPPED where the run is told to stop meanwhile.

    Faults of its settings, and a stop, are written to the event log too, because the window sees nothing but the folder.
    """
    folder = RunFolder(Path(os.path.realpath(user_path(str(path), "run"))))
    if not folder.config.is_file():
        raise UserError("run", f"The folder {path} holds no config.yaml.")
    if folder.has_event_log:
        raise UserError("run", f"The run {folder.name} has an event log already; resume it, or start another.")
    # From now on, so that nobody takes a process that goes through a large dataset for one that has ended.
    lock = hold_lock(folder)
    remove_word(folder.control)  # of a process that is no more
    try:
        raw = with_adapter(read(folder.config), folder.path.parent)
        require_allowed(raw, allow=allow_code)
        return PreparedRun(folder, *check_settings(raw, folder.path, partial(look_for_stop_word, folder)), lock=lock)
    except UserError as mistake:
        _end_before_start(folder, lock, "failed", " ".join(fault.sentence for fault in mistake.faults))
        raise
    except StopPending:
        sentence = "Stopped before its first step, while its settings and data were checked."
        _end_before_start(folder, lock, "stopped", sentence)
        say(sentence, sys.stderr)
        raise typer.Exit(STOPPED) from None


def _end_before_start(folder: RunFolder, lock: int, kind: str, sentence: str) -> None:
    """Write the event log's only line, and let go of the run."""
    remove_word(folder.control)
    event_log = EventLog(folder.events)
    event_log.write(kind, step=0, reason=kind, sentence=sentence)
    event_log.close()
    os.close(lock)


def apply_changes(raw: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """The raw settings with every `--set key=value` over them, in our words (`with_changes`).

    A key without a value takes the setting out of the file. Raises UserError for a change that cannot be read.
    """
    changed = parse_changes(changes)
    translation = with_changes(raw, changed)
    if translation.faults:
        return raw | changed  # the check reports what is wrong
    return translation.values


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """The raw settings of `--set key=value …`. Raises UserError for one that cannot be read."""
    return dict(map(_parse_change, changes))


def _parse_change(text: str) -> tuple[str, Any]:
    """Key and value of `key=value`. A value is YAML, except for settings that are text: `run_name=007` is no number."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise UserError("set", f"--set {quote(text)} must be written as key=value.")
    if key in SETTINGS and SETTINGS[key].kind in TEXTS:
        return key, value
    return key, parse_yaml(value, f"--set {quote(text)}", key)


IS_LOG_VARIABLE = "GRPO_STUDIO_STDOUT_IS_LOG"
"""Environment variable of a process whose stdout is a pipe to somebody who writes it to log.txt."""


class RunLog:
    """log.txt, appended to without a buffer: Python's would keep what failed, and fail again as the process ends."""

    def __init__(self, run: RunFolder) -> None:
        """Raises DiskError, and UserError for a folder that holds links or pipes."""
        require_plain_files(run.path)  # this is the first file of a run that is written, before its lock is held
        self._path = run.log
        self._fault: DiskError | None = None
        with writing(run.log):
            self._file: RawIOBase = append_regular(run.log)

    def write(self, text: str) -> None:
        """Never raises: the first fault is kept for `checked`."""
        try:
            with writing(self._path):
                write_all(self._file, text.encode(errors="backslashreplace"))
        except DiskError as fault:
            self._fault = self._fault or fault

    def checked(self, show: Callable[[Any], None]) -> Callable[[Any], None]:
        """`show` for an event of the event log, which then raises the fault of this log, once."""
        is_told = False

        def show_and_check(event: Any) -> None:
            nonlocal is_told
            show(event)
            if self._fault is not None and not is_told:
                is_told = True
                raise self._fault

        return show_and_check

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class Tee:
    """A text stream that writes to the terminal and to log.txt; every other attribute is the terminal's."""

    def __init__(self, terminal: Any, log: RunLog, *, is_log: bool = False) -> None:
        """`is_log`: what is written to the terminal is in log.txt already."""
        self._terminal, self._log = terminal, log
        self._has_terminal = terminal is not None and not is_log

    def write(self, text: str) -> int:
        self._log.write(text)
        self._tell(lambda: self._terminal.write(text))
        return len(text)

    def write_to_log(self, text: str) -> None:
        """Write to log.txt, not to the terminal."""
        self._log.write(text)

    def flush(self) -> None:
        self._tell(lambda: self._terminal.flush())

    def _tell(self, work: Callable[[], Any]) -> None:
        """Do something with the terminal, and give it up where it fails."""
        if not self._has_terminal:
            return
        try:
            work()
        except OSError:
            self._has_terminal = False
            give_up(self._terminal)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


def give_up(stream: Any) -> None:
    """Send what a stream still holds, and whatever is printed to it later, nowhere: Python flushes it as the process ends, and would exit
    with 120 where that fails."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(text: str, stream: Any) -> None:
    """Print a line for whoever is still there to read it."""
    try:
        tell(text, file=stream, flush=True)
    except OSError:
        give_up(stream)


@contextlib.contextmanager
def logging_to(folder: RunFolder) -> Generator[RunLog]:
    """Copy stdout and stderr to log.txt; where stdout is that file already, as the window starts a trainer, write to it alone. Raises
    DiskError where it cannot be opened."""
    is_log = stdout_is_log(folder)
    streams = sys.stdout, sys.stderr
    log = RunLog(folder)
    sys.stdout, sys.stderr = Tee(streams[0], log, is_log=is_log), Tee(streams[1], log, is_log=is_log)
    try:
        yield log
    finally:
        for tee in (sys.stdout, sys.stderr):
            tee.flush()
        sys.stdout, sys.stderr = streams
        log.close()


def stdout_is_log(folder: RunFolder) -> bool:
    """Whether what is printed goes to log.txt, as where the window has started this process or the launcher of it."""
    if os.environ.get(IS_LOG_VARIABLE):
        return True
    try:
        return folder.log.exists() and os.path.samestat(os.fstat(sys.stdout.fileno()), folder.log.stat())
    except (OSError, ValueError, AttributeError):
        return False


def restart(verb: str, *arguments: str) -> NoReturn:
    """Replace this process's program by `python -m backend VERB …`."""
    command = backend_command(verb, *arguments)
    # An exec ends no interpreter: what a reward file wants done at the end, such as stopping its judge, would be left out.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]: multiprocessing ends its children with it too
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(command[0], command, backend_environment())


def display_options(stream: bool, progress: bool | None) -> Sequence[str]:
    """The options `Stream` and `Live` as they were given."""
    live = () if progress is None else ("--progress" if progress else "--no-progress",)
    return [*(("--stream",) if stream else ()), *live]


NONE = "none"
"""In place of a hosts file: this machine alone."""


def hosts_setting(text: str | None) -> dict[str, Any]:
    """The settings that the option --hosts stands for. Raises UserError for what cannot be a path."""
    if text is None:
        return {}
    return {"hosts": "" if text == NONE else str(user_path(text, "hosts").absolute())}


def machine_settings(run: PreparedRun) -> Config:
    """The settings of a run with the changes that it is resumed with, as far as they decide where it trains. Raises UserError."""
    config = run_config(run.folder) if run.folder.has_event_log else run.settings
    asked = {key: value for key, value in run.changes.items() if key in AT_RESUME}
    return parse(
        config.model_dump() | {key: SETTINGS[key].default if value is None else value for key, value in asked.items()}
    )


def launch_and_exit(run: PreparedRun, config: Config, stream: bool, progress: bool | None) -> NoReturn:
    """Train on the machines of `config`, the settings of `machine_settings`; exit with the run's code. Raises UserError for a run that another
    process trains, and for machines that cannot train it."""
    from backend.distributed.launcher import run_ranks

    if run.inputs is not None:
        run.inputs.scorer.close()  # rank 0 reads them again
    if run.lock is not None:
        os.close(run.lock)  # it is rank 0's
    with held_for_launch(run.folder):
        end = run_ranks(_prepared_launch(run, config, stream, progress))
    if end.sentence:
        say(end.sentence, sys.stderr)
    raise typer.Exit(end.exit_code if end.exit_code else FINISHED)


def _prepared_launch(run: PreparedRun, config: Config, stream: bool, progress: bool | None) -> Launch:
    """`_launch`, whose UserError ends the event log too: the window sees nothing but the folder."""
    from backend.distributed.launcher import write_late_ending

    # mpirun gives rank 0 a terminal of its own, whatever there is here.
    is_live = sys.stdout.isatty() if progress is None else progress
    if stdout_is_log(run.folder):
        os.environ[IS_LOG_VARIABLE] = "1"
    try:
        return _launch(run, config, display_options(stream, is_live))
    except UserError as mistake:
        write_late_ending(run.folder, "failed", " ".join(fault.sentence for fault in mistake.faults))
        raise


def _launch(run: PreparedRun, config: Config, options: Sequence[str]) -> Launch:
    """What is to be started. Raises UserError for machines that cannot train it, and for a hosts file that was never allowed here."""
    from backend.distributed.launcher import Launch
    from backend.distributed.machine_check import check_machines_answer, plan_machines
    from backend.trainer.run_process import record_changes

    if run.changes.get("hosts"):  # named on the command line; the run folder's own may be somebody else's
        allow_hosts(config.hosts)
    require_hosts(config.hosts)
    planned = plan_machines(config)
    warnings = check_machines_answer(planned, config)
    record_changes(run.settings, run.folder, run.changes)
    by_hand = launch_command(planned.hosts, planned.file, planned.choice.backend, run.folder.path)
    say(f"{planned.choice.why} By hand it would be: {shell_line(by_hand)}", sys.stderr)
    orders = Orders(
        shell_line([*sys.argv]), is_checked=True, goes_on=config.on_lost_rank == "go_on", notes=planned.notes,
        warnings=[*run.warnings, *warnings],
    )  # fmt: skip
    return Launch(run.folder, planned.hosts, planned.choice.backend, orders, options)


@dataclass(frozen=True, slots=True)
class SharedWork:
    """What rank 0 of several machines trains with: `backend.trainer.run_process.train` takes them under these names."""

    load: LoadContext
    look: Callable[[], None]
    goes_on: bool


def train_and_exit(run: PreparedRun, stream: bool, progress: bool | None) -> NoReturn:
    """Train with the chosen display, here or on the machines that the run's settings name, then exit with the run's code."""
    config = machine_settings(run)
    if config.hosts:
        launch_and_exit(run, config, stream, progress)
    train_or_exit(run, stream, progress)
    raise typer.Exit(FINISHED)


def train_or_exit(
    run: PreparedRun,
    stream: bool,
    progress: bool | None,
    *,
    quiet: bool = False,
    go_on_with: Sequence[str] = (),
    shared: SharedWork | None = None,
    command: str = "",
) -> None:
    """Train with the chosen display; exit unless the run finished. `quiet` leaves stdout to the caller.

    After a GPU error the process may turn into another, which goes on with the run: `go_on_with` is its verb and arguments, `resume` on
    this run by default. `shared`: of rank 0 of several machines, which leaves that to its launcher. `command`: what was typed, for the
    event log; this process's own by default.
    """
    from backend.engine import cpu_setup
    from backend.runs.start_progress import progress_listener
    from backend.trainer.ending import RESTART
    from backend.trainer.run_process import train

    says_on_stdout = not (stream or quiet)
    if says_on_stdout:
        say(str(run.folder.path), sys.stdout)
    with handlers_restored() as afterwards:
        with (
            logging_to(run.folder) as log,
            display(stream, progress, quiet, run.settings.steps_per_report) as echo,
            progress_listener(lambda sentence: say(sentence, sys.stderr)),
        ):
            tell(cpu_setup.load_openblas(), file=sys.stderr, flush=True)
            ending = train(
                run.settings,
                run.folder,
                command=command or shell_line([*sys.argv]),
                echo=log.checked(echo),
                inputs=run.inputs,
                may_restart=True,
                changes=run.changes,
                warnings=run.warnings,
                lock=run.lock,
                **({} if shared is None else {"load": shared.load, "look": shared.look, "goes_on": shared.goes_on}),
            )
        afterwards.process_ends = ending.exit_code != 0 and ending.kind != RESTART
        if ending.kind == RESTART and shared is not None:
            raise typer.Exit(RESTART_RANKS)
        if ending.kind == RESTART:  # with the handlers that the trainer has left
            verb = go_on_with or ("resume", str(run.folder.path))
            restart(*verb, *display_options(stream, progress))
    if ending.exit_code:
        say(ending.sentence, sys.stderr)
        raise typer.Exit(ending.exit_code)
    if says_on_stdout:
        say(ending.sentence, sys.stdout)


@contextmanager
def display(stream: bool, progress: bool | None, quiet: bool, steps_per_line: int) -> Iterator[Callable[[Any], None]]:
    """Takes every event of the event log: a live display, lines of text, or the events as JSON on stdout."""
    from backend.cli.consoles import new_console
    from backend.cli.progress import LineDisplay, LiveDisplay

    if stream:
        yield tell_json
        return
    console = new_console(stderr=quiet)
    is_live = console.is_terminal if progress is None else progress
    with LiveDisplay(console) if is_live else LineDisplay(console, steps_per_line) as echo:
        yield echo
