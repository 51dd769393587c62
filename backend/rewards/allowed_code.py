"""Which reward files may run on this machine: path → SHA-256 of the contents that a person has allowed, and what for.

A person allows a file in the window, which asks, or on the command line by naming it: in a YAML file given to
`train`, in `--set`, with `--allow-code`. A run folder names files too, and may come from somebody else, so commands
that execute its code call `require_allowed` first. Nothing here runs code. Only the contents of the named file count:
modules beside it are imported with it, and their changes are not noticed; the question in the window names them
(`CodeFile.beside`).
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from backend.config.other_programs.translation import translate
from backend.rewards.catalogue import functions, locate_reward_file, read_call, split_names
from backend.runs.run_lock import LOCK_VARIABLE
from backend.utils import places
from backend.utils.disk_faults import DiskError
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import make_private_folder, read_bytes
from backend.utils.whole_file import replace_file

FILE = "trusted.json"
RISKY_MODULES = (
    *("ctypes", "ftplib", "http", "httpx", "multiprocessing", "os", "pathlib", "requests", "shutil", "smtplib"),
    *("socket", "subprocess", "tempfile", "urllib"),
)
"""Modules by which code usually accesses files, other programs or the network."""


class TrustRecord:
    """What a person has allowed on this machine: code, and hosts files (`backend.distributed`).

    In `file`, by default in the folder of preferences, which window and command line share.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or places.preferences_folder() / FILE

    def read(self) -> dict[str, Any]:
        """Every entry; none where there is no file, or a damaged one."""
        try:
            stored = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return cast("dict[str, Any]", stored) if isinstance(stored, dict) else {}

    def add(self, new: Mapping[str, Any]) -> None:
        """Add entries. Where the file cannot be written they are lost, and a person is asked again."""
        if not new:
            return
        with suppress(OSError, UnicodeError, DiskError):
            make_private_folder(self.file.parent)
            text = json.dumps(self.read() | dict(new), indent=1, ensure_ascii=False)
            replace_file(self.file, text, mode=stat.S_IRUSR | stat.S_IWUSR)


@dataclass(frozen=True, slots=True)
class CodeFile:
    """The contents of a file. `size` in bytes; `functions` and `imports` by name, in the order of the source, both
    empty if it is not Python; `fingerprint`: SHA-256 of the contents."""

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
        """Modules and packages in the file's own folder that it imports. `fingerprint` does not cover them."""
        names = dict.fromkeys(name.split(".")[0] for name in self.imports)
        others = [name for name in names if name and name not in sys.stdlib_module_names]
        folder = self.path.parent
        return tuple(name for name in others if (folder / f"{name}.py").is_file() or (folder / name).is_dir())


