"""Run a user's reward file once and collect what it registers.

The file runs with this process's rights; callers ask for consent (`backend.rewards.allowed_code`). `stand_in_library`
serves files that import mlx-lm-lora's registry.
"""

from __future__ import annotations

import sys
import threading
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from backend.rewards import registry
from backend.rewards.catalogue import (
    DEFAULT_REWARDS,
    locate_reward_file,
    not_in_file,
    parse_reward_file,
    rewards_in_file,
)
from backend.rewards.errors import describe_error
from backend.rewards.functions import r1
from backend.rewards.registry import REWARD_REGISTRY, RewardCallable
from backend.utils.errors import UserError
from backend.utils.text import quote

_DECORATORS = ("register_reward_function", "register_map_function")
_LIBRARY = "mlx_lm_lora"
_MODULES = (_LIBRARY, f"{_LIBRARY}.trainer", f"{_LIBRARY}.trainer.grpo_reward_functions")

# sys.modules belongs to the whole process. Reentrant: calls over several files enter one stand-in inside another.
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class RewardFile:
    """An executed file: functions by name, notes, module."""

    path: Path
    functions: dict[str, RewardCallable]
    notes: dict[str, str]
    module: ModuleType
    map_functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def module_function(self, name: str) -> RewardCallable:
        """The module's global `name`. Raises UserError on `reward_functions`."""
        if hasattr(self.module, name):
            return getattr(self.module, name)
        contents = vars(self.module).items()
        own = [key for key, value in contents if getattr(value, "__module__", "") == self.module.__name__]
        raise UserError("reward_functions", not_in_file(name, self.path, own))


def load_reward_file(path: str | Path, base: Path | None = None, *, plain: bool = False) -> RewardFile:
    """Run a .py or .txt file, relative to `base`, and collect what it registers.

    `plain`: it is used as `file.py::function` and may register nothing. Raises UserError on `reward_functions` if
    plain, else `reward_functions_file`.
    """
    path = locate_reward_file(path, base)
    setting = "reward_functions" if plain else "reward_functions_file"
    tree = parse_reward_file(path, setting)
    functions: dict[str, RewardCallable] = {}
    maps: dict[str, Callable[..., Any]] = {}
    # In `sys.modules` for dataclasses and pickle.
    module = ModuleType(f"reward_file_{path.stem}")
    module.__file__ = str(path)
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    # A helper beside the file can be imported. Last, so that it takes no other module's place.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sentence, cause = "", None
    with stand_in_library(functions, maps):
        try:
            exec(compile(tree, str(path), "exec", dont_inherit=True), vars(module))
        except BaseException as error:  # a SystemExit too
            name = error.name if isinstance(error, NameError) else ""
            advice = f" Begin the file with “from backend.rewards import {name}”." if name in _DECORATORS else ""
            sentence = f"{quote(path.name, 40)} cannot be loaded: {describe_error(error, path)}.{advice}"
            cause = error
    if not (sentence or plain or functions or maps):
        sentence = f'{path.name} registers no reward function: put @register_reward_function("name") above each.'
    if sentence:
        del sys.modules[module.__name__]
        if before:
            sys.modules[module.__name__] = before
        raise UserError(setting, sentence) from cause
    times = Counter(entry.name for entry in rewards_in_file(path))
    notes: dict[str, str] = {}
    for name in functions:
        if times[name] > 1:
            notes[name] = f"{path.name} registers {name} {times[name]} times; the last one counts."
        elif name in REWARD_REGISTRY:
            notes[name] = f"{name} of {path.name} takes the place of the built-in function of that name."
    return RewardFile(path, functions, notes, module, maps)


@contextmanager
def stand_in_library(
    table: dict[str, RewardCallable], maps: dict[str, Callable[..., Any]] | None = None
) -> Iterator[None]:
    """Stand in for mlx_lm_lora's registry, registering in `table` and `maps`.

    Also hides an installed mlx_lm_lora; restores `sys.modules` afterwards.
    """
    overlay = ChainMap(table, REWARD_REGISTRY)
    modules = {name: ModuleType(name, "GRPO Studio's stand-in: backend/rewards/user_files.py.") for name in _MODULES}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, loader=None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
            modules[parent].__path__ = []
    vars(modules[_MODULES[-1]]).update(
        {
            "RewardFunctions": Callable[[list[str], list[str], list[str], list[str] | None], list[float]],
            "REWARD_REGISTRY": overlay,
            "register_reward_function": registry.register_reward_function,
            "register_map_function": registry.register_map_function,
            "get_reward_function": registry.get_reward_function,
            "get_default_reward_functions": lambda: [REWARD_REGISTRY[name] for name in DEFAULT_REWARDS],
            "list_available_reward_functions": registry.list_reward_functions,
            "r1_extract_xml_answer": r1.extract_answer,
            **{name: REWARD_REGISTRY[name] for name in DEFAULT_REWARDS},
        }
    )
    with _lock, registry.registering_into(overlay, {} if maps is None else maps):
        before = _remove_library()
        sys.modules.update(modules)
        try:
            yield
        finally:
            _remove_library()
            sys.modules.update(before)


def _remove_library() -> dict[str, ModuleType]:
    # Runs around every call of a user's function, over thousands of names.
    names = [name for name in sys.modules if name.startswith(_LIBRARY) and name.partition(".")[0] == _LIBRARY]
    return {name: sys.modules.pop(name) for name in names}
