"""Run folders of somebody else, or damaged ones: every file of a recorded run mutated, then read by all that reads runs.

Each case takes a fresh copy of a small run (event log, completions, changes, notes, parent, evaluations, checkpoints, a sweep, a queue), breaks
one to three of its files, and calls every reader of `backend.spec`, the window's models and the verbs that look at runs. A reader may raise
UserError with one printable line, and nothing else; it may take 5 seconds at most, and may write nothing outside of the folder.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from backend.export import export_choices
from backend.runs import archive, disk_use, run_comparison, run_record, saved_weights, steering
from backend.runs.events import Follower, read_events
from backend.runs.queue import QueueFile
from backend.runs.run_folder import RunFolder, all_runs
from backend.runs.run_record import read_record, stamp
from backend.runs.sweeps import sweep_results
from backend.runs.sweeps.sweep_file import load_sweep
from backend.trainer.evaluation import evaluation_rows
from backend.trainer.health.watch import examine
from backend.utils.errors import UserError
from tests.support import made_up_runs
from tests.torture.hostile_files import beginning
from tests.torture.report import Report

LIMIT_S = 5
VERBS_EVERY = 10
"""Cases between two that call the verbs too: a verb takes as long as all readers together."""
LONGEST = 260
"""Characters of a sentence: 200 and the path of the temporary folder."""
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**400, 1e308, -(2**63), "", "x" * 5000, "<img src=x>\n\x1b[31m\u202e", "\udcff", [], [1, [2]], {}, {"a": {"b": 1}},
)  # fmt: skip
NUMBERS = (b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 3000 + b"]" * 3000, b'{"a":' * 2000 + b"1" + b"}" * 2000)
BYTES = (
    b"",
    b"\0" * 4096,
    b"\xff\xfe\x00",
    b"\x80\x81",
    b"{",
    b"[",
    b"null",
    b"[]",
    b"{}",
    b'"text"',
    b"\n" * 100,
    b"x" * 100_000,
)
NAMES = ("new\nline", "<b>bold", "\x1b[31m", "\udcff", "..x", "a" * 200, "‮", "000003")


MEMORY = Path("/dev/shm")
"""Files in memory, where the system has them: a case makes fifty."""


class TooSlow(BaseException):
    """A reader took longer than LIMIT_S."""


def main(count: int, seed: int) -> int:
    report = Report("run_folders")
    with tempfile.TemporaryDirectory(prefix="run-folders-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        template = make_template(Path(folder) / "template")
        for _, read in readers(shutil.copytree(template, Path(folder) / "whole")):
            with contextlib.suppress(UserError):
                read()  # imports everything, which the alarm of a case must not interrupt
        for number in range(count):
            failures = case(template, Path(folder) / "case", seed + number)
            for what, details in failures[:1]:
                report.failed(seed + number, what, details)
            if not failures:
                report.passed()
    return report.failures


def make_template(folder: Path) -> Path:
    """A folder of runs: two runs, a clone, a sweep and a queue."""
    for name in ("first", "second"):
        run = made_up_runs.make_run(folder / name, steps=6, total=8)
        run.log.write_text("loading\nstep 1\n")
        write(run.changes, {"v": 1, "changes": [{"step": 3, "settings": {"beta": [0.05, 0.1]}}]})
        write(run.about, {"title": "Sums", "note": "mine", "tags": ["a", "b"], "favourite": True})
        write(run.parent, {"run": "second" if name == "first" else "first", "path": str(folder / "gone"), "step": 2, "warm": True,
                           "changed": {"beta": [0.1, 0.2]}})  # fmt: skip
        for step in (2, 4, 6):
            saved = run.checkpoints / f"{step:06}"
            saved.mkdir(parents=True)
            write(
                saved / "state.json", {"step": step, "score": 0.5 * step, "events_bytes": 10, "completions_bytes": 10}
            )
            for file in ("adapters.safetensors", "optimizer.safetensors"):
                (saved / file).write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        run.adapters.mkdir()
        (run.adapters / "adapters.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        write(run.adapters / "adapter_config.json", {"rank": 2})
        run.gpu_errors.write_text('{"kind": "timeout", "step": 2}\n')
        write(run.change_request, {"settings": {"beta": 0.1}})
        run.control.write_text("pause")
        run.lock.write_text("")
        run.evaluations.mkdir()
        write(run.evaluations / "test.json", {"v": 1, "name": "test", "decodings": []})
        (run.evaluations / "test.jsonl").write_text('{"index": 0, "prompt": "p"}\n')
    sweep = folder / "sweeps" / "grid"
    sweep.mkdir(parents=True)
    (sweep / "sweep.yaml").write_text(
        "name: grid\nsearch: grid\nover: {beta: [0.0, 0.1]}\nseeds: [0]\nhalving: 'off'\nmetric: reward\n"
        "base: {model: m, data: d, iters: 8, steps_per_eval: 4}\n"
    )
    member = {"run": "first", "seed": 0, "state": "finished", "step": 8, "value": 0.5}
    write(sweep / "results.json", {
        "name": "grid", "metric": "reward", "state": "finished", "sentence": "", "began": 1.0, "updated": 2.0, "notes": [],
        "rungs": [], "configurations": [{"number": 1, "settings": {"beta": 0.0}, "runs": [member]}],
    })  # fmt: skip
    write(
        folder / "queue.json",
        {
            "runs": ["first"],
            "event logs": {"first": 1},
            "starting": None,
            "paused": False,
            "pause_after_failure": False,
        },
    )
    return folder


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


# ── breaking ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def break_file(path: Path, root: Path, dice: random.Random) -> str:
    """Break one file; → what was done."""
    how = dice.choice((values, values, values, values, numbers, bytes_of, cut, flip, kind_of_file))
    how(path, root, dice)
    return f"{path.relative_to(root)}: {how.__name__}"


def values(path: Path, root: Path, dice: random.Random) -> None:
    """Replace a value, a key or a list's item of the JSON or YAML in the file."""
    lines = beginning(path).split(b"\n") if path.suffix == ".jsonl" else [beginning(path)]
    at = dice.randrange(len(lines))
    try:
        content = json.loads(lines[at])
    except ValueError:
        return flip(path, root, dice)
    for _ in range(dice.randint(1, 3)):
        content = _with_another(content, dice)
    lines[at] = json.dumps(content, ensure_ascii=dice.random() < 0.5).encode(errors="surrogatepass")
    path.write_bytes(b"\n".join(lines))


