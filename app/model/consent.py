"""Consent to run the user's reward code: asked before a file first runs, and again when its contents have changed.

What is stored is each file's path with the SHA-256 of its contents. The command line does not ask, as the user names the file
there. Nothing here runs code or knows a widget: the window sets `ask` to its dialog.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.spec.faults import Mistake
from backend.spec.rewards.user_code import CodeFile, code_files, read_code


@dataclass(frozen=True, slots=True)
class ConsentRequest:
    """Code that needs consent. `changed`: earlier contents of this file were allowed."""

    code: CodeFile
    changed: bool


Ask = Callable[[Sequence[ConsentRequest]], bool]


def refuse_all(_requests: Sequence[ConsentRequest]) -> bool:
    """The answer without a window, when there is no user to ask."""
    return False


class Consent:
    """What the user has allowed. `ask` shows requests and returns the answer."""

    def __init__(self, file: Path, ask: Ask = refuse_all) -> None:
        self.ask = ask
        self._file = file

    def obtain(self, settings: Mapping[str, Any], base: Path | None = None) -> bool:
        """Whether all user code that a run with these raw settings executes may run; asks about what is not allowed yet.

        Relative paths in the settings are taken from the folder `base`.
        """
        requests = self.unconfirmed(settings, base)
        if requests and not self.ask(requests):
            return False
        for request in requests:
            self.allow(request.code)
        return True

    def unconfirmed(self, settings: Mapping[str, Any], base: Path | None = None) -> list[ConsentRequest]:
        """The code whose present contents are not allowed yet; empty for settings without user code."""
        allowed = self._allowed()
        codes = [code for code in map(_code, code_files(settings, base)) if code is not None]
        return [
            ConsentRequest(code, str(code.path) in allowed)
            for code in codes
            if allowed.get(str(code.path)) != code.fingerprint
        ]

    def trusted(self, settings: Mapping[str, Any], base: Path | None = None) -> dict[str, str]:
        """Path → SHA-256 of the allowed code that these settings name. The process that runs code refuses all other contents."""
        allowed = self._allowed()
        return {str(path): allowed[str(path)] for path in code_files(settings, base) if str(path) in allowed}

    def allows(self, code: CodeFile) -> bool:
        return self._allowed().get(str(code.path)) == code.fingerprint

    def allow(self, code: CodeFile) -> None:
        """Remember these contents. Where the file cannot be written, the user is asked again next time."""
        allowed = self._allowed() | {str(code.path): code.fingerprint}
        aside = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            aside.write_text(json.dumps(allowed, indent=1, ensure_ascii=False), encoding="utf-8")
            aside.replace(self._file)
        except OSError:
            aside.unlink(missing_ok=True)

    def _allowed(self) -> dict[str, str]:
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(path): str(fingerprint) for path, fingerprint in stored.items()} if isinstance(stored, dict) else {}


def _code(path: Path) -> CodeFile | None:
    try:
        return read_code(path)
    except Mistake:  # it cannot be read, so it cannot be run either; a run says so
        return None
