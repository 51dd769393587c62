"""Code that a person has allowed to run here: reward files, path → SHA-256 and rights, and MCP servers.

The window asks; on the command line naming a file allows it. Verbs that run code of a run folder call
`require_allowed`. Modules beside a file are not covered by its hash; the window lists them (`CodeFile.beside`)."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from backend.config.other_programs.translation import translate
from backend.rewards.catalogue import JUDGE, RewardCall, find_call, functions, locate_reward_file, split_names
from backend.runs.run_folder import LOCK_VARIABLE
from backend.tools.mcp_settings import LOOPBACK, ServerSettings, named_servers
from backend.utils import places
from backend.utils.disk import DiskError, replace_file
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import make_private_folder, read_bytes
from backend.utils.text import quote

FILE = "trusted.json"
JUDGES_SERVER = "judge's server on"
RISKY_MODULES = (
    *("ctypes", "ftplib", "http", "httpx", "multiprocessing", "os", "pathlib", "requests", "shutil", "smtplib"),
    *("socket", "subprocess", "tempfile", "urllib"),
)  # modules that usually give access to files, programs or the network


class TrustRecord:
    """Code and hosts files allowed on this machine, in `file`, by default in the preferences folder."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or places.preferences_folder() / FILE

    def read(self) -> dict[str, Any]:
        """Every entry; none for a missing or damaged file."""
        try:
            stored = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return stored if isinstance(stored, dict) else {}

    def add(self, new: Mapping[str, Any]) -> None:
        """Add entries. They are lost if the file cannot be written."""
        if not new:
            return
        with suppress(OSError, UnicodeError, DiskError):
            make_private_folder(self.file.parent)
            text = json.dumps(self.read() | dict(new), indent=1, ensure_ascii=False)
            replace_file(self.file, text, mode=stat.S_IRUSR | stat.S_IWUSR)


@dataclass(frozen=True, slots=True)
class CodeFile:
    """Contents of a file; `functions` and `imports` in source order, empty if not Python; SHA-256 `fingerprint`."""

    path: Path
    size: int
    fingerprint: str
    functions: tuple[str, ...]
    imports: tuple[str, ...]

    @property
    def reaches(self) -> tuple[str, ...]:
        """Imports of RISKY_MODULES."""
        return tuple(name for name in self.imports if name.split(".")[0] in RISKY_MODULES)

    @property
    def beside(self) -> tuple[str, ...]:
        """Imported modules in the file's own folder, which `fingerprint` does not cover."""
        names = dict.fromkeys(name.split(".")[0] for name in self.imports)
        others = [name for name in names if name and name not in sys.stdlib_module_names]
        folder = self.path.parent
        return tuple(name for name in others if (folder / f"{name}.py").is_file() or (folder / name).is_dir())


def read_code(path: Path) -> CodeFile:
    """Raises UserError on `reward_functions_file` for an unreadable file."""
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
    """Existing files that a run with these raw settings executes, stages included; paths relative to `base`."""
    settings = translate(settings).values  # as the run itself will read them
    named = settings.get("reward_functions_file")
    environment = settings.get("environment")
    classes = environment.values() if isinstance(environment, Mapping) else [environment]
    named = [*(named if isinstance(named, list) else [named]), settings.get("tools_file")]
    names = [text.strip() for text in named if isinstance(text, str)]
    names += [text.rpartition("::")[0].strip() for text in classes if isinstance(text, str)]
    names += [call.file for call in _reward_calls(settings)]
    paths: dict[Path, None] = {}
    for name in filter(None, names):
        with suppress(UserError):  # validation reports this too
            paths[locate_reward_file(name, base).resolve()] = None
    return [path for path in paths if path.is_file()]


def _reward_calls(settings: Mapping[str, Any]) -> Iterator[RewardCall]:
    stages = settings.get("stages")
    for part in [settings, *(stages if isinstance(stages, list) else [])]:
        entries = part.get("reward_functions") if isinstance(part, Mapping) else None
        entries = split_names(entries) if isinstance(entries, str) else entries
        yield from filter(None, map(find_call, map(str, entries if isinstance(entries, list) else [])))


@dataclass(frozen=True, slots=True)
class Rights:
    """Everything with `in_trainer` (`reward_isolation: thread`), else a confined process's, with or without network."""

    in_trainer: bool = False
    network: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Rights:
        return cls(settings.get("reward_isolation") == "thread", bool(settings.get("reward_network")))

    def cover(self, wanted: Rights) -> bool:
        return self.in_trainer or (not wanted.in_trainer and (self.network or not wanted.network))


@dataclass(frozen=True, slots=True)
class CodeToAllow:
    """Code that may not run yet with these rights. `changed`: earlier contents were allowed."""

    code: CodeFile
    changed: bool
    rights: Rights = Rights()