def read_code(path: Path) -> CodeFile:
    """Raises UserError on `reward_functions_file` for a file that cannot be read."""
    source = read_bytes(path, "reward_functions_file")
    imports: dict[str, None] = {}
    names: tuple[str, ...] = ()
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(source)
        names = tuple(function.name for function in functions(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imports |= dict.fromkeys(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imports[node.module or "."] = None
    return CodeFile(path, len(source), hashlib.sha256(source).hexdigest(), names, tuple(imports))


def code_files(settings: Mapping[str, Any], base: Path | None = None) -> list[Path]:
    """The existing files that a run with these raw settings executes, without duplicates.

    They are `reward_functions_file` and the file before `::` of every entry, in stages too. Relative paths start from
    the folder `base` (default: the working directory).
    """
    settings = translate(settings)[0]  # as the run itself will read them
    named = settings.get("reward_functions_file")
    names = [text.strip() for text in ([named] if isinstance(named, str) else _list(named)) if isinstance(text, str)]
    parts = [settings, *(stage for stage in _list(settings.get("stages")) if isinstance(stage, Mapping))]
    for part in parts:
        entries = part.get("reward_functions")
        for entry in split_names(entries) if isinstance(entries, str) else map(str, _list(entries)):
            with suppress(UserError):  # validation reports it, and no run starts with it
                names.append(read_call(entry).file)
    paths = [locate_reward_file(name, base).resolve() for name in names if name]
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class Rights:
    """What code may reach: with `in_trainer` (`reward_isolation: thread`) all that the user may; else what a confined
    process may, and with `network` the network too."""

    in_trainer: bool = False
    network: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Rights:
        return cls(settings.get("reward_isolation") == "thread", bool(settings.get("reward_network")))

    def cover(self, wanted: Rights) -> bool:
        return self.in_trainer or (not wanted.in_trainer and (self.network or not wanted.network))


@dataclass(frozen=True, slots=True)
class CodeToAllow:
    """Code that may not run yet with these rights. `changed`: earlier contents of this file were allowed to."""

    code: CodeFile
    changed: bool
    rights: Rights = Rights()


class AllowedCode:
    """The code in a record, by default that of this machine (`TrustRecord`)."""

    def __init__(self, file: Path | None = None) -> None:
        self._record = TrustRecord(file)

    def missing(self, settings: Mapping[str, Any], base: Path | None = None) -> list[CodeToAllow]:
        """The code of these settings whose present contents are not allowed, or not with the rights it gets there.

        Relative paths are taken from the folder `base`.
        """
        allowed, wanted, missing = self._read(), Rights.of(settings), list[CodeToAllow]()
        for path in code_files(settings, base):
            try:
                code = read_code(path)
            except UserError:  # it cannot be read, so it cannot be run either; a run says so
                continue
            fingerprint, rights = allowed.get(str(path), ("", Rights()))
            if fingerprint != code.fingerprint or not rights.cover(wanted):
                is_edit = fingerprint not in ("", code.fingerprint) and rights.cover(wanted)
                missing.append(CodeToAllow(code, is_edit, wanted))
        return missing

    def fingerprints(self, settings: Mapping[str, Any], base: Path | None = None) -> dict[str, str]:
        """Path → SHA-256 of the allowed code that these settings name. The process that runs code refuses all else."""
        allowed = self._read()
        return {str(path): allowed[str(path)][0] for path in code_files(settings, base) if str(path) in allowed}

    def rights(self, code: CodeFile) -> Rights | None:
        """The rights with which these contents may run; None if they may not."""
        fingerprint, rights = self._read().get(str(code.path), ("", Rights()))
        return rights if fingerprint == code.fingerprint else None

    def allow(self, codes: Iterable[CodeToAllow]) -> None:
        """Remember these contents, with these rights and those that the same contents had."""
        new = dict[str, Any]()
        for each in codes:
            had = self.rights(each.code) or Rights()
            rights = Rights(had.in_trainer or each.rights.in_trainer, had.network or each.rights.network)
            new[str(each.code.path)] = {"sha256": each.code.fingerprint} | asdict(rights)
        self._record.add(new)

    def _read(self) -> dict[str, tuple[str, Rights]]:
        """Path → SHA-256 and rights. A plain SHA-256, as earlier versions wrote it, means a confined process."""
        read = dict[str, tuple[str, Rights]]()
        for path, value in self._record.read().items():
            entry = cast("dict[str, Any]", value) if isinstance(value, dict) else {"sha256": value}
            rights = Rights(entry.get("in_trainer") is True, entry.get("network") is True)
            read[path] = str(entry.get("sha256")), rights
        return read


def allow_named(settings: Mapping[str, Any], base: Path | None = None) -> None:
    """A person has named this code on the command line: remember it as allowed."""
    record = AllowedCode()
    record.allow(record.missing(settings, base))


def require_allowed(settings: Mapping[str, Any], base: Path | None = None, *, allow: bool = False) -> None:
    """Raise UserError for code of a run folder that was never allowed here; with `allow` it is allowed from now on.

    A file that was allowed once may have been edited: whoever resumes on the command line means the edited one. The
    window asks again.
    """
    if allow:
        allow_named(settings, base)
        return
    if LOCK_VARIABLE in os.environ:
        return  # this process continues a run that it has begun itself (`backend.cli.training`)
    unknown = [each for each in AllowedCode().missing(settings, base) if not each.changed]
    if unknown:
        raise UserError(ConfigProblem("reward_functions_file", _refusal(each)) for each in unknown)


def _refusal(asked: CodeToAllow) -> str:
    how = " inside the trainer" if asked.rights.in_trainer else " and use the network" if asked.rights.network else ""
    return (
        f"The reward file {asked.code.path} was never allowed to run on this machine{how}. Read it first; --allow-code "
        "runs it from now on."
    )
