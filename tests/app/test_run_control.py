"""Several windows follow one run, and one of them controls it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.state.run import RunControl
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def looked(*controls: RunControl) -> list[bool]:
    """Each window looks at the live run; which of them see the control elsewhere."""
    for control in controls:
        control.update(live=True)
    return [control.is_elsewhere for control in controls]


def test_the_first_window_controls_the_run_and_the_next_when_it_is_gone(folder: RunFolder) -> None:
    first, second = RunControl(folder), RunControl(folder)
    assert looked(first, second) == [False, True]
    first.require()
    with pytest.raises(UserError, match="Another window"):
        second.require()
    first.release()
    assert looked(second, first) == [False, True]


def test_taking_over_passes_the_control_on_and_back(folder: RunFolder) -> None:
    first, second = RunControl(folder), RunControl(folder)
    looked(first, second)
    second.take_over()
    assert second.is_elsewhere, "not before the first has looked"
    assert looked(first, first, second, first) == [True, True, False, True]
    assert not folder.window_request.exists()
    first.take_over()
    assert looked(second, first) == [True, False]


def test_an_unanswered_request_expires(folder: RunFolder) -> None:
    first, second = RunControl(folder), RunControl(folder)
    looked(first, second)
    second.take_over()
    os.utime(folder.window_request, (0, 0))
    assert looked(first, second) == [False, True], "an old request, of a window that is gone perhaps, moves nobody"
