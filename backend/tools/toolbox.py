"""Load tools and environments, written as for TRL: functions with type hints and a Google docstring, and classes whose
public methods are tools."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from backend.rewards.errors import class_name, describe_error
from backend.rewards.registry import FunctionDescription
from backend.rewards.resolve import RewardFile, RewardFunction, load_reward_file
from backend.tools.host import NOT_TOOLS
from backend.tools.runner import ToolRunner
from backend.utils.errors import UserError
from backend.utils.text import quote


@dataclass(frozen=True, slots=True)
class RunTools:
    """Tools of a run, as its settings name them: `names` (none: all public functions) of the `tools_file`, and
    environments: name, "" for the only one → file and class. `functions` and `factories` are objects of a program."""

    file: Path | None
    names: Sequence[str] = ()
    environments: Mapping[str, tuple[Path, str]] = field(default_factory=dict[str, tuple[Path, str]])
    functions: Sequence[Callable[..., Any]] = ()
    factories: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])

    def __reduce__(self) -> Any:
        return _after_imports, tuple(getattr(self, each.name) for each in fields(self))

    def open(self, executed: dict[Path, RewardFile]) -> ToolRunner:
        """Run the files and load what they define; `executed` caches files already run. Raises UserError."""

        def contents(path: Path, setting: str) -> RewardFile:
            if path not in executed:
                executed[path] = load_reward_file(path, plain=True, setting=setting)
            return executed[path]

        tools = _tools_of(contents(self.file, "tools_file"), self.names) if self.file else self.functions
        kinds = [EnvironmentKind(name, factory) for name, factory in self.factories.items()]
        for name, (path, function) in self.environments.items():
            module = contents(path, "environment").module
            found = vars(module)
            if function not in found:
                own = (key for key, value in found.items() if getattr(value, "__module__", "") == module.__name__)
                classes = ", ".join(key for key in own if inspect.isclass(found[key])) or "none"
                what = (
                    f"{quote(path.name, 40)} has no class {quote(function, 40)}; its classes are {quote(classes, 60)}."
                )
                raise UserError("environment", what)
            kinds.append(EnvironmentKind(name, found[function], path))
        return ToolRunner(Toolbox(tools, kinds))


def _after_imports(*values: Any) -> RunTools:
    """The worker imports the library as it reads a request, before the time limit of the user's files begins."""
    _get_json_schema()
    return RunTools(*values)


def _tools_of(file: RewardFile, names: Sequence[str]) -> list[Callable[..., Any]]:
    """The named functions of a file, else its public ones, without reward functions."""
    found, path = vars(file.module), quote(file.path.name, 40)
    public = [
        name
        for name, value in found.items()
        if inspect.isroutine(value) and getattr(value, "__module__", "") == file.module.__name__
        if not name.startswith("_") and value not in file.functions.values()
    ]
    for name in names:
        if not callable(found.get(name)):
            what = f"{path} has no function {quote(name, 40)}; it has {quote(', '.join(public) or 'none', 80)}."
            raise UserError("tools", what)
    if not (names or public):
        raise UserError("tools_file", f"{path} has no public function that could be a tool.")
    return [found[name] for name in names or public]


class EnvironmentKind:
    """Makes the environments of one name. `pool`: its instances, which later rollouts reset again. Raises UserError for
    what cannot be used as an environment."""

    def __init__(self, name: str, factory: Any, file: Path | None = None) -> None:
        self.name, self.file, self._factory = name, file, factory
        self.pool = list[Any]()
        self.title = getattr(factory, "__name__", "") or class_name(factory)
        if not callable(factory):
            raise UserError("environment", f"{self.title} is not a class.")
        try:
            instance = self.make()
        except BaseException as error:
            raise UserError("environment", f"{self.title}() raised {describe_error(error, file)}.") from error
        self.type = type(instance)
        if not callable(getattr(self.type, "reset", None)):
            raise UserError("environment", f"The environment {self.title} needs a method reset(self, **row).")
        self.methods = [
            name
            for name in dir(self.type)
            if name[0] != "_" and name not in NOT_TOOLS
            if isinstance(inspect.getattr_static(self.type, name), types.FunctionType | classmethod)
        ]

    def make(self) -> Any:
        """A new instance, in the pool."""
        instance = self._factory()
        self.pool.append(instance)
        return instance


class Toolbox:
    """Functions and environments of a run. Raises UserError for what the model cannot be told of."""

    def __init__(self, tools: Sequence[Callable[..., Any]], kinds: Sequence[EnvironmentKind]) -> None:
        self.tools: dict[str, Callable[..., Any]] = {}
        self.kinds = {kind.name: kind for kind in kinds}
        self.shared_schemas = list[dict[str, Any]]()
        for tool in dict.fromkeys(tools):
            schema = _schema(tool, "tools_file")
            if (name := tool.__name__) in self.tools:
                raise UserError("tools_file", f"Two tools have the name {quote(name, 40)}.")
            self.tools[name] = tool
            self.shared_schemas.append(schema)
        self.environment_schemas = dict[str, list[dict[str, Any]]]()
        for kind in kinds:
            if both := sorted(self.tools.keys() & set(kind.methods)):
                what = f"{quote(both[0], 40)} is a function of the tools file and a method of {kind.title}; rename one."
                raise UserError("environment", what)
            schemas = [_schema(getattr(kind.pool[0], method), "environment") for method in kind.methods]
            self.environment_schemas[kind.name] = schemas

    def rewards(self) -> list[RewardFunction]:
        """The `get_reward` of each class, under the name of the class. Its score is None where a completion has another
        environment."""
        found = dict[type, RewardFunction]()
        for kind in self.kinds.values():
            method = getattr(kind.type, "get_reward", None)
            if method is not None and kind.type not in found:
                line = getattr(getattr(method, "__code__", None), "co_firstlineno", 0)
                call = _reward_of(kind.type, is_async=inspect.iscoroutinefunction(method))
                about = FunctionDescription(kind.type.__name__, kind.file, line)
                found[kind.type] = RewardFunction(about, call, inspect.signature(call).parameters, dialect="trl")
        return list(found.values())


def _reward_of(kind: type, *, is_async: bool) -> Callable[..., Any]:
    def get_reward(environments: list[Any]) -> list[Any]:
        return [each.get_reward() if type(each) is kind else None for each in environments]

    async def get_reward_async(environments: list[Any]) -> list[Any]:
        return [await each.get_reward() if type(each) is kind else None for each in environments]

    return get_reward_async if is_async else get_reward


def _get_json_schema() -> Callable[[Any], dict[str, Any]]:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as mlx-lm: PyTorch is not missed
    from transformers.utils import get_json_schema

    return get_json_schema


def _schema(tool: Any, setting: str) -> dict[str, Any]:
    name = getattr(tool, "__qualname__", "") or class_name(tool)
    try:
        return _get_json_schema()(tool)
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, NameError) else str(error)
        raise UserError(setting, f"The model cannot be told of {quote(name, 60)}. {quote(what, 160)}") from error
