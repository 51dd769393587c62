"""The command line and environment in which a verb is started."""

from __future__ import annotations

import os
import sys

import pytest

from backend.utils import places
from backend.utils.child_process import module_command
from backend.utils.command import backend_command, backend_environment


def test_a_bundled_app_starts_the_trainers_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_command("train", "--run", "a b") == [sys.executable, "-P", "-m", "backend", "train", "--run", "a b"]
    assert module_command("backend.some.module") == [sys.executable, "-P", "-m", "backend.some.module"]
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    for program in ("grpo-studio", "grpo-studio-backend"):  # from the window, and from the trainer itself
        monkeypatch.setattr(sys, "executable", f"/opt/GRPO Studio/{program}")
        assert backend_command("train", "x") == ["/opt/GRPO Studio/grpo-studio-backend", "train", "x"]
        assert module_command("backend.a")[1:] == ["child", "backend.a"]
    assert backend_environment({"HOME": "/h"}) == {"HOME": "/h"}, "a program of the user's must not import our packages"


def test_the_environment_puts_our_packages_first() -> None:
    root = str(places.project_root())
    assert backend_environment({})["PYTHONPATH"] == root
    environment = backend_environment({"PYTHONPATH": "/theirs", "HOME": "/h"})
    assert environment["PYTHONPATH"] == f"{root}{os.pathsep}/theirs" and environment["HOME"] == "/h"
    assert environment["PYTHONUNBUFFERED"] == "1" and environment["PYTHONIOENCODING"] == "utf-8"
