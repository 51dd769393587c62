"""A stand-in for `mlx_lm_lora.trainer.grpo_reward_functions`, so that reward files written for that library load
unchanged.

It has that one module and nothing else of the library. It is in `sys.modules` only while a user's code runs, also where
the real library is installed: otherwise the user's functions would register themselves there and be missing in ours.
Afterwards `sys.modules` is as it was.
"""

from __future__ import annotations

import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from backend.rewards import registry
from backend.rewards.catalogue.catalog import DEFAULT_REWARDS
from backend.rewards.functions import r1
from backend.rewards.registry import REWARD_REGISTRY, RewardCallable

_LIBRARY = "mlx_lm_lora"
_MODULES = (_LIBRARY, f"{_LIBRARY}.trainer", f"{_LIBRARY}.trainer.grpo_reward_functions")

# sys.modules belongs to the whole process: two files that ran concurrently would see each other's table. Reentrant, because
# calls over several files enter one stand-in inside another.
_lock = threading.RLock()


@contextmanager
def stand_in_library(
    table: dict[str, RewardCallable], maps: dict[str, Callable[..., Any]] | None = None
) -> Iterator[None]:
    """While open, a user's code may import the library, and what it registers goes into `table`, map functions into `maps`.

    `table` overlays the shipped functions: writes change only `table`, look-ups read both.
    """
    overlay = ChainMap(table, REWARD_REGISTRY)
    with (
        _lock,
        registry.registering_into(overlay, {} if maps is None else maps),
        _in_sys_modules(_stand_in_modules(overlay)),
    ):
        yield


@contextmanager
def _in_sys_modules(modules: dict[str, ModuleType]) -> Iterator[None]:
    before = _remove_library()
    sys.modules.update(modules)
    try:
        yield
    finally:
        _remove_library()
        sys.modules.update(before)


def _remove_library() -> dict[str, ModuleType]:
    """Remove the library and everything under it from `sys.modules`, and return what was there."""
    # Around every call of a user's function, over thousands of names: the first condition alone is looked at for nearly all.
    names = [name for name in sys.modules if name.startswith(_LIBRARY) and name.partition(".")[0] == _LIBRARY]
    return {name: sys.modules.pop(name) for name in names}


def _stand_in_modules(table: MutableMapping[str, RewardCallable]) -> dict[str, ModuleType]:
    modules = {
        name: ModuleType(name, "GRPO Studio's stand-in; see backend/rewards/mlx_lm_lora_shim.py.") for name in _MODULES
    }
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, loader=None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
            modules[parent].__path__ = []
    vars(modules[_MODULES[-1]]).update(_contents(table))
    return modules


def _contents(table: MutableMapping[str, RewardCallable]) -> dict[str, object]:
    return {
        "RewardFunctions": Callable[[list[str], list[str], list[str], list[str] | None], list[float]],
        "REWARD_REGISTRY": table,
        "register_reward_function": registry.register_reward_function,
        "register_map_function": registry.register_map_function,
        "get_reward_function": registry.get_reward_function,
        "get_default_reward_functions": lambda: [REWARD_REGISTRY[name] for name in DEFAULT_REWARDS],
        "list_available_reward_functions": registry.list_reward_functions,
        "r1_extract_xml_answer": r1.extract_answer,
        **{name: REWARD_REGISTRY[name] for name in DEFAULT_REWARDS},
    }
