"""A stand-in for `mlx_lm_lora.trainer.grpo_reward_functions`, so that reward files written for it load unchanged.

It is not that library: it offers the reward functions' module and nothing else of it. It stands in `sys.modules` only
while a person's code runs, also where the real library is installed, because otherwise their functions would register
themselves there and never be found here. Afterwards `sys.modules` is as it was.
"""

from __future__ import annotations

import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

from backend.rewards import registry
from backend.rewards.functions import r1
from backend.rewards.registry import REWARD_REGISTRY, RewardCallable
from backend.spec.rewards.catalog import DEFAULT_REWARDS

_LIBRARY = "mlx_lm_lora"
_MODULES = (_LIBRARY, f"{_LIBRARY}.trainer", f"{_LIBRARY}.trainer.grpo_reward_functions")

# sys.modules belongs to the whole process: two files loaded at once would see each other's table.
_lock = threading.RLock()


@contextmanager
def library(table: dict[str, RewardCallable]) -> Iterator[None]:
    """While open, a person's code may import the library, and what it registers lands in `table`.

    The table is laid over the built-in functions: writing changes only `table`, reading finds both.
    """
    seen = ChainMap(table, REWARD_REGISTRY)
    with _lock, registry.registering_into(seen), _standing_in(_stand_ins(seen)):
        yield


@contextmanager
def _standing_in(modules: dict[str, ModuleType]) -> Iterator[None]:
    before = _take_out()
    sys.modules.update(modules)
    try:
        yield
    finally:
        _take_out()
        sys.modules.update(before)


def _take_out() -> dict[str, ModuleType]:
    """Remove the library and everything under it from `sys.modules`, and return what was there."""
    names = [name for name in sys.modules if name == _LIBRARY or name.startswith(f"{_LIBRARY}.")]
    return {name: sys.modules.pop(name) for name in names}


def _stand_ins(table: MutableMapping[str, RewardCallable]) -> dict[str, ModuleType]:
    modules = {
        name: ModuleType(name, "GRPO Studio's stand-in; see backend/rewards/mlx_lm_lora.py.") for name in _MODULES
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
        "get_reward_function": registry.get_reward_function,
        "get_default_reward_functions": lambda: [REWARD_REGISTRY[name] for name in DEFAULT_REWARDS],
        "list_available_reward_functions": registry.list_reward_functions,
        "r1_extract_xml_answer": r1.extract_answer,
        **{name: REWARD_REGISTRY[name] for name in DEFAULT_REWARDS},
    }
