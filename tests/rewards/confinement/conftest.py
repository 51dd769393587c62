"""Real confined children, shared by the tests of a module, and what they may not touch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from backend.rewards.confinement.confine import confined_environment
from backend.utils.command import backend_environment
from tests.support.precious import made_run

CHILD = Path(__file__).with_name("probe_child.py")


class ProbedChild:
    """A confined child: `run` executes a snippet in it; `confinement` is what it says of itself."""

    def __init__(self, folder: Path, network: bool, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), str(folder), "network" if network else "no network"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=folder,
            start_new_session=True,
            env=backend_environment({**confined_environment(folder, network, os.environ), **(environment or {})}),
        )
        self.confinement = SimpleNamespace(**self._answer())

    def run(self, code: str, **names: Any) -> dict[str, Any]:
        """`{"value": …}` or `{"error": …, "errno": …, "text": …}`. The snippet sees `names`; paths are text."""
        assert self._process.stdin is not None
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in names.items()}
        self._process.stdin.write(json.dumps({"code": dedent(code), "names": plain}) + "\n")
        return self._answer()

    def needs(self, promise: str) -> None:
        """Skip the test where this system cannot hold the promise."""
        if not getattr(self.confinement, promise):
            pytest.skip(f"{promise}: {self.confinement.reason}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the child ended with {self._process.wait()}"
        return json.loads(line)


@pytest.fixture(scope="session")
def confined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbedChild]:
    """Confined, without a network."""
    child = ProbedChild(tmp_path_factory.mktemp("confined"), network=False)
    yield child
    child.close()


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbedChild]:
    """Confined, with the network."""
    child = ProbedChild(tmp_path_factory.mktemp("judge"), network=True)
    yield child
    child.close()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Somebody's run, outside the child's folder."""
    return made_run(tmp_path)
