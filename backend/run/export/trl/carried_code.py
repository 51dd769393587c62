"""The parts of our own modules that some of their functions need, as files that run without the rest of GRPO Studio.

Starting from names such as `r1_int_reward_func` of `backend.rewards.functions.r1`, every name that their source uses is followed,
through imports of ours, to the statements that bind it. Those statements are written out as they stand, comments included, in files of
the same names; everything else is left behind. So the code that runs in an export is the code that runs here.
"""

from __future__ import annotations

from collections.abc import Iterable

from backend.run.export.trl.module_source import (
    NOTHING,
    Statement,
    Use,
    imported,
    is_kept,
    module_path,
    module_source,
)


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
