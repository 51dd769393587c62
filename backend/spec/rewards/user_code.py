"""A person's code before it is run: which files a run would execute, what they hold, and which contents are meant.

Read as text and never run. Whoever asks a person's consent, or holds a run to it, asks here.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.spec.faults import Mistake
from backend.spec.rewards.entry import read_call, split_names
from backend.spec.rewards.parse import functions, locate_reward_file

RISKY_MODULES = ("ctypes", "ftplib", "http", "httpx", "multiprocessing", "os", "pathlib", "requests", "shutil", "smtplib",
            "socket", "subprocess", "tempfile", "urllib")  # fmt: skip
"""Modules by which code commonly reaches files, other programs or the network."""


@dataclass(frozen=True, slots=True)
class CodeFile:
    """One file as it is now. `size` in bytes; `functions` and `imports` by name, as they stand in the text, both empty
    where it is no Python; `fingerprint` the SHA-256 of its contents."""

    path: Path
    size: int
    fingerprint: str
    functions: tuple[str, ...]
    imports: tuple[str, ...]

    @property
    def reaches(self) -> tuple[str, ...]:
        """Of its imports, those by which code reaches beyond the texts it scores."""
        return tuple(name for name in self.imports if name.split(".")[0] in RISKY_MODULES)


def read_code(path: Path) -> CodeFile:
    """Raises Mistake on `reward_functions_file` for a file that cannot be read."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise Mistake("reward_functions_file", f"{path} cannot be read: {error.strerror}.") from None
    tree = _parsed(source)
    names = tuple(function.name for function in functions(tree)) if tree else ()
    return CodeFile(path, len(source), hashlib.sha256(source).hexdigest(), names, tuple(_imports(tree)) if tree else ())


def code_files(settings: Mapping[str, Any], base: Path | None = None) -> list[Path]:
    """The files whose code a run with these raw settings executes, each once; missing ones are left out.

    They are `reward_functions_file` and what stands before `::` in an entry, in the stages too. Relative paths are taken
    from the folder `base` (else from where we run).
    """
    named = [str(settings.get("reward_functions_file") or "").strip(), *_files_of(settings.get("reward_functions"))]
    for stage in _listed(settings.get("stages")):
        if isinstance(stage, Mapping):
            named += _files_of(cast("Mapping[str, Any]", stage).get("reward_functions"))
    places = [locate_reward_file(name, base).resolve() for name in named if name]
    return [path for path in dict.fromkeys(places) if path.is_file()]


def _files_of(entries: Any) -> list[str]:
    names = split_names(entries) if isinstance(entries, str) else [str(one) for one in _listed(entries)]
    return [file for file in map(_file_of, names) if file]


def _listed(value: Any) -> Iterable[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _file_of(entry: str) -> str:
    try:
        return read_call(entry).file
    except Mistake:  # told elsewhere, and no run begins with it
        return ""


def _parsed(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imports(tree: ast.Module) -> dict[str, None]:
    """Modules in the order in which they are imported, wherever in the file that is."""
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found[node.module or "."] = None
    return found