class AllowedCode(TrustRecord):
    """Allowed code in a record, by default this machine's."""

    def missing(self, settings: Mapping[str, Any], base: Path | None = None) -> list[CodeToAllow]:
        """Code of these settings that is not allowed with its rights; paths relative to `base`."""
        allowed, wanted, missing = self._allowed(), Rights.of(settings), list[CodeToAllow]()
        for path in code_files(settings, base):
            with suppress(UserError):  # one that cannot be read cannot be run either; a run says so
                code = read_code(path)
                fingerprint, rights = allowed.get(str(path), ("", Rights()))
                is_edit = fingerprint not in ("", code.fingerprint) and rights.cover(wanted)
                if fingerprint != code.fingerprint or not rights.cover(wanted):
                    missing.append(CodeToAllow(code, is_edit, wanted))
        return missing

    def rights(self, code: CodeFile) -> Rights | None:
        fingerprint, rights = self._allowed().get(str(code.path), ("", Rights()))
        return rights if fingerprint == code.fingerprint else None

    def allow(self, codes: Iterable[CodeToAllow]) -> None:
        """Allow these contents, adding to rights they already had."""
        new = dict[str, Any]()
        for each in codes:
            had = self.rights(each.code) or Rights()
            rights = Rights(had.in_trainer or each.rights.in_trainer, had.network or each.rights.network)
            new[str(each.code.path)] = {"sha256": each.code.fingerprint} | asdict(rights)
        self.add(new)

    def _allowed(self) -> dict[str, tuple[str, Rights]]:
        examples = (places.resources().resolve() / "examples").glob("*.py")
        allowed = {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), Rights()) for path in examples}
        for path, value in self.read().items():
            entry = value if isinstance(value, dict) else {"sha256": value}
            rights = Rights(entry.get("in_trainer") is True, entry.get("network") is True)
            allowed[path] = str(entry.get("sha256")), rights
        return allowed


class AllowedServers(TrustRecord):
    """MCP and OpenEnv servers, and hosts of judges, by the SHA-256 of what decides what starts."""

    def missing(self, settings: Mapping[str, Any]) -> dict[str, ServerSettings]:
        """Servers and judges' hosts of these raw settings that are not allowed, by name. An edited one is another."""
        allowed, named = self.read(), named_servers(settings)
        for call in _reward_calls(translate(settings).values):
            if call.function == JUDGE and not call.file:
                with suppress(ValueError):  # no URL: validation reports it
                    url = urlsplit(str(call.arguments.get("url", "")))
                    if url.hostname not in (None, *LOOPBACK):
                        named[f"{JUDGES_SERVER} {url.netloc}"] = ServerSettings(url=f"{url.scheme}://{url.netloc}")
        return {name: server for name, server in named.items() if server.fingerprint not in allowed}

    def allow(self, servers: Iterable[ServerSettings]) -> None:
        self.add({server.fingerprint: {"starts": server.command or server.url} for server in servers})


def allow_named(settings: Mapping[str, Any], base: Path | None = None) -> None:
    """Allow code and MCP servers named on the command line."""
    record, servers = AllowedCode(), AllowedServers()
    record.allow(record.missing(settings, base))
    servers.allow(servers.missing(settings).values())


def require_allowed(settings: Mapping[str, Any], base: Path | None = None, *, allow: bool = False) -> None:
    """Raise UserError for code or a server of a run folder that was never allowed here; `allow` allows it. Edited files
    pass on the command line, edited servers do not; the window asks again."""
    if allow:
        allow_named(settings, base)
        return
    if LOCK_VARIABLE in os.environ:
        return  # this process continues a run that it has begun itself (`backend.cli.training`)
    problems: list[ConfigProblem] = []
    for each in AllowedCode().missing(settings, base):
        how = " inside the trainer" if each.rights.in_trainer else " and use the network" if each.rights.network else ""
        sentence = f"The Python file {each.code.path} was never allowed to run on this machine{how}."
        if not each.changed:
            advice = "Read it first; --allow-code runs it from now on."
            problems.append(ConfigProblem("reward_functions_file", f"{sentence} {advice}"))
    for name, server in AllowedServers().missing(settings).items():
        setting = "mcp_servers" if name.startswith("MCP") else "environment"
        sentence = f"The {quote(name, 55)} was never allowed on this machine: {quote(server.starts, 90)}."
        sentence += " --allow-code starts it from now on."
        if name.startswith(JUDGES_SERVER):
            setting, sentence = "reward_functions", f"The {quote(name, 90)} would get the prompts and completions of"
            sentence += " this run; --allow-code allows it from now on."
        problems.append(ConfigProblem(setting, sentence))
    if problems:
        raise UserError(problems)
