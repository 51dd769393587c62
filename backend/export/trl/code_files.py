"""The Python of the folder: the scripts, our code that they need, the reward functions as TRL names them, the user's own files."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from keyword import iskeyword
from pathlib import Path

from backend.config.config import Config
from backend.export.trl.module_source import (
    NOTHING,
    PACKAGE,
    Statement,
    Use,
    imported,
    is_kept,
    module_path,
    module_source,
)
from backend.rewards import functions as functions
from backend.rewards.allowed_code import code_files, read_code
from backend.rewards.catalogue import locate_reward_file, metric_name, reward_call
from backend.rewards.registry import REWARD_REGISTRY, RewardCallable
from backend.utils.errors import UserError
from backend.utils.files import read_text
from backend.utils.own_files import own_file, own_files
from backend.utils.places import resources
from backend.utils.text import quote

# The parts of our own modules that some of their functions need, as files that run without the rest of GRPO Studio.


def carried_code(roots: Iterable[Use]) -> dict[str, str]:
    """Path (`backend/rewards/registry.py`) → source of every module that these names need, their packages included. Raises
    FileNotFoundError for a module that is not there as text, and LookupError for a name that a module does not bind."""
    needed = _needed(roots)
    return {_file_of(name): module_source(name).part(names) for name, names in sorted(needed.items())}


def _file_of(name: str) -> str:
    path = module_path(name)
    assert path is not None
    folder = name.replace(".", "/")
    return f"{folder}/__init__.py" if path.name == "__init__.py" else f"{folder}.py"


def _needed(roots: Iterable[Use]) -> dict[str, set[str]]:
    """Module → the names of it that are needed."""
    needed: dict[str, set[str]] = {}
    waiting = list(roots)
    while waiting:
        use = waiting.pop()
        for package in _packages(use.module):
            needed.setdefault(package, set())
        known = needed.setdefault(use.module, set())
        names = [use.name] if use.name else _all_names(use.module)
        for name in names:
            if name not in known and name != NOTHING:
                known.add(name)
                waiting += _behind(use.module, name)
        waiting += _spoken_of(use.module, known)
    return needed


def _packages(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _all_names(module: str) -> list[str]:
    source = module_source(module)
    return [*source.imports, *(name for statement in source.statements for name in statement.binds)]


def _behind(module: str, name: str) -> list[Use]:
    """What a name of a module needs."""
    source = module_source(module)
    if name in source.imports:
        return list(imported(source.imports[name], name))
    if not (binding := source.binding(name)):
        if module_path(f"{module}.{name}"):
            return [Use(f"{module}.{name}", NOTHING)]
        raise LookupError(f"{module} binds no {name}")
    return [
        use
        for statement in binding
        for use in (*_used_by(module, statement), *(Use(module, each) for each in statement.binds))
    ]


def _used_by(module: str, statement: Statement) -> list[Use]:
    return [*statement.uses, *(Use(module, name) for name in statement.defined | statement.imported)]


def _spoken_of(module: str, known: set[str]) -> list[Use]:
    """What the statements of a module need that bind nothing and are kept, such as a call that registers something for the end."""
    loose = (each for each in module_source(module).statements if not each.binds and is_kept(each, known))
    return [
        use
        for statement in loose
        for use in _used_by(module, statement)
        if use.module != module or use.name not in known
    ]


# ── code files ───────────────────────────────────────────────────────────────────────────────────────────────────────

SCRIPTS = ("train.py", "dataset.py", "reward_calls.py")
USER_CODE = "user_code"
_SETTING = "reward_functions_file"
_FOR_USERS = ("register_reward_function", "register_map_function", "get_reward_function", "RewardCallable")
"""What a user's file may import of `backend.rewards`."""


def script(name: str) -> str:
    return (resources() / "trl" / name).read_text(encoding="utf-8")


def our_code(config: Config) -> dict[str, str]:
    """Path → source of our modules that the scripts, the reward functions and the user's files need. Raises UserError for a user's file that
    imports what is not there."""
    uses = [use for name in SCRIPTS for use in _imports(script(name))]
    uses += [Use(call.__module__, call.__name__) for call in _shipped(config)]
    uses += [Use(f"{PACKAGE}.rewards", name) for name in _FOR_USERS]
    for path in code_files(config.model_dump()):
        own = _imports_of_user(path)
        try:
            carried_code(own)
        except LookupError as error:
            sentence = f"{path.name} imports of GRPO Studio what a folder for TRL cannot carry: {error}."
            raise UserError(_SETTING, quote(sentence, 200)) from None
        uses += own
    return carried_code(uses)


