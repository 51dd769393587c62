"""Verbs that train: train, resume, demo."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from backend.cli.outcome import FINISHED, verb
from backend.spec.aliases import translate
from backend.spec.config import SETTINGS, TEXTS, Config, beside, dump, load, parse, read
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder, default_run_name, demo_config, find_run, make_run_folder

RunsDir = Annotated[Path | None, typer.Option("--runs-dir", help="Where run folders go.")]
Stream = Annotated[bool, typer.Option("--stream", help="Repeat the diary on stdout, one JSON object a line.")]
Live = Annotated[bool | None, typer.Option("--progress/--no-progress", help="A live display (default on a terminal).")]


@verb
def train(
    config: Annotated[Path | None, typer.Argument(help="The settings, a YAML file.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Train in this folder, which holds config.yaml.")] = None,
    runs_dir: RunsDir = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run folder.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the file.")] = None,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Train from a YAML file; prints the run folder."""
    if (config is None) == (run is None):
        raise Mistake("config", "Give either a YAML file or --run with a run folder.")
    if run is not None:
        if name or changes or runs_dir:
            raise Mistake("run", "--set, --name and --runs-dir go with a YAML file; the folder of --run is as it is.")
        folder = _prepared_folder(run)
        settings = load_or_note(folder)
    else:
        settings, folder = _fresh_run(changed(read(config or ""), changes or []), runs_dir, name)
    finish(folder, settings, stream, progress)


