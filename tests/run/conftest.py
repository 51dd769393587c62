"""Fixtures of the tests that train in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.spec.places import RunFolder


@pytest.fixture(autouse=True)
def restore_signal_handlers() -> Iterator[None]:
    """Training in this process installs handlers for SIGINT and SIGTERM; restore the previous ones."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder that does not exist yet."""
    return RunFolder(tmp_path / "runs" / "mine")
