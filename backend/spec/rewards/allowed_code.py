"""Which reward files may run on this machine: path → SHA-256 of the contents that a person has allowed, and what for, in the record of
`backend.spec.trust_record`.

A person allows a file in the window, which asks, or on the command line by naming it: in a YAML file given to `train`, in `--set`, with
`--allow-code`. A run folder names files too, and may come from somebody else; whoever is about to train, resume, clone or evaluate one asks
`require_allowed` first. Nothing here runs code.

Who allows a file for a confined process has not allowed it for the trainer's own, nor for the network (`Rights`).

Only the contents of the named file count. It can import modules that lie beside it: those run with it, and their changes are not noticed;
the question in the window names them (`CodeFile.beside`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from backend.spec.faults import Fault, Mistake
from backend.spec.rewards.user_code import CodeFile, code_files, read_code
from backend.spec.run_lock import LOCK_VARIABLE
from backend.spec.trust_record import TrustRecord


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
    """Raise Mistake for code of a run folder that was never allowed here; with `allow` it is allowed from now on.

    On the command line a file that was allowed once may have been edited since: who mends a reward function and resumes means the
    mended one. The window asks again.
    """
    if allow:
        return allow_named(settings, base)
    if LOCK_VARIABLE in os.environ:
        return None  # this process goes on with a run that it has begun itself (`backend.cli.restart`)
    unknown = [each for each in AllowedCode().missing(settings, base) if not each.changed]
    if unknown:
        raise Mistake(Fault("reward_functions_file", _refusal(each)) for each in unknown)
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
    except Mistake:  # it cannot be read, so it cannot be run either; a run says so
        return None
