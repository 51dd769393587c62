"""Reward functions, tools and environments that are objects of the program. They run in this process, each call in a
thread with its time limit. config.yaml names them as functions of files in the run's folder."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from backend.config.config import Config
from backend.config.other_programs.trl import reward_entries
from backend.config.setting import RewardSettings
from backend.rewards.calls import ThreadCaller, class_name, describe_error
from backend.rewards.catalogue import find_call, metric_name, with_absolute_file
from backend.rewards.resolve import RewardFile, RewardFunction, load_reward_file, resolve
from backend.rewards.scorer import Scorer, begin_scorer, reward_source
from backend.rewards.scoring import FunctionHost
from backend.utils.disk import replace_file
from backend.utils.errors import UserError, user_traceback

FILE, TOOLS_FILE, ROLLOUT_FILE = "own_functions.py", "own_tools.py", "own_rollout.txt"  # in the run's folder
_TEXT = '''"""Functions and classes of the program that called backend.train. They are in that program."""

{definitions}
raise RuntimeError("only the program that called train() has {names}; there, backend.resume continues the run")
'''
_DEFINITION = "def {name}({arguments}**columns): ...\n\n"


class OwnObjects:
    """Objects of the program: `entries` of `reward_functions`, with names of `calls` among them; `tools` by name; and
    `factories` (name, "" for the only one → what makes an environment). Raises UserError."""

    def __init__(
        self,
        functions: Sequence[str | Callable[..., Any]],
        tools: Sequence[Callable[..., Any]] = (),
        environments: Callable[..., Any] | Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(functions, str) or callable(functions):
            functions = [functions]
        taken = {metric_name(function) for function in functions if isinstance(function, str)}
        self.calls: dict[str, Callable[..., Any]] = {}
        self.entries: list[str] = []
        for function in functions:
            if callable(function):
                name = _free_name(function, {*taken, *self.calls})
                self.calls[name] = function
            elif isinstance(function, str) and (entries := reward_entries([function])):
                name = with_absolute_file(entries[0], Path.cwd())
            else:
                sentence = f"A reward function is a name or can be called; {class_name(function)} is neither."
                raise UserError("reward_functions", sentence)
            self.entries.append(name)
        self.tools = {name_of(tool): tool for tool in tools}
        only = {} if environments is None else {"": environments}
        self.factories: Mapping[str, Any] = environments if isinstance(environments, Mapping) else only

    def settings(self, folder: Path) -> dict[str, Any]:
        """Write the files that stand for them into the run's folder. → what names them in config.yaml."""
        found: dict[str, Any] = {}
        if self.calls:
            _write(folder / FILE, self.calls, "completions, ")
        if self.entries:
            entries = [f"{folder / FILE}::{entry}" if entry in self.calls else entry for entry in self.entries]
            found["reward_functions"] = entries
        if self.tools or self.factories:
            file = folder / TOOLS_FILE
            classes = {name: _free_name(factory, set()) for name, factory in self.factories.items()}
            _write(file, dict.fromkeys([*self.tools, *classes.values()]))
            named = {name: f"{file}::{function}" for name, function in classes.items()}
            found |= {"tools_file": str(file), "tools": list(self.tools)} if self.tools else {}
            found |= {"environment": named.get("", named)} if named else {}
        return found | ({"reward_isolation": "thread"} if self.calls or self.tools or self.factories else {})

    def scorer(self, settings: Config) -> Scorer:
        """The scorer of a run with these objects and those of files. Raises UserError for missing ones."""
        from backend.tools.toolbox import run_tools

        functions = set(_own_names(settings))
        if missing := ", ".join(sorted(functions - self.calls.keys()))[:80]:
            what = f"with functions of a program, and {missing} is not among those given now."
            raise UserError("reward_functions", f"The run was trained {what}")
        named = run_tools(settings)
        own = {name for name, (file, _) in named.environments.items() if file.name == TOOLS_FILE}
        tools = {*named.names} if named.file and named.file.name == TOOLS_FILE else set[str]()
        if missing := sorted(tools - self.tools.keys()) + sorted(own - self.factories.keys()):
            names = ", ".join(name or "its environment" for name in missing)[:80]
            raise UserError("tools", f"The run was trained with objects of a program, and {names} is not given now.")
        if not (functions or self.tools or self.factories):
            return begin_scorer(settings)
        names = ", ".join([*self.calls, *self.tools, *map(name_of, self.factories.values())])[:100]
        note = f"Functions of the program that called train() run in its process, where nothing confines them: {names}."
        host = FunctionHost(ThreadCaller(), [note], self._resolve)
        scorer = Scorer(reward_source(settings), host, settings.reward_timeout)
        files = {name: entry for name, entry in named.environments.items() if name not in own}
        if tools:
            named = replace(named, file=None, names=())
        own_tools = [*self.tools.values()]
        scorer.tools = replace(named, environments=files, functions=own_tools, factories=self.factories)
        return scorer

    def _resolve(
        self, names: Sequence[str], file: Path | None, base: Path, executed: dict[Path, RewardFile]
    ) -> list[RewardFunction]:
        if file:  # no entry may name a function of it, and rows be mapped by one
            load_reward_file(file, executed)
        if not names:
            raise UserError("reward_functions", "No reward function is chosen, and no environment has a get_reward.")
        return [
            RewardFunction.of(name, self.calls[name], dialect="trl")
            if (name := _own_name(entry)) in self.calls
            else resolve([entry], file, base, executed)[0]
            for entry in names
        ]


