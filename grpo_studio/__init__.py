"""The installed form of GRPO Studio: this one package holds `app/`, `backend/` and `resources/`.

In a checkout `app` and `backend` lie at the top, where `python -m app` finds them. Installed like that they would take
two names in site-packages that other programs use as well, so a wheel holds them inside this package (pyproject.toml),
and importing it makes them importable by their own names. `python -m grpo_studio.backend VERB` and `python -m
grpo_studio.app` follow from that; processes that they start find our modules by PYTHONPATH
(`backend.utils.command.backend_environment`).
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

HOME = next(folder for folder in Path(__file__).resolve().parents if (folder / "backend").is_dir())
"""The folder that holds `app/`, `backend/` and `resources/`: this package when installed, the top of a checkout."""

# First, as another package called `app` or `backend` may be installed beside us.
if sys.path[:1] != [str(HOME)]:
    sys.path.insert(0, str(HOME))


def __getattr__(name: str) -> Any:
    """What the trainer offers as a library, under this package's name too: `from grpo_studio import Config, train`."""
    library = import_module("backend")
    if name not in library.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(library, name)
