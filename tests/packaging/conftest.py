"""Shared by the tests of what is packaged: the scripts of packaging/ as modules, and a wheel of this checkout."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports by name a script of packaging/ or packaging/macos/, in no package: `packaging` would hide PyPI's."""
    monkeypatch.syspath_prepend(ROOT / "packaging")
    monkeypatch.syspath_prepend(ROOT / "packaging" / "macos")
    return importlib.import_module


@pytest.fixture(scope="package")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))
