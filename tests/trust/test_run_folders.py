"""A sample of the torture of run folders: `python -m tests.torture run_folders` does thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture import run_folders


def test_a_sample_of_broken_run_folders_is_read() -> None:
    assert run_folders.main(count=8, seed=20_000) == 0


def test_a_reader_that_fails_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The torture itself: an exception that is no UserError, and a sentence that is too long, are failures."""
    from backend.utils.errors import UserError

    def raises(error: Exception) -> None:
        raise error

    assert run_folders._problem(lambda: raises(KeyError("x"))) is not None
    too_long = UserError("run", "Fine.")
    object.__setattr__(too_long.faults[0], "sentence", "x" * 500)  # a Fault cuts what it is given
    assert run_folders._problem(lambda: raises(too_long)) is not None
    assert run_folders._problem(lambda: raises(UserError("run", "Fine."))) is None
