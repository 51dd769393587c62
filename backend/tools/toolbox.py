"""Tools and environments of a run, written as for TRL: functions with type hints and a Google docstring, and classes
whose public methods are tools. Calls of a turn run in order, conversations side by side in threads, and async tools on
one event loop. Import it where there are tools only: it loads transformers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import inspect
import os
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.rewards.calls import Failure, ThreadCaller, class_name, describe_error, text_of
from backend.rewards.registry import FunctionDescription
from backend.rewards.resolve import RewardFile, RewardFunction, load_reward_file
from backend.rewards.scoring import ToolRequest
from backend.tools.host import NOT_TOOLS, ServedEnvironment, ToolSchemas
from backend.tools.mcp_settings import openenv_servers
from backend.types import ToolCall, ToolResult
from backend.utils.errors import UserError, user_traceback
from backend.utils.files import user_path
from backend.utils.text import quote

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as mlx-lm: PyTorch is not missed
from transformers.utils import get_json_schema

if TYPE_CHECKING:
    from backend.config.config import Config

LONGEST_RESULT = 1_000_000  # characters of a result or an error
_MOST_AT_ONCE = 4  # turns in one answer, which has a limit of bytes
_CANCEL_S = 0.3  # for an async call to end after its cancellation
_IMAGES = ("image", "image_url", "video", "audio")


@dataclass(frozen=True, slots=True)
class RunTools:
    """Tools as in the settings: `names` (none: all public functions) in `file`; environments: name, "" for the only one
    → file and class. `functions`, `factories`: a program's objects. `served`: servers' environments → reward names."""

    file: Path | None
    names: Sequence[str] = ()
    environments: Mapping[str, tuple[Path, str]] = field(default_factory=dict[str, tuple[Path, str]])
    functions: Sequence[Callable[..., Any]] = ()
    factories: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    served: Mapping[str, str] = field(default_factory=dict[str, str])

    def open(self, executed: dict[Path, RewardFile]) -> Toolbox:
        """Run the files and load what they define; `executed` caches files already run. Raises UserError."""
        tools = self.functions
        if self.file:  # the named functions, else the public ones, without reward functions
            file = load_reward_file(self.file, executed, plain=True, setting="tools_file")
            found, path = vars(file.module), quote(file.path.name, 40)
            public = [
                name
                for name, value in found.items()
                if inspect.isroutine(value) and getattr(value, "__module__", "") == file.module.__name__
                if not name.startswith("_") and value not in file.functions.values()
            ]
            for name in self.names:
                if not callable(found.get(name)):
                    known = quote(", ".join(public) or "none", 80)
                    raise UserError("tools", f"{path} has no function {quote(name, 40)}; it has {known}.")
            if not (self.names or public):
                raise UserError("tools_file", f"{path} has no public function that could be a tool.")
            tools = [found[name] for name in self.names or public]
        kinds = [EnvironmentKind(name, factory) for name, factory in self.factories.items()]
        kinds += [EnvironmentKind(name, type(title, (ServedEnvironment,), {})) for name, title in self.served.items()]
        for name, (path, function) in self.environments.items():
            module = load_reward_file(path, executed, plain=True, setting="environment").module
            found = vars(module)
            if function not in found:
                own = (key for key, value in found.items() if getattr(value, "__module__", "") == module.__name__)
                classes = ", ".join(key for key in own if inspect.isclass(found[key])) or "none"
                missing = f"{quote(path.name, 40)} has no class {quote(function, 40)}"
                raise UserError("environment", f"{missing}; its classes are {quote(classes, 60)}.")
            kinds.append(EnvironmentKind(name, found[function], path))
        return Toolbox(tools, kinds)


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


class EnvironmentKind:
    """Makes the environments of one name. `pool`: instances that later rollouts reset again. Raises UserError."""

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
            if isinstance(inspect.getattr_static(self.type, name), types.FunctionType | classmethod | staticmethod)
        ]

    def make(self) -> Any:
        """A new instance, in the pool."""
        instance = self._factory()
        self.pool.append(instance)
        return instance


class _RefusedError(Exception):
    """We end a call, or refuse its result; the text completes “NAME …”."""


@dataclass(slots=True, eq=False)
class _Seat:
    """A conversation and its environment. `is_busy`: a call runs, perhaps for ever, and no other may."""

    kind: EnvironmentKind | None
    instance: Any = None
    is_busy: bool = False


class Toolbox:
    """A run's functions and environments; answers tool requests. Raises UserError for what the model cannot be told."""

    def __init__(self, tools: Sequence[Callable[..., Any]], kinds: Sequence[EnvironmentKind]) -> None:
        self.tools: dict[str, Callable[..., Any]] = {}
        self.kinds = {kind.name: kind for kind in kinds}
        shared = list[dict[str, Any]]()
        for tool in dict.fromkeys(tools):
            schema = _schema(tool, "tools_file")
            if (name := tool.__name__) in self.tools:
                raise UserError("tools_file", f"Two tools have the name {quote(name, 40)}.")
            self.tools[name] = tool
            shared.append(schema)
        by_environment = dict[str, list[dict[str, Any]]]()
        for kind in kinds:
            if both := sorted(self.tools.keys() & set(kind.methods)):
                what = f"{quote(both[0], 40)} is a function of the tools file and a method of {kind.title}; rename one."
                raise UserError("environment", what)
            methods = [getattr(kind.pool[0], method) for method in kind.methods]
            by_environment[kind.name] = [_schema(method, "environment") for method in methods]
        self.schemas = ToolSchemas(shared, by_environment)
        self._seats: dict[int, _Seat] = {}
        self._ended: list[tuple[int, list[ToolResult]]] = []
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timeout_s = 0.0
        self._pid = os.getpid()

    def rewards(self) -> list[RewardFunction]:
        """The `get_reward` of each class; None where a completion has another environment."""

        def reward_of(kind: EnvironmentKind) -> RewardFunction:
            def score(environments: list[Any]) -> list[Any]:
                return [each.get_reward() if type(each) is kind.type else None for each in environments]

            async def score_async(environments: list[Any]) -> list[Any]:
                return [await each.get_reward() if type(each) is kind.type else None for each in environments]

            method: Any = kind.type.get_reward
            line = getattr(getattr(method, "__code__", None), "co_firstlineno", 0)
            call = score_async if inspect.iscoroutinefunction(method) else score
            about = FunctionDescription(kind.type.__name__, kind.file, line)
            return RewardFunction(about, call, inspect.signature(call).parameters, dialect="trl")

        kinds = {kind.type: kind for kind in self.kinds.values() if hasattr(kind.type, "get_reward")}
        return [*map(reward_of, kinds.values())]

    def environment(self, conversation: int) -> Any:
        seat = self._seats.get(conversation)
        return seat.instance if seat else None

    def run(self, request: ToolRequest) -> list[tuple[int, list[ToolResult]]]:
        """Start what the request names. → conversations that have ended their turn, or their reset."""
        self._timeout_s = request.timeout_s
        if request.close:
            threads, end = list[threading.Thread](), time.monotonic() + self._timeout_s
            for kind in self.kinds.values():
                pool, kind.pool = kind.pool, []
                for instance in pool if hasattr(kind.type, "close") else ():
                    limited = self._awaited if inspect.iscoroutinefunction(instance.close) else self._limited
                    threads.append(threading.Thread(target=limited, args=(_Seat(None), instance.close), daemon=True))
                    threads[-1].start()
            for thread in threads:
                thread.join(max(end - time.monotonic(), 0))
        if request.begin is not None:
            for seat in self._seats.values():
                if seat.is_busy and seat.kind:
                    seat.kind.pool[:] = [each for each in seat.kind.pool if each is not seat.instance]
            with self._changed:
                self._seats, self._ended = {}, []
            used = Counter[str]()
            for number, name, row in request.begin:
                kind = self.kinds[name]
                free = kind.pool[used[name] : used[name] + 1]
                used[name] += 1
                seat = self._seats[number] = _Seat(kind, *free)
                self._start(number, seat, self._reset, [row])
        for number, calls in request.submit.items():
            self._start(number, self._seats.setdefault(number, _Seat(None)), self._call, calls)
        with self._changed:
            self._changed.wait_for(lambda: self._ended, request.wait_s)
            taken, self._ended = self._ended[:_MOST_AT_ONCE], self._ended[_MOST_AT_ONCE:]
        return taken

    def _start(self, number: int, seat: _Seat, work: Callable[[_Seat, Any], ToolResult], each: Sequence[Any]) -> None:
        def run() -> None:
            results = [work(seat, one) for one in each]
            with self._changed:
                if self._seats.get(number) is seat:
                    self._ended.append((number, results))
                    self._changed.notify_all()

        threading.Thread(target=run, name=f"tools of {number}", daemon=True).start()

    def _reset(self, seat: _Seat, row: Mapping[str, Any]) -> ToolResult:
        assert seat.kind
        kind, start = seat.kind, time.perf_counter()

        def reset() -> str:
            seat.instance = kind.make() if seat.instance is None else seat.instance
            text = seat.instance.reset(**copy.deepcopy(dict(row)))
            if not isinstance(text, str | None):
                advice = "; images are not supported yet" if isinstance(text, list) else ""
                raise _RefusedError(f"returned {class_name(text)}, not text or None{advice}")
            return text or ""

        text, error = self._limited(seat, reset)
        if isinstance(error, _RefusedError):
            text = str(error)
        elif error is not None:
            text = f"raised {describe_error(error, kind.file)}"
            sys.stderr.write(user_traceback(error, kind.file))
        return _result("reset", text, error, start)

    def _call(self, seat: _Seat, call: ToolCall) -> ToolResult:
        start = time.perf_counter()
        method = seat.kind is not None and call.name in seat.kind.methods
        function = getattr(seat.instance, call.name) if method else self.tools.get(call.name)
        if function is None:
            text, error = "", ValueError(f"Tool {call.name} not found.")
        elif method and seat.is_busy:
            text, error = "", _RefusedError("cannot run: an earlier call of this environment has not ended")
        else:
            used = seat if method else _Seat(None)
            limited = self._awaited if inspect.iscoroutinefunction(function) else self._limited
            text, error = limited(used, functools.partial(function, **copy.deepcopy(call.arguments)))
        if error is not None:
            what = text_of(error)
            if isinstance(error, _RefusedError) or not isinstance(error, Exception):  # TRL has the bare text of others
                what = f"{call.name if isinstance(error, _RefusedError) else type(error).__name__ + ':'} {what}"
            text = str({"error": what})
        reward = getattr(seat.instance, "_step_reward", 0.0) if method and not error else 0.0  # of `OpenEnvSession`
        return _result(call.name, text, error, start, reward)

    def _limited(self, seat: _Seat, work: Callable[[], Any]) -> tuple[str, BaseException | None]:
        """The result as text, or why there is none."""
        seat.is_busy, caller = True, ThreadCaller()
        try:
            return caller.call(0, self._timeout_s, lambda: _as_text(work())), None
        except Failure as failure:
            return "", failure.__cause__ or self._too_long()
        except RuntimeError as error:  # the system has no more threads
            return "", error
        finally:
            seat.is_busy = caller.runs_on

    def _awaited(self, seat: _Seat, work: Callable[[], Any]) -> tuple[str, BaseException | None]:
        ended = threading.Event()

        async def run() -> tuple[str, BaseException | None]:
            try:
                return _as_text(await work()), None
            except GeneratorExit:
                raise
            except BaseException as error:  # SystemExit would end the loop, and a cancellation may be the tool's own
                return "", error
            finally:
                if os.getpid() != self._pid:  # a fork of a sync tool has no thread that could go on
                    os._exit(0)
                ended.set()

        seat.is_busy = True
        with self._changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async tools", daemon=True).start()
            loop = self._loop
        future = asyncio.run_coroutine_threadsafe(run(), loop)
        if concurrent.futures.wait([future], self._timeout_s).done:
            seat.is_busy = False
            return future.result()
        future.cancel()
        seat.is_busy = not ended.wait(_CANCEL_S)
        if seat.is_busy and self._loop is loop:  # something blocks it
            self._loop = None
        return "", self._too_long()

    def _too_long(self) -> Exception:
        return _RefusedError(f"was still running after {self._timeout_s:g} s (tool_timeout)")


def _schema(tool: Any, setting: str) -> dict[str, Any]:
    name = getattr(tool, "__qualname__", "") or class_name(tool)
    try:
        return getattr(tool, "json_schema", None) or get_json_schema(tool)
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, NameError) else str(error)
        raise UserError(setting, f"The model cannot be told of {quote(name, 60)}. {quote(what, 160)}") from error


def _as_text(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(part, Mapping) and part.get("type") in _IMAGES for part in value):
        raise _RefusedError("returned images, which are not supported yet")
    if len(text := str(value)) > LONGEST_RESULT:
        raise _RefusedError(f"returned {len(text):,} characters; at most {LONGEST_RESULT:,} are read")
    return text


def _result(name: str, text: str, error: BaseException | None, start: float, reward: float = 0.0) -> ToolResult:
    text = text[:LONGEST_RESULT].encode(errors="replace").decode()  # without lone surrogates, which no tokenizer reads
    return ToolResult(name, text, error is not None, time.perf_counter() - start, reward)
