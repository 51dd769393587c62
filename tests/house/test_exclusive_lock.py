"""The lock that keeps tests which measure seconds to themselves."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.support.exclusive_lock import Floor


class Guest:
    """Takes the floor in a thread of its own, and stays until it is told to leave."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self.inside, self._leave, self._floor = threading.Event(), threading.Event(), Floor(folder)
        self._thread = threading.Thread(target=self._visit, args=(alone,), daemon=True)
        self._thread.start()

    def _visit(self, alone: bool) -> None:
        with self._floor.taken(alone=alone):
            self.inside.set()
            self._leave.wait(20)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(20)


def test_many_share_it_and_who_measures_has_it_alone(tmp_path: Path):
    sharing = [Guest(tmp_path, alone=False) for _ in range(2)]
    assert all(one.inside.wait(10) for one in sharing)
    measuring = Guest(tmp_path, alone=True)
    time.sleep(0.1)  # it stands in the turnstile
    late = Guest(tmp_path, alone=False)
    assert not measuring.inside.wait(0.1) and not late.inside.wait(0.1), "nobody passes by who waits to be alone"
    for one in sharing:
        one.leave()
    assert measuring.inside.wait(10) and not late.inside.wait(0.1)
    measuring.leave()
    assert late.inside.wait(10)
    late.leave()


def test_one_process_by_itself_locks_nothing():
    with Floor(None).taken(alone=True), Floor(None).taken(alone=True):
        pass
