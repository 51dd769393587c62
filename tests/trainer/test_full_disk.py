"""Runs on a full or broken disk: one sentence, exit code 2, and after a resume as if nothing had happened; low space is
waited for."""

from __future__ import annotations

import errno
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from backend.cli.training import new_run
from backend.models import saving
from backend.runs import events as events_module
from backend.runs import guards
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.preflight import check
from backend.utils import disk
from backend.utils.disk import LONGEST_PLACE, Room
from backend.utils.errors import UserError
from backend.utils.text import quote
from tests.support import small_run

FULL = partial(OSError, errno.ENOSPC, "No space left on device")


def settings(inputs: Path, **changes: Any) -> dict[str, Any]:
    return small_run.settings_for(inputs, **({"iters": 3, "save_every": 2, "learning_rate": 1e-2} | changes))


@pytest.fixture(scope="module")
def unbroken(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = RunFolder(tmp_path_factory.mktemp("unbroken") / "run")
    assert small_run.train_here(settings(inputs), run).kind == "finished"
    return run


@pytest.mark.parametrize(
    ("name", "nth", "for_good"),
    [
        ("events.jsonl", 5, False),
        ("events.jsonl", 9, False),
        ("completions.jsonl", 3, False),
        ("events.jsonl", 10, True),
    ],
)
def test_a_line_that_cannot_be_written_ends_the_run_and_resuming_equals_never_having_stopped(
    inputs: Path,
    unbroken: RunFolder,
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    nth: int,
    for_good: bool,
) -> None:
    write_all, count = events_module.write_all, 0

    def full(file: Any, data: bytes) -> None:
        nonlocal count
        count += (is_it := Path(file.name).name == name)
        if is_it and (count == nth or (for_good and count > nth)):
            write_all(file, data[:7])
            raise FULL()
        write_all(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(events_module, "write_all", full)
        ending = small_run.train_here(settings(inputs), run)
    assert (ending.kind, ending.exit_code) == ("failed", 2)
    place = quote(run.path / name, LONGEST_PLACE)
    assert ending.sentence == f"disk: {place} cannot be written: the disk is full." and place.endswith(f"/{name}")
    last = list(read_events(run.events))[-1]
    assert (last["kind"] == "failed" and last["sentence"] == ending.sentence) != for_good, "for want of a last line"
    assert last["kind"] != "finished" and "traceback" not in last and not run.is_locked()
    assert small_run.train_here(settings(inputs), run).kind == "finished"
    small_run.assert_same_run(run, unbroken)


def test_an_unwritable_model_leaves_the_old(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    raw = settings(inputs, train_type="full", iters=2)
    run.model.mkdir(parents=True)
    (run.model / "config.json").write_text("old")

    def full(*_: Any, **__: Any) -> None:
        raise FULL()

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_model", full)
        ending = small_run.train_here(raw, run)
    place = quote(run.model, LONGEST_PLACE)
    assert (ending.exit_code, ending.sentence) == (2, f"disk: {place} cannot be written: the disk is full.")
    assert os.listdir(run.model) == ["config.json"] and not (run.path / ".model").exists()
    assert small_run.train_here(raw, run).kind == "finished"
    assert json.loads((run.model / "config.json").read_text()) and (run.model / "model.safetensors").exists()


def rooms(monkeypatch: pytest.MonkeyPatch, *free: Room | None) -> list[Room | None]:
    """The disk has these rooms at its next looks, the last of them for good."""
    left = list(free)
    monkeypatch.setattr(guards, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(guards, "room_on", lambda path: left.pop(0) if len(left) > 1 else left[0])
    return left


def notes(run: RunFolder) -> list[str]:
    return [sentence for sentence in small_run.notes(run) if "disk" in sentence.lower()]


def test_waiting_for_room(inputs: Path, unbroken: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plenty, none = RunFolder(tmp_path / "run"), Room(10**12, None), Room(3_000_000, None)
    rooms(monkeypatch, plenty, none, none, none, plenty)
    assert small_run.train_here(settings(inputs), run).kind == "finished"
    lacks, again = notes(run)
    where = quote(run.path, LONGEST_PLACE)
    assert lacks == f"The disk of {where} has 3 MB free, and 16.8 MB are needed. The run is paused until there is room."
    assert again == "There is space on the disk again; the run continues."
    assert [event.get("sentence") for event in read_events(run.events) if event.get("phase") == "paused"] == [lacks]
    assert run.completions.read_bytes() == unbroken.completions.read_bytes()


@pytest.mark.parametrize("room", [Room(3_000_000, None), Room(10**12, 3)])
def test_a_waiting_run_obeys(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: Room) -> None:
    rooms(monkeypatch, room)
    for word, kind in (("stop", "stopped"), ("resume", "finished")):
        run = RunFolder(tmp_path / word)

        def on_pause(event: Any, run: RunFolder = run, word: str = word) -> None:
            if event.get("phase") == "paused":
                run.say(word)

        ending = small_run.train_here(settings(inputs, iters=2), run, on_pause)
        assert ending.kind == kind and len(notes(run)) == 1
    assert ("3 more files" if room.files else "3 MB free") in notes(run)[0]


def test_a_run_without_room_is_refused(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = settings(inputs)
    monkeypatch.setattr(disk, "room_on", lambda folder: Room(5_000_000, None))
    (fault,) = check(raw)
    assert fault.setting == "disk"
    assert re.fullmatch(r"The run needs 1[67]\.?\d* MB on the disk of .*, which has 5 MB free\.", fault.sentence)
    with pytest.raises(UserError, match="disk: The run needs"):
        new_run(raw, tmp_path / "runs", "a")
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(disk, "room_on", lambda folder: None)
    assert check(raw) == []
