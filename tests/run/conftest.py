"""Fixtures of the tests of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.spec.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder that does not exist yet."""
    return RunFolder(tmp_path / "runs" / "mine")