def _with_another(content: Any, dice: random.Random) -> Any:
    keys = (
        list(content) if isinstance(content, dict) else list(range(len(content))) if isinstance(content, list) else []
    )
    if not keys or dice.random() < 0.15:
        return copy.deepcopy(dice.choice(VALUES))  # a value that is changed further must not change the list
    key = dice.choice(keys)
    if isinstance(content, dict) and dice.random() < 0.15:
        content.pop(key)
    elif isinstance(content[key], (dict, list)) and dice.random() < 0.7:
        content[key] = _with_another(content[key], dice)
    else:
        content[key] = copy.deepcopy(dice.choice(VALUES))
    return content


def numbers(path: Path, _root: Path, dice: random.Random) -> None:
    """Put a number, or a nest of brackets, that few parsers take in place of one number."""
    content = bytearray(beginning(path))
    places = [index for index, byte in enumerate(content) if chr(byte).isdigit()]
    if places:
        at = dice.choice(places)
        content[at : at + 1] = dice.choice(NUMBERS)
    path.write_bytes(bytes(content))


def bytes_of(path: Path, _root: Path, dice: random.Random) -> None:
    path.write_bytes(dice.choice(BYTES))


def cut(path: Path, _root: Path, dice: random.Random) -> None:
    content = beginning(path)
    path.write_bytes(content[: dice.randrange(len(content) + 1)])


def flip(path: Path, _root: Path, dice: random.Random) -> None:
    content = bytearray(beginning(path) or b"x")
    for _ in range(dice.choice((1, 5, 50))):
        content[dice.randrange(len(content))] = dice.randrange(256)
    path.write_bytes(bytes(content))


