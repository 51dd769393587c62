"""The exact command line of a verb, and the environment it needs; the window shows it and runs it."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from backend.utils.places import project_root

BUNDLED_PROGRAM, BUNDLED_WINDOW = "grpo-studio-backend", "grpo-studio"
"""The executables of a bundled app, where `sys.executable` is one of them, and not Python."""


def is_bundled() -> bool:
    """True if this program was made by PyInstaller (`packaging/grpo-studio.spec`)."""
    return getattr(sys, "frozen", False)


def backend_command(verb: str, *arguments: str) -> list[str]:
    """Program and arguments of `python -m backend VERB …`. `-P` keeps a folder `backend` in the working directory from
    being run in place of ours. Installed from a wheel we are part of the package `grpo_studio`."""
    return [*_program("backend", BUNDLED_PROGRAM), verb, *arguments]


def window_command(*arguments: str) -> list[str]:
    """Program and arguments of `python -m app …`, as `backend_command` makes the trainer's."""
    return [*_program("app", BUNDLED_WINDOW), *arguments]


def _program(package: str, bundled: str) -> list[str]:
    if is_bundled():
        return [str(Path(sys.executable).with_name(bundled))]
    parent = "grpo_studio." if (project_root() / "__init__.py").exists() else ""
    return [sys.executable, "-P", "-m", f"{parent}{package}"]


def backend_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for a backend process: our packages first, output unbuffered and in UTF-8."""
    environment = dict(os.environ if base is None else base)
    if is_bundled():
        return environment
    ours, theirs = str(project_root()), environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{ours}{os.pathsep}{theirs}" if theirs else ours
    return environment | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
