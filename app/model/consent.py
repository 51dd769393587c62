"""Whether a person's reward code may run: asked before it runs for the first time, and again when it has changed.

Consent is for contents, not for names: what is remembered is a file's path with the SHA-256 of what stood in it. The
command line does not ask, for there the person names the file. Nothing here runs anything, and no widget is known; the
window puts its dialog into `ask`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.spec.faults import Mistake
from backend.spec.rewards.user_code import Code, code_files, read_code


@dataclass(frozen=True, slots=True)
class ConsentRequest:
    """Code that wants to run. `changed`: earlier contents of this file were allowed."""

    code: Code
    changed: bool


Ask = Callable[[Sequence[ConsentRequest]], bool]


def refuse_all(_requests: Sequence[ConsentRequest]) -> bool:
    """With nobody there to be asked, nothing is allowed."""
    return False


class Consent:
    """What this person has allowed. `ask` shows requests and returns the answer."""

    def __init__(self, file: Path, ask: Ask = refuse_all) -> None:
        self.ask = ask
        self._file = file

    def given(self, settings: Mapping[str, Any], base: Path | None = None) -> bool:
        """Whether everything that a run with these raw settings executes may run; asks for what was not asked yet.

        Relative paths in the settings are taken from the folder `base`.
        """
        unconfirmed = self.unconfirmed(settings, base)
        if unconfirmed and not self.ask(unconfirmed):
            return False
        for request in unconfirmed:
            self.allow(request.code)
        return True

    def unconfirmed(self, settings: Mapping[str, Any], base: Path | None = None) -> list[ConsentRequest]:
        """The code that was not allowed as it is now; empty for settings with no code of the person's own."""
        allowed = self._allowed()
        codes = [code for code in map(_code, code_files(settings, base)) if code is not None]
        return [
            ConsentRequest(code, str(code.path) in allowed)
            for code in codes
            if allowed.get(str(code.path)) != code.fingerprint
        ]

    def trusted(self, settings: Mapping[str, Any], base: Path | None = None) -> dict[str, str]:
        """Path → fingerprint of the allowed code among these settings', for the process that is to run it and no other."""
        allowed = self._allowed()
        return {str(path): allowed[str(path)] for path in code_files(settings, base) if str(path) in allowed}

    def allows(self, code: Code) -> bool:
        return self._allowed().get(str(code.path)) == code.fingerprint

    def allow(self, code: Code) -> None:
        """Remember these contents; a preferences folder that cannot be written means being asked again."""
        allowed = self._allowed() | {str(code.path): code.fingerprint}
        aside = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            aside.write_text(json.dumps(allowed, indent=1, ensure_ascii=False), encoding="utf-8")
            aside.replace(self._file)
        except OSError:
            aside.unlink(missing_ok=True)

    def _allowed(self) -> dict[str, str]:
        try:
            told = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(path): str(found) for path, found in told.items()} if isinstance(told, dict) else {}


def _code(path: Path) -> Code | None:
    try:
        return read_code(path)
    except Mistake:  # it cannot be read, so it cannot be run either; a run says so
        return None