@verb
def resume(
    run: Annotated[str, typer.Argument(help="A run folder, or its name.")],
    runs_dir: RunsDir = None,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Go on from the newest whole checkpoint; without one, start over."""
    folder = find_run(run, runs_dir)
    if ended(folder) == "finished":
        print(f"The run {folder.name} has finished; there is nothing to resume.")
        return
    finish(folder, load(folder.config), stream, progress)


@verb
def demo(
    runs_dir: RunsDir = None,
    iters: Annotated[int | None, typer.Option(help="Steps, in place of the preset's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, in place of the preset's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make the bundled model and data again, then stop.")
    ] = False,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Train the bundled model on the bundled sums, and say how many it gets right before and after."""
    from backend.demo.accuracy import test_accuracy

    if rebuild:
        from backend.demo.build import rebuild as build
        from backend.spec.places import resources

        build(resources() / "demo", progress=print)
        return
    began = time.monotonic()
    changes = {key: value for key, value in (("iters", iters), ("seed", seed)) if value is not None}
    settings, folder = _fresh_run(read(demo_config()) | changes, runs_dir, None)
    before = test_accuracy(settings, None)
    say(f"Before: {before:.0%} of the test questions are answered right.", as_json)
    finish(folder, settings, stream, progress, quiet=as_json, leave=False)
    after = test_accuracy(settings, folder)
    say(f"After:  {after:.0%}.", as_json)
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        print(json.dumps({"run": str(folder.path), "before": before, "after": after, "seconds": seconds}))


def say(sentence: str, to_stderr: bool) -> None:
    print(sentence, file=sys.stderr if to_stderr else sys.stdout, flush=True)


# ── a run's folder and settings ──────────────────────────────────────────────────────────────────────────────────────


def changed(raw: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """The raw settings with every `--set key=value` put over them, in whatever words either says it. Values are read as
    YAML, save where the setting is text."""
    over = dict(map(_change, changes))
    ours, misread = translate(over)
    theirs, broken = translate(raw)
    if misread or broken:
        return raw | over  # the check will say what is wrong
    emptied = {key for key, value in over.items() if value is None}
    return {key: value for key, value in theirs.items() if key not in emptied} | ours


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise Mistake("set", f"--set {text} must be written as key=value.")
    if key in SETTINGS and SETTINGS[key].kind in TEXTS:
        return key, value
    try:
        return key, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        raise Mistake(key, f"--set {text} cannot be read: {value} is no YAML value.") from None


def _fresh_run(raw: dict[str, Any], runs_dir: Path | None, name: str | None) -> tuple[Config, RunFolder]:
    """Check everything first, so that a mistake leaves nothing behind; then make the folder and put the settings in."""
    from backend.run.preflight import check

    # What works here must work from the run's folder as well, where config.yaml is read again.
    raw = beside(Path.cwd(), raw) | ({} if name is None else {"run_name": name})
    if faults := check(raw):
        raise Mistake(faults)
    settings = parse(raw)
    made = settings.run_name or default_run_name(settings.model, settings.train_type, settings.train_mode)
    folder = make_run_folder(made, runs_dir, reuse=bool(settings.run_name))
    folder.config.write_text(dump(settings), encoding="utf-8")
    return settings, folder


def _prepared_folder(path: Path) -> RunFolder:
    folder = RunFolder(path.expanduser().resolve())
    if not folder.config.is_file():
        raise Mistake("run", f"The folder {path} holds no config.yaml.")
    if folder.has_diary:
        raise Mistake("run", f"The run {folder.name} has a diary already; resume it, or start another.")
    return folder


def load_or_note(folder: RunFolder) -> Config:
    """The folder's settings, checked like any others; what is wrong goes into the diary too, since the window reads it."""
    from backend.run.preflight import check

    try:
        raw = read(folder.config)
        if faults := check(raw):
            raise Mistake(faults)
        return parse(raw)
    except Mistake as mistake:
        from backend.spec.events import Diary

        sentence = " ".join(fault.sentence for fault in mistake.faults)
        diary = Diary(folder.events)
        diary.write("failed", step=0, reason="failed", sentence=sentence)
        diary.close()
        raise


def ended(folder: RunFolder) -> str | None:
    """The kind of the diary's last event, where it is an ending."""
    from backend.spec.archive import first_and_last_events
    from backend.spec.events import ENDINGS

    last = first_and_last_events(folder.events)[1]
    return last[-1]["kind"] if last and last[-1]["kind"] in ENDINGS else None


# ── running it ───────────────────────────────────────────────────────────────────────────────────────────────────────


def finish(
    folder: RunFolder, settings: Config, stream: bool, progress: bool | None, *, quiet: bool = False, leave: bool = True
) -> None:
    """Train in `folder` with the display asked for, then exit with the run's code unless it finished."""
    from backend.engine.cpu import blas
    from backend.run.trainer import train as run_training
    from backend.spec.command import shell_line

    if not (stream or quiet):
        print(folder.path, flush=True)
    with logging_to(folder), own_signals(), display(settings, stream, progress, quiet) as echo:
        print(blas.prepare(), file=sys.stderr, flush=True)
        ending = run_training(settings, folder, command=shell_line([*sys.argv]), echo=echo)
    if ending.exit_code:
        print(ending.sentence, file=sys.stderr)
        raise typer.Exit(ending.exit_code)
    if not (stream or quiet):
        print(ending.sentence)
    if leave:
        raise typer.Exit(FINISHED)


@contextmanager
def display(settings: Config, stream: bool, progress: bool | None, quiet: bool) -> Iterator[Callable[[Any], None]]:
    from rich.console import Console

    from backend.cli.progress import Board, Lines

    if stream:
        yield lambda event: print(json.dumps(event, ensure_ascii=False), flush=True)
        return
    console = Console(stderr=quiet)
    live = console.is_terminal if progress is None else progress
    with Board(console) if live else Lines(console, settings.steps_per_report) as echo:
        yield echo


@contextmanager
def own_signals() -> Iterator[None]:
    """The trainer takes SIGINT and SIGTERM over; what comes after it can be interrupted as usual again."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Tee:
    """Writes to the terminal and to log.txt alike."""

    def __init__(self, terminal: Any, log: Any) -> None:
        self._terminal, self._log = terminal, log

    def write(self, text: str) -> int:
        self._log.write(text)
        self._log.flush()
        return self._terminal.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


@contextmanager
def logging_to(folder: RunFolder) -> Iterator[None]:
    """Keep what the process prints in log.txt as well; where the window started it, stdout *is* log.txt already."""
    import os

    try:
        already = folder.log.exists() and os.path.samestat(os.fstat(sys.stdout.fileno()), folder.log.stat())
    except (OSError, ValueError):
        already = False
    if already:
        yield
        return
    streams = sys.stdout, sys.stderr
    with folder.log.open("a", encoding="utf-8") as log:
        sys.stdout, sys.stderr = Tee(streams[0], log), Tee(streams[1], log)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
