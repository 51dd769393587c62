"""The update check: off until the user turns it on, at most once a day, and never more than a sentence."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QObject, Signal

from app.state.prefs import Prefs
from app.state.service import Service
from backend.utils import releases
from backend.utils.errors import ConfigProblem

DAY_S = 24 * 3600


class Updates(QObject):
    """Asks the helper process. `service` is a function, so that a check that never happens starts no process.

    Signals:
        told(str) – one sentence with the result.
    """

    told = Signal(str)

    def __init__(self, prefs: Prefs, service: Callable[[], Service], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._prefs, self._service = prefs, service

    def check_at_start(self) -> bool:
        """Check if the user wants that and the last check was a day ago; whether one was begun. Tells only of a newer version."""
        due = time.time() - self._prefs.updates_checked > DAY_S
        if not (self._prefs.check_updates and due and releases.feed()):
            return False
        self._ask(lambda faults: None, lambda: None)
        return True

    def check_now(self) -> None:
        """Check because the user asks; tells whatever comes of it."""
        if not releases.feed():
            self.told.emit(releases.NO_FEED)
            return
        self.told.emit("Asking for the latest version…")
        self._ask(
            lambda faults: self.told.emit(faults[0].sentence),
            lambda: self.told.emit(f"GRPO Studio {releases.our_version()} is the latest version."),
        )

    def _ask(self, on_refused: Callable[[list[ConfigProblem]], None], on_none: Callable[[], None]) -> None:
        self._prefs.updates_checked = time.time()

        def on_answer(release: dict[str, Any] | None) -> None:
            if release is None:
                on_none()
            else:
                self.told.emit(_sentence(release))

        self._service().ask("newer_release", on_answer, on_refused=on_refused, owner=self, feed=releases.feed())


def _sentence(release: dict[str, Any]) -> str:
    where = f": {release['page']}" if release["page"] else ""
    return f"GRPO Studio {release['version']} is available; this is {releases.our_version()}{where}"
