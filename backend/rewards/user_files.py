"""Run a user's reward file once, and keep what it registers in a table of its own.

The file runs as a script does, with the user's rights: asking for consent is left to the window (by content
hash). It never writes to the table of shipped functions. Where it registers a name that a shipped function has,
its own function is used in runs with that file, and a note says so. A file written for TRL registers nothing; its
functions are looked up by name.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from backend.rewards.catalogue.catalog import locate_reward_file, not_in_file, parse_reward_file, rewards_in_file
from backend.rewards.mlx_lm_lora_shim import stand_in_library
from backend.rewards.registry import REWARD_REGISTRY, RewardCallable
from backend.rewards.runner.error_text import describe_error
from backend.utils.errors import UserError
from backend.utils.text import quote

DECORATORS = ("register_reward_function", "register_map_function")


@dataclass(frozen=True, slots=True)
class RewardFile:
    """A file that was run: the functions it registered by name, notes for the user on some of them, its module."""

    path: Path
    functions: dict[str, RewardCallable]
    notes: dict[str, str]
    module: ModuleType
    map_functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def module_function(self, name: str) -> RewardCallable:
        """The module's global `name`, as TRL would import it. Raises UserError on `reward_functions` if there is none."""
        if hasattr(self.module, name):
            return getattr(self.module, name)
        # Imported names are no suggestions for a misspelt one.
        defined = [key for key, value in vars(self.module).items() if _is_defined_in(value, self.module)]
        raise UserError("reward_functions", not_in_file(name, self.path, defined))


def _is_defined_in(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", "") == module.__name__


def load_reward_file(path: str | Path, base: Path | None = None) -> RewardFile:
    """Run a .py or .txt file and collect the reward functions it registers; no module or table remains if that fails.

    `~` is expanded, and a relative path is relative to the folder `base` (default: the working directory). Raises
    UserError on `reward_functions_file` when the file is missing, is no Python, raises while it runs, or registers
    nothing.
    """
    return _load(locate_reward_file(path, base), "reward_functions_file", must_register=True)


def load_plain_file(path: str | Path, base: Path | None = None) -> RewardFile:
    """Run a file whose functions are named as `file.py::function`; it need not register any.

    Paths as for `load_reward_file`. Raises UserError on `reward_functions`.
    """
    return _load(locate_reward_file(path, base), "reward_functions", must_register=False)


def _load(path: Path, setting: str, must_register: bool) -> RewardFile:
    tree = parse_reward_file(path, setting)
    functions: dict[str, RewardCallable] = {}
    maps: dict[str, Callable[..., Any]] = {}
    with stand_in_library(functions, maps), _new_module(path) as module:
        _run(tree, path, module, setting)
        if must_register and not functions and not maps:
            sentence = f'{path.name} registers no reward function: put @register_reward_function("name") above each.'
            raise UserError(setting, sentence)
    return RewardFile(path, functions, _notes(path, functions), module, maps)


@contextmanager
def _new_module(path: Path) -> Iterator[ModuleType]:
    """An empty module for the file. It stays in `sys.modules` if the block succeeds, else the previous entry is
    restored.

    It must be there while the file runs: dataclasses and pickle look their module up by name.
    """
    module = ModuleType(f"reward_file_{path.stem}")
    module.__file__ = str(path)
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield module
    except BaseException:
        del sys.modules[module.__name__]
        if before:
            sys.modules[module.__name__] = before
        raise


def _run(tree: ast.Module, path: Path, module: ModuleType, setting: str) -> None:
    # A helper beside the file can be imported. Last, so that it takes no other module's place.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(tree, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException as error:  # whatever a stranger's file raises, it is one that cannot be loaded
        sentence = f"{quote(path.name, 40)} cannot be loaded: {describe_error(error, path)}."
        raise UserError(setting, sentence + _advice(error)) from error


def _advice(error: BaseException) -> str:
    """What to add where a decorator of ours was not imported; else nothing."""
    name = error.name if isinstance(error, NameError) else ""
    return f" Begin the file with “from backend.rewards import {name}”." if name in DECORATORS else ""


def _notes(path: Path, functions: dict[str, RewardCallable]) -> dict[str, str]:
    notes = {
        name: f"{name} of {path.name} takes the place of the built-in function of that name."
        for name in functions
        if name in REWARD_REGISTRY
    }
    times = Counter(entry.name for entry in rewards_in_file(path))
    for name in functions:
        if times[name] > 1:
            notes[name] = f"{path.name} registers {name} {times[name]} times; the last one counts."
    return notes
