"""Every verb of the command line with hostile values for its arguments and options.

A case gives one argument or option a value that it should not have, and sound values to the others: settings of a model that is not there, or a
finished run, whose model is there for the verbs that train nothing. It must end within LIMIT_S with exit code 0 or 2; stderr is printable lines of
at most 200 characters, or typer's own page for its users' mistakes; stdout has no commands to a terminal; no file appears, and a verb that only
reads leaves the run as it was. In this process, through typer's runner: verbs that wait for a window or a web service, and those that measure the
machine, are left out.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import click
import typer.main
from typer.testing import CliRunner, Result

from backend.__main__ import app
from backend.spec.run_folder import RunFolder
from backend.spec.user_input.text import visible
from tests.support.small_run import settings_for, train_here, write_config
from tests.torture.report import Report

VERBS = app()
LIMIT_S = 5.0
LONGEST_LINE = 200
LEFT_OUT = {"serve", "bench", "hub", "demo", "rank"}
"""Verbs that wait, measure, end the process that they are in, or write what their values do not decide; `demo` has a test of its own, as its
settings are sound."""
TRAINING = {"train", "resume", "clone", "sweep", "queue"}
"""Verbs that would train the run that they are given, or have it trained: theirs has lost its model."""
WRITING = {"change", "evaluate", "export", "import", "track", "replay"}
"""Verbs that write into the run, or beside it."""
RUN_ARGUMENTS = {"run", "name", "names", "model"}
"""Arguments that name a run, or a model."""
LINES = "/seed {0}\n/row {0}\n{0}\n/{0}\n/system {0}\nhi\n/quit\n"
"""What a person types into `chat`, around a text."""
WATCHED = ("cwd", "home", "runs", "prefs")


class Slow(BaseException):
    """A case took longer than LIMIT_S."""


@dataclass(frozen=True)
class Place:
    """Folders that must stay empty, things that are no file, and settings of a model that is not there."""

    root: Path
    settings: Path

    @cached_property
    def run(self) -> Path:
        """A finished run, with its model."""
        run = RunFolder(self.root / "sound" / "run")
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            ending = train_here(settings_for(self.root / "sound"), run)
        assert ending.kind == "finished", ending
        shutil.copytree(run.path, self.root / "kept")
        bare = shutil.copytree(run.path, self.root / "sound" / "bare")
        write_config(bare / "config.yaml", settings_for(self.root / "sound") | {"model": str(self.root / "absent")})
        shutil.copytree(bare, self.root / "kept bare")
        return run.path

    @property
    def bare_run(self) -> Path:
        """The same, without its model."""
        return self.run.with_name("bare")

    def run_strays(self, verb: str) -> list[str]:
        """What a verb has changed of the runs and beside them; it is mended."""
        found: list[str] = []
        for run, kept in ((self.run, self.root / "kept"), (self.bare_run, self.root / "kept bare")):
            if _contents(run) != _contents(kept):
                found.append(f"changed {run.name}")
                shutil.rmtree(run)
                shutil.copytree(kept, run)
        known = {"model", "rows.jsonl", "run", "bare"}
        for path in self.root.joinpath("sound").iterdir():
            if path.name not in known:
                found.append(f"left {path.name!r} beside the run")
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return [] if verb in WRITING | TRAINING else found

    @property
    def texts(self) -> list[str]:
        names = ("pipe", "loop", "runs", "nosuch/x", "deep.json", "binary", "settings.yaml")
        odd = [str(self.root / name) for name in names]
        return [
            *odd, "", " ", ".", "..", "/", "~nosuchuser", "x" * 300, "a/" * 3000, "\udcff", "\x1b[31m\u202e", "a\nb", "a\0b", "../../x", "/dev/null", "/dev/zero",
            "-1", "nan", "9" * 5000, "nosuch", "owner/na me", "=", "iters", "iters=" + "9" * 5000, "iters=nan", "no=1", "run_name=../x", "run_name=\ud800", "reward_weights=[1,", "1:2:3", "best", "-", "[/red]", "1," + "9" * 5000, "reward>=" + "9" * 400, "²", "hub", "trl", "folder",
        ]  # fmt: skip

    @property
    def numbers(self) -> list[str]:
        return ["-1", "0", "9" * 30, "9" * 5000, "nan", "inf", "1e400", "", "x", "0x10", str(2**63), "-0.5", "\udcff"]

    def strays(self) -> list[str]:
        """What appeared in the watched folders; it is removed."""
        found = [path for name in WATCHED for path in (self.root / name).iterdir()]
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return [str(path.relative_to(self.root)) for path in found]


@contextmanager
def prepared(root: Path) -> Iterator[Place]:
    """A place in `root` with the environment and the working directory of this process moved there."""
    for name in WATCHED:
        (root / name).mkdir()
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to(root / "loop")
    (root / "deep.json").write_text("[" * 100_000)
    (root / "binary").write_bytes(bytes(range(256)))
    raw = settings_for(root / "sound") | {"model": str(root / "absent")}
    place = Place(root, write_config(root / "settings.yaml", raw))
    before, folder = dict(os.environ), Path.cwd()
    os.environ |= {
        "HOME": str(root / "home"), "GRPO_STUDIO_RUNS": str(root / "runs"), "GRPO_STUDIO_PREFS": str(root / "prefs"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "hub"), "COLUMNS": "150",
    }  # fmt: skip
    os.chdir(root / "cwd")
    try:
        yield place
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


# ── one case ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def verbs() -> dict[tuple[str, ...], click.Command]:
    """Every verb that can be tried, by its words."""
    found: dict[tuple[str, ...], click.Command] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        subcommands: Mapping[str, Any] | None = getattr(command, "commands", None)
        if subcommands is None:
            found[words] = command
        for name, each in (subcommands or {}).items():
            if not words and name in LEFT_OUT:
                continue
            walk(each, (*words, name))

    walk(typer.main.get_command(VERBS), ())
    return found


def draw(seed: int, place: Place, commands: Mapping[tuple[str, ...], click.Command]) -> list[str]:
    """The words of a command line."""
    rng = random.Random(f"verbs {seed}")
    words = rng.choice(list(commands))
    arguments = [each for each in commands[words].params if each.param_type_name == "argument"]
    options: list[Any] = [
        each
        for each in commands[words].params
        if each.param_type_name == "option" and each.name != "help" and not getattr(each, "is_flag", False)
    ]
    hostile = rng.randrange(len(arguments) + len(options)) if arguments or options else 0
    values: list[str] = []
    for number, argument in enumerate(arguments):
        is_sound = number != hostile and rng.random() < 0.7
        values.append(str(_sound(argument, words, place)) if is_sound else _value(argument, rng, place))
    chosen = [options[hostile - len(arguments)]] if hostile >= len(arguments) and options else []
    chosen += [option for option in options if rng.random() < 0.1]
    flags = [
        each.opts[0]
        for each in commands[words].params
        if getattr(each, "is_flag", False) and each.name != "help" and rng.random() < 0.1
    ]
    return [*words, *(f"{option.opts[0]}={_value(option, rng, place)}" for option in chosen), *flags, "--", *values]


def _value(parameter: Any, rng: random.Random, place: Place) -> str:
    return rng.choice(place.numbers if takes_number(parameter) else place.texts)


def takes_number(parameter: Any) -> bool:
    return parameter.type_descriptor.annotation in (int, float)


def _sound(argument: Any, words: tuple[str, ...], place: Place) -> Path:
    if argument.name not in RUN_ARGUMENTS:
        return place.settings
    return place.bare_run if words[0] in TRAINING else place.run


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wrong(result: Result) -> list[str]:
    """What is wrong with what a verb did."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return ["".join(traceback.format_exception(result.exception)[-4:])]
    found = [] if result.exit_code in (0, 2) else [f"exit code {result.exit_code}: {result.stderr[-300:]!r}"]
    if result.exit_code == 2 and not result.output.strip():  # `validate` has its sentences on stdout
        found.append("exit code 2 without a sentence")
    found += [f"a command to a terminal: {line[:200]!r}" for line in result.stdout.split("\n") if visible(line) != line]
    if not result.stderr.startswith("Usage:"):  # typer's page wraps its lines
        lines = result.stderr.split("\n")
        found += [f"not printable: {line[:200]!r}" for line in lines if not line.isprintable()]
        found += [
            f"{len(line)} characters: {line}" for line in lines if len(line) > LONGEST_LINE + 40
        ]  # the setting's name is before it
    return found


