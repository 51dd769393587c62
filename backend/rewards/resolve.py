"""Run a user's reward files, and resolve `reward_functions` entries to callables. A name is looked up in the user's
file first, then among shipped functions; `file.py::function` is called as in TRL. Callers ask for consent
(`backend.rewards.allowed_code`)."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from backend.rewards import registry
from backend.rewards.catalogue import (
    BUILT_IN,
    DEFAULT_REWARDS,
    INPUTS,
    Parameter,
    RewardCall,
    RewardEntry,
    canonical_entry,
    check_entries,
    locate_reward_file,
    not_in_file,
    parse_reward_file,
    rewards_in_file,
)
from backend.rewards.errors import describe_error
from backend.rewards.functions import r1
from backend.rewards.registry import REWARD_REGISTRY, FunctionDescription, RewardCallable
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import quote

Dialect = Literal["ours", "trl"]  # call convention, see `backend.rewards.inputs`

_SETTING = "reward_functions"
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_DECORATORS = ("register_reward_function", "register_map_function")
_MESSAGE = re.compile(r"""\[-?\d+\]\s*(\[|\.get\()\s*["']content["']""")
_WORD = re.compile(r"\w+")
_LIBRARY = "mlx_lm_lora"
_MODULES = (_LIBRARY, f"{_LIBRARY}.trainer", f"{_LIBRARY}.trainer.grpo_reward_functions")

# sys.modules belongs to the whole process. Reentrant: calls over several files enter one stand-in inside another.
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class RewardFile:
    """An executed file: functions by name, notes, module. `is_plain`: it registers none of these functions."""

    path: Path
    functions: dict[str, RewardCallable]
    notes: dict[str, str]
    module: ModuleType
    map_functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A callable with its call convention; `user_file` is None for shipped ones. `excluded` parameters get no input;
    `kwargs` from its entry override columns; `takes_messages`: it indexes prompts and completions as messages."""

    about: FunctionDescription
    call: RewardCallable
    parameters: Mapping[str, inspect.Parameter]
    user_file: RewardFile | None = None
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
        about |= {"takes_messages": _indexes_messages(call)}
        return cls(FunctionDescription(name, file, line, note), call, parameters, user_file, **about)

    @property
    def _required(self) -> list[str]:
        required = (each for each in self.parameters.values() if each.kind in _NAMED and each.default is each.empty)
        return [each.name for each in required if each.name not in self.excluded]

    def missing(self, inputs: Collection[str]) -> list[str]:
        return [name for name in self._required if name not in inputs]

    def call_kwargs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of a call: the inputs that it takes and its entry's arguments. `**kwargs` excludes
        `prompt`, as in TRL."""
        taken = {name for name, each in self.parameters.items() if each.kind in _NAMED}
        if any(each.kind is each.VAR_KEYWORD for each in self.parameters.values()):
            taken = inputs.keys() - ({"prompt"} - set(self._required))
        taken -= set(self.excluded)
        return {name: value for name, value in inputs.items() if name in taken} | dict(self.kwargs)


def resolve(
    names: Sequence[str],
    file: Path | None = None,
    base: Path | None = None,
    executed: dict[Path, RewardFile] | None = None,
) -> list[RewardFunction]:
    """Functions of these entries, in order, after running the user's `file`. Paths before `::` are relative to `base`
    (default: working directory). `executed` caches files already run. Raises UserError on `reward_functions_file` or
    `reward_functions`."""
    executed = {} if executed is None else executed
    user_file = None
    if file is not None:
        path = locate_reward_file(file).resolve()
        user_file = executed[path] = executed.get(path) or load_reward_file(file)
    registered = user_file.functions if user_file else {}
    by_name = REWARD_REGISTRY | registered
    resolved: list[RewardFunction] = []

    def find(entry: RewardCall) -> RewardEntry | None:
        if entry.file:
            path = locate_reward_file(entry.file, base).resolve()
            if path not in executed:
                executed[path] = load_reward_file(path, plain=True)
            own_file, contents = executed[path], vars(executed[path].module)
            if entry.function not in contents:
                module = own_file.module.__name__
                here = [name for name, value in contents.items() if getattr(value, "__module__", "") == module]
                raise UserError(_SETTING, not_in_file(entry.function, path, here))
            call = contents[entry.function]
        elif entry.function in by_name:
            own_file, call = user_file if entry.function in registered else None, by_name[entry.function]
        else:
            return None
        dialect = "trl" if entry.file or (own_file and own_file.is_plain) else "ours"
        function = RewardFunction.of(entry.name, call, own_file, dialect=dialect, kwargs=entry.arguments)
        settable = tuple(
            Parameter(
                each.name,
                "" if each.annotation is each.empty else inspect.formatannotation(each.annotation).strip("'"),
                None if each.default is each.empty else repr(each.default),
            )
            for each in function.parameters.values()
            if each.kind in _NAMED and each.name not in INPUTS
            if each.default is not each.empty or each.kind is each.KEYWORD_ONLY
        )
        # A column may have the name of a parameter. A user's function means the column, a shipped one never does.
        excluded = {*entry.arguments, *(each.name for each in settable if own_file is None)}
        resolved.append(replace(function, excluded=excluded))
        return RewardEntry(entry.name, "", "", str(own_file.path) if own_file else BUILT_IN, 0, settable)

    problems = check_entries(names, by_name, find)
    if not names:
        problems = [ConfigProblem(_SETTING, "No reward function is chosen.")]
    for function, text in zip(resolved, names, strict=True) if not problems else ():
        try:  # a shipped function checks its arguments before it reads completions (`require`)
            if function.user_file is None:
                function.call(prompts=[], completions=[], answer=[], **function.kwargs)
        except ValueError as error:
            problems.append(ConfigProblem(_SETTING, f"{canonical_entry(text)} cannot be used: {error}."))
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
    within = depth > 0 and any(_indexes_messages(each, depth - 1) for each in (*named, *held))
    return within or bool(_MESSAGE.search(source))


def load_reward_file(path: str | Path, *, plain: bool = False, setting: str = "") -> RewardFile:
    """Run a .py or .txt file and collect what it registers, else its plain functions. `plain`: it is used as
    `file.py::function` and may have none of either. Raises UserError on `setting`, by default `reward_functions` if
    plain, else `reward_functions_file`."""
    path = locate_reward_file(path)
    setting = setting or (_SETTING if plain else "reward_functions_file")
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
            sentence, cause = f"{quote(path.name, 40)} cannot be loaded: {describe_error(error, path)}.{advice}", error
    listed = [entry.name for entry in rewards_in_file(path)]
    is_plain = not functions
    if is_plain:
        functions = {name: vars(module)[name] for name in listed if name in vars(module)}
    if not (sentence or plain or functions or maps):
        sentence = f"{path.name} has no reward function, which is a function that takes completions."
    if sentence:
        del sys.modules[module.__name__]
        if before:
            sys.modules[module.__name__] = before
        raise UserError(setting, sentence) from cause
    times = Counter(listed)
    notes: dict[str, str] = {}
    for name in functions:
        if times[name] > 1:
            notes[name] = f"{path.name} registers {name} {times[name]} times; the last one counts."
        elif name in REWARD_REGISTRY:
            notes[name] = f"{name} of {path.name} takes the place of the built-in function of that name."
    return RewardFile(path, functions, notes, module, maps, is_plain)


@contextmanager
def stand_in_library(
    table: dict[str, RewardCallable], maps: dict[str, Callable[..., Any]] | None = None
) -> Iterator[None]:
    """Stand in for mlx_lm_lora's registry, registering in `table` and `maps`. Also hides an installed mlx_lm_lora;
    restores `sys.modules` afterwards."""
    overlay = ChainMap(table, REWARD_REGISTRY)
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
