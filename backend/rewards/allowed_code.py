"""The small file of what a person has allowed on this machine: code that may run, and hosts files whose machines may be contacted.

`backend.rewards.allowed_code` and `backend.distributed.allowed_hosts` say what its entries mean.
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


class TrustRecord:
    """The record in `file`; by default the one in the folder of preferences, which window and command line share."""

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
        """Keep these entries beside the others. Where the file cannot be written they are not kept, and a person is asked again."""
        if not new:
            return
        with suppress(OSError, UnicodeError, DiskError):
            make_private_folder(self.file.parent)
            text = json.dumps(self.read() | dict(new), indent=1, ensure_ascii=False)
            replace_file(self.file, text, mode=stat.S_IRUSR | stat.S_IWUSR)


# A user's code before it is run: which files a run would execute, what is in them, and the hash of their contents.

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
    """Raises UserError on `reward_functions_file` for a file that cannot be read."""
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
    except UserError:  # validation reports it, and no run starts with it
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


# ── allowed code ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Rights:
    """What code may reach: with `in_trainer` (`reward_isolation: thread`) all that the user may; else what a confined process may, and with
    `network` the network too."""

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
        """The code whose present contents are not allowed, or not with the rights that these settings give it; empty for settings without
        user code.

        Relative paths in the settings are taken from the folder `base`.
        """
        allowed, wanted, missing = self._read(), Rights.of(settings), list[CodeToAllow]()
        for code in filter(None, map(_code, code_files(settings, base))):
            fingerprint, rights = allowed.get(str(code.path), ("", Rights()))
            if fingerprint != code.fingerprint or not rights.cover(wanted):
                is_edit = fingerprint not in ("", code.fingerprint) and rights.cover(wanted)
                missing.append(CodeToAllow(code, is_edit, wanted))
        return missing

    def fingerprints(self, settings: Mapping[str, Any], base: Path | None = None) -> dict[str, str]:
        """Path → SHA-256 of the allowed code that these settings name. The process that runs code refuses all other contents."""
        allowed = self._read()
        return {str(path): allowed[str(path)][0] for path in code_files(settings, base) if str(path) in allowed}

    def rights(self, code: CodeFile) -> Rights | None:
        """With which rights these contents may run; None where they may not."""
        fingerprint, rights = self._read().get(str(code.path), ("", Rights()))
        return rights if fingerprint == code.fingerprint else None

    def allow(self, codes: Iterable[CodeToAllow]) -> None:
        """Remember these contents, with these rights and those that the same contents had. Where the file cannot be written they count as
        not allowed, and a person is asked again."""
        new = dict[str, Any]()
        for each in codes:
            had = self.rights(each.code) or Rights()
            rights = Rights(had.in_trainer or each.rights.in_trainer, had.network or each.rights.network)
            new[str(each.code.path)] = {"sha256": each.code.fingerprint} | asdict(rights)
        self._record.add(new)

    def _read(self) -> dict[str, tuple[str, Rights]]:
        """Path → SHA-256 and rights. A plain SHA-256, as earlier versions wrote it, stands for a confined process."""
        read = dict[str, tuple[str, Rights]]()
        for path, value in self._record.read().items():
            kept = cast("dict[str, Any]", value) if isinstance(value, dict) else {"sha256": value}
            rights = Rights(kept.get("in_trainer") is True, kept.get("network") is True)
            read[path] = str(kept.get("sha256")), rights
        return read


def allow_named(settings: Mapping[str, Any], base: Path | None = None) -> None:
    """A person has named this code on the command line: remember it as allowed."""
    record = AllowedCode()
    record.allow(record.missing(settings, base))


def require_allowed(settings: Mapping[str, Any], base: Path | None = None, *, allow: bool = False) -> None:
    """Raise UserError for code of a run folder that was never allowed here; with `allow` it is allowed from now on.

    On the command line a file that was allowed once may have been edited since: who mends a reward function and resumes means the
    mended one. The window asks again.
    """
    if allow:
        return allow_named(settings, base)
    if LOCK_VARIABLE in os.environ:
        return None  # this process goes on with a run that it has begun itself (`backend.cli.training`)
    unknown = [each for each in AllowedCode().missing(settings, base) if not each.changed]
    if unknown:
        raise UserError(ConfigProblem("reward_functions_file", _refusal(each)) for each in unknown)
    return None


def _refusal(asked: CodeToAllow) -> str:
    how = " inside the trainer" if asked.rights.in_trainer else " and use the network" if asked.rights.network else ""
    return (
        f"The reward file {asked.code.path} was never allowed to run on this machine{how}. Read it first; --allow-code runs it from "
        f"now on."
    )


def _code(path: Path) -> CodeFile | None:
    try:
        return read_code(path)
    except UserError:  # it cannot be read, so it cannot be run either; a run says so
        return None
