"""The event log: whole lines, one writer, and followers that miss nothing and repeat nothing, whatever happens to the
file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.runs import archive
from backend.runs import events as event_log_ends
from backend.runs.events import Event, EventLog, Follower, parse_line, read_events, truncate_file
from backend.runs.run_folder import RunFolder, hold_lock
from backend.utils.disk import DiskError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def put(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def line(**event: Any) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


def steps(events: list[Event]) -> list[Any]:
    return [event.get("step") for event in events]


def test_nan_and_infinities_are_null_and_paths_are_text(path: Path) -> None:
    odd = {"kl": math.nan, "a": [math.inf, (1.0, -math.inf)], "p": Path("x/y"), 3: True}
    written = EventLog(path).write("of tomorrow", metrics=odd)
    assert b"NaN" not in path.read_bytes() and b"Infinity" not in path.read_bytes()
    (event,) = read_events(path)
    assert event["metrics"] == written["metrics"] == {"kl": None, "a": [None, [1.0, None]], "p": "x/y", "3": True}


def test_a_half_line_waits_for_its_newline(path: Path) -> None:
    follower = Follower(path)
    assert follower.read() == [] and not follower.restarted  # there is no file yet
    put(path, line(step=1) + b'{"step": 2, "tex')
    assert steps(follower.read()) == [1] and follower.offset == len(line(step=1))
    assert follower.read() == []
    put(path, b't": "x"}')
    assert follower.read() == []
    put(path, b"\n")
    assert follower.read() == [{"step": 2, "text": "x"}] and follower.read() == [] and not follower.restarted


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(max_size=30), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    limit=st.integers(1, 50),
)
def test_each_line_of_a_growing_file_once(tmp_path: Path, texts: list[str], cuts: list[int], limit: int) -> None:
    path = tmp_path / "grown.jsonl"
    path.write_bytes(b"")
    data = b"".join(line(seq=i, text=text) for i, text in enumerate(texts))
    follower, received = Follower(path, limit=limit), []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        put(path, data[begin:end])
        while events := follower.read():
            received += events
            assert not follower.restarted
    assert received == [{"seq": i, "text": text} for i, text in enumerate(texts)]


def test_invalid_lines_and_unknown_kinds_are_skipped(path: Path) -> None:
    odd = [b"not json\n", b"[1, 2]\n", b"\xff\xfe\x00\n", b"\n", b"3\n", b"[" * 100_000 + b"\n", b'{"kind": 7}\n']
    put(path, line(step=1) + b"".join(odd) + line(kind="of tomorrow", step=2))
    follower = Follower(path)
    assert steps(follower.read()) == [1, 2]
    put(path, b"more rubbish\n")
    assert follower.read() == [] and not follower.restarted
    put(path, line(step=3))
    assert steps(follower.read()) == [3] and not follower.restarted


def event_log_of(path: Path, count: int, *, t0: float = 0.0) -> list[int]:
    """An event log of `count` steps, and its size after each; `t0` makes two of them differ in nothing but their
    times."""
    sizes = []
    with path.open("ab") as file:
        for number in range(count):
            file.write(line(v=1, seq=number, t=t0 + number, kind="step", step=number))
            sizes.append(file.tell())
    return sizes


def test_a_file_truncated_below_the_readers_offset_restarts_it(path: Path) -> None:
    sizes = event_log_of(path, 10)
    follower = Follower(path)
    follower.read()
    truncate_file(path, sizes[3])
    assert steps(follower.read()) == [0, 1, 2, 3] and follower.restarted
    assert follower.read() == [] and not follower.restarted


@pytest.mark.parametrize("shift", range(-30, 31, 3))
def test_a_file_truncated_and_grown_past_the_reader_restarts_it(path: Path, shift: int) -> None:
    """Between two reads, a resumed run may truncate the file and grow it past the reader's offset. The reader must then
    restart. Sequence numbers alone do not show it: the line after the offset may have the number that was expected."""
    sizes = event_log_of(path, 10)
    follower = Follower(path)
    follower.read()
    truncate_file(path, sizes[3])
    put(path, line(v=1, seq=4, t=50.0, kind="started", pad="x" * (60 + shift)))
    for number in range(5, 14):
        put(path, line(v=1, seq=number, t=50.0 + number, kind="step", step=number))
    events = follower.read()
    assert follower.restarted and [event["seq"] for event in events] == list(range(14))
    assert events[4]["kind"] == "started" and follower.read() == []


def test_a_deleted_file_restarts_the_reader_and_may_come_back(path: Path) -> None:
    event_log_of(path, 5)
    follower = Follower(path)
    follower.read()
    path.unlink()
    assert follower.read() == [] and follower.restarted and follower.offset == 0
    assert follower.read() == [] and not follower.restarted
    event_log_of(path, 2)
    assert len(follower.read()) == 2 and not follower.restarted


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "a-run")
    folder.path.mkdir()
    folder.config.write_text("model: owner/model\niters: 9\n")
    return folder


def test_the_summary_of_a_long_event_log_reads_its_ends(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    event_log = EventLog(run.events)
    event_log.write("started", iterations=20_000)
    for number in range(1, 20_001):
        event_log.append({"kind": "step", "step": number, "metrics": {"reward": number / 100}})
    event_log.write("finished", step=20_000, sentence="Finished after 20000 steps.")
    read = []
    monkeypatch.setattr(event_log_ends, "parse_line", lambda line: read.append(len(line)) or parse_line(line))
    result = archive.summary(run)
    assert (result.state, result.step, result.iterations, result.reward) == ("finished", 20_000, 20_000, 200.0)
    assert (result.name, result.model, result.sentence) == ("a-run", "owner/model", "Finished after 20000 steps.")
    assert sum(read) < 3 * event_log_ends.TAIL_BYTES < run.events.stat().st_size


def test_the_summary_finds_the_last_step_before_thousands_of_phases(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    """A long rollout or evaluation writes two phases a second: after six minutes the last step was farther from the end
    than the summary reads. A log of 300,000 notes took 25 s and half a gigabyte."""
    read = []
    monkeypatch.setattr(event_log_ends, "parse_line", lambda line: read.append(len(line)) or parse_line(line))
    event_log = EventLog(run.events)
    event_log.write("started", iterations=9)
    event_log.append({"kind": "step", "step": 1, "metrics": {"reward": 0.25}})
    for number in range(4000):
        event_log.append({"kind": "phase", "phase": "evaluating", "progress": number / 4000})
    result = archive.summary(run)
    assert (result.state, result.step, result.reward, result.iterations) == ("crashed", 1, 0.25, 9)
    assert sum(read) < 3 * event_log_ends.TAIL_BYTES < run.events.stat().st_size


def test_a_state_follows_from_the_event_log_and_the_lock(run: RunFolder) -> None:
    def state() -> str:
        return archive.summary(run).state

    assert state() == "starting"
    event_log = EventLog(run.events)
    handle = hold_lock(run)
    event_log.write("phase", phase="loading")
    assert state() == "starting", "nothing has started before `started`"
    event_log.write("started", iterations=2)
    assert state() == "running"
    event_log.write("step", step=1, metrics=None)
    assert archive.summary(run).step == 1 and archive.summary(run).reward is None

    os.close(handle)
    assert state() == "crashed"
    for ending in ("failed", "stopped", "finished"):
        event_log.write(ending, step=1, sentence="So it ended.")
        assert state() == ending


def test_a_fault_of_the_echo_is_raised_by_the_next_event_so_that_this_one_counts(tmp_path: Path) -> None:
    """A log that could not be written once ended a run between an evaluation's event and its place in the checkpoint:
    it stood there twice after a resume."""
    echoed: list[str] = []

    def echo(event: Event) -> None:
        echoed.append(event["kind"])
        if event["kind"] == "eval":
            raise DiskError("log.txt cannot be written: no space left on device.")

    event_log = EventLog(tmp_path / "events.jsonl", echo)
    assert event_log.write("eval", step=2)["seq"] == 0
    with pytest.raises(DiskError, match=r"log\.txt"):
        event_log.write("note", sentence="Not written.")
    event_log.write("step", step=3)
    event_log.close()
    assert echoed == ["eval", "step"] == [event["kind"] for event in read_events(tmp_path / "events.jsonl")]
    assert event_log.take_echo_error() is None
