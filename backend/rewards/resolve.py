"""Run a user's reward files, and resolve `reward_functions` entries to callables. A name is looked up in the user's
file first, then among shipped functions. Callers ask for consent (`backend.rewards.allowed_code`)."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from backend.rewards import catalogue, registry
from backend.rewards.calls import describe_error
from backend.rewards.functions import r1
from backend.rewards.registry import REWARD_REGISTRY, FunctionDescription, RewardCallable
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import quote

Dialect = Literal["ours", "trl"]  # call convention, see `backend.rewards.scoring`

_SETTING = "reward_functions"
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_DECORATORS = ("register_reward_function", "register_map_function")
_MESSAGE = re.compile(r"""\[-?\d+\]\s*(\[|\.get\()\s*["']content["']""")
_WORD = re.compile(r"\w+")
_LIBRARY = "mlx_lm_lora"
_MODULES = (_LIBRARY, f"{_LIBRARY}.trainer", f"{_LIBRARY}.trainer.grpo_reward_functions")


@dataclass(frozen=True, slots=True)
class RewardFile:
    """An executed file: functions by name, notes, module. `is_plain`: it registers none of these functions."""

    path: Path
    functions: dict[str, RewardCallable]
    notes: dict[str, str]
    module: ModuleType
    map_functions: dict[str, RewardCallable]
    is_plain: bool


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A callable with its call convention. `excluded` parameters get no input; its entry's `kwargs` override columns;
    `takes_messages`: it indexes prompts and completions as messages."""

    about: FunctionDescription
    call: RewardCallable
    parameters: Mapping[str, inspect.Parameter]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dialect: Dialect = "ours"
    excluded: Collection[str] = ()
    takes_messages: bool = False

    @classmethod
    def of(cls, name: str, call: RewardCallable, user_file: RewardFile | None = None, **about: Any) -> RewardFunction:
        """Raises UserError for a callable without a signature."""
        try:
            parameters = inspect.signature(call).parameters
        except (TypeError, ValueError) as error:
            raise UserError(_SETTING, f"{name} is not a function whose arguments can be read.") from error
        file, note = (user_file.path, user_file.notes.get(name, "")) if user_file else (None, "")
        code = getattr(inspect.unwrap(call), "__code__", None)
        line = code.co_firstlineno if code and code.co_filename == str(file) else 0
        described = FunctionDescription(name, file, line, note)
        return cls(described, call, parameters, takes_messages=_indexes_messages(call), **about)

    @property
    def required(self) -> list[str]:
        parameters = (each for each in self.parameters.values() if each.name not in self.excluded)
        return [each.name for each in parameters if each.kind in _NAMED and each.default is each.empty]

    def call_kwargs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs that it takes and its arguments. `**kwargs` excludes `prompt`, as in TRL."""
        taken = {name for name, each in self.parameters.items() if each.kind in _NAMED}
        if any(each.kind is each.VAR_KEYWORD for each in self.parameters.values()):
            taken = inputs.keys() - ({"prompt"} - set(self.required))
        taken -= set(self.excluded)
        return {name: value for name, value in inputs.items() if name in taken} | dict(self.kwargs)


def resolve(
    names: Sequence[str],
    file: Path | None = None,
    base: Path | None = None,
    executed: dict[Path, RewardFile] | None = None,
) -> list[RewardFunction]:
    """Functions of these entries, after running the user's `file`. Paths before `::` are relative to `base`. `executed`
    caches files. Raises UserError on `reward_functions_file` or `reward_functions`."""
    executed = {} if executed is None else executed
    user_file = load_reward_file(file, executed) if file else None
    registered = user_file.functions if user_file else {}
    by_name = REWARD_REGISTRY | registered
    resolved: list[RewardFunction] = []

    def find(entry: catalogue.RewardCall) -> catalogue.RewardEntry | None:
        if entry.file:
            path = catalogue.locate_reward_file(entry.file, base).resolve()
            own_file = load_reward_file(path, executed, plain=True)
            contents = vars(own_file.module)
            if entry.function not in contents:
                module = own_file.module.__name__
                here = [name for name, value in contents.items() if getattr(value, "__module__", "") == module]
                raise UserError(_SETTING, catalogue.not_in_file(entry.function, path, here))
            call = contents[entry.function]
        elif entry.function in by_name:
            own_file, call = user_file if entry.function in registered else None, by_name[entry.function]
        else:
            return None
        dialect = "trl" if entry.file or (own_file and own_file.is_plain) else "ours"
        function = RewardFunction.of(entry.name, call, own_file, dialect=dialect, kwargs=entry.arguments)
        settable = tuple(
            catalogue.Parameter(
                each.name,
                "" if each.annotation is each.empty else inspect.formatannotation(each.annotation).strip("'"),
                None if each.default is each.empty else repr(each.default),
            )
            for each in function.parameters.values()
            if each.kind in _NAMED and each.name not in catalogue.INPUTS
            if each.default is not each.empty or each.kind is each.KEYWORD_ONLY
        )
        # A column may have the name of a parameter. A user's function means the column, a shipped one never does.
        excluded = {*entry.arguments, *(each.name for each in settable if own_file is None)}
        resolved.append(replace(function, excluded=excluded))
        source = str(own_file.path) if own_file else catalogue.BUILT_IN
        return catalogue.RewardEntry(entry.name, "", "", source, 0, settable)

    problems = catalogue.check_entries(names, by_name, find)
    if not names:
        problems = [ConfigProblem(_SETTING, "No reward function is chosen.")]
    for function, text in zip(resolved, names, strict=True) if not problems else ():
        try:  # a shipped function checks its arguments before it reads completions (`require`)
            if function.about.file is None:
                function.call(prompts=[], completions=[], answer=[], **function.kwargs)
        except ValueError as error:
            problems.append(ConfigProblem(_SETTING, f"{catalogue.canonical_entry(text)} cannot be used: {error}."))
    if problems:
        raise UserError(problems)
    return resolved


def _indexes_messages(call: Any, depth: int = 2) -> bool:
    """True if its source has `[0]["content"]`, or that of a function of its file which it names, or of one it holds."""
    try:
        source = inspect.getsource(call if inspect.isroutine(call) else type(call))
    except (OSError, TypeError):  # built in, or typed at a prompt
        return False
    own = getattr(call, "__globals__", {})
    named = [each for word in {*_WORD.findall(source)} if getattr(each := own.get(word), "__globals__", None) is own]
    held = filter(inspect.isfunction, [getattr(call, "func", None), *getattr(call, "__dict__", {}).values()])
    within = depth and any(_indexes_messages(each, depth - 1) for each in (*named, *held))
    return bool(within or _MESSAGE.search(source))


def load_reward_file(
    path: str | Path, executed: dict[Path, RewardFile] | None = None, *, plain: bool = False, setting: str = ""
) -> RewardFile:
    """Run a file unless it is `executed`, and collect what it registers, else its plain functions. `plain`: it is used
    as `file.py::function` and may have none. Raises UserError on `setting`."""
    path = catalogue.locate_reward_file(path)
    executed = {} if executed is None else executed
    if known := executed.get(path.resolve()):
        return known
    setting = setting or (_SETTING if plain else "reward_functions_file")
    tree = catalogue.parse_reward_file(path, setting)
    functions: dict[str, RewardCallable] = {}
    maps: dict[str, RewardCallable] = {}
    # In `sys.modules` for dataclasses and pickle.
    module = sys.modules[f"reward_file_{path.stem}"] = ModuleType(f"reward_file_{path.stem}")
    module.__file__ = str(path)
    # A helper beside the file can be imported. Last, so that it takes no other module's place.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    table = ChainMap(functions, REWARD_REGISTRY)
    installed = _stand_in_library(table)
    try:
        with registry.registering_into(table, maps):
            exec(compile(tree, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException as error:  # a SystemExit too
        del sys.modules[module.__name__]
        sentence = f"{quote(path.name, 40)} cannot be loaded: {describe_error(error, path)}."
        if isinstance(error, NameError) and error.name in _DECORATORS:
            sentence += f" Begin the file with “from backend.rewards import {error.name}”."
        raise UserError(setting, sentence) from error
    finally:
        sys.modules |= installed
    times = Counter(entry.name for entry in catalogue.rewards_in_file(path))
    is_plain = not functions
    if is_plain:
        functions |= {name: vars(module)[name] for name in times if name in vars(module)}
    if not (plain or functions or maps):
        del sys.modules[module.__name__]
        raise UserError(setting, f"{path.name} has no reward function, which is a function that takes completions.")
    notes: dict[str, str] = {}
    for name in functions:
        if times[name] > 1:
            notes[name] = f"{path.name} registers {name} {times[name]} times; the last one counts."
        elif name in REWARD_REGISTRY:
            notes[name] = f"{name} of {path.name} takes the place of the built-in function of that name."
    loaded = executed[path.resolve()] = RewardFile(path, functions, notes, module, maps, is_plain)
    return loaded


def _stand_in_library(table: registry.Table) -> dict[str, ModuleType]:
    """Put a stand-in for mlx_lm_lora's registry into `sys.modules`. Returns an installed one that was there."""
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == _LIBRARY}
    modules = {name: ModuleType(name, "GRPO Studio's stand-in: backend/rewards/resolve.py.") for name in _MODULES}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, loader=None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
            modules[parent].__path__ = []
    vars(modules[_MODULES[-1]]).update(
        {
            "RewardFunctions": Callable[[list[str], list[str], list[str], list[str] | None], list[float]],
            "REWARD_REGISTRY": table,
            "register_reward_function": registry.register_reward_function,
            "register_map_function": registry.register_map_function,
            "get_reward_function": functools.partial(registry.get_reward_function, table=table),
            "get_default_reward_functions": lambda: [REWARD_REGISTRY[name] for name in catalogue.DEFAULT_REWARDS],
            "list_available_reward_functions": lambda: [*table],
            "r1_extract_xml_answer": r1.extract_answer,
            **{name: REWARD_REGISTRY[name] for name in catalogue.DEFAULT_REWARDS},
        }
    )
    sys.modules |= modules  # they stay: a function may import it when it is called
    return {name: module for name, module in before.items() if module.__spec__ and module.__spec__.loader}
