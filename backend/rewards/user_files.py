"""A person's reward file: run once, and what it registers kept in a table of its own.

The file runs as a script does, with all that entails: it is the person's own code. It never writes to the built-in
table. Where it registers a name that a built-in function has, its own function counts in runs that use the file, and
a note says so. A file written for TRL registers nothing; its functions are taken from it by name.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from backend.rewards.mlx_lm_lora import library
from backend.rewards.registry import REWARD_REGISTRY, RewardCallable
from backend.rewards.runner.excerpts import describe
from backend.spec.faults import Mistake
from backend.spec.rewards.catalog import locate_reward_file, not_in_file, parse_reward_file, rewards_in_file


@dataclass(frozen=True, slots=True)
class RewardFile:
    """What loading a file gave: the functions it registers by name, for some names a sentence that a person should
    see, and everything else that it holds."""

    path: Path
    functions: dict[str, RewardCallable]
    notes: dict[str, str]
    module: ModuleType

    def plain(self, name: str) -> RewardCallable:
        """What the file itself calls `name`, as TRL would import it. Mistake on `reward_functions` if there is none."""
        if hasattr(self.module, name):
            return getattr(self.module, name)
        own = [
            each
            for each, value in vars(self.module).items()
            if getattr(value, "__module__", "") == self.module.__name__
        ]
        raise Mistake("reward_functions", not_in_file(name, self.path, own))


def load_reward_file(path: str | Path, base: Path | None = None) -> RewardFile:
    """Run a .py or .txt file and collect the reward functions it registers; nothing is left behind if that fails.

    `~` is expanded, and a relative path is taken from the folder `base` (else from where we run). Raises Mistake on
    `reward_functions_file` when the file is missing, is no Python, raises while it runs, or registers nothing.
    """
    return _load(locate_reward_file(path, base), "reward_functions_file", must_register=True)


def load_plain_file(path: str | Path, base: Path | None = None) -> RewardFile:
    """Run a file whose functions are asked for by `file.py::function`; it need not register any.

    Paths as for `load_reward_file`. Raises Mistake on `reward_functions`.
    """
    return _load(locate_reward_file(path, base), "reward_functions", must_register=False)


def _load(path: Path, setting: str, must_register: bool) -> RewardFile:
    tree = parse_reward_file(path, setting)
    functions: dict[str, RewardCallable] = {}
    with library(functions), _module_of(path) as module:
        _run(tree, path, module, setting)
        if must_register and not functions:
            sentence = f'{path.name} registers no reward function: put @register_reward_function("name") above each.'
            raise Mistake(setting, sentence)
    return RewardFile(path, functions, _notes(path, functions), module)


@contextmanager
def _module_of(path: Path) -> Iterator[ModuleType]:
    """An empty module for the file, in `sys.modules` for good if the block succeeds, else as before.

    It has to be there: dataclasses and pickle look their module up by name.
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
    try:
        exec(compile(tree, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        raise Mistake(setting, f"{path.name} cannot be loaded: {describe(error, path)}.") from error


def _notes(path: Path, functions: dict[str, RewardCallable]) -> dict[str, str]:
    notes = {
        name: f"{name} of {path.name} takes the place of the built-in function of that name."
        for name in functions
        if name in REWARD_REGISTRY
    }
    times = Counter(entry.name for entry in rewards_in_file(path))
    for name in (name for name in functions if times[name] > 1):
        notes[name] = f"{path.name} registers {name} {times[name]} times; the last one counts."
    return notes
