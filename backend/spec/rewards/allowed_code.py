"""Which reward files may run on this machine: path → SHA-256 of the contents that a person has allowed, in one small file.

A person allows a file in the window, which asks, or on the command line by naming it: in a YAML file given to `train`, in `--set`, with
`--allow-code`. A run folder names files too, and may come from somebody else; whoever is about to train, resume, clone or evaluate one asks
`require_allowed` first. Nothing here runs code.

Only the contents of the named file count. It can import modules that lie beside it: those run with it, and their changes are not noticed;
the question in the window names them (`CodeFile.beside`).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.spec import places
from backend.spec.disk_faults import DiskFault
from backend.spec.faults import Fault, Mistake
from backend.spec.private_files import make_private_folder
from backend.spec.rewards.user_code import CodeFile, code_files, read_code
from backend.spec.whole_file import replace_file

FILE = "trusted.json"


@dataclass(frozen=True, slots=True)
class CodeToAllow:
    """Code that may not run yet. `changed`: earlier contents of this file were allowed. `in_trainer`: it would run inside the trainer
    (`reward_isolation: thread`), with the user's rights; else in a confined process, which has the network with `network`."""

    code: CodeFile
    changed: bool
    in_trainer: bool = False
    network: bool = False


class AllowedCode:
    """The record in `file`; by default the one in the folder of preferences, which window and command line share."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or places.preferences_folder() / FILE

    def missing(self, settings: Mapping[str, Any], base: Path | None = None) -> list[CodeToAllow]:
        """The code whose present contents are not allowed; empty for settings without user code.

        Relative paths in the settings are taken from the folder `base`.
        """
        allowed = self._read()
        in_trainer, network = settings.get("reward_isolation") == "thread", bool(settings.get("reward_network"))
        codes = [code for code in map(_code, code_files(settings, base)) if code is not None]
        return [
            CodeToAllow(code, str(code.path) in allowed, in_trainer, network)
            for code in codes
            if allowed.get(str(code.path)) != code.fingerprint
        ]

    def fingerprints(self, settings: Mapping[str, Any], base: Path | None = None) -> dict[str, str]:
        """Path → SHA-256 of the allowed code that these settings name. The process that runs code refuses all other contents."""
        allowed = self._read()
        return {str(path): allowed[str(path)] for path in code_files(settings, base) if str(path) in allowed}

    def allows(self, code: CodeFile) -> bool:
        return self._read().get(str(code.path)) == code.fingerprint

    def allow(self, codes: Iterable[CodeFile]) -> None:
        """Remember these contents. Where the file cannot be written they count as not allowed, and a person is asked again."""
        new = {str(code.path): code.fingerprint for code in codes}
        if not new:
            return
        with suppress(OSError, UnicodeError, DiskFault):
            make_private_folder(self._file.parent)
            replace_file(
                self._file,
                json.dumps(self._read() | new, indent=1, ensure_ascii=False),
                mode=stat.S_IRUSR | stat.S_IWUSR,
            )

    def _read(self) -> dict[str, str]:
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(stored, dict):
            return {}
        return {str(path): str(print_) for path, print_ in cast("dict[str, Any]", stored).items()}


def allow_named(settings: Mapping[str, Any], base: Path | None = None) -> None:
    """A person has named this code on the command line: remember it as allowed."""
    record = AllowedCode()
    record.allow(each.code for each in record.missing(settings, base))


def require_allowed(settings: Mapping[str, Any], base: Path | None = None, *, allow: bool = False) -> None:
    """Raise Mistake for code of a run folder that was never allowed here; with `allow` it is allowed from now on.

    On the command line a file that was allowed once may have been edited since: who mends a reward function and resumes means the
    mended one. The window asks again.
    """
    if allow:
        return allow_named(settings, base)
    if places.LOCK_VARIABLE in os.environ:
        return None  # this process goes on with a run that it has begun itself (`backend.cli.restart`)
    unknown = [each for each in AllowedCode().missing(settings, base) if not each.changed]
    if unknown:
        raise Mistake(Fault("reward_functions_file", _refusal(each.code.path)) for each in unknown)
    return None


def _refusal(path: Path) -> str:
    return f"The reward file {path} was never allowed to run on this machine. Read it first; --allow-code runs it from now on."


def _code(path: Path) -> CodeFile | None:
    try:
        return read_code(path)
    except Mistake:  # it cannot be read, so it cannot be run either; a run says so
        return None
