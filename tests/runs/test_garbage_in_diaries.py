"""Anything may lie between the lines of an event log or of completions.jsonl: every reader goes on, as does the run."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.state.run import RunState
from backend.runs import checkpoint
from backend.runs.archive import WorkClock, summary
from backend.runs.completion_rows import CompletionIndex, parse_group_row
from backend.runs.events import EventLog, Follower, check_format, event_ends, has_finished, read_events
from backend.runs.queue import QueueFile
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import compare, newest_evaluation, read_notes, read_parent, reward_curve
from backend.runs.steering import MetricWatch, read_changes
from backend.runs.sweep_results import SweepFolder, read_results
from backend.trainer.health.watch import Watch, examine
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.diaries import recording

VALUES: list[Any] = [None, "x", "", -1, 1.5, True, 10**400, 1e308, [], {}, [[]], {"a": None}, "\x00", "9" * 5000]


def garbage(chance: random.Random, lines: list[bytes]) -> bytes:
    """Something that may lie where a line should be."""
    line = chance.choice(lines)
    match chance.randrange(7):
        case 0:
            return chance.randbytes(chance.randrange(1, 300))
        case 1:
            return line[: chance.randrange(len(line))] + b"\n"
        case 2:
            return line  # once more, with the same seq
        case 3:
            return b"[" * chance.choice([1, 3000]) + b"\n"
        case 4:
            return json.dumps(chance.choice(VALUES)).encode() + b"\n"
        case 5:
            return b"\x00" * 4096 + b"\n"
        case _:
            event = json.loads(line)
            for key in chance.sample(sorted(event), min(len(event), chance.randrange(1, 4))):
                if isinstance(event[key], dict) and event[key] and chance.random() < 0.5:
                    event[key] |= {chance.choice(sorted(event[key])): chance.choice(VALUES)}
                elif chance.random() < 0.2:
                    del event[key]
                else:
                    event[key] = chance.choice(VALUES)
            return json.dumps(event).encode() + b"\n"


def with_garbage(chance: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    for _ in range(chance.randrange(1, 12)):
        place = chance.randrange(len(lines) + 1)
        lines[place : place + chance.randrange(2)] = [garbage(chance, content.splitlines(keepends=True))]
    return b"".join(lines)


def state_of_window(run: RunFolder) -> None:
    state, follower = RunState(), Follower(run.events)
    while events := follower.read():
        for event in events:
            state.apply(event)


def worked(run: RunFolder) -> None:
    clock = WorkClock()
    for event in read_events(run.events):
        clock.take(event)
    assert clock.seconds >= 0


def watched(run: RunFolder) -> None:
    Watch.resumed({}, read_events(run.events))
    watch = MetricWatch()
    for event in read_events(run.events):
        watch.take(event)
    watch.met(["kl > 0.8"])


def indexed(run: RunFolder) -> None:
    index = CompletionIndex(run.completions)
    while index.advance():
        pass
    for step in index.steps():
        index.rows(step)


def opened(run: RunFolder) -> None:
    event_log = EventLog(run.events)
    event_log.write("note", level="info", sentence="Still here.")
    event_log.close()


READERS: list[Callable[[RunFolder], Any]] = [summary, examine, has_finished, state_of_window, worked, watched, indexed]
READERS += [lambda run: compare([run, run]), lambda run: reward_curve(run.events), opened]
READERS += [lambda run: newest_evaluation(run.events), lambda run: event_ends(run.events)]


@pytest.fixture
def recorded(tmp_path: Path) -> RunFolder:
    run = recording("healthy-grpo").unpack(tmp_path / "recorded")
    golden = Path(__file__).parents[1] / "golden" / "run_of_2026_11" / "run"
    shutil.copyfile(golden / "completions.jsonl", run.completions)
    return run


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 100), marks=pytest.mark.proof)], ids=str)
def test_every_reader_goes_on(recorded: RunFolder, seeds: range) -> None:
    event_log, completions = recorded.events.read_bytes(), recorded.completions.read_bytes()
    raised: dict[str, int] = {}
    for seed in seeds:
        chance = random.Random(seed)
        recorded.events.write_bytes(with_garbage(chance, event_log))
        recorded.completions.write_bytes(with_garbage(chance, completions))
        for number, read in enumerate(READERS):
            try:
                read(recorded)
            except Exception as error:
                place = error.__traceback__
                while place and place.tb_next:
                    place = place.tb_next
                where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else ""
                raised.setdefault(f"reader {number}: {error!r} in {where}", seed)
    assert not raised, "\n".join(f"seed {seed}: {what}" for what, seed in raised.items())


def test_a_run_goes_on_although_its_files_were_edited(tmp_path: Path, run: RunFolder) -> None:
    """The recorded lengths no longer fall between two lines; the lines say where the step ends."""
    raw = small_run.settings_for(tmp_path, iters=3, save_every=2)
    assert small_run.train_here(raw, run).kind == "finished"
    shutil.rmtree(run.checkpoints / "000003")
    for file in (run.events, run.completions):
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join([lines[0], b"\xffedited by hand\n", b'{"kind": "step", "step": "x"}\n', *lines[1:]]))
    assert small_run.train_here(raw | {"iters": 4}, run).step == 4
    assert [event["step"] for event in small_run.events(run, "step") if "step" in event] == [1, 2, 3, 4]
    steps = [row["step"] for line in run.completions.read_bytes().splitlines() if (row := parse_group_row(line))]
    assert steps == [1, 2, 3, 4]
    saved = checkpoint.newest(run)
    assert saved is not None and saved.state.step == 4


FILE_READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "about": (lambda folder: RunFolder(folder).about, lambda folder: read_notes(RunFolder(folder))),
    "changes": (lambda folder: RunFolder(folder).changes, lambda folder: read_changes(RunFolder(folder))),
    "parent": (lambda folder: RunFolder(folder).parent, lambda folder: read_parent(RunFolder(folder))),
    "queue": (lambda folder: QueueFile(folder).path, lambda folder: QueueFile(folder).read()),
    "results": (lambda folder: SweepFolder(folder).results, lambda folder: read_results(SweepFolder(folder))),
}
"""Which file of a folder, and what reads it."""
STRANGE = '{"changes": [{"step": 1, "settings": {"' + "x" * 500 + '": [1, 2]}}], "title": 3, "runs": 3}'
BROKEN = ['{"a": [1, 2', "{1: 2}", "[]", STRANGE, "3"]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("name", FILE_READERS)
def test_a_broken_file_is_named_with_what_to_do_however_long_its_path(tmp_path: Path, name: str, broken: str) -> None:
    folder = tmp_path / ("a long name of a folder " * 5).strip() / ("and another one " * 8).strip()
    folder.mkdir(parents=True)
    file, read = FILE_READERS[name]
    file(folder).write_text(broken)
    with pytest.raises(UserError) as mistake:
        read(folder)
    (fault,) = mistake.value.faults
    assert file(folder).name in fault.sentence and "fix or delete" in fault.sentence.lower(), fault.sentence
    assert len(fault.sentence) <= 200, fault.sentence


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Whether a run is of a newer version is asked before anything of it is checked."""
    run = RunFolder(tmp_path)
    with run.changes.open("wb") as file:
        file.truncate(1 << 40)  # of holes
    check_format(run)
