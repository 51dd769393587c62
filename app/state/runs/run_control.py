"""Which of several windows controls a live run. The first that follows it does; the others watch, and may take over.

The lock is a file in the run's folder that dies with its window. A window cannot take it by force: it leaves a request, and the holder,
which looks several times a second, gives the lock up. If it does not answer, the request is void after ANSWER_S.
"""

from __future__ import annotations

import contextlib
import os
import time

from backend.runs.run_folder import RunFolder
from backend.utils import file_lock
from backend.utils.errors import UserError
from backend.utils.regular_file import read_regular
from backend.utils.whole_file import replace_file

ANSWER_S = 5.0
"""How long a request stands: a window that does not answer by then hangs."""


class RunControl:
    """One window's side of it. Call `update` whenever the run is looked at.

    Attributes:
        is_elsewhere – whether another window controls the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._handle: int | None = None
        self._has_asked = False
        self.is_elsewhere = False

    def update(self, live: bool) -> None:
        """Take the control of a live run that no window controls; give it up where another asks for it, or the run has ended."""
        if not live:
            self.release()
        elif self._handle is not None and self._is_asked_for():
            self._let_go()
            self.is_elsewhere = True
        elif self._handle is None:
            self._try_to_hold()

    def take_over(self) -> None:
        """Ask the window that controls the run to give it up; `update` then takes it. Raises DiskError."""
        replace_file(self._folder.window_request, self._name())
        self._has_asked = True

    def require(self) -> None:
        """Raises UserError where another window controls the run."""
        if self.is_elsewhere:
            raise UserError("run", "Another window controls this run. Take over there first.")

    def repeat_stop(self) -> None:
        """Write stop again where it came too early: a starting trainer deletes the control words that it finds."""
        is_there = self._folder.control.exists() or self._folder.control_taken.exists()
        if not is_there:
            with contextlib.suppress(UserError):  # a disk that is full now: tried again at the next look
                self._folder.say("stop")

    def release(self) -> None:
        """Give the control up; the run is not touched."""
        self._let_go()
        self._has_asked = self.is_elsewhere = False

    def _try_to_hold(self) -> None:
        if self._is_asked_for():  # it is about to be another's
            self.is_elsewhere = True
            return
        try:
            self._handle = file_lock.try_hold(self._folder.window_lock)
        except OSError:  # a folder that cannot be written: what is sent to the run then says so itself
            self.is_elsewhere = False
            return
        self.is_elsewhere = self._handle is None
        if self._handle is not None and self._has_asked:
            self._has_asked = False
            self._folder.window_request.unlink(missing_ok=True)

    def _is_asked_for(self) -> bool:
        """Whether another window has asked for the control, not too long ago."""
        request = self._folder.window_request
        try:
            age_s = time.time() - request.stat().st_mtime
            return abs(age_s) < ANSWER_S and read_regular(request) != self._name().encode()
        except OSError:
            return False

    def _let_go(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _name(self) -> str:
        return f"{os.getpid()}-{id(self)}"
