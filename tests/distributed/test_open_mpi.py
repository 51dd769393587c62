"""Open MPI is found where Homebrew has put it, also by an app, which a Mac starts without Homebrew's folder on its PATH."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backend.distributed import open_mpi
from backend.distributed.open_mpi import LIBRARY_VARIABLE, mpi_variables, mpirun


@pytest.fixture
def homebrew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in ("bin/mpirun", "lib/libmpi.40.dylib", "lib/libmpi.dylib", "lib/libmpi_mpifh.dylib"):
        path = tmp_path / "homebrew" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(open_mpi, "_USUAL_FOLDERS", (str(tmp_path / "homebrew" / "bin"),))
    return tmp_path / "homebrew"


def test_it_is_found_off_the_path(homebrew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mpirun() == str(homebrew / "bin" / "mpirun")
    monkeypatch.setattr(open_mpi, "_USUAL_FOLDERS", ())
    assert mpirun() is None


def test_a_mac_is_told_the_path_of_the_library(homebrew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert mpi_variables() == {LIBRARY_VARIABLE: str(homebrew / "lib" / "libmpi.dylib")}
    monkeypatch.setenv(LIBRARY_VARIABLE, "/my/libmpi.dylib")
    assert mpi_variables() == {LIBRARY_VARIABLE: "/my/libmpi.dylib"}
