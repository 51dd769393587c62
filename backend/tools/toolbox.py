"""Load tools and environments, written as for TRL: functions with type hints and a Google docstring, and classes whose
public methods are tools. Import it where there are tools only: it loads transformers."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.rewards.errors import class_name, describe_error
from backend.rewards.registry import FunctionDescription
from backend.rewards.resolve import RewardFile, RewardFunction, load_reward_file
from backend.tools.host import NOT_TOOLS, ServedEnvironment
from backend.tools.mcp_settings import openenv_servers
from backend.tools.runner import ToolRunner
from backend.utils.errors import UserError
from backend.utils.files import user_path
from backend.utils.text import quote

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as mlx-lm: PyTorch is not missed
from transformers.utils import get_json_schema

if TYPE_CHECKING:
    from backend.config.config import Config


@dataclass(frozen=True, slots=True)
class RunTools:
    """Tools of a run, as its settings name them: `names` (none: all public functions) of the `tools_file`, and
    environments: name, "" for the only one → file and class. `functions` and `factories` are objects of a program;
    `served`: environments that OpenEnv servers run → the name of their reward."""

    file: Path | None
    names: Sequence[str] = ()
    environments: Mapping[str, tuple[Path, str]] = field(default_factory=dict[str, tuple[Path, str]])
    functions: Sequence[Callable[..., Any]] = ()
    factories: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    served: Mapping[str, str] = field(default_factory=dict[str, str])

    def open(self, executed: dict[Path, RewardFile]) -> ToolRunner:
        """Run the files and load what they define; `executed` caches files already run. Raises UserError."""

        def contents(path: Path, setting: str) -> RewardFile:
            if path not in executed:
                executed[path] = load_reward_file(path, plain=True, setting=setting)
            return executed[path]

        tools = _tools_of(contents(self.file, "tools_file"), self.names) if self.file else self.functions
        kinds = [EnvironmentKind(name, factory) for name, factory in self.factories.items()]
        kinds += [EnvironmentKind(name, type(title, (ServedEnvironment,), {})) for name, title in self.served.items()]
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


def run_tools(config: Config) -> RunTools:
    """The files and names of these settings. Raises UserError."""
    file = user_path(config.tools_file, "tools_file", Path.cwd()).resolve() if config.tools_file else None
    entries = config.environment if isinstance(config.environment, Mapping) else {"": config.environment}
    served = {name: title for name, (title, _) in openenv_servers(config.environment).items()}
    environments: dict[str, tuple[Path, str]] = {}
    for name, entry in entries.items():
        if entry and name not in served:
            of_file, _, kind = entry.rpartition("::")
            if not of_file or not kind.isidentifier():
                raise UserError("environment", f"An environment is file.py::Class, not {quote(entry, 60)}.")
            environments[name] = user_path(of_file.strip(), "environment", Path.cwd()).resolve(), kind
    return RunTools(file, tuple(config.tools), environments, served=served)


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
        kinds = {kind.type: kind for kind in self.kinds.values() if hasattr(kind.type, "get_reward")}
        return [_reward_of(kind) for kind in kinds.values()]


def _reward_of(kind: EnvironmentKind) -> RewardFunction:
    def score(environments: list[Any]) -> list[Any]:
        return [each.get_reward() if type(each) is kind.type else None for each in environments]

    async def score_async(environments: list[Any]) -> list[Any]:
        return [await each.get_reward() if type(each) is kind.type else None for each in environments]

    method: Any = kind.type.get_reward
    line = getattr(getattr(method, "__code__", None), "co_firstlineno", 0)
    call = score_async if inspect.iscoroutinefunction(method) else score
    about = FunctionDescription(kind.type.__name__, kind.file, line)
    return RewardFunction(about, call, inspect.signature(call).parameters, dialect="trl")


def _schema(tool: Any, setting: str) -> dict[str, Any]:
    name = getattr(tool, "__qualname__", "") or class_name(tool)
    try:
        return getattr(tool, "json_schema", None) or get_json_schema(tool)
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, NameError) else str(error)
        raise UserError(setting, f"The model cannot be told of {quote(name, 60)}. {quote(what, 160)}") from error
