"""A user's code before it is run: which files a run would execute, what is in them, and the hash of their contents.

Files are read as text and never run. Asking for consent, and enforcing it, both build on this.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.spec.faults import Mistake
from backend.spec.other_programs.translation import translate
from backend.spec.rewards.entry import read_call, split_names
from backend.spec.rewards.parse import functions, locate_reward_file
from backend.spec.user_input.files import read_bytes

RISKY_MODULES = ("ctypes", "ftplib", "http", "httpx", "multiprocessing", "os", "pathlib", "requests", "shutil", "smtplib",
            "socket", "subprocess", "tempfile", "urllib")  # fmt: skip
"""Modules by which code usually accesses files, other programs or the network."""


@dataclass(frozen=True, slots=True)
class CodeFile:
    """The contents of one file. `size` in bytes; `functions` and `imports` by name, in the order of the source, both empty if
    it is not Python; `fingerprint`: SHA-256 of the contents."""

    path: Path
    size: int
    fingerprint: str
    functions: tuple[str, ...]
    imports: tuple[str, ...]

    @property
    def reaches(self) -> tuple[str, ...]:
        """Imports of RISKY_MODULES: code that may do more than score texts."""
        return tuple(name for name in self.imports if name.split(".")[0] in RISKY_MODULES)

    @property
    def beside(self) -> tuple[str, ...]:
        """Modules and packages in the file's own folder that it imports by name. They run with it, and `fingerprint` is not of them."""
        names = dict.fromkeys(name.split(".")[0] for name in self.imports)
        others = (name for name in names if name and name not in sys.stdlib_module_names)
        return tuple(name for name in others if self._has_beside(name))

    def _has_beside(self, name: str) -> bool:
        return (self.path.parent / f"{name}.py").is_file() or (self.path.parent / name).is_dir()


def read_code(path: Path) -> CodeFile:
    """Raises Mistake on `reward_functions_file` for a file that cannot be read."""
    source = read_bytes(path, "reward_functions_file")
    tree = _parsed(source)
    names = tuple(function.name for function in functions(tree)) if tree else ()
    return CodeFile(path, len(source), hashlib.sha256(source).hexdigest(), names, tuple(_imports(tree)) if tree else ())


def code_files(settings: Mapping[str, Any], base: Path | None = None) -> list[Path]:
    """The files that a run with these raw settings executes, without duplicates and without those that do not exist.

    They are `reward_functions_file` and the file before `::` of every entry, in stages too. Relative paths start from the
    folder `base` (default: the working directory).
    """
    settings = translate(settings)[0]  # as the run itself will read them
    named = [
        *map(str.strip, _texts(settings.get("reward_functions_file"))),
        *_files_of(settings.get("reward_functions")),
    ]
    for stage in _listed(settings.get("stages")):
        if isinstance(stage, Mapping):
            named += _files_of(cast("Mapping[str, Any]", stage).get("reward_functions"))
    paths = [locate_reward_file(name, base).resolve() for name in named if name]
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def _files_of(entries: Any) -> list[str]:
    names = split_names(entries) if isinstance(entries, str) else [str(entry) for entry in _listed(entries)]
    return [file for file in map(_file_of, names) if file]


def _texts(value: Any) -> list[str]:
    """A text, or every text of a list: YAML may write a single path as either."""
    return [value] if isinstance(value, str) else [each for each in _listed(value) if isinstance(each, str)]


def _listed(value: Any) -> Iterable[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _file_of(entry: str) -> str:
    try:
        return read_call(entry).file
    except Mistake:  # validation reports it, and no run starts with it
        return ""


def _parsed(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imports(tree: ast.Module) -> dict[str, None]:
    """Imported modules in order of appearance, at any level of the file."""
    modules: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules[node.module or "."] = None
    return modules