def _imports(source: str) -> list[Use]:
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return [use for node in statements for use in imported(node)]


def _imports_of_user(path: Path) -> list[Use]:
    """Raises UserError for a file that is no Python."""
    try:
        return _imports(read_text(path, _SETTING))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(_SETTING, f"{quote(path, 90)} is no Python: {quote(error, 60)}.") from None


def _shipped(config: Config) -> list[RewardCallable]:
    """Our reward functions that the run names; all of them beside a file of the user's, which may ask for any by its name."""
    if code_files(config.model_dump()):
        return list(REWARD_REGISTRY.values())
    return [REWARD_REGISTRY[reward_call(entry, REWARD_REGISTRY).function] for entry in config.reward_functions]


# ── rewards.py ───────────────────────────────────────────────────────────────────────────────────────────────────────


def reward_names(config: Config) -> dict[str, str]:
    """The name of a function's scores → its name in rewards.py, which has to be one of Python's."""
    names: dict[str, str] = {}
    for entry in config.reward_functions:
        plain = re.sub(r"\W", "_", metric_name(entry), flags=re.ASCII)
        is_taken = plain == "FUNCTIONS" or iskeyword(plain)
        plain = f"reward_{plain}" if is_taken or not plain.isidentifier() else plain
        taken = sum(name.rstrip("_") == plain for name in names.values())
        names[metric_name(entry)] = plain + "_" * taken
    return names


def rewards_module(config: Config) -> str:
    """rewards.py: one function for each entry, which `trl grpo` names as rewards.NAME."""
    modules = sorted({call.__module__ for call in _shipped(config)})
    lines = [
        '"""The reward functions of the run, in the order of their weights: `trl grpo` names them as rewards.NAME."""',
        "",
        *(f"import {module}  # registers its functions" for module in modules),
        "from reward_calls import reward_functions",
        "",
        "FUNCTIONS = reward_functions()",
    ]
    lines += [f"{name} = FUNCTIONS[{place}]" for place, name in enumerate(reward_names(config).values())]
    return "\n".join(lines) + "\n"


# ── the user's files ─────────────────────────────────────────────────────────────────────────────────────────────────


def copy_user_code(config: Config, folder: Path) -> Config:
    """Copy the user's files, and what they import from beside them, into `folder`; → the settings with paths relative to it."""
    homes: dict[Path, str] = {}
    for path in code_files(config.model_dump()):
        home = homes.setdefault(path.parent, USER_CODE + (f"_{len(homes) + 1}" if homes else ""))
        (folder / home).mkdir(exist_ok=True)
        _copy(path, folder / home)
    if not homes:
        return config

    def portable(name: str) -> str:
        path = locate_reward_file(name).resolve()
        return f"{homes[path.parent]}/{path.name}"

    entries = [_with_file(entry, portable) for entry in config.reward_functions]
    file = portable(config.reward_functions_file) if config.reward_functions_file else ""
    return config.model_copy(update={"reward_functions": entries, "reward_functions_file": file})


def _with_file(entry: str, portable: Callable[[str], str]) -> str:
    call = reward_call(entry, ())
    return replace(call, file=portable(call.file)).text if call.file else entry


def _copy(path: Path, home: Path) -> None:
    """A file, and the modules and packages beside it that it imports, and so on. Raises UserError for one that is a link out of its folder."""
    if (home / path.name).exists():
        return
    shutil.copyfile(own_file(path, path.parent, _SETTING), home / path.name)
    for name in read_code(path).beside:
        module, package = path.parent / f"{name}.py", path.parent / name
        if module.is_file():
            _copy(module, home)
        elif not (home / name).exists() and module_path(name) is None:
            copy_folder(package, home / name, _SETTING)


def copy_folder(source: Path, target: Path, setting: str) -> None:
    """Copy the files of a folder, and of those in it, but for hidden ones and caches. Raises UserError on `setting` for a link that leads out
    of it, and the first OSError as it is, which `shutil.copytree` does not."""
    target.mkdir()
    for path in own_files(source, setting, but=("__pycache__",)):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