def case(words: list[str], place: Place) -> str:
    """What is wrong with one command line; "" for nothing."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Slow

    found: list[str] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 4 * LIMIT_S)  # the machine may be busy
    try:
        result = CliRunner().invoke(VERBS, words, input=LINES.format(words[-1]).encode(errors="surrogatepass"))
        found = wrong(result)
    except Slow:
        result, found = None, [f"did not end: {traceback.format_exc(limit=-4)}"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    strays = [*place.strays(), *(place.run_strays(words[0]) if "run" in vars(place) else ())]
    if not found and result is not None and result.exit_code == 0:
        return ""  # what a verb was told to write, such as a queue in a folder of an odd name
    return "; ".join([*found, *(f"left {path}" for path in strays)])


def main(count: int, seed: int) -> int:
    """`count` command lines; returns how many failed."""
    report = Report("verbs")
    with tempfile.TemporaryDirectory(prefix="torture-verbs-") as folder, prepared(Path(folder)) as place:
        commands = verbs()
        for number in range(seed, seed + count):
            words = draw(number, place, commands)
            if found := case(words, place):
                shown = " ".join(repr(word)[:80] for word in words)
                report.failed(number, f"{shown}: {found.strip().splitlines()[-1][:200]}", found)
            else:
                report.passed()
    return report.failures
