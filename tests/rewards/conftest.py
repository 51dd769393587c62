"""Fixtures of the tests of reward files."""

from pathlib import Path
from textwrap import dedent

import pytest


@pytest.fixture
def write(tmp_path: Path):
    """Writes a dedented reward file and returns its path."""

    def write(text: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(dedent(text))
        return path

    return write