def program_error(setting: str, what: str, error: BaseException) -> UserError:
    return UserError(setting, f"{what} raised {describe_error(error, None, 100)}.", user_traceback(error))


@contextmanager
def errors_of_program(setting: str, what: str) -> Iterator[None]:
    """Turn an exception of an object of the program, `what`, into a UserError."""
    try:
        yield
    except Exception as error:
        raise program_error(setting, what, error) from error


def _write(file: Path, names: Iterable[str], arguments: str = "") -> None:
    definitions = "".join(_DEFINITION.format(name=name, arguments=arguments) for name in names)
    replace_file(file, _TEXT.format(definitions=definitions, names=", ".join(names)[:80]))


def name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", "") or type(function).__name__)


def _free_name(function: Callable[..., Any], taken: set[str]) -> str:
    name = name_of(function)
    name = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in name).strip("_")
    name = name if name.isidentifier() else f"function_{name}".rstrip("_")
    if not keyword.iskeyword(name) and name not in taken:
        return name
    first = 1 if keyword.iskeyword(name) else 2
    return next(each for number in count(first) if (each := f"{name}_{number}") not in taken)


def _own_name(entry: str) -> str:
    call = find_call(entry)
    return call.function if call and Path(call.file).name == FILE else ""


def mark_rollout(folder: Path, function: Any, config: Config) -> None:
    """Note in a new run's folder that a program's function samples. Raises UserError for settings of our sampler."""
    if function is not None:
        if config.rollout_quantization != "none":
            raise UserError("rollout_quantization", "The model does not sample, rollout_func does; choose None.")
        if config.uses_tools:
            raise UserError("rollout_func", "The run's own sampler calls tools; leave out rollout_func, or the tools.")
        replace_file(folder / ROLLOUT_FILE, "A function of the program that called backend.train samples this run.\n")


def require_rollout(folder: Path, function: Any = None) -> None:
    """Raise UserError where a run is to go on without the function that samples, or with one that it had not."""
    if (folder / ROLLOUT_FILE).exists() and function is None:
        what = "The run's completions come from a function of a program; go on there, with backend.resume()."
        raise UserError("rollout_func", what)
    if function is not None and not (folder / ROLLOUT_FILE).exists():
        raise UserError("rollout_func", "The run has sampled its completions itself so far; start a new one.")


def require_no_program(settings: RewardSettings) -> None:
    """Raise UserError for a run whose functions are objects of a program."""
    if names := ", ".join(_own_names(settings))[:60]:
        what = f"{names} are objects of the program that called train(); go on there, with backend.resume()."
        raise UserError("reward_functions", f"The run's reward functions {what}")


def _own_names(settings: RewardSettings) -> list[str]:
    entries = [entry for stage in reward_source(settings).stages for entry in stage]
    return [name for entry in entries if (name := _own_name(entry))]