def kind_of_file(path: Path, root: Path, dice: random.Random) -> None:
    """Something else in the file's place: a pipe, a folder, a loop, a link, a huge hole, nothing, no rights, an odd name."""
    what = dice.choice(("pipe", "folder", "loop", "far", "dangling", "huge", "gone", "forbidden", "odd name"))
    if what == "odd name":
        with contextlib.suppress(OSError):
            path.rename(path.with_name(dice.choice(NAMES)))
    elif what == "huge":
        with path.open("r+b") as file:
            file.truncate(2**30)
    elif what == "forbidden":
        path.chmod(0)
    else:
        path.unlink()
        if what == "pipe":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        elif what != "gone":
            path.symlink_to(
                {"loop": path.name, "far": "/etc/hostname", "dangling": str(root.parent / "outside" / "made")}[what]
            )


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def readers(root: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name → a call that reads the broken folder."""
    run, other = RunFolder(root / "first"), RunFolder(root / "second")
    yield "all_runs", lambda: list(all_runs(root))
    yield "record", lambda: json.dumps([read_record(each).to_dict() for each in all_runs(root)], default=str)
    yield "stamp", lambda: stamp(run)
    yield "summary", lambda: archive.summary(run)
    yield "examine", lambda: json.dumps(examine(run).to_dict(), default=str)
    yield "events", lambda: list(read_events(run.events))
    yield "follow", lambda: Follower(run.events).read()
    yield "notes", lambda: run_record.read_notes(run)
    yield "note it", lambda: run_record.change_notes(run, title="another")
    yield "parent", lambda: run_record.read_parent(run)
    yield "children", lambda: run_record.children(run, [run, other])
    yield (
        "checkpoints",
        lambda: (saved_weights.saved_weights(run), saved_weights.best_of(saved_weights.saved_weights(run))),
    )
    yield "find", lambda: saved_weights.find_checkpoint(run, "best")
    yield "choices", lambda: export_choices.weights_choices(run)
    yield "disk", lambda: (disk_use.disk_use(run), disk_use.freeable_space([run, other]))
    yield "free", lambda: disk_use.free_space(run)
    yield "config", lambda: steering.run_config(run)
    yield "changes", lambda: [change.sentence for change in steering.read_changes(run)]
    yield "request", lambda: steering.read_request(run.change_request)
    yield (
        "evaluations",
        lambda: [
            (evaluation_rows.read_evaluation(path), list(evaluation_rows.read_rows(path)))
            for path in evaluation_rows.evaluations_of(run)
        ],
    )
    yield "compare", lambda: _compare(run, other)
    yield "queue", lambda: QueueFile(root).read()
    yield "queue add", lambda: QueueFile(root).add(other)
    yield "sweeps", lambda: [_sweep(each) for each in sweep_results.all_sweeps(root)]
    for verb in (
        ("runs", "--archived"),
        ("doctor", str(run.path)),
        ("compare", str(run.path), str(other.path)),
        ("queue", "list"),
    ):
        yield f"verb {verb[0]}", lambda verb=verb: _verb(*verb, "--runs-dir", str(root))
    yield "window: run", lambda: _follow(run)
    yield "window: list", lambda: _list(root)
    yield "window: completions", lambda: _completions(run)


def _verb(*arguments: str) -> None:
    """A verb in this process; one that ends with a fault's sentence is fine."""
    from typer.testing import CliRunner

    from backend.__main__ import app

    if not _VERBS:
        _VERBS.append(app())
    result = CliRunner().invoke(_VERBS[0], list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code == 2 and "Usage" in result.stderr:
        raise AssertionError(result.stderr)  # the torture calls it wrongly


_VERBS: list[Any] = []


def _compare(run: RunFolder, other: RunFolder) -> Any:
    settings, results = run_comparison.compare([run, other])
    table = run_comparison.settings_table(["a", "b"], settings) + run_comparison.results_table(results)
    return run_comparison.as_csv(table), run_comparison.as_markdown(table), run_comparison.settings_in_course(run)


def _sweep(folder: sweep_results.SweepFolder) -> Any:
    results = sweep_results.read_results(folder)
    if results is not None:
        json.dumps(results.to_dict())
        sweep_results.shown_state(folder, results)
    return load_sweep(folder.plan), sweep_results.settings_of_runs(folder)


def _follow(folder: RunFolder) -> Any:
    from app.state.run import Run

    _application()
    run = Run(folder)
    try:
        for _ in range(3):
            run.poll()
        return (
            run.state,
            run.problem,
            run.checkpoint,
            run.config,
            run.reward_names,
            run.log_tail(),
            run.marks,
            run.notes,
        )
    finally:
        run.close()


def _list(root: Path) -> Any:
    from app.state.run_list import RunList

    _application()
    listed = RunList(root)
    for each in all_runs(root):
        listed.reread(each.path)
    return listed.family_of(root / "first")


def _completions(folder: RunFolder) -> Any:
    from app.state.run_completions import CompletionIndex

    index = CompletionIndex(folder.completions)
    while index.advance():
        pass
    return index.rows(), [index.rows(step) for step in index.steps()[:3]]


def _application() -> None:
    from PySide6.QtCore import QCoreApplication

    if QCoreApplication.instance() is None:
        _APPLICATION.append(QCoreApplication([]))


_APPLICATION: list[Any] = []


# ── one case ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def case(template: Path, folder: Path, seed: int) -> list[tuple[str, str]]:
    """Break a copy of the template and read it; → (what, traceback) of each failure."""
    dice = random.Random(seed)
    root = folder / "runs"
    shutil.copytree(template, root)
    (folder / "outside").mkdir()
    failures: list[tuple[str, str]] = []
    try:
        files = sorted(path for path in root.rglob("*") if path.is_file() and "second" not in path.parts)
        done = [break_file(path, root, dice) for path in dice.sample(files, dice.randint(1, 3))]
        for name, read in readers(root):
            if name.startswith("verb") and seed % VERBS_EVERY:
                continue
            if problem := _twice(read):
                failures.append((f"{name} after {'; '.join(done)}: {problem[0]}", problem[1]))
        if any((folder / "outside").iterdir()):
            failures.append((f"something was written outside after {'; '.join(done)}", ""))
    finally:
        shutil.rmtree(folder)
    return failures


def _twice(read: Callable[[], Any]) -> tuple[str, str] | None:
    """The problem of a reader; one that was only slow is tried again with more time, as the machine may be busy. A hang stays one."""
    problem = _problem(read)
    return _problem(read, 4 * LIMIT_S) if problem is not None and problem[0] == "too slow" else problem


def _problem(read: Callable[[], Any], limit_s: int = LIMIT_S) -> tuple[str, str] | None:
    """(a line, the traceback) of what a reader may not do; None where it behaves."""

    def too_slow(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(limit_s)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            read()
    except UserError as mistake:
        bad = [
            fault.sentence
            for fault in mistake.faults
            if not fault.sentence.isprintable() or len(fault.sentence) > LONGEST
        ]
        return (f"sentence {bad[0][:200]!r}", "") if bad else None
    except TooSlow:
        return "too slow", traceback.format_exc(limit=-6)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]!r}", traceback.format_exc(limit=-6)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return None
